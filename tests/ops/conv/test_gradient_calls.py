"""conv2d_input, conv2d_weight, conv_transpose2d and conv_transpose1d: PyTorch's meanings, any arrays, clear errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional, grad

import tapwise
from tapwise.errors import InvalidProblem

RNG = np.random.default_rng(3)
# (n, c, h, w), (k, c / groups, r, s), stride, padding, dilation, groups
GEOMETRIES: list[tuple[Any, ...]] = [
    ((2, 6, 11, 9), (4, 3, 3, 2), (2, 3), (1, 0), (2, 1), 2),
    ((1, 5, 8, 7), (7, 5, 3, 3), 1, 1, 1, 1),
    ((3, 8, 9, 9), (16, 1, 5, 3), 2, (2, 1), 1, 8),
    ((2, 4, 13, 13), (6, 4, 1, 1), 3, 0, 1, 1),
    ((2, 3, 7, 9), (4, 3, 3, 3), 1, 3, 1, 1),
    ((0, 3, 7, 9), (4, 3, 3, 3), 1, 1, 1, 1),
]
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def made(shape: tuple[int, ...], layout: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    tensor = torch.from_numpy(RNG.standard_normal(shape).astype(np.float32))
    return tensor.contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradients_are_those_of_torch(geometry: tuple[Any, ...], layout: torch.memory_format) -> None:
    x_shape, w_shape, *words = geometry
    x, w = made(x_shape, layout), made(w_shape)
    dy = made(tuple(functional.conv2d(x, w, None, *words).shape), layout)
    dx = tapwise.conv2d_input(x_shape, w, dy, *words)
    dw = tapwise.conv2d_weight(x, w_shape, dy, *words)
    torch.testing.assert_close(dx, grad.conv2d_input(x_shape, w, dy, *words), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dw, grad.conv2d_weight(x, w_shape, dy, *words), rtol=1e-4, atol=1e-4)
    if 0 not in x_shape:
        assert dx.is_contiguous(memory_format=layout) and dw.is_contiguous(memory_format=layout)
    out = torch.full(w_shape, torch.nan)
    assert tapwise.conv2d_weight(x, w_shape, dy, *words, out=out) is out
    torch.testing.assert_close(out, dw, rtol=0, atol=0)
    filled = torch.full(x_shape, torch.nan)
    assert tapwise.conv2d_input(x_shape, w, dy, *words, out=filled) is filled
    torch.testing.assert_close(filled, dx, rtol=0, atol=0)


@pytest.mark.many
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("x_shape", "w_shape", "words"),
    [
        ((2, 4, 5, 6), (4, 3, 4, 4), {"stride": 2, "padding": 1}),
        ((1, 6, 7, 5), (6, 2, 3, 5), {"stride": (2, 3), "padding": (1, 2), "output_padding": (1, 0), "groups": 2}),
        ((2, 3, 6, 6), (3, 5, 3, 3), {"dilation": 2}),
        ((2, 8, 4, 4), (8, 1, 2, 2), {"stride": 2, "groups": 8}),
        ((2, 4, 9, 9), (4, 4, 1, 1), {"stride": 3, "output_padding": 2}),
        ((2, 4, 5, 6), (4, 3, 3, 2), {"stride": (1, 2), "dilation": (3, 4), "output_padding": (2, 3)}),
        ((1, 4, 5, 6), (4, 2, 2, 3), {"groups": 2, "dilation": 5, "output_padding": (4, 0), "padding": 1}),
    ],
)
def test_transposed_convolution_is_that_of_torch(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], words: dict[str, Any], layout: torch.memory_format
) -> None:
    x, w = made(x_shape, layout), made(w_shape)
    bias = made((w_shape[1] * words.get("groups", 1),))
    expected = functional.conv_transpose2d(x, w, bias, **words)
    found = tapwise.conv_transpose2d(x, w, bias, **words)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    out = torch.full(expected.shape, torch.nan)
    assert tapwise.conv_transpose2d(x, w, bias, **words, out=out) is out
    torch.testing.assert_close(out, found, rtol=0, atol=0)
    fused = tapwise.conv_transpose2d(x[0].numpy(), w.numpy(), bias.numpy(), **words, activation="silu")
    assert isinstance(fused, np.ndarray)
    torch.testing.assert_close(torch.from_numpy(fused), functional.silu(expected[0]), rtol=1e-4, atol=1e-4)


def test_one_axis() -> None:
    x, w = made((2, 4, 9)), made((4, 3, 4))
    words: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1}
    expected = functional.conv_transpose1d(x, w, **words)
    torch.testing.assert_close(tapwise.conv_transpose1d(x, w, **words), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tapwise.conv_transpose1d(x[1], w, **words), expected[1], rtol=1e-4, atol=1e-4)


def test_any_strides() -> None:
    x, w = RNG.standard_normal((2, 5, 12, 9)), RNG.standard_normal((8, 5, 3, 3))
    dy = RNG.standard_normal((2, 8, 9, 10))
    turned, flipped = dy.transpose(0, 1, 3, 2)[:, ::-1], w[::-1, :, :, ::-1]
    expected = tapwise.conv2d_input(x.shape, flipped.copy(), turned.copy(), padding=(0, 1))
    np.testing.assert_array_equal(tapwise.conv2d_input(x.shape, flipped, turned, padding=(0, 1)), expected)
    expected = tapwise.conv2d_weight(x, w.shape, turned.copy(), padding=(0, 1))
    np.testing.assert_array_equal(tapwise.conv2d_weight(x, w.shape, turned, padding=(0, 1)), expected)
    swapped = x.astype(">f8")
    np.testing.assert_array_equal(tapwise.conv2d_weight(swapped, w.shape, turned, padding=(0, 1)), expected)


def forms(array: np.ndarray) -> list[np.ndarray]:
    """The same values reversed in memory, with gaps, in Fortran's order, read-only, and in the other byte order."""
    every = (slice(None, None, -1),) * array.ndim
    wide = np.full([2 * size for size in array.shape], 7, array.dtype)
    seen = wide[(slice(None, None, 2),) * array.ndim]
    seen[...] = array
    fixed = array.copy()
    fixed.flags.writeable = False
    reversed_ = array[every].copy()[every]
    return [reversed_, seen, np.asfortranarray(array), fixed, array.astype(array.dtype.newbyteorder())]


