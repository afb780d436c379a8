"""What a task of cpu.tiles holds: the arithmetic dtype, the tile's rows in scratch, and what lies behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu.simd import BYTES
from tapwise.forks import cached_property
from tapwise.integers import ceil_div
from tapwise.ops.filter.cpu.kernel import ROWS
from tapwise.ops.filter.problem import DTYPES, FilterProblem

# Elements by which a vector that begins in a row may end behind it.
SLACK: Final = 64
LINE_BYTES: Final = 64


@dataclass(frozen=True)
class Config(BaseConfig):
    """A task has `band` rows of `cols` elements."""

    band: int
    cols: int


def arithmetic(problem: FilterProblem) -> str:
    """The dtype of the sums; for the largest and the smallest the picture's own, if it holds `cval`."""
    if problem.op in ("max", "min") and problem.dtype != "f16" and problem.dtype == problem.to:
        kind = DTYPES[problem.dtype]
        if kind.kind == "f":
            return problem.dtype
        info = np.iinfo(kind)
        if problem.cval.is_integer() and info.min <= int(problem.cval) <= info.max:
            return problem.dtype
    return problem.accumulator


def halo(problem: FilterProblem) -> int:
    """Elements of a row that a window sees beside its own."""
    return (problem.size[2] - 1) * problem.c


def pitch_of(problem: FilterProblem, cols: int) -> int:
    """Elements of a tile's row: whole cache lines, and an odd number of them, so that columns spread over sets."""
    line = LINE_BYTES // BYTES[arithmetic(problem)]
    return (ceil_div(cols + halo(problem) + line, line) | 1) * line


@dataclass(frozen=True)
class Layout:
    """A worker's scratch, in elements: the tile, ROWS rows of column sums, as many rows of sums of groups."""

    problem: FilterProblem
    config: Config

    @cached_property
    def pitch(self) -> int:
        return pitch_of(self.problem, self.config.cols)

    @property
    def tile_rows(self) -> int:
        """Rows of the tile in each plane that a window sees."""
        return self.config.band + self.problem.size[1] - 1

    @property
    def column_sums(self) -> int:
        """Where the column sums begin."""
        return self.pitch * self.tile_rows * self.problem.size[0] + SLACK

    @property
    def group_sums(self) -> int:
        """How far the sums of groups lie behind the column sums."""
        return ROWS * self.pitch + SLACK

    @property
    def elements(self) -> int:
        return self.column_sums + 2 * self.group_sums

    @property
    def scratch_bytes(self) -> int:
        return self.elements * BYTES[arithmetic(self.problem)]

    @property
    def bands(self) -> int:
        return ceil_div(self.problem.spatial[1], self.config.band)

    @property
    def strips(self) -> int:
        return ceil_div(self.problem.spatial[2] * self.problem.c, self.config.cols)

    @property
    def tasks(self) -> int:
        return self.problem.spatial[0] * self.bands * self.strips
