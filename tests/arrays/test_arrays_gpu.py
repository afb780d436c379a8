"""On a GPU: arrays of every library, streams, graphs, threads, and the same bits each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapwise
from tapwise import registry
from tapwise.arrays import device as cuda
from tapwise.errors import InvalidProblem

pytestmark = pytest.mark.cuda


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 20, 24), dtype=np.float32)
    w = rng.standard_normal((5, 3, 3, 3), dtype=np.float32)
    problem = registry.parse("n2 c3 h20 w24 k5 r3 s3 pad1")
    return x, w, problem.convolve(x, w)  # type: ignore[attr-defined]


def test_torch_tensors_of_any_strides() -> None:
    import torch

    x, w, wanted = data()
    t, f = torch.from_numpy(x).cuda(), torch.from_numpy(w).cuda()
    wide = torch.empty(2, 3, 20, 48, device="cuda")
    wide[..., ::2] = t
    for image in (t, wide[..., ::2], t.transpose(2, 3).contiguous().transpose(2, 3)):
        y = tapwise.conv2d(image, f, padding=1)
        assert y.is_cuda and y.dtype == torch.float32
        np.testing.assert_allclose(y.cpu().numpy(), wanted, rtol=1e-4, atol=1e-5)
    out = torch.empty(5, 2, 20, 24, device="cuda").transpose(0, 1)
    assert tapwise.conv2d(t, f, padding=1, out=out) is out
    np.testing.assert_allclose(out.cpu().numpy(), wanted, rtol=1e-4, atol=1e-5)
    single = tapwise.conv2d(t[0], f, padding=1)
    np.testing.assert_allclose(single.cpu().numpy(), wanted[0], rtol=1e-4, atol=1e-5)
    columns = tapwise.im2col(t, 3, padding=1)
    torch.testing.assert_close(columns, torch.nn.functional.unfold(t, 3, padding=1))
    torch.testing.assert_close(
        tapwise.col2im(columns, (20, 24), 3, padding=1), torch.nn.functional.fold(columns, (20, 24), 3, padding=1)
    )
    image = torch.ones(2, 3, 20, 24, device="cuda")
    added = tapwise.col2im(columns, (20, 24), 3, padding=1, out=image, accumulate=True)
    torch.testing.assert_close(added, 1 + torch.nn.functional.fold(columns, (20, 24), 3, padding=1))


def test_one_number_of_no_element() -> None:
    import torch

    total = tapwise.reduce(torch.zeros(2, 0, device="cuda"), "sum")
    assert total.shape == () and total.item() == 0.0
    assert cuda.download(cuda.upload(np.array(3.0), 0)).shape == ()


def test_numpy_arrays_go_there_and_back() -> None:
    x, w, wanted = data()
    y = tapwise.conv2d(x[:, :, ::-1][:, :, ::-1], w, padding=1, device="cuda")
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    out = np.empty_like(y)
    assert tapwise.conv2d(x, w, padding=1, device="cuda:0", out=out) is out
    np.testing.assert_array_equal(out, y)
    layer = tapwise.prepare("n2 c3 h20 w24 k5 r3 s3 pad1", w, device="cuda")
    np.testing.assert_array_equal(layer(x), y)


def test_cupy_and_other_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    x, w, wanted = data()
    y = tapwise.conv2d(cupy.asarray(x)[:, :, ::1], cupy.asarray(w), padding=1)
    assert isinstance(y, cupy.ndarray)
    np.testing.assert_allclose(y.get(), wanted, rtol=1e-4, atol=1e-5)

    class Other:
        """An array of a library that is not known: its memory is all that it tells."""

        def __init__(self, array: Any) -> None:
            self._array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__

    z = tapwise.conv2d(Other(cupy.asarray(x)), Other(cupy.asarray(w)), padding=1)
    np.testing.assert_allclose(cupy.asarray(z).get(), wanted, rtol=1e-4, atol=1e-5)


def test_arrays_in_two_places_are_refused() -> None:
    import torch

    x, w, _ = data()
    for first, second in ((torch.from_numpy(x).cuda(), w), (x, torch.from_numpy(w).cuda())):
        with pytest.raises(InvalidProblem, match="one place"):
            tapwise.conv2d(first, second)
    with pytest.raises(InvalidProblem, match="device='cpu'"):
        tapwise.conv2d(torch.from_numpy(x).cuda(), torch.from_numpy(w).cuda(), device="cpu")


def test_the_current_stream_and_graphs() -> None:
    import torch

    x, w, wanted = data()
    t = torch.from_numpy(x).cuda()
    layer = tapwise.prepare("n2 c3 h20 w24 k5 r3 s3 pad1", torch.from_numpy(w).cuda())
    layer(t)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append([layer(t + number) for number in range(20)])
    torch.cuda.synchronize()
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    np.testing.assert_allclose(results[0][0].cpu().numpy(), wanted, rtol=1e-4, atol=1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(t)
    t.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_allclose(y.cpu().numpy(), 2 * wanted, rtol=1e-4, atol=1e-5)


def test_the_gpu_of_the_array() -> None:
    """Whichever GPU is current, and it stays so."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, w, wanted = data()
    for current, there in ((0, 1), (1, 0), (1, 1)):
        torch.cuda.set_device(current)
        t, f = torch.from_numpy(x).cuda(there), torch.from_numpy(w).cuda(there)
        layer = tapwise.prepare("n2 c3 h20 w24 k5 r3 s3 pad1", f)
        for y in (layer(t), tapwise.conv2d(t, f, padding=1), tapwise.conv2d(t.mT, f.mT, padding=1).mT):
            assert y.device.index == there
            np.testing.assert_allclose(y.cpu().numpy(), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tapwise.reduce(t, "sum", 1), t.sum(1))
        with torch.cuda.stream(torch.cuda.Stream(there)):
            torch.testing.assert_close(tapwise.softmax(t, 1), torch.softmax(t, 1))
        host = tapwise.conv2d(x, w, padding=1, device=f"cuda:{there}")
        np.testing.assert_allclose(host, wanted, rtol=1e-4, atol=1e-5)
        assert torch.cuda.current_device() == current
    torch.cuda.set_device(0)


