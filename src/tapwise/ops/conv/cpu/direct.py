"""cpu.direct: convolution as a matrix product whose matrix is never built.

Three routes, a config's `route`:
- "sums": each task packs the strip of the input that it needs (`strips`), block of channels by block of channels, runs
  register tiles over it (`tile`), and finishes its rows with bias, residual and activation while they are in cache;
- "straight": sums live in registers and, between blocks of gemm_k, in y itself;
- "in place": straight, from an input without padding and stride that is read where it lies.
Lanes run over pixels (NCHW) or over output channels (NHWC, and images of a few pixels).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit, tile
from tapwise.cpu.common import arithmetic, ceil_div, splits
from tapwise.cpu.cost import CACHE_RATES, Costs
from tapwise.cpu.epilogue import Epilogue
from tapwise.cpu.plan import COMMON, Fields, KernelPlan
from tapwise.cpu.simd import INT, Kernel, Target, target
from tapwise.ops.conv.cpu.strips import Strip, Window, emit_finish_row, emit_pack_pixels, emit_pack_plane, emit_zeros
from tapwise.ops.conv.problem import ConvProblem

# Terms of gemm_k in one block: a panel of filters and the input that it meets stay in L1.
BLOCK_TERMS: Final = 320
# Activations cheap enough to stand in every tile.
STRAIGHT_ACTIVATIONS: Final = (None, "relu", "relu6")
SCRATCH_BYTES: Final = 4 << 20

FIELDS: Final = (
    *COMMON, "sums_at", "offsets", "columns", "row_starts",
    "images", "groups", "group_c", "group_k", "h", "w_in", "p", "q", "stride_h", "stride_w",
    "row_phases", "col_phases",
    "rows", "cols", "image_block", "group_block", "filter_block", "channel_block",
    "row_strips", "col_strips", "image_blocks", "group_blocks", "filter_blocks",
    "taps", "pitch", "plane", "row_shift", "step", "flat", "sums_pitch", "filter_pad",
)  # fmt: skip


@dataclass(frozen=True)
class Config(BaseConfig):
    """route "sums", "straight" or "in place"; lanes "pixels" or "channels"; the register tile m x n; the strip: rows x
    cols outputs of `images` images, `filters` output channels of `groups` groups a task; `channels` of the input a
    block of gemm_k."""

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


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, route: str, lanes: str, m: int, n: int, bias: bool,
    residual: bool, activation: str | None,
) -> Kernel:  # fmt: skip
    """The kernels of one instance: `task` and `pack_task`."""
    k = Kernel(target, dtype)
    planar = layout == "nchw"
    tile.emit_filter_packer(k, lanes, storage, m if lanes == "pixels" else n * k.lanes)
    if route != "in place":
        _emit_pack_strip(k, storage, planar)
    if route == "sums":
        tile.emit(k, m, n, lanes)
        per_run = "one" if planar else "each"
        emit_finish_row(k, storage, per_run if bias else None, residual, activation)
        _emit_finish_strip(k, storage, planar, lanes)
        _emit_task(k, storage, lanes)
    else:
        tile.emit_straight(k, m, n, Epilogue(k, storage, planar, bias, residual, activation), route == "in place")
        _emit_straight_task(k, storage, route == "in place")
    _emit_filter_task(k, storage)
    return k


def _emit_pack_strip(k: Kernel, storage: str, planar: bool) -> None:
    """pack_strip(args, packed, image, channel, channels, p0, q0, rows): one image's planes of a block of channels.

    Only what lies inside the input is written: the rest of `packed` is zero already.
    """
    with k.function(
        "pack_strip", args="i64", packed=k.dtype, image=INT, channel=INT, channels=INT, p0=INT, q0=INT, rows=INT
    ) as (args, packed, image, channel, channels, p0, q0, rows):  # fmt: skip
        a = Fields(k, args, FIELDS)
        window = Window(
            p0, q0, rows + a.row_shift, a.pointer("row_starts", "i64"), a.pointer("columns", "i64"), a.row_phases,
            a.col_phases, a.stride_h, a.stride_w, a.h, a.w_in, a.pitch, a.plane,
        )  # fmt: skip
        total_c = a.group_c * a.groups
        x = a.pointer("x", storage)
        if planar:
            size = a.row_phases * a.col_phases * a.plane
            with k.loop(0, channels) as c:
                source = x + (image * total_c + channel + c) * (a.h * a.w_in)
                emit_pack_plane(k, window, source, packed + c * size)
        else:
            source = x + image * (a.h * a.w_in) * total_c + channel
            emit_pack_pixels(k, window, source, packed, channels, a.step, total_c)


def _emit_finish_strip(k: Kernel, storage: str, planar: bool, lanes: str) -> None:
    """finish_strip(args, sums, image, k0, filters, p0, q0, rows, cols): one image's sums, to y."""
    with k.function(
        "finish_strip", args="i64", sums=k.dtype, image=INT, k0=INT, filters=INT, p0=INT, q0=INT, rows=INT, cols=INT
    ) as (args, sums, image, k0, filters, p0, q0, rows, cols):  # fmt: skip
        a = Fields(k, args, FIELDS)
        y, bias, residual = (a.pointer(name, storage) for name in ("y", "bias", "residual"))
        total_k = a.group_k * a.groups
        p, q, pitch, sums_pitch = a.p, a.q, a.pitch, a.sums_pitch
        # Distances of neighbouring filters and pixels in the sums.
        by_filter, by_pixel = (sums_pitch, k.integer(1)) if lanes == "pixels" else (k.integer(1), sums_pitch)
        if planar:
            with k.loop(0, filters) as f, k.loop(0, rows) as row:
                at = ((image * total_k + k0 + f) * p + p0 + row) * q + q0
                here = sums + f * by_filter + row * pitch * by_pixel
                k.call("finish_row", here, by_pixel, bias + k0 + f, residual + at, y + at, cols)
        else:
            with k.loop(0, rows) as row, k.loop(0, cols) as col:
                at = ((image * p + p0 + row) * q + q0 + col) * total_k + k0
                here = sums + (row * pitch + col) * by_pixel
                k.call("finish_row", here, by_filter, bias + k0, residual + at, y + at, filters)


