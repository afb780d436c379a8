"""The kernels of cpu.depthwise that read x where it lies (NCHW): no copy, masked loads give the padding's zeros.

A tile is `rows` rows of outputs of `planes` channels by a few vectors of columns. Those make a whole row, the last one
as narrow as what is left allows (7 columns take 8 lanes, 19 take 16 and 4), or a block of a wider row's columns, of
which the last overlaps the one before. A column of taps at a time: its weights and the masks of its loads stay in
registers, and each row of x is loaded once for all outputs of the tile that the column meets. Which rows lie outside
the image is known when the kernel is compiled, so their products are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from tapwise.cpu.epilogue import Epilogue, Sums
from tapwise.cpu.fields import COMMON, Fields, entry, unravel
from tapwise.cpu.pairs import PairKernel, PairPtr
from tapwise.cpu.simd import I32, Int, Kernel, Ptr, Target
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.depthwise.kernel import emit_filters

FIELDS: Final = (
    *COMMON, "channels", "multiplier", "blocks", "w_in", "plane_in", "q", "plane_out", "taps", "taps_h", "taps_w",
    "table", "col_blocks", "last",
)  # fmt: skip


def vectors_of(columns: int, lanes: int) -> tuple[int, ...]:
    """Lanes of the vectors that cover so many columns."""
    rest, narrow = columns % lanes, lanes
    while narrow // 2 >= max(rest, min(4, lanes)):
        narrow //= 2
    return (lanes,) * (columns // lanes) + ((narrow,) if rest else ())


@dataclass(frozen=True)
class Rows:
    """Rows of a plane: `p` of outputs, `rows` of them a tile, of `h` of x; the filter's and what they are moved by."""

    h: int
    p: int
    rows: int
    pad: int
    taps: int
    stride: int
    dilation: int

    @property
    def reach(self) -> int:
        """Rows of x from the first output's first tap to the last one's last."""
        return (self.rows - 1) * self.stride + (self.taps - 1) * self.dilation + 1

    def inside(self, first: int) -> tuple[int, int]:
        """[low, high): the rows of x, from that of the first output's first tap, that lie inside the image."""
        top = first * self.stride - self.pad
        low = min(max(0, -top), self.reach)
        return low, max(low, min(self.reach, self.h - top))

    def runs(self) -> Iterator[tuple[tuple[int, int], int, int]]:
        """(inside, first, count): tiles that follow each other, alike. The last one overlaps the one before."""
        starts = [*range(0, self.p - self.rows, self.rows), self.p - self.rows]
        for inside, run in groupby(starts[:-1], self.inside):
            alike = list(run)
            yield inside, alike[0], len(alike)
        yield self.inside(starts[-1]), starts[-1], 1

    def users(self, row: int, taps: range) -> list[tuple[int, int]]:
        """(tap of the filter, output row of the tile) that row `row` meets."""
        pairs = [(r, *divmod(row - r * self.dilation, self.stride)) for r in taps]
        return [(r, output) for r, output, rest in pairs if rest == 0 and 0 <= output < self.rows]


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for.

    `vectors`: their lanes; `exact`: they do not pass the end of a row. `planes` of neighbouring channels go together,
    at most `weights` of a column of each stay in registers at once. Vectors of x come from `ways` loads, as many as the
    stride, and serve `columns` columns of taps that are neighbours; `odd`: an only one is left. `pairs`: those are of
    bfloat16 and take one product, an only one with zeros beside it.
    """

    place: Rows
    vectors: tuple[int, ...]
    exact: bool
    planes: int
    weights: int
    ways: int
    columns: int
    odd: bool
    pairs: bool = False

    @property
    def loads(self) -> int:
        """Of x, for each vector and a column of taps, or neighbouring ones."""
        return 1 if self.pairs else self.ways

    @property
    def line(self) -> int:
        """Numbers in `table` of a column of taps: where it reads, and a mask for each load of a vector."""
        return 1 + self.loads * len(self.vectors)

    @property
    def groups(self) -> list[range]:
        """The rows of a column of taps that go together, as evenly as can be."""
        count = ceil_div(self.place.taps, self.weights)
        size = ceil_div(self.place.taps, count)
        return [range(at, min(at + size, self.place.taps)) for at in range(0, self.place.taps, size)]


def generate(
    target: Target, *, dtype: str, storage: str, tile: Tile, bias: bool, residual: bool, activation: str | None
) -> Kernel:
    """The kernels of one instance: `task` and `pack_task`."""
    k = PairKernel(target, dtype) if tile.pairs else Kernel(target, dtype)
    epilogue = Epilogue(k, storage, True, bias, residual, activation)
    for inside in dict.fromkeys(inside for inside, _, _ in tile.place.runs()):
        _emit_tile(k, epilogue, tile, *inside)
    _emit_task(k, storage, tile)
    if isinstance(k, PairKernel):
        _emit_pair_filters(k, tile)
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
        f"tile_{low}_{high}", args="i64", table="i64", x=storage, w=k.dtype, bias=storage, residual=storage, y=storage
    ) as (args, table, x, w, bias, residual, y):  # fmt: skip
        a = Fields(k, args, FIELDS)
        sums = [[[k.var(k.constant(0.0, n)) for n in tile.vectors] for _ in range(place.rows)] for _ in planes]

        def products(s: Int, columns: int, half: bool = False) -> None:
            """Of neighbouring columns of taps from s on; of a pair of them, or the half one, in bfloat16."""
            entries = [k.load_int(table + s * tile.line + i) for i in range(tile.line)]
            wide = 2 if tile.pairs and not (half and tile.ways == 1) else 1
            masks = [k.mask(entry, wide * tile.vectors[i // tile.loads]) for i, entry in enumerate(entries[1:])]
            for taps in tile.groups:
                factors = {
                    (plane, i, r): k.broadcast(w + (a.taps * plane + (s + i) * a.taps_h + r))
                    for plane in planes
                    for i in range(columns)
                    for r in taps
                }
                at = [x + (entries[0] + a.w_in * low + a.plane_in * plane) for plane in planes]
                for row in range(low, high):
                    users = place.users(row, taps)
                    for plane in planes if users else ():
                        for v, n in enumerate(tile.vectors):
                            there, loads = at[plane] + firsts[v] * tile.ways, masks[v * tile.loads :][: tile.loads]
                            values = [_pairs(k, there, n, loads[0], tile.ways, half)] if isinstance(k, PairKernel) else _columns(k, there, n, loads, columns)
                            for i, value in enumerate(values):
                                for r, output in users:
                                    cell = sums[plane][output][v]
                                    cell.set(k.multiply_add(k.narrow(factors[plane, i, r], n), value, cell.get()))
                    # From row to row rather than by multiples: those would fill the integer registers.
                    at = [one + a.w_in for one in at]

        whole = a.taps_w - int(tile.odd)
        with k.loop(0, whole, tile.columns) as s:
            products(s, tile.columns)
        if tile.odd:
            products(whole, 1, tile.pairs)
        last = k.mask(a.last, tile.vectors[-1])
        found = []
        for plane in planes:
            there = a.plane_out * plane
            for output in range(place.rows):
                for v, first in enumerate(firsts):
                    # The row below, stored later, overwrites what passes the end of a row: masks cost more where a
                    # machine has no registers for them.
                    ends = (v, output) == (len(firsts) - 1, place.rows - 1)
                    mask = last if ends and not tile.exact else None
                    spot = there + first
                    found.append(Sums(sums[plane][output][v].get(), bias + plane, residual + spot, y + spot, mask))
                there = there + a.q
        # Those of the same length together, where none passes the end of a row.
        epilogue.store(sorted(found, key=lambda one: -k.lanes_of(one.value)) if tile.exact else found)


def _columns(k: Kernel, at: Ptr, lanes: int, masks: list[Any], columns: int) -> list[Any]:
    """What so many neighbouring columns of taps read: elements as far apart as there are loads, from `at`, `at` + 1."""
    loaded = [k.load(at + part * lanes, lanes, mask) for part, mask in enumerate(masks)]
    if len(loaded) == 1:
        return loaded
    return [k.shuffle(loaded[0], loaded[1], range(first, 2 * lanes, 2)) for first in range(columns)]


def _pairs(k: PairKernel, at: Ptr, lanes: int, mask: Any, stride: int, half: bool) -> Any:
    """What a pair of neighbouring columns of taps reads; of a half one, zeros beside each element.

    The mask has the elements that lie inside the image; of a half pair and stride 2 only every other one.
    """
    return k.lower_halves(at, lanes, mask) if half and stride == 1 else k.neighbours(at, lanes, mask, stride)


def _emit_pair_filters(k: PairKernel, tile: Tile) -> None:
    """`pack_task`: (c, S / 2, R) pairs of neighbouring columns of taps; of an odd number, the last with a zero."""
    with entry(k, FIELDS, "pack_task") as (a, worker):
        w, packed, taps_w = a.pointer("x", "bf16"), a.pointer("w", k.dtype), a.taps_w * 2 - int(tile.odd)
        with a.draws(worker), k.loop(0, a.channels) as c:
            with k.loop(0, a.taps_h) as r, k.loop(0, a.taps_w) as s:
                first = w + ((c * a.taps_h + r) * taps_w + s * 2)
                whole = s * 2 + 1 < taps_w
                pair = PairPtr(first, first + k.select(whole, k.integer(1), k.integer(0)), k.b.sext(whole, I32))
                k.store(packed + (c * a.taps + s * a.taps_h + r), k.load(pair, 1))


def _emit_task(k: Kernel, storage: str, tile: Tile) -> None:
    place, width = tile.place, sum(tile.vectors)
    with entry(k, FIELDS) as (a, worker):
        x, y, w = a.pointer("x", storage), a.pointer("y", storage), a.pointer("w", k.dtype)
        bias, residual = a.pointer("bias", storage), a.pointer("residual", storage)
        with a.draws(worker) as number:
            block, image = unravel(number, a.blocks)
            first, end = block * a.channels // a.blocks, (block + 1) * a.channels // a.blocks
            with k.loop(first, end, tile.planes) as at:
                # The last tile overlaps the one before.
                c = at.min(end - tile.planes)
                there = (image * a.channels + c) * a.plane_in
                here = (image * a.channels + c) * a.plane_out
                for (low, high), start, count in place.runs():
                    with k.loop(start, start + count * place.rows, place.rows) as p, k.loop(0, a.col_blocks) as block:
                        top = there + (p * place.stride - place.pad) * a.w_in
                        # The last block of columns overlaps the one before.
                        out = here + p * a.q + (block * width).min(a.q - width).max(0)
                        table = a.pointer("table", "i64") + block * a.taps_w * tile.line
                        k.call(
                            f"tile_{low}_{high}", a.args, table, x + top, w + c * a.taps, bias + c, residual + out,
                            y + out,
                        )  # fmt: skip