def test_a_thread_without_a_context() -> None:
    from concurrent.futures import ThreadPoolExecutor

    import torch

    x, w, wanted = data()
    t = torch.from_numpy(x).cuda()
    layer = tapwise.prepare("n2 c3 h20 w24 k5 r3 s3 pad1", torch.from_numpy(w).cuda())
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: layer(t), range(16)):
            np.testing.assert_allclose(y.cpu().numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_prepared_filters_are_copies() -> None:
    import torch

    x, w, wanted = data()
    filters = torch.from_numpy(w).cuda()
    layer = tapwise.prepare("n2 c3 h20 w24 k5 r3 s3 pad1", filters)
    filters.zero_()
    np.testing.assert_allclose(layer(torch.from_numpy(x).cuda()).cpu().numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_views_that_begin_anywhere() -> None:
    import torch

    _, w, _ = data()
    filters = torch.from_numpy(w).cuda()
    memory = torch.randn(2 * 3 * 20 * 24 + 8, device="cuda")
    layer = tapwise.prepare("n2 c3 h20 w24 k5 r3 s3 pad1", filters)
    for start in range(5):
        x = memory[start : start + 2 * 3 * 20 * 24].view(2, 3, 20, 24)
        wanted = torch.nn.functional.conv2d(x.double(), filters.double(), padding=1).float()
        torch.testing.assert_close(layer(x), wanted)
        torch.testing.assert_close(tapwise.im2col(x, 3), torch.nn.functional.unfold(x, 3))
        out = torch.empty(2 * 5 * 20 * 24 + 8, device="cuda")[start : start + 2 * 5 * 20 * 24].view(2, 5, 20, 24)
        torch.testing.assert_close(layer(x, out=out), wanted)


def test_the_same_bits_each_time() -> None:
    import torch

    torch.manual_seed(0)
    x, w = torch.randn(1, 6, 200, 201, device="cuda"), torch.randn(6, 6, 6, 6, device="cuda")
    columns = torch.randn(2, 27, 400, device="cuda")
    for identifier in ("cuda.direct", "cuda.sliding_window", "cuda.im2col_gemm"):
        first = tapwise.conv2d(x, w, algorithm=identifier)
        assert all(torch.equal(first, tapwise.conv2d(x, w, algorithm=identifier)) for _ in range(100))
    long = torch.randn(3_000_000, device="cuda")
    calls: tuple[Callable[[], Any], ...] = (lambda: tapwise.reduce(long, "sum"), lambda: tapwise.softmax(long))
    for call in calls:
        first = call()
        assert all(torch.equal(first, call()) for _ in range(100))
    first = tapwise.col2im(columns, (20, 20), 3, padding=1)
    assert all(torch.equal(first, tapwise.col2im(columns, (20, 20), 3, padding=1)) for _ in range(100))
