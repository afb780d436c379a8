"""Tiles of cpu.depthwise over planes (NCHW): `rows` x `vectors` outputs in registers over all taps.

A column of taps at a time: its weights stay in registers, and each row of the input is loaded once for all outputs of
the tile that its column meets, so a 3x3 filter over 7 rows loads 9 rows for 21 products. That needs the filter's rows,
their stride and dilation when the kernel is compiled; its columns are a loop over a table of offsets.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

from tapwise.cpu.epilogue import Epilogue, Sums
from tapwise.cpu.fields import Fields
from tapwise.cpu.simd import BYTES, INT, Int, Kernel
from tapwise.integers import ceil_div

# Weights of a column that stay in registers at once.
WEIGHTS: Final = 7


def groups(taps: int, stride: int, dilation: int, most: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """The rows of a filter as (phase, [(row, shift)]), at most `most` rows each.

    Row r of the filter meets packed row `output row + shift` of a row phase, numbered among those that some row meets.
    """
    phases: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for r in range(taps):
        shift, phase = divmod(r * dilation, stride)
        phases[phase].append((r, shift))
    result = []
    for number, phase in enumerate(sorted(phases)):
        rows = phases[phase]
        count = ceil_div(len(rows), most)
        size = ceil_div(len(rows), count)
        result += [(number, rows[at : at + size]) for at in range(0, len(rows), size)]
    return result


def tiles(registers: int, taps: int, stride: int, dilation: int) -> list[tuple[int, int]]:
    """(rows, vectors) whose sums fit the registers beside the weights and vectors of input on their way."""
    parts = groups(taps, stride, dilation, WEIGHTS)
    room = registers - max(len(rows) for _, rows in parts) - (1 if registers == 16 else 6) - (len(parts) > 1)
    return [(rows, vectors) for vectors in (1, 2, 3, 4) for rows in range(1, 15) if rows * vectors <= room]


def emit_outputs(
    k: Kernel, names: tuple[str, ...], epilogue: Epilogue, rows: int, vectors: int, taps_h: int, stride_h: int,
    dilation_h: int,
) -> None:  # fmt: skip
    """outputs(args, packed, w, bias, residual, y, height, ahead): all tiles of one packed tile of `height` >= rows.

    `residual` and `y` point at its first output; w holds the filter column by column. `ahead` is input that will be
    packed next: it is prefetched while the tiles keep the arithmetic units busy and the memory idle. The last tile of a
    row or a column overlaps the one before. Rows narrower than a vector are stored whole where the next row, that is
    stored later, overwrites the excess.
    """
    storage = epilogue.storage
    width = vectors * k.lanes
    column = groups(taps_h, stride_h, dilation_h, WEIGHTS)
    with k.function(
        "outputs", args="i64", packed=k.dtype, w=k.dtype, bias=storage, residual=storage, y=storage, height=INT,
        ahead=storage,
    ) as (args, packed, w, bias, residual, y, height, ahead):  # fmt: skip
        a = Fields(k, args, names)
        offsets = a.pointer("offsets", "i64")
        between_phases = a.col_phases * a.plane

        def sums_of(p: Int, q: Int) -> list[list[Any]]:
            here = packed + (p * a.pitch + q)
            sums = [[k.var(k.constant(0.0)) for _ in range(vectors)] for _ in range(rows)]
            with k.loop(0, a.taps_w) as s:
                there, weights = here + k.load_int(offsets + s), w + s * taps_h
                for phase, taps in column:
                    row_at = there + (between_phases * phase + a.pitch * taps[0][1])
                    factors = [k.broadcast(weights + r) for r, _ in taps]
                    for j in range(taps[0][1], taps[-1][1] + rows):
                        users = [(f, j - shift) for f, (_, shift) in zip(factors, taps, strict=True)]
                        users = [(f, row) for f, row in users if 0 <= row < rows]
                        for v in range(vectors if users else 0):
                            value = k.load(row_at + v * k.lanes)
                            for factor, row in users:
                                sums[row][v].set(k.fma(factor, value, sums[row][v].get()))
                        # From row to row rather than by multiples of the pitch: those would fill the integer registers.
                        row_at = row_at + a.pitch
            return [[cell.get() for cell in row] for row in sums]

        def sums_at(value: Any, at: Int) -> Sums:
            return Sums(value, bias, residual + at, y + at)

        def wide() -> None:
            length = a.stride_h * a.w_in
            # Each tile its share of what to prefetch: a burst would find the line fill buffers taken.
            share = length * (rows * width) // a.q
            with k.loop(0, height, rows) as down:
                p = down.min(height - rows)
                with k.loop(0, a.q, width) as across:
                    q = across.min(a.q - width)
                    near = ahead + (p * length + across // width * share)
                    with k.loop(0, share, 64 // BYTES[storage]) as i:
                        k.prefetch(near + i)
                    at, found = p * a.q + q, []
                    for cells in sums_of(p, q):
                        found += [sums_at(value, at + v * k.lanes) for v, value in enumerate(cells)]
                        at = at + a.q
                    epilogue.store(found)

        def narrow() -> None:
            end = height * a.q
            with k.loop(0, height, rows) as down:
                p = down.min(height - rows)
                for row, (value,) in enumerate(sums_of(p, k.integer(0))):
                    at = (p + row) * a.q
                    with k.if_else(at + k.lanes <= end) as (inside, outside):
                        with inside:
                            epilogue.store([sums_at(value, at)])
                        with outside:
                            epilogue.store_some(value, bias, residual + at, y + at, 0, a.q)

        if vectors > 1:
            wide()
        else:
            with k.if_else(a.q >= width) as (long, short):
                with long:
                    wide()
                with short:
                    narrow()
