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
from functools import cached_property
from typing import Any

import numpy as np

from tapwise.cpu.common import ceil_div
from tapwise.cpu.epilogue import activate
from tapwise.cpu.simd import INT, Int, Kernel, Ptr
from tapwise.problem import ConvProblem


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


def emit_pack_row(k: Kernel, storage: str) -> None:
    """Emit `pack_row`: one input row into its column phases.

    pack_row(source, out, columns, phases, q0, stride, pitch, plane): `columns` holds Strip.col_data; phase a goes to
    out + a * plane, `pitch` elements of which those outside the input are zero. `source` is the row's first element.
    """
    with k.function(
        "pack_row", source=storage, out=k.dtype, columns="i64", phases=INT, q0=INT, stride=INT, pitch=INT, plane=INT
    ) as (source, out, columns, phases, q0, stride, pitch, plane):  # fmt: skip
        emit_phases(k, source, out, columns, phases, q0, stride, pitch, plane)
        with k.loop(0, phases) as phase:
            first, end, _ = _phase_range(k, columns + phase * 3, q0, pitch)
            with k.loop(0, first) as i:
                k.store(out + phase * plane + i, k.constant(0.0, 1))
            emit_zeros(k, out + phase * plane + end, pitch - end)


def _phase_range(k: Kernel, entry: Ptr, q0: Int, pitch: Int) -> tuple[Int, Int, Int]:
    """(first, end, start) of one entry of Strip.col_data, in a strip that starts at column q0."""
    first = (k.load_int(entry) - q0).max(0).min(pitch)
    return first, (k.load_int(entry + 1) - q0).max(first).min(pitch), k.load_int(entry + 2)


def emit_phases(
    k: Kernel, source: Ptr, out: Ptr, columns: Ptr, phases: Int, q0: Int, stride: Int, pitch: Int, plane: Int
) -> None:
    """One input row into its column phases: only the elements inside the input are written.

    All 2 or 4 phases of a stride of 2 or 4 are split in one pass; the few elements that the vectors leave, and other
    strides, go phase by phase.
    """
    done_from, done_to = k.var(k.integer(0)), k.var(k.integer(0))
    for ways in (2, 4):
        with k.if_(k.both(stride.eq(ways), phases.eq(ways))):
            ranges = [_phase_range(k, columns + phase * 3, q0, pitch) for phase in range(ways)]
            low, high = ranges[0][0], ranges[0][1]
            for first, end, _ in ranges[1:]:
                low, high = low.max(first), high.min(end)
            whole = (high - low).max(0) // k.lanes * k.lanes
            there = source + (ranges[0][2] + (q0 + low) * ways)
            with k.loop(0, whole, k.lanes) as i:
                parts = deinterleave(k, there + i * ways, ways, ways, k.lanes)
                for index, part in enumerate(parts):
                    k.store(out + plane * index + low + i, part)
            done_from.set(low)
            done_to.set(low + whole)
    with k.loop(0, phases) as phase:
        first, end, start = _phase_range(k, columns + phase * 3, q0, pitch)
        here, there = out + phase * plane, source + (start + q0 * stride)
        with k.if_else(done_from.get() < done_to.get()) as (split, not_split):
            with split:
                for low, high in ((first, done_from.get()), (done_to.get(), end)):
                    with k.loop(low, high) as u:
                        k.store(here + u, k.load(there + u * stride, 1))
            with not_split:
                emit_copy(k, there + first * stride, here + first, end - first, stride)


def emit_copy_rows(k: Kernel, source: Ptr, source_pitch: Int, out: Ptr, out_pitch: Int, rows: Int, count: Int) -> None:
    """Copy `rows` rows of `count` elements; the vector width is picked once for all of them."""

    def copy(widths: list[int]) -> None:
        lanes, *narrower = widths
        with k.if_else(count >= lanes) as (then, otherwise):
            with then, k.loop(0, rows) as row:
                there, here = source + row * source_pitch, out + row * out_pitch
                with k.loop(0, count - lanes, lanes) as i:
                    k.store(here + i, k.load(there + i, lanes))
                k.store(here + (count - lanes), k.load(there + (count - lanes), lanes))
            with otherwise:
                if narrower:
                    copy(narrower)

    copy(k.widths())


def emit_copy(k: Kernel, source: Ptr, out: Ptr, count: Int, stride: Int) -> None:
    """out[i] = source[i * stride]. Stride 2 takes every other lane of two vectors, other strides go one by one."""
    with k.if_else(stride.eq(1)) as (then, otherwise):
        with then:
            k.rows(count, lambda i, lanes: k.store(out + i, k.load(source + i, lanes)))
        with otherwise:
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
