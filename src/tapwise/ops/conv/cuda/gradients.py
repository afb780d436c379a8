"""cuda.grid_stride of gradients: the definition, for whatever no other algorithm takes.

dgrad: one thread an element of dx, which gathers what its taps meet. wgrad: one block an element of dw, whose threads
share out the pixels. Each is for any memory order and any number of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, Final

from tapwise.algorithm import Config, Device, Plan
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.cuda.types import INDEX_LIMIT, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 256
# Of a launch; taps that all threads of an H100 look at in a microsecond (divisions of 64 bits), and terms that they add
# up: measured on one depthwise layer each, so orders of magnitude.
START_US: Final = 2.0
TAPS_US: Final = 2.2e5
TERMS_US: Final = 1e5
# Blocks of wgrad in a microsecond, and terms that they add up: within 0.7 and 1.1 of 16 times of depthwise layers.
BLOCKS_US: Final = 285.0
WGRAD_TERMS_US: Final = 1.4e5
# Microseconds of a term that a thread waits for.
TERM_US: Final = 0.5
# Pixels of a part of wgrad's sum at most, where tensor cores add: they cut off what does not fit into float32.
MOST_PART_PIXELS: Final = 1 << 15
# Multiprocessors that these are of.
MULTIPROCESSORS: Final = 132


class WgradPlan(CudaPlan):
    """Kernels that read x and dy as they are."""

    def pack(self, w: Any) -> Any:
        """dy itself."""
        return w


class _GridStride(CudaAlgorithm[Config]):
    """What both directions share."""

    axes: ClassVar[tuple[int, ...]] = (2,)

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        return [Config()]

    def _words(self, problem: ConvProblem) -> tuple[object, ...]:
        raise NotImplementedError

    def source(self, problem: ConvProblem, config: Config) -> Source:
        words = template_args(tensor_core_type(problem.dtype), problem.layout == "nhwc", *self._words(problem))
        return stub("ops/conv/cuda/gradients.cu", problem.direction, words, "Window", THREADS)

    def _launch(self, problem: ConvProblem, blocks: int) -> Launch:
        source = self.source(problem, Config())
        fields = window.window_fields(problem, source) | {"tiles_q": 1, "tiles_p": 1, "tiles_k": 1}
        return Launch(source, fields, (min(blocks, INDEX_LIMIT // THREADS), 1, 1), THREADS, dependent=True)


class GridStrideDgrad(_GridStride):
    """Any stride, padding, dilation and groups; both memory orders; float32, float64, float16, bfloat16 (in float32);
    any number of elements."""

    operator: ClassVar[str] = "dgrad"
    id: ClassVar[str] = "cuda.grid_stride"
    summary: ClassVar[str] = "one thread an element of dx, from the definition"
    takes_empty: ClassVar[bool] = True

    def _words(self, problem: ConvProblem) -> tuple[object, ...]:
        return (window.activation(problem.activation),)

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Taps that are looked at for each element, and terms; at least a thread's own, one behind the other."""
        share = device.multiprocessors / MULTIPROCESSORS
        taps, terms = prod(problem.x_shape) * prod(problem.kernel), problem.flops / 2
        alone = TERM_US * problem.terms / prod(problem.stride)
        return START_US + max(alone, (taps / TAPS_US + terms / (4 * TERMS_US)) / share)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return window.WindowPlan(problem, device, self.launches(problem, config, device))

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[Launch]:
        return [self._launch(problem, max(1, ceil_div(prod(problem.x_shape), THREADS)))]


class GridStrideWgrad(_GridStride):
    """Any stride, padding, dilation and groups; both memory orders; float32, float64, float16, bfloat16 (in float32);
    any number of elements."""

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cuda.grid_stride"
    summary: ClassVar[str] = "one block an element of dw, from the definition"
    takes_empty: ClassVar[bool] = True

    def _words(self, problem: ConvProblem) -> tuple[object, ...]:
        return (THREADS,)

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """All terms, and blocks that add their threads'; at least a thread's own terms, one behind the other."""
        alone = TERM_US * ceil_div(max(1, problem.terms), THREADS)
        all_blocks = prod(problem.w_shape) / BLOCKS_US + problem.flops / (2 * WGRAD_TERMS_US)
        return START_US + max(alone, all_blocks * MULTIPROCESSORS / device.multiprocessors)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return WgradPlan(problem, device, self.launches(problem, config, device))

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[Launch]:
        return [self._launch(problem, max(1, prod(problem.w_shape)))]
