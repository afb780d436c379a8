"""How cpu.direct cuts a problem into tasks: its configs, and the sizes and tables that follow from one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cpu import tile
from tapwise.cpu.common import lanes_of, splits
from tapwise.cpu.cost import Costs
from tapwise.cpu.simd import target
from tapwise.forks import cached_property
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cpu import generated
from tapwise.ops.conv.cpu.direct.pairs import paired, takes_pairs
from tapwise.ops.conv.cpu.direct.pieces import Pieces, cut, share_seen
from tapwise.ops.conv.cpu.packed_tile import packed_tile
from tapwise.ops.conv.problem import ConvProblem

# Terms of gemm_k in one block: a panel of filters and the input that it meets stay in L1.
BLOCK_TERMS: Final = 320
# Shares of products that are not with padding or in gaps: below, the others may be left out (pieces.py), in NCHW too.
WORTH_LEAVING_OUT: Final = 0.97
MUCH_PADDING: Final = 0.85
# Outputs of an axis that are cut into pieces, which goes one by one.
MOST_CUT: Final = 1 << 16
SCRATCH_BYTES: Final = 4 << 20
# Filters of a tile that are read where they lie: more addresses leave LLVM too few registers. Two tiles are enough.
IN_PLACE_M: Final = 8


@dataclass(frozen=True)
class Config(BaseConfig):
    """route "sums", "straight" or "in place"; lanes "pixels" or "channels"; the register tile m x n; a task: rows x
    cols outputs of `images` images, `filters` output channels of `groups` groups; `channels` of the input a
    block of gemm_k; whether filters are packed into panels, or read where they lie; whether
    channels are pairs of bfloat16 (pairs.py); whether taps that see padding alone are left out (pieces.py)."""

    route: str
    lanes: str
    m: int
    n: int
    rows: int
    cols: int
    images: int
    groups: int
    filters: int
    channels: int
    panels: bool = True
    pairs: bool = False
    pieces: bool = False

    @property
    def automatic(self) -> bool:
        """Vectors of filters are there to be read only where neighbouring filters lie side by side."""
        return self.panels or self.lanes == "pixels"


class Geometry(generated.Geometry):
    """Sizes and tables of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, config, device)
        self.device = device
        lanes = self.lanes
        self.packed = packed_tile(problem, config.rows, config.cols, lanes)
        # Channels of a pixel lie together, in NCHW if they can be transposed. In whole rows, those of a stride, too.
        last = problem.group_c % config.channels or config.channels
        self.transposed = (
            problem.layout == "nchw" and config.lanes == "channels" and not config.pairs and last >= lanes
            and problem.stride[1] == len(self.packed.col_phases)
        )  # fmt: skip
        self.whole_pixels = self.transposed or (
            problem.layout == "nhwc" and config.channels == problem.c
            and problem.stride[1] == len(self.packed.col_phases)
        )  # fmt: skip
        pixel = 1 if problem.layout == "nchw" and not self.transposed else config.channels
        self.step = pixel * (problem.stride[1] if self.whole_pixels else 1)
        pad = lanes if config.lanes == "channels" else 1
        self.filter_pad = ceil_div(problem.group_k, pad) * pad
        filters = ceil_div(config.filters, pad) * pad
        sums = config.images * self.packed.flat * filters
        self.sums_pitch = config.images * self.packed.flat if config.lanes == "pixels" else filters
        self.sums_at = ceil_div(config.images * config.channels * self.packed.planes * self.packed.plane, 16) * 16
        itemsize = problem.accumulator_bytes
        self.in_place = config.route == "in place"
        self.pitch = problem.spatial[1] if self.in_place else self.packed.pitch
        if config.route != "sums":
            sums = 0
        # What the last vector of a pixel-major or narrow tile reads beyond the packed input.
        self.steps_at = 0 if self.in_place else round_up((self.sums_at + sums + 64) * itemsize, 64)
        # The distances of a block's terms, int64.
        steps = 0 if config.panels else config.channels * problem.kernel[0] * problem.kernel[1]
        self.scratch_bytes = self.steps_at + round_up(8 * steps, 64)

    @cached_property
    def pieces(self) -> Pieces:
        """The pieces of all tasks."""
        c, costs = self.config, Costs(self.device, self.problem.accumulator_bytes)
        tile = c.m, min(c.n, ceil_div(c.filters, costs.lanes))
        return cut(self.problem, c.rows, c.cols, self.pitch, tile, c.channels, costs)

    @property
    def shortest_run(self) -> int:
        """Fewest pixels of a run of the straight routes: a row, or rows that follow each other."""
        p, q = self.problem.output
        rows, cols = (
            size - (ceil_div(size, part) - 1) * part for size, part in ((p, self.config.rows), (q, self.config.cols))
        )
        return q * rows if self.pitch == q == self.config.cols else cols

    @property
    def blocks(self) -> tuple[int, int, int, int, int]:
        """How many blocks of rows, columns, images, groups and filters there are: a task is one of each."""
        p, c = self.problem, self.config
        pairs = ((p.output[0], c.rows), (p.output[1], c.cols), (p.n, c.images), (p.groups, c.groups))
        rows, cols, images, groups = (ceil_div(size, part) for size, part in pairs)
        return rows, cols, images, groups, ceil_div(p.group_k, c.filters)

    @property
    def tasks(self) -> int:  # type: ignore[override]
        return prod(self.blocks)

    @property
    def pack_block(self) -> int:
        """Filters that are packed as one task: whole panels, for every thread some."""
        c = self.config
        panel = c.m if c.lanes == "pixels" else c.n * self.lanes
        return round_up(ceil_div(self.problem.group_k, self.device.threads), panel)

    def fields(self) -> dict[str, Any]:
        p, c, s = self.problem, self.config, self.packed
        row_blocks, col_blocks, image_blocks, group_blocks, filter_blocks = self.blocks
        fields: dict[str, Any] = {"whole_pixels": int(self.whole_pixels)}
        if c.pieces:
            table = self.pieces.table(p.kernel[1])
            fields |= {"pieces": table, "piece_step": table.shape[1], "block_terms": c.channels * prod(p.kernel)}
        return s.fields() | fields | {
            "tasks": self.tasks, "scratch_step": self.scratch_bytes, "sums_at": self.sums_at,
            "images": p.n, "groups": p.groups, "group_c": p.group_c, "group_k": p.group_k,
            "rows": c.rows, "cols": c.cols, "image_block": c.images, "group_block": c.groups,
            "filter_block": c.filters, "channel_block": c.channels,
            "row_blocks": row_blocks, "col_blocks": col_blocks, "image_blocks": image_blocks,
            "group_blocks": group_blocks, "filter_blocks": filter_blocks,
            "pitch": self.pitch, "step": self.step, "flat": s.flat, "sums_pitch": self.sums_pitch,
            "filter_pad": self.filter_pad, "offsets": self.offsets(), "steps_at": self.steps_at,
            "taps_h": p.kernel[0], "taps_w": p.kernel[1],
            "pack_block": self.pack_block, "pack_blocks": ceil_div(p.group_k, self.pack_block),
        }  # fmt: skip

    def offsets(self) -> np.ndarray:
        """(channels, R, S) int64, flat: where each term of a block of gemm_k reads in the packed tile."""
        p = self.problem
        channel = np.arange(self.config.channels)[:, None, None]
        if self.in_place:
            r, s = np.ogrid[: p.kernel[0], : p.kernel[1]]
            taps = (r * p.dilation[0] * p.spatial[1] + s * p.dilation[1])[None]
            distance = p.spatial[0] * p.spatial[1]
        elif self.whole_pixels:
            taps = self.packed.row_shifts[None, :, None] * self.step
            taps = taps + np.arange(p.kernel[1]) * (p.dilation[1] * self.config.channels)
            distance = 1
        else:
            taps = self.packed.tap_shifts[None] * self.step
            distance = 1 if p.layout == "nhwc" else self.packed.planes * self.packed.plane
        terms = (taps + channel * distance).astype(np.int64)
        if self.config.pieces:
            # In the order (R, S, channels), and those of a last block with fewer channels.
            blocks = (terms, terms[: p.group_c % self.config.channels])
            return np.concatenate([np.moveaxis(block, 0, -1).reshape(-1) for block in blocks])
        return np.ascontiguousarray(terms.reshape(-1))


