"""cpu.winograd: fewer products for filters of more than one tap, one row of the transform at a time.

An output tile of tile_h x tile_w is A_h^T [ (G_h w G_w^T) * (B_h^T x B_w) ] A_w, with one `Transform` an axis
(`transforms`): F(4x4, 3x3) takes 36 products instead of 144. The products are gone through in slices of one row i of
the transform: the input's row combination i, its column combinations, a matrix product over channels for each, their
column combinations, and A_h^T's column i adds the result to the output tiles. So scratch holds one slice rather than
the whole transformed input, which would be more than twice the input. Lanes run over tiles.

Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cpu import tile
from tapwise.cpu.common import lanes_of, splits
from tapwise.cpu.cost import IN_L1, ROW_CALL, Breakdown, Costs
from tapwise.cpu.plan import KernelPlan
from tapwise.cpu.simd import target
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cpu import generated
from tapwise.ops.conv.cpu.winograd.kernel import generate
from tapwise.ops.conv.cpu.winograd.steps import FIELDS
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.winograd.tiles import WinogradSums, tilings, view

BLOCK_CHANNELS: Final = 384
# Tasks of packing for each thread, of so many channels at least.
PACK_TASKS, LEAST_PACKED = 4, 8
# Of a thread, what is always allowed; more, up to twice the input.
SCRATCH_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Config(BaseConfig):
    """Output tile tile_h x tile_w; lanes over "tiles" or "channels"; register tile m x n; `rows` rows of tiles and
    `filters` output channels a task."""

    tile_h: int
    tile_w: int
    lanes: str
    m: int
    n: int
    rows: int
    filters: int


class Geometry(generated.Geometry):
    """Sizes of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        seen = view(problem)
        assert seen is not None
        super().__init__(seen.fprop, config, device)
        problem, lanes = seen.fprop, self.lanes
        self.axes = high, wide = seen.axes
        self.high, self.wide = high.transform(config.tile_h), wide.transform(config.tile_w)
        self.products = self.high.products * self.wide.products
        self.tile_rows = ceil_div(problem.output[0], config.tile_h * high.phases)
        self.tile_cols = ceil_div(problem.output[1], config.tile_w * wide.phases)
        # Rows of tiles of all phases, and tiles in one of them.
        self.phase_rows, self.row_tiles = self.tile_rows * high.phases, self.tile_cols * wide.phases
        # Runs of tiles, or of channels and filters, fill whole vectors.
        self.over_tiles = config.lanes == "tiles"
        tiles = config.rows * self.row_tiles
        self.tiles = round_up(tiles, lanes) if self.over_tiles else tiles
        self.filters = config.filters if self.over_tiles else round_up(config.filters, lanes)
        inputs = (self.tile_cols - 1) * self.wide.step + self.wide.span
        reach = (inputs - 1) * wide.dilation + (wide.phases - 1) * problem.stride[1] + 1
        outputs = self.row_tiles * config.tile_w
        row = max(problem.padding[1][0] + problem.spatial[1], reach, outputs)
        # Rounded up, and what the widest vectors read and write beyond.
        self.row_size = round_up(row + 2 * self.wide.step * lanes if self.over_tiles else row * problem.group_c, 16)
        self.channels = ceil_div(problem.group_c, ceil_div(problem.group_c, BLOCK_CHANNELS))
        self.transposed_at = (2 if self.over_tiles else 1) * self.row_size
        self.input_at = self.transposed_at + round_up(self.transposed_rows * problem.spatial[1] * problem.group_c, 16)
        # A tile's vectors of filters start at cache lines.
        self.product_at = self.input_at + round_up(self.wide.products * problem.group_c * self.tiles, 16)
        self.sums_at = self.product_at + self.wide.products * self.filters * self.tiles
        self.output_at = self.sums_at + config.tile_h * config.tile_w * self.filters * self.tiles
        total = self.output_at + (3 * self.row_size if self.over_tiles else 0)
        self.scratch_bytes = ceil_div(total * problem.accumulator_bytes, 64) * 64
        # Channels whose filters a task of packing transforms: there are several tasks for each thread.
        blocks = problem.groups * ceil_div(problem.group_k, config.filters)
        parts = ceil_div(PACK_TASKS * device.threads, blocks)
        self.pack_channels = max(LEAST_PACKED, ceil_div(problem.group_c, parts))
        self.pack_parts = ceil_div(problem.group_c, self.pack_channels)
        self.pack_tasks = blocks * self.pack_parts

    @property
    def transposed_rows(self) -> int:
        """Rows of x that a task transposes, at most: those that its rows of tiles see."""
        if self.over_tiles or self.problem.layout == "nhwc":
            return 0
        high, phases = self.axes[0], self.axes[0].phases
        tile_rows = (self.config.rows + phases - 2) // phases + 1
        seen = ((tile_rows - 1) * self.high.step + self.high.span - 1) * high.dilation + 1
        return min(self.problem.spatial[0], seen + (phases - 1) * self.problem.stride[0])

    @property
    def tasks(self) -> int:  # type: ignore[override]
        p, c = self.problem, self.config
        return ceil_div(self.phase_rows, c.rows) * ceil_div(p.group_k, c.filters) * p.groups * p.n

    @property
    def filter_pad(self) -> int:
        """Filters of a group, up to whole vectors where lanes run over them."""
        return self.problem.group_k if self.over_tiles else round_up(self.problem.group_k, self.lanes)

    @property
    def matrix(self) -> int:
        """A group's transformed filters of one product: an odd number of cache lines, so that those of all products,
        which are written side by side, lie in different sets of a cache."""
        itemsize = self.problem.accumulator_bytes
        lines = ceil_div(self.problem.group_c * self.filter_pad * itemsize, 64) | 1
        return lines * 64 // itemsize

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
            "sums_w": self.row_tiles * c.tile_w, "transposed_at": self.transposed_at,
            "run": self.tiles if self.over_tiles else self.filters, "product_step": self.filters * self.tiles,
            "filter_pad": self.filter_pad, "matrix": self.matrix,
            "pack_parts": self.pack_parts, "pack_channels": self.pack_channels,
            "tiles": self.tiles, "row_size": self.row_size, "input_at": self.input_at,
            "product_at": self.product_at, "sums_at": self.sums_at, "output_at": self.output_at,
            "offsets": np.arange(self.channels, dtype=np.int64) * (self.tiles if self.over_tiles else 1),
            "zeros": np.zeros(p.spatial[1] * (1 if self.over_tiles else p.group_c) + 16, np.float64),
            "factors": np.ascontiguousarray(a_t.T), "adds": np.ascontiguousarray((a_t.T != 0).astype(np.int64)),
        }  # fmt: skip


