"""Blocks of weight gradients whose rows come in stages (wgrad_stages.py): what a config has, how the sum is split, and
what there is to do for a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any, Final, Self, TypeVar

from tapwise.algorithm import Config, Device
from tapwise.cuda.jit.occupancy import room_of
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import wgrad_parts
from tapwise.ops.conv.cuda.costs import TAKEN, WARPGROUP, blocks_of
from tapwise.ops.conv.cuda.gradients import MOST_PART_PIXELS
from tapwise.ops.conv.problem import ConvProblem

LANES: Final = 32
# Stages at most; registers more where several blocks find room; rows of dy of a part at least; blocks of a cluster that
# add parts.
MOST_STAGES, SPARE, LEAST_ROWS, CLUSTERS = 8, 4, 2, (2, 4, 8)


class StagesConfig(Config):
    """A block has `channels`, `share` warps the same; sets of so many `images`, stages of so many `rows` of dy; sums of
    taps_h rows of taps. `parts` of the sum, which a second launch adds, or, where they are a `cluster`, its blocks.
    `copiers` warps bring rows: one by TMA, more where pixels begin within 16 bytes. Where the others take registers of
    theirs, they are a warpgroup."""

    channels: int
    share: int
    images: int
    rows: int
    taps_h: int
    stages: int
    parts: int
    cluster: bool
    # As most kernels have them.
    copiers: int = 1
    takes: bool = False

    def changed(self, **fields: int | bool) -> Self:
        whole: Any = self
        found: Self = replace(whole, **fields)
        return found

    @property
    def blocks_of_cluster(self) -> int:
        return self.parts if self.cluster else 1

    @property
    def has_second(self) -> bool:
        """Whether a second launch adds parts."""
        return self.parts > 1 and not self.cluster

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        """Those, and those that copy: a whole warpgroup where they give up registers."""
        return self.consumers + LANES * (WARPGROUP if self.takes else self.copiers)

    @property
    def registers_by_role(self) -> tuple[int, int]:
        """Of threads that multiply and that copy, where those take some of these."""
        return TAKEN[self.consumers // LANES] if self.takes else (0, 0)

    def strip(self, problem: ConvProblem) -> int:
        """Columns of dy."""
        raise NotImplementedError

    def columns(self, problem: ConvProblem) -> tuple[int, int]:
        """Of a row of x and of dy that come."""
        raise NotImplementedError

    def box_rows(self, problem: ConvProblem) -> tuple[int, int]:
        """Of a box of x and of dy."""
        raise NotImplementedError

    def pixel_bytes(self, problem: ConvProblem) -> int:
        """Of a block's channels of a pixel, as they come."""
        return self.channels * problem.itemsize

    def stage_bytes(self, problem: ConvProblem) -> int:
        raise NotImplementedError

    def terms(self, problem: ConvProblem) -> int:
        """Of a sum in a block."""
        raise NotImplementedError

    def term_pitch(self, sums: int) -> int:
        """Floats from one term of so many sums to the next."""
        return sums

    def registers(self, problem: ConvProblem) -> int:
        """Of a thread, about."""
        raise NotImplementedError


C = TypeVar("C", bound=StagesConfig)


def aligned(problem: ConvProblem) -> int:
    """Bytes that pixels begin at multiples of, up to 16."""
    return gcd(problem.c * problem.itemsize, 16)


def in_halves(problem: ConvProblem) -> bool:
    """Whether pixels are odd multiples of 8 bytes: every second one begins within a piece of TMA's."""
    return aligned(problem) == 8


def sums_of(problem: ConvProblem, config: StagesConfig) -> int:
    """That a block has."""
    return config.channels * problem.group_c * config.taps_h * problem.kernel[1]


def barriers_at(problem: ConvProblem, config: StagesConfig) -> int:
    """Bytes of stages, or of the sums that take their place at the end: terms of warps, and what a block of a cluster
    adds."""
    kept = sums_of(problem, config)
    received = config.parts * ceil_div(kept, config.parts) if config.cluster else 0
    sums = config.terms(problem) * config.term_pitch(kept) + received
    return round_up(max(config.stages * config.stage_bytes(problem), 4 * sums), 8)


