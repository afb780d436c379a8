"""A problem as a config of cuda.implicit_gemm of wgrad sees it: channels as they lie for TMA, tiles, steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm, prod
from typing import Final

from tapwise.forks import cached_property
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda.implicit_gemm.view import padded, unfolded, unfoldings
from tapwise.ops.conv.cuda.implicit_gemm_wgrad.config import (
    BLOCK,
    MOST_STAGES,
    PIECE,
    STEP_PIXELS,
    Config,
)
from tapwise.ops.conv.problem import ConvProblem

# Bytes of shared memory that align the stages and hold barriers.
MORE_BYTES: Final = 1024 + 16 * (MOST_STAGES + 1)
# Bytes of a line of memory; sets of groups whose places in lines are looked at.
LINE: Final = 128
SETS_SEEN: Final = 8
# Clusters that follow each other in the grid, and share what they read (3 to 7 were as good, 2 and 8 to 16 not).
NEIGHBOURS: Final = 4
# Where arrays of the workspace begin.
WORKSPACE_ALIGNMENT: Final = 256


@dataclass(frozen=True)
class View:
    """The problem as it is (`original`), and as the kernel sees it (`seen`): perhaps with taps that are packed as
    channels. A set is the groups that share tiles."""

    original: ConvProblem
    seen: ConvProblem
    config: Config

    @classmethod
    def of(cls, problem: ConvProblem, config: Config) -> View:
        return cls(problem, unfolded(problem, config.unfold), config)

    @cached_property
    def group_c(self) -> int:
        """Channels of a group, of taps side by side where these are packed as such."""
        return self.original.gemm_k // prod(self.seen.kernel)

    @property
    def channels(self) -> int:
        """Of a set."""
        return self.config.groups_per_tile * self.group_c

    @property
    def filters(self) -> int:
        """Of a set."""
        return self.config.groups_per_tile * self.original.group_k

    @cached_property
    def packs_x(self) -> bool:
        """Whether x has to be brought into another order first: pixels of whole pieces of 16 bytes."""
        return self.config.unfold > 0 or self.original.layout == "nchw" or self.original.c % PIECE > 0

    @cached_property
    def packs_dy(self) -> bool:
        return self.original.layout == "nchw" or self.original.k % PIECE > 0

    @property
    def packs_as_pair(self) -> bool:
        """Whether one launch packs both."""
        return self.packs_x and self.packs_dy and not self.config.unfold

    @cached_property
    def x_channels(self) -> int:
        """Channels of a pixel of x as the kernel reads it, zeros that fill its last piece among them."""
        return round_up(self.seen.c, PIECE)

    @cached_property
    def dy_channels(self) -> int:
        """The same of dy."""
        return round_up(self.original.k, PIECE)

    @cached_property
    def read_bytes(self) -> tuple[int, int]:
        """Bytes of x and dy as the kernel reads them."""
        problem = self.original
        x = self.seen.n * prod(self.seen.spatial) * self.x_channels
        dy = problem.n * prod(problem.output) * self.dy_channels
        return x * problem.itemsize, dy * problem.itemsize

    @cached_property
    def packed_bytes(self) -> tuple[int, int]:
        """What packed x and packed dy take."""
        x, dy = self.read_bytes
        return x * self.packs_x, dy * self.packs_dy

    @cached_property
    def channel_blocks(self) -> int:
        """Blocks of a set's channels."""
        return ceil_div(self.channels, self.config.block_channels)

    @cached_property
    def tiles_n(self) -> int:
        """Tiles of a set along its columns; of nothing, too, where tiles of a cluster share copies."""
        if self.config.halo:
            return self.channel_blocks * self.seen.kernel[0] // self.tap_rows
        blocks = prod(self.seen.kernel) * self.channel_blocks
        tiles = ceil_div(blocks, self.config.tile_columns // self.config.block_channels)
        return round_up(tiles, self.config.cluster_n)

    @cached_property
    def tiles_m(self) -> int:
        """Tiles of a set along its filters, likewise."""
        return round_up(ceil_div(self.filters, self.config.tile_filters), self.config.cluster_m)

    @cached_property
    def tiles(self) -> int:
        """All tiles of dw."""
        return self.tiles_n * self.tiles_m * ceil_div(self.original.groups, self.config.groups_per_tile)

    @property
    def filters_first(self) -> bool:
        """Whether tiles that follow each other lie along the filters, not along the columns: where neighbours read less
        then, of which all but one find in a cache what another just read."""
        config = self.config
        of_dy, of_x = config.tile_filters * config.cluster_m, config.tile_columns * config.cluster_n
        down, across = self.tiles_m // config.cluster_m, self.tiles_n // config.cluster_n
        along_filters = min(NEIGHBOURS, down) * of_dy + ceil_div(NEIGHBOURS, down) * of_x
        along_columns = ceil_div(NEIGHBOURS, across) * of_dy + min(NEIGHBOURS, across) * of_x
        return not config.halo and along_filters < along_columns

    @property
    def is_whole(self) -> bool:
        """Whether all sums of all tiles are dw's."""
        config = self.config
        sums = self.tiles * config.tile_filters * config.tile_columns
        return config.groups_per_tile == 1 and prod(self.original.w_shape) == sums

    @property
    def tap_rows(self) -> int:
        """Of a tile (halo)."""
        return self.config.tile_columns // (self.seen.kernel[1] * self.config.block_channels)

    @cached_property
    def image(self) -> tuple[int, int]:
        """Rows and pixels of a row that steps go through: of dy; or padded rows (halo), and where a tile has several
        rows of taps, which are the same memory from a later row, all rows of the padded image."""
        if not self.config.halo:
            return self.seen.output[0], self.seen.output[1]
        (high, wide), rows = padded(self.seen), self.seen.output[0]
        return rows if self.tap_rows == 1 else high, wide

    @cached_property
    def steps(self) -> int:
        return ceil_div(self.seen.n * prod(self.image), STEP_PIXELS)

    @cached_property
    def ahead(self) -> int:
        """Steps that the last tap is ahead (halo)."""
        if not self.config.halo:
            return 0
        (reach_h, reach_w), wide = self.seen.reach, self.image[1]
        down = reach_h - 1 if self.tap_rows > 1 else 0
        return (STEP_PIXELS - 1 + down * wide + reach_w - 1) // STEP_PIXELS

    @cached_property
    def lines(self) -> tuple[float, float]:
        """Lines of memory that a row of a copied box of x, and of dy, lies in: pixels, groups and blocks of channels
        may begin anywhere in one."""
        sets = range(min(SETS_SEEN, ceil_div(self.original.groups, self.config.groups_per_tile)))
        size, found = self.original.itemsize, []
        for pixel, channels, block in (
            (self.x_channels, self.channels, self.config.block_channels),
            (self.dy_channels, self.filters, BLOCK),
        ):
            firsts = [number * channels + first for number in sets for first in range(0, channels, block)]
            boxes = [(first % pixel, min(block, pixel - first % pixel)) for first in firsts]
            each = [lines_of(pixel * size, first * size % LINE, count * size) for first, count in boxes]
            found.append(sum(each) / len(each))
        return found[0], found[1]

    @cached_property
    def last_blocks(self) -> tuple[int, int]:
        """Channels of the last block of a set's channels, and of its filters, as copies bring them: those that there
        are. Behind a set of groups the next one's lie, and whole blocks come."""
        config = self.config
        if config.groups_per_tile < self.original.groups:
            return config.block_channels, BLOCK
        return (self.x_channels - 1) % config.block_channels + 1, (self.dy_channels - 1) % BLOCK + 1

    @property
    def stage_bytes(self) -> int:
        """What a step copies of dy and of x."""
        config = self.config
        columns = config.block_channels if config.halo else config.tile_columns
        return (config.tile_filters + columns) * STEP_PIXELS * self.original.itemsize

    @cached_property
    def shared_bytes(self) -> int:
        """Stages; in a ring of x the steps that the last tap is ahead, and the first pixels once more; afterwards the
        sums that a cluster adds."""
        config = self.config
        ring = (self.ahead + 1) * config.block_channels * STEP_PIXELS * self.original.itemsize * config.halo
        operands = config.stages * self.stage_bytes + ring
        sums = config.tile_filters * config.tile_columns * 4 if config.cluster_k > 1 else 0
        return max(operands, sums) + MORE_BYTES

    @cached_property
    def workspace(self) -> dict[str, tuple[int, int]]:
        """Where arrays lie in the workspace, (begin, end) in bytes by their names in launches: packed x and dy, and
        parts of a split gemm_k."""
        config, (x, dy) = self.config, self.packed_bytes
        parts = self.tiles * config.parts * config.tile_filters * config.tile_columns * 4 if config.parts > 1 else 0
        places, end = {}, 0
        for name, size in (("packed_x", x), ("packed_dy", dy), ("parts", parts)):
            if size:
                begin = round_up(end, WORKSPACE_ALIGNMENT)
                end = begin + size
                places[name] = begin, end
        return places

    @property
    def workspace_bytes(self) -> int:
        return max((end for _, end in self.workspace.values()), default=0)

    @property
    def bytes(self) -> int:
        """What the products read and write when every operand moves once."""
        return sum(self.read_bytes) + prod(self.original.w_shape) * self.original.itemsize


@lru_cache(1024)
def lines_of(pitch: int, first: int, count: int) -> float:
    """Lines that `count` bytes from `first` of a line on lie in, on average over rows so many bytes apart."""
    rows = LINE // gcd(pitch, LINE)
    return sum(((first + row * pitch) % LINE + count - 1) // LINE + 1 for row in range(rows)) / rows


def image_of_y(problem: ConvProblem) -> ConvProblem:
    """A problem whose x is the y, or dy, of another."""
    ones = {"kernel": (1, 1), "stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
    return problem.replace(c=problem.k, spatial=problem.output, groups=1, **ones)


def whole(problem: ConvProblem) -> ConvProblem:
    """All groups as one: their channels lie side by side."""
    return problem.replace(groups=1)


@lru_cache(256)
def ways(problem: ConvProblem) -> tuple[int, ...]:
    """Axes that are unfolded: of few channels one or both may be; none where a tensor map cannot express windows."""
    found = unfoldings(whole(problem))
    return found if problem.groups == 1 else found[: 0 in found]


def sets_of_groups(problem: ConvProblem) -> list[int]:
    """Groups that share tiles: all, or as many as fill a block of channels or of filters. Sets begin at whole pieces of
    16 bytes, as copies do."""
    sizes = problem.group_c, problem.group_k
    unit = lcm(*(PIECE // gcd(PIECE, size) for size in sizes))
    wanted = {max(unit, count // unit * unit) for count in (1, *(BLOCK // size for size in sizes))}
    return sorted({min(problem.groups, count) for count in wanted})


def is_pointwise(problem: ConvProblem) -> bool:
    """Whether each output pixel's window is the input's pixel of the same number."""
    return problem.kernel == problem.stride == (1, 1) and not any(map(any, problem.padding))
