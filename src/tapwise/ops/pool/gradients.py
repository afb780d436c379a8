"""The gradients of max and average pooling as a user calls them."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from tapwise import arrays, dispatch
from tapwise.algorithm import Buffers
from tapwise.arguments import LARGEST, flag, shown, whole, wholes
from tapwise.arrays.replay import Replays
from tapwise.arrays.workspaces import workspace
from tapwise.errors import InvalidProblem
from tapwise.ops.parameters import device_of, result, window, with_batch
from tapwise.ops.pool.problem import PoolProblem


def max_pool2d_backward(
    dy: Any, indices: Any, input_size: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, *, algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """dx, the gradient of max_pool2d by its input, with the meaning of PyTorch's max_pool2d_with_indices_backward.

    dy (n, c, p, q) or (c, p, q), the gradient by the values; `indices`: the int64 positions that max_pool2d gave, of
    dy's shape. `input_size`: the shape of x, (n, c, h, w) or (c, h, w). The other arguments are those that max_pool2d
    had. Each element of x gets the sum, in a fixed order, of dy of the windows that chose it: a position that its
    window does not see has no meaning, and is never written to outside of dx. float32, float64, float16 or bfloat16;
    arrays and `device` as for conv2d, any strides; dx has dy's kind and memory order. `out` is filled and returned.
    Raises InvalidProblem for a bad argument.
    """
    words = _plain(input_size), kernel_size, stride, padding, dilation, ceil_mode, algorithm, device
    return _max.call(_max_backward, words, out, dy, indices)


def avg_pool2d_backward(
    dy: Any, input_size: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, dilation: Any = 1, *, algorithm: str = "auto",
    device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """dx, the gradient of avg_pool2d by its input, with the meaning of PyTorch's avg_pool2d_backward.

    dy (n, c, p, q) or (c, p, q), the gradient by the means. `input_size`: the shape of x. The other arguments are
    those that avg_pool2d had; arrays as for max_pool2d_backward.
    """
    counted = ceil_mode, count_include_pad, divisor_override
    words = _plain(input_size), kernel_size, stride, padding, dilation, *counted, algorithm, device
    return _avg.call(_avg_backward, words, out, dy)


_problem = lru_cache(dispatch.CHOICES_KEPT)(PoolProblem)
_max, _avg = Replays(), Replays()


def _plain(size: Any) -> Any:
    """As calls are remembered by it."""
    return tuple(size) if isinstance(size, list) else size


def _max_backward(words: tuple[Any, ...], out: Any, dy: Any, indices: Any) -> Any:
    size, *steps, ceil, algorithm, device = words
    index, upload = arrays.place(dy, device)
    places = arrays.anywhere(indices, "indices", index if not upload else None, first="dy")
    if places.dtype != np.int64:
        raise InvalidProblem(f"indices has dtype {places.dtype}: int64 is allowed")
    own = {"op": "max", "ceil_mode": flag(ceil, "ceil_mode")}
    return _backward(own, size, steps, algorithm, arrays.anywhere(dy, "dy", index, upload), places, dy, out)


def _avg_backward(words: tuple[Any, ...], out: Any, dy: Any) -> Any:
    size, *steps, ceil, include, divisor, algorithm, device = words
    own = {
        "op": "avg", "ceil_mode": flag(ceil, "ceil_mode"), "count_include_pad": flag(include, "count_include_pad"),
        "divisor": None if divisor is None else whole(divisor, "divisor_override"),
    }  # fmt: skip
    return _backward(own, size, steps, algorithm, arrays.anywhere(dy, "dy", *arrays.place(dy, device)), None, dy, out)


def _backward(
    own: dict[str, Any], size: Any, steps: list[Any], algorithm: Any, source: Any, places: Any, given: Any, out: Any
) -> Any:
    """Run on checked arrays; `source` is the view of `given`."""
    dtype, shape = arrays.dtype_name(source, "dy"), wholes(size, "input_size")
    single, dy = with_batch(source, 2, "dy")
    if len(shape) != source.ndim:
        raise InvalidProblem(f"input_size={shown(size)}: {source.ndim} sizes are allowed, as many as dy has axes")
    if min(shape) < 0 or 8 * prod(one or 1 for one in shape) > LARGEST:
        raise InvalidProblem(f"input_size={shown(size)}: sizes from 0 whose product is below 2^60 are allowed")
    kernel, stride, padding, dilation = steps
    stride = kernel if stride is None or (isinstance(stride, (tuple, list)) and not stride) else stride
    n, c, *spatial = (1, *shape) if single else shape
    layout = arrays.layout_of(dy)
    problem = _problem(
        n=n, c=c, dtype=dtype, layout=layout, direction="dgrad", **own,
        **window(tuple(spatial), kernel, stride, padding, dilation),
    )  # fmt: skip
    for name, array in (("dy", source), ("indices", places)):
        if array is not None and tuple(array.shape) != problem.y_shape[single:]:
            raise InvalidProblem(
                f"{name} has shape {tuple(array.shape)}: {problem.y_shape[single:]} is allowed, as y for "
                f"input_size={shape}, kernel_size={problem.kernel}, stride={problem.stride}, "
                f"padding={problem.padding}, dilation={problem.dilation}"
            )
    target = None if out is None else result(out, shape, problem.x_dtype, source, "dy", indices=places)
    direct = target if not single and arrays.takes(target, layout, source) else None
    dx = arrays.empty(problem.x_shape, problem.x_dtype, layout, source) if direct is None else direct
    if not problem.empty:
        there = device_of(source)
        plan = dispatch.plan_for(problem, dispatch.choose(problem, there, algorithm), there)
        positions = None
        if places is not None:
            positions = arrays.dense(arrays.beside(places[None] if single else places, source), layout)
        with workspace(plan.workspace_bytes, source) as memory:
            plan.run(Buffers(arrays.dense(dy, layout), plan.pack(positions), dx, memory))
    if direct is not None:
        return out
    dx = dx[0] if single else dx
    if target is None:
        return arrays.like(dx, given)
    arrays.assign(target, dx)
    return out
