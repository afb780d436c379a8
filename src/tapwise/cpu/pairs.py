"""Products of pairs: AVX-512's vdpbf16ps, and Arm's bfdot, add two products of bfloat16 to each float32.

An element of 32 bits holds two bfloat16, the first in its lower half: of two channels, or of neighbouring columns. Such
pairs are packed, moved and broadcast like float32, whose type they have: only the multiply-add of a register tile knows
what they are. It rounds after each of the two sums (Arm's to odd), and takes and gives zeros for subnormal numbers.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from tapwise.cpu.simd import I32, Int, Kernel, Ptr
from tapwise.cpu.simd.values import BFLOAT

_AVX512: Final = "llvm.x86.avx512bf16.dpbf16ps"
_ARM: Final = "llvm.aarch64.neon.bfdot.v4f32.v8bf16"


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

    def neighbours(self, pointer: Ptr, lanes: int, mask: Any, step: int) -> Any:
        """Pairs of elements side by side in memory, of lane l those from l * `step` on; step 1 or 2.

        The mask is of the 2 * `lanes` elements from the pointer on: those that are off are 0, and not touched.
        """
        loaded = self.load_bits(pointer, 2 * lanes, mask)
        if step == 1:
            loaded = self.shuffle(loaded, loaded, [lane // 2 + lane % 2 for lane in range(2 * lanes)])
        return self.b.bitcast(loaded, self.vector("f32", lanes))

    def lower_halves(self, pointer: Ptr, lanes: int, mask: Any, step: int) -> Any:
        """Pairs of an element and a zero, of lane l that at l * `step`; step 1 or 2.

        The mask is of `step` * `lanes` elements, of those in between off.
        """
        loaded = self.load_bits(pointer, step * lanes, mask)
        if step == 1:
            loaded = self.b.zext(loaded, self.vector("i32", lanes))
        return self.b.bitcast(loaded, self.vector("f32", lanes))

    def lower_half(self, pointer: Ptr) -> Any:
        """A pair of one element and a zero."""
        return self.b.bitcast(self.b.zext(self.load_bits(pointer, 1), I32), self.scalar)

    def paired(self, lower: Any, upper: Any) -> Any:
        """Pairs of two of lower_halves, either of which may be None for zeros."""
        if upper is None:
            return lower
        bits = self.b.bitcast(upper, self.vector("i32", self.lanes_of(upper)))
        bits = self.b.shl(bits, self._bits(16, bits))
        if lower is not None:
            bits = self.b.or_(bits, self.b.bitcast(lower, bits.type))
        return self.b.bitcast(bits, upper.type)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """c and the two products of each lane's pairs; vectors of 128 bits or more."""
        lanes = self.lanes_of(c)
        pairs, name = ir.VectorType(BFLOAT, 2 * lanes), _ARM if self.target.arm else f"{_AVX512}.{32 * lanes}"
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(c.type, [c.type, pairs, pairs]), name)
        return self.b.call(function, [c, self.b.bitcast(a, pairs), self.b.bitcast(b, pairs)])


def pair_of_planes(k: PairKernel, first: Ptr, plane: Int, whole: Any) -> PairPtr:
    """A channel's plane and the next one's; zeros for that where there is none, `whole` being false."""
    second = k.select(whole, plane, k.integer(0))
    return PairPtr(first, first + second, k.b.sext(whole, I32))
