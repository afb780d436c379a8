"""cpu.winograd, lanes over channels: what a transform combines are vectors of channels.

Of NCHW a task's rows of x are transposed first, into scratch, and its sums on their way to y.
"""

from __future__ import annotations

from tapwise.cpu.copies import emit_zeros
from tapwise.cpu.fields import Fields, entry, unravel
from tapwise.cpu.simd import INT, Int, Kernel, Ptr
from tapwise.ops.conv.cpu.winograd.steps import FIELDS, combine
from tapwise.ops.conv.winograd.transforms import Transform


def emit_input(k: Kernel, storage: str, high: Transform, wide: Transform, i: int, planar: bool) -> None:
    """input_i(args, scratch, x, row0, rows): slice i of the transformed input of a task's rows, all channels.

    x is channels last, or a group of it, transposed (`planar`).

    Result j of a tile: scratch[input_at + (j * tiles + tile) * group_c + channel].
    """
    with k.function(
        f"input_{i}", args="i64", scratch=k.dtype, x=storage, row0=INT, rows=INT
    ) as (args, scratch, x, row0, rows):  # fmt: skip
        a = Fields(k, args, FIELDS)
        zeros, channels = a.pointer("zeros", storage), a.group_c
        pixel = channels if planar else channels * a.groups
        # Without groups a row of pixels is one run.
        one = pixel.eq(channels)
        runs, length = k.select(one, k.integer(1), a.w_in), k.select(one, a.w_in * channels, channels)
        combined = scratch + a.pad_left * channels
        step = a.tiles * channels
        with k.loop(0, rows) as row:
            tile_row, phase = (row0 + row) // a.row_phases, (row0 + row) % a.row_phases
            top = tile_row * a.dilation_h * high.step + phase * a.stride_h - a.pad_top
            sources = []
            for r, factor in enumerate(high.b_t[i]):
                if factor:
                    h = top + a.dilation_h * r
                    inside = k.both(h >= 0, h < a.h)
                    there = k.select(inside, x + h * (a.w_in * pixel), zeros)
                    sources.append((factor, there, k.select(inside, pixel, k.integer(0))))
            with k.loop(0, runs) as run:
                here = combined + run * channels
                starts = [(factor, source + run * distance) for factor, source, distance in sources]

                def combine_rows(at: Int, lanes: int, here: Ptr = here, starts: list = starts) -> None:  # type: ignore[type-arg]
                    k.store(here + at, combine(k, [(f, k.load(source + at, lanes)) for f, source in starts]))

                k.rows(length, combine_rows)
            with k.loop(0, a.col_phases) as col_phase, k.loop(0, a.tile_cols) as t:
                first = scratch + (col_phase * a.stride_w + t * a.dilation_w * wide.step) * channels
                out = scratch + a.input_at + ((row * a.col_phases + col_phase) * a.tile_cols + t) * channels

                def combine_columns(c: Int, lanes: int, first: Ptr = first, out: Ptr = out) -> None:
                    columns = [k.load(first + a.dilation_w * s * channels + c, lanes) for s in range(wide.span)]
                    for j, factors in enumerate(wide.b_t):
                        k.store(out + step * j + c, combine(k, list(zip(factors, columns, strict=True))))

                k.rows(channels, combine_columns)


def emit_output(k: Kernel, storage: str, high: Transform, planar: bool) -> None:
    """output(args, scratch, row0, rows, k0, filters, at): a task's sums to rows of y; k0 is a filter of all, `at` its
    first pixel's place in y."""
    with k.function(
        "output", args="i64", scratch=k.dtype, row0=INT, rows=INT, k0=INT, filters=INT, at=INT
    ) as (args, scratch, row0, rows, k0, filters, at):  # fmt: skip
        a = Fields(k, args, FIELDS)
        y, bias, residual = (a.pointer(name, storage) for name in ("y", "bias", "residual"))
        total_k = a.group_k * a.groups
        with k.loop(0, rows) as row, k.loop(0, high.outputs) as p:
            tile_row, phase = (row0 + row) // a.row_phases, (row0 + row) % a.row_phases
            height = (tile_row * high.outputs + p) * a.row_phases + phase
            sums = scratch + a.sums_at + (row * high.outputs + p) * a.sums_w * a.run
            here = at + height * a.q * (1 if planar else total_k)
            name, distance = ("to_planes", a.p * a.q) if planar else ("finish_pixels", total_k)
            with k.if_(height < a.p):
                k.call(name, sums, a.run, bias + k0, residual + here, y + here, distance, a.q, filters)


def emit_task(k: Kernel, storage: str, high: Transform, wide: Transform, planar: bool) -> None:
    """`task`: some rows of tiles of one image, and a block of filters of one group."""
    with entry(k, FIELDS) as (a, worker):
        scratch = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        w, x, offsets = a.pointer("w", k.dtype), a.pointer("x", storage), a.pointer("offsets", "i64")
        emit_zeros(k, scratch, a.row_size)
        with a.draws(worker) as number:
            row_block, filter_block, group, image = unravel(number, a.row_blocks, a.filter_blocks, a.groups)
            row0 = row_block * a.block_rows
            rows = (a.tile_rows * a.row_phases - row0).min(a.block_rows)
            k0 = filter_block * a.filter_block
            filters = (a.group_k - k0).min(a.filter_block)
            filter_, total_k = group * a.group_k + k0, a.group_k * a.groups
            if planar:
                place = (image * a.groups + group) * a.group_c * (a.h * a.w_in)
                source = _transposed_rows(k, a, scratch, x + place, high, row0, rows)
                at = (image * total_k + filter_) * (a.p * a.q)
            else:
                source = x + (image * (a.h * a.w_in) * a.groups + group) * a.group_c
                at = image * (a.p * a.q) * total_k + filter_
            emit_zeros(k, scratch + a.sums_at, rows * a.sums_w * a.run * high.outputs)
            for i in range(high.products):
                k.call(f"input_{i}", a.args, scratch, source, row0, rows)
                with k.loop(0, wide.products) as j, k.loop(0, a.group_c, a.channel_block) as channel:
                    panels = w + (group * (high.products * wide.products) + (j + i * wide.products)) * a.matrix
                    channels = (a.group_c - channel).min(a.channel_block)
                    k.call(
                        "block", scratch + a.input_at + j * a.tiles * a.group_c + channel, a.group_c, offsets, channels,
                        panels + channel * a.filter_pad + k0 * channels,
                        scratch + a.product_at + a.product_step * j, a.run, rows * a.tile_cols * a.col_phases,
                        (filters + (k.lanes - 1)) // k.lanes, channel > 0,
                    )  # fmt: skip
                k.call("accumulate", a.args, scratch, rows, i)
            k.call("output", a.args, scratch, row0, rows, filter_, filters, at)


def _transposed_rows(k: Kernel, a: Fields, scratch: Ptr, x: Ptr, high: Transform, row0: Int, rows: Int) -> Ptr:
    """The rows of x that `rows` rows of tiles see, channels last; where row 0 of the image would be."""
    phases, step = a.row_phases, a.dilation_h * high.step
    first = (row0 // phases * step - a.pad_top).max(0).min(a.h)
    last = (row0 + rows - 1) // phases * step + (phases - 1) * a.stride_h + a.dilation_h * (high.span - 1)
    end = (last + 1 - a.pad_top).min(a.h).max(first)
    out, pitch = scratch + a.transposed_at, a.h * a.w_in
    k.call("to_pixels", x + first * a.w_in, pitch, out, a.group_c, (end - first) * a.w_in, a.group_c)
    return out + (0 - first) * a.w_in * a.group_c
