"""Blocks of cuda.narrow_groups of wgrad: what a block has, and which of them find room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from tapwise.algorithm import Device
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import boxes
from tapwise.ops.conv.cuda.costs import REGISTERS
from tapwise.ops.conv.cuda.wgrad_stages_blocks import LANES, StagesConfig, aligned, deep, strips_of
from tapwise.ops.conv.problem import ConvProblem

GROUPS: Final = (1, 2, 4, 8, 16)
# Channels of a matrix, columns of a unit; bytes that a stage's boxes begin at multiples of.
OCTET, UNIT, ALIGNED = 8, 8, 1024
# Of a block: channels, warps at least and at most; images of a set; rows of a stage.
CHANNELS, LEAST_WARPS, MOST_WARPS = (64, 32, 16), 2, 16
IMAGES, ROWS = (1, 2, 4, 8), (8, 7, 4, 2, 1)
# Units of a stage; pairs of units of a warp; products that are unrolled; bytes of a stage.
MOST_UNITS, MOST_PAIRS, MOST_PRODUCTS, MOST_STAGE = 16, 8, 420, 48 << 10
# Registers of a thread: sums at most, what it has beside sums and rows of dy, all at most.
MOST_SUMS, OTHER_REGISTERS, MOST_REGISTERS = 128, 42, 248
# Warps that copy, by the bytes that pixels begin at multiples of; the registers of their threads, and what threads that
# multiply take more beside them (without it some configs spill).
COPIERS: Final = {16: (1,), 8: (4, 8), 4: (4, 8)}
COPIER_REGISTERS, BESIDE_COPIERS = 64, 24


@dataclass(frozen=True)
class Config(StagesConfig):
    """Strips are of `units` of 8 columns; the rest is every StagesConfig's."""

    channels: int
    share: int
    units: int
    images: int
    rows: int
    taps_h: int
    stages: int
    parts: int
    cluster: bool = False
    copiers: int = 1

    @property
    def consumers(self) -> int:
        return LANES * self.channels // OCTET * self.share

    def strip(self, problem: ConvProblem) -> int:
        return UNIT * self.units

    def columns(self, problem: ConvProblem) -> tuple[int, int]:
        """In eights; of x those that columns of dy meet which are there."""
        strip, q = self.strip(problem), max(1, problem.output[1])
        return round_up(self._reach(problem, min(strip, q) if strips_of(problem, self) == 1 else strip), 8), strip

    def _reach(self, problem: ConvProblem, columns: int) -> int:
        """Columns of x that so many of dy meet."""
        return (columns - 1) * problem.stride[1] + (problem.kernel[1] - 1) * problem.dilation[1] + 1

    def box_rows(self, problem: ConvProblem) -> tuple[int, int]:
        return self.rows * problem.stride[0], self.rows

    def stage_bytes(self, problem: ConvProblem) -> int:
        """With zeros behind x, where columns of dy that are not there read."""
        (columns_x, columns_dy), (rows_x, rows_dy) = self.columns(problem), self.box_rows(problem)
        zeros = max(0, self._reach(problem, columns_dy) - columns_x)
        pixels = (self.images * columns_x * rows_x + zeros, self.images * columns_dy * rows_dy)
        return sum(round_up(self.channels * problem.itemsize * count, ALIGNED) for count in pixels)

    def terms(self, problem: ConvProblem) -> int:
        return self.share

    def registers(self, problem: ConvProblem) -> int:
        """Sums, rows of dy, what else it has."""
        live = 2 * live_rows(problem, self) * pairs(self) * wide(problem)
        # Places of a row's taps.
        more = 8 * max(0, ceil_div(problem.kernel[1], 2) - 4)
        multiplying = sums(problem, self.taps_h) + live + more + OTHER_REGISTERS
        return max(multiplying + BESIDE_COPIERS, COPIER_REGISTERS) if self.copiers > 1 else multiplying


def tap_pairs(problem: ConvProblem, taps_h: int) -> int:
    """Of so many rows of taps."""
    return taps_h * ceil_div(problem.kernel[1], 2)


def wide(problem: ConvProblem) -> int:
    """Eights of filters that eight channels meet."""
    return max(1, problem.group_c // OCTET)


def pairs(config: Config) -> int:
    """Of units of a warp."""
    return config.units * config.images // (2 * config.share)


def live_rows(problem: ConvProblem, config: Config) -> int:
    """Rows of dy that a row of x meets."""
    return (config.taps_h - 1) * problem.dilation[0] // problem.stride[0] + 1


def sums(problem: ConvProblem, taps_h: int) -> int:
    """Registers of a thread."""
    return 4 * wide(problem) * tap_pairs(problem, taps_h)


def _shapes(problem: ConvProblem) -> Iterator[Config]:
    """Channels, warps, units, images: all but rows, stages and parts."""
    r, q = problem.kernel[0], ceil_div(problem.output[1], UNIT)
    taps = (ceil_div(r, count) for count in range(1, r + 1))
    taps_h = next((one for one in taps if sums(problem, one) <= MOST_SUMS), None)
    if taps_h is None:
        return
    even = {ceil_div(q, ceil_div(q, most)) for most in range(1, MOST_UNITS + 1)} if q else {1}
    counts = sorted(even | {2 * ceil_div(q, 2)})
    for channels in CHANNELS:
        if channels % problem.group_c or (channels > CHANNELS[-1] and channels >= 2 * problem.c):
            continue
        for share in (1, 2, 4):
            if not LEAST_WARPS <= channels // OCTET * share <= MOST_WARPS:
                continue
            for units in counts:
                for images, copiers in product(IMAGES, COPIERS[aligned(problem)]):
                    one = Config(channels, share, units, images, 1, taps_h, 2, 1, copiers=copiers)
                    if _is_even(one) and images < 2 * problem.n + (units % 2) * 2:
                        yield one


def _is_even(config: Config) -> bool:
    """Whether warps have as many pairs of units each, of whole images or of the same part of one."""
    if config.units * config.images % (2 * config.share):
        return False
    own, in_row = pairs(config), config.units if config.units % 2 else config.units // 2
    return own <= MOST_PAIRS and config.units * config.images <= MOST_UNITS and (own % in_row == 0 or in_row % own == 0)


def tiles(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """All but the parts: stages of as many rows as are unrolled, for one block a multiprocessor, two and three."""
    for shape in _shapes(problem):
        most = min(MOST_REGISTERS, REGISTERS // round_up(shape.threads, 4 * LANES) // 8 * 8)
        if shape.registers(problem) > most or max(*shape.columns(problem), problem.stride[0]) > boxes.MOST:
            continue
        products = pairs(shape) * tap_pairs(problem, shape.taps_h) * wide(problem)
        for rows in ROWS:
            one = replace(shape, rows=rows)
            large = one.stage_bytes(problem) > MOST_STAGE or rows * problem.stride[0] > boxes.MOST
            if rows > 1 and (rows * products > MOST_PRODUCTS or large or rows > problem.output[0]):
                continue
            yield from deep(problem, one, device)
