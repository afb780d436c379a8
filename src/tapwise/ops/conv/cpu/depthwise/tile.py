"""The tiles of cpu.depthwise where x is read in place: which rows and columns one has, and what they meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from tapwise.integers import ceil_div

# Rows of an odd column of taps that are multiplied one by one (pairs.py).
SINGLE_ROWS: Final = 3


def vectors_of(columns: int, lanes: int) -> tuple[int, ...]:
    """Lanes of the vectors that cover so many columns."""
    rest, narrow = columns % lanes, lanes
    while narrow // 2 >= max(rest, min(4, lanes)):
        narrow //= 2
    return (lanes,) * (columns // lanes) + ((narrow,) if rest else ())


@dataclass(frozen=True)
class Rows:
    """Rows of a plane: `p` of outputs, `rows` of them a tile, of `h` of x; the filter's and what they are moved by."""

    h: int
    p: int
    rows: int
    pad: int
    taps: int
    stride: int
    dilation: int

    @property
    def reach(self) -> int:
        """Rows of x from the first output's first tap to the last one's last."""
        return (self.rows - 1) * self.stride + (self.taps - 1) * self.dilation + 1

    def inside(self, first: int) -> tuple[int, int]:
        """[low, high): the rows of x, from that of the first output's first tap, that lie inside the image."""
        top = first * self.stride - self.pad
        low = min(max(0, -top), self.reach)
        return low, max(low, min(self.reach, self.h - top))

    def runs(self) -> Iterator[tuple[tuple[int, int], int, int]]:
        """(inside, first, count): tiles that follow each other, alike. The last one overlaps the one before."""
        starts = [*range(0, self.p - self.rows, self.rows), self.p - self.rows]
        for inside, run in groupby(starts[:-1], self.inside):
            alike = list(run)
            yield inside, alike[0], len(alike)
        yield self.inside(starts[-1]), starts[-1], 1

    def users(self, row: int, taps: range) -> list[tuple[int, int]]:
        """(tap of the filter, output row of the tile) that row `row` meets."""
        pairs = [(r, *divmod(row - r * self.dilation, self.stride)) for r in taps]
        return [(r, output) for r, output, rest in pairs if rest == 0 and 0 <= output < self.rows]


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for.

    `vectors`: their lanes; `exact`: they do not pass the end of a row. `planes` of neighbouring channels go together,
    at most `weights` of a column of each stay in registers at once. Vectors of x come from `ways` loads, as many as the
    stride, and serve `columns` columns of taps that are neighbours; `odd`: an only one is left. `pairs`: of bfloat16,
    multiplied in pairs (pairs.py): two columns are one, and one load a vector. `once`: a row of x is loaded once, for
    all of so many columns of taps, `apart` from each other, and moved along in registers; 0 if it is not. `halves`:
    what is left of a row behind whole vectors, up to half of one, goes together with that of the next channel; `exact`
    is said of these halves then.
    """

    place: Rows
    vectors: tuple[int, ...]
    exact: bool
    planes: int
    weights: int
    ways: int
    columns: int
    odd: bool
    pairs: bool = False
    once: int = 0
    apart: int = 1
    halves: bool = False

    @property
    def loads(self) -> int:
        """Of x, for each vector and a column of taps, or neighbouring ones."""
        return 1 if self.pairs else self.ways

    @property
    def line(self) -> int:
        """Numbers in `table` of a column of taps, or of all: where it reads, and a mask for each load."""
        return 1 + (self.loads_once if self.once else self.loads * len(self.vectors))

    @property
    def loads_once(self) -> int:
        """Vectors of x, as long as the first one of y, that all columns of taps meet."""
        return ceil_div((sum(self.vectors) - 1) * self.ways + (self.once - 1) * self.apart + 1, self.vectors[0])

    @property
    def rows_paired(self) -> bool:
        """Whether pairs of an odd column are of two rows; of few rows a pair takes as long as the product it saves."""
        return self.pairs and self.place.taps > SINGLE_ROWS

    @property
    def odd_weights(self) -> int:
        """Of an odd column of taps, pairs counted once."""
        return ceil_div(self.place.taps, 2) if self.rows_paired else self.place.taps

    def groups(self, count: int) -> list[range]:
        """The weights of a column of taps, as many as `count`, that stay in registers together: as even as can be."""
        size = ceil_div(count, ceil_div(count, self.weights))
        return [range(at, min(at + size, count)) for at in range(0, count, size)]
