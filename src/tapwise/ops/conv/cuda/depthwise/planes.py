"""The kernel of cuda.depthwise for NCHW: planes, or bands of their rows, by way of shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import hypot, prod
from typing import Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.costs import blocks_of, blocks_us, joint_us, memory_us
from tapwise.ops.conv.problem import ConvProblem

# Filters of so many taps, and strides, are unrolled; registers that values may take, and the rest.
MOST_TAPS, MOST_STRIDE, MOST_VALUES, OTHER_REGISTERS, FUNCTION_REGISTERS = 49, 4, 120, 28, 24
# Threads of a block: such as it is to have, and the most; bytes of shared memory.
SOME_THREADS: Final = (64, 128, 256)
MOST_THREADS, MOST_SHARED = 320, 64 << 10
# Bytes of a copy.
PIECE: Final = 16
# Cycles of a multiprocessor for a warp's instruction, and for its words in shared memory that lie in one bank; of a
# block: its start, its latency, that of an instruction.
ISSUE, BANK, BLOCK, BEGIN, LATENCY = 0.272, 0.731, 68.0, 210.0, 1.93
# Of the memory's bandwidth; microseconds of a launch.
MEMORY, START_US = 1.3, 1.0
BANKS: Final = 32


@dataclass(frozen=True)
class Planes(BaseConfig):
    """A thread computes `columns` of `rows` rows; a block has `segments` times so many rows, of so many `planes`."""

    columns: int
    rows: int
    segments: int
    planes: int


def is_plain(problem: ConvProblem) -> bool:
    """One filter each, no dilation, strides that are unrolled, planes under 2^26 elements."""
    return (
        problem.group_k == 1
        and max(problem.dilation) == 1
        and max(problem.stride) <= MOST_STRIDE
        and max(prod(problem.spatial), prod(problem.output)) < 1 << 26
    )


def suits(problem: ConvProblem) -> bool:
    """NCHW, plain, and filters that are unrolled."""
    words = 2 if problem.dtype == "f64" else 1
    return problem.layout == "nchw" and is_plain(problem) and prod(problem.kernel) * words <= MOST_TAPS


def threads(problem: ConvProblem, config: Planes) -> int:
    return round_up(ceil_div(problem.output[1], config.columns) * config.segments * config.planes, 32)


def _rows_x(problem: ConvProblem, config: Planes) -> int:
    """Of a block's plane."""
    seen = (config.rows * config.segments - 1) * problem.stride[0] + problem.kernel[0]
    return min(seen, problem.spatial[0]) if config.planes == 1 else problem.spatial[0]


def shared_bytes(problem: ConvProblem, config: Planes) -> int:
    """Elements of x and of y, each with what is in front of them in its piece."""
    (height, width), (p, q), grain = problem.spatial, problem.output, PIECE // problem.itemsize
    x = ((config.planes - 1) * height + _rows_x(problem, config)) * width + grain - 1
    y = ((config.planes - 1) * p + min(p, config.rows * config.segments)) * q + grain - 1
    return sum(ceil_div(elements, grain) * PIECE for elements in (x, y))


def _window(problem: ConvProblem, config: Planes) -> int:
    """Elements of a row of x that a thread reads."""
    return (config.columns - 1) * problem.stride[1] + problem.kernel[1]


def values(problem: ConvProblem, config: Planes) -> int:
    """Registers of a thread for weights, sums and a row of x."""
    live = ceil_div(problem.kernel[0], problem.stride[0])
    held = prod(problem.kernel) + live * config.columns + _window(problem, config)
    return held * (2 if problem.dtype == "f64" else 1)


def min_blocks_per_sm(problem: ConvProblem, config: Planes) -> int:
    """Blocks that find room."""
    functions = FUNCTION_REGISTERS * (problem.activation in window.FUNCTIONS)
    taken = values(problem, config) + OTHER_REGISTERS + functions * (2 if problem.dtype == "f64" else 1)
    return blocks_of(taken, threads(problem, config), shared_bytes(problem, config))


