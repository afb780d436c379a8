"""cpu.depthwise: one input channel a group, filters of any size.

There is no sum over channels, so nothing is worth blocking but the picture: a tile of outputs stays in registers over
all taps and goes straight to y with bias, residual and activation. NCHW (`planes`): lanes over the pixels of a row;
planes are packed (`strips`) into two buffers in turn, so that a plane has left the store buffer before it is read.
NHWC: lanes over channels, a tile is a run of pixels, and each tap one load a vector of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit
from tapwise.cpu.common import arithmetic, ceil_div
from tapwise.cpu.cost import Costs
from tapwise.cpu.epilogue import Epilogue
from tapwise.cpu.plan import COMMON, Fields, KernelPlan
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target, target
from tapwise.ops.conv.cpu.planes import WEIGHTS, emit_strip, groups, tiles
from tapwise.ops.conv.cpu.strips import Strip, Window, emit_pack_pixels, emit_pack_plane, emit_zeros
from tapwise.ops.conv.problem import ConvProblem

FIELDS: Final = (
    *COMMON, "offsets", "columns", "row_starts",
    "images", "channels", "multiplier", "h", "w_in", "p", "q", "stride_h", "stride_w",
    "row_phases", "col_phases", "row_strips", "channel_block", "channel_blocks",
    "taps", "taps_h", "taps_w", "pitch", "plane", "row_shift", "buffer",
)  # fmt: skip

# NHWC: (pixels, vectors of channels) by number of vector registers.
_RUNS: Final = {
    16: ((7, 1), (6, 1), (5, 2), (5, 1), (4, 2), (4, 1), (3, 4), (1, 8), (1, 1)),
    32: ((7, 3), (7, 2), (7, 1), (6, 4), (6, 2), (6, 1), (5, 2), (5, 1), (4, 4), (4, 1), (1, 8), (1, 1)),
}


@dataclass(frozen=True)
class Config(BaseConfig):
    """Register tile: `rows` x `vectors` (NCHW), or a run of `rows` pixels x `vectors` of channels (NHWC); a task is a
    strip of `strip` output rows of `channels` channels."""

    rows: int
    vectors: int
    strip: int
    channels: int


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, rows: int, vectors: int, taps_h: int, stride_h: int,
    dilation_h: int, bias: bool, residual: bool, activation: str | None,
) -> Kernel:  # fmt: skip
    """The kernels of one instance: `task` and `pack_task`. NHWC does not ask for the filter's rows."""
    k = Kernel(target, dtype)
    planar = layout == "nchw"
    epilogue = Epilogue(k, storage, planar, bias, residual, activation)
    _emit_pack(k, storage, planar, vectors)
    if planar:
        emit_strip(k, FIELDS, epilogue, rows, vectors, taps_h, stride_h, dilation_h)
    else:
        for count in sorted({rows, 1}):
            _emit_run(k, epilogue, count, vectors)
        _emit_pixels(k, storage, rows, vectors)
    _emit_task(k, storage, planar, vectors)
    _emit_filters(k, storage, planar, vectors)
    return k


def _emit_run(k: Kernel, epilogue: Epilogue, pixels: int, vectors: int) -> None:
    """tile_R(x, offsets, taps, w, bias, residual, y, y_step, last): a run of R pixels, y_step apart in y.

    Pixels are a run of vectors of channels each, w one such run a tap. When last is not 0, only `last` channels are
    stored.
    """
    storage = epilogue.storage
    with k.function(
        f"tile_{pixels}", x=k.dtype, offsets="i64", taps=INT, w=k.dtype, bias=storage, residual=storage,
        y=storage, y_step=INT, last=INT,
    ) as (x, offsets, taps, w, bias, residual, y, y_step, last):  # fmt: skip
        width = vectors * k.lanes
        sums = [[k.var(k.constant(0.0)) for _ in range(vectors)] for _ in range(pixels)]
        with k.loop(0, taps) as kk:
            there = x + k.load_int(offsets + kk)
            for v in range(vectors):
                factor = k.load(w + kk * width + v * k.lanes)
                for row in range(pixels):
                    value = k.load(there + (width * row + v * k.lanes))
                    sums[row][v].set(k.fma(factor, value, sums[row][v].get()))
        for row in range(pixels):
            for v in range(vectors):
                value, at, bias_at = sums[row][v].get(), y_step * row + v * k.lanes, bias + v * k.lanes
                with k.if_else(last.eq(0)) as (full, part):
                    with full:
                        k.store(y + at, epilogue.finish(value, bias_at, residual + at))
                    with part:
                        epilogue.store_some(value, bias, residual + at, y + at, v * k.lanes, last)


