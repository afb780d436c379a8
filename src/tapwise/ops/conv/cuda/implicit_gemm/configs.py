"""The configs of cuda.implicit_gemm for a problem: tiles, schedules, slabs, boxes and bundles that fit into shared
memory and registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Final

from tapwise.algorithm import Device
from tapwise.cuda.jit.tensor_map import LINE_BYTES
from tapwise.ops.conv.cuda.implicit_gemm import geometry, outputs
from tapwise.ops.conv.cuda.implicit_gemm.geometry import Config
from tapwise.ops.conv.problem import ConvProblem

# Taps for which a slab is kept: as many products are under way as there may be, and one.
LEAST_TAPS: Final = 3
# Taps whose products take as long as the next slab needs to come; with fewer there are more than two slabs.
MANY_TAPS: Final = 7
# Outputs of a box's line: with fewer it is mostly halo.
LEAST_ACROSS: Final = 4
# Sets of filters that stay beside slabs and boxes, each with its own blocks.
MOST_SETS: Final = 32
# Registers of a thread beside its sums: in the plain kernel, and for what else it does.
PLAIN_REGISTERS: Final = 60
MORE_REGISTERS: Final = {
    "bias": 8, "function": 56, "short function": 53, "ordered": 36, "residual": 4, "more residual": 17,
    "begun f32": 24, "odd": 48, "f32": 16, "nchw": 44,
}  # fmt: skip
# Outputs of a tile whose sums blocks of a cluster exchange.
MOST_EXCHANGED: Final = 8192
# (rows of the instruction, pixels, filters) of a tile.
TILES: Final = tuple(
    [("filters", pixels, 64) for pixels in (32, 48, 64, 72, 80, 96, 112, 128, 160, 176, 192, 208, 224, 256)]
    + [("filters", pixels, 128) for pixels in (48, 64, 96, 112, 128, 160, 192, 224, 256)]
    + [("pixels", 64, filters) for filters in (16, 24, 32, 40, 48, 64, 96, 128, 192, 256)]
    + [("pixels", 128, filters) for filters in (32, 40, 48, 56, 64, 96, 128, 160, 192, 256)]
    + [("pixels", 256, filters) for filters in (16, 32, 64, 128)]
)
# For few filters, of slabs: their windows overlap less.
LONG_TILES: Final = tuple(
    [("pixels", 512, filters) for filters in (8, 16, 24, 32)] + [("pixels", 1024, filters) for filters in (8, 16)]
)
# Columns of the matrix instruction at most, and of tiles that are made to fill whole waves.
MOST_COLUMNS, LEAST_FILLING = 256, 64
# (warpgroups, whether they take turns, blocks that share gemm_k, blocks of a multiprocessor).
SCHEDULES: Final = (
    (2, True, 1, 1), (2, False, 1, 1), (1, False, 1, 1), (1, False, 1, 2), (1, False, 2, 2), (1, False, 4, 2),
    (1, False, 8, 2), (1, False, 2, 1), (1, False, 4, 1), (1, False, 8, 1),
)  # fmt: skip


def all_configs(problem: ConvProblem, device: Device) -> Sequence[Config]:
    """Every config that fits the device, in no order."""
    found: list[Config] = []
    for way in geometry.unfoldings(problem):
        view = geometry.unfolded(problem, way)
        # What is packed is brought by the copy engine.
        found += [replace(one, unfold=way) for one in _configs(view, device) if not (way and one.gather)]
    return found


def _configs(problem: ConvProblem, device: Device) -> list[Config]:
    """The same of one view."""
    bundles = _bundles(problem, device)
    problem = geometry.folded(problem)
    found = []
    # y and residual go in boxes of as many pixels as divide a tile: smaller ones are slow.
    tiles = dict.fromkeys((*_tiles(problem), *_filling(problem, device, problem.n * prod(problem.output), 16)))
    for (rows, pixels, filters), (warpgroups, turns, split, resident) in product(tiles, SCHEDULES):
        if split > 1 and pixels * filters > MOST_EXCHANGED:
            continue
        config = Config("stream", rows, pixels, filters, warpgroups, turns, 0, split, resident)
        count = geometry.tiles_of(problem, config)[1]
        # Two blocks of a multiprocessor are of use where there are more blocks than multiprocessors.
        staged = _staged(problem, config, device)
        if staged is not None and (resident == 1 or split * count > geometry.PLACED * device.multiprocessors):
            found.append(staged)
        # Filters stay where a block has several tiles of the same.
        if split == resident == 1 and 2 * geometry.blocks_of(problem, config, device) <= count:
            staged = _staged(problem, replace(config, held=True), device)
            if staged is not None and geometry.blocks_of(problem, staged, device):
                found.append(staged)
    # Padded images share their padding with the next, so there is no more of it than windows reach.
    shared = all(min(sides) < reach for sides, reach in zip(problem.padding, problem.reach, strict=True))
    countable = problem.n * prod(geometry.padded(problem)) < geometry.LARGEST
    if set(problem.stride) == {1} and prod(problem.kernel) >= LEAST_TAPS and shared and countable:
        found += _slabs(problem, device)
    if set(problem.stride) == {1} and prod(problem.kernel) >= LEAST_TAPS:
        found += _boxes(problem, device)
    return found + bundles


def _boxes(problem: ConvProblem, device: Device) -> list[Config]:
    """Boxes whose tiles fit the image best: a few widths for each tile."""
    if not geometry.is_whole(problem) and problem.layout == "nhwc" and problem.math != "3xtf32":
        return []
    p, q = problem.output
    found: list[Config] = []
    for rows, pixels, filters in _tiles(problem) + LONG_TILES:
        if filters > (256 if rows == "pixels" else 64) or pixels < 64:
            continue
        widths = {}
        for count in range(1, q + 1):
            across = -(-q // count)
            wide = across + problem.reach[1] - 1
            if across < LEAST_ACROSS:
                break
            if wide > pixels:
                continue
            down = pixels // wide
            tiles = -(-p // down) * count
            lines = (down + problem.reach[0] - 1) * wide
            if wide <= geometry.MOST_LINES and down + problem.reach[0] - 1 <= geometry.MOST_LINES:
                widths[across] = tiles * (pixels + lines)
        for across, line in product(sorted(widths, key=lambda one: widths[one])[:2], _lines(problem)):
            config = Config("box", rows, pixels, filters, 2, True, 0, across=across, line=line)
            found += _ringed(problem, config, device)
    return found


def _bundles(problem: ConvProblem, device: Device) -> list[Config]:
    """Groups of 32 or 64 bytes of channels, as many in a line as fill it, each multiplied with its own filters."""
    size = problem.group_c * problem.itemsize
    count = LINE_BYTES // size if size in (32, 64) else 1
    if (
        count == 1
        or problem.groups % count
        or problem.group_k % 8
        or not geometry.is_whole(problem)
        or problem.math == "3xtf32"
        or problem.layout == "nchw"
    ):
        return []
    found: list[Config] = []
    filters = count * problem.group_k
    view = geometry.view_of(problem, Config("stream", "pixels", 64, filters, 1, False, 3, bundle=count))
    taken = [one for one in SCHEDULES if one[2] == 1]
    for pixels, (warpgroups, turns, split, resident) in product((64, 128, 256), taken):
        config = Config("stream", "pixels", pixels, filters, warpgroups, turns, 0, split, resident, bundle=count)
        staged = _staged(view, config, device)
        if staged is not None and filters <= 256:
            found.append(staged)
    shared = all(min(sides) < reach for sides, reach in zip(problem.padding, problem.reach, strict=True))
    if set(problem.stride) == {1} and prod(problem.kernel) >= LEAST_TAPS and shared:
        for pixels, stages in product((64, 128, 256), (8, 4)):
            config = Config("slab", "pixels", pixels, filters, 2, True, stages, slabs=2, bundle=count)
            if is_legal(view, config, device):
                found.append(config)
    return found


def _slabs(problem: ConvProblem, device: Device) -> list[Config]:
    """Slabs that the copy engine brings, or warps."""
    found: list[Config] = []
    filling = _filling(problem, device, problem.n * prod(geometry.padded(problem)), 8)
    tiles = dict.fromkeys((*_tiles(problem), *LONG_TILES, *filling))
    for (rows, pixels, filters), pieces, line in product(tiles, _pieces(problem), _lines(problem)):
        # Warps that gather would have the same pieces to copy.
        if filters > (256 if rows == "pixels" else 64) or (pieces and line):
            continue
        config = Config("slab", rows, pixels, filters, 2, True, 0, gather=pieces, line=line)
        found += _ringed(problem, config, device)
    return found


def _ringed(problem: ConvProblem, config: Config, device: Device) -> list[Config]:
    """A slab or box with all filters of its tiles beside it, where a block has several of the same, and with as long a
    ring of them as there is room for."""
    across, tiles = geometry.tiles_of(problem, config)
    most = 2 if prod(problem.kernel) >= MANY_TAPS else 4 if config.line else 3
    stays = [
        replace(config, held=True, stages=geometry.steps_of(problem, config), slabs=count)
        for count in range(most, 1, -1)
    ]
    sets, blocks = across * problem.groups, geometry.blocks_of(problem, stays[0], device)
    # Warps that gather take longer than the products of the short tiles that several sets leave room for.
    wanted = sets == 1 or (sets <= MOST_SETS and not config.gather and 0 < 2 * blocks <= tiles)
    found = [one for one in stays if wanted and is_legal(problem, one, device)][:1]
    if found and sets == 1:
        return found
    # A third slab is not worth a ring of fewer than eight stages.
    lengths = [(count, stages) for count in range(most, 1, -1) for stages in (12, 8, 6, 4) if count == 2 or stages >= 8]
    rings = (replace(config, slabs=count, stages=stages) for count, stages in lengths)
    return found + [one for one in rings if is_legal(problem, one, device)][:1]


def _staged(problem: ConvProblem, config: Config, device: Device) -> Config | None:
    """The config with as many stages as there is room for, up to all steps of a block."""
    steps = -(-geometry.steps_of(problem, config) // config.split)
    if config.split == 1:
        steps *= -(-geometry.tiles_of(problem, config)[1] // (device.multiprocessors * config.resident))
    for stages in range(min(8, max(3, steps)), 2, -1):
        one = replace(config, stages=stages)
        if is_legal(problem, one, device):
            return one
    return None


def is_legal(problem: ConvProblem, config: Config, device: Device) -> bool:
    """Whether the tile's parts fit shared memory, its sums the registers, and its rows the warpgroups."""
    room = (device.shared_bytes + 1024) // config.resident - 1024
    # Two warpgroups get registers of the one that copies, which needs them itself where it gathers.
    pair = 216 if config.gather else 232
    registers = pair if config.warpgroups == 2 else 255 if config.resident == 1 else 128
    function, short = (problem.activation == name and config.resident == 1 for name in ("tanh", "gelu"))
    ordered = outputs.order_of(problem, config) > 0
    streamed = config.kernel == "stream" and config.turns and not config.held
    used = {
        "bias": problem.bias or problem.activation is not None,
        "residual": problem.residual and not outputs.is_delivered(problem, config),
        # Of four bytes, or loaded before the products; streams in turns have registers for it.
        "more residual": problem.residual and (problem.dtype == "f32" or (ordered and not streamed)),
        "begun f32": problem.residual and problem.dtype == "f32" and ordered and config.turns,
        "function": function, "short function": short, "ordered": ordered and function,
        "odd": ordered and problem.group_k % 2 == 1,
        "f32": problem.dtype == "f32", "nchw": problem.layout == "nchw",
    }  # fmt: skip
    others = PLAIN_REGISTERS + sum(MORE_REGISTERS[name] for name, needed in used.items() if needed)
    height, width = geometry.sides_of(config)
    share, rest = divmod(height // 64, 1 if config.turns else config.warpgroups)
    return (
        outputs.shared_bytes(problem, config) <= room
        and geometry.steps_of(problem, config) >= config.split
        and share >= 1 and rest == 0
        and share * width // 2 + others <= registers
    )  # fmt: skip


def _tiles(problem: ConvProblem) -> tuple[tuple[str, int, int], ...]:
    """Tiles for any problem, and such as divide the filters of a group evenly."""
    widths = {-(-problem.group_k // (grain * count)) * grain for count in range(1, 5) for grain in (8, 16, 32)}
    even = product(("pixels",), (64, 128, 192, 256), sorted(width for width in widths if width <= 256))
    return tuple(dict.fromkeys((*TILES, *even)))


def _filling(problem: ConvProblem, device: Device, pixels: int, grain: int) -> list[tuple[str, int, int]]:
    """Tiles whose columns are pixels, no wider than their waves ask for: the fewest pixels, in multiples of `grain`,
    with which all `pixels` take so many waves of multiprocessors. Those of the three smallest numbers of waves, with 64
    and with 128 filters."""
    found = []
    for filters in (64, 128):
        across = -(-problem.group_k // filters) * problem.groups
        waves = range(1, 4 + pixels * across // (device.multiprocessors * MOST_COLUMNS))
        each = (-(-pixels // max(1, device.multiprocessors * count // across)) for count in waves)
        widths = (-(-one // grain) * grain for one in each)
        found += [("filters", one, filters) for one in widths if LEAST_FILLING <= one <= MOST_COLUMNS][:3]
    return found


def _lines(problem: ConvProblem) -> list[int]:
    """Lengths of a slab's lines: as `span` has them (0), and half where the last would be half empty. Parts of 3xtf32
    begin with a whole line."""
    whole, rest = divmod(problem.group_c * problem.itemsize, LINE_BYTES)
    return [0, LINE_BYTES // 2] if whole and 0 < rest <= LINE_BYTES // 2 and problem.math != "3xtf32" else [0]


def _pieces(problem: ConvProblem) -> list[int]:
    """Ways to bring a slab: by the copy engine (0), and by warps in pieces of so many bytes."""
    size = problem.itemsize
    if problem.layout == "nchw" or problem.math == "3xtf32":
        return [0]
    pieces = [count for count in (16, 8, 4) if problem.c * size % count == 0 and problem.group_c * size % count == 0]
    return [*pieces[:1], 0]
