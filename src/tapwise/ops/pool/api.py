"""Max and average pooling as a user calls them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tapwise import arrays, dispatch
from tapwise.algorithm import Buffers
from tapwise.arrays.workspaces import workspace
from tapwise.errors import InvalidProblem
from tapwise.ops.parameters import device_of, result, whole, window
from tapwise.ops.pool.problem import PoolProblem


def max_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False, *, algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """The largest element of each window, with the meaning of torch.nn.functional.max_pool2d.

    x (n, c, h, w) or (c, h, w); float32, float64 or float16; arrays and `device` as for conv2d, any strides. The result
    is of x's kind and memory order. The stride is the kernel's size by default.
    `padding`: a number, one for each axis, ((top, bottom), (left, right)), "same" or "valid"; each side smaller than
    the dilated kernel, and never chosen. NaN propagates. `return_indices`: also int64 positions h * width + w in the
    plane, the first of equals. `out` is filled and returned. Raises InvalidProblem for a bad argument.
    """
    options = {"ceil_mode": bool(ceil_mode), "indices": bool(return_indices)}
    return _pool("max", 2, x, kernel_size, stride, padding, dilation, options, algorithm, device, out)


def avg_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, dilation: Any = 1, *, algorithm: str = "auto",
    device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """The mean of each window, with the meaning of torch.nn.functional.avg_pool2d; arguments as for max_pool2d.

    `count_include_pad`: padding counts as zeros; what a last window in ceil mode sees beyond it never does.
    `divisor_override`: what sums are divided by instead of the count.
    """
    divisor = None if divisor_override is None else whole(divisor_override, "divisor_override")
    options = {"ceil_mode": bool(ceil_mode), "count_include_pad": bool(count_include_pad), "divisor": divisor}
    return _pool("avg", 2, x, kernel_size, stride, padding, dilation, options, algorithm, device, out)


def max_pool1d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False, *, algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """As max_pool2d with one spatial axis: x (n, c, w) or (c, w)."""
    options = {"ceil_mode": bool(ceil_mode), "indices": bool(return_indices)}
    return _pool("max", 1, x, kernel_size, stride, padding, dilation, options, algorithm, device, out)


def avg_pool1d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, dilation: Any = 1, *, algorithm: str = "auto",
    device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """As avg_pool2d with one spatial axis: x (n, c, w) or (c, w)."""
    divisor = None if divisor_override is None else whole(divisor_override, "divisor_override")
    options = {"ceil_mode": bool(ceil_mode), "count_include_pad": bool(count_include_pad), "divisor": divisor}
    return _pool("avg", 1, x, kernel_size, stride, padding, dilation, options, algorithm, device, out)


def _pool(
    op: str, axes: int, x: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, options: dict[str, Any],
    algorithm: str, device: str | None, out: Any,
) -> Any:  # fmt: skip
    source = arrays.anywhere(x, "x", *arrays.place(x, device))
    dtype = arrays.dtype_name(source, "x")
    single = source.ndim == axes + 1
    if not single and source.ndim != axes + 2:
        raise InvalidProblem(f"x has shape {source.shape}: {axes + 2} axes are allowed, or {axes + 1} without a batch")
    batched = source[None] if single else source
    n, c, *spatial = batched.shape
    stride = kernel_size if stride is None or stride == () else stride
    steps = window(tuple(spatial), kernel_size, stride, padding, dilation)
    problem = PoolProblem(op=op, n=n, c=c, dtype=dtype, layout=arrays.layout_of(batched), **steps, **options)
    images = problem.canonical()
    shape = problem.y_shape[single:]
    target = None if out is None else result(out, shape, problem.y_dtype, source)
    y = arrays.empty(images.y_shape, problem.y_dtype, problem.layout, source)
    places = arrays.empty(images.y_shape, np.dtype(np.int64), problem.layout, source) if problem.indices else None
    if not problem.empty:
        there = device_of(source)
        plan = dispatch.plan_for(images, dispatch.choose(images, there, algorithm), there)
        x_there = arrays.dense(batched[:, :, None] if axes == 1 else batched, problem.layout)
        with workspace(plan.workspace_bytes, source) as memory:
            plan.run(Buffers(x_there, None, y if places is None else (y, places), memory))

    def shaped(array: Any) -> Any:
        array = array[:, :, 0] if axes == 1 else array
        return array[0] if single else array

    if target is None:
        values = arrays.like(shaped(y), x)
    else:
        arrays.assign(target, shaped(y))
        values = out
    return values if places is None else (values, arrays.like(shaped(places), x))
