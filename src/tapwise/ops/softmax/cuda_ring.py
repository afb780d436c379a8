"""cuda.ring of softmax: long runs lie in shared memory one after another, and copies bring the next ones meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.cuda.types import template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.softmax.problem import SoftmaxProblem

# Elements of a run at least: a block holds shorter ones in registers.
LEAST: Final = 8193
# Threads of a block, and how many blocks a multiprocessor has registers for; slots of its ring.
BLOCKS: Final = {1024: 1, 512: 3, 256: 6}
SLOTS: Final = 2
# What the hardware takes of shared memory for each block.
RESERVED: Final = 1 << 10
# Of the cost model (H200): parts of the bandwidth; microseconds of a run, and of each element of those that a
# multiprocessor has at once, by bytes; of the launch.
MEMORY, EACH_RUN, EACH_ELEMENT, START = 0.87, 1.6, {2: 9e-5, 4: 11e-5}, 1.0


@dataclass(frozen=True)
class Config(BaseConfig):
    """threads of a block."""

    threads: int


class SoftmaxRing(CudaAlgorithm[Config]):
    """softmax and its logarithm along the last axis, of runs that shared memory has twice; float32, float16 and
    bfloat16 (in float32). Compute capability 9.0 and newer."""

    operator: ClassVar[str] = "softmax"
    id: ClassVar[str] = "cuda.ring"
    summary: ClassVar[str] = "a run in shared memory while the next one comes, read once"

    def rejects(self, problem: SoftmaxProblem, device: Device) -> str | None:
        if problem.dtype == "f64":
            return "takes f32, f16, bf16"
        if reason := unsuited(problem, device):
            return reason
        if problem.length < LEAST:
            return f"takes runs of {LEAST} elements and more"
        if _shared_bytes(problem, Config(min(BLOCKS))) > device.shared_bytes:
            return f"takes runs of which {SLOTS} fit into {device.shared_bytes} bytes of shared memory"
        return None

    def configs(self, problem: SoftmaxProblem, device: Device) -> Sequence[Config]:
        every = [Config(threads) for threads in BLOCKS]
        return [one for one in every if _shared_bytes(problem, one) <= device.shared_bytes]

    def predict_us(self, problem: SoftmaxProblem, config: Config, device: Device) -> float:
        """The longer of what memory and the threads take for the runs that a multiprocessor has at once."""
        outer, length, _ = problem.sizes
        at_once = blocks_at_once(problem, config, device)
        rounds = ceil_div(outer, at_once * device.multiprocessors)
        sharing = min(at_once, ceil_div(outer, rounds * device.multiprocessors))
        share = device.gbps * 1e3 * MEMORY / device.multiprocessors
        memory = 2 * length * problem.itemsize / share
        run = max(sharing * memory, EACH_RUN + sharing * length * EACH_ELEMENT[problem.itemsize])
        return rounds * run + START

    def plan(self, problem: SoftmaxProblem, config: Config, device: Device) -> Plan:
        return CudaPlan(problem, device, [self.launch(problem, config, device)])

    def launch(self, problem: SoftmaxProblem, config: Config, device: Device) -> Launch:
        blocks = min(problem.sizes[0], blocks_at_once(problem, config, device) * device.multiprocessors)
        shape = (blocks, 1, 1), config.threads, _shared_bytes(problem, config)
        return Launch(self.source(problem, config), fields(problem), *shape, dependent=True)

    def source(self, problem: SoftmaxProblem, config: Config) -> Source:
        skewed = problem.length * problem.itemsize % 16 != 0
        dtype = tensor_core_type(problem.dtype)
        words = template_args(dtype, problem.log, skewed, config.threads, SLOTS)
        return stub(
            "ops/softmax/softmax_ring.cu", "softmax_ring", words, "Runs", config.threads, BLOCKS[config.threads]
        )


def unsuited(problem: SoftmaxProblem, device: Device) -> str | None:
    """Why bulk copies cannot bring a problem's runs to shared memory, or None."""
    if problem.sizes[2] != 1:
        return "takes the last axis"
    # Both came with compute capability 9.0.
    return None if has_dependent_launches(device.architecture) else "needs compute capability 9.0"


def fields(problem: SoftmaxProblem) -> dict[str, int]:
    """The words of struct Runs: each run is one part, whose sums go by no other launch."""
    outer, length, _ = problem.sizes
    return {"w": 0, "outer": outer, "length": length, "inner": 1, "parts": 1, "accumulators": 0}


def blocks_at_once(problem: SoftmaxProblem, config: Config, device: Device) -> int:
    """Of a multiprocessor."""
    of_shared = (device.shared_bytes + RESERVED) // (_shared_bytes(problem, config) + RESERVED)
    return max(1, min(of_shared, BLOCKS[config.threads]))


def _shared_bytes(problem: SoftmaxProblem, config: Config) -> int:
    """Barriers, a level a warp, and the slots: a run with what stands before and behind it in its pieces."""
    piece = 16 // problem.itemsize
    pieces = (problem.length + 2 * piece - 2) // piece
    rest = 8 * SLOTS + 8 * (config.threads // 32)
    return 128 * ceil_div(rest, 128) + SLOTS * 128 * ceil_div(16 * pieces, 128)
