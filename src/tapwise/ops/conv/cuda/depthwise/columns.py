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
from tapwise.ops.conv.cuda.costs import blocks_of, blocks_us, joint_us, memory_us
from tapwise.ops.conv.cuda.residue_classes import phases, steps
from tapwise.ops.conv.cuda.window import OutputStrides
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 128
# Filters of so many taps, and strides, are unrolled; registers of a thread that values may take.
MOST_TAPS, MOST_STRIDE, MOST_VALUES = 49, 4, 168
# Values of a thread with whole windows.
MOST_WINDOWS: Final = 180
# Columns of the largest filter, and elements of a row that a thread may read.
MOST_COLUMNS, MOST_WINDOW = 31, 64
# Rows that a block of outputs has, and rows of x under way.
BLOCK_ROWS: Final = (4, 1)
AHEAD: Final = (2, 1, 4)
# Registers beside values, and of an activation that is a function.
OTHER_REGISTERS, FUNCTION_REGISTERS = 44, 24


@dataclass(frozen=True)
class Columns(BaseConfig):
    """kernel: "windows", "rolling" or "blocked"; `channels` and `columns` of outputs that a thread computes, `rows` of
    them down a column; rows of x `ahead` (windows: all; rolling) or rows of outputs at a time (blocked)."""

    kernel: str
    channels: int
    columns: int
    rows: int
    ahead: int

    @property
    def threads(self) -> int:
        """Of a block: few outputs are to find every multiprocessor."""
        return THREADS // 2 if self.kernel == "windows" else THREADS


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


def windows(problem: ConvProblem) -> Iterator[Columns]:
    """For few outputs: whole windows of one or two columns at a time."""
    for channels in (1, 2, 4) if problem.layout == "nhwc" else (1,):
        # One column where there is no room for two: it was never faster.
        for columns in (2, 1):
            kind = "windows", channels, columns, problem.kernel[0]
            if _fits(problem, channels, columns) and _values(problem, *kind) <= MOST_WINDOWS:
                yield Columns(*kind[:3], rows=1, ahead=kind[3])
                break


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
    last = problem.layout == "nhwc"
    large = r * s * size > MOST_TAPS or stride_h > MOST_STRIDE
    for channels, columns in product((2, 4, 1, 8), (4, 2, 8, 1)) if last else ((1, 1), (1, 2)):
        if not _fits(problem, channels, columns):
            continue
        for ahead in BLOCK_ROWS if large else AHEAD:
            kind = "blocked" if large else "rolling", channels, columns, ahead
            many = large and ahead > 1 and stride_h > 2
            if _values(problem, *kind) <= MOST_VALUES and not many:
                yield kind


def _fits(problem: ConvProblem, channels: int, columns: int) -> bool:
    """Whether a thread may have so many."""
    wide = ceil_div(problem.output[1], phases(problem)[1])
    if columns > 1 and (columns >= 2 * wide or _window(problem, columns) > MOST_WINDOW):
        return False
    # Channels side by side are one load: as many filters, and a piece of 16 bytes at most.
    together = problem.group_k == 1 and problem.c % channels == 0 and channels * problem.itemsize <= 16
    return channels == 1 or together


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
    item = ceil_div(channels * problem.itemsize, 4)
    if kernel == "windows":
        return r * (s + taken) * item + (columns + taken) * channels * _words(problem)
    if kernel == "blocked":
        return (ahead * columns + taken) * channels * _words(problem)
    sums, copies = ceil_div(r, steps(problem)[0]) * columns, ahead * taken * item
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
    last = problem.layout == "nhwc"
    start_us, each, alone = (_whole_windows if config.kernel == "windows" else _down_rows)(problem, config, last)
    launched = ceil_div(_threads(problem, config), config.threads)
    each *= config.threads / THREADS
    blocks = blocks_us(launched, min_blocks_per_sm(problem, config), each, alone, device)
    piece = min(32 * config.channels, problem.c) * problem.itemsize if last else 128
    return start_us + joint_us(blocks, 1.04 * memory_us(problem, device, piece, 0.75), 3.0)


def _pieces(problem: ConvProblem, config: Columns) -> float:
    """Pieces of memory that a warp's load has in NCHW: columns of a channel lie beside each other, channels do not."""
    return 1 + 32 / ceil_div(problem.output[1], config.columns)


