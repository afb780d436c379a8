"""On a GPU: every algorithm against float64, arrays of every library, streams, graphs, and the same bits each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapwise
from tapwise import baselines as peers
from tapwise import registry, verify
from tapwise.cuda.jit.device import gpu
from tapwise.errors import InvalidProblem
from tapwise.lab import bench, records
from tapwise.lab.suites import Case
from tapwise.ops.conv.reference import convolve
from tapwise.ops.reduce.problem import REDUCTIONS

pytestmark = pytest.mark.cuda

CONVOLUTIONS = [
    "c5 h11 w13 k7 r3 s3 pad1",
    "n2 c3 h17 w19 k9 r5 s5 stride2 pad2",
    "c6 h12 w9 k8 r3 s3 pad2 dilation2 bias relu",
    "c8 h9 w9 k6 r3 s3 pad1 groups2 residual tanh",
    "c17 h7 w9 k19 r1 s1 bias gelu",
    "c4 h10 w12 k5 r1 s7 pad0x3",
    "c9 h13 w15 k9 r3 s3 pad1 groups9 sigmoid",
    "c3 h40 w64 k4 r3 s3 pad2:1x3:0 stride2x1",
    "n3 c2 h33 w40 k13 r3 s3 pad1 bias silu",
    "c1 h70 w131 k1 r8 s8",
    "c2 h4 w5 k3 r3 s3 pad4 relu6",
    "n8 c128 h13 w13 k256 r3 s3 pad1 groups2",
]
PATCHES = [
    "n2 c3 h13 w17 r3 s3 stride2 pad1",
    "c4 h9 w9 r2 s2",
    "n2 c5 h20 w32 r3 s3 pad1",
    "c2 h15 w40 r3 s3 stride3 pad0:1x2:0 dilation1x2",
    "c2 h11 w26 r1 s7 stride1x3 pad0x5",
    "n3 c2 w50 s5 stride2 pad3:1",
    "c2 d5 h6 w19 t2 r3 s3 stride1x2x2 pad1 dilation2x1x1",
]


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
@pytest.mark.parametrize("text", CONVOLUTIONS)
@pytest.mark.parametrize("identifier", [name for name in registry.ALGORITHMS["conv"] if name.startswith("cuda.")])
def test_convolution(identifier: str, text: str, dtype: str) -> None:
    # Imported, its cuBLAS is among the configs.
    import torch  # noqa: F401

    problem, device = registry.parse(f"{text} {dtype}"), gpu()
    algorithm = registry.get(identifier)
    if algorithm.refusal(problem, device):
        return
    configs = list(algorithm.configs(problem, device))
    some = {configs[0], configs[-1], configs[len(configs) // 2], configs[-5]} if len(configs) > 20 else set(configs)
    for config in some:
        for integers in (False, True):
            verdict = verify.check(problem, identifier, config, device=device, integers=integers)
            assert verdict, f"{config}: {verdict.message}"


def test_bench_times_fused_and_plain_layers_in_turns() -> None:
    """Ours and cuDNN's, each over its own plain convolution; a plain layer has nothing to compare."""
    text = "n2 c64 h16 w16 k64 r3 s3 pad1 f16 nhwc"
    cases = [Case(registry.parse(text + more)) for more in (" bias relu residual", "")]
    rows: list[records.Record] = []
    bench.run(cases, bench.Options(peers=(peers.PEERS["cudnn-cl"],), repeats=3, device="cuda"), rows.append)
    fused, plain = rows
    assert fused.verified and set(fused.over_plain) == {fused.algorithm, "cudnn-cl"}
    assert all(ratio > 0.5 for ratio in fused.over_plain.values())
    assert set(fused.cold_us) == set(fused.wall_us) == set(fused.over_plain)
    assert plain.verified and not plain.over_plain


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
@pytest.mark.parametrize("text", PATCHES)
@pytest.mark.parametrize("operator", ["im2col", "col2im"])
def test_patches(operator: str, text: str, dtype: str) -> None:
    problem, device = registry.parse(f"{operator} {text} {dtype}"), gpu()
    for config in registry.get("cuda.grid_stride", operator).configs(problem, device):
        verdict = verify.check(problem, "cuda.grid_stride", config, device=device)
        assert verdict, f"{config}: {verdict.message}"


