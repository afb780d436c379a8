"""cuda.block_reduction of reduce: a block's threads reduce strided pieces, long runs in parts and a second launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from tapwise.algorithm import Device
from tapwise.cuda.block_reduction import THREADS, BlockReduction, Config, kernel
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.types import neighbours
from tapwise.ops.axes import rejects_apart
from tapwise.ops.reduce.problem import ReduceProblem

FILE: Final = "ops/reduce/reduce.cu"
# What a thread reduces by itself: its accumulators are large.
ALONE: Final = ("argmax", "argmin", "logsumexp")


class ReduceBlockReduction(BlockReduction):
    """All ops, along neighbouring axes of a dense array; float32, float64, float16 (in float32)."""

    operator: ClassVar[str] = "reduce"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "threads reduce strided pieces, a block puts them together; or one thread an output"
    passes: ClassVar[float] = 1.0

    def rejects(self, problem: ReduceProblem, device: Device) -> str | None:
        return rejects_apart(problem) or super().rejects(problem, device)

    def configs(self, problem: ReduceProblem, device: Device) -> Sequence[Config]:
        """Before the others what loads up to 16 bytes of neighbouring runs at once."""
        *_, inner = problem.collapsed or (1,)
        width = 1 if problem.op in ALONE else neighbours(inner, problem.itemsize)
        wide = self.wide(problem, width, device) if width > 1 else []
        return [*wide, *super().configs(problem, device)]

    def kernels(self, problem: ReduceProblem, config: Config) -> list[tuple[Source, Config]]:
        op = problem.op.upper()
        if config.parts == 1:
            return [(kernel(problem, FILE, config, op, config.neighbours, False, True), config)]
        last = Config(1, 32, THREADS // 32, 1)
        return [
            (kernel(problem, FILE, config, op, config.neighbours, False, False), config),
            (kernel(problem, FILE, last, op, 1, True, True), last),
        ]
