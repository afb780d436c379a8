"""The diagonal kernel of cuda.depthwise: what it takes, its launches, its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import has_dependent_launches
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.depthwise.classes import phases, steps
from tapwise.ops.conv.cuda.depthwise.costs import blocks_us, joint_us, memory_us
from tapwise.ops.conv.problem import ConvProblem

# Words of weights that a thread may hold, rows of a stage, and copies of a row by a thread.
MOST_WORDS, MOST_PERIOD, MOST_ITEMS = 45, 12, 12
MOST_STRIDE = 4
# Registers beside weights, sums and operands, and blocks of a multiprocessor.
OTHER_REGISTERS, MOST_BLOCKS = 46, 16
# Of a multiprocessor (Hopper).
REGISTERS, SHARED_BYTES = 1 << 16, 228 << 10


@dataclass(frozen=True)
class Diagonal(BaseConfig):
    """`octets` of channels and `strips` of `segments` x 8 columns a block, `tiles` of 16 pixels a warp, `rows` of
    outputs a block, and `stages` of rows of x in shared memory."""

    octets: int
    segments: int
    strips: int
    tiles: int
    rows: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * self.octets * (self.strips * self.segments // 2 // self.tiles)


def unsuited(problem: ConvProblem) -> str | None:
    """Why kernels with diagonal weights have no code for a problem, if so."""
    if problem.dtype not in ("f16", "bf16") or problem.layout != "nhwc" or problem.group_k != 1:
        return "takes 16 bits, channels last, one filter a channel"
    if max(steps(problem)) > MOST_STRIDE:
        return f"takes strides up to {MOST_STRIDE}"
    if max(prod(problem.x_shape), prod(problem.y_shape)) >= INDEX_LIMIT:
        return "takes fewer than 2^31 elements"
    return None


def copy_bytes(problem: ConvProblem) -> int:
    """Of one copy: what pixels are a multiple of."""
    return next(size for size in (16, 8, 4, 2) if problem.c * 2 % size == 0)


def period(problem: ConvProblem) -> int:
    """Rows of x in a stage: as many as until the same outputs' sums are free again."""
    return ceil_div(problem.kernel[0], steps(problem)[0]) * steps(problem)[0]


def columns(problem: ConvProblem, config: Diagonal) -> int:
    """Columns of a class that a strip reads."""
    stride_w = steps(problem)[1]
    return (config.segments * 8 - 1 + ceil_div(problem.kernel[1], stride_w)) * stride_w


def shared_bytes(problem: ConvProblem, config: Diagonal) -> int:
    pitch = (config.octets | 1) * 16
    return config.stages * period(problem) * config.strips * columns(problem, config) * pitch


def min_blocks_per_sm(problem: ConvProblem, config: Diagonal) -> int:
    """Blocks that registers and shared memory leave room for."""
    by_memory = SHARED_BYTES // (shared_bytes(problem, config) + 1024)
    return min(blocks_of(_registers(problem, config), config.threads), max(1, by_memory))


def blocks_of(registers: int, threads: int) -> int:
    """Blocks whose threads may have so many registers: warps of a multiprocessor come in fours, registers in eights."""
    for blocks in range(MOST_BLOCKS, 1, -1):
        if REGISTERS // round_up(blocks * threads, 128) // 8 * 8 >= registers:
            return blocks
    return 1


def _registers(problem: ConvProblem, config: Diagonal) -> int:
    """Of a thread: weights, sums and operands, a little more than they are, and the rest."""
    r, s = problem.kernel
    pairs, live = ceil_div(s, 2), ceil_div(r, steps(problem)[0])
    taken = int(1.07 * (r * pairs + (live + pairs) * config.tiles * 4)) + 2 * items(problem, config) + OTHER_REGISTERS
    return min(255, taken + 24 * (problem.activation in window.FUNCTIONS) + 8 * problem.residual)


def items(problem: ConvProblem, config: Diagonal) -> int:
    """Copies of a row by one thread."""
    pieces = config.octets * 16 // copy_bytes(problem)
    return ceil_div(config.strips * columns(problem, config) * pieces, config.threads)


