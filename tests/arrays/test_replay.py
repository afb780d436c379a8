"""Calls that are made again, without a GPU: tensors of the host stand in, and a function for the driver's launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from host_launches import Driver, Launched
from torch.nn import functional

import emulated
import tapwise
from tapwise import capture
from tapwise.arrays import device, replay
from tapwise.arrays.replay import Replays
from tapwise.cuda.jit import launch as launches
from tapwise.cuda.jit.compile import Source
from tapwise.errors import DeviceUnavailable

SOURCE = Source(
    "any", "struct Args { const void *x, *w; long long n; void *y; };\nvoid k(const __grid_constant__ Args p)"
)


@dataclass
class Operator:
    """y (h, n, w) seen as (n, h, w), from the second element of x (n, h, w) on; and how often it was called."""

    called: int = 0
    refuses: bool = False
    fixed: int = 0

    def __call__(self, words: tuple[Any, ...], out: Any, x: Any, w: Any = None) -> Any:
        self.called += 1
        if self.refuses:
            capture.refuse()
        source = device.view(x, "x")
        n, h, columns = source.shape
        y = device.empty((h, n, columns), source.dtype, source).transpose(1, 0, 2)
        launch = launches.Launch(SOURCE, {"n": 5}, (3, 2, 1), 64, dependent=True)
        launch.load("sm_90a", 0)
        weights = self.fixed if w is None else device.view(w, "w").ptr
        launch({"x": source.ptr + source.dtype.itemsize, "w": weights, "y": y.ptr}, 9)
        return device.give(y)


def test_a_call_is_made_again_with_other_tensors(driver: Driver) -> None:
    replays, operator = Replays(), Operator()
    first = replays.call(operator, (1, "same", (2, 3)), None, torch.zeros(2, 3, 4), None)
    for number in range(3):
        x = torch.full((2, 3, 4), float(number))
        y = replays.call(operator, (1, "same", (2, 3)), None, x, None)
        assert operator.called == 1
        assert (y.shape, y.stride(), y.dtype) == (first.shape, first.stride(), first.dtype)
        assert driver.seen[-1] == (9, [3, 2, 1, 64, 1, 1], 1, [x.data_ptr() + 4, 0, 5, y.data_ptr()])
        with torch.inference_mode():
            assert replays.call(operator, (1, "same", (2, 3)), None, x, None).is_inference()
    assert operator.called == 1 and len(driver.seen) == 7


def test_one_tensor_in_two_places(driver: Driver) -> None:
    replays, operator = Replays(), Operator()
    x, w = torch.zeros(2, 3, 4), torch.nn.Parameter(torch.zeros(2, 3, 4))
    replays.call(operator, (), None, x, x)
    with torch.no_grad():
        replays.call(operator, (), None, x, w)
    assert operator.called == 1
    assert [seen[3][1] for seen in driver.seen] == [x.data_ptr(), w.data_ptr()]


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 3, 5),
        torch.zeros(2, 3, 4, dtype=torch.float64),
        torch.zeros(2, 4, 3).transpose(1, 2),
        torch.zeros(2, 3, 8)[:, :, ::2],
        torch.zeros(25)[1:].view(2, 3, 4),
        torch._neg_view(torch.zeros(2, 3, 4)),
        torch.zeros(2, 3, 4).requires_grad_(),
        torch.zeros(2, 3, 4).to_sparse(),
        torch.zeros(2, 3, 4).numpy(),
        torch.zeros(2, 3, 4).as_subclass(type("Other", (torch.Tensor,), {})),
    ],
)
def test_what_is_not_like_it_goes_the_whole_way(other: Any, driver: Driver) -> None:
    replays, called = Replays(), []

    def operator(words: tuple[Any, ...], out: Any, x: Any) -> Any:
        called.append(x)
        return Operator()(words, out, torch.zeros(2, 3, 4) if x is other else x)

    for _ in range(3):
        replays.call(operator, (), None, torch.zeros(2, 3, 4))
    assert len(called) == 1
    replays.call(operator, (), None, other)
    assert called[1] is other


def test_what_is_recorded_goes_the_whole_way(driver: Driver) -> None:
    replays, operator, x = Replays(), Operator(), torch.zeros(2, 3, 4)
    replays.call(operator, (), None, x)
    with forward_ad.dual_level():
        replays.call(operator, (), None, x)
    assert operator.called == 2
    with torch.no_grad():
        replays.call(operator, (), None, x.clone().requires_grad_())
    assert operator.called == 2


def test_words_are_compared_with_their_types(driver: Driver) -> None:
    replays, operator, x = Replays(), Operator(), torch.zeros(2, 3, 4)
    for words in ((1, (0, 1)), (1, (0, 1)), (int("1"), (True - 1, 1))):
        replays.call(operator, words, None, x)
    assert operator.called == 1
    wrong: list[tuple[Any, ...]] = [(True, (0, 1)), (1.0, (0, 1)), (1, (0, True)), (1, [0, 1]), (1, (0.0, 1))]
    for number, words in enumerate(wrong):
        replays.call(operator, words, None, x)
        assert operator.called == 2 + number
    replays.call(operator, (1, (0, 1)), torch.zeros(2, 3, 4), x)
    assert operator.called == 2 + len(wrong)


def test_what_cannot_be_made_again_is_called(driver: Driver) -> None:
    x = torch.zeros(2, 3, 4)
    for operator, constants, quick in (
        (Operator(refuses=True), False, False),
        (Operator(fixed=1234), False, False),
        (Operator(fixed=1234), True, True),
    ):
        replays = Replays(constants)
        for _ in range(3):
            replays.call(operator, (), None, x)
            assert driver.seen[-1][3][1] == operator.fixed
        assert operator.called == (1 if quick else 3)

    def whole(words: tuple[Any, ...], out: Any, x: Any) -> Any:
        return x

    replays = Replays()
    assert replays.call(whole, (), None, x) is x and replays.call(whole, (), None, x) is x


def test_a_call_within_a_call_is_kept_for_itself(driver: Driver) -> None:
    outer, inner, operator, x = Replays(), Replays(), Operator(), torch.zeros(2, 3, 4)
    asked = []

    def calls(words: tuple[Any, ...], out: Any, x: Any) -> Any:
        asked.append(x)
        return inner.call(operator, words, out, x)

    for _ in range(3):
        outer.call(calls, (), None, x)
    assert len(asked) == 3 and operator.called == 1
    assert capture.active() is None


def test_with_several_gpus_only_the_current_one_is_quick(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [-1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    replays, operator, x = Replays(), Operator(), torch.zeros(2, 3, 4)
    for number, called in ((-1, 1), (-1, 1), (0, 2), (0, 3), (-1, 3)):
        current[0] = number
        replays.call(operator, (), None, x)
        assert operator.called == called


def test_an_error_is_raised_and_nothing_kept(driver: Driver) -> None:
    replays, operator, x = Replays(), Operator(), torch.zeros(2, 3, 4)
    driver.status = 2
    for _ in range(2):
        with pytest.raises(DeviceUnavailable, match="OUT_OF_MEMORY"):
            replays.call(operator, (), None, x)
    assert operator.called == 2 and capture.active() is None
    driver.status = 0
    replays.call(operator, (), None, x)
    driver.status = 2
    with pytest.raises(DeviceUnavailable, match="OUT_OF_MEMORY"):
        replays.call(operator, (), None, x)
    assert operator.called == 3


def test_the_latest_kinds_are_kept(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "KEPT", 4)
    replays, operator, x = Replays(), Operator(), torch.zeros(2, 3, 4)
    for number in range(20):
        replays.call(operator, (number,), None, x)
        # What is called now and then stays.
        replays.call(operator, (0,), None, x)
    assert operator.called == 20
    assert len(replays._young) <= 4 and len(replays._old) <= 4


def test_calls_at_the_same_time_have_arguments_of_their_own(driver: Driver) -> None:
    from concurrent.futures import ThreadPoolExecutor

    replays, operator = Replays(), Operator()
    tensors = [torch.zeros(2, 3, 4) for _ in range(64)]
    replays.call(operator, (), None, tensors[0])
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda x: replays.call(operator, (), None, x), tensors))
    pairs = {(words[0] - 4, words[3]) for _, _, _, words in driver.seen[1:]}
    assert pairs == {(x.data_ptr(), y.data_ptr()) for x, y in zip(tensors, made, strict=True)}
    assert operator.called == 1


def tensor(*shape: int, dtype: str = "float32", last: bool = False) -> torch.Tensor:
    made = torch.zeros(shape, dtype=getattr(torch, dtype))
    return made.contiguous(memory_format=torch.channels_last) if last else made


CALLS: dict[str, Callable[..., Any]] = {
    "conv2d": lambda x: tapwise.conv2d(x, tensor(32, 16, 3, 3), tensor(32), padding=1),
    "strided filters": lambda x: tapwise.conv2d(x, tensor(3, 3, 16, 8).permute(3, 2, 0, 1)),
    "residual": lambda x: tapwise.conv2d(x, tensor(8, 16, 3, 3), residual=x[:, :8, 1:-1, 1:-1]),
    "depthwise": lambda x: tapwise.conv2d(x, tensor(16, 1, 3, 3), groups=16, activation="relu"),
    "max_pool2d": lambda x: tapwise.max_pool2d(x, 3, 2, 1, return_indices=True),
    "avg_pool2d": lambda x: tapwise.avg_pool2d(x[:, ::2], 2),
    "max_pool2d_backward": lambda x: tapwise.max_pool2d_backward(x, torch.zeros_like(x).long(), (2, 16, 24, 28), 2),
    "softmax_backward": lambda x: tapwise.softmax_backward(x, x + 1, 1),
    "softmax": lambda x: tapwise.softmax(x, 1),
    "reduce": lambda x: tapwise.reduce(x, "sum", (1, 3)),
    "long": lambda x: tapwise.reduce(torch.zeros(3_000_000), "max"),
    "im2col": lambda x: tapwise.im2col(x, 3),
    "one image": lambda x: tapwise.max_pool2d(x[0], 2),
    "conv1d": lambda x: tapwise.conv1d(x[0], tensor(4, 12, 5)),
    "pool1d": lambda x: tapwise.avg_pool1d(x[0], 2),
    "transposed": lambda x: tapwise.conv_transpose2d(x, tensor(16, 4, 3, 3), dilation=3, output_padding=2),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_operators_launch_the_same_again(
    name: str, last: bool, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels with the same words, but for addresses: each of the first call stands for one of the second."""
    results, parts = [], []
    for _ in range(2):
        launched.clear()
        x = tensor(2, 16, 12, 14, last=last)
        made = CALLS[name](x)
        results.append((x, *(made if isinstance(made, tuple) else (made,))))
        parts.append(list(launched))
        monkeypatch.setattr(device, "view", lambda *_: pytest.fail("not made again"))
    first, second = parts
    assert first and [source for source, _ in first] == [source for source, _ in second]
    pairs: dict[int, int] = {}
    for (_, one), (_, other) in zip(first, second, strict=True):
        assert all(a == b or pairs.setdefault(a, b) == b for a, b in zip(one, other, strict=True))
    for y, again in zip(*(made[1:] for made in results), strict=True):
        assert (y.shape, y.stride(), y.dtype) == (again.shape, again.stride(), again.dtype)
        assert pairs[y.data_ptr()] == again.data_ptr()


