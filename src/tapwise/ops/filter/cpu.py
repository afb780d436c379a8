"""cpu.tiles of filters: a tile of the picture with its surroundings, brought into the arithmetic dtype, then swept.

A task is a tile of one plane: `band` rows by `cols` elements. Its rows, and what lies around them by the picture's
modes, are copied to scratch that stays in L2, with conversion; tables say which row or column stands for one beyond
the edges, so no padded picture is ever made. A sweep then adds weighted neighbours, eight vectors of an output row at
a time. It goes through a list of taps, (distance in the tile, weight), so that windows of any size and with holes are
one kernel: in two dimensions the list has the window's taps; a separable filter sweeps the column's taps into one row
of scratch and the row's taps from there. The largest and the smallest go the same way, in the picture's own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit
from tapwise.cpu.common import ceil_div
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import COMMON, Fields, KernelPlan
from tapwise.cpu.simd import BYTES, INT, INTEGERS, Int, Kernel, Ptr, Target, target
from tapwise.ops.filter.problem import DTYPES, FilterProblem, limits, source_index

# Vectors that are swept together, as many sums as hide an addition's latency with room for the rest; and rows of them:
# what one row has read, the next ones find in L1.
WAYS: Final = 8
ROWS: Final = 4
# Vectors that are fetched together.
FETCHED: Final = 4
# Bytes of a tile: half of a common L2. A window that does not fit gets so many times that, at so much a tap.
TILE_BYTES: Final = 224 << 10
LARGER: Final = ((1, 1.0), (8, 1.5), (64, 2.5))
WIDTHS: Final = (256, 512, 1024, 2048, 4096)
# Cycles to fetch and store a vector, and for a tap.
FETCH: Final = 8.0
TAP: Final = 0.75
# What a sweep costs beside its taps, in taps.
SWEEP: Final = 3
# Words before a list's distances.
HEADER: Final = 7
# Equal weights in a row, from so many on, are added in groups first.
GROUPED: Final = 8
FIELDS: Final = (
    *COMMON, "planes", "rows", "columns", "constants", "x_plane", "x_row", "height", "width", "lines", "depth",
    "left", "right", "band", "bands", "cols", "strips", "pitch", "line", "groups",
)  # fmt: skip
# What `constants` holds, in the arithmetic dtype.
CVAL, LOW, HIGH, START = range(4)


@dataclass(frozen=True)
class Config(BaseConfig):
    """A task has `band` rows of `cols` elements."""

    band: int
    cols: int


def arithmetic(problem: FilterProblem) -> str:
    """The dtype of the sums; for the largest and the smallest the picture's own, if it holds `cval`."""
    if problem.op in ("max", "min") and problem.dtype != "f16" and problem.dtype == problem.to:
        kind = DTYPES[problem.dtype]
        if kind.kind == "f" or (problem.cval.is_integer() and _holds(kind, int(problem.cval))):
            return problem.dtype
    return "f32" if problem.single else "f64"


def _holds(kind: np.dtype[Any], value: int) -> bool:
    info = np.iinfo(kind)
    return bool(info.min <= value <= info.max)


