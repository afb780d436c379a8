"""Pooling in float64, straight from the definition."""

from __future__ import annotations

from math import prod

import numpy as np

Sizes = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


def windows(
    x: np.ndarray, output: Sizes, kernel: Sizes, stride: Sizes, padding: Pairs, dilation: Sizes, outside: float
) -> np.ndarray:
    """(n, c, *output, taps): what each window of x (n, c, *spatial) sees, `outside` where that is no input."""
    result = np.asarray(x, np.float64)
    for axis, (size, count) in enumerate(zip(x.shape[2:], output, strict=True)):
        taps = np.arange(kernel[axis]) * dilation[axis]
        at = np.arange(count)[:, None] * stride[axis] - padding[axis][0] + taps
        inside = (at >= 0) & (at < size)
        number = 2 + axis
        taken = np.take(result, np.where(inside, at, 0), axis=number)
        shape = [1] * taken.ndim
        shape[number : number + 2] = inside.shape
        result = np.moveaxis(np.where(inside.reshape(shape), taken, outside), number + 1, -1)
    return result.reshape(*x.shape[:2], *output, prod(kernel))


def indices(x: np.ndarray, output: Sizes, kernel: Sizes, stride: Sizes, padding: Pairs, dilation: Sizes) -> np.ndarray:
    """Where each maximum stands in its plane: the first in the window, and the last NaN before all."""
    plane = np.arange(prod(x.shape[2:])).reshape(1, 1, *x.shape[2:])
    places = windows(plane, output, kernel, stride, padding, dilation, -1.0)
    seen = windows(x, output, kernel, stride, padding, dilation, -np.inf)
    # Padding is never chosen, not even in a window of nothing but -infinity.
    order = np.where(places >= 0, np.where(np.isnan(seen), np.inf, seen), -np.inf)
    rank = np.where(np.isnan(seen) & (places >= 0), 2, np.where(places >= 0, 1, 0))
    taps = np.arange(seen.shape[-1])
    best = np.lexsort((np.where(rank == 2, taps, -taps), order, rank), axis=-1)[..., -1]
    return np.take_along_axis(np.broadcast_to(places, seen.shape), best[..., None], -1)[..., 0].astype(np.int64)
