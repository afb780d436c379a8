"""cpu.pointwise: 1x1 convolution, a matrix product on the image as it lies, with any stride.

With stride 1 and no padding an image is one long row of pixels, whatever its height, so vectors are full to the end of
the image rather than of each row. With other strides only the pixels that are read are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tapwise.algorithm import Device, Plan
from tapwise.ops.conv.cpu.direct.blocking import Config
from tapwise.ops.conv.cpu.direct.direct import Direct
from tapwise.ops.conv.cpu.generated import TaskCost
from tapwise.ops.conv.problem import ConvProblem


def flatten(problem: ConvProblem) -> ConvProblem:
    """The same problem on images of one row, where that is the same thing."""
    if set(problem.kernel) == set(problem.stride) == {1} and not any(map(any, problem.padding)):
        return problem.replace(spatial=(1, problem.spatial[0] * problem.spatial[1]))
    return problem


class Pointwise(Direct):
    """1x1 convolution without expansion. dtypes, layouts and exactness as cpu.direct."""

    id: ClassVar[str] = "cpu.pointwise"
    summary: ClassVar[str] = "1x1 as a matrix product on the image as it lies, any stride"

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if set(problem.kernel) != {1}:
            return f"takes 1x1 filters, not {'x'.join(map(str, problem.kernel))}"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        return super().configs(flatten(problem), device)

    def task(self, problem: ConvProblem, config: Config, device: Device) -> TaskCost:
        return super().task(flatten(problem), config, device)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return super().plan(flatten(problem), config, device)
