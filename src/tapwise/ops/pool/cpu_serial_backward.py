"""cpu.serial of pooling's gradient: windows in plain loops, one thread."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.interrupts import pieces
from tapwise.cpu.numba_loops import LoopAlgorithm, compiled
from tapwise.ops.pool.problem import PoolProblem
from tapwise.problem import DTYPES


def scatter(dy: Any, places: Any, dx: Any) -> None:
    """dy and places (planes, windows), dx (planes, elements), zero before. Places outside of the plane are nothing."""
    for plane in range(dy.shape[0]):
        for window in range(dy.shape[1]):
            place = places[plane, window]
            if 0 <= place < dx.shape[1]:
                dx[plane, place] += dy[plane, window]


def spread(
    dy: Any, dx: Any, rows: Any, columns: Any, divisor: int, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> None:
    """dy (planes, p, q), dx (planes, h, w), zero before; `rows`, `columns`, `divisor` as for the mean itself."""
    planes, height, width = dx.shape
    for plane in range(planes):
        for p in range(dy.shape[1]):
            top = p * stride[0] - padding[0]
            first = max(0, -((top - rows[0]) // dilation[0]))
            counted = max(0, min(kernel[0], -((top - rows[1]) // dilation[0])) - first)
            for q in range(dy.shape[2]):
                left = q * stride[1] - padding[1]
                first = max(0, -((left - columns[0]) // dilation[1]))
                count = counted * max(0, min(kernel[1], -((left - columns[1]) // dilation[1])) - first)
                share = dy[plane, p, q] / dy.dtype.type(divisor if divisor != 0 else count)
                for r in range(max(0, -(top // dilation[0])), min(kernel[0], -((top - height) // dilation[0]))):
                    h = top + r * dilation[0]
                    for s in range(max(0, -(left // dilation[1])), min(kernel[1], -((left - width) // dilation[1]))):
                        dx[plane, h, left + s * dilation[1]] += share


class PoolDgradSerial(LoopAlgorithm):
    """Plain loops on one thread: each window adds to what it saw. float32, float64, float16, bfloat16 (in float32)."""

    operator: ClassVar[str] = "pool_dgrad"
    id: ClassVar[str] = "cpu.serial"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        """3 ns a tap, or a window of max."""
        return 10.0 + 3e-3 * problem.flops

    def pack(self, problem: PoolProblem, w: Any) -> Any:
        """The positions themselves."""
        return w

    def run(self, problem: PoolProblem, buffers: Buffers, us: float) -> None:
        p, dtype = problem, DTYPES[problem.accumulator]
        planes = p.n * p.c
        dy = np.ascontiguousarray(buffers.x, dtype).reshape(planes, *p.output)
        result = np.zeros((planes, *p.spatial), dtype)
        places = None if buffers.w is None else np.ascontiguousarray(buffers.w).reshape(planes, -1)
        starts = tuple(before for before, _ in p.padding)
        for first, end in pieces(planes, us):
            source, part = dy[first:end], result[first:end]
            if places is not None:
                flat = source.reshape(end - first, -1), places[first:end], part.reshape(end - first, -1)
                compiled(scatter)(*flat)
            else:
                window = (p.kernel, p.stride, starts, p.dilation)
                compiled(spread)(source, part, p.counted(0), p.counted(1), p.divisor or 0, *window)
        buffers.y[...] = result.reshape(buffers.y.shape)
