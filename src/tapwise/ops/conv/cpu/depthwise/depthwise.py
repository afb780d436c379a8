"""cpu.depthwise: one input channel a group, filters of any size.

There is no sum over channels, so nothing is worth blocking but the picture: a tile of outputs stays in registers over
all taps and goes straight to y with bias, residual and activation. NCHW (`planes`): lanes over the pixels of a row;
planes are packed (`strips`) into two buffers in turn, so that a plane has left the store buffer before it is read.
NHWC: lanes over channels, a tile is a run of pixels, and each tap one load a vector of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit
from tapwise.cpu.common import arithmetic, lanes_of, sum_bytes
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import KernelPlan
from tapwise.cpu.simd import target
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.depthwise.kernel import FIELDS, generate
from tapwise.ops.conv.cpu.depthwise.planes import WEIGHTS, groups, tiles
from tapwise.ops.conv.cpu.packed_tile import Strip
from tapwise.ops.conv.problem import ConvProblem

# NHWC: (pixels, vectors of channels) by number of vector registers.
_RUNS: Final = {
    16: ((7, 1), (6, 1), (5, 2), (5, 1), (4, 2), (4, 1), (3, 4), (1, 8), (1, 1)),
    32: ((7, 3), (7, 2), (7, 1), (6, 4), (6, 2), (6, 1), (5, 2), (5, 1), (4, 4), (4, 1), (1, 8), (1, 1)),
}


@dataclass(frozen=True)
class Config(BaseConfig):
    """Register tile: `rows` x `vectors` (NCHW), or a run of `rows` pixels x `vectors` of channels (NHWC); a task is a
    strip of `strip` output rows of `channels` channels."""

    rows: int
    vectors: int
    strip: int
    channels: int


class Geometry:
    """Sizes and tables of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, lanes: int) -> None:
        self.problem, self.config, self.lanes = problem, config, lanes
        self.planar = problem.layout == "nchw"
        self.strip = Strip(problem, config.strip, problem.output[1], lanes)
        self.width = 1 if self.planar else config.vectors * lanes
        # One more vector than the strip: the last tile of a narrow row reads beyond its pitch.
        self.plane = self.strip.plane + config.vectors * lanes if self.planar else self.strip.plane
        self.buffer = ceil_div(self.strip.planes * self.plane * self.width + lanes, 32) * 32 + 16
        self.scratch_bytes = ceil_div(2 * self.buffer * sum_bytes(problem), 64) * 64

    def tasks(self) -> int:
        p, c = self.problem, self.config
        return ceil_div(p.output[0], c.strip) * ceil_div(p.c, c.channels) * p.n

    def fields(self) -> dict[str, int | np.ndarray]:
        p, c, s = self.problem, self.config, self.strip
        # Planes find the filter's rows themselves: a table of its columns is enough.
        shifts = s.tap_shifts[:1] if self.planar else s.tap_shifts
        index, rest = np.divmod(shifts, s.plane)
        offsets = (index * self.plane + rest) * self.width
        return {
            "tasks": self.tasks(), "scratch_step": self.scratch_bytes,
            "images": p.n, "channels": p.c, "multiplier": p.group_k, "h": p.spatial[0], "w_in": p.spatial[1],
            "p": p.output[0], "q": p.output[1], "stride_h": p.stride[0], "stride_w": p.stride[1],
            "row_phases": len(s.row_phases), "col_phases": len(s.col_phases),
            "row_strips": ceil_div(p.output[0], c.strip),
            "channel_block": c.channels, "channel_blocks": ceil_div(p.c, c.channels),
            "taps": p.kernel[0] * p.kernel[1], "taps_h": p.kernel[0], "taps_w": p.kernel[1],
            "pitch": s.pitch, "plane": self.plane, "row_shift": s.row_shift,
            "buffer": self.buffer,
            "offsets": np.ascontiguousarray(offsets.reshape(-1).astype(np.int64)),
            "columns": np.array(s.col_data, np.int64),
            "row_starts": np.array([phase - p.padding[0][0] for phase in s.row_phases], np.int64),
        }  # fmt: skip


