"""Weights of filters in the dtype that they are multiplied in."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

# Units in the last place that a weight may be changed by to keep the sum of all.
MOST_ROUNDINGS: Final = 4
# Weights in two parts are less than 2 to this.
LARGEST_EXPONENT: Final = 14


def rounded(weights: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Weights in a dtype, with the sum that they have in float64: what the larger ones lose, the smaller ones get.

    But for weights so much smaller that it would be more than a few roundings of their own.
    """
    if dtype != np.float32:
        return weights.astype(dtype)
    result, rest = np.empty(len(weights), dtype), 0.0
    for number in np.argsort(-np.abs(weights), kind="stable"):
        wanted = _with_rest(float(weights[number]), rest)
        result[number] = wanted
        rest = _finite(wanted - float(result[number]))
    return result


def in_two_parts(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """(large, small, exponent): weights * 2^exponent as the sum of two float16 each, the largest below 2^14; their sum
    is kept as `rounded` does.

    A weight keeps 23 bits, one of less than 2^-15 of the largest those down to 2^-39 of it. Infinity and NaN have no
    small part.
    """
    size = np.abs(weights[np.isfinite(weights)])
    exponent = LARGEST_EXPONENT - int(np.frexp(size.max(initial=0.0))[1])
    scaled = np.ldexp(weights, exponent)
    large, small, rest = np.zeros(len(weights), np.float16), np.zeros(len(weights), np.float16), 0.0
    for number in np.argsort(-np.abs(scaled), kind="stable"):
        wanted = _with_rest(float(scaled[number]), rest)
        large[number] = wanted
        small[number] = _finite(wanted - float(large[number]))
        rest = _finite(wanted - float(large[number]) - float(small[number]))
    return large, small, exponent


def _with_rest(weight: float, rest: float) -> float:
    return weight + (rest if abs(rest) <= MOST_ROUNDINGS * 2.0**-24 * abs(weight) else 0.0)


def _finite(rest: float) -> float:
    """Infinity has no rest."""
    return rest if np.isfinite(rest) else 0.0
