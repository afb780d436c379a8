"""The kernel of cuda.depthwise that streams rows through shared memory: what it takes, its launch, its time.

Rows come by TMA, which costs no instructions and no registers, but some latency; or by cp.async, pixel by pixel, or
whole rows as they lie where a block has all channels and pixels are no multiple of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import boxes, streamed_rows, window
from tapwise.ops.conv.cuda.costs import (
    REGISTERS,
    blocks_of,
    blocks_us,
    cycles_us,
    joint_us,
    memory_us,
    warps_and_idle,
)
from tapwise.ops.conv.cuda.residue_classes import phases, steps
from tapwise.ops.conv.cuda.window import FpropFilters, OutputStrides
from tapwise.ops.conv.problem import ConvProblem

# Products of a thread for a stage's rows, which are all unrolled: more do not fit into the instruction cache.
MOST_PRODUCTS: Final = 1500
# Cycles of a multiprocessor: an instruction, what is moved, a block; a pixel that TMA brings, and more where its bytes
# are no whole lines of memory (fitted to times on 69 layers, N=32); of a block alone: an instruction, the first
# rows of TMA.
ISSUE, MOVE, BLOCK, BOX_PIXEL, RAGGED_PIXEL, LATENCY, FIRST_ROWS = 0.265, 0.962, 107.0, 0.155, 0.22, 1.0, 567.0
LINE: Final = 128
# Instructions of a copy of 4 bytes, and of a piece of a row; microseconds of a launch.
SMALL_COPY, ROW_COPY, START_US = 8.8, 40, 1.56
# Cycles until a product's code is there, of those beyond so many. Of memory's time: all, more where a block has 64
# bytes of a pixel, what L2 saves, and of what blocks read that others read too.
FETCH, WARM_PRODUCTS = 1.27, 250
MEMORY, SMALL_PIECES, IN_L2, SHARED = 1.01, 0.134, 0.844, 0.85
# Filters of so many taps, and strides, are unrolled; values that a thread may hold in registers, and the rest.
MOST_TAPS, MOST_STRIDE, MOST_VALUES, OTHER_REGISTERS, FUNCTION_REGISTERS = 81, 4, 160, 32, 24
# Periods that a block goes through from which three of them are held, else two.
MANY_ROUNDS: Final = 8
# Threads of a block; bytes of a pixel's channels in a block.
LEAST_THREADS, MOST_THREADS, LEAST_BYTES, MOST_BYTES = 32, 288, 64, 256
# Bytes that TMA and rows come in, that TMA brings at full speed, and that a stage of it begins at.
PIECE, TMA_PIECE, TMA_ALIGNMENT = 16, 64, 128


@dataclass(frozen=True)
class Streamed(BaseConfig):
    """A thread computes `channels` and `columns` of outputs, a block has `lanes` times so many channels and `groups`
    times so many columns, `rows` rows of outputs; `stages` of rows of x are in shared memory, where they come `by`
    "tma", or by cp.async as "rows" or "pixels"."""

    by: str
    channels: int
    columns: int
    lanes: int
    groups: int
    rows: int
    stages: int

    @property
    def threads(self) -> int:
        return round_up(self.lanes * self.groups, 32)


def suits(problem: ConvProblem) -> bool:
    """Channels last, one filter each, of up to 81 taps; strides up to 4; what is small."""
    return (
        problem.layout == "nhwc"
        and problem.group_k == 1
        and prod(problem.kernel) <= MOST_TAPS
        and max(steps(problem)) <= MOST_STRIDE
        and streamed_rows.is_small(problem)
    )


def _ways(problem: ConvProblem, config: Streamed, device: Device) -> list[str]:
    """How rows may come to such a block."""
    pixel, block = problem.c * problem.itemsize, config.channels * config.lanes
    dense, found = max(problem.dilation) == 1, ["pixels"] * (pixel % 4 == 0)
    found += ["rows"] * (dense and pixel % 8 > 0 and block == problem.c)
    if dense and has_dependent_launches(device.architecture) and pixel % PIECE == block * problem.itemsize % PIECE == 0:
        found += ["tma"] * (max(_columns(problem, config), block) <= boxes.MOST)
    return found


def copy_bytes(problem: ConvProblem, config: Streamed) -> int:
    """Of one copy: what pixels, there and in a block, are a multiple of."""
    block, sizes = config.channels * config.lanes, (PIECE, 8, 4)
    if config.by == "rows":
        return PIECE
    return next(size for size in sizes if problem.c * problem.itemsize % size == block * problem.itemsize % size == 0)


def _columns(problem: ConvProblem, config: Streamed) -> int:
    """Of x, that a block reads of a row."""
    return (config.groups * config.columns - 1) * steps(problem)[1] + problem.kernel[1]


def _stage_bytes(problem: ConvProblem, config: Streamed) -> int:
    row = _columns(problem, config) * config.channels * config.lanes * problem.itemsize
    if config.by == "rows":
        row = _margin_bytes(problem, config) + round_up(row + PIECE - problem.itemsize, PIECE)
    return round_up(streamed_rows.period(problem) * row, TMA_ALIGNMENT if config.by == "tma" else 1)


def _margin_bytes(problem: ConvProblem, config: Streamed) -> int:
    """Of a row, for columns before the first one's, which are read and masked."""
    return round_up(problem.padding[1][0] * problem.c * problem.itemsize, PIECE) if config.by == "rows" else 0


