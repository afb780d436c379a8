"""Kernels of logsumexp for cpu.simd of reduce: log(sum(e^(x - shift))) + shift.

The shift is the largest element, and 0 where that is infinite. Chunks leave their largest element and their sum; `join`
brings the sums to one shift.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tapwise.cpu.activations import exp
from tapwise.cpu.fields import entry
from tapwise.cpu.simd import Int, Kernel, Ptr
from tapwise.cpu.vectors import WAYS, across, columns, fold_row, larger

BLOCK: Final = 512


def _shift(k: Kernel, top: Any) -> Any:
    """The largest element, or 0 where it is infinite."""
    lanes = k.lanes_of(top)
    size = k.intrinsic("llvm.fabs", top)
    return k.b.select(k.b.fcmp_ordered("==", size, k.constant(np.inf, lanes)), k.constant(0.0, lanes), top)


def _row(k: Kernel, x: Ptr, count: Int) -> tuple[Any, Any]:
    """(largest element, sum of e^(x - shift))."""
    top = fold_row(k, x, count, -np.inf, lambda value: value, lambda a, b: larger(k, a, b))
    shift = _shift(k, top)
    total = k.var(k.constant(0.0, 1))
    with k.loop(0, count, BLOCK * k.lanes) as block:
        part = fold_row(
            k, x + block, (count - block).min(BLOCK * k.lanes), 0.0,
            lambda value: exp(k, k.sub(value, k.splat(shift, k.lanes_of(value)))), lambda a, b: k.add(a, b),
            WAYS,
        )  # fmt: skip
        total.set(k.add(total.get(), part))
    return top, total.get()


def _result(k: Kernel, top: Any, total: Any) -> Any:
    return k.add(k.intrinsic("llvm.log", total), _shift(k, top))


def emit_rows(k: Kernel, names: tuple[str, ...], storage: str) -> None:
    """task"""
    with entry(k, names) as (a, worker):
        x, y, parts = a.pointer("x", storage), a.pointer("y", storage), a.pointer("scratch", k.dtype)
        with a.draws(worker) as number:
            with k.if_else(a.chunks.eq(1)) as (whole, cut):
                with whole, k.loop(number * a.rows, ((number + 1) * a.rows).min(a.outer)) as row:
                    k.store(y + row, _result(k, *_row(k, x + row * a.length, a.length)))
                with cut:
                    start = number % a.chunks * a.chunk
                    here = x + number // a.chunks * a.length + start
                    top, total = _row(k, here, (a.length - start).min(a.chunk))
                    k.store(parts + number, top)
                    k.store(parts + (a.outer * a.chunks + number), total)


def emit_columns(k: Kernel, names: tuple[str, ...], storage: str) -> None:
    """task"""
    with entry(k, names) as (a, worker), a.draws(worker) as number:
        first = number % a.widths * a.width
        chunk, outer = number // a.widths % a.chunks, number // a.widths // a.chunks
        start = chunk * a.chunk
        count = (a.length - start).min(a.chunk)
        x = a.pointer("x", storage) + ((outer * a.length + start) * a.inner + first)
        y = a.pointer("y", storage) + (outer * a.inner + first)
        tops_at = a.pointer("scratch", k.dtype) + ((outer * a.chunks + chunk) * a.inner + first)
        sums_at = tops_at + a.outer * a.chunks * a.inner

        def body(b: Int, lanes: list[int]) -> None:
            spots = across(k, b, lanes)
            tops = [k.var(k.constant(-np.inf, n)) for _, n in spots]
            sums = [k.var(k.constant(0.0, n)) for _, n in spots]
            with k.loop(0, count) as r:
                for top, (spot, n) in zip(tops, spots, strict=True):
                    top.set(larger(k, top.get(), k.load(x + r * a.inner + spot, n)))
            shifts = [_shift(k, top.get()) for top in tops]
            with k.loop(0, count) as r:
                for total, shift, (spot, n) in zip(sums, shifts, spots, strict=True):
                    term = exp(k, k.sub(k.load(x + r * a.inner + spot, n), shift))
                    total.set(k.add(total.get(), term))
            with k.if_else(a.chunks.eq(1)) as (whole, cut):
                with whole:
                    for top, total, (spot, _) in zip(tops, sums, spots, strict=True):
                        k.store(y + spot, _result(k, top.get(), total.get()))
                with cut:
                    for top, total, (spot, _) in zip(tops, sums, spots, strict=True):
                        k.store(tops_at + spot, top.get())
                        k.store(sums_at + spot, total.get())

        columns(k, (a.inner - first).min(a.width), body)


def emit_join(k: Kernel, names: tuple[str, ...], storage: str) -> None:
    """join: largest elements and sums (outer, chunks, inner) into y."""
    with entry(k, names, "join") as (a, _):
        y, tops = a.pointer("y", storage), a.pointer("scratch", k.dtype)
        sums = tops + a.outer * a.chunks * a.inner
        with k.loop(0, a.outer) as outer, k.loop(0, a.inner) as b:
            here = outer * a.chunks * a.inner + b
            top = k.var(k.constant(-np.inf, 1))
            with k.loop(0, a.chunks) as c:
                top.set(larger(k, top.get(), k.load(tops + here + c * a.inner, 1)))
            shift = _shift(k, top.get())
            total = k.var(k.constant(0.0, 1))
            with k.loop(0, a.chunks) as c:
                share = exp(k, k.sub(k.load(tops + here + c * a.inner, 1), shift))
                total.set(k.fma(k.load(sums + here + c * a.inner, 1), share, total.get()))
            k.store(y + outer * a.inner + b, _result(k, top.get(), total.get()))
