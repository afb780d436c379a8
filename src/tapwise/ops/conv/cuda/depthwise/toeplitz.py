"""The kernel of cuda.depthwise for small images on tensor cores: rows of a filter as Toeplitz matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import boxes, window
from tapwise.ops.conv.cuda.costs import blocks_of, blocks_us, joint_us, memory_us
from tapwise.ops.conv.cuda.depthwise import banded
from tapwise.ops.conv.problem import ConvProblem

# Channels of a block; rows and columns of an image, rows of a filter; columns of x in a step, outputs of a product.
CHANNELS, MOST_SIZE, MOST_ROWS, STEP, OUTPUTS = 8, 32, 63, 16, 8
THREADS: Final = 32 * CHANNELS
# Registers of a thread for sums, for the rest, and while images come.
MOST_SUMS, OTHER_REGISTERS, LEAST_REGISTERS = 96, 48, 64
TILES: Final = (1, 2, 4, 8)


@dataclass(frozen=True)
class Toeplitz(BaseConfig):
    """A block has eight channels, each a warp's, of so many tiles of 16 rows of outputs: of an image, or of two."""

    tiles: int


def suits(problem: ConvProblem) -> bool:
    """16 bits, channels last, a multiple of eight of them with one filter each, no stride or dilation; images and
    outputs of up to 32 x 32; fewer than 2^31 elements."""
    return (
        problem.dtype in ("f16", "bf16")
        and problem.layout == "nhwc"
        and problem.group_k == 1
        and problem.c % CHANNELS == 0
        and set(problem.stride) == set(problem.dilation) == {1}
        and max(*problem.spatial, *problem.output) <= MOST_SIZE
        and problem.kernel[0] <= MOST_ROWS
        and max(prod(problem.x_shape), prod(problem.y_shape)) < INDEX_LIMIT
    )


def _tiles(problem: ConvProblem) -> tuple[int, int, int]:
    """16 rows of outputs, eight columns of them, 16 columns of x: how many."""
    (p, q), width = problem.output, problem.spatial[1]
    return ceil_div(p, 2 * OUTPUTS), ceil_div(q, OUTPUTS), ceil_div(width, STEP)


def images(problem: ConvProblem, config: Toeplitz) -> int:
    """Of a block."""
    return config.tiles * (2 if problem.output[0] <= OUTPUTS else 1)


def shared_bytes(problem: ConvProblem, config: Toeplitz) -> int:
    """Taps between zeros, and images; then sums."""
    (height, _), (r, s), (_, outputs, steps) = problem.spatial, problem.kernel, _tiles(problem)
    bands = CHANNELS * r * banded.pairs(OUTPUTS * outputs - 1 + STEP * steps)
    planes = CHANNELS * images(problem, config) * (height + 1) * STEP * steps * 2
    sums = CHANNELS * images(problem, config) * prod(problem.output) * 4
    return max(bands + max(planes, CHANNELS * r * s * 2 + 16), sums)


def min_blocks_per_sm(problem: ConvProblem, config: Toeplitz) -> int:
    """Blocks that registers and shared memory leave room for."""
    taken = max(LEAST_REGISTERS, 4 * config.tiles * prod(_tiles(problem)[:2]) + OTHER_REGISTERS)
    taken += 24 * (problem.activation in window.FUNCTIONS)
    return blocks_of(taken, THREADS, shared_bytes(problem, config))


def configs(problem: ConvProblem, device: Device) -> Iterator[Toeplitz]:
    if not suits(problem):
        return
    for tiles in TILES:
        one = Toeplitz(tiles)
        few = tiles == 1 or images(problem, one) < 2 * problem.n
        fits = 4 * tiles * prod(_tiles(problem)[:2]) <= MOST_SUMS and shared_bytes(problem, one) <= device.shared_bytes
        if few and fits:
            yield one


def predict_us(problem: ConvProblem, config: Toeplitz, device: Device) -> float:
    """What warps multiply and move, a block's latency, and memory. Constants are fitted to 49 times on 11 layers, N=1
    and N=32 (H200), within 8 %."""
    (high, wide, steps), r = _tiles(problem), problem.kernel[0]
    products = r * config.tiles * high * steps * wide
    operands = r * (config.tiles * high * steps + 2 * steps + wide)
    pixels = images(problem, config) * (prod(problem.spatial) + prod(problem.output)) / 32
    each = CHANNELS * (0.2 * products + 3.2 * operands + 0.6 * r) + 58 * pixels
    alone = 1160 + 3.5 * each / CHANNELS
    blocks = blocks_us(_blocks(problem, config), min_blocks_per_sm(problem, config), each, alone, device)
    return 1.4 + joint_us(blocks, memory_us(problem, device, 16, 0.9), 3.0)


def _blocks(problem: ConvProblem, config: Toeplitz) -> int:
    return ceil_div(problem.n, images(problem, config)) * (problem.c // CHANNELS)


def source(problem: ConvProblem, config: Toeplitz) -> Source:
    words: dict[str, int | bool | str] = {
        "R": problem.kernel[0], "S": problem.kernel[1], "PAD_H": problem.padding[0][0], "PAD_W": problem.padding[1][0],
        "H": problem.spatial[0], "W": problem.spatial[1], "P": problem.output[0], "Q": problem.output[1],
        "TILES": config.tiles, "BIAS": problem.bias, "RESIDUAL": problem.residual,
        "ACTIVATION": window.activation(problem.activation), **window.in_place_words(None),
    }  # fmt: skip
    file, blocks = "ops/conv/cuda/depthwise/toeplitz.cu", min_blocks_per_sm(problem, config)
    declarations = traits(tensor_core_type(problem.dtype), words)
    return stub(file, "depthwise_toeplitz", "Traits", "Banded", THREADS, blocks, declarations=declarations)


def launch(problem: ConvProblem, config: Toeplitz, device: Device) -> Launch:
    made = source(problem, config)
    fields = window.window_fields(problem, made)
    fields |= {"rows": problem.output[0], "strips": problem.n, "channel_blocks": problem.c // CHANNELS}
    shape = _blocks(problem, config), THREADS, shared_bytes(problem, config)
    return boxes.launch(made, fields, shape, None)
