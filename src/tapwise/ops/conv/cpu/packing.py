"""Packing: how a kernel brings the input that a task needs into a packed tile."""

from __future__ import annotations

from typing import Any

from tapwise.cpu.copies import deinterleave, emit_copy_rows, emit_strided_copy
from tapwise.cpu.fields import Fields
from tapwise.cpu.simd import Int, Kernel, Ptr


class Window:
    """What packing one plane needs to know inside a kernel: the task's place and, in `a`, PackedTile.fields.

    Row r of row phase i is input row (p0 + r) * stride_h + row_starts[i]. `rows` counts those of the packed tile, with
    the filter's reach.
    """

    def __init__(self, a: Fields, p0: Int, q0: Int, rows: Int) -> None:
        self.a, self.p0, self.q0, self.rows = a, p0, q0, rows + a.row_shift
        self.row_starts, self.columns = a.pointer("row_starts", "i64"), a.pointer("columns", "i64")

    def col_range(self, k: Kernel, phase: Any) -> tuple[Int, Int, Int]:
        """(first, end, start): packed columns [first, end) of a phase hold data; u is input u * stride + start."""
        entry = self.columns + k.integer(phase) * 3
        first = (k.load_int(entry) - self.q0).max(0).min(self.a.pitch)
        end = (k.load_int(entry + 1) - self.q0).max(first).min(self.a.pitch)
        return first, end, k.load_int(entry + 2) + self.q0 * self.a.stride_w

    def row_range(self, k: Kernel, phase: Int) -> tuple[Int, Int, Int]:
        """(first, end, top): rows [first, end) of a phase lie inside the input; row 0 is input row `top`."""
        top = self.p0 * self.a.stride_h + k.load_int(self.row_starts + phase)
        before, inside = (0 - top).max(0), (self.a.h - top).max(0)
        first = (before + (self.a.stride_h - 1)) // self.a.stride_h
        return first, ((inside + (self.a.stride_h - 1)) // self.a.stride_h).min(self.rows).max(first), top


def emit_pack_plane(k: Kernel, window: Window, source: Ptr, out: Ptr) -> None:
    """Pack one channel: what lies inside the input, split into phases; the rest of `out` must be zero already.

    What depends on the task alone is worked out before the loop over rows. Phases of a stride of 2 or 4 are split in
    one pass over the row, other strides go phase by phase.
    """
    v, a = window, window.a
    with k.loop(0, a.row_phases) as row_phase:
        first_row, end_row, top = v.row_range(k, row_phase)
        rows = end_row - first_row
        source_pitch = a.stride_h * a.w_in
        there = source + (top + first_row * a.stride_h) * a.w_in
        here = out + row_phase * a.col_phases * a.plane + first_row * a.pitch
        rest = k.var(a.col_phases)
        with k.if_(a.stride_w.eq(1)):
            first, end, start = v.col_range(k, 0)
            emit_copy_rows(k, there + (start + first), source_pitch, here + first, a.pitch, rows, end - first)
            rest.set(k.integer(0))
        for ways in (2, 4):
            with k.if_(k.both(a.stride_w.eq(ways), a.col_phases.eq(ways))):
                _split_rows(k, v, ways, there, source_pitch, here, rows)
                rest.set(k.integer(0))
        with k.loop(0, rest.get()) as phase:
            first, end, start = v.col_range(k, phase)
            with k.loop(0, rows) as row:
                source_row = there + row * source_pitch + (start + first * a.stride_w)
                emit_strided_copy(
                    k, source_row, here + phase * a.plane + row * a.pitch + first, end - first, a.stride_w
                )


def emit_pack_pixels(
    k: Kernel, window: Window, source: Ptr, out: Ptr, channels: Int, step: Int, source_step: Int
) -> None:
    """Pack `channels` neighbouring channels of NHWC: pixels `source_step` elements apart become `step` apart."""
    v, a = window, window.a
    with k.loop(0, a.row_phases) as row_phase, k.loop(0, a.col_phases) as phase:
        first_row, end_row, top = v.row_range(k, row_phase)
        first, end, start = v.col_range(k, phase)
        with k.loop(first_row, end_row) as row:
            there = source + ((top + row * a.stride_h) * a.w_in + start) * source_step
            here = out + ((row_phase * a.col_phases + phase) * a.plane + row * a.pitch) * step
            pixels = a.stride_w * source_step
            emit_copy_rows(k, there + first * pixels, pixels, here + first * step, step, end - first, channels)


def emit_pack_pixel_rows(k: Kernel, window: Window, source: Ptr, out: Ptr, pixel: Int, step: Int) -> None:
    """Pack rows of whole pixels of NHWC, of `pixel` elements each: copies. A flat index is `step` elements, the pixels
    of one stride; taps of all column phases lie in it."""
    v, a = window, window.a
    left = v.q0 * a.stride_w + k.load_int(v.columns + 2)
    first = (0 - left).max(0)
    count = (a.w_in - left).min(a.pitch * a.stride_w) - first
    with k.loop(0, a.row_phases) as row_phase:
        first_row, end_row, top = v.row_range(k, row_phase)
        there = source + ((top + first_row * a.stride_h) * a.w_in + left + first) * pixel
        here = out + (row_phase * a.plane + first_row * a.pitch) * step + first * pixel
        distance = a.stride_h * a.w_in * pixel
        emit_copy_rows(k, there, distance, here, a.pitch * step, end_row - first_row, count.max(0) * pixel)


def emit_pack_transposed_rows(k: Kernel, window: Window, source: Ptr, out: Ptr, channels: Int) -> None:
    """The same of `channels` planes of NCHW, transposed; a pixel has room for the channels of a block."""
    v, a = window, window.a
    left = v.q0 * a.stride_w + k.load_int(v.columns + 2)
    first = (0 - left).max(0)
    count = ((a.w_in - left).min(a.pitch * a.stride_w) - first).max(0)
    with k.loop(0, a.row_phases) as row_phase:
        first_row, end_row, top = v.row_range(k, row_phase)
        # Rows that follow each other in both are one run.
        one = k.both(a.stride_h.eq(1), k.both(count.eq(a.w_in), (a.pitch * a.stride_w).eq(a.w_in)))
        end = k.select(one, first_row + (end_row - first_row).min(1), end_row)
        length = k.select(one, (end_row - first_row) * count, count)
        with k.loop(first_row, end) as row:
            there = source + ((top + row * a.stride_h) * a.w_in + left + first)
            here = out + (row_phase * a.plane + row * a.pitch) * a.step + first * a.channel_block
            k.call("to_pixels", there, a.h * a.w_in, here, a.channel_block, length, channels)


def _split_rows(k: Kernel, v: Window, ways: int, source: Ptr, source_pitch: Int, out: Ptr, rows: Int) -> None:
    """All phases of stride `ways` at once; the at most one column that some phases have and others do not, alone."""
    a = v.a
    ranges = [v.col_range(k, phase) for phase in range(ways)]
    low, high = ranges[0][0], ranges[0][1]
    for first, end, _ in ranges[1:]:
        low, high = low.max(first), high.min(end)
    count, start = (high - low).max(0), ranges[0][2]

    def split(there: Ptr, here: Ptr, at: Int, lanes: int) -> None:
        parts = deinterleave(k, there + at * ways, ways, ways, lanes)
        for phase, part in enumerate(parts):
            k.store(here + a.plane * phase + at, part)

    def through(widths: list[int]) -> None:
        lanes, *narrower = widths
        with k.if_else(count >= lanes) as (then, otherwise):
            with then, k.loop(0, rows) as row:
                there = source + row * source_pitch + (start + low * ways)
                here = out + row * a.pitch + low
                with k.loop(0, count - lanes, lanes) as i:
                    split(there, here, i, lanes)
                split(there, here, count - lanes, lanes)
            with otherwise:
                if narrower:
                    through(narrower)

    through(k.widths())
    for phase, (first, end, begin) in enumerate(ranges):
        for one, other in ((first, low.min(end)), (high.max(low).max(first), end)):
            with k.loop(0, rows) as row, k.loop(one, other) as u:
                k.store(
                    out + a.plane * phase + row * a.pitch + u,
                    k.load(source + row * source_pitch + (begin + u * ways), 1),
                )
