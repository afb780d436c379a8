"""What a task of cpu.winograd costs, part by part. The constants are measured, not derived."""

from __future__ import annotations

from typing import ClassVar, Final

from tapwise.algorithm import Device
from tapwise.cpu.cost import Breakdown
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.generated import TaskCost as BaseTaskCost
from tapwise.ops.conv.cpu.winograd.blocking import Config, Geometry
from tapwise.ops.conv.problem import ConvProblem

# Share of the transforms' cycles that is not hidden behind the products around them.
OVERLAP: Final = 0.6
# Transform of the input: cycles a vector of an image row for the combination of rows, a vector of tiles and product for
# that of columns, and a row of one channel for the choice of its sources.
COMBINE_ROWS: Final = 7.0
COMBINE_COLUMNS: Final = 9.0
COMBINED_ROW: Final = 12.0
# Sums of the output tiles: cycles a vector of products for their column combination, and a vector of sums that a slice
# is added to.
PRODUCT_VECTOR: Final = 2.5
ADDED_VECTOR: Final = 1.6
# Output: cycles a vector of y, a row besides, and a vector of tiles for the interleaving of its columns.
OUTPUT_VECTOR: Final = 3.0
OUTPUT_ROW: Final = 20.0
INTERLEAVED: Final = 3.0
# Filters: cycles of a product's transform for the filters of one panel and channel.
FILTER: Final = 2.7


class TaskCost(BaseTaskCost):
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar = Geometry

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, config, device)
        self.vectors = self.geometry.tiles // self.costs.lanes

    def breakdown(self) -> Breakdown:
        """All parts of a task: a matrix product for each product of the transforms, and the transforms."""
        g = self.geometry
        tiles = self.tiles()
        return Breakdown(
            self.costs,
            {
                "products": g.products * tiles,
                "waiting for operands": g.products * self.costs.waiting(tiles, self.streamed()),
                "input transform": OVERLAP * self.input_transform(),
                "sums": OVERLAP * self.accumulation(),
                "output transform": OVERLAP * self.output_transform(),
            },
            g.tasks,
        )

    def tiles(self) -> float:
        """The register tiles of one product of the transforms."""
        g, c = self.geometry, self.config
        blocks = ceil_div(self.problem.group_c, g.channels)
        return blocks * self.costs.block(c.m, c.n, c.filters, self.vectors, g.channels)

    def streamed(self) -> float:
        """Filters and transformed input of one product, read by the tiles from the caches that hold them."""
        g, c, costs = self.geometry, self.config, self.costs
        panel = c.filters * self.problem.group_c * costs.itemsize
        columns = ceil_div(self.vectors, c.n)
        inputs = self.problem.group_c * g.tiles * costs.itemsize
        return costs.stream(columns * panel, panel * g.products) + costs.stream(inputs, inputs * g.wide.products)

    @property
    def row_vectors(self) -> int:
        """Vectors of a row of tiles: rows shorter than a vector are transformed in narrower ones."""
        g = self.geometry
        width = min(self.costs.lanes, 1 << max(0, g.tile_cols.bit_length() - 1))
        return g.axes[1].phases * ceil_div(g.tile_cols, 1 if width < 4 else width)

    def input_transform(self) -> float:
        """The input of all slices: its rows combined, then the columns of the combined rows."""
        g = self.geometry
        rows = self.problem.group_c * self.config.rows
        row = self.row_vectors * COMBINE_COLUMNS * g.wide.products
        row += self.costs.row(self.problem.spatial[1], COMBINE_ROWS) + COMBINED_ROW
        return g.high.products * rows * row

    def accumulation(self) -> float:
        """Each slice's products: columns combined, added to the sums of the output tiles, which lie in a cache."""
        g, c = self.geometry, self.config
        added = sum(1 for row in g.high.a_t for value in row if value)
        cycles = c.filters * self.vectors * (g.products * PRODUCT_VECTOR + added * c.tile_w * ADDED_VECTOR)
        sums = c.filters * c.tile_h * c.tile_w * g.tiles * self.costs.itemsize
        return cycles + self.costs.stream(2 * g.high.products * sums, sums)

    def output_transform(self) -> float:
        """Sums to rows of y, with bias, residual and activation."""
        c = self.config
        rows = c.filters * c.rows * c.tile_h
        row = self.costs.row(self.problem.output[1], OUTPUT_VECTOR) + OUTPUT_ROW
        return rows * (row + INTERLEAVED * c.tile_w * self.row_vectors)


def pack_us(problem: ConvProblem, config: Config, device: Device) -> float:
    """Transforming all filters: FILTER cycles a product, panel and channel, at 2.7 GHz."""
    products = Geometry(problem, config, device).products
    cycles = FILTER * products * (1 + config.m / 8)
    return 10.0 + problem.k * problem.group_c / config.m * cycles / 2700 / device.threads
