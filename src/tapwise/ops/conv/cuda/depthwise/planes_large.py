"""The kernel of cuda.depthwise for NCHW and large filters: planes and their filters in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import hypot
from typing import Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.costs import blocks_of, blocks_us, joint_us, memory_us
from tapwise.ops.conv.cuda.depthwise import planes
from tapwise.ops.conv.cuda.depthwise.planes import FUNCTION_REGISTERS, MOST_THREADS, OTHER_REGISTERS, SOME_THREADS
from tapwise.ops.conv.problem import ConvProblem

# Products of a thread for a row of x, which are unrolled; its sums and elements of a row.
MOST_PRODUCTS, MOST_VALUES = 1200, 100
# Columns of a thread; bytes of shared memory of a block.
MOST_COLUMNS: Final = (8, 16, 32)
MOST_SHARED: Final = 96 << 10
# Cycles of a multiprocessor for a warp's instruction, and for a word that it reads of shared memory; of a block: its
# start, the latency of an instruction, and of an element that a thread brings.
ISSUE, BANK, BEGIN, LATENCY, BRING = 0.247, 0.72, 300.0, 0.665, 64.0
# Instructions: an element of x that is brought, a weight, an output. Microseconds of a launch.
ELEMENT, WEIGHT, OUTPUT, START_US = 67.0, 24.0, 29.0, 2.5


@dataclass(frozen=True)
class LargePlanes(BaseConfig):
    """A thread computes `columns` of a row; a block has `band` rows of so many `planes`. `by`: "taps", or "x" where
    threads go through the rows of x."""

    columns: int
    band: int
    planes: int
    by: str


def suits(problem: ConvProblem) -> bool:
    """NCHW, one filter each, no dilation, small strides, filters that planes.py does not take."""
    return problem.layout == "nchw" and planes.is_plain(problem) and not planes.suits(problem)


def _groups(problem: ConvProblem, config: LargePlanes) -> int:
    return ceil_div(problem.output[1], config.columns)


def threads(problem: ConvProblem, config: LargePlanes) -> int:
    return round_up(_groups(problem, config) * config.band * config.planes, 32)


def _window(problem: ConvProblem, config: LargePlanes) -> int:
    """Elements of a row of x that a thread reads."""
    whole = _groups(problem, config) == 1
    return problem.spatial[1] if whole else (config.columns - 1) * problem.stride[1] + problem.kernel[1]


def _products(problem: ConvProblem, config: LargePlanes) -> int:
    """Of a thread for a row of x: where it has whole rows, those that have no padding."""
    if _groups(problem, config) > 1:
        return config.columns * problem.kernel[1]
    places = (q * problem.stride[1] - problem.padding[1][0] + s for q in range(config.columns)
              for s in range(problem.kernel[1]))  # fmt: skip
    return sum(0 <= place < problem.spatial[1] for place in places)


def shared_bytes(problem: ConvProblem, config: LargePlanes) -> int:
    """Planes and filters as they are computed with, in rows of odd numbers of elements."""
    (height, width), (r, s), groups = problem.spatial, problem.kernel, _groups(problem, config)
    columns = width if groups == 1 else (groups * config.columns - 1) * problem.stride[1] + s
    rows = min(height, (config.band - 1) * problem.stride[0] + r) if config.planes == 1 else height
    held = max(rows * (columns | 1), config.band * (problem.output[1] | 1))
    elements = config.planes * (held + r * (s | 1))
    return elements * (8 if problem.dtype == "f64" else 4)


def min_blocks_per_sm(problem: ConvProblem, config: LargePlanes) -> int:
    """Blocks that find room."""
    words = 2 if problem.dtype == "f64" else 1
    functions = FUNCTION_REGISTERS * (problem.activation in window.FUNCTIONS)
    taken = int(2.5 * config.columns + functions) * words + OTHER_REGISTERS
    return blocks_of(taken, threads(problem, config), shared_bytes(problem, config))


def configs(problem: ConvProblem, device: Device) -> Iterator[LargePlanes]:
    """Whole planes, as many as make a block, or bands of one."""
    if not suits(problem):
        return
    yield from (one for one in dict.fromkeys(_shapes(problem)) if _fits(problem, one, device))


def _shapes(problem: ConvProblem) -> Iterator[LargePlanes]:
    p, q = problem.output
    by = "x" if problem.spatial[0] < problem.kernel[0] else "taps"
    for columns, some in product((ceil_div(q, ceil_div(q, most)) for most in MOST_COLUMNS), SOME_THREADS):
        groups = ceil_div(q, columns)
        yield LargePlanes(columns, p, max(1, min(problem.c, some // (groups * p))), by)
        for band in (*(ceil_div(p, count) for count in (2, 4)), max(1, some // groups)):
            if band < p:
                yield LargePlanes(columns, band, 1, "taps")


def _fits(problem: ConvProblem, config: LargePlanes, device: Device) -> bool:
    words = 2 if problem.dtype == "f64" else 1
    return (
        (_window(problem, config) + config.columns) * words <= MOST_VALUES
        and _products(problem, config) <= MOST_PRODUCTS
        and threads(problem, config) <= MOST_THREADS
        and shared_bytes(problem, config) <= min(MOST_SHARED, device.shared_bytes)
        and config.planes <= problem.c
        and _blocks(problem, config) < INDEX_LIMIT
    )


def _pieces(problem: ConvProblem, config: LargePlanes) -> int:
    """Bands of a plane."""
    return ceil_div(problem.output[0], config.band)


def _blocks(problem: ConvProblem, config: LargePlanes) -> int:
    return ceil_div(problem.n * problem.c, config.planes) * _pieces(problem, config)


def predict_us(problem: ConvProblem, config: LargePlanes, device: Device) -> float:
    """What a multiprocessor's warps issue and read of shared memory, a block's latency, and memory. Constants are
    fitted to 234 times on 10 layers, N=1 and N=32 (H200), within 13 %."""
    r, s = problem.kernel
    words, many = 2 if problem.dtype == "f64" else 1, threads(problem, config)
    turns = problem.spatial[0] if config.by == "x" else r
    read = _window(problem, config) + s
    weights = config.planes * r * s / many
    brought = shared_bytes(problem, config) / 4 / words / many - weights
    computed = turns * (_products(problem, config) * words + read + 8) + OUTPUT * config.columns + 80
    issued = ISSUE * (computed + ELEMENT * brought + WEIGHT * weights)
    each = many // 32 * hypot(issued, BANK * turns * read * words)
    alone = BEGIN + LATENCY * computed + BRING * (brought + weights)
    blocks = blocks_us(_blocks(problem, config), min_blocks_per_sm(problem, config), each, alone, device)
    return joint_us(blocks, memory_us(problem, device, 32, 0), 4.0) + START_US


def source(problem: ConvProblem, config: LargePlanes) -> Source:
    words: dict[str, int | bool | str] = planes.sizes(problem) | {
        "TX": config.columns, "BAND": config.band, "PLANES": config.planes, "BY_X": config.by == "x",
    }  # fmt: skip
    declarations = traits(tensor_core_type(problem.dtype), words)
    file, blocks = "ops/conv/cuda/depthwise/planes_large.cu", min_blocks_per_sm(problem, config)
    name, count = "depthwise_planes_large", threads(problem, config)
    return stub(file, name, "Traits", "Planes", count, blocks, declarations=declarations)


def launch(problem: ConvProblem, config: LargePlanes, device: Device) -> Launch:
    made = source(problem, config)
    fields = {"n": problem.n, "c": problem.c, "pieces": _pieces(problem, config)}
    grid = _blocks(problem, config), 1, 1
    return Launch(
        made, fields, grid, threads(problem, config), shared_bytes(problem, config), dependent=True, balance=2
    )