def _emit_pack(k: Kernel, storage: str, planar: bool, vectors: int) -> None:
    """pack(args, out, x, p0, rows, channels): one strip of a channel (NCHW) or of a few neighbouring channels (NHWC).

    Only what lies inside the input is written: the buffers' borders are zero already.
    """
    width = 1 if planar else vectors * k.lanes
    with k.function(
        "pack", args="i64", out=k.dtype, x=storage, p0=INT, rows=INT, channels=INT
    ) as (args, out, x, p0, rows, channels):  # fmt: skip
        a = Fields(k, args, FIELDS)
        window = Window(
            p0, k.integer(0), rows + a.row_shift, a.pointer("row_starts", "i64"), a.pointer("columns", "i64"),
            a.row_phases, a.col_phases, a.stride_h, a.stride_w, a.h, a.w_in, a.pitch, a.plane,
        )  # fmt: skip
        if planar:
            emit_pack_plane(k, window, x, out)
        else:
            emit_pack_pixels(k, window, x, out, channels, k.integer(width), a.channels)


def _emit_pixels(k: Kernel, storage: str, pixels: int, vectors: int) -> None:
    """strip(args, packed, w, bias, residual, y, height, channels): all runs of one packed strip of `channels`."""
    with k.function(
        "strip", args="i64", packed=k.dtype, w=k.dtype, bias=storage, residual=storage, y=storage, height=INT,
        channels=INT,
    ) as (args, packed, w, bias, residual, y, height, channels):  # fmt: skip
        a = Fields(k, args, FIELDS)
        offsets = a.pointer("offsets", "i64")
        width = vectors * k.lanes
        last = k.select(channels.eq(width), k.integer(0), channels)
        with k.loop(0, height) as p:

            def run(q: Int, count: int, p: Int = p) -> None:
                at = (p * a.q + q) * a.channels
                k.call(
                    f"tile_{count}", packed + (p * a.pitch + q) * width, offsets, a.taps, w, bias, residual + at,
                    y + at, a.channels, last,
                )  # fmt: skip

            # The last run overlaps the one before; rows shorter than a run go pixel by pixel.
            with k.if_else(a.q >= pixels) as (long, short):
                with long, k.loop(0, a.q, pixels) as q:
                    run(q.min(a.q - pixels), pixels)
                with short, k.loop(0, a.q) as q:
                    run(q, 1)


