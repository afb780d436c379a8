"""The configs of cuda.implicit_gemm: one class a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tapwise.algorithm import Config as BaseConfig


@dataclass(frozen=True)
class TileConfig(BaseConfig):
    """What all kernels have: a CTA tile of `tile_pixels` x `tile_filters`.

    `swap_ab`: the matrix instruction's M is filters, not pixels. `stages` of the pipeline of copies.
    `filter_stationary`: the filters stay in shared memory. `groups_per_tile`: groups whose channels share a chunk, each
    with its own filters. `unfold`: last axes whose taps are packed side by side first.
    """

    kernel: ClassVar[str]

    swap_ab: bool
    tile_pixels: int
    tile_filters: int
    stages: int = 0
    filter_stationary: bool = False
    groups_per_tile: int = 1
    unfold: int = 0

    @property
    def tile_m(self) -> int:
        """Rows of the matrix instruction that make a tile."""
        return self.tile_filters if self.swap_ab else self.tile_pixels

    @property
    def tile_n(self) -> int:
        """Its columns."""
        return self.tile_pixels if self.swap_ab else self.tile_filters

    @property
    def instruction_n(self) -> int:
        """Columns of one instruction: those of one group."""
        return self.tile_n // self.groups_per_tile

    def __str__(self) -> str:
        return f"kernel={self.kernel} {super().__str__()}"


@dataclass(frozen=True)
class Im2colConfig(TileConfig):
    """x by TMA's im2col mode, a chunk of one tap a step.

    `warpgroups` share a tile, or (`ping_pong`) take whole tiles in turns. `split_k` CTAs of a cluster share gemm_k.
    `min_blocks_per_sm`: CTAs that a multiprocessor has room for. `transposed_pixels`: x in NCHW is read as it lies, of
    filters of 1x1, by TMA (`gather_bytes` 0) in boxes of channels and pixels of a plane, or by a warpgroup in pieces of
    so many bytes. `share_filters`: CTAs of a cluster whose tiles lie beside each other along pixels, and for which
    filters are copied together.
    """

    kernel: ClassVar[str] = "im2col"
    halo_buffers: ClassVar[int] = 0
    staged_strips: ClassVar[int] = 0
    chunk_bytes: ClassVar[int] = 0

    warpgroups: int = 1
    ping_pong: bool = False
    split_k: int = 1
    min_blocks_per_sm: int = 1
    transposed_pixels: bool = False
    gather_bytes: int = 0
    share_filters: int = 1

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.split_k * self.share_filters


@dataclass(frozen=True)
class HaloConfig(TileConfig):
    """A tile's pixels with their halo stay in shared memory while the taps pass; two warpgroups in ping-pong.

    `halo_buffers` in shared memory; `chunk_bytes` of a pixel's channels in one, 0 for as many as a chunk has at most.
    """

    warpgroups: ClassVar[int] = 2
    ping_pong: ClassVar[bool] = True
    split_k: ClassVar[int] = 1
    min_blocks_per_sm: ClassVar[int] = 1
    transposed_pixels: ClassVar[bool] = False
    share_filters: ClassVar[int] = 1
    cluster: ClassVar[int] = 1

    halo_buffers: int = 2
    chunk_bytes: int = 0


@dataclass(frozen=True)
class HaloRowsConfig(HaloConfig):
    """Pixels are counted along padded rows, images one below the other.

    `gather_bytes`: the pieces in which warps copy x, 0 for TMA.
    """

    kernel: ClassVar[str] = "halo_rows"
    staged_strips: ClassVar[int] = 0

    gather_bytes: int = 0


@dataclass(frozen=True)
class HaloTileConfig(HaloConfig):
    """A tile is a rectangle of an image, `across` outputs wide.

    `staged_strips`: x in NCHW, 16 bits, is read as it lies, by way of so many staging buffers (strips.py); 0 for x that
    is channels last, or packed.
    """

    kernel: ClassVar[str] = "halo_tile"
    gather_bytes: ClassVar[int] = 0

    across: int = 0
    staged_strips: int = 0


Config = Im2colConfig | HaloRowsConfig | HaloTileConfig
