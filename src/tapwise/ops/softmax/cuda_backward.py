"""cuda.block_reduction of softmax's gradient: a block's threads find a run's sum, then write dx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from tapwise.algorithm import Device, Plan
from tapwise.cuda.block_reduction import BUSY, THREADS, BlockReduction, Config, kernel, power_of_two, widths
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.integers import ceil_div
from tapwise.ops.softmax.problem import SoftmaxProblem

# Elements of dy, and as many of y, that a thread holds in registers.
MOST_KEPT: Final = 32


class GradientPlan(CudaPlan):
    """Kernels that read dy and y as they are."""

    def pack(self, w: Any) -> Any:
        """y itself."""
        return w


class SoftmaxDgradBlockReduction(BlockReduction):
    """Gradients of softmax and its logarithm along any axis of a dense array; float32, float64, float16 and bfloat16
    (in float32)."""

    operator: ClassVar[str] = "softmax_dgrad"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "a run's sum and then dx, from registers where they hold it; or one thread a run"

    def configs(self, problem: SoftmaxProblem, device: Device) -> Sequence[Config]:
        """Along the last axis 16 bytes a thread and load; else as of every block reduction."""
        outer, length, inner = problem.sizes
        plain = list(super().configs(problem, device))
        wide = []
        for width in widths(length, problem.itemsize) if inner == 1 else ():
            # Few long runs are cut in parts.
            if plain[0].parts > 1:
                wide += [replace(plain[0], vector=width)] * (length % width == 0)
                continue
            loads = length // width
            least = max(min(32, power_of_two(loads)), power_of_two(ceil_div(length, MOST_KEPT)))
            busy = min(power_of_two(ceil_div(BUSY * device.multiprocessors, outer)), power_of_two(loads))
            down = min(THREADS, max(least, busy))
            both = (Config(1, count, THREADS // count, 1, vector=width) for count in (down, min(THREADS, least)))
            wide += [one for one in both if width > 1 and (one.skews(problem) <= (self._kept(problem, one) > 0))]
        found = [one for one in wide if ceil_div(outer, one.runs) < INDEX_LIMIT]
        return list(dict.fromkeys([*found, *plain]))

    def predict_us(self, problem: SoftmaxProblem, config: Config, device: Device) -> float:
        """Bytes at seven tenths of the bandwidth, dy and y twice where registers do not hold them; or what a run's own
        thread takes: 0.1 us a load."""
        outer, length, inner = problem.sizes
        alone = length / (config.down * config.parts * config.vector) * 0.1
        blocks = ceil_div(outer * inner, config.runs) * config.parts
        # One thread a run reads a sector for each element.
        spread = max(1.0, 2.0 * problem.itemsize) if config.down == 1 and inner == 1 and length > 1 else 1.0
        busy = min(1.0, blocks * THREADS * config.vector / (512 * device.multiprocessors))
        memory = problem.bytes * spread / (device.gbps * 1e3 * 0.7 * max(busy, 0.02))
        again = 1.0 if self._kept(problem, config) else 5 / 3
        return max(memory, alone) * again + 2.0 * (1 + (config.parts > 1)) + 0.1 * (config.vector == 1)

    def _kept(self, problem: SoftmaxProblem, config: Config) -> int:
        """Loads of a thread that registers hold, 0 where they do not."""
        each = power_of_two(ceil_div(problem.length // config.vector, config.down))
        return each if config.parts == 1 and each * config.vector <= MOST_KEPT else 0

    def kernels(self, problem: SoftmaxProblem, config: Config) -> list[tuple[Source, Config]]:
        stages = ("BOTH",) if config.parts == 1 else ("MEASURE", "SCALE")
        file, kept = "ops/softmax/softmax_backward.cu", self._kept(problem, config)
        words = problem.log, config.vector, config.skews(problem), kept
        return [(kernel(problem, file, config, *words, stage), config) for stage in stages]

    def plan(self, problem: SoftmaxProblem, config: Config, device: Device) -> Plan:
        workspace = self.workspace_bytes(problem, config, device)
        return GradientPlan(problem, device, self.launches(problem, config), workspace)
