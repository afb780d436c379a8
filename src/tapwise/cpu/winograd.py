"""cpu.winograd: F(4x4, 3x3) and F(2x2, 3x3), one row of the transform at a time.

An output tile of m x m is A^T [ (G w G^T) * (B^T x B) ] A with (m + 2)^2 products instead of 9 m^2. The (m + 2)^2
products are gone through in slices of one row i: the input's row combination i, its m + 2 column combinations, m + 2
matrix products over channels, their column combinations, and A^T's column i adds the result to the output tiles. So
scratch holds one slice rather than the whole transformed input, which would be more than twice the input. Lanes run
over tiles.

Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015; points as in Barabasz et al., "Error
Analysis and Improving the Accuracy of Winograd Convolution", 2018.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import sqrt
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit, tile
from tapwise.cpu.common import arithmetic, ceil_div, rejects_all, splits
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import COMMON, Fields, KernelPlan
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target, target
from tapwise.cpu.strips import deinterleave, emit_finish_row, emit_zeros
from tapwise.problem import ConvProblem

Matrix = tuple[tuple[float, ...], ...]

# Evaluation points besides infinity: small powers of two and their reciprocals lose least.
POINTS: Final = {2: ("0", "1", "-1"), 4: ("0", "1", "-1", "1/2", "-2")}
BLOCK_CHANNELS: Final = 384
# Share of the transforms' cycles that is not hidden behind arithmetic.
OVERLAP: Final = 0.6

FIELDS: Final = (
    *COMMON, "zeros", "groups", "group_c", "group_k", "h", "w_in", "p", "q", "pad_top", "pad_left",
    "tile_rows", "tile_cols", "strip_rows", "strips", "filter_block", "filter_blocks", "channel_block",
    "tiles", "line_size", "input_at", "product_at", "sums_at", "output_at", "offsets",
)  # fmt: skip


@cache
def matrices(m: int) -> tuple[Matrix, Matrix, Matrix]:
    """(A^T, G, B^T) of F(m, 3): shapes (m, m + 2), (m + 2, 3), (m + 2, m + 2), by Toom and Cook's construction.

    Row i of G evaluates a filter at point i, scaled by 1 / prod(a_i - a_j); row i of B^T holds the coefficients of
    prod over j != i of (x - a_j); the last row stands for infinity.
    """
    points = [Fraction(text) for text in POINTS[m]]
    size = m + 2

    def polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
        coefficients = [Fraction(1)]
        for root in roots:
            shifted = [Fraction(0), *coefficients]
            coefficients = [a - root * b for a, b in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
        return coefficients

    a_t = [[point**row for point in points] + [Fraction(int(row == m - 1))] for row in range(m)]
    g, b_t = [], []
    for i, point in enumerate(points):
        others = points[:i] + points[i + 1 :]
        scale = Fraction(1)
        for other in others:
            scale *= point - other
        g.append([point**power / scale for power in range(3)])
        b_t.append([*polynomial(others), Fraction(0)])
    g.append([Fraction(0), Fraction(0), Fraction(1)])
    b_t.append(polynomial(points))
    assert len(b_t) == size

    def freeze(rows: Sequence[Sequence[Fraction]]) -> Matrix:
        return tuple(tuple(float(value) for value in row) for row in rows)

    return freeze(a_t), freeze(g), freeze(b_t)


@dataclass(frozen=True)
class Config(BaseConfig):
    """Output tile `size` x `size`; register tile m x n; `rows` rows of tiles and `filters` output channels a task."""

    size: int
    m: int
    n: int
    rows: int
    filters: int


def combine(k: Kernel, terms: Sequence[tuple[float, Any]]) -> Any:
    """The sum of coefficient * value; terms with coefficient 0 left out."""
    terms = [(c, v) for c, v in terms if c != 0]
    first, value = terms[0]
    lanes = k.lanes_of(value)
    total = value if first == 1 else k.mul(k.constant(first, lanes), value)
    for coefficient, value in terms[1:]:
        if coefficient in (1, -1):
            total = k.add(total, value) if coefficient == 1 else k.sub(total, value)
        else:
            total = k.fma(k.constant(coefficient, lanes), value, total)
    return total


def generate(
    target: Target, *, dtype: str, storage: str, size: int, m: int, n: int, bias: bool, residual: bool,
    activation: str | None,
) -> Kernel:  # fmt: skip
    """The kernels of one instance: `task` and `pack_task`."""
    k = Kernel(target, dtype)
    tile.emit(k, m, n, "pixels")
    emit_finish_row(k, storage, "one" if bias else None, residual, activation)
    for i in range(size + 2):
        _emit_input(k, storage, size, i)
        _emit_accumulate(k, size, i)
    _emit_output(k, storage, size)
    _emit_task(k, storage, size)
    _emit_filters(k, storage, size, m)
    return k


def interleave(k: Kernel, streams: Sequence[Any]) -> list[Any]:
    """The inverse of `deinterleave`: vectors that follow each other in memory."""
    if len(streams) == 1:
        return list(streams)
    lanes = k.lanes_of(streams[0])
    half = len(streams) // 2
    low, high = interleave(k, streams[0::2]), interleave(k, streams[1::2])
    result = []
    for a, b in zip(low, high, strict=True):
        picks = [lane // 2 + (lane % 2) * lanes for lane in range(2 * lanes)]
        result += [k.shuffle(a, b, picks[:lanes]), k.shuffle(a, b, picks[lanes:])]
    assert len(result) == 2 * half
    return result


def _emit_input(k: Kernel, storage: str, size: int, i: int) -> None:
    """input_i(args, scratch, image_group, row0, rows): slice i of the transformed input of a strip, all channels.

    Result j of channel c: scratch[input_at + (j * group_c + c) * tiles + tile].
    """
    b_t = matrices(size)[2]
    edge = size + 2
    with k.function(
        f"input_{i}", args="i64", scratch=k.dtype, x=storage, row0=INT, rows=INT
    ) as (args, scratch, x, row0, rows):  # fmt: skip
        a = Fields(k, args, FIELDS)
        zeros = a.pointer("zeros", storage)
        line = scratch + a.pad_left
        with k.loop(0, a.group_c) as c, k.loop(0, rows) as row:
            plane = x + c * (a.h * a.w_in)
            top = (row0 + row) * size - a.pad_top
            sources = []
            for r in range(edge):
                if b_t[i][r]:
                    h = top + r
                    inside = k.both(h >= 0, h < a.h)
                    sources.append((b_t[i][r], k.select(inside, plane + h * a.w_in, zeros)))

            def combine_rows(at: Int, lanes: int, sources: list[tuple[float, Ptr]] = sources) -> None:
                k.store(line + at, combine(k, [(f, k.load(source + at, lanes)) for f, source in sources]))

            k.rows(a.w_in, combine_rows)
            out = scratch + a.input_at + c * a.tiles + row * a.tile_cols
            step = a.group_c * a.tiles

            def combine_columns(t: Int, lanes: int, out: Ptr = out, step: Int = step) -> None:
                here = scratch + t * size
                columns = deinterleave(k, here, size, size, lanes)
                columns += deinterleave(k, here + size, size, 2, lanes)
                for j in range(edge):
                    k.store(out + step * j + t, combine(k, list(zip(b_t[j], columns, strict=True))))

            k.rows(a.tile_cols, combine_columns)


def _emit_accumulate(k: Kernel, size: int, i: int) -> None:
    """accumulate_i(args, scratch, filters): add slice i's products, column-combined, to the output tiles' sums.

    Sum (p, q) of a filter: scratch[sums_at + ((filter * size + p) * size + q) * tiles + tile].
    """
    a_t = matrices(size)[0]
    edge = size + 2
    with k.function(f"accumulate_{i}", args="i64", scratch=k.dtype, filters=INT) as (args, scratch, filters):
        a = Fields(k, args, FIELDS)
        with k.loop(0, filters) as f:
            products = scratch + a.product_at + f * a.tiles
            sums = scratch + a.sums_at + f * (a.tiles * (size * size))
            step = a.filter_block * a.tiles
            with k.loop(0, a.tiles, k.lanes) as t:
                columns = [k.load(products + step * j + t) for j in range(edge)]
                for q in range(size):
                    z = combine(k, list(zip(a_t[q], columns, strict=True)))
                    for p in range(size):
                        factor = a_t[p][i]
                        if not factor:
                            continue
                        cell = sums + a.tiles * (p * size + q) + t
                        first = next(index for index in range(edge) if a_t[p][index])
                        terms = [(factor, z)] if first == i else [(1.0, k.load(cell)), (factor, z)]
                        k.store(cell, combine(k, terms))


def _emit_output(k: Kernel, storage: str, size: int) -> None:
    """output(args, scratch, row0, rows, k0, filters, at): sums of a strip to rows of y; `at` is y's plane of k0."""
    with k.function(
        "output", args="i64", scratch=k.dtype, row0=INT, rows=INT, k0=INT, filters=INT, plane0=INT
    ) as (args, scratch, row0, rows, k0, filters, plane0):  # fmt: skip
        a = Fields(k, args, FIELDS)
        y, bias, residual = (a.pointer(name, storage) for name in ("y", "bias", "residual"))
        line = scratch + a.output_at
        with k.loop(0, filters) as f, k.loop(0, rows) as row:
            for p in range(size):
                sums = scratch + a.sums_at + (f * (size * size) + p * size) * a.tiles + row * a.tile_cols
                # Two lines in turn: a line is read while the next is written.
                here = line + a.line_size * (p % 2)
                height = (row0 + row) * size + p
                with k.if_(height < a.p):

                    def weave(t: Int, lanes: int, sums: Ptr = sums, here: Ptr = here) -> None:
                        streams = [k.load(sums + a.tiles * q + t, lanes) for q in range(size)]
                        if lanes == 1:
                            for q, value in enumerate(streams):
                                k.store(here + t * size + q, value)
                        else:
                            for index, vector in enumerate(interleave(k, streams)):
                                k.store(here + t * size + index * lanes, vector)

                    k.rows(a.tile_cols, weave)
                    at = ((plane0 + f) * a.p + height) * a.q
                    k.call("finish_row", here, 1, bias + k0 + f, residual + at, y + at, a.q)