def _emit_task(k: Kernel, storage: str, planar: bool, vectors: int) -> None:
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        scratch = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        x, y, w = a.pointer("x", storage), a.pointer("y", storage), a.pointer("w", k.dtype)
        bias, residual = a.pointer("bias", storage), a.pointer("residual", storage)
        width = 1 if planar else vectors * k.lanes
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            strip, number = number % a.row_strips, number // a.row_strips
            block, image = number % a.channel_blocks, number // a.channel_blocks
            p0 = strip * a.p // a.row_strips
            rows = (strip + 1) * a.p // a.row_strips - p0
            first = block * a.channel_block
            end = (first + a.channel_block).min(a.channels)
            emit_zeros(k, scratch, a.buffer * 2)

            def source(c: Int) -> Ptr:
                return x + (
                    (image * a.channels + c) * a.h * a.w_in if planar else image * a.h * a.w_in * a.channels + c
                )

            def packed(c: Int) -> Ptr:
                return scratch + ((c - first) // width % 2) * a.buffer

            def across(c: Int) -> Int:
                return (end - c).min(width)

            def window(c: Int) -> Ptr:
                """Where the strip's rows of a channel start; only a hint, so borders do not matter."""
                return source(c.min(end - 1)) + p0 * a.stride_h * a.w_in

            k.call("pack", args, packed(first), source(first), p0, rows, across(first))
            with k.loop(first, end, width) as c:
                following = c + width
                with k.if_(following < end):
                    k.call("pack", args, packed(following), source(following), p0, rows, across(following))
                if planar:
                    with k.loop(0, a.multiplier) as index:
                        filter_ = c * a.multiplier + index
                        at = ((image * a.channels * a.multiplier + filter_) * a.p + p0) * a.q
                        k.call(
                            "strip", args, packed(c), w + filter_ * a.taps, bias + filter_, residual + at, y + at,
                            rows, window(c + 2),
                        )  # fmt: skip
                else:
                    at = (image * a.p + p0) * a.q * a.channels + c
                    k.call(
                        "strip", args, packed(c), w + c * a.taps, bias + c, residual + at, y + at, rows, across(c),
                    )  # fmt: skip


def _emit_filters(k: Kernel, storage: str, planar: bool, vectors: int) -> None:
    """`pack_task`: NCHW (k, S, R); NHWC (k / width, taps, width), the last run filled up with zeros."""
    width = 1 if planar else vectors * k.lanes
    with k.function("pack_task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        w, packed = a.pointer("x", storage), a.pointer("w", k.dtype)
        with k.draws(a.counter, a.tasks, worker, a.workers):
            if planar:
                with k.loop(0, a.channels * a.multiplier * a.taps, a.taps) as first:
                    with k.loop(0, a.taps_h) as r, k.loop(0, a.taps_w) as s:
                        k.store(packed + first + s * a.taps_h + r, k.load(w + first + r * a.taps_w + s, 1))
            else:
                with k.loop(0, a.channels, width) as c, k.loop(0, a.taps) as kk:
                    here = packed + c * a.taps + kk * width
                    emit_zeros(k, here, k.integer(width))
                    with k.loop(0, (a.channels - c).min(width)) as i:
                        k.store(here + i, k.load(w + (c + i) * a.taps + kk, 1))


class Geometry:
    """Sizes and tables of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, lanes: int) -> None:
        self.problem, self.config, self.lanes = problem, config, lanes
        self.planar = problem.layout == "nchw"
        self.strip = Strip(problem, config.strip, problem.output[1], lanes)
        self.width = 1 if self.planar else config.vectors * lanes
        # One more vector than the strip: the last tile of a narrow row reads beyond its pitch.
        self.plane = self.strip.plane + config.vectors * lanes if self.planar else self.strip.plane
        self.buffer = ceil_div(self.strip.planes * self.plane * self.width + lanes, 32) * 32 + 16
        self.scratch_bytes = ceil_div(2 * self.buffer * (8 if problem.dtype == "f64" else 4), 64) * 64

    def tasks(self) -> int:
        p, c = self.problem, self.config
        return ceil_div(p.output[0], c.strip) * ceil_div(p.c, c.channels) * p.n

    def fields(self) -> dict[str, int | np.ndarray]:
        p, c, s = self.problem, self.config, self.strip
        # Planes find the filter's rows themselves: a table of its columns is enough.
        shifts = s.tap_shifts[:1] if self.planar else s.tap_shifts
        index, rest = np.divmod(shifts, s.plane)
        offsets = (index * self.plane + rest) * self.width
        return {
            "tasks": self.tasks(), "scratch_step": self.scratch_bytes,
            "images": p.n, "channels": p.c, "multiplier": p.group_k, "h": p.spatial[0], "w_in": p.spatial[1],
            "p": p.output[0], "q": p.output[1], "stride_h": p.stride[0], "stride_w": p.stride[1],
            "row_phases": len(s.row_phases), "col_phases": len(s.col_phases),
            "row_strips": ceil_div(p.output[0], c.strip),
            "channel_block": c.channels, "channel_blocks": ceil_div(p.c, c.channels),
            "taps": p.kernel[0] * p.kernel[1], "taps_h": p.kernel[0], "taps_w": p.kernel[1],
            "pitch": s.pitch, "plane": self.plane, "row_shift": s.row_shift,
            "buffer": self.buffer,
            "offsets": np.ascontiguousarray(offsets.reshape(-1).astype(np.int64)),
            "columns": np.array(s.col_data, np.int64),
            "row_starts": np.array([phase - p.padding[0][0] for phase in s.row_phases], np.int64),
        }  # fmt: skip


class Depthwise(Algorithm[Config]):
    """Depthwise convolution, filters of any size and stride, any number of outputs a channel (NCHW).

    float32, float64, float16 (computed in float32); exact on integers that float32 holds.
    """

    id: ClassVar[str] = "cpu.depthwise"
    summary: ClassVar[str] = "one channel a group; register tiles of rows straight to y"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise:
            return f"takes one input channel a group and several groups, not {problem.group_c} and {problem.groups}"
        if problem.layout == "nhwc" and problem.group_k != 1:
            return f"takes one output a channel in nhwc, not {problem.group_k}"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        every = list(dict.fromkeys(self._candidates(problem, device)))
        return sorted(every, key=lambda config: self.predict_us(problem, config, device))

    def _candidates(self, problem: ConvProblem, device: Device) -> Iterator[Config]:
        lanes = device.vector_bytes // (8 if problem.dtype == "f64" else 4)
        p, q = problem.output
        planar = problem.layout == "nchw"
        registers = target(settings.cpu_target()).registers
        shape = problem.kernel[0], problem.stride[0], problem.dilation[0]
        for rows, vectors in tiles(registers, *shape) if planar else _RUNS[registers]:
            if planar and (rows > p or (vectors > 1 and vectors * lanes > q)):
                continue
            if not planar and (rows > q or (vectors > 1 and (vectors - 1) * lanes >= problem.c)):
                continue
            width = 1 if planar else vectors * lanes
            for strip in sorted({p, *(max(rows, ceil_div(p, count)) for count in (2, 4, 8, 16, 32))}):
                # Strips are as even as can be, and a tile must fit the smallest.
                if strip > p or (planar and p // ceil_div(p, strip) < rows):
                    continue
                for count in (1, *(count * device.threads for count in (1, 2, 4, 8, 16))):
                    channels = ceil_div(ceil_div(problem.c, count), width) * width
                    config = Config(rows, vectors, strip, channels)
                    if Geometry(problem, config, lanes).scratch_bytes <= 4 << 20 or strip == rows:
                        yield config

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Cycles of one task: for each channel (or run of channels) its packing, and for each tile its products, loads
        and stores (`cost`); times the tasks that one worker draws."""
        itemsize = 8 if problem.dtype == "f64" else 4
        costs = Costs(device, itemsize)
        g = Geometry(problem, config, costs.lanes)
        taps = problem.kernel[0] * problem.kernel[1]
        q = problem.output[1]
        size = config.rows * config.vectors
        packed_rows = g.strip.planes * (config.strip + g.strip.row_shift)
        if g.planar:
            loads = 0
            for _, column in groups(problem.kernel[0], problem.stride[0], problem.dilation[0], WEIGHTS):
                reach = min(column[-1][1] - column[0][1] + config.rows, len(column) * config.rows)
                loads += len(column) + reach * config.vectors
            # Two products a cycle need eight sums in flight; half of the loads pass the end of a cache line.
            cycles = max(0.55 * taps * max(size, 8), 0.7 * problem.kernel[1] * loads)
            tile = cycles + 4 * problem.kernel[1] + 2.0 * size + 12
            across = ceil_div(q, config.vectors * costs.lanes)
            count = ceil_div(config.strip, config.rows) * across * problem.group_k
            if q < config.vectors * costs.lanes:
                tile += 2.0 * config.rows
            per_vector = {1: 2.0, 2: 2.5, 4: 4.0}.get(problem.stride[1], 1.5 * costs.lanes)
            pack = 30 + packed_rows * (2.0 + 0.7 * per_vector * ceil_div(g.strip.pitch, costs.lanes))
            runs = config.channels
        else:
            tile = taps * max(0.7 * size + 0.8, 4.0) + 3.0 * size + 22
            count = config.strip * ceil_div(q, config.rows)
            pack = packed_rows * g.strip.pitch * (4.0 + 2.0 * config.vectors)
            runs = ceil_div(config.channels, g.width)
        moved = (
            problem.spatial[0] * problem.spatial[1] + problem.k // problem.c * problem.output[0] * q
        ) * problem.itemsize
        share = config.strip / problem.output[0] * g.width
        memory = costs.stream(moved * share, problem.bytes)
        buffers = 2 * g.buffer * itemsize
        memory += costs.stream(buffers, buffers)
        zeros = 2 * g.buffer / costs.lanes
        task = runs * (pack + count * tile + 0.5 * memory) + zeros + 80
        return costs.wall_us(task, g.tasks(), device.threads)

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        return 5.0 + problem.k * problem.gemm_k * 1e-3

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        g = Geometry(problem, config, device.vector_bytes // (8 if problem.dtype == "f64" else 4))
        return g.scratch_bytes * max(1, min(device.threads, g.tasks()))

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        vector = target(settings.cpu_target())
        dtype = arithmetic(problem)
        names = ("taps_h", "stride_h", "dilation_h")
        sizes = (problem.kernel[0], problem.stride[0], problem.dilation[0]) if problem.layout == "nchw" else (0, 0, 0)
        shape = dict(zip(names, sizes, strict=True))
        library = jit.load(
            "depthwise", generate, vector, dtype=dtype, storage=problem.dtype, layout=problem.layout,
            rows=config.rows, vectors=config.vectors, **shape, bias=problem.bias, residual=problem.residual,
            activation=problem.activation,
        )  # fmt: skip
        g = Geometry(problem, config, vector.lanes(dtype))
        size = ceil_div(problem.k, g.width) * g.width * problem.gemm_k
        return KernelPlan(problem, device, library, FIELDS, g.fields(), packed_size=size, pack_tasks=1)
