"""The float64 reference against torch in float64, and against the definition written out as loops."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional

from tapwise.activation import ACTIVATIONS
from tapwise.errors import InvalidProblem
from tapwise.ops.conv import reference
from tapwise.ops.conv.problem import ConvProblem

PROBLEMS = [
    "c3 h8 w9 k5 r3 s3",
    "n2 c6 h11 w7 k4 r3 s5 stride2x1 pad0:1x2:3 dilation2x1 groups2",
    "c7 h5 w5 k7 r3 s3 pad1 groups7",
    "c4 h6 w5 k12 r2 s2 groups4 pad4",
    "n3 c5 h1 w1 k4 r1 s1",
    "c2 h3 w3 k3 r3 s3 pad6 dilation4",
    "n2 c3 w17 k4 s4 stride3 pad1:2 dilation2",
    "c2 d5 h6 w7 k3 t2 r3 s1 pad1x0x2 stride1x2x1 dilation2x1x1",
    "c0 h4 w4 k3 r3 s3 pad1",
    "n0 c3 h4 w4 k3 r3 s3",
]


def data(problem: ConvProblem, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in (problem.x_shape, problem.w_shape, (problem.k,), problem.y_shape)]


def torch_convolve(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    function = [torch.conv1d, torch.conv2d, torch.conv3d][len(problem.spatial) - 1]
    sides = [side for pair in reversed(problem.padding) for side in pair]
    padded = torch.nn.functional.pad(torch.from_numpy(x), sides)
    y = function(padded, torch.from_numpy(w), None, problem.stride, 0, problem.dilation, problem.groups)
    result: np.ndarray = y.numpy()
    return result


@pytest.mark.parametrize("text", [text for text in PROBLEMS if "c0" not in text])
def test_is_torch_in_float64(text: str) -> None:
    problem = ConvProblem.parse(text)
    x, w, _, _ = data(problem)
    y = problem.convolve(x, w)
    assert y.dtype == np.float64
    assert y.shape == problem.y_shape
    np.testing.assert_allclose(y, torch_convolve(problem, x, w), rtol=1e-12, atol=1e-12)


def test_is_the_definition() -> None:
    problem = ConvProblem.parse("n2 c4 h5 w6 k6 r3 s2 stride2x1 pad1:0x0:2 dilation1x3 groups2")
    x, w, _, _ = data(problem)
    expected = np.zeros(problem.y_shape)
    for n, k, p, q in np.ndindex(problem.y_shape):
        for c, r, s in product(range(2), range(3), range(2)):
            h, v = 2 * p + r - 1, q + 3 * s
            if 0 <= h < 5 and 0 <= v < 6:
                expected[n, k, p, q] += w[k, c, r, s] * x[n, k // 3 * 2 + c, h, v]
    np.testing.assert_allclose(problem.convolve(x, w), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("text", PROBLEMS)
def test_bands_and_filter_blocks_change_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvProblem.parse(text)
    x, w, _, _ = data(problem)
    whole = problem.convolve(x, w)
    monkeypatch.setattr(reference, "_COLUMN_BYTES", 1)
    monkeypatch.setattr(reference, "_FILTER_BYTES", 1)
    np.testing.assert_allclose(problem.convolve(x, w), whole, rtol=1e-12, atol=1e-12)


def activated(activation: str, z: torch.Tensor) -> torch.Tensor:
    """The activation by PyTorch."""
    if activation.startswith("leaky_relu"):
        return functional.leaky_relu(z, float(activation[10:] or 0.01))
    if activation == "gelu_tanh":
        return functional.gelu(z, approximate="tanh")
    result: torch.Tensor = getattr(functional, activation)(z)
    return result


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS, "leaky_relu0.2"])
@pytest.mark.parametrize("text", ["n2 c3 h6 w5 k4 r3 s3", "c3 w9 k4 s2", "n2 c0 h5 w3 k4 r3 s3"])
def test_bias_residual_and_activation(text: str, activation: str | None) -> None:
    problem = ConvProblem.parse(text).replace(bias=True, residual=True, activation=activation)
    x, w, bias, residual = data(problem)
    bias *= 3
    plain = problem.replace(bias=False, residual=False, activation=None)
    z = torch.from_numpy(torch_convolve(plain, x, w) if problem.c else np.zeros(problem.y_shape))
    z = z + torch.from_numpy(bias).reshape(-1, *[1] * len(problem.output)) + torch.from_numpy(residual)
    expected = z if activation is None else activated(activation, z)
    y = problem.convolve(x, w, bias, residual)
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "leaky_relu0", "leaky_relu-3", "leaky_relu1.5"])
def test_activations_of_special_values(activation: str) -> None:
    """Where a function bends, at its ends, and of what is no number."""
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 0, 3, -3, 6, -6, 2.9999999, -2.9999999, 88, -88, -800, 1e38, -1e38])
    wanted = activated(activation, torch.from_numpy(x)).numpy()
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(reference.activate(activation, x.copy()), wanted, rtol=1e-13, atol=1e-15)


def test_any_dtype_and_strides() -> None:
    problem = ConvProblem.parse("n2 c3 h6 w5 k4 r3 s3")
    x, w, _, _ = (array.astype(np.float16) for array in data(problem))
    expected = problem.convolve(x.astype(np.float64), w.astype(np.float64))
    turned = np.asfortranarray(x[:, :, ::-1])[:, :, ::-1]
    np.testing.assert_array_equal(problem.convolve(turned, np.asfortranarray(w)), expected)


def test_nan_and_infinity_go_where_they_are_read() -> None:
    problem = ConvProblem.parse("c1 h5 w5 k1 r2 s2 relu6")
    x, w = np.ones(problem.x_shape), np.ones(problem.w_shape)
    x[0, 0, 0, 0], x[0, 0, 4, 4] = np.nan, np.inf
    y = problem.convolve(x, w)
    assert np.isnan(y[0, 0, 0, 0])
    assert y[0, 0, 3, 3] == 6
    assert np.isfinite(y).sum() == 15


def test_arguments_that_do_not_fit() -> None:
    problem = ConvProblem.parse("c3 h6 w5 k4 r3 s3 bias")
    x, w, bias, residual = data(problem)
    with pytest.raises(InvalidProblem, match="x has shape"):
        problem.convolve(x[:, :2], w, bias)
    with pytest.raises(InvalidProblem, match="bias"):
        problem.convolve(x, w)
    with pytest.raises(InvalidProblem, match="residual"):
        problem.convolve(x, w, bias, residual)
    with pytest.raises(InvalidProblem, match="x has shape"):
        problem.replace(direction="dgrad").convolve(x, w, bias)
    with pytest.raises(InvalidProblem, match="bias=True: not fused behind wgrad"):
        problem.replace(direction="wgrad")


@pytest.mark.parametrize(
    "text",
    [
        "n2 c6 h11 w9 k4 r3 s2 stride2x3 pad1:2x0:1 dilation2x1 groups2",
        "c3 w12 k5 s4 stride3 pad2",
        "c4 d5 h6 w7 k6 t2 r3 s1 pad1x0x2 groups2",
        "n3 c2 h4 w5 k3 r3 s3 pad3",
    ],
)
def test_gradients_are_those_of_torch(text: str) -> None:
    forward = ConvProblem.parse(text)
    x, w, _, _ = data(forward)
    dy = np.random.default_rng(5).standard_normal(forward.y_shape)
    image, filters = torch.from_numpy(x).double().requires_grad_(), torch.from_numpy(w).double().requires_grad_()
    sides = [side for pair in reversed(forward.padding) for side in pair]
    convolve = [torch.conv1d, torch.conv2d, torch.conv3d][len(forward.spatial) - 1]
    steps = forward.stride, 0, forward.dilation, forward.groups
    convolve(torch.nn.functional.pad(image, sides), filters, None, *steps).backward(torch.from_numpy(dy))
    assert image.grad is not None and filters.grad is not None
    np.testing.assert_allclose(forward.replace(direction="dgrad").convolve(dy, w), image.grad.numpy(), atol=1e-12)
    np.testing.assert_allclose(forward.replace(direction="wgrad").convolve(x, dy), filters.grad.numpy(), atol=1e-12)
