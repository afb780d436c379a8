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
    *COMMON, "half_c", "half_k", "half_p", "pixels", "odd", "rows", "row_blocks", "filter_block", "filter_blocks",
    "pitch", "products_at", "offsets", "matrix",
)  # fmt: skip


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, m: int, n: int, bias: bool, residual: bool,
    activation: str | None,
) -> Kernel:  # fmt: skip
    """`task` and `pack_task`."""
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
        _emit_task(k, a, worker, number, storage, filters, planar)
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


def _emit_sums(k: Kernel, a: Fields, x: Ptr, rows: Int, out: Ptr, slot: Int, planar: bool) -> None:
    """The sums of parts of x, of some pixels of each half from x on: out[product][pixel][channel]."""
    later, total = a.pixels - a.half_p, a.half_c * 2
    pixel, channel = (1, a.pixels) if planar else (total, 1)
    begins = [x, x + later * pixel, x + a.half_c * channel, x + (a.half_c * channel + later * pixel)]
    transposed = [out + (slot * len(PRODUCTS) + a.rows * k.lanes * part) for part in range(4)]
    with k.loop(0, a.half_c, k.lanes) as c:
        if planar:
            for begin, there in zip(begins, transposed, strict=True):
                k.call("to_pixels", begin + c * a.pixels, a.pixels, there, k.lanes, rows, k.lanes)
        with k.loop(0, rows) as at:
            here = [one + at * k.lanes for one in transposed] if planar else [one + at * total + c for one in begins]
            loaded = [k.load(one) for one in here]
            for i, product in enumerate(PRODUCTS):
                k.store(out + (slot * i + at * a.pitch + c), _sum(k, product.x, loaded))


def _emit_task(k: Kernel, a: Fields, worker: Int, number: Int, storage: str, filters: Filters, planar: bool) -> None:
    """Some filters of each half and some pixels of each half: the seven products, their sums, y."""
    width, count = filters.width, len(PRODUCTS)
    row_block, filter_block, image = unravel(number, a.row_blocks, a.filter_blocks)
    row0, k0 = row_block * a.rows, filter_block * a.filter_block
    rows = (a.half_p - row0).min(a.rows)
    scratch = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
    sums, size = scratch + a.products_at, a.rows * a.pitch
    x = a.pointer("x", storage) + image * a.pixels * (a.half_c * 2)
    _emit_sums(k, a, x + row0 * (1 if planar else a.half_c * 2), rows, scratch, size, planar)
    w, offsets = a.pointer("w", k.dtype), a.pointer("offsets", "i64")
    y, bias, residual = (a.pointer(name, storage) for name in ("y", "bias", "residual"))
    slot = a.rows * width
    with k.loop(k0, (k0 + a.filter_block).min(a.half_k), width) as f:
        some = (a.half_k - f).min(width)
        for i in range(count):
            k.call(
                "block", scratch + size * i, a.pitch, offsets, a.half_c, w + (a.matrix * i + f * a.half_c),
                sums + slot * i, width, rows, some // k.lanes, rows < 0,
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
    across = (a.half_k - panel).min(width)
    out = packed + (panel * a.half_c + f % width)
    with k.loop(0, a.half_c, k.lanes) as c:
        for i, product in enumerate(PRODUCTS):
            rows = []
            for lane in range(k.lanes):
                here = [
                    w + ((f + lane + half_k * a.half_k) * total + half_c * a.half_c + c)
                    for half_k in range(2) for half_c in range(2)
                ]  # fmt: skip
                rows.append(_sum(k, product.w, here))
            for at, vector in enumerate(interleave(k, rows)):
                k.store(out + (a.matrix * i + (c + at) * across), vector)
