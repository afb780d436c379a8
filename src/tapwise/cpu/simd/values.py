"""What a kernel computes with besides vectors: dtypes, integers, pointers and variables. `k` is their Kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

from llvmlite import ir

I1: Final = ir.IntType(1)
I32: Final = ir.IntType(32)
INT: Final = ir.IntType(64)
PTR: Final = ir.PointerType()
INTEGERS: Final = {f"{sign}{bits}": bits for bits in (8, 16, 32, 64) for sign in "iu"}
TYPES: Final = {
    "f16": ir.HalfType(),
    # The bits: what is done with them is arithmetic of integers, but for one instruction that rounds to BFLOAT.
    "bf16": ir.IntType(16),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
    **{name: ir.IntType(bits) for name, bits in INTEGERS.items()},
}
BYTES: Final = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, **{name: bits // 8 for name, bits in INTEGERS.items()}}


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT: Final = _BFloat()


# Types and constants have a text that is made once: kernels have thousands of them.
@cache
def vector_of(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


@cache
def integer(kind: Any, value: int) -> Any:
    return ir.Constant(kind, value)


@cache
def _filled(kind: Any, value: str, lanes: int) -> Any:
    number = float(value)
    return ir.Constant(kind, number if lanes == 1 else [number] * lanes)


def filled(kind: Any, value: float, lanes: int) -> Any:
    """A floating-point number in every lane. Kept by its text: 0.0 equals -0.0."""
    return _filled(kind, repr(float(value)), lanes)


@cache
def picks(lanes: tuple[int, ...]) -> Any:
    """The constant operand of a shuffle."""
    return ir.Constant(vector_of(I32, len(lanes)), list(lanes))


@cache
def undefined(kind: Any) -> Any:
    return ir.Constant(kind, ir.Undefined)


class Int:
    """A 64-bit integer of the kernel, or a Python int known while generating."""

    def __init__(self, k: Any, value: Any) -> None:
        self.k, self.value = k, value

    @property
    def ir(self) -> Any:
        return integer(INT, self.value) if isinstance(self.value, int) else self.value

    def _binary(self, other: Any, fold: Callable[[int, int], int], emit: str) -> Int:
        other = self.k.integer(other)
        if isinstance(self.value, int) and isinstance(other.value, int):
            return Int(self.k, fold(self.value, other.value))
        return Int(self.k, getattr(self.k.b, emit)(self.ir, other.ir))

    def __add__(self, other: Any) -> Int:
        return self._binary(other, lambda a, b: a + b, "add")

    def __sub__(self, other: Any) -> Int:
        return self._binary(other, lambda a, b: a - b, "sub")

    def __rsub__(self, other: Any) -> Int:
        return self.k.integer(other) - self

    def __mul__(self, other: Any) -> Int:
        return self._binary(other, lambda a, b: a * b, "mul")

    # Operands of // and % are never negative in the kernels, so the cheaper unsigned forms serve.
    def __floordiv__(self, other: Any) -> Int:
        return self._binary(other, lambda a, b: a // b, "udiv")

    def __mod__(self, other: Any) -> Int:
        return self._binary(other, lambda a, b: a % b, "urem")

    __radd__ = __add__
    __rmul__ = __mul__

    def _compare(self, operator: str, other: Any) -> Any:
        return self.k.b.icmp_signed(operator, self.ir, self.k.integer(other).ir)

    def __lt__(self, other: Any) -> Any:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Any:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(">=", other)

    def eq(self, other: Any) -> Any:
        return self._compare("==", other)

    def min(self, other: Any) -> Int:
        return Int(self.k, self.k.b.select(self < other, self.ir, self.k.integer(other).ir))

    def max(self, other: Any) -> Int:
        return Int(self.k, self.k.b.select(self > other, self.ir, self.k.integer(other).ir))


class Ptr:
    """A pointer to elements of one dtype; `p + i` moves by elements."""

    def __init__(self, k: Any, value: Any, dtype: str) -> None:
        self.k, self.value, self.dtype = k, value, dtype

    @property
    def type(self) -> Any:
        return TYPES[self.dtype]

    def __add__(self, offset: Any) -> Ptr:
        index = self.k.integer(offset)
        return Ptr(self.k, self.k.b.gep(self.value, [index.ir], source_etype=self.type), self.dtype)

    def to(self, dtype: str) -> Ptr:
        return Ptr(self.k, self.value, dtype)


class Var:
    """A mutable value of the kernel; lives in registers once LLVM has promoted it."""

    def __init__(self, k: Any, initial: Any) -> None:
        self.k = k
        self.wrap = type(initial) if isinstance(initial, Int) else None
        value = initial.ir if isinstance(initial, Int) else initial
        self.type = value.type
        with k.b.goto_entry_block():
            self.slot = k.b.alloca(self.type)
        k.b.store(value, self.slot)

    def get(self) -> Any:
        value = self.k.b.load(self.slot, typ=self.type)
        return Int(self.k, value) if self.wrap else value

    def set(self, value: Any) -> None:
        self.k.b.store(value.ir if isinstance(value, Int) else value, self.slot)
