"""The kernels of cpu.winograd, and its steps with lanes over tiles."""

from __future__ import annotations

from typing import Any

from tapwise.cpu import tile
from tapwise.cpu.copies import deinterleave, emit_strided_copy, emit_zeros, interleave
from tapwise.cpu.epilogue import Epilogue, emit_finish_pixels, emit_finish_row
from tapwise.cpu.fields import Fields, entry, unravel
from tapwise.cpu.filters import Filters
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target
from tapwise.cpu.transposes import emit_to_pixels, emit_to_planes
from tapwise.ops.conv.cpu.winograd import over_channels
from tapwise.ops.conv.cpu.winograd.steps import FIELDS, combine, emit_accumulate, emit_filters
from tapwise.ops.conv.winograd.transforms import Axis, Transform


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, lanes: str, tile_h: int, tile_w: int, rows: Axis,
    columns: Axis, m: int, n: int, bias: bool, residual: bool, activation: str | None,
) -> Kernel:  # fmt: skip
    """The kernels of one instance: `task` and `pack_task`."""
    k = Kernel(target, dtype)
    high, wide = rows.transform(tile_h), columns.transform(tile_w)
    planar, over_tiles = layout == "nchw", lanes == "tiles"
    filters = Filters(k, "pixels", m) if over_tiles else Filters(k, "channels", n * k.lanes)
    tile.emit(k, m, n, filters)
    epilogue = Epilogue(k, storage, planar, bias, residual, activation)
    if over_tiles:
        emit_finish_row(epilogue)
        _emit_columns(k, wide)
    elif planar:
        emit_to_pixels(k, storage)
        emit_to_planes(epilogue)
    else:
        emit_finish_row(epilogue)
        emit_finish_pixels(epilogue)
    for i in range(high.products):
        if over_tiles:
            _emit_input(k, storage, high, i)
        else:
            over_channels.emit_input(k, k.dtype if planar else storage, high, wide, i, planar)
    emit_accumulate(k, high, wide, lanes)
    if over_tiles:
        _emit_output(k, storage, high, wide)
        _emit_task(k, storage, high, wide)
    else:
        over_channels.emit_output(k, storage, high, planar)
        over_channels.emit_task(k, storage, high, wide, planar)
    emit_filters(k, storage, high, wide, filters.width, m if over_tiles else k.lanes)
    return k


def _emit_columns(k: Kernel, wide: Transform) -> None:
    """columns(args, combined, out, step): the tiles' column combinations of one combined row; j's at out + j * step."""
    with k.function("columns", args="i64", combined=k.dtype, out=k.dtype, step=INT) as (args, combined, out, step):
        a = Fields(k, args, FIELDS)

        def combine_columns(t: Int, lanes: int, combined: Ptr, out: Ptr) -> None:
            here = combined + t * wide.step
            columns: list[Any] = []
            while len(columns) < wide.span:
                wanted = min(wide.step, wide.span - len(columns))
                columns += deinterleave(k, here + len(columns), wide.step, wanted, lanes)
            for j, row in enumerate(wide.b_t):
                k.store(out + step * j + t, combine(k, list(zip(row, columns, strict=True))))

        with k.if_else(a.dilation_w.eq(1)) as (dense, dilated):
            with dense:
                k.rows(a.tile_cols, lambda t, lanes: combine_columns(t, lanes, combined, out))
            with dilated, k.loop(0, a.col_phases) as phase:
                # The columns of one phase, as if there were no others.
                thin = combined + a.row_size
                count = (a.tile_cols - 1) * wide.step + wide.span
                emit_strided_copy(k, combined + phase * a.stride_w, thin, count, a.dilation_w)
                there = out + phase * a.tile_cols
                k.rows(a.tile_cols, lambda t, lanes: combine_columns(t, lanes, thin, there))


