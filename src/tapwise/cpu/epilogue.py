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

    def finish(self, value: Any, bias: Ptr, residual: Ptr) -> Any:
        k = self.k
        lanes = k.lanes_of(value)
        if self.bias:
            value = k.add(value, k.broadcast(bias, lanes) if self.planar else k.load(bias, lanes))
        if self.residual:
            value = k.add(value, k.load(residual, lanes))
        return activate(k, self.activation, value)

    def store_some(self, value: Any, bias: Ptr, residual: Ptr, y: Ptr, first: int, count: Int) -> None:
        """Store the lanes of a vector whose number, from `first`, lies below `count`, one by one."""
        k = self.k
        for lane in range(k.lanes):
            element = first + lane
            with k.if_(count > element):
                one = k.b.extract_element(value, ir.Constant(I32, lane))
                k.store(y + lane, self.finish(one, bias if self.planar else bias + element, residual + lane))


def emit_finish_row(k: Kernel, storage: str, bias: str | None, residual: bool, activation: str | None) -> None:
    """Emit `finish_row`: sums into y = activation(sums + bias + residual), one contiguous run of outputs.

    finish_row(sums, step, bias, residual, y, count): `sums` are `step` elements apart. bias: "one" value for the run,
    "each" output its own, or None.
    """
    with k.function(
        "finish_row", sums=k.dtype, step=INT, bias_at=storage, residual_at=storage, y=storage, count=INT
    ) as (sums, step, bias_at, residual_at, y, count):

        def finish(value: Any, i: Int, lanes: int) -> None:
            if bias is not None:
                added = k.broadcast(bias_at, lanes) if bias == "one" else k.load(bias_at + i, lanes)
                value = k.add(value, added)
            if residual:
                value = k.add(value, k.load(residual_at + i, lanes))
            k.store(y + i, activate(k, activation, value))

        with k.if_else(step.eq(1)) as (then, otherwise):
            with then:
                k.rows(count, lambda i, lanes: finish(k.load(sums + i, lanes), i, lanes))
            with otherwise, k.loop(0, count) as i:
                finish(k.load(sums + i * step, 1), i, 1)
