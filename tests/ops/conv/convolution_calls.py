"""What the tests of convolution as users call it share: data, results in float64, bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tapwise import arrays

ROUNDING = {np.float64: 2.0**-52, np.float32: 2.0**-23, np.float16: 2.0**-10}


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    values: np.ndarray = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)
    return values


def channels_last(array: np.ndarray) -> np.ndarray:
    return arrays.dense(array, "nhwc")


def activated(activation: str | tuple[str, float], y: torch.Tensor) -> torch.Tensor:
    """PyTorch's activation of that name, or of that name and slope."""
    if isinstance(activation, tuple):
        return functional.leaky_relu(y, activation[1])
    if activation == "gelu_tanh":
        return functional.gelu(y, approximate="tanh")
    result: torch.Tensor = getattr(functional, activation)(y)
    return result


def expected(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, activation: str | tuple[str, float] | None = None, residual: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(torch's result in float64, the size of what is summed); padding as torch takes it, or four sides."""
    wide = [None if a is None else torch.from_numpy(np.ascontiguousarray(a, np.float64)) for a in (x, w, bias)]
    convolve = functional.conv2d if w.ndim == 4 else functional.conv1d
    if isinstance(padding, tuple) and isinstance(padding[0], tuple):
        wide[0] = functional.pad(wide[0], [side for pair in reversed(padding) for side in pair])
        padding = 0
    y = convolve(*wide, stride, padding, dilation, groups)
    size = convolve(*(None if a is None else a.abs() for a in wide), stride, padding, dilation, groups)
    if residual is not None:
        y, size = y + torch.from_numpy(residual.astype(np.float64)), size + torch.from_numpy(np.abs(residual))
    if activation is not None:
        y = activated(activation, y)
    return y.numpy(), size.numpy().astype(np.float64)


def assert_right(y: Any, result: tuple[np.ndarray, np.ndarray], dtype: Any = np.float32, terms: int = 100) -> None:
    """Within rounding of what torch gives in float64: of the sum in its accumulator, and of the output."""
    value, size = result
    y = np.asarray(y)
    assert y.dtype == dtype
    assert y.shape == value.shape
    unit = ROUNDING[np.float64 if dtype == np.float64 else np.float32]
    allowed = unit * (12 + terms**0.5) * (size + np.abs(value) + 1) + ROUNDING[dtype] * np.abs(value)
    if dtype == np.float16:
        allowed += 2.0**-24
    assert np.all(np.abs(y - value) <= allowed), float((np.abs(y - value) / allowed).max())


def good() -> dict[str, Any]:
    return {"x": normal(2, 6, 9, 8), "w": normal(4, 6, 3, 3), "bias": normal(4)}
