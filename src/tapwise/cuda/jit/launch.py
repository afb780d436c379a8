"""Load cubins and launch kernels on a stream, with arguments that are packed once.

Every kernel takes one struct of 8-byte words: addresses and whole numbers. A launch copies the words made when it was
planned, fills in the addresses of this call, and asks the driver; nothing else happens, so it may be captured in a CUDA
graph. Tensor maps are words too (tensor_map.py), the first of them an address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import check, count, cuda_core
from tapwise.cuda.jit.tensor_map import WORDS, TensorMap, encode, template
from tapwise.errors import CompileError, DeviceUnavailable
from tapwise.forks import making
from tapwise.integers import ceil_div

_INVALID_CONTEXT: Final = 201
# What the driver says of a file in the cache that is whole, and no kernel of this GPU's.
_NO_CUBIN: Final = (
    "CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_PTX", "CUDA_ERROR_INVALID_SOURCE",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "CUDA_ERROR_NOT_FOUND",
)  # fmt: skip
# Structs with tensor maps are padded to multiples of so many words.
_ALIGNED_WORDS: Final = 8
# Streams for which a dependent launch keeps its configuration.
STREAMS_KEPT: Final = 64


class Kernel:
    """A loaded kernel, for every context of its GPU."""

    def __init__(self, source: Source, architecture: str, index: int, shared_bytes: int) -> None:
        from cuda.bindings import driver

        self._code = compiler.cubin(source, architecture)
        with on_gpu(index):
            found = self._find(driver, source)
            if found[0] and found[0].name in _NO_CUBIN:
                self._code = compiler.cubin(source, architecture, unusable=True)
                found = self._find(driver, source)
            kernel = check(found)
            if shared_bytes > 48 << 10:
                wanted = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(driver.cuKernelSetAttribute(wanted, shared_bytes, kernel, check(driver.cuDeviceGet(index))))
        self.function = driver.CUfunction(int(kernel))

    def _find(self, driver: Any, source: Source) -> tuple[Any, ...]:
        """(status, the kernel in the code): a driver that loads late says only of the kernel that there is none."""
        status, self._library = driver.cuLibraryLoadData(self._code, None, None, 0, None, None, 0)
        return (status,) if status else tuple(driver.cuLibraryGetKernel(self._library, source.entry.encode()))


@contextmanager
def on_gpu(index: int) -> Iterator[None]:
    """The GPU's primary context, the one that other libraries use, is this thread's meanwhile.

    What was current before is so again afterwards; where nothing was, the GPU stays current.
    """
    from cuda.bindings import driver

    core = cuda_core()
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
    with making:
        return Kernel(source, architecture, index, shared_bytes)


class Launch:
    """A kernel with its grid, the threads of a block, and its packed arguments: the words of its struct.

    `fields` gives the words that a plan knows; the others are addresses that a call fills in, 0 where it does not.
    `maps`: tensor maps by the address that they hold; the map of "x" is the words x0 to x15. `dependent`: it may be
    placed before what the stream runs has ended, and waits for that itself. `names_of`: words and maps that hold an
    address of another name.
    """

    def __init__(
        self, source: Source, fields: Mapping[str, int], grid: tuple[int, int, int], threads: int,
        shared_bytes: int = 0, maps: Mapping[str, TensorMap] | None = None, dependent: bool = False,
        names_of: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.source, self.grid, self.block, self.shared_bytes = source, grid, (threads, 1, 1), shared_bytes
        self.dependent, self.names = dependent, compiler.struct_words(source)
        names = self.names
        self.maps, self._names_of = dict(maps or {}), dict(names_of or {})
        unknown = (set(fields) | {f"{name}0" for name in self.maps}) - set(names)
        if unknown:
            raise KeyError(f"fields {sorted(unknown)} have no place among {names}")
        if not (0 < grid[0] < 1 << 31 and 0 < grid[1] < 1 << 16 and 0 < grid[2] < 1 << 16):
            raise CompileError(f"{source.name}: a grid of {grid} blocks is not allowed")
        self.words = [fields.get(name, 0) for name in names]
        self._pack = ctypes.c_int64 * (1 + ceil_div(len(names), _ALIGNED_WORDS) * _ALIGNED_WORDS)
        self._template = bytes(self._pack(0, *self.words))
        mapped = {f"{name}{word}" for name in self.maps for word in range(WORDS)}
        self._open = {name: index + 1 for index, name in enumerate(names) if name not in fields and name not in mapped}
        # (place of a word, name of the address that goes there).
        self._filled = [(place, self._names_of.get(name, name)) for name, place in self._open.items()]
        # Maps that are made anew for each address.
        self._remade: dict[str, int] = {}
        self._function: Any = None

    def load(self, architecture: str, index: int) -> None:
        """Compile and load. Raises CompileError, DeviceUnavailable."""
        kernel = _kernel(self.source, architecture, index, self.shared_bytes)
        self._function = kernel.function
        self._index, self._several = index, count() > 1
        from cuda.bindings import driver

        words = self._pack.from_buffer_copy(self._template)
        for name, spec in self.maps.items():
            place = 1 + self.names.index(f"{name}0")
            known = template(spec)
            if known is None:
                self._remade[name] = place
                continue
            words[place : place + WORDS] = list(known)
            self._filled.append((place, self._names_of.get(name, name)))
        self._template = bytes(words)
        self._launch = driver.cuLaunchKernelEx if self.dependent else driver.cuLaunchKernel
        self._configs: dict[int, Any] = {}

    def __call__(self, addresses: Mapping[str, int], stream: int) -> None:
        """Enqueue on a stream (a handle; 0 is the default stream)."""
        words = self._pack.from_buffer_copy(self._template)
        for place, name in self._filled:
            words[place] = addresses.get(name, 0)
        for name, place in self._remade.items():
            words[place : place + WORDS] = list(encode(self.maps[name], addresses[self._names_of.get(name, name)]))
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
        if not self.dependent:
            (status,) = self._launch(self._function, *self.grid, *self.block, self.shared_bytes, stream, start, 0)
            return status
        config = self._configs.get(stream) or self._config_of(stream)
        (status,) = self._launch(config, self._function, start, 0)
        return status

    def _config_of(self, stream: int) -> Any:
        """How to launch on a stream: kept, as making it takes as long as the launch."""
        from cuda.bindings import driver

        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block
        config.sharedMemBytes, config.hStream = self.shared_bytes, stream
        config.attrs, config.numAttrs = [attribute], 1
        if len(self._configs) >= STREAMS_KEPT:
            self._configs.clear()
        self._configs[stream] = config
        return config
