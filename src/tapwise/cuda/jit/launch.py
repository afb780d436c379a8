"""Load cubins and launch kernels on a stream, with arguments that are packed once.

Every kernel takes one struct of 8-byte words: addresses and whole numbers. A launch copies the words made when it was
planned, fills in the addresses of this call, and asks the driver; nothing else happens, so it may be captured in a CUDA
graph.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import check, count
from tapwise.errors import CompileError, DeviceUnavailable

_INVALID_CONTEXT: Final = 201
_lock = threading.Lock()


class Kernel:
    """A loaded kernel, for every context of its GPU."""

    def __init__(self, source: Source, architecture: str, index: int, shared_bytes: int) -> None:
        from cuda.bindings import driver

        self._code = compiler.cubin(source, architecture)
        with on_gpu(index):
            self._library = check(driver.cuLibraryLoadData(self._code, None, None, 0, None, None, 0))
            kernel = check(driver.cuLibraryGetKernel(self._library, source.entry.encode()))
            if shared_bytes > 48 << 10:
                wanted = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(driver.cuKernelSetAttribute(wanted, shared_bytes, kernel, check(driver.cuDeviceGet(index))))
        self.function = driver.CUfunction(int(kernel))


@contextmanager
def on_gpu(index: int) -> Iterator[None]:
    """The GPU's primary context, the one that other libraries use, is this thread's meanwhile.

    What was current before is so again afterwards; where nothing was, the GPU stays current.
    """
    from cuda import core
    from cuda.bindings import driver

    check(driver.cuInit(0))
    before = check(driver.cuCtxGetCurrent())
    core.Device(index).set_current()
    try:
        yield
    finally:
        if int(before):
            check(driver.cuCtxSetCurrent(before))


@lru_cache(maxsize=512)
def _kernel(source: Source, architecture: str, index: int, shared_bytes: int) -> Kernel:
    with _lock:
        return Kernel(source, architecture, index, shared_bytes)


class Launch:
    """A kernel with its geometry and its packed arguments; `names` are the struct's words in order.

    `fields` gives the words that a plan knows; the others are addresses that a call fills in, 0 where it does not.
    """

    def __init__(
        self, source: Source, names: Sequence[str], fields: Mapping[str, int], grid: tuple[int, int, int],
        block: tuple[int, int, int], shared_bytes: int = 0,
    ) -> None:  # fmt: skip
        unknown = set(fields) - set(names)
        if unknown:
            raise KeyError(f"fields {sorted(unknown)} have no place among {list(names)}")
        if not (0 < grid[0] < 1 << 31 and 0 < grid[1] < 1 << 16 and 0 < grid[2] < 1 << 16):
            raise CompileError(f"{source.name}: a grid of {grid} blocks is not allowed")
        self.source, self.names, self.grid, self.block, self.shared_bytes = (
            source,
            tuple(names),
            grid,
            block,
            shared_bytes,
        )
        self.words = [fields.get(name, 0) for name in names]
        self._pack = ctypes.c_int64 * (len(names) + 1)
        self._template = bytes(self._pack(0, *self.words))
        self._open = {name: index + 1 for index, name in enumerate(names) if name not in fields}
        self._function: Any = None

    def load(self, architecture: str, index: int) -> None:
        """Compile and load. Raises CompileError, DeviceUnavailable."""
        self._function = _kernel(self.source, architecture, index, self.shared_bytes).function
        self._index, self._several = index, count() > 1
        from cuda.bindings import driver

        self._launch = driver.cuLaunchKernel

    def __call__(self, addresses: Mapping[str, int], stream: int) -> None:
        """Enqueue on a stream (a handle; 0 is the default stream)."""
        words = self._pack.from_buffer_copy(self._template)
        for name, place in self._open.items():
            words[place] = addresses.get(name, 0)
        start = ctypes.addressof(words)
        # The first word is the list of parameters: one, the struct behind it.
        words[0] = start + 8
        # The default stream is that of the current GPU, and no other's stream is allowed there.
        if self._several:
            with on_gpu(self._index):
                status = self._enqueue(stream, start)
        else:
            status = self._enqueue(stream, start)
        if status and int(status) == _INVALID_CONTEXT:
            # A thread that has not used the GPU yet has no context.
            with on_gpu(self._index):
                status = self._enqueue(stream, start)
        if status:
            raise DeviceUnavailable(f"{self.source.name}: the CUDA driver refuses the launch: {status.name}")

    def _enqueue(self, stream: int, start: int) -> Any:
        """The driver's status."""
        (status,) = self._launch(self._function, *self.grid, *self.block, self.shared_bytes, stream, start, 0)
        return status
