"""The kernel of cpu.tiles: a tile of the picture is fetched to scratch, then swept by lists of taps.

A task is a tile of one plane. Its rows, and what lies around them by the picture's modes, are copied to scratch, with
conversion; tables say which row or column stands for one beyond the edges. A sweep then adds weighted neighbours, some
vectors in each of some rows at a time. It goes through a list of taps (distance, weight): in two dimensions the list
has the window's taps; a separable filter sweeps the column's taps into rows of scratch, and the row's taps from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tapwise.cpu.fields import COMMON, Fields
from tapwise.cpu.simd import INT, INTEGERS, Int, Kernel, Ptr, Target
from tapwise.ops.filter.cpu.taps import TapList, Taps

# Vectors that are swept together, as many sums as hide an addition's latency with room for the rest; and rows of them:
# what one row has read, the next ones find in L1.
WAYS: Final = 8
ROWS: Final = 4
# Vectors that are fetched together.
FETCHED: Final = 4
# The arguments. planes, rows, columns: tables of what stands for each plane, for each row and for each element beyond
# a row's ends, -1 for the constant. x_plane, x_row, pitch: elements between planes and rows of x, and between rows of
# the tile. window_rows, window_planes: taps; left, right: elements around a row. band, cols: of a tile; bands,
# strips: tiles of a plane. column_sums: where the rows between two sweeps begin; group_sums: how far the sums of
# groups lie behind.
FIELDS: Final = (
    *COMMON, "planes", "rows", "columns", "constants", "x_plane", "x_row", "height", "width", "window_rows",
    "window_planes", "left", "right", "band", "bands", "cols", "strips", "pitch", "column_sums", "group_sums",
)  # fmt: skip
# What `constants` holds, in the arithmetic dtype: the value beyond the edges; the smallest and the largest sum that
# becomes an integer, and what such a sum starts with.
CONSTANTS: Final = ("cval", "low", "high", "start")


@dataclass(frozen=True)
class Part:
    """The part of the result that a task computes: of a plane, `count` elements from `column` on in rows `top` to
    `bottom`."""

    plane: Int
    column: Int
    count: Int
    top: Int
    bottom: Int


@dataclass(frozen=True)
class Tables:
    """What stands for each plane and row of the tile, and for the elements beyond a row's ends."""

    planes: Ptr
    rows: Ptr
    columns: Ptr


@dataclass(frozen=True)
class Rows:
    """How many rows are swept together, and how far they lie apart in x and in y."""

    x: Int
    y: Int
    count: int = 1


def generate(
    target: Target, *, dtype: str, source: str, to: str, op: str, truncate: bool, ordered: bool = False,
    down: bool = False,
) -> Kernel:  # fmt: skip
    """The kernel of one instance, `task`: pictures of `source`, arithmetic in `dtype`, results in `to`; op sum, max or
    min; truncate: column sums are truncated to integers; ordered: taps go in pairs, and each term is rounded; down:
    results are rounded down to integers, not towards zero."""
    k = Kernel(target, dtype)
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        tile = k.pointer(a.scratch + worker * a.scratch_step, dtype)
        column_sums = tile + a.column_sums
        tables = Tables(*(a.pointer(name, "i64") for name in ("planes", "rows", "columns")))
        constants = a.pointer("constants", dtype)
        taps = Taps(k, a.pointer("w", "i64"), dtype)
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            strip, band = number % a.strips, number // a.strips % a.bands
            plane = number // a.strips // a.bands
            column, top = strip * a.cols, band * a.band
            count = (column + a.cols).min(a.width) - column
            part = Part(plane, column, count, top, (top + a.band).min(a.height))
            _fetch_tile(k, a, source, tile, part, tables, constants)
            y = a.pointer("y", to) + (plane * a.height * a.width + column)
            _sweep_tile(Sweeps(k, op, constants, taps, a, truncate, ordered, down), tile, column_sums, y, part)
    return k


def constant(constants: Ptr, name: str) -> Ptr:
    """Where one of CONSTANTS lies."""
    return constants + CONSTANTS.index(name)


def _fetch_tile(k: Kernel, a: Fields, source: str, tile: Ptr, part: Part, tables: Tables, constants: Ptr) -> None:
    """All rows that the part's windows see, of all planes."""
    with k.loop(0, a.window_planes) as t, k.loop(0, part.bottom - part.top + a.window_rows - 1) as j:
        from_plane, from_row = k.load_int(tables.planes + (part.plane + t)), k.load_int(tables.rows + (part.top + j))
        row = tile + (t * (a.band + a.window_rows - 1) + j) * a.pitch
        real = k.both(from_plane >= 0, from_row >= 0)
        with k.if_else(real) as (then, otherwise):
            with then:
                x = a.pointer("x", source) + (from_plane * a.x_plane + from_row * a.x_row)
                _fetch_row(k, a, x, row, part, tables.columns, constants)
            with otherwise:
                empty = k.broadcast(constant(constants, "cval"), k.lanes)
                # Rows of the tile have room for whole vectors.
                with k.loop(0, part.count + a.left + a.right, k.lanes) as i:
                    k.store(row + i, empty)


