"""The kernel of cpu.direct of dgrad: rows of dx from a packed tile of dy, all phases of their columns at once."""

from __future__ import annotations

from typing import Any, Final

from tapwise.cpu.copies import emit_zeros, interleave
from tapwise.cpu.epilogue import Epilogue, emit_finish_row
from tapwise.cpu.fields import COMMON, FILTER_STEPS, Fields, entry, unravel
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target
from tapwise.ops.conv.cpu.packing import Window, emit_pack_plane

# starts: where the terms of each phase of rows and columns begin, among `terms`; offsets: where each reads a packed
# tile; taps: its filter, and its tap's row and column.
FIELDS: Final = (
    *COMMON, "starts", "offsets", "taps", "terms", "columns", "row_starts",
    "group_c", "group_k", "groups", "h", "w_in", "p", "q", "stride_h", "stride_w", "row_phases", "col_phases",
    "pitch", "plane", "row_shift", "rows", "row_blocks", "group_block", "group_blocks",
    "vectors", "dx_h", "dx_w", "down", "steps_at", "sums_at", *FILTER_STEPS,
)  # fmt: skip


def generate(
    target: Target, *, dtype: str, storage: str, m: int, n: int, ways: int, bias: bool, residual: bool,
    activation: str | None,
) -> Kernel:  # fmt: skip
    """`task`, for tiles of `m` channels and `n` rows, of `ways` phases of columns."""
    k = Kernel(target, dtype)
    epilogue = Epilogue(k, storage, True, bias, residual, activation)
    emit_finish_row(epilogue)
    for rows in range(1, n + 1):
        for channels in range(1, m + 1):
            _emit_tile(k, channels, rows, ways)
        _emit_rows(epilogue, m, rows, ways)
    _emit_phase(k, n)
    _emit_task(k, storage, ways)
    return k


def _emit_tile(k: Kernel, m: int, n: int, ways: int) -> None:
    """tile_M_N(x, pitch, starts, offsets, steps, w, w_step, out, c_step, h_step): a vector of m channels and n rows.

    Rows of x are `pitch` apart, filters `w_step`; `steps` (i64) says where each term's filter lies. A row goes to
    out[channel * c_step + row * h_step], its phases interleaved.
    """
    with k.function(
        f"tile_{m}_{n}", x=k.dtype, pitch=INT, starts="i64", offsets="i64", steps="i64", w=k.dtype, w_step=INT,
        out=k.dtype, c_step=INT, h_step=INT,
    ) as (x, pitch, starts, offsets, steps, w, w_step, out, c_step, h_step):  # fmt: skip
        sums: list[list[list[Any]]] = []
        for way in range(ways):
            cells = [[k.var(k.constant(0.0)) for _ in range(n)] for _ in range(m)]
            with k.loop(k.load_int(starts + way), k.load_int(starts + (way + 1))) as term:
                here, factor = x + k.load_int(offsets + term), w + k.load_int(steps + term)
                loaded = [k.load(here + pitch * row) for row in range(n)]
                for channel in range(m):
                    scalar = k.broadcast(factor + w_step * channel)
                    for row in range(n):
                        cells[channel][row].set(k.fma(scalar, loaded[row], cells[channel][row].get()))
            sums.append(cells)
        for channel in range(m):
            for row in range(n):
                there = out + (c_step * channel + h_step * row)
                for at, vector in enumerate(interleave(k, [cells[channel][row].get() for cells in sums])):
                    k.store(there + at * k.lanes, vector)