def _down_rows(problem: ConvProblem, config: Columns, last: bool) -> tuple[float, float, float]:
    """Microseconds of a start; cycles of 128 threads, and of one alone. Constants of the rolling kernel in NCHW are
    fitted to 90 times on 21 layers (H200), within 13 %; in NHWC they lie between two
    fits to 96 times on 7."""
    (r, s), stride_h = problem.kernel, steps(problem)[0]
    rolling = config.kernel == "rolling"
    count = 1 if rolling else ceil_div(config.rows, config.ahead)
    rows, half = (config.rows - count) * stride_h + count * r, problem.itemsize == 2
    # Of a row: an element's load and conversion, and what comes once.
    load = 1 if last else 6 + 2.06 * _pieces(problem, config) if rolling else 4
    row = _window(problem, config.columns) * (load + config.channels * half) + (30 if not last and not rolling else 20)
    outputs = config.rows * config.columns
    instructions: float = (
        outputs * (r * s * config.channels * _words(problem) + 2 + config.channels // 2 * half) + rows * row + 150
    )
    if rolling and not last:
        return 0.8, 1.09 * instructions, 204 + 0.905 * instructions + 99 * rows / config.ahead
    instructions += 2 * r * s
    if not rolling:
        instructions += rows * min(config.ahead, r) * s * (2 + config.channels) * 0.57
    # Weights of the rolling kernel come while the launch before ends.
    if rolling:
        return 1.9, 1.3 * instructions, 800 + 1.6 * instructions + 180 * rows / config.ahead
    return 1.2, (1.43 if last else 1.1) * instructions, 770 + 1.26 * instructions + 209 * rows


def _whole_windows(problem: ConvProblem, config: Columns, last: bool) -> tuple[float, float, float]:
    """As _down_rows. Constants are fitted to 95 times on 25 layers (H200), those of NHWC then to 40 on 23 more,
    those of a start, of issue and of latency to 21 on 11 drawn anew."""
    (r, s), taken = problem.kernel, _window(problem, config.columns)
    converted = 0.4 * config.channels * (problem.itemsize == 2)
    products = s * config.columns * config.channels * _words(problem)
    load = 1.0 if last else 0.83 * _pieces(problem, config)
    more = 0.1 if last else 0.5
    instructions = r * (s * (load + converted) + taken * (load + more + converted) + products) + 250
    return (1.27, 1.53 * instructions, 1.9 * instructions) if last else (0.8, 1.7 * instructions, 1.83 * instructions)


def min_blocks_per_sm(problem: ConvProblem, config: Columns) -> int:
    """Blocks that registers leave room for."""
    # With one column there are more addresses than values; weights are read ahead of their use.
    others = OTHER_REGISTERS + (50 if config.kernel == "blocked" else 32 if config.columns == 1 else 0)
    taken = _values(problem, config.kernel, config.channels, config.columns, config.ahead) + others * _words(problem)
    taken += FUNCTION_REGISTERS * _words(problem) * (problem.activation in window.FUNCTIONS)
    return min(8, blocks_of(taken, config.threads))


def source(problem: ConvProblem, config: Columns, strides: OutputStrides | None = None) -> Source:
    (r, s), (stride_h, stride_w) = problem.kernel, steps(problem)
    y = strides or OutputStrides.dense(problem)
    # One column has no neighbour.
    across = stride_w if config.columns > 1 and problem.layout == "nhwc" else 1
    last, after = problem.layout == "nhwc", window.activation(problem.activation)
    index = counter(_threads(problem, config) + config.threads)
    if config.kernel == "windows":
        sizes: tuple[int, ...] = (config.channels, r, s, across)
    elif config.kernel == "rolling":
        sizes = (config.channels, r, s, stride_h, across)
    else:
        sizes = (config.channels, s, stride_h if config.ahead > 1 else 1, across)
    end = problem.bias, problem.residual, after, index
    # Elements from one to the next along a row in a class.
    x_step = problem.dilation[1] * (problem.c if last else 1)
    y_step = phases(problem)[1] * y.column if last else 0
    whole = last and problem.output[1] % (phases(problem)[1] * config.columns) == 0
    held = (config.columns,) if config.kernel == "windows" else (config.columns, config.ahead)
    words = *sizes, *held, x_step, y_step, whole, *end
    arguments = template_args(tensor_core_type(problem.dtype), last, *words)
    file, blocks = "ops/conv/cuda/depthwise/columns.cu", min_blocks_per_sm(problem, config)
    return stub(file, f"depthwise_{config.kernel}", arguments, "Columns", config.threads, blocks)


def launch(problem: ConvProblem, config: Columns, device: Device, strides: OutputStrides | None = None) -> Launch:
    made = source(problem, config, strides)
    (height, width), (p, q), (r, s) = problem.spatial, problem.output, problem.kernel
    pieces, groups = _parts(problem, config)
    fields = window.window_fields(problem, made)
    fields |= dict(zip(("phases_h", "phases_w"), phases(problem), strict=True))
    fields |= {"rows": config.rows, "pieces": pieces, "column_groups": groups, "multiplier": problem.group_k}
    y = strides or OutputStrides.dense(problem)
    fields |= {"x_image": problem.c * height * width, "y_image": y.image}
    if problem.layout == "nhwc":
        fields |= {"x_channel": 1, "x_row": width * problem.c, "x_column": problem.c, "w_channel": 1}
        fields |= {"y_channel": 1, "y_row": y.row, "y_column": y.column, "w_tap": problem.k}
    else:
        fields |= {"x_channel": height * width, "x_row": width, "x_column": 1, "w_channel": r * s}
        fields |= {"y_channel": p * q, "y_row": q, "y_column": 1, "w_tap": 1}
    grid = ceil_div(_threads(problem, config), config.threads), 1, 1
    return Launch(made, fields, grid, config.threads, dependent=True)