def _emit_input(k: Kernel, storage: str, high: Transform, i: int) -> None:
    """input_i(args, scratch, x, row0, rows): slice i of the transformed input of a task's rows, all channels.

    Result j of channel c: scratch[input_at + (j * group_c + c) * tiles + tile].
    """
    with k.function(
        f"input_{i}", args="i64", scratch=k.dtype, x=storage, row0=INT, rows=INT
    ) as (args, scratch, x, row0, rows):  # fmt: skip
        a = Fields(k, args, FIELDS)
        zeros = a.pointer("zeros", storage)
        combined = scratch + a.pad_left
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
                k.store(combined + at, combine(k, [(f, k.load(source + at, lanes)) for f, source in sources]))

            k.rows(a.w_in, combine_rows)
            out = scratch + a.input_at + c * a.tiles + row * a.tile_cols * a.col_phases
            k.call("columns", args, scratch, out, a.group_c * a.tiles)


def _emit_output(k: Kernel, storage: str, high: Transform, wide: Transform) -> None:
    """output(args, scratch, row0, rows, k0, filters, plane0): a task's sums to rows of y; plane0 is k0's plane."""
    cols = wide.outputs
    with k.function(
        "output", args="i64", scratch=k.dtype, row0=INT, rows=INT, k0=INT, filters=INT, plane0=INT
    ) as (args, scratch, row0, rows, k0, filters, plane0):  # fmt: skip
        a = Fields(k, args, FIELDS)
        y, bias, residual = (a.pointer(name, storage) for name in ("y", "bias", "residual"))
        rows_at = scratch + a.output_at
        thin = rows_at + a.row_size * 2

        def interleaved(sums: Ptr, out: Ptr) -> None:
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
                # Two rows in turn: one is read while the next is written.
                here = rows_at + a.row_size * (p % 2)
                height = (tile_row * high.outputs + p) * a.row_phases + row_phase
                with k.if_(height < a.p):
                    with k.if_else(a.col_phases.eq(1)) as (dense, dilated):
                        with dense:
                            interleaved(sums, here)
                        with dilated, k.loop(0, a.col_phases) as phase:
                            interleaved(sums + phase * a.tile_cols, thin)
                            with k.loop(0, a.tile_cols * cols) as i:
                                k.store(here + i * a.col_phases + phase, k.load(thin + i, 1))
                    at = ((plane0 + f) * a.p + height) * a.q
                    k.call("finish_row", here, 1, bias + k0 + f, residual + at, y + at, a.q)


def _emit_task(k: Kernel, storage: str, high: Transform, wide: Transform) -> None:
    with entry(k, FIELDS) as (a, worker):
        scratch = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        w, offsets = a.pointer("w", k.dtype), a.pointer("offsets", "i64")
        x = a.pointer("x", storage)
        emit_zeros(k, scratch, a.row_size)
        with a.draws(worker) as number:
            row_block, filter_block, image_group = unravel(number, a.row_blocks, a.filter_blocks)
            group = image_group % a.groups
            row0 = row_block * a.block_rows
            rows = (a.tile_rows * a.row_phases - row0).min(a.block_rows)
            k0 = filter_block * a.filter_block
            filters = (a.group_k - k0).min(a.filter_block)
            # (image * groups + group) * channels of a group is the first plane of x and of y.
            planes = x + image_group * a.group_c * (a.h * a.w_in)
            emit_zeros(k, scratch + a.sums_at, filters * a.tiles * (high.outputs * wide.outputs))
            for i in range(high.products):
                k.call(f"input_{i}", a.args, scratch, planes, row0, rows)
                with k.loop(0, wide.products) as j, k.loop(0, a.group_c, a.channel_block) as channel:
                    panels = w + (group * (high.products * wide.products) + (j + i * wide.products)) * a.matrix
                    channels = (a.group_c - channel).min(a.channel_block)
                    k.call(
                        "block", scratch + a.input_at + (a.group_c * j + channel) * a.tiles, 1, offsets, channels,
                        panels + channel * a.filter_pad + k0 * channels,
                        scratch + a.product_at + a.product_step * j, a.tiles, filters,
                        a.tiles // k.lanes, channel > 0,
                    )  # fmt: skip
                k.call("accumulate", a.args, scratch, filters, i)
            k.call("output", a.args, scratch, row0, rows, group * a.group_k + k0, filters, image_group * a.group_k + k0)
