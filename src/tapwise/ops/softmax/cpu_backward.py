"""cpu.simd of softmax's gradient: a sum over each row or column, in vectors, and dx from it.

Rows that are cut into chunks, and columns, as in cpu.simd of softmax itself: a second launch adds the chunks' sums up,
in order, and writes dx.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tapwise.algorithm import Device, Plan
from tapwise.cpu.common import RowConfig, load
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import ChunkPlan
from tapwise.ops.softmax.cpu import SoftmaxSimd
from tapwise.ops.softmax.cpu_backward_kernel import generate
from tapwise.ops.softmax.cpu_kernel import FIELDS
from tapwise.ops.softmax.problem import SoftmaxProblem


class GradientPlan(ChunkPlan):
    """Kernels that read y as it is."""

    def pack(self, w: Any) -> Any:
        """y itself."""
        return w


class SoftmaxDgradSimd(SoftmaxSimd):
    """Gradients of softmax and its logarithm along any axis; float32, float64, float16, bfloat16 (in float32)."""

    operator: ClassVar[str] = "softmax_dgrad"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "sums of rows or columns in vectors, then dx; rows in chunks where they are few"

    def predict_us(self, problem: SoftmaxProblem, config: RowConfig, device: Device) -> float:
        """About a cycle an element of float32, and one more for the exponential; or the bytes over the bandwidth."""
        costs = Costs(device, problem.accumulator_bytes)
        outer, length, inner = problem.sizes
        tasks = config.fields(outer, length, inner)["tasks"]
        cycles = (2.0 if problem.log else 1.0) * outer * length * inner * (8 / costs.lanes)
        cycles = max(cycles, costs.stream(problem.bytes, problem.bytes)) / max(1, tasks) + 40
        return costs.wall_us(cycles, tasks, device.threads) + (6.0 if config.chunks > 1 else 0.0)

    def plan(self, problem: SoftmaxProblem, config: RowConfig, device: Device) -> Plan:
        outer, length, inner = problem.sizes
        library = load("softmax_dgrad", generate, problem, log=problem.log, last=inner == 1)
        fields = config.fields(outer, length, inner)
        workspace = config.workspace_bytes(outer, inner)
        return GradientPlan(problem, device, library, FIELDS, fields, "scale", False, workspace)
