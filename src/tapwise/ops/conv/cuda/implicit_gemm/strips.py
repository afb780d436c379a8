"""How planes of x in NCHW come to a halo tile (transposed_halo.cuh): in strips that TMA copies as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Final

from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.problem import ConvProblem

# Pixels of a piece of 16 bytes, at whose multiples copies begin.
PIECE: Final = 8
# Pixels of a row of a copy at most, in an odd number of pieces.
MOST_PIXELS: Final = 31 * PIECE
# Bytes of a strip, of which a warp transposes one at a time; a row of an image may be more.
STRIP_BYTES: Final = 9216
# Warps that transpose.
WARPS: Final = 3


@dataclass(frozen=True)
class Strips:
    """`count` of a halo: each `rows` rows of a rectangle (or, `flat`, one run of whole rows) of `pieces` pieces, whose
    rows lie `pitch` pixels apart. `classes`: copies of a strip, each of the planes that begin with one remainder."""

    flat: bool
    classes: int
    count: int
    rows: int
    pitch: int
    pieces: int

    @property
    def pixels(self) -> int:
        """That come with a halo."""
        return self.count * self.rows * self.pitch


@lru_cache(4096)
def strips_of(problem: ConvProblem, across: int, down: int, wide: int, high: int, channels: int) -> Strips | None:
    """For a halo of `high` rows of `wide` pixels, of `down` rows of `across` outputs, `channels` a chunk.

    None where TMA cannot bring it: rows are no whole pieces and a tile has a part of them; or planes begin with several
    remainders and are of too few channels, or of chunks that are not full.
    """
    (height, width), (p, q) = problem.spatial, problem.output
    if problem.layout != "nchw" or problem.itemsize != 2:
        return None
    if across < q:
        shift = max((first - problem.padding[1][0]) % PIECE for first in range(0, q, across))
        pieces = ceil_div(shift + wide, PIECE)
        pitch = (pieces | 1) * PIECE
        if width % PIECE or pitch > MOST_PIXELS:
            return None
        rows, count = _evenly(high, STRIP_BYTES // (pitch * problem.itemsize * channels))
        return Strips(False, 1, count, rows, pitch, pieces)
    plane = height * width
    classes = plane_classes(problem)
    if classes > 1 and (problem.group_c % channels or channels // classes < 8):
        return None
    firsts = [first * width for first in range(-problem.padding[0][0], p - problem.padding[0][0], down)]
    shift = max((number * plane + first) % PIECE for number in range(classes) for first in firsts)
    most = min(STRIP_BYTES // (PIECE * problem.itemsize * channels), MOST_PIXELS // PIECE)
    pieces, count = _evenly(ceil_div(shift + high * width, PIECE), most)
    return Strips(True, classes, count, 1, pieces * PIECE, pieces)


def plane_classes(problem: ConvProblem) -> int:
    """Remainders, by pieces, with which planes begin."""
    return PIECE // gcd(prod(problem.spatial), PIECE)


def _evenly(total: int, most: int) -> tuple[int, int]:
    """(an odd size of at most `most`, or 1; how many make up `total`): as many for each warp where that may be."""
    largest = max(1, most - (most % 2 == 0))
    count = round_up(ceil_div(total, largest), WARPS)
    each = min(ceil_div(total, count) | 1, largest)
    return each, ceil_div(total, each)
