"""cpu.winograd: fewer products for filters of more than one tap, one row of the transform at a time.

An output tile of tile_h x tile_w is A_h^T [ (G_h w G_w^T) * (B_h^T x B_w) ] A_w, with one `Transform` an axis
(`transforms`): F(4x4, 3x3) takes 36 products instead of 144. The products are gone through in slices of one row i of
the transform: the input's row combination i, its column combinations, a matrix product over channels for each, their
column combinations, and A_h^T's column i adds the result to the output tiles. So scratch holds one slice rather than
the whole transformed input, which would be more than twice the input. Lanes run over tiles.

Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit, tile
from tapwise.cpu.common import arithmetic, ceil_div, splits
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import COMMON, Fields, KernelPlan
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target, target
from tapwise.ops.conv.cpu.strips import deinterleave, emit_finish_row, emit_strided_copy, emit_zeros
from tapwise.ops.conv.cpu.transforms import Axis, Transform, tilings, transform
from tapwise.ops.conv.problem import ConvProblem

BLOCK_CHANNELS: Final = 384
# Share of the transforms' cycles that is not hidden behind arithmetic.
OVERLAP: Final = 0.6

FIELDS: Final = (
    *COMMON, "zeros", "factors", "adds", "groups", "group_c", "group_k", "h", "w_in", "p", "q", "pad_top", "pad_left",
    "stride_h", "stride_w", "dilation_h", "dilation_w", "row_phases", "col_phases",
    "tile_rows", "tile_cols", "strip_rows", "strips", "filter_block", "filter_blocks", "channel_block",
    "tiles", "line_size", "input_at", "product_at", "sums_at", "output_at", "offsets",
)  # fmt: skip


@dataclass(frozen=True)
class Config(BaseConfig):
    """Output tile tile_h x tile_w; register tile m x n; `rows` rows of tiles and `filters` output channels a task."""

    tile_h: int
    tile_w: int
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
    target: Target, *, dtype: str, storage: str, tile_h: int, tile_w: int, taps_h: int, taps_w: int, stride_h: int,
    stride_w: int, m: int, n: int, bias: bool, residual: bool, activation: str | None,
) -> Kernel:  # fmt: skip
    """The kernels of one instance: `task` and `pack_task`. Strides are those of the axes' transforms."""
    k = Kernel(target, dtype)
    high, wide = transform(tile_h, taps_h, stride_h), transform(tile_w, taps_w, stride_w)
    tile.emit(k, m, n, "pixels")
    emit_finish_row(k, storage, "one" if bias else None, residual, activation)
    _emit_columns(k, wide)
    for i in range(high.products):
        _emit_input(k, storage, high, i)
    _emit_accumulate(k, high, wide)
    _emit_output(k, storage, high, wide)
    _emit_task(k, storage, high, wide)
    _emit_filters(k, storage, high, wide, m)
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


def _emit_columns(k: Kernel, wide: Transform) -> None:
    """columns(args, line, out, step): all column combinations of the tiles of one line, result j at out + j * step."""
    with k.function("columns", args="i64", line=k.dtype, out=k.dtype, step=INT) as (args, line, out, step):
        a = Fields(k, args, FIELDS)

        def combine_columns(t: Int, lanes: int, line: Ptr, out: Ptr) -> None:
            here = line + t * wide.step
            columns: list[Any] = []
            while len(columns) < wide.span:
                wanted = min(wide.step, wide.span - len(columns))
                columns += deinterleave(k, here + len(columns), wide.step, wanted, lanes)
            for j, row in enumerate(wide.b_t):
                k.store(out + step * j + t, combine(k, list(zip(row, columns, strict=True))))

        with k.if_else(a.dilation_w.eq(1)) as (dense, dilated):
            with dense:
                k.rows(a.tile_cols, lambda t, lanes: combine_columns(t, lanes, line, out))
            with dilated, k.loop(0, a.col_phases) as phase:
                # The columns of one phase, as if there were no others.
                thin = line + a.line_size
                count = (a.tile_cols - 1) * wide.step + wide.span
                emit_strided_copy(k, line + phase * a.stride_w, thin, count, a.dilation_w)
                there = out + phase * a.tile_cols
                k.rows(a.tile_cols, lambda t, lanes: combine_columns(t, lanes, thin, there))