def shared_bytes(problem: ConvProblem, config: StagesConfig) -> int:
    """Those, and barriers."""
    return barriers_at(problem, config) + 16 * config.stages + 8 * config.cluster


def min_blocks_per_sm(problem: ConvProblem, config: StagesConfig) -> int:
    """Blocks that find room on a multiprocessor."""
    return blocks_of(config.registers(problem) + SPARE, config.threads, shared_bytes(problem, config))


def deep(problem: ConvProblem, config: C, device: Device) -> Iterator[C]:
    """With as many stages as one block a multiprocessor, two and three have room for."""
    held = blocks_of(config.registers(problem) + SPARE, config.threads)
    for beside in (1, 2, 3):
        room = room_of(device, beside)
        one = config.changed(stages=min(MOST_STAGES, room // (config.stage_bytes(problem) + 16)))
        if one.stages > 1 and beside <= held and shared_bytes(problem, one) <= room:
            yield one


def strips_of(problem: ConvProblem, config: StagesConfig) -> int:
    return ceil_div(problem.output[1], config.strip(problem))


def all_rows(problem: ConvProblem, config: StagesConfig, more: int = 0) -> int:
    """Of dy, of all sets of images and strips; an image's with so many more."""
    return (problem.output[0] + more) * ceil_div(problem.n, config.images) * strips_of(problem, config)


def blocks_of_part(problem: ConvProblem, config: StagesConfig) -> tuple[int, int]:
    """Pieces of a filter, blocks of channels."""
    return ceil_div(problem.kernel[0], config.taps_h), ceil_div(problem.c, config.channels)


def splits(problem: ConvProblem, config: C, device: Device) -> Iterator[C]:
    """Parts that fill the device once, twice or half."""
    room = device.multiprocessors * min_blocks_per_sm(problem, config) / prod(blocks_of_part(problem, config))
    least = ceil_div(problem.n * prod(problem.output), MOST_PART_PIXELS * config.share)
    most = max(least, all_rows(problem, config) // LEAST_ROWS)
    for parts in dict.fromkeys(min(max(least, int(room * share)), most) for share in (1, 0.5, 2)):
        one = config.changed(parts=parts)
        if parts * wgrad_parts.part_pitch(problem) * 4 <= wgrad_parts.PARTS_BYTES:
            yield one
    for parts in CLUSTERS:
        one = config.changed(parts=parts, cluster=True)
        if least <= parts <= most and shared_bytes(problem, one) <= device.shared_bytes:
            yield one


@dataclass(frozen=True)
class Rows:
    """Of a block, in the mean: stages; rows of x that are multiplied; bytes that come, and pixels of their boxes."""

    stages: float
    multiplied: float
    bytes: float
    box_pixels: float

    @classmethod
    def of(cls, problem: ConvProblem, config: StagesConfig) -> Rows:
        stride_h, (p, q), (h, w), s = problem.stride[0], problem.output, problem.spatial, problem.kernel[1]
        rows = all_rows(problem, config) / config.parts
        # Runs of rows of an image: parts may begin and end within one.
        runs = max(1.0, rows / p) if rows % p == 0 or p % rows == 0 else (rows + p - 1) / p
        each, stage = rows / runs, config.rows * stride_h
        more = max(0, (config.taps_h - 1) * problem.dilation[0] + 1 - stride_h)
        real = min(h, each * stride_h + more)
        multiplied = runs * (round_up(h, stage) if each >= p else real + stage / 2)
        stages = runs * ((each * stride_h + more) / stage + 0.5)
        strips, strip, (columns_x, columns_dy) = (
            strips_of(problem, config), config.strip(problem), config.columns(problem)
        )  # fmt: skip
        across = min(w / strips + (s - 1 if strips > 1 else 0), columns_x)
        pixels = min(config.images, problem.n) * runs * (real * across + each * min(q / strips, strip))
        box_pixels = config.images * runs * (real * columns_x + each * columns_dy)
        there = problem.c / round_up(problem.c, config.channels) * config.channels
        return cls(stages, multiplied, pixels * there * problem.itemsize, box_pixels)
