"""cuda.block_reduction of softmax: a block's threads find a run's maximum and sum, then write the quotients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import ClassVar, Final

from tapwise.algorithm import Device
from tapwise.cuda import block_reduction
from tapwise.cuda.block_reduction import THREADS, BlockReduction, kernel, widths
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.launch import has_dependent_launches
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.integers import ceil_div
from tapwise.ops.softmax.problem import SoftmaxProblem

# Elements of a run that a thread holds in registers; of a cluster's blocks.
MOST_KEPT, MOST_OF_CLUSTER = 32, 64
CLUSTERS: Final = (2, 4, 8)
# Threads of a block that holds runs, if one needs no more: small blocks leave few registers of a multiprocessor over.
KEPT_THREADS: Final = 64
# Elements of a thread that are few, and blocks of a multiprocessor then: at most, or where registers are short.
FEW, MOST_BLOCKS, FEWER_BLOCKS = 8, 8, 6
# Of the cost model, fitted to 60 problems (H200). Loads of 16 bytes that a thread has best, and narrower ones; what
# twice or half as many cost, and half as wide ones; an edge as a part of a load; warps that meet in shared memory.
LOADS, FEW_LOADS, UNEVEN, NARROW, EDGE, SEVERAL_WARPS = 3, 6, 0.15, 0.08, 0.3, 1.1
# Parts of a sector that a run's own thread writes one by one without a loss.
PARTS = 8
# The same of a cluster, which has no fewer than so many loads, and what it costs, and elements of two bytes in it; of
# reading twice, which has no more than so many loads. Of both, half as wide loads. Launches of 2 us that a cluster is,
# and two launches one after the other.
CLUSTER_LOADS, FEWER, CLUSTER, SHORT = 6, 0.25, 1.05, 1.2
TWICE_LOADS, MORE, TWICE, NARROWER, LAUNCHES = 8, 0.1, 1.1, 0.4, (1.5, 6.5)


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
        if inner == 1 and not any(one.parts == 1 for one in kept):
            sizes = widths(problem.length, problem.itemsize)
            kept += [replace(one, vector=width) for one in plain if one.across == 1 for width in sizes]
            wide = Config(1, 2 * THREADS, 1, 1, vector=sizes[0])
            # Of two bytes registers hold too many elements of such a block.
            kept += [wide] * (problem.itemsize > 2 or not self._kept(problem, wide))
        found = [one for one in kept if ceil_div(outer, one.runs) * one.parts < INDEX_LIMIT]
        return list(dict.fromkeys([*found, *plain]))

    def _kept_configs(self, problem: SoftmaxProblem, device: Device) -> Iterator[Config]:
        """16 bytes a thread and load; threads a run from as few as can hold it to as many as have a load each."""
        length = problem.length
        for width in widths(length, problem.itemsize):
            down = 1
            while down <= THREADS:
                if length <= down * MOST_KEPT and (down == 1 or length > down * width // 2):
                    yield Config(1, down, max(1, KEPT_THREADS // down), 1, vector=width)
                down *= 2
            if length > THREADS * MOST_KEPT and has_dependent_launches(device.architecture):
                for parts in CLUSTERS:
                    if length <= parts * THREADS * MOST_OF_CLUSTER:
                        yield Config(1, THREADS, 1, parts, vector=width, cluster=True)

    def predict_us(self, problem: SoftmaxProblem, config: Config, device: Device) -> float:  # type: ignore[override]
        """Bytes at seven tenths of the bandwidth, x twice where registers do not hold it, and more where those of a
        thread hold few or many; or what a run's own thread takes: 0.05 us a load and an element."""
        outer, length, inner = problem.sizes
        loads = max(length, 1) / (config.down * config.parts * config.vector)
        alone = loads * (1 + config.vector) * 0.05
        blocks = ceil_div(outer * inner, config.runs) * config.parts
        kept, spread = self._kept(problem, config), 1.0
        if config.down == 1 and inner == 1 and length > 1:
            # A thread writes a sector of its own run in parts; of one that it does not hold it reads it so, too.
            parts = min(length, 32 // (problem.itemsize * config.vector))
            spread = max(1.0, parts / PARTS if kept else 2.0 * problem.itemsize)
        busy = min(1.0, blocks * config.threads * config.vector / (512 * device.multiprocessors))
        memory = problem.bytes * spread / (device.gbps * 1e3 * 0.7 * max(busy, 0.02))
        halvings = log2(16 // (config.vector * problem.itemsize)) if inner == 1 else 0.0
        again = 1 + NARROWER * halvings
        if config.cluster:
            again *= CLUSTER * (1 + FEWER * max(0.0, log2(CLUSTER_LOADS / loads)))
            again *= SHORT if problem.itemsize < 4 else 1.0
        elif kept:
            edges = self._edges(problem, config)
            best = LOADS if config.vector * problem.itemsize == 16 else FEW_LOADS
            again = 1 + UNEVEN * abs(log2((loads + EDGE * edges) / best)) + NARROW * halvings
            again *= SEVERAL_WARPS if config.down > 32 else 1.0
        else:
            again *= TWICE + MORE * max(0.0, log2(loads / TWICE_LOADS))
        launches = 1.0 if config.parts == 1 else LAUNCHES[not config.cluster]
        return max(memory, alone) * again + 2.0 * launches

    def workspace_bytes(self, problem: SoftmaxProblem, config: Config, device: Device) -> int:  # type: ignore[override]
        """A cluster's parts need none."""
        return 0 if config.cluster else super().workspace_bytes(problem, config, device)

    def shared_bytes(self, problem: SoftmaxProblem, config: Config) -> int:  # type: ignore[override]
        """Of a cluster, whose blocks read each other's: an accumulator a thread, and the part's level and sum."""
        return (THREADS + 1) * (24 if problem.dtype == "f64" else 16) if config.cluster else 0

    def _kept(self, problem: SoftmaxProblem, config: Config) -> int:
        """Loads of a thread that registers hold, 0 where they do not."""
        length = problem.length // config.vector * config.vector
        each = ceil_div(ceil_div(length, config.parts), config.down * config.vector)
        most = MOST_OF_CLUSTER if config.cluster else MOST_KEPT
        return each if (config.parts == 1 or config.cluster) and each * config.vector <= most else 0

    def _edges(self, problem: SoftmaxProblem, config: Config) -> int:
        """Elements of a thread between a run's ends and its pieces."""
        return ceil_div(2 * config.vector - 2, config.down) if config.skews(problem) else 0

    def kernels(self, problem: SoftmaxProblem, config: Config) -> list[tuple[Source, Config]]:  # type: ignore[override]
        stages = ("BOTH",) if config.parts == 1 or config.cluster else ("MEASURE", "SCALE")
        kept, cluster = self._kept(problem, config), config.parts if config.cluster else 1
        file, words = "ops/softmax/softmax.cu", (problem.log, config.vector, config.skews(problem), kept)
        # Few elements leave room for many threads, whose loads hide each other's wait.
        few = 0 < config.vector * kept <= FEW and problem.dtype != "f64"
        short = (
            self._edges(problem, config) > 1
            or config.cluster
            or (problem.log and (config.skews(problem) or config.vector == 1))
        )
        more = {
            "cluster": cluster,
            "blocks": (FEWER_BLOCKS if short else MOST_BLOCKS) * THREADS // config.threads if few else 1,
        }
        return [(kernel(problem, file, config, *words, stage, cluster, **more), config) for stage in stages]
