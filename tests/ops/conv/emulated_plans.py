"""Plans run by emulation: a GPU whose memory is this machine's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import emulated
from tapwise import arrays
from tapwise.algorithm import Buffers
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.device import H200
from tapwise.cuda.jit.launch import Launch
from tapwise.ops.conv.cuda import fprop_phases, joined_pixels, pack, pixel_shuffle
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import compare

# Its CTAs have several tiles each.
SMALL = replace(H200, multiprocessors=3)
needs_compiler = pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU whose memory is this machine's."""

    def called(self: Launch, addresses: Any, stream: int) -> None:
        emulated.run_at(self, addresses)

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> DeviceArray:
        return lent(np.full(shape, np.nan, dtype))

    caches = fprop_phases._turn, pixel_shuffle._gather, joined_pixels._join, pack._filters
    monkeypatch.setattr(Launch, "load", lambda *_: None)
    monkeypatch.setattr(Launch, "__call__", called)
    monkeypatch.setattr(arrays.cuda, "allocate", allocate)
    monkeypatch.setattr(arrays.cuda, "assign", lambda to, x: np.copyto(memory_of(to), memory_of(x)))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def lent(array: np.ndarray) -> DeviceArray:
    """A copy that ends with its last page."""
    copy = emulated.Guarded(array)
    return DeviceArray(copy.address, array.shape, array.strides, array.dtype, 0, "other", copy)


def memory_of(array: DeviceArray) -> np.ndarray:
    reaches = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    before, behind = (sum(one for one in reaches if (one < 0) == back) for back in (True, False))
    memory = (ctypes.c_uint8 * (behind - before + array.dtype.itemsize)).from_address(array.ptr + before)
    first = np.ctypeslib.as_array(memory)[-before:].view(array.dtype)
    return np.lib.stride_tricks.as_strided(first, array.shape, array.strides)


def verdict_of(algorithm: Any, problem: ConvProblem, config: Any) -> Any:
    """A plan's result against float64, on memory that is this machine's."""
    inputs = problem.sample(np.random.default_rng(0), False)

    def laid(array: np.ndarray) -> DeviceArray:
        if problem.layout == "nchw":
            return lent(np.ascontiguousarray(array))
        return lent(np.ascontiguousarray(np.moveaxis(array, 1, -1))).transpose(0, 3, 1, 2)

    plan = algorithm.plan(problem, config, SMALL)
    y = laid(np.full(problem.result_shape, np.nan, problem.y_dtype))
    size = plan.workspace_bytes
    workspace = lent(np.full(size, 0xFF, np.uint8)) if size else None
    bias = None if inputs.bias is None else lent(inputs.bias)
    residual = None if inputs.residual is None else laid(inputs.residual)
    plan.run(Buffers(laid(inputs.x), plan.pack(lent(inputs.w)), y, workspace, bias, residual, 0))
    return compare(memory_of(y), *problem.reference(inputs, algorithm), problem.y_dtype)


def check_what_is_not_finite(problem: ConvProblem, algorithm: Any, config: Any) -> None:
    """A weight gradient, channels last, of x and dy with infinities and NaN: they stay with the sums that have them."""
    inputs = problem.sample(np.random.default_rng(0), False)
    x, dy = inputs.x.copy(), inputs.w.copy()
    x[0, 1, 0, 0], x[-1, 2, -1, -1], x[0, 3, 4, -1] = np.inf, np.nan, -np.inf
    # Not where padding is met: whether its zeros are multiplied is left open.
    dy[0, 4, 3, 3], dy[-1, 0, 2, 4] = np.inf, np.nan
    with np.errstate(all="ignore"):
        expected = problem.convolve(x, dy)
    y = np.zeros((problem.k, *problem.kernel, problem.group_c), problem.y_dtype)
    last = {"x": np.ascontiguousarray(np.moveaxis(x, 1, -1)), "w": np.ascontiguousarray(np.moveaxis(dy, 1, -1))}
    size = algorithm.workspace_bytes(problem, config, H200)
    there = {**last, "y": y, "workspace": np.full(max(size, 16), 0xFF, np.uint8)}
    for launch in algorithm.launches(problem, config, H200):
        emulated.run(launch, there)
    assert not np.isfinite(expected).all()
    np.testing.assert_allclose(np.moveaxis(y, -1, 1).astype(np.float64), expected, rtol=2e-2, atol=1e-1)
