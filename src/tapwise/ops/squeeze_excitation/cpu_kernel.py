"""The kernels of cpu.simd of squeeze-and-excitation: means, both products, and the scale.

Between them lie in scratch: means (n, c), what they are squeezed to (n, m), gates (n, c).
"""

from __future__ import annotations

from typing import Any, Final

from tapwise.cpu.activations import activate
from tapwise.cpu.fields import COMMON, Fields, entry
from tapwise.cpu.simd import Int, Kernel, Ptr, Target
from tapwise.cpu.vectors import Fold, fold_row, fold_rows

# Of an image: channels, pixels, squeezed channels, blocks that are tasks; channels, pixels and squeezed channels of a
# block.
FIELDS: Final = (*COMMON, "n", "channels", "pixels", "m", "blocks", "block_c", "block_p", "block_m")
# Rows of pixels whose sums go side by side.
WAYS: Final = 4


def generate(target: Target, *, dtype: str, storage: str, layout: str, activation: str, gate: str) -> Kernel:
    """`task`: means; `reduce`; `expand`; `scale`, which in NCHW expands its own channels. A task is a block of an
    image."""
    k = Kernel(target, dtype)
    planes = layout == "nchw"
    _emit_means(k, storage, planes)
    _emit_reduce(k, storage, activation)
    if not planes:
        with entry(k, FIELDS, "expand") as (a, worker), a.draws(worker) as number:
            _expand(k, a, storage, gate, number // a.blocks, *_block(number % a.blocks, a.block_c, a.channels))
    _emit_scale(k, storage, gate, planes)
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


def _emit_reduce(k: Kernel, storage: str, activation: str) -> None:
    with entry(k, FIELDS, "reduce") as (a, worker), a.draws(worker) as number:
        image = number // a.blocks
        reduce, bias = a.pointer("w", k.dtype), a.pointer("bias", storage)
        means, squeezed, _ = _between(k, a, image)
        with k.loop(*_block(number % a.blocks, a.block_m, a.m)) as j:

            def term(c: Int, lanes: int, j: Int = j) -> Any:
                return k.mul(k.load(reduce + j * a.channels + c, lanes), k.load(means + c, lanes))

            (total,) = fold_rows(k, a.channels, [Fold(0.0, term, k.add)])
            k.store(squeezed + j, activate(k, activation, k.add(total, k.load(bias + j, 1))))


def _expand(k: Kernel, a: Fields, storage: str, gate: str, image: Int, first: Int, end: Int) -> None:
    """The gates of an image's channels from `first` to `end`."""
    expand, offsets = a.pointer("w", k.dtype) + a.m * a.channels, a.pointer("bias", storage) + a.m
    _, squeezed, gates = _between(k, a, image)

    def body(i: Int, lanes: int) -> None:
        total = k.var(k.load(offsets + first + i, lanes))
        with k.loop(0, a.m) as j:
            weight = k.load(expand + j * a.channels + first + i, lanes)
            total.set(k.fma(k.broadcast(squeezed + j, lanes), weight, total.get()))
        k.store(gates + first + i, activate(k, gate, total.get()))

    k.rows(end - first, body)


def _between(k: Kernel, a: Fields, image: Int) -> tuple[Ptr, Ptr, Ptr]:
    """What an image has in scratch."""
    scratch = a.pointer("scratch", k.dtype)
    squeezed = scratch + a.n * a.channels
    return scratch + image * a.channels, squeezed + image * a.m, squeezed + a.n * a.m + image * a.channels


def _emit_scale(k: Kernel, storage: str, gate: str, planes: bool) -> None:
    with entry(k, FIELDS, "scale") as (a, worker), a.draws(worker) as number:
        image = number // a.blocks
        start = image * a.channels * a.pixels
        x, y = a.pointer("x", storage) + start, a.pointer("y", storage) + start
        *_, gates = _between(k, a, image)
        # Along planes, or along a pixel's channels.
        size, whole, length = (a.block_c, a.channels, a.pixels) if planes else (a.block_p, a.pixels, a.channels)
        first, end = _block(number % a.blocks, size, whole)
        if planes:
            _expand(k, a, storage, gate, image, first, end)
        with k.loop(first, end) as row:

            def body(i: Int, lanes: int, row: Int = row) -> None:
                factor = k.broadcast(gates + row, lanes) if planes else k.load(gates + i, lanes)
                k.store(y + row * length + i, k.mul(k.load(x + row * length + i, lanes), factor))

            k.rows(length, body)