def shared_bytes(problem: ConvProblem, config: Streamed) -> int:
    barriers = 16 if config.by == "tma" else 0
    return config.stages * (_stage_bytes(problem, config) + barriers)


def filters_at(problem: ConvProblem, config: Streamed) -> int:
    """Where in shared memory filters that are read as they lie begin."""
    return round_up(shared_bytes(problem, config), PIECE)


def filter_bytes(problem: ConvProblem, config: Streamed, taps: int) -> int:
    """What filters of so many taps take there."""
    return config.channels * config.lanes * taps * problem.itemsize


def _items(problem: ConvProblem, config: Streamed) -> int:
    """Copies of a stage by one thread."""
    if config.by == "tma":
        return 0
    copied = _stage_bytes(problem, config) - streamed_rows.period(problem) * _margin_bytes(problem, config)
    return ceil_div(copied // copy_bytes(problem, config), config.threads)


def values(problem: ConvProblem, config: Streamed) -> int:
    """Registers of a thread for weights, sums, a row of x, places of copies, and masks."""
    (r, s), (stride_h, stride_w) = problem.kernel, steps(problem)
    window_columns = (config.columns - 1) * stride_w + s
    each = config.channels * (2 if problem.dtype == "f64" else 1)
    own = (r * s + ceil_div(r, stride_h) * config.columns + window_columns) * each
    copies = _items(problem, config)
    return own + (3 * copies + window_columns if config.by == "rows" else 2 * copies)


def _registers(problem: ConvProblem, config: Streamed) -> int:
    """Of a thread, that are certainly enough."""
    functions, doubles = problem.activation in window.FUNCTIONS, problem.dtype == "f64"
    if config.by == "pixels" or doubles:
        taken = int((1.3 if doubles else 1.2) * values(problem, config)) + OTHER_REGISTERS
        return taken + FUNCTION_REGISTERS * (1 + doubles) * functions
    return values(problem, config) + (29 if config.by == "rows" else 26) + 8 * functions


def min_blocks_per_sm(problem: ConvProblem, config: Streamed) -> int:
    """Blocks that certainly find room."""
    return blocks_of(_registers(problem, config), config.threads, shared_bytes(problem, config))


def configs(problem: ConvProblem, device: Device) -> Iterator[Streamed]:
    if not suits(problem):
        return
    classes_h, classes_w = phases(problem)
    p, q = ceil_div(problem.output[0], classes_h), ceil_div(problem.output[1], classes_w)
    heights = sorted({*(ceil_div(p, pieces) for pieces in (1, 2, 3, 4)), *(min(p, rows) for rows in (8, 16))})
    many, live = (
        {2: (2, 4, 1), 4: (1, 2), 8: (1,)}[problem.itemsize],
        streamed_rows.period(problem) // steps(problem)[0],
    )
    for channels in many:
        # Single elements of 16 bits where there is no other way.
        if problem.c % channels or (channels * problem.itemsize < 4 and problem.c % 2 == 0):
            continue
        for lanes, columns in product(_lanes(problem, channels, device), (4, 8, 2)):
            for groups, rows in product(_groups(q, columns, lanes), reversed(heights)):
                # More is on its way where a block has time for it: measured, short blocks only take longer.
                rounds = ceil_div((rows - 1) * steps(problem)[0] + problem.kernel[0], streamed_rows.period(problem))
                plain = Streamed("", channels, columns, lanes, groups, rows, 3 if rounds >= MANY_ROUNDS else 2)
                if live * prod(problem.kernel) * columns * channels > MOST_PRODUCTS or plain.threads < LEAST_THREADS:
                    continue
                for way in _ways(problem, plain, device):
                    one = replace(plain, by=way)
                    if _fits(problem, one, device):
                        yield one


def _fits(problem: ConvProblem, config: Streamed, device: Device) -> bool:
    """Registers and shared memory of a block, and how many blocks there are."""
    # Filters of more taps with places of copies beside them were spilled.
    most = MOST_VALUES - 15 * (config.by == "pixels" and prod(problem.kernel) > 64)
    return (
        values(problem, config) <= most
        and _registers(problem, config) * round_up(config.threads, 128) <= REGISTERS
        and shared_bytes(problem, config) <= device.shared_bytes
        and _blocks(problem, config) < INDEX_LIMIT
    )


def _lanes(problem: ConvProblem, channels: int, device: Device) -> list[int]:
    """Such as leave few idle, nearest to a warp first; in pieces of 64 bytes where TMA brings them (others took up to
    four times as long), else of 8 or 4 bytes where pixels have them, else all."""
    each, found = channels * problem.itemsize, problem.c // channels
    whole = next((size for size in (PIECE, 8, 4) if problem.c * problem.itemsize % size == 0), None)
    if whole == PIECE and max(problem.dilation) == 1 and has_dependent_launches(device.architecture):
        whole = TMA_PIECE
    if whole is None:
        return [found] * (found <= MOST_THREADS)
    lanes = {n for n in range(LEAST_BYTES // each, MOST_BYTES // each + 1) if n * each % whole == 0}
    if found <= MOST_THREADS // 2:
        lanes.add(found)
    idle = {n: ceil_div(found, n) * n / found for n in lanes if n <= found}
    if not idle:
        return [found]
    fitting = [n for n, waste in idle.items() if waste <= 1.05 * min(idle.values())]
    return sorted(fitting, key=lambda n: (abs(n - 32), n))[:3] + [found] * (found in fitting and found > 32)


def _groups(q: int, columns: int, lanes: int) -> list[int]:
    """Such as share a row evenly."""
    most, needed = max(1, MOST_THREADS // lanes), ceil_div(q, columns)
    found = dict.fromkeys(ceil_div(needed, strips) for strips in range(1, needed + 1))
    return [groups for groups in found if groups <= most][:3]


def predict_us(problem: ConvProblem, config: Streamed, device: Device) -> float:
    """Instructions of a multiprocessor's warps and what they move, a block's latency, and memory. Constants are fitted
    to 1,677 times on 39 layers, N=1 and N=32 (H200), then to 641 on 46 more, N=32, at last without those of blocks that
    were not balanced, 484. Issue, moves, latency, TMA's first rows, memory and L2: to 393 on 58 drawn anew."""
    (r, s), (stride_h, stride_w), halves = problem.kernel, steps(problem), problem.itemsize == 2
    rows, copies = (config.rows - 1) * stride_h + r, _items(problem, config)
    seen, stages = (config.columns - 1) * stride_w + s, ceil_div(rows, streamed_rows.period(problem))
    outputs, words = config.rows * config.columns, 2 if problem.dtype == "f64" else 1
    # The last rows have products for outputs that are none.
    rows_of_taps = config.rows * r + (r - 1) / 2 / stride_h
    instructions = (rows_of_taps * s * config.columns * words + outputs / 2) * config.channels
    instructions += rows * (seen * (config.channels * halves + (config.by == "rows")) + 6) + 40 + 2 * r * s
    each_copy = ROW_COPY if config.by == "rows" else SMALL_COPY * (copy_bytes(problem, config) == 4)
    instructions += stages * (20 + copies * each_copy)
    # What goes to and from shared and global memory.
    moved = rows * seen + outputs + stages * copies
    each, alone = ISSUE * instructions + MOVE * moved, LATENCY * instructions + FIRST_ROWS * (config.by == "tma")
    count, held, of_block = _blocks(problem, config), min_blocks_per_sm(problem, config), BLOCK
    warps = warps_and_idle(max(1, min(held, ceil_div(count, device.multiprocessors))), config.threads)
    if config.by == "tma":
        whole = config.channels * config.lanes * problem.itemsize % LINE == 0
        of_block += rows * _columns(problem, config) * (BOX_PIXEL + (0 if whole else RAGGED_PIXEL))
    blocks = blocks_us(count, held, warps * each + of_block, alone, device)
    # What fits into L2 is found there in part; neighbouring blocks read some columns and rows both.
    again = max(1, _columns(problem, config) / (config.groups * config.columns * stride_w))
    again *= max(1, rows / (config.rows * stride_h))
    pieces = (
        1 if config.by == "rows" else 1 + SMALL_PIECES * (64 / (config.channels * config.lanes * problem.itemsize)) ** 2
    )
    in_l2 = IN_L2 * max(0.0, 1 - problem.bytes / device.l2_bytes)
    memory = memory_us(problem, device, 32, 0) * (MEMORY * pieces - in_l2)
    memory += SHARED * (again - 1) * prod(problem.x_shape) * problem.itemsize / (device.gbps * 1e3)
    # Code that is unrolled comes from memory once.
    products = streamed_rows.period(problem) // stride_h * r * s * config.columns * config.channels
    fetched = FETCH * max(0, products - WARM_PRODUCTS) / cycles_us(device)
    return joint_us(blocks, memory, 3.0) + fetched + START_US


def _parts(problem: ConvProblem, config: Streamed) -> tuple[int, int, int]:
    """Pieces of a column of outputs, strips along a row, blocks of channels."""
    (p, q), (classes_h, classes_w) = problem.output, phases(problem)
    pieces = classes_h * ceil_div(ceil_div(p, classes_h), config.rows)
    along = classes_w * ceil_div(ceil_div(q, classes_w), config.groups * config.columns)
    return pieces, along, ceil_div(problem.c, config.channels * config.lanes)


def _is_whole(problem: ConvProblem, config: Streamed) -> bool:
    """Whether all strips have all their columns."""
    return problem.output[1] % (phases(problem)[1] * config.groups * config.columns) == 0


def _blocks(problem: ConvProblem, config: Streamed) -> int:
    return problem.n * prod(_parts(problem, config))


def source(
    problem: ConvProblem, config: Streamed, strides: OutputStrides | None = None, filters: FpropFilters | None = None
) -> Source:
    (r, s), (stride_h, stride_w) = problem.kernel, steps(problem)
    y = strides or OutputStrides.dense(problem)
    words: dict[str, int | bool | str] = {
        "R": r, "S": s, "SH": stride_h, "SW": stride_w, "V": config.channels, "TX": config.columns,
        "LANES": config.lanes, "GROUPS": config.groups, "STAGES": config.stages, "BY": config.by.upper(),
        "COPY": copy_bytes(problem, config), "MARGIN": _margin_bytes(problem, config),
        "Y_STEP": phases(problem)[1] * y.column, "WHOLE": _is_whole(problem, config), "BIAS": problem.bias,
        "RESIDUAL": problem.residual, "ACTIVATION": window.activation(problem.activation),
        "FILTERS_AT": filters_at(problem, config), **window.in_place_words(filters),
    }  # fmt: skip
    declarations = traits(tensor_core_type(problem.dtype), words)
    file, blocks = "ops/conv/cuda/depthwise/streamed.cu", min_blocks_per_sm(problem, config)
    return stub(file, "depthwise_streamed", "Traits", "Streamed", config.threads, blocks, declarations=declarations)


def launch(
    problem: ConvProblem, config: Streamed, device: Device, strides: OutputStrides | None = None,
    filters: FpropFilters | None = None,
) -> Launch:  # fmt: skip
    made = source(problem, config, strides, filters)
    # A stage's rows of a block's columns and channels.
    box = (config.channels * config.lanes, _columns(problem, config), streamed_rows.period(problem))
    map_x = boxes.map_x(problem, box) if config.by == "tma" else None
    room = shared_bytes(problem, config)
    if filters is not None:
        room = filters_at(problem, config) + filter_bytes(problem, config, prod(filters.kernel))
    shape = _blocks(problem, config), config.threads, room
    fields = streamed_rows.fields(problem, made, config.rows, _parts(problem, config), strides)
    return boxes.launch(made, fields, shape, map_x)
