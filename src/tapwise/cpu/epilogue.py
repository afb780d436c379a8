"""What is fused behind the sums: bias, residual and activation, on their way to y."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from tapwise.cpu.activations import activate
from tapwise.cpu.simd import I32, INT, Int, Kernel, Ptr


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

    def finish(self, value: Any, bias: Ptr, residual: Ptr, mask: Any = None) -> Any:
        """With a mask, the residual's lanes that are off are not read."""
        k = self.k
        lanes = k.lanes_of(value)
        if self.bias:
            value = k.add(value, k.broadcast(bias, lanes) if self.planar else k.load(bias, lanes))
        if self.residual:
            value = k.add(value, k.load(residual, lanes, mask))
        return activate(k, self.activation, value)

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
                k.rows(count, lambda i, lanes: finish(k.load(sums + i, lanes), i))
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

        def finish(pixel: Int, at: Int, lanes: int) -> None:
            out = pixel * distance + at
            value = k.load(sums + pixel * step + at, lanes)
            k.store(y + out, epilogue.finish(value, bias + at, residual + out))

        def two(lanes: int) -> None:
            with k.loop(0, pixels) as pixel:
                for at in (k.integer(0), count - lanes):
                    finish(pixel, at, lanes)

        def many() -> None:
            with k.loop(0, pixels) as pixel, k.loop(0, count, k.lanes) as at:
                finish(pixel, at.min(count - k.lanes), k.lanes)

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
