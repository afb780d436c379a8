"""Packed tiles: the input of one task of cpu.direct and its kin, as its kernel reads it.

A task computes `rows` x `cols` outputs of `images` images. It packs the padded input it needs, split into stride
phases, so that row p, column q of the output reads tap (r, s) at one constant shift from the flat index p * pitch + q:

    stride 2, columns:  x0 x1 x2 x3 x4 x5  ->  phase 0: x0 x2 x4   phase 1: x1 x3 x5

The tile then runs over the flat index as if the tile were one long row; the few columns between a row's end and the
pitch are computed and thrown away. They are as few as can be: the zeros right of one row are the zeros left of the
next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from tapwise.forks import cached_property
from tapwise.integers import ceil_div
from tapwise.ops.conv.problem import ConvProblem

TILES_KEPT: Final = 256


@dataclass(frozen=True)
class PackedTile:
    """What a task of `rows` x `cols` outputs reads. Lengths are in elements."""

    problem: ConvProblem
    rows: int
    cols: int
    lanes: int

    @cached_property
    def row_phases(self) -> list[int]:
        """Phases of the rows that some tap reads."""
        p = self.problem
        return sorted({r * p.dilation[0] % p.stride[0] for r in range(p.kernel[0])})

    @cached_property
    def col_phases(self) -> list[int]:
        p = self.problem
        return sorted({s * p.dilation[1] % p.stride[1] for s in range(p.kernel[1])})

    @cached_property
    def row_shift(self) -> int:
        """Rows of a packed plane beyond those of the outputs."""
        p = self.problem
        return (p.kernel[0] - 1) * p.dilation[0] // p.stride[0]

    @cached_property
    def col_shift(self) -> int:
        p = self.problem
        return (p.kernel[1] - 1) * p.dilation[1] // p.stride[1]

    @cached_property
    def col_data(self) -> list[tuple[int, int, int]]:
        """For each column phase: packed columns [first, end) hold data, and packed column u is input u * stride +
        start."""
        p = self.problem
        result = []
        for phase in self.col_phases:
            start = phase - p.padding[1][0]
            first = max(0, ceil_div(-start, p.stride[1]))
            end = max(first, ceil_div(p.spatial[1] - start, p.stride[1]))
            result.append((first, end, start))
        return result

    @cached_property
    def pitch(self) -> int:
        """Distance of rows in a packed plane and in the flat index of outputs."""
        if self.cols < self.problem.output[1]:
            return self.cols + self.col_shift
        reach = self.cols + self.col_shift
        # A read past the pitch lands in the zeros at the start of the next row, if there are enough of them.
        return max(self.cols, *(max(min(end, reach), reach - first) for first, end, _ in self.col_data))

    @cached_property
    def flat(self) -> int:
        """Length of the flat index, up to a whole vector."""
        return ceil_div((self.rows - 1) * self.pitch + self.cols, self.lanes) * self.lanes

    @cached_property
    def plane(self) -> int:
        """Length of one packed plane (a channel's phase), with what the last vector reads beyond it.

        An odd number of cache lines, so that the planes of successive channels start in different cache sets.
        """
        length = max(
            (self.rows + self.row_shift) * self.pitch, self.flat + self.row_shift * self.pitch + self.col_shift
        )
        cache_line = 64 // 4
        return (ceil_div(length, cache_line) | 1) * cache_line

    @cached_property
    def planes(self) -> int:
        """Packed planes of one channel."""
        return len(self.row_phases) * len(self.col_phases)

    def fields(self) -> dict[str, int | np.ndarray]:
        """What kernels know of the problem and its packed tile. int64 `columns` holds col_data."""
        p = self.problem
        return {
            "h": p.spatial[0], "w_in": p.spatial[1], "p": p.output[0], "q": p.output[1],
            "stride_h": p.stride[0], "stride_w": p.stride[1], "taps": p.kernel[0] * p.kernel[1],
            "row_phases": len(self.row_phases), "col_phases": len(self.col_phases),
            "pitch": self.pitch, "plane": self.plane, "row_shift": self.row_shift,
            "columns": np.array(self.col_data, np.int64),
            "row_starts": np.array([phase - p.padding[0][0] for phase in self.row_phases], np.int64),
        }  # fmt: skip

    @cached_property
    def row_shifts(self) -> np.ndarray:
        """(R,) int64: as tap_shifts, of rows of taps in planes that hold all column phases."""
        p = self.problem
        shifts = [divmod(r * p.dilation[0], p.stride[0]) for r in range(p.kernel[0])]
        return np.array([self.row_phases.index(phase) * self.plane + shift * self.pitch for shift, phase in shifts])

    @cached_property
    def tap_shifts(self) -> np.ndarray:
        """(R, S) int64: where tap (r, s) reads, from the flat index, within one channel's planes."""
        p = self.problem
        shifts = np.empty(p.kernel, np.int64)
        for r in range(p.kernel[0]):
            shift_h, phase_h = divmod(r * p.dilation[0], p.stride[0])
            for s in range(p.kernel[1]):
                shift_w, phase_w = divmod(s * p.dilation[1], p.stride[1])
                index = self.row_phases.index(phase_h) * len(self.col_phases) + self.col_phases.index(phase_w)
                shifts[r, s] = index * self.plane + shift_h * self.pitch + shift_w
        return shifts


@lru_cache(TILES_KEPT)
def packed_tile(problem: ConvProblem, rows: int, cols: int, lanes: int) -> PackedTile:
    """The same for the same task: many configs differ in other things."""
    return PackedTile(problem, rows, cols, lanes)
