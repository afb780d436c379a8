"""The kernel under construction: its functions, control flow, vectors and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir

from tapwise.cpu.simd import values
from tapwise.cpu.simd.target import Target
from tapwise.cpu.simd.values import BFLOAT, BYTES, I1, I32, INT, INTEGERS, PTR, TYPES, Int, Ptr, Var

# LLVM's types in the names of its intrinsics.
_SHORT: Final = {"half": "f16", "bfloat": "bf16", "i16": "i16", "float": "f32", "double": "f64"}


class Kernel:
    """One module of kernels for a target and an arithmetic dtype."""

    def __init__(self, target: Target, dtype: str) -> None:
        self.target, self.dtype = target, dtype
        self.lanes = target.lanes(dtype)
        self.scalar = TYPES[dtype]
        self.module = ir.Module("tapwise")
        self.module.triple = target.triple
        self.b: Any = None

    # Functions, control flow

    @contextmanager
    def function(
        self, name: str, public: bool = False, spills: bool = False, **parameters: Any
    ) -> Iterator[list[Any]]:  # fmt: skip
        """Emit a function. A parameter is given as INT, or as a dtype string for a pointer to that dtype.

        `spills`: it may have more vectors than registers. Its stack is aligned to vectors: LLVM notices too late to do
        so, and what crosses cache lines takes up to twice as long, in some processes and not in others.
        """
        types = [PTR if isinstance(kind, str) else kind for kind in parameters.values()]
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), types), name)
        function.attributes.add("nounwind")
        if not public:
            function.linkage = "internal"
            function.attributes.add("noinline")
        if spills:
            function.attributes.alignstack = self.target.vector_bytes
        outer = self.b
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        arguments: list[Any] = []
        for argument, (label, kind) in zip(function.args, parameters.items(), strict=True):
            argument.name = label
            arguments.append(Ptr(self, argument, kind) if isinstance(kind, str) else Int(self, argument))
        yield arguments
        self.b.ret_void()
        self.b = outer

    def call(self, name: str, *arguments: Any) -> None:
        self.b.call(self.module.get_global(name), [self._value(argument) for argument in arguments])

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, int | Int):
            return self.integer(argument).ir
        return argument.value if isinstance(argument, Ptr) else argument

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Int]:
        """for i in range(start, stop, step), as a loop of the kernel."""
        start, stop, step = self.integer(start), self.integer(stop), self.integer(step)
        counter = Var(self, Int(self, start.ir))
        head = self.b.append_basic_block("head")
        body = self.b.append_basic_block("body")
        end = self.b.append_basic_block("end")
        self.b.cbranch(start < stop, body, end)
        self.b.position_at_end(body)
        i = counter.get()
        yield i
        self.b.branch(head)
        self.b.position_at_end(head)
        following = counter.get() + step
        counter.set(following)
        self.b.cbranch(following < stop, body, end)
        self.b.position_at_end(end)

    @contextmanager
    def draws(self, counter: Ptr, total: Int, worker: Int, workers: Int) -> Iterator[Int]:
        """The body for tasks that a worker draws, until all `total` are drawn.

        Even workers draw from the first task on and odd ones from the last one back, so that what a worker reads and
        writes is likely in its core's caches from the call before. The counter holds how many were drawn from the
        front, and 2^32 times how many from the back, but for the first task of each worker, which it has undrawn.
        """
        odd = worker % 2
        backwards = odd.eq(1)
        one = self.select(backwards, self.integer(1 << 32), self.integer(1))
        place, before = Var(self, worker // 2), Var(self, worker)
        head = self.b.append_basic_block("draw")
        body = self.b.append_basic_block("drawn")
        end = self.b.append_basic_block("done")
        self.b.branch(head)
        self.b.position_at_end(head)
        number = place.get()
        self.b.cbranch(before.get() < total, body, end)
        self.b.position_at_end(body)
        yield self.select(backwards, total - number - 1, number)
        drawn = Int(self, self.b.atomic_rmw("add", counter.value, one.ir, "monotonic"))
        front, back = drawn % (1 << 32) + (workers + 1) // 2, drawn // (1 << 32) + workers // 2
        place.set(self.select(backwards, back, front))
        before.set(front + back)
        self.b.branch(head)
        self.b.position_at_end(end)

    @contextmanager
    def if_(self, condition: Any) -> Iterator[None]:
        with self.b.if_then(condition):
            yield

    def if_else(self, condition: Any) -> Any:
        """`with k.if_else(c) as (then, otherwise): with then: ...; with otherwise: ...`"""
        return self.b.if_else(condition)

    def fence(self) -> None:
        """Keep LLVM from moving memory accesses across this point."""
        self.b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)

    def opaque(self, value: Int) -> Int:
        """The same number, which LLVM cannot put together with others."""
        return Int(self, self.b.asm(ir.FunctionType(INT, [INT]), "", "=r,0", [value.ir], False))

    # Integers, pointers, variables

    def integer(self, value: Any) -> Int:
        return value if isinstance(value, Int) else Int(self, value)

    def select(self, condition: Any, yes: Any, no: Any) -> Any:
        if isinstance(yes, Ptr):
            return Ptr(self, self.b.select(condition, yes.value, no.value), yes.dtype)
        if isinstance(yes, Int):
            return Int(self, self.b.select(condition, yes.ir, self.integer(no).ir))
        return self.b.select(condition, yes, no)

    def both(self, one: Any, two: Any) -> Any:
        return self.b.and_(one, two)

    def var(self, initial: Any) -> Var:
        return Var(self, initial)

    def load_int(self, pointer: Ptr) -> Int:
        return Int(self, self.b.load(pointer.value, align=8, typ=INT))

    def store_int(self, pointer: Ptr, value: Int) -> None:
        self.b.store(value.ir, pointer.value, align=8)

    def pointer(self, address: Int, dtype: str) -> Ptr:
        """An address held in an integer, as a pointer."""
        return Ptr(self, self.b.inttoptr(address.ir, PTR), dtype)

    def prefetch(self, pointer: Ptr, near: bool = False, write: bool = False) -> None:
        """Ask for a cache line that is used soon, into L2 or, when `near`, into L1; any address is allowed."""
        name = "llvm.prefetch.p0"
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32]), name)
        self.b.call(
            function, [pointer.value, *(values.integer(I32, flag) for flag in (int(write), 3 if near else 2, 1))]
        )

    def prefetch_rows(self, arrays: Sequence[Ptr], at: Int, count: int) -> None:
        """Ask for `count` elements of each array, into L2.

        For columns that come next, of rows that lie far apart: the machine's own prefetcher sees no pattern there.
        """
        for array in arrays:
            size = BYTES[array.dtype]
            for byte in range(0, count * size, 64):
                self.prefetch(array + (at + byte // size))

    # Vectors and scalars of floating point: `lanes` 1 means a scalar

    def vector(self, dtype: str, lanes: int) -> Any:
        return TYPES[dtype] if lanes == 1 else values.vector_of(TYPES[dtype], lanes)

    def load(self, pointer: Ptr, lanes: int | None = None, mask: Any = None) -> Any:
        """`lanes` elements (default: a full vector) from any address, widened to the arithmetic dtype.

        With a mask, the lanes that are off are 0, and their memory is not touched.
        """
        lanes = self.lanes if lanes is None else lanes
        value = self.load_bits(pointer, lanes, mask)
        if pointer.dtype == self.dtype:
            return value
        if pointer.dtype in INTEGERS:
            return self._from_integers(value, pointer.dtype, lanes)
        if pointer.dtype == "bf16":
            return self._from_bf16(value, lanes)
        return self.b.fpext(value, self.vector(self.dtype, lanes))

    def load_bits(self, pointer: Ptr, lanes: int, mask: Any = None) -> Any:
        """The same as they are stored: bfloat16 as integers of 16 bits."""
        kind, align = self.vector(pointer.dtype, lanes), BYTES[pointer.dtype]
        if mask is None:
            return self.b.load(pointer.value, align=align, typ=kind)
        function = self._masked("load", kind, kind, [PTR, I32, mask.type, kind])
        return self.b.call(function, [pointer.value, values.integer(I32, align), mask, ir.Constant(kind, None)])

    def _from_integers(self, value: Any, dtype: str, lanes: int) -> Any:
        """Integers as floating point; narrow ones by way of 32 bits, which machines convert from."""
        kind, unsigned = self.vector(self.dtype, lanes), dtype[0] == "u"
        if INTEGERS[dtype] < 32:
            value = (self.b.zext if unsigned else self.b.sext)(value, self.vector("i32", lanes))
            unsigned = False
        return self.b.uitofp(value, kind) if unsigned else self.b.sitofp(value, kind)

    def _from_bf16(self, value: Any, lanes: int) -> Any:
        """The bits of bfloat16 as float32: its upper half."""
        wide = self.b.zext(value, self.vector("i32", lanes))
        return self.b.bitcast(self.b.shl(wide, self._bits(16, wide)), self.vector("f32", lanes))

    def _to_bf16(self, value: Any, exact: bool) -> Any:
        """float32 rounded to nearest even as bits of bfloat16 (or LLVM's bfloat); NaN stays NaN."""
        lanes, b = self.lanes_of(value), self.b
        if self.target.rounds_bf16 and not exact:
            return b.fptrunc(value, BFLOAT if lanes == 1 else values.vector_of(BFLOAT, lanes))
        bits = b.bitcast(value, self.vector("i32", lanes))
        upper = b.lshr(bits, self._bits(16, bits))
        if not exact:
            even = b.and_(upper, self._bits(1, bits))
            nearest = b.lshr(b.add(bits, b.add(even, self._bits(0x7FFF, bits))), self._bits(16, bits))
            # A NaN whose lower half alone says so.
            quiet = b.or_(upper, self._bits(0x40, bits))
            upper = b.select(b.fcmp_unordered("uno", value, value), quiet, nearest)
        return b.trunc(upper, self.vector("bf16", lanes))

    def _bits(self, number: int, like: Any) -> Any:
        """A 32-bit integer in every lane."""
        lanes = self.lanes_of(like)
        return ir.Constant(like.type, number if lanes == 1 else [number] * lanes)

    def store(self, pointer: Ptr, value: Any, mask: Any = None, exact: bool = False) -> None:
        """Store a vector or scalar to any address, narrowed to the pointer's dtype; with a mask, its lanes that are on.

        `exact`: that dtype holds the value as it is. The instruction of AVX-512 that rounds to bfloat16 makes zeros of
        subnormal numbers. Integers are cut off towards zero and to their low bits; the value must fit 32 bits of
        float32, 64 of float64.
        """
        if pointer.dtype != self.dtype:
            lanes = self.lanes_of(value)
            kind = self.vector(pointer.dtype, lanes)
            if pointer.dtype in INTEGERS:
                whole = "i32" if self.dtype == "f32" else "i64"
                value = self.b.fptosi(value, self.vector(whole, lanes))
                if INTEGERS[pointer.dtype] < INTEGERS[whole]:
                    value = self.b.trunc(value, kind)
            elif pointer.dtype == "bf16":
                value = self._to_bf16(value, exact)
            else:
                value = self.b.fptrunc(value, kind)
        align = BYTES[pointer.dtype]
        if mask is None:
            self.b.store(value, pointer.value, align=align)
            return
        function = self._masked("store", value.type, ir.VoidType(), [value.type, PTR, I32, mask.type])
        self.b.call(function, [value, pointer.value, values.integer(I32, align), mask])

    def _masked(self, name: str, kind: Any, result: Any, types: Sequence[Any]) -> Any:
        """LLVM's masked load or store of vectors of a type."""
        full = f"llvm.masked.{name}.v{kind.count}{_SHORT[str(kind.element)]}.p0"
        function = self.module.globals.get(full)
        return ir.Function(self.module, ir.FunctionType(result, types), full) if function is None else function

    def mask(self, bits: Int, lanes: int) -> Any:
        """Lanes that are on, from the low bits of an integer."""
        return self.b.bitcast(self.b.trunc(bits.ir, ir.IntType(lanes)), values.vector_of(I1, lanes))

    def splat(self, scalar: Any, lanes: int | None = None) -> Any:
        """A scalar in every lane."""
        lanes = self.lanes if lanes is None else lanes
        if lanes == 1:
            return scalar
        nothing = values.undefined(values.vector_of(scalar.type, lanes))
        one = self.b.insert_element(nothing, scalar, values.integer(I32, 0))
        return self.b.shuffle_vector(one, nothing, values.picks((0,) * lanes))

    def broadcast(self, pointer: Ptr, lanes: int | None = None) -> Any:
        """One element from memory in every lane."""
        return self.splat(self.load(pointer, 1), lanes)

    def constant(self, value: float, lanes: int | None = None) -> Any:
        lanes = self.lanes if lanes is None else lanes
        kind = self.vector(self.dtype, lanes)
        return values.filled(kind, value, lanes)

    def kept(self, value: float, lanes: int) -> Any:
        """The same, read from memory by the instruction that uses it: for loops with more constants than registers.

        LLVM cannot see that the memory never changes, so it neither holds the vector in a register nor fills one from
        a scalar, an instruction of its own each time.
        """
        width = min(lanes, self.lanes)
        kind = self.vector(self.dtype, width)
        name = f"kept_{float(value).hex()}_{width}"
        table = self.module.globals.get(name)
        if table is None:
            table = ir.GlobalVariable(self.module, kind, name)
            table.initializer = self.constant(value, width)
            # Seen from outside, so that it counts as mutable, but not replaceable, so that its address is a known one.
            table.linkage = "hidden"
            table.align = 64
        loaded = self.b.load(table, align=64, typ=kind)
        return loaded if width == lanes else self.shuffle(loaded, loaded, [*range(width)] * (lanes // width))

    def lanes_of(self, value: Any) -> int:
        return value.type.count if isinstance(value.type, ir.VectorType) else 1

    def intrinsic(self, name: str, *operands: Any) -> Any:
        """An LLVM intrinsic of one type, e.g. llvm.fma."""
        kind = operands[0].type
        suffix = f"v{kind.count}{_SHORT[str(kind.element)]}" if isinstance(kind, ir.VectorType) else _SHORT[str(kind)]
        full = f"{name}.{suffix}"
        function = self.module.globals.get(full)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(kind, [kind] * len(operands)), full)
        return self.b.call(function, operands)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        return self.intrinsic("llvm.fma", a, b, c)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """What a register tile does with elements a and b and a sum c."""
        return self.fma(a, b, c)

    def add(self, a: Any, b: Any) -> Any:
        return self.b.fadd(a, b)

    def sub(self, a: Any, b: Any) -> Any:
        return self.b.fsub(a, b)

    def mul(self, a: Any, b: Any) -> Any:
        return self.b.fmul(a, b)

    def div(self, a: Any, b: Any) -> Any:
        return self.b.fdiv(a, b)

    def shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Lanes of a followed by b, picked by index."""
        return self.b.shuffle_vector(a, b, values.picks(tuple(lanes)))

    def narrow(self, value: Any, lanes: int) -> Any:
        """The first lanes of a vector."""
        return value if self.lanes_of(value) == lanes else self.shuffle(value, value, range(lanes))

    def gather(self, pointers: Sequence[Ptr]) -> Any:
        """A vector from elements at separate addresses."""
        value = values.undefined(values.vector_of(self.scalar, len(pointers)))
        for lane, pointer in enumerate(pointers):
            value = self.b.insert_element(value, self.load(pointer, 1), values.integer(I32, lane))
        return value

    # Rows

    def widths(self) -> list[int]:
        """Vector widths worth trying on short rows, widest first, ending with the scalar."""
        widths, lanes = [], self.lanes
        while lanes >= min(4, self.lanes) and lanes > 1:
            widths.append(lanes)
            lanes //= 2
        return [*widths, 1]

    def rows(
        self, n: Int, body: Callable[[Int, int], None], widths: Sequence[int] | None = None, together: int = 1
    ) -> None:
        """Call body(i, lanes) over 0 <= i < n in vectors, without reading or writing outside.

        The last vector overlaps the one before it, so body must give the same result when an element is done
        twice. Rows shorter than a vector take the next narrower one. `together`: body takes so many vectors as one
        where there are as many.
        """
        lanes, *narrower = self.widths() if widths is None else widths
        if lanes == 1:
            with self.loop(0, n) as i:
                body(i, 1)
            return
        with self.if_else(n >= lanes) as (then, otherwise):
            with then:
                whole = n - n % (together * lanes) if together > 1 else self.integer(0)
                if together > 1:
                    with self.loop(0, whole, together * lanes) as i:
                        body(i, together * lanes)
                # The last start is n - lanes, whatever the step leaves over.
                with self.loop(whole, n, lanes) as i:
                    body(i.min(n - lanes), lanes)
            with otherwise:
                self.rows(n, body, narrower)
