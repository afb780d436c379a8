"""cpu.direct: convolution as a matrix product whose matrix is never built.

Each task packs the strip of the input that it needs (`strips`), block of channels by block of channels, runs register
tiles over it (`tile`), and finishes its rows with bias, residual and activation while they are in cache. Lanes run over
pixels (NCHW) or over output channels (NHWC, and images of a few pixels).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import driver, jit, tile
from tapwise.cpu.simd import BYTES, INT, Int, Kernel, Ptr, Target, target
from tapwise.cpu.strips import Strip, ceil_div, emit_finish_row, emit_pack_row, emit_zeros
from tapwise.problem import ConvProblem
from tapwise import settings

# Terms of gemm_k in one block: a panel of filters and the input that it meets stay in L1.
BLOCK_TERMS: Final = 320
SCRATCH_BYTES: Final = 4 << 20

FIELDS: Final = (
    "counter", "tasks", "x", "w", "y", "bias", "residual", "scratch", "scratch_step", "sums_at",
    "offsets", "columns", "row_starts",
    "images", "groups", "group_c", "group_k", "h", "w_in", "p", "q", "stride_h", "stride_w",
    "row_phases", "col_phases",
    "rows", "cols", "image_block", "group_block", "filter_block", "channel_block",
    "row_strips", "col_strips", "image_blocks", "group_blocks", "filter_blocks",
    "taps", "pitch", "plane", "row_shift", "step", "flat", "sums_pitch", "filter_pad",
)  # fmt: skip
INDEX: Final = {name: index for index, name in enumerate(FIELDS)}


@dataclass(frozen=True)
class Config(BaseConfig):
    """lanes "pixels" or "channels"; the register tile m x n; the strip: rows x cols outputs of `images` images,
    `filters` output channels of `groups` groups a task; `channels` of the input a block of gemm_k."""

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
    target: Target, *, dtype: str, storage: str, layout: str, lanes: str, m: int, n: int, bias: bool, residual: bool,
    activation: str | None,
) -> Kernel:  # fmt: skip
    """The kernels of one instance: `task` and `pack_task`."""
    k = Kernel(target, dtype)
    planar = layout == "nchw"
    tile.emit(k, m, n, lanes)
    tile.emit_filter_packer(k, lanes, storage, m if lanes == "pixels" else n * k.lanes)
    if planar:
        emit_pack_row(k, storage)
    else:
        _emit_pack_pixels(k, storage)
    per_run = "one" if planar else "each"
    emit_finish_row(k, storage, per_run if bias else None, residual, activation)
    _emit_pack_strip(k, storage, planar)
    _emit_finish_strip(k, storage, planar, lanes)
    _emit_task(k, storage, lanes)
    _emit_filter_task(k, storage)
    return k


class Fields:
    """A kernel's argument array by name; all loaded at the function's entry, what is not used costs nothing."""

    def __init__(self, k: Kernel, args: Ptr) -> None:
        self._k = k
        self._fields = {name: k.load_int(args + index) for name, index in INDEX.items()}

    def __getattr__(self, name: str) -> Int:
        return self._fields[name]

    def pointer(self, name: str, dtype: str) -> Ptr:
        return self._k.pointer(self._fields[name], dtype)


def _emit_pack_pixels(k: Kernel, storage: str) -> None:
    """`pack_row` for NHWC: as strips.emit_pack_row, each packed pixel holding `channels` neighbouring channels.

    Pixels are `step` elements apart when packed, `c` in the source.
    """
    with k.function(
        "pack_row", source=storage, out=k.dtype, columns="i64", phases=INT, q0=INT, stride=INT, pitch=INT, plane=INT,
        channels=INT, step=INT, c=INT,
    ) as (source, out, columns, phases, q0, stride, pitch, plane, channels, step, c):  # fmt: skip
        with k.loop(0, phases) as phase:
            entry = columns + phase * 3
            first = (k.load_int(entry) - q0).max(0).min(pitch)
            end = (k.load_int(entry + 1) - q0).max(first).min(pitch)
            here = out + phase * plane * step
            there = source + (k.load_int(entry + 2) + q0 * stride) * c
            emit_zeros(k, here, first * step)
            with k.loop(first, end) as u:
                pixel, original = here + u * step, there + u * stride * c
                k.rows(channels, lambda i, lanes: k.store(pixel + i, k.load(original + i, lanes)))
            emit_zeros(k, here + end * step, (pitch - end) * step)


def _emit_pack_strip(k: Kernel, storage: str, planar: bool) -> None:
    """pack_strip(args, packed, image, channel, channels, p0, q0, rows): one image's planes of a block of channels."""
    with k.function(
        "pack_strip", args="i64", packed=k.dtype, image=INT, channel=INT, channels=INT, p0=INT, q0=INT, rows=INT
    ) as (args, packed, image, channel, channels, p0, q0, rows):  # fmt: skip
        a = Fields(k, args)
        x, columns, starts = a.pointer("x", storage), a.pointer("columns", "i64"), a.pointer("row_starts", "i64")
        total_c = a.group_c * a.groups
        every_row = rows + a.row_shift
        planes = a.row_phases * a.col_phases
        width = k.int(1) if planar else a.step

        def rows_of(c: Int) -> None:
            with k.loop(0, a.row_phases) as phase:
                base = packed + (c * planes + phase * a.col_phases) * a.plane * width
                start = k.load_int(starts + phase)
                with k.loop(0, every_row) as row:
                    h = (p0 + row) * a.stride_h + start
                    out = base + row * a.pitch * width
                    inside = k.both(h >= 0, h < a.h)
                    with k.if_else(inside) as (then, otherwise):
                        with then:
                            if planar:
                                source = x + ((image * total_c + channel + c) * a.h + h) * a.w_in
                                k.call("pack_row", source, out, columns, a.col_phases, q0, a.stride_w, a.pitch, a.plane)
                            else:
                                source = x + (image * a.h + h) * a.w_in * total_c + channel
                                k.call(
                                    "pack_row", source, out, columns, a.col_phases, q0, a.stride_w, a.pitch, a.plane,
                                    channels, a.step, total_c,
                                )  # fmt: skip
                        with otherwise, k.loop(0, a.col_phases) as col_phase:
                            emit_zeros(k, out + col_phase * a.plane * width, a.pitch * width)
                with k.loop(0, a.col_phases) as col_phase:
                    end = every_row * a.pitch
                    emit_zeros(k, base + (col_phase * a.plane + end) * width, (a.plane - end) * width)

        if planar:
            with k.loop(0, channels) as c:
                rows_of(c)
        else:
            rows_of(k.int(0))