POOLS = [
    "maxpool n2 c3 h13 w17 r3 s3 stride2 pad1",
    "maxpool c5 h9 w9 r2 s3 stride1x2 pad1:0x1:2 dilation2x1 ceil nhwc",
    "avgpool n2 c3 h13 w17 r3 s3 stride2 pad1 ceil",
    "avgpool c4 h9 w11 r3 s2 stride1 pad1:0x1:1 exclude_pad",
    "avgpool n3 c7 h8 w9 r5 s5 pad2 divisor7 nhwc",
    "avgpool c2 h40 w41 r7 s7 stride3",
]
RUNS = [
    *(f"reduce {op} {rest}" for op in REDUCTIONS for rest in ("5x1000x7 axis1", "9x41 axis1", "41113", "300x33 axis0")),
    "reduce sum 3x4x5 axisnone",
    "reduce mean 2000x3000 axis1",
    "reduce max 70000x3 axis1",
    "softmax 1024x1000",
    "softmax 100003",
    "softmax 7x3",
    "softmax 8x21x37x5 axis1",
    "softmax 3x5000x129 axis1",
    "log_softmax 3x70001",
    "log_softmax 40x33x20 axis1",
]


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
@pytest.mark.parametrize("text", [*POOLS, *RUNS])
def test_plain_operators(text: str, dtype: str) -> None:
    problem, device = registry.parse(f"{text} {dtype}"), gpu()
    for algorithm in registry.of_backend("cuda", problem.operator):
        for config in algorithm.configs(problem, device):
            verdict = verify.check(problem, algorithm.id, config, device=device)
            assert verdict, f"{algorithm.id} {config}: {verdict.message}"


FILTERS = [
    "filter gaussian sigma1 h99 w77",
    "filter gaussian sigma5 h130 w61 c3 u8 wrap",
    "filter gaussian sigma2 h20 w20 c4 to:u8",
    "filter box size15 h50 w60 c3 u8",
    "filter box size4 h33 w1100 i8 constant",
    "filter sobel h50 w33 u8 to:i16 constant",
    "filter laplace h30 w3 i16 to:i32",
    "filter correlate h99 w77 c3 r7 s5 mirror",
    "filter correlate d5 h9 w8 t3 r3 s3 f64 constant",
    "filter correlate h1 w1000 s31 u16",
    "filter correlate h700 w9 r8 to:f64 nearest",
    "filter maximum size5 h99 w77 u8",
    "filter maximum size4 h31 w50 c2 i64 constant",
    "filter minimum size15 h9 w7 nearest",
]


@pytest.mark.parametrize("text", FILTERS)
def test_filters(text: str) -> None:
    problem, device = registry.parse(text), gpu()
    for config in registry.get("cuda.sliding_window", "filter").configs(problem, device):
        verdict = verify.check(problem, "cuda.sliding_window", config, device=device)
        assert verdict, f"{config}: {verdict.message}"


