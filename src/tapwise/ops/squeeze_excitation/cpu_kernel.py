"""The kernels of cpu.simd of squeeze-and-excitation: means, an image's products, and the scale.

Between them lie in scratch: means (n, c), what they are squeezed to (n, m), gates (n, c).
"""

from __future__ import annotations

from typing import Any, Final

from tapwise.cpu.activations import activate
from tapwise.cpu.fields import COMMON, Fields, entry
from tapwise.cpu.simd import Int, Kernel, Ptr, Target
from tapwise.cpu.vectors import Fold, fold_row, fold_rows

# Of an image: channels, pixels, squeezed channels, blocks that are tasks; channels and pixels of a block.
FIELDS: Final = (*COMMON, "n", "channels", "pixels", "m", "blocks", "block_c", "block_p")
# Rows of pixels whose sums go side by side.
WAYS: Final = 4


def generate(target: Target, *, dtype: str, storage: str, layout: str, activation: str, gate: str) -> Kernel:
    """`task`: means; `products`; `scale`. A task is a block of an image; products are those of whole images."""
    k = Kernel(target, dtype)
    planes = layout == "nchw"
    _emit_means(k, storage, planes)
    _emit_products(k, storage, activation, gate)
    _emit_scale(k, storage, planes)
    return k


def _block(number: Int, size: Int, whole: Int) -> tuple[Int, Int]:
    """From where to where a block goes."""
    first = (number * size).min(whole)
    return first, (first + size).min(whole)


def _emit_means(k: Kernel, storage: str, planes: bool) -> None:
    with entry(k, FIELDS) as (a, worker), a.draws(worker) as number:
        image = number // a.blocks
        first, end = _block(number % a.blocks, a.block_c, a.channels)
        x = a.pointer("x", storage) + image * a.channels * a.pixels
        means = a.pointer("scratch", k.dtype) + image * a.channels
        count = k.b.sitofp(a.pixels.ir, k.scalar)
        if planes:
            with k.loop(first, end) as channel:
                total = fold_row(k, x + channel * a.pixels, a.pixels, 0.0, lambda value: value, k.add)
                k.store(means + channel, k.div(total, count))
            return

        def body(c: Int, lanes: int) -> None:
            sums = [k.var(k.constant(0.0, lanes)) for _ in range(WAYS)]
            many = a.pixels - a.pixels % WAYS
            here = x + first + c
            with k.loop(0, many, WAYS) as p:
                for way, total in enumerate(sums):
                    total.set(k.add(total.get(), k.load(here + (p + way) * a.channels, lanes)))
            with k.loop(many, a.pixels) as p:
                sums[0].set(k.add(sums[0].get(), k.load(here + p * a.channels, lanes)))
            total = k.add(k.add(sums[0].get(), sums[1].get()), k.add(sums[2].get(), sums[3].get()))
            k.store(means + first + c, k.div(total, k.splat(count, lanes)))

        k.rows(end - first, body)


def _emit_products(k: Kernel, storage: str, activation: str, gate: str) -> None:
    with entry(k, FIELDS, "products") as (a, worker), a.draws(worker) as number, k.if_((number % a.blocks).eq(0)):
        image = number // a.blocks
        reduce, bias = a.pointer("w", k.dtype), a.pointer("bias", storage)
        expand, offsets = reduce + a.m * a.channels, bias + a.m
        means, squeezed, gates = _between(k, a, image)
        with k.loop(0, a.m) as j:

            def term(c: Int, lanes: int, j: Int = j) -> Any:
                return k.mul(k.load(reduce + j * a.channels + c, lanes), k.load(means + c, lanes))

            (total,) = fold_rows(k, a.channels, [Fold(0.0, term, k.add)])
            k.store(squeezed + j, activate(k, activation, k.add(total, k.load(bias + j, 1))))

        def body(c: Int, lanes: int) -> None:
            total = k.var(k.load(offsets + c, lanes))
            with k.loop(0, a.m) as j:
                total.set(
                    k.fma(k.broadcast(squeezed + j, lanes), k.load(expand + j * a.channels + c, lanes), total.get())
                )
            k.store(gates + c, activate(k, gate, total.get()))

        k.rows(a.channels, body)


def _between(k: Kernel, a: Fields, image: Int) -> tuple[Ptr, Ptr, Ptr]:
    """What an image has in scratch."""
    scratch = a.pointer("scratch", k.dtype)
    squeezed = scratch + a.n * a.channels
    return scratch + image * a.channels, squeezed + image * a.m, squeezed + a.n * a.m + image * a.channels


def _emit_scale(k: Kernel, storage: str, planes: bool) -> None:
    with entry(k, FIELDS, "scale") as (a, worker), a.draws(worker) as number:
        image = number // a.blocks
        start = image * a.channels * a.pixels
        x, y = a.pointer("x", storage) + start, a.pointer("y", storage) + start
        *_, gates = _between(k, a, image)
        # Along planes, or along a pixel's channels.
        size, whole, length = (a.block_c, a.channels, a.pixels) if planes else (a.block_p, a.pixels, a.channels)
        first, end = _block(number % a.blocks, size, whole)
        with k.loop(first, end) as row:

            def body(i: Int, lanes: int, row: Int = row) -> None:
                factor = k.broadcast(gates + row, lanes) if planes else k.load(gates + i, lanes)
                k.store(y + row * length + i, k.mul(k.load(x + row * length + i, lanes), factor))

            k.rows(length, body)
