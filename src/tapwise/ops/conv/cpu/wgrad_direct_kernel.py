"""The kernels of cpu.direct of wgrad: operands into panels of pixels, outer products in registers, sums to dw.

Sums lie as [row][tap][lane]: rows are filters and lanes channels or, swapped, rows are channels and lanes filters.
Flat: x keeps its channels side by side with zeros beyond its columns, so that the taps of a row and the channels are
one run of elements, and only rows of taps are taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tapwise.cpu.fields import COMMON, Fields, entry, unravel
from tapwise.cpu.simd import I1, INT, Int, Kernel, Ptr, Target
from tapwise.cpu.transposes import columns_of
from tapwise.ops.conv.cpu.wgrad_panels import emit_pack, emit_pack_flat

# Of each tap: rows and columns of dy that meet x there, and where tap (0, 0) of pixel (0, 0) lies in x.
TAP: Final = ("p_first", "p_end", "q_first", "q_end", "row", "col")
FIELDS: Final = (
    *COMMON, "taps_at", "images", "groups", "c", "k", "h", "w_in", "p", "q", "kernel_h", "kernel_w",
    "stride_h", "stride_w", "pad_h", "pad_w", "reach_h", "taps", "flat_width", "row_step",
    "x_panels", "x_more", "x_blocks", "dy_panels", "dy_more", "dy_blocks",
    "band_images", "row_blocks", "bands", "part_bands", "parts", "parts_at", "part_step",
    "x_panel", "dy_panel", "dy_at", "sums_at", "line_at", "sum_lanes", "finish_rows", "finish_tasks",
)  # fmt: skip


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, m: int, n: int, swap: bool, flat: bool, pack_x: bool,
    pack_dy: bool, sums: str,
) -> Kernel:  # fmt: skip
    """`task` and `finish_task`. `sums`: "direct" into dw, "scratch" and then to dw, or "parts" that are added later."""
    k = Kernel(target, dtype)
    planar = layout == "nchw"
    for rows in {m, max(1, m - 1)}:
        for vectors in {n, max(1, n - 1)}:
            _emit_tile(k, rows, vectors)
    if pack_x and flat:
        emit_pack_flat(k, FIELDS, storage, planar)
    elif pack_x:
        pitch = pitch_of(m) if swap else n * k.lanes
        emit_pack(k, storage, planar, "pack_x", pitch, pitch if swap else k.lanes)
    if pack_dy:
        pitch = n * k.lanes if swap else pitch_of(m)
        emit_pack(k, storage, planar, "pack_dy", pitch, k.lanes if swap else pitch)
    if sums != "direct":
        _emit_finish(k, storage, planar, swap, flat)
    _emit_task(k, storage, planar, m, n, swap, flat, pack_x, pack_dy, sums)
    if sums == "parts":
        _emit_finish_task(k, swap)
    return k


def pitch_of(m: int) -> int:
    """Elements of a pixel in a panel of m rows: a power of two, which vectors are transposed to."""
    return 1 << (m - 1).bit_length()


def _emit_tile(k: Kernel, m: int, n: int) -> None:
    """tile_M_N(...): out[i * pitch + lane] (+)= sum over images, rows and columns of a[i] * b[lane].

    A pixel's M elements of a and N vectors of b lie side by side; the steps between pixels are the operands' own.
    """
    steps = {f"{one}_{axis}": INT for one in "ab" for axis in ("image", "row", "col")}
    with k.function(
        f"tile_{m}_{n}", a=k.dtype, b=k.dtype, out=k.dtype, pitch=INT, accumulate=I1, images=INT, rows=INT, cols=INT,
        **steps,
    ) as (a, b, out, pitch, accumulate, images, rows, cols, a_image, a_row, a_col, b_image, b_row, b_col):  # fmt: skip
        cells = [[out + pitch * i + j * k.lanes for j in range(n)] for i in range(m)]
        sums = [[k.var(k.constant(0.0)) for _ in range(n)] for _ in range(m)]
        with k.loop(0, images) as image, k.loop(0, rows) as row:
            a_line, b_line = a + image * a_image + row * a_row, b + image * b_image + row * b_row
            with k.loop(0, cols) as col:
                factors, values = a_line + col * a_col, b_line + col * b_col
                loaded = [k.load(values + j * k.lanes) for j in range(n)]
                for i in range(m):
                    factor = k.broadcast(factors + i)
                    for j in range(n):
                        sums[i][j].set(k.fma(factor, loaded[j], sums[i][j].get()))
        with k.if_else(accumulate.value) as (then, otherwise):
            with then:
                for i in range(m):
                    for j in range(n):
                        k.store(cells[i][j], k.add(k.load(cells[i][j]), sums[i][j].get()))
            with otherwise:
                for i in range(m):
                    for j in range(n):
                        k.store(cells[i][j], sums[i][j].get())


def _emit_finish(k: Kernel, storage: str, planar: bool, swap: bool, flat: bool) -> None:
    """finish(args, sums, pitch, tap_step, line, group, k0, filters, c0, channels): sums to where they lie in dw."""
    with k.function(
        "finish", args="i64", sums=k.dtype, pitch=INT, tap_step=INT, line=k.dtype, group=INT, k0=INT, filters=INT,
        c0=INT, channels=INT,
    ) as (args, sums, pitch, tap_step, line, group, k0, filters, c0, channels):  # fmt: skip
        a = Fields(k, args, FIELDS)
        group_c, window = a.c // a.groups, a.kernel_h * a.kernel_w
        dw = a.pointer("y", storage) + ((group * (a.k // a.groups) + k0) * group_c) * window
        size = group_c * window
        if swap or (flat and planar):
            # Element by element: such gradients are small.
            by_tap, by_channel = (group_c, k.integer(1)) if not planar else (k.integer(1), window)
            with k.loop(0, a.kernel_h) as r, k.loop(0, a.kernel_w) as s, k.loop(0, channels) as c:
                tap = r * a.kernel_w + s
                out = dw + tap * by_tap + (c0 + c) * by_channel
                row, at = (s * group_c + c, r) if flat else (c, tap)
                here = sums + (row * pitch + at * tap_step if swap else at * tap_step + row)
                along = k.integer(1) if swap else pitch
                with k.loop(0, filters) as f:
                    k.store(out + f * size, k.load(here + f * along, 1))
        elif not planar:
            length = group_c * a.kernel_w if flat else channels
            with k.loop(0, filters) as f, k.loop(0, a.taps) as tap:
                here, out = sums + f * pitch + tap * tap_step, dw + f * size + tap * (size // a.taps) + c0
                k.rows(length, lambda i, lanes: k.store(out + i, k.load(here + i, lanes)))
        else:
            with k.loop(0, filters) as f:
                here, out = sums + f * pitch, dw + f * size + c0 * window
                with k.if_else(a.taps.eq(1)) as (one, many):
                    with one:
                        k.rows(channels, lambda i, lanes: k.store(out + i, k.load(here + i, lanes)))
                    with many:
                        # What a block writes beyond itself is written again while a vector of channels follows it.
                        there = (channels - k.lanes).max(0) // k.lanes * k.lanes
                        with k.loop(0, there, k.lanes) as c:
                            emit_channels(k, here + c, tap_step, a.taps, out + c * window, k.lanes)
                        with k.loop(there, channels, k.lanes) as c:
                            emit_channels(k, here + c, tap_step, a.taps, line + (c - there) * window, k.lanes)
                        rest = out + there * window
                        k.rows((channels - there) * window, lambda i, lanes: k.store(rest + i, k.load(line + i, lanes)))


def emit_channels(k: Kernel, sums: Ptr, tap_step: Int, taps: Int, line: Ptr, lanes: int) -> None:
    """A vector of channels of all taps, into channels of neighbouring taps. Writes up to a vector beyond the last.

    A store of a vector of taps reaches into the next channel, which is written later; so the last taps come first.
    """

    def part(first: Int, count: int) -> None:
        rows = [sums + (first + j).min(taps - 1) * tap_step for j in range(count)]
        for channel, (value,) in enumerate(columns_of(k, rows, lanes)):
            k.store(line + taps * channel + first, value)

    with k.if_else(taps <= min(4, lanes)) as (few, many):
        with few:
            part(k.integer(0), min(4, lanes))
        with many:
            groups = (taps + (lanes - 1)) // lanes
            with k.loop(0, groups) as number:
                part((groups - 1 - number) * lanes, lanes)


def _emit_finish_task(k: Kernel, swap: bool) -> None:
    """`finish_task`: a block of rows of the sums, all parts added in order, then written."""
    with entry(k, FIELDS, "finish_task") as (a, worker):
        group_k, group_c = a.k // a.groups, a.c // a.groups
        line = k.pointer(a.scratch + worker * a.scratch_step, k.dtype) + a.line_at
        parts = k.pointer(a.scratch + a.parts_at, k.dtype)
        pitch = a.taps * a.sum_lanes
        group_size = a.part_step // a.groups
        with k.loop(worker, a.finish_tasks, a.workers) as number:
            blocks = a.finish_tasks // a.groups
            block, group = number % blocks, number // blocks
            first = block * a.finish_rows
            rows = (group_size // pitch - first).min(a.finish_rows)
            sums = parts + group * group_size + first * pitch

            def add(i: Int, lanes: int, sums: Ptr = sums) -> None:
                total = k.var(k.load(sums + i, lanes))
                with k.loop(1, a.parts) as part:
                    total.set(k.add(total.get(), k.load(sums + part * a.part_step + i, lanes)))
                k.store(sums + i, total.get())

            # Rows are whole vectors: none is added twice.
            with k.loop(0, rows * pitch, k.lanes) as i:
                add(i, k.lanes)
            k0, filters = (k.integer(0), group_k) if swap else (first, rows)
            k.call("finish", a.args, sums, pitch, a.sum_lanes, line, group, k0, filters, 0, group_c)


class _Side:
    """One operand's panels: of rows (`unit` 1) or of vectors (`unit` lanes), `width` or one less of them wide."""

    def __init__(self, k: Kernel, width: int, unit: int, more: Int) -> None:
        self._k, self.width, self.unit, self._more = k, width, unit, more

    def start(self, panel: Int) -> Int:
        """Its first channel or filter; the first `more` panels are the wide ones."""
        return (panel * (self.width - 1) + panel.min(self._more)) * self.unit

    def wide(self, panel: Int) -> Any:
        return panel < self._more