def test_pictures_on_the_gpu_are_those_of_the_cpu() -> None:
    import torch

    from tapwise import image
    from tapwise.errors import InvalidProblem

    rng = np.random.default_rng(0)
    for kind in (np.uint8, np.int16, np.float32, np.float64):
        x = rng.integers(0, 120, (40, 33, 3)).astype(kind)
        t = torch.from_numpy(x).cuda()
        calls = (
            ("gaussian_filter", {"sigma": 2, "channel_axis": -1}), ("gaussian_filter", {"sigma": 1, "mode": "wrap"}),
            ("sobel", {"axis": 0, "output": np.float64}), ("prewitt", {}), ("laplace", {"channel_axis": 2}),
            ("uniform_filter", {"size": 5, "axes": (0, 2)}), ("maximum_filter", {"size": 3}),
            ("minimum_filter", {"footprint": np.eye(3), "axes": (0, 1)}),
            ("correlate", {"weights": rng.integers(-2, 3, (3, 4)) * 1.0, "axes": (1, 0), "output": np.float64}),
            ("correlate1d", {"weights": [1, 2, 3], "axis": 0}),
            ("gaussian_laplace", {"sigma": 1, "output": np.float64}),
        )  # fmt: skip
        for name, options in calls:
            want = getattr(image, name)(x, **options)
            y = getattr(image, name)(t, **options)
            assert isinstance(y, torch.Tensor) and y.is_cuda
            off = np.abs(y.cpu().numpy().astype(np.float64) - want.astype(np.float64)).max()
            assert off <= (1 if want.dtype.kind in "iu" else 2e-4), (name, kind, off)
        # In place, and transposed.
        before = image.gaussian_filter(np.ascontiguousarray(x.transpose(1, 0, 2)), 1)
        view = t.transpose(0, 1)
        assert image.gaussian_filter(view, 1, output=view) is view
        assert np.abs(view.cpu().numpy().astype(float) - before.astype(float)).max() <= (
            1 if kind == np.uint8 else 1e-3
        )
    for call in (
        lambda: image.gaussian_filter(t.to(torch.complex64), 1), lambda: image.sobel(t, output=np.zeros(t.shape)),
        lambda: image.sobel(np.zeros((3, 3)), output=torch.zeros(3, 3, device="cuda")),
    ):  # fmt: skip
        with pytest.raises(InvalidProblem):
            call()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_positions_of_pooling(layout: str) -> None:
    import torch

    order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    x = torch.randint(-3, 4, (2, 3, 21, 23), device="cuda").float()
    x[0, 0, 3, 4], x[1, 2, 9:12] = float("nan"), float("-inf")
    x = x.contiguous(memory_format=order)
    for window in ((3, 2, 1), (2, 2, 0), (3, 1, 1, 2)):
        y, places = tapwise.max_pool2d(x, *window, return_indices=True)
        wanted, positions = torch.nn.functional.max_pool2d(x, *window, return_indices=True)
        torch.testing.assert_close(y, wanted, equal_nan=True)
        assert torch.equal(places, positions) or layout == "nhwc"
        flat = x.flatten(2).gather(2, places.flatten(2)).view_as(y)
        torch.testing.assert_close(flat, wanted, equal_nan=True)
    y = tapwise.avg_pool1d(x[0], 3, 2, 1)
    torch.testing.assert_close(y, torch.nn.functional.avg_pool1d(x[0], 3, 2, 1), equal_nan=True)


def test_reductions_of_special_values() -> None:
    import torch

    inf, nan = float("inf"), float("nan")
    rows = [
        [1.0, nan, 3.0, -inf], [inf, 1.0, 2.0, 3.0], [-inf, -inf, -inf, -inf], [inf, -inf, 0.0, 0.0],
        [nan, nan, inf, 1.0], [2.0, 5.0, 5.0, 1.0], [inf, inf, 1.0, 1.0],
    ]  # fmt: skip
    x = torch.tensor(rows, device="cuda").repeat_interleave(50, 1)
    for function in (tapwise.softmax, tapwise.log_softmax):
        wanted = getattr(torch, function.__name__)(x, -1)
        torch.testing.assert_close(function(x), wanted, equal_nan=True)
        torch.testing.assert_close(function(x.T.contiguous(), 0).T, wanted, equal_nan=True)
    for op, wanted in (
        ("max", x.amax(1)), ("min", x.amin(1)), ("logsumexp", x.logsumexp(1)), ("sum", x.sum(1)), ("prod", x.prod(1)),
    ):  # fmt: skip
        torch.testing.assert_close(tapwise.reduce(x, op, 1), wanted, equal_nan=True)
    for op in ("argmax", "argmin"):
        assert tapwise.reduce(x, op, 1).tolist() == getattr(np, op)(x.cpu().numpy(), axis=1).tolist()


