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


def scatter(dy: np.ndarray, places: np.ndarray, shape: Sizes) -> np.ndarray:
    """dx (n, c, *spatial) of max: each element of dy (n, c, *output) added where its position says; -1 is nowhere."""
    planes, size = shape[0] * shape[1], prod(shape[2:])
    flat = places.reshape(planes, -1) + np.arange(planes)[:, None] * size
    there = places.reshape(planes, -1) >= 0
    return np.bincount(flat[there], dy.reshape(planes, -1)[there], planes * size).reshape(shape)


def spread(dy: np.ndarray, shape: Sizes, kernel: Sizes, stride: Sizes, padding: Pairs, dilation: Sizes) -> np.ndarray:
    """dx (n, c, *spatial): each element of dy (n, c, *output) added to all elements that its window sees."""
    result = dy
    for axis, size in enumerate(shape[2:]):
        source = np.moveaxis(result, 2 + axis, 0)
        total = np.zeros((size, *source.shape[1:]))
        for number, values in enumerate(source):
            start, step = number * stride[axis] - padding[axis][0], dilation[axis]
            first, end = max(0, -(start // step)), min(kernel[axis], -((start - size) // step))
            if first < end:
                total[start + first * step : start + (end - 1) * step + 1 : step] += values
        result = np.moveaxis(total, 0, 2 + axis)
    return result
