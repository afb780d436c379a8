"""cpu.depthwise where x is read in place: configs, sizes and cost of a task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import ClassVar, Final

import numpy as np

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cpu.common import lanes_of
from tapwise.cpu.cost import Breakdown, Costs
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu import generated
from tapwise.ops.conv.cpu.depthwise.tile import SINGLE_ROWS, Rows, Tile, vectors_of
from tapwise.ops.conv.problem import ConvProblem

PLANES: Final = (1, 2, 4)
# Most vectors of a tile, and of a row, by a vector's bytes: without registers for masks, wide rows are packed.
MOST_VECTORS: Final = {32: 1, 64: 4}
MOST_IN_ROW: Final = {32: 2}
# Vector registers besides sums and weights.
OTHERS: Final = 4
# In how many groups a column of taps may be taken, each with the rows of x loaded anew.
MOST_GROUPS: Final = 3


@dataclass(frozen=True)
class InPlaceConfig(BaseConfig):
    """A tile is `rows` rows of outputs by `vectors`, of `planes` channels; an image's channels are `blocks` tasks.

    `pairs`: neighbouring taps of bfloat16 are multiplied together. `once`: a row of x is loaded once for all columns of
    taps. `halves`: the last half vectors of two channels' rows are one.
    """

    rows: int
    vectors: int
    planes: int
    blocks: int
    pairs: bool = False
    once: bool = False
    halves: bool = False


class Geometry(generated.Geometry):
    """Sizes and tables of one problem and config. Lengths are in elements."""

    scratch_bytes = 0

    def __init__(self, problem: ConvProblem, config: InPlaceConfig, device: Device) -> None:
        super().__init__(problem, config, device)
        q, ways = problem.output[1], problem.stride[1]
        vectors = vectors_of(min(q, config.vectors * self.lanes), self.lanes)
        # Both halves of what two loads bring are used where taps lie side by side; a pair is one product.
        together = 2 if config.pairs or (ways == 2 and problem.dilation[1] == 1 and problem.kernel[1] > 1) else 1
        columns = 1 if config.pairs else together
        odd = problem.kernel[1] % together > 0
        self.taps_w = ceil_div(problem.kernel[1], together // columns)
        # Without registers for masks they lie in those of vectors.
        masks = 0 if device.vector_bytes == 64 else ways * len(vectors)
        room = device.registers - config.rows * config.planes * len(vectors) - OTHERS - masks
        weights = max(0, min(room // (config.planes * columns), problem.kernel[0]))
        place = Rows(
            problem.spatial[0], problem.output[0], config.rows, problem.padding[0][0], problem.kernel[0],
            problem.stride[0], problem.dilation[0],
        )  # fmt: skip
        width = sum(vectors)
        once = problem.kernel[1] if config.once else 0
        exact = 2 * (q % width) == width if config.halves else width <= q
        self.tile = Tile(
            place, vectors, exact, config.planes, weights, ways, columns, odd, config.pairs, once,
            problem.dilation[1], config.halves,
        )  # fmt: skip
        # Of a channel, pairs counted once.
        self.weights = place.taps * (self.taps_w - odd) + (self.tile.odd_weights if odd else 0)
        self.col_blocks, self.width = q // width if config.halves else ceil_div(q, width), width
        self.tasks = config.blocks * problem.n

    def fields(self) -> dict[str, int | np.ndarray]:
        p = self.problem
        (h, w_in), (height, q), vectors = p.spatial, p.output, self.tile.vectors
        last = q % self.width if self.config.halves else min(q - sum(vectors[:-1]), vectors[-1])
        return {
            "tasks": self.tasks, "scratch_step": 0, "channels": p.c, "multiplier": 1, "blocks": self.config.blocks,
            "w_in": w_in, "plane_in": h * w_in, "q": q, "plane_out": height * q, "taps": self.weights,
            "taps_h": p.kernel[0], "taps_w": self.taps_w, "table": self.table(),
            "col_blocks": self.col_blocks, "last": (1 << last) - 1,
        }  # fmt: skip

    def table(self) -> np.ndarray:
        """int64 (column blocks, columns of taps or pairs of them, 1 + vectors loaded): the shift of a column of taps,
        then which elements of each vector it reads lie inside the image, as bits."""
        p, tile = self.problem, self.tile
        ways, width, taps = p.stride[1], p.spatial[1], p.kernel[1]
        lines = []
        for block in range(self.col_blocks + tile.halves):
            half = block == self.col_blocks
            first = block * self.width if half else max(0, min(block * self.width, p.output[1] - self.width))
            if tile.once:
                at, lanes = first * ways - p.padding[1][0], tile.vectors[0]
                inside = [[0 <= at + i * lanes + lane < width for lane in range(lanes)] for i in range(tile.loads_once)]
                lines.append([at, *(sum(1 << lane for lane in range(lanes) if there[lane]) for there in inside)])
                continue
            for s in range(0, taps, 2 if tile.pairs else 1):
                at = first * ways + s * p.dilation[1] - p.padding[1][0]
                lines.append([at])
                for lanes in (n // 2 if half else n for n in tile.vectors for _ in range(tile.loads)):
                    reads = set(range(lanes))
                    if tile.pairs:
                        # Of an only column every other element at stride 2; else their neighbours, too.
                        reads = {lane * ways + second for lane in reads for second in range(min(2, taps - s))}
                    lines[-1].append(sum(1 << lane for lane in reads if 0 <= at + lane < width))
                    at += lanes * ways // tile.loads
        return np.array(lines, np.int64)


def takes_pairs(problem: ConvProblem, device: Device) -> bool:
    """Whether neighbouring taps are multiplied together."""
    if problem.dtype != "bf16" or not device.bf16_pairs:
        return False
    return problem.dilation[1] == 1 if problem.kernel[1] > 1 else problem.kernel[0] > SINGLE_ROWS


def candidates(problem: ConvProblem, device: Device) -> Iterator[InPlaceConfig]:
    """For planes of stride 1 or 2, one filter a channel, on machines that load vectors by masks."""
    (p, q), lanes = problem.output, lanes_of(problem, device)
    masks = device.vector_bytes == 64 or (device.vector_bytes == 32 and problem.itemsize >= 4)
    # Of an only column, several rows would lie in a vector of y.
    if not masks or problem.layout != "nchw" or problem.group_k > 1 or problem.stride[1] > 2 or q < 2:
        return
    in_row = ceil_div(q, lanes)
    pairs = takes_pairs(problem, device)
    if in_row > MOST_IN_ROW.get(device.vector_bytes, in_row):
        return
    for planes, vectors in product(PLANES, range(1, min(MOST_VECTORS[device.vector_bytes], in_row) + 1)):
        most = (device.registers - OTHERS) // (planes * vectors)
        for rows in sorted({ceil_div(p, count) for count in range(1, p + 1) if ceil_div(p, count) <= most}):
            for blocks in (1, *(count * device.threads for count in (1, 2, 4))):
                config = InPlaceConfig(rows, vectors, planes, blocks, pairs)
                if problem.c // blocks < planes:
                    continue
                if MOST_GROUPS * Geometry(problem, config, device).tile.weights >= problem.kernel[0]:
                    yield config
                    if fits_halves(problem, config, device):
                        yield replace(config, halves=True)
                if fits_once(problem, config, device):
                    yield replace(config, once=True)


def fits_halves(problem: ConvProblem, config: InPlaceConfig, device: Device) -> bool:
    """Whether up to half a vector of a row is left behind whole ones, and tasks have two channels. Where vectors are
    loaded by masks."""
    lanes, q = lanes_of(problem, device), problem.output[1]
    one = config.planes == config.vectors == 1 and not config.pairs and problem.stride[1] == 1
    several = q > lanes and problem.c // config.blocks > 1
    return one and several and device.vector_bytes == 64 and 0 < 2 * (q % lanes) <= lanes


def fits_once(problem: ConvProblem, config: InPlaceConfig, device: Device) -> bool:
    """Whether registers hold all weights, and rows of x that are moved along. Measured on a Zen 5 alone: a stride of 2
    takes 0.86 to 0.95 of the time so, 1 mostly as long."""
    taps = prod(problem.kernel)
    if config.pairs or device.vector_bytes < 64 or device.split_loads:
        return False
    if problem.stride[1] == 1 or problem.kernel[1] < 2:
        return False
    tile = Geometry(problem, replace(config, once=True), device).tile
    vectors = len(tile.vectors)
    taken = config.planes * (config.rows * vectors + taps) + tile.loads_once + vectors + OTHERS
    return taken <= device.registers


# What a task costs; measured, not derived. A product of a vector, and a load of x, for what the machine's units take at
# once: where vectors are twice as wide as units, narrow ones take half of the time.
PRODUCT: Final = 0.44
LOAD: Final = 0.22
# The same on a Zen 5, where most of them lie in two cache lines and other parts take less: the choice on 37 layers is
# 1.04 of the best, 1.05 with the other.
LOAD_SPLIT: Final = 0.5
# A row of x that is loaded once, moved along in registers.
SHIFT: Final = 0.2
# A product waits for the one before it of the same sum; the next tile's fill some of the time.
LATENCY: Final = 2.4
# In pairs of bfloat16 (pairs.py), beside a load: columns that are neighbours are permuted, elements of an odd column
# widened, and put together with those of the next row.
PERMUTE: Final = 0.2
WIDEN: Final = 0.4
PAIR_ROWS: Final = 0.6
# A column of taps, each of its weights, an output vector's store (rounded to bfloat16), a tile.
COLUMN: Final = 1.6
WEIGHT: Final = 0.8
STORE: Final = 1.3
PAIRS_STORE: Final = 2.4
TILE: Final = 10.0
# The share of these that products do not hide on a Zen 5.
TILE_EXPOSED: Final = 0.6
# Of the time that memory takes, what is not hidden, for each row of x that a tile reads beside the others: the
# machine's prefetcher follows few of them, more on a Zen 5. With its two numbers the choice is 1.025 of the best of
# some 20 configs on 129 layers, and 1.018 on 50 that nothing was fitted to; without them 1.036 and 1.034.
MEMORY_EXPOSED: Final = 0.018
MEMORY_EXPOSED_SPLIT: Final = 0.004
# Drawing a task and working out its place.
TASK: Final = 40.0
# Two channels' half vectors, of each over a whole one: fitted so that 3x3, which gains nothing, does not take them.
HALVES: Final = 0.87


def memory(problem: ConvProblem, channels: int, costs: Costs) -> float:
    """Cycles for x and y of so many channels, where they do not stay in the worker's own caches."""
    device = costs.device
    moved = channels * (prod(problem.spatial) + prod(problem.output)) * problem.itemsize
    resident = problem.bytes // device.threads
    return 0.0 if resident <= device.l2_bytes * 0.75 else costs.stream(moved, problem.bytes)


