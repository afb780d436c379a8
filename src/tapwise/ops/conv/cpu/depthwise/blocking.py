"""How cpu.depthwise cuts a problem into tasks: its configs, and the sizes and tables that follow from one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cpu.common import lanes_of
from tapwise.cpu.simd import target
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.depthwise.planes import tiles
from tapwise.ops.conv.cpu.generated import Geometry as BaseGeometry
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
    """Register tile: `rows` x `vectors` (NCHW), or a run of `rows` pixels x `vectors` of channels (NHWC); a task is a
    block of `task_rows` output rows of `channels` channels."""

    rows: int
    vectors: int
    task_rows: int
    channels: int


class Geometry(BaseGeometry):
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
        if not planar and (rows > q or (vectors > 1 and (vectors - 1) * lanes >= problem.c)):
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