def candidates(problem: ConvProblem, device: Device) -> list[Config]:
    """Tile sizes, blocks of rows and of filters whose scratch stays within the limit; or the smallest."""
    seen, asked = view(problem), problem
    assert seen is not None
    problem = seen.fprop
    in_bytes = problem.n * problem.c * problem.spatial[0] * problem.spatial[1] * max(4, problem.itemsize)
    limit = max(2 * in_bytes, SCRATCH_BYTES * device.threads)
    needed: dict[Config, int] = {}
    for (tile_h, tile_w), way in product(tilings(asked), lanes_ways(problem, device)):
        phases = seen.axes[0].phases
        tile_rows = ceil_div(problem.output[0], tile_h * phases) * phases
        rows_choices = sorted({ceil_div(tile_rows, count) for count in (1, 2, 4, 6, 8, 14, 16, tile_rows)})
        of_lanes = "pixels" if way == "tiles" else way
        # Vectors of filters begin at cache lines, so that none is loaded like two.
        tiles = tile.shapes(target(settings.cpu_target()), of_lanes, device.split_loads and device.vector_cycles > 1)
        for m, n in tiles:
            panel = m if way == "tiles" else n * lanes_of(problem, device)
            if m < 3 or (panel >= 2 * problem.group_k and (way == "tiles" or (m, n) != tiles[0])):
                continue
            for rows in rows_choices:
                for filters in splits(problem.group_k, panel, device.threads):
                    config = Config(tile_h, tile_w, way, m, n, rows, filters)
                    needed[config] = Geometry(asked, config, device).workspace_bytes(device.threads)
    fitting = [config for config, size in needed.items() if size <= limit]
    return fitting or sorted(needed, key=needed.__getitem__)[:1]


