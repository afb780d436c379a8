"""reduce, softmax and log_softmax as a user calls them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, Final

import numpy as np

from tapwise import arrays, dispatch
from tapwise.algorithm import Buffers, Device, Plan
from tapwise.errors import InvalidProblem
from tapwise.ops.parameters import device_of, result
from tapwise.ops.reduce.problem import POSITIONS, ReduceProblem, SoftmaxProblem, normal_axes

# Results of no element.
_OF_NOTHING: Final = {"mean": np.nan, "prod": 1.0, "logsumexp": -np.inf}
# Calls remembered by shape, strides and arguments: a small reduction takes less time than choosing for it.
KEPT: Final = 1024


def softmax(x: Any, axis: int = -1, *, algorithm: str = "auto", device: str | None = None, out: Any = None) -> Any:
    """e^x over the sum of e^x along one axis, shifted by the largest element.

    x: any shape; float32, float64 or float16 (computed in float32); arrays and `device` as for conv2d, any strides. The
    result is of x's kind, shape and dtype. A row with NaN or +infinity, or of nothing but -infinity, is NaN.
    `algorithm`: "auto" or an id such as "cpu.simd". `out`, which may not overlap x, is filled and returned: for large
    arrays, new memory takes as long as the softmax. Raises InvalidProblem for a bad argument.
    """
    return _softmax(x, axis, False, algorithm, device, out)


def log_softmax(x: Any, axis: int = -1, *, algorithm: str = "auto", device: str | None = None, out: Any = None) -> Any:
    """The logarithm of softmax, x - max - log(sum(e^(x - max))), computed as that. Arguments as for softmax."""
    return _softmax(x, axis, True, algorithm, device, out)


def reduce(
    x: Any, op: str, axis: Any = None, keepdims: bool = False, *, algorithm: str = "auto", device: str | None = None
) -> Any:
    """One value for each run of elements along `axis`.

    op: sum, mean, max, min, prod, argmax, argmin, norm1 (sum |x|), norm2 (square root of the sum of squares),
    sumsquare, logsumexp. axis: None (all), a number, or a tuple; () leaves every element by itself. Sums are kept in
    blocks, so that errors do not grow with the length. NaN wins in max, min, argmax and argmin, whose positions (int64)
    are the first of equals. Of no element: sum, norm1, norm2, sumsquare 0, prod 1, mean NaN, logsumexp -infinity.

    x: any shape, float32, float64 or float16 (in float32); arrays as for softmax. The result is of x's kind and dtype.
    Raises InvalidProblem for an unknown op, a bad axis, and the largest or smallest of nothing.
    """
    source = arrays.anywhere(x, "x", *arrays.place(x, device))
    axis, there = _plain(axis), device_of(source)
    done = _reduction(op, source.shape, source.strides, source.dtype, axis, bool(keepdims), algorithm, there)
    if done.plan is None:
        nothing = arrays.empty(done.shape, done.dtype, "nchw", source)
        arrays.assign(nothing, np.full(done.shape, done.value, done.dtype))
        return arrays.like(nothing, x)
    left = arrays.empty(done.result, done.dtype, "nchw", source)
    _run(done.plan, _dense(source, done.order), left)
    if done.back is not None:
        left = left.transpose(*done.back)
    return arrays.like(left.reshape(done.shape), x)


def _plain(axis: Any) -> Any:
    """An axis argument in plain numbers, as calls are remembered by it: 1.0 equals 1, and is no axis."""
    if axis is None or type(axis) is int:
        return axis
    try:
        return tuple(map(index, axis)) if isinstance(axis, (tuple, list)) else index(axis)
    except TypeError:
        raise InvalidProblem(f"axis={axis!r}: None, a whole number or a tuple of them is allowed") from None


@dataclass(frozen=True)
class _Prepared:
    """What a call needs besides its array: axes in the order of the kernel's problem, its plan, the way back.

    Without a plan there is nothing to compute: every result is `value`.
    """

    order: tuple[int, ...] | None
    plan: Plan | None
    result: tuple[int, ...]
    back: tuple[int, ...] | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    value: float = 0.0


@lru_cache(KEPT)
def _reduction(
    op: str, shape: tuple[int, ...], strides: tuple[int, ...], kind: np.dtype[Any], axis: Any, keepdims: bool,
    algorithm: str, device: Device,
) -> _Prepared:  # fmt: skip
    dtype = arrays.dtype_name(np.empty(0, kind), "x")
    axes = normal_axes(axis, len(shape))
    wanted = ReduceProblem(shape, axes, op=op, keepdims=keepdims, dtype=dtype)
    result = np.dtype(np.int64) if op in POSITIONS else arrays.DTYPES[dtype]
    if wanted.empty or wanted.length == 0:
        return _Prepared(None, None, (), None, wanted.y_shape, result, _OF_NOTHING.get(op, 0.0))
    order = _order(shape, strides, axes, op in POSITIONS)
    inside = tuple(sorted(order.index(axis) for axis in axes))
    problem = ReduceProblem(tuple(shape[axis] for axis in order), inside, op=op, dtype=dtype)
    kept = [axis for axis in order if axis not in axes]
    back = None if kept == sorted(kept) else tuple(np.argsort(kept).tolist())
    plan = dispatch.plan_for(problem, dispatch.choose(problem, device, algorithm), device)
    return _Prepared(_unless_trivial(order), plan, problem.y_shape, back, wanted.y_shape, result)


def _softmax(x: Any, axis: int, log: bool, algorithm: str, device: str | None, out: Any) -> Any:
    source = arrays.anywhere(x, "x", *arrays.place(x, device))
    if isinstance(axis, (tuple, list)) or axis is None:
        raise InvalidProblem(f"axis={axis!r}: one whole number is allowed")
    axis = _plain(axis)
    shape = source.shape
    if not shape:
        source = source.reshape((1,))
    done = _softmax_of(source.shape, source.strides, source.dtype, axis, log, algorithm, device_of(source))
    target = None if out is None else result(out, shape, done.dtype, source)
    # A result that lies as the kernel writes it is written where it belongs.
    direct = None if target is None or done.back is not None or not arrays.is_dense(target, "nchw") else target
    y = arrays.empty(done.result, done.dtype, "nchw", source) if direct is None else direct
    if done.plan is not None:
        _run(done.plan, _dense(source, done.order), y)
    if direct is not None:
        return out
    if done.back is not None:
        y = y.transpose(*done.back)
    y = y if shape else y.reshape(())
    if target is None:
        return arrays.like(y, x)
    arrays.assign(target, y)
    return out


@lru_cache(KEPT)
def _softmax_of(
    shape: tuple[int, ...], strides: tuple[int, ...], kind: np.dtype[Any], axis: int, log: bool, algorithm: str,
    device: Device,
) -> _Prepared:  # fmt: skip
    dtype = arrays.dtype_name(np.empty(0, kind), "x")
    (number,) = normal_axes(axis, len(shape))
    order = _memory_order(strides)
    problem = SoftmaxProblem(tuple(shape[a] for a in order), (order.index(number),), log=log, dtype=dtype)
    plan = None
    if not problem.empty:
        plan = dispatch.plan_for(problem, dispatch.choose(problem, device, algorithm), device)
    order_or_none = _unless_trivial(order)
    back = None if order_or_none is None else tuple(np.argsort(order).tolist())
    return _Prepared(order_or_none, plan, problem.shape, back, shape, arrays.DTYPES[dtype])


def _memory_order(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Axes by falling stride: the order in which a transposed array lies dense."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -abs(strides[axis])))


def _unless_trivial(order: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if order == tuple(range(len(order))) else order


def _dense(source: Any, order: tuple[int, ...] | None) -> Any:
    """The array with its axes in that order, in C order and aligned; a copy only where it is not."""
    if order is not None:
        source = source.transpose(*order)
    if not isinstance(source, np.ndarray):
        return arrays.dense(source, "nchw")
    flags = source.flags
    if flags.c_contiguous and flags.aligned:
        return source
    return np.array(source, order="C")


def _order(shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int, ...], positions: bool) -> tuple[int, ...]:
    """An order of the axes in which those that are gone through are neighbours.

    The order in which they lie in memory where that is one, else those axes last. Positions in the flattened array
    count in the order of x's own axes.
    """
    order = tuple(range(len(shape))) if positions and len(axes) > 1 else _memory_order(strides)
    inside = tuple(sorted(order.index(axis) for axis in axes))
    if ReduceProblem(tuple(shape[axis] for axis in order), inside).folded is not None:
        return order
    return (*(axis for axis in range(len(shape)) if axis not in axes), *axes)


def _run(plan: Plan, x: Any, y: Any) -> None:
    if not plan.workspace_bytes:
        plan.run(Buffers(x, None, y))
        return
    if not isinstance(x, np.ndarray):
        plan.run(Buffers(x, None, y, arrays.workspace(plan.workspace_bytes, x)))
        return
    free, size = arrays.workspaces(plan.workspace_bytes)
    try:
        workspace = free.pop()
    except IndexError:
        workspace = arrays.aligned(size)
    plan.run(Buffers(x, None, y, workspace))
    free.append(workspace)