@pytest.mark.skipif(not emulated.available(), reason="kernels run by emulation")
def test_what_is_made_again_is_right(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run by emulation: other images, filters that change in place, memory with anything in it."""
    allocate, launched.computed = replay.allocator(torch, 0), True
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(replay, "allocator", lambda *_: lambda *given: allocate(*given).fill_(77))
    w, bias, turned = torch.randn(8, 6, 3, 3), torch.randn(8), torch.randn(6, 4, 2, 3)
    layer, packed = tapwise.prepare((2, 6, 9, 10), w, bias, padding=1), w.clone()
    for number in range(3):
        x = torch.randn(2, 6, 9, 10)
        for order in (torch.contiguous_format, torch.channels_last):
            w.data.mul_(1.5)
            image = x.contiguous(memory_format=order)
            for algorithm in ("cuda.implicit_gemm_simt", "auto"):
                y = tapwise.conv2d(image, w, bias, padding=1, algorithm=algorithm)
                close(y, functional.conv2d(x, w, bias, padding=1))
            close(layer(image), functional.conv2d(x, packed, bias, padding=1))
            larger = {"stride": (1, 2), "dilation": 3, "output_padding": (2, 1)}
            close(tapwise.conv_transpose2d(image, turned, **larger), functional.conv_transpose2d(x, turned, **larger))
            places = tapwise.max_pool2d(image, 2, return_indices=True)
            close(places, functional.max_pool2d(image, 2, return_indices=True))
            close(tapwise.softmax(image, 1), torch.softmax(image, 1))
            close(tapwise.reduce(image[:, ::2], "sum", (1, 3)), image[:, ::2].sum((1, 3)))
        if number == 0:
            monkeypatch.setattr(device, "view", lambda *_: pytest.fail("not made again"))


@pytest.mark.skipif(not emulated.available(), reason="kernels run by emulation")
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_prepared_layers_of_other_batches(layout: str, launched: Launched) -> None:
    """What is made within a call, to stay, is no part of what is captured."""
    launched.computed = True
    w, bias = torch.randn(8, 6, 3, 3), torch.randn(8)
    layer = tapwise.prepare((2, 6, 7, 8), w, bias, padding=1, layout=layout, residual=True)
    for n in (2, 3, 2, 1, 3):
        x, added = torch.randn(n, 6, 7, 8), torch.randn(n, 8, 7, 8)
        wanted = functional.conv2d(x, w, bias, padding=1) + added
        for order in (torch.contiguous_format, torch.channels_last):
            for _ in range(3):
                found = layer(x.contiguous(memory_format=order), added)
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
