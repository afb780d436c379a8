"""cpu.serial of softmax's gradient: the definition in plain loops, one thread."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.interrupts import pieces
from tapwise.cpu.numba_loops import LoopAlgorithm, compiled
from tapwise.ops.axes import rejects_apart
from tapwise.ops.softmax.cpu_serial import BLOCK
from tapwise.ops.softmax.problem import SoftmaxProblem
from tapwise.problem import DTYPES


def gradient(dy: Any, y: Any, dx: Any, log: bool) -> None:
    """dy, y and dx (outer, length, inner) of one floating dtype."""
    outer, length, inner = dy.shape
    for a in range(outer):
        for b in range(inner):
            total = dy.dtype.type(0)
            for first in range(0, length, BLOCK):
                part = dy.dtype.type(0)
                for r in range(first, min(first + BLOCK, length)):
                    part += dy[a, r, b] if log else dy[a, r, b] * y[a, r, b]
                total += part
            for r in range(length):
                if log:
                    dx[a, r, b] = dy[a, r, b] - math.exp(y[a, r, b]) * total
                else:
                    dx[a, r, b] = (dy[a, r, b] - total) * y[a, r, b]


class SoftmaxDgradSerial(LoopAlgorithm):
    """Plain loops on one thread: the sum, then dx. float32, float64, float16, bfloat16 (in float32)."""

    operator: ClassVar[str] = "softmax_dgrad"
    id: ClassVar[str] = "cpu.serial"

    def rejects(self, problem: SoftmaxProblem, device: Device) -> str | None:
        return rejects_apart(problem)

    def predict_us(self, problem: SoftmaxProblem, config: Config, device: Device) -> float:
        """3 ns an element, and 7 for a call of exp."""
        return 10.0 + (10e-3 if problem.log else 3e-3) * problem.flops / 4

    def pack(self, problem: SoftmaxProblem, w: Any) -> Any:
        """y itself."""
        return w

    def run(self, problem: SoftmaxProblem, buffers: Buffers, us: float) -> None:
        collapsed, dtype = problem.sizes, DTYPES[problem.accumulator]
        dy, y = (np.ascontiguousarray(one, dtype).reshape(collapsed) for one in (buffers.x, buffers.w))
        result = np.empty(collapsed, dtype)
        for first, end in pieces(len(dy), us):
            compiled(gradient)(dy[first:end], y[first:end], result[first:end], problem.log)
        buffers.y[...] = result.reshape(buffers.y.shape)
