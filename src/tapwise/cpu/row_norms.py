"""Layer norm: rows that lie one behind the other, each less its mean and by its deviation, times factors, plus offsets.

For memory that stays where it is, as pieces.py.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from tapwise import settings
from tapwise.cpu import jit
from tapwise.cpu.addresses import address
from tapwise.cpu.device import host
from tapwise.cpu.driver import Launch
from tapwise.cpu.fields import entry
from tapwise.cpu.simd import Int, Kernel, Ptr, Target, target
from tapwise.cpu.vectors import fold_row
from tapwise.integers import ceil_div

FIELDS: Final = ("counter", "tasks", "workers", "x", "y", "factors", "offsets", "rows", "length", "block")
# Elements of a task at least.
TASK: Final = 4096


def generate(target: Target, *, eps: float, factors: bool, offsets: bool) -> Kernel:
    """`task`: a block of rows. A row is read three times, from the cache after the first."""
    k = Kernel(target, "f32")
    with entry(k, FIELDS) as (a, worker), a.draws(worker) as number:
        x, y = a.pointer("x", "f32"), a.pointer("y", "f32")
        one, length = k.constant(1.0, 1), k.b.sitofp(a.length.ir, k.vector("f32", 1))
        with k.loop(number * a.block, ((number + 1) * a.block).min(a.rows)) as row:
            here, there = x + row * a.length, y + row * a.length
            total = fold_row(k, here, a.length, 0.0, lambda value: value, k.add)
            mean = k.div(total, length)

            def square(value: Any, mean: Any = mean) -> Any:
                apart = k.sub(value, k.splat(mean, k.lanes_of(value)))
                return k.mul(apart, apart)

            squares = k.div(fold_row(k, here, a.length, 0.0, square, k.add), length)
            scale = k.div(one, k.intrinsic("llvm.sqrt", k.add(squares, k.constant(eps, 1))))

            def body(i: Int, lanes: int, here: Ptr = here, there: Ptr = there, each: Any = (mean, scale)) -> None:
                middle, factor = (k.splat(one, lanes) for one in each)
                value = k.mul(k.sub(k.load(here + i, lanes), middle), factor)
                value = k.mul(value, k.load(a.pointer("factors", "f32") + i, lanes)) if factors else value
                value = k.add(value, k.load(a.pointer("offsets", "f32") + i, lanes)) if offsets else value
                k.store(there + i, value)

            k.rows(a.length, body)
    return k


class RowNorms:
    """y of x (rows, length), float32, both C-contiguous; factors and offsets (length,) or None."""

    def __init__(
        self, x: np.ndarray, y: np.ndarray, factors: np.ndarray | None, offsets: np.ndarray | None, eps: float
    ) -> None:
        # Addresses are in the arguments.
        self._kept = x, y, factors, offsets
        rows, length = x.shape
        threads = host().threads
        block = max(1, TASK // length, rows // (8 * threads))
        self._tasks = ceil_div(rows, block)
        self._workers = min(threads, self._tasks)
        places = [0 if one is None else address(one) for one in self._kept]
        self._values = 0, self._tasks, self._workers, *places, rows, length, block
        words = {"eps": eps, "factors": factors is not None, "offsets": offsets is not None}
        self._task = jit.load("row_norms", generate, target(settings.cpu_target()), **words).address("task")

    def launches(self) -> list[Launch]:
        """For driver.sequence."""
        return [Launch(self._task, (ctypes.c_int64 * len(FIELDS))(*self._values), self._workers)]
