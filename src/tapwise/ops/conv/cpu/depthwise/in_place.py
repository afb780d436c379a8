"""The kernels of cpu.depthwise that read x where it lies (NCHW): no copy, masked loads give the padding's zeros.

A tile is `rows` rows of outputs of `planes` channels by a few vectors of columns. Those make a whole row, the last one
as narrow as what is left allows (7 columns take 8 lanes, 19 take 16 and 4), or a block of a wider row's columns, of
which the last overlaps the one before. A column of taps at a time: its weights and the masks of its loads stay in
registers, and each row of x is loaded once for all outputs of the tile that the column meets. Which rows lie outside
the image is known when the kernel is compiled, so their products are left out. Half a vector, or less, that is left of
a row goes together with that of the next channel.
"""

from __future__ import annotations

from typing import Any, Final

from tapwise.cpu.epilogue import Epilogue, Sums
from tapwise.cpu.fields import COMMON, Fields, entry, unravel
from tapwise.cpu.pairs import PairKernel
from tapwise.cpu.simd import Int, Kernel, Ptr, Target
from tapwise.ops.conv.cpu.depthwise import pairs
from tapwise.ops.conv.cpu.depthwise.kernel import emit_filters
from tapwise.ops.conv.cpu.depthwise.pairs import Cells
from tapwise.ops.conv.cpu.depthwise.tile import Tile

FIELDS: Final = (
    *COMMON, "channels", "multiplier", "blocks", "w_in", "plane_in", "q", "plane_out", "taps", "taps_h", "taps_w",
    "table", "col_blocks", "last",
)  # fmt: skip

# Tiles whose rows of x are asked for early. On a Zen 5 an x in memory is 1.9 times as fast (94 MB, 3x3 of stride 2) and
# 2.6 (41 MB, stride 1), one in L3 takes 2 to 7 % less, in L2 no more than before. Four tiles are as good, one takes
# 17 % longer in memory. Asking for y, too, takes 0 to 20 % longer.
AHEAD: Final = 2


def generate(
    target: Target, *, dtype: str, storage: str, tile: Tile, bias: bool, residual: bool, activation: str | None
) -> Kernel:
    """The kernels of one instance: `task` and `pack_task`."""
    k = PairKernel(target, dtype) if tile.pairs else Kernel(target, dtype)
    epilogue = Epilogue(k, storage, True, bias, residual, activation)
    for inside in dict.fromkeys(inside for inside, _, _ in tile.place.runs()):
        _emit_tile(k, epilogue, tile, *inside)
        if tile.halves:
            _emit_halves(k, epilogue, tile, *inside)
    _emit_task(k, storage, tile)
    if isinstance(k, PairKernel):
        pairs.emit_filters(k, FIELDS, tile)
    else:
        emit_filters(k, FIELDS, storage, True, 1)
    return k


def _emit_tile(k: Kernel, epilogue: Epilogue, tile: Tile, low: int, high: int) -> None:
    """tile_LOW_HIGH(args, table, x, w, bias, residual, y): one tile of neighbouring channels.

    x points at the row of the first output's first tap, which may lie above the image; `table` is that of the block of
    columns.
    """
    storage, place, planes = epilogue.storage, tile.place, range(tile.planes)
    firsts = [sum(tile.vectors[:v]) for v in range(len(tile.vectors))]
    with k.function(
        f"tile_{low}_{high}", spills=tile.pairs, args="i64", table="i64", x=storage, w=k.dtype, bias=storage,
        residual=storage, y=storage,
    ) as (args, table, x, w, bias, residual, y):  # fmt: skip
        a = Fields(k, args, FIELDS)
        sums = [[[k.var(k.constant(0.0, n)) for n in tile.vectors] for _ in range(place.rows)] for _ in planes]

        if isinstance(k, PairKernel):
            pairs.emit_products(k, a, tile, range(low, high), table, x, w, sums)
        elif tile.once:
            _emit_products_once(k, a, tile, range(low, high), table, x, w, sums)
        else:
            _emit_products(k, a, tile, range(low, high), table, x, w, sums)
        last, exact = k.mask(a.last, tile.vectors[-1]), tile.exact or tile.halves
        found = []
        for plane in planes:
            there = a.plane_out * plane
            for output in range(place.rows):
                for v, first in enumerate(firsts):
                    # The row below, stored later, overwrites what passes the end of a row: masks cost more where a
                    # machine has no registers for them.
                    ends = (v, output) == (len(firsts) - 1, place.rows - 1)
                    mask = last if ends and not exact else None
                    spot = there + first
                    found.append(Sums(sums[plane][output][v].get(), bias + plane, residual + spot, y + spot, mask))
                there = there + a.q
        # Those of the same length together, where none passes the end of a row.
        epilogue.store(sorted(found, key=lambda one: -k.lanes_of(one.value)) if exact else found)


