"""cuda.narrow_groups: many groups of few channels on tensor cores, windows read from pixels in shared memory.

A tap of a group is 8 or 16 bytes of a pixel, which is what half an operand of the matrix instruction takes from it: the
pixels of a tile are copied to shared memory once for some groups, and operands are read straight from them. Groups are
never joined by zeros, so an infinity stays in its group.

Source: PTX ISA on mma.sync and ldmatrix; the groups of few channels are those of Xie et al., "Aggregated residual
transformations for deep neural networks", 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from math import prod
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.types import reciprocal, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import row_tiles, window
from tapwise.ops.conv.problem import ConvProblem

# Channels and filters of a group; halves of operands, for which the kernel has code of its own each.
CHANNELS: Final = (4, 8, 16, 24, 32)
FILTERS: Final = (4, 8, 16, 32)
MOST_HALVES: Final = 50
# Filters that a warp takes at a time, bytes of a row of them on their way to y, and of a pixel's channels in a block.
TOGETHER: Final = 32
SCRATCH_BYTES: Final = 80
MOST_BYTES: Final = 256
# Outputs of a tile, and of its rows.
LEAST_OUTPUTS, MOST_OUTPUTS, NARROWEST = 64, 1024, 16
# Registers of a thread beside sums and places, and for what else it does: groups of four channels, what follows the
# sums, a function, a residual, another GPU than Hopper.
OTHER_REGISTERS: Final = 48
MORE_REGISTERS: Final = (24, 36, 24, 64, 16)
# Cycles: an operand of 16 pixels, so many times more in words, one of 8 filters; 16 pixels x 32 filters on their way to
# y, more with a function, with a residual; a piece of x; of warps without a tile left.
OPERAND, WORDS_INSTEAD, FILTER, FINISH = 2.43, 1.68, 4.0, 90.0
FUNCTION, RESIDUAL, COPY, WAITING = 52.0, 44.0, 0.58, 0.27
# A block alone: a warp tile, a step of 16 pixels, and until its pixels are there; a launch; what the smaller adds.
CHAIN, STEP, LOAD, START, CYCLES_US, BOTH, LAUNCH_US = 200.0, 7.5, 600.0, 700.0, 1700.0, 0.2, 2.0


@dataclass(frozen=True)
class Config(BaseConfig):
    """A tile of down x across outputs of `groups_per_tile` groups; a warp takes rows x 16 of its pixels at a time;
    `min_blocks_per_sm` bounds the registers."""

    down: int
    across: int
    groups_per_tile: int
    rows: int
    min_blocks_per_sm: int


class NarrowGroups(row_tiles.RowTiles[Config]):
    """Groups of 4, 8, 16, 24 or 32 channels and of 4, 8, 16 or 32 filters, in all multiples of 8; channels last; any
    stride, padding and dilation; float16 and bfloat16. Compute capability 8.0 and newer."""

    id: ClassVar[str] = "cuda.narrow_groups"
    summary: ClassVar[str] = "tensor cores (mma.sync) on pixels in shared memory: many groups of few channels"
    kernel: ClassVar[str] = "narrow_groups"
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16")

    def unsuited(self, problem: ConvProblem) -> str | None:
        if problem.group_c not in CHANNELS or problem.group_k not in FILTERS:
            found = f"{problem.group_c} and {problem.group_k}"
            return f"takes groups of {CHANNELS} channels and {FILTERS} filters, not {found}"
        if problem.k % 8 or problem.c % 8:
            return f"takes channels and filters in multiples of 8, not {problem.c} and {problem.k}"
        if _halves(problem) > MOST_HALVES:
            return f"takes windows of up to {MOST_HALVES} pieces of 16 bytes, not {_halves(problem)}"
        return None

    def fitting(self, problem: ConvProblem, device: Device) -> Iterator[Config]:
        each = TOGETHER // problem.group_k
        for groups_per_tile in (count * each for count in (4, 2, 1)):
            size = groups_per_tile * problem.group_c * 2
            # The last tile may have more groups than are left, by less than what is written together.
            if -problem.groups % groups_per_tile >= each or size > MOST_BYTES or size % 16:
                continue
            for rows in (4, 2, 1):
                sums = rows * each * ceil_div(problem.group_k, 8) * 4
                more = problem.bias or problem.residual or problem.activation is not None
                function = problem.activation in window.FUNCTIONS
                many = problem.residual or function or (more and problem.group_c > 8)
                most = 1 if many else 2 if problem.group_c == 4 or more else 4
                if sums > 64 or rows > most:
                    continue
                registers = sums + 16 * rows + OTHER_REGISTERS
                used = problem.group_c == 4, more, function, problem.residual, device.architecture != "sm_90a"
                registers += sum(compress(MORE_REGISTERS, used))
                min_blocks_per_sm = row_tiles.min_blocks_per_sm(registers)
                for down, across in row_tiles.shapes(problem, LEAST_OUTPUTS, MOST_OUTPUTS, NARROWEST):
                    config = Config(down, across, groups_per_tile, rows, min_blocks_per_sm)
                    if row_tiles.fits(self.shared_bytes(problem, config), min_blocks_per_sm, device):
                        yield config

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """What the blocks of a multiprocessor read of shared memory and issue, or a block's chain of latencies where
        they are few; and memory. Constants are cycles (H200), fitted to times on 19 problems. On the 237 of them whose
        configs are still offered the error of the logarithm is 0.14, the choice 3 % slower than the best, 1.13 times at
        worst."""
        tiles = row_tiles.tiles_of(problem, config.down, config.across)[2] * self.filter_tiles(problem, config)
        high, columns = pixels_of(problem, config)
        each, steps, eights = TOGETHER // problem.group_k, ceil_div(_halves(problem), 2), ceil_div(problem.group_k, 8)
        warp_tiles = ceil_div(config.down * config.across, 16 * config.rows) * (config.groups_per_tile // each)
        longest = ceil_div(warp_tiles, row_tiles.WARPS)
        # Of a warp tile: operands of pixels (words where a tap is half of one) and of filters, and the way to y.
        operand = OPERAND * (WORDS_INSTEAD if problem.group_c == 4 else 1)
        way = FINISH + FUNCTION * (problem.activation in window.FUNCTIONS) + RESIDUAL * problem.residual
        warp_tile = each * steps * (config.rows * operand + FILTER * eights) + config.rows * way
        copied = high * columns * config.groups_per_tile * problem.group_c / 8 * COPY
        # Warps that have no tile left wait for the others.
        work = (warp_tiles * (1 - WAITING) + row_tiles.WARPS * longest * WAITING) * warp_tile + copied
        chain = longest * (CHAIN + steps * each * config.rows * STEP) + LOAD
        together = min(config.min_blocks_per_sm, ceil_div(tiles, device.multiprocessors))
        share = ceil_div(tiles, device.multiprocessors * config.min_blocks_per_sm)
        compute = (share * max(together * work, chain) + START) / CYCLES_US
        memory = problem.bytes / (device.gbps * 1e3)
        return float(max(compute, memory) + BOTH * min(compute, memory) + LAUNCH_US)

    def template(self, problem: ConvProblem, config: Config) -> str:
        words = (
            tensor_core_type(problem.dtype), problem.group_c, problem.group_k, *problem.kernel, config.groups_per_tile,
            config.rows, problem.bias, problem.residual, window.activation(problem.activation),
        )  # fmt: skip
        return f"Narrow<{template_args(*words)}>"

    def fields(self, problem: ConvProblem, config: Config) -> dict[str, int]:
        high, columns = pixels_of(problem, config)
        return {
            "image_rows": high, "columns": columns, "group_tiles": self.filter_tiles(problem, config),
            "per_across": reciprocal(config.across),
            "per_piece": reciprocal(columns * config.groups_per_tile * problem.group_c // 8),
        }  # fmt: skip

    def filter_tiles(self, problem: ConvProblem, config: Config) -> int:
        """Tiles along the groups."""
        return ceil_div(problem.groups, config.groups_per_tile)

    def filter_bytes(self, problem: ConvProblem, config: Config) -> int:
        """A block's filters as operands."""
        return config.groups_per_tile * ceil_div(_halves(problem), 2) * ceil_div(problem.group_k, 8) * 256

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        """Zeros, the filters, outputs on their way, and the pixels of two tiles."""
        pixel = config.groups_per_tile * problem.group_c * 2 + 16
        scratch = row_tiles.WARPS * 16 * SCRATCH_BYTES
        return 16 + self.filter_bytes(problem, config) + scratch + 2 * prod(pixels_of(problem, config)) * pixel


def _halves(problem: ConvProblem) -> int:
    """Halves of operands, 8 terms of a window of a group: two taps of 4 channels, or 8 channels of a tap."""
    taps = prod(problem.kernel)
    return ceil_div(taps, 2) if problem.group_c == 4 else taps * (problem.group_c // 8)


def pixels_of(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """(rows, columns) of x that a tile reaches."""
    (stride_h, stride_w), (reach_h, reach_w) = problem.stride, problem.reach
    return (config.down - 1) * stride_h + reach_h, (config.across - 1) * stride_w + reach_w
