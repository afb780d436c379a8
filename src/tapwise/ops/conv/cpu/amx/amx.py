"""cpu.amx: bfloat16 convolution on Intel's tile registers (AMX), a matrix product whose matrix is never built.

A task packs what its outputs read, pixel by pixel with the channels side by side, so that 16 pixels of a row and 16
pairs of one tap's channels, or of a row of taps, are a tile as it lies. Two tiles of pixels meet two of 16 filters.
Sums of all terms stay in the tile registers; behind the products they are finished like those of cpu.direct.

Source: Georganas et al., "High-Performance Deep Learning via a Single Building Block", 2020 (batch-reduce GEMM).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cpu.amx import PAIRS, ROWS, configs
from tapwise.cpu.common import splits
from tapwise.cpu.cost import Breakdown
from tapwise.cpu.plan import ALONE_BYTES, KernelPlan
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cpu import generated
from tapwise.ops.conv.cpu.amx.kernel import FIELDS, PANEL, generate, narrow_pairs
from tapwise.ops.conv.cpu.pointwise import flatten
from tapwise.ops.conv.problem import ConvProblem

SCRATCH_BYTES: Final = 4 << 20
# Fitted to 430 times of 50 layers on Emerald Rapids: predictions err by a fifth, the choice takes 1.11 of the best.
# Cycles of a product of 16 rows, and of a row of a tile to load: a step takes 150, of which products are 64.
PRODUCT: Final = 38.0
LOADED_ROW: Final = 2.4
# Of operands that stream from a cache; of two tiles of pixels beside their steps.
WAITING: Final = 0.9
PAIR_OF_TILES: Final = 136.0
# Packing: cycles of 16 pairs of a pixel from planes and from pixels, and of a row.
FROM_PLANES: Final = 4.5
FROM_PIXELS: Final = 3.0
PACK_ROW: Final = 20.0
# Of the time that x and y take from and to their caches or memory.
READ: Final = 4.0
WRITE: Final = 0.17
# Finishing: cycles of 16 pixels of 16 planes; of a run of pixels of these, whose lines lie far apart.
BLOCK_TO_PLANES: Final = 66.0
RUN_TO_PLANES: Final = 1570.0
FINISH_VECTOR: Final = 1.5
# Drawing a task and working out its place.
TASK: Final = 440.0
# Of a task, what one worker waits for another.
UNEVEN: Final = 0.24
# Packing an element of the filters, which is loaded alone.
PACK_FILTER_NS: Final = 1.0


@dataclass(frozen=True)
class Config(BaseConfig):
    """A task: rows x cols outputs of one image, `filters` of one group."""

    rows: int
    cols: int
    filters: int


class Geometry(generated.Geometry):
    """Sizes and tables of one problem and config. Lengths are in pairs of channels unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, config, device)
        p, c = problem, config
        self.pixel, self.step_pairs = pixel_of(p)
        # Of filters with one row only the rows that are read are packed.
        one_row = p.kernel[0] == 1
        self.row_step, self.down = (p.stride[0], 1) if one_row else (1, p.stride[0])
        self.reach = tuple((size - 1) * dilation + 1 for size, dilation in zip(p.kernel, p.dilation, strict=True))
        self.width = (c.cols - 1) * p.stride[1] + self.reach[1]
        self.high = (c.rows - 1) * self.down + self.reach[0]
        self.packed = self.high * self.width * self.pixel
        self.sums_at = round_up(self.packed, 16)
        self.scratch_bytes = round_up(4 * (self.sums_at + c.rows * c.cols * PANEL) + 64, 64)
        self.blocks = (
            ceil_div(p.output[0], c.rows), ceil_div(p.output[1], c.cols), ceil_div(p.group_k, c.filters),
        )  # fmt: skip
        self.tasks = prod(self.blocks) * p.n * p.groups
        self.steps = prod(p.kernel) * self.pixel // self.step_pairs

    def offsets(self) -> np.ndarray:
        """(steps,) int64: where each step's pairs begin, from a tile's first pixel."""
        p = self.problem
        r, s, pair = np.ogrid[: p.kernel[0], : p.kernel[1], : self.pixel]
        terms = (r * p.dilation[0] * self.width + s * p.dilation[1]) * self.pixel + pair
        return terms.reshape(-1)[:: self.step_pairs].astype(np.int64)

    def fields(self) -> dict[str, Any]:
        p, c = self.problem, self.config
        row_blocks, col_blocks, filter_blocks = self.blocks
        return {
            "tasks": self.tasks, "scratch_step": self.scratch_bytes, "h": p.spatial[0], "w_in": p.spatial[1],
            "p": p.output[0], "q": p.output[1], "pad_h": p.padding[0][0], "pad_w": p.padding[1][0],
            "row_take": p.stride[0], "row_step": self.row_step, "col_take": p.stride[1], "images": p.n,
            "groups": p.groups, "group_c": p.group_c, "group_k": p.group_k, "rows": c.rows, "cols": c.cols,
            "filter_block": c.filters, "row_blocks": row_blocks, "col_blocks": col_blocks,
            "filter_blocks": filter_blocks, "pixel": self.pixel, "width": self.width,
            "pixel_step": self.pixel * p.stride[1], "down": self.down, "reach_h": self.reach[0],
            "reach_w": self.reach[1], "steps": self.steps, "step_pairs": self.step_pairs, "offsets": self.offsets(),
            "configs": configs(self.step_pairs), "sums_at": self.sums_at,
            "taps_h": p.kernel[0], "taps_w": p.kernel[1],
        }  # fmt: skip