def _emit_halves(k: Kernel, epilogue: Epilogue, tile: Tile, low: int, high: int) -> None:
    """halves_LOW_HIGH, as a tile's function: what is left of two channels' rows, half a vector of each."""
    storage, place, (lanes,) = epilogue.storage, tile.place, tile.vectors
    half = lanes // 2

    def both(one: Any, other: Any) -> Any:
        return k.shuffle(one, other, range(lanes))

    with k.function(
        f"halves_{low}_{high}", args="i64", table="i64", x=storage, w=k.dtype, bias=storage, residual=storage,
        y=storage,
    ) as (args, table, x, w, bias, residual, y):  # fmt: skip
        a = Fields(k, args, FIELDS)
        sums = [k.var(k.constant(0.0, lanes)) for _ in range(place.rows)]
        with k.loop(0, a.taps_w) as s:
            shift, there = (k.load_int(table + s * tile.line + i) for i in range(2))
            mask = k.mask(there, half)
            for taps in tile.groups(place.taps):
                weights = {r: w + (s * a.taps_h + r) for r in taps}
                factors = {r: both(k.broadcast(at, half), k.broadcast(at + a.taps, half)) for r, at in weights.items()}
                at = x + (shift + a.w_in * low)
                for row in range(low, high):
                    if users := place.users(row, taps):
                        value = both(k.load(at, half, mask), k.load(at + a.plane_in, half, mask))
                        for r, output in users:
                            sums[output].set(k.fma(factors[r], value, sums[output].get()))
                    at = at + a.w_in
        found, last = [], None if tile.exact else k.mask(a.last, half)
        for plane in range(2):
            spot = a.plane_out * plane
            for total in sums:
                value = k.shuffle(total.get(), total.get(), range(half * plane, half * (plane + 1)))
                found.append(Sums(value, bias + plane, residual + spot, y + spot, last))
                spot = spot + a.q
        epilogue.store(found)


