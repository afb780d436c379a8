"""cpu.direct: convolution as a matrix product whose matrix is never built.

Three routes, a config's `route`:
- "sums": each task packs the input that it needs (`packed_tile`), block of channels by block of channels, runs
  register tiles over it (`tile`), and finishes its rows with bias, residual and activation while they are in cache;
- "straight": sums live in registers and, between blocks of gemm_k, in y itself;
- "in place": straight, from an input without padding and stride that is read where it lies.
Lanes run over pixels (NCHW) or over output channels (NHWC, and images of a few pixels).
"""

from __future__ import annotations

from dataclasses import replace
from math import log2, prod
from typing import ClassVar, Final

from tapwise.algorithm import Device, Plan
from tapwise.cpu.cost import EXPOSED, IN_L1, Breakdown
from tapwise.cpu.plan import ALONE_BYTES, InPlacePlan, KernelPlan
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu import generated
from tapwise.ops.conv.cpu.direct.blocking import Config, Geometry, candidates
from tapwise.ops.conv.cpu.direct.kernel import FIELDS, generate
from tapwise.ops.conv.cpu.direct.pairs import PAIR_NS, PairPlan, paired
from tapwise.ops.conv.problem import ConvProblem

# What a task costs; measured, not derived.
# Straight routes: a row of outputs is a call of its own, and one of each panel of filters.
RUN_CALL: Final = 40.0
# In place: where planes are whole pages, all channels of a tile want the same cache sets (32x32 pixels take 1.9 times
# as long, 64x64 1.5 times), and lines come from L2. Units half as wide as vectors take long enough for that: of 28 such
# layers of 1x1 with AVX-512 on a Zen 4, 25 are fastest in place, up to 1.3 times; with AVX2 there 2 of 16.
SETS_ALIKE: Final = 1.6
PAGE_BYTES: Final = 4096
# In place, too: cycles of each page that a register tile meets (Emerald Rapids; choices on Zen 4 are right without).
PAGE_CYCLES: Final = 8.0
# Ways of a set of L1.
CHANNELS_HELD: Final = 8
# Packing: cycles a plane, and a vector of a row by column stride (other strides go element by element); what a row
# takes less than `Costs.row` says, as its number of vectors is decided once for all rows of a plane.
PACK_PLANE: Final = 40.0
PACK_VECTOR: Final = {1: 2.0, 2: 2.5, 4: 4.0}
PACK_ELEMENT: Final = 1.5
PACK_ROW_LESS: Final = 13.0
# Packing: cycles a vector of channels.
PACK_CHANNELS: Final = 2.0
# The packed copy misses more than it streams: borders, phases. Read in place, the products hide most of it.
PACK_READ: Final = 1.8
READ_IN_PLACE: Final = 0.3
# Finishing: cycles a vector of sums.
FINISH_VECTOR: Final = 1.5
# Stores wait in buffers for half of the time that their memory takes.
STORE_EXPOSED: Final = 0.2
# Packing an element of the filters: some of a panel, one of a vector alone, and in vectors that are transposed.
PACK_FILTER_NS: Final = {"pixels": 0.7, "channels": 1.2}
TRANSPOSE_FILTER_NS: Final = 0.5
# Filters in place: addresses are put together, and lines are read in part; where vectors are lines (99 drawn layers on
# an Emerald Rapids, 1.05 to 1.18 by route and tile).
FILTERS_IN_PLACE: Final = 1.02
FILTERS_IN_PLACE_WHOLE: Final = 1.09
# There, too: what lanes over channels take more than the model says; each doubling of the pixels that a column of tiles
# reads, beyond half of L1.
CHANNELS_WHOLE, STRIP = 1.1, 0.06
# Cycles for each line of them that a tile meets, where dgrad's lie so that no line's filters follow each other.
SCATTERED_LINE: Final = 1.5
# Packed inputs of which L2 holds no more than such a share: cycles for each byte beyond, that is written and read again
# from further away. Where vectors are loaded at once (60 layers of 1x1 on an Emerald Rapids: tasks of 1.8 MB take 1.5
# times as long as those of 250 KB).
HELD_SHARE, LOST = 0.25, 0.3
# Drawing a task and working out its place.
TASK: Final = 500.0

# Straight routes ask for lines of y early where a worker's share of it is larger than its L2, and sums have at least
# so many terms: takes 5 to 30 % off where y lies in L3 or memory; adds 4 to 8 % where sums are shorter or L2 holds y.
FETCH_TERMS: Final = 20


