"""cpu.serial of softmax: the definition in plain loops, one thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.algorithm import Algorithm, Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu.numba_loops import compiled
from tapwise.ops.axes import rejects_apart
from tapwise.ops.softmax.problem import SoftmaxProblem

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


@cache
def _loops() -> Any:
    return compiled(softmax)


class SerialPlan(Plan):
    """float16 goes through float32 copies."""

    def __init__(self, problem: SoftmaxProblem) -> None:
        self.problem = problem

    def run(self, buffers: Buffers) -> None:
        folded = self.problem.folded
        dtype = np.dtype(np.float64 if self.problem.dtype == "f64" else np.float32)
        result = np.empty(folded, dtype)
        _loops()(np.ascontiguousarray(buffers.x, dtype).reshape(folded), result, self.problem.log)
        buffers.y[...] = result.reshape(buffers.y.shape)


@dataclass(frozen=True)
class Config(BaseConfig):
    """Nothing to choose."""


class SoftmaxSerial(Algorithm[Config]):
    """Plain loops on one thread: largest element, sum of exponentials, quotient. float32, float64, float16."""

    operator: ClassVar[str] = "softmax"
    id: ClassVar[str] = "cpu.serial"
    summary: ClassVar[str] = "plain loops, one thread"

    def rejects(self, problem: SoftmaxProblem, device: Device) -> str | None:
        return rejects_apart(problem)

    def configs(self, problem: SoftmaxProblem, device: Device) -> Sequence[Config]:
        return [Config()]

    def predict_us(self, problem: SoftmaxProblem, config: Config, device: Device) -> float:
        """15 ns an element: two calls of exp."""
        return 10.0 + 15e-3 * problem.flops / 4

    def workspace_bytes(self, problem: SoftmaxProblem, config: Config, device: Device) -> int:
        return 0

    def plan(self, problem: SoftmaxProblem, config: Config, device: Device) -> Plan:
        return SerialPlan(problem)
