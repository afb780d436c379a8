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
# Threads of a multiprocessor that are too few to keep it busy; that have one tap each.
FEW, FEW_SPREAD = 2048, 512
# Columns of more bytes leave the cache before all else.
STREAM_BYTES: Final = 24 << 20
# Waves of blocks: enough that the last one is a small part.
BLOCKS_EACH: Final = 64
# Windows of a channel at least where threads go past the ends of lines.
LONG: Final = 512
# Parts of the bandwidth that stores of so many bytes a thread reach.
REACHED: Final = {16: 0.85, 8: 0.8, 4: 0.65, 2: 0.52}


@dataclass(frozen=True)
class Config(BaseConfig):
    """threads of a block; neighbours that a thread computes together; spread: a thread has one tap only (im2col);
    partition: a block's windows as they come (run), or a block, row or column of the image (im2col); past: neighbours
    go past the ends of lines, and begin where a store of all of them may (im2col)."""

    threads: int
    vector: int
    spread: bool = False
    partition: str = "run"
    past: bool = False

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
        found = self.automatic_configs(problem, device.multiprocessors)
        if _coordinates(problem):
            return found
        return found + [Config(threads, 1, False, partition) for partition in PARTITIONS for threads in PART_THREADS]

    def automatic_configs(self, problem: PatchProblem, multiprocessors: int) -> list[Config]:
        """Those that may be chosen, the best first."""
        windows, taps = problem.n * problem.c * prod(problem.output), prod(problem.kernel)
        # Where neighbours share what is read four are best, else two.
        order = (4, 2, 1) if _dense(problem) else (2, 4, 1)
        vectors = [n for n in order if problem.output[-1] % n == 0 and n * problem.itemsize <= 16]
        found = [Config(threads, vector) for vector in vectors for threads in (256, 128)]
        if windows < FEW * multiprocessors * vectors[0]:
            found.sort(key=lambda one: (vectors.index(one.vector), one.threads))
        spread = [Config(256, vector, True) for vector in vectors]
        # As many neighbours as leave enough threads.
        spread.sort(key=lambda one: (windows * taps < one.vector * FEW_SPREAD * multiprocessors, -one.vector))
        line, most = problem.output[-1], 16 // problem.itemsize
        if _dense(problem) and line >= most and line % most and problem.itemsize > 2:
            past, many = [Config(256, most, past=True)], windows >= FEW * multiprocessors * most
            found = past + found if many and prod(problem.output) >= LONG else found + past
        return spread + found if windows < FEW * multiprocessors and taps > MOST_TAPS else found + spread

    def best_anywhere(self, problem: PatchProblem) -> list[Config]:
        """The best configs of GPUs with any number of multiprocessors."""
        windows, taps = problem.n * problem.c * prod(problem.output), prod(problem.kernel)
        marks = {windows // FEW, *(windows // (FEW * n) for n in (2, 4))}
        marks |= {windows * taps // (FEW_SPREAD * n) for n in (1, 2, 4)}
        return list(dict.fromkeys(self.automatic_configs(problem, count + 1)[0] for count in {0, *marks}))

    def predict_us(self, problem: PatchProblem, config: Config, device: Device) -> float:
        """The bytes over what stores reach of the bandwidth; the first config is the best one."""
        best = self.configs(problem, device)[0]
        slow = 1.0 + 0.05 * (config != best) + 0.5 * (config.partition != "run")
        reached = REACHED[min(16, problem.itemsize * best.vector)]
        return problem.bytes / (device.gbps * 1e3 * reached) * slow + 1.5

    def plan(self, problem: PatchProblem, config: Config, device: Device) -> Plan:
        return CudaPlan(problem, device, [self.launch(problem, config, device)])

    def _threads_needed(self, problem: PatchProblem, config: Config) -> int:
        taps = prod(problem.kernel) if config.spread else 1
        windows = ceil_div(prod(problem.output), config.vector)
        if config.across:
            down, rows = config.threads // config.across, prod(problem.output[:-1])
            windows = ceil_div(problem.output[-1], config.across) * ceil_div(rows, down) * config.threads
        return problem.n * problem.c * taps * windows

    def source(self, problem: PatchProblem, config: Config) -> Source:
        stream = prod(problem.columns_shape) * problem.itemsize > STREAM_BYTES
        count = counter(self._threads_needed(problem, config))
        if config.past:
            words = template_args(DTYPES[problem.dtype].cpp, config.vector, *_kernel(problem), stream, count)
            # A run that passes an end counts on from it.
            wide = coordinates(*(2 * n for n in (prod(problem.spatial), prod(problem.output), *problem.ends)))
            return stub("ops/patches/im2col_past.cu", "im2col_past", words, "Patches", config.threads, header=wide)
        words = template_args(
            DTYPES[problem.dtype].cpp, config.vector, *_kernel(problem), _step(problem), stream, config.spread,
            config.threads if config.across else 0, config.across, count,
        )  # fmt: skip
        return stub("ops/patches/patches.cu", "im2col", words, "Patches", config.threads, header=_coordinates(problem))

    def launch(self, problem: PatchProblem, config: Config, device: Device) -> Launch:
        blocks = min(
            ceil_div(self._threads_needed(problem, config), config.threads), BLOCKS_EACH * device.multiprocessors
        )
        return Launch(self.source(problem, config), fields(problem), (blocks, 1, 1), config.threads, dependent=True)


class Col2imGridStride(Im2colGridStride):
    """Any stride, padding and dilation, 1 to 3 spatial axes, any number of elements; float32, float64, float16
    and bfloat16 (in float32)."""

    operator: ClassVar[str] = "col2im"
    id: ClassVar[str] = "cuda.grid_stride"
    summary: ClassVar[str] = "a thread gathers one element of the image"

    def configs(self, problem: PatchProblem, device: Device) -> Sequence[Config]:
        stride = _stride(problem)
        # Eight where a tap meets every other one only.
        most = 8 if stride == 2 and problem.spatial[-1] % 8 == 0 else 4
        vectors = [
            count
            for count in (8, 4, 2, 1)
            if stride and count % stride == 0 and count <= min(most, 16 // problem.itemsize)
        ]
        return [Config(threads, vector) for vector in vectors or [1] for threads in (128, 256)]

    def _threads_needed(self, problem: PatchProblem, config: Config) -> int:
        *depth, high, wide = problem.canonical(3).spatial
        stride = _stride(problem) or 1
        return problem.n * problem.c * prod(depth) * ceil_div(high, stride) * ceil_div(wide, config.vector)

    def source(self, problem: PatchProblem, config: Config) -> Source:
        p, stride = problem.canonical(3), _stride(problem)
        more = p.accumulate, counter(self._threads_needed(problem, config))
        if not stride:
            known = 2 if set(p.stride[1:]) == {2} else 0
            name, words = "col2im", template_args(DTYPES[p.dtype].cpp, known, *more)
        else:
            rests = (*(p.padding[axis][0] % stride for axis in (1, 2)), *(p.dilation[axis] % stride for axis in (1, 2)))
            whole = p.spatial[2] % config.vector == 0
            words = template_args(DTYPES[p.dtype].cpp, config.vector, stride, *rests, *_kernel(problem), whole, *more)
            name = "col2im_tiles"
        return stub("ops/patches/patches.cu", name, words, "Patches", config.threads, header=_coordinates(problem))


def fields(problem: PatchProblem) -> dict[str, int]:
    """The numbers of struct Patches."""
    p = problem.canonical(3)
    starts = tuple(before for before, _ in p.padding)
    triples = zip(_TRIPLES, (p.spatial, p.kernel, p.output, p.stride, starts, p.dilation), strict=True)
    return {"planes": p.n * p.c, **{f"{name}{i}": value for name, triple in triples for i, value in enumerate(triple)}}


def _coordinates(problem: PatchProblem) -> str:
    """What kernels' stubs begin with: in how many bits they count places."""
    return coordinates(prod(problem.spatial), prod(problem.output), *problem.ends)


def _step(problem: PatchProblem) -> int:
    """The stride along a line, if it is 1 or 2 and a window's taps are neighbours; else 0."""
    return problem.stride[-1] if problem.stride[-1] <= 2 and problem.dilation[-1] == 1 else 0


def _dense(problem: PatchProblem) -> bool:
    """Whether windows of a line, and a window's taps, are neighbours."""
    return problem.stride[-1] == problem.dilation[-1] == 1


def _stride(problem: PatchProblem) -> int:
    """Of lines and columns of tiles of col2im: 1 or 2, with 2 for few taps; 0 where it has none."""
    strides = set(problem.canonical(3).stride[1:])
    return strides.pop() if strides == {1} or (strides == {2} and prod(problem.kernel) <= MOST_TAPS) else 0


def _kernel(problem: PatchProblem) -> tuple[int, ...]:
    """The kernel's sizes if it has few taps, else that along a line if it has few, zeros for the others."""
    sizes = problem.canonical(3).kernel
    return sizes if prod(sizes) <= MOST_TAPS else (0, 0, sizes[2] * (sizes[2] <= MOST_TAPS))
