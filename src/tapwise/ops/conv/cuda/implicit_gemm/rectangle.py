"""Halo tiles: rectangles of an image with what their windows reach, and the residues of strides that they are sorted
by."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tapwise.integers import round_up
from tapwise.ops.conv.problem import ConvProblem


@dataclass(frozen=True)
class Residues:
    """Pixels along an axis that taps meet, sorted by what the stride leaves of them: `count` residues, multiples of
    `grain`."""

    count: int
    grain: int

    @classmethod
    def of(cls, taps: int, stride: int, dilation: int) -> Residues | None:
        """None where they are no such multiples, from 0 on."""
        met = {tap * dilation % stride for tap in range(taps)}
        grain = gcd(dilation, stride) if taps > 1 else stride
        return cls(len(met), grain) if met == {grain * number for number in range(len(met))} else None


def residues_of(problem: ConvProblem) -> tuple[Residues, Residues] | None:
    """Of rows and of columns."""
    rows, columns = (Residues.of(*one) for one in zip(problem.kernel, problem.stride, problem.dilation, strict=True))
    return (rows, columns) if rows and columns else None


def halo_beside(problem: ConvProblem) -> tuple[int, int]:
    """Rows and columns of a halo tile that it has more of than outputs, of each residue of the strides."""
    down, across = ((reach - 1) // stride for reach, stride in zip(problem.reach, problem.stride, strict=True))
    return down, across


def row_vector(problem: ConvProblem, across: int = 0) -> int:
    """Elements at whose multiples rows of y in NCHW begin and end, 16 bytes at most, and so those of halo tiles
    `across` outputs wide: threads write that many at once. 1 where there are none, and in NHWC."""
    counts = (count // problem.itemsize for count in (16, 8, 4))
    fitting = (count for count in counts if count > 1 and gcd(problem.output[1], across) % count == 0)
    return next(fitting, 1) if problem.layout == "nchw" else 1


@dataclass(frozen=True)
class Rectangle:
    """A halo tile: `down` outputs, in shared memory `high` rows of `wide` pixels, of each residue of the strides, which
    lie `apart` pixels; and the pixels `behind` them that operands shifted by the last tap read."""

    down: int
    wide: int
    high: int
    residues: int
    apart: int
    behind: int

    @classmethod
    def of(cls, problem: ConvProblem, across: int, pixels: int) -> Rectangle:
        """Of a tile of so many pixels, `across` outputs wide."""
        more_h, more_w = halo_beside(problem)
        wide = round_up(across + more_w, row_vector(problem, across))
        down = pixels // wide
        high, residues = down + more_h, residues_of(problem)
        assert residues is not None
        rows, columns = residues
        apart = high * wide
        if columns.count > 1:
            # Pixels beside each other, of several residues, lie in different groups of banks.
            apart += (8 // problem.stride[1] - apart) % 8
        return cls(down, wide, high, rows.count * columns.count, apart, round_up(more_w + pixels - down * wide, 8))
