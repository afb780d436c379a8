"""im2col and col2im as a user calls them."""

from __future__ import annotations

from math import prod
from typing import Any

from tapwise import arrays
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
    of one. float32, float64 or float16; arrays and `device` as for conv2d.
    `padding` in conv2d's forms. `out` is filled and returned. Raises InvalidProblem for a bad argument.
    """
    source = arrays.anywhere(x, "x", *arrays.place(x, device))
    axes = len(kernel_size) if isinstance(kernel_size, (tuple, list)) else max(2, source.ndim - 2)
    single = source.ndim == axes + 1
    if not 1 <= axes <= 3 or (not single and source.ndim != axes + 2):
        raise InvalidProblem(f"x has shape {source.shape}: {axes + 2} axes are allowed for kernel_size={kernel_size!r}")
    batched = source[None] if single else source
    n, c, *spatial = batched.shape
    steps = window(tuple(spatial), kernel_size, stride, padding, dilation)
    problem = Im2colProblem(n=n, c=c, dtype=arrays.dtype_name(source, "x"), **steps)
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
    source = arrays.anywhere(cols, "cols", *arrays.place(cols, device))
    spatial = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    spatial = numbers(spatial, len(spatial), "output_size")
    if source.ndim not in (2, 3) or not 1 <= len(spatial) <= 3:
        raise InvalidProblem(f"cols has shape {source.shape} for output_size={output_size!r}: (n, c * taps, windows)")
    single = source.ndim == 2
    batched = source[None] if single else source
    steps = window(spatial, kernel_size, stride, padding, dilation)
    n, rows, _ = batched.shape
    taps = prod(steps["kernel"])
    if rows % taps:
        raise InvalidProblem(
            f"cols has shape {source.shape}: c * {taps} rows are allowed for kernel_size={steps['kernel']}"
        )
    if accumulate and out is None:
        raise InvalidProblem("accumulate=True without out: there is nothing to add to")
    dtype = arrays.dtype_name(source, "cols")
    problem = Col2imProblem(n=n, c=rows // taps, accumulate=bool(accumulate), dtype=dtype, **steps)
    if batched.shape != problem.columns_shape:
        raise InvalidProblem(
            f"cols has shape {source.shape}: output_size={output_size!r} with these windows has {problem.columns_shape}"
        )
    return _run(problem, batched, single, cols, source, out, algorithm)


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
