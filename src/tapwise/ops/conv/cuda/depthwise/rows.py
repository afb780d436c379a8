"""The kernel of cuda.depthwise for images of few columns: a thread computes whole rows of outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.costs import blocks_of, blocks_us, joint_us, warps_and_idle
from tapwise.ops.conv.cuda.window import FpropFilters, OutputStrides
from tapwise.ops.conv.problem import ConvProblem

# Columns of x, and of y; sizes, strides and elements of an image that are counted in 32 bits.
MOST_COLUMNS, MOST_SIZE, MOST_ELEMENTS = 32, 1 << 20, 1 << 29
# Products of a thread for a row of x, which are unrolled; values that it may hold in registers, and the rest.
MOST_PRODUCTS, MOST_VALUES, OTHER_REGISTERS, FUNCTION_REGISTERS = 1200, 168, 24, 24
# Threads of a block, such as it has where there are rows enough, and the least where a thread has two of them.
MOST_THREADS, SOME_THREADS, LEAST_THREADS = 288, 128, 96
# Cycles of a multiprocessor: an instruction, a read of weights; a block alone: its start, an instruction, a row of x.
ISSUE, TAP, BEGIN, LATENCY, ROW = 0.367, 0.43, 127.0, 0.64, 47.0
# Instructions: a conversion of x, an output, its function, a turn of bringing weights. Microseconds of a launch.
CONVERSION, OUTPUT, FUNCTION, TURN, START_US = 0.126, 6.3, 2.9, 12.2, 1.7
# Of memory's time: all, and what is beside the pieces; how much of it overlaps; bytes that are read at least.
MEMORY, BESIDE, POWER, SECTOR = 1.07, 0.8, 1.9, 32
# Bytes of weights that a block has at most.
MOST_SHARED: Final = 96 << 10


@dataclass(frozen=True)
class Rows(BaseConfig):
    """A thread computes `channels` of `rows` rows of outputs, a block has `lanes` times so many channels and `groups`
    times so many rows."""

    channels: int
    rows: int
    lanes: int
    groups: int

    @property
    def threads(self) -> int:
        return round_up(self.lanes * self.groups, 32)


def suits(problem: ConvProblem) -> bool:
    """Channels last, one filter each, up to 32 columns of x and y; sizes under 2^20, images under 2^29 elements."""
    sides = (side for pair in problem.padding for side in pair)
    sizes = (*problem.spatial, *problem.output, *problem.reach, *problem.stride, *problem.dilation, *sides)
    return (
        problem.layout == "nhwc"
        and problem.group_k == 1
        and max(problem.spatial[1], problem.output[1]) <= MOST_COLUMNS
        and max(sizes) < MOST_SIZE
        and max(prod(problem.spatial), prod(problem.output)) * problem.c < MOST_ELEMENTS
    )


def products(problem: ConvProblem) -> int:
    """Of a row of outputs with a row of taps and a channel: those that have no padding."""
    left, step, dilation = problem.padding[1][0], problem.stride[1], problem.dilation[1]
    columns = (q * step - left + s * dilation for q in range(problem.output[1]) for s in range(problem.kernel[1]))
    return sum(0 <= column < problem.spatial[1] for column in columns)


def values(problem: ConvProblem, config: Rows) -> int:
    """Registers of a thread for sums, a row of x, and the next one as it lies in memory."""
    words = 2 if problem.dtype == "f64" else 1
    columns, outputs = problem.spatial[1], problem.output[1] * config.rows
    packed = columns * ceil_div(config.channels * problem.itemsize, 4)
    return (columns + outputs + 1) * config.channels * words + packed


def shared_bytes(problem: ConvProblem, config: Rows) -> int:
    """A block's weights as they are computed with."""
    return prod(problem.kernel) * config.lanes * config.channels * (8 if problem.dtype == "f64" else 4)


def min_blocks_per_sm(problem: ConvProblem, config: Rows) -> int:
    """Blocks that find room."""
    functions = FUNCTION_REGISTERS * (problem.activation in window.FUNCTIONS)
    taken = int(1.05 * values(problem, config)) + OTHER_REGISTERS + functions
    return blocks_of(taken, config.threads, shared_bytes(problem, config))


