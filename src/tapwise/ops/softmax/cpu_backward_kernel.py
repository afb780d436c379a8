"""The kernels of cpu.simd of softmax's gradient: rows, chunks of rows, columns."""

from __future__ import annotations

from typing import Any

from tapwise.cpu.activations import exp
from tapwise.cpu.fields import entry
from tapwise.cpu.simd import Int, Kernel, Ptr, Target
from tapwise.cpu.vectors import WAYS, Fold, columns, fold_rows
from tapwise.ops.softmax.cpu_kernel import BLOCK, FIELDS


def generate(target: Target, *, dtype: str, storage: str, log: bool, last: bool) -> Kernel:
    """The kernels of one instance: `task`, and `scale` for rows in chunks. `last`: along the last axis."""
    k = Kernel(target, dtype)
    if last:
        _emit_rows(k, storage, log)
        _emit_scale(k, storage, log)
    else:
        _emit_columns(k, storage, log)
    return k


def _term(k: Kernel, dy: Ptr, y: Ptr, at: Int, lanes: int, log: bool) -> Any:
    """What is summed: dy of the logarithm, else dy * y."""
    value = k.load(dy + at, lanes)
    return value if log else k.mul(value, k.load(y + at, lanes))


def _gradient(k: Kernel, dy: Ptr, y: Ptr, at: Int, lanes: int, total: Any, log: bool) -> Any:
    one, other = k.load(dy + at, lanes), k.load(y + at, lanes)
    return k.sub(one, k.mul(exp(k, other), total)) if log else k.mul(k.sub(one, total), other)


def _row_sum(k: Kernel, dy: Ptr, y: Ptr, count: Int, log: bool) -> Any:
    """The sum over `count` elements, in blocks."""
    total = k.var(k.constant(0.0, 1))
    with k.loop(0, count, BLOCK * k.lanes) as block:
        fold = Fold(0.0, lambda at, lanes: _term(k, dy, y, at + block, lanes, log), k.add)
        total.set(k.add(total.get(), fold_rows(k, (count - block).min(BLOCK * k.lanes), [fold])[0]))
    return total.get()


def _write_row(k: Kernel, dy: Ptr, y: Ptr, dx: Ptr, count: Int, total: Any, log: bool) -> None:
    """dx of a row; an exponential's steps go through several vectors together."""

    def body(i: Int, lanes: int) -> None:
        k.store(dx + i, _gradient(k, dy, y, i, lanes, k.splat(total, lanes), log))

    k.rows(count, body, [WAYS * k.lanes, *k.widths()])


def _emit_rows(k: Kernel, storage: str, log: bool) -> None:
    """task: whole rows, or the sums of chunks of rows, which go to scratch."""
    with entry(k, FIELDS) as (a, worker):
        dy, y, dx = (a.pointer(name, storage) for name in ("x", "w", "y"))
        parts = a.pointer("scratch", k.dtype)
        with a.draws(worker) as number, k.if_else(a.chunks.eq(1)) as (whole, cut):
            with whole, k.loop(number * a.rows, ((number + 1) * a.rows).min(a.outer)) as row:
                at = row * a.length
                total = _row_sum(k, dy + at, y + at, a.length, log)
                _write_row(k, dy + at, y + at, dx + at, a.length, total, log)
            with cut:
                start = number % a.chunks * a.chunk
                at = number // a.chunks * a.length + start
                count = (a.length - start).min(a.chunk)
                k.store(parts + number, _row_sum(k, dy + at, y + at, count, log))


def _emit_scale(k: Kernel, storage: str, log: bool) -> None:
    """scale: dx of the chunks of rows."""
    with entry(k, FIELDS, "scale") as (a, worker):
        dy, y, dx = (a.pointer(name, storage) for name in ("x", "w", "y"))
        with a.draws(worker) as number:
            row, start = number // a.chunks, number % a.chunks * a.chunk
            parts = a.pointer("scratch", k.dtype) + row * a.chunks
            total = k.var(k.constant(0.0, 1))
            with k.loop(0, a.chunks) as c:
                total.set(k.add(total.get(), k.load(parts + c, 1)))
            at = row * a.length + start
            count = (a.length - start).min(a.chunk)
            _write_row(k, dy + at, y + at, dx + at, count, total.get(), log)


def _emit_columns(k: Kernel, storage: str, log: bool) -> None:
    """task: `width` columns of one outer index, some vectors of them through both steps at a time."""
    with entry(k, FIELDS) as (a, worker), a.draws(worker) as number:
        first = number % a.widths * a.width
        at = number // a.widths * a.length * a.inner + first
        dy, y, dx = (a.pointer(name, storage) + at for name in ("x", "w", "y"))

        def body(b: Int, each: list[int]) -> None:
            lanes = sum(each)
            total = k.var(k.constant(0.0, lanes))
            with k.loop(0, a.length, BLOCK) as block:
                part = k.var(k.constant(0.0, lanes))
                with k.loop(block, (block + BLOCK).min(a.length)) as r:
                    k.prefetch_rows([dy, y, dx], r * a.inner + b + lanes, lanes)
                    part.set(k.add(part.get(), _term(k, dy, y, r * a.inner + b, lanes, log)))
                total.set(k.add(total.get(), part.get()))
            with k.loop(0, a.length) as r:
                here = r * a.inner + b
                k.store(dx + here, _gradient(k, dy, y, here, lanes, total.get(), log))

        columns(k, (a.inner - first).min(a.width), body)
