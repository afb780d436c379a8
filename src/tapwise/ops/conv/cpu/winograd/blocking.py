"""How cpu.winograd cuts a problem into tasks: axes, tilings, configs, and the sizes that follow from one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cpu import tile
from tapwise.cpu.common import splits
from tapwise.cpu.simd import target
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.generated import Geometry as BaseGeometry
from tapwise.ops.conv.cpu.winograd.transforms import Transform, transform
from tapwise.ops.conv.problem import ConvProblem

BLOCK_CHANNELS: Final = 384
# Products of the largest F on an axis when both axes have one, and when one has: their errors multiply.
MOST_PRODUCTS: Final = {2: 6, 1: 8}
# Tiles of a vector of lanes are taken apart by shuffles for these; more rows of products take too long to compile.
STEPS: Final = (1, 2, 4, 8)
MOST_ROWS: Final = 9


@dataclass(frozen=True)
class Config(BaseConfig):
    """Output tile tile_h x tile_w; register tile m x n; `rows` rows of tiles and `filters` output channels a task."""

    tile_h: int
    tile_w: int
    m: int
    n: int
    rows: int
    filters: int


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a problem. A common factor of stride and dilation only thins the input out; what is left of
    the dilation makes `phases` interleaved convolutions, output `phases * i + a` being number a's. Input u of tile t is

        (t * step + u) * dilation + a * (the problem's stride) - padding
    """

    taps: int
    stride: int
    dilation: int
    phases: int

    @staticmethod
    def of(problem: ConvProblem, axis: int) -> Axis:
        taps, stride, dilation = problem.kernel[axis], problem.stride[axis], problem.dilation[axis]
        if taps == 1:
            return Axis(1, stride, 1, 1)
        common = gcd(stride, dilation)
        return Axis(taps, stride // common, dilation, dilation // common)

    def transform(self, outputs: int) -> Transform:
        return transform(outputs, self.taps, self.stride)


def tilings(problem: ConvProblem) -> list[tuple[int, int]]:
    """(tile_h, tile_w) that save products and keep the error small; none where no tile does."""
    axes = [Axis.of(problem, axis) for axis in range(2)]
    long = sum(axis.taps > axis.stride for axis in axes)
    result = []
    for size in (4, 2):
        sizes = [size if axis.taps > axis.stride else 1 for axis in axes]
        parts = [axis.transform(outputs) for axis, outputs in zip(axes, sizes, strict=True)] if long else []
        if not parts or any(part.step not in STEPS or part.products > MOST_ROWS for part in parts):
            continue
        largest = max(outputs + ceil_div(axis.taps, axis.stride) - 1 for axis, outputs in zip(axes, sizes, strict=True))
        products = parts[0].products * parts[1].products
        if largest <= MOST_PRODUCTS[long] and products < sizes[0] * sizes[1] * axes[0].taps * axes[1].taps:
            result.append((sizes[0], sizes[1]))
    return result


class Geometry(BaseGeometry):
    """Sizes of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, config, device)
        lanes = self.lanes
        self.axes = high, wide = Axis.of(problem, 0), Axis.of(problem, 1)
        self.high, self.wide = high.transform(config.tile_h), wide.transform(config.tile_w)
        self.products = self.high.products * self.wide.products
        self.tile_rows = ceil_div(problem.output[0], config.tile_h * high.phases)
        self.tile_cols = ceil_div(problem.output[1], config.tile_w * wide.phases)
        # Rows of tiles of all phases, and tiles in one of them.
        self.phase_rows, self.row_tiles = self.tile_rows * high.phases, self.tile_cols * wide.phases
        self.tiles = ceil_div(config.rows * self.row_tiles, lanes) * lanes
        inputs = (self.tile_cols - 1) * self.wide.step + self.wide.span
        reach = (inputs - 1) * wide.dilation + (wide.phases - 1) * problem.stride[1] + 1
        outputs = self.row_tiles * config.tile_w
        row = max(problem.padding[1][0] + problem.spatial[1], reach, outputs)
        # Rounded up, and what the widest vectors read and write beyond.
        self.row_size = ceil_div(row + 2 * self.wide.step * lanes, 16) * 16
        self.channels = ceil_div(problem.group_c, ceil_div(problem.group_c, BLOCK_CHANNELS))
        self.input_at = 2 * self.row_size
        self.product_at = self.input_at + self.wide.products * problem.group_c * self.tiles
        self.sums_at = self.product_at + self.wide.products * config.filters * self.tiles
        self.output_at = self.sums_at + config.tile_h * config.tile_w * config.filters * self.tiles
        total = self.output_at + 3 * self.row_size
        self.scratch_bytes = ceil_div(total * problem.accumulator_bytes, 64) * 64

    @property
    def tasks(self) -> int:  # type: ignore[override]
        p, c = self.problem, self.config
        return ceil_div(self.phase_rows, c.rows) * ceil_div(p.group_k, c.filters) * p.groups * p.n

    def fields(self) -> dict[str, int | np.ndarray]:
        p, c = self.problem, self.config
        a_t = np.array(self.high.a_t, f"f{p.accumulator_bytes}")
        return {
            "tasks": self.tasks, "scratch_step": self.scratch_bytes,
            "groups": p.groups, "group_c": p.group_c, "group_k": p.group_k,
            "h": p.spatial[0], "w_in": p.spatial[1], "p": p.output[0], "q": p.output[1],
            "pad_top": p.padding[0][0], "pad_left": p.padding[1][0], "stride_h": p.stride[0], "stride_w": p.stride[1],
            "dilation_h": self.axes[0].dilation, "dilation_w": self.axes[1].dilation,
            "row_phases": self.axes[0].phases, "col_phases": self.axes[1].phases,
            "tile_rows": self.tile_rows, "tile_cols": self.tile_cols, "block_rows": c.rows,
            "row_blocks": ceil_div(self.phase_rows, c.rows),
            "filter_block": c.filters, "filter_blocks": ceil_div(p.group_k, c.filters), "channel_block": self.channels,
            "tiles": self.tiles, "row_size": self.row_size, "input_at": self.input_at,
            "product_at": self.product_at, "sums_at": self.sums_at, "output_at": self.output_at,
            "offsets": np.arange(self.channels, dtype=np.int64) * self.tiles,
            "zeros": np.zeros(p.spatial[1] + 16, np.float64),
            "factors": np.ascontiguousarray(a_t.T), "adds": np.ascontiguousarray((a_t.T != 0).astype(np.int64)),
        }  # fmt: skip


def candidates(problem: ConvProblem, device: Device) -> Iterator[Config]:
    limit = 2 * problem.n * problem.c * problem.spatial[0] * problem.spatial[1] * max(4, problem.itemsize)
    smallest: Config | None = None
    smallest_size = 0
    found = False
    for tile_h, tile_w in tilings(problem):
        phases = Axis.of(problem, 0).phases
        tile_rows = ceil_div(problem.output[0], tile_h * phases) * phases
        rows_choices = sorted({ceil_div(tile_rows, count) for count in (1, 2, 4, 6, 8, 14, 16, tile_rows)})
        for m, n in tile.shapes(target(settings.cpu_target())):
            if m < 3 or m >= 2 * problem.group_k:
                continue
            for rows in rows_choices:
                for filters in splits(problem.group_k, m, device.threads):
                    config = Config(tile_h, tile_w, m, n, rows, filters)
                    needed = Geometry(problem, config, device).workspace_bytes(device.threads)
                    if needed <= limit:
                        found = True
                        yield config
                    elif smallest is None or needed < smallest_size:
                        smallest, smallest_size = config, needed
    if not found and smallest is not None:
        yield smallest
