"""Blocks of cuda.depthwise_mma_sp of wgrad: what a block has, and which of them find room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import lcm
from typing import Final

from tapwise.algorithm import Device
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import boxes
from tapwise.ops.conv.cuda.costs import REGISTERS, TAKEN
from tapwise.ops.conv.cuda.wgrad_stages_blocks import LANES, StagesConfig, deep, in_halves
from tapwise.ops.conv.problem import ConvProblem

# Columns of a tile, and of dy of a unit at most; bytes that a box begins at multiples of; places of a product, images
# of a set in multiples of.
TILE, ALIGNED, PLACES, FOUR = 8, 1024, 16, 4
# Where pixels may begin 8 bytes further: channels of a block, by the bytes of a pixel that comes.
HALF_CHANNELS: Final = {28: 64, 48: 128, 60: 128}
# Of a block: channels, of a warp, tiles; warps at least and at most; images of a set; rows of a stage.
CHANNELS, EACH, TILES, LEAST_WARPS, MOST_WARPS = (64, 32, 16), (4, 8), (1, 2), 2, 16
IMAGES, ROWS = (4, 8, 16, 32), (4, 2, 1)
# Columns of dy of a unit at least; units of a strip; products that are unrolled; bytes of a stage.
LEAST_WIDTH, MOST_UNITS, MOST_PRODUCTS, MOST_STAGE = 3, 16, 250, 72 << 10
# Of a strip, columns of x that its neighbour reads, too.
MOST_TWICE: Final = 0.7
# Of the places of a product, at least so many are there, where there are so many images.
LEAST_PLACES: Final = 0.7
# Registers of a thread: what it has beside sums and operands, more for several rows of a stage, and where pixels may
# begin 8 bytes further and some places are none, all at most.
OTHER_REGISTERS, MORE_ROWS, NO_PLACES, MOST_REGISTERS = 24, 6, 10, 248


@dataclass(frozen=True)
class Config(StagesConfig):
    """A warp has `each` channels; a strip is of `units` of `width` columns, which `tiles` of 8 columns of x meet; the
    rest is every StagesConfig's."""

    channels: int
    each: int
    share: int
    units: int
    width: int
    tiles: int
    images: int
    rows: int
    taps_h: int
    stages: int
    parts: int
    cluster: bool = False
    takes: bool = False

    @property
    def consumers(self) -> int:
        return LANES * self.channels // self.each * self.share

    def strip(self, problem: ConvProblem) -> int:
        return self.units * self.width

    def columns(self, problem: ConvProblem) -> tuple[int, int]:
        of_x, of_dy = self.strip(problem) + reach(problem), self.strip(problem)
        return (round_up(of_x, 2), round_up(of_dy, 2)) if in_halves(problem) else (pitch(of_x), pitch(of_dy))

    def box_rows(self, problem: ConvProblem) -> tuple[int, int]:
        return 1, 1

    def pixel_bytes(self, problem: ConvProblem) -> int:
        return HALF_CHANNELS[self.channels] if in_halves(problem) else super().pixel_bytes(problem)

    def stage_bytes(self, problem: ConvProblem) -> int:
        """With the columns that are read beyond a row's end."""
        pixel, before = self.pixel_bytes(problem), (self.units - 1) * self.width
        read = (before + TILE * self.tiles, before + TILE)

        def row(columns: int, most: int) -> int:
            beyond = max(0, most - columns)
            if not in_halves(problem):
                return round_up(pixel * (self.images * columns + beyond), ALIGNED)
            box = round_up(pixel * self.images * columns // 4, 8 * pixel)
            return round_up(4 * box + pixel * ceil_div(beyond, 2), ALIGNED)

        return self.rows * sum(map(row, self.columns(problem), read))

    def terms(self, problem: ConvProblem) -> int:
        return self.share * self.width

    def term_pitch(self, sums: int) -> int:
        """A warp's lanes store terms of eight columns, each in a bank of its own."""
        return round_up(sums - 4, LANES) + 4

    def registers(self, problem: ConvProblem) -> int:
        """Sums, rows of dy, operands of two rows of x and of one of dy, what else it has."""
        of_rows = self.tiles * (self.taps_h + 2) + live_rows(problem, self) + 1
        more = NO_PLACES * (in_halves(problem) and self.units * self.images % PLACES > 0)
        return self.each * (2 * of_rows + 2) + OTHER_REGISTERS + MORE_ROWS * (self.rows > 1) + more


def pitch(columns: int) -> int:
    """Pixels of an image's row: two more than a multiple of four, so that lanes that have four images, and columns
    beside each other, read from all banks."""
    return round_up(columns - 2, 4) + 2


def reach(problem: ConvProblem) -> int:
    """Columns from the first tap to the last."""
    return (problem.kernel[1] - 1) * problem.dilation[1]


def live_rows(problem: ConvProblem, config: Config) -> int:
    """Rows of dy that a row of x meets."""
    return (config.taps_h - 1) * problem.dilation[0] + 1


def unrolled(problem: ConvProblem, config: Config) -> int:
    """Products of the stages after which a warp's registers have the same rows of dy again."""
    return lcm(config.rows, live_rows(problem, config)) * config.each // 2 * config.tiles * config.taps_h


def _widths(problem: ConvProblem, tiles: int) -> Iterator[tuple[int, int]]:
    """(units, width) of strips that share a row evenly, and of several of which little is read twice."""
    most, q = min(TILE, TILE * tiles - reach(problem)), max(1, problem.output[1])
    if most >= min(LEAST_WIDTH, q):
        needed = ceil_div(q, most)
        for units in sorted({ceil_div(needed, count) for count in range(1, needed + 1)}):
            strips = ceil_div(needed, units)
            width = ceil_div(q, strips * units)
            if strips == 1 or reach(problem) <= units * width * MOST_TWICE:
                yield units, width


def _shapes(problem: ConvProblem) -> Iterator[Config]:
    """All but rows, stages and parts."""
    r = problem.kernel[0]
    # Reads of eight channels are of whole pieces of 16 bytes.
    possible = (HALF_CHANNELS, EACH[:1]) if in_halves(problem) else (CHANNELS, EACH)
    for channels, each, tiles in product(*possible, TILES):
        if channels > min(possible[0]) and channels >= 2 * problem.c:
            continue
        plain = Config(channels, each, 1, 1, 1, tiles, FOUR, 1, r, 2, 1)
        taps = (ceil_div(r, count) for count in range(1, r + 1))
        fitting = (one for one in taps if replace(plain, taps_h=one).registers(problem) <= MOST_REGISTERS)
        taps_h = next(fitting, None)
        for (units, width), images in product(_widths(problem, tiles), IMAGES):
            places = units * images
            share = ceil_div(places, PLACES)
            if taps_h is None or units > MOST_UNITS or images >= problem.n + FOUR:
                continue
            warps = channels // each * share
            many = places >= LEAST_PLACES * PLACES * share or images >= problem.n
            if many and LEAST_WARPS <= warps <= MOST_WARPS:
                yield replace(plain, units=units, width=width, images=images, share=share, taps_h=taps_h)


def tiles(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """All but the parts: stages of as many rows as are unrolled, for one block a multiprocessor, two and three."""
    for shape, rows in product(_shapes(problem), ROWS):
        one = _fitting(problem, replace(shape, rows=rows))
        if one is None or max(one.columns(problem)) > boxes.MOST:
            continue
        large = one.stage_bytes(problem) > MOST_STAGE or rows > problem.output[0]
        if rows == 1 or not (unrolled(problem, one) > MOST_PRODUCTS or large):
            yield from deep(problem, one, device)


def _fitting(problem: ConvProblem, config: Config) -> Config | None:
    """With copying warps that give up registers, where it needs them."""
    needed, warps = config.registers(problem), config.consumers // LANES
    if needed <= min(MOST_REGISTERS, REGISTERS // round_up(config.threads, 4 * LANES) // 8 * 8):
        return config
    return replace(config, takes=True) if warps in TAKEN and needed <= TAKEN[warps][0] else None
