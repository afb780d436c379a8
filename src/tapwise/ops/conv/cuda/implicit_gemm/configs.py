"""The configs of cuda.implicit_gemm for a problem: tiles, schedules, halos and groups that fit into shared memory and
registers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Final, NamedTuple

from tapwise.algorithm import Device
from tapwise.cuda.jit.occupancy import room_of
from tapwise.cuda.jit.tensor_map import SWIZZLE_BYTES
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda.implicit_gemm.config import Config, HaloRowsConfig, HaloTileConfig, Im2colConfig
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.rectangle import halo_beside, row_vector
from tapwise.ops.conv.cuda.implicit_gemm.shifted_planes import MOST_PIXELS
from tapwise.ops.conv.cuda.implicit_gemm.strips import plane_classes, strips_of
from tapwise.ops.conv.cuda.implicit_gemm.view import (
    BLOCK,
    COPY_PIXELS,
    PLACED,
    View,
    has_group_axis,
    is_aligned,
    padded,
    plane_pieces,
    unfoldings,
)
from tapwise.ops.conv.cuda.window import FpropFilters
from tapwise.ops.conv.problem import ConvProblem

# Taps for which a halo is kept: as many products are under way as there may be, and one.
LEAST_TAPS: Final = 3
# Taps whose products take as long as the next halo needs to come; with fewer there are more than two buffers.
MANY_TAPS: Final = 7
# Halo buffers of fewer taps than LEAST_TAPS (of strides alone), whose products take no longer than a strip's way.
FEW_TAPS_BUFFERS: Final = 6
# Outputs of a halo tile's row: with fewer it is mostly halo.
LEAST_ACROSS: Final = 4
# Staging buffers of planes: one or two for each warp that transposes.
STAGED_STRIPS: Final = (6, 3)
# Sets of filters that stay beside halo rows, each with its own CTAs.
MOST_SETS: Final = 32
# Registers of a thread beside its sums: in the plain kernel, and for what else it does.
PLAIN_REGISTERS: Final = 60
MORE_REGISTERS: Final = {
    "bias": 8, "function": 56, "short function": 53, "direct store": 36, "residual": 4, "more residual": 17,
    "f32 residual as C": 24, "odd": 48, "f32": 16, "nchw": 44,
}  # fmt: skip
# Sums of a thread beside which epilogues that store rows of planes were seen to fit 216 registers.
ROW_SUMS: Final = 128
# Outputs of a tile whose sums CTAs of a cluster exchange.
MOST_EXCHANGED: Final = 8192
# CTAs of a cluster that share filters, and outputs of a tile from which on they may.
SHARING: Final = (2, 4)
LEAST_SHARING: Final = 128 * 112
# Columns of the matrix instruction at most, and pixels of a tile that is made to fit.
MOST_N: Final = 256
LEAST_PIXELS: Final = 32


class Tile(NamedTuple):
    """Pixels and filters of a CTA tile; `swap_ab`: the instruction's M is filters."""

    swap_ab: bool
    pixels: int
    filters: int


TILES: Final = tuple(
    [Tile(True, pixels, 64) for pixels in (32, 48, 64, 72, 80, 96, 112, 128, 160, 176, 192, 208, 224, 256)]
    + [Tile(True, pixels, 128) for pixels in (48, 64, 96, 112, 128, 160, 192, 224, 256)]
    + [Tile(False, 64, filters) for filters in (16, 24, 32, 40, 48, 64, 96, 128, 192, 256)]
    + [Tile(False, 128, filters) for filters in (32, 40, 48, 56, 64, 96, 128, 160, 192, 256)]
    + [Tile(False, 256, filters) for filters in (16, 32, 64, 128)]
)
# For few filters, of halos: their windows overlap less.
LONG_TILES: Final = tuple(
    [Tile(False, 512, filters) for filters in (8, 16, 24, 32)] + [Tile(False, 1024, filters) for filters in (8, 16)]
)


class Schedule(NamedTuple):
    """Warpgroups, whether they are in ping-pong, CTAs that share gemm_k, and those of a multiprocessor."""

    warpgroups: int
    ping_pong: bool
    split_k: int
    min_blocks_per_sm: int


