"""cpu.direct of wgrad: outer products of dy and x in registers while the pixels of a band stream by.

A tile holds `m` rows by `n` vectors of sums of one tap: each pixel brings n vectors of one operand and m broadcast
elements of the other. Channels last are read where they lie; NCHW is transposed band by band into panels that stay in
the cache, as are 16 bits, which are widened there. Each tap goes over the rows and columns where it meets the input, so
there are no masks and no zeros, but for few channels: those lie side by side with the taps of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import ClassVar, Final

import numpy as np

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu.common import lanes_of, load
from tapwise.cpu.cost import Breakdown, Costs
from tapwise.cpu.jit import Library
from tapwise.cpu.plan import KernelPlan
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cpu.wgrad_direct_kernel import FIELDS, TAP, generate, pitch_of
from tapwise.ops.conv.problem import ConvProblem

# Most rows and vectors of a tile, by number of vector registers.
_TILES: Final = {16: ((6, 2), (4, 3)), 32: ((12, 2), (8, 3), (6, 4))}


@dataclass(frozen=True)
class Config(BaseConfig):
    """Tile: `m` broadcast rows by `n` vectors; rows are filters and lanes channels, or the other way round (`swap`).

    A task is a block of at most `x_block` of x's panels (of such rows or vectors) by `dy_block` of dy's, in one of
    `parts` parts of the pixels; it takes `images` images and at most `rows` rows of dy at a time.
    """

    swap: bool
    m: int
    n: int
    x_block: int
    dy_block: int
    images: int
    rows: int
    parts: int


class Geometry:
    """Sizes of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        self.problem, self.config, self.lanes = problem, config, lanes_of(problem, device)
        p, c, lanes = problem, config, self.lanes
        self.flat = is_flat(p, lanes)
        self.taps = p.kernel[0] * (1 if self.flat else p.kernel[1])
        self.x_length = p.group_c * (p.kernel[1] if self.flat else 1)
        x_units, dy_units = units(p, lanes, c.swap)
        x_width, dy_width = (c.m, c.n) if c.swap else (c.n, c.m)
        self.x_panels, self.dy_panels = ceil_div(x_units, x_width), ceil_div(dy_units, dy_width)
        self.x_more = x_units - self.x_panels * (x_width - 1)
        self.dy_more = dy_units - self.dy_panels * (dy_width - 1)
        self.x_blocks, self.dy_blocks = ceil_div(self.x_panels, c.x_block), ceil_div(self.dy_panels, c.dy_block)
        here = p.layout == "nhwc" and not p.widened
        self.pack_x = self.flat or not here or not (c.swap or p.group_c % lanes == 0)
        self.pack_dy = not here or (c.swap and p.group_k % lanes != 0)
        # Bands of one image have even shares of its rows, and parts the same number of bands, where they can.
        image_blocks, row_blocks = ceil_div(p.n, c.images), ceil_div(p.output[0], c.rows)
        even = round_up(row_blocks, c.parts // gcd(c.parts, image_blocks))
        self.row_blocks = even if even <= p.output[0] else row_blocks
        rows = ceil_div(p.output[0], self.row_blocks)
        self.bands = self.row_blocks * image_blocks
        self.part_bands = ceil_div(self.bands, c.parts)
        self.parts = ceil_div(self.bands, self.part_bands)
        self.tasks = p.groups * self.x_blocks * self.dy_blocks * self.parts
        self.sums = self._sums()
        # Widths of panels in memory: of rows, a power of two; of vectors, whole.
        row_pitch, lane_pitch = pitch_of(c.m), c.n * lanes
        x_pitch, dy_pitch = (row_pitch, lane_pitch) if c.swap else (lane_pitch, row_pitch)
        self.row_step = p.stride[0] if p.kernel[0] == 1 and p.padding[0][0] == 0 else 1
        reach = (p.kernel[0] - 1) * p.dilation[0] + 1
        self.x_rows = ceil_div(min(p.spatial[0], (rows - 1) * p.stride[0] + reach), self.row_step)
        self.flat_width = (p.output[1] - 1) * p.stride[1] + p.kernel[1]
        self.x_panel = c.images * self.x_rows * p.spatial[1] * x_pitch + lanes
        self.dy_panel = c.images * rows * p.output[1] * dy_pitch + lanes
        flat_size = c.images * self.x_rows * self.flat_width * p.group_c + (c.n + 1) * lanes + c.m
        x_size = flat_size if self.flat else c.x_block * self.x_panel if self.pack_x else 0
        sum_rows, vectors = self.block_sizes()
        self.dy_at = round_up(x_size, 32)
        self.sums_at = self.dy_at + round_up(c.dy_block * self.dy_panel if self.pack_dy else 0, 32)
        block = sum_rows * self.taps * vectors * lanes if self.sums == "scratch" else 0
        self.line_at = self.sums_at + round_up(block, 32)
        line = 0 if self.sums == "direct" else prod(p.kernel) * min(round_up(p.group_c, lanes), 2 * lanes) + lanes
        self.scratch_bytes = round_up((self.line_at + line) * p.accumulator_bytes, 64)
        # Of parts: all sums of a group, in whole vectors.
        lane_length = p.group_k if c.swap else self.x_length
        self.sum_rows = self.x_length if c.swap else p.group_k
        self.sum_lanes = round_up(lane_length, lanes)
        self.part_step = p.groups * self.sum_rows * self.taps * self.sum_lanes
        self.finish_rows = self.sum_rows if c.swap else max(1, ceil_div(self.sum_rows, 4 * device.threads))
        self.workers = max(1, min(device.threads, self.tasks))

    def block_sizes(self) -> tuple[int, int]:
        """Most rows and vectors of a task's sums."""
        c = self.config
        return (c.x_block * c.m, c.dy_block * c.n) if c.swap else (c.dy_block * c.m, c.x_block * c.n)

    def _sums(self) -> str:
        """Where the sums of a task are kept."""
        p, c = self.problem, self.config
        if self.parts > 1:
            return "parts"
        as_lies = p.layout == "nhwc" or prod(p.kernel) == 1
        whole = self.x_length % self.lanes == 0 and not p.widened
        return "direct" if as_lies and whole and not c.swap else "scratch"

    @property
    def parts_bytes(self) -> int:
        return self.parts * self.part_step * self.problem.accumulator_bytes if self.sums == "parts" else 0

    @property
    def workspace_bytes(self) -> int:
        """Scratch of all workers, and the parts."""
        return self.scratch_bytes * self.workers + self.parts_bytes

    def tap_ranges(self) -> np.ndarray:
        """The table of taps (TAP)."""
        p = self.problem
        rows = [tap_range(p, 0, r) for r in range(p.kernel[0])]
        cols = [(0, p.output[1], 0)] if self.flat else [tap_range(p, 1, s) for s in range(p.kernel[1])]
        table = [(p0, p1, q0, q1, row, col) for p0, p1, row in rows for q0, q1, col in cols]
        return np.array(table, np.int64).reshape(-1, len(TAP))

    def fields(self) -> dict[str, int | np.ndarray]:
        p, c = self.problem, self.config
        return {
            "tasks": self.tasks, "scratch_step": self.scratch_bytes, "taps_at": self.tap_ranges(), "images": p.n,
            "groups": p.groups, "c": p.c, "k": p.k, "h": p.spatial[0], "w_in": p.spatial[1],
            "p": p.output[0], "q": p.output[1], "kernel_h": p.kernel[0], "kernel_w": p.kernel[1],
            "stride_h": p.stride[0], "stride_w": p.stride[1], "pad_h": p.padding[0][0], "pad_w": p.padding[1][0],
            "reach_h": (p.kernel[0] - 1) * p.dilation[0] + 1, "taps": self.taps,
            "flat_width": self.flat_width, "row_step": self.row_step,
            "x_panels": self.x_panels, "x_more": self.x_more, "x_blocks": self.x_blocks,
            "dy_panels": self.dy_panels, "dy_more": self.dy_more, "dy_blocks": self.dy_blocks,
            "band_images": c.images, "row_blocks": self.row_blocks, "bands": self.bands,
            "part_bands": self.part_bands, "parts": self.parts, "parts_at": self.scratch_bytes * self.workers,
            "part_step": self.part_step, "x_panel": self.x_panel, "dy_panel": self.dy_panel, "dy_at": self.dy_at,
            "sums_at": self.sums_at, "line_at": self.line_at, "sum_lanes": self.sum_lanes,
            "finish_rows": self.finish_rows, "finish_tasks": p.groups * ceil_div(self.sum_rows, self.finish_rows),
        }  # fmt: skip


def tap_range(problem: ConvProblem, axis: int, tap: int) -> tuple[int, int, int]:
    """(first, end) of outputs whose tap lies in the input, and where the tap of output 0 lies."""
    stride, size, outputs = problem.stride[axis], problem.spatial[axis], problem.output[axis]
    offset = tap * problem.dilation[axis] - problem.padding[axis][0]
    first = min(outputs, max(0, ceil_div(-offset, stride)))
    end = max(first, min(outputs, (size - 1 - offset) // stride + 1))
    return first, end, offset


def is_flat(problem: ConvProblem, lanes: int) -> bool:
    """Whether channels and the taps of a row are one axis: few channels would leave lanes empty."""
    return problem.group_c < lanes and problem.kernel[1] > 1 and problem.dilation[1] == 1


def units(problem: ConvProblem, lanes: int, swap: bool) -> tuple[int, int]:
    """Of x's and of dy's panels: rows, or vectors."""
    x = problem.group_c * (problem.kernel[1] if is_flat(problem, lanes) else 1)
    return (x, ceil_div(problem.group_k, lanes)) if swap else (ceil_div(x, lanes), problem.group_k)


def _blocks(panels: int) -> list[int]:
    """Even blocks of panels: 1, 2, 4 ... of them."""
    return list(dict.fromkeys(ceil_div(panels, 1 << i) for i in range((panels - 1).bit_length() + 1)))


def candidates(problem: ConvProblem, device: Device) -> Iterator[Config]:
    p, lanes = problem, lanes_of(problem, device)
    height, width = p.output
    for swap in (False, True):
        x_units, dy_units = units(p, lanes, swap)
        rows_, vectors = (x_units, dy_units) if swap else (dy_units, x_units)
        shapes = {
            (ceil_div(rows_, ceil_div(rows_, m)), ceil_div(vectors, ceil_div(vectors, n)))
            for m, n in _TILES[device.registers]
        }
        for m, n in sorted(shapes, reverse=True):
            x_panels, dy_panels = ceil_div(x_units, m if swap else n), ceil_div(dy_units, n if swap else m)
            for x_block in [x_panels] if is_flat(p, lanes) else _blocks(x_panels):
                for dy_block in _blocks(dy_panels):
                    pixel = x_block * (m if swap else n * lanes) * prod(p.stride)
                    pixel += dy_block * (n * lanes if swap else m)
                    # A task's operands of a band stay in L2.
                    most = max(1, device.l2_bytes // 2 // (pixel * p.accumulator_bytes) // width)
                    row_blocks = ceil_div(height, most)
                    rows = ceil_div(height, row_blocks)
                    images = max(1, min(p.n, most // height))
                    for parts in (1, device.threads, 2 * device.threads):
                        if parts > 1:
                            images = min(images, ceil_div(p.n, parts))
                            if p.n < parts:
                                rows = min(rows, ceil_div(height, ceil_div(parts, p.n)))
                        yield Config(swap, m, n, x_block, dy_block, images, rows, parts)


# What a task costs, in cycles; measured.
# A multiply-add of vectors, and where units are half as wide; a pixel of a tile with too few of them to hide their
# latency.
PRODUCT, HALVED = 0.74, 0.9
LATENCY: Final = 3.0
# A row of pixels in a tile; a tile's start and end; each of its vectors, loaded, added and stored.
ROW: Final = 8.0
TILE: Final = 60.0
SUM: Final = 3.0
# Of the time that a task's sums take from their cache and back, what arithmetic does not hide.
SUMS_EXPOSED: Final = 0.4
# The same of x and dy, which each task reads for itself, where they are large; small ones are read ahead.
MEMORY_EXPOSED: Final = 0.5
# An element brought into panels: transposed (for each cycle that a vector takes), copied, or one of few channels.
PACK_PLANAR: Final = 0.35
PACK_LAST: Final = 0.25
PACK_FLAT: Final = 1.5
# An element of dw written from the sums: in vectors, or by itself.
FINISH: Final = 0.2
FINISH_EACH: Final = 1.5
START: Final = 300.0
# Tasks that are counted one by one: of more, all workers have about the same.
COUNTED: Final = 64


class TaskCost:
    """Cycles of one task of a config, on one device."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        self.problem, self.config, self.device = problem, config, device
        self.geometry = Geometry(problem, config, device)
        self.costs = Costs(device, problem.accumulator_bytes)

    def breakdown(self) -> Breakdown:
        """All parts of the average task, times what the slowest worker has more than its share."""
        p, c, g, costs = self.problem, self.config, self.geometry, self.costs
        x_share, dy_share, part = 1 / g.x_blocks, 1 / g.dy_blocks, 1 / g.parts
        cols = [q1 - q0 for q0, q1, _ in (tap_range(p, 1, s) for s in range(p.kernel[1]))]
        rows = [p1 - p0 for p0, p1, _ in (tap_range(p, 0, r) for r in range(p.kernel[0]))]
        lines = p.n * sum(rows) * part
        pixels = lines * (p.output[1] if g.flat else sum(cols))
        x_units, dy_units = units(p, g.lanes, c.swap)
        area = x_units * x_share * dy_units * dy_share
        tiles = g.x_panels * x_share * g.dy_panels * dy_share
        # A task's sums are read and written again with each band, and once more to finish.
        most_rows, most_vectors = g.block_sizes()
        held = most_rows * most_vectors * g.taps * g.lanes * p.accumulator_bytes
        moved = 2 * held * (g.part_bands - (g.sums == "direct"))
        planar = p.layout == "nchw"
        pack_dy = PACK_PLANAR * self.device.vector_cycles if planar else PACK_LAST
        pack_x = PACK_FLAT if g.flat else pack_dy
        x_elements = g.part_bands * c.images * g.x_rows * p.spatial[1] * p.group_c * x_share
        dy_elements = p.n * prod(p.output) * p.group_k * dy_share * part
        read = (x_elements + dy_elements) * p.itemsize
        finish = 0.0 if g.sums == "direct" else FINISH_EACH if c.swap else FINISH
        cycles = {
            "products": pixels * max(area * (PRODUCT if self.device.vector_cycles == 1 else HALVED), tiles * LATENCY),
            "lines": tiles * (lines * (1 if g.flat else len(cols)) * ROW + g.part_bands * g.taps * TILE),
            "sums": g.part_bands * area * g.taps * SUM + SUMS_EXPOSED * costs.stream(moved, held),
            "memory": MEMORY_EXPOSED * costs.stream(read, p.bytes) if p.bytes > self.device.l3_bytes / 4 else 0.0,
            "packing": x_elements * pack_x * g.pack_x + dy_elements * pack_dy * g.pack_dy,
            "finishing": area * g.taps * g.lanes * finish * g.parts,
            "start": START + (self.device.start_us * costs.cycles_per_us if g.parts > 1 else 0.0),
        }
        longest = self.longest()
        return Breakdown(costs, {name: longest * part for name, part in cycles.items()}, g.tasks)

    def longest(self) -> float:
        """The products of the worker that has most, over those of as many average tasks as it has tasks at most."""
        g, threads = self.geometry, self.device.threads
        if g.tasks > COUNTED:
            return 1.0
        x_units, dy_units = units(self.problem, g.lanes, self.config.swap)
        x_sizes, dy_sizes = _sizes(x_units, g.x_panels, g.x_blocks), _sizes(dy_units, g.dy_panels, g.dy_blocks)
        last = g.bands - (g.parts - 1) * g.part_bands
        parts = [g.part_bands] * (g.parts - 1) + [last]
        loads = [0] * min(threads, g.tasks)
        for part, _, dy_size, x_size in itertools.product(parts, range(self.problem.groups), dy_sizes, x_sizes):
            # Who is done first draws the next.
            loads[loads.index(min(loads))] += part * dy_size * x_size
        total = self.problem.groups * g.bands * dy_units * x_units
        return max(loads) * g.tasks / (ceil_div(g.tasks, threads) * total)


def _sizes(units: int, panels: int, blocks: int) -> list[int]:
    """Rows or vectors of each block of panels, the first of which may have one more."""
    starts = [block * panels // blocks for block in range(blocks + 1)]
    least, more = divmod(units, panels)
    starts = [least * panel + min(panel, more) for panel in starts]
    return [end - begin for begin, end in itertools.pairwise(starts)]


class PartsPlan(KernelPlan):
    """Launches the tasks, and `finish_task` behind them where the sums are in parts."""

    def __init__(
        self, problem: ConvProblem, device: Device, library: Library, names: Sequence[str],
        fields: Mapping[str, int | np.ndarray], workspace_bytes: int, parts: bool,
    ) -> None:  # fmt: skip
        super().__init__(problem, device, library, names, fields)
        self.workspace_bytes = workspace_bytes
        if parts:
            self.then("finish_task")

    def pack(self, w: np.ndarray) -> np.ndarray:
        """dy itself."""
        return w


class DirectWgrad(Algorithm[Config]):
    """Register-blocked outer products; any filter, stride, dilation and groups.

    float32, float64, float16, bfloat16 (computed in float32); NCHW and NHWC. Exact on integers that float32 holds.
    Rejects anything but two spatial axes, and problems with nothing to sum.
    """

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cpu.direct"
    summary: ClassVar[str] = "register tiles of outer products over pixels, a tap at a time"
    axes: ClassVar[tuple[int, ...]] = (2,)

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
            "wgrad_direct", generate, problem, layout=problem.layout, m=config.m, n=config.n, swap=config.swap,
            flat=g.flat, pack_x=g.pack_x, pack_dy=g.pack_dy, sums=g.sums,
        )  # fmt: skip
        return PartsPlan(problem, device, library, FIELDS, g.fields(), g.workspace_bytes, g.sums == "parts")
