"""The kernels of cpu.simd of im2col and col2im."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tapwise.cpu.copies import emit_strided_copy
from tapwise.cpu.fields import COMMON, Fields, entry
from tapwise.cpu.simd import Int, Kernel, Ptr, Target

AXES: Final = ("0", "1", "2")
FIELDS: Final = (
    *COMMON, *(name + axis for name in ("size", "out", "taps", "stride", "pad", "dilation") for axis in AXES),
    "planes", "block", "row_blocks", "row_size", "accumulate",
)  # fmt: skip


def generate_im2col(target: Target, *, dtype: str, storage: str) -> Kernel:
    """`task`: `block` (plane, tap) pairs, row by row."""
    k = Kernel(target, dtype)
    with entry(k, FIELDS) as (a, worker):
        taps = a.taps0 * a.taps1 * a.taps2
        with a.draws(worker) as number:
            row_block, first = number % a.row_blocks, number // a.row_blocks * a.block
            rows = a.out0 * a.out1
            low, high = row_block * rows // a.row_blocks, (row_block + 1) * rows // a.row_blocks
            with k.loop(first, (first + a.block).min(a.planes * taps)) as pair:
                plane, tap = pair // taps, pair % taps
                t, r, s = tap // (a.taps1 * a.taps2), tap // a.taps2 % a.taps1, tap % a.taps2
                shift = s * a.dilation2 - a.pad2
                # Windows [begin, end) of a row see the image with this tap.
                begin = ((0 - shift).max(0) + (a.stride2 - 1)) // a.stride2
                end = ((a.size2 - shift).max(0) + (a.stride2 - 1)) // a.stride2
                begin, end = begin.min(a.out2), end.min(a.out2).max(begin.min(a.out2))
                with k.loop(low, high) as row:
                    d = row // a.out1 * a.stride0 + t * a.dilation0 - a.pad0
                    h = row % a.out1 * a.stride1 + r * a.dilation1 - a.pad1
                    inside = k.both(k.both(d >= 0, d < a.size0), k.both(h >= 0, h < a.size1))
                    y = a.pointer("y", storage) + (pair * rows + row) * a.out2
                    source = a.pointer("x", storage) + ((plane * a.size0 + d) * a.size1 + h) * a.size2 + shift
                    low_q = k.select(inside, begin, a.out2)
                    count = k.select(inside, end - begin, k.integer(0))
                    _zeros(k, y, low_q)
                    _zeros(k, y + low_q + count, a.out2 - low_q - count)
                    with k.if_else(a.stride2.eq(1)) as (dense, thin):
                        with dense:
                            _copy(k, source + low_q, y + low_q, count)
                        with thin:
                            emit_strided_copy(k, source + low_q * a.stride2, y + low_q, count, a.stride2)
    return k


def _zeros(k: Kernel, y: Ptr, count: Int) -> None:
    with k.if_(count > 0):
        k.rows(count, lambda i, lanes: k.store(y + i, k.constant(0.0, lanes)))


def _copy(k: Kernel, x: Ptr, y: Ptr, count: Int) -> None:
    with k.if_(count > 0):
        k.rows(count, lambda i, lanes: k.store(y + i, k.load(x + i, lanes), exact=True))


def _once(k: Kernel, count: Int, body: Callable[[Int, int], None]) -> None:
    """body(i, lanes) over i < count, each element once: vectors, half a vector, the rest one by one."""
    start = count - count % k.lanes
    with k.loop(0, start, k.lanes) as i:
        body(i, k.lanes)
    lanes = k.lanes // 2
    if lanes >= 2:
        following = count - count % lanes
        with k.if_(following > start):
            body(start, lanes)
        start = following
    with k.loop(start, count) as i:
        body(i, 1)


def generate_col2im(target: Target, *, dtype: str, storage: str) -> Kernel:
    """`task`: `block` planes of the image, row by row."""
    k = Kernel(target, dtype)
    with entry(k, FIELDS) as (a, worker):
        sums = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        taps = a.taps0 * a.taps1 * a.taps2
        patches = a.out0 * a.out1 * a.out2
        with a.draws(worker) as number:
            row_block, first = number % a.row_blocks, number // a.row_blocks * a.block
            rows = a.size0 * a.size1
            low, high = row_block * rows // a.row_blocks, (row_block + 1) * rows // a.row_blocks
            with k.loop(first, (first + a.block).min(a.planes)) as plane, k.loop(low, high) as row:
                y = a.pointer("y", storage) + (plane * rows + row) * a.size2
                x = a.pointer("x", storage) + plane * taps * patches
                k.rows(a.row_size * a.stride2, lambda i, lanes: k.store(sums + i, k.constant(0.0, lanes)))
                _add_rows(k, a, sums, x, row)
                _write_row(k, a, sums, y)
    return k


def _add_rows(k: Kernel, a: Fields, sums: Ptr, x: Ptr, row: Int) -> None:
    """Add to the sums what the columns hold of one row of the image."""
    d, h = row // a.size1, row % a.size1
    with k.loop(0, a.taps0) as t:
        o = d + a.pad0 - t * a.dilation0
        with k.if_(k.both(o >= 0, (o % a.stride0).eq(0))):
            o = o // a.stride0
            with k.if_(o < a.out0), k.loop(0, a.taps1) as r:
                p = h + a.pad1 - r * a.dilation1
                with k.if_(k.both(p >= 0, (p % a.stride1).eq(0))):
                    p = p // a.stride1
                    with k.if_(p < a.out1), k.loop(0, a.taps2) as s:
                        tap = (t * a.taps1 + r) * a.taps2 + s
                        source = x + ((tap * a.out0 + o) * a.out1 + p) * a.out2
                        # Window q of this tap lies at image column q * stride + shift; a multiple of the stride makes
                        # the division that of a positive number.
                        shift = s * a.dilation2 - a.pad2
                        lifted = shift + a.pad2 * a.stride2
                        residue, place = lifted % a.stride2, lifted // a.stride2 - a.pad2
                        begin = (0 - place).max(0).min(a.out2)
                        width = (a.size2 - residue + (a.stride2 - 1)) // a.stride2
                        count = ((width - place).max(0).min(a.out2) - begin).max(0)
                        part = sums + residue * a.row_size + (place + begin)
                        there = source + begin

                        def add(i: Int, lanes: int, part: Ptr = part, there: Ptr = there) -> None:
                            k.store(part + i, k.add(k.load(part + i, lanes), k.load(there + i, lanes)))

                        _once(k, count, add)


def _write_row(k: Kernel, a: Fields, sums: Ptr, y: Ptr) -> None:
    with k.if_else(a.stride2.eq(1)) as (dense, apart):
        with dense, k.if_else(a.accumulate.eq(0)) as (write, more):
            with write:
                k.rows(a.size2, lambda i, lanes: k.store(y + i, k.load(sums + i, lanes)))
            with more:
                _once(k, a.size2, lambda i, n: k.store(y + i, k.add(k.load(y + i, n), k.load(sums + i, n))))
        with apart, k.loop(0, a.stride2) as residue:
            part = sums + residue * a.row_size
            count = (a.size2 - residue + (a.stride2 - 1)) // a.stride2
            with k.loop(0, count) as i:
                there = y + residue + i * a.stride2
                value = k.var(k.load(part + i, 1))
                with k.if_(a.accumulate.eq(1)):
                    value.set(k.add(value.get(), k.load(there, 1)))
                k.store(there, value.get())