def test_transposed_convolution_of_any_memory() -> None:
    x, w, bias = (RNG.standard_normal(shape) for shape in ((2, 4, 5, 6), (4, 3, 3, 2), (3,)))
    words: dict[str, Any] = {
        "stride": (1, 2),
        "dilation": (3, 1),
        "output_padding": (2, 1),
        "padding": ((1, 0), (0, 2)),
    }
    one: dict[str, Any] = {"stride": 2, "output_padding": 1}
    wide = np.pad(
        functional.conv_transpose2d(*map(torch.from_numpy, (x, w, bias)), (1, 2), 0, 0, 1, (3, 1)).numpy(),
        ((0, 0), (0, 0), (0, 2), (0, 1)),
    )
    wide[:, :, -2:] = wide[:, :, :, -1:] = bias[:, None, None]
    expected = tapwise.conv_transpose2d(x, w, bias, **words)
    np.testing.assert_allclose(expected, wide[:, :, 1:, :-2], rtol=1e-9, atol=1e-9)
    line = tapwise.conv_transpose1d(x[:, :, 0], w[:, :, 0], bias, **one)
    for a, b, c in zip(forms(x), forms(w)[::-1], forms(bias), strict=True):
        np.testing.assert_array_equal(tapwise.conv_transpose2d(a, b, c, **words), expected)
        np.testing.assert_array_equal(tapwise.conv_transpose1d(a[:, :, 0], b[:, :, 0], c, **one), line)
        out = np.full(expected.shape[::-1], np.nan).T[:, :, ::-1]
        assert tapwise.conv_transpose2d(a, b, c, **words, out=out) is out
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("stride", [1, 2])
def test_nan_and_infinity_reach_what_they_meet(stride: int) -> None:
    x, w = made((2, 3, 6, 7)), made((4, 3, 3, 3))
    dy = made(tuple(functional.conv2d(x, w, None, stride, 1).shape))
    wild = dy.clone()
    wild[0, 1, 0, 0], wild[1, 2, -1, 1] = torch.nan, torch.inf
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4, equal_nan=True)
    close(tapwise.conv2d_input(x.shape, w, wild, stride, 1), grad.conv2d_input(x.shape, w, wild, stride, 1))
    close(tapwise.conv_transpose2d(wild, w, None, stride), functional.conv_transpose2d(wild, w, None, stride))
    x[0, 1, 0, 0], x[1, 2, 3, 3] = torch.nan, -torch.inf
    close(tapwise.conv2d_weight(x, w.shape, dy, stride, 1), grad.conv2d_weight(x, w.shape, dy, stride, 1))
    bias = torch.tensor([torch.nan, 1, -torch.inf])
    close(tapwise.conv_transpose2d(dy, w, bias, 4), functional.conv_transpose2d(dy, w, bias, 4))


