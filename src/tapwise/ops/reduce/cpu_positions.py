"""Kernels of argmax and argmin for cpu.simd of reduce.

Along the last axis a row goes through in blocks: the best of a block is found by vectors, and only the block that holds
the row's best is searched for its place. Chunks leave their best and its place; `join` takes the first of the best.
Along other axes lanes carry values and places. NaN is better than everything, and the first of equals is taken.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir

from tapwise.cpu.fields import entry
from tapwise.cpu.simd import I32, INT, Int, Kernel, Ptr
from tapwise.cpu.vectors import across, columns, fold_lanes, fold_row, larger, smaller

BLOCK: Final = 256


class Positions:
    """argmax, or argmin with `least`, in float kernels whose y is int64."""

    def __init__(self, k: Kernel, names: tuple[str, ...], storage: str, least: bool) -> None:
        self.k, self.names, self.storage, self.least = k, names, storage, least

    def _combine(self, a: Any, b: Any) -> Any:
        k = self.k
        chosen = smaller(k, a, b) if self.least else larger(k, a, b)
        return k.b.select(k.b.fcmp_unordered("uno", b, b), b, chosen)

    def _better(self, a: Any, b: Any) -> Any:
        """Whether b takes the place of a: it is better or NaN, and a is not NaN."""
        k = self.k
        return k.b.and_(k.b.fcmp_unordered("<" if self.least else ">", b, a), k.b.fcmp_ordered("ord", a, a))

    def _row(self, x: Ptr, count: Int) -> tuple[Any, Int]:
        """(best, place) of `count` elements."""
        k = self.k
        worst = np.inf if self.least else -np.inf
        best, start = k.var(k.constant(worst, 1)), k.var(k.integer(0))
        with k.loop(0, count, BLOCK) as block:
            size = (count - block).min(BLOCK)
            top = fold_row(k, x + block, size, worst, lambda value: value, self._combine)
            better = self._better(best.get(), top)
            start.set(k.select(better, block, start.get()))
            best.set(k.select(better, top, best.get()))
        return best.get(), start.get() + self._first(x + start.get(), (count - start.get()).min(BLOCK), best.get())

    def _first(self, x: Ptr, count: Int, wanted: Any) -> Int:
        """The first of `count` elements that is `wanted`, or NaN where that is NaN; one is."""
        k = self.k
        lanes = k.lanes
        numbers = ir.VectorType(I32, lanes)

        def hits(at: Int, n: int) -> Any:
            value, sought = k.load(x + at, n), k.splat(wanted, n)
            both = k.b.and_(k.b.fcmp_unordered("uno", value, value), k.b.fcmp_unordered("uno", sought, sought))
            return k.b.or_(k.b.fcmp_ordered("==", value, sought), both)

        def lower(a: Any, b: Any) -> Any:
            return k.b.select(k.b.icmp_signed("<", a, b), a, b)

        # Each lane its lowest hit; BLOCK stands for none.
        lowest = k.var(ir.Constant(numbers, [BLOCK] * lanes))
        vectors = count - count % lanes
        with k.loop(0, vectors, lanes) as at:
            here = k.b.add(k.splat(k.b.trunc(at.ir, I32), lanes), ir.Constant(numbers, list(range(lanes))))
            lowest.set(lower(lowest.get(), k.b.select(hits(at, lanes), here, ir.Constant(numbers, [BLOCK] * lanes))))
        first = k.var(fold_lanes(k, lowest.get(), lower))
        with k.loop(vectors, count) as at:
            here = k.b.trunc(at.ir, I32)
            first.set(lower(first.get(), k.b.select(hits(at, 1), here, ir.Constant(I32, BLOCK))))
        return Int(k, k.b.sext(first.get(), INT))

    def _store(self, y: Ptr, value: Any) -> None:
        self.k.b.store(value, y.value, align=8)

    def emit_rows(self) -> None:
        """task"""
        k = self.k
        with entry(k, self.names) as (a, worker):
            x, y, parts = a.pointer("x", self.storage), a.pointer("y", "i64"), a.pointer("scratch", k.dtype)
            places = a.pointer("scratch", "i64") + a.outer * a.chunks
            with a.draws(worker) as number:
                with k.if_else(a.chunks.eq(1)) as (whole, cut):
                    with whole, k.loop(number * a.rows, ((number + 1) * a.rows).min(a.outer)) as row:
                        self._store(y + row, self._row(x + row * a.length, a.length)[1].ir)
                    with cut:
                        start = number % a.chunks * a.chunk
                        here = x + number // a.chunks * a.length + start
                        best, place = self._row(here, (a.length - start).min(a.chunk))
                        k.store(parts + number, best)
                        self._store(places + number, (place + start).ir)

    def emit_join(self) -> None:
        """join: the first of the best of a row's chunks."""
        k = self.k
        with entry(k, self.names, "join") as (a, _):
            y, parts = a.pointer("y", "i64"), a.pointer("scratch", k.dtype)
            places = a.pointer("scratch", "i64") + a.outer * a.chunks
            with k.loop(0, a.outer) as row:
                first = row * a.chunks
                best, place = k.var(k.load(parts + first, 1)), k.var(k.load_int(places + first))
                with k.loop(first + 1, first + a.chunks) as number:
                    value = k.load(parts + number, 1)
                    better = self._better(best.get(), value)
                    place.set(k.select(better, k.load_int(places + number), place.get()))
                    best.set(k.select(better, value, best.get()))
                self._store(y + row, place.get().ir)

    def emit_columns(self) -> None:
        """task"""
        k = self.k
        integer = INT if k.dtype == "f64" else I32
        with entry(k, self.names) as (a, worker), a.draws(worker) as number:
            first, outer = number % a.widths * a.width, number // a.widths
            x = a.pointer("x", self.storage) + (outer * a.length * a.inner + first)
            y = a.pointer("y", "i64") + (outer * a.inner + first)

            def body(b: Int, lanes: list[int]) -> None:
                spots = across(k, b, lanes)
                best = [k.var(k.load(x + spot, n)) for spot, n in spots]
                kinds = [integer if n == 1 else ir.VectorType(integer, n) for _, n in spots]
                places = [
                    k.var(ir.Constant(kind, None if n > 1 else 0)) for kind, (_, n) in zip(kinds, spots, strict=True)
                ]
                with k.loop(1, a.length) as r:
                    row = r.ir if integer is INT else k.b.trunc(r.ir, I32)
                    for top, place, (spot, n) in zip(best, places, spots, strict=True):
                        value = k.load(x + r * a.inner + spot, n)
                        better = self._better(top.get(), value)
                        place.set(k.b.select(better, k.splat(row, n), place.get()))
                        top.set(k.b.select(better, value, top.get()))
                for place, (spot, n) in zip(places, spots, strict=True):
                    wide = place.get()
                    if integer is not INT:
                        wide = k.b.sext(wide, INT if n == 1 else ir.VectorType(INT, n))
                    self._store(y + spot, wide)

            columns(k, (a.inner - first).min(a.width), body)
