"""softmax in float64, straight from the definition, with what a result may be off by."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tapwise.ops.softmax.problem import SoftmaxProblem

# Sums are kept in blocks: rounding errors grow with a block's length, not with the array's.
BLOCK = 1024


def softmax(problem: SoftmaxProblem, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(y64, bound). A row with a NaN, with +infinity, or of nothing but -infinity is NaN."""
    x = x.astype(np.float64)
    u = problem.roundoff
    if x.size == 0:
        return x, x
    axis = problem.axes[0] if problem.shape else None
    with np.errstate(all="ignore"):
        shifted = x - x.max(axis=axis, keepdims=True)
        e = np.exp(shifted)
        total = e.sum(axis=axis, keepdims=True)
        factor = 16.0 + 2.0 * sqrt(min(problem.length, BLOCK))
        if problem.log:
            y = shifted - np.log(total)
            bound = u * (factor + 2.0 * np.abs(shifted) + 2.0 * np.abs(y))
        else:
            y = e / total
            # The difference is rounded before it is an exponent.
            bound = u * y * (factor + np.where(np.isfinite(shifted), np.abs(shifted), 0.0))
        return y, bound + problem.rounding(y)
