"""On a GPU: calls that are made again give what the first one gave, whatever changed in between."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tapwise
from tapwise.errors import InvalidProblem

pytestmark = pytest.mark.cuda

Call = Callable[[Any], Any]
DTYPES = ["float32", "float16", "bfloat16"]


def calls(torch: Any, dtype: Any) -> dict[str, tuple[Call, tuple[int, ...]]]:
    """Every operator: (a call with x, the shape of x)."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda").to(dtype)

    w, bias, added = normal(24, 16, 3, 3), normal(24), normal(2, 24, 12, 14)
    single, deep, first = normal(24, 16, 5), normal(16, 1, 3, 3), normal(24, 3, 7, 7)
    narrow = normal(32, 4, 3, 3)
    images = (2, 16, 12, 14)
    places = (2 * torch.arange(12).reshape(12, 1) * 28 + 2 * torch.arange(14)).expand(images).contiguous().cuda()
    return {
        "conv2d": (lambda x: tapwise.conv2d(x, w, bias, padding=1, activation="relu"), images),
        "residual": (lambda x: tapwise.conv2d(x, w, padding=(1, 1), residual=added), images),
        "transposed filters": (lambda x: tapwise.conv2d(x, w.transpose(2, 3)), images),
        "large": (lambda x: tapwise.conv2d(x, w.repeat(8, 8, 1, 1), stride=2), (4, 128, 28, 28)),
        "depthwise": (lambda x: tapwise.conv2d(x, deep, padding=1, groups=16), images),
        "groups": (lambda x: tapwise.conv2d(x, narrow, groups=4), images),
        "few channels": (lambda x: tapwise.conv2d(x, first, stride=2, padding=3), (2, 3, 40, 44)),
        "one image": (lambda x: tapwise.conv2d(x, w, bias), images[1:]),
        "conv1d": (lambda x: tapwise.conv1d(x, single, bias, padding=2), (3, 16, 50)),
        "max_pool2d": (lambda x: tapwise.max_pool2d(x, 3, 2, 1), images),
        "positions": (lambda x: tapwise.max_pool2d(x, 2, return_indices=True), images),
        "avg_pool2d": (lambda x: tapwise.avg_pool2d(x, 2, ceil_mode=True), images),
        "max_pool1d": (lambda x: tapwise.max_pool1d(x, 3), (4, 9, 31)),
        "avg_pool1d": (lambda x: tapwise.avg_pool1d(x, 3, 1, 1), (4, 9, 31)),
        "max_pool2d_backward": (lambda x: tapwise.max_pool2d_backward(x, places, (2, 16, 24, 28), 2), images),
        "avg_pool2d_backward": (lambda x: tapwise.avg_pool2d_backward(x, (2, 16, 12, 14), 3, 1, 1), images),
        "softmax_backward": (lambda x: tapwise.softmax_backward(x, x, 1), (40, 200)),
        "softmax": (lambda x: tapwise.softmax(x, 1), (40, 200)),
        "log_softmax": (lambda x: tapwise.log_softmax(x, dim=1), (2, 21, 9, 10)),
        "long softmax": (lambda x: tapwise.softmax(x), (300_000,)),
        "sum": (lambda x: tapwise.reduce(x, "sum", (0, 2), True), (7, 30, 20)),
        "argmax": (lambda x: tapwise.reduce(x, "argmax", 1), (7, 300)),
        "long mean": (lambda x: tapwise.reduce(x, "mean"), (2_000_000,)),
        "im2col": (lambda x: tapwise.im2col(x, (3, 3), padding=1), images),
        "col2im": (lambda x: tapwise.col2im(x, (12, 14), 3, padding=1), (2, 144, 168)),
    }


