"""softmax and log_softmax as a user calls them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from tapwise import arrays, dispatch
from tapwise.algorithm import Device
from tapwise.arguments import shown, word
from tapwise.arrays.replay import Replays
from tapwise.errors import InvalidProblem
from tapwise.ops.axes import normal_axes
from tapwise.ops.orders import KEPT, PreparedCall, in_order, memory_order, plain_axis, run, synonym, unless_same
from tapwise.ops.parameters import device_of, result
from tapwise.ops.softmax.problem import SoftmaxProblem


def softmax(
    x: Any,
    axis: int = -1,
    *,
    dim: int | None = None,
    algorithm: str = "auto",
    device: str | None = None,
    out: Any = None,
) -> Any:
    """e^x over the sum of e^x along one axis, shifted by the largest element.

    x: any shape; float32, float64, float16 or bfloat16 (computed in float32); arrays and `device` as for conv2d, any
    strides. The result is of x's kind, shape and dtype. A row with NaN or +infinity, or of nothing but -infinity, is
    NaN. `dim`: PyTorch's name of `axis`. `algorithm`: "auto" or an id such as "cpu.simd". `out`, which may not overlap
    x, is filled and returned: for large arrays, new memory takes as long as the softmax. Raises InvalidProblem for a
    bad argument.
    """
    return _replays.call(_softmax, (axis, dim, False, algorithm, device), out, x)


def log_softmax(
    x: Any,
    axis: int = -1,
    *,
    dim: int | None = None,
    algorithm: str = "auto",
    device: str | None = None,
    out: Any = None,
) -> Any:
    """The logarithm of softmax, x - max - log(sum(e^(x - max))), computed as that. Arguments as for softmax."""
    return _replays.call(_softmax, (axis, dim, True, algorithm, device), out, x)


_replays: Final = Replays()


def _softmax(words: tuple[Any, ...], out: Any, x: Any) -> Any:
    axis, dim, log, algorithm, device = words
    axis = synonym(axis, "axis", -1, dim, "dim")
    source = arrays.anywhere(x, "x", *arrays.place(x, device))
    if isinstance(axis, (tuple, list)) or axis is None:
        raise InvalidProblem(f"axis={shown(axis)}: one whole number is allowed")
    axis, algorithm = plain_axis(axis), word(algorithm, "algorithm", dispatch.ALGORITHM)
    shape = source.shape
    if not shape:
        source = source.reshape((1,))
    done = _softmax_of(source.shape, source.strides, source.dtype, axis, log, algorithm, device_of(source))
    target = None if out is None else result(out, shape, done.dtype, source)
    # A result that lies as the kernel writes it is written where it belongs.
    direct = target if done.back is None and arrays.takes(target, "nchw", source) else None
    y = arrays.empty(done.result, done.dtype, "nchw", source) if direct is None else direct
    if done.plan is not None:
        run(done.plan, in_order(source, done.order), y)
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
) -> PreparedCall:  # fmt: skip
    dtype = arrays.dtype_name(np.empty(0, kind), "x")
    (number,) = normal_axes(axis, len(shape))
    order = memory_order(strides)
    problem = SoftmaxProblem(tuple(shape[a] for a in order), (order.index(number),), log=log, dtype=dtype)
    plan = None
    if not problem.empty:
        plan = dispatch.plan_for(problem, dispatch.choose(problem, device, algorithm), device)
    order_or_none = unless_same(order)
    back = None if order_or_none is None else tuple(np.argsort(order).tolist())
    return PreparedCall(order_or_none, plan, problem.shape, back, shape, problem.y_dtype)
