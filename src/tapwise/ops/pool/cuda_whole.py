"""cuda.block_reduction of pooling: windows that are the whole image, as the reduction that they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import ClassVar

from tapwise.algorithm import Device, Plan
from tapwise.cuda.block_reduction import Config
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.ops.pool.problem import PoolProblem
from tapwise.ops.reduce.cuda import ReduceBlockReduction
from tapwise.ops.reduce.problem import ReduceProblem


@lru_cache(256)
def reduction(problem: PoolProblem) -> ReduceProblem:
    """The same as a mean or a maximum along an axis."""
    pixels = prod(problem.spatial)
    last = problem.layout == "nhwc"
    shape = (problem.n, pixels, problem.c) if last else (problem.n * problem.c, pixels)
    return ReduceProblem(shape, (1,), dtype=problem.dtype, op={"max": "max", "avg": "mean"}[problem.op])


class PoolBlockReduction(CudaAlgorithm[Config]):
    """One window that is the whole image, without padding, no positions; both memory orders."""

    operator: ClassVar[str] = "pool"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "global pooling as a reduction"
    axes: ClassVar[tuple[int, ...]] = (2,)
    _reduce: ClassVar[ReduceBlockReduction] = ReduceBlockReduction()

    def rejects(self, problem: PoolProblem, device: Device) -> str | None:
        whole = problem.kernel == problem.spatial and max(problem.dilation) == 1 and not any(map(any, problem.padding))
        if not whole or problem.indices or problem.divisor not in (None, prod(problem.spatial)):
            return "takes one window, the whole image, without padding, positions and another divisor"
        return self._reduce.refusal(reduction(problem), device)

    def configs(self, problem: PoolProblem, device: Device) -> Sequence[Config]:
        return self._reduce.configs(reduction(problem), device)

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        return self._reduce.predict_us(reduction(problem), config, device)

    def workspace_bytes(self, problem: PoolProblem, config: Config, device: Device) -> int:
        return self._reduce.workspace_bytes(reduction(problem), config, device)

    def sources(self, problem: PoolProblem, config: Config) -> list[Source]:
        return self._reduce.sources(reduction(problem), config)

    def launches(self, problem: PoolProblem, config: Config, device: Device) -> list[Launch]:
        return self._reduce.launches(reduction(problem), config)

    def plan(self, problem: PoolProblem, config: Config, device: Device) -> Plan:
        return self._reduce.plan(reduction(problem), config, device)