def generate(target: Target, *, dtype: str, source: str, to: str, op: str, whole: bool) -> Kernel:
    """The kernel of one instance, `task`: pictures of `source`, arithmetic in `dtype`, results in `to`; op sum, max or
    min; whole: what a column leaves is cut off to whole numbers."""
    k = Kernel(target, dtype)
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        tile = k.pointer(a.scratch + worker * a.scratch_step, dtype)
        line = tile + a.line
        planes, rows, columns = (a.pointer(name, "i64") for name in ("planes", "rows", "columns"))
        constants = a.pointer("constants", dtype)
        packed = a.pointer("w", "i64")
        first, second = k.load_int(packed), k.load_int(packed + 1)
        nudges = [packed.to(dtype) + (2 + sweep) * (8 // BYTES[dtype]) for sweep in range(2)]
        columns_, high, grouped = (k.load_int(packed + word) for word in (4, 5, 6))
        places = packed + HEADER
        weights = packed.to(dtype) + (first + second + columns_ + grouped + HEADER) * (8 // BYTES[dtype])
        full = Columns(columns_, high, places + (first + second), weights + (first + second), a.pitch)
        group_places = places + (first + second + columns_)
        group_weights = weights + (first + second + columns_ * high)
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            strip, band = number % a.strips, number // a.strips % a.bands
            plane = number // a.strips // a.bands
            c0, p0 = strip * a.cols, band * a.band
            n = (c0 + a.cols).min(a.width) - c0
            p1 = (p0 + a.band).min(a.height)
            with k.loop(0, a.depth) as t, k.loop(0, p1 - p0 + a.lines - 1) as j:
                from_plane, from_row = k.load_int(planes + (plane + t)), k.load_int(rows + (p0 + j))
                to_row = tile + (t * (a.band + a.lines - 1) + j) * a.pitch
                real = k.both(from_plane >= 0, from_row >= 0)
                with k.if_else(real) as (then, otherwise):
                    with then:
                        x = a.pointer("x", source) + (from_plane * a.x_plane + from_row * a.x_row)
                        _fetch(k, a, x, to_row, c0, n, columns, constants)
                    with otherwise:
                        empty = k.broadcast(constants + CVAL, k.lanes)
                        _fill(k, to_row, n + a.left + a.right, empty)
            y = a.pointer("y", to) + (plane * a.height * a.width + c0)
            across, lines = n + a.left + a.right, Rows(a.pitch, a.pitch)
            together = p1 - (p1 - p0) % ROWS
            for start, stop, rows_ in ((p0, together, ROWS), (together, p1, 1)):
                with k.loop(start, stop, rows_) as p:
                    row, out = tile + (p - p0) * a.pitch, y + p * a.width
                    with k.if_else(second.eq(0)) as (then, otherwise):
                        with then:
                            steps = Rows(a.pitch, a.width, rows_)
                            _sweep(k, op, row, n, places, weights, first, constants, nudges[1], out, steps, None, full)
                        with otherwise:
                            steps = Rows(a.pitch, a.pitch, rows_)
                            _sweep(
                                k, op, row, across, places, weights, first, constants, nudges[0], line, steps, whole,
                                full,
                            )  # fmt: skip
                            with k.loop(0, rows_) as j:
                                from_, to_ = line + j * a.pitch, out + j * a.width
                                with k.if_(grouped > 0):
                                    _sweep(
                                        k, op, from_, across, group_places, group_weights, grouped, constants,
                                        nudges[0], from_ + a.groups, lines, False,
                                    )  # fmt: skip
                                _sweep(
                                    k,
                                    op,
                                    from_,
                                    n,
                                    places + first,
                                    weights + first,
                                    second,
                                    constants,
                                    nudges[1],
                                    to_,
                                    lines,
                                )
    return k


def _fetch(k: Kernel, a: Fields, x: Ptr, to: Ptr, c0: Int, n: Int, columns: Ptr, constants: Ptr) -> None:
    """A row's elements c0 - left to c0 + n + right, with what stands for those beyond its ends."""
    start, stop = c0 - a.left, c0 + n + a.right
    inner, outer = start.max(0), stop.min(a.width)
    here = to + (inner - start)
    there = x + inner
    count = outer - inner
    step = FETCHED * k.lanes
    many = count - count % step
    with k.loop(0, many, step) as i:
        values = [k.load(there + (i + way * k.lanes)) for way in range(FETCHED)]
        for way, value in enumerate(values):
            k.store(here + (i + way * k.lanes), value)
    with k.if_(many < count):
        rest = there + many
        k.rows(count - many, lambda i, lanes: k.store(here + (many + i), k.load(rest + i, lanes)))

    # The table has the elements before the row, then those behind it.
    def beyond(low: Int, high: Int, shift: Int) -> None:
        with k.loop(low, high) as e:
            at = k.load_int(columns + (e + shift))
            with k.if_else(at >= 0) as (then, otherwise):
                with then:
                    k.store(to + (e - start), k.load(x + at, 1))
                with otherwise:
                    k.store(to + (e - start), k.load(constants + CVAL, 1))

    beyond(start, stop.min(0), a.left)
    beyond(start.max(a.width), stop, a.left - a.width)


def _fill(k: Kernel, to: Ptr, count: Int, value: Any) -> None:
    """Rows of the tile have room for whole vectors."""
    with k.loop(0, count, k.lanes) as i:
        k.store(to + i, value)


@dataclass(frozen=True)
class Rows:
    """How many rows are swept together, and how far they lie apart in x and in y."""

    x: Int
    y: Int
    count: int = 1


@dataclass(frozen=True)
class Columns:
    """A window without holes as `count` columns of `high` taps: where each begins in the tile, and their weights."""

    count: Int
    high: Int
    places: Ptr
    weights: Ptr
    pitch: Int


def _sweep(
    k: Kernel, op: str, x: Ptr, count: Int, places: Ptr, weights: Ptr, taps: Int, constants: Ptr, nudge: Ptr, y: Ptr,
    rows: Rows,
    whole: bool | None = None, full: Columns | None = None,
) -> None:  # fmt: skip
    """y[i] = combination of x[i + place] over the taps, for i < count, in each row.

    `whole` is given where y is the line between two sweeps, and says whether that is cut off to whole numbers. `full`
    columns are swept where there are any, several rows at a time.
    """
    cut = y.dtype in INTEGERS and k.dtype not in INTEGERS

    def block(at: Int, ways: int, lanes: int) -> None:
        spots = [(row, way * lanes) for row in range(rows.count) for way in range(ways)]

        def values(tap: Any) -> list[Any]:
            here = x + (at + k.load_int(places + tap))
            starts = [here + rows.x * row for row in range(rows.count)]
            return [k.load(starts[row] + shift, lanes) for row, shift in spots]

        if op == "sum":
            start = k.broadcast(constants + START, lanes) if cut else k.constant(0.0, lanes)
            sums = [k.var(start) for _ in spots]
        else:
            sums = [k.var(value) for value in values(0)]

        def by_taps() -> None:
            with k.loop(0 if op == "sum" else 1, taps) as tap:
                weight = k.broadcast(weights + tap, lanes) if op == "sum" else None
                for total, value in zip(sums, values(tap), strict=True):
                    total.set(k.fma(weight, value, total.get()) if op == "sum" else _better(k, op, total.get(), value))

        if full is None or op != "sum" or rows.count == 1:
            by_taps()
        else:
            with k.if_else(full.count > 0) as (then, otherwise):
                with then:
                    _add_columns(k, full, x + at, sums, rows.count, ways, lanes)
                with otherwise:
                    by_taps()
        for (row, shift), total in zip(spots, sums, strict=True):
            value = total.get()
            if whole or cut:
                value = k.add(value, k.intrinsic("llvm.copysign", k.broadcast(nudge, lanes), value))
            if whole:
                value = k.intrinsic("llvm.trunc", value)
            if cut:
                low, high = k.broadcast(constants + LOW, lanes), k.broadcast(constants + HIGH, lanes)
                value = k.b.select(k.b.fcmp_ordered(">", value, low), value, low)
                value = k.b.select(k.b.fcmp_ordered("<", value, high), value, high)
                if y.dtype == "u64":
                    # By way of the signed number with the same bits.
                    high_half = k.b.fcmp_ordered(">=", value, k.constant(2.0**63, lanes))
                    value = k.b.select(high_half, k.sub(value, k.constant(2.0**64, lanes)), value)
            k.store(y + (rows.y * row + at + shift), value)

    ways = WAYS // rows.count
    step = ways * k.lanes
    many = count - count % step
    with k.loop(0, many, step) as i:
        block(i, ways, k.lanes)
    if whole is not None:
        # The line has room for whole vectors, and so has the tile.
        with k.loop(many, count, k.lanes) as i:
            block(i, 1, k.lanes)
        return
    # The last vector of a row overlaps the one before; narrow pictures go in narrower vectors.
    widths = [k.lanes, *(w for w in (k.lanes // 2, k.lanes // 4) if w > 1), 1]
    with k.if_else(count >= k.lanes) as (then, otherwise):
        with then, k.loop(many, count, k.lanes) as i:
            block(i.min(count - k.lanes), 1, k.lanes)
        with otherwise:
            k.rows(count, lambda i, lanes: block(i, 1, lanes), widths[1:])


def _add_columns(k: Kernel, full: Columns, x: Ptr, sums: list[Any], rows: int, ways: int, lanes: int) -> None:
    """A row of the tile is loaded once for all rows of the result that see it: each time `rows` sums further down.

    The first and last rows are seen by fewer; nothing is multiplied by 0, which would spread infinity.
    """
    with k.loop(0, full.count) as column:
        start = x + k.load_int(full.places + column)
        weights = full.weights + column * full.high

        def step(number: Int, seeing: Sequence[int]) -> None:
            here = start + number * full.pitch
            values = [k.load(here + way * lanes, lanes) for way in range(ways)]
            for row in seeing:
                weight = k.broadcast(weights + (number - row), lanes)
                for way, value in enumerate(values):
                    total = sums[row * ways + way]
                    total.set(k.fma(weight, value, total.get()))

        for head in range(rows - 1):
            step(k.integer(head), range(head + 1))
        with k.loop(rows - 1, full.high) as number:
            step(number, range(rows))
        for tail in range(rows - 1):
            step(full.high + tail, range(tail + 1, rows))


def _better(k: Kernel, op: str, a: Any, b: Any) -> Any:
    """The larger or smaller; a NaN stays where it is first."""
    sign = ">" if op == "max" else "<"
    if k.dtype not in INTEGERS:
        return k.b.select(k.b.fcmp_unordered(sign, b, a), b, a)
    compare = k.b.icmp_unsigned if k.dtype[0] == "u" else k.b.icmp_signed
    return k.b.select(compare(sign, b, a), b, a)


class TilesPlan(KernelPlan):
    """`pack` makes the list of taps."""

    def __init__(
        self, problem: FilterProblem, device: Device, library: Any, fields: dict[str, Any], dtype: str
    ) -> None:
        super().__init__(problem, device, library, FIELDS, fields)
        self._pitch, self._lines, self._band = fields["pitch"], fields["lines"], fields["band"]
        self._dtype, self._groups = DTYPES[dtype], fields["groups"]

    def pack(self, w: np.ndarray | None) -> np.ndarray:
        """(taps of the first sweep, of the second, nudges, columns and their height, distances, weights).

        Of the largest and the smallest, `w` is None or where it looks.

        A tap whose weight is 0 is left out, as in scipy: what it would see, infinity perhaps, does not count.
        """
        problem: FilterProblem = self.problem
        _, r, s = problem.size
        nudges = (0.0, 0.0) if w is None else problem.nudges(np.asarray(w, np.float64).ravel())
        if problem.op == "separable" or (w is None and problem.size[0] == 1):
            column, row = (np.ones(r), np.ones(s)) if w is None else (np.asarray(w[:r]), np.asarray(w[r:]))
            # Without a column the row is swept from the tile itself, and the other way round.
            if r == 1 and (w is None or column[0] == 1):
                return self._taps([(np.arange(s) * problem.c, row)], nudges)
            if w is not None and self._better_at_once(column, row):
                weights = np.multiply.outer(np.asarray(column, np.float64), np.asarray(row, np.float64))
                i, j = np.indices(weights.shape)
                places = (i * self._pitch + j * problem.c).T.ravel()
                return self._taps([(places, weights.T.ravel())], nudges, weights)
            down = np.arange(r) * self._pitch
            if s == 1 and (w is None or row[0] == 1):
                return self._taps([(down, column)], nudges, column[:, None])
            return self._taps([(down, column), (np.arange(s) * problem.c, row)], nudges, column[:, None], w is not None)
        weights = np.ones(problem.size) if w is None else np.asarray(w).reshape(problem.size)
        t, i, j = np.indices(problem.size)
        lines = self._band + self._lines - 1
        places = ((t * lines + i) * self._pitch + j * problem.c).transpose(0, 2, 1).ravel()
        window = weights[0] if len(weights) == 1 else None
        return self._taps([(places, weights.transpose(0, 2, 1).ravel())], nudges, window)

    def _better_at_once(self, column: np.ndarray, row: np.ndarray) -> bool:
        """Whether the window in one sweep takes less than a column and a row, and means the same."""
        problem: FilterProblem = self.problem
        counts = np.count_nonzero(column), np.count_nonzero(row)
        exact = bool(np.all(column == np.rint(column)) and np.all(row == np.rint(row)))
        return bool(counts[0] * counts[1] <= sum(counts) + SWEEP and (exact or not problem.whole or not problem.cut))

    def _taps(
        self, sweeps: list[tuple[np.ndarray, np.ndarray]], nudges: tuple[float, float],
        window: np.ndarray | None = None, group: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """`window`: the first sweep's weights as rows and columns, to go by columns if it is high and without holes.

        The lists have the order of that, so that a row gets the same sum whether it goes alone or with others.
        """
        columns, high = 0, 0
        if window is not None and len(window) >= ROWS and np.all(window != 0):
            high, columns = window.shape
        kept = []
        for places, weights in sweeps:
            seen = weights != 0
            # A sweep needs a tap; a weight of 0 then is one that counts.
            seen[0] |= not seen.any()
            kept.append((places[seen].astype(np.int64), weights[seen].astype(np.float64)))
        counts = [len(places) for places, _ in kept] + [0] * (2 - len(kept))
        parts = [rounded(values, self._dtype) for _, values in kept]
        groups = np.zeros(0, np.int64)
        if group and counts[1] >= GROUPED and np.all(kept[1][1] == kept[1][1][0]):
            # About as many elements as groups, whose sums lie behind the line, and what is left over from the line.
            size = round(counts[1] ** 0.5)
            whole, rest = divmod(counts[1], size)
            row, step = kept[1][0], int(kept[1][0][1] - kept[1][0][0])
            groups = row[:size]
            ends = row[size * whole :]
            kept[1] = np.concatenate([self._groups + np.arange(whole) * size * step, ends]), kept[1][1][: whole + rest]
            counts[1] = whole + rest
            parts[1] = rounded(np.full(whole + rest, kept[1][1][0]), self._dtype)
        starts = np.arange(columns, dtype=np.int64) * self.problem.c
        if columns:
            parts.append(parts[0])
        parts.append(np.ones(len(groups), self._dtype))
        weights = np.concatenate(parts)
        padded = np.zeros(ceil_div(weights.nbytes, 8) * 8 // weights.itemsize, self._dtype)
        padded[: len(weights)] = weights
        # One to a word, whatever its size.
        given = np.zeros((2, 8 // weights.itemsize), self._dtype)
        given[:, 0] = nudges
        return np.concatenate(
            [
                counts, given.view(np.int64).ravel(), [columns, high, len(groups)], *(places for places, _ in kept),
                starts, groups,
                padded.view(np.int64),
            ]
        ).astype(np.int64)  # fmt: skip


def rounded(weights: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Weights in a dtype, with the sum that they have in float64: what the larger ones lose, the smaller ones get."""
    if dtype != np.float32:
        return weights.astype(dtype)
    result, rest = np.empty(len(weights), dtype), 0.0
    for number in np.argsort(-np.abs(weights), kind="stable"):
        wanted = float(weights[number]) + rest
        result[number] = wanted
        rest = wanted - float(result[number])
        # Infinity has no rest.
        rest = rest if np.isfinite(rest) else 0.0
    return result


class Tiles(Algorithm[Config]):
    """Windows of any size up to what a tile holds; 8 to 64 bit integers, f16, f32, f64."""

    operator: ClassVar[str] = "filter"
    id: ClassVar[str] = "cpu.tiles"
    summary: ClassVar[str] = (
        "tiles in L2 with their surroundings, swept tap by tap in vectors; columns first, then rows"
    )
    dtypes: ClassVar[None] = None

    def rejects(self, problem: FilterProblem, device: Device) -> str | None:
        if self._shape(problem, device) is None:
            return f"takes windows whose surroundings fit {TILE_BYTES * LARGER[-1][0] >> 20} MiB, not {problem.size}"
        return None

    def _halo(self, problem: FilterProblem) -> int:
        return (problem.size[2] - 1) * problem.c

    def _shape(self, problem: FilterProblem, device: Device) -> tuple[int, int] | None:
        """(rows, elements) of a tile: what is fetched and summed beside the results is the least part of it."""
        depth, height, width = problem.spatial
        width *= problem.c
        itemsize = BYTES[arithmetic(problem)]
        halo, (t, r, s) = self._halo(problem), problem.size
        best: tuple[float, int, int] | None = None
        for (times, slower), cols in product(LARGER, sorted({min(cols, width) for cols in WIDTHS})):
            lines = times * TILE_BYTES // itemsize // (self._pitch(problem, cols) * t) - (r - 1)
            if lines < 1:
                continue
            band = min(lines, height)
            # Cycles a vector: fetching, where a short piece of a row costs a start in memory too, and two sweeps.
            across = 1 + halo / cols
            waste = FETCH * (1 + (r - 1) / band) * t * across * (1 + 64 / (cols + halo)) + TAP * slower * (
                r * across + s
            )
            if best is None or waste < best[0]:
                best = (waste, band, cols)
        if best is None:
            return None
        _, band, cols = best
        # Enough tasks for all threads, of even height.
        strips = ceil_div(width, cols) * depth
        bands = max(ceil_div(height, band), min(height, ceil_div(4 * device.threads, strips)))
        if height * width * depth * problem.taps <= 1 << 14:
            bands = ceil_div(height, band)
        return ceil_div(height, bands), cols

    def _pitch(self, problem: FilterProblem, cols: int) -> int:
        """Elements of a tile's row: whole cache lines, and an odd number of them, so that columns spread over sets."""
        line = 64 // BYTES[arithmetic(problem)]
        return (ceil_div(cols + self._halo(problem) + line, line) | 1) * line

    def configs(self, problem: FilterProblem, device: Device) -> Sequence[Config]:
        shape = self._shape(problem, device)
        assert shape is not None
        return [Config(*shape)]

    def predict_us(self, problem: FilterProblem, config: Config, device: Device) -> float:
        """TAP cycles a tap and vector, and FETCH; or the bytes over the bandwidth."""
        costs = Costs(device, BYTES[arithmetic(problem)])
        vectors = problem.spatial[0] * problem.spatial[1] * problem.spatial[2] * problem.c / costs.lanes
        cycles = max(
            vectors * (TAP * problem.taps + FETCH), costs.stream(problem.bytes, problem.bytes) * device.threads
        )
        tasks = self._tasks(problem, config)
        return costs.wall_us(cycles / tasks + 100, tasks, device.threads)

    def _tasks(self, problem: FilterProblem, config: Config) -> int:
        depth, height, width = problem.spatial
        return depth * ceil_div(height, config.band) * ceil_div(width * problem.c, config.cols)

    def _scratch(self, problem: FilterProblem, config: Config) -> tuple[int, int]:
        """(elements of a tile, of all scratch: the tile, lines, and groups of their elements)."""
        pitch = self._pitch(problem, config.cols)
        tile = pitch * (config.band + problem.size[1] - 1) * problem.size[0]
        # Vectors that begin in a row may end behind it.
        return tile + 64, tile + 64 + 2 * self._lines(pitch)

    def _lines(self, pitch: int) -> int:
        """Elements of the lines between two sweeps."""
        return ROWS * pitch + 64

    def workspace_bytes(self, problem: FilterProblem, config: Config, device: Device) -> int:
        workers = max(1, min(device.threads, self._tasks(problem, config)))
        return self._scratch(problem, config)[1] * BYTES[arithmetic(problem)] * workers

    def plan(self, problem: FilterProblem, config: Config, device: Device) -> Plan:
        dtype = arithmetic(problem)
        (_, height, width), (t, r, s) = problem.spatial, problem.size
        width_all = width * problem.c
        tables = [
            source_index(np.arange(-before, length + size - 1 - before), length, mode)
            for before, length, size, mode in zip(
                problem.before, problem.spatial, problem.size, problem.modes, strict=True
            )
        ]
        left = problem.before[2]
        beyond = np.concatenate([tables[2][:left], tables[2][left + width :]])
        channels = np.arange(problem.c)
        columns = np.where(beyond[:, None] < 0, -1, beyond[:, None] * problem.c + channels)
        # Of the largest and smallest in integers, the constant alone is needed.
        plain = dtype in INTEGERS
        constants = np.array([problem.cval, *((0, 0, 0) if plain else limits(problem))]).astype(DTYPES[dtype])
        pitch = self._pitch(problem, config.cols)
        line, scratch = self._scratch(problem, config)
        fields = {
            "planes": tables[0].astype(np.int64), "rows": tables[1].astype(np.int64),
            "columns": np.ascontiguousarray(columns.ravel(), np.int64), "constants": constants,
            "x_plane": height * width_all, "x_row": width_all, "height": height, "width": width_all, "lines": r,
            "depth": t, "left": left * problem.c, "right": (s - 1 - left) * problem.c, "band": config.band,
            "bands": ceil_div(height, config.band), "cols": config.cols, "strips": ceil_div(width_all, config.cols),
            "pitch": pitch, "line": line, "groups": self._lines(pitch), "tasks": self._tasks(problem, config),
            "scratch_step": scratch * BYTES[dtype],
        }  # fmt: skip
        op = problem.op if problem.op in ("max", "min") else "sum"
        whole = problem.whole and problem.cut and not problem.clip and op == "sum"
        return TilesPlan(problem, device, _library(dtype, problem.dtype, problem.to, op, whole), fields, dtype)


@lru_cache(maxsize=256)
def _library(dtype: str, source: str, to: str, op: str, whole: bool) -> Any:
    cpu = target(settings.cpu_target())
    return jit.load("filter", generate, cpu, dtype=dtype, source=source, to=to, op=op, whole=whole)
