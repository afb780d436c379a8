"""cpu.simd of squeeze-and-excitation: means, both products and the scale in vectors, each by all threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final

import numpy as np

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu.common import lanes_of, load
from tapwise.cpu.cost import Costs
from tapwise.cpu.jit import Library
from tapwise.cpu.plan import KernelPlan
from tapwise.integers import ceil_div
from tapwise.ops.squeeze_excitation.cpu_kernel import FIELDS, generate
from tapwise.ops.squeeze_excitation.problem import SqueezeExcitationProblem
from tapwise.problem import DTYPES

# Elements that one thread is done with before a team has started.
ALONE: Final = 16384


@dataclass(frozen=True)
class Config(BaseConfig):
    """An image's channels, or pixels, are so many tasks."""

    blocks: int


class GatePlan(KernelPlan):
    """Launches the kernels one behind the other: in NCHW those that scale channels work out their gates first."""

    def __init__(
        self, problem: SqueezeExcitationProblem, device: Device, library: Library, fields: dict[str, int]
    ) -> None:
        super().__init__(problem, device, library, FIELDS, fields)
        self.workspace_bytes = workspace_bytes(problem)
        for name in ("reduce", "scale") if problem.layout == "nchw" else ("reduce", "expand", "scale"):
            self.then(name)

    def pack(self, w: np.ndarray) -> np.ndarray:
        """In the arithmetic dtype; themselves where they are so: they are nobody's for longer than a call."""
        return np.ascontiguousarray(w, DTYPES[self.problem.accumulator])


def workspace_bytes(problem: SqueezeExcitationProblem) -> int:
    return problem.accumulator_bytes * problem.n * (2 * problem.c + problem.m)


class SqueezeExcitationSimd(Algorithm[Config]):
    """Any sizes, both memory orders; float32, float64, float16, bfloat16 (in float32)."""

    operator: ClassVar[str] = "squeeze_excitation"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "means, products and the scale in vectors, a launch each"

    def configs(self, problem: SqueezeExcitationProblem, device: Device) -> Sequence[Config]:
        """Four tasks a thread, or one where there is little to do."""
        if prod(problem.x_shape) + problem.n * 2 * problem.m * problem.c <= ALONE:
            return [Config(1)]
        return [Config(max(1, min(4 * device.threads // min(problem.n, 4 * device.threads), problem.c)))]

    def predict_us(self, problem: SqueezeExcitationProblem, config: Config, device: Device) -> float:
        """x from cache or memory twice, y once; a vector of the filters a cycle; three or four starts."""
        costs, tasks = Costs(device, problem.accumulator_bytes), problem.n * config.blocks
        image = prod(problem.x_shape) * problem.itemsize
        cycles = costs.stream(3 * image, problem.bytes) + 3 * prod(problem.x_shape) / costs.lanes
        cycles += 2 * problem.n * problem.m * problem.c / costs.lanes
        return costs.wall_us(cycles / tasks + 40, tasks, device.threads) + (6.0 if tasks > 1 else 0.0)

    def workspace_bytes(self, problem: SqueezeExcitationProblem, config: Config, device: Device) -> int:
        return workspace_bytes(problem)

    def plan(self, problem: SqueezeExcitationProblem, config: Config, device: Device) -> Plan:
        words = {"layout": problem.layout, "activation": problem.activation, "gate": problem.gate}
        library = load("squeeze_excitation", generate, problem, **words)
        # Channels last, whole vectors of a pixel.
        lanes = lanes_of(problem, device) if problem.layout == "nhwc" else 1
        fields = {
            "tasks": problem.n * config.blocks, "n": problem.n, "channels": problem.c, "pixels": problem.pixels,
            "m": problem.m, "blocks": config.blocks, "block_p": ceil_div(problem.pixels, config.blocks),
            "block_m": ceil_div(problem.m, config.blocks),
            "block_c": ceil_div(ceil_div(problem.c, config.blocks), lanes) * lanes,
        }  # fmt: skip
        return GatePlan(problem, device, library, fields)
