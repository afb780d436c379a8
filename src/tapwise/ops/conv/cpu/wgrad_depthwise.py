"""cpu.depthwise of wgrad: one input channel a group.

Lanes are channels. For a row of taps the sums stay in registers over a band of rows, and each loaded vector of x serves
all taps that it meets. Channels last are read where they lie; in NCHW a vector of channels of a band is transposed
first, into a buffer that stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final

import numpy as np

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu.common import lanes_of, load
from tapwise.cpu.cost import Breakdown, Costs
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cpu.wgrad_depthwise_kernel import FIELDS, generate
from tapwise.ops.conv.cpu.wgrad_direct import PartsPlan, tap_range
from tapwise.ops.conv.problem import ConvProblem

# Sums of a row of taps stay in registers.
WIDEST: Final = 11


@dataclass(frozen=True)
class Config(BaseConfig):
    """A task is `block` vectors of channels in one of `parts` parts of the pixels, `rows` rows of dy at a time."""

    block: int
    rows: int
    parts: int
    pack: bool


class Geometry:
    """Sizes of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        p, c = problem, config
        self.problem, self.config = problem, config
        self.lanes = vector_of(p, device)
        self.vectors = ceil_div(p.c, self.lanes)
        self.blocks = ceil_div(self.vectors, c.block)
        self.row_blocks = ceil_div(p.output[0], c.rows)
        self.bands = self.row_blocks * p.n
        self.part_bands = ceil_div(self.bands, c.parts)
        self.parts = ceil_div(self.bands, self.part_bands)
        self.tasks = self.blocks * self.parts
        self.taps = prod(p.kernel)
        reach = (p.kernel[0] - 1) * p.dilation[0] + 1
        self.x_rows = min(p.spatial[0], (c.rows - 1) * p.stride[0] + reach)
        self.dy_at = round_up(self.x_rows * p.spatial[1] * self.lanes, 32) if c.pack else 0
        self.sums_at = self.dy_at + (round_up(c.rows * p.output[1] * self.lanes, 32) if c.pack else 0)
        size = p.group_k * self.taps * self.lanes
        self.line_at = self.sums_at + (round_up(c.block * size, 32) if self.parts == 1 else 0)
        line = (self.taps + 1) * self.lanes
        self.scratch_bytes = round_up((self.line_at + line) * p.accumulator_bytes, 64)
        self.part_step = self.vectors * size
        self.workers = max(1, min(device.threads, self.tasks))

    @property
    def workspace_bytes(self) -> int:
        """Scratch of all workers, and the parts."""
        parts = self.parts * self.part_step if self.parts > 1 else 0
        return self.scratch_bytes * self.workers + parts * self.problem.accumulator_bytes

    def fields(self) -> dict[str, int | np.ndarray]:
        p, c = self.problem, self.config
        rows = np.array([tap_range(p, 0, r) for r in range(p.kernel[0])], np.int64)
        cols = np.array([tap_range(p, 1, s) for s in range(p.kernel[1])], np.int64)
        inner_first = int(cols[:, 0].max())
        return {
            "tasks": self.tasks, "scratch_step": self.scratch_bytes, "rows_at": rows, "cols_at": cols,
            "inner_first": inner_first, "inner_end": max(inner_first, int(cols[:, 1].min())),
            "images": p.n, "c": p.c, "multiplier": p.group_k, "h": p.spatial[0], "w_in": p.spatial[1],
            "p": p.output[0], "q": p.output[1], "stride_h": p.stride[0], "pad_h": p.padding[0][0],
            "reach_h": (p.kernel[0] - 1) * p.dilation[0] + 1, "kernel_h": p.kernel[0],
            "vectors": self.vectors, "block": c.block, "blocks": self.blocks, "band_rows": c.rows,
            "row_blocks": self.row_blocks, "bands": self.bands, "part_bands": self.part_bands, "parts": self.parts,
            "parts_at": self.scratch_bytes * self.workers, "part_step": self.part_step, "dy_at": self.dy_at,
            "sums_at": self.sums_at, "line_at": self.line_at, "taps": self.taps,
        }  # fmt: skip


def vector_of(problem: ConvProblem, device: Device) -> int:
    """Channels of a vector: a whole one, or a power of two about as wide as few channels are."""
    lanes = lanes_of(problem, device)
    bits = problem.c.bit_length()
    return min(lanes, 1 << (bits - 1) if problem.layout == "nhwc" else 1 << (problem.c - 1).bit_length())


def candidates(problem: ConvProblem, device: Device) -> Iterator[Config]:
    p, height = problem, problem.output[0]
    vectors = ceil_div(p.c, vector_of(p, device))
    heights = sorted({ceil_div(height, ceil_div(height, rows)) for rows in (2, 4, 8, 16, 32, height)}, reverse=True)
    for parts in (1, device.threads, 4 * device.threads):
        for blocks in (1, device.threads, 4 * device.threads):
            for rows in heights:
                if parts == 1 or p.n * ceil_div(height, rows) >= parts:
                    for pack in (True, False)[: 1 if p.layout == "nchw" else 2]:
                        yield Config(ceil_div(vectors, blocks), rows, parts, pack)