def _fetch_row(k: Kernel, a: Fields, x: Ptr, to: Ptr, part: Part, columns: Ptr, constants: Ptr) -> None:
    """The part's elements of a row with `left` before and `right` behind them, and what stands for those beyond."""
    start, stop = part.column - a.left, part.column + part.count + a.right
    inner, outer = start.max(0), stop.min(a.width)
    inside_to, inside_x = to + (inner - start), x + inner
    count = outer - inner
    step = FETCHED * k.lanes
    many = count - count % step
    with k.loop(0, many, step) as i:
        values = [k.load(inside_x + (i + way * k.lanes)) for way in range(FETCHED)]
        for way, value in enumerate(values):
            k.store(inside_to + (i + way * k.lanes), value)
    with k.if_(many < count):
        rest = inside_x + many
        k.rows(count - many, lambda i, lanes: k.store(inside_to + (many + i), k.load(rest + i, lanes)))

    # The table has the elements before the row, then those behind it.
    def beyond(low: Int, high: Int, shift: Int) -> None:
        with k.loop(low, high) as e:
            at = k.load_int(columns + (e + shift))
            with k.if_else(at >= 0) as (then, otherwise):
                with then:
                    k.store(to + (e - start), k.load(x + at, 1))
                with otherwise:
                    k.store(to + (e - start), k.load(constant(constants, "cval"), 1))

    beyond(start, stop.min(0), a.left)
    beyond(start.max(a.width), stop, a.left - a.width)


@dataclass(frozen=True)
class Sweeps:
    """What all sweeps of a kernel share."""

    k: Kernel
    op: str
    constants: Ptr
    taps: Taps
    a: Fields
    truncate: bool
    ordered: bool
    down: bool


def _sweep_tile(s: Sweeps, tile: Ptr, column_sums: Ptr, y: Ptr, part: Part) -> None:
    """From the tile to y, ROWS rows at a time: in one sweep, or in two by way of the column sums."""
    k, a, taps = s.k, s.a, s.taps
    across, single = part.count + a.left + a.right, Rows(a.pitch, a.pitch)
    together = part.bottom - (part.bottom - part.top) % ROWS
    for start, stop, rows in ((part.top, together, ROWS), (together, part.bottom, 1)):
        with k.loop(start, stop, rows) as p:
            row, out = tile + (p - part.top) * a.pitch, y + p * a.width
            with k.if_else(taps.is_single) as (then, otherwise):
                with then:
                    steps = Rows(a.pitch, a.width, rows)
                    Sweep(s, taps.first, steps, taps.result_epsilon, windowed=True).emit(row, part.count, out)
                with otherwise:
                    steps = Rows(a.pitch, a.pitch, rows)
                    down = Sweep(s, taps.first, steps, taps.column_epsilon, windowed=True, to_scratch=True)
                    down.emit(row, across, column_sums, truncate=s.truncate)
                    with k.loop(0, rows) as j:
                        from_, to = column_sums + j * a.pitch, out + j * a.width
                        with k.if_(taps.groups.count > 0):
                            groups = Sweep(s, taps.groups, single, taps.column_epsilon, to_scratch=True)
                            groups.emit(from_, across, from_ + a.group_sums)
                        Sweep(s, taps.second, single, taps.result_epsilon).emit(from_, part.count, to)


