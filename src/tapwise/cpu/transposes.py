"""Between planes and pixels: blocks of channels by pixels, transposed in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from tapwise.cpu.copies import interleave
from tapwise.cpu.epilogue import Epilogue
from tapwise.cpu.simd import I32, INT, Int, Kernel


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
                here, planes = source + first * pitch + at, []
                for _ in range(k.lanes):
                    planes.append(k.load(here, count))
                    here = here + pitch
                there = out + at * step + first
                for pixel in _transposed(k, planes, count):
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
                here, vectors = sums + at * step + f, []
                for _ in range(pixel_count):
                    vectors.append(k.load(here))
                    here = here + step
                spot = f * pitch + at
                for lane, value in enumerate(rows_of(k, interleave(k, vectors), pixel_count)):
                    with k.if_(count > f + lane):
                        k.store(y + spot, epilogue.finish(value, bias + f + lane, residual + spot))
                    spot = spot + pitch

            k.rows(pixels, body)


def _transposed(k: Kernel, planes: Sequence[Any], count: int) -> list[list[Any]]:
    """Of a vector of `count` pixels of each of many channels: of each pixel, vectors that hold its channels."""
    if count == 1:
        value = ir.Constant(k.vector(k.dtype, len(planes)), ir.Undefined)
        for lane, one in enumerate(planes):
            value = k.b.insert_element(value, one, ir.Constant(I32, lane))
        return [[value]]
    vectors = interleave(k, planes)
    each = len(vectors) // count
    return [vectors[pixel * each : (pixel + 1) * each] for pixel in range(count)]


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
