"""Arrays in a GPU's memory: any library's in, the same library's out.

PyTorch tensors, CuPy arrays, and whatever has `__cuda_array_interface__` or speaks DLPack. New memory comes from the
user's library, so its allocator, its streams and its CUDA graphs stay in charge; for other libraries and for NumPy
arrays it comes from the driver's pool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from tapwise import capture
from tapwise.arrays.tensors import check_unrecorded, is_fake, is_proxy, why_not
from tapwise.errors import InvalidProblem

# Dtypes that PyTorch and NumPy have in common, by their one name.
_SHARED = (
    "float16", "bfloat16", "float32", "float64",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
# Bytes that the first element of a dense array lies on a multiple of.
ALIGNMENT = 16


@dataclass(frozen=True)
class DeviceArray:
    """Memory of GPU `index` from address `ptr`: shape, strides in bytes, dtype. `owner` keeps it alive.

    `library`: "torch", "cupy" or "other". It has `__cuda_array_interface__`, so other libraries can take it up.
    `synchronized`: what is there was written before anything that is still to run.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    index: int
    library: str
    owner: Any
    synchronized: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        place = {"shape": self.shape, "strides": self.strides, "data": (self.ptr, False)}
        return place | {"typestr": self.dtype.str, "version": 3}

    @property
    def stream(self) -> int:
        """The handle of the stream that its library works on in this thread; the default stream for others."""
        if self.library == "torch":
            return torch_stream()(self.index)
        if self.library == "cupy":
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
        return 0

    def transpose(self, *axes: int) -> DeviceArray:
        """The same memory with its axes in another order."""
        return self._view(self.ptr, tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes))

    def __getitem__(self, key: Any) -> DeviceArray:
        """Views by None, whole slices and numbers: what operators need to add and take off axes."""
        words = key if isinstance(key, tuple) else (key,)
        address, shape, strides, axis = self.ptr, [], [], 0
        for word in words:
            if word is None:
                shape.append(1)
                strides.append(0)
                continue
            if isinstance(word, int):
                address += word * self.strides[axis]
            elif word == slice(None):
                shape.append(self.shape[axis])
                strides.append(self.strides[axis])
            else:
                raise TypeError(f"index {word!r}: None, : and numbers are allowed")
            axis += 1
        return self._view(address, (*shape, *self.shape[axis:]), (*strides, *self.strides[axis:]))

    def reshape(self, shape: tuple[int, ...]) -> DeviceArray:
        """The same memory with axes of size one added or taken off."""
        kept = [(size, step) for size, step in zip(self.shape, self.strides, strict=True) if size != 1]
        if [size for size, _ in kept] != [size for size in shape if size != 1]:
            raise ValueError(f"only axes of size one are added or taken off, not {self.shape} to {shape}")
        steps = iter(step for _, step in kept)
        return self._view(self.ptr, shape, tuple(self.dtype.itemsize if size == 1 else next(steps) for size in shape))

    def spans(self) -> tuple[int, int]:
        """The first address of its elements and the one behind the last."""
        reach = [(size - 1) * step for size, step in zip(self.shape, self.strides, strict=True)]
        low, high = (sum(choose(0, one) for one in reach) for choose in (min, max))
        return (self.ptr + low, self.ptr + high + self.dtype.itemsize) if self.size else (self.ptr, self.ptr)

    def _view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> DeviceArray:
        return DeviceArray(address, shape, strides, self.dtype, self.index, self.library, self.owner)

    def dense_as(self, order: tuple[int, ...]) -> bool:
        """Whether elements lie without gaps, with the axes in that order from outside to inside."""
        step = self.dtype.itemsize
        for axis in reversed(order):
            if self.shape[axis] != 1 and self.strides[axis] != step:
                return prod(self.shape) == 0
            step *= self.shape[axis]
        return True


def is_device(value: Any) -> bool:
    """Whether an array lies in a GPU's memory."""
    if isinstance(value, np.ndarray):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.is_cuda)
    if isinstance(value, DeviceArray):
        return True
    if is_proxy(value) or isinstance(value, type):
        return False
    if hasattr(value, "__cuda_array_interface__"):
        return True
    if hasattr(value, "__dlpack_device__"):
        try:
            return int(value.__dlpack_device__()[0]) in (2, 13)  # kDLCUDA, kDLCUDAManaged
        # Another library's code: whoever reads the memory says what is wrong.
        except Exception:
            return False
    return False


def view(value: Any, name: str) -> DeviceArray:
    """The same memory as a DeviceArray, without a copy. Raises InvalidProblem where that cannot be."""
    if isinstance(value, DeviceArray):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(torch, value, name)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return DeviceArray(value.data.ptr, value.shape, value.strides, value.dtype, value.device.id, "cupy", value)
    return _of_other(value, name)