class TaskCost(generated.TaskCost):
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar = Geometry

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, config, device)
        self.packed = self.geometry.packed
        self.over_pixels = config.lanes == "pixels"
        self.costs = replace(self.costs, planes=self.over_pixels)
        self.straight = config.route != "sums"
        self.blocks = ceil_div(problem.group_c, config.channels)
        self.terms = config.channels * problem.kernel[0] * problem.kernel[1]
        self.pixels = (config.rows - 1) * self.packed.pitch + config.cols
        # Rows of outputs that follow each other in y are one run.
        one_run = not self.straight or self.geometry.pitch == problem.output[1] == config.cols
        self.runs = 1 if one_run else config.rows
        size = self.costs.itemsize
        self.input_bytes = config.channels * self.packed.planes * self.packed.plane * size
        self.panel_bytes = config.filters * self.terms * size
        # A worker's own filters: with rows or images in several tasks all of them.
        tasks = max(1, self.geometry.tasks // device.threads)
        self.own_filter_bytes = config.filters * config.groups * tasks * problem.gemm_k * size
        self.packed_rows = self.packed.planes * (config.rows + self.packed.row_shift)
        self.source_bytes = config.channels * self.packed_rows * self.packed.pitch * problem.itemsize

    def breakdown(self) -> Breakdown:
        """All parts of a task; a task goes through `groups` groups, each in `blocks` blocks of gemm_k."""
        c, costs = self.config, self.costs
        tiles = self.tiles()
        in_place = c.route == "in place"
        block = {
            "products": c.images * tiles,
            "waiting for operands": costs.waiting(c.images * tiles, self.streamed()),
            "calls": self.calls(),
            "packing": 0.0 if in_place else c.images * self.packing(),
            "reading x": c.images * self.reading(),
        }
        image = {
            "finishing": 0.0 if self.straight else self.finishing(),
            "sums": self.sums(),
            "writing y": self.writing(),
        }
        cycles = {name: c.groups * (self.blocks * part) for name, part in block.items()}
        cycles |= {name: c.groups * (c.images * part) for name, part in image.items()}
        beyond = self.input_bytes * c.images - HELD_SHARE * costs.device.l2_bytes
        if costs.whole and not in_place and beyond > 0:
            cycles["lines that L2 lost"] = c.groups * self.blocks * beyond * LOST
        zeros = c.images * c.channels * self.packed.planes * self.packed.plane / costs.lanes
        cycles |= {"zeros": 0.0 if in_place else zeros, "start": TASK}
        return Breakdown(costs, cycles, self.geometry.tasks)

    def scattered_us(self, apart: int) -> float:
        """What a run waits longer for filters in place, neighbours `apart` elements apart and channels further."""
        c, costs, size = self.config, self.costs, self.costs.itemsize
        across = self.runs * ceil_div(self.vectors(), c.n)
        # Lines and elements of one channel. A tile's neighbours begin anywhere in a line, vectors mostly with one.
        if self.over_pixels:
            tiles, passes, elements = ceil_div(c.filters, c.m) * across, across, c.filters * apart
            lines = ((c.m - 1) * apart + 1) * size / 64 + 1.0
        else:
            passes, taps = ceil_div(self.pixels, c.m), self.terms / c.channels
            tiles, elements, lines = passes * across, c.filters * taps, taps * max(1.0, c.n * costs.lanes * size / 64)
        read = self.problem.group_c * elements * size
        cycles = self.problem.group_c * tiles * lines * SCATTERED_LINE + EXPOSED * costs.stream(passes * read, read)
        cycles *= c.groups * c.images
        tasks = ceil_div(self.geometry.tasks, max(1, min(self.device.threads, self.geometry.tasks)))
        return tasks * cycles / costs.cycles_per_us

    def vectors(self) -> int:
        """Vectors of lanes beside each other in a run of a block of sums."""
        c, lanes = self.config, self.costs.lanes
        if self.runs > 1:
            return ceil_div(c.cols, lanes)
        return ceil_div(self.pixels if self.over_pixels else c.filters, lanes)

    def tiles(self) -> float:
        """The register tiles of one image and block of gemm_k."""
        c, p, costs = self.config, self.problem, self.costs
        rows = c.filters if self.over_pixels else self.pixels
        if c.pieces:
            whole, rest = divmod(self.vectors(), n := min(c.n, self.vectors()))
            narrow = costs.tile(c.m, rest, self.terms) / costs.tile(c.m, n, self.terms) if rest else 0.0
            drawn = ceil_div(self.geometry.tasks, self.device.threads)
            tiles = self.geometry.pieces.cycles(drawn) * (whole + narrow) * c.channels
        else:
            tiles = costs.block(c.m, c.n, rows, self.vectors(), self.terms)
        plane = p.spatial[0] * p.spatial[1] * costs.itemsize
        alike = plane % PAGE_BYTES == 0 and c.channels > CHANNELS_HELD and costs.device.vector_cycles == 1.0
        if c.route == "in place" and alike:
            tiles *= SETS_ALIKE
        if c.route == "in place" and costs.whole:
            pages = c.channels * min(1.0, plane / PAGE_BYTES)
            tiles += PAGE_CYCLES * pages * ceil_div(c.filters, c.m) * ceil_div(self.vectors(), c.n)
        tiles *= self.runs
        if costs.whole and self.over_pixels:
            column = self.terms * min(c.n, self.vectors()) * costs.device.vector_bytes
            tiles *= 1.0 + STRIP * max(0.0, log2(2 * column / costs.device.l1_bytes))
        elif costs.whole:
            tiles = tiles * CHANNELS_WHOLE + costs.first_pass(self.panel_bytes, p.layout)
        if c.panels:
            return tiles
        return tiles * (FILTERS_IN_PLACE_WHOLE if costs.whole else FILTERS_IN_PLACE)

    def streamed(self) -> float:
        """Filters and input of one block of gemm_k, read by the tiles of all images from the caches that hold them."""
        c, costs, panel, x = self.config, self.costs, self.panel_bytes, self.input_bytes
        all_filters = self.problem.k * self.problem.gemm_k * costs.itemsize
        own = min(all_filters, self.own_filter_bytes)
        if self.over_pixels:
            passes = self.runs * ceil_div(self.vectors(), c.n)
            read = costs.stream(x, x) + self.columns_again()
            return costs.filters(panel, passes, panel, own, all_filters, c.images) + c.images * read
        # Each tile of pixels reads the panel of its filters, which L1 may hold for the next.
        columns = ceil_div(c.filters, c.n * costs.lanes)
        passes = ceil_div(self.pixels, c.m)
        again = IN_L1 * panel / columns
        read = c.images * costs.stream(columns * x, x)
        return costs.filters(panel, passes, again, own, all_filters, c.images) + read

    def columns_again(self) -> float:
        """What a column of tiles reads, for each tile but the first. Where loads are split, STRIP stands for it."""
        c, costs = self.config, self.costs
        if costs.device.split_loads:
            return 0.0
        column = self.terms * min(c.n, self.vectors()) * costs.device.vector_bytes
        columns = self.runs * ceil_div(self.vectors(), c.n)
        return costs.stream((ceil_div(c.filters, c.m) - 1) * columns * column, column)

    def calls(self) -> float:
        """Rows of the straight routes that are runs of their own."""
        if self.runs == 1:
            return 0.0
        return self.runs * (1.0 + self.config.filters / self.config.m) * RUN_CALL

    def packing(self) -> float:
        """One image's input of a block, from cache into the packed tile."""
        c, costs, pitch, ways = self.config, self.costs, self.packed.pitch, self.problem.stride[1]
        if self.geometry.transposed:
            rows = self.packed_rows / ways
            return costs.transposing(c.channels, round(rows * min(pitch * ways, self.problem.spatial[1])), round(rows))
        if self.problem.layout == "nchw":
            vector = PACK_VECTOR.get(self.problem.stride[1], PACK_ELEMENT * costs.lanes)
            return c.channels * (PACK_PLANE + self.packed_rows * (costs.row(pitch, vector) - PACK_ROW_LESS))
        if self.geometry.whole_pixels:
            # Rows of all column phases.
            return self.packed_rows / ways * costs.row(pitch * ways * c.channels, PACK_CHANNELS)
        return self.packed_rows * pitch * costs.row(c.channels, PACK_CHANNELS)

    def reading(self) -> float:
        """The same from where x lies."""
        exposed = READ_IN_PLACE if self.config.route == "in place" else PACK_READ
        return exposed * self.costs.stream(self.source_bytes, self.problem.bytes)

    def finishing(self) -> float:
        """Bias, residual and activation of one image's sums."""
        c, costs = self.config, self.costs
        if self.over_pixels:
            return c.filters * c.rows * costs.row(c.cols, FINISH_VECTOR)
        if self.problem.layout == "nchw":
            return costs.transposing(c.filters, c.rows * c.cols, c.rows)
        return c.rows * c.cols * costs.row(c.filters, FINISH_VECTOR)

    def sums(self) -> float:
        """Sums of one image that go through the caches: each block of gemm_k reads and writes them, finishing reads."""
        sums = self.config.filters * self.pixels * self.costs.itemsize
        passes = 2 * (self.blocks - 1) if self.straight else 2 * self.blocks + 1
        return self.costs.stream(passes * sums, sums * self.config.images + self.input_bytes)

    def writing(self) -> float:
        """One image's outputs, to memory."""
        outputs = self.config.filters * self.config.rows * self.config.cols
        return STORE_EXPOSED * self.costs.stream(outputs * self.problem.itemsize, self.problem.bytes)


def _transposes(problem: ConvProblem, config: Config) -> bool:
    """Whether vectors of dense filters are transposed as they are packed: their terms are in the panels' order."""
    return config.lanes == "channels" and not (config.pieces and problem.layout == "nchw")


class Direct(generated.GeneratedAlgorithm[Config]):
    """Register-blocked direct convolution; any filter, stride, dilation and groups.

    float32, float64, float16, bfloat16 (computed in float32); NCHW and NHWC. Exact on integers that float32 holds.
    """

    id: ClassVar[str] = "cpu.direct"
    summary: ClassVar[str] = "register tiles over a packed input; lanes over pixels or channels"
    candidates = staticmethod(candidates)
    cost: ClassVar = TaskCost

    def in_place(self, problem: ConvProblem, device: Device, beside: bool) -> list[Config]:
        """Configs that read filters where they lie; vectors of them where neighbours lie `beside` each other."""
        found = [config for config in self.configs(problem, device) if not config.panels]
        return [config for config in found if beside or config.automatic]

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """A nanosecond an element, which is loaded and stored alone; less where vectors of filters are transposed."""
        if not config.panels:
            return 0.0
        each = TRANSPOSE_FILTER_NS if _transposes(problem, config) else PACK_FILTER_NS[config.lanes]
        # Of pairs there are half as many elements.
        elements = problem.k * problem.gemm_k * (0.5 if config.pairs else 1.0)
        together = PAIR_NS if config.pairs else 0.0
        alone = elements * problem.accumulator_bytes < ALONE_BYTES
        return 8.0 + 1e-3 * elements * (each / (1 if alone else device.threads) + together)

    def turned_us(self, problem: ConvProblem, config: Config, device: Device, apart: int) -> float:
        """Tiles that read filters in place meet lines with few that they need. Nothing of lanes over channels can be
        transposed where filters do not lie side by side."""
        if not config.panels:
            task = self.task(problem, config, device)
            assert isinstance(task, TaskCost)
            return task.scattered_us(apart)
        if apart == 1 or not _transposes(problem, config):
            return 0.0
        return 1e-3 * PACK_FILTER_NS[config.lanes] / device.threads * problem.k * problem.gemm_k

    def task(self, problem: ConvProblem, config: Config, device: Device) -> generated.TaskCost:
        return super().task(paired(problem) if config.pairs else problem, config, device)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        parameters = {name: getattr(config, name) for name in ("route", "lanes", "panels", "pairs", "pieces", "m", "n")}
        own = problem.itemsize * prod(problem.y_shape) / device.threads
        fetches = config.route != "sums" and problem.gemm_k >= FETCH_TERMS and own > device.l2_bytes
        parameters["fetch_y"] = fetches
        library = self.load("direct", generate, problem, layout=problem.layout, **parameters)
        odd = problem.group_c % 2
        problem = paired(problem) if config.pairs else problem
        fields = Geometry(problem, config, device).fields() | {"odd": odd}
        if not config.panels:
            return InPlacePlan(problem, device, library, FIELDS, fields, config.lanes == "channels")
        return (PairPlan if config.pairs else KernelPlan)(
            problem, device, library, FIELDS, fields,
            packed_size=problem.c * fields["taps"] * fields["filter_pad"],
            pack_tasks=problem.groups * ceil_div(problem.group_c, config.channels) * fields["pack_blocks"],
        )  # fmt: skip
