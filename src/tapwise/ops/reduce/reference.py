"""reduce in float64, straight from the definition."""

from __future__ import annotations

import numpy as np


def reduce(op: str, x: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(y64 without those axes, the size of what rounding errors are relative to).

    argmax and argmin: exact positions, the first of equals, and the first NaN before all.
    """
    if op in ("argmax", "argmin"):
        axis = axes[0] if len(axes) < x.ndim else None
        y = np.asarray((np.argmax if op == "argmax" else np.argmin)(x, axis=axis), np.float64)
        return y, np.zeros_like(y)
    # Sums of float64 need more than float64, where the machine has more.
    x = x.astype(np.longdouble if x.dtype == np.float64 else np.float64)
    y, size = _reduced(op, x, axes)
    return y.astype(np.float64), size.astype(np.float64)


def _reduced(op: str, x: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    if op in ("sum", "mean"):
        y, size = (np.asarray(values.sum(axis=axes)) for values in (x, np.abs(x)))
        count = x.size / y.size if op == "mean" else 1.0
        return y / count, size / count
    if op == "logsumexp":
        top = x.max(axis=axes, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0.0)
        y = np.log(np.exp(x - top).sum(axis=axes, keepdims=True)) + top
        return y, np.where(np.isfinite(y), np.abs(y), 0.0) + np.abs(top) + 1.0
    terms = np.abs(x) if op == "norm1" else np.square(x) if op in ("norm2", "sumsquare") else x
    combine = getattr(terms, op) if op in ("max", "min", "prod") else terms.sum
    y = np.asarray(combine(axis=axes))
    if op == "norm2":
        y = np.sqrt(y)
    return y, np.zeros_like(y) if op in ("max", "min") else np.abs(y)