def test_of_no_element() -> None:
    bias = made((2,))
    found = tapwise.conv_transpose2d(made((2, 0, 4, 5)), made((0, 2, 3, 3)), bias, activation="relu")
    torch.testing.assert_close(found, functional.relu(bias)[None, :, None, None].expand(2, 2, 6, 7))
    assert tapwise.conv_transpose2d(made((0, 3, 4, 4)), made((3, 2, 3, 3)), bias).shape == (0, 2, 6, 6)
    assert tapwise.conv_transpose1d(made((2, 3, 4)), made((3, 0, 3))).shape == (2, 0, 6)
    # Padding may take all of the result, and filters may be larger than x.
    assert tapwise.conv_transpose2d(made((2, 3, 1, 4)), made((3, 2, 2, 3)), padding=(1, 0)).shape == (2, 2, 0, 6)
    x, w = made((1, 2, 2, 2)), made((2, 3, 5, 7))
    torch.testing.assert_close(tapwise.conv_transpose2d(x, w), functional.conv_transpose2d(x, w), rtol=1e-4, atol=1e-4)
    # Sums of no terms are zeros.
    assert not tapwise.conv2d_input((2, 3, 6, 6), made((0, 3, 3, 3)), made((2, 0, 4, 4))).any()
    assert not tapwise.conv2d_weight(made((0, 3, 6, 6)), (4, 3, 3, 3), made((0, 4, 4, 4))).any()
    with pytest.raises(InvalidProblem, match=r"kernel=\(3, 3\)"):
        tapwise.conv2d_input((2, 3, 2, 2), made((4, 3, 3, 3)), made((2, 4, 0, 0)))
    with pytest.raises(InvalidProblem, match="x has shape"):
        tapwise.conv_transpose2d(made((2, 3, 0, 4)), made((3, 2, 3, 3)))


def test_bad_arguments_are_named() -> None:
    x, w, dy = (np.zeros(shape, np.float32) for shape in ((2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 6, 6)))
    with pytest.raises(InvalidProblem, match=r"dy has shape \(2, 4, 6, 6\): \(2, 4, 8, 8\)"):
        tapwise.conv2d_input(x.shape, w, dy, padding=1)
    with pytest.raises(InvalidProblem, match="dy has shape"):
        tapwise.conv2d_weight(x, w.shape, dy, stride=2)
    with pytest.raises(InvalidProblem, match="groups=2"):
        tapwise.conv2d_input(x.shape, w, dy, groups=2)
    with pytest.raises(InvalidProblem, match="w has dtype float64"):
        tapwise.conv2d_input(x.shape, w.astype(np.float64), dy)
    with pytest.raises(InvalidProblem, match="weight_size"):
        tapwise.conv2d_weight(x, (4, 3, 3), dy)
    with pytest.raises(InvalidProblem, match="output_padding"):
        tapwise.conv_transpose2d(dy, w, output_padding=1)
    with pytest.raises(InvalidProblem, match="w has shape"):
        tapwise.conv_transpose2d(x, w)
    with pytest.raises(InvalidProblem, match="out overlaps x"):
        tapwise.conv2d_weight(x, (2, 3, 8, 8), np.zeros((2, 2, 1, 1), np.float32), out=x)
    with pytest.raises(InvalidProblem, match="out overlaps dy"):
        tapwise.conv2d_input((2, 4, 6, 6), w[:, :1, :1, :1].repeat(4, 1), dy, out=dy)
    with pytest.raises(InvalidProblem, match="out overlaps w"):
        tapwise.conv_transpose2d(x[:, :1, :1, :1], w[:1], out=np.lib.stride_tricks.as_strided(w, (2, 3, 3, 3)))
    with pytest.raises(InvalidProblem, match=r"dy has shape .* stride=.*, padding=.* dilation="):
        tapwise.conv2d_input(x.shape, w, dy, dilation=2)
    with pytest.raises(InvalidProblem, match=r"dy has shape \(6, 6\)"):
        tapwise.conv2d_input(x.shape, w, dy[0, 0])
    with pytest.raises(InvalidProblem, match="w has dtype float32: float16, as dy"):
        tapwise.conv2d_input(x.shape, w, dy.astype(np.float16))
    with pytest.raises(InvalidProblem, match=r"x of shape .*, weight_size=\(4, 2, 3, 3\), groups=1"):
        tapwise.conv2d_weight(x, (4, 2, 3, 3), dy)
    bad: Any
    for bad in ([], {}, np.zeros(2), slice(1)):
        with pytest.raises(InvalidProblem, match="math="):
            tapwise.conv2d_weight(x, w.shape, dy, math=bad)
        with pytest.raises(InvalidProblem, match="math="):
            tapwise.conv2d_input(x.shape, w, dy, math=bad)
        with pytest.raises(InvalidProblem, match="activation="):
            tapwise.conv_transpose2d(dy, w, activation=bad)
    with pytest.raises(InvalidProblem, match=r"cuda\.grid_stride"):
        tapwise.conv2d_weight(x, w.shape, dy, algorithm="cpu.winograd")
