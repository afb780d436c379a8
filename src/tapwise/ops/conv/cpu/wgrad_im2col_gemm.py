"""cpu.im2col_gemm of wgrad: the input expanded into a matrix, chunk by chunk, and a BLAS product a group with dy.

dw (k, c r s) = dy (k, pixels) times the transposed matrix (c r s, pixels) that fprop multiplies with the filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import numpy as np

from tapwise.algorithm import Algorithm, Buffers, Device, Plan
from tapwise.integers import round_up
from tapwise.ops.conv.cpu.im2col_gemm import (
    AFTER_US,
    ALIGNMENT,
    BLAS_SHARE,
    GEMM_US,
    RUN_US,
    Config,
    Geometry,
    Im2colGemm,
    Im2colPlan,
)
from tapwise.ops.conv.problem import ConvProblem

# Measured: sums of a chunk added to those before it.
ADD_NS = 0.5


def _sums_bytes(problem: ConvProblem) -> int:
    return round_up(prod(problem.w_shape) * problem.accumulator_bytes, ALIGNMENT)


class WgradPlan(Im2colPlan):
    """Expands as fprop does; the workspace begins with the sums, and those of one chunk."""

    def __init__(self, problem: ConvProblem, config: Config) -> None:
        super().__init__(problem, config)
        self.workspace_bytes = Im2colGemmWgrad.bytes_of(problem, config)

    def pack(self, w: np.ndarray) -> np.ndarray:
        """dy itself."""
        return w

    def run(self, buffers: Buffers) -> None:
        x, dy, dw, workspace, *_ = buffers
        p = self.problem
        shape, size = (p.groups, p.group_k, p.gemm_k), _sums_bytes(p)
        count = prod(shape) * self._dtype.itemsize
        sums, one = (workspace[at : at + count].view(self._dtype).reshape(shape) for at in (0, size))
        sums.fill(0)
        # NaN and infinity are results like others.
        with np.errstate(all="ignore"):
            for image, *chunk in self._chunks():
                matrix = self._matrix(x[image], workspace[2 * size :], *chunk)
                part = self._in_order(dy[image])[self._pixels(*chunk)].astype(self._dtype, copy=False)
                if self._planar:
                    np.matmul(part.reshape(p.groups, p.group_k, -1), matrix.swapaxes(1, 2), out=one)
                else:
                    np.matmul(part.reshape(-1, p.groups, p.group_k).transpose(1, 2, 0), matrix, out=one)
                sums += one
            # gemm_k is c r s, or r s c in channels last.
            if self._planar:
                dw[...] = sums.reshape(p.w_shape)
            else:
                dw[...] = sums.reshape(p.k, *p.kernel, p.group_c).transpose(0, 3, 1, 2)


class Im2colGemmWgrad(Algorithm[Config]):
    """Expansion and BLAS. float32, float64, float16, bfloat16 (computed in float32); NCHW and NHWC; any groups.

    NumPy's BLAS decides on its own threads. Rejects anything but two spatial axes, and problems with nothing to sum.
    """

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cpu.im2col_gemm"
    summary: ClassVar[str] = "expansion into a matrix, then BLAS with dy"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """Chunks as fprop's."""
        return Im2colGemm().configs(problem, device)

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """fprop's expansion; products of the same operations, and sums of each chunk added up."""
        fprop = problem.replace(direction="fprop")
        pixels = prod(problem.output)
        chunks = problem.n * -(-problem.output[0] // config.rows) * -(-problem.output[1] // config.cols)
        peak = device.gflops * device.threads * (0.5 if problem.dtype == "f64" else 1.0)
        used = 1e-3 * problem.flops / (peak * BLAS_SHARE * min(1.0, pixels / (pixels + 20)))
        added = 1e-3 * chunks * prod(problem.w_shape) * ADD_NS
        copied = Im2colGemm().predict_us(fprop.replace(k=problem.groups), config, device)
        return RUN_US + copied + used + chunks * problem.groups * GEMM_US + added

    @staticmethod
    def bytes_of(problem: ConvProblem, config: Config) -> int:
        """Sums, those of a chunk, and the matrix."""
        return 2 * _sums_bytes(problem) + Geometry(problem, config).workspace_bytes

    def after_us(self, problem: ConvProblem, config: Config) -> float:
        return AFTER_US

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return self.bytes_of(problem, config)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return WgradPlan(problem, config)
