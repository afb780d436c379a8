"""The argument array of a kernel, by name: filled by its plan, read inside the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tapwise.cpu.simd import Int, Kernel, Ptr

# The first fields of every kernel's argument array; the kernel's own follow.
COMMON: Final = ("counter", "tasks", "workers", "x", "w", "y", "bias", "residual", "scratch", "scratch_step")


class Fields:
    """A kernel's argument array by name; all loaded at the function's entry, what is not used costs nothing."""

    def __init__(self, k: Kernel, args: Ptr, names: Sequence[str]) -> None:
        self._k = k
        self._fields = {name: k.load_int(args + index) for index, name in enumerate(names)}
        self.counter = args

    def __getattr__(self, name: str) -> Int:
        return self._fields[name]

    def pointer(self, name: str, dtype: str) -> Ptr:
        return self._k.pointer(self._fields[name], dtype)
