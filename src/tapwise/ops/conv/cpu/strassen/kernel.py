"""The kernels of cpu.strassen: sums of parts of x, products and their sums, and filters into panels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tapwise.cpu import tile
from tapwise.cpu.copies import interleave
from tapwise.cpu.epilogue import Epilogue, emit_finish_pixels, emit_finish_row
from tapwise.cpu.fields import COMMON, Fields, entry, unravel
from tapwise.cpu.filters import Filters
from tapwise.cpu.simd import Int, Kernel, Ptr, Target
from tapwise.cpu.transposes import emit_to_pixels, emit_to_planes
from tapwise.ops.conv.cpu.strassen.products import PRODUCTS

FIELDS: Final = (
    *COMMON, "half_c", "half_k", "filter_pad", "half_p", "pixels", "odd", "rows", "row_blocks", "filter_block",
    "filter_blocks", "pitch", "products_at", "offsets", "matrix", "plane", "q", "row_step", "row_length", "slots",
    "places",
)  # fmt: skip


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, strided: bool, m: int, n: int, bias: bool,
    residual: bool, activation: str | None,
) -> Kernel:  # fmt: skip
    """`task` and `pack_task`. `strided`: pixels of x that are read do not follow each other."""
    k, planar = Kernel(target, dtype), layout == "nchw"
    epilogue = Epilogue(k, storage, planar, bias, residual, activation)
    filters = Filters(k, "channels", n * k.lanes)
    tile.emit(k, m, n, filters)
    if planar:
        emit_to_pixels(k, storage)
        emit_to_planes(epilogue)
    else:
        emit_finish_row(epilogue)
        emit_finish_pixels(epilogue)
    with entry(k, FIELDS) as (a, worker), a.draws(worker) as number:
        _emit_task(k, a, worker, number, storage, filters, planar, strided)
    with entry(k, FIELDS, "pack_task") as (a, worker), a.draws(worker) as number:
        _emit_filters(k, a, number, storage, filters.width)
    return k


def _sum(k: Kernel, factors: Sequence[int], terms: Sequence[Any]) -> Any:
    """Terms with a factor of 1 or -1, of which one at least is 1; a term is a vector, or where one is loaded from."""
    total = None
    for factor, term in sorted(zip(factors, terms, strict=True), key=lambda pair: -pair[0]):
        if factor:
            value = k.load(term) if isinstance(term, Ptr) else term
            total = value if total is None else (k.add if factor > 0 else k.sub)(total, value)
    return total


def _emit_sums(
    k: Kernel, a: Fields, x: Ptr, row0: Int, rows: Int, out: Ptr, slot: Int, planar: bool, strided: bool
) -> None:
    """The sums of parts of x, an image, of `rows` pixels of each half from row0 on: out[product][pixel][channel].

    Planes are transposed a vector of channels at a time, what is read of a row of x with all that lies between.
    """
    firsts, total = [row0, row0 + (a.pixels - a.half_p)], a.half_c * 2
    transposed = [out + (slot * len(PRODUCTS) + a.slots * k.lanes * part) for part in range(4)]
    top = [first // a.q for first in firsts]
    places = a.pointer("places", "i64")
    with k.loop(0, a.half_c, k.lanes) as next_c:
        c = next_c.min(a.half_c - k.lanes)
        begins = [x + (c + half_c * a.half_c) * (a.plane if planar else 1) for half_c in range(2)]
        if planar:
            for part, there in enumerate(transposed):
                begin, half_p = begins[part // 2], part % 2
                if not strided:
                    k.call("to_pixels", begin + firsts[half_p], a.plane, there, k.lanes, rows, k.lanes)
                    continue
                last = (firsts[half_p] + rows - 1) // a.q
                with k.loop(top[half_p], last + 1) as row:
                    here = there + (row - top[half_p]) * a.row_length * k.lanes
                    k.call("to_pixels", begin + row * a.row_step, a.plane, here, k.lanes, a.row_length, k.lanes)
        with k.loop(0, rows) as at:
            pixels = [at, at] if planar else [first + at for first in firsts]
            if strided:
                pixels = [k.load_int(places + (first + at)) for first in firsts]
            if strided and planar:
                pixels = [place - first * a.row_length for place, first in zip(pixels, top, strict=True)]
            # Of each part: where its pixels lie, and how far from each other.
            parts, step = (transposed, k.lanes) if planar else ([begins[part // 2] for part in range(4)], total)
            loaded = [k.load(begin + pixels[part % 2] * step) for part, begin in enumerate(parts)]
            for i, product in enumerate(PRODUCTS):
                k.store(out + (slot * i + at * a.pitch + c), _sum(k, product.x, loaded))


def _emit_task(
    k: Kernel, a: Fields, worker: Int, number: Int, storage: str, filters: Filters, planar: bool, strided: bool
) -> None:
    """Some filters of each half and some pixels of each half: the seven products, their sums, y."""
    width, count = filters.width, len(PRODUCTS)
    row_block, filter_block, image = unravel(number, a.row_blocks, a.filter_blocks)
    row0, k0 = row_block * a.rows, filter_block * a.filter_block
    rows = (a.half_p - row0).min(a.rows)
    scratch = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
    sums, size = scratch + a.products_at, a.rows * a.pitch
    x = a.pointer("x", storage) + image * a.plane * (a.half_c * 2)
    _emit_sums(k, a, x, row0, rows, scratch, size, planar, strided)
    w, offsets = a.pointer("w", k.dtype), a.pointer("offsets", "i64")
    y, bias, residual = (a.pointer(name, storage) for name in ("y", "bias", "residual"))
    slot = a.rows * width
    with k.loop(k0, (k0 + a.filter_block).min(a.half_k), width) as f:
        some = (a.half_k - f).min(width)
        for i in range(count):
            k.call(
                "block", scratch + size * i, a.pitch, offsets, a.half_c, w + (a.matrix * i + f * a.half_c),
                sums + slot * i, width, rows, (some + (k.lanes - 1)) // k.lanes, rows < 0,
            )  # fmt: skip
        # The first four products make room for the parts of y.
        with k.loop(0, rows * width, k.lanes) as at:
            products = [k.load(sums + (slot * i + at)) for i in range(count)]
            for part in range(4):
                factors = [product.y[part] for product in PRODUCTS]
                k.store(sums + (slot * part + at), _sum(k, factors, products))
        for part in range(4):
            half_k, half_p = divmod(part, 2)
            # The middle pixel of an odd number is in both halves: that of the first one counts.
            skip = k.select(k.both(row0.eq(0), a.odd.eq(1)), k.integer(1), k.integer(0)) if half_p else k.integer(0)
            this_k = f + half_k * a.half_k if half_k else f
            this_p = row0 + skip + (a.pixels - a.half_p) if half_p else row0
            here = sums + (slot * part + skip * width)
            if planar:
                there = (image * (a.half_k * 2) + this_k) * a.pixels + this_p
                k.call(
                    "to_planes", here, width, bias + this_k, residual + there, y + there, a.pixels, rows - skip, some
                )  # fmt: skip
            else:
                there = (image * a.pixels + this_p) * (a.half_k * 2) + this_k
                k.call(
                    "finish_pixels", here, width, bias + this_k, residual + there, y + there, a.half_k * 2, rows - skip,
                    some,
                )  # fmt: skip


def _emit_filters(k: Kernel, a: Fields, number: Int, storage: str, width: int) -> None:
    """A vector of filters of each half: the sums of their parts, transposed into panels."""
    w, packed, total = a.pointer("x", storage), a.pointer("w", k.dtype), a.half_c * 2
    f = number * k.lanes
    panel = f - f % width
    across = (a.filter_pad - panel).min(width)
    out = packed + (panel * a.half_c + f % width)
    with k.loop(0, a.half_c, k.lanes) as next_c:
        c = next_c.min(a.half_c - k.lanes)
        for i, product in enumerate(PRODUCTS):
            rows = []
            for lane in range(k.lanes):
                # What fills the last vector up goes nowhere.
                filter_ = (f + lane).min(a.half_k - 1)
                here = [
                    w + ((filter_ + half_k * a.half_k) * total + half_c * a.half_c + c)
                    for half_k in range(2) for half_c in range(2)
                ]  # fmt: skip
                rows.append(_sum(k, product.w, here))
            for at, vector in enumerate(interleave(k, rows)):
                k.store(out + (a.matrix * i + (c + at) * across), vector)
