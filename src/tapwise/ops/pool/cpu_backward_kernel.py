"""The kernels of cpu.simd of pooling's gradient: positions scattered within a band of rows; means spread."""

from __future__ import annotations

from typing import Any, Final

from tapwise.cpu.fields import COMMON, Fields, entry
from tapwise.cpu.simd import Int, Kernel, Ptr, Target

FIELDS: Final = (
    *COMMON, "row_shares", "col_shares", "channels", "h", "w_in", "p", "q", "r", "s", "stride_h", "stride_w",
    "pad_top", "pad_left", "planes", "block", "row_blocks", "row_size",
)  # fmt: skip
# Windows whose positions are read before the first is added.
UNROLLED: Final = 4


def generate(target: Target, *, dtype: str, storage: str, layout: str, op: str, s: int, near: bool) -> Kernel:
    """The kernel of one instance, `task`. `s`: columns of a window of means in NCHW, else 0; `near`: a stride of 1."""
    k = Kernel(target, dtype)
    with entry(k, FIELDS) as (a, worker):
        scratch = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        padded = scratch + a.q
        if s:
            _zero(k, padded, a.row_size)
        with a.draws(worker) as number:
            row_block, first = number % a.row_blocks, number // a.row_blocks * a.block
            h0, h1 = row_block * a.h // a.row_blocks, (row_block + 1) * a.h // a.row_blocks
            with k.loop(first, (first + a.block).min(a.planes)) as plane:
                if op == "max":
                    _emit_scatter(k, a, scratch, storage, plane, h0, h1, layout == "nhwc")
                else:
                    _emit_spread(k, a, scratch, padded, storage, plane, h0, h1, s, near)
    return k


def _zero(k: Kernel, target: Ptr, count: Int) -> None:
    k.rows(count, lambda i, lanes: k.store(target + i, k.constant(0.0, lanes)))


