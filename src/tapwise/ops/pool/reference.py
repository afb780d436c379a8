"""Pooling in float64, straight from the definition."""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tapwise.ops.pool.problem import PoolProblem


def windows(problem: PoolProblem, x: np.ndarray, outside: float) -> np.ndarray:
    """(n, c, *output, *kernel): what each window sees, `outside` where that is no input."""
    result = np.asarray(x, np.float64)
    for axis in range(len(problem.spatial)):
        taps = np.arange(problem.kernel[axis]) * problem.dilation[axis]
        at = np.arange(problem.output[axis])[:, None] * problem.stride[axis] - problem.padding[axis][0] + taps
        inside = (at >= 0) & (at < problem.spatial[axis])
        number = 2 + axis
        taken = np.take(result, np.where(inside, at, 0), axis=number)
        shape = [1] * taken.ndim
        shape[number : number + 2] = inside.shape
        result = np.moveaxis(np.where(inside.reshape(shape), taken, outside), number + 1, -1)
    return result


def pool(problem: PoolProblem, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(y64, bound): max is exact, a mean is off by its sum's roundings."""
    axes = tuple(range(-len(problem.spatial), 0))
    with np.errstate(all="ignore"):
        if problem.op == "max":
            y = windows(problem, x, -np.inf).max(axis=axes)
            return y, np.zeros_like(y)
        seen = windows(problem, x, 0.0)
        if problem.divisor is not None:
            count = np.full(problem.output, float(problem.divisor))
        else:
            count = np.ones(problem.output)
            for axis in range(len(problem.spatial)):
                shape = [1] * len(problem.output)
                shape[axis] = -1
                count = count * np.array(problem.counts(axis), np.float64).reshape(shape)
        y = seen.sum(axis=axes) / count
        size = np.abs(seen).sum(axis=axes) / np.abs(count)
        return y, (8.0 + 2.0 * sqrt(prod(problem.kernel))) * problem.roundoff * size + problem.rounding(y)


def indices(problem: PoolProblem, x: np.ndarray) -> np.ndarray:
    """Where each maximum stands in its plane: the first in the window, and a NaN before everything."""
    axes = len(problem.spatial)
    seen = windows(problem, x, -np.inf)
    plane = np.arange(prod(problem.spatial), dtype=np.float64).reshape(1, 1, *problem.spatial)
    places = windows(problem.replace(n=1, c=1), plane, -1.0).reshape(*problem.output, -1)
    flat = seen.reshape(*seen.shape[:-axes], -1)
    # Padding is never chosen, not even in a window of nothing but -infinity.
    order = np.where(places >= 0, np.where(np.isnan(flat), np.inf, flat), -np.inf)
    rank = np.where(np.isnan(flat) & (places >= 0), 2, np.where(places >= 0, 1, 0))
    best = np.lexsort((np.broadcast_to(-np.arange(flat.shape[-1]), flat.shape), order, rank), axis=-1)[..., -1]
    return np.take_along_axis(np.broadcast_to(places, flat.shape), best[..., None], -1)[..., 0].astype(np.int64)
