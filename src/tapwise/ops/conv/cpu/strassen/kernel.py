"""The kernels of cpu.strassen: sums of parts of x, products and their sums, and filters into panels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tapwise.cpu import tile
from tapwise.cpu.copies import emit_zeros, interleave
from tapwise.cpu.epilogue import Epilogue, emit_finish_pixels, emit_finish_row
from tapwise.cpu.fields import COMMON, Fields, entry, unravel
from tapwise.cpu.filters import Filters
from tapwise.cpu.simd import Int, Kernel, Ptr, Target
from tapwise.cpu.transposes import emit_to_pixels, emit_to_planes
from tapwise.ops.conv.cpu.strassen.products import PRODUCTS

FIELDS: Final = (
    *COMMON, "half_c", "half_terms", "half_k", "filter_pad", "half_p", "pixels", "odd", "rows", "row_blocks",
    "filter_block", "filter_blocks", "pitch", "products_at", "offsets", "matrix", "plane", "w_in", "image", "q",
    "stride_h", "dilation_h", "dilation_w", "taps_h", "taps_w", "row_length", "slots", "places",
    "h", "pad_top", "pad_left",
)  # fmt: skip


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, source: str, m: int, n: int, bias: bool,
    residual: bool, activation: str | None,
) -> Kernel:  # fmt: skip
    """`task` and `pack_task`. `source` is what vectors of terms are made of: "planes" whose pixels follow each other or
    "rows" of planes, both transposed, "pixels" of channels last, "taps" of filters whose rows are whole vectors."""
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
        _emit_task(k, a, worker, number, storage, filters, planar, source)
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


def _emit_sums(k: Kernel, a: Fields, x: Ptr, row0: Int, rows: Int, out: Ptr, slot: Int, source: str) -> None:
    """The sums of parts of x, an image, of `rows` pixels of each half from row0 on: out[product][pixel][term].

    The halves of terms are those of channels, each in the order (tap, channel); of "taps" in that of the filters.
    """
    firsts = [row0, row0 + (a.pixels - a.half_p)]
    places = a.pointer("places", "i64")

    def combine(parts: Sequence[Ptr], step: Int | int, term: Int, indices: Sequence[Int] | None = None) -> None:
        """A vector of terms of all pixels: parts' begin, and their pixels by `places`, less `indices`, or in a row."""
        with k.loop(0, rows) as at:
            pixels = [at, at]
            if source != "planes":
                pixels = [k.load_int(places + (first + at)) for first in firsts]
            if indices is not None:
                pixels = [pixel - index for pixel, index in zip(pixels, indices, strict=True)]
            loaded = [k.load(begin + pixels[part % 2] * step) for part, begin in enumerate(parts)]
            for i, product in enumerate(PRODUCTS):
                k.store(out + (slot * i + at * a.pitch + term), _sum(k, product.x, loaded))

    if source == "taps":
        half_rows = a.half_terms // a.taps_w
        with k.loop(0, half_rows) as row, k.loop(0, a.taps_w, k.lanes) as s:
            both = [row, row + half_rows]
            rows_at = [x + ((one // a.taps_h) * a.plane + one % a.taps_h * a.w_in + s) for one in both]
            combine([rows_at[part // 2] for part in range(4)], 1, row * a.taps_w + s)
        return
    transposed = [out + (slot * len(PRODUCTS) + a.slots * k.lanes * part) for part in range(4)]
    if source == "rows":
        # The padding beside rows stays as it is.
        emit_zeros(k, transposed[0], a.slots * (4 * k.lanes))
    with k.loop(0, a.half_c, k.lanes) as next_c, k.loop(0, a.taps_h) as r:
        c, down = next_c.min(a.half_c - k.lanes), r * a.dilation_h
        term = r * a.taps_w * a.half_c + c
        if source == "pixels":
            with k.loop(0, a.taps_w) as s:
                there = (down * a.w_in + s * a.dilation_w) * (a.half_c * 2)
                begins = [x + (there + c + half_c * a.half_c) for half_c in range(2)]
                combine([begins[part // 2] for part in range(4)], a.half_c * 2, term + s * a.half_c)
            return
        begins = [x + (c + half_c * a.half_c) * a.plane for half_c in range(2)]
        if source == "planes":
            for part, out_at in enumerate(transposed):
                begin = begins[part // 2] + firsts[part % 2]
                k.call("to_pixels", begin, a.plane, out_at, k.lanes, rows, k.lanes)
            combine(transposed, k.lanes, term)
            return
        # All that lies between the pixels of a row is transposed too.
        tops = [first // a.q for first in firsts]
        length = (a.row_length - a.pad_left).min(a.w_in)
        for part, out_at in enumerate(transposed):
            top = tops[part % 2]
            with k.loop(top, (firsts[part % 2] + rows - 1) // a.q + 1) as row:
                here = out_at + ((row - top) * a.row_length + a.pad_left) * k.lanes
                h = row * a.stride_h + (down - a.pad_top)
                with k.if_else(k.both(h >= 0, h < a.h)) as (inside, outside):
                    with inside:
                        k.call("to_pixels", begins[part // 2] + h * a.w_in, a.plane, here, k.lanes, length, k.lanes)
                    with outside:
                        emit_zeros(k, here, length * k.lanes)
        with k.loop(0, a.taps_w) as s:
            right = s * a.dilation_w * k.lanes
            indices = [top * a.row_length for top in tops]
            combine([one + right for one in transposed], k.lanes, term + s * a.half_c, indices)


def _emit_task(
    k: Kernel, a: Fields, worker: Int, number: Int, storage: str, filters: Filters, planar: bool, source: str
) -> None:
    """Some filters of each half and some pixels of each half: the seven products, their sums, y."""
    width, count = filters.width, len(PRODUCTS)
    row_block, filter_block, image = unravel(number, a.row_blocks, a.filter_blocks)
    row0, k0 = row_block * a.rows, filter_block * a.filter_block
    rows = (a.half_p - row0).min(a.rows)
    scratch = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
    sums, size = scratch + a.products_at, a.rows * a.pitch
    _emit_sums(k, a, a.pointer("x", storage) + image * a.image, row0, rows, scratch, size, source)
    w, offsets = a.pointer("w", k.dtype), a.pointer("offsets", "i64")
    y, bias, residual = (a.pointer(name, storage) for name in ("y", "bias", "residual"))
    slot = a.rows * width
    with k.loop(k0, (k0 + a.filter_block).min(a.half_k), width) as f:
        some = (a.half_k - f).min(width)
        for i in range(count):
            k.call(
                "block", scratch + size * i, a.pitch, offsets, a.half_terms, w + (a.matrix * i + f * a.half_terms),
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
    """A vector of filters of each half, terms in their order: the sums of their parts, transposed into panels."""
    w, packed = a.pointer("x", storage), a.pointer("w", k.dtype)
    f = number * k.lanes
    panel = f - f % width
    across = (a.filter_pad - panel).min(width)
    out = packed + (panel * a.half_terms + f % width)
    with k.loop(0, a.half_terms, k.lanes) as next_term:
        term = next_term.min(a.half_terms - k.lanes)
        for i, product in enumerate(PRODUCTS):
            rows = []
            for lane in range(k.lanes):
                # What fills the last vector up goes nowhere.
                filter_ = (f + lane).min(a.half_k - 1)
                halves = [filter_, filter_ + a.half_k]
                parts = [w + ((half * 2 + part) * a.half_terms + term) for half in halves for part in range(2)]
                rows.append(_sum(k, product.w, parts))
            for at, vector in enumerate(interleave(k, rows)):
                k.store(out + (a.matrix * i + (term + at) * across), vector)
