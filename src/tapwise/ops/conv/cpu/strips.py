"""Strips: how cpu.direct and its kin cut a convolution into tasks, and how they bring a strip of the input in and out.

A task computes `rows` x `cols` outputs of `images` images. It packs the padded input it needs, split into stride
phases, so that row p, column q of the output reads tap (r, s) at one constant shift from the flat index p * pitch + q:

    stride 2, columns:  x0 x1 x2 x3 x4 x5  ->  phase 0: x0 x2 x4   phase 1: x1 x3 x5

The tile then runs over the flat index as if the strip were one long row; the few columns between a row's end and the
pitch are computed and thrown away. They are as few as can be: the zeros right of one row are the zeros left of the
next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from tapwise.cpu.common import ceil_div
from tapwise.cpu.epilogue import activate
from tapwise.cpu.simd import INT, Int, Kernel, Ptr
from tapwise.ops.conv.problem import ConvProblem


@dataclass(frozen=True)
class Strip:
    """Geometry of the strips of one problem: `rows` x `cols` outputs a strip. Lengths are in elements."""

    problem: ConvProblem
    rows: int
    cols: int
    lanes: int

    @cached_property
    def row_phases(self) -> list[int]:
        """Phases of the rows that some tap reads."""
        p = self.problem
        return sorted({r * p.dilation[0] % p.stride[0] for r in range(p.kernel[0])})

    @cached_property
    def col_phases(self) -> list[int]:
        p = self.problem
        return sorted({s * p.dilation[1] % p.stride[1] for s in range(p.kernel[1])})

    @cached_property
    def row_shift(self) -> int:
        """Rows of a packed plane beyond the strip's own."""
        p = self.problem
        return (p.kernel[0] - 1) * p.dilation[0] // p.stride[0]

    @cached_property
    def col_shift(self) -> int:
        p = self.problem
        return (p.kernel[1] - 1) * p.dilation[1] // p.stride[1]

    @cached_property
    def col_data(self) -> list[tuple[int, int, int]]:
        """For each column phase: packed columns [first, end) hold data, and packed column u is input u * stride +
        start."""
        p = self.problem
        result = []
        for phase in self.col_phases:
            start = phase - p.padding[1][0]
            first = max(0, ceil_div(-start, p.stride[1]))
            end = max(first, ceil_div(p.spatial[1] - start, p.stride[1]))
            result.append((first, end, start))
        return result

    @cached_property
    def pitch(self) -> int:
        """Distance of rows in a packed plane and in the flat index of outputs."""
        if self.cols < self.problem.output[1]:
            return self.cols + self.col_shift
        reach = self.cols + self.col_shift
        # A read past the pitch lands in the zeros at the start of the next row, if there are enough of them.
        return max(self.cols, *(max(min(end, reach), reach - first) for first, end, _ in self.col_data))

    @cached_property
    def flat(self) -> int:
        """Length of the flat index, up to a whole vector."""
        return ceil_div((self.rows - 1) * self.pitch + self.cols, self.lanes) * self.lanes

    @cached_property
    def plane(self) -> int:
        """Length of one packed plane (a channel's phase), with what the last vector reads beyond it.

        An odd number of 64-byte lines, so that the planes of successive channels start in different cache sets.
        """
        length = max(
            (self.rows + self.row_shift) * self.pitch, self.flat + self.row_shift * self.pitch + self.col_shift
        )
        line = 64 // 4
        return (ceil_div(length, line) | 1) * line

    @cached_property
    def planes(self) -> int:
        """Packed planes of one channel."""
        return len(self.row_phases) * len(self.col_phases)

    @cached_property
    def tap_shifts(self) -> np.ndarray:
        """(R, S) int64: where tap (r, s) reads, from the flat index, within one channel's planes."""
        p = self.problem
        shifts = np.empty(p.kernel, np.int64)
        for r in range(p.kernel[0]):
            shift_h, phase_h = divmod(r * p.dilation[0], p.stride[0])
            for s in range(p.kernel[1]):
                shift_w, phase_w = divmod(s * p.dilation[1], p.stride[1])
                index = self.row_phases.index(phase_h) * len(self.col_phases) + self.col_phases.index(phase_w)
                shifts[r, s] = index * self.plane + shift_h * self.pitch + shift_w
        return shifts


