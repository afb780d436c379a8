"""cpu.serial of pooling: windows in plain loops, one thread; with positions too."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.interrupts import pieces
from tapwise.cpu.numba_loops import LoopAlgorithm, compiled
from tapwise.ops.pool.problem import PoolProblem
from tapwise.problem import DTYPES


def largest(x: Any, y: Any, places: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
    """x (n, c, h, w), y and places (n, c, p, q); places is empty when nobody asks."""
    images, channels, height, width = x.shape
    for n in range(images):
        for c in range(channels):
            for p in range(y.shape[2]):
                top = p * stride[0] - padding[0]
                for q in range(y.shape[3]):
                    left = q * stride[1] - padding[1]
                    best = x.dtype.type(-np.inf)
                    place = -1
                    # Taps inside alone: a window may be far larger than the image.
                    for r in range(max(0, -(top // dilation[0])), min(kernel[0], -((top - height) // dilation[0]))):
                        h = top + r * dilation[0]
                        for s in range(
                            max(0, -(left // dilation[1])), min(kernel[1], -((left - width) // dilation[1]))
                        ):
                            v = left + s * dilation[1]
                            value = x[n, c, h, v]
                            # The first of equals, and the last NaN.
                            if place < 0 or value > best or value != value:
                                best = value
                                place = h * width + v
                    y[n, c, p, q] = best
                    if places.size:
                        places[n, c, p, q] = place


def mean(
    x: Any, y: Any, rows: Any, columns: Any, divisor: int, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> None:
    """`rows` and `columns`: from where to where taps are counted; `divisor`: what is divided by instead, or 0."""
    images, channels, height, width = x.shape
    for n in range(images):
        for c in range(channels):
            for p in range(y.shape[2]):
                top = p * stride[0] - padding[0]
                first = max(0, -((top - rows[0]) // dilation[0]))
                counted = max(0, min(kernel[0], -((top - rows[1]) // dilation[0])) - first)
                for q in range(y.shape[3]):
                    left = q * stride[1] - padding[1]
                    total = x.dtype.type(0)
                    for r in range(max(0, -(top // dilation[0])), min(kernel[0], -((top - height) // dilation[0]))):
                        h = top + r * dilation[0]
                        for s in range(
                            max(0, -(left // dilation[1])), min(kernel[1], -((left - width) // dilation[1]))
                        ):
                            total += x[n, c, h, left + s * dilation[1]]
                    first = max(0, -((left - columns[0]) // dilation[1]))
                    count = counted * max(0, min(kernel[1], -((left - columns[1]) // dilation[1])) - first)
                    y[n, c, p, q] = total / x.dtype.type(divisor if divisor != 0 else count)


class PoolSerial(LoopAlgorithm):
    """Plain loops on one thread. float32, float64, float16, bfloat16 (in float32); both memory orders; positions."""

    operator: ClassVar[str] = "pool"
    id: ClassVar[str] = "cpu.serial"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        """2 ns a tap."""
        return 10.0 + 2e-3 * prod(problem.y_shape) * prod(problem.kernel)

    def run(self, problem: PoolProblem, buffers: Buffers, us: float) -> None:
        p, dtype = problem, DTYPES[problem.accumulator]
        values, places = buffers.y if p.indices else (buffers.y, np.empty((0, 0, 0, 0), np.int64))
        source = np.ascontiguousarray(buffers.x, dtype)
        result = np.empty(values.shape, dtype)
        top, left = (before for before, _ in p.padding)
        for first, end in pieces(p.output[0], us):
            # Rows from `first` on are those of an image with so much less padding.
            window = (p.kernel, p.stride, (top - first * p.stride[0], left), p.dilation)
            part = result[:, :, first:end]
            if p.op == "max":
                compiled(largest)(source, part, places[:, :, first:end], *window)
            else:
                compiled(mean)(source, part, p.counted(0), p.counted(1), p.divisor or 0, *window)
        values[...] = result
