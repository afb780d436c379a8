"""Convolution in float64, straight from the definition: what every result is compared with.

    y[n, k, p, q] = activation(sum over c, r, s of w[k, c, r, s] * x[n, c, p * stride + r * dilation - padding, ...]
                               + bias[k] + residual[n, k, p, q])

The terms of each output pixel are gathered from a strided view of the zero-padded input, and NumPy's matrix product
adds them up; band by band of output rows, so that memory stays bounded.
"""

from __future__ import annotations

import math
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tapwise.errors import InvalidProblem

if TYPE_CHECKING:
    from tapwise.ops.conv.problem import ConvProblem

_COLUMN_BYTES: Final = 64 << 20
_FILTER_BYTES: Final = 128 << 20

_erf = np.frompyfunc(math.erf, 1, 1)


def convolve(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """y as float64, of logical shape (n, k, *output), with the bias, residual and activation that the problem names.

    x (n, c, *spatial), w (k, c / groups, *kernel), bias (k,), residual as y: any dtype and strides; 1 to 3 axes.
    Raises InvalidProblem for shapes that are not the problem's, and for directions other than fprop.
    """
    if problem.direction != "fprop":
        raise InvalidProblem(f"direction={problem.direction!r}: the reference computes fprop")
    _check_shape("x", x, problem.x_shape, True)
    _check_shape("w", w, problem.w_shape, True)
    _check_shape("bias", bias, (problem.k,), problem.bias)
    _check_shape("residual", residual, problem.y_shape, problem.residual)
    y = np.zeros(problem.y_shape)
    # NaN and infinity are results like others.
    with np.errstate(all="ignore"):
        if not problem.empty and problem.c:
            _sum_terms(problem, x, w, y)
        if bias is not None:
            y += bias.astype(np.float64).reshape(-1, *[1] * len(problem.output))
        if residual is not None:
            y += residual
        return activate(problem.activation, y)


def _check_shape(name: str, array: np.ndarray | None, shape: tuple[int, ...], wanted: bool) -> None:
    if (array is not None) != wanted:
        raise InvalidProblem(f"{name}: the problem has {'one' if wanted else 'none'}")
    if array is not None and array.shape != shape:
        raise InvalidProblem(f"{name} has shape {array.shape}: {shape} is allowed")


def _sum_terms(problem: ConvProblem, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """Add the convolution to y (n, k, *output), C order."""
    groups, axes = problem.groups, len(problem.output)
    filters = w.reshape(groups, problem.group_k, problem.gemm_k)
    sums = y.reshape(problem.n, groups, problem.group_k, problem.output[0], prod(problem.output[1:]))
    row_bytes = 8 * problem.c * prod(problem.kernel) * sums.shape[-1]
    rows = max(1, min(problem.output[0], _COLUMN_BYTES // row_bytes))
    step = max(1, _FILTER_BYTES // (8 * groups * problem.gemm_k))
    for k0 in range(0, problem.group_k, step):
        block = filters[:, k0 : k0 + step].astype(np.float64)
        for image in range(problem.n):
            for p0 in range(0, problem.output[0], rows):
                p1 = min(p0 + rows, problem.output[0])
                slab = _padded_rows(problem, x[image], p0, p1)
                windows = np.lib.stride_tricks.as_strided(
                    slab,
                    (problem.c, *problem.kernel, p1 - p0, *problem.output[1:]),
                    (
                        slab.strides[0],
                        *(slab.strides[1 + axis] * problem.dilation[axis] for axis in range(axes)),
                        *(slab.strides[1 + axis] * problem.stride[axis] for axis in range(axes)),
                    ),
                    writeable=False,
                )
                columns = windows.reshape(groups, problem.gemm_k, -1)
                product = np.matmul(block, columns)
                sums[image, :, k0 : k0 + step, p0:p1] += product.reshape(*product.shape[:2], p1 - p0, -1)


def _padded_rows(problem: ConvProblem, image: np.ndarray, p0: int, p1: int) -> np.ndarray:
    """The part of the zero-padded image (c, *spatial) that outputs p0 to p1 of the first axis read, as float64."""
    first = p0 * problem.stride[0] - problem.padding[0][0]
    span = (p1 - 1 - p0) * problem.stride[0] + problem.reach[0]
    rest = [size + sum(pad) for size, pad in zip(problem.spatial[1:], problem.padding[1:], strict=True)]
    slab = np.zeros((problem.c, span, *rest))
    top, bottom = max(first, 0), min(first + span, problem.spatial[0])
    if top < bottom:
        inner = [
            slice(pad[0], pad[0] + size) for size, pad in zip(problem.spatial[1:], problem.padding[1:], strict=True)
        ]
        slab[(slice(None), slice(top - first, bottom - first), *inner)] = image[:, top:bottom]
    return slab


def activate(name: str | None, values: np.ndarray) -> np.ndarray:
    """The activation of that name, written over `values` and returned. NaN stays NaN."""
    if name == "relu":
        np.maximum(values, 0, out=values)
    elif name == "relu6":
        np.clip(values, 0, 6, out=values)
    elif name == "tanh":
        np.tanh(values, out=values)
    elif name == "gelu":
        erf: Any = _erf(values * math.sqrt(0.5))
        values *= 0.5 + 0.5 * erf.astype(values.dtype)
    elif name in ("sigmoid", "silu"):
        with np.errstate(over="ignore", invalid="ignore"):
            sigmoid = 1 / (1 + np.exp(-values))
            np.multiply(values if name == "silu" else 1, sigmoid, out=values)
    elif name is not None:
        raise InvalidProblem(f"activation={name!r} is not known")
    return values
