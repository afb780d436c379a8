"""Weights of named filters, and whether weights are products of a column and a row."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from tapwise.arguments import shown
from tapwise.errors import InvalidPicture
from tapwise.image import values

# A remainder of the weights that float32 cannot tell from nothing.
_NOTHING: Final = 1e-7
# Passes that at most are tried, and what each costs beside its taps, in taps.
_MOST_PASSES: Final = 3
_PASS: Final = 12
# Derivatives of higher orders are beyond floating point.
_MOST_ORDER: Final = 100


@lru_cache(maxsize=256)
def _gaussian(sigma: float, order: int, radius: int) -> np.ndarray:
    # Each rounding as in scipy, whose integers depend on them.
    x = np.arange(-radius, radius + 1)
    bell = np.exp(-0.5 / (sigma * sigma) * x**2)
    bell = bell / bell.sum()
    if order == 0:
        weights: np.ndarray = bell
    else:
        # The n-th derivative is a polynomial times the bell: p' - p * x / sigma^2 is the next one's polynomial.
        powers = np.arange(order + 1)
        step = np.diag(powers[1:], 1) + np.diag(np.ones(order) / -(sigma * sigma), -1)
        polynomial = np.zeros(order + 1)
        polynomial[0] = 1
        for _ in range(order):
            polynomial = step.dot(polynomial)
        weights = (x[:, None].astype(np.float64) ** powers).dot(polynomial) * bell
    weights.flags.writeable = False
    return weights


def gaussian_weights(sigma: Any, order: Any, radius: Any, truncate: float) -> np.ndarray:
    """Weights to correlate with for a Gaussian, or its derivative of an order; `radius` taps to each side, or from
    `truncate` standard deviations. Raises InvalidPicture."""
    spread, times = values.real(sigma, "sigma"), values.real(order, "order")
    if not 0 <= times <= _MOST_ORDER or times != int(times):
        raise InvalidPicture(f"order={shown(order)}: order must be non-negative, and an integer up to {_MOST_ORDER}")
    if radius is None:
        reach = float(values.real(truncate, "truncate") * spread + 0.5)
        if not -1 < reach <= values.MOST_TAPS // 2:
            words = f"the radius is from 0 to {values.MOST_TAPS // 2}"
            raise InvalidPicture(f"sigma={shown(sigma)}, truncate={shown(truncate)}: {words}")
    else:
        reach = values.real(radius, "radius")
        if reach != int(reach) or not 0 <= reach <= values.MOST_TAPS // 2:
            words = f"Radius must be a nonnegative integer, at most {values.MOST_TAPS // 2}"
            raise InvalidPicture(f"radius={shown(radius)}: {words}.")
    # Of no width: what is not filtered.
    if spread <= 1e-15:
        return np.ones(1)
    # Flipped, as correlation takes the weights of a derivative.
    return _gaussian(spread, int(times), int(reach))[::-1]


def factors(weights: np.ndarray, to: np.dtype[Any], mode: str, cval: float) -> list[np.ndarray] | None:
    """Columns and rows (each in one array) whose products add up to weights (r, s), or None where one sweep is better.

    Only for results in floating point: products round, and an integer would not always come out exact. Not where a
    constant other than 0 lies beyond the edges.
    """
    r, s = weights.shape
    if to.kind != "f" or (mode == "constant" and cval != 0) or r * s <= r + s + _PASS:
        return None
    if not np.isfinite(weights).all():
        return None
    u, sizes, v = np.linalg.svd(weights)
    limit = _NOTHING if to.itemsize <= 4 else 1e-15 * max(r, s)
    rank = int(np.count_nonzero(sizes > limit * max(float(sizes[0]), 1e-300)))
    if rank == 0 or rank > _MOST_PASSES or rank * (r + s + _PASS) >= np.count_nonzero(weights):
        return None
    roots = np.sqrt(sizes[:rank])
    return [np.concatenate([u[:, n] * roots[n], v[n] * roots[n]]) for n in range(rank)]
