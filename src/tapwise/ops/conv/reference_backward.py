"""The gradients of convolution in float64, straight from the definition: what every result is compared with.

    dx[n, c, h, w] = sum of dy[n, k, p, q] * w[k, c, r, s] where h = p * stride + r * dilation - padding, and so for w
    dw[k, c, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, c, p * stride + r * dilation - padding, ...]

Tap by tap: what a tap adds to dx, or is given by x, is a strided part of the padded image; NumPy's matrix product does
the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from tapwise.ops.conv.reference import Pairs

Taps = Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]


def input_gradient(
    dy: np.ndarray, w: np.ndarray, spatial: tuple[int, ...], stride: tuple[int, ...], padding: Pairs,
    dilation: tuple[int, ...], groups: int,
) -> np.ndarray:  # fmt: skip
    """dx (n, c, *spatial) as float64, of dy (n, k, *output) and w (k, c / groups, *kernel): any dtype and strides."""
    (n, k, *output), (_, group_c, *kernel) = dy.shape, w.shape
    filters = w.astype(np.float64).reshape(groups, k // groups, group_c, *kernel)
    padded = [size + sum(pad) for size, pad in zip(spatial, padding, strict=True)]
    inner = tuple(slice(before, before + size) for size, (before, _) in zip(spatial, padding, strict=True))
    dx = np.zeros((n, groups * group_c, *spatial))
    # NaN and infinity are results like others.
    with np.errstate(all="ignore"):
        for image in range(n if dy.size and w.size else 0):
            columns = dy[image].astype(np.float64).reshape(groups, k // groups, -1)
            sums = np.zeros((groups * group_c, *padded))
            for tap, part in _taps(kernel, output, stride, dilation):
                product = np.matmul(filters[(slice(None),) * 3 + tap].swapaxes(1, 2), columns)
                sums[(slice(None), *part)] += product.reshape(-1, *output)
            dx[image] = sums[(slice(None), *inner)]
    return dx


def weight_gradient(
    x: np.ndarray, dy: np.ndarray, kernel: tuple[int, ...], stride: tuple[int, ...], padding: Pairs,
    dilation: tuple[int, ...], groups: int,
) -> np.ndarray:  # fmt: skip
    """dw (k, c / groups, *kernel) as float64, of x (n, c, *spatial) and dy (n, k, *output): any dtype and strides."""
    (n, c, *_), (_, k, *output) = x.shape, dy.shape
    dw = np.zeros((groups, k // groups, c // groups, *kernel))
    with np.errstate(all="ignore"):
        for image in range(n if x.size and dy.size else 0):
            columns = dy[image].astype(np.float64).reshape(groups, k // groups, -1)
            padded = np.pad(x[image].astype(np.float64), ((0, 0), *padding))
            for tap, part in _taps(kernel, output, stride, dilation):
                seen = padded[(slice(None), *part)].reshape(groups, c // groups, prod(output))
                dw[(slice(None),) * 3 + tap] += np.matmul(columns, seen.swapaxes(1, 2))
    return dw.reshape(k, c // groups, *kernel)


def _taps(
    kernel: tuple[int, ...] | list[int], output: list[int], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Taps:
    """Each tap, and the part of the padded image that meets it, a place for each output."""
    for tap in np.ndindex(*kernel):
        firsts = [place * distance for place, distance in zip(tap, dilation, strict=True)]
        yield (
            tap,
            tuple(
                slice(first, first + (count - 1) * step + 1, step)
                for first, count, step in zip(firsts, output, stride, strict=True)
            ),
        )