def _emit_input(k: Kernel, storage: str, high: Transform, i: int) -> None:
    """input_i(args, scratch, x, row0, rows): slice i of the transformed input of a strip, all channels.

    Result j of channel c: scratch[input_at + (j * group_c + c) * tiles + tile].
    """
    with k.function(
        f"input_{i}", args="i64", scratch=k.dtype, x=storage, row0=INT, rows=INT
    ) as (args, scratch, x, row0, rows):  # fmt: skip
        a = Fields(k, args, FIELDS)
        zeros = a.pointer("zeros", storage)
        line = scratch + a.pad_left
        with k.loop(0, a.group_c) as c, k.loop(0, rows) as row:
            plane = x + c * (a.h * a.w_in)
            tile_row, phase = (row0 + row) // a.row_phases, (row0 + row) % a.row_phases
            top = tile_row * a.dilation_h * high.step + phase * a.stride_h - a.pad_top
            sources = []
            for r, factor in enumerate(high.b_t[i]):
                if factor:
                    h = top + a.dilation_h * r
                    inside = k.both(h >= 0, h < a.h)
                    sources.append((factor, k.select(inside, plane + h * a.w_in, zeros)))

            def combine_rows(at: Int, lanes: int, sources: list[tuple[float, Ptr]] = sources) -> None:
                k.store(line + at, combine(k, [(f, k.load(source + at, lanes)) for f, source in sources]))

            k.rows(a.w_in, combine_rows)
            out = scratch + a.input_at + c * a.tiles + row * a.tile_cols * a.col_phases
            k.call("columns", args, scratch, out, a.group_c * a.tiles)


def _emit_accumulate(k: Kernel, high: Transform, wide: Transform) -> None:
    """accumulate(args, scratch, filters, i): add slice i's products, column-combined, to the output tiles' sums.

    Sum (p, q) of a filter: scratch[sums_at + ((filter * tile_h + p) * tile_w + q) * tiles + tile].
    """
    rows, cols = high.outputs, wide.outputs
    with k.function(
        "accumulate", args="i64", scratch=k.dtype, filters=INT, i=INT
    ) as (args, scratch, filters, i):  # fmt: skip
        a = Fields(k, args, FIELDS)
        factors, adds = a.pointer("factors", k.dtype) + i * rows, a.pointer("adds", "i64") + i * rows
        with k.loop(0, filters) as f:
            products = scratch + a.product_at + f * a.tiles
            sums = scratch + a.sums_at + f * (a.tiles * (rows * cols))
            step = a.filter_block * a.tiles
            with k.loop(0, a.tiles, k.lanes) as t:
                columns = [k.load(products + step * j + t) for j in range(wide.products)]
                z = [combine(k, list(zip(wide.a_t[q], columns, strict=True))) for q in range(cols)]
                for p in range(rows):
                    with k.if_(k.load_int(adds + p).eq(1)):
                        factor = k.broadcast(factors + p)
                        for q in range(cols):
                            cell = sums + a.tiles * (p * cols + q) + t
                            k.store(cell, k.fma(factor, z[q], k.load(cell)))


