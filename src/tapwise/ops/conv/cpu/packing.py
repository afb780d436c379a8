"""Packing: how a kernel brings the input that a task needs into a packed tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapwise.cpu.copies import deinterleave, emit_copy_rows, emit_strided_copy
from tapwise.cpu.simd import Int, Kernel, Ptr


@dataclass(frozen=True)
class Window:
    """What packing one plane needs to know inside a kernel: the task's place and the tables of its phases.

    Row r of row phase i is input row (p0 + r) * stride_h + row_starts[i]. `columns` holds Strip.col_data. `plane` and
    `pitch` are those of the packed tile, `rows` its rows (with the filter's reach), h and w the input's size.
    """

    p0: Int
    q0: Int
    rows: Int
    row_starts: Ptr
    columns: Ptr
    row_phases: Int
    col_phases: Int
    stride_h: Int
    stride_w: Int
    h: Int
    w: Int
    pitch: Int
    plane: Int

    def col_range(self, k: Kernel, phase: Any) -> tuple[Int, Int, Int]:
        """(first, end, start): packed columns [first, end) of a phase hold data; u is input u * stride + start."""
        entry = self.columns + k.integer(phase) * 3
        first = (k.load_int(entry) - self.q0).max(0).min(self.pitch)
        end = (k.load_int(entry + 1) - self.q0).max(first).min(self.pitch)
        return first, end, k.load_int(entry + 2) + self.q0 * self.stride_w

    def row_range(self, k: Kernel, phase: Int) -> tuple[Int, Int, Int]:
        """(first, end, top): rows [first, end) of a phase lie inside the input; row 0 is input row `top`."""
        top = self.p0 * self.stride_h + k.load_int(self.row_starts + phase)
        before, inside = (0 - top).max(0), (self.h - top).max(0)
        first = (before + (self.stride_h - 1)) // self.stride_h
        return first, ((inside + (self.stride_h - 1)) // self.stride_h).min(self.rows).max(first), top


def emit_pack_plane(k: Kernel, window: Window, source: Ptr, out: Ptr) -> None:
    """Pack one channel: what lies inside the input, split into phases; the rest of `out` must be zero already.

    What depends on the task alone is worked out before the loop over rows. Phases of a stride of 2 or 4 are split in
    one pass over the row, other strides go phase by phase.
    """
    v = window
    with k.loop(0, v.row_phases) as row_phase:
        first_row, end_row, top = v.row_range(k, row_phase)
        rows = end_row - first_row
        source_pitch = v.stride_h * v.w
        there = source + (top + first_row * v.stride_h) * v.w
        here = out + row_phase * v.col_phases * v.plane + first_row * v.pitch
        rest = k.var(v.col_phases)
        with k.if_(v.stride_w.eq(1)):
            first, end, start = v.col_range(k, 0)
            emit_copy_rows(k, there + (start + first), source_pitch, here + first, v.pitch, rows, end - first)
            rest.set(k.integer(0))
        for ways in (2, 4):
            with k.if_(k.both(v.stride_w.eq(ways), v.col_phases.eq(ways))):
                _split_rows(k, v, ways, there, source_pitch, here, rows)
                rest.set(k.integer(0))
        with k.loop(0, rest.get()) as phase:
            first, end, start = v.col_range(k, phase)
            with k.loop(0, rows) as row:
                source_row = there + row * source_pitch + (start + first * v.stride_w)
                emit_strided_copy(
                    k, source_row, here + phase * v.plane + row * v.pitch + first, end - first, v.stride_w
                )


def emit_pack_pixels(
    k: Kernel, window: Window, source: Ptr, out: Ptr, channels: Int, step: Int, source_step: Int
) -> None:
    """Pack `channels` neighbouring channels of NHWC: pixels `source_step` elements apart become `step` apart."""
    v = window
    with k.loop(0, v.row_phases) as row_phase, k.loop(0, v.col_phases) as phase:
        first_row, end_row, top = v.row_range(k, row_phase)
        first, end, start = v.col_range(k, phase)
        with k.loop(first_row, end_row) as row:
            there = source + ((top + row * v.stride_h) * v.w + start) * source_step
            here = out + ((row_phase * v.col_phases + phase) * v.plane + row * v.pitch) * step
            pixels = v.stride_w * source_step
            emit_copy_rows(k, there + first * pixels, pixels, here + first * step, step, end - first, channels)


def _split_rows(k: Kernel, v: Window, ways: int, source: Ptr, source_pitch: Int, out: Ptr, rows: Int) -> None:
    """All phases of stride `ways` at once; the at most one column that some phases have and others do not, alone."""
    ranges = [v.col_range(k, phase) for phase in range(ways)]
    low, high = ranges[0][0], ranges[0][1]
    for first, end, _ in ranges[1:]:
        low, high = low.max(first), high.min(end)
    count, start = (high - low).max(0), ranges[0][2]

    def split(there: Ptr, here: Ptr, at: Int, lanes: int) -> None:
        parts = deinterleave(k, there + at * ways, ways, ways, lanes)
        for phase, part in enumerate(parts):
            k.store(here + v.plane * phase + at, part)

    def through(widths: list[int]) -> None:
        lanes, *narrower = widths
        with k.if_else(count >= lanes) as (then, otherwise):
            with then, k.loop(0, rows) as row:
                there = source + row * source_pitch + (start + low * ways)
                here = out + row * v.pitch + low
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
                    out + v.plane * phase + row * v.pitch + u,
                    k.load(source + row * source_pitch + (begin + u * ways), 1),
                )