def _of_torch(torch: Any, tensor: Any, name: str) -> DeviceArray:
    check_unrecorded(torch, tensor, name)
    dtype = _numpy_dtype(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg() or is_fake(tensor):
        raise InvalidProblem(f"{name} {why_not(torch, tensor)}")
    size = dtype.itemsize
    strides = tuple(step * size for step in tensor.stride())
    address, seen = tensor.data_ptr(), capture.active()
    if seen is not None:
        address = seen.address(tensor, address)
    return DeviceArray(address, tuple(tensor.shape), strides, dtype, tensor.device.index, "torch", tensor)


@cache
def _numpy_dtype(dtype: Any) -> np.dtype[Any] | None:
    name = str(dtype).removeprefix("torch.")
    if name not in _SHARED:
        return None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    return found


def _of_other(value: Any, name: str) -> DeviceArray:
    try:
        from cuda.core.utils import StridedMemoryView

        seen = StridedMemoryView.from_any_interface(value, stream_ptr=-1)
        dtype = np.dtype(seen.dtype)
    # Another library's code, and the driver's: it may raise anything.
    except Exception as error:
        raise InvalidProblem(
            f"{name} is a {type(value).__name__} whose memory cannot be shared: {type(error).__name__}, {error}"
        ) from error
    shape = tuple(seen.shape)
    size = dtype.itemsize
    strides = tuple(step * size for step in seen.strides) if seen.strides else _dense_strides(shape, size)
    return DeviceArray(seen.ptr, shape, strides, dtype, seen.device_id, "other", value)


def _dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], like: DeviceArray) -> DeviceArray:
    """New memory in C order from the library and on the GPU of another array."""
    if like.library == "torch":
        kind, device = _torch_words(dtype, like.index)
        owner = sys.modules["torch"].empty(shape, dtype=kind, device=device)
        address, seen = owner.data_ptr(), capture.active()
        if seen is not None:
            address = seen.new(owner, address)
    elif like.library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(like.index):
            owner = cupy.empty(shape, dtype)
        address = owner.data.ptr
    else:
        return allocate(shape, dtype, like.index)
    return DeviceArray(address, shape, _dense_strides(shape, dtype.itemsize), dtype, like.index, like.library, owner)


@cache
def _torch_words(dtype: np.dtype[Any], index: int) -> tuple[Any, Any]:
    """PyTorch's names of a dtype and of a GPU."""
    torch = sys.modules["torch"]
    return getattr(torch, dtype.name), torch.device("cuda", index)


def allocate(shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> DeviceArray:
    """New memory in C order from the driver's pool."""
    from tapwise.cuda.jit.device import cuda_core
    from tapwise.cuda.jit.launch import on_gpu

    capture.refuse()
    with on_gpu(index):
        device = cuda_core().Device(index)
        owner = device.allocate(max(1, prod(shape) * dtype.itemsize), stream=device.default_stream)
    return DeviceArray(int(owner.handle), shape, _dense_strides(shape, dtype.itemsize), dtype, index, "other", owner)


def assign(target: DeviceArray, source: DeviceArray) -> None:
    """target[...] = source, of the same shape and dtype, any strides, on the source's stream."""
    from tapwise.cuda.copy import launch

    if source.size:
        copy = launch(source.shape, source.strides, target.strides, source.dtype.itemsize, source.index)
        copy({"x": source.ptr, "y": target.ptr}, source.stream)


def clear(target: DeviceArray) -> None:
    """target[...] = 0, on its library's stream."""
    from tapwise.cuda.copy import launch

    if target.size:
        fill = launch(target.shape, (0,) * target.ndim, target.strides, target.dtype.itemsize, target.index)
        fill({"x": 0, "y": target.ptr}, target.stream)


def give(array: DeviceArray) -> Any:
    """The array as one of its library."""
    if array.library == "torch":
        torch = sys.modules["torch"]
        size = array.dtype.itemsize
        offset = (array.ptr - array.owner.data_ptr()) // size + array.owner.storage_offset()
        given = torch.as_strided(array.owner, array.shape, [step // size for step in array.strides], offset)
        if (seen := capture.active()) is not None:
            seen.give(given, array.ptr)
        return given
    if array.library == "cupy":
        cupy = sys.modules["cupy"]
        memory = array.owner.data + (array.ptr - array.owner.data.ptr)
        return cupy.ndarray(array.shape, array.dtype, memory, array.strides)
    return array


def _driver() -> tuple[Any, Any, Any]:
    """(the driver's functions, what raises for their status, the context of a GPU)."""
    from cuda.bindings import driver

    from tapwise.cuda.jit.device import check
    from tapwise.cuda.jit.launch import on_gpu

    return driver, check, on_gpu


def synchronize(array: DeviceArray) -> DeviceArray:
    """The array once its library's stream has written there; as it is where a graph captures that stream."""
    capture.refuse()
    driver, check, on_gpu = _driver()
    stream = array.stream
    with on_gpu(array.index):
        if check(driver.cuStreamIsCapturing(stream)) != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            return array
        check(driver.cuStreamSynchronize(stream))
    return replace(array, synchronized=True)


def torch_stream() -> Callable[[int], int]:
    """PyTorch's current stream of a GPU, as a function of its number that gives a handle."""
    torch = sys.modules["torch"]
    # The public way makes an object for each call, which takes longer than a launch.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw if raw is not None else lambda index: int(torch.cuda.current_stream(index).cuda_stream)


def upload(array: np.ndarray, index: int = 0) -> DeviceArray:
    """A copy in a GPU's memory, in C order."""
    driver, check, on_gpu = _driver()
    source = np.asarray(array, order="C")
    target = allocate(source.shape, source.dtype, index)
    if source.nbytes:
        with on_gpu(index):
            check(driver.cuMemcpyHtoD(target.ptr, source.ctypes.data, source.nbytes))
    return target


def download(array: DeviceArray) -> np.ndarray:
    """A copy in this machine's memory, with the same order of axes in memory; waits for the default stream."""
    capture.refuse()
    driver, check, on_gpu = _driver()
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis] if array.shape[axis] > 1 else 0)
    if not array.dense_as(tuple(order)):
        raise ValueError(f"only dense arrays are downloaded, not strides {array.strides} of {array.shape}")
    target = np.empty([array.shape[axis] for axis in order], array.dtype)
    with on_gpu(array.index):
        check(driver.cuCtxSynchronize())
        if target.nbytes:
            check(driver.cuMemcpyDtoH(target.ctypes.data, array.ptr, target.nbytes))
    return target.transpose(np.argsort(order)) if array.ndim else target
