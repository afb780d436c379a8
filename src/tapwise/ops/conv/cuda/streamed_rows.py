"""What the kernels share that stream rows of x through shared memory, channels last (streamed_loads.cuh)."""

from __future__ import annotations

from math import prod

from tapwise.cuda.jit.compile import Source
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.residue_classes import phases, steps
from tapwise.ops.conv.cuda.window import OutputStrides
from tapwise.ops.conv.problem import ConvProblem

# Of an axis, and elements of an image: places of 32 bits, outside the image too.
MOST_SIZE, MOST_ELEMENTS = 1 << 20, 1 << 29


def is_small(problem: ConvProblem) -> bool:
    """Sizes under 2^20, images of x and y, and filters, of fewer than 2^29 elements."""
    sides = (side for pair in problem.padding for side in pair)
    sizes = (*problem.spatial, *problem.output, *problem.reach, *problem.stride, *problem.dilation, *sides)
    return (
        max(sizes) < MOST_SIZE
        and max(prod(problem.spatial) * problem.c, prod(problem.output) * problem.k) < MOST_ELEMENTS
        and prod(problem.w_shape) < MOST_ELEMENTS
    )


def period(problem: ConvProblem) -> int:
    """Rows of x in a stage."""
    stride_h = steps(problem)[0]
    return ceil_div(problem.kernel[0], stride_h) * stride_h


def fields(
    problem: ConvProblem, source: Source, rows: int, parts: tuple[int, int, int], strides: OutputStrides | None = None
) -> dict[str, int]:
    """The struct's words but for the map, of blocks of so many rows."""
    (height, width), c, y = problem.spatial, problem.c, strides or OutputStrides.dense(problem)
    found = window.window_fields(problem, source)
    found |= dict(zip(("phases_h", "phases_w"), phases(problem), strict=True))
    found |= {"rows": rows} | dict(zip(("pieces", "strips_row", "channel_blocks"), parts, strict=True))
    found |= {"x_image": height * width * c, "x_row": width * c}
    return found | {"y_image": y.image, "y_channel": 1, "y_row": y.row, "y_column": y.column}
