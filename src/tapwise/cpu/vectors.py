"""Pieces of reductions: folding a row into one value, a vector's lanes into one, columns in vectors side by side."""

from __future__ import annotations

from collections.abc import Callable
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


def fold_lanes(k: Kernel, value: Any, combine: Combine) -> Any:
    """All lanes of a vector, combined pairwise."""
    lanes = k.lanes_of(value)
    while lanes > 1:
        half = lanes // 2
        low, high = (k.shuffle(value, value, range(first, first + half)) for first in (0, half))
        value = combine(low, high)
        lanes = half
    return value if not isinstance(value.type, ir.VectorType) else k.b.extract_element(value, ir.Constant(I32, 0))


def fold_row(
    k: Kernel, x: Ptr, count: Int, identity: float, prepare: Callable[[Any], Any], combine: Combine,
    prepare_at: Callable[[Any, Int], Any] | None = None, ways: int = ROW_WAYS,
) -> Any:  # fmt: skip
    """combine over prepare(x[i]), i < count, in `ways` vectors, then a vector, always in that order; rows shorter than
    a vector one by one.

    `prepare_at` is given the element's number besides; it may be called twice for an element, with the same value.
    """
    step = ways * k.lanes

    def ready(at: Int, lanes: int) -> Any:
        value = k.load(x + at, lanes)
        return prepare(value) if prepare_at is None else prepare_at(value, at)

    sums = [k.var(k.constant(identity)) for _ in range(ways)]
    many = count - count % step
    with k.loop(0, many, step) as i:
        for way, part in enumerate(sums):
            part.set(combine(part.get(), ready(i + way * k.lanes, k.lanes)))
    vectors = count - count % k.lanes
    with k.loop(many, vectors, k.lanes) as i:
        sums[0].set(combine(sums[0].get(), ready(i, k.lanes)))
    # The rest in a vector that ends with the row; what it has in common with the one before does not count twice.
    rest = count - vectors
    long = k.both(rest > 0, count >= k.lanes)
    with k.if_(long):
        value = ready(count - k.lanes, k.lanes)
        numbers = ir.Constant(ir.VectorType(I32, k.lanes), list(range(k.lanes)))
        first = k.splat(k.b.trunc((k.integer(k.lanes) - rest).ir, I32), k.lanes)
        fresh = k.b.select(k.b.icmp_signed(">=", numbers, first), value, k.constant(identity))
        sums[0].set(combine(sums[0].get(), fresh))
    values = [part.get() for part in sums]
    while len(values) > 1:
        values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    total = k.var(fold_lanes(k, values[0], combine))
    with k.loop(k.select(long, count, vectors), count) as i:
        total.set(combine(total.get(), ready(i, 1)))
    return total.get()


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
