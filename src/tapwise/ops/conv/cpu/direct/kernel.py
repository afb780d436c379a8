"""The kernels of cpu.direct: a task packs its tile of the input, multiplies and finishes; filters into panels."""

from __future__ import annotations

from typing import Final

from tapwise.cpu import tile
from tapwise.cpu.copies import emit_zeros
from tapwise.cpu.epilogue import Epilogue, emit_finish_pixels, emit_finish_row
from tapwise.cpu.fields import COMMON, FILTER_STEPS, Fields, entry, unravel
from tapwise.cpu.filters import Filters, emit_filter_packer, emit_term_steps
from tapwise.cpu.pairs import PairKernel
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target
from tapwise.cpu.transposes import emit_to_pixels, emit_to_planes
from tapwise.ops.conv.cpu.direct.pairs_kernel import emit_pack_planes
from tapwise.ops.conv.cpu.packing import (
    Window,
    emit_pack_pixel_rows,
    emit_pack_pixels,
    emit_pack_plane,
    emit_pack_transposed_rows,
)  # fmt: skip

FIELDS: Final = (
    *COMMON, "sums_at", "offsets", "columns", "row_starts",
    "images", "groups", "group_c", "group_k", "h", "w_in", "p", "q", "stride_h", "stride_w",
    "row_phases", "col_phases",
    "rows", "cols", "image_block", "group_block", "filter_block", "channel_block",
    "row_blocks", "col_blocks", "image_blocks", "group_blocks", "filter_blocks",
    "taps", "pitch", "plane", "row_shift", "step", "flat", "sums_pitch", "filter_pad", "taps_h", "taps_w", "steps_at",
    "odd", "pieces", "piece_step", "block_terms", "whole_pixels", "pack_block", "pack_blocks",
    *FILTER_STEPS,
)  # fmt: skip


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, route: str, lanes: str, panels: bool, m: int, n: int,
    bias: bool, residual: bool, activation: str | None, pairs: bool = False, pieces: bool = False,
    fetch_y: bool = False,
) -> Kernel:  # fmt: skip
    """The kernels of one instance: `task`, and `pack_task` where filters are packed into panels. `pairs`: channels are
    pairs of bfloat16. `pieces`: of rows that meet padding, some terms are left out (pieces.py). `fetch_y`: straight
    routes ask for y before they write it."""
    k = PairKernel(target, dtype) if pairs else Kernel(target, dtype)
    planar = layout == "nchw"
    epilogue = Epilogue(k, storage, planar, bias, residual, activation)
    filters = Filters(k, lanes, m if lanes == "pixels" else n * k.lanes, in_place=not panels)
    if panels:
        given = k.dtype if pairs else storage
        emit_filter_packer(filters, given)
        _emit_filter_task(k, given, pieces)
    else:
        emit_term_steps(k)
    if isinstance(k, PairKernel) and planar:
        emit_pack_planes(k, FIELDS)
    elif route != "in place":
        if planar and lanes == "channels":
            emit_to_pixels(k, storage)
        _emit_pack_input(k, k.dtype if pairs else storage, planar, lanes)
    if route == "sums":
        tile.emit(k, m, n, filters, pieces)
        if planar and lanes == "channels":
            emit_to_planes(epilogue)
        else:
            emit_finish_row(epilogue)
        if not planar:
            emit_finish_pixels(epilogue)
        _emit_finish_output(k, storage, planar, lanes)
        _emit_task(k, storage, filters, pieces)
    else:
        tile.emit_straight(k, m, n, filters, epilogue, route == "in place", fetch_y)
        _emit_straight_task(k, storage, filters, route == "in place")
    return k


def _emit_pack_input(k: Kernel, storage: str, planar: bool, lanes: str) -> None:
    """pack_input(args, packed, image, channel, channels, p0, q0, rows): one image's planes of a block of channels.

    Only what lies inside the input is written: the rest of `packed` is zero already.
    """
    with k.function(
        "pack_input", args="i64", packed=k.dtype, image=INT, channel=INT, channels=INT, p0=INT, q0=INT, rows=INT
    ) as (args, packed, image, channel, channels, p0, q0, rows):
        a = Fields(k, args, FIELDS)
        window = Window(a, p0, q0, rows)
        total_c = a.group_c * a.groups
        x = a.pointer("x", storage)
        if planar:
            size, plane = a.row_phases * a.col_phases * a.plane, a.h * a.w_in
            first = x + (image * total_c + channel) * plane

            def planes() -> None:
                with k.loop(0, channels) as c:
                    emit_pack_plane(k, window, first + c * plane, packed + c * size)

            if lanes == "pixels":
                planes()
                return
            with k.if_else(a.whole_pixels.eq(1)) as (whole, parts):
                with whole:
                    emit_pack_transposed_rows(k, window, first, packed, channels)
                with parts:
                    planes()
        else:
            source = x + image * (a.h * a.w_in) * total_c + channel
            with k.if_else(a.whole_pixels.eq(1)) as (whole, parts):
                with whole:
                    emit_pack_pixel_rows(k, window, source, packed, total_c, a.step)
                with parts:
                    emit_pack_pixels(k, window, source, packed, channels, a.step, total_c)