class TaskCost(generated.TaskCost):
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar = Geometry

    def breakdown(self) -> Breakdown:
        """All parts of a task."""
        p, g, c = self.problem, self.geometry, self.config
        channels = ceil_div(p.c, c.blocks)
        runs = list(g.tile.place.runs())
        tiles = ceil_div(channels, c.planes) * (g.col_blocks + HALVES * c.halves)
        exposed = MEMORY_EXPOSED if self.device.split_loads else MEMORY_EXPOSED_SPLIT
        cycles = {
            "products": tiles * sum(count * self.products(*inside) for inside, _, count in runs),
            "tiles": tiles * sum(count for _, _, count in runs) * self.tile(),
            "memory": exposed * c.planes * g.tile.place.reach * memory(p, channels, self.costs),
            "start": TASK,
        }
        return Breakdown(self.costs, cycles, g.tasks)

    def products(self, low: int, high: int) -> float:
        """The products of a tile, and the loads of x for them."""
        p, t = self.problem, self.geometry.tile
        products = p.kernel[1] * sum(len(t.place.users(row, range(p.kernel[0]))) for row in range(low, high))
        if t.once:
            shifts = len(t.vectors) * (p.kernel[1] - (t.ways == 1))
            return self.together(products, 0.0) + t.planes * (high - low) * (self.load * t.loads_once + SHIFT * shifts)
        # Of what two loads bring, each column is picked by a shuffle.
        moves = self.load * self.columns * t.ways + (LOAD * p.kernel[1] if t.ways > 1 else 0.0)
        return self.together(products, (high - low) * len(t.groups(p.kernel[0])) * moves)

    @property
    def load(self) -> float:
        """Of a vector of x."""
        return LOAD if self.device.split_loads else LOAD_SPLIT

    def together(self, products: int, loads: float) -> float:
        """So many products of each vector of a tile, and loads of as many cycles."""
        t = self.geometry.tile
        slow = self.device.vector_cycles / self.costs.lanes
        operations = t.planes * sum(max(1.0, n * slow) for n in t.vectors)
        return max(PRODUCT * products * operations, LATENCY * self.geometry.weights) + loads * operations

    @property
    def columns(self) -> int:
        """Of taps, as often as x is loaded for them."""
        return ceil_div(self.problem.kernel[1], self.geometry.tile.columns)

    @property
    def passes(self) -> int:
        """Over the rows of x of a tile."""
        t = self.geometry.tile
        return 1 if t.once else self.columns * len(t.groups(self.problem.kernel[0]))

    def tile(self) -> float:
        """What else a tile costs."""
        g, c = self.geometry, self.config
        store = PAIRS_STORE if c.pairs else STORE
        cycles = COLUMN * self.passes + WEIGHT * g.weights * c.planes
        cycles += store * c.rows * c.planes * len(g.tile.vectors) + TILE
        return cycles if self.device.split_loads else TILE_EXPOSED * cycles


class PairsCost(TaskCost):
    """The same of a config with `pairs`."""

    def products(self, low: int, high: int) -> float:
        """The products of a tile, and the loads of x for them."""
        t, stride = self.geometry.tile, self.problem.stride[1]
        place, whole = t.place, self.problem.kernel[1] // 2
        column = sum(len(place.users(row, range(place.taps))) for row in range(low, high))
        products, load = whole * column, self.load + PERMUTE if stride == 1 else self.load
        loads = whole * len(t.groups(place.taps)) * load
        if t.odd:
            # Pairs of rows begin above the image, too.
            first, step = (low - place.dilation, 2) if t.rows_paired else (low, 1)
            products += sum(len(place.users(row, range(0, place.taps, step))) for row in range(first, high))
            beside = PAIR_ROWS if t.rows_paired else WIDEN if stride == 1 else self.load
            loads += len(t.groups(t.odd_weights)) * beside
        return self.together(products, (high - low) * loads)

    @property
    def passes(self) -> int:
        """Over the rows of x of a tile."""
        t = self.geometry.tile
        odd = len(t.groups(t.odd_weights)) if t.odd else 0
        return self.problem.kernel[1] // 2 * len(t.groups(t.place.taps)) + odd
