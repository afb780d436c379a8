"""cuda.block_reduction of reduce: a block's threads reduce strided pieces, long runs in parts and a second launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, log2
from typing import ClassVar, Final

from tapwise.algorithm import Device
from tapwise.cuda.block_reduction import BUSY, THREADS, BlockReduction, Config, kernel, power_of_two, widths
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.types import INDEX_LIMIT, neighbours
from tapwise.integers import ceil_div
from tapwise.ops.axes import rejects_apart
from tapwise.ops.reduce.problem import ReduceProblem

FILE: Final = "ops/reduce/reduce.cu"
# Loads of a thread to choose from; the best number, and what twice or half as many cost (15 problems, H200).
LOADS: Final = (16, 8, 4)
BEST_LOADS, UNEVEN = 10, 0.2
# Along inner axes, a thread an output (24 problems, H200). Threads of a block, of which multiprocessors get more even
# shares than of 256; how much of what the largest share has beyond the mean is waited for. Microseconds of an element
# that a thread loads. From so many outputs of a multiprocessor on it takes so much of the time that others take.
FEW: Final = 128
UNEVEN_SHARES, ELEMENT_US = 0.35, 0.025
OUTPUTS, PLAIN = 190, 0.75
# Bytes that a thread of some outputs beside each other loads at once; from so many threads of a multiprocessor on they
# take so much of the time, and with fewer so much more (6 problems).
AT_ONCE: Final = 8
LOADERS, TOGETHER, SPARSE = 350, 0.95, 1.06
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
        """Before the others what loads up to 16 bytes of neighbouring runs, or of one run, at once."""
        outer, length, inner = problem.collapsed or (1, 1, 1)
        width = 1 if problem.op in ALONE else neighbours(inner, problem.itemsize)
        wide = self.wide(problem, width, device) if width > 1 else []
        plain = list(super().configs(problem, device))
        if inner == 1 and length > 1:
            for vector in widths(length, problem.itemsize):
                downs = (min(THREADS, power_of_two(ceil_div(length // vector, each))) for each in LOADS)
                wide += [Config(1, down, THREADS // down, 1, vector=vector) for down in downs]
                wide += [replace(plain[0], vector=vector)] * (plain[0].parts > 1)
            wide = [one for one in wide if ceil_div(outer, one.runs) * one.parts < INDEX_LIMIT]
        if inner > 1:
            plain.append(Config(FEW, 1, 1, 1))
            pairs = AT_ONCE // problem.itemsize
            if pairs > 1 and problem.op not in ALONE and inner % pairs == 0:
                plain.append(Config(FEW // 2, 1, 1, 1, pairs))
        return list(dict.fromkeys([*wide, *plain]))

    def predict_us(self, problem: ReduceProblem, config: Config, device: Device) -> float:
        """As of every block reduction; along the last axis more where a thread has few loads or many, and along others
        less for a thread an output, where blocks are shared out evenly."""
        us, (outer, length, inner) = super().predict_us(problem, config, device), problem.collapsed or (1, 1, 1)
        if inner == 1 and config.down > 1:
            loads = max(1.0, length / (config.down * config.parts * config.vector))
            return us * (1 + UNEVEN * abs(log2(loads / BEST_LOADS)))
        outputs = outer * inner / device.multiprocessors
        if config.down > 1 or inner == 1 or problem.op in ALONE:
            return us * (0.9 if config.down == 1 and outputs >= BUSY else 1.0)
        rounds = outputs / config.runs
        us = max(problem.bytes / (device.gbps * 1e3 * 0.7), length * ELEMENT_US)
        us *= 1 + UNEVEN_SHARES * (ceil(rounds) / rounds - 1)
        if config.neighbours > 1:
            us *= TOGETHER if outputs / config.neighbours >= LOADERS else SPARSE
        return (us + 2.0) * (PLAIN if outputs >= OUTPUTS else 1.0)

    def kernels(self, problem: ReduceProblem, config: Config) -> list[tuple[Source, Config]]:
        op, loads = problem.op.upper(), (config.neighbours, config.vector, config.skews(problem))
        if config.parts == 1:
            return [(kernel(problem, FILE, config, op, *loads, False, True), config)]
        last = Config(1, 32, THREADS // 32, 1)
        return [
            (kernel(problem, FILE, config, op, *loads, False, False), config),
            (kernel(problem, FILE, last, op, 1, 1, False, True, True), last),
        ]
