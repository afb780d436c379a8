"""Kernels on a team of OpenMP's threads, without Numba: the library (libgomp) that the process has already.

That is PyTorch's own where PyTorch was loaded before, so that both have the same threads: others would spin beside them
on the same cores. A table of kernels is run in one parallel region, with a barrier between two of them: a start of the
team through Numba takes 3 to 5 us, and the host's way to it as long.

A thread that was asleep may be woken on the core of the thread that calls, where it waits for its turn while another
core is idle, and be left there for 50 ms (seen on two cores with Linux 6.18). Such a thread leaves that core by itself.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from llvmlite import ir

from tapwise import settings
from tapwise.cpu import jit
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target, target

NAME: Final = "libgomp.so.1"
FUNCTIONS: Final = (
    "GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads",
    "sched_getcpu", "sched_getaffinity", "sched_setaffinity",
)  # fmt: skip
# How often a thread that waits looks before it sleeps: some 50 us. libgomp's own 300,000 are 15 ms, for which a thread
# that waits keeps another of the team from its core, where a third one has the other core: OpenBLAS's spin for 25 ms
# and more after each product of NumPy. A convolution of 0.15 ms between products takes 1.4 to 12 ms so, and 0.3 to 0.9
# with 1000; without products the same as before (two cores of an Emerald Rapids, three runs).
SPINS: Final = "1000"
SPIN_VARIABLES: Final = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# Words of a table: the address of the functions' addresses, the number of rows, whether arguments begin with a counter
# that is set to 0 for the next time, the core of the thread that calls, then (kernel, arguments, workers).
HEAD: Final = 4
ROW: Final = 3
# Words of 64 cores in a set of cores, and its bytes, as glibc has it.
SET_WORDS: Final = 16
SET_BYTES: Final = 8 * SET_WORDS
_I32: Final = ir.IntType(32)
_PTR: Final = ir.PointerType()


def generate(target: Target) -> Kernel:
    k = Kernel(target, "f32")
    emit(k)
    return k


def emit(k: Kernel) -> None:
    """`enter(table, workers)` calls the kernels of a table one behind the other in one parallel region; `run(functions,
    kernel, args, workers)` makes a table of one."""

    def call(functions: Ptr, name: str, kind: Any, *arguments: Any) -> Any:
        address = k.load_int(functions + FUNCTIONS.index(name))
        return k.b.call(k.b.inttoptr(address.ir, kind.as_pointer()), arguments)

    def number(functions: Ptr, name: str) -> Int:
        return Int(k, k.b.zext(call(functions, name, ir.FunctionType(_I32, [])), INT))

    def cores(functions: Ptr, what: str, words: Ptr) -> Any:
        kind = ir.FunctionType(_I32, [_I32, INT, _PTR])
        return call(functions, f"sched_{what}affinity", kind, _I32(0), INT(SET_BYTES), words.value)

    # To where the system likes, and it may come back.
    with k.function("leave", functions="i64", core=INT, team=INT) as (functions, core, team):
        words, count = Ptr(k, k.b.alloca(INT, SET_WORDS), "i64"), k.var(k.integer(0))
        with k.if_(k.b.icmp_signed("==", cores(functions, "get", words), _I32(0))):
            for word in range(SET_WORDS):
                count.set(count.get() + Int(k, k.b.ctpop(k.load_int(words + word).ir)))
            # Where there are fewer cores than threads, some share one.
            with k.if_(k.both(count.get() >= team, core < 64 * SET_WORDS)):
                word = words + core // 64
                allowed, bit = k.load_int(word), k.b.shl(INT(1), (core % 64).ir)
                k.store_int(word, Int(k, k.b.and_(allowed.ir, k.b.not_(bit))))
                cores(functions, "set", words)
                k.store_int(word, allowed)
                cores(functions, "set", words)

    task = ir.FunctionType(ir.VoidType(), [INT, INT])
    with k.function("region", table="i64") as (table,):
        functions = k.pointer(k.load_int(table), "i64")
        me, team = number(functions, "omp_get_thread_num"), number(functions, "omp_get_num_threads")
        first = k.load_int(table + 3)
        with k.if_(k.both(me > 0, number(functions, "sched_getcpu").eq(first))):
            k.call("leave", functions, first, team)
        rows, resets = k.load_int(table + 1), k.load_int(table + 2)
        with k.loop(0, rows) as row:
            kernel, args, workers = (k.load_int(table + (row * ROW + (HEAD + word))) for word in range(ROW))
            # A team may be smaller than asked for.
            with k.loop(me, workers, team) as worker:
                k.b.call(k.b.inttoptr(kernel.ir, task.as_pointer()), [args.ir, worker.ir])
            # Behind the last row the region ends with a barrier of its own.
            with k.if_(resets + rows - row > 1):
                call(functions, "GOMP_barrier", ir.FunctionType(ir.VoidType(), []))
            with k.if_(me < resets):
                k.store_int(k.pointer(args, "i64"), k.integer(0))

    def enter(table: Ptr, workers: Int) -> None:
        functions = k.pointer(k.load_int(table), "i64")
        k.store_int(table + 3, number(functions, "sched_getcpu"))
        kind = ir.FunctionType(ir.VoidType(), [_PTR, _PTR, _I32, _I32])
        threads = k.b.trunc(workers.ir, _I32)
        region = k.module.get_global("region")
        call(functions, "GOMP_parallel", kind, region, table.value, threads, _I32(0))

    with k.function("enter", public=True, table="i64", workers=INT) as (table, workers):
        enter(table, workers)
    with k.function("run", public=True, functions=INT, kernel=INT, args=INT, workers=INT) as (functions, *rest):
        table = Ptr(k, k.b.alloca(INT, HEAD + ROW), "i64")
        for place, value in enumerate((functions, k.integer(1), k.integer(0), k.integer(0), *rest)):
            k.store_int(table + place, value)
        enter(table, rest[-1])


@contextmanager
def _spinning_shortly() -> Iterator[None]:
    """A libgomp that is loaded here lets its threads sleep early, unless the user's environment says how long."""
    ours = not any(name in os.environ for name in SPIN_VARIABLES)
    if ours:
        os.environ[SPIN_VARIABLES[0]] = SPINS
    try:
        yield
    finally:
        if ours:
            del os.environ[SPIN_VARIABLES[0]]


class Team:
    """Raises OSError where there is no libgomp."""

    def __init__(self) -> None:
        with _spinning_shortly():
            library = ctypes.CDLL(NAME)
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in FUNCTIONS]
        self._functions = np.array(addresses, np.int64)
        self.functions = self._functions.ctypes.data
        kernels = jit.load("team", generate, target(settings.cpu_target()))
        word = ctypes.c_int64
        self._enter = ctypes.CFUNCTYPE(None, word, word)(kernels.address("enter"))
        self._run = ctypes.CFUNCTYPE(None, word, word, word, word)(kernels.address("run"))

    @property
    def run(self) -> Callable[[int, int, int], None]:
        """As driver.run."""
        run, functions = self._run, self._functions.ctypes.data
        return lambda address, args, workers: run(functions, address, args, workers)

    def sequence(self, rows: Sequence[tuple[int, int, int]]) -> Callable[[], None]:
        """What calls kernels one behind the other: (kernel, arguments, workers) of each. Arguments are to stay where
        they are, their counters 0."""
        head = (self._functions.ctypes.data, len(rows), 1, 0)
        table, enter = np.array([*head, *(word for row in rows for word in row)], np.int64), self._enter
        workers = max(workers for _, _, workers in rows)
        return lambda: enter(table.ctypes.data, workers)
