"""Arrays in this machine's memory: any library's as NumPy's; their dtypes and memory orders."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

# Now, and not by the first thread that looks at an array: a child forked meanwhile would wait for it.
import numpy.ma

from tapwise.arrays.tensors import ALLOWED, check_unrecorded, is_proxy, is_torch, why_not
from tapwise.cpu.addresses import address
from tapwise.errors import InvalidProblem
from tapwise.problem import DTYPES

_BF16: Final = DTYPES["bf16"]
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
# Bytes that arrays begin at a multiple of, and of arrays so small that it does not pay.
ALIGNMENT: Final = 64
_SMALL: Final = 1 << 16
_BYTES: Final = np.dtype(np.uint8)
_KINDS: Final = "a NumPy array, a PyTorch tensor, a CuPy array, or an array that speaks DLPack"


def view(value: Any, name: str) -> np.ndarray:
    """The same memory as a NumPy array, without a copy. `name` is the argument that an error names.

    Raises InvalidProblem for what is no array, does not lie in this machine's memory, or wants gradients.
    """
    if isinstance(value, np.ndarray):
        if isinstance(value, numpy.ma.MaskedArray):
            raise InvalidProblem(f"{name} is a masked array: masks are not taken into account; fill it first")
        return value.view(np.ndarray)
    if is_torch(value):
        return _view_of_tensor(value, name)
    if is_proxy(value):
        raise InvalidProblem(f"{name} is a Proxy of torch.fx, which has no values: call tapwise outside of its tracing")
    if not hasattr(value, "__dlpack__"):
        raise InvalidProblem(f"{name} is a {type(value).__name__}: {_KINDS} is allowed")
    try:
        return np.from_dlpack(value)
    # Another library's code: it may raise anything.
    except Exception as error:
        raise InvalidProblem(
            f"{name} is a {type(value).__name__} that NumPy cannot share: {type(error).__name__}, {error}"
        ) from error


def _view_of_tensor(tensor: Any, name: str) -> np.ndarray:
    torch = sys.modules["torch"]
    check_unrecorded(torch, tensor, name)
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        return numpy_of(tensor)
    except (RuntimeError, TypeError) as error:
        raise InvalidProblem(f"{name} {why_not(torch, tensor)}") from error


def numpy_of(tensor: Any) -> np.ndarray:
    """A tensor's memory. Of bfloat16 PyTorch and NumPy share the bits alone. Raises PyTorch's errors."""
    torch: Any = sys.modules["torch"]
    if tensor.dtype is torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy()
        return bits.view(_BF16)
    array: np.ndarray = tensor.numpy()
    return array


def tensor_of(array: np.ndarray) -> Any:
    """An array's memory as a tensor of PyTorch, which must be loaded."""
    torch: Any = sys.modules["torch"]
    if array.dtype == _BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dtype_name(array: Any, name: str) -> str:
    """ "f32", "f64", "f16" or "bf16", in any byte order. Raises InvalidProblem for other dtypes."""
    known = _NAMES.get(native_dtype(array.dtype))
    if known is None:
        raise InvalidProblem(f"{name} has dtype {array.dtype}: {ALLOWED} is allowed")
    return known


def native_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in this machine's byte order."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def native(array: np.ndarray) -> np.ndarray:
    """In this machine's byte order: the array itself, or a copy."""
    return array if array.dtype.isnative else array.astype(native_dtype(array.dtype))


def channels_last(array: np.ndarray) -> np.ndarray:
    """(n, c, *spatial) seen as (n, *spatial, c)."""
    return array.transpose(0, *range(2, array.ndim), 1)


def channels_first(array: Any) -> Any:
    """(n, *spatial, c) seen as (n, c, *spatial)."""
    return array.transpose(0, -1, *range(1, array.ndim - 1))


def maker(shape: tuple[int, ...], dtype: np.dtype[Any], last: bool = False) -> Callable[[], np.ndarray]:
    """What makes new arrays, in C order or `last` in that of (n, *spatial, c). They begin with a cache line, as
    PyTorch's do; NumPy's do so 16 bytes after one, and then each vector of a kernel lies in two of them."""
    array: Any = np.ndarray
    size, strides = prod(shape) * dtype.itemsize, None
    if last:
        strides = channels_first(np.empty((shape[0], *shape[2:], shape[1]), dtype)).strides
    if size < _SMALL:
        return partial(array, shape, dtype, None, 0, strides) if last else partial(np.empty, shape, dtype)
    empty, longer = np.empty, size + ALIGNMENT

    def make() -> np.ndarray:
        memory = empty(longer, _BYTES)
        made: np.ndarray = array(shape, dtype, memory, -address(memory) % ALIGNMENT, strides)
        return made

    return make


def new(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """A new array of `maker`."""
    return maker(shape, dtype)()
