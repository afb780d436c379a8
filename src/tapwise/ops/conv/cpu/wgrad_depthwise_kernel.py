"""The kernels of cpu.depthwise of wgrad: a row of taps at a time, its sums in registers, lanes over channels.

Sums lie as [vector][filter of a channel][tap][lane].
"""

from __future__ import annotations

from typing import Any, Final

from tapwise.cpu.fields import COMMON, Fields, entry, unravel
from tapwise.cpu.simd import I1, INT, Int, Kernel, Ptr, Target
from tapwise.ops.conv.cpu.wgrad_direct_kernel import emit_channels
from tapwise.ops.conv.cpu.wgrad_panels import emit_pack

# Of each row (column) of taps: rows (columns) of dy that meet x there, and where output 0 meets it.
RANGE: Final = 3
FIELDS: Final = (
    *COMMON, "rows_at", "cols_at", "inner_first", "inner_end",
    "images", "c", "multiplier", "h", "w_in", "p", "q", "stride_h", "pad_h", "reach_h", "kernel_h",
    "vectors", "block", "blocks", "band_rows", "row_blocks", "bands", "part_bands", "parts", "parts_at", "part_step",
    "dy_at", "sums_at", "line_at", "taps",
)  # fmt: skip


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, pack: bool, lanes: int, kernel_w: int, stride_w: int,
    dilation_w: int, parts: bool,
) -> Kernel:  # fmt: skip
    """`task`, and `finish_task` for sums in parts. `pack`: operands are brought into a buffer first."""
    k = Kernel(target, dtype)
    planar = layout == "nchw"
    _emit_taps(k, k.dtype if pack else storage, lanes, kernel_w, stride_w, dilation_w)
    if pack:
        emit_pack(k, storage, planar, "pack", lanes, lanes)
    _emit_finish(k, storage, planar, lanes)
    _emit_task(k, storage, planar, pack, lanes, kernel_w, parts)
    if parts:
        _emit_finish_task(k, lanes)
    return k


def _emit_taps(k: Kernel, storage: str, lanes: int, kernel_w: int, stride_w: int, dilation_w: int) -> None:
    """row_of_taps(args, x, x_row, x_col, dy, dy_row, dy_col, sums, accumulate, rows): over all columns of `rows` rows.

    x: where column 0 of the first row lies. Columns that all taps have go in blocks: an element of x serves several
    taps, and each column of a block has sums of its own, which hide the latency of the multiply-add.
    """
    half = k.target.registers // 2
    block = 4 if 4 * kernel_w <= half else 2 if 2 * kernel_w <= half else 1
    with k.function(
        "row_of_taps", args="i64", x=storage, x_row=INT, x_col=INT, dy=storage, dy_row=INT, dy_col=INT, sums=k.dtype,
        accumulate=I1, rows=INT,
    ) as (args, x, x_row, x_col, dy, dy_row, dy_col, sums, accumulate, rows):  # fmt: skip
        a = Fields(k, args, FIELDS)
        table = a.pointer("cols_at", "i64")
        firsts, ends, cols = ([k.load_int(table + s * RANGE + i) for s in range(kernel_w)] for i in range(RANGE))
        totals = [[k.var(k.constant(0.0, lanes)) for _ in range(kernel_w)] for _ in range(block)]

        def add(u: int, s: int, factor: Any, value: Any) -> None:
            totals[u][s].set(k.fma(factor, value, totals[u][s].get()))

        def edge(s: int, x_line: Ptr, dy_line: Ptr, first: Int, end: Int) -> None:
            """Columns that not every tap has."""
            with k.loop(first, end) as q:
                add(0, s, k.load(dy_line + q * dy_col, lanes), k.load(x_line + (q * stride_w + cols[s]) * x_col, lanes))

        with k.loop(0, rows) as row:
            x_line, dy_line = x + row * x_row, dy + row * dy_row
            for s in range(kernel_w):
                edge(s, x_line, dy_line, firsts[s], ends[s].min(a.inner_first))
            whole = a.inner_end - (a.inner_end - a.inner_first) % block
            with k.loop(a.inner_first, whole, block) as q:
                factors = [k.load(dy_line + (q + u) * dy_col, lanes) for u in range(block)]
                start = x_line + (q * stride_w + cols[0]) * x_col
                users: dict[int, list[tuple[int, int]]] = {}
                for u in range(block):
                    for s in range(kernel_w):
                        users.setdefault(u * stride_w + s * dilation_w, []).append((u, s))
                for at in sorted(users):
                    value = k.load(start + x_col * at, lanes)
                    for u, s in users[at]:
                        add(u, s, factors[u], value)
            with k.loop(whole, a.inner_end) as q:
                factor = k.load(dy_line + q * dy_col, lanes)
                for s in range(kernel_w):
                    add(s % block, s, factor, k.load(x_line + (q * stride_w + cols[s]) * x_col, lanes))
            for s in range(kernel_w):
                edge(s, x_line, dy_line, firsts[s].max(a.inner_end), ends[s])
        for s in range(kernel_w):
            total = totals[0][s].get()
            for u in range(1, block):
                total = k.add(total, totals[u][s].get())
            here = sums + s * lanes
            with k.if_else(accumulate.value) as (then, otherwise):
                with then:
                    k.store(here, k.add(k.load(here, lanes), total))
                with otherwise:
                    k.store(here, total)


