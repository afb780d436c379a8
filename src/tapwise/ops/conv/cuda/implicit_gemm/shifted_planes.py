"""How planes of x in NCHW that begin within pieces of 16 bytes come to a tile (shifted_planes.cuh): early, by TMA, and
warps shift them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

from tapwise.integers import round_up
from tapwise.ops.conv.cuda.implicit_gemm.strips import PIECE, plane_classes
from tapwise.ops.conv.problem import ConvProblem

# Elements along an axis of a copy's box, and pixels of a tile with those that come early.
MOST_BOX: Final = 256
MOST_PIXELS: Final = 30 * PIECE
# Chunks that a team has in shared memory: one is shifted while the other comes. Bytes of one that a warp shifts
# alone.
BUFFERS, ONE_WARP_BYTES = 2, 10 << 10
# Warps that shift.
WARPS: Final = 4


@dataclass(frozen=True)
class ShiftedPlanes:
    """`classes`: channels whose planes TMA sees as one; `whole`: a copy brings all of these, in elements of eight
    bytes, else a tile's pixels of one. Bytes of a channel's row of such pixels: a piece more than a tile has, an odd
    count of them; and of a chunk."""

    classes: int
    whole: bool
    row_bytes: int
    chunk_bytes: int

    @property
    def warps(self) -> int:
        """Of a team that shifts a chunk; teams take turns."""
        return 1 if self.chunk_bytes <= ONE_WARP_BYTES else 2

    @property
    def teams(self) -> int:
        return WARPS // self.warps

    @property
    def shared_bytes(self) -> int:
        """Buffers and their barriers."""
        return BUFFERS * self.teams * (self.chunk_bytes + 8)


@lru_cache(4096)
def shifted_planes_of(problem: ConvProblem, pixels: int, channels: int) -> ShiftedPlanes | None:
    """For a tile of so many pixels and chunks of `channels`. None where planes are whole pieces."""
    classes, plane = plane_classes(problem), prod(problem.spatial)
    if classes == 1:
        return None
    row = (pixels // PIECE + 1 | 1) * 16
    if plane <= pixels and plane * classes // 4 <= MOST_BOX:
        return ShiftedPlanes(classes, True, row, channels * pixels * 2 + 128)
    return ShiftedPlanes(classes, False, row, classes * round_up(channels // classes * row, 128))