def _emit_task(k: Kernel, storage: str, lanes: str) -> None:
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        packed = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        sums = packed + a.sums_at
        w, offsets = a.pointer("w", k.dtype), a.pointer("offsets", "i64")
        planes = a.plane * a.row_phases * a.col_phases
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            row_strip, number = number % a.row_strips, number // a.row_strips
            col_strip, number = number % a.col_strips, number // a.col_strips
            image_block, number = number % a.image_blocks, number // a.image_blocks
            filter_block, group_block = number % a.filter_blocks, number // a.filter_blocks
            p0, q0 = row_strip * a.rows, col_strip * a.cols
            rows, cols = (a.p - p0).min(a.rows), (a.q - q0).min(a.cols)
            image0, group0 = image_block * a.image_block, group_block * a.group_block
            images = (a.images - image0).min(a.image_block)
            k0 = filter_block * a.filter_block
            filters = (a.group_k - k0).min(a.filter_block)
            pixels = (rows - 1) * a.pitch + cols
            vectors = ((pixels if lanes == "pixels" else filters) + (k.lanes - 1)) // k.lanes
            size = a.channel_block * planes
            # All blocks of channels and groups of a task have their borders at the same places.
            emit_zeros(k, packed, images * size)
            with k.loop(group0, (group0 + a.group_block).min(a.groups)) as group:
                panels = w + group * a.group_c * a.taps * a.filter_pad
                with k.loop(0, a.group_c, a.channel_block) as channel:
                    channels = (a.group_c - channel).min(a.channel_block)
                    with k.loop(0, images) as image:
                        k.call(
                            "pack_strip", args, packed + image * size, image0 + image, group * a.group_c + channel,
                            channels, p0, q0, rows,
                        )  # fmt: skip
                    terms = channels * a.taps
                    panel = panels + channel * a.taps * a.filter_pad + k0 * terms
                    with k.loop(0, images) as image:
                        k.call(
                            "block", packed + image * size, a.step, offsets, terms, panel,
                            sums + image * a.flat * (1 if lanes == "pixels" else a.sums_pitch), a.sums_pitch,
                            filters if lanes == "pixels" else pixels, vectors, channel > 0,
                        )  # fmt: skip
                with k.loop(0, images) as image:
                    k.call(
                        "finish_strip", args, sums + image * a.flat * (1 if lanes == "pixels" else a.sums_pitch),
                        image0 + image, group * a.group_k + k0, filters, p0, q0, rows, cols,
                    )  # fmt: skip