def _emit_finish(k: Kernel, storage: str, planar: bool, lanes: int) -> None:
    """finish(args, sums, line, vector): a vector's sums to dw, filter by filter."""
    with k.function("finish", args="i64", sums=k.dtype, line=k.dtype, vector=INT) as (args, sums, line, vector):
        a = Fields(k, args, FIELDS)
        first = _first_channel(a, planar, lanes, vector)
        count = (a.c - first).min(lanes)
        with k.loop(0, a.multiplier) as j:
            emit_channels(k, sums + j * a.taps * lanes, k.integer(lanes), a.taps, line, lanes)
            single = a.multiplier.eq(1)
            runs = k.select(single, k.integer(1), count)
            length = a.taps * k.select(single, count, k.integer(1))
            with k.loop(0, runs) as run:
                out = a.pointer("y", storage) + ((first + run) * a.multiplier + j) * a.taps
                here = line + run * a.taps
                k.rows(length, lambda i, width: k.store(out + i, k.load(here + i, width)))


def _first_channel(a: Fields, planar: bool, lanes: int, vector: Int) -> Int:
    """In channels last the last vector overlaps the one before it, and both write the same."""
    return vector * lanes if planar else (vector * lanes).min(a.c - lanes)


def _emit_task(k: Kernel, storage: str, planar: bool, pack: bool, lanes: int, kernel_w: int, parts: bool) -> None:
    with entry(k, FIELDS) as (a, worker):
        x, dy = a.pointer("x", storage), a.pointer("w", storage)
        scratch = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        size = a.multiplier * a.taps * lanes
        with a.draws(worker) as number:
            block, part = unravel(number, a.blocks)
            first_vector = block * a.block
            end_vector = (first_vector + a.block).min(a.vectors)
            if parts:
                sums = k.pointer(a.scratch + a.parts_at, k.dtype) + part * a.part_step + first_vector * size
            else:
                sums = scratch + a.sums_at
            first_band = part * a.part_bands
            with k.loop(first_band, (first_band + a.part_bands).min(a.bands)) as band:
                image, p0 = band // a.row_blocks, band % a.row_blocks * a.band_rows
                rows = (a.p - p0).min(a.band_rows)
                h0 = (p0 * a.stride_h - a.pad_h).max(0)
                h1 = ((p0 + rows - 1) * a.stride_h - a.pad_h + a.reach_h).min(a.h).max(h0)
                x_image, dy_image = image * a.h * a.w_in * a.c, image * a.p * a.q * a.c * a.multiplier
                with k.loop(first_vector, end_vector) as vector, k.loop(0, a.multiplier) as j:
                    channel = _first_channel(a, planar, lanes, vector)
                    x_pixel, dy_pixel = (k.integer(1), k.integer(1)) if planar else (a.c, a.c)
                    x_channel, dy_channel = (a.h * a.w_in, a.p * a.q) if planar else (k.integer(1), k.integer(1))
                    x_here = x + x_image + channel * x_channel + h0 * a.w_in * x_pixel
                    dy_here = dy + dy_image + (channel * a.multiplier + j) * dy_channel + p0 * a.q * dy_pixel
                    x_col = dy_col = a.c
                    if pack:
                        count = (a.c - channel).min(lanes)
                        x_step, dy_step = (x_channel, a.multiplier * dy_channel) if planar else (x_pixel, dy_pixel)
                        with k.if_(j.eq(0)):
                            k.call("pack", x_here, x_step, scratch, count, (h1 - h0) * a.w_in)
                        k.call("pack", dy_here, dy_step, scratch + a.dy_at, count, rows * a.q)
                        x_here, dy_here = scratch, scratch + a.dy_at
                        x_col = dy_col = k.integer(lanes)
                    here = sums + (vector - first_vector) * size + j * a.taps * lanes
                    with k.loop(0, a.kernel_h) as r:
                        table = a.pointer("rows_at", "i64") + r * RANGE
                        p_first, p_end, tap_row = (k.load_int(table + i) for i in range(RANGE))
                        top = p_first.max(p0)
                        height = p_end.min(p0 + rows) - top
                        line = top * a.stride_h + tap_row - h0
                        k.call(
                            "row_of_taps", a.args, x_here + line * a.w_in * x_col, a.stride_h * a.w_in * x_col, x_col,
                            dy_here + (top - p0) * a.q * dy_col, a.q * dy_col, dy_col, here + r * (kernel_w * lanes),
                            band > first_band, height,
                        )  # fmt: skip
            if not parts:
                with k.loop(first_vector, end_vector) as vector:
                    k.call("finish", a.args, sums + (vector - first_vector) * size, scratch + a.line_at, vector)


def _emit_finish_task(k: Kernel, lanes: int) -> None:
    """`finish_task`: all parts of a vector's sums added in order, then written."""
    with entry(k, FIELDS, "finish_task") as (a, worker):
        line = k.pointer(a.scratch + worker * a.scratch_step, k.dtype) + a.line_at
        parts, size = k.pointer(a.scratch + a.parts_at, k.dtype), a.multiplier * a.taps * lanes
        with k.loop(worker, a.vectors, a.workers) as vector:
            sums = parts + vector * size
            with k.loop(0, size, lanes) as i:
                total = k.var(k.load(sums + i, lanes))
                with k.loop(1, a.parts) as part:
                    total.set(k.add(total.get(), k.load(sums + part * a.part_step + i, lanes)))
                k.store(sums + i, total.get())
            k.call("finish", a.args, sums, line, vector)