def _emit_finish_output(k: Kernel, storage: str, planar: bool, lanes: str) -> None:
    """finish_output(args, sums, image, k0, filters, p0, q0, rows, cols): one image's sums, to y."""
    with k.function(
        "finish_output", args="i64", sums=k.dtype, image=INT, k0=INT, filters=INT, p0=INT, q0=INT, rows=INT, cols=INT
    ) as (args, sums, image, k0, filters, p0, q0, rows, cols):
        a = Fields(k, args, FIELDS)
        y, bias, residual = (a.pointer(name, storage) for name in ("y", "bias", "residual"))
        total_k = a.group_k * a.groups
        p, q, pitch, sums_pitch = a.p, a.q, a.pitch, a.sums_pitch
        if planar:
            at = ((image * total_k + k0) * p + p0) * q + q0
            if lanes == "pixels":
                with k.loop(0, filters) as f, k.loop(0, rows) as row:
                    there = at + (f * p + row) * q
                    here = sums + f * sums_pitch + row * pitch
                    k.call("finish_row", here, 1, bias + k0 + f, residual + there, y + there, cols)
                return
            # Rows that follow each other in y and in the sums are one run.
            one = k.both(pitch.eq(q), cols.eq(q))
            runs, length = k.select(one, k.integer(1), rows), k.select(one, rows * q, cols)
            with k.loop(0, runs) as row:
                there, here = at + row * q, sums + row * pitch * sums_pitch
                k.call(
                    "to_planes", here, sums_pitch, bias + k0, residual + there, y + there, p * q, length, filters
                )  # fmt: skip
        else:
            with k.loop(0, rows) as row:
                at = ((image * p + p0 + row) * q + q0) * total_k + k0
                here = sums + row * pitch * sums_pitch
                k.call("finish_pixels", here, sums_pitch, bias + k0, residual + at, y + at, total_k, cols, filters)


class _Source:
    """Where a task finds its filters."""

    def __init__(self, k: Kernel, a: Fields, worker: Int, filters: Filters) -> None:
        self._a, self._in_place, self._w, self.own = a, filters.in_place, a.pointer("w", k.dtype), []
        if filters.in_place:
            # The same for all tasks, blocks and groups.
            steps = k.pointer(a.scratch + worker * a.scratch_step + a.steps_at, "i64")
            k.call("term_steps", steps, a.w_c, a.w_r, a.w_s, a.channel_block, a.taps_h, a.taps_w)
            self.own = [steps, a.w_k]

    def block(self, group: Int, channel: Int, k0: Int, terms: Int) -> Ptr:
        """A group's filters from k0 on, for the block of gemm_k that begins with `channel`."""
        a = self._a
        if self._in_place:
            return self._w + (group * a.w_g + k0 * a.w_k + channel * a.w_c)
        return self._w + ((group * a.group_c + channel) * a.taps * a.filter_pad + k0 * terms)


def _emit_task(k: Kernel, storage: str, filters: Filters, pieces: bool) -> None:
    lanes = filters.lanes
    with entry(k, FIELDS) as (a, worker):
        packed = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        sums = packed + a.sums_at
        source, offsets = _Source(k, a, worker, filters), a.pointer("offsets", "i64")
        planes = a.plane * a.row_phases * a.col_phases
        with a.draws(worker) as number:
            row_block, col_block, image_block, filter_block, group_block = unravel(
                number, a.row_blocks, a.col_blocks, a.image_blocks, a.filter_blocks
            )
            p0, q0 = row_block * a.rows, col_block * a.cols
            rows, cols = (a.p - p0).min(a.rows), (a.q - q0).min(a.cols)
            image0, group0 = image_block * a.image_block, group_block * a.group_block
            images = (a.images - image0).min(a.image_block)
            k0 = filter_block * a.filter_block
            count = (a.group_k - k0).min(a.filter_block)
            pixels = (rows - 1) * a.pitch + cols
            vectors = ((pixels if lanes == "pixels" else count) + (k.lanes - 1)) // k.lanes
            size = a.channel_block * planes
            # All blocks of channels and groups of a task have their borders at the same places.
            emit_zeros(k, packed, images * size)
            with k.loop(group0, (group0 + a.group_block).min(a.groups)) as group:
                with k.loop(0, a.group_c, a.channel_block) as channel:
                    channels = (a.group_c - channel).min(a.channel_block)
                    with k.loop(0, images) as image:
                        k.call(
                            "pack_input", a.args, packed + image * size, image0 + image, group * a.group_c + channel,
                            channels, p0, q0, rows,
                        )  # fmt: skip
                    terms = channels * a.taps
                    here, rows_of, own = offsets, count if lanes == "pixels" else pixels, source.own
                    if pieces:
                        # The last block's channels may be fewer, and its terms lie elsewhere.
                        here = offsets + k.select(channels < a.channel_block, a.block_terms, k.integer(0))
                        table = a.pointer("pieces", "i64") + (col_block * a.row_blocks + row_block) * a.piece_step
                        rows_of, own = k.load_int(table), [table + 1, channels, a.taps_w]
                    with k.loop(0, images) as image:
                        k.call(
                            "block", packed + image * size, a.step, here, terms,
                            source.block(group, channel, k0, terms),
                            sums + image * a.flat * (1 if lanes == "pixels" else a.sums_pitch), a.sums_pitch,
                            rows_of, vectors, channel > 0, *own,
                        )  # fmt: skip
                with k.loop(0, images) as image:
                    k.call(
                        "finish_output", a.args, sums + image * a.flat * (1 if lanes == "pixels" else a.sums_pitch),
                        image0 + image, group * a.group_k + k0, count, p0, q0, rows, cols,
                    )  # fmt: skip


