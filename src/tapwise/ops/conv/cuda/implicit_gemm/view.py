"""A problem as a config of cuda.implicit_gemm sees it: chunks and steps of gemm_k, tiles and CTAs, halos."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod, sqrt
from typing import Any, Final

from tapwise.algorithm import Device
from tapwise.cuda.jit.tensor_map import SWIZZLE_BYTES, legal
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.forks import cached_property
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import pack
from tapwise.ops.conv.cuda.implicit_gemm.config import Config, HaloRowsConfig, HaloTileConfig, Im2colConfig
from tapwise.ops.conv.cuda.implicit_gemm.rectangle import Rectangle
from tapwise.ops.conv.cuda.implicit_gemm.shifted_planes import ShiftedPlanes, shifted_planes_of
from tapwise.ops.conv.cuda.implicit_gemm.strips import Strips, plane_classes, strips_of
from tapwise.ops.conv.cuda.window import FpropFilters, JoinedFilters, OutputStrides
from tapwise.ops.conv.problem import ConvProblem

# Pixels that one copy takes.
COPY_PIXELS: Final = 256
# Of 132 multiprocessors, clusters of four and eight find places on 120.
PLACED: Final = 10 / 11
# Filters, or pixels, side by side that one copy takes where operands lie across gemm_k.
BLOCK: Final = 64
# Bytes of the instruction's steps along gemm_k.
STEP_BYTES: Final = 32


@lru_cache(256)
def folded(problem: ConvProblem) -> ConvProblem:
    """The same sums with fewer taps: windows side by side along a row are pixels of s * c channels."""
    (_, s), (_, stride), (_, sides) = problem.kernel, problem.stride, problem.padding
    height, width = problem.spatial
    if (
        s == 1 or s != stride or problem.dilation[1] != 1 or sides != (0, 0) or problem.groups > 1
        or problem.layout != "nhwc" or problem.math == "3xtf32" or width != problem.output[1] * s
        or not is_aligned(problem)
    ):  # fmt: skip
        return problem
    high, step, above = problem.kernel[0], problem.stride[0], problem.padding[0]
    sizes = {"spatial": (height, width // s), "kernel": (high, 1), "stride": (step, 1), "padding": (above, (0, 0))}
    return problem.replace(c=problem.c * s, **sizes)


@lru_cache(256)
def unfolded(problem: ConvProblem, unfold: int) -> ConvProblem:
    """The same sums where a few channels of all taps along the last axes were packed side by side, for each output, and
    fill whole chunks, which TMA takes faster."""
    if not unfold:
        return problem
    sizes: dict[str, list[Any]] = {
        name: list(getattr(problem, name)) for name in ("spatial", "kernel", "stride", "padding", "dilation")
    }
    channels = problem.c
    for axis in range(2 - unfold, 2):
        if problem.kernel[axis] > 1:
            channels *= problem.kernel[axis]
            ones = {"kernel": 1, "stride": 1, "padding": (0, 0), "dilation": 1, "spatial": problem.output[axis]}
            for name, value in ones.items():
                sizes[name][axis] = value
    if channels > problem.c:
        channels = round_up(channels, chunk_bytes(problem.replace(c=channels)) // problem.itemsize)
    return problem.replace(c=channels, **{name: tuple(values) for name, values in sizes.items()})


@lru_cache(256)
def unfoldings(problem: ConvProblem) -> tuple[int, ...]:
    """Ways to compute the problem: as it is (0), and with few channels unfolded along one axis or both."""
    few = problem.groups == 1 and problem.c * problem.itemsize < STEP_BYTES
    ways = [0] + [count for count in (1, 2) if few and problem.kernel[2 - count] > 1]
    views = {way: unfolded(problem, way) for way in ways}
    return tuple(
        way
        for way, view in views.items()
        if is_exact(problem, view)
        and legal(corners_of(view), last_offsets(view), view.stride)
        and (way == 0 or problem.n * prod(view.spatial) * view.c < INDEX_LIMIT)
    )


def is_exact(problem: ConvProblem, view: ConvProblem) -> bool:
    """Whether 3xtf32 keeps fp32's bound in a view: tensor cores cut off after each step of eight channels; with few of
    them in a step that adds up."""
    additions = 3 * prod(view.kernel) * ceil_div(view.group_c, 8)
    return problem.math != "3xtf32" or additions <= 0.5 * problem.gemm_k + 2 * sqrt(problem.gemm_k)


def is_aligned(problem: ConvProblem) -> bool:
    """Whether TMA can take the channels as they lie: pixels and groups in whole pieces of 16 bytes."""
    return problem.group_c * problem.itemsize % 16 == 0


def chunk_bytes(problem: ConvProblem) -> int:
    """Bytes of a pixel's chunk of channels in shared memory: as few as hold a group's, 128 at most."""
    size = problem.group_c * problem.itemsize
    return next((count for count in (32, 64) if size <= count), SWIZZLE_BYTES)


def plane_pieces(problem: ConvProblem) -> int | None:
    """In which pieces planes of x in NCHW are read as they lie, of filters of 1x1 and 16 bits: 0 by TMA, or planes of
    pieces of 8 bytes, but not of 16, by a warpgroup, which takes less than shifting what TMA brings. None where x is
    packed."""
    plain = prod(problem.kernel) == prod(problem.stride) == 1 and problem.output == problem.spatial
    if not plain or problem.layout != "nchw" or problem.itemsize != 2:
        return None
    classes = plane_classes(problem)
    if classes == 2:
        return 8
    return 0 if problem.group_c % classes == 0 else None


def has_group_axis(problem: ConvProblem) -> bool:
    """Whether the map of x has an axis for groups and parts."""
    return problem.groups > 1 or problem.math == "3xtf32"


def corners_of(problem: ConvProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where windows begin, innermost axis first: from -padding to the last window's place relative to the edge."""
    lower, upper = [], []
    for (before, after), reach in zip(problem.padding[::-1], problem.reach[::-1], strict=True):
        lower.append(-before)
        upper.append(after - (reach - 1))
    if has_group_axis(problem):
        lower, upper = [*lower, 0], [*upper, 0]
    return tuple(lower), tuple(upper)


