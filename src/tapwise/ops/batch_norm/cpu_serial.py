"""cpu.serial of batch normalisation: NumPy's sums, an image after the other, one thread."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.numba_loops import LoopAlgorithm
from tapwise.ops.batch_norm.problem import BatchNormProblem
from tapwise.ops.batch_norm.reference import derivative
from tapwise.problem import DTYPES


def _summed(terms: np.ndarray) -> np.ndarray:
    """Over rows, then over columns: of channels-last images NumPy adds one number after the other."""
    return np.asarray(terms.sum(axis=2).sum(axis=1))


class BatchNormSerial(LoopAlgorithm):
    """NumPy's sums; float32, float64, float16, bfloat16 (in float32); both memory orders."""

    operator: ClassVar[str] = "batch_norm"
    id: ClassVar[str] = "cpu.serial"
    summary: ClassVar[str] = "NumPy's sums, one thread"

    def predict_us(self, problem: BatchNormProblem, config: Config, device: Device) -> float:
        """1 ns for what is done to an element, and 30 us an image."""
        return problem.n * 30.0 + 1e-3 * problem.flops

    def run(self, problem: BatchNormProblem, buffers: Buffers, us: float) -> None:
        dtype, x = DTYPES[problem.accumulator], buffers.x
        with np.errstate(all="ignore"):
            base = x[0, :, :1, :1].astype(dtype)
            base = np.where(np.isfinite(base), base, 0)
            sums = np.zeros((2, problem.c), dtype)
            for image in x:
                apart = image.astype(dtype) - base
                sums += _summed(apart), _summed(apart * apart)
            first, second = sums / (problem.n * problem.pixels)
            variance = second - first * first
            buffers.y[...] = base[:, 0, 0] + first, np.where(variance < 0, 0, variance)


class BatchNormDgradSerial(BatchNormSerial):
    """The gradient's sums likewise, then the gradient by x."""

    operator: ClassVar[str] = "batch_norm_dgrad"
    id: ClassVar[str] = "cpu.serial"

    def pack(self, problem: BatchNormProblem, w: Any) -> Any:
        """x itself."""
        return w

    def run(self, problem: BatchNormProblem, buffers: Buffers, us: float) -> None:
        dtype, (dx, sums) = DTYPES[problem.accumulator], buffers.y
        mean, invstd, weight, bias = buffers.bias[:, :, None, None]

        def terms(dy: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """(g, xhat) of an image."""
            xhat = (x.astype(dtype) - mean) * invstd
            return dy.astype(dtype) * derivative(problem.activation, xhat * weight + bias).astype(dtype), xhat

        sums[...] = 0
        with np.errstate(all="ignore"):
            for dy, x in zip(buffers.x, buffers.w, strict=True):
                g, xhat = terms(dy, x)
                sums += _summed(g), _summed(g * xhat)
            mean_g, mean_gx = sums[:, :, None, None] / (problem.n * problem.pixels)
            for dy, x, result in zip(buffers.x, buffers.w, dx, strict=True):
                g, xhat = terms(dy, x)
                result[...] = (g - mean_g - xhat * mean_gx) * (invstd * weight)