# What a task costs, in cycles; measured.
# A multiply-add of vectors; a row of dy for a row of taps; a call for a band of rows, and one to bring an operand in.
PRODUCT: Final = 0.6
LINE: Final = 16.0
CALL: Final = 60.0
PACK_CALL: Final = 80.0
# An element brought in; one of dw summed and written.
PACK: Final = 0.2
FINISH: Final = 2.0
# Of the time that operands take from their caches, and from memory, what arithmetic does not hide.
CACHES_EXPOSED: Final = 0.2
MEMORY_EXPOSED: Final = 0.4
LINE_BYTES: Final = 64
# Pages that the first level of a TLB holds, and what the second level takes.
PAGE: Final = 4096
PAGES: Final = 64
PAGE_MISS: Final = 8.0
# Lines a multiple of that apart share few sets of the first cache: most of them come from the next.
SETS_APART: Final = 1024
SET_MISS: Final = 1.5
START: Final = 200.0


class TaskCost:
    """Cycles of one task of a config, on one device."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        self.problem, self.config, self.device = problem, config, device
        self.geometry, self.costs = Geometry(problem, config, device), Costs(device, problem.accumulator_bytes)

    def breakdown(self) -> Breakdown:
        """All parts of a task."""
        p, c, g = self.problem, self.config, self.geometry
        cols = sum(q1 - q0 for q0, q1, _ in (tap_range(p, 1, s) for s in range(p.kernel[1])))
        rows = sum(p1 - p0 for p0, p1, _ in (tap_range(p, 0, r) for r in range(p.kernel[0])))
        vectors, bands = c.block * p.group_k, g.part_bands
        lines = p.n * rows / g.parts
        x_pixels, dy_pixels = g.x_rows * p.spatial[1], c.rows * p.output[1]
        elements = bands * g.lanes * (x_pixels * c.block + dy_pixels * vectors)
        # Each row of taps reads the band's pixels again, a line of the cache for each.
        seen = p.kernel[0] * (1 + p.stride[1]) * dy_pixels * vectors * bands
        held = x_pixels + dy_pixels
        distance = (g.lanes if c.pack else p.c) * p.itemsize
        missed = PAGE_MISS * min(1.0, distance / PAGE) if held * distance > PAGES * PAGE else 0.0
        missed += SET_MISS if distance % SETS_APART == 0 else 0.0
        cycles = {
            "products": vectors * lines * cols * PRODUCT,
            "lines": vectors * (lines * LINE + bands * p.kernel[0] * CALL),
            "caches": CACHES_EXPOSED * self.costs.stream(LINE_BYTES * seen, LINE_BYTES * held),
            "distance": 0.0 if c.pack else seen * missed,
            "packing": elements * PACK + 2 * vectors * bands * PACK_CALL if c.pack else 0.0,
            "finishing": vectors * g.taps * g.lanes * FINISH * g.parts,
            "memory": MEMORY_EXPOSED * self.costs.stream(elements * p.itemsize, p.bytes),
            "start": START + (self.device.start_us * self.costs.cycles_per_us if g.parts > 1 else 0.0),
        }
        return Breakdown(self.costs, cycles, g.tasks)


class DepthwiseWgrad(Algorithm[Config]):
    """Depthwise weight gradient; any stride and dilation, filters up to 11 columns, in NCHW any number of outputs a
    channel.

    float32, float64, float16, bfloat16 (computed in float32). Exact on integers that float32 holds.
    """

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cpu.depthwise"
    summary: ClassVar[str] = "one channel a group; lanes over channels, sums of a row of taps in registers"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise:
            return f"takes one input channel a group and several groups, not {problem.group_c} and {problem.groups}"
        if problem.layout == "nhwc" and problem.group_k != 1:
            return f"takes one output a channel in nhwc, not {problem.group_k}"
        if problem.kernel[1] > WIDEST:
            return f"takes filters of up to {WIDEST} columns, not {problem.kernel[1]}"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """Every sensible blocking."""
        return list(dict.fromkeys(candidates(problem, device)))

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Cycles of one task, times the tasks that one worker draws."""
        return TaskCost(problem, config, device).breakdown().us

    def explain(self, problem: ConvProblem, config: Config, device: Device) -> str:
        """What a task is made of."""
        return str(TaskCost(problem, config, device).breakdown())

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return Geometry(problem, config, device).workspace_bytes

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        g = Geometry(problem, config, device)
        library = load(
            "wgrad_depthwise", generate, problem, layout=problem.layout, pack=config.pack, lanes=g.lanes,
            kernel_w=problem.kernel[1], stride_w=problem.stride[1], dilation_w=problem.dilation[1], parts=g.parts > 1,
        )  # fmt: skip
        return PartsPlan(problem, device, library, FIELDS, g.fields(), g.workspace_bytes, g.parts > 1)
