"""Any array in, the same kind out; memory orders.

Inside, everything is a NumPy array, or a DeviceArray in a GPU's memory, of logical shape (n, c, *spatial) that shares
memory with what the user gave. Its memory order is the problem's layout: "nchw" or "nhwc".
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tapwise.arguments import shown
from tapwise.arrays import device as cuda
from tapwise.arrays.device import DeviceArray
from tapwise.arrays.host import channels_first as channels_first
from tapwise.arrays.host import channels_last as channels_last
from tapwise.arrays.host import dtype_name as dtype_name
from tapwise.arrays.host import native as native
from tapwise.arrays.host import native_dtype, new, tensor_of
from tapwise.arrays.host import view as view
from tapwise.arrays.tensors import is_torch
from tapwise.errors import InvalidProblem

# What operators work on.
Array = np.ndarray | DeviceArray

_GPU: Final = re.compile(r"cuda(?::([0-9]{1,4}))?")
_MOST_OVERLAP_WORK: Final = 10_000


def anywhere(value: Any, name: str, index: int | None, upload: bool = False, first: str = "x") -> Array:
    """The same memory as an array that operators work on, in native byte order.

    `index`: the GPU that it has to lie on, None for this machine's memory: where the function's `first` argument lies.
    `upload`: NumPy arrays are copied there. Raises InvalidProblem for what lies elsewhere.
    """
    if not cuda.is_device(value):
        array = native(view(value, name))
        if index is None:
            return array
        if not upload:
            raise InvalidProblem(
                f"{name} lies in this machine's memory and {first} on GPU {index}: one place is allowed"
            )
        dtype_name(array, name)
        return cuda.upload(array, index)
    there = cuda.view(value, name)
    if index is None:
        raise InvalidProblem(
            f"{name} lies on GPU {there.index} and {first} in this machine's memory: one place is allowed"
        )
    if there.index != index:
        raise InvalidProblem(f"{name} lies on GPU {there.index} and {first} on GPU {index}: one place is allowed")
    return there


def place(value: Any, device: str | None) -> tuple[int | None, bool]:
    """(GPU to compute on, or None for this machine's CPU; whether arrays are copied there and back).

    `device`: None for where the array lies, "cpu", "cuda" or "cuda:1". Raises InvalidProblem for another word.
    """
    there = cuda.is_device(value)
    if device is None or (isinstance(device, str) and device == "cpu"):
        if there and device == "cpu":
            raise InvalidProblem("device='cpu' with an array on a GPU: copy it to this machine's memory first")
        return (cuda.view(value, "x").index if there else None), False
    number = gpu_number(device)
    if not there:
        from tapwise.cuda.jit.device import gpu

        return gpu(number or 0).index, True
    index = cuda.view(value, "x").index
    if number not in (None, index):
        raise InvalidProblem(f"device={device!r} with an array on GPU {index}")
    return index, False


def gpu_number(device: Any) -> int | None:
    """1 of "cuda:1", None of "cuda". Raises InvalidProblem for anything else."""
    match = _GPU.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise InvalidProblem(f"device={shown(device)}: None, 'cpu', 'cuda' or 'cuda:<number>'")
    return int(match[1]) if match[1] else None


def like(array: Array, value: Any) -> Any:
    """An array as one of the library that `value` is from, sharing memory where that library allows it.

    A library that only gives out DLPack and names no namespace gets a NumPy array, which speaks DLPack too. What was
    computed on a GPU for an array of this machine's memory is copied back.
    """
    if isinstance(array, DeviceArray):
        if cuda.is_device(value):
            return cuda.give(array)
        array = cuda.download(array)
    if isinstance(value, np.ndarray):
        return array
    if is_torch(value):
        return tensor_of(array)
    import array_api_compat

    try:
        namespace = array_api_compat.array_namespace(value)
    except TypeError:
        return array
    return namespace.from_dlpack(array)


def is_dense(array: Array, layout: str) -> bool:
    """Whether elements lie without gaps in that memory order, each on an address of its size."""
    if isinstance(array, DeviceArray):
        # Kernels read and write up to 16 bytes at once.
        return array.dense_as(_order(array.ndim, layout)) and array.ptr % cuda.ALIGNMENT == 0
    ordered = array if layout == "nchw" else channels_last(array)
    return ordered.flags.c_contiguous and ordered.flags.aligned and array.dtype.isnative


def takes(target: Array | None, layout: str, source: Array) -> bool:
    """Whether kernels that run where the source lies may write to an array as it is."""
    same = isinstance(target, np.ndarray) == isinstance(source, np.ndarray)
    return target is not None and same and is_dense(target, layout)


def dense(array: Any, layout: str) -> Any:
    """The array, or a copy where it is not dense in that memory order."""
    if is_dense(array, layout):
        return array
    result = empty(array.shape, native_dtype(array.dtype), layout, array)
    assign(result, array)
    return result


def assign(target: Any, source: Any) -> None:
    """target[...] = source, from this machine's memory to a GPU's and back where that is needed."""
    if isinstance(target, DeviceArray):
        cuda.assign(target, source if isinstance(source, DeviceArray) else cuda.upload(source, target.index))
    else:
        target[...] = on_host(source)


def on_host(array: Array) -> np.ndarray:
    """The array, or a copy of it in this machine's memory."""
    return cuda.download(array) if isinstance(array, DeviceArray) else array


def copy(array: Any) -> Any:
    """A copy in C order, in the same memory."""
    if not isinstance(array, DeviceArray):
        return np.array(array, order="C")
    result = empty(array.shape, array.dtype, "nchw", array)
    assign(result, array)
    return result


def extended(array: Any, behind: tuple[int, ...]) -> Any:
    """A copy in its memory order with so many zeros behind each spatial axis."""
    n, c, *spatial = array.shape
    sizes = (size + more for size, more in zip(spatial, behind, strict=True))
    wide = empty((n, c, *sizes), array.dtype, layout_of(array), array)
    if isinstance(wide, DeviceArray):
        cuda.clear(wide)
        assign(replace(wide, shape=array.shape), array)
    else:
        wide[...] = 0
        wide[tuple(map(slice, array.shape))] = array
    return wide


def beside(array: Array, source: Array) -> Array:
    """The array, copied to where the source lies if it lies elsewhere."""
    if isinstance(source, DeviceArray) and isinstance(array, np.ndarray):
        return cuda.upload(array, source.index)
    return array


def target(out: Any, source: Array) -> Array:
    """The user's `out` as an array to write to: where the source lies, or in this machine's memory for a copy back."""
    if isinstance(source, DeviceArray) and cuda.is_device(out):
        return anywhere(out, "out", source.index)
    return view(out, "out")


def _order(axes: int, layout: str) -> tuple[int, ...]:
    """The axes of (n, c, *spatial) from outside to inside."""
    return tuple(range(axes)) if layout == "nchw" else (0, *range(2, axes), 1)


def layout_of(array: Array) -> str:
    """The memory order of (n, c, *spatial): "nhwc" only for what is dense that way and not the other."""
    if isinstance(array, DeviceArray):
        return "nhwc" if not is_dense(array, "nchw") and is_dense(array, "nhwc") else "nchw"
    return "nhwc" if not array.flags.c_contiguous and channels_last(array).flags.c_contiguous else "nchw"


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], layout: str, beside: Any = None) -> Any:
    """A new array of logical shape (n, c, *spatial), dense in that memory order, in the memory of `beside`. Of vectors
    there is one order."""
    layout = "nchw" if len(shape) == 1 else layout
    if isinstance(beside, DeviceArray):
        order = _order(len(shape), layout)
        memory = cuda.empty(tuple(shape[axis] for axis in order), dtype, beside)
        return memory if layout == "nchw" else memory.transpose(0, len(shape) - 1, *range(1, len(shape) - 1))
    if layout == "nchw":
        return new(shape, dtype)
    n, c, *spatial = shape
    return channels_first(new((n, *spatial, c), dtype))


def writeable(array: Array) -> bool:
    """Whether it may be written to, as far as its library says."""
    return array.flags.writeable if isinstance(array, np.ndarray) else True


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays have an element's memory in common; True where that is too hard to tell."""
    if isinstance(a, DeviceArray) or isinstance(b, DeviceArray):
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            return False
        (low, high), (start, end) = a.spans(), b.spans()
        return low < end and start < high
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=_MOST_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
