"""Blocks of cuda.narrow_groups of wgrad: what a block has, which of them find room, how the sum is split, and what
there is to do for one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod
from typing import Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import boxes, wgrad_parts
from tapwise.ops.conv.cuda.costs import MORE_BYTES, REGISTERS, SHARED_BYTES, blocks_of
from tapwise.ops.conv.cuda.gradients import MOST_PART_PIXELS
from tapwise.ops.conv.problem import ConvProblem

GROUPS: Final = (1, 2, 4, 8, 16)
# Channels of a matrix, columns of a unit, lanes of a warp; bytes that a stage's boxes begin at multiples of.
OCTET, UNIT, LANES, ALIGNED = 8, 8, 32, 1024
# Of a block: channels, warps at least and at most; images of a set; rows of a stage, stages.
CHANNELS, LEAST_WARPS, MOST_WARPS = (64, 32, 16), 2, 16
IMAGES, ROWS, MOST_STAGES = (1, 2, 4, 8), (8, 7, 4, 2, 1), 8
# Units of a stage; pairs of units of a warp; products that are unrolled; bytes of a stage.
MOST_UNITS, MOST_PAIRS, MOST_PRODUCTS, MOST_STAGE = 16, 8, 420, 48 << 10
# Registers of a thread: sums at most, what it has beside sums and rows of dy, more where several blocks find room, all
# at most.
MOST_SUMS, OTHER_REGISTERS, SPARE, MOST_REGISTERS = 128, 42, 4, 248
# Warps that copy, by the bytes that pixels begin at multiples of; the registers of their threads, and what threads that
# multiply take more beside them (without it some configs spill).
COPIERS: Final = {16: (1,), 8: (4, 8), 4: (4, 8)}
COPIER_REGISTERS, BESIDE_COPIERS = 64, 24
# Rows of dy of a part at least; blocks of a cluster that add parts.
LEAST_ROWS, CLUSTERS = 2, (2, 4, 8)


@dataclass(frozen=True)
class Config(BaseConfig):
    """A block has `channels`, `share` warps the same; strips of `units` of 8 columns, sets of so many `images`, stages
    of so many `rows` of dy; sums of taps_h rows of taps. `parts` of the sum, which a second launch adds, or, where they
    are a `cluster`, its blocks. `copiers` warps bring rows: one by TMA, more where pixels begin within 16 bytes."""

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
    def blocks_of_cluster(self) -> int:
        return self.parts if self.cluster else 1

    @property
    def has_second(self) -> bool:
        """Whether a second launch adds parts."""
        return self.parts > 1 and not self.cluster

    @property
    def consumers(self) -> int:
        return LANES * self.channels // OCTET * self.share

    @property
    def threads(self) -> int:
        """Those that multiply, and those that copy."""
        return self.consumers + LANES * self.copiers


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


def registers(problem: ConvProblem, config: Config) -> int:
    """Of a thread, about: sums, rows of dy, what else it has."""
    live = 2 * live_rows(problem, config) * pairs(config) * wide(problem)
    # Places of a row's taps.
    more = 8 * max(0, ceil_div(problem.kernel[1], 2) - 4)
    multiplying = sums(problem, config.taps_h) + live + more + OTHER_REGISTERS
    return max(multiplying + BESIDE_COPIERS, COPIER_REGISTERS) if config.copiers > 1 else multiplying


def aligned(problem: ConvProblem) -> int:
    """Bytes that pixels begin at multiples of, up to 16."""
    return gcd(problem.c * problem.itemsize, 16)


def columns_x(problem: ConvProblem, config: Config) -> int:
    """Of x in a stage: those that its units meet, in eights."""
    reach = (UNIT * config.units - 1) * problem.stride[1] + (problem.kernel[1] - 1) * problem.dilation[1] + 1
    return round_up(reach, 8)


def box_bytes(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """Of a stage, of x and of dy."""
    pixel = config.channels * problem.itemsize * config.images * config.rows
    return pixel * problem.stride[0] * columns_x(problem, config), pixel * UNIT * config.units


def stage_bytes(problem: ConvProblem, config: Config) -> int:
    return sum(round_up(size, ALIGNED) for size in box_bytes(problem, config))


def barriers_at(problem: ConvProblem, config: Config) -> int:
    """Bytes of stages, or of the sums that take their place at the end: those of warps, and those that a block of a
    cluster adds."""
    kept = config.channels * problem.group_c * config.taps_h * problem.kernel[1]
    received = config.parts * ceil_div(kept, config.parts) if config.cluster else 0
    return round_up(max(config.stages * stage_bytes(problem, config), 4 * (config.share * kept + received)), 8)


def shared_bytes(problem: ConvProblem, config: Config) -> int:
    """Those, and barriers."""
    return barriers_at(problem, config) + 16 * config.stages + 8 * config.cluster


def min_blocks_per_sm(problem: ConvProblem, config: Config) -> int:
    """Blocks that find room on a multiprocessor."""
    return blocks_of(registers(problem, config) + SPARE, config.threads, shared_bytes(problem, config))


def strips_of(problem: ConvProblem, config: Config) -> int:
    return ceil_div(problem.output[1], UNIT * config.units)


def all_rows(problem: ConvProblem, config: Config) -> int:
    """Of dy, of all sets of images and strips."""
    return problem.output[0] * ceil_div(problem.n, config.images) * strips_of(problem, config)


def blocks_of_part(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """Pieces of a filter, blocks of channels."""
    return ceil_div(problem.kernel[0], config.taps_h), ceil_div(problem.c, config.channels)


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
        if registers(problem, shape) > most or max(columns_x(problem, shape), problem.stride[0]) > boxes.MOST:
            continue
        products = pairs(shape) * tap_pairs(problem, shape.taps_h) * wide(problem)
        for rows in ROWS:
            one = replace(shape, rows=rows)
            large = stage_bytes(problem, one) > MOST_STAGE or rows * problem.stride[0] > boxes.MOST
            if rows > 1 and (rows * products > MOST_PRODUCTS or large or rows > problem.output[0]):
                continue
            for beside in (1, 2, 3):
                room = min(device.shared_bytes, SHARED_BYTES // beside - MORE_BYTES)
                stages = min(MOST_STAGES, room // (stage_bytes(problem, one) + 16))
                deep = replace(one, stages=stages)
                held = blocks_of(registers(problem, one) + SPARE, one.threads)
                if stages > 1 and beside <= held and shared_bytes(problem, deep) <= room:
                    yield deep


def splits(problem: ConvProblem, config: Config, device: Device) -> Iterator[Config]:
    """Parts that fill the device once, twice or half."""
    room = device.multiprocessors * min_blocks_per_sm(problem, config) / prod(blocks_of_part(problem, config))
    least = ceil_div(problem.n * prod(problem.output), MOST_PART_PIXELS * config.share)
    most = max(least, all_rows(problem, config) // LEAST_ROWS)
    for parts in dict.fromkeys(min(max(least, int(room * share)), most) for share in (1, 0.5, 2)):
        one = replace(config, parts=parts)
        if parts * wgrad_parts.part_pitch(problem) * 4 <= wgrad_parts.PARTS_BYTES:
            yield one
    for parts in CLUSTERS:
        one = replace(config, parts=parts, cluster=True)
        if least <= parts <= most and shared_bytes(problem, one) <= device.shared_bytes:
            yield one


@dataclass(frozen=True)
class Work:
    """Of a block, in the mean: stages; of a warp, matrices by fours and products; bytes that come, and pixels of
    their boxes."""

    stages: float
    matrices: float
    products: float
    bytes: float
    box_pixels: float

    @classmethod
    def of(cls, problem: ConvProblem, config: Config) -> Work:
        (stride_h, stride_w), (p, q), (h, w), s = problem.stride, problem.output, problem.spatial, problem.kernel[1]
        rows = all_rows(problem, config) / config.parts
        # Runs of rows of an image: parts may begin and end within one.
        runs = max(1.0, rows / p) if rows % p == 0 or p % rows == 0 else (rows + p - 1) / p
        each, stage = rows / runs, config.rows * stride_h
        more = max(0, (config.taps_h - 1) * problem.dilation[0] + 1 - stride_h)
        real = min(h, each * stride_h + more)
        multiplied = runs * (round_up(h, stage) if each >= p else real + stage / 2)
        stages = runs * ((each * stride_h + more) / stage + 0.5)
        own, strips, channels = pairs(config), strips_of(problem, config), config.channels
        matrices = own * (multiplied * s * gcd(stride_w, 2) + stages * config.rows * wide(problem)) / 2
        products = multiplied / stride_h * own * tap_pairs(problem, config.taps_h) * wide(problem)
        across = min(w / strips + (s - 1 if strips > 1 else 0), columns_x(problem, config))
        pixels = min(config.images, problem.n) * runs * (real * across + each * min(q / strips, UNIT * config.units))
        box_pixels = config.images * runs * (real * columns_x(problem, config) + each * UNIT * config.units)
        there = problem.c / round_up(problem.c, channels) * channels
        return cls(stages, matrices, products, pixels * there * problem.itemsize, box_pixels)
