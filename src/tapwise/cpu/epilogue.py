"""What is fused behind the sums: bias, residual and activation, on their way to y."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from llvmlite import ir

from tapwise.cpu.activations import activate, activate_all, together
from tapwise.cpu.simd import I32, INT, Int, Kernel, Ptr


class Sums(NamedTuple):
    """A vector of sums: where its bias and residual begin, and its place in y. Lanes that a mask has off are neither
    read nor written."""

    value: Any
    bias: Ptr
    residual: Ptr
    y: Ptr
    mask: Any = None


@dataclass
class Epilogue:
    """What happens to a vector of sums on its way to y."""

    k: Kernel
    storage: str
    planar: bool
    bias: bool
    residual: bool
    activation: str | None

    @property
    def plain(self) -> bool:
        """Whether y is the sum itself."""
        return not (self.bias or self.residual or self.activation)

    @property
    def together(self) -> int:
        """Vectors that are best finished at once."""
        return together(self.activation)

    def finish(self, value: Any, bias: Ptr, residual: Ptr) -> Any:
        """What is stored for one vector, or one scalar, of sums."""
        return activate(self.k, self.activation, self._added(value, bias, residual))

    def store(self, all_sums: Iterable[Sums]) -> None:
        """Finish vectors of sums and store them, in their order."""
        k = self.k
        for _, alike in groupby(all_sums, lambda sums: k.lanes_of(sums.value)):
            left = list(alike)
            while left:
                count = min(self.together, 1 << (len(left).bit_length() - 1))
                some, left = left[:count], left[count:]
                values = activate_all(
                    k,
                    self.activation,
                    [self._added(value, bias, residual, mask) for value, bias, residual, _, mask in some],
                )
                for sums, value in zip(some, values, strict=True):
                    k.store(sums.y, value, sums.mask)

    def _added(self, value: Any, bias: Ptr, residual: Ptr, mask: Any = None) -> Any:
        """With bias and residual. With a mask, the residual's lanes that are off are not read."""
        k = self.k
        lanes = k.lanes_of(value)
        if self.bias:
            value = k.add(value, k.broadcast(bias, lanes) if self.planar else k.load(bias, lanes))
        if self.residual:
            value = k.add(value, k.load(residual, lanes, mask))
        return value

    def store_some(self, value: Any, bias: Ptr, residual: Ptr, y: Ptr, first: int, count: Int) -> None:
        """Store the lanes of a vector whose number, from `first`, lies below `count`, one by one."""
        k = self.k
        for lane in range(k.lanes):
            element = first + lane
            with k.if_(count > element):
                one = k.b.extract_element(value, ir.Constant(I32, lane))
                k.store(y + lane, self.finish(one, bias if self.planar else bias + element, residual + lane))


def emit_finish_row(epilogue: Epilogue) -> None:
    """Emit `finish_row`: sums into y = activation(sums + bias + residual), one contiguous run of outputs.

    finish_row(sums, step, bias, residual, y, count): `sums` are `step` elements apart. The bias is one value for the
    run where the epilogue is planar, else each output has its own.
    """
    k, storage = epilogue.k, epilogue.storage
    with k.function(
        "finish_row", sums=k.dtype, step=INT, bias_at=storage, residual_at=storage, y=storage, count=INT
    ) as (sums, step, bias_at, residual_at, y, count):

        def finish(value: Any, i: Int) -> None:
            bias = bias_at if epilogue.planar else bias_at + i
            k.store(y + i, epilogue.finish(value, bias, residual_at + i))

        with k.if_else(step.eq(1)) as (then, otherwise):
            with then:
                k.rows(count, lambda i, lanes: finish(k.load(sums + i, lanes), i), together=epilogue.together)
            with otherwise, k.loop(0, count) as i:
                finish(k.load(sums + i * step, 1), i)


def emit_finish_pixels(epilogue: Epilogue) -> None:
    """Emit `finish_pixels`: finish_row for `pixels` pixels, channels last; which vectors, is decided once for all.

    finish_pixels(sums, step, bias, residual, y, distance, pixels, count): `count` sums of each pixel lie side by side,
    those of pixels `step` elements apart, results `distance`.
    """
    k, storage = epilogue.k, epilogue.storage
    with k.function(
        "finish_pixels", sums=k.dtype, step=INT, bias=storage, residual=storage, y=storage, distance=INT, pixels=INT,
        count=INT,
    ) as (sums, step, bias, residual, y, distance, pixels, count):  # fmt: skip

        def finish(pixel: Int, places: list[Int], lanes: int) -> None:
            out, here = pixel * distance, sums + pixel * step
            epilogue.store(
                Sums(k.load(here + at, lanes), bias + at, residual + (out + at), y + (out + at)) for at in places
            )

        def two(lanes: int) -> None:
            with k.loop(0, pixels) as pixel:
                finish(pixel, [k.integer(0), count - lanes], lanes)

        def many() -> None:
            width = epilogue.together * k.lanes
            whole = count - count % width
            with k.loop(0, pixels) as pixel:
                if width > k.lanes:
                    with k.loop(0, whole, width) as at:
                        finish(pixel, [at + first for first in range(0, width, k.lanes)], k.lanes)
                with k.loop(whole if width > k.lanes else 0, count, k.lanes) as at:
                    finish(pixel, [at.min(count - k.lanes)], k.lanes)

        def few() -> None:
            with k.loop(0, pixels) as pixel:
                out = pixel * distance
                k.call("finish_row", sums + pixel * step, 1, bias, residual + out, y + out, count)

        half = k.lanes // 2
        with k.if_else(count >= k.lanes) as (wide, narrow):
            with wide, k.if_else(k.both(count > k.lanes, count <= 2 * k.lanes)) as (pair, other):
                with pair:
                    two(k.lanes)
                with other:
                    many()
            with narrow, k.if_else(count >= half) as (halves, thin):
                with halves:
                    two(half)
                with thin:
                    few()
