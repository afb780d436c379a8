"""cuda.pixel_shuffle: dgrad with a stride as one convolution of dy, whose filters are all phases' at once.

Phases of the stride (ops/conv/phases.py) see nearly the same part of dy. With as many filters as there are phases times
channels, each at its own place in a window that is large enough for all and zero elsewhere, one convolution computes
them, and another launch puts their results side by side in dx. For few channels, where a phase alone would leave most
of a tile empty: first layers, and the last ones of generators.

Source: Shi et al., "Real-time single image and video super-resolution using an efficient sub-pixel convolutional
neural network", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Any, ClassVar, Final

from tapwise import arrays, registry
from tapwise.algorithm import Algorithm, Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan, stream
from tapwise.cuda.types import INDEX_LIMIT, counter, neighbours, template_args, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda.fprop_phases import shaped
from tapwise.ops.conv.phases import ALIGNMENT, joint, offers
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 256
BLOCKS_EACH: Final = 16
LAUNCHES_KEPT: Final = 512
# Microseconds of each launch beside the convolution, and the share of the bandwidth that shuffling reaches (assumed).
START_US, BYTES_SHARE = 2.0, 0.5


@dataclass(frozen=True)
class Config(BaseConfig):
    """The algorithm of the convolution and its config."""

    algorithm: str
    part: BaseConfig

    def __str__(self) -> str:
        return f"{self.algorithm}({self.part})"


class ShufflePlan(CudaPlan):
    """The convolution, and dx of its result; with a bias, that of all filters before."""

    def __init__(self, problem: ConvProblem, algorithm: PixelShuffle, config: Config, device: Device) -> None:
        shuffle = algorithm.shuffle_launch(problem, device)
        self._bias = [algorithm.bias_launch(problem)] if problem.bias else []
        needed = algorithm.workspace_bytes(problem, config, device)
        super().__init__(problem, device, [*self._bias, shuffle], needed)
        self._joint, self._shuffle, self._device = joint(problem), shuffle, device
        inner: Any = registry.get(config.algorithm)
        self._plan: Plan = inner.plan(self._joint.fprop, config.part, device)
        self._inner_at = result_bytes(problem) + bias_bytes(problem)

    def pack(self, w: DeviceArray) -> Any:
        """The filters of all phases, as the convolution takes them."""
        return self._plan.pack(gathered_filters(self.problem, w, self._device))

    def run(self, buffers: Buffers) -> None:
        dy, packed, dx, workspace, bias, *_ = buffers
        assert workspace is not None
        on, fprop = stream(buffers), self._joint.fprop
        result = shaped(dx, workspace.ptr, fprop.y_shape, fprop.layout)
        if bias is not None:
            at = workspace.ptr + result_bytes(self.problem)
            for launch in self._bias:
                launch({"bias": bias.ptr, "y": at}, on)
            bias = shaped(bias, at, (fprop.k,), "nchw")
        inner = shaped(workspace, workspace.ptr + self._inner_at, (self.workspace_bytes - self._inner_at,), "nchw")
        self._plan.run(Buffers(dy, packed, result, inner, bias, None, on))
        self._shuffle({"parts": workspace.ptr, "y": dx.ptr}, on)


def result_bytes(problem: ConvProblem) -> int:
    """Of the convolution's result in the workspace, behind which its bias lies."""
    return round_up(prod(joint(problem).fprop.y_shape) * problem.itemsize, ALIGNMENT)


def bias_bytes(problem: ConvProblem) -> int:
    return round_up(joint(problem).fprop.k * problem.itemsize, ALIGNMENT) if problem.bias else 0


