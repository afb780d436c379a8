"""What cuda.few_channels has in common for both orders of x: its configs, and where windows begin in rows of x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.ops.conv.problem import ConvProblem

# Of gemm_k that half of the matrix instruction's operand has.
PIECE_BYTES: Final = 16
# The fewest outputs of a tile, the most, and those of its narrowest rows.
TILES: Final = 64, 2048, 32


@dataclass(frozen=True)
class Config(BaseConfig):
    """A tile of down x across outputs; a warp takes rows x 16 of its pixels with so many filters at a time. Of filters
    (in NCHW, of pixels) `order` are permuted together; `min_blocks_per_sm` bounds the registers."""

    down: int
    across: int
    rows: int
    filters: int
    order: int
    min_blocks_per_sm: int


def pixel_elements(problem: ConvProblem) -> int:
    """Elements of x from a pixel to its neighbour in a row."""
    return problem.c if problem.layout == "nhwc" else 1


def parity_of(problem: ConvProblem) -> str:
    """Where windows begin in words of shared memory: at EVEN elements, at ODD ones, or BOTH alternately."""
    if problem.itemsize == 4:
        return "EVEN"
    each = pixel_elements(problem)
    if problem.stride[1] * each % 2:
        return "BOTH"
    return "ODD" if problem.padding[1][0] * each % 2 else "EVEN"


def kinds_of(problem: ConvProblem) -> int:
    """Kinds of windows, each with filters of its own."""
    return 2 if parity_of(problem) == "BOTH" else 1


def copy_bytes(problem: ConvProblem) -> int:
    """Bytes of a piece that is copied: as many as rows of x are a multiple of; 0 where that is no word."""
    row_bytes = problem.spatial[1] * pixel_elements(problem) * problem.itemsize
    return next((count for count in (16, 8, 4) if row_bytes % count == 0), 0)


def lead_bytes(problem: ConvProblem) -> int:
    """How far a row begins before the first window at most: less than a piece."""
    return (copy_bytes(problem) or 4) - problem.itemsize
