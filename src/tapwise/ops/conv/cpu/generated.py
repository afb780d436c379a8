"""What the algorithms with generated kernels share: sizes of a task, its cost, and what follows from the two."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tapwise.algorithm import Algorithm, C, Device
from tapwise.cpu.common import lanes_of, load
from tapwise.cpu.cost import Breakdown, Costs
from tapwise.cpu.jit import Library
from tapwise.cpu.simd import Kernel
from tapwise.ops.conv.problem import ConvProblem


class Geometry:
    """Sizes of one problem and config. Lengths are in elements unless named otherwise."""

    # Of one worker; how many tasks there are.
    scratch_bytes: int
    tasks: int

    def __init__(self, problem: ConvProblem, config: Any, device: Device) -> None:
        self.problem, self.config, self.lanes = problem, config, lanes_of(problem, device)

    def workspace_bytes(self, threads: int) -> int:
        """Scratch of all workers."""
        return self.scratch_bytes * max(1, min(threads, self.tasks))


class TaskCost:
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar[type[Geometry]]

    def __init__(self, problem: ConvProblem, config: Any, device: Device) -> None:
        self.problem, self.config, self.device = problem, config, device
        self.costs = Costs(device, problem.accumulator_bytes)
        self.geometry: Any = self.sizes(problem, config, device)

    @abstractmethod
    def breakdown(self) -> Breakdown:
        """All parts of a task."""


class GeneratedAlgorithm(Algorithm[C]):
    """A subclass names the configs worth trying and the cost of a task."""

    axes: ClassVar[tuple[int, ...]] = (2,)
    # candidates(problem, device): configs, a valid default first; repetitions do no harm.
    candidates: ClassVar[Any]
    cost: ClassVar[type[TaskCost]]

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[C]:
        """Every sensible blocking."""
        return list(dict.fromkeys(self.candidates(problem, device)))

    def task(self, problem: ConvProblem, config: C, device: Device) -> TaskCost:
        return self.cost(problem, config, device)

    def predict_us(self, problem: ConvProblem, config: C, device: Device) -> float:
        """Cycles of one task (`cost`), times the tasks that one worker draws."""
        return self.task(problem, config, device).breakdown().us

    def explain(self, problem: ConvProblem, config: C, device: Device) -> str:
        """What a task is made of."""
        return str(self.task(problem, config, device).breakdown())

    def workspace_bytes(self, problem: ConvProblem, config: C, device: Device) -> int:
        return int(self.task(problem, config, device).geometry.workspace_bytes(device.threads))

    def load(self, name: str, generate: Callable[..., Kernel], problem: ConvProblem, **parameters: Any) -> Library:
        """The kernels, with the problem's epilogue."""
        fused = {"bias": problem.bias, "residual": problem.residual, "activation": problem.activation}
        return load(name, generate, problem, **parameters, **fused)
