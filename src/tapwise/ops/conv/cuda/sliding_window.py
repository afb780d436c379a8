"""cuda.sliding_window: one thread an output, its window read from global or from shared memory.

Choices: where the window is read from (`memory`), the shape of a block (`partition`: a square of outputs, a piece of a
row, a piece of a column) and its `threads`. A column of threads reads a different row of the image in every thread, so
each of its loads touches as many memory sectors as there are threads; that is why it loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.partition import PARTITIONS, tile_shape
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import DTYPES, template_args
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = (256, 32, 64, 128, 512, 1024)
# Shared memory that every GPU gives a block without asking.
SHARED: Final = 48 << 10
# Blocks along the last axis of a grid; kernels loop over what is beyond.
MOST_PLANES: Final = 65535


@dataclass(frozen=True)
class Config(BaseConfig):
    """memory: global or shared; partition: block, row or column; threads of a block."""

    memory: str
    partition: str
    threads: int

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs of a block along q and p."""
        return tile_shape(self.partition, self.threads)


class SlidingWindow(CudaAlgorithm[Config]):
    """Any stride, padding, dilation and groups; NCHW; float32, float64, float16 (in float32)."""

    id: ClassVar[str] = "cuda.sliding_window"
    summary: ClassVar[str] = "one thread an output; from global or shared memory; by blocks, rows or columns"
    layouts: ClassVar[tuple[str, ...]] = ("nchw",)
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        return window.TOO_LARGE if window.is_large(problem) else None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        found = []
        for threads in THREADS:
            for partition in PARTITIONS:
                for memory in ("global", "shared"):
                    config = Config(memory, partition, threads)
                    if memory == "global" or self.shared_bytes(problem, config) <= SHARED:
                        found.append(config)
        return found

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        """A block's part of one input channel, with its halo."""
        if config.memory == "global":
            return 0
        size = problem.itemsize
        for outputs, step, taps, apart in zip(
            config.shape, problem.stride[::-1], problem.kernel[::-1], problem.dilation[::-1], strict=True
        ):
            size *= (outputs - 1) * step + (taps - 1) * apart + 1
        return size

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Two loads a multiply-add: 0.042 of the arithmetic rate at best; columns twice as slow.

        A tile in shared memory pays at stride 1: otherwise it holds elements that few threads want.

        And no thread is done before it has waited for its terms: 1.5 us a channel from shared memory, 50 ns a term.
        """
        slow = {"block": 1.0, "row": 1.2, "column": 2.0}[config.partition]
        shared, unit = config.memory == "shared", set(problem.stride) == {1}
        slow *= (1.0 if unit else 1.5) if shared else (1.3 if unit else 1.0)
        slow *= 1.0 if config.threads == (256 if shared else 1024) else 1.1
        across, down = config.shape
        p, q = problem.output
        blocks = ceil_div(q, across) * ceil_div(p, down) * problem.n * problem.k
        waves = ceil_div(blocks * config.threads, 2048 * device.multiprocessors)
        channels = problem.c // problem.groups
        alone = channels * (1.5 if config.memory == "shared" else 0.0) + 0.05 * channels * prod(problem.kernel)
        return max(window.roof_us(problem, device, 0.042 / slow, 0.5 / slow), waves * alone + 2.0)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return window.WindowPlan(problem, device, [self.launch(problem, config)])

    def source(self, problem: ConvProblem, config: Config) -> Source:
        words = template_args(
            DTYPES[problem.dtype].cpp, config.memory == "shared", *config.shape, window.ACTIVATIONS[problem.activation]
        )
        return stub("ops/conv/cuda/sliding_window.cu", "sliding_window", words, "Window", config.threads)

    def launch(self, problem: ConvProblem, config: Config) -> Launch:
        source, (across, down) = self.source(problem, config), config.shape
        fields = window.window_fields(problem, source)
        fields |= {"tiles_q": ceil_div(fields["q"], across), "tiles_p": ceil_div(fields["p"], down), "tiles_k": 1}
        grid = (fields["tiles_q"] * fields["tiles_p"], 1, min(problem.n * problem.k, MOST_PLANES))
        return Launch(source, fields, grid, config.threads, self.shared_bytes(problem, config))
