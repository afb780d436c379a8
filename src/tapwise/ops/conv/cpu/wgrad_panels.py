"""Panels of wgrad's kernels: operands pixel by pixel, as register tiles take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapwise.cpu.copies import emit_zeros, interleave
from tapwise.cpu.fields import Fields
from tapwise.cpu.simd import INT, Int, Kernel
from tapwise.cpu.transposes import columns_of


def emit_pack(k: Kernel, storage: str, planar: bool, name: str, pitch: int, streams: int) -> None:
    """pack(source, step, out, count, length): `length` pixels of `count` channels, `pitch` elements a pixel in `out`.

    `step`: from a channel's plane to the next (NCHW; `streams` of them are transposed at a time), or from pixel to
    pixel. What is not there of a panel is filled with its last channel, or not at all: no sum of it is used.
    """
    with k.function(name, source=storage, step=INT, out=k.dtype, count=INT, length=INT) as (
        source, step, out, count, length,
    ):  # fmt: skip
        if not planar:
            with k.if_else(count.eq(pitch)) as (whole, part):
                with whole, k.loop(0, length) as i:
                    width = min(pitch, k.lanes)
                    for at in range(0, pitch, width):
                        k.store(out + i * pitch + at, k.load(source + i * step + at, width))
                with part, k.loop(0, length) as i:
                    there, here = source + i * step, out + i * pitch
                    k.rows(count, lambda j, lanes: k.store(here + j, k.load(there + j, lanes)))
            return
        with k.loop(0, count, streams) as first:
            planes = [source + (first + j).min(count - 1) * step for j in range(streams)]
            start = out + first

            def body(i: Int, lanes: int) -> None:
                here = [plane + i for plane in planes]
                if streams < 4:
                    # Pixels lie one behind the other, several to a vector.
                    loaded = [k.load(one, lanes) for one in here]
                    for at, piece in enumerate(loaded if lanes == 1 else interleave(k, loaded)):
                        pixel, channel = divmod(at * lanes, streams)
                        k.store(start + (i + pixel) * pitch + channel, piece)
                    return
                for pixel, vectors in enumerate(columns_of(k, here, lanes)):
                    there = start + (i + pixel) * pitch
                    for vector in vectors:
                        k.store(there, vector)
                        there = there + k.lanes_of(vector)

            k.rows(length, body)


def emit_pack_flat(k: Kernel, names: Sequence[str], storage: str, planar: bool) -> None:
    """pack_flat(args, source, out, c): one row of x, its `c` channels side by side, zeros beyond its columns."""
    with k.function("pack_flat", args="i64", source=storage, out=k.dtype, c=INT) as (args, source, out, c):
        a = Fields(k, args, names)
        width = a.w_in.min(a.flat_width - a.pad_w).max(0)
        emit_zeros(k, out, a.flat_width * c)
        inside = out + a.pad_w * c
        if planar:
            plane = a.h * a.w_in
            three = c.eq(3)
            done = k.var(k.integer(0))
            with k.if_(three):
                whole = width - width % k.lanes
                with k.loop(0, whole, k.lanes) as i:
                    loaded = [k.load(source + j * plane + i) for j in range(3)]
                    for part in range(3):
                        k.store(inside + i * 3 + part * k.lanes, _third(k, loaded, part))
                done.set(whole)
            with k.loop(0, c) as channel, k.loop(done.get(), width) as i:
                k.store(inside + i * c + channel, k.load(source + channel * plane + i, 1))
        else:
            with k.if_else(c.eq(a.c)) as (whole_pixels, parts):
                with whole_pixels:
                    k.rows(width * c, lambda i, lanes: k.store(inside + i, k.load(source + i, lanes)))
                with parts, k.loop(0, width) as i, k.loop(0, c) as channel:
                    k.store(inside + i * c + channel, k.load(source + i * a.c + channel, 1))


def _third(k: Kernel, streams: list[Any], part: int) -> Any:
    """Vector `part` of three streams interleaved."""
    lanes, elements = k.lanes, [divmod(part * k.lanes + lane, 3) for lane in range(k.lanes)]
    two = k.shuffle(streams[0], streams[1], [at + (lanes if stream == 1 else 0) for at, stream in elements])
    picks = [lanes + at if stream == 2 else lane for lane, (at, stream) in enumerate(elements)]
    return k.shuffle(two, streams[2], picks)