class Depthwise(Algorithm[Config]):
    """Depthwise convolution, filters of any size and stride, any number of outputs a channel (NCHW).

    float32, float64, float16 (computed in float32); exact on integers that float32 holds.
    """

    id: ClassVar[str] = "cpu.depthwise"
    summary: ClassVar[str] = "one channel a group; register tiles of rows straight to y"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise:
            return f"takes one input channel a group and several groups, not {problem.group_c} and {problem.groups}"
        if problem.layout == "nhwc" and problem.group_k != 1:
            return f"takes one output a channel in nhwc, not {problem.group_k}"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        return list(dict.fromkeys(self._candidates(problem, device)))

    def _candidates(self, problem: ConvProblem, device: Device) -> Iterator[Config]:
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
            for strip in sorted({p, *(max(rows, ceil_div(p, count)) for count in (2, 4, 8, 16, 32))}):
                # Strips are as even as can be, and a tile must fit the smallest.
                if strip > p or (planar and p // ceil_div(p, strip) < rows):
                    continue
                for count in (1, *(count * device.threads for count in (1, 2, 4, 8, 16))):
                    channels = ceil_div(ceil_div(problem.c, count), width) * width
                    config = Config(rows, vectors, strip, channels)
                    if Geometry(problem, config, lanes).scratch_bytes <= 4 << 20 or strip == rows:
                        yield config

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Cycles of one task: for each channel (or run of channels) its packing, and for each tile its products, loads
        and stores (`cost`); times the tasks that one worker draws."""
        itemsize = sum_bytes(problem)
        costs = Costs(device, itemsize)
        g = Geometry(problem, config, costs.lanes)
        taps = problem.kernel[0] * problem.kernel[1]
        q = problem.output[1]
        size = config.rows * config.vectors
        packed_rows = g.strip.planes * (config.strip + g.strip.row_shift)
        if g.planar:
            loads = 0
            for _, column in groups(problem.kernel[0], problem.stride[0], problem.dilation[0], WEIGHTS):
                reach = min(column[-1][1] - column[0][1] + config.rows, len(column) * config.rows)
                loads += len(column) + reach * config.vectors
            # Two products a cycle need eight sums in flight; half of the loads pass the end of a cache line.
            cycles = max(0.55 * taps * max(size, 8), 0.7 * problem.kernel[1] * loads)
            tile = cycles + 4 * problem.kernel[1] + 2.0 * size + 12
            across = ceil_div(q, config.vectors * costs.lanes)
            count = ceil_div(config.strip, config.rows) * across * problem.group_k
            if q < config.vectors * costs.lanes:
                tile += 2.0 * config.rows
            per_vector = {1: 2.0, 2: 2.5, 4: 4.0}.get(problem.stride[1], 1.5 * costs.lanes)
            pack = 30 + packed_rows * (2.0 + 0.7 * per_vector * ceil_div(g.strip.pitch, costs.lanes))
            runs = config.channels
        else:
            tile = taps * max(0.7 * size + 0.8, 4.0) + 3.0 * size + 22
            count = config.strip * ceil_div(q, config.rows)
            pack = packed_rows * g.strip.pitch * (4.0 + 2.0 * config.vectors)
            runs = ceil_div(config.channels, g.width)
        moved = (
            problem.spatial[0] * problem.spatial[1] + problem.k // problem.c * problem.output[0] * q
        ) * problem.itemsize
        share = config.strip / problem.output[0] * g.width
        memory = costs.stream(moved * share, problem.bytes)
        buffers = 2 * g.buffer * itemsize
        memory += costs.stream(buffers, buffers)
        zeros = 2 * g.buffer / costs.lanes
        task = runs * (pack + count * tile + 0.5 * memory) + zeros + 80
        return costs.wall_us(task, g.tasks(), device.threads)

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        return 5.0 + problem.k * problem.gemm_k * 1e-3

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        g = Geometry(problem, config, lanes_of(problem, device))
        return g.scratch_bytes * max(1, min(device.threads, g.tasks()))

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        vector = target(settings.cpu_target())
        dtype = arithmetic(problem)
        names = ("taps_h", "stride_h", "dilation_h")
        sizes = (problem.kernel[0], problem.stride[0], problem.dilation[0]) if problem.layout == "nchw" else (0, 0, 0)
        shape = dict(zip(names, sizes, strict=True))
        library = jit.load(
            "depthwise", generate, vector, dtype=dtype, storage=problem.dtype, layout=problem.layout,
            rows=config.rows, vectors=config.vectors, **shape, bias=problem.bias, residual=problem.residual,
            activation=problem.activation,
        )  # fmt: skip
        g = Geometry(problem, config, vector.lanes(dtype))
        size = ceil_div(problem.k, g.width) * g.width * problem.gemm_k
        return KernelPlan(problem, device, library, FIELDS, g.fields(), packed_size=size, pack_tasks=1)