def last_offsets(problem: ConvProblem) -> tuple[int, ...]:
    """How far the last tap lies from the first, innermost axis first."""
    return tuple(reach - 1 for reach in problem.reach[::-1]) + ((0,) if has_group_axis(problem) else ())


def padded(problem: ConvProblem) -> tuple[int, int]:
    """(high, wide) of an image along halo rows: neighbours share their padding."""
    high, wide = (size + max(sides) for size, sides in zip(problem.spatial, problem.padding, strict=True))
    return high, wide


@dataclass(frozen=True)
class View:
    """The problem as it is (`original`), with taps packed side by side (`unfolded`), and as the kernel sees it
    (`seen`): unfolded or folded, or with several groups as one. `strides`: of y, None where it is dense. `filters`:
    those of fprop, where they are not packed. `joined`: those of joined pixels."""

    original: ConvProblem
    unfolded: ConvProblem
    seen: ConvProblem
    config: Config
    strides: OutputStrides | None = None
    filters: FpropFilters | None = None
    joined: JoinedFilters | None = None

    @classmethod
    def of(
        cls, problem: ConvProblem, config: Config, strides: OutputStrides | None = None,
        filters: FpropFilters | None = None, joined: JoinedFilters | None = None,
    ) -> View:  # fmt: skip
        base = unfolded(problem, config.unfold)
        if not config.staged_strips:
            base = pack.thinned(base)
        if config.unfold:
            seen = base
        elif config.groups_per_tile > 1:
            seen = base.replace(groups=base.groups // config.groups_per_tile)
        else:
            seen = folded(base)
        return cls(problem, base, seen, config, strides, filters, joined)

    def configured(self, config: Config) -> View:
        """The same problems with another config, of as many groups a tile and axes unfolded."""
        return replace(self, config=config)

    @property
    def itemsize(self) -> int:
        return self.seen.itemsize

    @cached_property
    def is_packed(self) -> bool:
        """Whether x has to be brought into another order first."""
        problem = self.original
        if self.config.unfold:
            return True
        direct = problem.layout == "nhwc" and problem.math != "3xtf32" and is_aligned(problem)
        return not (self.config.gather_bytes or self.config.transposed_pixels or self.config.staged_strips or direct)

    @cached_property
    def shifted(self) -> ShiftedPlanes | None:
        """How planes that begin within pieces of 16 bytes come to a tile of im2col."""
        config = self.config
        if not config.transposed_pixels or config.gather_bytes:
            return None
        return shifted_planes_of(self.seen, config.tile_pixels, self.chunk_bytes // self.itemsize)

    @property
    def warps_bring(self) -> bool:
        """Whether warps bring x to its places in shared memory."""
        return self.config.gather_bytes > 0 or self.shifted is not None

    @cached_property
    def tiles_p(self) -> int:
        """Tiles of a plane."""
        return ceil_div(prod(self.seen.output), self.config.tile_pixels)

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a pixel's chunk of channels in shared memory."""
        return self.config.chunk_bytes or chunk_bytes(self.seen)

    @cached_property
    def chunks(self) -> int:
        """Chunks of a group's channels."""
        return ceil_div(self.seen.group_c * self.itemsize, self.chunk_bytes)

    @property
    def parts(self) -> int:
        """Products that stand for one: three of 3xtf32."""
        return 3 if self.seen.math == "3xtf32" else 1

    @cached_property
    def steps(self) -> int:
        """Steps of gemm_k: chunks of all taps and parts."""
        return prod(self.seen.kernel) * self.chunks * self.parts

    @cached_property
    def last_chunk_steps(self) -> int:
        """The instruction's steps in a tap's last chunk of channels."""
        rest = self.seen.group_c * self.itemsize - (self.chunks - 1) * self.chunk_bytes
        return ceil_div(rest, STEP_BYTES)

    @cached_property
    def last_chunk_bytes(self) -> int:
        """Bytes of a pixel that copies of a tap's last chunk bring: TMA takes up to four times as long for boxes that
        reach beyond the channels. Of a single chunk those that there are, else whole steps of the instruction, as rows
        hold other chunks before."""
        config = self.config
        if config.transposed_pixels or config.staged_strips or config.gather_bytes or config.groups_per_tile > 1:
            return self.chunk_bytes
        channels = pack.wide(self.seen) if self.is_packed else self.seen.group_c
        there = channels * self.itemsize - (self.chunks - 1) * self.chunk_bytes
        return there if self.chunks == 1 else round_up(there, STEP_BYTES)

    @property
    def partial_taps(self) -> JoinedFilters | None:
        """Those whose first and last column of taps is not multiplied whole: of halos of one chunk. With more of them
        short products leave nothing (pairs of 44 channels 18.5 us instead of 16.7)."""
        halo = not isinstance(self.config, Im2colConfig)
        return self.joined if halo and self.chunks == 1 and self.seen.kernel[1] > 1 else None

    @property
    def is_narrow(self) -> bool:
        """Whether these are fewer than those of other chunks."""
        return self.last_chunk_bytes < self.chunk_bytes

    @cached_property
    def rectangle(self) -> Rectangle:
        """Of a halo tile."""
        assert isinstance(self.config, HaloTileConfig)
        return Rectangle.of(self.seen, self.config.across, self.config.tile_pixels)

    @cached_property
    def strips(self) -> Strips | None:
        """Of a halo tile's planes, where they are read as they lie."""
        config = self.config
        if not isinstance(config, HaloTileConfig) or not config.staged_strips:
            return None
        found = strips_of(self.seen, config.across, self.rectangle.down, self.chunk_bytes // self.itemsize)
        assert found is not None
        return found

    @property
    def flat_planes(self) -> bool:
        """Whether such strips are runs of whole rows."""
        return self.strips is not None and self.strips.flat

    @property
    def plane_classes(self) -> int:
        """Copies of such a strip."""
        return self.strips.classes if self.strips else 1

    @cached_property
    def halo_rows(self) -> tuple[int, int]:
        """(pixels of a tile with their halo along padded rows, pixels of one of their copies)."""
        (reach_h, reach_w), (_, wide) = self.seen.reach, padded(self.seen)
        pixels = self.config.tile_pixels + (reach_h - 1) * wide + reach_w - 1
        copies = ceil_div(pixels, COPY_PIXELS)
        each = ceil_div(pixels, 8 * copies) * 8
        return copies * each, each

    @cached_property
    def halo_pixels(self) -> int:
        """Pixels that come with a tile: itself and its halo."""
        if isinstance(self.config, HaloTileConfig):
            return self.rectangle.residues * self.rectangle.apart
        return self.halo_rows[0]

    @cached_property
    def tiles_f(self) -> int:
        """Tiles along the filters of a group."""
        return ceil_div(self.seen.group_k, self.config.tile_filters)

    @cached_property
    def tiles(self) -> int:
        """All tiles."""
        problem, config = self.seen, self.config
        if isinstance(config, HaloTileConfig):
            p, q = problem.output
            pixel_tiles = problem.n * ceil_div(p, self.rectangle.down) * ceil_div(q, config.across)
        elif config.transposed_pixels and not config.gather_bytes:
            pixel_tiles = problem.n * self.tiles_p
        else:
            rows = isinstance(config, HaloRowsConfig)
            pixel_tiles = ceil_div(problem.n * prod(padded(problem) if rows else problem.output), config.tile_pixels)
        return self.tiles_f * pixel_tiles * problem.groups

    @cached_property
    def units(self) -> int:
        """Tiles, or as many as CTAs that share filters take together: the last of them may have no pixels."""
        return ceil_div(self.tiles // self.tiles_f, self.config.share_filters) * self.tiles_f

    def blocks(self, device: Device) -> int:
        """CTAs of the launch; where filters stay, so many that each of them keeps its filters."""
        config = self.config
        if config.split_k > 1:
            return self.tiles * config.split_k
        if config.share_filters > 1:
            placed = device.multiprocessors if config.share_filters == 2 else int(device.multiprocessors * PLACED)
            return max(1, min(self.units, placed // config.share_filters)) * config.share_filters
        most = min(self.tiles, device.multiprocessors * config.min_blocks_per_sm)
        if config.filter_stationary:
            most -= most % (self.tiles_f * self.seen.groups)
        return most

    @property
    def threads(self) -> int:
        """Of a CTA: warpgroups, and a warp that copies; beside two, or where it gathers, a warpgroup."""
        several = self.config.warpgroups == 2 or self.warps_bring
        return self.config.warpgroups * 128 + (128 if several else 32)

    @property
    def transposed_filters(self) -> bool:
        """Whether filters are read as fprop has them."""
        return self.filters is not None

    @property
    def copied_filters(self) -> int:
        """Filters of a tile that copies bring: whole blocks where they lie side by side."""
        count = self.config.tile_filters // self.config.groups_per_tile
        return round_up(count, BLOCK) if self.transposed_filters else count

    @property
    def block_pixels(self) -> int:
        """Pixels of a tile of im2col that a stage has room for: whole blocks of planes."""
        count = self.config.tile_pixels
        return round_up(count, BLOCK) if self.config.transposed_pixels else count

    @property
    def last_pixels(self) -> int:
        """Pixels of the last block of planes of a tile, which a box of its own copies; 0 where it is whole."""
        config = self.config
        boxes = config.transposed_pixels and not config.gather_bytes and not self.shifted
        return config.tile_pixels % BLOCK if boxes else 0

    @property
    def copied_pixels(self) -> int:
        """Pixels of a tile of im2col that copies bring."""
        return self.config.tile_pixels if self.last_pixels else self.block_pixels

    @property
    def cooperative(self) -> int:
        """Warpgroups that share a tile."""
        return 1 if self.config.ping_pong else self.config.warpgroups

    @cached_property
    def pipeline_bytes(self) -> int:
        """Shared memory of x and filters, as SharedLayout of the kernels has it, with what aligns its parts."""
        config, row = self.config, self.chunk_bytes
        filters = self.copied_filters * row
        if isinstance(config, Im2colConfig):
            stage = self.block_pixels * row + (0 if config.filter_stationary else filters)
            kept = self.steps * filters + 2048 if config.filter_stationary else 0
            early = self.shifted.shared_bytes if self.shifted else 0
            return config.stages * (round_up(stage, 1024) if config.transposed_pixels else stage) + kept + early
        pixels = self.halo_pixels
        if isinstance(config, HaloTileConfig):
            pixels = round_up(pixels, 8) + self.rectangle.behind
        # Beside staging buffers is a line of 16 bytes for each lane; theirs begin with 128.
        strips = self.strips
        staged = 0
        if strips:
            staged = config.staged_strips * strips.rows * strips.pitch * row + 4 * strips.table_words + 1024
        return config.halo_buffers * (pixels * row + 16) + config.stages * filters + staged + 2048
