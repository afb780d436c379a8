"""Filters on pictures in float64, straight from the definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tapwise.integers import ceil_div
from tapwise.ops.filter.edges import window_sources

# Elements that are worked out together.
_BLOCK: Final = 1 << 15


def combine(
    op: str, x: np.ndarray, weights: np.ndarray, before: Sequence[int], modes: Sequence[str], cval: float
) -> tuple[np.ndarray, np.ndarray]:
    """(sum, max or min over the taps of (t, r, s) weights, sum of absolute terms) of x (d, h, w, c)."""
    padded = x
    for axis in range(3):
        table = window_sources(x.shape[axis], weights.shape[axis], before[axis], modes[axis])
        padded = np.take(padded, np.maximum(table, 0), axis=axis)
        outside = [slice(None)] * axis + [table < 0]
        padded[tuple(outside)] = cval
    total, size_of = np.empty(x.shape), np.zeros(x.shape)
    taps = list(zip(*np.nonzero(weights), strict=True))
    depth, height, width, c = x.shape
    # Some rows at a time, which stay in the caches.
    step = max(1, _BLOCK // max(1, width * c))
    for d, first in np.ndindex(depth, ceil_div(height, step)):
        rows = slice(first * step, min(height, (first + 1) * step))
        value = np.full((rows.stop - rows.start, width, c), {"sum": 0.0, "max": -np.inf, "min": np.inf}[op])
        magnitude = np.zeros_like(value)
        for t, r, s in taps:
            seen = padded[d + t, rows.start + r : rows.stop + r, s : s + width]
            if op == "sum":
                term = seen * weights[t, r, s]
                value += term
                np.abs(term, out=term)
                magnitude += term
            else:
                (np.maximum if op == "max" else np.minimum)(value, seen, out=value)
        total[d, rows], size_of[d, rows] = value, magnitude
    return total, size_of
