"""What a task of cpu.winograd costs."""

from __future__ import annotations

from typing import Final

from tapwise.algorithm import Device
from tapwise.cpu.common import sum_bytes
from tapwise.cpu.cost import Costs
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.winograd.blocking import Config, Geometry
from tapwise.ops.conv.problem import ConvProblem

# Share of the transforms' cycles that is not hidden behind arithmetic.
OVERLAP: Final = 0.6


def predict_us(problem: ConvProblem, config: Config, device: Device) -> float:
    """Cycles of one task: a matrix product for each product of the transforms, and for each vector of transformed
    input, product and output some cycles for its transform (`cost`); times the tasks that one worker draws."""
    costs = Costs(device, sum_bytes(problem))
    g = Geometry(problem, config, costs.lanes)
    high, wide = g.high, g.wide
    vectors = g.tiles // costs.lanes
    channel_blocks = ceil_div(problem.group_c, g.channels)
    tiles = channel_blocks * costs.block(config.m, config.n, config.filters, vectors, g.channels)
    panel = config.filters * problem.group_c * costs.itemsize
    columns = ceil_div(vectors, config.n)
    streamed = costs.stream(columns * panel, panel * g.products)
    inputs = problem.group_c * g.tiles * costs.itemsize
    streamed += costs.stream(inputs, inputs * wide.products)
    product = g.products * max(tiles, 0.3 * tiles + streamed)
    # Rows shorter than a vector are transformed in narrower ones.
    width = min(costs.lanes, 1 << max(0, g.tile_cols.bit_length() - 1))
    width = 1 if width < 4 else width
    row_pieces = g.axes[1].phases * ceil_div(g.tile_cols, width)
    lines = problem.group_c * config.rows * costs.row(problem.spatial[1], 7.0)
    pieces = problem.group_c * config.rows * row_pieces
    inputs_cycles = high.products * (pieces * 9.0 * wide.products + lines + 12 * problem.group_c * config.rows)
    cells = config.tile_h * config.tile_w
    sums_bytes = config.filters * cells * g.tiles * costs.itemsize
    added = sum(1 for row in high.a_t for value in row if value)
    accumulate = config.filters * vectors * (g.products * 2.5 + added * config.tile_w * 1.6)
    accumulate += costs.stream(2 * high.products * sums_bytes, sums_bytes)
    rows = config.filters * config.rows * config.tile_h
    output = rows * (costs.row(problem.output[1], 3.0) + 20 + 3.0 * config.tile_w * row_pieces)
    # Transforms of one slice overlap with the products around them.
    return costs.wall_us(product + OVERLAP * (inputs_cycles + accumulate + output), g.tasks, device.threads)
