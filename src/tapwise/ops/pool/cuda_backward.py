"""cuda.tiles and cuda.grid_stride of pooling's gradient: dx gathered from the windows, a tile or an element a thread.

An element of dx is in up to ceil(kernel / stride)^2 windows. One thread an element reads each window that often; a
thread with a tile of several strides reads those windows once for all of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.cuda.types import coordinates, counter, neighbours, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.pool.problem import PoolProblem

BLOCKS_EACH: Final = 64
# Sums that a thread holds in registers, windows that it reads, and additions of both: all are unrolled.
MOST_SUMS: Final = 64
MOST_WINDOWS: Final = 36
MOST_ADDITIONS: Final = 640
# Strides of a tile, down and across.
TILES: Final = ((1, 1), (2, 2), (1, 2), (1, 4), (2, 4))
# Bytes and operations a cycle of a multiprocessor: of its L1 cache, of its lanes. A thread's access counts as four
# bytes at least. Estimates, as are the operations.
L1_BYTES: Final = 64
LEAST_ACCESS: Final = 4
LANES: Final = 128
# Operations of a window and element besides its additions, and of an element of dx in memory's order.
OF_WINDOW: Final = 4
OF_PLACE: Final = 60


@dataclass(frozen=True)
class Config(BaseConfig):
    """threads of a block; neighbouring channels of a thread, and rows and columns of its tile of dx."""

    threads: int
    channels: int
    rows: int = 1
    columns: int = 1


class GradientPlan(CudaPlan):
    """Kernels that read dy and the positions as they are."""

    def pack(self, w: Any) -> Any:
        """The positions themselves."""
        return w


class _Gathered(CudaAlgorithm[Config]):
    """What both share. float32, float64, float16 and bfloat16 (in float32)."""

    operator: ClassVar[str] = "pool_dgrad"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def threads_needed(self, problem: PoolProblem, config: Config) -> int:
        down, across = (ceil_div(size, each) for size, each in zip(problem.spatial, _tile(config), strict=True))
        return problem.n * problem.c // config.channels * down * across

    def windows_read(self, problem: PoolProblem, config: Config) -> int:
        """By a thread, at most."""
        raise NotImplementedError

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        """The largest of: bytes at eight tenths of the bandwidth; accesses to L1; operations. With few blocks a part
        of the multiprocessors works."""
        threads, windows = self.threads_needed(problem, config), self.windows_read(problem, config)
        access = max(LEAST_ACCESS, config.channels * problem.itemsize)
        each = access + (8 * config.channels if problem.op == "max" else 0)
        written = config.rows * config.columns * access
        sums = config.channels * config.rows * config.columns
        operations = OF_PLACE + windows * (config.channels * OF_WINDOW + 2 * sums)
        blocks = min(device.multiprocessors, ceil_div(threads, config.threads))
        cycles = threads * max((windows * each + written) / L1_BYTES, operations / LANES) / blocks
        gigahertz = device.gflops / 256
        memory = problem.bytes / (device.gbps * 1e3 * 0.8)
        return max(memory, cycles / (gigahertz * 1e3)) * (1 + (256 - config.threads) / 1e4) + 2.0

    def plan(self, problem: PoolProblem, config: Config, device: Device) -> Plan:
        return GradientPlan(problem, device, [self.launch(problem, config, device)])

    def words(self, problem: PoolProblem, config: Config) -> tuple[object, ...]:
        """Template arguments behind those that both have."""
        raise NotImplementedError

    def source(self, problem: PoolProblem, config: Config) -> Source:
        words = (
            tensor_core_type(problem.dtype), config.channels, problem.op == "max", problem.layout == "nhwc",
            *self.words(problem, config), counter(self.threads_needed(problem, config)),
        )  # fmt: skip
        tile = _tile(config)
        padded = (size + sum(pad) for size, pad in zip(problem.spatial, problem.padding, strict=True))
        reached = (size + t + d for size, t, d in zip(padded, tile, problem.dilation, strict=True))
        header = coordinates(prod(size + t for size, t in zip(problem.spatial, tile, strict=True)), *reached)
        name = "tile" if self.words(problem, config) else "gather"
        args = template_args(*words)
        return stub("ops/pool/pool_backward.cu", name, args, "PoolGradient", config.threads, header=header)

    def launch(self, problem: PoolProblem, config: Config, device: Device) -> Launch:
        fields: dict[str, int] = {"n": problem.n, "c": problem.c, "divisor": problem.divisor or 0}
        names = ("height", "width"), ("r", "s"), ("p", "q")
        for pair, values in zip(names, (problem.spatial, problem.kernel, problem.output), strict=True):
            fields |= dict(zip(pair, values, strict=True))
        for axis, letter in enumerate("hw"):
            stride, dilation = problem.stride[axis], problem.dilation[axis]
            low, high = problem.counted(axis)
            fields |= {
                f"stride_{letter}": stride, f"pad_{letter}": problem.padding[axis][0], f"dilation_{letter}": dilation,
                f"low_{letter}": low, f"high_{letter}": high, f"step_{letter}": dilation // gcd(stride, dilation),
                f"tiles_{letter}": ceil_div(problem.spatial[axis], _tile(config)[axis]),
            }  # fmt: skip
        blocks = ceil_div(self.threads_needed(problem, config), config.threads)
        grid = (min(blocks, BLOCKS_EACH * device.multiprocessors), 1, 1)
        return Launch(self.source(problem, config), fields, grid, config.threads, dependent=True)


class PoolDgradTiles(_Gathered):
    """Windows and strides that fit a thread's registers, dilation 1, both memory orders, any number of elements."""

    id: ClassVar[str] = "cuda.tiles"
    summary: ClassVar[str] = "one thread a tile of dx, each window that it is in read once"

    def rejects(self, problem: PoolProblem, device: Device) -> str | None:
        if set(problem.dilation) != {1}:
            return f"takes dilation 1, not {problem.dilation}"
        if not self.configs(problem, device):
            return f"takes windows that fit a thread's registers, not {problem.kernel} with stride {problem.stride}"
        return None

    def configs(self, problem: PoolProblem, device: Device) -> Sequence[Config]:
        widest = neighbours(problem.c, problem.itemsize) if problem.layout == "nhwc" else 1
        found = []
        for channels in dict.fromkeys((widest, max(1, widest // 2), 1)):
            for down, across in TILES:
                config = Config(256, channels, down * problem.stride[0], across * problem.stride[1])
                windows = self.windows_read(problem, config)
                sums = channels * config.rows * config.columns * (problem.accumulator_bytes // 4)
                if sums <= MOST_SUMS and windows <= MOST_WINDOWS and windows * sums <= MOST_ADDITIONS:
                    found += [config, Config(128, channels, config.rows, config.columns)]
        return found

    def windows_read(self, problem: PoolProblem, config: Config) -> int:
        return prod(last - first + 1 for first, last in self._read(problem, config))

    def _read(self, problem: PoolProblem, config: Config) -> list[tuple[int, int]]:
        """The first and the last window that see a tile, from the one at its corner, an axis each."""
        axes = zip(_tile(config), problem.kernel, problem.stride, problem.padding, strict=True)
        return [(ceil_div(before - r + 1, stride), (t - 1 + before) // stride) for t, r, stride, (before, _) in axes]

    def words(self, problem: PoolProblem, config: Config) -> tuple[object, ...]:
        read = self._read(problem, config)
        starts = [
            first * stride - before
            for (first, _), stride, (before, _) in zip(read, problem.stride, problem.padding, strict=True)
        ]
        at_once = 1
        if problem.layout == "nchw":
            at_once = gcd(neighbours(problem.spatial[1], problem.itemsize), config.columns)
        return (
            *problem.kernel, *problem.stride, config.rows, config.columns, *(last - first + 1 for first, last in read),
            *(first for first, _ in read), *starts, at_once,
        )  # fmt: skip


class PoolDgradGridStride(_Gathered):
    """Any kernel, stride, padding and dilation, both memory orders, any number of elements."""

    id: ClassVar[str] = "cuda.grid_stride"
    summary: ClassVar[str] = "one thread an element of dx, or up to 16 bytes of channels"

    def configs(self, problem: PoolProblem, device: Device) -> Sequence[Config]:
        widest = neighbours(problem.c, problem.itemsize) if problem.layout == "nhwc" else 1
        return [Config(threads, channels) for channels in dict.fromkeys((widest, 1)) for threads in (256, 128)]

    def windows_read(self, problem: PoolProblem, config: Config) -> int:
        return problem.windows

    def words(self, problem: PoolProblem, config: Config) -> tuple[object, ...]:
        return ()


def _tile(config: Config) -> tuple[int, int]:
    return config.rows, config.columns
