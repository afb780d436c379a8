"""What batch normalisation adds up, in float64, straight from the definition."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tapwise.activation import LEAKY_RELU, named_activation

# Where derivatives jump.
KINKS: dict[str, tuple[float, ...]] = {
    "relu": (0.0,), "relu6": (0.0, 6.0), LEAKY_RELU: (0.0,), "hardsigmoid": (-3.0, 3.0), "hardswish": (-3.0, 3.0),
}  # fmt: skip
_LINEAR = 1.59576912160573071
_CUBIC = _LINEAR * 0.044715
_erf: Any = np.vectorize(math.erf, otypes=[np.float64])


def derivative(activation: str | None, u: np.ndarray) -> np.ndarray:
    """Of an activation at u, with PyTorch's values where it has none; NaN of NaN."""
    name, slope = named_activation(activation)
    one = np.ones_like(u)
    if name == "relu":
        return np.where(u <= 0, 0.0, one)
    if name == "relu6":
        return np.where((u <= 0) | (u >= 6), 0.0, one)
    if name == LEAKY_RELU:
        return np.where(u > 0, one, slope)
    if name == "hardsigmoid":
        return np.where((u <= -3) | (u >= 3), 0.0, one / 6)
    if name == "hardswish":
        return np.where(u <= -3, 0.0, np.where(u >= 3, one, u / 3 + 0.5))
    if name == "tanh":
        return np.asarray(1 - np.tanh(u) ** 2)
    if name == "gelu":
        density = np.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
        return np.asarray(0.5 * (1 + _erf(u * math.sqrt(0.5))) + u * density)
    if name in ("sigmoid", "silu", "gelu_tanh"):
        z = u * (_LINEAR + _CUBIC * u * u) if name == "gelu_tanh" else u
        s = 1 / (1 + np.exp(-z))
        if name == "sigmoid":
            return np.asarray(s * (1 - s))
        return np.asarray(s + u * s * (1 - s) * (_LINEAR + 3 * _CUBIC * u * u if name == "gelu_tanh" else 1))
    return one


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean, biased variance) of each channel of x (n, c, h, w)."""
    # Each channel's elements beside each other: over several axes NumPy adds one after the other, which of thousands of
    # doubles is less exact than what is tested against it.
    rows = np.ascontiguousarray(x.swapaxes(0, 1), np.float64).reshape(x.shape[1], -1)
    return rows.mean(axis=1), rows.var(axis=1)


class Terms(NamedTuple):
    """Of each element of x: g, xhat, and u, the activation's argument."""

    g: np.ndarray
    xhat: np.ndarray
    u: np.ndarray


def gradient_terms(dy: np.ndarray, x: np.ndarray, parameters: np.ndarray, activation: str | None) -> Terms:
    """dy and x (n, c, h, w); parameters (4, c): mean, invstd, weight, bias."""
    mean, invstd, weight, bias = parameters.astype(np.float64)[:, :, None, None]
    xhat = (x.astype(np.float64) - mean) * invstd
    u = xhat * weight + bias
    return Terms(dy.astype(np.float64) * derivative(activation, u), xhat, u)
