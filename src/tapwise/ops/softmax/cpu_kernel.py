"""The kernels of cpu.simd of softmax: rows, chunks of rows, columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tapwise.cpu.activations import LIFT, exp_lifted
from tapwise.cpu.fields import COMMON, entry
from tapwise.cpu.simd import Int, Kernel, Ptr, Target, Var
from tapwise.cpu.vectors import WAYS, Fold, across, columns, fold_row, fold_rows, larger

# Vectors of a row, or elements of a column, in a sum that is kept in one piece.
BLOCK: Final = 512
FIELDS: Final = (*COMMON, "outer", "length", "inner", "chunk", "chunks", "rows", "row_blocks", "width", "widths")


def generate(target: Target, *, dtype: str, storage: str, log: bool, last: bool) -> Kernel:
    """The kernels of one instance: `task`, and `scale` for rows in chunks. `last`: along the last axis."""
    k = Kernel(target, dtype)
    if last:
        _emit_rows(k, storage, log)
        _emit_scale(k, storage, log)
    else:
        _emit_columns(k, storage, log)
    return k


def _row_top(k: Kernel, x: Ptr, count: Int) -> Any:
    """The largest of `count` elements; a NaN among them may be lost, and shows in the sum."""
    return fold_row(k, x, count, -np.inf, lambda value: value, lambda a, b: larger(k, a, b))


def _row_sum(k: Kernel, x: Ptr, count: Int, top: Any, y: Ptr | None, after: Ptr | None = None) -> tuple[Any, Any]:
    """(the sum of e^(x - top), in blocks; the largest element of the row `after`, which is looked through besides).

    The terms are written to y where there is one. The exponentials leave the loads and comparisons of another row
    room to hide in.
    """
    total, largest = k.var(k.constant(0.0, 1)), k.var(k.constant(-np.inf, 1))
    with k.loop(0, count, BLOCK * k.lanes) as block:

        def term(at: Int, lanes: int) -> Any:
            at = at + block
            e = exp_lifted(k, k.sub(k.load(x + at, lanes), k.splat(top, lanes)))
            if y is not None:
                k.store(y + at, e)
            return e

        folds = [Fold(0.0, term, lambda a, b: k.add(a, b))]
        if after is not None:
            there = after + block
            folds.append(Fold(-np.inf, lambda at, lanes: k.load(there + at, lanes), lambda a, b: larger(k, a, b)))
        values = fold_rows(k, (count - block).min(BLOCK * k.lanes), folds, WAYS, WAYS)
        total.set(k.add(total.get(), values[0]))
        if after is not None:
            largest.set(larger(k, largest.get(), values[1]))
    return total.get(), largest.get()


def _finished(
    k: Kernel, x: Ptr, terms: Ptr, log: bool, again: bool, top: Any, total: Any, scale: Any
) -> Callable[[Int, int], Any]:
    """y at (element, lanes) from x or its terms, and the row's largest element and sum.

    `scale` is what terms are multiplied by.
    """

    def body(i: Int, lanes: int) -> Any:
        if log:
            return k.sub(k.sub(k.load(x + i, lanes), k.splat(top, lanes)), k.splat(total, lanes))
        term = exp_lifted(k, k.sub(k.load(x + i, lanes), k.splat(top, lanes))) if again else k.load(terms + i, lanes)
        return k.mul(term, k.splat(scale, lanes))

    return body


def _write_row(k: Kernel, y: Ptr, count: Int, body: Callable[[Int, int], Any]) -> None:
    """y of a row from body(element, lanes), which may read y there."""
    lanes = k.lanes
    with k.if_else(count >= lanes) as (long, short):
        with long:
            # The last vector ends with the row: it is computed before the elements that it shares are replaced.
            last = body(count - lanes, lanes)
            many = count - count % (WAYS * lanes)
            with k.loop(0, many, WAYS * lanes) as i:
                for spot, n in across(k, i, [lanes] * WAYS):
                    k.store(y + spot, body(spot, n))
            with k.loop(many, count - lanes, lanes) as i:
                k.store(y + i, body(i, lanes))
            k.store(y + (count - lanes), last)
        with short, k.loop(0, count) as i:
            k.store(y + i, body(i, 1))


def _emit_rows(k: Kernel, storage: str, log: bool) -> None:
    """task: whole rows, or the first two steps of the chunks of rows, whose largest elements and sums go to scratch."""
    again = storage != k.dtype
    with entry(k, FIELDS) as (a, worker):
        x, y = a.pointer("x", storage), a.pointer("y", storage)
        parts = a.pointer("scratch", k.dtype)
        with a.draws(worker) as number:
            with k.if_else(a.chunks.eq(1)) as (whole, cut):
                with whole:
                    first, end = number * a.rows, ((number + 1) * a.rows).min(a.outer)
                    next_top = k.var(_row_top(k, x + first * a.length, a.length))
                    with k.loop(first, end) as row:
                        _emit_row(k, x, y, row, end, a.length, log, again, next_top)
                with cut:
                    start = number % a.chunks * a.chunk
                    here = number // a.chunks * a.length + start
                    count = (a.length - start).min(a.chunk)
                    top = _row_top(k, x + here, count)
                    # A chunk of nothing but -infinity adds nothing, unless the whole row is so.
                    nothing = k.b.fcmp_ordered("==", top, k.constant(-np.inf, 1))
                    shift = k.select(nothing, k.constant(0.0, 1), top)
                    total, _ = _row_sum(k, x + here, count, shift, None if log or again else y + here)
                    k.store(parts + number * 2, top)
                    k.store(parts + (number * 2 + 1), total)


def _emit_row(k: Kernel, x: Ptr, y: Ptr, row: Int, end: Int, length: Int, log: bool, again: bool, top: Var) -> None:
    """A row through all steps. `top` holds its largest element, and then that of the next row before `end`."""
    here, after = row * length, (row + 1).min(end - 1) * length
    largest = top.get()
    total, following = _row_sum(k, x + here, length, largest, None if log or again else y + here, x + after)
    top.set(following)
    one = k.constant(1.0, 1)
    scale = one if log else k.div(one, total)
    logarithm = _logarithm(k, total) if log else total
    _write_row(k, y + here, length, _finished(k, x + here, y + here, log, again, largest, logarithm, scale))


def _emit_scale(k: Kernel, storage: str, log: bool) -> None:
    """scale: the last step of the chunks of rows."""
    again = storage != k.dtype
    with entry(k, FIELDS, "scale") as (a, worker):
        x, y = a.pointer("x", storage), a.pointer("y", storage)
        with a.draws(worker) as number:
            row, chunk = number // a.chunks, number % a.chunks
            parts = a.pointer("scratch", k.dtype) + row * a.chunks * 2
            top = k.var(k.constant(-np.inf, 1))
            with k.loop(0, a.chunks) as c:
                top.set(larger(k, top.get(), k.load(parts + c * 2, 1)))
            total = k.var(k.constant(0.0, 1))
            with k.loop(0, a.chunks) as c:
                share = _share(k, k.load(parts + c * 2, 1), top.get())
                total.set(k.fma(k.load(parts + (c * 2 + 1), 1), share, total.get()))
            start = chunk * a.chunk
            here = row * a.length + start
            count = (a.length - start).min(a.chunk)
            one = k.constant(1.0, 1)
            if log:
                scale, last = one, _logarithm(k, total.get())
            else:
                share = one if again else _share(k, k.load(parts + chunk * 2, 1), top.get())
                scale, last = k.div(share, total.get()), one
            _write_row(k, y + here, count, _finished(k, x + here, y + here, log, again, top.get(), last, scale))


def _share(k: Kernel, part: Any, top: Any) -> Any:
    """What terms relative to a chunk's largest element become relative to the row's."""
    return _let_down(k, exp_lifted(k, k.sub(part, top)))


def _let_down(k: Kernel, value: Any) -> Any:
    """What a lifted exponential, or a sum of such, stands for."""
    return k.mul(value, k.constant(2.0**-LIFT, k.lanes_of(value)))


def _logarithm(k: Kernel, total: Any) -> Any:
    return k.intrinsic("llvm.log", _let_down(k, total))


def _emit_columns(k: Kernel, storage: str, log: bool) -> None:
    """task: `width` columns of one outer index, a vector of them through all three steps at a time."""
    again = storage != k.dtype
    with entry(k, FIELDS) as (a, worker), a.draws(worker) as number:
        first = number % a.widths * a.width
        at = number // a.widths * a.length * a.inner + first
        x, y = a.pointer("x", storage) + at, a.pointer("y", storage) + at

        def body(b: Int, lanes: list[int]) -> None:
            # As one long vector they take each step of the exponential together.
            _column_steps(k, x, y, b, sum(lanes), a.length, a.inner, log, again)

        columns(k, (a.inner - first).min(a.width), body)


def _column_steps(
    k: Kernel, x: Ptr, y: Ptr, first: Int, lanes: int, length: Int, inner: Int, log: bool, again: bool
) -> None:
    """`lanes` columns from `first` on, side by side through all three steps."""
    top = k.var(k.constant(-np.inf, lanes))
    with k.loop(0, length) as r:
        k.prefetch_rows([x, y], r * inner + first + lanes, lanes)
        top.set(larger(k, top.get(), k.load(x + (r * inner + first), lanes)))

    def term(r: Int) -> Any:
        here = r * inner + first
        e = exp_lifted(k, k.sub(k.load(x + here, lanes), top.get()))
        if not log and not again:
            k.store(y + here, e)
        return e

    total = _block_sum(k, lanes, length, term)
    end = _logarithm(k, total) if log else k.div(k.constant(1.0, lanes), total)
    with k.loop(0, length) as r:
        here = r * inner + first
        if log:
            value = k.sub(k.sub(k.load(x + here, lanes), top.get()), end)
        elif again:
            value = k.mul(exp_lifted(k, k.sub(k.load(x + here, lanes), top.get())), end)
        else:
            value = k.mul(k.load(y + here, lanes), end)
        k.store(y + here, value)


def _block_sum(k: Kernel, lanes: int, length: Int, term: Callable[[Int], Any]) -> Any:
    """Sum of the vectors term(row), in blocks."""
    total = k.var(k.constant(0.0, lanes))
    with k.loop(0, length, BLOCK) as block:
        part = k.var(k.constant(0.0, lanes))
        with k.loop(block, (block + BLOCK).min(length)) as r:
            part.set(k.add(part.get(), term(r)))
        total.set(k.add(total.get(), part.get()))
    return total.get()
