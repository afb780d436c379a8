"""Max and average pooling as a user calls them."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np

from tapwise import arrays, dispatch
from tapwise.algorithm import Plan
from tapwise.arguments import flag, whole
from tapwise.arrays.host_calls import note
from tapwise.arrays.replay import Replays
from tapwise.ops.orders import compute, run
from tapwise.ops.parameters import device_of, result, window, with_batch
from tapwise.ops.pool.problem import PoolProblem


def max_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False, *, algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """The largest element of each window, with the meaning of torch.nn.functional.max_pool2d.

    x (n, c, h, w) or (c, h, w); float32, float64, float16 or bfloat16; arrays and `device` as for conv2d, any strides.
    The result is of x's kind and memory order. The stride is the kernel's size by default.
    `padding`: a number, one for each axis, ((top, bottom), (left, right)), "same" or "valid"; each side smaller than
    the dilated kernel, and never chosen. NaN propagates. `return_indices`: also int64 positions h * width + w in the
    plane, the first of equals. `out` is filled and returned. Raises InvalidProblem for a bad argument.
    """
    words = kernel_size, stride, padding, dilation, ceil_mode, return_indices, algorithm, device
    return _max2d.call(_max_pool2d, words, out, x)


def avg_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, dilation: Any = 1, *, algorithm: str = "auto",
    device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """The mean of each window, with the meaning of torch.nn.functional.avg_pool2d; arguments as for max_pool2d.

    `count_include_pad`: padding counts as zeros; what a last window in ceil mode sees beyond it never does.
    `divisor_override`: what sums are divided by instead of the count.
    """
    words = kernel_size, stride, padding, dilation, ceil_mode, count_include_pad, divisor_override, algorithm, device
    return _avg2d.call(_avg_pool2d, words, out, x)


def max_pool1d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False, *, algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """As max_pool2d with one spatial axis: x (n, c, w) or (c, w)."""
    words = kernel_size, stride, padding, dilation, ceil_mode, return_indices, algorithm, device
    return _max1d.call(_max_pool1d, words, out, x)


def avg_pool1d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, dilation: Any = 1, *, algorithm: str = "auto",
    device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """As avg_pool2d with one spatial axis: x (n, c, w) or (c, w)."""
    words = kernel_size, stride, padding, dilation, ceil_mode, count_include_pad, divisor_override, algorithm, device
    return _avg1d.call(_avg_pool1d, words, out, x)


# Making a problem takes longer than looking it up.
_problem = lru_cache(dispatch.CHOICES_KEPT)(PoolProblem)
_max2d, _max1d, _avg2d, _avg1d = Replays(), Replays(), Replays(), Replays()


def problem_of(op: str, shape: tuple[int, ...], dtype: str, layout: Any, words: tuple[Any, ...]) -> PoolProblem:
    """Of x with a batch. `words`: kernel_size, stride, padding, dilation, ceil_mode, then of max return_indices, of avg
    count_include_pad and divisor_override. Raises InvalidProblem where they do not fit."""
    kernel_size, stride, padding, dilation, ceil, *options = words
    (indices,), (include, divisor) = (options, (True, None)) if op == "max" else ((False,), options)
    n, c, *spatial = shape
    stride = kernel_size if stride is None or (isinstance(stride, (tuple, list)) and not stride) else stride
    ceil, indices, include = (
        flag(ceil, "ceil_mode"), flag(indices, "return_indices"), flag(include, "count_include_pad"),
    )  # fmt: skip
    windows = window(tuple(spatial), kernel_size, stride, padding, dilation)
    divisor = None if divisor is None else whole(divisor, "divisor_override")
    return _problem(
        op=op, n=n, c=c, dtype=dtype, layout=layout, divisor=divisor, ceil_mode=ceil, indices=indices,
        count_include_pad=include, **windows,
    )  # fmt: skip


def _pool(op: str, axes: int, words: tuple[Any, ...], out: Any, x: Any) -> Any:
    *words_of_problem, algorithm, device = words
    source = arrays.anywhere(x, "x", *arrays.place(x, device))
    dtype = arrays.dtype_name(source, "x")
    single, batched = with_batch(source, axes)
    problem = problem_of(op, batched.shape, dtype, arrays.layout_of(batched), tuple(words_of_problem))
    images = problem.canonical()
    target = None if out is None else result(out, problem.y_shape[single:], problem.y_dtype, source)
    y = arrays.empty(images.y_shape, problem.y_dtype, problem.layout, source)
    places = arrays.empty(images.y_shape, np.dtype(np.int64), problem.layout, source) if problem.indices else None
    given = batched[:, :, None] if axes == 1 else batched
    lifted = arrays.dense(given, problem.layout)
    plan = compute(images, algorithm, lifted, y if places is None else (y, places))
    if plan is not None and target is None and lifted is given and isinstance(source, np.ndarray):
        note(partial(_again, problem, plan, single), (source,), device_of(source), partial(device_of, source))

    def shaped(array: Any) -> Any:
        array = array[:, :, 0] if axes == 1 else array
        return array[0] if single else array

    if target is not None:
        arrays.assign(target, shaped(y))
    values = arrays.like(shaped(y), x) if target is None else out
    return values if places is None else (values, arrays.like(shaped(places), x))


def _again(problem: PoolProblem, plan: Plan, single: bool, x: np.ndarray) -> Any:
    """What `_pool` gives for other arrays of the same kind."""
    images, line = problem.canonical(), len(problem.spatial) == 1
    kinds = [problem.y_dtype, *([np.dtype(np.int64)] if problem.indices else [])]
    made = [arrays.empty(images.y_shape, dtype, problem.layout) for dtype in kinds]
    batched = x[None] if single else x
    run(plan, batched[:, :, None] if line else batched, made[0] if len(made) == 1 else tuple(made))
    results = [array[:, :, 0] if line else array for array in made]
    results = [array[0] for array in results] if single else results
    return results[0] if len(made) == 1 else tuple(results)


_max_pool2d, _max_pool1d, _avg_pool2d, _avg_pool1d = (
    partial(_pool, op, axes) for op in ("max", "avg") for axes in (2, 1)
)
