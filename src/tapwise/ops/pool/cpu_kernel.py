"""The kernel of cpu.simd of pooling: rows of a window first, then its columns; or all taps of a pixel."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tapwise.cpu.copies import deinterleave
from tapwise.cpu.fields import COMMON, entry
from tapwise.cpu.simd import Int, Kernel, Ptr, Target
from tapwise.cpu.vectors import larger

FIELDS: Final = (
    *COMMON, "identity", "row_counts", "row_edge", "row_skip", "col_counts",
    "col_edge", "col_skip", "channels", "h", "w_in", "p", "q", "stride_h", "stride_w",
    "pad_top", "pad_left", "dilation_h", "dilation_w", "planes", "block", "row_blocks", "row_size",
)  # fmt: skip


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, op: str, r: int, s: int, stride: int, dilation: int
) -> Kernel:
    """The kernel of one instance, `task`. Stride and dilation are those of the columns, and 0 in NHWC."""
    k = Kernel(target, dtype)
    if layout == "nchw":
        _emit_planes(k, storage, op, r, s, stride, dilation)
    else:
        _emit_pixels(k, storage, op, r, s)
    return k


def _combine(k: Kernel, op: str, values: list[Any]) -> Any:
    """The largest, NaN before all, or the sum; pairwise."""

    def two(a: Any, b: Any) -> Any:
        if op == "avg":
            return k.add(a, b)
        return k.b.select(k.b.fcmp_unordered("uno", b, b), b, larger(k, a, b))

    while len(values) > 1:
        paired = [two(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[len(paired) * 2 :]
    return values[0]


def _columns(k: Kernel, padded: Ptr, at: Int, lanes: int, s: int, stride: int, dilation: int) -> list[Any]:
    """A vector for each of s taps: element i of tap t is padded[(at + i) * stride + t * dilation]."""
    here = padded + at * stride
    if stride == 1 or lanes == 1:
        return [k.load(here + t * dilation, lanes) for t in range(s)]
    if stride in (2, 4) and dilation == 1:
        taps: list[Any] = []
        while len(taps) < s:
            taps += deinterleave(k, here + len(taps), stride, min(stride, s - len(taps)), lanes)
        return taps
    return [k.gather([here + (lane * stride + t * dilation) for lane in range(lanes)]) for t in range(s)]


def _counted(at: Int, edge: Int, skip: Int) -> Int:
    """Where the factor of output `at` stands in its table, which lacks `skip` of the outputs behind `edge`."""
    return at.min((at - skip).max(edge))


def _emit_planes(k: Kernel, storage: str, op: str, r: int, s: int, stride: int, dilation: int) -> None:
    with entry(k, FIELDS) as (a, worker):
        padded = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        identity = a.pointer("identity", storage)
        row_counts, col_counts = a.pointer("row_counts", k.dtype), a.pointer("col_counts", k.dtype)
        nothing = -np.inf if op == "max" else 0.0
        k.rows(a.row_size, lambda i, lanes: k.store(padded + i, k.constant(nothing, lanes)))
        with a.draws(worker) as number:
            row_block, first = number % a.row_blocks, number // a.row_blocks * a.block
            p0, p1 = row_block * a.p // a.row_blocks, (row_block + 1) * a.p // a.row_blocks
            with k.loop(first, (first + a.block).min(a.planes)) as plane, k.loop(p0, p1) as p:
                x = a.pointer("x", storage) + plane * (a.h * a.w_in)
                y = a.pointer("y", storage) + (plane * a.p + p) * a.q
                top = p * a.stride_h - a.pad_top
                rows = []
                for tap in range(r):
                    h = top + a.dilation_h * tap
                    rows.append(k.select(k.both(h >= 0, h < a.h), x + h * a.w_in, identity))

                def down(i: Int, lanes: int, rows: list[Ptr] = rows) -> None:
                    k.store(padded + a.pad_left + i, _combine(k, op, [k.load(row + i, lanes) for row in rows]))

                def across(i: Int, lanes: int, y: Ptr = y, p: Int = p) -> None:
                    value = _combine(k, op, _columns(k, padded, i, lanes, s, stride, dilation))
                    if op == "avg":
                        vertical = k.broadcast(row_counts + _counted(p, a.row_edge, a.row_skip), lanes)
                        count = k.mul(vertical, k.load(col_counts + _counted(i, a.col_edge, a.col_skip), lanes))
                        value = k.div(value, count)
                    k.store(y + i, value, exact=op == "max")

                k.rows(a.w_in, down)
                k.rows(a.q, across)


def _emit_pixels(k: Kernel, storage: str, op: str, r: int, s: int) -> None:
    with entry(k, FIELDS) as (a, worker):
        identity = a.pointer("identity", storage)
        row_counts, col_counts = a.pointer("row_counts", k.dtype), a.pointer("col_counts", k.dtype)
        with a.draws(worker) as number:
            row_block, first = number % a.row_blocks, number // a.row_blocks * a.block
            p0, p1 = row_block * a.p // a.row_blocks, (row_block + 1) * a.p // a.row_blocks
            with k.loop(first, (first + a.block).min(a.planes)) as image, k.loop(p0, p1) as p, k.loop(0, a.q) as q:
                x = a.pointer("x", storage) + image * (a.h * a.w_in) * a.channels
                y = a.pointer("y", storage) + ((image * a.p + p) * a.q + q) * a.channels
                taps = []
                for tap in range(r):
                    h = p * a.stride_h - a.pad_top + a.dilation_h * tap
                    inside = k.both(h >= 0, h < a.h)
                    for column in range(s):
                        v = q * a.stride_w - a.pad_left + a.dilation_w * column
                        both = k.both(inside, k.both(v >= 0, v < a.w_in))
                        taps.append(k.select(both, x + (h * a.w_in + v) * a.channels, identity))

                def body(c: Int, lanes: int, taps: list[Ptr] = taps, y: Ptr = y, p: Int = p, q: Int = q) -> None:
                    value = _combine(k, op, [k.load(there + c, lanes) for there in taps])
                    if op == "avg":
                        vertical = k.broadcast(row_counts + _counted(p, a.row_edge, a.row_skip), lanes)
                        count = k.mul(vertical, k.broadcast(col_counts + _counted(q, a.col_edge, a.col_skip), lanes))
                        value = k.div(value, count)
                    k.store(y + c, value, exact=op == "max")

                k.rows(a.channels, body)
