"""cpu.serial of bias and activation's gradient: NumPy, an image after the other, one thread."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.numba_loops import LoopAlgorithm
from tapwise.ops.bias_activation.problem import BiasActivationProblem
from tapwise.ops.bias_activation.reference import slope
from tapwise.problem import DTYPES


class BiasActivationDgradSerial(LoopAlgorithm):
    """NumPy's products and sums; float32, float64, float16, bfloat16 (in float32); both memory orders."""

    operator: ClassVar[str] = "bias_activation_dgrad"
    id: ClassVar[str] = "cpu.serial"
    summary: ClassVar[str] = "NumPy's products and sums, one thread"

    def predict_us(self, problem: BiasActivationProblem, config: Config, device: Device) -> float:
        """1 ns for what is done to an element, and 30 us an image."""
        return problem.n * 30.0 + 1e-3 * problem.flops

    def pack(self, problem: BiasActivationProblem, w: Any) -> Any:
        return w

    def run(self, problem: BiasActivationProblem, buffers: Buffers, us: float) -> None:
        dtype = DTYPES[problem.accumulator]
        written, totals = buffers.y if problem.second is not None else (None, buffers.y)
        sums = np.zeros(problem.c, dtype)
        with np.errstate(all="ignore"):
            for i, dy in enumerate(buffers.x):
                g = dy.astype(dtype)
                if written is not None:
                    slopes = slope(problem.activation, buffers.w[i].astype(dtype)).astype(dtype)
                    g = np.where(slopes == 0, dtype.type(0), g * slopes)
                    written[i] = g
                # Over rows, then over columns: of channels-last images NumPy adds one number after the other.
                sums += g.sum(axis=2).sum(axis=1)
            totals[...] = sums
