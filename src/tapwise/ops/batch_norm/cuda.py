"""cuda.block_reduction of batch normalisation: blocks add up parts of the rows for some channels, a second launch the
parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.block_reduction import power_of_two
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.cuda.types import INDEX_LIMIT, coordinates, neighbours, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.batch_norm.problem import BatchNormProblem
from tapwise.ops.conv.cuda.window import activation

FILE: Final = "ops/batch_norm/batch_norm.cu"
THREADS: Final = 256
# Threads side by side: of 2 to 32 on an H200 8 took least, or as much (lines of 128 bytes).
ACROSS: Final = 8
MOST_PARTS: Final = 65535
# Roughly as measured on an H200: microseconds of a launch and of the second, the share of the bandwidth that is
# reached, and microseconds of a thread's loads, which are one behind the other.
LAUNCH_US: Final = 1.6
SECOND_US: Final = 1.4
SHARE: Final = 0.82
LOADS_US: Final = 0.55


@dataclass(frozen=True)
class Config(BaseConfig):
    """`across` threads side by side; the rows in `parts`."""

    across: int
    parts: int


class SumsPlan(CudaPlan):
    """Kernels that read x as it is."""

    def pack(self, w: Any) -> Any:
        """x itself, of the gradient."""
        return w


class BatchNormBlockReduction(CudaAlgorithm[Config]):
    """Any sizes, both memory orders; float32, float64, float16 and bfloat16 (in float32)."""

    operator: ClassVar[str] = "batch_norm"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "blocks add up parts of the rows, a second launch the parts, in order"

    def rejects(self, problem: BatchNormProblem, device: Device) -> str | None:
        return None if problem.c < INDEX_LIMIT else "takes fewer than 2^31 channels"

    def configs(self, problem: BatchNormProblem, device: Device) -> Sequence[Config]:
        """As many parts as fill the GPU once: with twice as many all but 2 of 20 layers took longer. Or one."""
        vectors = ceil_div(problem.c, self.vector(problem)) if problem.layout == "nhwc" else 1
        across, rows = min(ACROSS, power_of_two(vectors)), self.rows(problem)
        ways, resident = self._ways(problem)
        most = min(MOST_PARTS, ceil_div(rows, ways * (THREADS // across)))
        parts = max(1, min(most, device.multiprocessors * resident // self._slabs(problem, across)))
        # None is without a row.
        parts = ceil_div(rows, ceil_div(rows, parts))
        return [Config(across, count) for count in dict.fromkeys((parts, 1))]

    @staticmethod
    def vector(problem: BatchNormProblem) -> int:
        """Neighbours in memory that a thread loads at once."""
        return neighbours(problem.c if problem.layout == "nhwc" else problem.pixels, problem.itemsize)

    def rows(self, problem: BatchNormProblem) -> int:
        """Pixels, or vectors of a channel's planes."""
        return problem.n * (problem.pixels if problem.layout == "nhwc" else problem.pixels // self.vector(problem))

    @staticmethod
    def _ways(problem: BatchNormProblem) -> tuple[int, int]:
        """(rows that a thread loads at once, blocks a multiprocessor at least, which bounds the registers)."""
        if problem.direction == "fprop":
            return 4, 4
        return (4, 2) if problem.layout == "nhwc" else (2, 3)

    def _slabs(self, problem: BatchNormProblem, across: int) -> int:
        """Blocks along channels."""
        return ceil_div(problem.c, across * self.vector(problem)) if problem.layout == "nhwc" else problem.c

    def predict_us(self, problem: BatchNormProblem, config: Config, device: Device) -> float:
        """Memory, less of it where blocks do not fill the GPU; or a thread's loads behind each other; launches."""
        ways, resident = self._ways(problem)
        blocks = self._slabs(problem, config.across) * config.parts
        busy = min(1.0, blocks / (resident * device.multiprocessors)) ** 0.4
        memory = problem.bytes / (device.gbps * 1e3 * SHARE * busy)
        loads = ceil_div(ceil_div(self.rows(problem), config.parts), ways * THREADS // config.across)
        waves = ceil_div(blocks, device.multiprocessors * resident)
        return max(memory, waves * loads * LOADS_US) + LAUNCH_US + (SECOND_US if config.parts > 1 else 0.0)

    def workspace_bytes(self, problem: BatchNormProblem, config: Config, device: Device) -> int:
        """Two sums a channel and part."""
        return 2 * problem.c * config.parts * problem.accumulator_bytes if config.parts > 1 else 0

    def sources(self, problem: BatchNormProblem, config: Config) -> list[Source]:
        last, gradient, vector = problem.layout == "nhwc", problem.direction == "dgrad", self.vector(problem)
        element, header = tensor_core_type(problem.dtype), coordinates(self.rows(problem))
        ways, resident = self._ways(problem)
        words = template_args(
            element, vector, config.across, ways, last, gradient, activation(problem.activation), config.parts == 1
        )
        first = stub(FILE, "batch_norm", words, "Channels", THREADS, resident, header)
        if config.parts == 1:
            return [first]
        words = template_args(element, vector, last, gradient)
        return [first, stub(FILE, "batch_norm_parts", words, "Channels", THREADS, header=header)]

    def launches(self, problem: BatchNormProblem, config: Config) -> list[Launch]:
        fields = {"rows": self.rows(problem), "c": problem.c, "pixels": problem.pixels, "parts": config.parts}
        fields |= {} if problem.w_is_image else {"w": 0, "bias": 0}
        grids = (self._slabs(problem, config.across), config.parts, 1), (ceil_div(problem.c, THREADS // 32), 1, 1)
        return [
            Launch(source, fields, grid, THREADS, dependent=True)
            for source, grid in zip(self.sources(problem, config), grids, strict=False)
        ]

    def plan(self, problem: BatchNormProblem, config: Config, device: Device) -> Plan:
        workspace = self.workspace_bytes(problem, config, device)
        return SumsPlan(problem, device, self.launches(problem, config), workspace)


class BatchNormDgradBlockReduction(BatchNormBlockReduction):
    """The same of the gradient's sums."""

    operator: ClassVar[str] = "batch_norm_dgrad"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "the activation's argument worked out again, sums as forward"
