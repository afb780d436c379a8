"""cpu.depthwise: one input channel a group, filters of any size.

There is no sum over channels, so nothing is worth blocking but the picture: a tile of `rows` x `vectors` outputs
stays in registers over all taps, each tap one broadcast and one load a vector, and goes straight to y with bias,
residual and activation. NCHW: lanes over the pixels of a row; planes are packed (`strips`) into two buffers in turn,
so that a plane has left the store buffer before it is read. NHWC: lanes over channels, a tile is a run of pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from llvmlite import ir

from tapwise import settings
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit
from tapwise.cpu.common import arithmetic, ceil_div, rejects_all
from tapwise.cpu.cost import Costs
from tapwise.cpu.epilogue import activate
from tapwise.cpu.plan import COMMON, Fields, KernelPlan
from tapwise.cpu.simd import BYTES, I32, INT, Int, Kernel, Ptr, Target, target
from tapwise.cpu.strips import Strip, Window, emit_pack_pixels, emit_pack_plane, emit_zeros
from tapwise.problem import ConvProblem

FIELDS: Final = (
    *COMMON, "offsets", "columns", "row_starts",
    "images", "channels", "multiplier", "h", "w_in", "p", "q", "stride_h", "stride_w",
    "row_phases", "col_phases", "strip_rows", "row_strips", "channel_block", "channel_blocks",
    "taps", "pitch", "plane", "row_shift", "buffer",
)  # fmt: skip

# (rows, vectors) by number of vector registers: rows * vectors sums and one broadcast.
_TILES: Final = {
    16: ((7, 2), (7, 1), (6, 2), (6, 1), (5, 2), (5, 1), (4, 3), (4, 2), (4, 1), (3, 4), (2, 5), (1, 8), (1, 1)),
    32: ((7, 3), (7, 2), (7, 1), (6, 4), (6, 2), (6, 1), (5, 5), (5, 2), (5, 1), (4, 6), (4, 3), (4, 1), (2, 8), (1,
    8), (1, 1)),
}  # fmt: skip


@dataclass(frozen=True)
class Config(BaseConfig):
    """Register tile: `rows` x `vectors` (NCHW), or a run of `rows` pixels x `vectors` of channels (NHWC); a task is a
    strip of `strip` output rows of `channels` channels."""

    rows: int
    vectors: int
    strip: int
    channels: int


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, rows: int, vectors: int, bias: bool, residual: bool,
    activation: str | None,
) -> Kernel:  # fmt: skip
    """The kernels of one instance: `task` and `pack_task`."""
    k = Kernel(target, dtype)
    planar = layout == "nchw"
    epilogue = _Epilogue(k, storage, planar, bias, residual, activation)
    for count in sorted({rows, 1}):
        _emit_tile(k, epilogue, count, vectors, planar)
    _emit_pack(k, storage, planar, vectors)
    _emit_strip(k, storage, rows, vectors, planar)
    _emit_task(k, storage, planar, vectors)
    _emit_filters(k, storage, planar, vectors)
    return k


@dataclass
class _Epilogue:
    """What happens to a vector of sums on its way to y."""

    k: Kernel
    storage: str
    planar: bool
    bias: bool
    residual: bool
    activation: str | None

    def finish(self, value: Any, bias: Ptr, residual: Ptr) -> Any:
        k = self.k
        lanes = k.lanes_of(value)
        if self.bias:
            value = k.add(value, k.broadcast(bias, lanes) if self.planar else k.load(bias, lanes))
        if self.residual:
            value = k.add(value, k.load(residual, lanes))
        return activate(k, self.activation, value)


def _emit_tile(k: Kernel, epilogue: _Epilogue, rows: int, vectors: int, planar: bool) -> None:
    """tile_R(x, x_step, offsets, taps, w, bias, residual, y, y_step, last, narrow): R runs of vectors, x_step and
    y_step apart.

    NCHW: a run is a row's vectors, w one number a tap. NHWC: a run is a pixel's vectors of channels, w a run a tap.
    When last is not 0, only `last` elements of the run are stored, and only where a whole vector would pass y's
    `narrow`: the rest of a row is written before the next row, which then overwrites it.
    """
    storage = epilogue.storage
    with k.function(
        f"tile_{rows}", x=k.dtype, x_step=INT, offsets="i64", taps=INT, w=k.dtype, bias=storage, residual=storage,
        y=storage, y_step=INT, last=INT, end=INT,
    ) as (x, x_step, offsets, taps, w, bias, residual, y, y_step, last, end):  # fmt: skip
        width = vectors * k.lanes
        sums = [[k.var(k.constant(0.0)) for _ in range(vectors)] for _ in range(rows)]

        def tap(kk: Int) -> None:
            there = x + k.load_int(offsets + kk)
            if planar:
                factors = [k.broadcast(w + kk)] * vectors
            else:
                factors = [k.load(w + kk * width + v * k.lanes) for v in range(vectors)]
            for row in range(rows):
                for v in range(vectors):
                    value = k.load(there + x_step * row + v * k.lanes)
                    sums[row][v].set(k.fma(factors[v], value, sums[row][v].get()))

        whole = taps - taps % 3
        with k.loop(0, whole, 3) as first:
            for u in range(3):
                tap(first + u)
        with k.loop(whole, taps) as kk:
            tap(kk)

        def store(row: int, v: int) -> None:
            at = y_step * row + v * k.lanes
            value = epilogue.finish(sums[row][v].get(), bias if planar else bias + v * k.lanes, residual + at)
            k.store(y + at, value)

        with k.if_else(last.eq(0)) as (full, partial):
            with full:
                for row in range(rows):
                    for v in range(vectors):
                        store(row, v)
            with partial:
                for row in range(rows):
                    for v in range(vectors):
                        at = y_step * row + v * k.lanes
                        with k.if_else(at + k.lanes <= end) as (inside, outside):
                            with inside:
                                if not planar:
                                    _store_some(k, epilogue, sums[row][v].get(), bias, residual, y, at, v, last)
                                else:
                                    store(row, v)
                            with outside:
                                _store_some(k, epilogue, sums[row][v].get(), bias, residual, y, at, v, last)


def _store_some(
    k: Kernel, epilogue: _Epilogue, value: Any, bias: Ptr, residual: Ptr, y: Ptr, at: Int, v: int, last: Int
) -> None:
    """Store the lanes of vector v that lie below `last`, one by one."""
    for lane in range(k.lanes):
        element = v * k.lanes + lane
        with k.if_(last > element):
            one = k.b.extract_element(value, ir.Constant(I32, lane))
            at_bias = bias if epilogue.planar else bias + element
            k.store(y + at + lane, epilogue.finish(one, at_bias, residual + at + lane))


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


def _emit_strip(k: Kernel, storage: str, tile_rows: int, vectors: int, planar: bool) -> None:
    """strip(args, packed, w, bias, residual, y, rows, channels, ahead): all tiles of one packed strip.

    `residual` and `y` point at the strip's first output. `ahead` is input that will be packed next: it is fetched
    while the tiles keep the arithmetic units busy and the memory idle.
    """
    with k.function(
        "strip", args="i64", packed=k.dtype, w=k.dtype, bias=storage, residual=storage, y=storage, rows=INT,
        channels=INT, ahead=storage,
    ) as (args, packed, w, bias, residual, y, rows, channels, ahead):  # fmt: skip
        a = Fields(k, args, FIELDS)
        offsets = a.pointer("offsets", "i64")
        width = vectors * k.lanes

        def starts(total: Int, size: int, body: Any) -> None:
            """body(start, size) over a length: whole tiles, the last one overlapping; a short length in ones."""
            with k.if_else(total >= size) as (long, short):
                with long:
                    with k.loop(0, total - size, size) as start:
                        body(start, size)
                    body(total - size, size)
                with short, k.loop(0, total) as start:
                    body(start, 1)

        if planar:

            def tile(p: Int, count: int, q: Int, last: Int) -> None:
                at = p * a.q + q
                k.call(
                    f"tile_{count}", packed + p * a.pitch + q, a.pitch, offsets, a.taps, w, bias, residual + at, y + at,
                    a.q, last, rows * a.q - at,
                )  # fmt: skip

            with k.if_else(a.q >= width) as (wide, narrow):
                with wide:

                    def across(p: Int, count: int) -> None:
                        length = a.stride_h * a.w_in
                        # Each tile its share: a burst would find the line fill buffers taken.
                        share = length * (count * width) // a.q
                        with k.loop(0, a.q - width, width) as q:
                            near = ahead + (p * length + q // width * share)
                            with k.loop(0, share, 64 // BYTES[storage]) as i:
                                k.prefetch(near + i)
                            tile(p, count, q, k.integer(0))
                        tile(p, count, a.q - width, k.integer(0))

                    starts(rows, tile_rows, across)
                with narrow:
                    starts(rows, tile_rows, lambda p, count: tile(p, count, k.integer(0), a.q))
        else:
            last = k.select(channels.eq(width), k.integer(0), channels)

            def along(p: Int) -> None:
                def run(q: Int, count: int) -> None:
                    at = (p * a.q + q) * a.channels
                    k.call(
                        f"tile_{count}", packed + (p * a.pitch + q) * width, width, offsets, a.taps, w, bias, residual
                        + at, y + at, a.channels, last, 0,
                    )  # fmt: skip

                starts(a.q, tile_rows, run)

            with k.loop(0, rows) as p:
                along(p)


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
            p0 = strip * a.strip_rows
            rows = (a.p - p0).min(a.strip_rows)
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
                            rows, 1, window(c + 2),
                        )  # fmt: skip
                else:
                    at = (image * a.p + p0) * a.q * a.channels + c
                    k.call(
                        "strip", args, packed(c), w + c * a.taps, bias + c, residual + at, y + at, rows, across(c), x,
                    )  # fmt: skip


def _emit_filters(k: Kernel, storage: str, planar: bool, vectors: int) -> None:
    """`pack_task`: NCHW keeps (k, taps); NHWC (k / width, taps, width), the last run filled up with zeros."""
    width = 1 if planar else vectors * k.lanes
    with k.function("pack_task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        w, packed = a.pointer("x", storage), a.pointer("w", k.dtype)
        with k.draws(a.counter, a.tasks, worker, a.workers):
            if planar:
                k.rows(a.channels * a.multiplier * a.taps, lambda i, lanes: k.store(packed + i, k.load(w + i, lanes)))
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
        index, rest = np.divmod(s.tap_shifts, s.plane)
        offsets = (index * self.plane + rest) * self.width
        return {
            "tasks": self.tasks(), "scratch_step": self.scratch_bytes,
            "images": p.n, "channels": p.c, "multiplier": p.group_k, "h": p.spatial[0], "w_in": p.spatial[1],
            "p": p.output[0], "q": p.output[1], "stride_h": p.stride[0], "stride_w": p.stride[1],
            "row_phases": len(s.row_phases), "col_phases": len(s.col_phases),
            "strip_rows": c.strip, "row_strips": ceil_div(p.output[0], c.strip),
            "channel_block": c.channels, "channel_blocks": ceil_div(p.c, c.channels),
            "taps": p.kernel[0] * p.kernel[1], "pitch": s.pitch, "plane": self.plane, "row_shift": s.row_shift,
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

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise:
            return f"takes one input channel a group and several groups, not {problem.group_c} and {problem.groups}"
        if problem.layout == "nhwc" and problem.group_k != 1:
            return f"takes one output a channel in nhwc, not {problem.group_k}"
        return rejects_all(problem, device)

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        every = list(dict.fromkeys(self._candidates(problem, device)))
        return sorted(every, key=lambda config: self.predict_us(problem, config, device))

    def _candidates(self, problem: ConvProblem, device: Device) -> Iterator[Config]:
        lanes = device.vector_bytes // (8 if problem.dtype == "f64" else 4)
        p, q = problem.output
        planar = problem.layout == "nchw"
        for rows, vectors in _TILES[target(settings.cpu_target()).registers]:
            if planar and (rows > p or (vectors > 1 and vectors * lanes > q)):
                continue
            if not planar and (rows > q or (vectors > 1 and (vectors - 1) * lanes >= problem.c)):
                continue
            width = 1 if planar else vectors * lanes
            for strip in sorted({p, *(max(rows, ceil_div(p, count)) for count in (2, 4, 8, 16, 32))}):
                if strip > p:
                    continue
                for count in (1, *(count * device.threads for count in (1, 2, 4, 8, 16))):
                    channels = ceil_div(ceil_div(problem.c, count), width) * width
                    config = Config(rows, vectors, strip, channels)
                    if Geometry(problem, config, lanes).scratch_bytes <= 4 << 20 or strip == rows:
                        yield config

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Cycles of one task: for each channel (or run of channels) its packing, and for each tile its taps and stores
        (`cost`); times the tasks that one worker draws. A tap costs 0.7 cycles a vector: unaligned loads."""
        itemsize = 8 if problem.dtype == "f64" else 4
        costs = Costs(device, itemsize)
        g = Geometry(problem, config, costs.lanes)
        taps = problem.kernel[0] * problem.kernel[1]
        q = problem.output[1]
        size = config.rows * config.vectors
        tile = taps * max(0.7 * size + 0.8, 4.0) + 3.0 * size + 22
        packed_rows = g.strip.planes * (config.strip + g.strip.row_shift)
        if g.planar:
            across = ceil_div(q, config.vectors * costs.lanes)
            tiles = ceil_div(config.strip, config.rows) * across * problem.group_k
            if q < config.vectors * costs.lanes:
                tile += 2.0 * config.rows
            per_vector = {1: 2.0, 2: 2.5, 4: 4.0}.get(problem.stride[1], 1.5 * costs.lanes)
            pack = 40 + packed_rows * (costs.row(g.strip.pitch, per_vector) - 6)
            runs = config.channels
        else:
            tiles = config.strip * ceil_div(q, config.rows)
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
        task = runs * (pack + tiles * tile + 0.6 * memory) + zeros + 80
        return costs.wall_us(task, g.tasks(), device.threads)

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        return 5.0 + problem.k * problem.gemm_k * 1e-3

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        g = Geometry(problem, config, device.vector_bytes // (8 if problem.dtype == "f64" else 4))
        return g.scratch_bytes * max(1, min(device.threads, g.tasks()))

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        vector = target(settings.cpu_target())
        dtype = arithmetic(problem)
        library = jit.load(
            "depthwise", generate, vector, dtype=dtype, storage=problem.dtype, layout=problem.layout,
            rows=config.rows, vectors=config.vectors, bias=problem.bias, residual=problem.residual,
            activation=problem.activation,
        )  # fmt: skip
        g = Geometry(problem, config, vector.lanes(dtype))
        size = ceil_div(problem.k, g.width) * g.width * problem.gemm_k
        return KernelPlan(problem, device, library, FIELDS, g.fields(), packed_size=size, pack_tasks=1)
