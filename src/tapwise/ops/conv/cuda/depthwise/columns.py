"""The kernels of cuda.depthwise in registers: what they take, their launches, their time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.types import INDEX_LIMIT, counter, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.depthwise.classes import phases, steps
from tapwise.ops.conv.cuda.depthwise.costs import blocks_of, blocks_us, joint_us, memory_us
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 128
# Filters of so many taps, and strides, are unrolled; registers of a thread that values may take.
MOST_TAPS, MOST_STRIDE, MOST_VALUES = 49, 4, 168
# Columns of the largest filter, and elements of a row that a thread may read.
MOST_COLUMNS, MOST_WINDOW = 31, 64
# Rows that a block of outputs has, and rows of x under way.
BLOCK_ROWS: Final = (4, 1)
AHEAD: Final = (2, 1, 4)
# Registers beside values, and of an activation that is a function.
OTHER_REGISTERS, FUNCTION_REGISTERS = 44, 24


@dataclass(frozen=True)
class Columns(BaseConfig):
    """kernel: "rolling" or "blocked"; `channels` and `columns` of outputs that a thread computes, `rows` of them down a
    column; rows of x `ahead` (rolling) or rows of outputs at a time (blocked)."""

    kernel: str
    channels: int
    columns: int
    rows: int
    ahead: int


def unsuited(problem: ConvProblem) -> str | None:
    """Why they have no code for a problem, if so."""
    if problem.kernel[1] > MOST_COLUMNS:
        return f"takes filters of up to {MOST_COLUMNS} columns, not {problem.kernel[1]}"
    if problem.spatial[1] * problem.c >= INDEX_LIMIT or problem.output[1] * problem.k >= INDEX_LIMIT:
        return "takes rows of fewer than 2^31 elements"
    sides = [side for pair in problem.padding for side in pair]
    if max(*problem.spatial, *problem.output, *problem.reach, *problem.stride, *problem.dilation, *sides) >= 1 << 29:
        return "takes sizes, padding and steps under 2^29"
    return None


def configs(problem: ConvProblem) -> Iterator[Columns]:
    p = ceil_div(problem.output[0], phases(problem)[0])
    heights = sorted({*(ceil_div(p, pieces) for pieces in (1, 2, 4)), *(min(p, rows) for rows in (16, 8, 4, 2))})
    for kernel, channels, columns, ahead in _kinds(problem):
        for rows in reversed(heights):
            if kernel == "rolling" or rows >= min(ahead, p):
                yield Columns(kernel, channels, columns, rows, ahead)


def _kinds(problem: ConvProblem) -> Iterator[tuple[str, int, int, int]]:
    """(kernel, channels, columns, ahead): what is compiled."""
    (r, s), size, stride_h = problem.kernel, _words(problem), steps(problem)[0]
    last, wide = problem.layout == "nhwc", ceil_div(problem.output[1], phases(problem)[1])
    large = r * s * size > MOST_TAPS or stride_h > MOST_STRIDE
    for channels, columns in product((2, 4, 1, 8), (4, 2, 8, 1)) if last else ((1, 1), (1, 2)):
        if columns > 1 and (columns >= 2 * wide or _window(problem, columns) > MOST_WINDOW):
            continue
        # Channels side by side are one load: as many filters, and a piece of 16 bytes at most.
        if channels > 1 and (problem.group_k > 1 or problem.c % channels or channels * problem.itemsize > 16):
            continue
        for ahead in BLOCK_ROWS if large else AHEAD:
            kind = "blocked" if large else "rolling", channels, columns, ahead
            many = large and ahead > 1 and stride_h > 2
            if _values(problem, *kind) <= MOST_VALUES and not many:
                yield kind


def _words(problem: ConvProblem) -> int:
    """Registers of a value."""
    return 2 if problem.dtype == "f64" else 1


def _window(problem: ConvProblem, columns: int) -> int:
    """Elements of a row that a thread reads."""
    s = problem.kernel[1]
    return (columns - 1) * steps(problem)[1] + s if problem.layout == "nhwc" else columns * s


def _values(problem: ConvProblem, kernel: str, channels: int, columns: int, ahead: int) -> int:
    """Registers for weights, sums, and elements of x, which lie there as they are until they are used."""
    (r, s), taken = problem.kernel, _window(problem, columns)
    if kernel == "blocked":
        return (ahead * columns + taken) * channels * _words(problem)
    sums, copies = ceil_div(r, steps(problem)[0]) * columns, ahead * taken * ceil_div(channels * problem.itemsize, 4)
    return (r * s + sums + taken) * channels * _words(problem) + copies


def _threads(problem: ConvProblem, config: Columns) -> int:
    return problem.n * (problem.k // config.channels) * prod(_parts(problem, config))


def _parts(problem: ConvProblem, config: Columns) -> tuple[int, int]:
    """Pieces of a column, and groups of columns: their numbers."""
    (p, q), (phases_h, phases_w) = problem.output, phases(problem)
    pieces = phases_h * ceil_div(ceil_div(p, phases_h), config.rows)
    if problem.layout == "nhwc":
        return pieces, phases_w * ceil_div(ceil_div(q, phases_w), config.columns)
    return pieces, ceil_div(q, config.columns)


def predict_us(problem: ConvProblem, config: Columns, device: Device) -> float:
    """Instructions of a multiprocessor's threads, a thread's latency, and memory."""
    (r, s), stride_h, last = problem.kernel, steps(problem)[0], problem.layout == "nhwc"
    count = ceil_div(config.rows, config.ahead) if config.kernel == "blocked" else 1
    rows, half = (config.rows - count) * stride_h + count * r, problem.itemsize == 2
    # Of a row: an element's load and conversion, and what comes once.
    row = _window(problem, config.columns) * ((1 if last else 4) + config.channels * half) + (20 if last else 30)
    outputs = config.rows * config.columns
    instructions: float = (
        outputs * (r * s * config.channels * _words(problem) + 2 + config.channels // 2 * half) + rows * row
    )
    if config.kernel == "blocked":
        instructions += rows * min(config.ahead, r) * s * (2 + config.channels) * 0.57
    instructions += 150 + 2 * r * s
    each = (1.43 if last else 1.1) * instructions
    alone = 770 + 1.26 * instructions + 209 * rows / (config.ahead if config.kernel == "rolling" else 1)
    launched = ceil_div(_threads(problem, config), THREADS)
    blocks = blocks_us(launched, min_blocks_per_sm(problem, config), each, alone, device)
    piece = min(32 * config.channels, problem.c) * problem.itemsize if last else 128
    return 1.2 + joint_us(blocks, 1.04 * memory_us(problem, device, piece, 0.75), 3.0)


def min_blocks_per_sm(problem: ConvProblem, config: Columns) -> int:
    """Blocks that registers leave room for."""
    # With one column there are more addresses than values; weights are read ahead of their use.
    others = OTHER_REGISTERS + (50 if config.kernel == "blocked" else 32 if config.columns == 1 else 0)
    taken = _values(problem, config.kernel, config.channels, config.columns, config.ahead) + others * _words(problem)
    taken += FUNCTION_REGISTERS * _words(problem) * (problem.activation in window.FUNCTIONS)
    return min(8, blocks_of(taken, THREADS))


def source(problem: ConvProblem, config: Columns) -> Source:
    (r, s), (stride_h, stride_w) = problem.kernel, steps(problem)
    # One column has no neighbour.
    across = stride_w if config.columns > 1 and problem.layout == "nhwc" else 1
    last, after = problem.layout == "nhwc", window.activation(problem.activation)
    index = counter(_threads(problem, config) + THREADS)
    if config.kernel == "rolling":
        sizes: tuple[int, ...] = (config.channels, r, s, stride_h, across)
    else:
        sizes = (config.channels, s, stride_h if config.ahead > 1 else 1, across)
    end = problem.bias, problem.residual, after, index
    # Elements from one to the next along a row in a class.
    x_step = problem.dilation[1] * (problem.c if last else 1)
    y_step = phases(problem)[1] * problem.k if last else 0
    whole = last and problem.output[1] % (phases(problem)[1] * config.columns) == 0
    words = *sizes, config.columns, config.ahead, x_step, y_step, whole, *end
    arguments = template_args(tensor_core_type(problem.dtype), last, *words)
    file, blocks = "ops/conv/cuda/depthwise/columns.cu", min_blocks_per_sm(problem, config)
    return stub(file, f"depthwise_{config.kernel}", arguments, "Columns", THREADS, blocks)


def launch(problem: ConvProblem, config: Columns, device: Device) -> Launch:
    made = source(problem, config)
    (height, width), (p, q), (r, s) = problem.spatial, problem.output, problem.kernel
    pieces, groups = _parts(problem, config)
    fields = window.window_fields(problem, made)
    fields |= dict(zip(("phases_h", "phases_w"), phases(problem), strict=True))
    fields |= {"rows": config.rows, "pieces": pieces, "column_groups": groups, "multiplier": problem.group_k}
    fields |= {"x_image": problem.c * height * width, "y_image": problem.k * p * q}
    if problem.layout == "nhwc":
        fields |= {"x_channel": 1, "x_row": width * problem.c, "x_column": problem.c, "w_channel": 1}
        fields |= {"y_channel": 1, "y_row": q * problem.k, "y_column": problem.k, "w_tap": problem.k}
    else:
        fields |= {"x_channel": height * width, "x_row": width, "x_column": 1, "w_channel": r * s}
        fields |= {"y_channel": p * q, "y_row": q, "y_column": 1, "w_tap": 1}
    grid = ceil_div(_threads(problem, config), THREADS), 1, 1
    return Launch(made, fields, grid, THREADS, dependent=True)