def _emit_finish_strip(k: Kernel, storage: str, planar: bool, lanes: str) -> None:
    """finish_strip(args, sums, image, k0, filters, p0, q0, rows, cols): one image's sums, to y."""
    with k.function(
        "finish_strip", args="i64", sums=k.dtype, image=INT, k0=INT, filters=INT, p0=INT, q0=INT, rows=INT, cols=INT
    ) as (args, sums, image, k0, filters, p0, q0, rows, cols):  # fmt: skip
        a = Fields(k, args)
        y, bias, residual = (a.pointer(name, storage) for name in ("y", "bias", "residual"))
        total_k = a.group_k * a.groups
        p, q, pitch, sums_pitch = a.p, a.q, a.pitch, a.sums_pitch
        # Distances of neighbouring filters and pixels in the sums.
        by_filter, by_pixel = (sums_pitch, k.int(1)) if lanes == "pixels" else (k.int(1), sums_pitch)
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
        a = Fields(k, args)
        packed = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        sums = packed + a.sums_at
        w, offsets = a.pointer("w", k.dtype), a.pointer("offsets", "i64")
        planes = a.plane * a.row_phases * a.col_phases
        with k.draws(args + INDEX["counter"], a.tasks) as number:
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
            with k.loop(group0, (group0 + a.group_block).min(a.groups)) as group:
                panels = w + group * a.group_c * a.taps * a.filter_pad
                with k.loop(0, a.group_c, a.channel_block) as channel:
                    channels = (a.group_c - channel).min(a.channel_block)
                    size = a.channel_block * planes
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


