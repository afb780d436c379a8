"""im2col and col2im as a user calls them."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

from tapwise import arrays, dispatch
from tapwise.arguments import LARGEST, flag, shown
from tapwise.arrays.replay import Replays
from tapwise.errors import InvalidProblem
from tapwise.ops.orders import compute
from tapwise.ops.parameters import numbers, result, window
from tapwise.ops.patches.problem import Col2imProblem, Im2colProblem, PatchProblem


def im2col(
    x: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1, out: Any = None, *,
    algorithm: str = "auto", device: str | None = None,
) -> Any:  # fmt: skip
    """Every window of an image as a column, with the meaning of torch.nn.functional.unfold.

    x (n, c, *spatial) of 1 to 3 spatial axes, or (c, *spatial); the result (n, c * prod(kernel_size), windows). An
    array of three axes is (c, h, w) where kernel_size is a number or two, as in PyTorch, and (n, c, w) where it is one
    of one. float32, float64, float16 or bfloat16; arrays and `device` as for conv2d.
    `padding` in conv2d's forms. `out` is filled and returned. Raises InvalidProblem for a bad argument.
    """
    return _columns.call(_im2col, (kernel_size, dilation, padding, stride, algorithm, device), out, x)


_columns, _images = Replays(), Replays()


def _im2col(words: tuple[Any, ...], out: Any, x: Any) -> Any:
    kernel_size, dilation, padding, stride, algorithm, device = words
    source = arrays.anywhere(x, "x", *arrays.place(x, device))
    axes = len(kernel_size) if isinstance(kernel_size, (tuple, list)) else max(2, source.ndim - 2)
    single = source.ndim == axes + 1
    if not 1 <= axes <= 3 or (not single and source.ndim != axes + 2):
        raise InvalidProblem(
            f"x has shape {source.shape}: {axes + 2} axes are allowed for kernel_size={shown(kernel_size)}"
        )
    batched = source[None] if single else source
    n, c, *spatial = batched.shape
    steps = window(tuple(spatial), kernel_size, stride, padding, dilation)
    problem = _im2col_problem(n=n, c=c, dtype=arrays.dtype_name(source, "x"), **steps)
    return _run(problem, batched, single, x, source, out, algorithm)


def col2im(
    cols: Any, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1, *,
    out: Any = None, accumulate: bool = False, algorithm: str = "auto", device: str | None = None,
) -> Any:  # fmt: skip
    """Columns summed back into an image, with the meaning of torch.nn.functional.fold: the adjoint of im2col.

    cols (n, c * prod(kernel_size), windows) or without n; output_size the image's spatial sizes, 1 to 3; the result
    (n, c, *output_size). `accumulate` adds to what is in `out`, which must then be given. Sums in a fixed order, each
    by one thread. Dtypes, arrays, padding and errors as for im2col.
    """
    steps = dilation, padding, stride
    return _images.call(_col2im, (output_size, kernel_size, *steps, accumulate, algorithm, device), out, cols)


def _col2im(words: tuple[Any, ...], out: Any, cols: Any) -> Any:
    output_size, kernel_size, dilation, padding, stride, accumulate, algorithm, device = words
    source = arrays.anywhere(cols, "cols", *arrays.place(cols, device))
    spatial = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    spatial = numbers(spatial, len(spatial), "output_size")
    if source.ndim not in (2, 3) or not 1 <= len(spatial) <= 3:
        raise InvalidProblem(
            f"cols has shape {source.shape} for output_size={shown(output_size)}: (n, c * taps, windows)"
        )
    if min(spatial) < 0 or prod(spatial) > LARGEST:
        given = shown(output_size)
        raise InvalidProblem(f"output_size={given}: sizes of at least 0 whose product is below 2^63 are allowed")
    single = source.ndim == 2
    batched = source[None] if single else source
    steps = window(spatial, kernel_size, stride, padding, dilation)
    n, rows, _ = batched.shape
    taps = prod(steps["kernel"])
    if rows % taps:
        raise InvalidProblem(
            f"cols has shape {source.shape}: c * {taps} rows are allowed for kernel_size={steps['kernel']}"
        )
    accumulate = flag(accumulate, "accumulate")
    if accumulate and out is None:
        raise InvalidProblem("accumulate=True without out: there is nothing to add to")
    dtype = arrays.dtype_name(source, "cols")
    try:
        problem = _col2im_problem(n=n, c=rows // taps, accumulate=accumulate, dtype=dtype, **steps)
    except InvalidProblem as error:
        raise InvalidProblem(f"output_size={spatial}: {error}") from None
    if batched.shape != problem.columns_shape:
        allowed = f"{problem.columns_shape} is allowed for output_size={spatial}, kernel_size={problem.kernel}, "
        steps_given = f"stride={problem.stride}, padding={problem.padding}, dilation={problem.dilation}"
        raise InvalidProblem(f"cols has shape {source.shape}: {allowed}{steps_given}")
    return _run(problem, batched, single, cols, source, out, algorithm)


# Making a problem takes longer than looking it up.
_im2col_problem = lru_cache(dispatch.CHOICES_KEPT)(Im2colProblem)
_col2im_problem = lru_cache(dispatch.CHOICES_KEPT)(Col2imProblem)


def _run(problem: PatchProblem, batched: Any, single: bool, x: Any, source: Any, out: Any, algorithm: str) -> Any:
    """The result for what the user gave, `x`, which is `source` as an array, and `batched` with a batch axis."""
    target = None if out is None else result(out, problem.y_shape[single:], problem.y_dtype, source)
    y: Any = None if target is None else target[None] if single else target
    # A result that lies as the kernel writes it is written, or added to, where it belongs.
    direct = arrays.takes(y, "nchw", batched)
    if not direct:
        before = y
        y = arrays.empty(problem.y_shape, problem.y_dtype, "nchw", batched)
        if problem.accumulate:
            arrays.assign(y, arrays.beside(before, batched))
    compute(problem, algorithm, arrays.dense(batched, "nchw"), y)
    if target is None:
        return arrays.like(y[0] if single else y, x)
    if not direct:
        arrays.assign(target, y[0] if single else y)
    return out
