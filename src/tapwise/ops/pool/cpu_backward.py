"""cpu.simd of pooling's gradient, band by band of rows of dx.

max: each window adds dy to the element that its position names. A thread has a band of rows that stays in its cache,
and goes in order through the windows that see it: no atomics. avg: the rows of dy that see a row of dx are added up
first, in vectors, its columns then; a row that the same windows see as the one above is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.cpu.common import PlaneConfig, load
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import KernelPlan
from tapwise.integers import ceil_div
from tapwise.ops.pool.cpu_backward_kernel import FIELDS, generate
from tapwise.ops.pool.problem import PoolProblem

# Taps of a row in NCHW: all are unrolled.
LARGEST: Final = 16
# Windows of an axis: each has a share in a table.
MOST_OUTPUTS: Final = 1 << 24
# Bytes of a band that stay in a core's cache besides what is read.
BAND_BYTES: Final = 1 << 20


class GradientPlan(KernelPlan):
    """A kernel that reads positions as they are."""

    def pack(self, w: Any) -> Any:
        """The positions themselves."""
        return w


class PoolDgradSimd(Algorithm[PlaneConfig]):
    """max: any window. avg: dilation 1, in NCHW windows of up to 16 columns. float32, float64, 16 bits (in float32)."""

    operator: ClassVar[str] = "pool_dgrad"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "positions scattered within a thread's rows; means spread along rows, then columns"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: PoolProblem, device: Device) -> str | None:
        if problem.op == "max":
            return None
        if set(problem.dilation) != {1}:
            return f"takes means of dilation 1, not {problem.dilation}"
        if problem.layout == "nchw" and problem.kernel[1] > LARGEST:
            return f"takes means of up to {LARGEST} columns in nchw, not {problem.kernel}"
        if max(problem.output) > MOST_OUTPUTS:
            return f"takes means of up to {MOST_OUTPUTS} windows an axis, not {problem.output}"
        return None

    def configs(self, problem: PoolProblem, device: Device) -> Sequence[PlaneConfig]:
        planes, rows = self._planes(problem), problem.spatial[0]
        shared = PlaneConfig.shared_out(planes, rows, device.threads, prod(problem.x_shape))
        bands = min(rows, ceil_div(problem.accumulator_bytes * prod(problem.x_shape) // planes, BAND_BYTES))
        return [shared if bands <= shared.row_blocks else PlaneConfig(shared.block, bands)]

    def predict_us(self, problem: PoolProblem, config: PlaneConfig, device: Device) -> float:
        """max: three cycles a window. avg: a cycle a vector and tap. Or the bytes over the memory's bandwidth."""
        costs = Costs(device, problem.accumulator_bytes)
        tasks = config.tasks(self._planes(problem))
        vectors = prod(problem.x_shape) / costs.lanes
        cycles = 3.0 * prod(problem.y_shape) + vectors
        if problem.op == "avg":
            taps = problem.kernel[1] if problem.layout == "nchw" else problem.windows + 2
            cycles = vectors * (taps + problem.windows + 1)
        cycles = max(cycles, costs.stream(problem.bytes, problem.bytes))
        return costs.wall_us(cycles / max(1, tasks) + 40, tasks, device.threads)

    def _planes(self, problem: PoolProblem) -> int:
        """Planes (NCHW) or images (NHWC)."""
        return problem.n * (problem.c if problem.layout == "nchw" else 1)

    def _row_size(self, problem: PoolProblem) -> int:
        """Elements of a padded row, with what the widest vector reads beyond it."""
        (width, q), (before, _) = (problem.spatial[1], problem.output[1]), problem.padding[1]
        return problem.kernel[1] + max(width + before, (q - 1) * problem.stride[1] + 1) + 64

    def _scratch(self, problem: PoolProblem, config: PlaneConfig) -> int:
        """Elements of one worker's: sums of a band of 16 bits, or of a row of windows and that row padded."""
        channels = problem.c if problem.layout == "nhwc" else 1
        if problem.op == "max":
            rows = ceil_div(problem.spatial[0], config.row_blocks)
            return rows * problem.spatial[1] * channels if problem.itemsize < problem.accumulator_bytes else 0
        return problem.output[1] * channels + (self._row_size(problem) if problem.layout == "nchw" else 0)

    def workspace_bytes(self, problem: PoolProblem, config: PlaneConfig, device: Device) -> int:
        workers = max(1, min(device.threads, config.tasks(self._planes(problem))))
        return self._step(problem, config) * workers

    def _step(self, problem: PoolProblem, config: PlaneConfig) -> int:
        return ceil_div(self._scratch(problem, config) * problem.accumulator_bytes, 64) * 64

    def plan(self, problem: PoolProblem, config: PlaneConfig, device: Device) -> Plan:
        columns = problem.op == "avg" and problem.layout == "nchw"
        s, near = (problem.kernel[1], problem.stride[1] == 1) if columns else (0, False)
        library = load("pool_dgrad", generate, problem, layout=problem.layout, op=problem.op, s=s, near=near)
        shares = [_shares(problem, axis) for axis in (0, 1)] if problem.op == "avg" else [np.zeros(1)] * 2
        fields: dict[str, int | np.ndarray] = {
            "tasks": config.tasks(self._planes(problem)), "scratch_step": self._step(problem, config),
            "row_shares": shares[0], "col_shares": shares[1],
            "channels": problem.c if problem.layout == "nhwc" else 1,
            "h": problem.spatial[0], "w_in": problem.spatial[1], "p": problem.output[0], "q": problem.output[1],
            "r": problem.reach[0], "s": problem.reach[1],
            "stride_h": problem.stride[0], "stride_w": problem.stride[1],
            "pad_top": problem.padding[0][0], "pad_left": problem.padding[1][0],
            "planes": self._planes(problem), "block": config.block, "row_blocks": config.row_blocks,
            "row_size": self._row_size(problem),
        }  # fmt: skip
        return GradientPlan(problem, device, library, FIELDS, fields)


def _shares(problem: PoolProblem, axis: int) -> np.ndarray:
    """What each window of an axis multiplies its part of dy by."""
    dtype, count = np.dtype(f"f{problem.accumulator_bytes}"), problem.output[axis]
    if problem.divisor is not None:
        return np.full(count, 1 / problem.divisor if axis == 0 else 1.0, dtype)
    with np.errstate(divide="ignore"):
        return (1 / problem.counts(axis)).astype(dtype)
