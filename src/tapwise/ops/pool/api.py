"""Max and average pooling as a user calls them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from tapwise import arrays, dispatch
from tapwise.arguments import flag, whole
from tapwise.ops.orders import compute
from tapwise.ops.parameters import result, window, with_batch
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
    steps = kernel_size, stride, padding, dilation
    return _pool("max", 2, x, steps, algorithm, device, out, ceil_mode=ceil_mode, return_indices=return_indices)


def avg_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, dilation: Any = 1, *, algorithm: str = "auto",
    device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """The mean of each window, with the meaning of torch.nn.functional.avg_pool2d; arguments as for max_pool2d.

    `count_include_pad`: padding counts as zeros; what a last window in ceil mode sees beyond it never does.
    `divisor_override`: what sums are divided by instead of the count.
    """
    options = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad, "divisor": divisor_override}
    return _pool("avg", 2, x, (kernel_size, stride, padding, dilation), algorithm, device, out, **options)


def max_pool1d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False, *, algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """As max_pool2d with one spatial axis: x (n, c, w) or (c, w)."""
    steps = kernel_size, stride, padding, dilation
    return _pool("max", 1, x, steps, algorithm, device, out, ceil_mode=ceil_mode, return_indices=return_indices)


def avg_pool1d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, dilation: Any = 1, *, algorithm: str = "auto",
    device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """As avg_pool2d with one spatial axis: x (n, c, w) or (c, w)."""
    options = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad, "divisor": divisor_override}
    return _pool("avg", 1, x, (kernel_size, stride, padding, dilation), algorithm, device, out, **options)


# Making a problem takes longer than looking it up.
_problem = lru_cache(dispatch.CHOICES_KEPT)(PoolProblem)
# Arguments that a problem calls otherwise.
_FLAGS: Final = {"return_indices": "indices"}


def _pool(
    op: str, axes: int, x: Any, steps: tuple[Any, ...], algorithm: str, device: str | None, out: Any,
    divisor: Any = None, **flags: Any,
) -> Any:  # fmt: skip
    """`steps`: kernel_size, stride, padding, dilation as they were given."""
    source = arrays.anywhere(x, "x", *arrays.place(x, device))
    dtype = arrays.dtype_name(source, "x")
    single, batched = with_batch(source, axes)
    n, c, *spatial = batched.shape
    kernel_size, stride, padding, dilation = steps
    stride = kernel_size if stride is None or (isinstance(stride, (tuple, list)) and not stride) else stride
    words: dict[str, Any] = {_FLAGS.get(name, name): flag(value, name) for name, value in flags.items()}
    words |= window(tuple(spatial), kernel_size, stride, padding, dilation)
    divisor = None if divisor is None else whole(divisor, "divisor_override")
    layout = arrays.layout_of(batched)
    problem = _problem(op=op, n=n, c=c, dtype=dtype, layout=layout, divisor=divisor, **words)
    images = problem.canonical()
    target = None if out is None else result(out, problem.y_shape[single:], problem.y_dtype, source)
    y = arrays.empty(images.y_shape, problem.y_dtype, problem.layout, source)
    places = arrays.empty(images.y_shape, np.dtype(np.int64), problem.layout, source) if problem.indices else None
    lifted = arrays.dense(batched[:, :, None] if axes == 1 else batched, problem.layout)
    compute(images, algorithm, lifted, y if places is None else (y, places))

    def shaped(array: Any) -> Any:
        array = array[:, :, 0] if axes == 1 else array
        return array[0] if single else array

    if target is not None:
        arrays.assign(target, shaped(y))
    values = arrays.like(shaped(y), x) if target is None else out
    return values if places is None else (values, arrays.like(shaped(places), x))
