"""The kernels of cpu.depthwise: packing two buffers in turn, tiles of planes or runs of pixels, filters."""

from __future__ import annotations

from typing import Final

from tapwise.cpu.copies import emit_zeros
from tapwise.cpu.epilogue import Epilogue, Sums
from tapwise.cpu.fields import COMMON, Fields, entry, unravel
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target
from tapwise.ops.conv.cpu.depthwise.planes import emit_outputs
from tapwise.ops.conv.cpu.packing import Window, emit_pack_pixels, emit_pack_plane

FIELDS: Final = (
    *COMMON, "offsets", "columns", "row_starts",
    "images", "channels", "multiplier", "h", "w_in", "p", "q", "stride_h", "stride_w",
    "row_phases", "col_phases", "row_blocks", "channel_block", "channel_blocks",
    "taps", "taps_h", "taps_w", "pitch", "plane", "row_shift", "buffer", "pad_h", "dilation_h",
)  # fmt: skip


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
        emit_outputs(k, FIELDS, epilogue, rows, vectors, taps_h, stride_h, dilation_h)
    else:
        for count in sorted({rows, 1}):
            _emit_run(k, epilogue, count, vectors)
        _emit_pixels(k, storage, rows, vectors)
    _emit_task(k, storage, planar, vectors)
    emit_filters(k, FIELDS, storage, planar, vectors)
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
        places = [(row, v) for row in range(pixels) for v in range(vectors)]
        with k.if_else(last.eq(0)) as (full, part):
            with full:
                epilogue.store(
                    Sums(sums[row][v].get(), bias + v * k.lanes, residual + at, y + at)
                    for row, v in places
                    for at in [y_step * row + v * k.lanes]
                )
            with part:
                for row, v in places:
                    at = y_step * row + v * k.lanes
                    epilogue.store_some(sums[row][v].get(), bias, residual + at, y + at, v * k.lanes, last)


def _emit_pack(k: Kernel, storage: str, planar: bool, vectors: int) -> None:
    """pack(args, out, x, p0, rows, channels): a task's input of a channel (NCHW) or of neighbouring channels (NHWC).

    Only what lies inside the input is written: the buffers' borders are zero already.
    """
    width = 1 if planar else vectors * k.lanes
    with k.function(
        "pack", args="i64", out=k.dtype, x=storage, p0=INT, rows=INT, channels=INT
    ) as (args, out, x, p0, rows, channels):  # fmt: skip
        a = Fields(k, args, FIELDS)
        window = Window(a, p0, k.integer(0), rows)
        if planar:
            emit_pack_plane(k, window, x, out)
        else:
            emit_pack_pixels(k, window, x, out, channels, k.integer(width), a.channels)


def _emit_pixels(k: Kernel, storage: str, pixels: int, vectors: int) -> None:
    """outputs(args, packed, w, bias, residual, y, p0, height, channels): all runs of one packed tile of `channels`.

    The tile begins with output row p0. Rows of taps that lie outside the image are left out.
    """
    with k.function(
        "outputs", args="i64", packed=k.dtype, w=k.dtype, bias=storage, residual=storage, y=storage, p0=INT,
        height=INT, channels=INT,
    ) as (args, packed, w, bias, residual, y, p0, height, channels):  # fmt: skip
        a = Fields(k, args, FIELDS)
        offsets = a.pointer("offsets", "i64")
        width = vectors * k.lanes
        last = k.select(channels.eq(width), k.integer(0), channels)
        with k.loop(0, height) as p:
            top = (p0 + p) * a.stride_h

            def rows_above(row: Int, top: Int = top) -> Int:
                """Rows of taps that read above a row of x."""
                return ((row + a.pad_h - top).max(0) + (a.dilation_h - 1)) // a.dilation_h

            low = rows_above(k.integer(0)).min(a.taps_h) * a.taps_w
            taps = rows_above(a.h).min(a.taps_h) * a.taps_w - low

            def run(q: Int, count: int, p: Int = p, low: Int = low, taps: Int = taps) -> None:
                at = (p * a.q + q) * a.channels
                k.call(
                    f"tile_{count}", packed + (p * a.pitch + q) * width, offsets + low, taps, w + low * width, bias,
                    residual + at, y + at, a.channels, last,
                )  # fmt: skip

            # The last run overlaps the one before; rows shorter than a run go pixel by pixel.
            with k.if_else(a.q >= pixels) as (long, short):
                with long, k.loop(0, a.q, pixels) as q:
                    run(q.min(a.q - pixels), pixels)
                with short, k.loop(0, a.q) as q:
                    run(q, 1)


