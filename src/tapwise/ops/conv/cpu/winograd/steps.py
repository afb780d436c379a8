"""What the kernels of cpu.winograd share in both memory orders: filters transformed, products added to the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tapwise.cpu.copies import emit_zeros
from tapwise.cpu.fields import COMMON, FILTER_STEPS, Fields, entry, unravel
from tapwise.cpu.simd import INT, Int, Kernel, Ptr
from tapwise.ops.conv.winograd.transforms import Transform

FIELDS: Final = (
    *COMMON, "zeros", "factors", "adds", "groups", "group_c", "group_k", "h", "w_in", "p", "q", "pad_top", "pad_left",
    "stride_h", "stride_w", "dilation_h", "dilation_w", "row_phases", "col_phases",
    "tile_rows", "tile_cols", "block_rows", "row_blocks", "filter_block", "filter_blocks", "channel_block",
    "tiles", "row_size", "sums_w", "transposed_at", "run", "product_step", "filter_pad", "matrix",
    "pack_parts", "pack_channels", "input_at", "product_at", "sums_at", "output_at", "offsets",
    *FILTER_STEPS,
)  # fmt: skip


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


def emit_accumulate(k: Kernel, high: Transform, wide: Transform, lanes: str) -> None:
    """accumulate(args, scratch, count, i): add slice i's products, column-combined, to the output tiles' sums.

    Lanes over tiles: of `count` filters, each a run of tiles. Sum (p, q) of run f begins at
    scratch[sums_at + ((f * tile_h + p) * tile_w + q) * run].
    Lanes over channels: of `count` rows of tiles, each tile a run of filters. The sums of all rows and columns of
    pixels, a run each, lie as an image of `sums_w` columns.
    """
    rows, cols = high.outputs, wide.outputs
    with k.function("accumulate", args="i64", scratch=k.dtype, count=INT, i=INT) as (args, scratch, count, i):
        a = Fields(k, args, FIELDS)
        factors, adds = a.pointer("factors", k.dtype) + i * rows, a.pointer("adds", "i64") + i * rows

        def add(number: Int, sums: Ptr, down: Int, across: Int) -> None:
            """The products of a run, to sums `down` and `across` apart."""
            products = scratch + a.product_at + number * a.run
            with k.loop(0, a.run, k.lanes) as t:
                columns = [k.load(products + a.product_step * j + t) for j in range(wide.products)]
                z = [combine(k, list(zip(wide.a_t[q], columns, strict=True))) for q in range(cols)]
                for p in range(rows):
                    with k.if_(k.load_int(adds + p).eq(1)):
                        factor = k.broadcast(factors + p)
                        for q in range(cols):
                            cell = sums + down * p + across * q + t
                            k.store(cell, k.fma(factor, z[q], k.load(cell)))

        first = scratch + a.sums_at
        if lanes == "tiles":
            with k.loop(0, count) as f:
                add(f, first + f * (a.run * (rows * cols)), a.run * cols, a.run)
            return
        down, across = a.sums_w * a.run, a.col_phases * a.run
        with k.loop(0, count) as row, k.loop(0, a.col_phases) as phase, k.loop(0, a.tile_cols) as t:
            number = (row * a.col_phases + phase) * a.tile_cols + t
            add(number, first + row * rows * down + t * cols * across + phase * a.run, down, across)


def emit_filters(k: Kernel, storage: str, high: Transform, wide: Transform, panel: int, lanes: int) -> None:
    """`pack_task`: G_h w G_w^T of all filters, each product's matrix in the panels that tile.block reads.

    `lanes` filters of a panel at once; vectors of a narrower last panel are filled up with its last filter, whose sums
    go nowhere. A last panel that is no whole vectors goes one filter at a time.
    """
    taps_h, taps_w = len(high.g[0]), len(wide.g[0])
    with entry(k, FIELDS, "pack_task") as (a, worker):
        w, packed = a.pointer("x", storage), a.pointer("w", k.dtype)
        with a.draws(worker) as number:
            filter_block, part, group = unravel(number, a.filter_blocks, a.pack_parts)
            first, from_c = filter_block * a.filter_block, part * a.pack_channels
            end = (first + a.filter_block).min(a.group_k)
            products = high.products * wide.products
            with k.if_(k.both(first.eq(0), part.eq(0))), k.loop(0, products) as product:
                used = a.group_c * a.filter_pad
                emit_zeros(k, packed + (group * products + product) * a.matrix + used, a.matrix - used)
            with k.loop(0, a.group_c, a.channel_block) as channel, k.loop(first, end, panel) as k0:
                channels = (a.group_c - channel).min(a.channel_block)
                begin, stop = (from_c - channel).max(0), (from_c + a.pack_channels - channel).min(channels)
                width, real = (a.filter_pad - k0).min(panel), (a.group_k - k0).min(panel)
                base = packed + group * products * a.matrix + channel * a.filter_pad + k0 * channels

                def transform(c: Int, shift: Int, lanes: int, base: Ptr, k0: Int, channel: Int, width: Int) -> None:
                    source = w + (group * a.w_g + k0 * a.w_k + (channel + c) * a.w_c)
                    filters = [source + (shift + lane).min(real - 1) * a.w_k for lane in range(lanes)]
                    places = [[a.w_r * r + a.w_s * s for s in range(taps_w)] for r in range(taps_h)]
                    taps = [[_across(k, filters, place) for place in row] for row in places]
                    for i, down in enumerate(high.g):
                        row = [combine(k, [(down[r], taps[r][s]) for r in range(taps_h)]) for s in range(taps_w)]
                        for j, across in enumerate(wide.g):
                            value = combine(k, list(zip(across, row, strict=True)))
                            k.store(base + a.matrix * (i * wide.products + j) + c * width + shift, value)

                with k.if_else((width % lanes).eq(0)) as (whole, partial):
                    with whole, k.loop(begin, stop) as c, k.loop(0, width, lanes) as shift:
                        transform(c, shift, lanes, base, k0, channel, width)
                    with partial, k.loop(begin, stop) as c, k.loop(0, width) as shift:
                        transform(c, shift, 1, base, k0, channel, width)


def _across(k: Kernel, filters: Sequence[Ptr], tap: Int) -> Any:
    """One tap of several filters."""
    return k.load(filters[0] + tap, 1) if len(filters) == 1 else k.gather([f + tap for f in filters])
