"""Weights of filters in the dtype that they are multiplied in."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

# Units in the last place that a weight may be changed by to keep the sum of all.
MOST_ROUNDINGS: Final = 4


def rounded(weights: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Weights in a dtype, with the sum that they have in float64: what the larger ones lose, the smaller ones get.

    But for weights so much smaller that it would be more than a few roundings of their own.
    """
    if dtype != np.float32:
        return weights.astype(dtype)
    result, rest = np.empty(len(weights), dtype), 0.0
    for number in np.argsort(-np.abs(weights), kind="stable"):
        wanted = float(weights[number])
        wanted += rest if abs(rest) <= MOST_ROUNDINGS * 2.0**-24 * abs(wanted) else 0.0
        result[number] = wanted
        rest = wanted - float(result[number])
        # Infinity has no rest.
        rest = rest if np.isfinite(rest) else 0.0
    return result
