"""cpu.serial of reduce: the definition in plain loops, one thread. Sums are kept in blocks."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.interrupts import pieces
from tapwise.cpu.numba_loops import LoopAlgorithm, compiled
from tapwise.ops.axes import rejects_apart
from tapwise.ops.reduce.problem import POSITIONS, REDUCTIONS, ReduceProblem
from tapwise.problem import DTYPES

BLOCK: Final = 256
CODES: Final = {op: number for number, op in enumerate(REDUCTIONS)}
SUM, MEAN, MAX, MIN, PROD, ARGMAX, ARGMIN, NORM1, NORM2, SUMSQUARE, LOGSUMEXP = (CODES[op] for op in REDUCTIONS)


def reduce(x: Any, y: Any, op: int) -> None:
    """x (outer, length, inner), y (outer, inner)."""
    outer, length, inner = x.shape
    for a in range(outer):
        for b in range(inner):
            if op in (MAX, MIN, ARGMAX, ARGMIN, LOGSUMEXP):
                best = x[a, 0, b]
                place = 0
                for r in range(1, length):
                    value = x[a, r, b]
                    better = value < best if op in (MIN, ARGMIN) else value > best
                    if (better or value != value) and best == best:
                        best = value
                        place = r
                if op in (MAX, MIN):
                    y[a, b] = best
                    continue
                if op in (ARGMAX, ARGMIN):
                    y[a, b] = place
                    continue
                if math.isinf(best):
                    best = x.dtype.type(0)
            else:
                best = x.dtype.type(0)
            if op == PROD:
                product = x.dtype.type(1)
                for r in range(length):
                    product *= x[a, r, b]
                y[a, b] = product
                continue
            total = x.dtype.type(0)
            for first in range(0, length, BLOCK):
                part = x.dtype.type(0)
                for r in range(first, min(first + BLOCK, length)):
                    value = x[a, r, b]
                    if op == NORM1:
                        part += abs(value)
                    elif op in (NORM2, SUMSQUARE):
                        part += value * value
                    elif op == LOGSUMEXP:
                        part += math.exp(value - best)
                    else:
                        part += value
                total += part
            if op == MEAN:
                total = total / x.dtype.type(length)
            elif op == NORM2:
                total = math.sqrt(total)
            elif op == LOGSUMEXP:
                total = best + math.log(total)
            y[a, b] = total


class ReduceSerial(LoopAlgorithm):
    """Plain loops on one thread, sums in blocks of 256. float32, float64, float16, bfloat16 (in float32)."""

    operator: ClassVar[str] = "reduce"
    id: ClassVar[str] = "cpu.serial"

    def rejects(self, problem: ReduceProblem, device: Device) -> str | None:
        return rejects_apart(problem)

    def predict_us(self, problem: ReduceProblem, config: Config, device: Device) -> float:
        """1.5 ns an element; 10 with an exponential."""
        return 10.0 + (10e-3 if problem.op == "logsumexp" else 1.5e-3) * problem.flops

    def run(self, problem: ReduceProblem, buffers: Buffers, us: float) -> None:
        collapsed = problem.sizes
        dtype = DTYPES[problem.accumulator]
        result = np.empty((collapsed[0], collapsed[2]), np.int64 if problem.op in POSITIONS else dtype)
        x = np.ascontiguousarray(buffers.x, dtype).reshape(collapsed)
        for first, end in pieces(len(x), us):
            compiled(reduce)(x[first:end], result[first:end], CODES[problem.op])
        with np.errstate(over="ignore"):
            buffers.y[...] = result.reshape(buffers.y.shape)
