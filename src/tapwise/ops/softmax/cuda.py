"""cuda.block_reduction of softmax: a block's threads find a run's maximum and sum, then write the quotients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2
from typing import ClassVar, Final

from tapwise.algorithm import Device
from tapwise.cuda import block_reduction
from tapwise.cuda.block_reduction import THREADS, BlockReduction, kernel
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.launch import has_dependent_launches
from tapwise.cuda.types import INDEX_LIMIT, neighbours
from tapwise.integers import ceil_div
from tapwise.ops.softmax.problem import SoftmaxProblem

# Elements of a run that a thread holds in registers; of a cluster's blocks.
MOST_KEPT, MOST_OF_CLUSTER = 32, 64
CLUSTERS: Final = (2, 4, 8)
# Elements of a thread that are few, and blocks of a multiprocessor then.
FEW, MOST_BLOCKS = 8, 8
# Elements that a thread holds best, or where it reads one by one; what twice or half as many cost, and what reading so
# does (31 problems, H200).
HELD, FEW_HELD, UNEVEN, ONE_BY_ONE = 11, 6, 0.15, 0.15


@dataclass(frozen=True)
class Config(block_reduction.Config):
    """As of every block reduction. `cluster`: parts are blocks of a cluster, which hold them in registers."""

    cluster: bool = False


class SoftmaxBlockReduction(BlockReduction):
    """softmax and its logarithm along any axis of a dense array; float32, float64, float16 and bfloat16 (in
    float32)."""

    operator: ClassVar[str] = "softmax"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "runs in registers of a block or a cluster; longer ones read twice; or one thread a run"

    def configs(self, problem: SoftmaxProblem, device: Device) -> Sequence[Config]:
        """Along the last axis first those whose threads hold a run in registers."""
        outer, _, inner = problem.sizes
        plain = [Config(one.across, one.down, one.groups, one.parts) for one in super().configs(problem, device)]
        kept = list(self._kept_configs(problem, device)) if inner == 1 else []
        found = [one for one in kept if ceil_div(outer, one.runs) * one.parts < INDEX_LIMIT]
        return list(dict.fromkeys([*found, *plain]))

    def _kept_configs(self, problem: SoftmaxProblem, device: Device) -> Iterator[Config]:
        """16 bytes a thread and load; threads a run from as few as can hold it to as many as have a load each."""
        width, length = neighbours(problem.length, problem.itemsize), problem.length
        down = 1
        while down <= THREADS:
            if length <= down * MOST_KEPT and (down == 1 or length > down * width // 2):
                yield Config(1, down, THREADS // down, 1, vector=width)
            down *= 2
        if length > THREADS * MOST_KEPT and has_dependent_launches(device.architecture):
            for parts in CLUSTERS:
                if length <= parts * THREADS * MOST_OF_CLUSTER:
                    yield Config(1, THREADS, 1, parts, vector=width, cluster=True)

    def predict_us(self, problem: SoftmaxProblem, config: Config, device: Device) -> float:  # type: ignore[override]
        """Bytes at seven tenths of the bandwidth, x twice where registers do not hold it, and more where those of a
        thread hold few or many; or what a run's own thread takes: 0.1 us a load."""
        outer, length, inner = problem.sizes
        alone = length / (config.down * config.parts * config.vector) * 0.1
        blocks = ceil_div(outer * inner, config.runs) * config.parts
        spread = max(1.0, 8.0 * problem.itemsize / 4 if config.down == 1 and inner == 1 and length > 1 else 1.0)
        busy = min(1.0, blocks * THREADS * config.vector / (512 * device.multiprocessors))
        memory = problem.bytes * spread / (device.gbps * 1e3 * 0.7 * max(busy, 0.02))
        again = 1.5
        if self._kept(problem, config):
            held = max(length, 1) / (config.down * config.parts)
            one_by_one = config.vector == 1
            best = FEW_HELD if one_by_one else HELD
            again = 1 + UNEVEN * abs(log2(held / best)) + ONE_BY_ONE * one_by_one
        launches = 1.0 if config.parts == 1 else 1.5 if config.cluster else 3.0
        return max(memory, alone) * again + 2.0 * launches

    def workspace_bytes(self, problem: SoftmaxProblem, config: Config, device: Device) -> int:  # type: ignore[override]
        """A cluster's parts need none."""
        return 0 if config.cluster else super().workspace_bytes(problem, config, device)

    def shared_bytes(self, problem: SoftmaxProblem, config: Config) -> int:  # type: ignore[override]
        """Of a cluster, whose blocks read each other's: an accumulator a thread, and the part's level and sum."""
        return (THREADS + 1) * (24 if problem.dtype == "f64" else 16) if config.cluster else 0

    def _kept(self, problem: SoftmaxProblem, config: Config) -> int:
        """Loads of a thread that registers hold, 0 where they do not."""
        each = ceil_div(ceil_div(problem.length, config.parts), config.down * config.vector)
        most = MOST_OF_CLUSTER if config.cluster else MOST_KEPT
        return each if (config.parts == 1 or config.cluster) and each * config.vector <= most else 0

    def kernels(self, problem: SoftmaxProblem, config: Config) -> list[tuple[Source, Config]]:  # type: ignore[override]
        stages = ("BOTH",) if config.parts == 1 or config.cluster else ("MEASURE", "SCALE")
        kept, cluster = self._kept(problem, config), config.parts if config.cluster else 1
        file, words = "ops/softmax/softmax.cu", (problem.log, config.vector, kept)
        # Few elements leave room for many threads, whose loads hide each other's wait.
        few = 0 < config.vector * kept <= FEW and problem.dtype != "f64"
        more = {"cluster": cluster, "blocks": MOST_BLOCKS if few else 1}
        return [(kernel(problem, file, config, *words, stage, cluster, **more), config) for stage in stages]