def _emit_straight_task(k: Kernel, storage: str, filters: Filters, in_place: bool) -> None:
    with entry(k, FIELDS) as (a, worker):
        packed = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        x, y, source = a.pointer("x", storage), a.pointer("y", storage), _Source(k, a, worker, filters)
        bias, residual = a.pointer("bias", storage), a.pointer("residual", storage)
        offsets = a.pointer("offsets", "i64")
        with a.draws(worker) as number:
            row_block, col_block, image, filter_block, group_block = unravel(
                number, a.row_blocks, a.col_blocks, a.images, a.filter_blocks
            )
            p0, q0 = row_block * a.rows, col_block * a.cols
            rows, cols = (a.p - p0).min(a.rows), (a.q - q0).min(a.cols)
            group0 = group_block * a.group_block
            k0 = filter_block * a.filter_block
            count = (a.group_k - k0).min(a.filter_block)
            # Rows that follow each other in the input and in y are one run.
            whole = k.both(a.pitch.eq(a.q), a.cols.eq(a.q))
            runs, length = k.select(whole, k.integer(1), rows), k.select(whole, rows * a.q, cols)
            if not in_place:
                emit_zeros(k, packed, a.channel_block * a.plane * a.row_phases * a.col_phases)
            with k.loop(group0, (group0 + a.group_block).min(a.groups)) as group:
                filter_ = group * a.group_k + k0
                at = ((image * a.groups * a.group_k + filter_) * a.p + p0) * a.q + q0
                with k.loop(0, a.group_c, a.channel_block) as channel:
                    channels = (a.group_c - channel).min(a.channel_block)
                    terms = channels * a.taps
                    plane = group * a.group_c + channel
                    if in_place:
                        there = x.to(k.dtype) + ((image * a.groups * a.group_c + plane) * a.h + p0) * a.w_in + q0
                    else:
                        k.call("pack_input", a.args, packed, image, plane, channels, p0, q0, rows)
                        there = packed
                    with k.loop(0, runs) as run:
                        here = at + run * a.q
                        k.call(
                            "run", there + run * a.pitch, offsets, terms, source.block(group, channel, k0, terms),
                            bias + filter_, residual + here, y + here, a.p * a.q, channel > 0,
                            channel + channels >= a.group_c, count, length, *source.own,
                        )  # fmt: skip


def _emit_filter_task(k: Kernel, storage: str, pieces: bool) -> None:
    """`pack_task`: all filters into panels; a task is some panels of one block of channels of one group. Terms are in
    the order (channel, tap), or (tap, channel) for `pieces`."""
    with entry(k, FIELDS, "pack_task") as (a, worker):
        w, packed = a.pointer("x", storage), a.pointer("w", k.dtype)
        blocks = (a.group_c + (a.channel_block - 1)) // a.channel_block
        length = a.group_c * a.taps
        with a.draws(worker) as number:
            pack_block, block, group = unravel(number, a.pack_blocks, blocks)
            k0 = pack_block * a.pack_block
            filters = (a.group_k - k0).min(a.pack_block)
            channel = block * a.channel_block
            terms = (a.group_c - channel).min(a.channel_block) * a.taps
            source = w + (group * a.w_g + k0 * a.w_k + channel * a.w_c)
            out = packed + group * length * a.filter_pad + channel * a.taps * a.filter_pad + k0 * terms
            steps, sizes = (a.w_c, a.w_r, a.w_s), ((a.group_c - channel).min(a.channel_block), a.taps_h, a.taps_w)
            if pieces:
                steps, sizes = (*steps[1:], steps[0]), (*sizes[1:], sizes[0])
            k.call("pack_filters", source, a.w_k, *steps, *sizes, out, filters)
