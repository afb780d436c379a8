"""reduce in float64, straight from the definition, with what a result may be off by."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tapwise.ops.reduce.problem import ReduceProblem

# Sums are kept in blocks: rounding errors grow with a block's length, not with the array's.
BLOCK = 1024


def reduce(problem: ReduceProblem, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(y64, bound); for argmax and argmin the exact positions: the first of equals, and the first NaN before all."""
    axes = problem.axes
    if problem.op in ("argmax", "argmin"):
        whole = len(axes) == len(problem.shape)
        pick = np.argmax if problem.op == "argmax" else np.argmin
        y = np.asarray(pick(x) if whole else pick(x, axis=axes[0])).reshape(problem.y_shape)
        return y.astype(np.float64), np.zeros(problem.y_shape)
    x = x.astype(np.float64)
    u = problem.roundoff
    n = problem.length
    with np.errstate(all="ignore"):
        y, size = _value(problem, x, axes)
        steps = {"max": 0.0, "min": 0.0, "prod": 2.0 * n, "logsumexp": 24.0}.get(
            problem.op, 8.0 + 2.0 * sqrt(min(n, BLOCK))
        )
        y, size = y.reshape(problem.y_shape), size.reshape(problem.y_shape)
        return y, u * steps * size + problem.rounding(y)


def _value(problem: ReduceProblem, x: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The result, and the size of what its rounding errors are relative to."""
    op, n = problem.op, problem.length
    sum_of = x.sum(axis=axes) if op in ("sum", "mean") else None
    if sum_of is not None:
        scale = 1.0 if op == "sum" else float(n)
        return np.asarray(sum_of / scale), np.asarray(np.abs(x).sum(axis=axes) / scale)
    if op in ("max", "min"):
        y = np.asarray(x.max(axis=axes) if op == "max" else x.min(axis=axes))
        return y, np.zeros_like(y)
    if op == "prod":
        y = np.asarray(x.prod(axis=axes))
    elif op == "norm1":
        y = np.asarray(np.abs(x).sum(axis=axes))
    elif op == "logsumexp":
        top = x.max(axis=axes, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0.0)
        y = np.asarray(np.log(np.exp(x - top).sum(axis=axes, keepdims=True)) + top)
        return y, np.where(np.isfinite(y), np.abs(y), 0.0) + np.abs(top) + 1.0 + sqrt(min(n, BLOCK)) / 8
    else:
        squares = np.asarray((x * x).sum(axis=axes))
        y = squares if op == "sumsquare" else np.sqrt(squares)
    return y, np.abs(y)
