"""The kernel of cuda.depthwise on sparse tensor cores: rows of a filter as bands, pixels read and written as they lie.

A product has two channels of 8 outputs beside each other, of 8 places of the images: what is zero between channels is
what mma.sp leaves out. TMA brings rows of x and takes rows of y; nothing is transposed.

Source: PTX ISA on mma.sp, tensor maps and setmaxnreg.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.jit.occupancy import MORE_BYTES, room_of
from tapwise.cuda.jit.tensor_map import TensorMap
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import boxes, window
from tapwise.ops.conv.cuda.costs import (
    REGISTERS,
    SHARED_BYTES,
    WARPGROUP,
    blocks_of,
    cycles_us,
    joint_us,
)
from tapwise.ops.conv.cuda.window import FpropFilters
from tapwise.ops.conv.problem import ConvProblem

LANES: Final = 32
# Outputs of a place, places of a product, columns of x that a place sees; channels of a warp, its pairs of them; bytes
# that a row begins at multiples of.
OUTPUTS, PLACES, COLUMNS, EACH, PAIRS, ALIGNED = 8, 8, 16, 4, 2, 1024
# Of a block: channels, tiles of a warp, warps at most; images; rows of x and y on their way at most.
CHANNELS, TILES, MOST_WARPS = (64, 32, 16), (1, 2), 16
IMAGES, MOST_STAGES, OUTS = (8, 4, 2, 1), 8, 3
# Columns of taps at least: fewer are faster without products. Rows of them; units of a strip; unrolled products.
LEAST_TAPS, MOST_TAPS, MOST_UNITS, MOST_PRODUCTS = 5, 11, 8, 420
# Rows of a stage, of which all are made at once; where rows of outputs under way are a multiple of them.
STAGE_ROWS: Final = (1, 2, 4)
# Outputs of a place at least; of the places of a block, so many are there.
LEAST_WIDTH, LEAST_PLACES = 4, 0.7
# Registers of a thread beside taps, sums and columns; all at most. Warps that help.
OTHER_REGISTERS, MOST_REGISTERS, HELPERS = 34, 248, 2
# Registers of a thread that multiplies and of one of a warpgroup that gives them up, by the warps that multiply. With
# 24, as costs.TAKEN has it of eight, those that bring and take runs of rows spill.
TAKEN: Final = {8: (232, 40), 12: (152, 56)}
# Pieces of a line that blocks have, where its rows are a multiple of them; parts at most, as a grid's second axis.
PIECES, MOST_PARTS = (1, 2, 3, 4, 5, 6, 8), (1 << 16) - 1


@dataclass(frozen=True)
class Sparse(BaseConfig):
    """A block has `channels`, of sets of `images` strips of `units` of `width` columns; `parts` blocks share the rows
    of outputs of them all, one behind the other. `share` warps have the same channels, with `tiles` of 8 places each.
    `stages` of `stage_rows` rows of x are on their way. Where warps that multiply take registers of the others
    (`takes`), those are a warpgroup."""

    channels: int
    share: int
    tiles: int
    units: int
    width: int
    images: int
    parts: int
    stage_rows: int
    stages: int
    takes: bool = False

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return LANES * self.channels // EACH * self.share

    @property
    def threads(self) -> int:
        return self.consumers + LANES * (WARPGROUP if self.takes else HELPERS)

    @property
    def strip(self) -> int:
        """Columns of outputs."""
        return self.units * self.width


def reach(problem: ConvProblem, axis: int) -> int:
    """Rows or columns from the first tap to the last."""
    return (problem.kernel[axis] - 1) * problem.dilation[axis]


def suits(problem: ConvProblem, device: Device) -> bool:
    """16 bits, channels last, in eights, one filter each, of five columns or more; stride 1; no residual."""
    return (
        problem.dtype in ("f16", "bf16")
        and problem.layout == "nhwc"
        and problem.group_k == 1
        and problem.c % 8 == 0
        and not problem.residual
        and problem.stride == (1, 1)
        and problem.kernel[0] <= MOST_TAPS
        and problem.kernel[1] >= LEAST_TAPS
        and reach(problem, 1) < COLUMNS
        and most_width(problem) >= min(LEAST_WIDTH, problem.output[1])
        and max(prod(problem.x_shape), prod(problem.y_shape)) < INDEX_LIMIT
        and has_dependent_launches(device.architecture)
    )


def most_width(problem: ConvProblem) -> int:
    """Outputs of a place."""
    return min(OUTPUTS, COLUMNS - reach(problem, 1))


def columns_x(problem: ConvProblem, config: Sparse) -> int:
    """Of a row of x: two more than a multiple of four, so that lanes of several images read from all banks."""
    return round_up(min(config.strip, max(1, problem.output[1])) + reach(problem, 1) - 2, 4) + 2


def row_bytes(problem: ConvProblem, config: Sparse) -> tuple[int, int]:
    """Of a row of x of all images, with zeros where the last unit reads beyond, and of one of y."""
    pixel, columns = config.channels * problem.itemsize, columns_x(problem, config)
    x = config.images * columns + max(0, config.strip - config.width + COLUMNS - columns)
    return round_up(x * pixel, ALIGNED), round_up(config.images * config.strip * pixel, ALIGNED)


def shared_bytes(problem: ConvProblem, config: Sparse, filters: FpropFilters | None = None) -> int:
    """Rows of x and y, taps, barriers."""
    count = prod(filters.kernel if filters else problem.kernel)
    row_x, row_y = (config.stage_rows * row for row in row_bytes(problem, config))
    taps = config.channels * count * problem.itemsize
    return config.stages * (row_x + 16) + OUTS * (row_y + 16) + taps + 16


def reads_in_place(problem: ConvProblem, config: Sparse, filters: FpropFilters) -> bool:
    """Whether there is room for filters of fprop, of which a stride leaves some taps to each phase."""
    return shared_bytes(problem, config, filters) <= SHARED_BYTES - MORE_BYTES


def live_rows(problem: ConvProblem) -> int:
    """Rows of outputs under way, with the one that is whole."""
    return reach(problem, 0) + 2


def products(problem: ConvProblem, config: Sparse) -> int:
    """That are unrolled: of as many rows of x as there are rows of outputs under way."""
    return live_rows(problem) * problem.kernel[0] * config.tiles * PAIRS


def registers(problem: ConvProblem, config: Sparse) -> int:
    """Of a thread that multiplies, about."""
    taps, sums = 4 * PAIRS * problem.kernel[0], 4 * PAIRS * config.tiles * live_rows(problem)
    more = EACH * problem.bias + 6 * (problem.activation in window.FUNCTIONS)
    return taps + sums + 8 * PAIRS * config.tiles + OTHER_REGISTERS + more


def min_blocks_per_sm(problem: ConvProblem, config: Sparse) -> int:
    return blocks_of(registers(problem, config), config.threads, shared_bytes(problem, config))


def configs(problem: ConvProblem, device: Device) -> Iterator[Sparse]:
    if not suits(problem, device) or not problem.output[0] or not problem.output[1]:
        return
    needed = ceil_div(problem.output[1], most_width(problem))
    units = sorted({ceil_div(needed, strips) for strips in range(1, needed + 1)})
    for channels, tiles, images in product(CHANNELS, TILES, IMAGES):
        if (channels > CHANNELS[-1] and channels >= 2 * problem.c) or images >= 2 * problem.n:
            continue
        for count in units:
            places = count * images
            share = ceil_div(places, PLACES * tiles)
            if count > MOST_UNITS or (places < LEAST_PLACES * PLACES * tiles * share and images < problem.n):
                continue
            width = ceil_div(problem.output[1], count * ceil_div(needed, count))
            for stage_rows in STAGE_ROWS:
                plain = Sparse(channels, share, tiles, count, width, images, 1, stage_rows, 2)
                if live_rows(problem) % stage_rows == 0:
                    for one in _fitting(problem, plain, device):
                        yield from (replace(one, parts=parts) for parts in _parts(problem, one, device))


def _fitting(problem: ConvProblem, config: Sparse, device: Device) -> list[Sparse]:
    """With as many stages as one block a multiprocessor, two and three have room for; with registers of the others,
    where it needs them."""
    warps, taken = config.consumers // LANES, registers(problem, config)
    if not 2 <= warps <= MOST_WARPS or products(problem, config) > MOST_PRODUCTS:
        return []
    if max(columns_x(problem, config), config.strip) > boxes.MOST:
        return []
    if taken > min(MOST_REGISTERS, REGISTERS // round_up(config.threads, 4 * LANES) // 8 * 8):
        if warps not in TAKEN or taken > TAKEN[warps][0]:
            return []
        config = replace(config, takes=True)
    stage, found = config.stage_rows * row_bytes(problem, config)[0] + 16, []
    fixed = shared_bytes(problem, config) - config.stages * stage
    for beside in (1, 2, 3):
        one = replace(config, stages=min(MOST_STAGES, (room_of(device, beside) - fixed) // stage))
        if one.stages >= 2 and (beside == 1 or blocks_of(taken, config.threads) >= beside) and one not in found:
            found.append(one)
    return found


def blocks_and_lines(problem: ConvProblem, config: Sparse) -> tuple[int, int]:
    """Blocks of channels; strips of columns of all sets of images."""
    strips, sets = ceil_div(problem.output[1], config.strip), ceil_div(problem.n, config.images)
    return ceil_div(problem.c, config.channels), strips * sets


def _parts(problem: ConvProblem, config: Sparse, device: Device) -> list[int]:
    """Pieces of lines; or as many parts as find places at once, which are even but for what begins cost."""
    blocks, lines = blocks_and_lines(problem, config)
    places = device.multiprocessors * min_blocks_per_sm(problem, config)
    found = {lines * pieces for pieces in PIECES if problem.output[0] % pieces == 0} | {places // blocks}
    most = min(lines * problem.output[0] // config.stage_rows, MOST_PARTS)
    return sorted(parts for parts in found if 1 <= parts <= most)


def in_pieces(problem: ConvProblem, config: Sparse) -> bool:
    """Whether each block has a piece of a line, all of the same rows, or whole ones."""
    _, lines = blocks_and_lines(problem, config)
    pieces, rest = divmod(config.parts, lines)
    return lines % config.parts == 0 or (rest == 0 and problem.output[0] % pieces == 0)


def runs_of(problem: ConvProblem, config: Sparse) -> tuple[float, float]:
    """Of a block, in the mean, runs of rows of a line, and rows of each."""
    (p, _), (_, lines) = problem.output, blocks_and_lines(problem, config)
    rows = lines * p / config.parts
    runs = max(1.0, rows / p) if in_pieces(problem, config) else (rows + p - 1) / p
    return runs, rows / runs


# Of the cost model, fitted to 544 times on 16 layers, 32 images (H200), then to 139 on 23 more. Cycles of a
# multiprocessor: a product, a load or store of a warp, a pixel of a box; bytes of a cycle; cycles of a warp alone: a
# row, a stage's barriers, a product; a block's begin. How sharply the larger decides; microseconds.
PRODUCT, MOVE, PIXEL, L2_BYTES, ROW, STAGE, OWN_PRODUCT, BLOCK = 1.01, 2.25, 1.78, 25.3, 73.0, 260.0, 2.67, 2000.0
POWER, START_US = 1.5, 0.88
# Of memory's time for what blocks read that others read, too.
SHARED: Final = 0.86


def predict_us(problem: ConvProblem, config: Sparse, device: Device) -> float:
    """Blocks' rows: what warps multiply and move, what TMA brings and takes, a warp's chain; memory."""
    (r, _), (height, _), each = problem.kernel, problem.spatial, config.stage_rows
    (blocks, lines), strips = blocks_and_lines(problem, config), ceil_div(problem.output[1], config.strip)
    runs, of_run = runs_of(problem, config)
    above, pieces = problem.padding[0][0], runs * config.parts / lines
    rows = min(height, of_run + reach(problem, 0))
    # With rows of stages that are not in x; rows that are multiplied, without those above x.
    brought = runs * (rows + (each - 1) / 2)
    skipped = min(above, reach(problem, 0)) // each * each / pieces
    turns = runs * (of_run + (each - 1) / 2 + live_rows(problem) - skipped)
    size = config.channels * problem.itemsize
    warps, of_row = config.consumers // LANES, r * config.tiles * PAIRS
    loads = 4 * conflicts(size, columns_x(problem, config), config.width, config.images)
    moved = config.tiles * (loads * turns + 2 * runs * of_run)
    issued = warps * (PRODUCT * turns * of_row + MOVE * moved)
    pixels = config.images * (brought * columns_x(problem, config) + runs * of_run * config.strip)
    there = problem.spatial[1] / strips * rows * runs + problem.output[1] / strips * runs * of_run
    loaded = max(PIXEL * pixels, min(config.images, problem.n) * there * size / L2_BYTES)
    own = turns * (ROW + STAGE / each + OWN_PRODUCT * of_row)
    held, share = min_blocks_per_sm(problem, config), ceil_div(blocks * config.parts, device.multiprocessors)

    def wave(count: int) -> float:
        return joint_us(joint_us(count * issued, count * loaded, POWER), own, POWER) + BLOCK if count else 0.0

    busy = (share // held * wave(held) + wave(share % held)) / cycles_us(device)
    return START_US + joint_us(busy, _memory_us(problem, config, device), 4.0)


def _memory_us(problem: ConvProblem, config: Sparse, device: Device) -> float:
    """All arrays once, and of x the columns and rows that neighbouring blocks see, too."""
    (_, lines), strips = blocks_and_lines(problem, config), ceil_div(problem.output[1], config.strip)
    (height, width), (runs, of_run) = problem.spatial, runs_of(problem, config)
    across, down = min(width, config.strip + reach(problem, 1)), min(height, of_run + reach(problem, 0))
    seen = strips * across * runs * config.parts / lines * down
    again = SHARED * max(0.0, seen / max(1, height * width) - 1) * prod(problem.x_shape) * problem.itemsize
    return (problem.bytes + again) / (device.gbps * 1e3)


@lru_cache(4096)
def conflicts(pixel: int, columns: int, width: int, images: int) -> float:
    """Turns of a load of half a warp, four columns of four places: units of an image lie in the same banks."""
    turns = 0
    for first in (0, 4):
        banks: list[set[int]] = [set() for _ in range(16)]
        for place, column in product(range(first, first + 4), range(4)):
            at = (place % images * columns + place // images * width + column) * pixel
            at ^= at // 128 % (pixel // 16) * 16
            banks[at // 8 % 16].add(at)
        turns += max(len(found) for found in banks)
    return turns / 2


def source(problem: ConvProblem, config: Sparse, filters: FpropFilters | None = None) -> Source:
    dilation_h, dilation_w = problem.dilation
    takes, leaves = TAKEN[config.consumers // LANES] if config.takes else (0, 0)
    words: dict[str, int | bool | str] = {
        "CHANNELS": config.channels, "SHARE": config.share, "TILES": config.tiles,
        "UNITS": config.units, "WIDTH": config.width, "COLUMNS_X": columns_x(problem, config), "IMAGES": config.images,
        "ROWS": config.stage_rows, "STAGES": config.stages, "OUTS": OUTS, "R": problem.kernel[0],
        "S": problem.kernel[1], "DH": dilation_h, "DW": dilation_w, "TAKES": takes, "LEAVES": leaves,
        "BIAS": problem.bias, "ACTIVATION": window.activation(problem.activation), **window.in_place_words(filters),
    }  # fmt: skip
    file, held = "ops/conv/cuda/depthwise/sparse.cu", min_blocks_per_sm(problem, config)
    declarations = traits(tensor_core_type(problem.dtype), words)
    return stub(file, "depthwise_sparse", "Traits", "SparseRows", config.threads, held, declarations=declarations)


def launch(problem: ConvProblem, config: Sparse, device: Device, filters: FpropFilters | None = None) -> Launch:
    made, (blocks, lines) = source(problem, config, filters), blocks_and_lines(problem, config)
    run_rows = 0 if in_pieces(problem, config) else reach(problem, 0)
    rows, more = divmod(lines * (problem.output[0] + run_rows), config.parts)
    fields = window.window_fields(problem, made) | {
        "sets": ceil_div(problem.n, config.images), "run_rows": run_rows, "part_rows": rows, "more_parts": more,
    }  # fmt: skip
    grid, names = (blocks, config.parts, 1), {"map_x": "x", "map_y": "y"}
    maps = {
        "map_x": _map(problem, problem.spatial, columns_x(problem, config), config),
        "map_y": _map(problem, problem.output, config.strip, config),
    }
    shared = shared_bytes(problem, config, filters)
    return Launch(made, fields, grid, config.threads, shared, maps, dependent=True, names_of=names)


def _map(problem: ConvProblem, sizes: tuple[int, ...], columns: int, config: Sparse) -> TensorMap:
    """A row of a strip of a set of images."""
    (high, wide), pixel = sizes, problem.c * problem.itemsize
    strides, box = (pixel, pixel * wide, pixel * wide * high), (config.channels, columns, 1, config.images)
    swizzle = config.channels * problem.itemsize
    return TensorMap(problem.dtype, (problem.c, wide, high, problem.n), strides, box, swizzle_bytes=swizzle)
