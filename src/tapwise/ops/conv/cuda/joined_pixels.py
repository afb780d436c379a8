"""cuda.joined_pixels: pixels of few channels that lie beside each other, as one pixel of as many times the channels.

Channels last, 4 pixels of 18 channels are one of 72: whole pieces of 16 bytes, which TMA takes as they lie, and most of
a K chunk. As many outputs beside each other are one pixel of y of as many times the filters. The convolution over them
has filters that are zero where an output does not see a pixel: more products than the definition, but fuller ones, and
x is not packed first. cuda.implicit_gemm computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, Final

from tapwise import arrays, registry
from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import INDEX_LIMIT, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.fprop_phases import shaped
from tapwise.ops.conv.cuda.implicit_gemm.view import is_aligned
from tapwise.ops.conv.cuda.window import JoinedFilters
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 256
BLOCKS_EACH: Final = 16
LAUNCHES_KEPT: Final = 512
# Pixels that are joined, and bytes of their channels at most: with more, most products are zeros. Pixels that
# cuda.implicit_gemm would not have to pack are one chunk.
PIXELS: Final = (2, 4, 8)
MOST_BYTES, MOST_ALIGNED_BYTES = 192, 128
INNER: Final = "cuda.implicit_gemm"


@dataclass(frozen=True)
class Config(BaseConfig):
    """`pixels` that are joined, and cuda.implicit_gemm's config."""

    pixels: int
    part: BaseConfig

    def __str__(self) -> str:
        return f"pixels={self.pixels} {self.part}"


@dataclass(frozen=True)
class Joined:
    """`fprop`: the convolution over joined pixels, whose filters reach so many of these back (`ahead`), and where they
    are zero."""

    fprop: ConvProblem
    ahead: int
    filters: JoinedFilters


