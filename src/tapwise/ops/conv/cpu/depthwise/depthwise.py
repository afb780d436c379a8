"""cpu.depthwise: one input channel a group, filters of any size.

There is no sum over channels, so nothing is worth blocking but the picture: a tile of outputs stays in registers over
all taps and goes straight to y with bias, residual and activation. NCHW: lanes over the pixels of a row. Where masked
loads can do that, x is read where it lies (`in_place`; bfloat16 in `pairs` of taps); else planes are packed (`planes`,
`packed_tile`) into two buffers in turn, so that a plane has left the store buffer before it is read. NHWC: lanes over
channels, a tile is a run of pixels, and each tap one load a vector of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

import numpy as np

from tapwise import settings
from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cpu.common import lanes_of
from tapwise.cpu.cost import Breakdown
from tapwise.cpu.plan import KernelPlan
from tapwise.cpu.simd import target
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu import generated
from tapwise.ops.conv.cpu.depthwise import in_place, in_place_cost, pixels, small_planes, small_planes_cost
from tapwise.ops.conv.cpu.depthwise.in_place_cost import InPlaceConfig
from tapwise.ops.conv.cpu.depthwise.kernel import FIELDS, generate
from tapwise.ops.conv.cpu.depthwise.pixels import PixelsConfig
from tapwise.ops.conv.cpu.depthwise.planes import WEIGHTS, groups, tiles
from tapwise.ops.conv.cpu.depthwise.small_planes_cost import SmallPlanesConfig
from tapwise.ops.conv.cpu.packed_tile import PackedTile
from tapwise.ops.conv.problem import ConvProblem

SCRATCH_BYTES: Final = 4 << 20
# NHWC: (pixels, vectors of channels) by number of vector registers.
_RUNS: Final = {
    16: ((7, 1), (6, 1), (5, 2), (5, 1), (4, 2), (4, 1), (3, 4), (1, 8), (1, 1)),
    32: ((7, 3), (7, 2), (7, 1), (6, 4), (6, 2), (6, 1), (5, 2), (5, 1), (4, 4), (4, 1), (1, 8), (1, 1)),
}


@dataclass(frozen=True)
class Config(BaseConfig):
    """Of packed input. Register tile: `rows` x `vectors` (NCHW), or a run of `rows` pixels x `vectors` of channels
    (NHWC); a task is a block of `task_rows` output rows of `channels` channels."""

    rows: int
    vectors: int
    task_rows: int
    channels: int


AnyConfig: TypeAlias = Config | InPlaceConfig | PixelsConfig | SmallPlanesConfig


class Geometry(generated.Geometry):
    """Sizes and tables of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, config, device)
        lanes = self.lanes
        self.planar = problem.layout == "nchw"
        self.packed = PackedTile(problem, config.task_rows, problem.output[1], lanes)
        self.width = 1 if self.planar else config.vectors * lanes
        # One more vector than the tile: the last tile of a narrow row reads beyond its pitch.
        self.plane = self.packed.plane + config.vectors * lanes if self.planar else self.packed.plane
        self.buffer = ceil_div(self.packed.planes * self.plane * self.width + lanes, 32) * 32 + 16
        self.scratch_bytes = ceil_div(2 * self.buffer * problem.accumulator_bytes, 64) * 64

    @property
    def tasks(self) -> int:  # type: ignore[override]
        p, c = self.problem, self.config
        return ceil_div(p.output[0], c.task_rows) * ceil_div(p.c, c.channels) * p.n

    def fields(self) -> dict[str, int | np.ndarray]:
        p, c, s = self.problem, self.config, self.packed
        # Planes find the filter's rows themselves: a table of its columns is enough.
        shifts = s.tap_shifts[:1] if self.planar else s.tap_shifts
        index, rest = np.divmod(shifts, s.plane)
        offsets = (index * self.plane + rest) * self.width
        return s.fields() | {
            "tasks": self.tasks, "scratch_step": self.scratch_bytes,
            "images": p.n, "channels": p.c, "multiplier": p.group_k, "row_blocks": ceil_div(p.output[0], c.task_rows),
            "channel_block": c.channels, "channel_blocks": ceil_div(p.c, c.channels),
            "taps_h": p.kernel[0], "taps_w": p.kernel[1], "plane": self.plane, "buffer": self.buffer,
            "pad_h": p.padding[0][0], "dilation_h": p.dilation[0],
            "offsets": np.ascontiguousarray(offsets.reshape(-1).astype(np.int64)),
        }  # fmt: skip


