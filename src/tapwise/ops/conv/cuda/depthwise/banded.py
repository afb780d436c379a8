"""The kernels of cuda.depthwise with banded weights: what they take, their launches, their time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import boxes, window
from tapwise.ops.conv.cuda.costs import REGISTERS, blocks_of, blocks_us, joint_us, memory_us
from tapwise.ops.conv.cuda.residue_classes import phases, steps
from tapwise.ops.conv.cuda.window import FpropFilters
from tapwise.ops.conv.problem import ConvProblem

# Positions of a tile, outputs of a position, and columns of a step.
TILE, OUTPUTS, STEP = 16, 8, 16
# Where rows begin that TMA brings, for their swizzled pieces; boxes that a warp asks for.
TMA_ALIGNMENT, MOST_STRIPS = 1024, 32
# Columns of boxes, of those that outputs lie beside.
MOST_OUTSIDE = 1.45
# Registers of a thread for weights and sums (rolling), and for sums and operands (blocked).
MOST_VALUES = 144
MOST_STEPS, MOST_ROWS, MOST_STRIDE = 6, 63, 4
OTHER_REGISTERS = 44
# Taps a filter from which weights may be in shared memory.
LEAST_LARGE = 81
# (octets, channels of a warp, tiles, tiles of a warp): 8 to 16 warps.
SHAPES = (
    (1, 1, 1, 1), (2, 1, 1, 1), (4, 2, 1, 1), (8, 4, 1, 1), (4, 4, 1, 1), (2, 2, 1, 1), (1, 1, 2, 1), (1, 1, 2, 2),
    (2, 1, 2, 2), (2, 2, 2, 1), (2, 2, 2, 2), (4, 2, 2, 2), (4, 4, 2, 1), (8, 4, 2, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Banded(BaseConfig):
    """A block has `octets` of channels and `tiles` of 16 positions, a warp `channels` and `tiles_warp` of them.

    A row of a strip has `wide` positions, a strip `rows` rows of outputs, of which `sums` are under way or written
    together; `stages` of `depth` rows of x are in shared memory, where TMA brings them or (`tma` False) threads.
    kernel: "rolling" (weights in registers) or "large" (in shared memory).
    """

    kernel: str
    octets: int
    channels: int
    tiles: int
    tiles_warp: int
    wide: int
    rows: int
    sums: int
    depth: int
    stages: int
    tma: bool = False

    @property
    def warps(self) -> int:
        return 8 * self.octets // self.channels * (self.tiles // self.tiles_warp)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def strips(self) -> int:
        return self.tiles * TILE // self.wide


def suits(problem: ConvProblem) -> bool:
    """16 bits, channels last, an even number of them with one filter each; strides up to 4, windows of up to 96 columns
    and 63 rows; fewer than 2^31 elements."""
    return (
        problem.dtype in ("f16", "bf16")
        and problem.layout == "nhwc"
        and problem.group_k == 1
        and problem.c % 2 == 0
        and max(steps(problem)[0], problem.stride[1]) <= MOST_STRIDE
        and column_steps(problem) <= MOST_STEPS
        and problem.kernel[0] <= MOST_ROWS
        and max(prod(problem.x_shape), prod(problem.y_shape)) < INDEX_LIMIT
    )


def copy_bytes(problem: ConvProblem) -> int:
    """Of one copy: what pixels are a multiple of."""
    return next(size for size in (16, 8, 4) if problem.c * 2 % size == 0)


def column_steps(problem: ConvProblem) -> int:
    """Steps of 16 columns that a position's outputs see."""
    return ceil_div(problem.stride[1] * (OUTPUTS - 1) + problem.reach[1], STEP)


def live(problem: ConvProblem) -> int:
    """Rows of outputs under way."""
    return ceil_div(problem.kernel[0], steps(problem)[0])


def strip_pieces(problem: ConvProblem, config: Banded) -> int:
    """Pieces of 16 bytes from strip to strip in a plane."""
    stride_w = problem.stride[1]
    need = max(_groups(problem, config), stride_w * (config.wide - 1) + 2 * column_steps(problem))
    return _pitch(need, config.wide, stride_w)