def _emit_filter_task(k: Kernel, storage: str) -> None:
    """`pack_task`: all filters into panels; a task is one block of channels of one group."""
    with k.function("pack_task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args)
        w, packed = a.pointer("x", storage), a.pointer("w", k.dtype)
        blocks = (a.group_c + (a.channel_block - 1)) // a.channel_block
        length = a.group_c * a.taps
        with k.draws(args + INDEX["counter"], a.tasks) as number:
            filter_block, number = number % a.filter_blocks, number // a.filter_blocks
            block, group = number % blocks, number // blocks
            k0 = filter_block * a.filter_block
            filters = (a.group_k - k0).min(a.filter_block)
            channel = block * a.channel_block
            terms = (a.group_c - channel).min(a.channel_block) * a.taps
            source = w + (group * a.group_k + k0) * length + channel * a.taps
            out = packed + group * length * a.filter_pad + channel * a.taps * a.filter_pad + k0 * terms
            k.call("pack_filters", source, length, terms, out, filters)


class DirectPlan(Plan):
    """Kernels, geometry and argument template of one problem and config."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        self.problem, self.config = problem, config
        self._target = target(settings.cpu_target())
        dtype = "f64" if problem.dtype == "f64" else "f32"
        self._library = jit.load(
            "direct", generate, self._target, dtype=dtype, storage=problem.dtype, layout=problem.layout,
            lanes=config.lanes, m=config.m, n=config.n, bias=problem.bias, residual=problem.residual,
            activation=problem.activation,
        )  # fmt: skip
        self._task, self._serial = self._library.address("task"), self._library.function("task")
        geometry = Geometry(problem, config, self._target.lanes(dtype))
        fields = geometry.fields()
        self._tables = geometry.offsets(), geometry.columns(), geometry.row_starts()
        for name, table in zip(("offsets", "columns", "row_starts"), self._tables, strict=True):
            fields[name] = table.ctypes.data
        self._workers = max(1, min(device.threads, fields["tasks"]))
        self.workspace_bytes = geometry.scratch_bytes * self._workers
        self._template = np.array([fields.get(name, 0) for name in FIELDS], np.int64).tobytes()
        self._fields = fields
        self._array = ctypes.c_int64 * len(FIELDS)
        self._packed_dtype = np.dtype(np.float64 if dtype == "f64" else np.float32)

    def pack(self, w: np.ndarray) -> np.ndarray:
        f = self._fields
        w = np.ascontiguousarray(w)
        packed = np.empty(f["groups"] * f["group_c"] * f["taps"] * f["filter_pad"], self._packed_dtype)
        args = self._array.from_buffer_copy(self._template)
        args[INDEX["x"]] = w.ctypes.data
        args[INDEX["w"]] = packed.ctypes.data
        blocks = ceil_div(f["group_c"], f["channel_block"])
        args[INDEX["tasks"]] = tasks = f["groups"] * blocks * f["filter_blocks"]
        workers = min(self._workers, tasks) if packed.nbytes > 1 << 16 else 1
        self._launch("pack_task", args, workers)
        return packed

    def _launch(self, name: str, args: Any, workers: int) -> None:
        if workers == 1:
            self._library.function(name)(ctypes.addressof(args), 0)
        else:
            driver.run(self._library.address(name), ctypes.addressof(args), workers)

    def run(
        self, x: Any, packed: Any, y: Any, workspace: Any = None, *, bias: Any = None, residual: Any = None,
        stream: Any = None,
    ) -> None:  # fmt: skip
        args = self._array.from_buffer_copy(self._template)
        args[_X] = x.__array_interface__["data"][0]
        args[_W] = packed.__array_interface__["data"][0]
        args[_Y] = y.__array_interface__["data"][0]
        args[_SCRATCH] = workspace.__array_interface__["data"][0]
        if bias is not None:
            args[_BIAS] = bias.__array_interface__["data"][0]
        if residual is not None:
            args[_RESIDUAL] = residual.__array_interface__["data"][0]
        if self._workers == 1:
            self._serial(ctypes.addressof(args), 0)
        else:
            driver.run(self._task, ctypes.addressof(args), self._workers)


_X, _W, _Y, _SCRATCH, _BIAS, _RESIDUAL = (INDEX[name] for name in ("x", "w", "y", "scratch", "bias", "residual"))


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
        # What the last vector of a pixel-major or narrow strip reads beyond the packed input.
        self.scratch_bytes = ceil_div((self.sums_at + sums + 64) * itemsize, 64) * 64

    def fields(self) -> dict[str, int]:
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
            "taps": p.kernel[0] * p.kernel[1], "pitch": s.pitch, "plane": s.plane, "row_shift": s.row_shift,
            "step": self.step, "flat": s.flat, "sums_pitch": self.sums_pitch, "filter_pad": self.filter_pad,
        }  # fmt: skip

    def offsets(self) -> np.ndarray:
        """int64 (channels, R, S) flattened: where each term of a block of gemm_k reads in the packed strip."""
        taps = self.strip.tap_shifts[None] * self.step
        channel = np.arange(self.config.channels)[:, None, None]
        distance = 1 if self.problem.layout == "nhwc" else self.strip.planes * self.strip.plane
        return np.ascontiguousarray((taps + channel * distance).reshape(-1).astype(np.int64))

    def columns(self) -> np.ndarray:
        return np.array(self.strip.col_data, np.int64)

    def row_starts(self) -> np.ndarray:
        return np.array([phase - self.problem.padding[0][0] for phase in self.strip.row_phases], np.int64)
