"""cpu.depthwise: one input channel a group, filters of any size.

There is no sum over channels, so nothing is worth blocking but the picture: a tile of outputs stays in registers over
all taps and goes straight to y with bias, residual and activation. NCHW (`planes`): lanes over the pixels of a row;
planes are packed (`packed_tile`) into two buffers in turn, so that a plane has left the store buffer before it is read.
NHWC: lanes over channels, a tile is a run of pixels, and each tap one load a vector of them.
"""

from __future__ import annotations

from typing import ClassVar

from tapwise.algorithm import Device, Plan
from tapwise.cpu.plan import KernelPlan
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.depthwise.blocking import Config, Geometry, candidates
from tapwise.ops.conv.cpu.depthwise.cost import TaskCost
from tapwise.ops.conv.cpu.depthwise.kernel import FIELDS, generate
from tapwise.ops.conv.cpu.generated import GeneratedAlgorithm
from tapwise.ops.conv.problem import ConvProblem


class Depthwise(GeneratedAlgorithm[Config]):
    """Depthwise convolution, filters of any size and stride, any number of outputs a channel (NCHW).

    float32, float64, float16 (computed in float32); exact on integers that float32 holds.
    """

    id: ClassVar[str] = "cpu.depthwise"
    summary: ClassVar[str] = "one channel a group; register tiles of rows straight to y"
    candidates = staticmethod(candidates)
    cost: ClassVar = TaskCost

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise:
            return f"takes one input channel a group and several groups, not {problem.group_c} and {problem.groups}"
        if problem.layout == "nhwc" and problem.group_k != 1:
            return f"takes one output a channel in nhwc, not {problem.group_k}"
        return None

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        return 5.0 + problem.k * problem.gemm_k * 1e-3

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        names = ("taps_h", "stride_h", "dilation_h")
        sizes = (problem.kernel[0], problem.stride[0], problem.dilation[0]) if problem.layout == "nchw" else (0, 0, 0)
        shape = dict(zip(names, sizes, strict=True))
        tile = {"rows": config.rows, "vectors": config.vectors}
        library = self.load("depthwise", generate, problem, layout=problem.layout, **tile, **shape)
        g = Geometry(problem, config, device)
        size = ceil_div(problem.k, g.width) * g.width * problem.gemm_k
        return KernelPlan(problem, device, library, FIELDS, g.fields(), packed_size=size, pack_tasks=1)
