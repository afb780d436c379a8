"""How planes of x in NCHW come to a halo tile (transposed_halo.cuh): in strips that TMA copies as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Final

from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda.implicit_gemm.rectangle import residues_of
from tapwise.ops.conv.problem import ConvProblem

# Pixels of a piece of 16 bytes, at whose multiples copies begin.
PIECE: Final = 8
# Pixels of a row of a copy at most, in an odd number of pieces.
MOST_PIXELS: Final = 31 * PIECE
# Bytes of a strip, of which a warp transposes one at a time; a row of an image may be more.
STRIP_BYTES: Final = 9216
# Rows that TMA steps at once.
MOST_STEP: Final = 8
# Warps that transpose.
WARPS: Final = 3


@dataclass(frozen=True)
class Strips:
    """`count` of a halo of `high` rows: each `rows` of them (or, `flat`, one run of whole rows) of `pieces` pieces,
    which lie `pitch` pixels apart. `classes`: copies of a strip, each of the planes that begin with one remainder;
    every `grain`-th row of x is one of a rectangle's."""

    flat: bool
    classes: int
    count: int
    high: int
    rows: int
    pitch: int
    pieces: int
    grain: int = 1

    @property
    def pixels(self) -> int:
        """That come with a halo."""
        return self.count * self.rows * self.pitch

    @property
    def table_words(self) -> int:
        """Of the table of their places: of a run's pixels, or of a rectangle's by rows, and seven before the first."""
        return self.count * self.pitch + 8 if self.flat else self.high * (self.pitch + 8)


@lru_cache(4096)
def strips_of(problem: ConvProblem, across: int, down: int, channels: int) -> Strips | None:
    """For the halo of `down` rows of `across` outputs, `channels` a chunk.

    None where TMA cannot bring it: rows are no whole pieces and a tile has a part of them; or planes begin with several
    remainders and are of too few channels, or of chunks that are not full. With strides rectangles have the rows that
    taps meet, runs have all.
    """
    (height, width), (p, q), (stride_h, stride_w) = problem.spatial, problem.output, problem.stride
    (above, _), (left, _) = problem.padding
    residues = residues_of(problem)
    if problem.layout != "nchw" or problem.itemsize != 2 or residues is None:
        return None
    grain = residues[0].grain
    high = (down - 1) * stride_h + problem.reach[0]
    if across < q or (grain > 1 and width % PIECE == 0):
        high = (high - 1) // grain + 1
        shift = max((first * stride_w - left) % PIECE for first in range(0, q, across))
        pieces = ceil_div(shift + (across - 1) * stride_w + problem.reach[1], PIECE)
        pitch = (pieces | 1) * PIECE
        if width % PIECE or pitch > MOST_PIXELS or grain > MOST_STEP:
            return None
        rows, count = _evenly(high, STRIP_BYTES // (pitch * problem.itemsize * channels))
        return Strips(False, 1, count, high, rows, pitch, pieces, grain)
    plane = height * width
    classes = plane_classes(problem)
    if classes > 1 and (problem.group_c % channels or channels // classes < 8):
        return None
    firsts = [(first * stride_h - above) * width for first in range(0, p, down)]
    shift = max((number * plane + first) % PIECE for number in range(classes) for first in firsts)
    most = min(STRIP_BYTES // (PIECE * problem.itemsize * channels), MOST_PIXELS // PIECE)
    pieces, count = _evenly(ceil_div(shift + high * width, PIECE), most)
    return Strips(True, classes, count, high, 1, pieces * PIECE, pieces)


def plane_classes(problem: ConvProblem) -> int:
    """Remainders, by pieces, with which planes begin."""
    return PIECE // gcd(prod(problem.spatial), PIECE)


def _evenly(total: int, most: int) -> tuple[int, int]:
    """(an odd size of at most `most`, or 1; how many make up `total`): as many for each warp where that may be."""
    largest = max(1, most - (most % 2 == 0))
    count = round_up(ceil_div(total, largest), WARPS)
    each = min(ceil_div(total, count) | 1, largest)
    return each, ceil_div(total, each)
