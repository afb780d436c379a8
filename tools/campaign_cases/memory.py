"""Arrays as users have them: special values, and every way to lie in memory."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

# What data hold besides normal numbers.
SPECIALS: Final = ("normal", "normal", "integers", "zero", "nan", "inf", "huge", "tiny")
FORMS: Final = (
    *("c", "c", "fortran", "reversed", "sliced", "broadcast", "readonly", "swapped", "unaligned", "inside"),
    *("torch", "torch_last", "torch_sliced", "torch_expanded"),
)
_LARGE: Final = {"float16": 64.0, "bfloat16": 2.0**40, "float32": 2.0**40, "float64": 2.0**200}


def data(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], special: str) -> np.ndarray:
    """Random values in C order."""
    if special == "integers":
        return rng.integers(-3, 4, shape).astype(dtype)
    x = rng.standard_normal(shape)
    scale = _LARGE[dtype.name]
    if special in ("huge", "tiny", "zero"):
        x *= {"huge": scale, "tiny": 1 / scale, "zero": 0.0}[special]
    if special in ("nan", "inf") and x.size:
        places = rng.integers(0, x.size, 1 + int(rng.integers(3)))
        x.reshape(-1)[places] = np.nan if special == "nan" else rng.choice([-np.inf, np.inf], len(places))
    return x.astype(dtype)


def laid(array: np.ndarray, form: str, backend: str) -> Any:
    """The same values in that form; on a GPU what NumPy has is PyTorch's."""
    if backend == "cuda" or form.startswith("torch"):
        return _tensor(array, form, backend)
    if form == "fortran":
        return np.asfortranarray(array)
    if form == "reversed":
        every = (slice(None, None, -1),) * array.ndim
        return array[every].copy(order="K")[every]
    if form == "sliced":
        wide = np.full([2 * size for size in array.shape], 7, array.dtype)
        wide[(slice(None, None, 2),) * array.ndim] = array
        return wide[(slice(None, None, 2),) * array.ndim]
    if form == "broadcast":
        # An axis of one element whose stride says nothing.
        axes = [axis for axis, size in enumerate(array.shape) if size == 1]
        strides = [-48 if axis in axes else stride for axis, stride in enumerate(array.strides)]
        return np.lib.stride_tricks.as_strided(array, array.shape, strides)
    if form == "readonly":
        array = array.copy()
        array.flags.writeable = False
        return array
    if form == "swapped" and array.dtype.name != "bfloat16":
        return array.astype(array.dtype.newbyteorder())
    if form == "unaligned":
        storage = np.empty(array.nbytes + 1, np.uint8)
        moved = storage[1:].view(array.dtype).reshape(array.shape)
        moved[...] = array
        return moved
    if form == "inside":
        wide = np.full([size + 3 for size in array.shape], 7, array.dtype)
        here = tuple(slice(1, 1 + size) for size in array.shape)
        wide[here] = array
        return wide[here]
    return array


def _tensor(array: np.ndarray, form: str, backend: str) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array.copy(order="K"))
    tensor = tensor.to(backend)
    if form in ("torch_last", "fortran") and tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if form in ("torch_sliced", "sliced", "inside"):
        wide = torch.full([2 * size + 1 for size in tensor.shape], 7, dtype=tensor.dtype, device=tensor.device)
        here = tuple(slice(1, None, 2) for _ in tensor.shape)
        wide[here] = tensor
        return wide[here]
    if form in ("torch_expanded", "reversed") and tensor.ndim:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor


def plain(value: Any) -> np.ndarray:
    """A result or an input as a NumPy array, for comparison."""
    if isinstance(value, np.ndarray):
        return value
    tensor = value.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        import ml_dtypes

        return np.asarray(tensor.float().numpy().astype(ml_dtypes.bfloat16))
    return np.asarray(tensor.numpy())
