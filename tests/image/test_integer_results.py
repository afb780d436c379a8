"""Filters whose result is of integers or bool: cut after each axis, as scipy.ndimage does."""

from __future__ import annotations

import platform
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy import ndimage

from tapwise import image
from tapwise.arrays.device import DeviceArray
from tapwise.errors import InvalidPicture

_RNG = np.random.default_rng(0)
_FLOATS = _RNG.standard_normal((31, 45)) * 10
_WORDS = _RNG.integers(-1000, 1000, (31, 45)).astype(np.int16)
_BOOLS = _RNG.random((9, 11, 12)) < 0.5
_BYTES = _RNG.integers(0, 120, (31, 45)).astype(np.uint8)


def equal(name: str, x: np.ndarray, **options: Any) -> None:
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(getattr(image, name)(x, **options), getattr(ndimage, name)(x, **options))


@pytest.mark.parametrize("to", [np.int32, np.int16, np.int64, np.uint8, np.uint16, bool])
@pytest.mark.parametrize("name", ["sobel", "prewitt", "laplace"])
def test_differences_of_floats(name: str, to: Any) -> None:
    """The first axis, and it is the later one in memory, is cut before the second reads it."""
    for x in (_FLOATS, _FLOATS.astype(np.float32), _FLOATS[:12].reshape(12, 5, 9)):
        equal(name, x, output=to)
        if name != "laplace":
            equal(name, x, output=to, axis=0)


@pytest.mark.parametrize("to", [np.uint8, np.int8, bool, np.uint16])
def test_the_largest_is_cut_after_each_axis(to: Any) -> None:
    for name in ("maximum_filter", "minimum_filter"):
        equal(name, _WORDS, size=3, output=to)
        equal(name, _WORDS, size=(2, 5), output=to, axes=(1, 0))
        equal(name, _WORDS.astype(np.float32) / 8, size=3, output=np.int16)
        equal(name, _BYTES, size=4, mode="constant", cval=300.0)
        equal(name, _BYTES, footprint=np.eye(3), mode="constant", cval=300.0)


@pytest.mark.parametrize("name", ["sobel", "prewitt", "laplace", "gaussian_laplace", "gaussian_filter"])
def test_sums_of_bool_keep_their_bytes_between_axes(name: str) -> None:
    options = {"sigma": 1.0} if name.startswith("gaussian") else {}
    for x in (_BOOLS, _BOOLS[0], _BOOLS[0, 0]):
        equal(name, x, **options)
        equal(name, x.astype(np.int16), output=bool, **options)


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.int16, np.int32, np.int64])
def test_derivatives_that_leave_the_range(kind: Any) -> None:
    x = _RNG.integers(0, 120, (31, 45)).astype(kind)
    equal("gaussian_filter", x, sigma=1.2, order=1)
    equal("gaussian_laplace", x, sigma=1.0)
    equal("gaussian_filter", _FLOATS, sigma=1.0, output=kind)
    equal("gaussian_filter", x, sigma=0.8, mode="constant", cval=1.5)


@pytest.mark.parametrize("kind", [np.int16, np.uint16, np.int32, np.uint32, np.int64, np.float32])
def test_terms_are_added_up_in_the_order_of_scipy(kind: Any) -> None:
    """A mean of equal integers is that integer, or its roundings make it less: once for each axis."""
    for sigma in (0.3, 0.5, 1.4, 1.8, 2.2, 2.4):
        for shape in ((5,), (6, 7), (3, 1, 4), (2, 2, 2, 2)):
            equal("gaussian_filter", np.full(shape, 100, kind), sigma=sigma, output=None if kind != np.float32 else int)
    x = _RNG.integers(0, 100, (40, 37)).astype(kind)
    for weights in ([0.1, 0.2, 0.4, 0.2, 0.1], [-0.3, 0.1, 0.0, -0.1, 0.3], [0.25, 0.5, 0.25, 0.5], [0.1, 0.7]):
        equal("correlate1d", x, weights=weights, output=np.int32)
        equal("convolve1d", x, weights=weights, output=np.int32, axis=0, mode="wrap")