@dataclass(frozen=True)
class Sweep:
    """One sweep: y[i] = combination of x[i + place] over a list of taps, for i < count, in each of `rows`.

    epsilon: what is added to the size of a sum before it is truncated. windowed: it goes by the record's columns where
    there are any and several rows go together. to_scratch: y has room for whole vectors behind each row.
    """

    shared: Sweeps
    taps: TapList
    rows: Rows
    epsilon: Ptr
    windowed: bool = False
    to_scratch: bool = False

    def emit(self, x: Ptr, count: Int, y: Ptr, truncate: bool = False) -> None:
        """`truncate`: sums that stay in the arithmetic dtype are truncated to integers."""
        k = self.shared.k
        ways = WAYS // self.rows.count
        step = ways * k.lanes
        many = count - count % step
        with k.loop(0, many, step) as i:
            self._block(x, y, i, ways, k.lanes, truncate)
        if self.to_scratch:
            with k.loop(many, count, k.lanes) as i:
                self._block(x, y, i, 1, k.lanes, truncate)
            return
        # The last vector of a row overlaps the one before; narrow pictures go in narrower vectors.
        widths = [k.lanes, *(w for w in (k.lanes // 2, k.lanes // 4) if w > 1), 1]
        with k.if_else(count >= k.lanes) as (then, otherwise):
            with then, k.loop(many, count, k.lanes) as i:
                self._block(x, y, i.min(count - k.lanes), 1, k.lanes, truncate)
            with otherwise:
                k.rows(count, lambda i, lanes: self._block(x, y, i, 1, lanes, truncate), widths[1:])

    def _block(self, x: Ptr, y: Ptr, at: Int, ways: int, lanes: int, truncate: bool) -> None:
        """`ways` vectors in each row, from element `at` on."""
        k, op, rows = self.shared.k, self.shared.op, self.rows
        to_integer = y.dtype in INTEGERS and k.dtype not in INTEGERS
        spots = [(row, way * lanes) for row in range(rows.count) for way in range(ways)]

        def values(tap: Any) -> list[Any]:
            under = x + (at + k.load_int(self.taps.places + tap))
            starts = [under + rows.x * row for row in range(rows.count)]
            return [k.load(starts[row] + shift, lanes) for row, shift in spots]

        if op == "sum":
            constants = self.shared.constants
            start = k.broadcast(constant(constants, "start"), lanes) if to_integer else k.constant(0.0, lanes)
            sums = [k.var(start) for _ in spots]
        else:
            sums = [k.var(value) for value in values(0)]

        def by_taps() -> None:
            with k.loop(0 if op == "sum" else 1, self.taps.count) as tap:
                weight = k.broadcast(self.taps.weights + tap, lanes) if op == "sum" else None
                for total, value in zip(sums, values(tap), strict=True):
                    total.set(k.fma(weight, value, total.get()) if op == "sum" else _better(k, op, total.get(), value))

        def by_pairs() -> None:
            with k.loop(0, self.taps.count, 2) as tap:
                weight, sign = (k.broadcast(self.taps.weights + (tap + one), lanes) for one in (0, 1))
                for total, value, other in zip(sums, values(tap), values(tap + 1), strict=True):
                    # x + sign * other is rounded once either way.
                    total.set(k.add(total.get(), k.mul(weight, k.fma(sign, other, value))))

        if self.shared.ordered:
            by_pairs()
        elif not self.windowed or op != "sum" or rows.count == 1:
            by_taps()
        else:
            with k.if_else(self.shared.taps.columns.count > 0) as (then, otherwise):
                with then:
                    self._add_columns(x + at, sums, ways, lanes)
                with otherwise:
                    by_taps()
        for (row, shift), total in zip(spots, sums, strict=True):
            value = total.get()
            if truncate or to_integer:
                value = k.add(value, k.intrinsic("llvm.copysign", k.broadcast(self.epsilon, lanes), value))
            if truncate:
                value = k.intrinsic("llvm.trunc", value)
            if to_integer:
                value = self._in_range(value, y.dtype, lanes)
                value = k.intrinsic("llvm.floor", value) if self.shared.down else value
            k.store(y + (rows.y * row + at + shift), value)

    def _in_range(self, value: Any, to: str, lanes: int) -> Any:
        """A sum that is about to become an integer, held within what its dtype or a conversion takes."""
        k, constants = self.shared.k, self.shared.constants
        low, high = (k.broadcast(constant(constants, name), lanes) for name in ("low", "high"))
        value = k.b.select(k.b.fcmp_ordered(">", value, low), value, low)
        value = k.b.select(k.b.fcmp_ordered("<", value, high), value, high)
        if to == "u64":
            # By way of the signed number with the same bits.
            high_half = k.b.fcmp_ordered(">=", value, k.constant(2.0**63, lanes))
            value = k.b.select(high_half, k.sub(value, k.constant(2.0**64, lanes)), value)
        return value

    def _add_columns(self, x: Ptr, sums: list[Any], ways: int, lanes: int) -> None:
        """A row of the tile is loaded once for all rows of the result that see it: each time `rows` sums further down.

        The first and last rows are seen by fewer; nothing is multiplied by 0, which would spread infinity.
        """
        k, rows = self.shared.k, self.rows.count
        columns, height = self.shared.taps.columns, self.shared.taps.column_height
        with k.loop(0, columns.count) as column:
            start = x + k.load_int(columns.places + column)
            weights = columns.weights + column * height

            def step(number: Int, seeing: Sequence[int]) -> None:
                row_x = start + number * self.rows.x
                values = [k.load(row_x + way * lanes, lanes) for way in range(ways)]
                for row in seeing:
                    weight = k.broadcast(weights + (number - row), lanes)
                    for way, value in enumerate(values):
                        total = sums[row * ways + way]
                        total.set(k.fma(weight, value, total.get()))

            for head in range(rows - 1):
                step(k.integer(head), range(head + 1))
            with k.loop(rows - 1, height) as number:
                step(number, range(rows))
            for tail in range(rows - 1):
                step(height + tail, range(tail + 1, rows))


def _better(k: Kernel, op: str, a: Any, b: Any) -> Any:
    """The larger or smaller; a NaN stays where it is first."""
    sign = ">" if op == "max" else "<"
    if k.dtype not in INTEGERS:
        return k.b.select(k.b.fcmp_unordered(sign, b, a), b, a)
    compare = k.b.icmp_unsigned if k.dtype[0] == "u" else k.b.icmp_signed
    return k.b.select(compare(sign, b, a), b, a)
