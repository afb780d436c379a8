"""Convolution in float64, straight from the definition: what every result is compared with.

    y[n, k, p, q] = activation(sum over c, r, s of w[k, c, r, s] * x[n, c, p * stride + r * dilation - padding, ...]
                               + bias[k] + residual[n, k, p, q])

The terms of each output pixel are gathered from a strided view of the zero-padded input, and NumPy's matrix product
adds them up; band by band of output rows, so that memory stays bounded.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any, Final

import numpy as np

from tapwise.activation import named_activation
from tapwise.errors import InvalidProblem

Pairs = tuple[tuple[int, int], ...]

_COLUMN_BYTES: Final = 64 << 20
_FILTER_BYTES: Final = 128 << 20

# gelu_tanh(v) = v sigmoid(v (GELU_LINEAR + GELU_CUBIC v^2)).
GELU_LINEAR: Final = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC: Final = GELU_LINEAR * 0.044715

_erf = np.frompyfunc(math.erf, 1, 1)


def convolve(
    x: np.ndarray, w: np.ndarray, stride: tuple[int, ...], padding: Pairs, dilation: tuple[int, ...], groups: int = 1,
    bias: np.ndarray | None = None, residual: np.ndarray | None = None, activation: str | None = None,
) -> np.ndarray:  # fmt: skip
    """y as float64, of shape (n, k, *output).

    x (n, c, *spatial), w (k, c / groups, *kernel), bias (k,), residual as y: any dtype and strides; any number of axes.
    `padding`: (before, after) for each axis.
    """
    reach = [(r - 1) * d + 1 for r, d in zip(w.shape[2:], dilation, strict=True)]
    steps = zip(x.shape[2:], padding, reach, stride, strict=True)
    output = [(size + sum(pad) - span) // step + 1 for size, pad, span, step in steps]
    y = np.zeros((len(x), len(w), *output))
    # NaN and infinity are results like others.
    with np.errstate(all="ignore"):
        if y.size and w.size:
            _sum_terms(x, w, stride, padding, dilation, groups, y)
        if bias is not None:
            y += bias.astype(np.float64).reshape(-1, *[1] * len(output))
        if residual is not None:
            y += residual
        return activate(activation, y)


def _sum_terms(
    x: np.ndarray, w: np.ndarray, stride: tuple[int, ...], padding: Pairs, dilation: tuple[int, ...], groups: int,
    y: np.ndarray,
) -> None:  # fmt: skip
    """Add the convolution to y (n, k, *output), C order."""
    c, (k, group_c, *kernel), (n, _, height, *rest) = x.shape[1], w.shape, y.shape
    group_k, terms = k // groups, group_c * prod(kernel)
    filters = w.reshape(groups, group_k, terms)
    sums = y.reshape(n, groups, group_k, height, prod(rest))
    rows = max(1, min(height, _COLUMN_BYTES // (8 * c * prod(kernel) * sums.shape[-1])))
    step = max(1, _FILTER_BYTES // (8 * groups * terms))
    for k0 in range(0, group_k, step):
        block = filters[:, k0 : k0 + step].astype(np.float64)
        for image in range(n):
            for p0 in range(0, height, rows):
                p1 = min(p0 + rows, height)
                first = p0 * stride[0] - padding[0][0]
                slab = _padded_rows(
                    x[image], first, (p1 - 1 - p0) * stride[0] + (kernel[0] - 1) * dilation[0] + 1, padding
                )
                windows = np.lib.stride_tricks.as_strided(
                    slab,
                    (c, *kernel, p1 - p0, *rest),
                    (slab.strides[0], *np.multiply(slab.strides[1:], dilation), *np.multiply(slab.strides[1:], stride)),
                    writeable=False,
                )
                product = np.matmul(block, windows.reshape(groups, terms, -1))
                sums[image, :, k0 : k0 + step, p0:p1] += product.reshape(*product.shape[:2], p1 - p0, -1)


def _padded_rows(image: np.ndarray, first: int, span: int, padding: Pairs) -> np.ndarray:
    """`span` rows of the zero-padded image (c, *spatial) from row `first` (of the image itself), as float64."""
    c, height, *rest = image.shape
    slab = np.zeros((c, span, *(size + sum(pad) for size, pad in zip(rest, padding[1:], strict=True))))
    top, bottom = max(first, 0), min(first + span, height)
    if top < bottom:
        inner = [slice(before, before + size) for size, (before, _) in zip(rest, padding[1:], strict=True)]
        slab[(slice(None), slice(top - first, bottom - first), *inner)] = image[:, top:bottom]
    return slab


def activate(activation: str | None, values: np.ndarray) -> np.ndarray:
    """The activation of that word, written over `values` and returned. NaN stays NaN."""
    name, slope = named_activation(activation)
    if name == "relu":
        np.maximum(values, 0, out=values)
    elif name == "relu6":
        np.clip(values, 0, 6, out=values)
    elif name == "tanh":
        np.tanh(values, out=values)
    elif name == "gelu":
        erf: Any = _erf(values * math.sqrt(0.5))
        values *= 0.5 + 0.5 * erf.astype(values.dtype)
    elif name == "leaky_relu":
        with np.errstate(all="ignore"):
            np.multiply(values, slope, out=values, where=~(values > 0))
    elif name in ("hardsigmoid", "hardswish"):
        with np.errstate(invalid="ignore"):
            hard = np.clip(values + 3, 0, 6) / 6
            np.multiply(values if name == "hardswish" else 1, hard, out=values)
    elif name in ("sigmoid", "silu", "gelu_tanh"):
        with np.errstate(over="ignore", invalid="ignore"):
            # 1 + tanh(t) is twice the sigmoid of 2 t.
            argument = values * (GELU_LINEAR + GELU_CUBIC * (values * values)) if name == "gelu_tanh" else values
            sigmoid = 1 / (1 + np.exp(-argument))
            np.multiply(1 if name == "sigmoid" else values, sigmoid, out=values)
    elif name is not None:
        raise InvalidProblem(f"activation={name!r} is not known")
    return values
