"""Load cubins and launch kernels on a stream, with arguments that are packed once.

Every kernel takes one struct of 8-byte words: addresses and whole numbers. A launch keeps copies of the words made when
it was planned, each with all else that the driver wants behind one address; a call takes one, fills in its addresses
and asks the driver. Nothing else happens, so it may be captured in a CUDA graph. Tensor maps are words too
(tensor_map.py), the first of them an address.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from math import prod
from typing import Any, ClassVar, Final

from tapwise import capture
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit import occupancy
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import check, count, cuda_core, gpu
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
# Per cent of what may be shared memory.
_ALL_OF_IT: Final = 100
_DEPENDENT: Final = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
# The driver's version that the entry point is of.
_DRIVER: Final = 12000


class _Head(ctypes.Structure):
    """CUlaunchConfig, its one CUlaunchAttribute, and the list of parameters: one, the struct behind the head."""

    _fields_: ClassVar = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_uint64), ("attributes", ctypes.c_uint64), ("attribute_count", ctypes.c_uint64),
        ("attribute", ctypes.c_uint64), ("value", ctypes.c_uint64 * 8), ("parameters", ctypes.c_uint64),
    ]  # fmt: skip


# The first word behind the head.
FIRST: Final = ctypes.sizeof(_Head) // 8
# Words of a launch with its head, and what enqueues them: the driver's status.
Arguments = tuple[Any, Callable[[], int]]


@cache
def _entry() -> Any:
    """cuLaunchKernelEx as a foreign function: it takes arguments that were made before."""
    from cuda.bindings import driver

    address = check(driver.cuGetProcAddress(b"cuLaunchKernelEx", _DRIVER, 0)[:2])
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(int(address))


def has_dependent_launches(architecture: str) -> bool:
    """Whether a kernel can be placed while the launch before it runs (compute capability 9.0 and newer)."""
    return int(architecture.removeprefix("sm_").rstrip("af")) >= 90


class Kernel:
    """A loaded kernel, for every context of its GPU. `most_shared`: wherever it runs, shared memory gets all that it
    may have, and L1 what is left; else as much as blocks ask for."""

    def __init__(
        self, source: Source, architecture: str, index: int, shared_bytes: int, most_shared: bool = False
    ) -> None:
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
            if most_shared:
                # A hint, which a driver may refuse.
                hint = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                driver.cuKernelSetAttribute(hint, _ALL_OF_IT, kernel, check(driver.cuDeviceGet(index)))
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
def _kernel(source: Source, architecture: str, index: int, shared_bytes: int, most_shared: bool = False) -> Kernel:
    with making:
        return Kernel(source, architecture, index, shared_bytes, most_shared)


class Launch:
    """A kernel with its grid, the threads of a block, and its packed arguments: the words of its struct.

    `fields` gives the words that a plan knows; the others are addresses that a call fills in, 0 where it does not.
    `maps`: tensor maps by the address that they hold; the map of "x" is the words x0 to x15. `dependent`: its
    kernel waits by itself for what the stream runs, and may be placed before that has ended, where the GPU can do so.
    `names_of`: words and maps that hold an address of another name. `balance`: of a dependent launch, where a
    multiprocessor has at least so many of the blocks to run and room for more, none gets more of them
    (tapwise.cuda.jit.occupancy); 0: as they come. For kernels that bring what they read to shared memory: of L1, little
    is left. `stream_place`: the word of the stream, among all that a call fills in.
    """

    stream_place: ClassVar[int] = _Head.stream.offset // 8

    def __init__(
        self, source: Source, fields: Mapping[str, int], grid: tuple[int, int, int], threads: int,
        shared_bytes: int = 0, maps: Mapping[str, TensorMap] | None = None, dependent: bool = False,
        names_of: Mapping[str, str] | None = None, balance: int = 0,
    ) -> None:  # fmt: skip
        self.source, self.grid, self.block, self.shared_bytes = source, grid, (threads, 1, 1), shared_bytes
        self.dependent, self.balance, self.names = dependent, balance, compiler.struct_words(source)
        names = self.names
        self.maps, self._names_of = dict(maps or {}), dict(names_of or {})
        unknown = (set(fields) | {f"{name}0" for name in self.maps}) - set(names)
        if unknown:
            raise KeyError(f"fields {sorted(unknown)} have no place among {names}")
        if not (0 < grid[0] < 1 << 31 and 0 < grid[1] < 1 << 16 and 0 < grid[2] < 1 << 16):
            raise CompileError(f"{source.name}: a grid of {grid} blocks is not allowed")
        self.words = [fields.get(name, 0) for name in names]
        padding = -len(names) % _ALIGNED_WORDS
        self._template = struct.pack(f"{len(names) + padding}q", *self.words, *[0] * padding)
        mapped = {f"{name}{word}" for name in self.maps for word in range(WORDS)}
        self._open = {name: FIRST + at for at, name in enumerate(names) if name not in fields and name not in mapped}
        # (place of a word, name of the address that goes there).
        self.filled = [(place, self.source_of(name)) for name, place in self._open.items()]
        # Maps that are made anew for each address.
        self.remade: dict[str, int] = {}
        self._function: Any = None
        self._attributes = 0
        self._free: list[Arguments] = []

    def source_of(self, name: str) -> str:
        """The array whose address a word or map of that name holds."""
        return self._names_of.get(name, name)

    def load(self, architecture: str, index: int) -> None:
        """Compile and load. Raises CompileError, DeviceUnavailable."""
        self._function = _kernel(self.source, architecture, index, self.shared_bytes).function
        self._index, self._several = index, count() > 1
        self._attributes = int(self.dependent and has_dependent_launches(architecture))
        if self._attributes and self.balance:
            self._balance(architecture)
        words = (ctypes.c_int64 * (len(self._template) // 8)).from_buffer_copy(self._template)
        for name, spec in self.maps.items():
            place = self.names.index(f"{name}0")
            known = template(spec)
            if known is None:
                self.remade[name] = FIRST + place
                continue
            words[place : place + WORDS] = list(known)
            self.filled.append((FIRST + place, self.source_of(name)))
        self._template = bytes(words)

    def _balance(self, architecture: str) -> None:
        device, blocks, threads = gpu(self._index), prod(self.grid), self.block[0]
        with on_gpu(self._index):
            held = occupancy.held(self._function, threads, self.shared_bytes)
        if not self.balance <= ceil_div(blocks, device.multiprocessors) < held:
            return
        wide = occupancy.balanced_bytes(device, self.shared_bytes, blocks)
        function = _kernel(self.source, architecture, self._index, wide).function
        with on_gpu(self._index):
            held = occupancy.held(function, threads, wide)
        if occupancy.cluster_places(device, compiler.cluster_of(self.source), held) >= blocks:
            self._function, self.shared_bytes = function, wide

    def prefer_shared(self, architecture: str) -> None:
        """Have shared memory as large as it may be, if blocks may be balanced, for launches that follow each other:
        multiprocessors wait until they are idle where it changes its size between one and the next."""
        if self._attributes and self.balance:
            self._function = _kernel(self.source, architecture, self._index, self.shared_bytes, True).function

    def arguments(self, values: Mapping[int, int] | None = None) -> Arguments:
        """The launch in memory of its own, for one call at a time; `values` of words by their places."""
        head = _Head(self.grid, self.block, self.shared_bytes, attribute_count=self._attributes, attribute=_DEPENDENT)
        head.value[0] = 1
        memory = bytes(head) + self._template
        words = (ctypes.c_int64 * (len(memory) // 8)).from_buffer_copy(memory)
        placed, start = _Head.from_buffer(words), ctypes.addressof(words)
        placed.attributes, placed.parameters = start + _Head.attribute.offset, start + ctypes.sizeof(_Head)
        for place, value in (values or {}).items():
            words[place] = value
        given = (start, int(self._function), start + _Head.parameters.offset)
        return words, partial(_entry(), *map(ctypes.c_void_p, given), None)

    def __call__(self, addresses: Mapping[str, int], stream: int) -> None:
        """Enqueue on a stream (a handle; 0 is the default stream)."""
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = self.arguments()
        words, enqueue = arguments
        words[self.stream_place] = stream
        for place, name in self.filled:
            words[place] = addresses.get(name, 0)
        for name, place in self.remade.items():
            words[place : place + WORDS] = list(encode(self.maps[name], addresses[self.source_of(name)]))
        # The default stream is that of the current GPU, and no other's stream is allowed there.
        if self._several:
            with on_gpu(self._index):
                status = enqueue()
        else:
            status = enqueue()
        if status:
            self.again(status, enqueue)
        self._free.append(arguments)
        if (seen := capture.active()) is not None:
            seen.launched(self, addresses)

    def again(self, status: int, enqueue: Callable[[], int]) -> None:
        """What follows a status that is no success. Raises DeviceUnavailable."""
        from cuda.bindings import driver

        if status == _INVALID_CONTEXT:
            # A thread that has not used the GPU yet has no context.
            with on_gpu(self._index):
                status = enqueue()
        if status:
            name = driver.CUresult(status).name
            raise DeviceUnavailable(f"{self.source.name}: the CUDA driver refuses the launch: {name}")