def lanes_ways(problem: ConvProblem, device: Device) -> list[str]:
    """Channels last over channels; in NCHW over tiles, or over vectors of channels, which are transposed."""
    if problem.layout == "nhwc":
        return ["channels"]
    return ["tiles", "channels"] if problem.group_c >= lanes_of(problem, device) else ["tiles"]


# What a task costs; measured, not derived.
# Share of the transforms' cycles that is not hidden behind the products around them.
OVERLAP: Final = 0.75
# Transform of the input: cycles a vector of an image row for the combination of rows, a vector of tiles and product for
# that of columns, and a row of one channel for the choice of its sources.
COMBINE_ROWS: Final = 14.0
COMBINE_COLUMNS: Final = 6.0
COMBINED_ROW: Final = 16.0
# Channels last, what is done for a tile: cycles besides those of its vectors.
TILE_RUN: Final = 25.0
# Sums of the output tiles: cycles a vector of products for their column combination, and a vector of sums that a slice
# is added to.
PRODUCT_VECTOR: Final = 1.25
ADDED_VECTOR: Final = 0.6
# Output: cycles a vector of y, a row besides, and a vector of tiles for the interleaving of its columns.
OUTPUT_VECTOR: Final = 1.5
OUTPUT_ROW: Final = 40.0
INTERLEAVED: Final = 7.0
# Of a transform's cycles, the share that goes by vectors.
BY_VECTORS: Final = 0.67
# NCHW with lanes over channels: all parts take so much longer where vectors are loaded at once (Emerald Rapids: with
# what is then chosen four layers of stride 2 take 0.81 to 0.88 of the time, five others 0.96 to 1.14).
CHANNELS_WHOLE: Final = 1.05
# Filters: cycles of a product's transform for the filters of one panel and channel.
FILTER: Final = 6.0
# Transformed filters that were just written, microseconds a MB: where vectors are loaded at once (Emerald Rapids: 686
# times of 49 gradients, two threads, within a fifth), and where each thread begins with all of them, half of which
# another holds (there, and on a Zen 4: 40 gradients and 20 calls); how often they go to memory and back where L3 is too
# small.
FRESH_US, FRESH_ALL_US = 30.0, 30.0
FRESH_PASSES: Final = 3.0