def configs(problem: ConvProblem, device: Device) -> Iterator[Diagonal]:
    classes_h, classes_w = phases(problem)
    p, q = ceil_div(problem.output[0], classes_h), ceil_div(problem.output[1], classes_w)
    wide = ceil_div(q, 8)
    octets = ceil_div(problem.c, 8)
    r, s = problem.kernel
    if period(problem) > MOST_PERIOD or r * ceil_div(s, 2) > MOST_WORDS:
        return
    shapes = {(segments, 1) for segments in (2, 4, 6, 8) if segments < wide + 2}
    shapes |= {(segments, strips) for segments in (wide,) for strips in (1, 2, 4) if segments * strips in (2, 4, 6, 8)}
    heights = sorted({*(ceil_div(p, pieces) for pieces in (1, 2, 4)), *(min(p, rows) for rows in (16, 8, 4))})
    for count in (8, 4, 2, 1):
        if count > 1 and count >= 2 * octets:
            continue
        for segments, strips in sorted(shapes):
            for tiles in (1, 2):
                if segments * strips // 2 % tiles:
                    continue
                for stages in (3, 2):
                    for rows in reversed(heights):
                        one = Diagonal(count, segments, strips, tiles, rows, stages)
                        pieces = count * 16 // copy_bytes(problem)
                        if one.threads % pieces or items(problem, one) > MOST_ITEMS:
                            continue
                        if _registers(problem, one) * round_up(one.threads, 128) > REGISTERS:
                            continue
                        if shared_bytes(problem, one) <= device.shared_bytes:
                            yield one


def predict_us(problem: ConvProblem, config: Diagonal, device: Device) -> float:
    """Instructions of all warps, a block's latency, and memory."""
    (r, s), (stride_h, _) = problem.kernel, steps(problem)
    pairs, rows = ceil_div(s, 2), (config.rows - 1) * stride_h + r
    warps, piece = config.threads // 32, min(config.octets * 8, problem.c) * 2
    copies = rows * columns(problem, config) * config.strips * (config.octets * 16 // copy_bytes(problem)) / 8
    # Of a tile: products and what brings their weights, operands, and an output's epilogue.
    tile = config.rows * (r * pairs * (1 + 2 / config.tiles) + 24) + rows * pairs * 2
    tiles = warps * config.tiles
    each, alone = 1.24 * (tiles * tile + copies), 1220 + 8.4 * config.tiles * tile
    issue, latency = blocks_us(_blocks(problem, config), min_blocks_per_sm(problem, config), each, alone, device)
    return 1.8 + joint_us(issue, latency, memory_us(problem, device, piece, 0.45))


def _parts(problem: ConvProblem, config: Diagonal) -> tuple[int, int, int, int]:
    """Pieces of rows, strips along a row, blocks of strips, and of channels."""
    (p, q), (classes_h, classes_w) = problem.output, phases(problem)
    pieces = classes_h * ceil_div(ceil_div(p, classes_h), config.rows)
    along = classes_w * ceil_div(ceil_div(q, classes_w), 8 * config.segments)
    return pieces, along, ceil_div(problem.n * along, config.strips), ceil_div(problem.c, 8 * config.octets)


def _blocks(problem: ConvProblem, config: Diagonal) -> int:
    pieces, _, groups, channels = _parts(problem, config)
    return pieces * groups * channels


def block_words(problem: ConvProblem) -> dict[str, int | bool | str]:
    """What all kernels with diagonal weights are instantiated with."""
    (r, s), (stride_h, stride_w) = problem.kernel, steps(problem)
    return {
        "R": r, "S": s, "SH": stride_h, "SW": stride_w, "COPY": copy_bytes(problem), "BIAS": problem.bias,
        "RESIDUAL": problem.residual, "ACTIVATION": window.activation(problem.activation),
    }  # fmt: skip


def source(problem: ConvProblem, config: Diagonal) -> Source:
    sizes = {
        "OCTETS": config.octets, "SEGMENTS": config.segments, "STRIPS": config.strips, "MTILES": config.tiles,
        "STAGES": config.stages,
    }  # fmt: skip
    words = traits(tensor_core_type(problem.dtype), block_words(problem) | sizes)
    file = "ops/conv/cuda/depthwise/diagonal.cu"
    blocks = min_blocks_per_sm(problem, config)
    return stub(file, "depthwise_diagonal", "Traits", "Diagonal", config.threads, blocks, declarations=words)


def launch(problem: ConvProblem, config: Diagonal, device: Device) -> Launch:
    made = source(problem, config)
    _, along, groups, channels = _parts(problem, config)
    fields = window.window_fields(problem, made)
    fields |= dict(zip(("phases_h", "phases_w"), phases(problem), strict=True))
    fields |= {
        "rows": config.rows, "strips_row": along, "strips": problem.n * along, "strip_groups": groups,
        "channel_blocks": channels,
    }  # fmt: skip
    dependent = has_dependent_launches(device)
    grid = (_blocks(problem, config), 1, 1)
    return Launch(made, fields, grid, config.threads, shared_bytes(problem, config), dependent=dependent)
