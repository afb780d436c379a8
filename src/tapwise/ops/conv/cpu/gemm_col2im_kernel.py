"""The second kernel of cpu.gemm_col2im: rows of dx, each the sum of the rows of products that lie in it."""

from __future__ import annotations

from typing import Any, Final

from tapwise.cpu.copies import interleave
from tapwise.cpu.epilogue import Epilogue, emit_finish_row
from tapwise.cpu.fields import COMMON, Fields, entry
from tapwise.cpu.simd import Int, Kernel, Ptr, Target

# Tables (i64). row_starts: where the rows of products of each row of dx begin in row_offsets, which says where they lie
# in a plane; tap_starts: of each phase of columns, in tap_offsets, and in `masks` by vector: the places that meet one.
FIELDS: Final = (
    *COMMON, "row_starts", "row_offsets", "tap_starts", "tap_offsets", "masks",
    "planes", "block", "channels", "products", "height", "width", "vectors",
)  # fmt: skip


def generate(
    target: Target, *, dtype: str, storage: str, ways: int, bias: bool, residual: bool, activation: str | None
) -> Kernel:
    """`task`: `block` planes of y; their products, `products` elements a plane, are x. `ways`: the columns' stride."""
    k = Kernel(target, dtype)
    epilogue = Epilogue(k, storage, True, bias, residual, activation)
    emit_finish_row(epilogue)
    with entry(k, FIELDS) as (a, worker):
        sums = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        with a.draws(worker) as number:
            first = number * a.block
            with k.loop(first, (first + a.block).min(a.planes)) as plane, k.loop(0, a.height) as row:
                _emit_row(k, a, ways, a.pointer("x", k.dtype) + plane * a.products, row, sums)
                bias_at = a.pointer("bias", storage) + plane % a.channels
                at = (plane * a.height + row) * a.width
                residual_at, y = (a.pointer(name, storage) + at for name in ("residual", "y"))
                k.call("finish_row", sums, k.integer(1), bias_at, residual_at, y, a.width)
    return k


def _emit_row(k: Kernel, a: Fields, ways: int, products: Ptr, row: Int, sums: Ptr) -> None:
    """A row's sums, phases of columns interleaved."""
    row_starts, row_offsets, tap_starts, tap_offsets, masks = (
        a.pointer(name, "i64") for name in ("row_starts", "row_offsets", "tap_starts", "tap_offsets", "masks")
    )
    begin, end = k.load_int(row_starts + row), k.load_int(row_starts + (row + 1))
    with k.loop(0, a.vectors) as v:
        found: list[Any] = []
        for way in range(ways):
            total = k.var(k.constant(0.0))
            low, high = k.load_int(tap_starts + way), k.load_int(tap_starts + (way + 1))
            with k.loop(begin, end) as line:
                here = products + (k.load_int(row_offsets + line) + v * k.lanes)
                with k.loop(low, high) as tap:
                    mask = k.mask(k.load_int(masks + (tap * a.vectors + v)), k.lanes)
                    total.set(k.add(total.get(), k.load(here + k.load_int(tap_offsets + tap), mask=mask)))
            found.append(total.get())
        for at, vector in enumerate(interleave(k, found)):
            k.store(sums + (v * ways + at) * k.lanes, vector)