def _emit_output(k: Kernel, storage: str, high: Transform, wide: Transform) -> None:
    """output(args, scratch, row0, rows, k0, filters, plane0): sums of a strip to rows of y; plane0 is k0's plane."""
    cols = wide.outputs
    with k.function(
        "output", args="i64", scratch=k.dtype, row0=INT, rows=INT, k0=INT, filters=INT, plane0=INT
    ) as (args, scratch, row0, rows, k0, filters, plane0):  # fmt: skip
        a = Fields(k, args, FIELDS)
        y, bias, residual = (a.pointer(name, storage) for name in ("y", "bias", "residual"))
        line = scratch + a.output_at
        thin = line + a.line_size * 2

        def weave(sums: Ptr, out: Ptr) -> None:
            def body(t: Int, lanes: int) -> None:
                streams = [k.load(sums + a.tiles * q + t, lanes) for q in range(cols)]
                if lanes == 1:
                    for q, value in enumerate(streams):
                        k.store(out + t * cols + q, value)
                else:
                    for index, vector in enumerate(interleave(k, streams)):
                        k.store(out + t * cols + index * lanes, vector)

            k.rows(a.tile_cols, body)

        with k.loop(0, filters) as f, k.loop(0, rows) as row:
            tile_row, row_phase = (row0 + row) // a.row_phases, (row0 + row) % a.row_phases
            for p in range(high.outputs):
                sums = scratch + a.sums_at + (f * high.outputs + p) * cols * a.tiles + row * a.tile_cols * a.col_phases
                # Two lines in turn: a line is read while the next is written.
                here = line + a.line_size * (p % 2)
                height = (tile_row * high.outputs + p) * a.row_phases + row_phase
                with k.if_(height < a.p):
                    with k.if_else(a.col_phases.eq(1)) as (dense, dilated):
                        with dense:
                            weave(sums, here)
                        with dilated, k.loop(0, a.col_phases) as phase:
                            weave(sums + phase * a.tile_cols, thin)
                            with k.loop(0, a.tile_cols * cols) as i:
                                k.store(here + i * a.col_phases + phase, k.load(thin + i, 1))
                    at = ((plane0 + f) * a.p + height) * a.q
                    k.call("finish_row", here, 1, bias + k0 + f, residual + at, y + at, a.q)


def _emit_task(k: Kernel, storage: str, high: Transform, wide: Transform) -> None:
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
            rows = (a.tile_rows * a.row_phases - row0).min(a.strip_rows)
            k0 = filter_block * a.filter_block
            filters = (a.group_k - k0).min(a.filter_block)
            # (image * groups + group) * channels of a group is the first plane of x and of y.
            planes = x + image_group * a.group_c * (a.h * a.w_in)
            matrix = a.group_c * a.group_k
            emit_zeros(k, scratch + a.sums_at, filters * a.tiles * (high.outputs * wide.outputs))
            for i in range(high.products):
                k.call(f"input_{i}", args, scratch, planes, row0, rows)
                with k.loop(0, wide.products) as j, k.loop(0, a.group_c, a.channel_block) as channel:
                    panels = w + (group * (high.products * wide.products) + (j + i * wide.products)) * matrix
                    channels = (a.group_c - channel).min(a.channel_block)
                    k.call(
                        "block", scratch + a.input_at + (a.group_c * j + channel) * a.tiles, 1, offsets, channels,
                        panels + channel * a.group_k + k0 * channels,
                        scratch + a.product_at + a.filter_block * a.tiles * j, a.tiles, filters,
                        a.tiles // k.lanes, channel > 0,
                    )  # fmt: skip
                k.call("accumulate", args, scratch, filters, i)
            k.call("output", args, scratch, row0, rows, group * a.group_k + k0, filters, image_group * a.group_k + k0)


