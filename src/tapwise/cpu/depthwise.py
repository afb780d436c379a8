"""cpu.depthwise: one input channel a group, filters of any size."""

from __future__ import annotations

from typing import ClassVar

from tapwise.algorithm import Device
from tapwise.cpu.direct import Direct
from tapwise.problem import ConvProblem


class Depthwise(Direct):
    """Depthwise convolution, with any number of outputs for each channel."""

    id: ClassVar[str] = "cpu.depthwise"
    summary: ClassVar[str] = "one channel a group; lanes over pixels"

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise:
            return f"takes one input channel a group, not {problem.group_c}"
        return super().rejects(problem, device)
