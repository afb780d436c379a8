"""The kernels of cpu.simd of reduce: rows, columns, and the joining of partial results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Final

import numpy as np

from tapwise.cpu.fields import COMMON, entry
from tapwise.cpu.simd import Int, Kernel, Ptr, Target, Var
from tapwise.cpu.vectors import ROW_WAYS, Fold, across, columns, fold_lanes, fold_row, fold_rows, larger, smaller
from tapwise.ops.reduce import cpu_logsumexp as logsumexp
from tapwise.ops.reduce.cpu_positions import Positions

# Elements of a row, and partial results of one, in a sum that is kept in one piece.
ROW_BLOCK: Final = 4096
JOIN_BLOCK: Final = 512
FIELDS: Final = (*COMMON, "outer", "length", "inner", "chunk", "chunks", "rows", "width", "widths")


class _Op:
    """What one op does to elements and partial results."""

    def __init__(self, k: Kernel, name: str) -> None:
        self.k, self.name = k, name
        self.identity = {"prod": 1.0, "max": -np.inf, "min": np.inf}.get(name, 0.0)

    def prepare(self, value: Any) -> Any:
        if self.name == "norm1":
            return self.k.intrinsic("llvm.fabs", value)
        return self.k.mul(value, value) if self.name in ("norm2", "sumsquare") else value

    def combine(self, a: Any, b: Any) -> Any:
        k = self.k
        if self.name == "prod":
            return k.mul(a, b)
        if self.name in ("max", "min"):
            # The choice loses a NaN in b, and keeps one in a: so a NaN in b is put back.
            return k.b.select(k.b.fcmp_unordered("uno", b, b), b, self.choose(a, b))
        return k.add(a, b)

    @property
    def chooses(self) -> bool:
        """Whether the value is one of the elements."""
        return self.name in ("max", "min")

    def choose(self, a: Any, b: Any) -> Any:
        """combine for numbers that are no NaN: one instruction where that takes three."""
        return larger(self.k, a, b) if self.name == "max" else smaller(self.k, a, b)

    def trace(self, trace: Any, value: Any) -> Any:
        """0 as long as every value was finite, then NaN."""
        return self.k.fma(value, self.k.constant(0.0, self.k.lanes_of(value)), trace)

    def doubtful(self, traces: Sequence[Any]) -> Any:
        """Whether a trace saw NaN or infinity."""
        k = self.k
        total = traces[0]
        for trace in traces[1:]:
            total = k.add(total, trace)
        total = fold_lanes(k, total, k.add)
        return k.b.fcmp_unordered("uno", total, total)

    def finish(self, value: Any, length: Int) -> Any:
        k = self.k
        if self.name == "mean":
            lanes = k.lanes_of(value)
            count = k.b.sitofp(length.ir, k.scalar)
            return k.div(value, k.splat(count, lanes))
        return k.intrinsic("llvm.sqrt", value) if self.name == "norm2" else value


def generate(target: Target, *, dtype: str, storage: str, op: str, last: bool) -> Kernel:
    """The kernels of one instance: `task`, and `join` for partial results. `last`: along the last axis."""
    k = Kernel(target, dtype)
    if op in ("argmax", "argmin"):
        positions = Positions(k, FIELDS, storage, op == "argmin")
        (positions.emit_rows if last else positions.emit_columns)()
        positions.emit_join()
    elif op == "logsumexp":
        (logsumexp.emit_rows if last else logsumexp.emit_columns)(k, FIELDS, storage)
        logsumexp.emit_join(k, FIELDS, storage)
    else:
        what = _Op(k, op)
        (_emit_rows if last else _emit_columns)(k, storage, what)
        _emit_join(k, storage, what)
    return k


def _emit_rows(k: Kernel, storage: str, op: _Op) -> None:
    with entry(k, FIELDS) as (a, worker):
        x, y, parts = a.pointer("x", storage), a.pointer("y", storage), a.pointer("scratch", k.dtype)

        def fold(here: Ptr, count: Int) -> Any:
            if op.chooses:
                return _chosen(k, here, count, op)
            total = k.var(k.constant(op.identity, 1))
            with k.loop(0, count, ROW_BLOCK) as block:
                size = (count - block).min(ROW_BLOCK)
                part = fold_row(k, here + block, size, op.identity, op.prepare, op.combine)
                total.set(op.combine(total.get(), part))
            return total.get()

        with a.draws(worker) as number:
            with k.if_else(a.chunks.eq(1)) as (whole, cut):
                with whole, k.loop(number * a.rows, ((number + 1) * a.rows).min(a.outer)) as row:
                    k.store(y + row, op.finish(fold(x + row * a.length, a.length), a.length), exact=op.chooses)
                with cut:
                    start = number % a.chunks * a.chunk
                    here = x + number // a.chunks * a.length + start
                    k.store(parts + number, fold(here, (a.length - start).min(a.chunk)))


def _chosen(k: Kernel, x: Ptr, count: Int, op: _Op) -> Any:
    """The largest or smallest of a row: as if there were no NaN, and again where there is one, or an infinity."""

    def element(at: Int, lanes: int) -> Any:
        return k.load(x + at, lanes)

    best, trace = fold_rows(
        k, count, [Fold(op.identity, element, op.choose), Fold(0.0, element, op.trace)], ROW_WAYS // 2
    )
    result = k.var(best)
    with k.if_(op.doubtful([trace])):
        result.set(fold_row(k, x, count, op.identity, op.prepare, op.combine))
    return result.get()


def _emit_columns(k: Kernel, storage: str, op: _Op) -> None:
    with entry(k, FIELDS) as (a, worker), a.draws(worker) as number:
        first = number % a.widths * a.width
        chunk, outer = number // a.widths % a.chunks, number // a.widths // a.chunks
        start = chunk * a.chunk
        count = (a.length - start).min(a.chunk)
        x = a.pointer("x", storage) + ((outer * a.length + start) * a.inner + first)
        y = a.pointer("y", storage) + (outer * a.inner + first)
        parts = a.pointer("scratch", k.dtype) + ((outer * a.chunks + chunk) * a.inner + first)

        def body(b: Int, lanes: list[int]) -> None:
            spots = across(k, b, lanes)
            ahead = b + len(spots) * k.lanes
            sums = [k.var(k.constant(op.identity, n)) for _, n in spots]

            def fold(combine: Callable[[Any, Any], Any], traces: Sequence[Var]) -> None:
                for total in sums:
                    total.set(k.constant(op.identity, k.lanes_of(total.get())))
                with k.loop(0, count) as r:
                    k.prefetch_rows([x], r * a.inner + ahead, len(spots) * k.lanes)
                    for total, trace, (spot, n) in zip_longest(sums, traces, spots):
                        value = k.load(x + r * a.inner + spot, n)
                        total.set(combine(total.get(), op.prepare(value)))
                        if trace is not None:
                            trace.set(op.trace(trace.get(), value))

            if op.chooses:
                traces = [k.var(k.constant(0.0, n)) for _, n in spots]
                fold(op.choose, traces)
                with k.if_(op.doubtful([trace.get() for trace in traces])):
                    fold(op.combine, ())
            else:
                fold(op.combine, ())
            with k.if_else(a.chunks.eq(1)) as (whole, cut):
                with whole:
                    for total, (spot, _) in zip(sums, spots, strict=True):
                        k.store(y + spot, op.finish(total.get(), a.length), exact=op.chooses)
                with cut:
                    for total, (spot, _) in zip(sums, spots, strict=True):
                        k.store(parts + spot, total.get())

        columns(k, (a.inner - first).min(a.width), body)


def _emit_join(k: Kernel, storage: str, op: _Op) -> None:
    """join: partial results (outer, chunks, inner) into y, by the first worker alone: there are few."""
    with entry(k, FIELDS, "join") as (a, _):
        y, parts = a.pointer("y", storage), a.pointer("scratch", k.dtype)
        with k.loop(0, a.outer) as outer, k.loop(0, a.inner) as b:
            here = parts + (outer * a.chunks * a.inner + b)
            total = k.var(k.constant(op.identity, 1))
            # Blocks here too: a row may have many chunks.
            with k.loop(0, a.chunks, JOIN_BLOCK) as block:
                part = k.var(k.constant(op.identity, 1))
                with k.loop(block, (block + JOIN_BLOCK).min(a.chunks)) as c:
                    part.set(op.combine(part.get(), k.load(here + c * a.inner, 1)))
                total.set(op.combine(total.get(), part.get()))
            k.store(y + outer * a.inner + b, op.finish(total.get(), a.length), exact=op.chooses)