def _emit_straight_task(k: Kernel, storage: str, in_place: bool) -> None:
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        packed = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        x, y, w = a.pointer("x", storage), a.pointer("y", storage), a.pointer("w", k.dtype)
        bias, residual = a.pointer("bias", storage), a.pointer("residual", storage)
        offsets = a.pointer("offsets", "i64")
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            row_strip, number = number % a.row_strips, number // a.row_strips
            col_strip, number = number % a.col_strips, number // a.col_strips
            image, number = number % a.images, number // a.images
            filter_block, group_block = number % a.filter_blocks, number // a.filter_blocks
            p0, q0 = row_strip * a.rows, col_strip * a.cols
            rows, cols = (a.p - p0).min(a.rows), (a.q - q0).min(a.cols)
            group0 = group_block * a.group_block
            k0 = filter_block * a.filter_block
            filters = (a.group_k - k0).min(a.filter_block)
            # Rows that follow each other in the input and in y are one line.
            whole = k.both(a.pitch.eq(a.q), a.cols.eq(a.q))
            lines, length = k.select(whole, k.integer(1), rows), k.select(whole, rows * a.q, cols)
            if not in_place:
                emit_zeros(k, packed, a.channel_block * a.plane * a.row_phases * a.col_phases)
            with k.loop(group0, (group0 + a.group_block).min(a.groups)) as group:
                filter_ = group * a.group_k + k0
                panels = w + group * a.group_c * a.taps * a.filter_pad
                at = ((image * a.groups * a.group_k + filter_) * a.p + p0) * a.q + q0
                with k.loop(0, a.group_c, a.channel_block) as channel:
                    channels = (a.group_c - channel).min(a.channel_block)
                    terms = channels * a.taps
                    plane = group * a.group_c + channel
                    if in_place:
                        source = x.to(k.dtype) + ((image * a.groups * a.group_c + plane) * a.h + p0) * a.w_in + q0
                    else:
                        k.call("pack_strip", args, packed, image, plane, channels, p0, q0, rows)
                        source = packed
                    panel = panels + channel * a.taps * a.filter_pad + k0 * terms
                    with k.loop(0, lines) as line:
                        here = at + line * a.q
                        k.call(
                            "line", source + line * a.pitch, offsets, terms, panel, bias + filter_, residual + here,
                            y + here, a.p * a.q, channel > 0, channel + channels >= a.group_c, filters, length,
                        )  # fmt: skip


