"""A config of cuda.implicit_gemm of wgrad, and what its tiles are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tapwise.algorithm import Config as BaseConfig

# Filters of a block, and channels at most: a row of 128 bytes. Pixels of a step.
BLOCK: Final = 64
STEP_PIXELS: Final = 64
# Pieces of channels that TMA takes: 16 bytes.
PIECE: Final = 8
# Of the halo kernel: rows of taps that a tile has at most, all of a filter, and then taps of a row; else, of one row of
# taps, filters, and columns at most.
MOST_TAPS: Final = (3, 3)
ROW_FILTERS: Final = (64, 128, 192)
MOST_COLUMNS: Final = 256
# (filters, columns, warpgroups, CTAs a multiprocessor).
TILES: Final = (
    (128, 256, 2, 1), (256, 128, 2, 1), (128, 192, 2, 1), (192, 192, 3, 1), (128, 128, 2, 1),
    (128, 128, 2, 2), (64, 256, 1, 1), (64, 192, 1, 2), (64, 128, 1, 2), (128, 64, 2, 2),
    (64, 64, 1, 3), (64, 64, 1, 1), (128, 64, 2, 1), (64, 128, 1, 1), (64, 192, 1, 1),
)  # fmt: skip
# The same for blocks of fewer channels, of which as many hold all of a set.
FEW: Final = 32
FEW_TILES: Final = (
    (64, 288, 3, 1), (64, 256, 1, 1), (64, 192, 1, 2), (64, 96, 1, 3), (64, 64, 1, 3), (64, 32, 1, 3),
    (128, 128, 2, 2), (128, 96, 2, 2),
)  # fmt: skip
MOST_STAGES, MOST_HALO_STAGES = 7, 6


@dataclass(frozen=True)
class Config(BaseConfig):
    """A CTA tile of `tile_filters` x `tile_columns` (channels of taps) by so many `warpgroups`; `stages` of 64 pixels;
    `split_k` parts of the pixels; `min_blocks_per_sm`: CTAs that a multiprocessor has room for. `halo`: columns are one
    block of channels of a row of taps, or of all, copied once. `groups_per_tile`: groups whose filters and channels lie
    side by side in tiles, of which each filter's own group is kept. `unfold`: last axes whose taps are packed as
    channels. `block_channels`: of a block, 64 or 32. `cluster_k`: CTAs whose parts of a tile are added in shared
    memory; `cluster_m`, `cluster_n`: of their cluster, tiles along the filters and along the columns that share what
    is copied."""

    halo: bool
    tile_filters: int
    tile_columns: int
    warpgroups: int
    stages: int
    min_blocks_per_sm: int
    split_k: int
    groups_per_tile: int = 1
    unfold: int = 0
    block_channels: int = BLOCK
    cluster_k: int = 1
    cluster_m: int = 1
    cluster_n: int = 1

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return self.cluster_k * self.cluster_m * self.cluster_n

    @property
    def parts(self) -> int:
        """Those that go to the workspace, where there are several."""
        return self.split_k // self.cluster_k

    @property
    def threads(self) -> int:
        """Warpgroups and a warp that copies."""
        return 128 * self.warpgroups + 32

    @property
    def persistent(self) -> bool:
        """Whether a CTA takes one tile after the other, the next one's copies under way while it stores: sums of
        clusters take the stages' memory, and of three warpgroups, or of most sums with parts, registers do not do."""
        few = self.tile_filters * self.tile_columns // self.warpgroups < 128 * 128 or self.split_k == 1
        return not self.halo and self.cluster_k == 1 and self.warpgroups < 3 and few

    @property
    def instruction_n(self) -> int:
        """Columns of a matrix instruction: warpgroups share the filters where each gets 64, or else the columns."""
        across = 1 if self.tile_filters // BLOCK % self.warpgroups == 0 else self.warpgroups
        return self.tile_columns // across

    @property
    def stages_ahead(self) -> int:
        """Stages that copies are under way to, while one warpgroup's products of two steps are, or several's of one."""
        return max(1, self.stages - (2 if self.warpgroups == 1 else 1))
