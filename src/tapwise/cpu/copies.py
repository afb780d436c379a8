"""Elements from here to there: rows, strided rows, vectors interleaved and taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tapwise.cpu.simd import Int, Kernel, Ptr


def emit_zeros(k: Kernel, out: Ptr, count: Int) -> None:
    """Zero `count` elements."""
    k.rows(count, lambda i, lanes: k.store(out + i, k.constant(0.0, lanes)))


def emit_copy_rows(k: Kernel, source: Ptr, source_pitch: Int, out: Ptr, out_pitch: Int, rows: Int, count: Int) -> None:
    """Copy `rows` rows of `count` elements; how many vectors of which width is decided once for all of them."""

    def few(lanes: int, vectors: int) -> None:
        """Vectors side by side, the last one up to the end of the row."""
        starts = [k.integer(i * lanes) for i in range(vectors - 1)] + [count - lanes]
        with k.loop(0, rows) as row:
            there, here = source + row * source_pitch, out + row * out_pitch
            for at, value in [(at, k.load(there + at, lanes)) for at in starts]:
                k.store(here + at, value, exact=True)

    def many(lanes: int) -> None:
        with k.loop(0, rows) as row, k.loop(0, count, lanes) as i:
            at = i.min(count - lanes)
            k.store(out + row * out_pitch + at, k.load(source + row * source_pitch + at, lanes), exact=True)

    def pick(ways: list[tuple[int, Any]]) -> None:
        """ways: (shortest row, what copies it), the longest first."""
        (least, body), *rest = ways
        if not rest:
            body()
            return
        with k.if_else(count >= least) as (then, otherwise):
            with then:
                body()
            with otherwise:
                pick(rest)

    lanes, *narrower, one = k.widths()
    whole = [((vectors - 1) * lanes + 1, partial(few, lanes, vectors)) for vectors in (4, 3, 2)]
    halves = [(width, partial(few, width, 2)) for width in narrower]
    one_vector, singles = (lanes, partial(few, lanes, 1)), (0, partial(many, one))
    pick([(4 * lanes + 1, partial(many, lanes)), *whole, one_vector, *halves, singles])


def emit_strided_copy(k: Kernel, source: Ptr, out: Ptr, count: Int, stride: Int) -> None:
    """out[i] = source[i * stride]: lanes of two vectors for stride 2, of four for stride 4, else one by one."""
    done = k.var(k.integer(0))
    for ways in (2, 4):
        with k.if_(stride.eq(ways)):
            # The vectors may not read past the last element, source[(count - 1) * stride].
            whole = (count - 1).max(0) // k.lanes * k.lanes
            with k.loop(0, whole, k.lanes) as i:
                k.store(out + i, deinterleave(k, source + i * ways, ways, 1, k.lanes)[0], exact=True)
            done.set(whole)
    with k.loop(done.get(), count) as i:
        k.store(out + i, k.load(source + i * stride, 1), exact=True)


def deinterleave(k: Kernel, source: Ptr, ways: int, wanted: int, lanes: int) -> list[Any]:
    """The first `wanted` of `ways` (2 or 4) interleaved vectors: result[s][t] = source[ways * t + s]."""
    if lanes == 1:
        return [k.load(source + s, 1) for s in range(wanted)]
    vectors = [k.load(source + i * lanes, lanes) for i in range(ways)]

    def split(parts: list[Any], first: int, step: int) -> list[Any]:
        """Streams first, first + step, ... of `parts`, a run of vectors that hold them interleaved."""
        if len(parts) == 1:
            return [parts[0]] if first < wanted else []
        pairs = list(zip(parts[::2], parts[1::2], strict=True))
        even = [k.shuffle(a, b, range(0, 2 * lanes, 2)) for a, b in pairs]
        odd = [k.shuffle(a, b, range(1, 2 * lanes, 2)) for a, b in pairs]
        evens, odds = split(even, first, 2 * step), split(odd, first + step, 2 * step)
        return [v for pair in zip(evens, odds, strict=False) for v in pair] + evens[len(odds) :]

    return split(vectors, 0, 1)


def interleave(k: Kernel, streams: Sequence[Any]) -> list[Any]:
    """The inverse of `deinterleave`: vectors that follow each other in memory."""
    if len(streams) == 1:
        return list(streams)
    lanes = k.lanes_of(streams[0])
    low, high = interleave(k, streams[0::2]), interleave(k, streams[1::2])
    result = []
    for a, b in zip(low, high, strict=True):
        picks = [lane // 2 + (lane % 2) * lanes for lane in range(2 * lanes)]
        result += [k.shuffle(a, b, picks[:lanes]), k.shuffle(a, b, picks[lanes:])]
    return result
