"""cpu.depthwise where a row of x fits into a vector: configs, sizes and cost of a task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cpu.cost import Breakdown
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu import generated
from tapwise.ops.conv.cpu.depthwise.in_place_cost import memory, takes_pairs
from tapwise.ops.conv.cpu.depthwise.small_planes import Plane
from tapwise.ops.conv.problem import ConvProblem


@dataclass(frozen=True)
class SmallPlanesConfig(BaseConfig):
    """A vector has `joined` rows; an image's channels are `blocks` tasks."""

    joined: int
    blocks: int


class Geometry(generated.Geometry):
    """Sizes of one problem and config."""

    scratch_bytes = 0

    def __init__(self, problem: ConvProblem, config: SmallPlanesConfig, device: Device) -> None:
        super().__init__(problem, config, device)
        (h, w), (p, q), (taps_h, taps_w), ((pad_h, _), (pad_w, _)) = (
            problem.spatial, problem.output, problem.kernel, problem.padding,
        )  # fmt: skip
        rest = *problem.dilation, config.joined, self.lanes
        self.plane = Plane(h, w, p, q, taps_h, taps_w, pad_h, pad_w, *rest)
        self.columns = self.plane.by_columns(device.registers)
        self.tasks = config.blocks * problem.n

    def fields(self) -> dict[str, int | np.ndarray]:
        p = self.problem
        return {
            "tasks": self.tasks, "scratch_step": 0, "channels": p.c, "multiplier": 1, "blocks": self.config.blocks,
            "taps": p.gemm_k, "taps_h": p.kernel[0], "taps_w": p.kernel[1],
        }  # fmt: skip


def candidates(problem: ConvProblem, device: Device) -> Iterator[SmallPlanesConfig]:
    """For one filter a channel, on machines that load and store whole vectors by masks. Measured on a Zen 5 alone."""
    lanes = device.vector_bytes // problem.accumulator_bytes
    wide = max(problem.spatial[1], problem.output[1])
    if device.vector_bytes < 64 or device.split_loads or problem.layout != "nchw" or problem.group_k > 1:
        return
    if problem.stride != (1, 1) or wide > lanes or takes_pairs(problem, device) or 0 in problem.output:
        return
    joined = min(lanes // wide, problem.output[0])
    for blocks in (1, *(count * device.threads for count in (1, 2, 4))):
        config = SmallPlanesConfig(joined, blocks)
        plane = Geometry(problem, config, device).plane
        if blocks <= problem.c and (plane.by_columns(device.registers) or plane.by_rows(device.registers)):
            yield config


# Cycles: a product, a row's load, a shift, a weight, a vector's store; measured on a Zen 5.
PRODUCT: Final = 0.44
LOAD: Final = 0.6
SHIFT: Final = 0.25
WEIGHT: Final = 0.3
STORE: Final = 1.3
# Drawing a task and working out its place.
TASK: Final = 40.0
# Of the time that memory takes, what is not hidden.
MEMORY_EXPOSED: Final = 0.1


class TaskCost(generated.TaskCost):
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar = Geometry

    def breakdown(self) -> Breakdown:
        """All parts of a task."""
        plane, slow = self.geometry.plane, self.device.vector_cycles
        channels = ceil_div(self.problem.c, self.config.blocks)
        products = plane.taps_w * sum(map(len, plane.users.values()))
        rows = len(plane.users)
        cycles = {
            "products": channels * slow * PRODUCT * products,
            "shifts": channels * slow * SHIFT * rows * (plane.taps_w - 1),
            "rows": channels * (LOAD * rows + WEIGHT * plane.taps_h * plane.taps_w + STORE * plane.outputs),
            "memory": MEMORY_EXPOSED * memory(self.problem, channels, self.costs),
            "start": TASK,
        }
        return Breakdown(self.costs, cycles, self.geometry.tasks)