def test_derivatives_of_bytes() -> None:
    for kind in (np.uint8, np.int8):
        for order in (1, 2, (0, 3)):
            equal("gaussian_filter", _BYTES.astype(kind), sigma=1.2, order=order)
        equal("gaussian_laplace", _BYTES.astype(kind), sigma=1.0)


def test_four_axes_at_once() -> None:
    x = _RNG.standard_normal((3, 4, 5, 6)) * 100
    for to in (np.uint32, np.uint8, np.int16):
        equal("correlate", x, weights=_RNG.standard_normal((2, 1, 3, 2)), output=to)


@pytest.mark.parametrize("value", [1, 77, 2**31 - 1, -(2**31)])
def test_means_of_equal_large_integers(value: int) -> None:
    """They are that integer: 49 roundings of 2^31 are more than a fixed epsilon makes up for."""
    x = np.full((20, 20), value, np.int32)
    for size in (3, 7, 15):
        equal("uniform_filter", x, size=size)


def test_not_a_number_becomes_what_it_does_in_c() -> None:
    x = _FLOATS.copy()
    x[3, 4], x[20, 9] = np.nan, np.inf
    for to in (np.uint8, np.int16, np.int32, np.uint32, np.int64):
        y = image.correlate(x, [[1.0]], output=to)
        smallest = np.iinfo(to).min if to in (np.int32, np.int64) else 0
        assert y[3, 4] == smallest
        # Of 64 bits float64 does not hold all that the second axis adds up.
        if platform.machine() == "x86_64" and to != np.int64:
            equal("gaussian_filter", np.where(np.isinf(x), 0, x), sigma=1.0, output=to)


class _OnGpu:
    """What is asked of a tensor before its memory is."""

    dtype = "torch.bool"
    __cuda_array_interface__: ClassVar[dict[str, Any]] = {}


def test_dtypes_on_a_gpu_are_named() -> None:
    with pytest.raises(InvalidPicture, match="input has dtype bool: on a GPU integers, float32 and float64"):
        image.sobel(_OnGpu())


def test_more_than_three_axes_on_a_gpu_are_named() -> None:
    shape = (2, 3, 4, 5)
    x, y = (DeviceArray(4096, shape, (240, 80, 20, 4), np.dtype(np.float32), 0, "other", None) for _ in range(2))
    with pytest.raises(InvalidPicture, match="up to three at once on a GPU"):
        image.laplace(x, output=y)
    with pytest.raises(InvalidPicture, match="up to three at once on a GPU"):
        image.gaussian_laplace(x, 1.0, output=y)


def test_sums_of_bool_just_below_one_are_none() -> None:
    weights = np.full((3, 4, 2), 0.9996 / 24)
    x = np.ones((5, 6, 7), bool)
    for function in (ndimage.correlate, image.correlate):
        assert not function(x, weights).any()
        assert function(x, weights + 1e-3).all()
    rng = np.random.default_rng(0)
    x = rng.random((40, 50, 3)) < 0.5
    for _ in range(20):
        weights = rng.standard_normal((3, 4, 2))
        np.testing.assert_array_equal(image.correlate(x, weights), ndimage.correlate(x, weights))


def test_functions_of_one_axis_cut_with_one_tap_too() -> None:
    x = np.array([[256.0, 0.5, 3.0, 512.0]])
    for name in ("uniform_filter1d", "maximum_filter1d", "minimum_filter1d"):
        ours, theirs = getattr(image, name), getattr(ndimage, name)
        np.testing.assert_array_equal(ours(x, 1, output=bool), theirs(x, 1, output=bool))
        np.testing.assert_array_equal(ours(x, 1, output=bool), [[False, False, True, False]])