@dataclass(frozen=True)
class Window:
    """What packing one plane needs to know inside a kernel: the strip's place and the tables of its phases.

    Row r of row phase i is input row (p0 + r) * stride_h + row_starts[i]. `columns` holds Strip.col_data. `plane` and
    `pitch` are those of the packed strip, `rows` its rows (with the filter's reach), h and w the input's size.
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

    What depends on the strip alone is worked out before the loop over rows. Phases of a stride of 2 or 4 are split in
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


def emit_copy_rows(k: Kernel, source: Ptr, source_pitch: Int, out: Ptr, out_pitch: Int, rows: Int, count: Int) -> None:
    """Copy `rows` rows of `count` elements; how many vectors of which width is settled once for all of them."""

    def few(lanes: int, vectors: int) -> None:
        """Vectors side by side, the last one up to the end of the row."""
        starts = [k.integer(i * lanes) for i in range(vectors - 1)] + [count - lanes]
        with k.loop(0, rows) as row:
            there, here = source + row * source_pitch, out + row * out_pitch
            for at, value in [(at, k.load(there + at, lanes)) for at in starts]:
                k.store(here + at, value)

    def many(lanes: int) -> None:
        with k.loop(0, rows) as row, k.loop(0, count, lanes) as i:
            at = i.min(count - lanes)
            k.store(out + row * out_pitch + at, k.load(source + row * source_pitch + at, lanes))

    def pick(ways: list[tuple[int, Any]]) -> None:
        """ways: (shortest row, what copies it), the longest first."""
        (least, body), *rest = ways
        if not rest:
            body()
            return
        with k.if_else(count >= least) as (then, otherwise):
            with then:
                body()
            with otherwise:
                pick(rest)

    lanes, *narrower, one = k.widths()
    whole = [((vectors - 1) * lanes + 1, partial(few, lanes, vectors)) for vectors in (4, 3, 2)]
    halves = [(width, partial(few, width, 2)) for width in narrower]
    pick(
        [
            (4 * lanes + 1, partial(many, lanes)),
            *whole,
            (lanes, partial(few, lanes, 1)),
            *halves,
            (0, partial(many, one)),
        ]
    )


def emit_strided_copy(k: Kernel, source: Ptr, out: Ptr, count: Int, stride: Int) -> None:
    """out[i] = source[i * stride]: lanes of two vectors for stride 2, of four for stride 4, else one by one."""
    done = k.var(k.integer(0))
    for ways in (2, 4):
        with k.if_(stride.eq(ways)):
            # The vectors may not read past the last element, source[(count - 1) * stride].
            whole = (count - 1).max(0) // k.lanes * k.lanes
            with k.loop(0, whole, k.lanes) as i:
                k.store(out + i, deinterleave(k, source + i * ways, ways, 1, k.lanes)[0])
            done.set(whole)
    with k.loop(done.get(), count) as i:
        k.store(out + i, k.load(source + i * stride, 1))


def deinterleave(k: Kernel, source: Ptr, ways: int, wanted: int, lanes: int) -> list[Any]:
    """The first `wanted` of `ways` (2 or 4) interleaved vectors: result[s][t] = source[ways * t + s]."""
    if lanes == 1:
        return [k.load(source + s, 1) for s in range(wanted)]
    vectors = [k.load(source + i * lanes, lanes) for i in range(ways)]

    def split(parts: list[Any], first: int, step: int) -> list[Any]:
        """Streams first, first + step, ... of `parts`, a run of vectors that hold them interleaved."""
        if len(parts) == 1:
            return [parts[0]] if first < wanted else []
        pairs = list(zip(parts[::2], parts[1::2], strict=True))
        even = [k.shuffle(a, b, range(0, 2 * lanes, 2)) for a, b in pairs]
        odd = [k.shuffle(a, b, range(1, 2 * lanes, 2)) for a, b in pairs]
        evens, odds = split(even, first, 2 * step), split(odd, first + step, 2 * step)
        return [v for pair in zip(evens, odds, strict=False) for v in pair] + evens[len(odds) :]

    return split(vectors, 0, 1)


def emit_zeros(k: Kernel, out: Ptr, count: Int) -> None:
    """Zero `count` elements."""
    k.rows(count, lambda i, lanes: k.store(out + i, k.constant(0.0, lanes)))


def emit_finish_row(k: Kernel, storage: str, bias: str | None, residual: bool, activation: str | None) -> None:
    """Emit `finish_row`: sums into y = activation(sums + bias + residual), one contiguous run of outputs.

    finish_row(sums, step, bias, residual, y, count): `sums` are `step` elements apart. bias: "one" value for the run,
    "each" output its own, or None.
    """
    with k.function(
        "finish_row", sums=k.dtype, step=INT, bias_at=storage, residual_at=storage, y=storage, count=INT
    ) as (sums, step, bias_at, residual_at, y, count):  # fmt: skip

        def finish(value: Any, i: Int, lanes: int) -> None:
            if bias is not None:
                added = k.broadcast(bias_at, lanes) if bias == "one" else k.load(bias_at + i, lanes)
                value = k.add(value, added)
            if residual:
                value = k.add(value, k.load(residual_at + i, lanes))
            k.store(y + i, activate(k, activation, value))

        with k.if_else(step.eq(1)) as (then, otherwise):
            with then:
                k.rows(count, lambda i, lanes: finish(k.load(sums + i, lanes), i, lanes))
            with otherwise, k.loop(0, count) as i:
                finish(k.load(sums + i * step, 1), i, 1)