def pixel_of(problem: ConvProblem) -> tuple[int, int]:
    """Pairs that a packed pixel has room for, and pairs of a step: the fewest steps, which must not leave the pairs
    that lie beside each other, those of a tap or of a row of taps; of as many, pixels that begin with a cache line."""
    pairs = ceil_div(problem.group_c, 2)
    beside = problem.kernel[1] if problem.dilation[1] == 1 else 1
    rooms = [narrow_pairs(problem.group_c)] if pairs < PAIRS else range(pairs, pairs + PAIRS)
    found = ((room, max(n for n in range(1, PAIRS + 1) if beside * room % n == 0)) for room in rooms)
    return min(found, key=lambda one: (one[0] / one[1], one[0] % PAIRS > 0, one[0]))


class TaskCost(generated.TaskCost):
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar = Geometry

    def breakdown(self) -> Breakdown:
        p, c, g, costs = self.problem, self.config, self.geometry, self.costs
        across = ceil_div(c.cols, ROWS)
        tile, tiles = ceil_div(c.cols, across), ceil_div(c.rows * across, 2)
        step = max(4 * PRODUCT * tile / ROWS, LOADED_ROW * 2 * (tile + g.step_pairs))
        panels, terms = ceil_div(c.filters, PANEL), g.steps * g.step_pairs
        panel, filters = terms * PANEL * 4, p.k * p.gemm_k * 2
        read = panels * (costs.stream(panel, filters) + (tiles - 1) * costs.stream(panel, panel))
        pixels = panels * tiles * 2 * costs.stream(tile * terms * 4, g.packed * 4)
        products = panels * tiles * (g.steps * step + PAIR_OF_TILES)
        runs = c.rows if c.cols < p.output[1] else 1
        run, planar = c.rows * c.cols // runs, p.layout == "nchw"
        vectors = g.high * g.width * g.pixel / costs.lanes
        if planar:
            lanes = ceil_div(c.filters, costs.lanes)
            finishing = lanes * runs * (ceil_div(run, costs.lanes) * BLOCK_TO_PLANES + RUN_TO_PLANES)
        else:
            finishing = c.rows * c.cols * costs.row(c.filters, FINISH_VECTOR)
        cycles = {
            "products": products,
            "waiting for operands": WAITING * (read + pixels),
            "packing": vectors * (FROM_PLANES if planar else FROM_PIXELS) + g.high * PACK_ROW,
            "zeros": g.packed / costs.lanes,
            "reading x": READ * costs.stream(g.high * g.width * p.group_c * 2, p.bytes),
            "finishing": finishing,
            "writing y": WRITE * costs.stream(c.rows * c.cols * c.filters * 2, p.bytes),
            "start": TASK,
        }
        # The last task that a worker draws is waited for.
        rounds = ceil_div(g.tasks, max(1, min(self.device.threads, g.tasks)))
        cycles["uneven workers"] = UNEVEN * sum(cycles.values()) / rounds
        return Breakdown(costs, cycles, g.tasks)


class Amx(generated.GeneratedAlgorithm[Config]):
    """Any filter, stride, dilation and groups; bfloat16 with float32 sums; NCHW and NHWC. Linux on processors with AMX.

    Takes subnormal numbers for zeros.
    """

    id: ClassVar[str] = "cpu.amx"
    summary: ClassVar[str] = "AMX tiles of pixels by tiles of filters, bfloat16"
    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)
    cost: ClassVar = TaskCost

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        return None if device.amx else "needs a processor with AMX, and Linux"

    @staticmethod
    def candidates(problem: ConvProblem, device: Device) -> Iterator[Config]:
        problem = flatten(problem)
        p, q = problem.output
        sizes = {(ceil_div(p, count), q) for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128) if count <= p}
        if p == 1 or q > 1024:
            widths = (round_up(ceil_div(q, count), ROWS) for count in (2, 4, 6, 8, 16, 32, 64))
            sizes |= {(1, cols) for cols in widths if cols < q}
        sizes.add((1, min(q, 2 * ROWS)))
        for rows, cols in sorted(sizes):
            for filters in splits(problem.group_k, PANEL, device.threads):
                config = Config(rows, cols, filters)
                least = (rows, cols) == (1, min(q, 2 * ROWS))
                if least or Geometry(problem, config, device).scratch_bytes <= SCRATCH_BYTES:
                    yield config

    def task(self, problem: ConvProblem, config: Config, device: Device) -> generated.TaskCost:
        return super().task(flatten(problem), config, device)

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        elements = problem.k * problem.gemm_k
        alone = 2 * elements < ALONE_BYTES
        return 8.0 + 1e-3 * PACK_FILTER_NS * elements / (1 if alone else device.threads)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        problem = flatten(problem)
        few = problem.group_c if ceil_div(problem.group_c, 2) < PAIRS else 0
        library = self.load("amx", generate, problem, layout=problem.layout, channels=few)
        geometry = Geometry(problem, config, device)
        panels = problem.groups * ceil_div(problem.group_k, PANEL)
        return KernelPlan(
            problem, device, library, FIELDS, geometry.fields(),
            packed_size=panels * PANEL * geometry.steps * geometry.step_pairs, pack_tasks=panels,
        )  # fmt: skip