def gathered_filters(problem: ConvProblem, w: DeviceArray, device: Device) -> DeviceArray:
    """The convolution's filters of w, those of dy's channels innermost in memory."""
    fprop = joint(problem).fprop
    memory = arrays.empty((prod(fprop.w_shape),), w.dtype, "nchw", w)
    launch = _gather(problem, tuple(step // w.dtype.itemsize for step in w.strides), device)
    launch({"w": w.ptr, "y": memory.ptr}, w.stream)
    return shaped(memory, memory.ptr, fprop.w_shape, "nhwc")


def gather_launch(problem: ConvProblem, steps: tuple[int, ...], device: Device) -> Launch:
    """Of filters with such strides, in elements."""
    fields = _fields(problem) | dict(zip(("step_k", "step_c", "step_r", "step_s"), steps, strict=True))
    blocks = min(ceil_div(prod(joint(problem).fprop.w_shape), THREADS), BLOCKS_EACH * device.multiprocessors)
    return Launch(source(problem, "gather_filters"), fields, (blocks, 1, 1), THREADS, dependent=True)


@lru_cache(LAUNCHES_KEPT)
def _gather(problem: ConvProblem, steps: tuple[int, ...], device: Device) -> Launch:
    launch = gather_launch(problem, steps, device)
    launch.load(device.architecture, device.index)
    return launch


def source(problem: ConvProblem, entry: str) -> Source:
    """The kernel of that name."""
    words: tuple[Any, ...] = (tensor_core_type(problem.dtype),)
    if entry == "shuffle_pixels":
        size = max(prod(problem.x_shape), prod(joint(problem).fprop.y_shape))
        words = *words, problem.layout == "nhwc", _vector(problem), counter(size)
    return stub("ops/conv/cuda/pixel_shuffle.cu", entry, template_args(*words), "PixelShuffle", THREADS)


def _vector(problem: ConvProblem) -> int:
    """Neighbours in memory that all of them are in the convolution's result too."""
    row, run = problem.spatial[1] * problem.c, joint(problem).phases[1] * problem.c
    return neighbours(gcd(row, run), problem.itemsize) if problem.layout == "nhwc" else 1


def _fields(problem: ConvProblem) -> dict[str, int]:
    whole, (height, width), (r, s) = joint(problem), problem.spatial, problem.kernel
    (down, across), (ahead_h, ahead_w), (taps_h, taps_w) = whole.phases, whole.ahead, whole.fprop.kernel
    p, q = whole.fprop.output
    return {
        "k": problem.k, "c": problem.c, "r": r, "s": s, "taps_h": taps_h, "taps_w": taps_w, "ahead_h": ahead_h,
        "ahead_w": ahead_w, "across": across, "down": down, "n": problem.n, "height": height, "width": width, "p": p,
        "q": q, "stride_h": problem.stride[0], "stride_w": problem.stride[1], "pad_h": problem.padding[0][0],
        "pad_w": problem.padding[1][0], "dilation_h": problem.dilation[0], "dilation_w": problem.dilation[1],
        "step_k": 0, "step_c": 0, "step_r": 0, "step_s": 0,
    }  # fmt: skip


class PixelShuffle(CudaAlgorithm[Config]):
    """One group, any stride, padding and dilation; every dtype, NCHW and NHWC."""

    operator: ClassVar[str] = "dgrad"
    id: ClassVar[str] = "cuda.pixel_shuffle"
    summary: ClassVar[str] = "one convolution of dy with the filters of all phases, then their results side by side"
    # Taps that a phase does not have are zeros.
    keeps_infinities: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...] | None] = None
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if problem.groups > 1:
            return f"takes one group, not {problem.groups}"
        if prod(problem.stride) == 1:
            return "takes a stride: without one there is one phase"
        fprop = joint(problem).fprop
        if max(map(prod, (fprop.w_shape, problem.w_shape))) >= INDEX_LIMIT:
            return "takes filters of fewer than 2^31 elements"
        return None if self._offers(fprop, device) else f"finds no algorithm for '{fprop}'"

    @staticmethod
    def _offers(fprop: ConvProblem, device: Device) -> list[Any]:
        return [one for one in offers(fprop, device) if registry.get(one.algorithm).exact]

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """By each algorithm, the fastest first."""
        found = self._offers(joint(problem).fprop, device)
        return [Config(one.algorithm, one.config or BaseConfig()) for one in found]

    @staticmethod
    def _inner(config: Config) -> Algorithm[Any]:
        return registry.get(config.algorithm)

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """The convolution, and its result read and written once more."""
        fprop = joint(problem).fprop
        moved = (prod(fprop.y_shape) + prod(problem.x_shape)) * problem.itemsize
        more = START_US * (1 + problem.bias) + moved / (device.gbps * 1e3 * BYTES_SHARE)
        return self._inner(config).predict_us(fprop, config.part, device) + more

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """The launches that gather filters and pack them."""
        return 2 * START_US + prod(joint(problem).fprop.w_shape) * problem.itemsize / (device.gbps * 1e3 * 0.1)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        inner = self._inner(config).workspace_bytes(joint(problem).fprop, config.part, device)
        return result_bytes(problem) + bias_bytes(problem) + inner

    def error_factor(self, problem: ConvProblem) -> float:
        """Of the convolution: products rounded to tf32 have one that counts for all."""
        rounded = registry.get("cuda.implicit_gemm_mma").error_factor(joint(problem).fprop)
        return max(super().error_factor(problem), rounded if problem.math == "tf32" else 0.0)

    def shuffle_launch(self, problem: ConvProblem, device: Device) -> Launch:
        pieces = ceil_div(prod(problem.x_shape), THREADS * _vector(problem))
        grid = (min(pieces, BLOCKS_EACH * device.multiprocessors), 1, 1)
        return Launch(source(problem, "shuffle_pixels"), _fields(problem), grid, THREADS, dependent=True)

    def bias_launch(self, problem: ConvProblem) -> Launch:
        blocks = ceil_div(joint(problem).fprop.k, THREADS)
        return Launch(source(problem, "repeat_bias"), _fields(problem), (blocks, 1, 1), THREADS, dependent=True)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        names = ["gather_filters", "shuffle_pixels", *(["repeat_bias"] if problem.bias else [])]
        inner: Any = self._inner(config)
        return [*(source(problem, name) for name in names), *inner.sources(joint(problem).fprop, config.part)]

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return ShufflePlan(problem, self, config, device)
