"""The kernel of cpu.amx: a task packs its pixels, multiplies tiles of them with tiles of filters, and finishes."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from tapwise.cpu.amx import CONFIG_BYTES, ROWS, TileKernel
from tapwise.cpu.copies import emit_zeros, interleave
from tapwise.cpu.epilogue import Epilogue, emit_finish_pixels, emit_finish_row
from tapwise.cpu.fields import COMMON, FILTER_STEPS, Fields, entry, unravel
from tapwise.cpu.pairs import pair_of_planes
from tapwise.cpu.simd import I1, INT, Int, Ptr, Target
from tapwise.cpu.transposes import rows_of
from tapwise.integers import ceil_div

FIELDS: Final = (
    *COMMON,
    "h", "w_in", "p", "q", "pad_h", "pad_w", "row_take", "row_step", "col_take",
    "images", "groups", "group_c", "group_k",
    "rows", "cols", "filter_block", "row_blocks", "col_blocks", "filter_blocks",
    "pixel", "width", "pixel_step", "down", "reach_h", "reach_w",
    "steps", "step_pairs", "offsets", "configs", "sums_at", "taps_h", "taps_w", *FILTER_STEPS,
)  # fmt: skip
# Filters of two tiles.
PANEL: Final = 32


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, channels: int, bias: bool, residual: bool,
    activation: str | None,
) -> TileKernel:  # fmt: skip
    """`task`, and `pack_task` for the filters. `channels`: of a group, where their pairs do not fill a
    vector; else 0."""
    k = TileKernel(target, dtype)
    planar = layout == "nchw"
    epilogue = Epilogue(k, storage, planar, bias, residual, activation)
    if planar:
        _emit_pairs_to_pixels(k, channels)
        _emit_panel_to_planes(epilogue)
    else:
        emit_finish_row(epilogue)
        emit_finish_pixels(epilogue)
    _emit_pack(k, planar)
    _emit_products(k)
    _emit_filter_task(k)
    with entry(k, FIELDS) as (a, worker):
        packed = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        sums, configs = packed + a.sums_at, a.pointer("configs", "i64")
        with a.draws(worker) as number:
            row_block, col_block, filter_block, image, group = unravel(
                number, a.row_blocks, a.col_blocks, a.filter_blocks, a.images
            )
            p0, q0, k0 = row_block * a.rows, col_block * a.cols, filter_block * a.filter_block
            rows, cols = (a.p - p0).min(a.rows), (a.q - q0).min(a.cols)
            count = (a.group_k - k0).min(a.filter_block)
            k.call("pack", a.args, packed, image, group, p0, q0, rows, cols)
            # As many pixels in each tile of a row.
            across = (cols + (ROWS - 1)) // ROWS
            tile = (cols + (across - 1)) // across
            k.configure(configs + (tile - 1) * (CONFIG_BYTES // 8))
            panels = (a.group_k + (PANEL - 1)) // PANEL
            filters = k.pointer(a.w, k.dtype) + (group * panels + k0 // PANEL) * a.steps * a.step_pairs * PANEL
            with k.loop(0, count, PANEL) as first:
                panel = filters + first * a.steps * a.step_pairs
                k.call("products", a.args, packed, sums, panel, rows, cols, across, tile)
                some = (count - first).min(PANEL)
                _finish(k, a, storage, planar, sums, image, group, k0 + first, some, p0, q0, rows, cols)
        k.release()
    return k


def _emit_pairs_to_pixels(k: TileKernel, channels: int) -> None:
    """pairs_to_pixels(source, plane, out, step, pixels, channels): planes of bfloat16, `plane` elements apart, to
    pixels `step` pairs apart. The last pair of an odd number of channels has a zero.

    `channels`, if not 0: so many, too few for a vector of pairs; a pixel has room for a power of two of these.
    """
    with k.function(
        "pairs_to_pixels", source="bf16", plane=INT, out=k.dtype, step=INT, pixels=INT, channels=INT
    ) as (source, plane, out, step, pixels, count):  # fmt: skip
        width = narrow_pairs(channels) if channels else k.lanes
        pairs = (count + 1) // 2

        def pair(here: Ptr, first: Int, lane: int, lanes: int) -> Any:
            if channels and 2 * lane >= channels:
                return k.constant(0.0, lanes)
            # Of many channels only the last pair may be of one.
            whole = ir.Constant(I1, 2 * lane + 1 < channels if channels else 1)
            if not channels and lane == width - 1:
                whole = first * 2 + (2 * lane + 1) < count
            return k.load(pair_of_planes(k, here + plane * (2 * lane), plane, whole), lanes)

        def body(first: Int, at: Int, lanes: int) -> None:
            here, there = source + (first * 2 * plane + at), out + (at * step + first)
            planes = [pair(here, first, lane, lanes) for lane in range(width)]
            if lanes == 1:
                for lane, value in enumerate(planes):
                    k.store(there + lane, value)
                return
            for index, vector in enumerate(interleave(k, planes)):
                for begin in range(0, lanes, part := min(lanes, width)):
                    pixel, inside = divmod(index * lanes + begin, width)
                    some = vector if part == lanes else k.shuffle(vector, vector, range(begin, begin + part))
                    k.store(there + step * pixel + inside, some)

        with k.loop(0, pairs, width) as c:
            first = k.integer(0) if channels else c.min(pairs - width)
            k.rows(pixels, lambda at, lanes: body(first, at, lanes))


def narrow_pairs(channels: int) -> int:
    """Pairs of a pixel of few channels: a power of two."""
    return 1 << (ceil_div(channels, 2) - 1).bit_length()


def _emit_pack(k: TileKernel, planar: bool) -> None:
    """pack(args, packed, image, group, p0, q0, rows, cols): what a task reads of a group's channels, pixel by pixel.

    Row i of it is input row p0 * row_take + i * row_step - pad_h, of columns from q0 * col_take - pad_w on.
    """
    with k.function(
        "pack", args="i64", packed=k.dtype, image=INT, group=INT, p0=INT, q0=INT, rows=INT, cols=INT
    ) as (args, packed, image, group, p0, q0, rows, cols):  # fmt: skip
        a = Fields(k, args, FIELDS)
        x = a.pointer("x", "bf16")
        total_c, plane = a.group_c * a.groups, a.h * a.w_in
        high = (rows - 1) * a.down + a.reach_h
        top, left = p0 * a.row_take - a.pad_h, q0 * a.col_take - a.pad_w
        wide = ((cols - 1) * a.col_take + a.reach_w).min(a.width)
        emit_zeros(k, packed, high * a.width * a.pixel)
        first = (0 - left).max(0)
        count = ((a.w_in - left).min(wide) - first).max(0)
        # Rows that follow each other in both are one run.
        one = k.both(a.row_step.eq(1), k.both(count.eq(a.w_in), count.eq(a.width)))
        begin = ((0 - top).max(0) + (a.row_step - 1)) // a.row_step
        end = (((a.h - top).max(0) + (a.row_step - 1)) // a.row_step).min(high).max(begin)
        runs = k.select(one, begin + (end - begin).min(1), end)
        length = k.select(one, (end - begin) * count, count)
        with k.loop(begin, runs) as row:
            at = (top + row * a.row_step) * a.w_in + left + first
            out = packed + (row * a.width + first) * a.pixel
            if planar:
                source = x + ((image * total_c + group * a.group_c) * plane + at)
                k.call("pairs_to_pixels", source, plane, out, a.pixel, length, a.group_c)
            else:
                _copy_pixels(k, x + ((image * plane + at) * total_c + group * a.group_c), total_c, out, a, length)


def _copy_pixels(k: TileKernel, source: Ptr, total_c: Int, out: Ptr, a: Fields, pixels: Int) -> None:
    """Channels of pixels side by side, as bits: pixel by pixel, or all at once where they follow each other."""
    whole = k.both((a.pixel * 2).eq(a.group_c), a.groups.eq(1))
    runs, length = k.select(whole, k.integer(1), pixels), k.select(whole, pixels * a.group_c, a.group_c)

    def move(i: Int, lanes: int, here: Ptr, there: Ptr) -> None:
        k.b.store(k.load_bits(there + i, lanes), (here + i).value, align=2)

    with k.loop(0, runs) as pixel:
        there, here = source + pixel * total_c, out.to("bf16") + pixel * a.pixel * 2
        k.rows(length, lambda i, lanes: move(i, lanes, here, there), [32, 16, 8, 4, 1])


def _emit_products(k: TileKernel) -> None:
    """products(args, packed, sums, panel, rows, cols, across, tile): two tiles of pixels by two of filters at a time.

    sums[(row * cols + col) * PANEL + filter]; the last tile of a row overlaps the one before it.
    """
    with k.function(
        "products", args="i64", packed=k.dtype, sums=k.dtype, panel=k.dtype, rows=INT, cols=INT, across=INT, tile=INT
    ) as (args, packed, sums, panel, rows, cols, across, tile):  # fmt: skip
        a = Fields(k, args, FIELDS)
        offsets, tiles, pixel_bytes = a.pointer("offsets", "i64"), rows * across, a.pixel_step * 4

        def place(number: Int) -> tuple[Ptr, Ptr]:
            """Where a tile's first pixel is read, and its sums go."""
            row, start = number // across, (number % across * tile).min(cols - tile)
            there = packed + (row * a.down * a.width * a.pixel + start * a.pixel_step)
            return there, sums + (row * cols + start) * PANEL

        with k.loop(0, tiles, 2) as pair:
            (one, sums_one), (two, sums_two) = place(pair), place((pair + 1).min(tiles - 1))
            for number in range(4):
                k.zero(number)
            with k.loop(0, a.steps) as step:
                at, here = k.load_int(offsets + step), panel + step * a.step_pairs * PANEL
                k.load_tile(4, one + at, pixel_bytes)
                k.load_tile(6, here, 4 * PANEL)
                k.load_tile(5, two + at, pixel_bytes)
                k.load_tile(7, here + PANEL // 2, 4 * PANEL)
                # The next step's filters: a panel streams from L2.
                for line in range(2 * ROWS):
                    k.prefetch(here + a.step_pairs * PANEL + line * 16, near=True)
                for number in range(4):
                    k.add_products(number, 4 + number // 2, 6 + number % 2)
            for number in range(4):
                there = (sums_one, sums_two)[number // 2] + number % 2 * (PANEL // 2)
                k.store_tile(there, 4 * PANEL, number)


def _emit_panel_to_planes(epilogue: Epilogue) -> None:
    """panel_to_planes(sums, bias, residual, y, pitch, pixels, count): sums of pixels PANEL apart, finished, to `count`
    planes of y `pitch` apart. Plane after plane, or a vector of them: their lines lie far from each other."""
    k, storage = epilogue.k, epilogue.storage
    with k.function(
        "panel_to_planes", sums=k.dtype, bias=storage, residual=storage, y=storage, pitch=INT, pixels=INT, count=INT
    ) as (sums, bias, residual, y, pitch, pixels, count):  # fmt: skip

        def planes(f: Int, at: Int, lanes: int, here: Int | None) -> None:
            vectors = [k.load(sums + (at + pixel) * PANEL + f) for pixel in range(lanes)]
            spot = f * pitch + at
            for lane, value in enumerate(rows_of(k, interleave(k, vectors), lanes)):

                def store(lane: int = lane, value: Any = value, spot: Int = spot) -> None:
                    k.store(y + spot, epilogue.finish(value, bias + f + lane, residual + spot))

                if here is None:
                    store()
                else:
                    with k.if_(here > lane):
                        store()
                spot = spot + pitch

        with k.loop(0, count, k.lanes) as f:
            here = count - f
            with k.if_else(here >= k.lanes) as (then, otherwise):
                with then:
                    k.rows(pixels, lambda at, lanes: planes(f, at, lanes, None))
                with otherwise:
                    k.rows(pixels, lambda at, lanes: planes(f, at, lanes, here))


def _emit_filter_task(k: TileKernel) -> None:
    """`pack_task`: filters of any strides to panels [tap][pair][filter]; a task is a panel."""
    with entry(k, FIELDS, "pack_task") as (a, worker):
        w, packed = a.pointer("x", "bf16"), a.pointer("w", k.dtype)
        panels, size = (a.group_k + (PANEL - 1)) // PANEL, a.taps_h * a.taps_w * a.pixel * PANEL
        with a.draws(worker) as number:
            group, first, panel = number // panels, number % panels * PANEL, packed + number * size
            emit_zeros(k, panel, size)
            with (
                k.loop(0, (a.group_k - first).min(PANEL)) as lane,
                k.loop(0, a.taps_h) as r,
                k.loop(0, a.taps_w) as s,
            ):
                source = w + (group * a.w_g + (first + lane) * a.w_k + r * a.w_r + s * a.w_s)
                out = panel + (r * a.taps_w + s) * a.pixel * PANEL + lane
                with k.loop(0, a.group_c // 2) as pair:
                    here = source + pair * 2 * a.w_c
                    k.store(out + pair * PANEL, k.paired(k.lower_half(here), k.lower_half(here + a.w_c)))
                with k.if_((a.group_c % 2).eq(1)):
                    last = a.group_c // 2
                    k.store(out + last * PANEL, k.lower_half(source + last * 2 * a.w_c))


def _finish(
    k: TileKernel, a: Fields, storage: str, planar: bool, sums: Ptr, image: Int, group: Int, k0: Int, count: Int,
    p0: Int, q0: Int, rows: Int, cols: Int,
) -> None:  # fmt: skip
    y, bias, residual = (a.pointer(name, storage) for name in ("y", "bias", "residual"))
    total_k, filter_ = a.group_k * a.groups, group * a.group_k + k0
    if planar:
        one = cols.eq(a.q)
        runs, length = k.select(one, k.integer(1), rows), k.select(one, rows * a.q, cols)
        with k.loop(0, runs) as row:
            at = ((image * total_k + filter_) * a.p + p0 + row) * a.q + q0
            k.call(
                "panel_to_planes", sums + row * cols * PANEL, bias + filter_, residual + at, y + at, a.p * a.q, length,
                count,
            )  # fmt: skip
        return
    with k.loop(0, rows) as row:
        at = ((image * a.p + p0 + row) * a.q + q0) * total_k + filter_
        here = sums + row * cols * PANEL
        k.call("finish_pixels", here, PANEL, bias + filter_, residual + at, y + at, total_k, cols, count)