def configs(problem: ConvProblem, device: Device) -> Iterator[Rows]:
    if not suits(problem):
        return
    most = {2: (2, 4, 1), 4: (1, 2, 4), 8: (1,)}[problem.itemsize]
    for channels in most:
        if problem.c % channels or channels * problem.itemsize > 16:
            continue
        for rows in (1, 2):
            # Rows of x are shared by neighbouring outputs alone.
            if rows > 1 and (problem.dilation[0] > 1 or rows > problem.output[0]):
                continue
            for lanes in _lanes(problem.c // channels):
                for groups in _groups(ceil_div(problem.output[0], rows), lanes):
                    # Fewer threads bring the same weights: only where there is not more to do.
                    if rows > 1 and lanes * groups < LEAST_THREADS:
                        continue
                    one = Rows(channels, rows, lanes, groups)
                    if values(problem, one) > MOST_VALUES or products(problem) * channels * rows > MOST_PRODUCTS:
                        continue
                    few = _blocks(problem, one) < INDEX_LIMIT
                    if few and shared_bytes(problem, one) <= min(MOST_SHARED, device.shared_bytes):
                        yield one


def _lanes(found: int) -> list[int]:
    """Such as share the channels evenly: about a warp, or two of them."""
    return list(dict.fromkeys(ceil_div(found, ceil_div(found, most)) for most in (32, 64, 16)))


def _groups(rows: int, lanes: int) -> list[int]:
    """All rows in a block where that is not too many threads, and such as share them evenly."""
    most = max(1, MOST_THREADS // lanes)
    some = max(1, SOME_THREADS // lanes)
    return list(dict.fromkeys(ceil_div(rows, ceil_div(rows, count)) for count in (most, some)))


def predict_us(problem: ConvProblem, config: Rows, device: Device) -> float:
    """Instructions of a multiprocessor's warps, the latency of the block's longest thread, and memory. Constants were
    fitted to 700 times on 32 layers (H200), then to 322 on 38 more: the choice took 1.07 times the best one's time,
    1.28 at worst. What is beside the pieces of pixels: to 403 on 38 layers. A launch: to 142 on 50 drawn anew."""
    (r, s), half, words = problem.kernel, problem.itemsize == 2, 2 if problem.dtype == "f64" else 1
    top, height, step, apart = problem.padding[0][0], problem.spatial[0], problem.stride[0], problem.dilation[0]
    # Rows of x that each thread sees inside the image, and rows of taps that it multiplies.
    seen = (config.rows - 1) * step + r
    inside = [
        sum(0 <= p * step - top + t * apart < height for t in range(seen))
        for p in range(0, problem.output[0], config.rows)
    ]
    mean, most, each_row = sum(inside) / len(inside), max(inside), config.rows * r / seen
    multiplied = products(problem) * config.channels * words * each_row
    read, taps = problem.spatial[1] * config.channels, s * each_row * max(1.0, config.channels * words / 2)
    functions = FUNCTION * (problem.activation in window.FUNCTIONS)
    outputs = problem.output[1] * config.rows * (OUTPUT + config.channels * (1 + functions))
    turns = TURN * ceil_div(prod(problem.kernel), config.groups)
    issued = ISSUE * (mean * (multiplied + CONVERSION * read * half) + outputs + turns) + TAP * mean * taps
    longest = most * (multiplied + read * (1 + half) + taps) + outputs + turns
    alone = BEGIN + LATENCY * longest + ROW * most
    held = min_blocks_per_sm(problem, config)
    warps = warps_and_idle(held, config.threads)
    blocks = blocks_us(_blocks(problem, config), held, warps * issued, alone, device)
    memory = MEMORY * problem.bytes / (device.gbps * 1e3) + _sectors_us(problem, config, device)
    return joint_us(blocks, memory, POWER) + START_US


def _sectors_us(problem: ConvProblem, config: Rows, device: Device) -> float:
    """What blocks read of sectors beyond their pieces of a pixel, which begin anywhere in them."""
    piece = min(config.channels * config.lanes, problem.c) * problem.itemsize
    begins = gcd(SECTOR, problem.c * problem.itemsize, config.channels * config.lanes * problem.itemsize)
    return BESIDE * (SECTOR - begins) / piece * problem.bytes / (device.gbps * 1e3)


def _blocks(problem: ConvProblem, config: Rows) -> int:
    return problem.n * prod(_parts(problem, config))


def _parts(problem: ConvProblem, config: Rows) -> tuple[int, int]:
    """Blocks of an image's rows, and of channels."""
    return ceil_div(problem.output[0], config.groups * config.rows), ceil_div(problem.c, config.channels * config.lanes)


def source(
    problem: ConvProblem, config: Rows, strides: OutputStrides | None = None, filters: FpropFilters | None = None
) -> Source:
    y = strides or OutputStrides.dense(problem)
    words: dict[str, int | bool | str] = {
        "R": problem.kernel[0], "S": problem.kernel[1], "W": problem.spatial[1], "Q": problem.output[1],
        "STEP": problem.stride[1], "PAD": problem.padding[1][0], "DILATION": problem.dilation[1],
        "V": config.channels, "ROWS": config.rows, "LANES": config.lanes, "GROUPS": config.groups,
        "X_STEP": problem.c, "Y_STEP": y.column, "BIAS": problem.bias, "RESIDUAL": problem.residual,
        "ACTIVATION": window.activation(problem.activation), **window.in_place_words(filters),
    }  # fmt: skip
    declarations = traits(tensor_core_type(problem.dtype), words)
    file, blocks = "ops/conv/cuda/depthwise/rows.cu", min_blocks_per_sm(problem, config)
    return stub(file, "depthwise_rows", "Traits", "Rows", config.threads, blocks, declarations=declarations)


def launch(
    problem: ConvProblem, config: Rows, device: Device, strides: OutputStrides | None = None,
    filters: FpropFilters | None = None,
) -> Launch:  # fmt: skip
    made = source(problem, config, strides, filters)
    (height, width), c, y = problem.spatial, problem.c, strides or OutputStrides.dense(problem)
    pieces, channels = _parts(problem, config)
    fields = window.window_fields(problem, made) | {"phases_h": 1, "pieces": pieces, "channel_blocks": channels}
    fields |= {"x_image": height * width * c, "x_row": width * c}
    fields |= {"y_image": y.image, "y_channel": 1, "y_row": y.row, "y_column": y.column}
    grid = _blocks(problem, config), 1, 1
    # Rows of x are read through L1, of which balanced blocks have little: few blocks are left as they come.
    few = min_blocks_per_sm(problem, config) > 2 * ceil_div(grid[0], device.multiprocessors)
    shape = grid, config.threads, shared_bytes(problem, config)
    return Launch(made, fields, *shape, dependent=True, balance=0 if few else 2)
