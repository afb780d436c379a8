"""Products of pairs: AVX-512's vdpbf16ps adds two products of bfloat16 to each float32.

An element of 32 bits holds the bfloat16 of two channels, the first in its lower half. Such pairs are packed, moved and
broadcast like float32, whose type they have: only the multiply-add of a register tile knows what they are. It rounds
after each of the two sums, and takes and gives zeros for subnormal numbers.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from tapwise.cpu.simd import I32, Int, Kernel, Ptr
from tapwise.cpu.simd.values import BFLOAT

_INSTRUCTION: Final = "llvm.x86.avx512bf16.dpbf16ps.512"


class PairPtr(Ptr):
    """A pointer to the lower halves of pairs, and one to the `upper` ones; `upper_bits` 0: zeros instead of those."""

    def __init__(self, lower: Ptr, upper: Ptr, upper_bits: Any) -> None:
        super().__init__(lower.k, lower.value, lower.dtype)
        self.upper, self.upper_bits = upper, upper_bits

    def __add__(self, offset: Any) -> PairPtr:
        return PairPtr(super().__add__(offset), self.upper + offset, self.upper_bits)


class PairKernel(Kernel):
    """A float32 kernel whose register tiles multiply pairs."""

    def load(self, pointer: Ptr, lanes: int | None = None, mask: Any = None) -> Any:
        """Of a PairPtr pairs put together from both halves."""
        lower = super().load(pointer, lanes, mask)
        if not isinstance(pointer, PairPtr):
            return lower
        lanes = self.lanes if lanes is None else lanes
        upper = super().load(pointer.upper, lanes, mask)
        lower, upper = (self.b.bitcast(half, self.vector("i32", lanes)) for half in (lower, upper))
        # Widened, each lies in the upper half.
        lower = self.b.lshr(lower, self._bits(16, lower))
        both = self.b.or_(lower, self.b.and_(upper, self.splat(pointer.upper_bits, lanes)))
        return self.b.bitcast(both, self.vector("f32", lanes))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """c and the two products of each lane's pairs."""
        pairs = ir.VectorType(BFLOAT, 2 * self.lanes)
        function = self.module.globals.get(_INSTRUCTION)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(c.type, [c.type, pairs, pairs]), _INSTRUCTION)
        return self.b.call(function, [c, self.b.bitcast(a, pairs), self.b.bitcast(b, pairs)])


def pair_of_planes(k: PairKernel, first: Ptr, plane: Int, whole: Any) -> PairPtr:
    """A channel's plane and the next one's; zeros for that where there is none, `whole` being false."""
    second = k.select(whole, plane, k.integer(0))
    return PairPtr(first, first + second, k.b.sext(whole, I32))
