"""The one Numba function of the kernels' driver, in a module of its own so that Numba can cache it on disk."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic


@intrinsic
def _call(typing: Any, address: Any, args: Any, worker: Any) -> Any:
    """Call void (*)(int64 args, int64 worker) at an address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        integer = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [integer, integer])
        function = builder.inttoptr(values[0], kind.as_pointer())
        builder.call(function, values[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _for_each_worker(address: int, args: int, workers: int) -> None:
    for worker in prange(workers):
        _call(address, args, worker)


def _compile(cache: bool) -> Any:
    return njit(["void(int64, int64, int64)"], parallel=True, nogil=True, cache=cache)(_for_each_worker)


try:
    for_each_worker = _compile(True)
except (RuntimeError, OSError):  # no folder that Numba could write its cache to
    for_each_worker = _compile(False)
