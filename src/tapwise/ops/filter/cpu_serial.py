"""cpu.serial of filters: an element of the result at a time, in float64, one thread."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.numba_loops import LoopAlgorithm, compiled
from tapwise.ops.filter.problem import FilterProblem, ordered_terms, stored

# What `loop` combines by.
_OPS: Final = {"dense": 0, "separable": 0, "max": 1, "min": 2}
_BLOCK: Final = 1 << 18


def loop(x: Any, y: Any, first: int, weights: Any, planes: Any, rows: Any, columns: Any, cval: float, op: int) -> None:
    """y[i] = combination over the window of element first + i of x (d, h, w, c), where its weight is not 0."""
    _, height, width, channels = x.shape
    for i in range(y.shape[0]):
        e = first + i
        c, v = e % channels, e // channels % width
        h, d = e // channels // width % height, e // channels // width // height
        total = 0.0 if op == 0 else (-np.inf if op == 1 else np.inf)
        for t in range(weights.shape[0]):
            for r in range(weights.shape[1]):
                for s in range(weights.shape[2]):
                    if weights[t, r, s] == 0:
                        continue
                    plane, row, column = planes[d + t], rows[h + r], columns[v + s]
                    value = cval
                    if plane >= 0 and row >= 0 and column >= 0:
                        value = float(x[plane, row, column, c])
                    if op == 0:
                        total += weights[t, r, s] * value
                    elif op == 1:
                        total = max(total, value)
                    else:
                        total = min(total, value)
        y[i] = total


def ordered_loop(
    x: Any, y: Any, first: int, taps: Any, values: Any, planes: Any, rows: Any, columns: Any, cval: float
) -> None:
    """y[i] = sum of the terms `ordered_terms` over the window of element first + i; taps (terms, 2, 3)."""
    _, height, width, channels = x.shape
    for i in range(y.shape[0]):
        e = first + i
        c, v = e % channels, e // channels % width
        h, d = e // channels // width % height, e // channels // width // height
        total = 0.0
        for n in range(taps.shape[0]):
            term = 0.0
            for side in range(2):
                t, r, s = taps[n, side]
                plane, row, column = planes[d + t], rows[h + r], columns[v + s]
                value = cval
                if plane >= 0 and row >= 0 and column >= 0:
                    value = float(x[plane, row, column, c])
                term += value if side == 0 else values[n, 1] * value
            total += values[n, 0] * term
        y[i] = total


class FilterSerial(LoopAlgorithm):
    """Everything."""

    operator: ClassVar[str] = "filter"
    id: ClassVar[str] = "cpu.serial"
    summary: ClassVar[str] = "plain loops in float64, one thread"
    dtypes: ClassVar[None] = None

    def predict_us(self, problem: FilterProblem, config: Config, device: Device) -> float:
        """5 ns a tap."""
        return 5e-3 * prod(problem.x_shape) * problem.taps + 20.0

    def pack(self, problem: FilterProblem, w: np.ndarray | None) -> tuple[list[np.ndarray], tuple[float, float]]:
        """(weights (t, r, s) of each sweep, what is added to sums before they are truncated)."""
        if w is None:
            return [np.ones(problem.size)], (0.0, 0.0)
        weights = np.asarray(w, np.float64)
        if problem.op in ("max", "min"):
            weights = (weights != 0).astype(np.float64)
        epsilons = problem.rounding_epsilons(weights)
        if problem.op != "separable":
            return [weights.reshape(problem.size)], epsilons
        r = problem.size[1]
        return [weights[:r].reshape(1, r, 1), weights[r:].reshape(1, 1, -1)], epsilons

    def run(self, problem: FilterProblem, buffers: Buffers, us: float) -> None:
        x, packed, y, *_ = buffers
        # Numba does not take float16.
        x = x.astype(np.float32) if x.dtype == np.float16 else x
        picture = x.reshape(*problem.spatial, problem.c)
        planes, rows, columns = problem.sources()
        weights, (first, last) = packed
        if problem.op == "separable":
            down, across = weights
            still = np.arange(problem.spatial[2])
            half = np.empty(prod(problem.x_shape))
            _combine(problem, picture, half, down, planes, rows, still, problem.cval)
            if problem.truncates_columns:
                half = np.trunc(half + np.copysign(first, half))
            outside = problem.constant_beside(down, first)
            picture, still = half.reshape(picture.shape), np.arange(problem.spatial[1])
            _combine(problem, picture, y.reshape(-1), across, planes, still, columns, outside, last)
        else:
            _combine(problem, picture, y.reshape(-1), weights[0], planes, rows, columns, problem.cval, last)


def _combine(
    problem: FilterProblem, x: np.ndarray, y: np.ndarray, weights: np.ndarray, planes: np.ndarray, rows: np.ndarray,
    columns: np.ndarray, cval: float, epsilon: float = 0.0,
) -> None:  # fmt: skip
    """In blocks, whose sums are in float64."""
    if problem.ordered:
        taps, values = ordered_terms(weights.ravel())
        places = np.stack(np.unravel_index(taps, weights.shape), axis=-1)
    for first in range(0, y.size, _BLOCK):
        part = y[first : first + _BLOCK]
        sums = np.empty(part.size)
        if problem.ordered:
            compiled(ordered_loop)(x, sums, first, places, values, planes, rows, columns, cval)
        else:
            compiled(loop)(x, sums, first, weights, planes, rows, columns, cval, _OPS[problem.op])
        part[:] = sums if y.dtype == np.float64 else stored(problem, sums + np.copysign(epsilon, sums))