def _emit_rows(epilogue: Epilogue, m: int, n: int, ways: int) -> None:
    """rows_N(args, x, starts, steps, sums, group, image, h): n rows of dx from row h on, `down` apart.

    All channels of a group, tile by tile. Whole vectors go to dx where they are what it holds, the last of a row of
    whole steps over the one before; other ends of rows, or all of them, by way of a buffer that stays in L1.
    """
    k, storage = epilogue.k, epilogue.storage
    with k.function(
        f"rows_{n}", args="i64", x=k.dtype, starts="i64", steps="i64", sums=k.dtype, group=INT, image=INT, h=INT
    ) as (args, x, starts, steps, sums, group, image, h):
        a = Fields(k, args, FIELDS)
        w = a.pointer("w", k.dtype) + group * a.w_g
        bias, residual, y = (a.pointer(name, storage) for name in ("bias", "residual", "y"))
        step = ways * k.lanes
        straight = a.dx_w // step if epilogue.plain and storage == k.dtype else k.integer(0)
        fits = k.both(straight > 0, (a.dx_w % ways).eq(0))
        done = k.select(fits, a.dx_w, straight * step)
        line = (a.vectors - straight) * step

        def tile(count: int, c: Int) -> None:
            number = group * a.group_c + c

            def place(channel: Int, row: Int) -> Int:
                return ((image * a.groups * a.group_c + number + channel) * a.dx_h + h + row * a.down) * a.dx_w

            def compute(first: Int, out: Ptr, c_step: Int, h_step: Int) -> None:
                offsets, factors = a.pointer("offsets", "i64"), w + c * a.w_c
                here = x + first
                k.call(f"tile_{count}_{n}", here, a.pitch, starts, offsets, steps, factors, a.w_c, out, c_step, h_step)

            zero = k.integer(0)
            there, own = y.to(k.dtype) + place(zero, zero), (a.dx_h * a.dx_w, a.down * a.dx_w)
            with k.loop(0, straight) as v:
                compute(v * k.lanes, there + v * step, *own)
            with k.if_(k.both(fits, a.dx_w > straight * step)):
                compute(a.dx_w // ways - k.lanes, there + (a.dx_w - step), *own)
            with k.if_(done < a.dx_w):
                with k.loop(straight, a.vectors) as v:
                    compute(v * k.lanes, sums + (v - straight) * step, line * n, line)
                with k.loop(0, count) as channel, k.loop(0, n) as row:
                    at = place(channel, row) + done
                    here = sums + line * (channel * n + row)
                    rest = a.dx_w - done
                    k.call("finish_row", here, k.integer(1), bias + number + channel, residual + at, y + at, rest)

        whole = a.group_c - a.group_c % m
        with k.loop(0, whole, m) as c:
            tile(m, c)
        for count in range(1, m):
            with k.if_((a.group_c % m).eq(count)):
                tile(count, whole)


def _emit_phase(k: Kernel, n: int) -> None:
    """phase(args, packed, starts, steps, sums, group, image, h, count): `count` rows of dx from row h on."""
    with k.function(
        "phase", args="i64", packed=k.dtype, starts="i64", steps="i64", sums=k.dtype, group=INT, image=INT, h=INT,
        count=INT,
    ) as (args, packed, starts, steps, sums, group, image, h, count):  # fmt: skip
        a = Fields(k, args, FIELDS)

        def some(rows: int, row: Int) -> None:
            there = packed + row * a.pitch
            k.call(f"rows_{rows}", args, there, starts, steps, sums, group, image, h + row * a.down)

        whole = count - count % n
        with k.loop(0, whole, n) as row:
            some(n, row)
        for rows in range(1, n):
            with k.if_((count % n).eq(rows)):
                some(rows, whole)


def _emit_task(k: Kernel, storage: str, ways: int) -> None:
    """A task is a block of places of one image's rows, for a block of groups: dy is packed once for all phases."""
    with entry(k, FIELDS) as (a, worker):
        scratch = a.scratch + worker * a.scratch_step
        packed, sums = k.pointer(scratch, k.dtype), k.pointer(scratch + a.sums_at, k.dtype)
        steps, starts = k.pointer(scratch + a.steps_at, "i64"), a.pointer("starts", "i64")
        with k.loop(0, a.terms) as term:
            whose, row, column = (k.load_int(a.pointer("taps", "i64") + (term * 3 + i)) for i in range(3))
            k.store_int(steps + term, whose * a.w_k + row * a.w_r + column * a.w_s)
        with a.draws(worker) as number:
            row_block, group_block, image = unravel(number, a.row_blocks, a.group_blocks)
            first, group0 = row_block * a.rows, group_block * a.group_block
            # All groups of a task have their borders at the same places.
            emit_zeros(k, packed, a.group_k * a.plane)
            with k.loop(group0, (group0 + a.group_block).min(a.groups)) as group:
                window = Window(a, first, k.integer(0), a.rows)
                channel = (image * a.groups + group) * a.group_k
                with k.loop(0, a.group_k) as c:
                    source = a.pointer("x", storage) + (channel + c) * (a.h * a.w_in)
                    emit_pack_plane(k, window, source, packed + c * a.plane)
                with k.loop(0, a.down) as phase:
                    count = ((a.dx_h - phase + (a.down - 1)) // a.down - first).max(0).min(a.rows)
                    h = phase + first * a.down
                    k.call("phase", a.args, packed, starts + phase * ways, steps, sums, group, image, h, count)