def _emit_task(k: Kernel, storage: str, size: int) -> None:
    edge = size + 2
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        scratch = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        w, offsets = a.pointer("w", k.dtype), a.pointer("offsets", "i64")
        x = a.pointer("x", storage)
        emit_zeros(k, scratch, a.line_size)
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            strip, number = number % a.strips, number // a.strips
            filter_block, image_group = number % a.filter_blocks, number // a.filter_blocks
            group = image_group % a.groups
            row0 = strip * a.strip_rows
            rows = (a.tile_rows - row0).min(a.strip_rows)
            k0 = filter_block * a.filter_block
            filters = (a.group_k - k0).min(a.filter_block)
            # (image * groups + group) * channels of a group is the first plane of x and of y.
            planes = x + image_group * a.group_c * (a.h * a.w_in)
            matrix = a.group_c * a.group_k
            for i in range(edge):
                k.call(f"input_{i}", args, scratch, planes, row0, rows)
                for j in range(edge):
                    panels = w + (group * (edge * edge) + (i * edge + j)) * matrix
                    with k.loop(0, a.group_c, a.channel_block) as channel:
                        channels = (a.group_c - channel).min(a.channel_block)
                        k.call(
                            "block", scratch + a.input_at + (a.group_c * j + channel) * a.tiles, 1, offsets, channels,
                            panels + channel * a.group_k + k0 * channels,
                            scratch + a.product_at + a.filter_block * a.tiles * j, a.tiles, filters,
                            a.tiles // k.lanes, channel > 0,
                        )  # fmt: skip
                k.call(f"accumulate_{i}", args, scratch, filters)
            k.call("output", args, scratch, row0, rows, group * a.group_k + k0, filters, image_group * a.group_k + k0)