def configs(problem: ConvProblem, device: Device) -> Iterator[Planes]:
    """Whole planes, as many as make a block, or bands of one."""
    if not suits(problem):
        return
    p, q = problem.output
    for columns in (1, 2, 4):
        groups = ceil_div(q, columns)
        if columns > 1 and columns >= 2 * q:
            continue
        shapes = dict.fromkeys(
            (ceil_div(p, segments), segments, max(1, some // (groups * segments)))
            for segments, some in product((1, 2, 3, 4, 8), SOME_THREADS)
            if ceil_div(p, ceil_div(p, segments)) == segments
        )
        bands = ((rows, max(1, some // groups), 1) for rows, some in product((4, 8, 16, 32), SOME_THREADS))
        shapes |= dict.fromkeys(band for band in bands if band[0] * band[1] < p)
        for rows, segments, planes in shapes:
            one = Planes(columns, rows, segments, planes)
            if _fits(problem, one, device):
                yield one


def _fits(problem: ConvProblem, config: Planes, device: Device) -> bool:
    return (
        values(problem, config) <= MOST_VALUES
        and threads(problem, config) <= MOST_THREADS
        and shared_bytes(problem, config) <= min(MOST_SHARED, device.shared_bytes)
        and config.planes <= problem.n * problem.c
        and _blocks(problem, config) < INDEX_LIMIT
    )


def _pieces(problem: ConvProblem, config: Planes) -> int:
    """Bands of a plane."""
    return ceil_div(problem.output[0], config.rows * config.segments)


def _blocks(problem: ConvProblem, config: Planes) -> int:
    return ceil_div(problem.n * problem.c, config.planes) * _pieces(problem, config)


def _words_in_a_bank(problem: ConvProblem, config: Planes, of_x: bool) -> float:
    """The most that a warp wants of one bank of shared memory with one column of its window, or of its outputs."""
    rows, columns = problem.spatial if of_x else problem.output
    down, across = problem.stride if of_x else (1, 1)
    groups, each, lanes = ceil_div(problem.output[1], config.columns), [], min(threads(problem, config), 4 * BANKS)
    for first in range(0, lanes, BANKS):
        wanted: dict[int, set[int]] = {}
        for thread in range(first, min(first + BANKS, groups * config.segments * config.planes)):
            plane, segment = thread // groups // config.segments, thread // groups % config.segments
            place = (plane * rows + segment * config.rows * down) * columns + thread % groups * config.columns * across
            word = place * problem.itemsize // 4
            wanted.setdefault(word % BANKS, set()).add(word)
        each.append(max(map(len, wanted.values()), default=0))
    return sum(each) / len(each)


def predict_us(problem: ConvProblem, config: Planes, device: Device) -> float:
    """What a multiprocessor's warps issue and read of shared memory, a block's latency, and memory. Constants are
    fitted to 1,320 times on 60 layers, N=1 and N=32 (H200), within 12 %."""
    (r, s), step, half = problem.kernel, problem.stride[0], problem.itemsize == 2
    words = 2 if problem.dtype == "f64" else 1
    seen, outputs = (config.rows - 1) * step + r, config.rows * config.columns
    read = seen * _window(problem, config)
    # The last rows have products for outputs that are none.
    products = (config.rows * r + (r - 1) / 2 / step) * s * config.columns * words
    warps, copies = threads(problem, config) // 32, shared_bytes(problem, config) / PIECE / threads(problem, config)
    instructions = products + outputs * (4 + half) + read * (3 + half) + 8 * seen + 3 * r * s + 60 + 10 * copies
    banks = read * _words_in_a_bank(problem, config, True) + outputs * _words_in_a_bank(problem, config, False)
    each, alone = warps * hypot(ISSUE * instructions, BANK * banks) + BLOCK, BEGIN + LATENCY * instructions
    blocks = blocks_us(_blocks(problem, config), min_blocks_per_sm(problem, config), each, alone, device)
    return joint_us(blocks, memory_us(problem, device, PIECE, 0) * MEMORY, 4.0) + START_US


def sizes(problem: ConvProblem) -> dict[str, int | bool | str]:
    """Words of a kernel that is compiled for one problem."""
    return {
        "R": problem.kernel[0], "S": problem.kernel[1], "SH": problem.stride[0], "SW": problem.stride[1],
        "H": problem.spatial[0], "W": problem.spatial[1], "OUT_H": problem.output[0], "OUT_W": problem.output[1],
        "PAD_H": problem.padding[0][0], "PAD_W": problem.padding[1][0], "BIAS": problem.bias,
        "RESIDUAL": problem.residual, "ACTIVATION": window.activation(problem.activation),
    }  # fmt: skip


def source(problem: ConvProblem, config: Planes) -> Source:
    words = sizes(problem) | {
        "TX": config.columns, "ROWS": config.rows, "SEGMENTS": config.segments, "PLANES": config.planes,
    }  # fmt: skip
    declarations = traits(tensor_core_type(problem.dtype), words)
    file, blocks = "ops/conv/cuda/depthwise/planes.cu", min_blocks_per_sm(problem, config)
    return stub(
        file, "depthwise_planes", "Traits", "Planes", threads(problem, config), blocks, declarations=declarations
    )


def launch(problem: ConvProblem, config: Planes, device: Device) -> Launch:
    made = source(problem, config)
    fields = {"n": problem.n, "c": problem.c, "pieces": _pieces(problem, config)}
    grid = _blocks(problem, config), 1, 1
    return Launch(
        made, fields, grid, threads(problem, config), shared_bytes(problem, config), dependent=True, balance=2
    )