SCHEDULES: Final = (
    Schedule(2, True, 1, 1), Schedule(2, False, 1, 1), Schedule(1, False, 1, 1), Schedule(1, False, 1, 2),
    Schedule(1, False, 2, 1), Schedule(1, False, 4, 1), Schedule(1, False, 8, 1),
)  # fmt: skip


def all_configs(problem: ConvProblem, device: Device, filters: FpropFilters | None = None) -> Sequence[Config]:
    """Every config that fits the device, in no order; with `filters` those that read them as they lie."""
    found: list[Config] = []
    for unfold in (0,) if filters else unfoldings(problem):
        view = View.of(problem, Im2colConfig(False, 64, 64, unfold=unfold), None, filters)
        found += _im2col(view, device)
        if set(view.seen.stride) == {1} and prod(view.seen.kernel) >= LEAST_TAPS:
            found += _halo_rows(view, device)
            found += _halo_tiles(view, device)
        if max(problem.stride) > 1 and not filters and not unfold and problem.layout == "nchw":
            strided = View.of(problem, HaloTileConfig(False, 64, 64, staged_strips=STAGED_STRIPS[0]))
            found += _halo_tiles(strided, device)
        if filters is None:
            found += _grouped(view, device)
            pieces = plane_pieces(view.original)
            if pieces is not None:
                found += _planes(view, pieces, device)
    return found


def phased_configs(problem: ConvProblem, count: int, device: Device, filters: FpropFilters) -> list[Im2colConfig]:
    """Configs for `count` phases of dgrad in one launch, the one with most steps as a problem of fprop."""
    view = View.of(problem.replace(n=problem.n * count), Im2colConfig(False, 64, 64), None, filters)
    return [
        one for one in _im2col(view, device)
        if isinstance(one, Im2colConfig) and one.cluster == 1 and not one.filter_stationary
    ]  # fmt: skip


def _im2col(view: View, device: Device) -> Iterator[Config]:
    tiles = dict.fromkeys((*_tiles(view.seen), *_whole_waves(view.seen, device)))
    for tile, schedule in product(tiles, SCHEDULES):
        if schedule.split_k == 1 or tile.pixels * tile.filters <= MOST_EXCHANGED:
            config = _im2col_config(tile, schedule, unfold=view.config.unfold)
            yield from _scheduled(view.configured(config), device)


def _scheduled(view: View, device: Device) -> Iterator[Config]:
    """A config of im2col with the stages that it has room for, and with filters that stay."""
    config = view.config
    # Two CTAs of a multiprocessor are of use where there are more CTAs than multiprocessors.
    staged = _staged(view, device)
    # Filters that lie across gemm_k are swizzled by 128 bytes; those behind few channels' pixels would begin within the
    # pattern.
    if view.transposed_filters and view.block_pixels * view.chunk_bytes % (8 * SWIZZLE_BYTES):
        staged = None
    if staged is not None and (config.min_blocks_per_sm == 1 or view.tiles > PLACED * device.multiprocessors):
        yield staged
    # Filters stay where a CTA has several tiles of the same.
    if config.split_k == config.min_blocks_per_sm == 1 and 2 * view.blocks(device) <= view.tiles:
        stationary = _staged(view.configured(replace(config, filter_stationary=True)), device)
        if stationary is not None and view.configured(stationary).blocks(device):
            yield stationary
    if isinstance(staged, Im2colConfig) and _may_share(view, device):
        yield from (replace(staged, share_filters=count) for count in SHARING)


def _may_share(view: View, device: Device) -> bool:
    """Whether CTAs of a cluster may share filters: of large tiles, more than multiprocessors."""
    config, problem = view.config, view.seen
    large = config.tile_pixels * config.tile_filters >= LEAST_SHARING and view.tiles >= device.multiprocessors
    plain = problem.layout == "nhwc" and not has_group_axis(problem) and not config.transposed_pixels
    return large and plain and config.split_k == config.min_blocks_per_sm == config.groups_per_tile == 1