def same(torch: Any, one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    return all(
        torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype and a.device == b.device for a, b in pairs
    )


NAMES = [
    "conv2d", "residual", "transposed filters", "large", "depthwise", "groups", "few channels", "one image", "conv1d",
    "max_pool2d", "positions", "avg_pool2d", "max_pool1d", "avg_pool1d",
    "max_pool2d_backward", "avg_pool2d_backward", "softmax_backward", "softmax", "log_softmax", "long softmax",
    "sum", "argmax", "long mean", "im2col", "col2im",
]  # fmt: skip


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_second_call_gives_what_the_first_gave(name: str, dtype: str, last: bool) -> None:
    """For other values in other memory, on other streams, in threads, in inference mode and in a graph."""
    import torch

    made = calls(torch, getattr(torch, dtype))
    assert set(made) == set(NAMES)
    call, shape = made[name]
    if last and (len(shape) != 4 or name in ("residual",)):
        pytest.skip("images alone have two orders")
    order = torch.channels_last if last else torch.contiguous_format

    def image(seed: int) -> Any:
        torch.manual_seed(seed)
        x = torch.randn(shape, device="cuda").to(getattr(torch, dtype))
        return x.contiguous(memory_format=order) if last else x

    x, other = image(1), image(2)
    first, changed = call(x), call(other)
    assert same(torch, call(x), first)
    assert not same(torch, changed, first) or name == "argmax"
    kept = x.clone(memory_format=torch.preserve_format)
    x.copy_(other)
    assert same(torch, call(x), changed)
    assert same(torch, call(kept), first)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        # Behind much other work of the stream: what ran on another one would be there too early.
        heavy = torch.randn(4096, 4096, device="cuda")
        for _ in range(4):
            heavy = heavy @ heavy * 1e-2
        late = kept + (heavy[0, 0] * 0).nan_to_num().to(kept.dtype)
        result = call(late)
    stream.synchronize()
    assert same(torch, result, first)
    with ThreadPoolExecutor(4) as pool:
        for number, y in enumerate(pool.map(lambda number: call((kept, other)[number % 2]), range(24))):
            assert same(torch, y, (first, changed)[number % 2])
    graph = torch.cuda.CUDAGraph()
    static = kept.clone(memory_format=torch.preserve_format)
    with torch.cuda.graph(graph):
        y = call(static)
    static.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert same(torch, y, changed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
def test_filters_are_read_each_time(last: bool, dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    x, w = torch.randn(2, 64, 14, 14, device="cuda").to(kind), torch.randn(64, 64, 3, 3, device="cuda").to(kind)
    bias = torch.zeros(64, device="cuda", dtype=kind)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    first = tapwise.conv2d(x, w, bias, padding=1)
    tapwise.conv2d(x, w, bias, padding=1)
    w.data.mul_(2)
    assert torch.equal(tapwise.conv2d(x, w, bias, padding=1), first * 2)
    w.copy_(w * 2)
    bias.add_(1)
    # A call with `out` is worked out anew each time.
    anew = tapwise.conv2d(x, w, bias, padding=1, out=torch.empty_like(first))
    assert torch.equal(tapwise.conv2d(x, w, bias, padding=1), anew)
    bias.zero_()
    assert torch.equal(tapwise.conv2d(x, w, bias, padding=1), first * 4)
    # The same filters with other strides, and as a parameter of a module.
    swapped = w.contiguous(memory_format=torch.channels_last)
    for _ in range(3):
        assert torch.equal(tapwise.conv2d(x, swapped, bias, padding=1), first * 4)
    with torch.no_grad():
        assert torch.equal(tapwise.conv2d(x, torch.nn.Parameter(w), bias, padding=1), first * 4)


def test_what_cannot_be_taken_is_refused_as_before() -> None:
    import torch

    x, w = torch.randn(1, 4, 9, 9, device="cuda"), torch.randn(4, 4, 3, 3, device="cuda")
    layer = tapwise.prepare((1, 4, 9, 9), w)
    makers: tuple[Call, ...] = (lambda x: tapwise.conv2d(x, w), lambda x: tapwise.max_pool2d(x, 2), layer)
    for call in makers:
        wanted = call(x)
        for _ in range(2):
            call(x)
        with pytest.raises(InvalidProblem, match="requires a gradient"):
            call(x.clone().requires_grad_())
        with pytest.raises(InvalidProblem, match="negative bit"):
            call(torch._neg_view(x))
        with pytest.raises(InvalidProblem, match=r"vmap"):
            torch.vmap(call)(x[None])
        with pytest.raises(InvalidProblem):
            call(x.to(torch.int32))
        assert torch.equal(call(x), wanted)
    wrong: Any
    tapwise.conv2d(x, w, stride=1)
    for wrong in (True, 1.0, "1"):
        with pytest.raises(InvalidProblem):
            tapwise.conv2d(x, w, stride=wrong)
    with pytest.raises(InvalidProblem):
        tapwise.conv2d(x, w.cpu())
    with pytest.raises(InvalidProblem):
        layer(x.cpu())


def test_prepared_calls_of_every_batch_and_stride() -> None:
    import torch

    for layout in ("nchw", "nhwc"):
        w, bias = torch.randn(32, 16, 3, 3, device="cuda").half(), torch.randn(32, device="cuda").half()
        layer = tapwise.prepare((2, 16, 12, 12), w, bias, padding=1, layout=layout, residual=True)
        for n in (2, 5, 2, 1, 5, *range(20, 32), 5, 2):
            x, added = (
                torch.randn(n, 16, 12, 12, device="cuda").half(),
                torch.randn(n, 32, 12, 12, device="cuda").half(),
            )
            wanted = torch.nn.functional.conv2d(x.double(), w.double(), bias.double(), padding=1) + added.double()
            for seen in (x, x.contiguous(memory_format=torch.channels_last)):
                for _ in range(3):
                    torch.testing.assert_close(layer(seen, added).double(), wanted, rtol=0.01, atol=0.05)
