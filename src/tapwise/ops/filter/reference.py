"""Filters on pictures in float64, straight from the definition."""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from tapwise.integers import ceil_div
from tapwise.ops.filter.edges import window_sources

if TYPE_CHECKING:
    from tapwise.ops.filter.problem import FilterProblem

# Elements that are worked out together.
_BLOCK: Final = 1 << 15


def _taps(problem: FilterProblem, x: np.ndarray, weights: np.ndarray, op: str) -> tuple[np.ndarray, np.ndarray]:
    """(combination over the taps of (t, r, s) weights, sum of absolute terms) of (d, h, w, c)."""
    padded = x
    for axis in range(3):
        of_axis = problem.spatial[axis], problem.size[axis], problem.before[axis], problem.modes[axis]
        table = window_sources(*of_axis)
        padded = np.take(padded, np.maximum(table, 0), axis=axis)
        outside = [slice(None)] * axis + [table < 0]
        padded[tuple(outside)] = problem.cval
    total, size_of = np.empty(x.shape), np.zeros(x.shape)
    taps = list(zip(*np.nonzero(weights), strict=True))
    _, height, width = problem.spatial
    # Some rows at a time, which stay in the caches.
    step = max(1, _BLOCK // max(1, width * problem.c))
    for d, first in np.ndindex(problem.spatial[0], ceil_div(height, step)):
        rows = slice(first * step, min(height, (first + 1) * step))
        count = rows.stop - rows.start
        value = np.zeros((count, width, problem.c))
        if op != "sum":
            value.fill(-np.inf if op == "max" else np.inf)
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


def apply(problem: FilterProblem, x: np.ndarray, w: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(y64, bound) for the weights that `problem.weights()` gives unless w does.

    Sums of integers with integral weights are exact. A sum that is truncated to an integer may be off by one where it
    lies as near to one as its roundings.
    """
    with np.errstate(all="ignore"):
        picture = np.asarray(x, np.float64).reshape(*problem.spatial, problem.c)
        if problem.op in ("max", "min"):
            y, _ = _taps(problem, picture, np.ones(problem.size) if w is None else w.reshape(problem.size), problem.op)
            y = y.reshape(problem.y_shape)
            return y, np.zeros_like(y)
        weights = problem.weights() if w is None else np.asarray(w, np.float64)
        integers = bool(np.all(weights == np.rint(weights))) and problem.x_dtype.kind in "iu"
        first, last = problem.rounding_epsilons(weights)
        if problem.op == "dense":
            y, size = _taps(problem, picture, weights.reshape(problem.size), "sum")
        else:
            _, r, s = problem.size
            column = problem.replace(size=(1, r, 1), before=(0, problem.before[1], 0))
            row = problem.replace(size=(1, 1, s), before=(0, 0, problem.before[2]))
            y, size = _taps(column, picture, weights[:r].reshape(1, r, 1), "sum")
            outside = problem.cval * float(weights[:r].sum())
            if problem.truncates_columns:
                y, outside = np.trunc(y + np.copysign(first, y)), float(np.trunc(outside + np.copysign(first, outside)))
            across = row.replace(cval=outside)
            _, size = _taps(across, size, np.abs(weights[r:]).reshape(1, 1, s), "sum")
            y, _ = _taps(across, y, weights[r:].reshape(1, 1, s), "sum")
        y, size = y.reshape(problem.y_shape), size.reshape(problem.y_shape)
        bound = (8.0 + 2.0 * sqrt(prod(problem.size))) * problem.roundoff * size
        if not problem.integral:
            return y, bound + problem.rounding(y)
        info = np.iinfo(problem.y_dtype)
        if problem.clip:
            near = np.abs(y - np.floor(y) - 0.5) <= bound
            return np.clip(np.floor(y + 0.5), info.min, info.max), np.where(near, 1.0, 0.0)
        wrapped = np.trunc(y + np.copysign(last, y)).astype(np.int64).astype(problem.y_dtype).astype(np.float64)
        return wrapped, np.zeros_like(y) if integers else np.ones_like(y)
