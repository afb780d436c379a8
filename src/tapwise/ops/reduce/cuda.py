"""cuda.block_reduction of reduce: a block's threads reduce strided pieces, long runs in parts and a second launch."""

from __future__ import annotations

from typing import ClassVar

from tapwise.algorithm import Device
from tapwise.cuda.block_reduction import THREADS, BlockReduction, Config, kernel
from tapwise.cuda.jit.compile import Source
from tapwise.ops.axes import rejects_apart
from tapwise.ops.reduce.problem import ReduceProblem

FILE = "ops/reduce/reduce.cu"


class ReduceBlockReduction(BlockReduction):
    """All ops, along neighbouring axes of a dense array; float32, float64, float16 (in float32)."""

    operator: ClassVar[str] = "reduce"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "threads reduce strided pieces, a block puts them together; or one thread an output"
    passes: ClassVar[float] = 1.0

    def rejects(self, problem: ReduceProblem, device: Device) -> str | None:
        return rejects_apart(problem) or super().rejects(problem, device)

    def kernels(self, problem: ReduceProblem, config: Config) -> list[tuple[Source, Config]]:
        op = problem.op.upper()
        if config.parts == 1:
            return [(kernel(problem, FILE, config, op, False, True), config)]
        last = Config(1, 32, THREADS // 32, 1)
        return [
            (kernel(problem, FILE, config, op, False, False), config),
            (kernel(problem, FILE, last, op, True, True), last),
        ]
