"""What algorithms share that take a picture strip by strip (rows.cuh): how they see it, blocks of a strip, the words of
a launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from tapwise.cuda.types import INDEX_LIMIT
from tapwise.integers import ceil_div
from tapwise.ops.filter.edges import MODES
from tapwise.ops.filter.problem import FilterProblem

# Rows of a block's part of a strip, beyond those that it sees besides; of the last blocks'.
SEGMENT, LAST_SEGMENT = 64, 32
MOST_CHANNELS: Final = 4
# Of a grid's second and third axes.
MOST_BLOCKS: Final = (1 << 16) - 1


class View(NamedTuple):
    """A picture as the kernel sees it: windows of (r, s) taps over (height, width) pixels of c channels."""

    depth: int
    height: int
    width: int
    c: int
    taps: tuple[int, int]
    before: tuple[int, int]
    modes: tuple[str, str]


@lru_cache(256)
def view_of(problem: FilterProblem) -> View:
    """A window of one column takes all channels as pixels; one of one row, of many channels, is a column."""
    (depth, height, width), (_, r, s), (_, above, left) = problem.spatial, problem.size, problem.before
    c, (_, mode_h, mode_w) = problem.c, problem.modes
    if s == 1 and c > 1:
        return View(depth, height, width * c, 1, (r, 1), (above, 0), (mode_h, mode_w))
    if r == 1 and c > MOST_CHANNELS and problem.op != "separable":
        return View(depth * height, width, c, 1, (s, 1), (left, 0), (mode_w, mode_w))
    return View(depth, height, width, c, (r, s), (above, left), (mode_h, mode_w))


def refusal(problem: FilterProblem, fewest_rows: int) -> str | None:
    """Why a problem has no strips that blocks of a grid take, or None. `fewest_rows`: of the steps of one with many."""
    view = view_of(problem)
    if not problem.single:
        return "adds up in float32, and takes what is exact enough there"
    if problem.size[0] > 1:
        return "takes windows over two axes"
    if view.c > MOST_CHANNELS:
        return f"takes up to {MOST_CHANNELS} channels"
    ends = (size + taps for size, taps in zip((view.height, view.width), view.taps, strict=True))
    if 2 * max(ends) * view.c >= INDEX_LIMIT:
        return "takes axes of fewer than 2^30 elements"
    if max(view.height // fewest_rows, view.depth) >= MOST_BLOCKS:
        return "takes fewer than 2^20 rows, and pictures of fewer than 2^16 on top of each other"
    return None


def no_byte(problem: FilterProblem) -> str | None:
    """Why what lies beyond an edge of bytes is none, or None."""
    info = np.iinfo(problem.x_dtype)
    shown = "constant" in problem.modes
    if shown and not (info.min <= problem.cval <= info.max and float(problem.cval).is_integer()):
        return "takes a cval that is a byte, too"
    return None


class Segments(NamedTuple):
    """Steps of a block down its strip, and how many such blocks a strip has; of those behind them; blocks in all."""

    steps: int
    number: int
    last_steps: int
    blocks: int


def segments_of(view: View, tiles: tuple[int, int], rows: int, places: int) -> Segments:
    """Of about SEGMENT rows beyond what a block sees besides its own; the last, about as many as run at once, of few
    rows, so that all multiprocessors end together. `tiles`: of `rows` rows, down and across; `places`: blocks that run
    at once."""
    down, across = tiles
    strips = max(1, across * view.depth)
    steps = max(1, (SEGMENT + view.taps[0] - 1) // rows)
    few = min(steps, ceil_div(LAST_SEGMENT, rows)) if strips * down > places else 1
    number = max(0, down - few * places // strips) // steps
    return Segments(steps, number, few, number + ceil_div(down - number * steps, few))


def fields_of(view: View, segments: Segments) -> dict[str, int]:
    """The numbers of `FilterTiles`."""
    befores = view.before[0], view.before[1] * view.c
    fields = {
        "height": view.height, "width": view.width * view.c, "steps": segments.steps, "segments": segments.number,
        "last_steps": segments.last_steps,
    }  # fmt: skip
    for axis, before, mode in zip("hw", befores, view.modes, strict=True):
        fields |= {f"before_{axis}": before, f"mode_{axis}": MODES.index(mode)}
    return fields