@lru_cache(256)
def joined(problem: ConvProblem, pixels: int) -> Joined | None:
    """Of so many pixels as one; None where rows of x or y do not divide, or it would have to leave out a part of x."""
    width, outputs = problem.spatial[1], problem.output[1]
    if width % pixels or outputs % pixels:
        return None
    stride, (before, _), reach = problem.stride[1], problem.padding[1], problem.reach[1]
    ahead = ceil_div(before, pixels)
    last = (stride * (pixels - 1) + reach - 1 - before) // pixels
    behind = (outputs // pixels - 1) * stride + last - (width // pixels - 1)
    fprop = problem.replace(
        c=problem.c * pixels, k=problem.k * pixels, spatial=(problem.spatial[0], width // pixels),
        kernel=(problem.kernel[0], ahead + last + 1), padding=(problem.padding[0], (ahead, max(0, behind))),
        dilation=(problem.dilation[0], 1),
    )  # fmt: skip
    if fprop.output != (problem.output[0], outputs // pixels):
        return None
    # Pixels of the first and of the last one that taps of any output meet.
    places = [
        stride * output + tap * problem.dilation[1] - before
        for output in range(pixels) for tap in range(problem.kernel[1])
    ]  # fmt: skip
    met = [[place % pixels for place in places if place // pixels == group] for group in (-ahead, last)]
    each = problem.c * problem.itemsize
    return Joined(fprop, ahead, JoinedFilters(problem.k, min(met[0]) * each, (max(met[1]) + 1) * each))


def _most_bytes(problem: ConvProblem) -> int:
    return MOST_ALIGNED_BYTES if is_aligned(problem) else MOST_BYTES


class JoinedPlan(CudaPlan):
    """The convolution's launches on x, y and residual as they lie; its filters are made of w when they are packed."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, device, [], 0)
        found = joined(problem, config.pixels)
        assert found is not None
        self._fprop, self._pixels, self._device = found.fprop, config.pixels, device
        inner: Any = registry.get(INNER)
        self._plan: Plan = inner.plan(self._fprop, config.part, device, joined=found.filters)

    def pack(self, w: DeviceArray) -> Any:
        """The joined filters, as the convolution takes them."""
        memory = arrays.empty((prod(self._fprop.w_shape),), w.dtype, "nchw", w)
        launch = _join(self.problem, self._pixels, tuple(step // w.dtype.itemsize for step in w.strides), self._device)
        launch({"w": w.ptr, "y": memory.ptr}, w.stream)
        return self._plan.pack(shaped(memory, memory.ptr, self._fprop.w_shape, "nhwc"))

    def run(self, buffers: Buffers) -> None:
        self._plan.run(buffers)


def join_source(problem: ConvProblem) -> Source:
    words = template_args(tensor_core_type(problem.dtype))
    return stub("ops/conv/cuda/joined_pixels.cu", "join_filters", words, "JoinedFilters", THREADS)


def join_launch(problem: ConvProblem, pixels: int, steps: tuple[int, ...], device: Device) -> Launch:
    """Of filters with such strides, in elements."""
    found = joined(problem, pixels)
    assert found is not None
    source = join_source(problem)
    fields = window.window_fields(problem, source) | dict(
        zip(("step_k", "step_c", "step_r", "step_s"), steps, strict=True), pixels=pixels, ahead=found.ahead,
        taps_w=found.fprop.kernel[1],
    )  # fmt: skip
    blocks = min(ceil_div(prod(found.fprop.w_shape), THREADS), BLOCKS_EACH * device.multiprocessors)
    return Launch(source, fields, (blocks, 1, 1), THREADS, dependent=True)


@lru_cache(LAUNCHES_KEPT)
def _join(problem: ConvProblem, pixels: int, steps: tuple[int, ...], device: Device) -> Launch:
    launch = join_launch(problem, pixels, steps, device)
    launch.load(device.architecture, device.index)
    return launch


class JoinedPixels(window.TensorCoreAlgorithm[Config]):
    """One group of few channels, rows of x and y of whole pairs (or fours, eights) of pixels; any kernel, stride,
    padding and dilation that cuda.implicit_gemm takes then; channels last, float16, bfloat16 and tf32. Hopper."""

    id: ClassVar[str] = "cuda.joined_pixels"
    summary: ClassVar[str] = "pixels beside each other as one of as many times the channels, by cuda.implicit_gemm"
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16", "tf32")
    layouts: ClassVar[tuple[str, ...]] = ("nhwc",)
    # Outputs multiply pixels that they do not see by zeros.
    keeps_infinities: ClassVar[bool] = False

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if problem.groups > 1:
            return f"takes one group, not {problem.groups}"
        if problem.c * problem.itemsize * PIXELS[0] > _most_bytes(problem):
            most = _most_bytes(problem) // (problem.itemsize * PIXELS[0])
            return f"takes up to {most} channels, not {problem.c}"
        if not self._ways(problem, device):
            return "takes rows of x and y of whole pairs of pixels, in whole pieces of 16 bytes"
        return None

    @staticmethod
    def _ways(problem: ConvProblem, device: Device) -> list[tuple[int, ConvProblem]]:
        """How many pixels may be joined, and the convolution that it makes."""
        inner, ways = registry.get(INNER), []
        for pixels in PIXELS:
            size = problem.c * problem.itemsize * pixels
            found = joined(problem, pixels) if size % 16 == 0 and size <= _most_bytes(problem) else None
            if found and prod(found.fprop.w_shape) < INDEX_LIMIT and inner.refusal(found.fprop, device) is None:
                ways.append((pixels, found.fprop))
        return ways

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """Those of cuda.implicit_gemm that read pixels as they lie."""
        inner = registry.get(INNER)
        return [
            Config(pixels, part)
            for pixels, fprop in self._ways(problem, device)
            for part in inner.configs(fprop, device)
            if not inner.workspace_bytes(fprop, part, device)
        ]

    @staticmethod
    def _joined(problem: ConvProblem, config: Config) -> Joined:
        found = joined(problem, config.pixels)
        assert found is not None
        return found

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """That of the convolution, less products that are left out."""
        inner: Any = registry.get(INNER)
        whole = self._joined(problem, config)
        return float(inner.predict_us(whole.fprop, config.part, device, whole.filters))

    def explain(self, problem: ConvProblem, config: Config, device: Device) -> str:
        inner: Any = registry.get(INNER)
        whole = self._joined(problem, config)
        return str(inner.explain(whole.fprop, config.part, device, whole.filters))

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """The launch that joins filters, and those that pack them."""
        fprop = self._joined(problem, config).fprop
        moved = prod(fprop.w_shape) * problem.itemsize
        return window.PACK_US + moved / window.PACK_BYTES + registry.get(INNER).pack_us(fprop, config.part, device)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        inner: Any = registry.get(INNER)
        whole = self._joined(problem, config)
        return [join_source(problem), *inner.sources(whole.fprop, config.part, joined=whole.filters)]

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return JoinedPlan(problem, config, device)