def _emit_filter_task(k: Kernel, storage: str) -> None:
    """`pack_task`: all filters into panels; a task is one block of channels of one group."""
    with k.function("pack_task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        w, packed = a.pointer("x", storage), a.pointer("w", k.dtype)
        blocks = (a.group_c + (a.channel_block - 1)) // a.channel_block
        length = a.group_c * a.taps
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            filter_block, number = number % a.filter_blocks, number // a.filter_blocks
            block, group = number % blocks, number // blocks
            k0 = filter_block * a.filter_block
            filters = (a.group_k - k0).min(a.filter_block)
            channel = block * a.channel_block
            terms = (a.group_c - channel).min(a.channel_block) * a.taps
            source = w + (group * a.group_k + k0) * length + channel * a.taps
            out = packed + group * length * a.filter_pad + channel * a.taps * a.filter_pad + k0 * terms
            k.call("pack_filters", source, length, terms, out, filters)


class Geometry:
    """Sizes and tables of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, lanes: int) -> None:
        self.problem, self.config, self.lanes = problem, config, lanes
        self.strip = Strip(problem, config.rows, config.cols, lanes)
        # Pixel-major packing keeps the channels of a pixel together.
        self.step = 1 if problem.layout == "nchw" else config.channels
        pad = lanes if config.lanes == "channels" else 1
        self.filter_pad = ceil_div(problem.group_k, pad) * pad
        filters = ceil_div(config.filters, pad) * pad
        sums = config.images * self.strip.flat * filters
        self.sums_pitch = config.images * self.strip.flat if config.lanes == "pixels" else filters
        self.sums_at = ceil_div(config.images * config.channels * self.strip.planes * self.strip.plane, 16) * 16
        itemsize = 8 if problem.dtype == "f64" else 4
        self.in_place = config.route == "in place"
        self.pitch = problem.spatial[1] if self.in_place else self.strip.pitch
        if config.route != "sums":
            sums = 0
        # What the last vector of a pixel-major or narrow strip reads beyond the packed input.
        self.scratch_bytes = 0 if self.in_place else ceil_div((self.sums_at + sums + 64) * itemsize, 64) * 64

    @property
    def line(self) -> int:
        """Fewest pixels of a line of the straight routes: a row, or a strip whose rows follow each other."""
        p, q = self.problem.output
        rows, cols = (
            size - (ceil_div(size, part) - 1) * part for size, part in ((p, self.config.rows), (q, self.config.cols))
        )
        return q * rows if self.pitch == q == self.config.cols else cols

    def fields(self) -> dict[str, Any]:
        p, c, s = self.problem, self.config, self.strip
        row_strips, col_strips = ceil_div(p.output[0], c.rows), ceil_div(p.output[1], c.cols)
        image_blocks, group_blocks = ceil_div(p.n, c.images), ceil_div(p.groups, c.groups)
        filter_blocks = ceil_div(p.group_k, c.filters)
        return {
            "tasks": row_strips * col_strips * image_blocks * group_blocks * filter_blocks,
            "scratch_step": self.scratch_bytes, "sums_at": self.sums_at,
            "images": p.n, "groups": p.groups, "group_c": p.group_c, "group_k": p.group_k,
            "h": p.spatial[0], "w_in": p.spatial[1], "p": p.output[0], "q": p.output[1],
            "stride_h": p.stride[0], "stride_w": p.stride[1],
            "row_phases": len(s.row_phases), "col_phases": len(s.col_phases),
            "rows": c.rows, "cols": c.cols, "image_block": c.images, "group_block": c.groups,
            "filter_block": c.filters, "channel_block": c.channels,
            "row_strips": row_strips, "col_strips": col_strips, "image_blocks": image_blocks,
            "group_blocks": group_blocks, "filter_blocks": filter_blocks,
            "taps": p.kernel[0] * p.kernel[1], "pitch": self.pitch, "plane": s.plane, "row_shift": s.row_shift,
            "step": self.step, "flat": s.flat, "sums_pitch": self.sums_pitch, "filter_pad": self.filter_pad,
        }  # fmt: skip

    def tables(self) -> dict[str, np.ndarray]:
        """int64 arrays. offsets (channels, R, S): where each term of a block of gemm_k reads in the packed strip."""
        p = self.problem
        channel = np.arange(self.config.channels)[:, None, None]
        if self.in_place:
            r, s = np.ogrid[: p.kernel[0], : p.kernel[1]]
            taps = (r * p.dilation[0] * p.spatial[1] + s * p.dilation[1])[None]
            distance = p.spatial[0] * p.spatial[1]
        else:
            taps = self.strip.tap_shifts[None] * self.step
            distance = 1 if p.layout == "nhwc" else self.strip.planes * self.strip.plane
        return {
            "offsets": np.ascontiguousarray((taps + channel * distance).reshape(-1).astype(np.int64)),
            "columns": np.array(self.strip.col_data, np.int64),
            "row_starts": np.array([phase - self.problem.padding[0][0] for phase in self.strip.row_phases], np.int64),
        }


class Direct(Algorithm[Config]):
    """Register-blocked direct convolution; any filter, stride, dilation and groups.

    float32, float64, float16 (computed in float32); NCHW and NHWC. Exact on integers that float32 holds.
    """

    id: ClassVar[str] = "cpu.direct"
    summary: ClassVar[str] = "register tiles over a packed strip; lanes over pixels or channels"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """Every sensible blocking, the one with the shortest predicted time first."""
        every = list(dict.fromkeys(self._candidates(problem, device)))
        return sorted(every, key=lambda config: self.predict_us(problem, config, device))

    def _candidates(self, problem: ConvProblem, device: Device) -> Iterator[Config]:
        lanes = device.vector_bytes // (8 if problem.dtype == "f64" else 4)
        p, q = problem.output
        image_blocks = {1, min(problem.n, max(1, 256 // max(1, p * q)))}
        for way in lanes_ways(problem, lanes):
            tiles = tile.shapes(target(settings.cpu_target()), way)
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
                for rows, cols in strip_sizes(p, q, device.threads, n * lanes):
                    for filters in splits(problem.group_k, m if way == "pixels" else n * lanes, device.threads):
                        for (route, channels), groups in product(blocks, group_blocks(problem, device.threads)):
                            for images in image_blocks if route == "sums" else (1,):
                                config = Config(route, way, m, n, rows, cols, images, groups, filters, channels)
                                g = Geometry(problem, config, lanes)
                                # Short pieces in place leave no next pixels to prefetch.
                                least = min(q, 8 * n * lanes) if route == "in place" else 1
                                if cols < least or (route != "sums" and g.line < lanes):
                                    continue
                                if g.scratch_bytes <= SCRATCH_BYTES or (rows, cols) == (1, min(q, n * lanes)):
                                    yield config

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Cycles of one task's packing, tiles and finishing (`cost`), times the tasks that one worker draws."""
        geometry = Geometry(problem, config, device.vector_bytes // (8 if problem.dtype == "f64" else 4))
        costs = Costs(device, 8 if problem.dtype == "f64" else 4)
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

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """About a nanosecond an element: each is loaded and stored alone."""
        return 8.0 + problem.k * problem.gemm_k * 1.2e-3 / device.threads

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        geometry = Geometry(problem, config, device.vector_bytes // (8 if problem.dtype == "f64" else 4))
        return geometry.scratch_bytes * max(1, min(device.threads, geometry.fields()["tasks"]))

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        vector = target(settings.cpu_target())
        dtype = arithmetic(problem)
        library = jit.load(
            "direct", generate, vector, dtype=dtype, storage=problem.dtype, layout=problem.layout, route=config.route,
            lanes=config.lanes, m=config.m, n=config.n, bias=problem.bias, residual=problem.residual,
            activation=problem.activation,
        )  # fmt: skip
        geometry = Geometry(problem, config, vector.lanes(dtype))
        fields = geometry.fields()
        blocks = ceil_div(problem.group_c, config.channels)
        return KernelPlan(
            problem, device, library, FIELDS, fields | geometry.tables(),
            packed_size=problem.c * fields["taps"] * fields["filter_pad"],
            pack_tasks=problem.groups * blocks * fields["filter_blocks"],
        )  # fmt: skip


def lanes_ways(problem: ConvProblem, lanes: int) -> list[str]:
    """Lanes over pixels for NCHW, over channels for NHWC and for small images, whose rows leave lanes empty."""
    if problem.layout == "nhwc":
        return ["channels"]
    return ["pixels", "channels"] if problem.output[0] * problem.output[1] <= 40 * lanes else ["pixels"]


def straight_routes(problem: ConvProblem, way: str) -> list[str]:
    """The routes besides "sums" that a problem can take."""
    if problem.layout != "nchw" or way != "pixels" or problem.activation not in STRAIGHT_ACTIVATIONS:
        return []
    # Sums do not wait in a y of float16.
    if problem.dtype == "f16":
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


def strip_sizes(p: int, q: int, threads: int, tile_lanes: int) -> list[tuple[int, int]]:
    """(rows, cols) of strips: whole images, even bands of rows, and for long rows pieces of them."""
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
