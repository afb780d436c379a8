"""Taps that see padding alone, left out of cpu.direct's products: a task's rows are cut into pieces.

Rows and columns near the border of an image meet padding with some taps of the filter. A piece is a run of pixels (of
one row, or of whole rows) and the rectangle of taps that some of its pixels see inside the image. Long runs fill
register tiles, short ones leave out more taps: the cut with the least cycles is taken.

    3x3, padding 1:     r 1..2            first row
                        r 0..2            rows between, or each row as  s 1..2 | s 0..2 | s 0..1
                        r 0..1            last row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np

from tapwise.cpu.cost import ROW_CALL, Costs
from tapwise.integers import ceil_div
from tapwise.ops.conv.problem import ConvProblem

CUTS_KEPT = 256
# First and past the last tap that is seen.
Range = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """`count` pixels from flat index `at` of the task's pixels, and the rows and columns of taps that they see."""

    at: int
    count: int
    rows: Range
    cols: Range

    def fields(self, taps_w: int) -> tuple[int, int, int, int, int]:
        """As the register tiles take it: at, count, first tap, taps that follow each other, how many times."""
        (top, bottom), (left, right) = self.rows, self.cols
        if (left, right) == (0, taps_w):
            return self.at, self.count, top * taps_w, (bottom - top) * taps_w, 1
        return self.at, self.count, top * taps_w + left, right - left, bottom - top


def seen(problem: ConvProblem, axis: int, first: int, count: int) -> Range:
    """The taps of an axis that one of `count` outputs from `first` on sees inside the image; or a few more."""
    stride, dilation, pad = problem.stride[axis], problem.dilation[axis], problem.padding[axis][0]
    low = max(0, ceil_div(pad - (first + count - 1) * stride, dilation))
    high = min(problem.kernel[axis], (problem.spatial[axis] - 1 + pad - first * stride) // dilation + 1)
    return (low, high) if low < high else (0, 0)


@lru_cache(CUTS_KEPT)
def share_seen(problem: ConvProblem) -> float:
    """Of all products, those that are not with padding."""
    share = 1.0
    for axis, (outputs, taps) in enumerate(zip(problem.output, problem.kernel, strict=True)):
        stride, dilation, pad = problem.stride[axis], problem.dilation[axis], problem.padding[axis][0]
        # Of each tap: the first output whose window has it inside, and the first behind them.
        firsts = (max(0, ceil_div(pad - tap * dilation, stride)) for tap in range(taps))
        ends = (min(outputs, (problem.spatial[axis] - 1 + pad - tap * dilation) // stride + 1) for tap in range(taps))
        share *= sum(max(0, end - first) for first, end in zip(firsts, ends, strict=True)) / (outputs * taps)
    return share


@dataclass(frozen=True)
class Pieces:
    """The pieces of each task, tasks of one block of columns beside each other; the cycles of a task in the `mean` and
    of the `longest`, for one channel of one block of gemm_k and one tile's width of filters."""

    tasks: tuple[tuple[Piece, ...], ...]
    mean: float
    longest: float

    def cycles(self, drawn: int) -> float:
        """Of a task of a worker that draws so many: one of them is the longest."""
        return self.mean + (self.longest - self.mean) / drawn

    def table(self, taps_w: int) -> np.ndarray:
        """(tasks, 1 + 5 * most pieces) int64: how many, and their fields."""
        most = max(map(len, self.tasks))
        result = np.zeros((len(self.tasks), 1 + 5 * most), np.int64)
        for row, pieces in zip(result, self.tasks, strict=True):
            row[0] = len(pieces)
            row[1 : 1 + 5 * len(pieces)] = [value for piece in pieces for value in piece.fields(taps_w)]
        return result


# The cycles of a run of pixels with so many taps.
Price = Callable[[int, int], float]


@lru_cache(CUTS_KEPT)
def cut(
    problem: ConvProblem, rows: int, cols: int, pitch: int, tile: tuple[int, int], channels: int, costs: Costs
) -> Pieces:
    """Tasks of rows x cols outputs, whose rows are `pitch` apart in the flat index, for register tiles of m pixels by n
    vectors over `channels` channels."""
    m, n = tile

    def price(pixels: int, taps: int) -> float:
        if not taps:
            return ROW_CALL
        whole, rest = divmod(pixels, m)
        cycles = whole * costs.tile(m, n, taps * channels) + ROW_CALL
        return cycles + (costs.tile(rest, n, taps * channels) if rest else 0.0)

    p, q = problem.output
    found, each = [], []
    for q0 in range(0, q, cols):
        width = min(cols, q - q0)
        for p0 in range(0, p, rows):
            cycles, pieces = _task(problem, range(p0, min(p, p0 + rows)), q0, width, pitch, price)
            found.append(pieces)
            each.append(cycles / channels)
    return Pieces(tuple(found), sum(each) / len(each), max(each))


def _task(
    problem: ConvProblem, rows: range, q0: int, width: int, pitch: int, price: Price
) -> tuple[float, tuple[Piece, ...]]:
    """Rows that see the same taps: together, or each cut by columns; or together with those of other taps."""
    runs = _runs(problem, 0, rows.start, len(rows))
    across = seen(problem, 1, q0, width)
    by_columns = _runs(problem, 1, q0, width)

    def together(i: int, j: int) -> tuple[float, list[Piece]]:
        first, last = runs[i], runs[j - 1]
        taps = _union(runs[i:j])
        count = (last[0] + last[1] - first[0] - 1) * pitch + width
        piece = Piece((first[0] - rows.start) * pitch, count, taps, across)
        best = price(count, (taps[1] - taps[0]) * (across[1] - across[0])), [piece]
        if j == i + 1:
            high = taps[1] - taps[0]

            def columns(a: int, b: int) -> tuple[float, list[Piece]]:
                left, right = by_columns[a], by_columns[b - 1]
                seen_ = _union(by_columns[a:b])
                pixels = right[0] + right[1] - left[0]
                here = [
                    Piece((row - rows.start) * pitch + left[0] - q0, pixels, taps, seen_)
                    for row in range(first[0], first[0] + first[1])
                ]
                return first[1] * price(pixels, high * (seen_[1] - seen_[0])), here

            best = min(best, _cheapest(len(by_columns), columns), key=lambda one: one[0])
        return best

    cycles, pieces = _cheapest(len(runs), together)
    return cycles, tuple(pieces)


def _runs(problem: ConvProblem, axis: int, first: int, count: int) -> list[tuple[int, int, Range]]:
    """(first, count, taps) of outputs beside each other that see the same taps."""
    result = []
    for taps, group in groupby(range(first, first + count), lambda one: seen(problem, axis, one, 1)):
        members = list(group)
        result.append((members[0], len(members), taps))
    return result


def _union(runs: list[tuple[int, int, Range]]) -> Range:
    """The taps that any run sees."""
    ranges = [taps for _, _, taps in runs if taps[0] < taps[1]]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else (0, 0)


def _cheapest(count: int, one: Callable[[int, int], tuple[float, list[Piece]]]) -> tuple[float, list[Piece]]:
    """The cheapest way to cut [0, count) into intervals, each of which `one` prices."""
    best: list[tuple[float, list[Piece]]] = [(0.0, [])]
    for end in range(1, count + 1):
        ways = []
        for start in range(end):
            cycles, pieces = one(start, end)
            ways.append((best[start][0] + cycles, best[start][1] + pieces))
        best.append(min(ways, key=lambda way: way[0]))
    return best[count]