def _emit_filters(k: Kernel, storage: str, high: Transform, wide: Transform, panel: int) -> None:
    """`pack_task`: G_h w G_w^T of all filters, each product's matrix in the panels that tile.block reads.

    Lanes run over the filters of a panel; the narrower last panel goes one filter at a time.
    """
    taps_h, taps_w = len(high.g[0]), len(wide.g[0])
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
                base = packed + group * (high.products * wide.products) * matrix + channel * a.group_k + k0 * channels

                def transform(c: Int, shift: Int, lanes: int, base: Ptr, k0: Int, channel: Int, width: Int) -> None:
                    filter_ = (group * a.group_k + k0 + shift) * a.group_c + channel + c
                    source = w + filter_ * (taps_h * taps_w)
                    filters = [source + a.group_c * (taps_h * taps_w * lane) for lane in range(lanes)]
                    taps = [[_across(k, filters, taps_w * r + s) for s in range(taps_w)] for r in range(taps_h)]
                    for i, down in enumerate(high.g):
                        row = [combine(k, [(down[r], taps[r][s]) for r in range(taps_h)]) for s in range(taps_w)]
                        for j, across in enumerate(wide.g):
                            value = combine(k, list(zip(across, row, strict=True)))
                            k.store(base + matrix * (i * wide.products + j) + c * width + shift, value)

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
        self.problem, self.config = problem, config
        self.axes = high, wide = Axis.of(problem, 0), Axis.of(problem, 1)
        self.high, self.wide = high.transform(config.tile_h), wide.transform(config.tile_w)
        self.products = self.high.products * self.wide.products
        self.tile_rows = ceil_div(problem.output[0], config.tile_h * high.phases)
        self.tile_cols = ceil_div(problem.output[1], config.tile_w * wide.phases)
        # Rows of tiles of all phases, and tiles in one of them.
        self.strip_rows, self.row_tiles = self.tile_rows * high.phases, self.tile_cols * wide.phases
        self.tiles = ceil_div(config.rows * self.row_tiles, lanes) * lanes
        inputs = (self.tile_cols - 1) * self.wide.step + self.wide.span
        reach = (inputs - 1) * wide.dilation + (wide.phases - 1) * problem.stride[1] + 1
        outputs = self.row_tiles * config.tile_w
        line = max(problem.padding[1][0] + problem.spatial[1], reach, outputs)
        # Rounded up, and what the widest vectors read and write beyond.
        self.line_size = ceil_div(line + 2 * self.wide.step * lanes, 16) * 16
        self.channels = ceil_div(problem.group_c, ceil_div(problem.group_c, BLOCK_CHANNELS))
        self.input_at = 2 * self.line_size
        self.product_at = self.input_at + self.wide.products * problem.group_c * self.tiles
        self.sums_at = self.product_at + self.wide.products * config.filters * self.tiles
        self.output_at = self.sums_at + config.tile_h * config.tile_w * config.filters * self.tiles
        total = self.output_at + 3 * self.line_size
        self.scratch_bytes = ceil_div(total * (8 if problem.dtype == "f64" else 4), 64) * 64

    @property
    def tasks(self) -> int:
        p, c = self.problem, self.config
        return ceil_div(self.strip_rows, c.rows) * ceil_div(p.group_k, c.filters) * p.groups * p.n

    def fields(self) -> dict[str, int | np.ndarray]:
        p, c = self.problem, self.config
        a_t = np.array(self.high.a_t, np.float64 if p.dtype == "f64" else np.float32)
        return {
            "tasks": self.tasks, "scratch_step": self.scratch_bytes,
            "groups": p.groups, "group_c": p.group_c, "group_k": p.group_k,
            "h": p.spatial[0], "w_in": p.spatial[1], "p": p.output[0], "q": p.output[1],
            "pad_top": p.padding[0][0], "pad_left": p.padding[1][0], "stride_h": p.stride[0], "stride_w": p.stride[1],
            "dilation_h": self.axes[0].dilation, "dilation_w": self.axes[1].dilation,
            "row_phases": self.axes[0].phases, "col_phases": self.axes[1].phases,
            "tile_rows": self.tile_rows, "tile_cols": self.tile_cols, "strip_rows": c.rows,
            "strips": ceil_div(self.strip_rows, c.rows),
            "filter_block": c.filters, "filter_blocks": ceil_div(p.group_k, c.filters), "channel_block": self.channels,
            "tiles": self.tiles, "line_size": self.line_size, "input_at": self.input_at,
            "product_at": self.product_at, "sums_at": self.sums_at, "output_at": self.output_at,
            "offsets": np.arange(self.channels, dtype=np.int64) * self.tiles,
            "zeros": np.zeros(p.spatial[1] + 16, np.float64),
            "factors": np.ascontiguousarray(a_t.T), "adds": np.ascontiguousarray((a_t.T != 0).astype(np.int64)),
        }  # fmt: skip


