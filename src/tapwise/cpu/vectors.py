"""Pieces of reductions: folding a row into one value, a vector's lanes into one, columns in vectors side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

from tapwise.cpu.simd import I32, Int, Kernel, Ptr

# Vectors side by side: as many as hide the latency of an addition and keep the memory busy. An exponential has enough
# to do by itself.
WAYS: Final = 4
ROW_WAYS: Final = 8

Combine = Callable[[Any, Any], Any]


def larger(k: Kernel, a: Any, b: Any) -> Any:
    """The larger of a and b; a NaN in b is lost."""
    return k.b.select(k.b.fcmp_ordered(">", b, a), b, a)


def smaller(k: Kernel, a: Any, b: Any) -> Any:
    """The smaller of a and b; a NaN in b is lost."""
    return k.b.select(k.b.fcmp_ordered("<", b, a), b, a)


def fold_vectors(k: Kernel, value: Any, least: int, combine: Combine) -> Any:
    """The halves of a long vector combined, until it has `least` lanes."""
    lanes = k.lanes_of(value)
    while lanes > least:
        lanes //= 2
        value = combine(*(k.shuffle(value, value, range(first, first + lanes)) for first in (0, lanes)))
    return value


def fold_lanes(k: Kernel, value: Any, combine: Combine) -> Any:
    """All lanes of a vector, combined pairwise."""
    value = fold_vectors(k, value, 2, combine)
    lanes = k.lanes_of(value)
    if not isinstance(value.type, ir.VectorType):
        return value
    elements = [k.b.extract_element(value, ir.Constant(I32, lane)) for lane in range(lanes)]
    return elements[0] if lanes == 1 else combine(*elements)


@dataclass(frozen=True)
class Fold:
    """combine over ready(element's number, lanes), from `identity`.

    `ready` may be called twice for an element, with the same value.
    """

    identity: float
    ready: Callable[[Int, int], Any]
    combine: Combine


def fold_row(
    k: Kernel, x: Ptr, count: Int, identity: float, prepare: Callable[[Any], Any], combine: Combine,
    ways: int = ROW_WAYS, wide: int = 1,
) -> Any:  # fmt: skip
    """combine over prepare(x[i]), i < count."""
    fold = Fold(identity, lambda at, lanes: prepare(k.load(x + at, lanes)), combine)
    return fold_rows(k, count, [fold], ways, wide)[0]


def fold_rows(k: Kernel, count: Int, folds: Sequence[Fold], ways: int = ROW_WAYS, wide: int = 1) -> list[Any]:
    """The values of several folds over 0 <= i < count, done in one sweep: each in `ways` vectors, then a vector, always
    in that order; rows shorter than a vector one by one.

    `wide` of the vectors go through each operation together: a long chain of operations keeps the units busy only where
    another stands beside it in the code.
    """
    lanes = k.lanes
    step, group = ways * lanes, wide * lanes
    groups = [[k.var(k.constant(fold.identity)) for _ in range(ways // wide)] for fold in folds]
    many = count - count % step
    with k.loop(0, many, step) as i:
        for way in range(ways // wide):
            for fold, parts in zip(folds, groups, strict=True):
                value = fold_vectors(k, fold.ready(i + way * group, group), lanes, fold.combine)
                parts[way].set(fold.combine(parts[way].get(), value))
    vectors = count - count % lanes
    sums = []
    for fold, parts in zip(folds, groups, strict=True):
        values = [part.get() for part in parts]
        while len(values) > 1:
            values = [fold.combine(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
        sums.append(k.var(values[0]))
    with k.loop(many, vectors, lanes) as i:
        for fold, total in zip(folds, sums, strict=True):
            total.set(fold.combine(total.get(), fold.ready(i, lanes)))
    # The rest in a vector that ends with the row; what it has in common with the one before does not count twice.
    rest = count - vectors
    long = k.both(rest > 0, count >= lanes)
    with k.if_(long):
        numbers = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        first = k.splat(k.b.trunc((k.integer(lanes) - rest).ir, I32), lanes)
        new = k.b.icmp_signed(">=", numbers, first)
        for fold, total in zip(folds, sums, strict=True):
            value = fold.ready(count - lanes, lanes)
            total.set(fold.combine(total.get(), k.b.select(new, value, k.constant(fold.identity))))
    totals = [k.var(fold_lanes(k, total.get(), fold.combine)) for fold, total in zip(folds, sums, strict=True)]
    with k.loop(k.select(long, count, vectors), count) as i:
        for fold, total in zip(folds, totals, strict=True):
            total.set(fold.combine(total.get(), fold.ready(i, 1)))
    return [total.get() for total in totals]


def across(k: Kernel, first: Int, lanes: list[int]) -> list[tuple[Int, int]]:
    """(place, lanes) of vectors side by side from `first`."""
    spots, shift = [], 0
    for n in lanes:
        spots.append((first + shift, n))
        shift += n
    return spots


def columns(k: Kernel, count: Int, body: Callable[[Int, list[int]], None]) -> None:
    """body(first, lanes of vectors side by side) over `count` columns: WAYS vectors, single ones, single columns.

    Each column is done once.
    """
    lanes = k.lanes
    many = count - count % (WAYS * lanes)
    with k.loop(0, many, WAYS * lanes) as b:
        body(b, [lanes] * WAYS)
    whole = count - count % lanes
    with k.loop(many, whole, lanes) as b:
        body(b, [lanes])
    with k.loop(whole, count) as b:
        body(b, [1])
