"""Filters on pictures in float64, straight from the definition."""

from __future__ import annotations

from math import prod, sqrt

import numpy as np

from tapwise.problem_filter import DTYPES, FilterProblem, source_index


def _taps(problem: FilterProblem, x: np.ndarray, weights: np.ndarray, op: str) -> tuple[np.ndarray, np.ndarray]:
    """(combination over the taps of (t, r, s) weights, sum of absolute terms) of (d, h, w, c)."""
    tables = [
        source_index(np.arange(-before, length + size - 1 - before), length, mode)
        for before, length, size, mode in zip(problem.before, problem.spatial, problem.size, problem.modes, strict=True)
    ]
    total = np.zeros(x.shape) if op == "sum" else np.full(x.shape, -np.inf if op == "max" else np.inf)
    size = np.zeros(x.shape)
    for tap in zip(*np.nonzero(weights), strict=True):
        at = [table[start : start + n] for table, start, n in zip(tables, tap, problem.spatial, strict=True)]
        seen = x[np.ix_(*(np.maximum(one, 0) for one in at))]
        outside = (at[0] < 0)[:, None, None] | (at[1] < 0)[None, :, None] | (at[2] < 0)[None, None, :]
        seen = np.where(outside[..., None], problem.cval, seen)
        if op == "sum":
            total = total + weights[tap] * seen
            size += abs(weights[tap]) * np.abs(seen)
        else:
            total = (np.maximum if op == "max" else np.minimum)(total, seen)
    return total, size


def apply(problem: FilterProblem, x: np.ndarray, w: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(y64, bound) for the weights that `problem.weights()` gives unless w does.

    Sums of whole numbers with whole weights are exact. A sum that is cut off to a whole number may be off by one where
    it lies as near to one as its roundings.
    """
    with np.errstate(all="ignore"):
        picture = np.asarray(x, np.float64).reshape(*problem.spatial, problem.c)
        if problem.op in ("max", "min"):
            y, _ = _taps(problem, picture, np.ones(problem.size) if w is None else w.reshape(problem.size), problem.op)
            y = y.reshape(problem.y_shape)
            return y, np.zeros_like(y)
        weights = problem.weights() if w is None else np.asarray(w, np.float64)
        whole = problem.whole and not problem.clip
        integers = bool(np.all(weights == np.rint(weights))) and DTYPES[problem.dtype].kind in "iu"
        first, last = problem.nudges(weights)
        if problem.op == "dense":
            y, size = _taps(problem, picture, weights.reshape(problem.size), "sum")
        else:
            _, r, s = problem.size
            column = problem.replace(size=(1, r, 1), before=(0, problem.before[1], 0))
            row = problem.replace(size=(1, 1, s), before=(0, 0, problem.before[2]))
            y, size = _taps(column, picture, weights[:r].reshape(1, r, 1), "sum")
            outside = problem.cval * float(weights[:r].sum())
            if whole and problem.cut:
                y, outside = np.trunc(y + np.copysign(first, y)), float(np.trunc(outside + np.copysign(first, outside)))
            across = row.replace(cval=outside)
            _, size = _taps(across, size, np.abs(weights[r:]).reshape(1, 1, s), "sum")
            y, _ = _taps(across, y, weights[r:].reshape(1, 1, s), "sum")
        y, size = y.reshape(problem.y_shape), size.reshape(problem.y_shape)
        u = 2.0**-24 if problem.single else 2.0**-53
        bound = (8.0 + 2.0 * sqrt(prod(problem.size))) * u * size
        if not problem.whole:
            kind = np.finfo(DTYPES[problem.to])
            return y, bound + float(kind.eps) / 2 * np.abs(y) + float(kind.smallest_subnormal)
        info = np.iinfo(DTYPES[problem.to])
        if problem.clip:
            near = np.abs(y - np.floor(y) - 0.5) <= bound
            return np.clip(np.floor(y + 0.5), info.min, info.max), np.where(near, 1.0, 0.0)
        wrapped = np.trunc(y + np.copysign(last, y)).astype(np.int64).astype(DTYPES[problem.to]).astype(np.float64)
        return wrapped, np.zeros_like(y) if integers else np.ones_like(y)