def _emit_task(
    k: Kernel, storage: str, planar: bool, m: int, n: int, swap: bool, flat: bool, pack_x: bool, pack_dy: bool,
    sums: str,
) -> None:  # fmt: skip
    rows_name, lanes_name = ("x", "dy") if swap else ("dy", "x")
    with entry(k, FIELDS) as (a, worker):
        group_c, group_k = a.c // a.groups, a.k // a.groups
        x, dy = a.pointer("x", storage), a.pointer("w", storage)
        scratch = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        x_side = _Side(k, m if swap else n, 1 if swap else k.lanes, a.x_more)
        dy_side = _Side(k, n if swap else m, k.lanes if swap else 1, a.dy_more)
        sides = {"x": x_side, "dy": dy_side}
        x_length = group_c * a.kernel_w if flat else group_c
        with a.draws(worker) as number:
            x_block, dy_block, group, part = unravel(number, a.x_blocks, a.dy_blocks, a.groups)
            of = {"x": (x_block, a.x_panels, a.x_blocks), "dy": (dy_block, a.dy_panels, a.dy_blocks)}
            first = {name: block * panels // blocks for name, (block, panels, blocks) in of.items()}
            end = {name: (block + 1) * panels // blocks for name, (block, panels, blocks) in of.items()}
            c0, k0 = x_side.start(first["x"]), dy_side.start(first["dy"])
            channels = x_side.start(end["x"]).min(x_length) - c0
            filters = dy_side.start(end["dy"]).min(group_k) - k0
            r0, l0 = (c0, k0) if swap else (k0, c0)
            if sums == "direct":
                tap_step = x_length
                pitch = a.taps * tap_step
                out = a.pointer("y", storage) + (group * group_k + k0) * pitch + c0
            else:
                lanes = (filters if swap else channels) + (k.lanes - 1)
                tap_step = a.sum_lanes if sums == "parts" else lanes // k.lanes * k.lanes
                pitch = a.taps * tap_step
                if sums == "parts":
                    start = part * a.part_step + group * (a.part_step // a.groups)
                    out = k.pointer(a.scratch + a.parts_at, k.dtype) + start + r0 * pitch + l0
                else:
                    out = scratch + a.sums_at
            first_band = part * a.part_bands
            with k.loop(first_band, (first_band + a.part_bands).min(a.bands)) as band:
                row_block, image_block = band % a.row_blocks, band // a.row_blocks
                image0, p0 = image_block * a.band_images, row_block * a.p // a.row_blocks
                images, rows = (a.images - image0).min(a.band_images), (row_block + 1) * a.p // a.row_blocks - p0
                h0 = (p0 * a.stride_h - a.pad_h).max(0)
                h1 = ((p0 + rows - 1) * a.stride_h - a.pad_h + a.reach_h).min(a.h).max(h0)
                x_rows = (h1 - h0 + (a.row_step - 1)) // a.row_step
                steps: dict[str, tuple[Int, Int, Int]] = {}
                bases: dict[str, Callable[[Int], Ptr]] = {}
                # dy: rows p0 and further of its panels.
                if pack_dy:
                    pitch_dy = n * k.lanes if swap else pitch_of(m)
                    steps["dy"] = rows * a.q * pitch_dy, a.q * pitch_dy, k.integer(pitch_dy)
                    packed_dy = scratch + a.dy_at
                    bases["dy"] = lambda panel: packed_dy + (panel - first["dy"]) * a.dy_panel
                    with k.loop(first["dy"], end["dy"]) as panel, k.loop(0, images) as image:
                        filter_ = dy_side.start(panel)
                        count = dy_side.start(panel + 1).min(group_k) - filter_
                        filter_ = group * group_k + filter_
                        there = bases["dy"](panel) + image * steps["dy"][0]
                        plane = (image0 + image) * a.p * a.q * a.k
                        if planar:
                            source, step = dy + plane + (filter_ * a.p + p0) * a.q, a.p * a.q
                        else:
                            source, step = dy + plane + p0 * a.q * a.k + filter_, a.k
                        k.call("pack_dy", source, step, there, count, rows * a.q)
                else:
                    steps["dy"] = a.p * a.q * a.k, a.q * a.k, a.k
                    dy_here = dy.to(k.dtype) + (image0 * a.p + p0) * a.q * a.k + group * group_k
                    bases["dy"] = lambda panel: dy_here + dy_side.start(panel)
                # x: rows h0 and further, `row_step` apart.
                if flat:
                    row_length = a.flat_width * group_c
                    steps["x"] = x_rows * row_length, row_length, group_c
                    bases["x"] = lambda panel: scratch + x_side.start(panel)
                    with k.loop(0, images) as image, k.loop(0, x_rows) as row:
                        there = scratch + image * steps["x"][0] + row * row_length
                        line = (image0 + image) * a.h * a.w_in * a.c
                        if planar:
                            source = x + line + (group * group_c * a.h + h0 + row * a.row_step) * a.w_in
                        else:
                            source = x + line + (h0 + row * a.row_step) * a.w_in * a.c + group * group_c
                        k.call("pack_flat", a.args, source, there, group_c)
                elif pack_x:
                    pitch_x = pitch_of(m) if swap else n * k.lanes
                    steps["x"] = x_rows * a.w_in * pitch_x, a.w_in * pitch_x, k.integer(pitch_x)
                    bases["x"] = lambda panel: scratch + (panel - first["x"]) * a.x_panel
                    # Rows that follow each other are one run.
                    together = a.row_step.eq(1)
                    runs = k.select(together, k.integer(1), x_rows)
                    length = k.select(together, x_rows, k.integer(1)) * a.w_in
                    with k.loop(first["x"], end["x"]) as panel, k.loop(0, images) as image, k.loop(0, runs) as run:
                        channel = x_side.start(panel)
                        count = x_side.start(panel + 1).min(group_c) - channel
                        channel = group * group_c + channel
                        there = bases["x"](panel) + image * steps["x"][0] + run * steps["x"][1]
                        plane = (image0 + image) * a.h * a.w_in * a.c
                        h = h0 + run * a.row_step
                        if planar:
                            source, step = x + plane + (channel * a.h + h) * a.w_in, a.h * a.w_in
                        else:
                            source, step = x + plane + h * a.w_in * a.c + channel, a.c
                        k.call("pack_x", source, step, there, count, length)
                else:
                    steps["x"] = a.h * a.w_in * a.c, a.w_in * a.c * a.row_step, a.c
                    x_here = x.to(k.dtype) + (image0 * a.h + h0) * a.w_in * a.c + group * group_c
                    bases["x"] = lambda panel: x_here + x_side.start(panel)
                x_row, x_col = steps["x"][1] * (a.stride_h // a.row_step), steps["x"][2] * a.stride_w
                with k.loop(first[lanes_name], end[lanes_name]) as lane_panel:
                    with k.loop(first[rows_name], end[rows_name]) as row_panel, k.loop(0, a.taps) as tap:
                        table = a.pointer("taps_at", "i64") + tap * len(TAP)
                        p_first, p_end, q_first, q_end, tap_row, tap_col = (
                            k.load_int(table + i) for i in range(len(TAP))
                        )
                        top = p_first.max(p0)
                        height = (p_end.min(p0 + rows) - top).max(0)
                        width = q_end - q_first
                        panels = {lanes_name: lane_panel, rows_name: row_panel}
                        line = (top * a.stride_h + tap_row - h0) // a.row_step
                        there_x = bases["x"](panels["x"]) + line * steps["x"][1]
                        there_x = there_x + (q_first * a.stride_w + tap_col) * steps["x"][2]
                        there_dy = bases["dy"](panels["dy"]) + (top - p0) * steps["dy"][1] + q_first * steps["dy"][2]
                        strides = {"x": (steps["x"][0], x_row, x_col), "dy": steps["dy"]}
                        pointers = {"x": there_x, "dy": there_dy}
                        # Rows without a gap in either are one.
                        joined = k.both(x_row.eq(x_col * width), steps["dy"][1].eq(steps["dy"][2] * width))
                        tile_rows = k.select(joined, k.integer(1), height)
                        tile_cols = k.select(joined, width * height, width)
                        row_side, lane_side = sides[rows_name], sides[lanes_name]
                        here = out + (row_side.start(row_panel) - r0) * pitch + tap * tap_step
                        here = here + (lane_side.start(lane_panel) - l0)
                        more = row_side.wide(row_panel), lane_side.wide(lane_panel)
                        arguments = (
                            pointers[rows_name], pointers[lanes_name], here, pitch, band > first_band, images,
                            tile_rows, tile_cols, *strides[rows_name], *strides[lanes_name],
                        )  # fmt: skip
                        _call_tile(k, m, n, more, arguments)
            if sums == "scratch":
                shape = (k0, filters, 0 if flat else c0, group_c if flat else channels)
                k.call("finish", a.args, out, pitch, tap_step, scratch + a.line_at, group, *shape)


def _call_tile(k: Kernel, m: int, n: int, more: tuple[Any, Any], arguments: tuple[Any, ...]) -> None:
    with k.if_else(more[0]) as (tall, low):
        for block, rows in ((tall, m), (low, max(1, m - 1))):
            with block, k.if_else(more[1]) as (wide, narrow):
                with wide:
                    k.call(f"tile_{rows}_{n}", *arguments)
                with narrow:
                    k.call(f"tile_{rows}_{max(1, n - 1)}", *arguments)
