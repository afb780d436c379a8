"""softmax in float64, straight from the definition."""

from __future__ import annotations

import numpy as np


def softmax(x: np.ndarray, axis: int | None, log: bool) -> tuple[np.ndarray, np.ndarray]:
    """(y64, x less the largest). A row with a NaN, with +infinity, or of nothing but -infinity is NaN."""
    x = x.astype(np.float64)
    shifted = x - x.max(axis=axis, keepdims=True, initial=-np.inf)
    e = np.exp(shifted)
    total = e.sum(axis=axis, keepdims=True)
    return shifted - np.log(total) if log else e / total, shifted
