"""The kernel of cuda.depthwise with diagonal weights for large filters: its configs, its launches, its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import has_dependent_launches
from tapwise.cuda.types import tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.depthwise import diagonal
from tapwise.ops.conv.cuda.depthwise.classes import phases, steps
from tapwise.ops.conv.problem import ConvProblem

# Pairs of taps below which weights fit into registers, and the tallest filter whose rows are counted in a block.
LEAST_PAIRS, MOST_ROWS = 16, 63
# Registers beside sums and operands.
OTHER_REGISTERS = 68


@dataclass(frozen=True)
class DiagonalLarge(BaseConfig):
    """A block of `groups` x `rows` rows of outputs by `segments` x 8 columns; a warp takes `tiles` of 16 pixels."""

    segments: int
    groups: int
    rows: int
    tiles: int

    @property
    def threads(self) -> int:
        return 32 * (self.groups * self.segments // 2 // self.tiles)


def quads(problem: ConvProblem) -> int:
    """Of pairs of taps in a row of weights."""
    return ceil_div(ceil_div(problem.kernel[1], 2), 4)


def shared_bytes(problem: ConvProblem, config: DiagonalLarge) -> int:
    (r, s), (stride_h, stride_w) = problem.kernel, steps(problem)
    columns = (config.segments * 8 - 1 + ceil_div(s, stride_w)) * stride_w
    rows = (config.groups * config.rows - 1) * stride_h + r
    return r * quads(problem) * 128 + rows * columns * 16


def configs(problem: ConvProblem, device: Device) -> Iterator[DiagonalLarge]:
    r, s = problem.kernel
    if r * ceil_div(s, 2) < LEAST_PAIRS or r > MOST_ROWS:
        return
    p, q = (ceil_div(size, classes) for size, classes in zip(problem.output, phases(problem), strict=True))
    wide = ceil_div(q, 8)
    for rows in (7, 8, 4):
        for segments in sorted({wide, ceil_div(wide, 2), min(wide, 4), min(wide, 2)}):
            for groups in (8, 4, 2, 1):
                if groups > 1 and (groups - 1) * rows >= p:
                    continue
                for tiles in (2, 4, 1):
                    one = DiagonalLarge(segments, groups, rows, tiles)
                    if groups * segments % (2 * tiles) or rows * tiles > 28:
                        continue
                    if _registers(problem, one) * round_up(one.threads, 128) > diagonal.REGISTERS:
                        continue
                    if shared_bytes(problem, one) <= device.shared_bytes:
                        yield one


def predict_us(problem: ConvProblem, config: DiagonalLarge, device: Device) -> float:
    """Matrix instructions and reads of shared memory of all warps, latencies where few warps hide them, and memory:
    estimates."""
    (r, _), (stride_h, _) = problem.kernel, steps(problem)
    rows, warps = (config.rows - 1) * stride_h + r, config.threads // 32
    # Cycles of a multiprocessor for a quad of a row: 1.25 products a cycle, operands of pixels, and of weights.
    products = config.rows * r * 4 * config.tiles * 0.8
    reads = rows * 4 * config.tiles * 4 + config.rows * r * 4
    work = quads(problem) * max(products, reads) * warps
    blocks, held = _blocks(problem, config), min_blocks_per_sm(problem, config)
    cycles_us = device.gflops / 256 * 1e3
    # Copies come first, and nothing hides them but other blocks.
    copies = 1500 + shared_bytes(problem, config) / 16
    waves = ceil_div(blocks, device.multiprocessors * held)
    busy = min(1.0, held * warps / 8)
    compute = waves * (held * work / (0.75 * busy) + copies / held) / cycles_us
    memory = problem.bytes / (device.gbps * 1e3 * 0.6)
    return max(compute, memory) + 2.5


def min_blocks_per_sm(problem: ConvProblem, config: DiagonalLarge) -> int:
    """Blocks that registers and shared memory leave room for."""
    by_memory = diagonal.SHARED_BYTES // (shared_bytes(problem, config) + 1024)
    return min(diagonal.blocks_of(_registers(problem, config), config.threads), max(1, by_memory))


def _registers(problem: ConvProblem, config: DiagonalLarge) -> int:
    """Of a thread: sums, operands and the rest."""
    taken = config.rows * config.tiles * 4 + 16 * config.tiles + OTHER_REGISTERS
    return min(255, taken + 24 * (problem.activation in window.FUNCTIONS) + 8 * problem.residual)


def _blocks(problem: ConvProblem, config: DiagonalLarge) -> int:
    (p, _), (classes_h, _) = problem.output, phases(problem)
    pieces = classes_h * ceil_div(ceil_div(p, classes_h), config.groups * config.rows)
    return pieces * problem.n * _along(problem, config) * ceil_div(problem.c, 8)


def _along(problem: ConvProblem, config: DiagonalLarge) -> int:
    """Strips along a row of y."""
    (_, q), (_, classes_w) = problem.output, phases(problem)
    return classes_w * ceil_div(ceil_div(q, classes_w), 8 * config.segments)


def source(problem: ConvProblem, config: DiagonalLarge) -> Source:
    sizes = {"SEGMENTS": config.segments, "GROUPS": config.groups, "ROWS": config.rows, "MTILES": config.tiles}
    words = traits(tensor_core_type(problem.dtype), diagonal.block_words(problem) | sizes)
    file, blocks = "ops/conv/cuda/depthwise/diagonal_large.cu", min_blocks_per_sm(problem, config)
    name = "depthwise_diagonal_large"
    return stub(file, name, "Traits", "Diagonal", config.threads, blocks, declarations=words)


def launch(problem: ConvProblem, config: DiagonalLarge, device: Device) -> Launch:
    made = source(problem, config)
    along = _along(problem, config)
    fields = window.window_fields(problem, made)
    fields |= dict(zip(("phases_h", "phases_w"), phases(problem), strict=True))
    fields |= {"rows": config.groups * config.rows, "strips_row": along, "strips": problem.n * along}
    fields |= {"strip_groups": problem.n * along, "channel_blocks": ceil_div(problem.c, 8)}
    grid, dependent = (_blocks(problem, config), 1, 1), has_dependent_launches(device)
    return Launch(made, fields, grid, config.threads, shared_bytes(problem, config), dependent=dependent)
