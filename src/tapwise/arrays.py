"""Any array in, the same kind out; memory orders; scratch memory that lives on.

Inside, everything is a NumPy array of logical shape (n, c, *spatial) that shares memory with what the user gave. Its
memory order is the problem's layout: "nchw" or "nhwc".
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from tapwise.errors import InvalidProblem

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_ALLOWED: Final = "float32, float64 or float16"
_KINDS: Final = "a NumPy array, a PyTorch CPU tensor, or an array that speaks DLPack"

ALIGNMENT: Final = 64
_MOST_OVERLAP_WORK: Final = 10_000

# Scratch buffers not in use, by size. Lists: pop and append are atomic, so no lock.
_free_workspaces: dict[int, list[np.ndarray]] = {}


def view(value: Any, name: str) -> np.ndarray:
    """The same memory as a NumPy array, without a copy. `name` is the argument that an error names.

    Raises InvalidProblem for what is no array, does not lie in this machine's memory, or wants gradients.
    """
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise InvalidProblem(f"{name} is a masked array: masks are not taken into account; fill it first")
        return value.view(np.ndarray)
    if _is_torch(value):
        return _view_of_tensor(value, name)
    if not hasattr(value, "__dlpack__"):
        raise InvalidProblem(f"{name} is a {type(value).__name__}: {_KINDS} is allowed")
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidProblem(f"{name} is a {type(value).__name__} that NumPy cannot share: {error}") from error


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _view_of_tensor(tensor: Any, name: str) -> np.ndarray:
    if tensor.requires_grad:
        if sys.modules["torch"].is_grad_enabled():
            raise InvalidProblem(
                f"{name} requires a gradient: tapwise computes no gradients yet; "
                f"use {name}.detach(), or call it under torch.no_grad()"
            )
        tensor = tensor.detach()
    try:
        array: np.ndarray = tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise InvalidProblem(
            f"{name} is a {tensor.dtype} tensor on {tensor.device}: a dense CPU tensor of {_ALLOWED} is allowed"
        ) from error
    return array


def like(array: np.ndarray, value: Any) -> Any:
    """A NumPy array as an array of the library that `value` is from, sharing memory where that library allows it.

    A library that only gives out DLPack and names no namespace gets a NumPy array, which speaks DLPack too.
    """
    if isinstance(value, np.ndarray):
        return array
    if _is_torch(value):
        return sys.modules["torch"].from_numpy(array)
    import array_api_compat

    try:
        namespace = array_api_compat.array_namespace(value)
    except TypeError:
        return array
    return namespace.from_dlpack(array)


def dtype_name(array: np.ndarray, name: str) -> str:
    """ "f32", "f64" or "f16", in any byte order. Raises InvalidProblem for other dtypes."""
    known = _NAMES.get(native_dtype(array.dtype))
    if known is None:
        raise InvalidProblem(f"{name} has dtype {array.dtype}: {_ALLOWED} is allowed")
    return known


def native_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in this machine's byte order."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def native(array: np.ndarray) -> np.ndarray:
    """In this machine's byte order: the array itself, or a copy."""
    return array if array.dtype.isnative else array.astype(native_dtype(array.dtype))


def _channels_last(array: np.ndarray) -> np.ndarray:
    """(n, c, *spatial) seen as (n, *spatial, c)."""
    return array.transpose(0, *range(2, array.ndim), 1)


def channels_first(array: np.ndarray) -> np.ndarray:
    """(n, *spatial, c) seen as (n, c, *spatial)."""
    return array.transpose(0, -1, *range(1, array.ndim - 1))


def is_dense(array: np.ndarray, layout: str) -> bool:
    """Whether elements lie without gaps in that memory order, each on an address of its size."""
    ordered = array if layout == "nchw" else _channels_last(array)
    return ordered.flags.c_contiguous and ordered.flags.aligned and array.dtype.isnative


def dense(array: np.ndarray, layout: str) -> np.ndarray:
    """The array, or a copy where it is not dense in that memory order."""
    if is_dense(array, layout):
        return array
    result = empty(array.shape, native_dtype(array.dtype), layout)
    result[...] = array
    return result


def layout_of(array: np.ndarray) -> str:
    """The memory order of (n, c, *spatial): "nhwc" only for what is dense that way and not the other."""
    return "nhwc" if not array.flags.c_contiguous and _channels_last(array).flags.c_contiguous else "nchw"


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], layout: str) -> np.ndarray:
    """A new array of logical shape (n, c, *spatial), dense in that memory order."""
    if layout == "nchw":
        return np.empty(shape, dtype)
    n, c, *spatial = shape
    return channels_first(np.empty((n, *spatial, c), dtype))


def overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have an element's memory in common; True where that is too hard to tell."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=_MOST_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def aligned(size_bytes: int) -> np.ndarray:
    """New uint8 memory that starts on a cache line."""
    storage = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -storage.ctypes.data % ALIGNMENT
    return storage[start : start + size_bytes]


def workspaces(size_bytes: int) -> tuple[list[np.ndarray], int]:
    """The free buffers that hold `size_bytes`, and their size.

    A call pops one (or makes one with `aligned`) and appends it when it is done, so calls at the same time never share
    one, and pages are touched once. Sizes are powers of two: all that is kept stays below twice the largest workspace
    for each call at the same time.
    """
    size = 1 << max(12, (size_bytes - 1).bit_length())
    return _free_workspaces.setdefault(size, []), size
