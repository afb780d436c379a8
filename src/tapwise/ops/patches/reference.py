"""im2col and col2im in float64, straight from the definition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

Sizes = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


def _padded(shape: Sizes, padding: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Zeros for an image (n, c, *spatial) with its padding, and the view of the image in it."""
    whole = np.zeros((*shape[:2], *(size + sum(pad) for size, pad in zip(shape[2:], padding, strict=True))))
    inner = (slice(before, before + size) for size, (before, _) in zip(shape[2:], padding, strict=True))
    return whole, whole[(slice(None), slice(None), *inner)]


def _taps(padded: np.ndarray, kernel: Sizes, stride: Sizes, dilation: Sizes) -> Iterator[np.ndarray]:
    """What each tap of all windows sees of the padded image: (n, c, *output)."""
    axes = [
        [slice(tap * d, size - (r - 1 - tap) * d, step) for tap in range(r)]
        for size, r, step, d in zip(padded.shape[2:], kernel, stride, dilation, strict=True)
    ]
    return (padded[(slice(None), slice(None), *tap)] for tap in product(*axes))


def im2col(x: np.ndarray, kernel: Sizes, stride: Sizes, padding: Pairs, dilation: Sizes) -> np.ndarray:
    """Columns (n, c * taps, windows) of x (n, c, *spatial)."""
    whole, image = _padded(x.shape, padding)
    image[...] = x
    n, c = x.shape[:2]
    windows = np.stack([seen.reshape(n, c, -1) for seen in _taps(whole, kernel, stride, dilation)], axis=2)
    return windows.reshape(n, -1, windows.shape[-1])


def col2im(
    columns: np.ndarray, shape: Sizes, kernel: Sizes, stride: Sizes, padding: Pairs, dilation: Sizes
) -> np.ndarray:
    """The image (n, c, *spatial) of that shape that the columns add up to."""
    whole, image = _padded(shape, padding)
    for number, seen in enumerate(_taps(whole, kernel, stride, dilation)):
        seen += columns.reshape(*shape[:2], -1, *seen.shape[2:])[:, :, number]
    return image