def candidates(problem: ConvProblem, device: Device) -> Iterator[Config]:
    lanes = lanes_of(problem, device)
    p, q = problem.output
    planar = problem.layout == "nchw"
    registers = target(settings.cpu_target()).registers
    shape = problem.kernel[0], problem.stride[0], problem.dilation[0]
    for rows, vectors in tiles(registers, *shape) if planar else _RUNS[registers]:
        if planar and (rows > p or (vectors > 1 and vectors * lanes > q)):
            continue
        if not planar and (rows > q or (vectors > 1 and vectors * lanes > problem.c)):
            continue
        width = 1 if planar else vectors * lanes
        for task_rows in sorted({p, *(max(rows, ceil_div(p, count)) for count in (2, 4, 8, 16, 32))}):
            # Blocks of rows are as even as can be, and a tile must fit the smallest.
            if task_rows > p or (planar and p // ceil_div(p, task_rows) < rows):
                continue
            for count in (1, *(count * device.threads for count in (1, 2, 4, 8, 16))):
                channels = ceil_div(ceil_div(problem.c, count), width) * width
                config = Config(rows, vectors, task_rows, channels)
                if Geometry(problem, config, device).scratch_bytes <= SCRATCH_BYTES or task_rows == rows:
                    yield config


# What a task costs; measured, not derived.
# NCHW. Two products a cycle need SUMS sums in flight; half of the loads pass the end of a cache line.
PRODUCT: Final = 0.5
SUMS: Final = 8
LOAD: Final = 0.7
# A column of taps, an output vector's store, a tile; a row of outputs narrower than a tile.
COLUMN: Final = 3.0
STORE: Final = 1.8
TILE: Final = 5.0
NARROW_ROW: Final = 2.0
# Packing: a plane, a row, and the share of a vector's cycles (by column stride; others go element by element) that the
# tiles before it do not hide.
PACK_PLANE: Final = 50.0
PACK_ROW: Final = 1.0
PACK_EXPOSED: Final = 0.3
PACK_VECTOR: Final = {1: 2.0, 2: 2.5, 4: 4.0}
PACK_ELEMENT: Final = 1.5
# NHWC. A tap of a run of pixels: cycles an output vector, and besides; at least what a multiply-add takes to end.
RUN_PRODUCT: Final = 0.75
RUN_TAP: Final = 1.8
LATENCY: Final = 2.0
RUN_STORE: Final = 4.0
RUN: Final = 4.0
# Packing: a pixel, and a vector of its channels.
PACK_PIXEL: Final = 0.2
PACK_PIXEL_VECTOR: Final = 3.5
# Memory is read ahead: half of its time is hidden.
MEMORY_EXPOSED: Final = 0.4
# Channels last, a task with some of the channels reads a part of each pixel.
SPLIT_PIXELS: Final = 1.5
# Drawing a task and working out its place.
TASK: Final = 1000.0


class TaskCost(generated.TaskCost):
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar = Geometry

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, config, device)
        self.sums = config.rows * config.vectors
        self.taps = problem.kernel[0] * problem.kernel[1]
        self.packed_rows = self.geometry.packed.planes * (config.task_rows + self.geometry.packed.row_shift)

    def breakdown(self) -> Breakdown:
        """All parts of a task; a task goes through its channels, or runs of neighbouring channels, one by one."""
        p, g, c = self.problem, self.geometry, self.config
        planar = g.planar
        times = c.channels if planar else ceil_div(c.channels, g.width)
        cycles = {
            "products": times * (self.planes() if planar else self.runs()),
            "packing": times * (self.pack_planes() if planar else self.pack_pixels()),
            "memory": times * (MEMORY_EXPOSED * self.memory() * (1.0 if planar or c.channels >= p.c else SPLIT_PIXELS)),
            "zeros": 2 * g.buffer / self.costs.lanes,
            "start": TASK,
        }
        return Breakdown(self.costs, cycles, g.tasks)

    def planes(self) -> float:
        """NCHW: the tiles of one channel."""
        p, c, lanes = self.problem, self.config, self.costs.lanes
        loads = 0
        for _, column in groups(p.kernel[0], p.stride[0], p.dilation[0], WEIGHTS):
            reach = min(column[-1][1] - column[0][1] + c.rows, len(column) * c.rows)
            loads += len(column) + reach * c.vectors
        product = PRODUCT * self.device.vector_cycles
        tile = max(product * self.taps * max(self.sums, SUMS), LOAD * p.kernel[1] * loads)
        tile += COLUMN * p.kernel[1] + STORE * self.sums + TILE
        if p.output[1] < c.vectors * lanes:
            tile += NARROW_ROW * c.rows
        return ceil_div(c.task_rows, c.rows) * ceil_div(p.output[1], c.vectors * lanes) * p.group_k * tile

    def pack_planes(self) -> float:
        """NCHW: the input of one channel."""
        lanes = self.costs.lanes
        vector = PACK_VECTOR.get(self.problem.stride[1], PACK_ELEMENT * lanes)
        row = PACK_ROW + PACK_EXPOSED * vector * ceil_div(self.geometry.packed.pitch, lanes)
        return PACK_PLANE + self.packed_rows * row

    def runs(self) -> float:
        """NHWC: the runs of pixels of one run of channels."""
        p, c = self.problem, self.config
        # Rows of taps outside the image are left out; what is left of them, in the mean.
        tops = np.arange(p.output[0]) * p.stride[0] - p.padding[0][0]
        rows = np.add.outer(tops, np.arange(p.kernel[0]) * p.dilation[0])
        taps = self.taps * float(np.mean((rows >= 0) & (rows < p.spatial[0])))
        run = taps * max(RUN_PRODUCT * self.sums + RUN_TAP, LATENCY) + RUN_STORE * self.sums + RUN
        return c.task_rows * ceil_div(p.output[1], c.rows) * run

    def pack_pixels(self) -> float:
        """NHWC: the input of one run of channels."""
        return self.packed_rows * self.geometry.packed.pitch * (PACK_PIXEL + PACK_PIXEL_VECTOR * self.config.vectors)

    def memory(self) -> float:
        """x and y of one channel (or run of channels) in memory, and the two buffers in a cache."""
        p, g, costs = self.problem, self.geometry, self.costs
        outputs = p.k // p.c * p.output[0] * p.output[1]
        moved = (p.spatial[0] * p.spatial[1] + outputs) * p.itemsize
        buffers = 2 * g.buffer * costs.itemsize
        share = self.config.task_rows / p.output[0] * g.width
        return costs.stream(moved * share, p.bytes) + costs.stream(buffers, buffers)


