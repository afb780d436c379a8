"""What a task of cpu.direct costs."""

from __future__ import annotations

from math import gcd

from tapwise.algorithm import Device
from tapwise.cpu.common import lanes_of, sum_bytes
from tapwise.cpu.cost import CACHE_RATES, Costs
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.direct.blocking import Config, Geometry
from tapwise.ops.conv.problem import ConvProblem


def predict_us(problem: ConvProblem, config: Config, device: Device) -> float:
    """Cycles of one task's packing, tiles and finishing (`cost`), times the tasks that one worker draws."""
    geometry = Geometry(problem, config, lanes_of(problem, device))
    costs = Costs(device, sum_bytes(problem))
    strip, size = geometry.strip, costs.itemsize
    taps = problem.kernel[0] * problem.kernel[1]
    blocks = ceil_div(problem.group_c, config.channels)
    terms = config.channels * taps
    pixels = (config.rows - 1) * strip.pitch + config.cols
    over_pixels = config.lanes == "pixels"
    rows, lanes = (config.filters, pixels) if over_pixels else (pixels, config.filters)
    vectors = ceil_div(lanes, costs.lanes)
    straight = config.route != "sums"
    whole = geometry.pitch == problem.output[1] == config.cols
    if straight:
        vectors = ceil_div(pixels, costs.lanes) if whole else config.rows * ceil_div(config.cols, costs.lanes)
    line_calls = config.rows * (1.0 + config.filters / config.m) * 20 if straight and not whole else 0.0
    columns = ceil_div(vectors, config.n)

    tiles = costs.block(config.m, config.n, rows, vectors, terms)
    # What one tile reads of the input, in whole cache lines: beyond L1 each panel of filters fetches it again.
    lines = (config.n * costs.lanes * size if over_pixels else config.m * 8) / 64
    # Packed planes start with a line; taps and images in memory do not.
    lines += 0.0 if over_pixels and problem.kernel[1] == 1 and config.route != "in place" else 1.0
    footprint = config.channels * problem.kernel[0] * len(strip.col_phases) * lines * 64
    held = footprint + (config.m if over_pixels else config.n * costs.lanes) * terms * size
    if held > device.l1_bytes:
        share = 0.12 if over_pixels and config.route != "in place" else 0.25
        share *= min(1.0, 2.0 * (held / device.l1_bytes - 1.0))
        tiles *= 1.0 + share * footprint / CACHE_RATES[1] / costs.tile(config.m, config.n, terms)
    if not over_pixels and problem.layout == "nchw":
        # Broadcasts from neighbouring pixels, and sums that lie across y's planes: measured, not derived.
        tiles *= 1.03
    if config.route == "in place":
        plane = problem.spatial[0] * problem.spatial[1] * size
        # Loads that pass the end of a cache line, and a page for each channel: more than the first level of
        # address translation holds.
        tiles *= 1.0 + 0.1 * max(0, device.vector_bytes - gcd(plane, 64)) / 64
        tiles *= 1.06 if plane > 4096 and terms > 64 else 1.0
    panel = config.filters * terms * size
    input_bytes = config.channels * strip.planes * strip.plane * size
    if over_pixels:
        streamed = costs.stream(columns * panel, panel) + costs.stream(input_bytes, input_bytes)
    else:
        passes = ceil_div(config.filters, config.n * costs.lanes)
        streamed = costs.stream(panel, panel) + costs.stream(passes * input_bytes, input_bytes)
    per_block = config.images * max(tiles, 0.3 * tiles + streamed) + line_calls

    packed_rows = strip.planes * (config.rows + strip.row_shift)
    if problem.layout == "nchw":
        per_vector = {1: 1.5, 2: 2.5, 4: 4.0}.get(problem.stride[1], 1.5 * costs.lanes)
        pack = config.channels * (20 + packed_rows * (costs.row(strip.pitch, per_vector) - 11))
    else:
        pack = packed_rows * strip.pitch * costs.row(config.channels, 2.0)
    source = config.channels * packed_rows * strip.pitch * problem.itemsize
    pack = config.images * (pack + 1.3 * costs.stream(source, problem.bytes))

    matched = over_pixels == (problem.layout == "nchw")
    if over_pixels:
        finish = config.filters * config.rows * costs.row(config.cols, 3.0 if matched else 2.0 * costs.lanes)
    else:
        finish = config.rows * config.cols * costs.row(config.filters, 3.0 if matched else 2.0 * costs.lanes)
    if straight:
        finish = 0.0
    # Every block of gemm_k goes through the sums once more, and finishing reads them and writes y.
    sums = config.filters * pixels * size
    passes = 2 * (blocks - 1) if straight else 2 * blocks + 1
    finish += costs.stream(passes * sums, sums * config.images + input_bytes)
    finish += 0.5 * costs.stream(config.filters * config.rows * config.cols * problem.itemsize, problem.bytes)
    zeros = config.images * config.channels * strip.planes * strip.plane / costs.lanes
    if config.route == "in place":
        pack, zeros = 0.3 * costs.stream(source, problem.bytes), 0.0
    task = config.groups * (blocks * (per_block + pack) + config.images * finish) + zeros + 60
    # Filters come from memory once a run when they do not fit the caches.
    tasks = geometry.fields()["tasks"]
    once = costs.stream(config.groups * config.filters * problem.gemm_k * size, problem.bytes)
    return costs.wall_us(max(task, once), tasks, device.threads)
