"""cpu.direct: convolution as a matrix product whose matrix is never built.

Three routes, a config's `route`:
- "sums": each task packs the input that it needs (`packed_tile`), block of channels by block of channels, runs
  register tiles over it (`tile`), and finishes its rows with bias, residual and activation while they are in cache;
- "straight": sums live in registers and, between blocks of gemm_k, in y itself;
- "in place": straight, from an input without padding and stride that is read where it lies.
Lanes run over pixels (NCHW) or over output channels (NHWC, and images of a few pixels).
"""

from __future__ import annotations

from typing import ClassVar

from tapwise.algorithm import Device, Plan
from tapwise.cpu.plan import KernelPlan
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.direct.blocking import Config, Geometry, candidates
from tapwise.ops.conv.cpu.direct.cost import TaskCost
from tapwise.ops.conv.cpu.direct.kernel import FIELDS, generate
from tapwise.ops.conv.cpu.generated import GeneratedAlgorithm
from tapwise.ops.conv.problem import ConvProblem


class Direct(GeneratedAlgorithm[Config]):
    """Register-blocked direct convolution; any filter, stride, dilation and groups.

    float32, float64, float16 (computed in float32); NCHW and NHWC. Exact on integers that float32 holds.
    """

    id: ClassVar[str] = "cpu.direct"
    summary: ClassVar[str] = "register tiles over a packed input; lanes over pixels or channels"
    candidates = staticmethod(candidates)
    cost: ClassVar = TaskCost

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """About a nanosecond an element: each is loaded and stored alone."""
        return 8.0 + problem.k * problem.gemm_k * 1.2e-3 / device.threads

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        parameters = {"route": config.route, "lanes": config.lanes, "m": config.m, "n": config.n}
        library = self.load("direct", generate, problem, layout=problem.layout, **parameters)
        geometry = Geometry(problem, config, device)
        fields = geometry.fields()
        blocks = ceil_div(problem.group_c, config.channels)
        return KernelPlan(
            problem, device, library, FIELDS, fields,
            packed_size=problem.c * fields["taps"] * fields["filter_pad"],
            pack_tasks=problem.groups * blocks * fields["filter_blocks"],
        )  # fmt: skip