class TaskCost(generated.TaskCost):
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar = Geometry

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, config, device)
        g = self.geometry
        self.problem = g.problem
        # Of a run that lanes go along; how many runs there are.
        self.vectors = (g.tiles if g.over_tiles else g.filters) // self.costs.lanes
        self.runs = config.filters if g.over_tiles else g.tiles
        # Where vectors take two cycles, the instructions of a transform that are none do not.
        self.slow = 1.0 + BY_VECTORS * (device.vector_cycles - 1.0)

    def breakdown(self) -> Breakdown:
        """All parts of a task: a matrix product for each product of the transforms, and the transforms."""
        g = self.geometry
        tiles = self.tiles()
        cycles = {
            "products": g.products * tiles,
            "waiting for operands": g.products * self.costs.waiting(tiles, self.streamed()),
            "transposing": self.transposing(),
            "input transform": OVERLAP * self.input_transform(),
            "sums": OVERLAP * self.accumulation(),
            "output transform": OVERLAP * self.output_transform(),
        }
        if self.costs.whole and not g.over_tiles and self.problem.layout == "nchw":
            cycles = {part: count * CHANNELS_WHOLE for part, count in cycles.items()}
        return Breakdown(self.costs, cycles, g.tasks)

    def tiles(self) -> float:
        """The register tiles of one product of the transforms."""
        g, c = self.geometry, self.config
        blocks = ceil_div(self.problem.group_c, g.channels)
        tiles = blocks * self.costs.block(c.m, c.n, self.runs, self.vectors, g.channels)
        if g.over_tiles:
            return tiles
        panel = self.vectors * self.costs.device.vector_bytes * self.problem.group_c
        return tiles + self.costs.first_pass(panel, self.problem.layout)

    def streamed(self) -> float:
        """Filters and transformed input of one product, read by the tiles from the caches that hold them."""
        g, c, p, costs = self.geometry, self.config, self.problem, self.costs
        panel, inputs = (count * p.group_c * costs.itemsize for count in (c.filters, g.tiles))
        all_filters = p.k * p.group_c * costs.itemsize * g.products
        own = min(all_filters, panel * g.products * max(1, g.tasks // self.device.threads))
        if g.over_tiles:
            passes = ceil_div(self.vectors, c.n)
            return costs.filters(panel, passes, panel, own, all_filters) + costs.stream(
                inputs, inputs * g.wide.products
            )
        columns, passes = ceil_div(self.vectors, c.n), ceil_div(self.runs, c.m)
        again = IN_L1 * panel / columns
        return costs.filters(panel, passes, again, own, all_filters) + costs.stream(columns * inputs, inputs)

    @property
    def row_vectors(self) -> int:
        """Vectors of a row of tiles: rows shorter than a vector are transformed in narrower ones."""
        g = self.geometry
        width = min(self.costs.lanes, 1 << max(0, g.tile_cols.bit_length() - 1))
        return g.axes[1].phases * ceil_div(g.tile_cols, 1 if width < 4 else width)

    def input_transform(self) -> float:
        """The input of all slices: its rows combined, then the columns of the combined rows."""
        g, costs = self.geometry, self.costs
        if not g.over_tiles:
            vectors = self.slow * ceil_div(self.problem.group_c, costs.lanes)
            columns = self.problem.spatial[1]
            # Without groups a row of pixels is one run.
            grouped = self.problem.groups > 1 and self.problem.layout == "nhwc"
            row = columns * vectors * COMBINE_ROWS + ROW_CALL * (columns if grouped else 1)
            row += g.row_tiles * (vectors * COMBINE_COLUMNS * g.wide.products + TILE_RUN)
            return g.high.products * self.config.rows * row
        rows = self.problem.group_c * self.config.rows
        row = self.slow * self.row_vectors * COMBINE_COLUMNS * g.wide.products
        row += self.costs.row(self.problem.spatial[1], COMBINE_ROWS) + COMBINED_ROW
        return g.high.products * rows * row

    def transposing(self) -> float:
        """Rows of x and of y, of NCHW and lanes over channels."""
        g, c, p = self.geometry, self.config, self.problem
        if g.over_tiles or p.layout == "nhwc":
            return 0.0
        height, (_, q) = c.rows * c.tile_h, p.output
        reading = self.costs.transposing(p.group_c, g.transposed_rows * p.spatial[1], 1)
        return reading + self.costs.transposing(c.filters, height * q, height)

    def accumulation(self) -> float:
        """Each slice's products: columns combined, added to the sums of the output tiles, which lie in a cache."""
        g, c = self.geometry, self.config
        added = sum(1 for row in g.high.a_t for value in row if value)
        cycles = g.products * PRODUCT_VECTOR + added * c.tile_w * ADDED_VECTOR
        cycles *= self.slow * self.runs * self.vectors
        cycles += 0.0 if g.over_tiles else g.high.products * self.runs * TILE_RUN
        sums = g.filters * c.tile_h * c.tile_w * g.tiles * self.costs.itemsize
        return cycles + self.costs.stream(2 * g.high.products * sums, sums)

    def output_transform(self) -> float:
        """Sums to rows of y, with bias, residual and activation."""
        c, g = self.config, self.geometry
        if not g.over_tiles:
            return g.tiles * c.tile_h * c.tile_w * (self.costs.row(c.filters, OUTPUT_VECTOR) + OUTPUT_ROW)
        rows = c.filters * c.rows * c.tile_h
        row = self.costs.row(self.problem.output[1], OUTPUT_VECTOR) + OUTPUT_ROW
        return rows * (row + self.slow * INTERLEAVED * c.tile_w * self.row_vectors)


class _Winograd(WinogradSums, generated.GeneratedAlgorithm[Config]):
    """Of both directions: tiles of the problem's view."""

    summary: ClassVar[str] = "F(4x4, 3x3) and its kin, sliced by transform row; lanes over tiles or channels"
    candidates = staticmethod(candidates)
    cost: ClassVar = TaskCost
    kernel_plan: ClassVar[type[KernelPlan]] = KernelPlan

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if problem.depthwise:
            return "has no product over channels to save when each group has one"
        if problem.group_k == 1 or problem.group_c == 1:
            return "takes two channels and filters a group or more, not one"
        if not tilings(problem):
            size, stride = ("x".join(map(str, pair)) for pair in (problem.kernel, problem.stride))
            return f"takes filters whose tiles save products within its error bound, not {size} of stride {stride}"
        return None

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Transforming all filters, FILTER cycles a product, panel and channel at 2.7 GHz; what the run then waits."""
        g = Geometry(problem, config, device)
        p, products, width = g.problem, g.products, config.m if g.over_tiles else g.lanes
        panels = p.k * p.group_c / width
        transform = panels * FILTER * products * (1 + width / 8) / 2700 / min(device.threads, g.pack_tasks)
        size = p.k * p.group_c * products * p.accumulator_bytes
        memory = FRESH_PASSES * 1e-3 * size / device.gbps if size > device.l3_bytes * 0.75 else 0.0
        at_once = Costs(device, p.accumulator_bytes).at_once
        fresh = FRESH_US * at_once + FRESH_ALL_US * (config.filters >= p.group_k)
        return 10.0 + transform + 1e-6 * fresh * size + memory

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        g = Geometry(problem, config, device)
        tile = {name: getattr(config, name) for name in ("tile_h", "tile_w", "lanes", "m", "n")}
        # Kernels do not know of the dilation.
        rows, columns = (replace(axis, dilation=1, phases=1) for axis in g.axes)
        library = self.load("winograd", generate, problem, layout=problem.layout, rows=rows, columns=columns, **tile)
        return self.kernel_plan(
            problem, device, library, FIELDS, g.fields(),
            packed_size=g.products * problem.groups * g.matrix,
            pack_tasks=g.pack_tasks,
        )  # fmt: skip


class Winograd(_Winograd):
    """Filters of 2 to 7 taps an axis where a tile saves products: 3x3 of stride 1 and 2, 5x5, 1x7 and 7x1 among them;
    any padding, dilation and groups; float32, float64, float16, bfloat16 (in float32); NCHW and NHWC.

    Rounding errors are larger than those of a direct sum, so `auto` never takes it for float64, and its bound is in
    terms of |A^T| [ (|G| |w| |G^T|) * (|B^T| |x| |B|) ] |A|, the size of what it sums.
    """

    id: ClassVar[str] = "cpu.winograd"


class DgradPlan(KernelPlan):
    """Filters are packed from where they lie, channels and filters swapped."""

    def pack_into(self, w: np.ndarray, memory: np.ndarray | None) -> np.ndarray | None:
        assert isinstance(self.problem, ConvProblem)
        seen = view(self.problem)
        assert seen is not None
        return super().pack_into(seen.filters(w), memory)


class WinogradDgrad(_Winograd):
    """The same of dgrad: with a stride of 2 or 4, tiles of dx have all its phases, interleaved. No dilation beside a
    stride, and no padding from which an element of dx sees less than all of dy."""

    operator: ClassVar[str] = "dgrad"
    id: ClassVar[str] = "cpu.winograd"
    summary: ClassVar[str] = "Winograd's fprop of dy, all phases of a stride in one tile"
    kernel_plan: ClassVar[type[KernelPlan]] = DgradPlan
