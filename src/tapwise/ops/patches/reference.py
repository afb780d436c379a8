"""im2col and col2im in float64, straight from the definition."""

from __future__ import annotations

from itertools import product
from math import prod, sqrt
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tapwise.ops.patches.problem import PatchProblem


def _padded(problem: PatchProblem) -> np.ndarray:
    spatial = [size + sum(pad) for size, pad in zip(problem.spatial, problem.padding, strict=True)]
    return np.zeros((problem.n, problem.c, *spatial))


def _inner(problem: PatchProblem) -> tuple[slice, ...]:
    sizes = zip(problem.spatial, problem.padding, strict=True)
    return (slice(None), slice(None), *(slice(pad[0], pad[0] + size) for size, pad in sizes))


def _taps(problem: PatchProblem) -> list[tuple[slice, ...]]:
    """Where each tap of all windows reads the padded image."""
    result = []
    for tap in product(*(range(r) for r in problem.kernel)):
        steps = zip(tap, problem.dilation, problem.stride, problem.output, strict=True)
        result.append((slice(None), slice(None), *(slice(t * d, t * d + (q - 1) * s + 1, s) for t, d, s, q in steps)))
    return result


def im2col(problem: PatchProblem, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(y64, bound): nothing is rounded."""
    image = _padded(problem)
    image[_inner(problem)] = x
    windows = [image[tap].reshape(problem.n, problem.c, 1, -1) for tap in _taps(problem)]
    y = np.concatenate(windows, axis=2).reshape(problem.columns_shape)
    return y, np.zeros(())


def col2im(problem: PatchProblem, x: np.ndarray, before: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(y64, bound); `before` is what the sums are added to."""
    result = []
    for values in (np.asarray(x, np.float64), np.abs(np.asarray(x, np.float64))):
        image = _padded(problem)
        parts = values.reshape(problem.n, problem.c, prod(problem.kernel), *problem.output)
        for number, tap in enumerate(_taps(problem)):
            image[tap] += parts[:, :, number]
        result.append(image[_inner(problem)])
    y, size = result
    if before is not None:
        y, size = y + before, size + np.abs(before)
    return y, (8.0 + 2.0 * sqrt(prod(problem.kernel))) * problem.roundoff * size + problem.rounding(y)