def candidates(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """With filters in panels, and in place where tiles can read them so; on pairs of channels where they are taken."""
    if takes_pairs(problem, device):
        for config in in_panels(paired(problem), device):
            yield replace(config, pairs=True)
        return
    lanes = lanes_of(problem, device)
    # Of such tiles LLVM spills sums on NEON.
    in_place = problem.itemsize == problem.accumulator_bytes and device.vector_bytes > 16
    first, second, *_ = (m for m, _ in tile.shapes(target(settings.cpu_target())) if m <= IN_PLACE_M)
    for config in in_panels(problem, device):
        yield config
        if config.pieces:
            continue
        over_pixels = config.lanes == "pixels"
        if in_place and (config.m in (first, second) if over_pixels else problem.group_k % lanes == 0):
            yield replace(config, panels=False)


def in_panels(problem: ConvProblem, device: Device) -> Iterator[Config]:
    lanes = lanes_of(problem, device)
    p, q = problem.output
    share, worth = share_seen(problem), WORTH_LEAVING_OUT if max(p, q) <= MOST_CUT else 0.0
    image_blocks = {1, min(problem.n, max(1, 256 // max(1, p * q)))}
    for way in lanes_ways(problem, lanes):
        tiles = tile.shapes(target(settings.cpu_target()), way, device.split_loads)
        routes = straight_routes(problem, way)
        # Few terms and long rows never gain by sums of their own.
        if not routes or problem.gemm_k > BLOCK_TERMS or q < 8 * lanes:
            routes.append("sums")
        blocks = list(product(routes, channel_blocks(problem)))
        for m, n in tiles:
            # Lanes over channels: m counts pixels, so only the squarer tiles make sense.
            if way == "channels" and (n * lanes >= 2 * problem.group_k or m < 3) and (m, n) != tiles[0]:
                continue
            if way == "pixels" and (m >= 2 * problem.group_k or (m < 3 and m < problem.group_k)):
                continue
            for rows, cols in task_sizes(p, q, device.threads, n * lanes):
                for filters in splits(problem.group_k, m if way == "pixels" else n * lanes, device.threads):
                    for (route, channels), groups in product(blocks, group_blocks(problem, device.threads)):
                        for images in image_blocks if route == "sums" else (1,):
                            config = Config(route, way, m, n, rows, cols, images, groups, filters, channels)
                            g = Geometry(problem, config, device)
                            # Short pieces in place leave no next pixels to prefetch.
                            least = min(q, 8 * n * lanes) if route == "in place" else 1
                            if cols < least or (route != "sums" and g.shortest_run < lanes):
                                continue
                            if g.scratch_bytes <= SCRATCH_BYTES or (rows, cols) == (1, min(q, n * lanes)):
                                yield config
                                if route == "sums" and way == "channels" and share * cols / g.pitch < worth:
                                    yield replace(config, pieces=True)


def lanes_ways(problem: ConvProblem, lanes: int) -> list[str]:
    """Lanes over pixels for NCHW; over channels for NHWC, for small images, whose rows leave lanes empty, and where
    many taps see padding: only they leave them out."""
    if problem.layout == "nhwc":
        return ["channels"]
    small = problem.output[0] * problem.output[1] <= 40 * lanes
    return ["pixels", "channels"] if small or share_seen(problem) < MUCH_PADDING else ["pixels"]


def straight_routes(problem: ConvProblem, way: str) -> list[str]:
    """The routes besides "sums" that a problem can take."""
    if problem.layout != "nchw" or way != "pixels":
        return []
    # Sums do not wait in a y of 16 bits.
    if problem.widened:
        return ["straight"] if channel_blocks(problem) == [problem.group_c] else []
    as_it_lies = set(problem.stride) == {1} and not any(map(any, problem.padding))
    return ["straight", "in place"] if as_it_lies else ["straight"]


def channel_blocks(problem: ConvProblem) -> list[int]:
    """Channels in a block of gemm_k: even blocks of about BLOCK_TERMS terms."""
    taps = problem.kernel[0] * problem.kernel[1]
    blocks = max(1, round(problem.gemm_k / BLOCK_TERMS))
    counts = (blocks, ceil_div(blocks, 2), 2 * blocks)
    sizes = {ceil_div(problem.group_c, min(count, problem.group_c)) for count in counts}
    return sorted(size for size in sizes if size * taps <= 2 * BLOCK_TERMS or size == 1)


def group_blocks(problem: ConvProblem, threads: int) -> list[int]:
    """Groups that one task goes through."""
    counts = {1, ceil_div(problem.groups, 4 * threads), ceil_div(problem.groups, 16 * threads)}
    return sorted(counts) if problem.group_k < 64 else [1]


def task_sizes(p: int, q: int, threads: int, tile_lanes: int) -> list[tuple[int, int]]:
    """(rows, cols) of tasks: whole images, even bands of rows, and for long rows pieces of them."""
    sizes = set()
    for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128):
        rows = ceil_div(p, min(p, count * max(1, threads // 2)))
        sizes.add((rows, q))
    if p == 1 or q > 2048:
        for count in (2, 4, 6, 8, 12, 16, 32, 64, 128):
            cols = ceil_div(ceil_div(q, count), tile_lanes) * tile_lanes
            if cols < q:
                sizes |= {(1, cols), (min(p, 4), cols)}
    sizes.add((1, min(q, tile_lanes)))
    return sorted(sizes)