def test_reductions_of_any_strides_and_places() -> None:
    import torch

    x = torch.randn(4, 6, 10, device="cuda")
    seen = x[:, ::2].transpose(0, 2)
    torch.testing.assert_close(tapwise.reduce(seen, "sum", (0, 2), keepdims=True), seen.sum((0, 2), keepdim=True))
    torch.testing.assert_close(tapwise.reduce(x, "sum", ()), x)
    torch.testing.assert_close(tapwise.softmax(seen, 1), torch.softmax(seen, 1))
    out = torch.empty(10, 3, 4, device="cuda").transpose(1, 2).contiguous().transpose(1, 2)
    assert tapwise.softmax(seen, 0, out=out) is out
    torch.testing.assert_close(out, torch.softmax(seen, 0))
    assert tapwise.reduce(torch.empty(3, 0, device="cuda"), "sum", 1).tolist() == [0.0] * 3
    array = x.cpu().numpy()
    np.testing.assert_allclose(tapwise.reduce(array, "mean", 1, device="cuda"), array.mean(1), rtol=1e-5, atol=1e-6)
    y = tapwise.max_pool2d(array, 2, device="cuda")
    assert isinstance(y, np.ndarray)
    np.testing.assert_array_equal(y, tapwise.max_pool2d(array, 2))
    scalar = torch.tensor(3.0, device="cuda")
    assert tapwise.softmax(scalar).item() == 1.0 and tapwise.reduce(scalar, "sum").item() == 3.0


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 20, 24), dtype=np.float32)
    w = rng.standard_normal((5, 3, 3, 3), dtype=np.float32)
    problem = registry.parse("n2 c3 h20 w24 k5 r3 s3 pad1")
    return x, w, convolve(problem, x, w)  # type: ignore[arg-type]


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
    for call in (lambda: tapwise.reduce(long, "sum"), lambda: tapwise.softmax(long)):
        first = call()
        assert all(torch.equal(first, call()) for _ in range(100))
    first = tapwise.col2im(columns, (20, 20), 3, padding=1)
    assert all(torch.equal(first, tapwise.col2im(columns, (20, 20), 3, padding=1)) for _ in range(100))


def test_more_than_2_31_elements() -> None:
    import torch

    x = torch.ones(40, 1, 7400, 7400, device="cuda", dtype=torch.float16)
    assert x.numel() > 1 << 31
    w = torch.ones(1, 1, 2, 2, device="cuda", dtype=torch.float16)
    for identifier in ("cuda.direct", "cuda.sliding_window"):
        y = tapwise.conv2d(x, w, algorithm=identifier)
        assert bool((y == 4).all())
    del y
    columns = tapwise.im2col(x[:, :, :, :7398], (1, 2), stride=(1, 2))
    assert columns.numel() > 1 << 31 and bool((columns == 1).all())


@pytest.mark.parametrize("words", ["gaussian sigma=2", "sobel", "bank"])
def test_named_filters_are_those_of_the_cpu(words: str) -> None:
    from tapwise.image import bank
    from tapwise.image.work import Work

    x = np.random.default_rng(0).integers(0, 256, (61, 47, 3)).astype(np.uint8)
    for options in ({}, {"stride": 2, "mode": "wrap"}, {"size": (40, 50)}):
        named = bank.parse(words)
        here, there = Work(named, **options)(x), Work(named, device="cuda", **options)(x)
        assert here.shape == there.shape
        assert np.abs(here.astype(int) - there.astype(int)).max() <= 1