class Winograd(Algorithm[Config]):
    """Filters of 2 to 7 taps an axis where a tile saves products: 3x3 of stride 1 and 2, 5x5, 1x7 and 7x1 among them;
    any padding, dilation and groups; float32, float64, float16 (in float32); NCHW.

    Rounding errors are larger than those of a direct sum, so `auto` never takes it for float64, and its bound is in
    terms of |A^T| [ (|G| |w| |G^T|) * (|B^T| |x| |B|) ] |A|, the size of what it sums.
    """

    id: ClassVar[str] = "cpu.winograd"
    summary: ClassVar[str] = "F(4x4, 3x3) and its kin, sliced by transform row; lanes over tiles"
    exact: ClassVar[bool] = False
    layouts: ClassVar[tuple[str, ...]] = ("nchw",)
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if problem.depthwise:
            return "has no product over channels to save when each group has one"
        if not tilings(problem):
            size, stride = ("x".join(map(str, pair)) for pair in (problem.kernel, problem.stride))
            return f"takes filters whose tiles save products within its error bound, not {size} of stride {stride}"
        return None

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
        for tile_h, tile_w in tilings(problem):
            phases = Axis.of(problem, 0).phases
            tile_rows = ceil_div(problem.output[0], tile_h * phases) * phases
            rows_choices = sorted({ceil_div(tile_rows, count) for count in (1, 2, 4, 6, 8, 14, 16, tile_rows)})
            for m, n in tile.shapes(target(settings.cpu_target())):
                if m < 3 or m >= 2 * problem.group_k:
                    continue
                for rows in rows_choices:
                    for filters in splits(problem.group_k, m, device.threads):
                        config = Config(tile_h, tile_w, m, n, rows, filters)
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
        """Cycles of one task: a matrix product for each product of the transforms, and for each vector of transformed
        input, product and output some cycles for its transform (`cost`); times the tasks that one worker draws."""
        costs = Costs(device, 8 if problem.dtype == "f64" else 4)
        g = self._geometry(problem, config, device)
        high, wide = g.high, g.wide
        vectors = g.tiles // costs.lanes
        channel_blocks = ceil_div(problem.group_c, g.channels)
        tiles = channel_blocks * costs.block(config.m, config.n, config.filters, vectors, g.channels)
        panel = config.filters * problem.group_c * costs.itemsize
        columns = ceil_div(vectors, config.n)
        streamed = costs.stream(columns * panel, panel * g.products)
        inputs = problem.group_c * g.tiles * costs.itemsize
        streamed += costs.stream(inputs, inputs * wide.products)
        product = g.products * max(tiles, 0.3 * tiles + streamed)
        # Rows shorter than a vector are transformed in narrower ones.
        width = min(costs.lanes, 1 << max(0, g.tile_cols.bit_length() - 1))
        width = 1 if width < 4 else width
        row_pieces = g.axes[1].phases * ceil_div(g.tile_cols, width)
        lines = problem.group_c * config.rows * costs.row(problem.spatial[1], 7.0)
        pieces = problem.group_c * config.rows * row_pieces
        inputs_cycles = high.products * (pieces * 9.0 * wide.products + lines + 12 * problem.group_c * config.rows)
        cells = config.tile_h * config.tile_w
        sums_bytes = config.filters * cells * g.tiles * costs.itemsize
        added = sum(1 for row in high.a_t for value in row if value)
        accumulate = config.filters * vectors * (g.products * 2.5 + added * config.tile_w * 1.6)
        accumulate += costs.stream(2 * high.products * sums_bytes, sums_bytes)
        rows = config.filters * config.rows * config.tile_h
        output = rows * (costs.row(problem.output[1], 3.0) + 20 + 3.0 * config.tile_w * row_pieces)
        # Transforms of one slice overlap with the products around them.
        return costs.wall_us(product + OVERLAP * (inputs_cycles + accumulate + output), g.tasks, device.threads)

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """About 2.7 cycles a product for the filters of one panel and channel."""
        cycles = 2.7 * self._geometry(problem, config, device).products * (1 + config.m / 8)
        return 10.0 + problem.k * problem.group_c / config.m * cycles / 2700 / device.threads

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        g = self._geometry(problem, config, device)
        return g.scratch_bytes * max(1, min(device.threads, g.tasks))

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        vector = target(settings.cpu_target())
        dtype = arithmetic(problem)
        g = Geometry(problem, config, vector.lanes(dtype))
        library = jit.load(
            "winograd", generate, vector, dtype=dtype, storage=problem.dtype, tile_h=config.tile_h,
            tile_w=config.tile_w, taps_h=g.axes[0].taps, taps_w=g.axes[1].taps, stride_h=g.axes[0].stride,
            stride_w=g.axes[1].stride, m=config.m, n=config.n, bias=problem.bias, residual=problem.residual,
            activation=problem.activation,
        )  # fmt: skip
        return KernelPlan(
            problem, device, library, FIELDS, g.fields(), packed_size=g.products * problem.k * problem.group_c,
            pack_tasks=problem.groups * ceil_div(problem.group_k, config.filters),
        )  # fmt: skip

    def error_factor(self, problem: ConvProblem) -> float:
        """A few roundings in each transform, and a random walk over the channels."""
        return 4.0 + 0.25 * sqrt(problem.group_c)

    def magnitude(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """|A^T| [ (|G| |w| |G^T|) * (|B^T| |x| |B|) ] |A| of the largest tile, in float64; smaller ones stay below."""
        axes = [Axis.of(problem, axis) for axis in range(2)]
        sizes = tilings(problem)[0]
        high, wide = (axis.transform(size) for axis, size in zip(axes, sizes, strict=True))
        v = np.abs(np.asarray(x, np.float64))
        for axis, part, transformed in zip(axes, (high, wide), (2, 3), strict=True):
            v = _tiles(problem, axis, part, v, transformed)
        # v: (n, c, phases and tiles of rows, of cols, span, span)
        v = np.einsum("ia,nctuab,jb->ijnctu", np.abs(high.b_t), v, np.abs(wide.b_t), optimize=True)
        u = np.einsum(
            "ia,kcab,jb->ijkc", np.abs(high.g), np.abs(np.asarray(w, np.float64)), np.abs(wide.g), optimize=True
        )
        products, (rows, cols) = high.products * wide.products, v.shape[-2:]
        v = v.reshape(products, problem.n, problem.groups, problem.group_c, rows * cols)
        u = u.reshape(products, 1, problem.groups, problem.group_k, problem.group_c)
        sums = np.matmul(u, v).reshape(high.products, wide.products, problem.n, problem.k, rows, cols)
        y = np.einsum("pi,ijnktu,qj->nktpuq", np.abs(high.a_t), sums, np.abs(wide.a_t), optimize=True)
        # Tile t of phase a makes outputs phases * (t * size + p) + a.
        split = [rows // axes[0].phases, axes[0].phases, sizes[0], cols // axes[1].phases, axes[1].phases, sizes[1]]
        y = y.reshape(problem.n, problem.k, *split).transpose(0, 1, 2, 4, 3, 5, 7, 6)
        p, q = problem.output
        return y.reshape(problem.n, problem.k, rows * sizes[0], cols * sizes[1])[:, :, :p, :q]


def _tiles(problem: ConvProblem, axis: Axis, part: Transform, v: np.ndarray, number: int) -> np.ndarray:
    """The spans of one spatial axis: v with that axis turned into tiles, t * phases + a, and a last axis of span."""
    index = number - 2
    count = ceil_div(problem.output[index], part.outputs * axis.phases)
    tile_, phase, tap = np.ogrid[:count, : axis.phases, : part.span]
    at = (tile_ * part.step + tap) * axis.dilation + phase * problem.stride[index] - problem.padding[index][0]
    at = at.reshape(-1, part.span)
    inside = (at >= 0) & (at < problem.spatial[index])
    # Spans of an earlier axis stand last: count axes from the front.
    taken = np.take(v, np.where(inside, at, 0).reshape(-1), axis=number)
    taken = taken.reshape(*v.shape[:number], *at.shape, *v.shape[number + 1 :])
    mask = inside.reshape(*[1] * number, *at.shape, *[1] * (v.ndim - number - 1))
    return np.moveaxis(np.where(mask, taken, 0.0), number + 1, -1)
