"""The kernel of cuda.depthwise with taps as diagonal matrices: what it takes, its launch, its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.depthwise import boxes, streamed
from tapwise.ops.conv.cuda.depthwise.classes import phases, steps
from tapwise.ops.conv.cuda.depthwise.costs import REGISTERS, blocks_of, cycles_us, joint_us, memory_us
from tapwise.ops.conv.problem import ConvProblem

# Channels of an octet, and pixels of a tile; bytes of an octet, and what a stage begins at.
CHANNELS, PIXELS, OCTET_BYTES, ALIGNMENT = 8, 16, 16, 1024
# Filters that are unrolled; threads of a block; registers of a thread beside weights, sums and operands.
MOST_TAPS, LEAST_THREADS, MOST_THREADS, OTHER_REGISTERS, FUNCTION_REGISTERS = 121, 64, 512, 36, 24
# Octets of a block, and those that TMA brings at full speed; stages of rows of x (three were no faster).
OCTETS, TMA_OCTETS, STAGES = (8, 4, 2, 3, 5, 7), (4, 8), 2
# Cycles of a copy of 4 bytes, and of more.
SMALL_COPY, COPY = 30.0, 9.4


@dataclass(frozen=True)
class Diagonal(BaseConfig):
    """A warp has eight channels of `tiles` of 16 columns, or of 8 columns of two `images`, a block `octets` times so
    many channels and `groups` times so many columns, `rows` rows of outputs. Rows of x come to shared memory `by`
    "tma", or by cp.async as "pixels"."""

    by: str
    octets: int
    images: int
    tiles: int
    groups: int
    rows: int

    @property
    def threads(self) -> int:
        return 32 * self.octets * self.groups

    @property
    def columns(self) -> int:
        """Of y."""
        return PIXELS // self.images * self.tiles * self.groups


def suits(problem: ConvProblem) -> bool:
    """What streamed takes, of 16 bits and an even number of channels, with filters of up to 121 taps; in a class of
    dilation no stride."""
    return (
        problem.dtype in ("f16", "bf16")
        and problem.c % 2 == 0
        and steps(problem) == (1, 1)
        and prod(problem.kernel) <= MOST_TAPS
        and streamed.is_small(problem)
    )


def copy_bytes(problem: ConvProblem) -> int:
    """Of one copy: what pixels are a multiple of."""
    return next(size for size in (16, 8, 4) if problem.c * 2 % size == 0)


def _stage(problem: ConvProblem, config: Diagonal) -> tuple[int, int]:
    """Rows and columns of x of each image."""
    return problem.kernel[0], round_up(config.columns - 1 + problem.kernel[1], 8)


def _stage_bytes(problem: ConvProblem, config: Diagonal) -> int:
    return round_up(config.images * prod(_stage(problem, config)) * config.octets * OCTET_BYTES, ALIGNMENT)


def shared_bytes(problem: ConvProblem, config: Diagonal) -> int:
    kept = config.images * problem.kernel[0] * config.columns * config.octets * OCTET_BYTES
    return ALIGNMENT + 2 * round_up(kept, ALIGNMENT) + STAGES * (_stage_bytes(problem, config) + 16)


def registers(problem: ConvProblem, config: Diagonal) -> int:
    """Of a thread."""
    r, s = problem.kernel
    copies = ceil_div(_stage_bytes(problem, config) // copy_bytes(problem), config.threads)
    taken = r * s + config.tiles * (4 * (r + ceil_div(s, 2)) + 6 * (s % 2))
    taken += 10 + 2 * copies if config.by == "pixels" else 0
    return taken + OTHER_REGISTERS + FUNCTION_REGISTERS * (problem.activation in window.FUNCTIONS)


def min_blocks_per_sm(problem: ConvProblem, config: Diagonal) -> int:
    """Blocks that registers and shared memory leave room for."""
    return blocks_of(registers(problem, config), config.threads, shared_bytes(problem, config))


def configs(problem: ConvProblem, device: Device) -> Iterator[Diagonal]:
    if not suits(problem):
        return
    classes_h, classes_w = phases(problem)
    p, q = ceil_div(problem.output[0], classes_h), ceil_div(problem.output[1], classes_w)
    even = [ceil_div(p, pieces) for pieces in (1, 2, 3, 4, 6)]
    heights = sorted({*even, *(min(p, round_up(rows, problem.kernel[0])) for rows in even)})
    for octets, images, tiles in product(_octets(problem), (1, 2), (1, 2)):
        needed = ceil_div(q, PIXELS // images * tiles)
        # Two images where their columns are fewer.
        if images == 2 and (problem.n == 1 or needed * PIXELS // 2 * tiles >= round_up(q, PIXELS * tiles)):
            continue
        for groups in dict.fromkeys(ceil_div(needed, strips) for strips in (1, 2, 3, 4)):
            for rows in reversed(heights):
                for by in _ways(problem, octets, device):
                    one = Diagonal(by, octets, images, tiles, groups, rows)
                    if _fits(problem, one, device):
                        yield one


def _octets(problem: ConvProblem) -> list[int]:
    """Such as leave few channels idle: more where TMA brings them."""
    found = ceil_div(problem.c, CHANNELS)
    waste = {n: ceil_div(found, n) * n / found for n in OCTETS if n <= found} or {2: 1.0}
    return [n for n, idle in waste.items() if idle <= (1.15 if n in TMA_OCTETS else 1.07) * min(waste.values())]


def _ways(problem: ConvProblem, octets: int, device: Device) -> list[str]:
    dense = max(problem.dilation) == 1 and has_dependent_launches(device.architecture)
    return ["tma"] * (dense and problem.c % CHANNELS == 0 and octets in TMA_OCTETS) + ["pixels"]


def _fits(problem: ConvProblem, config: Diagonal, device: Device) -> bool:
    return (
        LEAST_THREADS <= config.threads <= MOST_THREADS
        and min(255, registers(problem, config)) * config.threads <= REGISTERS
        and registers(problem, config) < 250
        and shared_bytes(problem, config) <= device.shared_bytes
        and (config.by == "pixels" or max(_stage(problem, config)) <= boxes.MOST)
        and _blocks(problem, config) < INDEX_LIMIT
    )


def predict_us(problem: ConvProblem, config: Diagonal, device: Device) -> float:
    """Products of a multiprocessor's warps, a block's latency, and memory. Constants are fitted to 546 times on 13
    layers, N=32 (H200), within 11 %."""
    r, s = problem.kernel
    rows, copies = config.rows + r - 1, 0.0
    products = config.tiles * config.rows * (s // 2 * r + s % 2 * ceil_div(r, 2))
    moved, stages = config.tiles * (rows * ceil_div(s, 2) + config.rows), ceil_div(rows, r)
    if config.by == "pixels":
        size = copy_bytes(problem)
        copies = (SMALL_COPY if size == 4 else COPY) * stages * _stage_bytes(problem, config) / size / config.threads
    each = config.threads / 32 * (2.09 * products + copies)
    alone = 4300 + 2.45 * products + 10.4 * moved + 267 * stages
    # The last wave's blocks begin while others still run.
    share, held = _blocks(problem, config) / device.multiprocessors, min_blocks_per_sm(problem, config)
    waves = 0.5 * (ceil_div(ceil(share), held) + max(1.0, share / held))
    blocks = (ceil(share) * each + waves * alone) / cycles_us(device)
    # What fits into L2 is found there in part.
    pieces = 1.57 + 0.27 * 64 / (2 * min(config.octets * CHANNELS, problem.c))
    memory = memory_us(problem, device, 32, 0) * (pieces - 0.85 * max(0.0, 1 - problem.bytes / device.l2_bytes))
    return 1.1 + joint_us(blocks, memory, 3.4)


def _parts(problem: ConvProblem, config: Diagonal) -> tuple[int, int, int]:
    """Pieces of a column of outputs, strips along a row, blocks of channels."""
    (p, q), (classes_h, classes_w) = problem.output, phases(problem)
    pieces = classes_h * ceil_div(ceil_div(p, classes_h), config.rows)
    along = classes_w * ceil_div(ceil_div(q, classes_w), config.columns)
    return pieces, along, ceil_div(problem.c, CHANNELS * config.octets)


def _blocks(problem: ConvProblem, config: Diagonal) -> int:
    return ceil_div(problem.n, config.images) * prod(_parts(problem, config))


def source(problem: ConvProblem, config: Diagonal) -> Source:
    r, s = problem.kernel
    words: dict[str, int | bool | str] = {
        "R": r, "S": s, "OCTETS": config.octets, "IMAGES": config.images, "TILES": config.tiles,
        "GROUPS": config.groups, "STAGES": STAGES, "BY": config.by.upper(), "COPY": copy_bytes(problem),
        "BIAS": problem.bias, "RESIDUAL": problem.residual, "ACTIVATION": window.activation(problem.activation),
    }  # fmt: skip
    declarations = traits(tensor_core_type(problem.dtype), words)
    file, blocks = "ops/conv/cuda/depthwise/diagonal.cu", min_blocks_per_sm(problem, config)
    return stub(file, "depthwise_diagonal", "Traits", "Streamed", config.threads, blocks, declarations=declarations)


def launch(problem: ConvProblem, config: Diagonal, device: Device) -> Launch:
    made = source(problem, config)
    # A stage's rows of a block's columns and channels, in pieces of 16 bytes that are swizzled.
    rows, columns = _stage(problem, config)
    box = (config.octets * CHANNELS, columns, rows)
    span = config.octets * OCTET_BYTES
    map_x = boxes.map_x(problem, box, span, config.images) if config.by == "tma" else None
    shape = _blocks(problem, config), config.threads, shared_bytes(problem, config)
    return boxes.launch(made, streamed.fields(problem, made, config.rows, _parts(problem, config)), shape, map_x)
