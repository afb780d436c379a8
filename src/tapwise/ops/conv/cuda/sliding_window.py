"""cuda.sliding_window: one thread an output, its window read from global or from shared memory. It takes everything.

Choices: where the window is read from (`memory`), the shape of a block (`partition`: a square of outputs, a piece of a
row, a piece of a column, a run of y in the order of its memory) and its `threads`. A column of threads reads a
different row of the image in every thread, so each of its loads touches as many memory sectors as there are threads;
that is why it loses. A run is for any memory order and any number of elements.
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
from tapwise.cuda.types import DTYPES, INDEX_LIMIT, template_args
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
    """memory: global or shared; partition: block, row, column or run; threads of a block."""

    memory: str
    partition: str
    threads: int

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs of a block along q and p."""
        return tile_shape(self.partition, self.threads)


class SlidingWindow(CudaAlgorithm[Config]):
    """Any stride, padding, dilation and groups; both memory orders; float32, float64, float16, bfloat16 (in float32);
    any number of elements."""

    id: ClassVar[str] = "cuda.sliding_window"
    summary: ClassVar[str] = "one thread an output; from global or shared memory; by blocks, rows, columns or runs"
    axes: ClassVar[tuple[int, ...]] = (2,)
    takes_empty: ClassVar[bool] = True

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        run = Config("global", "run", 256)
        if problem.layout == "nhwc" or window.is_large(problem) or problem.trivial:
            return [run]
        found = []
        for threads in THREADS:
            for partition in PARTITIONS:
                for memory in ("global", "shared"):
                    config = Config(memory, partition, threads)
                    if memory == "global" or self.shared_bytes(problem, config) <= SHARED:
                        found.append(config)
        return [*found, run]

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

        And no thread is done before it has waited for its terms: 1.5 us a channel from shared memory, 0.25 from global
        memory, and 50 ns a term.
        """
        if config.partition == "run":
            # Addresses are worked out for every term.
            waves = ceil_div(prod(problem.y_shape), 2048 * device.multiprocessors)
            return max(window.roof_us(problem, device, 0.02, 0.3), waves * 0.05 * problem.gemm_k + 2.0)
        slow = {"block": 1.0, "row": 1.2, "column": 2.0}[config.partition]
        shared, unit = config.memory == "shared", set(problem.stride) == {1}
        slow *= (1.0 if unit else 1.5) if shared else (1.3 if unit else 1.0)
        slow *= 1.0 if config.threads == (256 if shared else 1024) else 1.1
        across, down = config.shape
        p, q = problem.output
        blocks = ceil_div(q, across) * ceil_div(p, down) * problem.n * problem.k
        waves = ceil_div(blocks * config.threads, 2048 * device.multiprocessors)
        channels = problem.c // problem.groups
        alone = channels * (1.5 if shared else 0.25) + 0.05 * channels * prod(problem.kernel)
        return max(window.roof_us(problem, device, 0.042 / slow, 0.5 / slow), waves * alone + 2.0)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return window.WindowPlan(problem, device, [self.launch(problem, config)])

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[Launch]:
        return [self.launch(problem, config)]

    def source(self, problem: ConvProblem, config: Config) -> Source:
        if config.partition == "run":
            large = max(prod(problem.x_shape), prod(problem.y_shape), prod(problem.w_shape)) >= INDEX_LIMIT
            far = max(reach + size for reach, size in zip(problem.reach, problem.spatial, strict=True)) >= INDEX_LIMIT
            words = template_args(
                DTYPES[problem.dtype].cpp, problem.layout == "nhwc", window.activation(problem.activation),
                "long long" if large or far else "int",
            )  # fmt: skip
            return stub("ops/conv/cuda/sliding_window.cu", "sliding_window_run", words, "Window", config.threads)
        words = template_args(
            DTYPES[problem.dtype].cpp, config.memory == "shared", *config.shape, window.activation(problem.activation)
        )
        return stub("ops/conv/cuda/sliding_window.cu", "sliding_window", words, "Window", config.threads)

    def launch(self, problem: ConvProblem, config: Config) -> Launch:
        source = self.source(problem, config)
        fields = window.window_fields(problem, source)
        if config.partition == "run":
            fields |= {"tiles_q": 1, "tiles_p": 1, "tiles_k": 1}
            blocks = max(1, ceil_div(prod(problem.y_shape), config.threads))
            grid = min(blocks, INDEX_LIMIT // config.threads), 1, 1
            return Launch(source, fields, grid, config.threads, dependent=True)
        across, down = config.shape
        fields |= {"tiles_q": ceil_div(fields["q"], across), "tiles_p": ceil_div(fields["p"], down), "tiles_k": 1}
        grid = (fields["tiles_q"] * fields["tiles_p"], 1, min(problem.n * problem.k, MOST_PLANES))
        return Launch(source, fields, grid, config.threads, self.shared_bytes(problem, config), dependent=True)
