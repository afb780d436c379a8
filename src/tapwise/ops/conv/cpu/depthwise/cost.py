"""What a task of cpu.depthwise costs, part by part. The constants are measured, not derived."""

from __future__ import annotations

from typing import ClassVar, Final

from tapwise.algorithm import Device
from tapwise.cpu.cost import Breakdown
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.depthwise.blocking import Config, Geometry
from tapwise.ops.conv.cpu.depthwise.planes import WEIGHTS, groups
from tapwise.ops.conv.cpu.generated import TaskCost as BaseTaskCost
from tapwise.ops.conv.problem import ConvProblem

# NCHW. Two products a cycle need SUMS sums in flight; half of the loads pass the end of a cache line.
PRODUCT: Final = 0.55
SUMS: Final = 8
LOAD: Final = 0.7
# A column of taps, an output vector's store, a tile; a row of outputs narrower than a tile.
COLUMN: Final = 4.0
STORE: Final = 2.0
TILE: Final = 12.0
NARROW_ROW: Final = 2.0
# Packing: a plane, a row, and the share of a vector's cycles (by column stride; others go element by element) that the
# tiles before it do not hide.
PACK_PLANE: Final = 30.0
PACK_ROW: Final = 2.0
PACK_EXPOSED: Final = 0.7
PACK_VECTOR: Final = {1: 2.0, 2: 2.5, 4: 4.0}
PACK_ELEMENT: Final = 1.5
# NHWC. A tap of a run of pixels: cycles an output vector, and besides; at least what a multiply-add takes to end.
RUN_PRODUCT: Final = 0.7
RUN_TAP: Final = 0.8
LATENCY: Final = 4.0
RUN_STORE: Final = 3.0
RUN: Final = 22.0
# Packing: a pixel, and a vector of its channels.
PACK_PIXEL: Final = 4.0
PACK_PIXEL_VECTOR: Final = 2.0
# Memory is read ahead: half of its time is hidden.
MEMORY_EXPOSED: Final = 0.5
# Drawing a task and working out its place.
TASK: Final = 80.0


class TaskCost(BaseTaskCost):
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar = Geometry

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, config, device)
        self.sums = config.rows * config.vectors
        self.taps = problem.kernel[0] * problem.kernel[1]
        self.packed_rows = self.geometry.packed.planes * (config.task_rows + self.geometry.packed.row_shift)

    def breakdown(self) -> Breakdown:
        """All parts of a task; a task goes through its channels, or runs of neighbouring channels, one by one."""
        g, c = self.geometry, self.config
        planar = g.planar
        times = c.channels if planar else ceil_div(c.channels, g.width)
        cycles = {
            "products": times * (self.planes() if planar else self.runs()),
            "packing": times * (self.pack_planes() if planar else self.pack_pixels()),
            "memory": times * (MEMORY_EXPOSED * self.memory()),
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
        tile = max(PRODUCT * self.taps * max(self.sums, SUMS), LOAD * p.kernel[1] * loads)
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
        c = self.config
        run = self.taps * max(RUN_PRODUCT * self.sums + RUN_TAP, LATENCY) + RUN_STORE * self.sums + RUN
        return c.task_rows * ceil_div(self.problem.output[1], c.rows) * run

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
