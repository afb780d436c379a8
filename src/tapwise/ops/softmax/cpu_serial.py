"""cpu.serial of softmax: the definition in plain loops, one thread."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.interrupts import pieces
from tapwise.cpu.numba_loops import LoopAlgorithm, compiled
from tapwise.ops.axes import rejects_apart
from tapwise.ops.softmax.problem import SoftmaxProblem
from tapwise.problem import DTYPES

# Terms of a sum that is kept in one piece.
BLOCK: Final = 256


def softmax(x: Any, y: Any, log: bool) -> None:
    """x and y (outer, length, inner) of one floating dtype."""
    outer, length, inner = x.shape
    for a in range(outer):
        for b in range(inner):
            top = x[a, 0, b]
            for r in range(length):
                if x[a, r, b] > top:
                    top = x[a, r, b]
            total = x.dtype.type(0)
            for first in range(0, length, BLOCK):
                part = x.dtype.type(0)
                for r in range(first, min(first + BLOCK, length)):
                    part += math.exp(x[a, r, b] - top)
                total += part
            for r in range(length):
                if log:
                    y[a, r, b] = x[a, r, b] - top - math.log(total)
                else:
                    y[a, r, b] = math.exp(x[a, r, b] - top) / total


class SoftmaxSerial(LoopAlgorithm):
    """Plain loops on one thread: largest element, sum of exponentials, quotient. float32, float64, 16 bits."""

    operator: ClassVar[str] = "softmax"
    id: ClassVar[str] = "cpu.serial"

    def rejects(self, problem: SoftmaxProblem, device: Device) -> str | None:
        return rejects_apart(problem)

    def predict_us(self, problem: SoftmaxProblem, config: Config, device: Device) -> float:
        """15 ns an element: two calls of exp."""
        return 10.0 + 15e-3 * problem.flops / 4

    def run(self, problem: SoftmaxProblem, buffers: Buffers, us: float) -> None:
        collapsed = problem.sizes
        dtype = DTYPES[problem.accumulator]
        result = np.empty(collapsed, dtype)
        x = np.ascontiguousarray(buffers.x, dtype).reshape(collapsed)
        for first, end in pieces(len(x), us):
            compiled(softmax)(x[first:end], result[first:end], problem.log)
        buffers.y[...] = result.reshape(buffers.y.shape)
