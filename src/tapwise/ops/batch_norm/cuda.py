"""cuda.block_reduction of batch normalisation."""

from __future__ import annotations

from typing import ClassVar, Final

from tapwise.channels_problem import ChannelsProblem
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.types import coordinates, template_args, tensor_core_type
from tapwise.ops.batch_norm.cuda_sums import THREADS, ChannelSums, Config
from tapwise.ops.conv.cuda.window import activation

# Rows that a thread of the last launch loads at once.
WAYS: Final = 4


class BatchNormBlockReduction(ChannelSums):
    """Any sizes, both memory orders; float32, float64, float16 and bfloat16 (in float32)."""

    operator: ClassVar[str] = "batch_norm"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "blocks add up parts of the rows, a second launch the parts, in order"
    sums: ClassVar[str] = "MOMENTS"
    ways: ClassVar[tuple[tuple[int, int], tuple[int, int]]] = (4, 4), (4, 4)


class BatchNormDgradBlockReduction(BatchNormBlockReduction):
    """The gradient's sums likewise, then the gradient by x."""

    operator: ClassVar[str] = "batch_norm_dgrad"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "sums as forward, the activation's argument worked out again; dx from the sums, backwards"
    sums: ClassVar[str] = "NORM_GRADIENT"
    ways: ClassVar[tuple[tuple[int, int], tuple[int, int]]] = (4, 2), (2, 3)

    def moved(self, problem: ChannelsProblem) -> int:
        """Both images twice, and dx."""
        return problem.bytes * 5 // 3

    def sources(self, problem: ChannelsProblem, config: Config) -> list[Source]:
        _, resident = self._ways(problem)
        words = template_args(
            tensor_core_type(problem.dtype), self.vector(problem), config.across, WAYS, problem.layout == "nhwc",
            activation(problem.activation),
        )  # fmt: skip
        header = coordinates(self.rows(problem))
        last = stub("ops/batch_norm/norm_input.cu", "norm_input", words, "Channels", THREADS, resident, header)
        return [*super().sources(problem, config), last]
