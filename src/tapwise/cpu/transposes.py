"""Between planes and pixels: blocks of channels by pixels, transposed in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from tapwise.cpu.copies import interleave
from tapwise.cpu.epilogue import Epilogue
from tapwise.cpu.simd import BYTES, I32, INT, Int, Kernel, Ptr


def emit_to_pixels(k: Kernel, storage: str) -> None:
    """Emit to_pixels(source, pitch, out, step, pixels, channels): planes `pitch` apart to pixels `step` apart.

    out[i * step + c] = source[c * pitch + i]; there is at least a vector of channels.
    """
    with k.function(
        "to_pixels", source=storage, pitch=INT, out=k.dtype, step=INT, pixels=INT, channels=INT
    ) as (source, pitch, out, step, pixels, channels):  # fmt: skip
        with k.loop(0, channels, k.lanes) as c:
            first = c.min(channels - k.lanes)

            def body(at: Int, count: int, first: Int = first) -> None:
                here, there = [source + first * pitch + at], out + at * step + first
                for _ in range(k.lanes - 1):
                    here.append(here[-1] + pitch)
                for pixel in columns_of(k, here, count):
                    shift = 0
                    for vector in pixel:
                        k.store(there + shift, vector)
                        shift += k.lanes_of(vector)
                    there = there + step

            k.rows(pixels, body)


def emit_to_planes(epilogue: Epilogue) -> None:
    """Emit to_planes(sums, step, bias, residual, y, pitch, pixels, count): sums of pixels `step` apart, finished, to
    `count` planes of y `pitch` apart. Whole vectors of filters are read; those behind `count` go nowhere."""
    k, storage = epilogue.k, epilogue.storage
    with k.function(
        "to_planes", sums=k.dtype, step=INT, bias=storage, residual=storage, y=storage, pitch=INT, pixels=INT, count=INT
    ) as (sums, step, bias, residual, y, pitch, pixels, count):  # fmt: skip
        with k.loop(0, count, k.lanes) as f:

            def body(at: Int, pixel_count: int, f: Int = f) -> None:
                here = [sums + at * step + f]
                for _ in range(pixel_count - 1):
                    here.append(here[-1] + step)
                spot = f * pitch + at
                for lane, (value,) in enumerate(columns_of(k, here, k.lanes)):
                    with k.if_(count > f + lane):
                        k.store(y + spot, epilogue.finish(value, bias + f + lane, residual + spot))
                    spot = spot + pitch

            k.rows(pixels, body)


def columns_of(k: Kernel, rows: Sequence[Ptr], count: int) -> list[list[Any]]:
    """Of `count` elements at each of `rows`: of each column the vectors that hold it."""
    if BYTES[k.dtype] == 4 and len(rows) % 4 == count % 4 == 0:
        return [[column] for column in _by_quarters(k, rows, count)]
    loaded = [k.load(row, count) for row in rows]
    if count == 1:
        value = ir.Constant(k.vector(k.dtype, len(rows)), ir.Undefined)
        for lane, one in enumerate(loaded):
            value = k.b.insert_element(value, one, ir.Constant(I32, lane))
        return [[value]]
    vectors = interleave(k, loaded)
    if len(rows) <= count:
        return [[part] for part in rows_of(k, vectors, len(rows))]
    each = len(rows) // count
    return [vectors[column * each : (column + 1) * each] for column in range(count)]


def _by_quarters(k: Kernel, rows: Sequence[Ptr], count: int) -> list[Any]:
    """As columns_of: 4, 8 or 16 rows, elements of four bytes; by shuffles within quarters of 128 bits, which are fast.

    Rows four apart share a vector, so that quarters come where they belong: 4x4 elements are transposed within each.
    """
    columns: list[Any] = []
    size = len(rows)
    width = 8 if size == 16 and count % 8 == 0 else 4
    shared = size // width
    for at in range(0, count, width):
        found = []
        for first in range(0, size, 4 * shared):
            four = [
                _joined(k, [k.load(row + at, width) for row in rows[first + i : first + 4 * shared : 4]])
                for i in range(4)
            ]
            # Of rows 0 and 1 and of rows 2 and 3 the first two columns, and the others; then one column of all four.
            low, high = ([_unpacked(k, four[i], four[i + 1], 1, half) for i in (0, 2)] for half in range(2))
            found.append([_unpacked(k, a, b, 2, half) for a, b in (low, high) for half in range(2)])
        for quarter in range(width // 4):
            for parts in zip(*found, strict=True):
                # Every other quarter of two vectors is a column.
                lanes = [lane for lane in range(2 * size) if lane // 4 % 2 == quarter]
                columns.append(k.shuffle(*parts, lanes) if len(parts) == 2 else parts[0])
    return columns


def _joined(k: Kernel, vectors: Sequence[Any]) -> Any:
    """Vectors behind each other, as one."""
    while len(vectors) > 1:
        lanes = range(2 * k.lanes_of(vectors[0]))
        vectors = [k.shuffle(a, b, lanes) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _unpacked(k: Kernel, a: Any, b: Any, size: int, half: int) -> Any:
    """Units of `size` lanes of a and b in turns, those of one half of each four lanes."""
    count = k.lanes_of(a)
    units = [at + 2 * half + i for at in range(0, count, 4) for i in range(0, 2, size)]
    return k.shuffle(a, b, [lane + i for unit in units for lane in (unit, unit + count) for i in range(size)])


def rows_of(k: Kernel, vectors: Sequence[Any], count: int) -> list[Any]:
    """Parts of `count` lanes of vectors that follow each other."""
    parts = []
    for vector in vectors:
        lanes = k.lanes_of(vector)
        for first in range(0, lanes, count):
            if count == lanes:
                parts.append(vector)
            elif count == 1:
                parts.append(k.b.extract_element(vector, ir.Constant(I32, first)))
            else:
                parts.append(k.shuffle(vector, vector, range(first, first + count)))
    return parts