def _planes(view: View, pieces: int, device: Device) -> Iterator[Config]:
    """Those that read planes of x as they lie, in such pieces. By TMA (0) a tile has pixels of one, so some tiles
    divide one evenly."""
    plane, problem = prod(view.seen.output), view.seen
    tiles = dict.fromkeys((*_tiles(problem), *_whole_waves(problem, device)))
    if not pieces:
        widths = sorted({round_up(ceil_div(plane, count), 8) for count in range(1, 9)} - set(range(LEAST_PIXELS)))
        fitting = [Tile(True, pixels, filters) for pixels in widths if pixels <= MOST_N for filters in (64, 128)]
        most = min(round_up(plane, BLOCK), MOST_PIXELS if plane_classes(problem) > 1 else MOST_N)
        tiles = dict.fromkeys(tile for tile in (*_tiles(problem), *fitting) if tile.pixels <= most)
    for tile, schedule in product(tiles, SCHEDULES):
        if schedule.split_k == 1 or tile.pixels * tile.filters <= MOST_EXCHANGED:
            config = replace(_im2col_config(tile, schedule), transposed_pixels=True, gather_bytes=pieces)
            yield from _scheduled(view.configured(config), device)


def _im2col_config(tile: Tile, schedule: Schedule, groups_per_tile: int = 1, unfold: int = 0) -> Im2colConfig:
    return Im2colConfig(
        tile.swap_ab, tile.pixels, tile.filters, groups_per_tile=groups_per_tile, unfold=unfold, **schedule._asdict()
    )


def _shares_padding(problem: ConvProblem) -> bool:
    """Padded images share their padding with the next, so there may be no more of it than windows reach."""
    return all(min(sides) < reach for sides, reach in zip(problem.padding, problem.reach, strict=True))


def _halo_rows(view: View, device: Device) -> Iterator[Config]:
    problem = view.seen
    if not _shares_padding(problem) or problem.n * prod(padded(problem)) >= INDEX_LIMIT:
        return
    tiles = dict.fromkeys((*_tiles(problem), *LONG_TILES))
    for tile, pieces, chunk in product(tiles, _gathers(view), _chunks(problem)):
        # Warps that gather would have the same pieces to copy.
        if tile.filters <= (64 if tile.swap_ab else MOST_N) and not (pieces and chunk):
            config = HaloRowsConfig(
                tile.swap_ab, tile.pixels, tile.filters, unfold=view.config.unfold, chunk_bytes=chunk,
                gather_bytes=pieces,
            )  # fmt: skip
            yield from _buffered(view.configured(config), config, device)


def _halo_tiles(view: View, device: Device) -> Iterator[Config]:
    """Those whose rectangles fit the image best: a few widths for each tile, of pixels that TMA brings as they lie or
    were packed, and of planes that are transposed."""
    problem = view.seen
    if not is_aligned(problem) and problem.layout == "nhwc" and problem.math != "3xtf32":
        return
    planes = problem.layout == "nchw" and problem.itemsize == 2 and not view.config.unfold
    strided = max(problem.stride) > 1
    staging = (*(() if strided else (0,)), *(STAGED_STRIPS if planes else ()))
    chunks = _chunks(problem, strided)
    for tile, staged, chunk in product(_tiles(problem) + LONG_TILES, staging, chunks):
        if tile.filters > ((128 if strided else 64) if tile.swap_ab else MOST_N) or tile.pixels < 64:
            continue
        config = HaloTileConfig(
            tile.swap_ab, tile.pixels, tile.filters, unfold=view.config.unfold, chunk_bytes=chunk, staged_strips=staged
        )
        for across in _widths(view.configured(config), config):
            one = replace(config, across=across)
            yield from _buffered(view.configured(one), one, device)


