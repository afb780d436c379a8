"""cuda.block_reduction of softmax: a block's threads find a run's maximum and sum, then write the quotients."""

from __future__ import annotations

from typing import ClassVar, Final

from tapwise.cuda.block_reduction import BlockReduction, Config, kernel, power_of_two
from tapwise.cuda.jit.compile import Source
from tapwise.integers import ceil_div
from tapwise.ops.softmax.problem import SoftmaxProblem

# Elements of a run that a thread holds in registers.
MOST_KEPT: Final = 16


class SoftmaxBlockReduction(BlockReduction):
    """softmax and its logarithm along any axis of a dense array; float32, float64, float16 (in float32)."""

    operator: ClassVar[str] = "softmax"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "maximum and sum in one reading, then the quotients; or one thread a run"
    passes: ClassVar[float] = 1.5

    def kernels(self, problem: SoftmaxProblem, config: Config) -> list[tuple[Source, Config]]:
        stages = ("BOTH",) if config.parts == 1 else ("MEASURE", "SCALE")
        each = ceil_div(problem.length, config.down)
        kept = power_of_two(each) if config.parts == 1 and each <= MOST_KEPT else 0
        return [
            (kernel(problem, "ops/softmax/softmax.cu", config, problem.log, kept, stage), config) for stage in stages
        ]
