"""cpu.serial of squeeze-and-excitation: the definition in NumPy, an image after the other, one thread."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.numba_loops import LoopAlgorithm
from tapwise.ops.conv.reference import activate
from tapwise.ops.squeeze_excitation.problem import SqueezeExcitationProblem
from tapwise.problem import DTYPES


class SqueezeExcitationSerial(LoopAlgorithm):
    """NumPy's sums and products, one thread; float32, float64, float16, bfloat16 (in float32); both memory orders."""

    operator: ClassVar[str] = "squeeze_excitation"
    id: ClassVar[str] = "cpu.serial"
    summary: ClassVar[str] = "NumPy's sums, one thread"

    def predict_us(self, problem: SqueezeExcitationProblem, config: Config, device: Device) -> float:
        """1 ns an element that is summed or multiplied, and 30 us an image."""
        return problem.n * 30.0 + 1e-3 * problem.flops

    def pack(self, problem: SqueezeExcitationProblem, w: Any) -> Any:
        return np.ascontiguousarray(w, DTYPES[problem.accumulator])

    def run(self, problem: SqueezeExcitationProblem, buffers: Buffers, us: float) -> None:
        reduce, expand = buffers.w
        bias = buffers.bias.astype(reduce.dtype)
        with np.errstate(all="ignore"):
            for x, y in zip(buffers.x, buffers.y, strict=True):
                image = x.astype(reduce.dtype)
                # Sums of products in pairs, as of the means: NumPy's matrix product would start threads.
                means = image.reshape(problem.c, -1).mean(axis=1)
                squeezed = activate(problem.activation, (reduce * means).sum(axis=1) + bias[: problem.m])
                gates = (expand * squeezed[:, None]).T.copy().sum(axis=1) + bias[problem.m :]
                y[...] = image * activate(problem.gate, gates)[:, None, None]