def _emit_products(k: Kernel, a: Fields, tile: Tile, rows: range, table: Ptr, x: Ptr, w: Ptr, sums: Cells) -> None:
    """All products of a tile with those rows of x."""
    place, planes = tile.place, range(tile.planes)
    firsts = [sum(tile.vectors[:v]) for v in range(len(tile.vectors))]

    def products(s: Int, columns: int) -> None:
        """Of neighbouring columns of taps from s on."""
        entries = [k.load_int(table + s * tile.line + i) for i in range(tile.line)]
        masks = [k.mask(entry, tile.vectors[i // tile.ways]) for i, entry in enumerate(entries[1:])]
        for taps in tile.groups(place.taps):
            factors = {
                (plane, i, r): k.broadcast(w + (a.taps * plane + (s + i) * a.taps_h + r))
                for plane in planes
                for i in range(columns)
                for r in taps
            }
            at = [x + (entries[0] + a.w_in * rows.start + a.plane_in * plane) for plane in planes]
            for row in rows:
                users = place.users(row, taps)
                for plane in planes if users else ():
                    for v, n in enumerate(tile.vectors):
                        loads = masks[v * tile.ways : (v + 1) * tile.ways]
                        values = _columns(k, at[plane] + firsts[v] * tile.ways, n, loads, columns)
                        for i, value in enumerate(values):
                            for r, output in users:
                                cell = sums[plane][output][v]
                                cell.set(k.fma(k.narrow(factors[plane, i, r], n), value, cell.get()))
                # From row to row rather than by multiples: those would fill the integer registers.
                at = [one + a.w_in for one in at]

    whole = a.taps_w - int(tile.odd)
    with k.loop(0, whole, tile.columns) as s:
        products(s, tile.columns)
    if tile.odd:
        products(whole, 1)


def _emit_products_once(k: Kernel, a: Fields, tile: Tile, rows: range, table: Ptr, x: Ptr, w: Ptr, sums: Cells) -> None:
    """The same where registers hold all weights: each row of x is loaded once."""
    place, planes, lanes, columns = tile.place, range(tile.planes), tile.vectors[0], range(tile.once)
    firsts = [sum(tile.vectors[:v]) for v in range(len(tile.vectors))]
    first, *entries = (k.load_int(table + i) for i in range(tile.line))
    masks = [k.mask(entry, lanes) for entry in entries]
    factors = {
        (plane, s, r): k.broadcast(w + (a.taps * plane + s * a.taps_h + r), lanes)
        for plane in planes
        for s in columns
        for r in range(place.taps)
    }
    at = [x + (first + a.w_in * rows.start + a.plane_in * plane) for plane in planes]
    for row in rows:
        users = place.users(row, range(place.taps))
        for plane in planes if users else ():
            loaded = [k.load(at[plane] + i * lanes, lanes, mask) for i, mask in enumerate(masks)]
            for s in columns:
                for v, n in enumerate(tile.vectors):
                    value = _picked(k, loaded, firsts[v] * tile.ways + s * tile.apart, tile.ways, n)
                    for r, output in users:
                        cell = sums[plane][output][v]
                        cell.set(k.fma(k.narrow(factors[plane, s, r], n), value, cell.get()))
        at = [one + a.w_in for one in at]


def _picked(k: Kernel, loaded: list[Any], first: int, step: int, count: int) -> Any:
    """`count` elements of vectors that follow each other, from `first` on, `step` apart."""
    lanes = k.lanes_of(loaded[0])
    wanted = [first + step * i for i in range(count)]
    low, high = wanted[0] // lanes, wanted[-1] // lanes
    if step == 1 and first % lanes == 0:
        return k.narrow(loaded[low], count)
    found = k.shuffle(
        loaded[low], loaded[min(low + 1, high)], [min(one - low * lanes, 2 * lanes - 1) for one in wanted]
    )
    if high - low < 2:
        return found
    # The last ones lie in a third vector.
    behind = [one >= (low + 2) * lanes for one in wanted]
    third = k.narrow(loaded[high], lanes) if lanes == count else k.shuffle(loaded[high], loaded[high], range(count))
    return k.shuffle(
        found,
        third,
        [count + one % lanes if last else i for i, (one, last) in enumerate(zip(wanted, behind, strict=True))],
    )


def _columns(k: Kernel, at: Ptr, lanes: int, masks: list[Any], columns: int) -> list[Any]:
    """What so many neighbouring columns of taps read: elements as far apart as there are loads, from `at`, `at` + 1."""
    loaded = [k.load(at + part * lanes, lanes, mask) for part, mask in enumerate(masks)]
    if len(loaded) == 1:
        return loaded
    return [k.shuffle(loaded[0], loaded[1], range(first, 2 * lanes, 2)) for first in range(columns)]


def _emit_task(k: Kernel, storage: str, tile: Tile) -> None:
    place, width, planes = tile.place, sum(tile.vectors), range(tile.planes)
    together = 2 if tile.halves else tile.planes
    with entry(k, FIELDS) as (a, worker):
        x, y, w = a.pointer("x", storage), a.pointer("y", storage), a.pointer("w", k.dtype)
        bias, residual = a.pointer("bias", storage), a.pointer("residual", storage)
        with a.draws(worker) as number:
            block, image = unravel(number, a.blocks)
            first, end = block * a.channels // a.blocks, (block + 1) * a.channels // a.blocks
            with k.loop(first, end, together) as at:
                # The last tile overlaps the one before.
                c = at.min(end - together)
                for (low, high), start, count in place.runs():
                    with k.loop(start, start + count * place.rows, place.rows) as p:

                        def emit(
                            name: str,
                            channel: Int,
                            block: Int,
                            column: Int,
                            p: Int = p,
                            low: int = low,
                            high: int = high,
                        ) -> None:
                            top = (image * a.channels + channel) * a.plane_in + (p * place.stride - place.pad) * a.w_in
                            out, next_rows = (
                                (image * a.channels + channel) * a.plane_out + p * a.q + column,
                                place.rows * place.stride,
                            )
                            if name == "tile":
                                ahead = x + top + column * tile.ways + a.w_in * (AHEAD * next_rows)
                                rows = [
                                    ahead + a.plane_in * plane + a.w_in * row
                                    for plane in planes
                                    for row in range(next_rows)
                                ]
                                k.prefetch_rows(rows, k.integer(0), width * tile.ways)
                            step = tile.line if tile.once else a.taps_w * tile.line
                            k.call(
                                f"{name}_{low}_{high}", a.args, a.pointer("table", "i64") + block * step, x + top,
                                w + channel * a.taps, bias + channel, residual + out, y + out,
                            )  # fmt: skip

                        for plane in range(together // tile.planes):
                            with k.loop(0, a.col_blocks) as block:
                                # The last block of columns overlaps the one before.
                                emit("tile", c + plane, block, (block * width).min(a.q - width).max(0))
                        if tile.halves:
                            emit("halves", c, a.col_blocks, a.col_blocks * width)
