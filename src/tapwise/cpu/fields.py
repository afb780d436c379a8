"""A kernel that a plan launches: its argument array by name, filled by the plan, and the tasks that it draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from tapwise.cpu.simd import INT, Int, Kernel, Ptr

# The first fields of every kernel's argument array; the kernel's own follow.
COMMON: Final = ("counter", "tasks", "workers", "x", "w", "y", "bias", "residual", "scratch", "scratch_step")


# Of kernels that pack filters of any strides: the distances of w's axes, which a call gives; w_g: of groups.
FILTER_STEPS: Final = ("w_g", "w_k", "w_c", "w_r", "w_s")


class Fields:
    """A kernel's argument array by name; all loaded at the function's entry, what is not used costs nothing."""

    def __init__(self, k: Kernel, args: Ptr, names: Sequence[str]) -> None:
        self._k = k
        self._fields = {name: k.load_int(args + index) for index, name in enumerate(names)}
        # The counter that tasks are drawn from is the first of them.
        self.args = self.counter = args

    def __getattr__(self, name: str) -> Int:
        return self._fields[name]

    def draws(self, worker: Int) -> AbstractContextManager[Int]:
        """The body for each task that a worker draws."""
        return self._k.draws(self.counter, self.tasks, worker, self.workers)

    def pointer(self, name: str, dtype: str) -> Ptr:
        return self._k.pointer(self._fields[name], dtype)


@contextmanager
def entry(k: Kernel, names: Sequence[str], name: str = "task") -> Iterator[tuple[Fields, Int]]:
    """Emit a kernel, name(args, worker): its argument array, and the worker's number."""
    with k.function(name, public=True, args="i64", worker=INT) as (args, worker):
        yield Fields(k, args, names), worker


def unravel(number: Int, *sizes: Int) -> list[Int]:
    """The indices of a task in blocks of these sizes, the fastest first, and what is left."""
    indices = []
    for size in sizes:
        indices.append(number % size)
        number = number // size
    return [*indices, number]
