"""Calls in this machine's memory that are made again: the same as the first, whatever is given."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import tapwise
from tapwise.arrays import host_calls
from tapwise.errors import InvalidProblem

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: str = "f4") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def last(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


# A call and arrays of one kind for it.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "conv2d": (lambda x, w: tapwise.conv2d(x, w, padding=1), lambda: (normal(2, 3, 7, 9), normal(5, 3, 3, 3))),
    "conv2d of everything": (
        lambda x, w, b, r: tapwise.conv2d(x, w, b, 2, 1, residual=r, activation="relu", groups=2),
        lambda: (last(normal(1, 4, 9, 9)), normal(6, 2, 3, 3)[:, :, ::-1], normal(6), last(normal(1, 6, 5, 5))),
    ),
    "conv2d with a residual in another order": (
        lambda x, w, r: tapwise.conv2d(x, w, residual=r),
        lambda: (normal(1, 4, 6, 7), normal(5, 4, 2, 2), last(normal(1, 5, 5, 6))),
    ),
    "conv1d of one": (lambda x, w: tapwise.conv1d(x, w, dilation=2), lambda: (normal(3, 30), normal(4, 3, 5))),
    "transposed": (
        lambda x, w, b: tapwise.conv_transpose2d(x, w, b, 2),
        lambda: (normal(1, 4, 5, 6), normal(4, 3, 2, 2), normal(3)),
    ),
    "dgrad": (
        lambda dy, w: tapwise.conv2d_input((1, 3, 7, 9), w, dy), lambda: (normal(1, 5, 5, 7), normal(5, 3, 3, 3)),
    ),
    "wgrad": (
        lambda x, dy: tapwise.conv2d_weight(x, (5, 3, 3, 3), dy), lambda: (normal(2, 3, 7, 9), normal(2, 5, 5, 7)),
    ),
    "pool": (lambda x: tapwise.max_pool2d(x, 3, 2, 1, return_indices=True), lambda: (normal(3, 8, 9),)),
    "float64 pool": (lambda x: tapwise.avg_pool1d(x, 2), lambda: (normal(2, 3, 8, dtype="f8"),)),
}  # fmt: skip


def slow(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], *arguments: Any) -> Any:
    """The call without what was kept."""
    with monkeypatch.context() as patch:
        patch.setattr(
            host_calls.HostCalls, "call", lambda self, function, words, same, torch, *a: function(words, None, *a)
        )
        return call(*arguments)


@pytest.mark.parametrize("torch", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_later_calls_give_what_the_first_way_gives(name: str, torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in new memory, of the same kind, shape and strides."""
    call, arguments = CALLS[name]
    if torch:
        tensors = pytest.importorskip("torch")
    results = []
    for _ in range(4):
        arrays = arguments()
        if torch:
            arrays = tuple(tensors.from_numpy(np.ascontiguousarray(one) if _negative(one) else one) for one in arrays)
        expected, found = slow(monkeypatch, call, *arrays), call(*arrays)
        for mine, other in zip(_several(found), _several(expected), strict=True):
            assert type(mine) is type(other) and mine.dtype == other.dtype and mine.shape == other.shape
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))
            assert np.asarray(mine).strides == np.asarray(other).strides
        results.append(np.asarray(_several(found)[0]))
    assert not any(np.shares_memory(results[0], other) for other in results[1:])


def _negative(array: np.ndarray) -> bool:
    return any(step < 0 for step in array.strides)


def _several(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_equal_words_that_mean_other_things() -> None:
    x, w = normal(1, 3, 9, 9), normal(4, 3, 3, 3)
    for _ in range(3):
        tapwise.conv2d(x, w, stride=1)
    with pytest.raises(InvalidProblem, match="stride"):
        tapwise.conv2d(x, w, stride=1.5)
    with pytest.raises(InvalidProblem, match="stride"):
        tapwise.conv2d(x, w, stride=True)


def test_arrays_of_other_kinds_go_the_whole_way() -> None:
    """Other strides, byte orders, subclasses, misaligned and masked arrays behind a plain one of the same shape."""
    x, w = normal(1, 3, 9, 9), normal(4, 3, 3, 3)
    expected = [tapwise.conv2d(x, w) for _ in range(3)][-1]
    shifted = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    shifted[...] = x
    fixed = x.copy()
    fixed.flags.writeable = False
    for other in (last(x), x.astype(">f4"), np.ascontiguousarray(x[..., ::-1])[..., ::-1], shifted, fixed):
        for _ in range(2):
            np.testing.assert_allclose(tapwise.conv2d(other, w), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidProblem, match="masked"):
        tapwise.conv2d(np.ma.masked_array(x), w)
    with pytest.raises(InvalidProblem, match="w has dtype"):
        tapwise.conv2d(x, w.astype(np.float64))


def test_filters_are_read_anew() -> None:
    x, w = normal(1, 8, 5, 5), normal(8, 8, 1, 1)
    once = [tapwise.conv2d(x, w) for _ in range(3)][-1]
    w *= 2
    np.testing.assert_array_equal(tapwise.conv2d(x, w), 2 * once)


def test_another_number_of_threads_is_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = normal(1, 8, 30, 30), normal(8, 8, 3, 3)
    first = [tapwise.conv2d(x, w) for _ in range(3)][-1]
    monkeypatch.setenv("TAPWISE_NUM_THREADS", "1")
    np.testing.assert_allclose(tapwise.conv2d(x, w), first, rtol=1e-4, atol=1e-5)
    monkeypatch.setenv("TAPWISE_NUM_THREADS", "none")
    with pytest.raises(InvalidProblem, match="TAPWISE_NUM_THREADS"):
        tapwise.conv2d(x, w)


def test_kinds_beyond_those_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_calls, "KEPT", 3)
    for width in (*range(5, 13), *range(5, 13)):
        x = normal(1, 1, 4, width)
        np.testing.assert_array_equal(tapwise.max_pool2d(x, 2)[0, 0, 0, 0], x[0, 0, :2, :2].max())


def test_many_threads_share_a_kept_call() -> None:
    w = normal(6, 3, 3, 3)
    images = [normal(1, 3, 20, 20) for _ in range(8)]
    expected = [tapwise.conv2d(x, w) for x in images]
    with ThreadPoolExecutor(4) as team:
        for found, other in zip(team.map(lambda x: tapwise.conv2d(x, w), images * 4), expected * 4, strict=True):
            np.testing.assert_array_equal(found, other)


def test_tensors_that_are_more_than_memory() -> None:
    torch = pytest.importorskip("torch")
    x, w = torch.randn(1, 3, 9, 9), torch.randn(4, 3, 3, 3)
    expected = [tapwise.conv2d(x, w) for _ in range(3)][-1]
    with pytest.raises(InvalidProblem, match="gradient"):
        tapwise.conv2d(x.clone().requires_grad_(), w)
    with torch.no_grad():
        assert torch.equal(tapwise.conv2d(x, w.clone().requires_grad_()), expected)
    with pytest.raises(InvalidProblem, match="vmap"):
        torch.vmap(lambda one: tapwise.conv2d(one, w))(x[None])
    assert torch.equal(tapwise.conv2d(x, torch.nn.Parameter(w, requires_grad=False)), expected)
