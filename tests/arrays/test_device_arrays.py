"""Views of device memory, against NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tapwise.arrays import device as device_arrays
from tapwise.arrays.device import DeviceArray


def mirrored(array: np.ndarray) -> DeviceArray:
    """A DeviceArray with an array's address, shape and strides: nothing reads its memory."""
    return DeviceArray(array.ctypes.data, array.shape, array.strides, array.dtype, 0, "other", array)


@pytest.mark.parametrize(
    "key", [None, np.s_[None, :], np.s_[:, :, None], np.s_[:, :, 0], np.s_[1], np.s_[1, :, None, 2], np.s_[:, None, 3]]
)
def test_views(key: Any) -> None:
    array = np.zeros((3, 5, 7), np.float32)[::-1, :, ::2]
    view, wanted = mirrored(array)[key], array[key]
    assert (view.ptr, view.shape, view.ndim, view.size) == (wanted.ctypes.data, wanted.shape, wanted.ndim, wanted.size)
    kept = [axis for axis, size in enumerate(wanted.shape) if size > 1]
    assert [view.strides[axis] for axis in kept] == [wanted.strides[axis] for axis in kept]


def test_transposed_dense_and_spans() -> None:
    array = np.zeros((2, 3, 4, 5), np.float32)
    for candidate in (array, array[:, :, ::2], array[::-1], array[:, :1], array[:0], array.transpose(0, 2, 3, 1)):
        view = mirrored(candidate)
        assert view.dense_as(tuple(range(4))) == candidate.flags.c_contiguous
        assert view.spans() == np.lib.array_utils.byte_bounds(candidate) or candidate.size == 0
        assert view.transpose(0, 2, 3, 1).shape == candidate.transpose(0, 2, 3, 1).shape
    assert mirrored(array.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1).dense_as((0, 1, 2, 3))
    with pytest.raises(TypeError, match="index"):
        mirrored(array)[::2]


def test_where_arrays_lie() -> None:
    import torch

    assert not device_arrays.is_device(np.zeros(3)) and not device_arrays.is_device(torch.zeros(3))
    assert device_arrays.is_device(mirrored(np.zeros(3)))
    assert mirrored(np.zeros((2, 3), np.float32)).__cuda_array_interface__["typestr"] == "<f4"
