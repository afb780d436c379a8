"""Products of cpu.depthwise on pairs of bfloat16 (cpu/pairs.py), where x is read in place.

A pair is of two taps that are neighbours in a row of the filter, and of what they meet in x. Of an odd number of
columns the last one is left. There pairs are of taps that are neighbours in the column, and of an odd number of rows
the last tap is alone, with a zero; of few rows all are. Beside it x has a zero too, so infinities and NaN count only
where a tap meets them.

    5x5: pairs of taps       of lane l from x       stride 2
    a a b b f                a: x[l], x[l + 1]      x[2l], x[2l + 1]
    c c d d f                f: the elements of two rows in the same column
    . . . . g
    . . . . g
    . . . . h                h: an element and a zero
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from tapwise.cpu.fields import Fields, entry
from tapwise.cpu.pairs import PairKernel, PairPtr
from tapwise.cpu.simd import I1, I32, Int, Ptr, Var
from tapwise.ops.conv.cpu.depthwise.tile import Tile

# Sums of a tile: [plane][output row][vector].
Cells = list[list[list[Var]]]


def emit_products(k: PairKernel, a: Fields, tile: Tile, rows: range, table: Ptr, x: Ptr, w: Ptr, sums: Cells) -> None:
    """All products of a tile with those rows of x; arguments as tile_LOW_HIGH has them (in_place.py)."""
    whole = a.taps_w - int(tile.odd)
    with k.loop(0, whole) as s:
        _column(k, a, tile, rows, table + s * tile.line, x, w + s * a.taps_h, sums, k.neighbours, 2)
    if tile.odd:
        rest = table + whole * tile.line, x, w + whole * a.taps_h, sums
        if tile.rows_paired:
            _paired_rows(k, a, tile, rows, *rest)
        else:
            _column(k, a, tile, rows, *rest, k.lower_halves, tile.ways)


def _column(
    k: PairKernel, a: Fields, tile: Tile, rows: range, line: Ptr, x: Ptr, w: Ptr, sums: Cells,
    read: Callable[[Ptr, int, Any, int], Any], wide: int,
) -> None:  # fmt: skip
    """Of a column of pairs; `line` and `w` are its own. `read` loads pairs, `wide` elements a lane."""
    start, masks = _line(k, tile, line, wide)
    for taps in tile.groups(tile.place.taps):
        factors = _factors(k, a, tile, w, taps)
        at = [x + (start + a.w_in * rows.start + a.plane_in * plane) for plane in range(tile.planes)]
        for row in rows:
            if users := tile.place.users(row, taps):
                for plane, v, lanes, there in _vectors(tile, at):
                    value = read(there, lanes, masks[v], tile.ways)
                    for r, output in users:
                        _add(k, sums[plane][output][v], factors[plane, r], value)
            at = [one + a.w_in for one in at]


def _paired_rows(
    k: PairKernel, a: Fields, tile: Tile, rows: range, line: Ptr, x: Ptr, w: Ptr, sums: Cells
) -> None:  # fmt: skip
    """Of an only column of taps, in pairs of rows; `line` and `w` are its own."""
    place, below = tile.place, tile.place.dilation
    start, masks = _line(k, tile, line, tile.ways)
    for pairs in tile.groups(tile.odd_weights):
        factors = _factors(k, a, tile, w, pairs)
        at = [x + (start + a.w_in * rows.start + a.plane_in * plane) for plane in range(tile.planes)]
        alone: dict[tuple[int, int, int], Any] = {}
        # By a pair's second row, as that is loaded last; the first may lie above the image, the second below.
        for second in range(rows.start, rows.stop + below):
            users = place.users(second - below, range(2 * pairs.start, min(2 * pairs.stop, place.taps), 2))
            for plane, v, lanes, there in _vectors(tile, at):
                if second in rows:
                    alone[plane, v, second] = k.lower_halves(there, lanes, masks[v], tile.ways)
                lower, upper = alone.get((plane, v, second - below)), alone.get((plane, v, second))
                both = k.paired(lower, upper) if users and (lower or upper) else None
                for r, output in users:
                    value = both if r + 1 < place.taps else lower
                    if value is not None:
                        _add(k, sums[plane][output][v], factors[plane, r // 2], value)
            at = [one + a.w_in for one in at]


def _line(k: PairKernel, tile: Tile, line: Ptr, wide: int) -> tuple[Int, list[Any]]:
    """Of a line of the table: where it reads, and each vector's mask, of `wide` elements a lane."""
    masks = [k.mask(k.load_int(line + (1 + v)), wide * lanes) for v, lanes in enumerate(tile.vectors)]
    return k.load_int(line), masks


def _factors(k: PairKernel, a: Fields, tile: Tile, w: Ptr, pairs: range) -> dict[tuple[int, int], Any]:
    return {(plane, r): k.broadcast(w + (a.taps * plane + r)) for plane in range(tile.planes) for r in pairs}


def _vectors(tile: Tile, at: list[Ptr]) -> list[tuple[int, int, int, Ptr]]:
    """(plane, vector, its lanes, where it begins in x) of a row."""
    return [
        (plane, v, lanes, at[plane] + sum(tile.vectors[:v]) * tile.ways)
        for plane in range(tile.planes)
        for v, lanes in enumerate(tile.vectors)
    ]


def _add(k: PairKernel, cell: Var, factor: Any, value: Any) -> None:
    cell.set(k.multiply_add(k.narrow(factor, k.lanes_of(value)), value, cell.get()))


def emit_filters(k: PairKernel, names: tuple[str, ...], tile: Tile) -> None:
    """`pack_task`: of each channel (S / 2, R) pairs, and of an odd column its weights."""
    with entry(k, names, "pack_task") as (a, worker):
        w, packed, whole = a.pointer("x", "bf16"), a.pointer("w", k.dtype), a.taps_w - int(tile.odd)
        taps_w, step = whole * 2 + int(tile.odd), 2 if tile.rows_paired else 1
        with a.draws(worker), k.loop(0, a.channels) as c:
            here = packed + c * a.taps
            with k.loop(0, a.taps_h) as r, k.loop(0, whole) as s:
                first = w + ((c * a.taps_h + r) * taps_w + s * 2)
                k.store(here + (s * a.taps_h + r), k.load(PairPtr(first, first + 1, ir.Constant(I32, -1)), 1))
            if tile.odd:
                with k.loop(0, a.taps_h, step) as r:
                    first, more = w + ((c * a.taps_h + r) * taps_w + (taps_w - 1)), r + (step - 1) < a.taps_h
                    more = more if tile.rows_paired else ir.Constant(I1, 0)
                    below = first + k.select(more, taps_w, k.integer(0))
                    pair = k.load(PairPtr(first, below, k.b.sext(more, I32)), 1)
                    k.store(here + (whole * a.taps_h + r // step), pair)