def _widths(view: View, config: HaloTileConfig) -> list[int]:
    """The two widths of rectangles with which fewest pixels are multiplied and brought, if there are."""
    problem, tile = view.seen, config.tile_pixels
    p, q = problem.output
    more_h, more_w = halo_beside(problem)
    found, grain = {}, row_vector(problem)
    for count in range(1, q + 1):
        across = round_up(ceil_div(q, count), grain)
        wide = round_up(across + more_w, grain)
        if across < LEAST_ACROSS:
            break
        if wide > tile:
            continue
        down = tile // wide
        high = down + more_h
        pixels = high * wide
        if config.staged_strips:
            strips = strips_of(problem, across, down, view.chunk_bytes // view.itemsize)
            if strips is None:
                continue
            pixels = strips.pixels
        if wide <= COPY_PIXELS and high <= COPY_PIXELS:
            found[across] = ceil_div(p, down) * ceil_div(q, across) * (tile + pixels)
    return sorted(found, key=lambda one: found[one])[:2]


def _grouped(view: View, device: Device) -> Iterator[Config]:
    """Groups of 32 or 64 bytes of channels, as many in a chunk as fill it, each multiplied with its own filters."""
    problem = view.unfolded
    size = problem.group_c * problem.itemsize
    count = SWIZZLE_BYTES // size if size in (32, 64) else 1
    filters = count * problem.group_k
    packed = problem.layout == "nchw" or problem.math == "3xtf32" or not is_aligned(problem)
    if count == 1 or problem.groups % count or problem.group_k % 8 or filters > MOST_N or packed:
        return
    tiles = [Tile(False, pixels, filters) for pixels in (64, 128, 256)]
    for tile, schedule in product(tiles, [one for one in SCHEDULES if one.split_k == 1]):
        one = View.of(view.original, _im2col_config(tile, schedule, groups_per_tile=count))
        staged = _staged(one, device)
        if staged is not None:
            yield staged
    if set(problem.stride) == {1} and prod(problem.kernel) >= LEAST_TAPS and _shares_padding(problem):
        for tile, stages in product(tiles, (8, 4)):
            config = HaloRowsConfig(tile.swap_ab, tile.pixels, tile.filters, stages, groups_per_tile=count)
            if is_legal(View.of(view.original, config), device):
                yield config


def _buffered(view: View, config: HaloRowsConfig | HaloTileConfig, device: Device) -> list[Config]:
    """A halo with all filters of its tiles beside it, where a CTA has several of the same, and with as long a ring of
    them as there is room for."""
    taps = prod(view.seen.kernel)
    most = 2 if taps >= MANY_TAPS else 4 if config.chunk_bytes else 3
    if taps < LEAST_TAPS:
        most = FEW_TAPS_BUFFERS
    # Of one tap the products of two halos are under way.
    least = 2 if taps > 1 else 3
    stationary: list[Config] = [
        replace(config, filter_stationary=True, stages=view.steps, halo_buffers=count)
        for count in range(most, least - 1, -1)
    ]
    sets, blocks = view.tiles_f * view.seen.groups, view.configured(stationary[0]).blocks(device)
    # Warps that gather take longer than the products of the short tiles that several sets leave room for.
    several = isinstance(config, HaloRowsConfig) and sets <= MOST_SETS and not config.gather_bytes
    wanted = sets == 1 or (several and 0 < 2 * blocks <= view.tiles)
    found = [one for one in stationary if wanted and is_legal(view.configured(one), device)][:1]
    if found and sets == 1:
        return found
    # A third buffer is not worth a ring of fewer than eight stages.
    lengths = [
        (count, stages) for count in range(most, least - 1, -1) for stages in (12, 8, 6, 4)
        if count == least or stages >= 8 or taps < LEAST_TAPS
    ]  # fmt: skip
    rings: Iterator[Config] = (replace(config, halo_buffers=count, stages=stages) for count, stages in lengths)
    return found + [one for one in rings if is_legal(view.configured(one), device)][:1]


def _staged(view: View, device: Device) -> Config | None:
    """The config with as many stages as there is room for, up to all steps of a CTA."""
    config = view.config
    steps = ceil_div(view.steps, config.split_k)
    if config.split_k == 1:
        steps *= ceil_div(view.tiles, device.multiprocessors * config.min_blocks_per_sm)
    # Teams that shift planes wait for a stage's last use alone, not for the one before it.
    least = max(3, view.shifted.teams if view.shifted else 0)
    candidates = (replace(config, stages=stages) for stages in range(min(8, max(least, steps)), least - 1, -1))
    return next((one for one in candidates if is_legal(view.configured(one), device)), None)


def is_legal(view: View, device: Device) -> bool:
    """Whether the tile's parts fit shared memory, its sums the registers, and its rows the warpgroups."""
    problem, config, epilogue = view.seen, view.config, Epilogue(view)
    per_sm = config.min_blocks_per_sm
    share, rest = divmod(config.tile_m // 64, view.cooperative)
    if share < 1 or rest or view.steps < config.split_k:
        return False
    if epilogue.shared_bytes > room_of(device, per_sm):
        return False
    # Two warpgroups get registers of the one that copies, which needs them itself where it gathers or transposes.
    threads_copy = view.warps_bring or config.staged_strips
    pair = 232 if not threads_copy else 208 if isinstance(config, Im2colConfig) else 216
    registers = pair if config.warpgroups == 2 else 255 if per_sm == 1 else 128
    function, short = (problem.activation == name and per_sm == 1 for name in ("tanh", "gelu"))
    direct = epilogue.permuted_n > 0
    rolling = isinstance(config, Im2colConfig) and config.ping_pong and not config.filter_stationary
    used = {
        "bias": problem.bias or problem.activation is not None,
        "residual": problem.residual and not epilogue.tma_residual,
        # Of four bytes, or loaded before the products; im2col in ping-pong has registers for it.
        "more residual": problem.residual and (problem.dtype == "f32" or (direct and not rolling)),
        "f32 residual as C": problem.residual and problem.dtype == "f32" and direct and config.ping_pong,
        "function": function,
        "short function": short,
        "direct store": direct and function,
        "odd": direct and problem.group_k % 2 == 1,
        "f32": problem.dtype == "f32",
        "nchw": problem.layout == "nchw",
    }
    others = PLAIN_REGISTERS + sum(MORE_REGISTERS[name] for name, needed in used.items() if needed)
    sums = share * config.tile_n // 2
    rows = config.staged_strips > 0 and epilogue.vector > 1 and not (function or short or share * problem.residual > 1)
    return sums + others <= registers or (rows and sums <= ROW_SUMS)


def _tiles(problem: ConvProblem) -> tuple[Tile, ...]:
    """Tiles for any problem, and such as divide the filters of a group evenly."""
    widths = {ceil_div(problem.group_k, grain * count) * grain for count in range(1, 5) for grain in (8, 16, 32)}
    even = product((False,), (64, 128, 192, 256), sorted(width for width in widths if width <= MOST_N))
    return tuple(dict.fromkeys((*TILES, *(Tile(*one) for one in even))))


def _whole_waves(problem: ConvProblem, device: Device) -> Iterator[Tile]:
    """Tiles of as few pixels as one to four waves of CTAs need."""
    pixels = problem.n * prod(problem.output)
    for filters, waves in product((64, 128), range(1, 5)):
        beside = waves * device.multiprocessors // (ceil_div(problem.group_k, filters) * problem.groups)
        fewest = round_up(ceil_div(pixels, beside), 8) if beside else 0
        if LEAST_PIXELS <= fewest <= MOST_N:
            yield Tile(True, fewest, filters)


def _chunks(problem: ConvProblem, strided: bool = False) -> list[int]:
    """Bytes of a halo's chunks of channels: as view.py has them (0), and half where the last would be half empty, or
    where a halo has many pixels. Parts of 3xtf32 begin with a whole chunk."""
    whole, rest = divmod(problem.group_c * problem.itemsize, SWIZZLE_BYTES)
    half = whole and (strided or 0 < rest <= SWIZZLE_BYTES // 2) and problem.math != "3xtf32"
    return [0, SWIZZLE_BYTES // 2] if half else [0]


def _gathers(view: View) -> list[int]:
    """Ways to bring halo rows: by TMA (0), and by warps in pieces of so many bytes. What is packed comes by TMA."""
    problem = view.seen
    if problem.layout == "nchw" or problem.math == "3xtf32" or view.config.unfold:
        return [0]
    pieces = [count for count in (16, 8, 4) if problem.group_c * problem.itemsize % count == 0]
    return [*pieces[:1], 0]