def _emit_task(k: Kernel, storage: str, planar: bool, vectors: int) -> None:
    with entry(k, FIELDS) as (a, worker):
        scratch = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        x, y, w = a.pointer("x", storage), a.pointer("y", storage), a.pointer("w", k.dtype)
        bias, residual = a.pointer("bias", storage), a.pointer("residual", storage)
        width = 1 if planar else vectors * k.lanes
        with a.draws(worker) as number:
            row_block, block, image = unravel(number, a.row_blocks, a.channel_blocks)
            p0 = row_block * a.p // a.row_blocks
            rows = (row_block + 1) * a.p // a.row_blocks - p0
            first = block * a.channel_block
            end = (first + a.channel_block).min(a.channels)
            emit_zeros(k, scratch, a.buffer * 2)

            def source(c: Int) -> Ptr:
                return x + (
                    (image * a.channels + c) * a.h * a.w_in if planar else image * a.h * a.w_in * a.channels + c
                )

            def packed(c: Int) -> Ptr:
                return scratch + ((c - first) // width % 2) * a.buffer

            def window(c: Int) -> Ptr:
                """Where the task's rows of a channel start; only a hint, so borders do not matter."""
                return source(c.min(end - 1)) + p0 * a.stride_h * a.w_in

            # Channels last: the last run of channels overlaps the one before, or is the only one.
            across = a.channels.min(width)

            def place(c: Int) -> Int:
                return c if planar else c.min(a.channels - across)

            k.call("pack", a.args, packed(first), source(place(first)), p0, rows, across)
            with k.loop(first, end, width) as c:
                following = c + width
                with k.if_(following < end):
                    k.call("pack", a.args, packed(following), source(place(following)), p0, rows, across)
                if planar:
                    with k.loop(0, a.multiplier) as index:
                        filter_ = c * a.multiplier + index
                        at = ((image * a.channels * a.multiplier + filter_) * a.p + p0) * a.q
                        k.call(
                            "outputs", a.args, packed(c), w + filter_ * a.taps, bias + filter_, residual + at, y + at,
                            rows, window(c + 2),
                        )  # fmt: skip
                else:
                    at = (image * a.p + p0) * a.q * a.channels + place(c)
                    k.call(
                        "outputs", a.args, packed(c), w + c * a.taps, bias + place(c), residual + at, y + at, p0, rows,
                        across,
                    )  # fmt: skip


def emit_filters(k: Kernel, names: tuple[str, ...], storage: str, planar: bool, vectors: int) -> None:
    """`pack_task`: NCHW (k, S, R); NHWC (k / width, taps, width), the last run those of the last
    channels; of fewer than a run, filled up with zeros."""
    width = 1 if planar else vectors * k.lanes
    with entry(k, names, "pack_task") as (a, worker):
        w, packed = a.pointer("x", storage), a.pointer("w", k.dtype)
        with a.draws(worker):
            if planar:
                with k.loop(0, a.channels * a.multiplier * a.taps, a.taps) as first:
                    with k.loop(0, a.taps_h) as r, k.loop(0, a.taps_w) as s:
                        k.store(packed + first + s * a.taps_h + r, k.load(w + first + r * a.taps_w + s, 1))
            else:
                with k.loop(0, a.channels, width) as c, k.loop(0, a.taps) as kk:
                    here = packed + c * a.taps + kk * width
                    across = a.channels.min(width)
                    first = c.min(a.channels - across)
                    emit_zeros(k, here, k.integer(width))
                    with k.loop(0, across) as i:
                        k.store(here + i, k.load(w + (first + i) * a.taps + kk, 1))