@lru_cache(4096)
def _pitch(need: int, wide: int, stride_w: int) -> int:
    """Of what suffices that with the fewest conflicts of eight positions' banks."""

    def conflicts(pitch: int) -> int:
        found = 0
        for first in (0, 8):
            at = [j // wide * pitch + j % wide * stride_w for j in range(first, first + 8)]
            found += max(sum(place % 8 == bank for place in at) for bank in range(8))
        return found

    return min((need, need + 1), key=lambda pitch: (conflicts(pitch), pitch))


def _groups(problem: ConvProblem, config: Banded) -> int:
    """Of 8 columns that a strip sees."""
    return ceil_div(problem.stride[1] * (OUTPUTS * config.wide - 1) + problem.reach[1], 8)


def shared_bytes(problem: ConvProblem, config: Banded) -> int:
    channels, positions = config.octets * 8, config.tiles * TILE
    rows = round_up(config.depth, 4 // min(4, config.octets))
    slots = config.strips * _groups(problem, config) * 8
    raw = rows * slots * (config.octets | 1) * 16 * config.stages
    if config.tma:
        more = (rows - config.depth) * _groups(problem, config) * 8
        raw = (config.depth * slots * config.stages + more) * config.octets * 16 + TMA_ALIGNMENT + 8 * config.stages
    planes = rows * channels * (config.strips * strip_pieces(problem, config) | 1) * 16
    out = config.sums * channels * (positions + 1) * 16 * (2 if problem.residual else 1)
    if config.kernel == "rolling":
        return raw + planes + out
    r, s = problem.kernel
    taps = round_up(channels * r * s * 2, 16)
    row = pairs(7 * problem.stride[1] + STEP * column_steps(problem))
    return round_up(channels * r * row, 16) + max(raw + planes, out, taps)


def pairs(places: int) -> int:
    """Bytes of a row of taps with zeros beside them, as pairs that begin at even places and at odd ones."""
    words = (places + 2) // 2
    half = words // 32 * 32 + 8 if words % 32 < 8 else words // 32 * 32 + 40 if words % 32 > 24 else words
    return (half + words) * 4


def values(problem: ConvProblem, config: Banded) -> int:
    """Registers of a thread for weights, sums and operands."""
    ksteps = column_steps(problem)
    weights = 2 * ksteps * (problem.kernel[0] if config.kernel == "rolling" else 1)
    sums = live(problem) if config.kernel == "rolling" else config.sums
    return weights * config.channels + (sums + ksteps) * 4 * config.tiles_warp * config.channels


def _places(problem: ConvProblem, config: Banded) -> int:
    """Registers of a thread for places of copies, matrices and outputs."""
    groups, once = config.strips * _groups(problem, config), min(4, config.octets)
    copies = 0 if config.tma else ceil_div(groups * 8 * config.octets * 16 // copy_bytes(problem), config.threads)
    transposed = ceil_div(groups * config.octets // once * ceil_div(config.depth, 4 // once), config.warps)
    written = ceil_div(4 * config.tiles * config.octets, config.warps)
    return 2 * copies + 2 * transposed + 3 * written


def _registers(problem: ConvProblem, config: Banded) -> int:
    taken = values(problem, config) + _places(problem, config) + OTHER_REGISTERS
    return min(255, taken + 24 * (problem.activation in window.FUNCTIONS))


def min_blocks_per_sm(problem: ConvProblem, config: Banded) -> int:
    """Blocks that registers and shared memory leave room for."""
    return blocks_of(_registers(problem, config), config.threads, shared_bytes(problem, config))


def configs(problem: ConvProblem, device: Device) -> Iterator[Banded]:
    if not suits(problem):
        return
    p, wide = ceil_div(problem.output[0], phases(problem)[0]), ceil_div(problem.output[1], OUTPUTS)
    octets = ceil_div(problem.c, 8)
    widths = sorted({ceil_div(wide, parts) for parts in (1, 2, 3, 4, 8)})
    for count, channels, tiles, tiles_warp in SHAPES:
        if count > 1 and count >= 2 * octets:
            continue
        for across in widths:
            if across > tiles * TILE:
                continue
            for kernel, rows, sums, depth, stages in _depths(problem, p):
                if kernel == "large" and channels > 1:
                    continue
                one = Banded(kernel, count, channels, tiles, tiles_warp, across, rows, sums, depth, stages)
                one = replace(one, tma=_is_for_tma(problem, one, device))
                if values(problem, one) > MOST_VALUES or one.threads * _registers(problem, one) > REGISTERS:
                    continue
                if shared_bytes(problem, one) <= device.shared_bytes:
                    yield one


def _is_for_tma(problem: ConvProblem, config: Banded, device: Device) -> bool:
    """Whether boxes of rows, columns and channels are what a block copies. Measured, they are faster in whole sectors
    of 32 bytes and more, where most of their columns are the image's."""
    columns, span = _groups(problem, config) * 8, config.octets * 16
    return (
        has_dependent_launches(device.architecture)
        and config.octets > 1
        and problem.c * problem.itemsize % span == 0
        and problem.dilation[0] == 1
        and columns <= MOST_OUTSIDE * min(problem.stride[1] * OUTPUTS * config.wide, problem.spatial[1])
        and max(columns, config.depth) <= boxes.MOST
        and config.strips <= MOST_STRIPS
    )


def _depths(problem: ConvProblem, p: int) -> Iterator[tuple[str, int, int, int, int]]:
    """(kernel, rows, sums, depth, stages)."""
    rows_under_way, stride_h = live(problem), steps(problem)[0]
    heights = sorted({*(ceil_div(p, pieces) for pieces in (1, 2, 4)), *(min(p, rows) for rows in (16, 8, 4))})
    period = rows_under_way * stride_h
    depths = [part for part in (2, 4) if part < period] + [period * n for n in (1, 2, 4) if n == 1 or period * n <= 12]
    for depth in depths:
        sums = ceil_div(depth, stride_h)
        for rows in heights:
            for stages in (2, 3):
                yield "rolling", rows, sums, depth, stages
    if prod(problem.kernel) >= LEAST_LARGE:
        for rows in sorted({min(p, rows) for rows in (4, 7, 8, 14, 16)}):
            yield "large", rows, rows, 4, 2


def predict_us(problem: ConvProblem, config: Banded, device: Device) -> float:
    """Instructions of all warps, matrix products, a block's latency, and memory."""
    r, stride_h, ksteps = problem.kernel[0], steps(problem)[0], column_steps(problem)
    rows, once = (config.rows - 1) * stride_h + r, min(4, config.octets)
    tiles, groups = config.tiles * config.octets * 8, config.strips * _groups(problem, config)
    copies = 0.0 if config.tma else rows * groups * 8 * (config.octets * 16 // copy_bytes(problem)) / 32
    transposed = ceil_div(rows, config.depth) * ceil_div(config.depth, 4 // once) * groups * config.octets / once
    written = config.rows * 4 * config.tiles * config.octets
    # Instructions of a tile's products, with what brings their weights, and of operands, copies and outputs.
    large = config.kernel == "large"
    products = tiles * ksteps * (config.rows * r if large else rows * ceil_div(r, stride_h))
    others: float = tiles * (rows * ksteps * 2 + (config.rows if large else rows) * 8)
    others += 6 * copies + 7 * transposed + 8 * written
    each, stages = 1.6 * (products + others), ceil_div(rows, config.depth)
    alone = 2450 + 0.48 * each / config.warps + 260 * stages
    if large:
        each = products * (2.0 + 1.34 / config.tiles_warp) + 1.8 * others
        # Filters are spread in shared memory first.
        alone = 90 + 0.1 * each / config.warps + 280 * stages + 363 * config.octets * 8 * r / config.warps
    blocks = blocks_us(_blocks(problem, config), min_blocks_per_sm(problem, config), each, alone, device)
    piece = min(config.octets * 8, problem.c) * 2
    return (1.8 if large else 0.55) + joint_us(blocks, 0.85 * memory_us(problem, device, piece, 1.65), 5.3)


def _parts(problem: ConvProblem, config: Banded) -> tuple[int, int, int]:
    """Pieces of rows, strips along a row, and blocks of channels."""
    (p, q), classes = problem.output, phases(problem)[0]
    pieces = classes * ceil_div(ceil_div(p, classes), config.rows)
    return pieces, ceil_div(q, OUTPUTS * config.wide), ceil_div(problem.c, 8 * config.octets)


def _blocks(problem: ConvProblem, config: Banded) -> int:
    pieces, along, channels = _parts(problem, config)
    return ceil_div(problem.n * pieces * along, config.strips) * channels


def source(problem: ConvProblem, config: Banded, filters: FpropFilters | None = None) -> Source:
    (r, s), large = problem.kernel, config.kernel == "large"
    words: dict[str, int | bool | str] = {
        "R": r, "S": s, "SH": steps(problem)[0], "SW": problem.stride[1], "DW": problem.dilation[1],
        "OCTETS": config.octets, "EACH": config.channels, "TILES": config.tiles, "MTILES": config.tiles_warp,
        "WIDE": config.wide, "STRIP": strip_pieces(problem, config), "ROWS": config.depth, "STAGES": config.stages,
        "SUMS": config.sums, "PHASES": phases(problem)[0], "STRIPS_ROW": _parts(problem, config)[1],
        "COPY": copy_bytes(problem), "TMA": config.tma, "BIAS": problem.bias, "RESIDUAL": problem.residual,
        "ACTIVATION": window.activation(problem.activation), **window.in_place_words(filters),
    }  # fmt: skip
    file, blocks = f"ops/conv/cuda/depthwise/banded{'_large' * large}.cu", min_blocks_per_sm(problem, config)
    declarations = traits(tensor_core_type(problem.dtype), words)
    name = f"depthwise_banded{'_large' * large}"
    return stub(file, name, "Traits", "Banded", config.threads, blocks, declarations=declarations)


def launch(problem: ConvProblem, config: Banded, device: Device, filters: FpropFilters | None = None) -> Launch:
    made = source(problem, config, filters)
    pieces, along, channels = _parts(problem, config)
    fields = window.window_fields(problem, made)
    fields |= {"rows": config.rows, "strips": problem.n * pieces * along, "channel_blocks": channels}
    # A stage's rows of a strip's columns and a block's channels, in pieces of 16 bytes that are swizzled.
    span, box = config.octets * 16, (config.octets * 8, _groups(problem, config) * 8, config.depth)
    map_x = boxes.map_x(problem, box, span) if config.tma else None
    shape = _blocks(problem, config), config.threads, shared_bytes(problem, config)
    return boxes.launch(made, fields, shape, map_x)
