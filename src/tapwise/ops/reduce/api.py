"""reduce as a user calls it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from tapwise import arrays, dispatch
from tapwise.algorithm import Device
from tapwise.arguments import flag, word
from tapwise.arrays.replay import Replays
from tapwise.ops.axes import normal_axes
from tapwise.ops.orders import KEPT, PreparedCall, in_order, memory_order, plain_axis, run, synonym, unless_same
from tapwise.ops.parameters import device_of
from tapwise.ops.reduce.problem import OPS, POSITIONS, ReduceProblem

# Results of no element.
_OF_NOTHING: Final = {"mean": np.nan, "prod": 1.0, "logsumexp": -np.inf}


def reduce(
    x: Any, op: str, axis: Any = None, keepdims: bool = False, *, dim: Any = None, keepdim: bool | None = None,
    algorithm: str = "auto", device: str | None = None,
) -> Any:  # fmt: skip
    """One value for each run of elements along `axis`.

    op: sum, mean, max, min, prod, argmax, argmin, norm1 (sum |x|), norm2 (square root of the sum of squares),
    sumsquare, logsumexp. axis: None (all), a number, or a tuple; () leaves every element by itself. Sums are kept in
    blocks, so that errors do not grow with the length. NaN wins in max, min, argmax and argmin, whose positions (int64)
    are the first of equals. Of no element: sum, norm1, norm2, sumsquare 0, prod 1, mean NaN, logsumexp -infinity.
    `dim` and `keepdim`: PyTorch's names of `axis` and `keepdims`.

    x: any shape, float32, float64, float16 or bfloat16 (in float32); arrays as for softmax. The result is of x's kind
    and dtype. Raises InvalidProblem for an unknown op, a bad axis, and the largest or smallest of nothing.
    """
    return _replays.call(_reduce, (op, axis, keepdims, dim, keepdim, algorithm, device), None, x)


_replays: Final = Replays()


def _reduce(words: tuple[Any, ...], out: None, x: Any) -> Any:
    op, axis, keepdims, dim, keepdim, algorithm, device = words
    source = arrays.anywhere(x, "x", *arrays.place(x, device))
    axis, there = plain_axis(synonym(axis, "axis", None, dim, "dim")), device_of(source)
    op, algorithm = word(op, "op", OPS), word(algorithm, "algorithm", dispatch.ALGORITHM)
    keepdims = flag(synonym(keepdims, "keepdims", False, keepdim, "keepdim"), "keepdims")
    done = reduction(op, source.shape, source.strides, source.dtype, axis, keepdims, algorithm, there)
    if done.plan is None:
        nothing = arrays.empty(done.shape, done.dtype, "nchw", source)
        arrays.assign(nothing, np.full(done.shape, done.value, done.dtype))
        return arrays.like(nothing, x)
    left = arrays.empty(done.result, done.dtype, "nchw", source)
    run(done.plan, in_order(source, done.order), left)
    if done.back is not None:
        left = left.transpose(*done.back)
    return arrays.like(left.reshape(done.shape), x)


@lru_cache(KEPT)
def reduction(
    op: str, shape: tuple[int, ...], strides: tuple[int, ...], kind: np.dtype[Any], axis: Any, keepdims: bool,
    algorithm: str, device: Device,
) -> PreparedCall:  # fmt: skip
    """How an array of this kind is reduced."""
    dtype = arrays.dtype_name(np.empty(0, kind), "x")
    axes = normal_axes(axis, len(shape))
    wanted = ReduceProblem(shape, axes, op=op, keepdims=keepdims, dtype=dtype)
    if wanted.trivial:
        return PreparedCall(None, None, (), None, wanted.y_shape, wanted.y_dtype, _OF_NOTHING.get(op, 0.0))
    order = _order(shape, strides, axes, op in POSITIONS)
    inside = tuple(sorted(order.index(axis) for axis in axes))
    problem = ReduceProblem(tuple(shape[axis] for axis in order), inside, op=op, dtype=dtype)
    kept = [axis for axis in order if axis not in axes]
    back = None if kept == sorted(kept) else tuple(np.argsort(kept).tolist())
    plan = dispatch.plan_for(problem, dispatch.choose(problem, device, algorithm), device)
    return PreparedCall(unless_same(order), plan, problem.y_shape, back, wanted.y_shape, wanted.y_dtype)


def _order(shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int, ...], positions: bool) -> tuple[int, ...]:
    """An order of the axes in which those that are gone through are neighbours.

    The order in which they lie in memory where that is one, else those axes last. Positions in the flattened array
    count in the order of x's own axes.
    """
    order = tuple(range(len(shape))) if positions and len(axes) > 1 else memory_order(strides)
    inside = tuple(sorted(order.index(axis) for axis in axes))
    if ReduceProblem(tuple(shape[axis] for axis in order), inside).collapsed is not None:
        return order
    return (*(axis for axis in range(len(shape)) if axis not in axes), *axes)
