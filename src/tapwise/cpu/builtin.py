"""Kernels as builtin functions of CPython, which Python calls without ctypes.

A call through ctypes takes 0.2 us and 0.1 for each argument, and filling a plan's argument array in Python 0.8: more
than small kernels take. Such a function finds the addresses of the arrays that it is given, fills its own copy of the
argument array, lets go of the GIL and runs the kernel. All calls together of a Zen 5 take 1.1 us less.

Sources: Python/C API Reference Manual, PyMethodDef, METH_FASTCALL, PyEval_SaveThread (all in the stable ABI); NumPy
C-API, PyArray_DATA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from llvmlite import ir

from tapwise import settings
from tapwise.cpu import jit, team
from tapwise.cpu.fields import COMMON
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target, target
from tapwise.forks import making

# In the order of Buffers, what the function is given: an array or None each. What follows is ignored.
GIVEN: Final = ("x", "w", "y", "scratch", "bias", "residual")
# Words of a record, which the kernel's argument array follows.
HEAD: Final = ("kernel", "workers", "functions", "none", "save_thread", "restore_thread", "retain", "length")
# Of CPython's C interface.
FASTCALL: Final = 0x0080
POINTER: Final = ir.PointerType()
# What all functions are made with: PyCFunction_NewEx, the method, and the addresses that a record holds.
_maker: Final[list[tuple[Any, Any, tuple[int, ...]]]] = []


def generate(target: Target, *, head: int) -> Kernel:
    """`builtin(record, arguments, count)`, as CPython calls it; arrays' addresses stand `head` bytes behind theirs."""
    k = Kernel(target, "f32")
    team.emit(k)
    nothing = ir.VoidType()
    function = ir.Function(k.module, ir.FunctionType(POINTER, [POINTER, POINTER, INT]), "builtin")
    k.b = ir.IRBuilder(function.append_basic_block("entry"))

    def data(array: Int) -> Int:
        return k.load_int(k.pointer(array + head, "i64"))

    def api(name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [one.type for one in arguments])
        return k.b.call(k.b.inttoptr(words[name].ir, kind.as_pointer()), arguments)

    record = k.pointer(data(Int(k, k.b.ptrtoint(function.args[0], INT))), "i64")
    words = {name: k.load_int(record + place) for place, name in enumerate(HEAD)}
    args = Ptr(k, k.b.alloca(INT, words["length"].ir), "i64")
    with k.loop(0, words["length"]) as word:
        k.store_int(args + word, k.load_int(record + (word + len(HEAD))))
    for place, name in enumerate(GIVEN):
        array = k.load_int(Ptr(k, function.args[1], "i64") + place)
        with k.if_(k.b.icmp_signed("!=", array.ir, words["none"].ir)):
            k.store_int(args + COMMON.index(name), data(array))
    state = api("save_thread", POINTER)
    address = Int(k, k.b.ptrtoint(args.value, INT))
    with k.if_else(words["workers"].eq(1)) as (alone, together):
        with alone:
            task = ir.FunctionType(nothing, [INT, INT])
            k.b.call(k.b.inttoptr(words["kernel"].ir, task.as_pointer()), [address.ir, INT(0)])
        with together:
            k.call("run", words["functions"], words["kernel"], address, words["workers"])
    api("restore_thread", nothing, state)
    none = k.b.inttoptr(words["none"].ir, POINTER)
    api("retain", nothing, none)
    k.b.ret(none)
    return k


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    ]  # fmt: skip


def _make_maker() -> None:
    """Functions hold the method's address alone, so it is one for all, and stays."""
    library = jit.load("builtin", generate, target(settings.cpu_target()), head=object.__basicsize__)
    api = ctypes.pythonapi
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        ("PyCFunction_NewEx", api)
    )
    functions = (api.PyEval_SaveThread, api.PyEval_RestoreThread, api.Py_IncRef)
    addresses = tuple(ctypes.cast(one, ctypes.c_void_p).value or 0 for one in functions)
    _maker.append((make, _Method(b"kernel", library.address("builtin"), FASTCALL, None), (id(None), *addresses)))


def make(kernel: int, workers: int, functions: int, template: Iterable[int]) -> Callable[..., None]:
    """A function of arrays in the order of GIVEN that runs a kernel on so many workers. `functions`: of the team, where
    there are several; `template`: the kernel's argument array without arrays."""
    with making:
        if not _maker:
            _make_maker()
        ((new, method, fixed),) = _maker
    words = [*template]
    record = np.array([kernel, workers, functions, *fixed, len(words), *words], np.int64)
    found: Callable[..., None] = new(ctypes.addressof(method), record, None)
    return found
