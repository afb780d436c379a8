"""cpu.serial of pooling: windows in plain loops, one thread; with positions too."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.numba_loops import LoopAlgorithm, compiled
from tapwise.ops.pool.problem import PoolProblem
from tapwise.problem import DTYPES


def largest(x: Any, y: Any, places: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
    """x (n, c, h, w), y and places (n, c, p, q); places is empty when nobody asks."""
    images, channels, height, width = x.shape
    for n in range(images):
        for c in range(channels):
            for p in range(y.shape[2]):
                for q in range(y.shape[3]):
                    best = x.dtype.type(-np.inf)
                    place = -1
                    for r in range(kernel[0]):
                        h = p * stride[0] - padding[0] + r * dilation[0]
                        if h < 0 or h >= height:
                            continue
                        for s in range(kernel[1]):
                            v = q * stride[1] - padding[1] + s * dilation[1]
                            if v < 0 or v >= width:
                                continue
                            value = x[n, c, h, v]
                            if place < 0 or ((value > best or value != value) and best == best):
                                best = value
                                place = h * width + v
                    y[n, c, p, q] = best
                    if places.size:
                        places[n, c, p, q] = place


def mean(x: Any, y: Any, rows: Any, columns: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
    """`rows` and `columns`: what the sum of row p, column q is divided by, as a product."""
    images, channels, height, width = x.shape
    for n in range(images):
        for c in range(channels):
            for p in range(y.shape[2]):
                for q in range(y.shape[3]):
                    total = x.dtype.type(0)
                    for r in range(kernel[0]):
                        h = p * stride[0] - padding[0] + r * dilation[0]
                        if h < 0 or h >= height:
                            continue
                        for s in range(kernel[1]):
                            v = q * stride[1] - padding[1] + s * dilation[1]
                            if v >= 0 and v < width:
                                total += x[n, c, h, v]
                    y[n, c, p, q] = total / (rows[p] * columns[q])


def divisors(problem: PoolProblem, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """What a sum is divided by: a factor for each output row and one for each column."""
    if problem.divisor is not None:
        return np.full(problem.output[0], problem.divisor, dtype), np.ones(problem.output[1], dtype)
    return np.array(problem.counts(0), dtype), np.array(problem.counts(1), dtype)


class PoolSerial(LoopAlgorithm):
    """Plain loops on one thread. float32, float64, float16 (in float32); both memory orders; positions."""

    operator: ClassVar[str] = "pool"
    id: ClassVar[str] = "cpu.serial"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        """2 ns a tap."""
        return 10.0 + 2e-3 * prod(problem.y_shape) * prod(problem.kernel)

    def run(self, problem: PoolProblem, buffers: Buffers) -> None:
        p, dtype = problem, DTYPES[problem.accumulator]
        values, places = buffers.y if p.indices else (buffers.y, np.empty((0, 0, 0, 0), np.int64))
        source = np.ascontiguousarray(buffers.x, dtype)
        result = np.empty(values.shape, dtype)
        window = (p.kernel, p.stride, tuple(before for before, _ in p.padding), p.dilation)
        if p.op == "max":
            compiled(largest)(source, result, places, *window)
        else:
            compiled(mean)(source, result, *divisors(p, dtype), *window)
        values[...] = result