def _emit_filters(k: Kernel, storage: str, size: int, panel: int) -> None:
    """`pack_task`: G w G^T of all filters, each of the (size + 2)^2 matrices in the panels that tile.block reads.

    Lanes run over the filters of a panel; the narrower last panel goes one filter at a time.
    """
    g = matrices(size)[1]
    edge = size + 2
    with k.function("pack_task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        w, packed = a.pointer("x", storage), a.pointer("w", k.dtype)
        matrix = a.group_c * a.group_k
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            filter_block, group = number % a.filter_blocks, number // a.filter_blocks
            first = filter_block * a.filter_block
            end = (first + a.filter_block).min(a.group_k)
            with k.loop(0, a.group_c, a.channel_block) as channel, k.loop(first, end, panel) as k0:
                channels = (a.group_c - channel).min(a.channel_block)
                width = (a.group_k - k0).min(panel)
                base = packed + group * (edge * edge) * matrix + channel * a.group_k + k0 * channels

                def transform(c: Int, shift: Int, lanes: int, base: Ptr, k0: Int, channel: Int, width: Int) -> None:
                    source = w + ((group * a.group_k + k0 + shift) * a.group_c + channel + c) * 9
                    filters = [source + a.group_c * (9 * lane) for lane in range(lanes)]
                    taps = [[_across(k, filters, 3 * r + s) for s in range(3)] for r in range(3)]
                    for i in range(edge):
                        row = [combine(k, [(g[i][r], taps[r][s]) for r in range(3)]) for s in range(3)]
                        for j in range(edge):
                            value = combine(k, [(g[j][s], row[s]) for s in range(3)])
                            k.store(base + matrix * (i * edge + j) + c * width + shift, value)

                with k.if_else(width.eq(panel)) as (whole, partial):
                    with whole, k.loop(0, channels) as c:
                        transform(c, k.integer(0), panel, base, k0, channel, width)
                    with partial, k.loop(0, channels) as c, k.loop(0, width) as shift:
                        transform(c, shift, 1, base, k0, channel, width)


def _across(k: Kernel, filters: Sequence[Ptr], tap: int) -> Any:
    """One tap of several filters."""
    return k.load(filters[0] + tap, 1) if len(filters) == 1 else k.gather([f + tap for f in filters])


class Geometry:
    """Sizes of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, lanes: int) -> None:
        size, edge = config.size, config.size + 2
        self.problem, self.config = problem, config
        self.tile_rows, self.tile_cols = (ceil_div(extent, size) for extent in problem.output)
        self.tiles = ceil_div(config.rows * self.tile_cols, lanes) * lanes
        reach = max(problem.padding[1][0] + problem.spatial[1], size * self.tile_cols + 2)
        self.line_size = ceil_div(reach + 2 * size + lanes, 16) * 16
        self.channels = ceil_div(problem.group_c, ceil_div(problem.group_c, BLOCK_CHANNELS))
        self.input_at = self.line_size
        self.product_at = self.input_at + edge * problem.group_c * self.tiles
        self.sums_at = self.product_at + edge * config.filters * self.tiles
        self.output_at = self.sums_at + size * size * config.filters * self.tiles
        # What the widest vector of the last tile reads and writes beyond.
        total = self.output_at + 2 * self.line_size + size * lanes
        self.scratch_bytes = ceil_div(total * (8 if problem.dtype == "f64" else 4), 64) * 64

    def fields(self) -> dict[str, int | np.ndarray]:
        p, c = self.problem, self.config
        strips, filter_blocks = ceil_div(self.tile_rows, c.rows), ceil_div(p.group_k, c.filters)
        return {
            "tasks": strips * filter_blocks * p.groups * p.n, "scratch_step": self.scratch_bytes,
            "groups": p.groups, "group_c": p.group_c, "group_k": p.group_k,
            "h": p.spatial[0], "w_in": p.spatial[1], "p": p.output[0], "q": p.output[1],
            "pad_top": p.padding[0][0], "pad_left": p.padding[1][0],
            "tile_rows": self.tile_rows, "tile_cols": self.tile_cols, "strip_rows": c.rows, "strips": strips,
            "filter_block": c.filters, "filter_blocks": filter_blocks, "channel_block": self.channels,
            "tiles": self.tiles, "line_size": self.line_size, "input_at": self.input_at,
            "product_at": self.product_at, "sums_at": self.sums_at, "output_at": self.output_at,
            "offsets": np.arange(self.channels, dtype=np.int64) * self.tiles,
            "zeros": np.zeros(p.spatial[1] + 16, np.float64),
        }  # fmt: skip


class Winograd(Algorithm[Config]):
    """3x3, stride 1, any padding and groups; float32, float64, float16 (in float32); NCHW.

    Rounding errors are larger than those of a direct sum, so `auto` never takes it for float64, and its bound is in
    terms of |A^T| [ (|G| |w| |G^T|) * (|B^T| |x| |B|) ] |A|, the size of what it sums.
    """

    id: ClassVar[str] = "cpu.winograd"
    summary: ClassVar[str] = "F(4x4, 3x3) and F(2x2, 3x3), sliced by transform row; lanes over tiles"
    exact: ClassVar[bool] = False

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if problem.kernel != (3, 3):
            return f"takes 3x3 filters, not {'x'.join(map(str, problem.kernel))}"
        for name, values in (("stride", problem.stride), ("dilation", problem.dilation)):
            if set(values) != {1}:
                return f"takes {name} 1, not {'x'.join(map(str, values))}"
        if problem.layout != "nchw":
            return f"takes nchw, not {problem.layout}"
        if problem.depthwise:
            return "has no product over channels to save when each group has one"
        return rejects_all(problem, device)

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """Tile sizes, strips and filter blocks whose scratch stays within twice the input, the fastest predicted
        first."""
        every = list(dict.fromkeys(self._candidates(problem, device)))
        return sorted(every, key=lambda config: self.predict_us(problem, config, device))

    def _candidates(self, problem: ConvProblem, device: Device) -> Iterator[Config]:
        limit = 2 * problem.n * problem.c * problem.spatial[0] * problem.spatial[1] * max(4, problem.itemsize)
        smallest: Config | None = None
        smallest_size = 0
        found = False
        for size in (4, 2):
            tile_rows = ceil_div(problem.output[0], size)
            rows_choices = sorted({ceil_div(tile_rows, count) for count in (1, 2, 4, 6, 8, 14, 16, tile_rows)})
            for m, n in tile.shapes(target(settings.cpu_target())):
                if m < 3 or m >= 2 * problem.group_k:
                    continue
                for rows in rows_choices:
                    for filters in splits(problem.group_k, m, device.threads):
                        config = Config(size, m, n, rows, filters)
                        needed = self.workspace_bytes(problem, config, device)
                        if needed <= limit:
                            found = True
                            yield config
                        elif smallest is None or needed < smallest_size:
                            smallest, smallest_size = config, needed
        if not found and smallest is not None:
            yield smallest

    def _geometry(self, problem: ConvProblem, config: Config, device: Device) -> Geometry:
        return Geometry(problem, config, device.vector_bytes // (8 if problem.dtype == "f64" else 4))

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Cycles of one task: (size + 2)^2 matrix products, and for each vector of transformed input, product and
        output some cycles for its transform (`cost`); times the tasks that one worker draws."""
        costs = Costs(device, 8 if problem.dtype == "f64" else 4)
        g = self._geometry(problem, config, device)
        size, edge = config.size, config.size + 2
        vectors = g.tiles // costs.lanes
        channel_blocks = ceil_div(problem.group_c, g.channels)
        tiles = channel_blocks * costs.block(config.m, config.n, config.filters, vectors, g.channels)
        panel = config.filters * problem.group_c * costs.itemsize
        columns = ceil_div(vectors, config.n)
        streamed = costs.stream(columns * panel, panel * edge * edge)
        inputs = problem.group_c * g.tiles * costs.itemsize
        streamed += costs.stream(inputs, inputs * edge)
        product = edge * edge * max(tiles, 0.3 * tiles + streamed)
        # Rows shorter than a vector are transformed in narrower ones.
        width = min(costs.lanes, 1 << max(0, g.tile_cols.bit_length() - 1))
        width = 1 if width < 4 else width
        pieces = problem.group_c * config.rows * ceil_div(g.tile_cols, width)
        lines = problem.group_c * config.rows * costs.row(problem.spatial[1], 7.0)
        inputs_cycles = edge * (pieces * (9.0 * edge) + lines + 12 * problem.group_c * config.rows)
        sums_bytes = config.filters * size * size * g.tiles * costs.itemsize
        accumulate = config.filters * vectors * (edge * edge * 2.5 + (4 * size + 2) * size * 1.6)
        accumulate += costs.stream(2 * edge * sums_bytes, sums_bytes)
        rows = config.filters * config.rows * size
        output = rows * (costs.row(problem.output[1], 3.0) + 20 + 3.0 * size * ceil_div(g.tile_cols, width))
        strips = ceil_div(g.tile_rows, config.rows)
        tasks = strips * ceil_div(problem.group_k, config.filters) * problem.groups * problem.n
        # Transforms of one slice overlap with the products around them.
        return costs.wall_us(product + OVERLAP * (inputs_cycles + accumulate + output), tasks, device.threads)

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """About 40 (F(2x2)) or 100 (F(4x4)) cycles for the filters of one panel and channel."""
        cycles = (100 if config.size == 4 else 40) * (1 + config.m / 8)
        return 10.0 + problem.k * problem.group_c / config.m * cycles / 2700 / device.threads

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        g = self._geometry(problem, config, device)
        strips = ceil_div(g.tile_rows, config.rows)
        tasks = strips * ceil_div(problem.group_k, config.filters) * problem.groups * problem.n
        return g.scratch_bytes * max(1, min(device.threads, tasks))

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        vector = target(settings.cpu_target())
        dtype = arithmetic(problem)
        library = jit.load(
            "winograd", generate, vector, dtype=dtype, storage=problem.dtype, size=config.size, m=config.m, n=config.n,
            bias=problem.bias, residual=problem.residual, activation=problem.activation,
        )  # fmt: skip
        fields = Geometry(problem, config, vector.lanes(dtype)).fields()
        edge = config.size + 2
        return KernelPlan(
            problem, device, library, FIELDS, fields, packed_size=edge * edge * problem.k * problem.group_c,
            pack_tasks=problem.groups * ceil_div(problem.group_k, config.filters),
        )  # fmt: skip

    def error_factor(self, problem: ConvProblem) -> float:
        """A few roundings in each transform, and a random walk over the channels."""
        return 4.0 + 0.25 * sqrt(problem.group_c)

    def magnitude(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """|A^T| [ (|G| |w| |G^T|) * (|B^T| |x| |B|) ] |A| for F(4x4, 3x3), in float64; F(2x2, 3x3) stays below it."""
        size = 4
        a_t, g, b_t = (np.abs(np.array(matrix)) for matrix in matrices(size))
        groups = problem.groups
        p, q = problem.output
        rows, cols = ceil_div(p, size), ceil_div(q, size)
        n = problem.n
        (top, bottom), (left, right) = problem.padding
        extra = ((0, 0), (0, 0), (top, bottom + rows * size - p), (left, right + cols * size - q))
        padded = np.pad(np.abs(np.asarray(x, np.float64)), extra)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (size + 2, size + 2), axis=(2, 3))
        windows = windows[:, :, : rows * size : size, : cols * size : size]
        v = np.einsum("ia,nctuab,jb->ijnctu", b_t, windows, b_t, optimize=True)
        u = np.einsum("ia,kcab,jb->ijkc", g, np.abs(np.asarray(w, np.float64)), g, optimize=True)
        edge = size + 2
        v = v.reshape(edge * edge, n, groups, problem.group_c, rows * cols)
        u = u.reshape(edge * edge, 1, groups, problem.group_k, problem.group_c)
        products = np.matmul(u, v).reshape(edge, edge, n, problem.k, rows, cols)
        y = np.einsum("pi,ijnktu,qj->nktpuq", a_t, products, a_t, optimize=True)
        return y.reshape(n, problem.k, rows * size, cols * size)[:, :, :p, :q]