def _seeing(place: Int, count: Int, taps: Int, stride: Int) -> tuple[Int, Int]:
    """(the first window that sees a padded place, the first behind those that do), without dilation."""
    first = ((place - taps + 1).max(0) + (stride - 1)) // stride
    return first, (place // stride + 1).min(count)


def _emit_scatter(
    k: Kernel, a: Fields, scratch: Ptr, storage: str, plane: Int, h0: Int, h1: Int, last: bool
) -> None:  # fmt: skip
    """Each window that may have chosen one of the rows adds to the element that it did choose, in order."""
    low, size = h0 * a.w_in, (h1 - h0) * a.w_in
    dx = a.pointer("y", storage) + (plane * a.h * a.w_in + low) * a.channels
    # Sums of 16 bits are kept in float32.
    sums = dx if storage == k.dtype else scratch
    _zero(k, sums, size * a.channels)
    first, _ = _seeing(h0 + a.pad_top, a.p, a.r, a.stride_h)
    _, end = _seeing(h1 - 1 + a.pad_top, a.p, a.r, a.stride_h)
    start, count = (plane * a.p + first) * a.q * a.channels, (end - first).max(0) * a.q
    dy, places = a.pointer("x", storage) + start, a.pointer("w", "i64") + start

    def add(at: Int, many: int, channel: Int) -> None:
        chosen = [k.load_int(places + (at + i)) - low for i in range(many)]
        for i, one in enumerate(chosen):
            with k.if_(k.b.icmp_unsigned("<", one.ir, size.ir)):
                there = sums + (one * a.channels + (channel + i) if last else one)
                k.store(there, k.add(k.load(there, 1), k.load(dy + (at + i), 1)))

    def run(length: Int, base: Int) -> None:
        whole = length - length % UNROLLED
        with k.loop(0, whole, UNROLLED) as i:
            add(base + i, UNROLLED, i)
        with k.loop(whole, length) as i:
            add(base + i, 1, i)

    if last:
        with k.loop(0, count) as window:
            run(a.channels, window * a.channels)
    else:
        run(count, k.integer(0))
    if storage != k.dtype:
        k.rows(size * a.channels, lambda i, lanes: k.store(dx + i, k.load(sums + i, lanes)))


def _emit_spread(
    k: Kernel, a: Fields, sums: Ptr, padded: Ptr, storage: str, plane: Int, h0: Int, h1: Int, s: int, near: bool
) -> None:
    """Rows of dy that see a row of dx are added up, each with its share, then columns; a row that the same windows see
    as the one before is a copy of it."""
    row_shares, col_shares = a.pointer("row_shares", k.dtype), a.pointer("col_shares", k.dtype)
    width, output = a.w_in * a.channels, a.q * a.channels
    dy, dx = a.pointer("x", storage) + plane * a.p * output, a.pointer("y", storage) + plane * a.h * width
    seen = [k.var(k.integer(-1)), k.var(k.integer(-1))]
    with k.loop(h0, h1) as h:
        first, end = _seeing(h + a.pad_top, a.p, a.r, a.stride_h)
        here = dx + h * width
        same = k.both(first.eq(seen[0].get()), end.eq(seen[1].get()))
        seen[0].set(first)
        seen[1].set(end)
        with k.if_else(same) as (copied, added):
            with copied:
                above = dx + (h - 1) * width
                k.rows(width, lambda i, lanes: k.store(here + i, k.load(above + i, lanes), exact=True))
            with added:
                _zero(k, sums, output)
                with k.loop(first, end) as p:
                    row = dy + p * output

                    def down(i: Int, lanes: int, row: Ptr = row, p: Int = p) -> None:
                        share = k.broadcast(row_shares + p, lanes)
                        # The last vector overlaps the one before it, whose sums must not be added to twice.
                        k.store(sums + i, k.fma(k.load(row + i, lanes), share, k.load(sums + i, lanes)))

                    _once(k, output, down)
                if s:
                    _across_planes(k, a, sums, padded, col_shares, here, s, near)
                else:
                    _across_pixels(k, a, sums, col_shares, here)


def _once(k: Kernel, count: Int, body: Any) -> None:
    """body(i, lanes) over 0 <= i < count, each element once."""
    whole = count - count % k.lanes
    with k.loop(0, whole, k.lanes) as i:
        body(i, k.lanes)
    with k.loop(whole, count) as i:
        body(i, 1)


def _across_planes(
    k: Kernel, a: Fields, sums: Ptr, padded: Ptr, shares: Ptr, here: Ptr, s: int, near: bool
) -> None:  # fmt: skip
    """Sums stand where their windows begin in a padded row, zeros between them; s neighbours are an element of dx."""

    def place(q: Int, lanes: int) -> None:
        at = q if near else q * a.stride_w
        k.store(padded + (at + (s - 1)), k.mul(k.load(sums + q, lanes), k.load(shares + q, lanes)))

    if near:
        k.rows(a.q, place)
    else:
        with k.loop(0, a.q) as q:
            place(q, 1)

    def across(i: Int, lanes: int) -> None:
        values = [k.load(padded + (i + a.pad_left + tap), lanes) for tap in range(s)]
        while len(values) > 1:
            paired = [k.add(one, two) for one, two in zip(values[::2], values[1::2], strict=False)]
            values = paired + values[len(paired) * 2 :]
        k.store(here + i, values[0])

    k.rows(a.w_in, across)


def _across_pixels(k: Kernel, a: Fields, sums: Ptr, shares: Ptr, here: Ptr) -> None:
    with k.loop(0, a.w_in) as w:
        first, end = _seeing(w + a.pad_left, a.q, a.s, a.stride_w)
        pixel = here + w * a.channels

        def body(c: Int, lanes: int) -> None:
            total = k.var(k.constant(0.0, lanes))
            with k.loop(first, end) as q:
                share = k.broadcast(shares + q, lanes)
                total.set(k.fma(k.load(sums + (q * a.channels + c), lanes), share, total.get()))
            k.store(pixel + c, total.get())

        k.rows(a.channels, body)
