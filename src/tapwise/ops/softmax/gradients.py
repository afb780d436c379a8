"""The gradients of softmax and log_softmax as a user calls them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from tapwise import arrays, dispatch
from tapwise.algorithm import Buffers, Device
from tapwise.arguments import shown, word
from tapwise.arrays.replay import Replays
from tapwise.arrays.workspaces import workspace
from tapwise.errors import InvalidProblem
from tapwise.ops.axes import normal_axes
from tapwise.ops.orders import KEPT, PreparedCall, in_order, memory_order, plain_axis, synonym, unless_same
from tapwise.ops.parameters import device_of, result
from tapwise.ops.softmax.problem import SoftmaxProblem


def softmax_backward(
    dy: Any, y: Any, axis: int = -1, *, dim: int | None = None, algorithm: str = "auto", device: str | None = None,
    out: Any = None,
) -> Any:  # fmt: skip
    """dx = (dy - sum(dy * y)) * y, the gradient of softmax by its input, with the meaning of PyTorch's.

    dy, the gradient by y, and y, what softmax gave: any one shape; float32, float64, float16 or bfloat16 (computed in
    float32), of one dtype; arrays and `device` as for conv2d, any strides. dx is of dy's kind, shape and dtype. `axis`:
    the one that softmax went along; `dim`: PyTorch's name of it. `algorithm`: "auto" or an id such as "cpu.simd".
    `out`, which may not overlap dy or y, is filled and returned. Raises InvalidProblem for a bad argument.
    """
    return _replays.call(_backward, (axis, dim, False, algorithm, device), out, dy, y)


def log_softmax_backward(
    dy: Any, y: Any, axis: int = -1, *, dim: int | None = None, algorithm: str = "auto", device: str | None = None,
    out: Any = None,
) -> Any:  # fmt: skip
    """dx = dy - e^y * sum(dy), the gradient of log_softmax, whose result y is. Arguments as for softmax_backward."""
    return _replays.call(_backward, (axis, dim, True, algorithm, device), out, dy, y)


_replays: Final = Replays()


def _backward(words: tuple[Any, ...], out: Any, dy: Any, y: Any) -> Any:
    axis, dim, log, algorithm, device = words
    axis = synonym(axis, "axis", -1, dim, "dim")
    index, upload = arrays.place(dy, device)
    source, other = arrays.anywhere(dy, "dy", index, upload), arrays.anywhere(y, "y", index, upload, "dy")
    if isinstance(axis, (tuple, list)) or axis is None:
        raise InvalidProblem(f"axis={shown(axis)}: one whole number is allowed")
    axis, algorithm = plain_axis(axis), word(algorithm, "algorithm", dispatch.ALGORITHM)
    shape = source.shape
    arrays.dtype_name(source, "dy")
    if other.shape != shape:
        raise InvalidProblem(f"y has shape {other.shape}: {shape}, as dy, is allowed")
    if other.dtype != source.dtype:
        raise InvalidProblem(f"y has dtype {other.dtype}: {source.dtype}, as dy, is allowed")
    if not shape:
        source, other = source.reshape((1,)), other.reshape((1,))
    done = _backward_of(source.shape, source.strides, source.dtype, axis, log, algorithm, device_of(source))
    target = None if out is None else result(out, shape, done.dtype, source, "dy", y=other)
    direct = target if done.back is None and arrays.takes(target, "nchw", source) else None
    dx = arrays.empty(done.result, done.dtype, "nchw", source) if direct is None else direct
    if done.plan is not None:
        given, beside = in_order(source, done.order), in_order(other, done.order)
        with workspace(done.plan.workspace_bytes, source) as memory:
            done.plan.run(Buffers(given, done.plan.pack(beside), dx, memory))
    if direct is not None:
        return out
    if done.back is not None:
        dx = dx.transpose(*done.back)
    dx = dx if shape else dx.reshape(())
    if target is None:
        return arrays.like(dx, dy)
    arrays.assign(target, dx)
    return out


@lru_cache(KEPT)
def _backward_of(
    shape: tuple[int, ...], strides: tuple[int, ...], kind: np.dtype[Any], axis: int, log: bool, algorithm: str,
    device: Device,
) -> PreparedCall:  # fmt: skip
    (number,) = normal_axes(axis, len(shape))
    order = memory_order(strides)
    problem = SoftmaxProblem(
        tuple(shape[a] for a in order), (order.index(number),), log=log,
        dtype=arrays.dtype_name(np.empty(0, kind), "dy"), direction="dgrad",
    )  # fmt: skip
    plan = None
    if not problem.empty:
        plan = dispatch.plan_for(problem, dispatch.choose(problem, device, algorithm), device)
    unlike = unless_same(order)
    back = None if unlike is None else tuple(np.argsort(order).tolist())
    return PreparedCall(unlike, plan, problem.shape, back, shape, problem.y_dtype)
