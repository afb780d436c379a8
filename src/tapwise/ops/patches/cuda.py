"""cuda.grid_stride of im2col and col2im: a thread has a few windows, or one element of the image, and strides on.

im2col: a thread writes all taps of up to four neighbouring windows of one channel. col2im gathers: no atomics, and the
same sum in the same order each time.
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
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.cuda.types import DTYPES, coordinates, counter, template_args
from tapwise.integers import ceil_div
from tapwise.ops.patches.problem import PatchProblem

_TRIPLES: Final = ("size", "kernel", "out", "stride", "pad", "dilation")
# Kernels of up to so many taps are unrolled.
MOST_TAPS: Final = 16
# The RGB report's threads of a block.
PART_THREADS: Final = (64, 256, 1024)
# Windows a multiprocessor that are too few to keep it busy.
FEW: Final = 2048
# Waves of blocks: enough that the last one is a small part.
BLOCKS_EACH: Final = 64


@dataclass(frozen=True)
class Config(BaseConfig):
    """threads of a block; neighbours that a thread computes together; spread: a thread has one tap only (im2col);
    partition: a block's windows as they come (run), or a block, row or column of the image (im2col)."""

    threads: int
    vector: int
    spread: bool = False
    partition: str = "run"

    @property
    def automatic(self) -> bool:
        """Not the RGB report's partitions: none was faster, and they multiply what is to be compared."""
        return self.partition == "run"

    @property
    def across(self) -> int:
        """Windows of a block in a line of the image, 0 as they come: ACROSS in include/partition.cuh."""
        return 0 if self.partition == "run" else tile_shape(self.partition, self.threads)[0]


class Im2colGridStride(CudaAlgorithm[Config]):
    """Any stride, padding and dilation, 1 to 3 spatial axes, any number of elements; float32, float64, float16 and
    bfloat16."""

    operator: ClassVar[str] = "im2col"
    id: ClassVar[str] = "cuda.grid_stride"
    summary: ClassVar[str] = "a thread writes all taps of a few windows"

    def configs(self, problem: PatchProblem, device: Device) -> Sequence[Config]:
        few = problem.n * problem.c * prod(problem.output) < FEW * device.multiprocessors
        if _coordinates(problem):
            return self.automatic_configs(problem, few)
        parts = [Config(threads, 1, False, partition) for partition in PARTITIONS for threads in PART_THREADS]
        return self.automatic_configs(problem, few) + parts

    def automatic_configs(self, problem: PatchProblem, few: bool) -> list[Config]:
        """Those that may be chosen, the best first; `few`: too few windows to keep the GPU busy."""
        windows, size = prod(problem.output), problem.itemsize
        vectors = [count for count in (4, 2, 1) if windows % count == 0 and count * size <= 16]
        found = [Config(threads, vector) for vector in vectors for threads in (128, 256)]
        # One element a thread is best where taps begin on cache lines, else several: a store then covers whole sectors.
        found.sort(key=lambda c: (c.vector != 1, -c.threads) if windows * size % 128 == 0 else (0, 0))
        spread = [Config(256, vector, True) for vector in vectors]
        return spread + found if few and prod(problem.kernel) > MOST_TAPS else found + spread

    def predict_us(self, problem: PatchProblem, config: Config, device: Device) -> float:
        """The bytes over seven tenths of the bandwidth; the first config is the best one."""
        slow = 1.0 + 0.05 * (config != self.configs(problem, device)[0]) + 0.5 * (config.partition != "run")
        return problem.bytes / (device.gbps * 1e3 * 0.7) * slow + 2.0

    def plan(self, problem: PatchProblem, config: Config, device: Device) -> Plan:
        return CudaPlan(problem, device, [self.launch(problem, config, device)])

    def _threads_needed(self, problem: PatchProblem, config: Config) -> int:
        taps = prod(problem.kernel) if config.spread else 1
        windows = prod(problem.output) // config.vector
        if config.across:
            down, rows = config.threads // config.across, prod(problem.output[:-1])
            windows = ceil_div(problem.output[-1], config.across) * ceil_div(rows, down) * config.threads
        return problem.n * problem.c * taps * windows

    def source(self, problem: PatchProblem, config: Config) -> Source:
        words = template_args(
            DTYPES[problem.dtype].cpp, config.vector, *_kernel(problem), config.spread,
            config.threads if config.across else 0, config.across, counter(self._threads_needed(problem, config)),
        )  # fmt: skip
        return stub("ops/patches/patches.cu", "im2col", words, "Patches", config.threads, header=_coordinates(problem))

    def launch(self, problem: PatchProblem, config: Config, device: Device) -> Launch:
        p = problem.canonical(3)
        starts = tuple(before for before, _ in p.padding)
        values = (p.spatial, p.kernel, p.output, p.stride, starts, p.dilation)
        fields = {"planes": p.n * p.c}
        for name, triple in zip(_TRIPLES, values, strict=True):
            fields |= {f"{name}{axis}": value for axis, value in enumerate(triple)}
        blocks = min(
            ceil_div(self._threads_needed(problem, config), config.threads), BLOCKS_EACH * device.multiprocessors
        )
        return Launch(self.source(problem, config), fields, (blocks, 1, 1), config.threads)


class Col2imGridStride(Im2colGridStride):
    """Any stride, padding and dilation, 1 to 3 spatial axes, any number of elements; float32, float64, float16
    and bfloat16 (in float32)."""

    operator: ClassVar[str] = "col2im"
    id: ClassVar[str] = "cuda.grid_stride"
    summary: ClassVar[str] = "a thread gathers one element of the image"

    def configs(self, problem: PatchProblem, device: Device) -> Sequence[Config]:
        width, unit = problem.spatial[-1], set(problem.stride[-2:]) == {1}
        vectors = [size for size in (4, 2, 1) if width % size == 0 and size * problem.itemsize <= 16]
        vectors = [count for count in vectors if unit or count == 1]
        # Two elements a thread measured best, then four.
        vectors.sort(key=lambda count: (2, 4, 1).index(count))
        return [Config(threads, vector) for vector in vectors for threads in (128, 256)]

    def _threads_needed(self, problem: PatchProblem, config: Config) -> int:
        return problem.n * problem.c * prod(problem.spatial) // config.vector

    def source(self, problem: PatchProblem, config: Config) -> Source:
        strides = set(problem.stride[-2:])
        stride = strides.pop() if strides in ({1}, {2}) else 0
        words = template_args(
            DTYPES[problem.dtype].cpp, config.vector, stride, *_kernel(problem), problem.accumulate,
            counter(self._threads_needed(problem, config)),
        )  # fmt: skip
        return stub("ops/patches/patches.cu", "col2im", words, "Patches", config.threads, header=_coordinates(problem))


def _coordinates(problem: PatchProblem) -> str:
    """What kernels' stubs begin with: in how many bits they count places."""
    return coordinates(prod(problem.spatial), prod(problem.output), *problem.ends)


def _kernel(problem: PatchProblem) -> tuple[int, ...]:
    """The kernel's sizes where they are few, else zeros."""
    sizes = problem.canonical(3).kernel
    return sizes if prod(sizes) <= MOST_TAPS else (0, 0, 0)
