"""Sums for each channel of an image: blocks add up parts of the rows for some channels, a second launch the parts.

Rows are pixels in channels-last order, vectors of a channel's planes in NCHW.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.channels_problem import ChannelsProblem
from tapwise.cuda.block_reduction import power_of_two
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan, stream
from tapwise.cuda.types import INDEX_LIMIT, coordinates, neighbours, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda.window import activation

FILE: Final = "ops/batch_norm/channel_sums.cu"
THREADS: Final = 256
WARPS: Final = THREADS // 32
# Threads side by side: of 2 to 32 on an H200 8 took least, or as much (lines of 128 bytes).
ACROSS: Final = 8
MOST_PARTS: Final = 65535
# Roughly as measured on an H200: microseconds of a launch and of the second, the share of the bandwidth that is
# reached, and microseconds of a thread's loads, which are one behind the other.
LAUNCH_US: Final = 1.6
SECOND_US: Final = 1.4
SHARE: Final = 0.82
LOADS_US: Final = 0.55


@dataclass(frozen=True)
class Config(BaseConfig):
    """`across` threads side by side; the rows in `parts`."""

    across: int
    parts: int


class SumsPlan(CudaPlan):
    """Kernels that read a second image as it is. y is an array, or a pair where there are two results."""

    def pack(self, w: Any) -> Any:
        return w

    def run(self, buffers: Buffers) -> None:
        if self.problem.second is None:
            super().run(buffers)
            return
        first, second = buffers.y
        named = {"x": buffers.x, "w": buffers.w, "bias": buffers.bias, "workspace": buffers.workspace}
        named |= {"y": first, "second": second}
        addresses = {name: array.ptr for name, array in named.items() if array is not None}
        self.enqueue(addresses, stream(buffers))


class ChannelSums(CudaAlgorithm[Config]):
    """Any sizes, both memory orders; float32, float64, float16 and bfloat16 (in float32)."""

    # One of the enum in channel_sums.cu.
    sums: ClassVar[str]
    # Of rows in channels-last order and in NCHW: how many a thread loads at once, and how many blocks a multiprocessor
    # has at least, which bounds the registers.
    ways: ClassVar[tuple[tuple[int, int], tuple[int, int]]]
    summary: ClassVar[str] = "blocks add up parts of the rows, a second launch the parts, in order"

    def rejects(self, problem: ChannelsProblem, device: Device) -> str | None:
        return None if problem.c < INDEX_LIMIT else "takes fewer than 2^31 channels"

    def configs(self, problem: ChannelsProblem, device: Device) -> Sequence[Config]:
        """As many parts as fill the GPU once: with twice as many all but 2 of 20 layers took longer. Or one."""
        vectors = ceil_div(problem.c, self.vector(problem)) if problem.layout == "nhwc" else 1
        across, rows = min(ACROSS, power_of_two(vectors)), self.rows(problem)
        ways, resident = self._ways(problem)
        most = min(MOST_PARTS, ceil_div(rows, ways * (THREADS // across)))
        parts = max(1, min(most, device.multiprocessors * resident // self._slabs(problem, across)))
        # None is without a row.
        parts = ceil_div(rows, ceil_div(rows, parts))
        return [Config(across, count) for count in dict.fromkeys((parts, 1))]

    @staticmethod
    def vector(problem: ChannelsProblem) -> int:
        """Neighbours in memory that a thread loads at once."""
        return neighbours(problem.c if problem.layout == "nhwc" else problem.pixels, problem.itemsize)

    def rows(self, problem: ChannelsProblem) -> int:
        """Pixels, or vectors of a channel's planes."""
        return problem.n * (problem.pixels if problem.layout == "nhwc" else problem.pixels // self.vector(problem))

    def _ways(self, problem: ChannelsProblem) -> tuple[int, int]:
        return self.ways[0 if problem.layout == "nhwc" else 1]

    def _slabs(self, problem: ChannelsProblem, across: int) -> int:
        """Blocks along channels."""
        return ceil_div(problem.c, across * self.vector(problem)) if problem.layout == "nhwc" else problem.c

    def predict_us(self, problem: ChannelsProblem, config: Config, device: Device) -> float:
        """Memory, less of it where blocks do not fill the GPU; or a thread's loads behind each other; launches."""
        ways, resident = self._ways(problem)
        blocks = self._slabs(problem, config.across) * config.parts
        busy: float = min(1.0, blocks / (resident * device.multiprocessors)) ** 0.4
        memory = self.moved(problem) / (device.gbps * 1e3 * SHARE * busy)
        loads = ceil_div(ceil_div(self.rows(problem), config.parts), ways * THREADS // config.across)
        waves = ceil_div(blocks, device.multiprocessors * resident)
        return max(memory, waves * loads * LOADS_US) + LAUNCH_US + SECOND_US * (len(self.sources(problem, config)) - 1)

    def moved(self, problem: ChannelsProblem) -> int:
        """Bytes that are read and written."""
        return problem.bytes

    def workspace_bytes(self, problem: ChannelsProblem, config: Config, device: Device) -> int:
        """Two sums a channel and part."""
        return 2 * problem.c * config.parts * problem.accumulator_bytes if config.parts > 1 else 0

    def sources(self, problem: ChannelsProblem, config: Config) -> list[Source]:
        last, vector, word = problem.layout == "nhwc", self.vector(problem), activation(problem.activation)
        element, header = tensor_core_type(problem.dtype), coordinates(self.rows(problem))
        ways, resident = self._ways(problem)
        words = template_args(element, vector, config.across, ways, last, self.sums, word, config.parts == 1)
        first = stub(FILE, "channel_sums", words, "Channels", THREADS, resident, header)
        if config.parts == 1:
            return [first]
        words = template_args(element, vector, last, self.sums, problem.second is not None)
        return [first, stub(FILE, "channel_sums_parts", words, "Channels", THREADS, header=header)]

    def launches(self, problem: ChannelsProblem, config: Config) -> list[Launch]:
        fields = {"rows": self.rows(problem), "c": problem.c, "pixels": problem.pixels, "parts": config.parts}
        fields |= {} if problem.w_is_image else {"w": 0}
        fields |= {} if self.sums == "NORM_GRADIENT" else {"bias": 0}
        fields |= {} if problem.second is not None else {"second": 0}
        of_parts, of_channels = (self._slabs(problem, config.across), config.parts, 1), ceil_div(problem.c, WARPS)
        grids = [of_parts, *[(of_channels, 1, 1)] * (config.parts > 1), of_parts]
        return [
            Launch(source, fields, grid, THREADS, dependent=True)
            for source, grid in zip(self.sources(problem, config), grids, strict=False)
        ]

    def plan(self, problem: ChannelsProblem, config: Config, device: Device) -> Plan:
        workspace = self.workspace_bytes(problem, config, device)
        return SumsPlan(problem, device, self.launches(problem, config), workspace)
