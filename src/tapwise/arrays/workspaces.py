"""Scratch memory for the length of a call; what was used before is used again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np

from tapwise.arrays import device
from tapwise.arrays.device import DeviceArray
from tapwise.arrays.host import ALIGNMENT

_LEAST: Final = 1 << 12
_NONE: Final = nullcontext(None)

_pools: dict[tuple[int, np.dtype], Pool] = {}


class Pool:
    """Buffers of one size that no call uses.

    A call takes one and gives it back when it is done, so calls at the same time never share one, and pages
    are touched once. Pop and append are atomic, so there is no lock.
    """

    __slots__ = ("free", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.free: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        try:
            return self.free.pop()
        except IndexError:
            return aligned(self.size_bytes)


class Lease:
    """`with Lease(pool) as memory`: a buffer of the pool, which goes back at the end."""

    __slots__ = ("_memory", "_pool")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __enter__(self) -> np.ndarray:
        self._memory = self._pool.take()
        return self._memory

    def __exit__(self, *error: object) -> None:
        self._pool.free.append(self._memory)


def pool(size_bytes: int, dtype: np.dtype) -> Pool:
    """The pool whose buffers hold so many bytes of kernels that compute with such elements: whole vectors are computed
    where part of them is somebody's numbers, and whole numbers, read as such, are so small that they take 90 times as
    long.

    Sizes are powers of two: all that is kept stays below twice the largest workspace for each call at the same time.
    """
    size = max(_LEAST, 1 << (size_bytes - 1).bit_length())
    # Of two threads that come first at once, both get the same one.
    return _pools.get((size, dtype)) or _pools.setdefault((size, dtype), Pool(size))


def workspace(size_bytes: int, beside: Any) -> AbstractContextManager[Any]:
    """`with workspace(size, x) as memory`: where x lies, None for no bytes. Its contents have no meaning."""
    if not size_bytes:
        return _NONE
    if isinstance(beside, DeviceArray):
        return nullcontext(scratch(size_bytes, beside))
    return Lease(pool(size_bytes, beside.dtype))


def scratch(size_bytes: int, beside: Any) -> Any:
    """New scratch memory where the array lies, to be kept; None for no bytes."""
    if not size_bytes:
        return None
    if isinstance(beside, DeviceArray):
        return device.empty((size_bytes,), np.dtype(np.uint8), beside)
    return aligned(size_bytes)


def aligned(size_bytes: int) -> np.ndarray:
    """New uint8 memory that starts on a cache line, zeros: what others left there might be numbers as small."""
    storage = np.zeros(size_bytes + ALIGNMENT, np.uint8)
    start = -storage.ctypes.data % ALIGNMENT
    return storage[start : start + size_bytes]