def all_candidates(problem: ConvProblem, device: Device) -> Iterator[AnyConfig]:
    yield from candidates(problem, device)
    yield from in_place_cost.candidates(problem, device)
    yield from pixels.candidates(problem, device)
    yield from small_planes_cost.candidates(problem, device)


class Depthwise(generated.GeneratedAlgorithm[AnyConfig]):
    """Depthwise convolution, filters of any size and stride, any number of outputs a channel (NCHW).

    float32, float64, float16, bfloat16 (computed in float32; in place by products of pairs, where the processor has
    them); exact on integers that float32 holds.
    """

    id: ClassVar[str] = "cpu.depthwise"
    summary: ClassVar[str] = "one channel a group; register tiles of rows straight to y"
    candidates = staticmethod(all_candidates)

    def task(self, problem: ConvProblem, config: AnyConfig, device: Device) -> generated.TaskCost:
        if isinstance(config, InPlaceConfig):
            cost = in_place_cost.PairsCost if config.pairs else in_place_cost.TaskCost
            return cost(problem, config, device)
        if isinstance(config, PixelsConfig):
            return pixels.TaskCost(problem, config, device)
        if isinstance(config, SmallPlanesConfig):
            return small_planes_cost.TaskCost(problem, config, device)
        return TaskCost(problem, config, device)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise:
            return f"takes one input channel a group and several groups, not {problem.group_c} and {problem.groups}"
        if problem.layout == "nhwc" and problem.group_k != 1:
            return f"takes one output a channel in nhwc, not {problem.group_k}"
        return None

    def pack_us(self, problem: ConvProblem, config: AnyConfig, device: Device) -> float:
        return 5.0 + problem.k * problem.gemm_k * 1e-3

    def plan(self, problem: ConvProblem, config: AnyConfig, device: Device) -> Plan:
        if isinstance(config, InPlaceConfig):
            there = in_place_cost.Geometry(problem, config, device)
            library = self.load("depthwise_in_place", in_place.generate, problem, tile=there.tile)
            size = problem.k * there.weights
            return KernelPlan(problem, device, library, in_place.FIELDS, there.fields(), packed_size=size, pack_tasks=1)
        if isinstance(config, PixelsConfig):
            run = pixels.Geometry(problem, config, device)
            shape = {"pixels": config.pixels, "vectors": config.vectors}
            library = self.load("depthwise_pixels", pixels.generate, problem, **shape)
            size = ceil_div(problem.k, run.width) * run.width * problem.gemm_k
            return KernelPlan(problem, device, library, pixels.FIELDS, run.fields(), packed_size=size, pack_tasks=1)
        if isinstance(config, SmallPlanesConfig):
            of = small_planes_cost.Geometry(problem, config, device)
            library = self.load("depthwise_small", small_planes.generate, problem, plane=of.plane, columns=of.columns)
            size = problem.k * problem.gemm_k
            fields = small_planes.FIELDS, of.fields()
            return KernelPlan(problem, device, library, *fields, packed_size=size, pack_tasks=1)
        names = ("taps_h", "stride_h", "dilation_h")
        sizes = (problem.kernel[0], problem.stride[0], problem.dilation[0]) if problem.layout == "nchw" else (0, 0, 0)
        shape = dict(zip(names, sizes, strict=True))
        tile = {"rows": config.rows, "vectors": config.vectors}
        library = self.load("depthwise", generate, problem, layout=problem.layout, **tile, **shape)
        g = Geometry(problem, config, device)
        size = ceil_div(problem.k, g.width) * g.width * problem.gemm_k
        return KernelPlan(problem, device, library, FIELDS, g.fields(), packed_size=size, pack_tasks=1)
