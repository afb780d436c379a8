"""cuda.thread_per_run of softmax: short runs of 16 bits that lie anywhere, by way of shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.cuda.types import INDEX_LIMIT, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.softmax.cuda_ring import fields, unsuited
from tapwise.ops.softmax.problem import SoftmaxProblem

# Elements of a run, and runs of a block.
LEAST, MOST = 9, 95
RUNS: Final = 128
# Blocks of a multiprocessor that registers have room for, by the elements of a run that they may hold.
BLOCKS: Final = ((48, 8), (64, 6), (80, 5), (MOST, 4))
# Of the cost model (H200): parts of the bandwidth, and microseconds of an element on all threads of a multiprocessor,
# and of the first runs.
MEMORY, EACH_ELEMENT, START = 0.88, 7e-5, 1.9


@dataclass(frozen=True)
class Config(BaseConfig):
    """threads of a block: its runs."""

    threads: int = RUNS


class SoftmaxThreadPerRun(CudaAlgorithm[Config]):
    """softmax and its logarithm along the last axis, of runs of 9 to 95 elements that are no multiple of eight; float16
    and bfloat16 (in float32). Compute capability 9.0 and newer."""

    operator: ClassVar[str] = "softmax"
    id: ClassVar[str] = "cuda.thread_per_run"
    summary: ClassVar[str] = "short runs through shared memory, each in one thread's registers"

    def rejects(self, problem: SoftmaxProblem, device: Device) -> str | None:
        outer, length, _ = problem.sizes
        if problem.itemsize != 2:
            return "takes f16, bf16"
        if reason := unsuited(problem, device):
            return reason
        if not LEAST <= length <= MOST or length % 8 == 0:
            return f"takes runs of {LEAST} to {MOST} elements, no multiple of 8"
        return "takes fewer than 2^31 blocks" if ceil_div(outer, RUNS) >= INDEX_LIMIT else None

    def configs(self, problem: SoftmaxProblem, device: Device) -> Sequence[Config]:
        return [Config()]

    def predict_us(self, problem: SoftmaxProblem, config: Config, device: Device) -> float:
        outer, length, _ = problem.sizes
        memory = problem.bytes / (device.gbps * 1e3 * MEMORY)
        blocks = ceil_div(outer, config.threads)
        runs = ceil_div(blocks, device.multiprocessors) * config.threads
        return max(memory, runs * length * EACH_ELEMENT) + START

    def plan(self, problem: SoftmaxProblem, config: Config, device: Device) -> Plan:
        return CudaPlan(problem, device, [self.launch(problem, config, device)])

    def launch(self, problem: SoftmaxProblem, config: Config, device: Device) -> Launch:
        # A barrier's piece, then the runs.
        shared = 16 + config.threads * problem.length * problem.itemsize
        shape = (ceil_div(problem.sizes[0], config.threads), 1, 1), config.threads, shared
        return Launch(self.source(problem, config), fields(problem), *shape, dependent=True)

    def source(self, problem: SoftmaxProblem, config: Config) -> Source:
        length = problem.length
        words = template_args(tensor_core_type(problem.dtype), problem.log, length, config.threads)
        blocks = next(blocks for most, blocks in BLOCKS if length <= most)
        return stub(
            "ops/softmax/softmax_thread_per_run.cu", "softmax_thread_per_run", words, "Runs", config.threads, blocks
        )
