"""cpu.pixel_shuffle: dgrad of filters as large as their stride, which meet each pixel of dx once: one 1x1 convolution.

All taps of all channels are filters of it, as they lie, and its results are put side by side. Layers of patches, and
transposed convolutions that double an image.

Source: Shi et al., "Real-time single image and video super-resolution using an efficient sub-pixel convolutional
neural network", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import arrays, registry
from tapwise.algorithm import Algorithm, Buffers, Device, Plan
from tapwise.integers import round_up
from tapwise.ops.conv.cpu.fprop_phases import CALL_US, JOIN_NS, in_place
from tapwise.ops.conv.cpu.joined_rows import shuffle_plan
from tapwise.ops.conv.phases import ALIGNMENT, Config, offers
from tapwise.ops.conv.problem import ConvProblem

BEYOND: Final = "takes filters as large as their stride on images without padding and rest, "


class ShufflePlan(Plan):
    def __init__(self, problem: ConvProblem, algorithm: PixelShuffle, config: Config, device: Device) -> None:
        self.problem = problem
        self.workspace_bytes = algorithm.workspace_bytes(problem, config, device)
        self._fprop = pointwise(problem)
        ((identifier, part),) = config.parts
        one: Any = registry.get(identifier)
        self._plan, self._shuffle = one.plan(self._fprop, part, device), shuffle_plan(problem, device)
        self.packed_bytes = self._plan.packed_bytes

    def pack(self, w: np.ndarray) -> Any:
        return self.pack_into(w, None)

    def pack_into(self, w: np.ndarray, memory: np.ndarray | None) -> Any:
        return self._plan.pack_into(filters_in_place(self.problem, w), memory)

    def run(self, buffers: Buffers) -> None:
        dy, packed, dx, workspace, bias, *_ = buffers
        p, fprop = self.problem, self._fprop
        size = prod(fprop.y_shape)
        flat = workspace[: size * dx.itemsize].view(dx.dtype)
        if p.layout == "nchw":
            result = flat.reshape(fprop.y_shape)
        else:
            result = arrays.channels_first(flat.reshape(p.n, *p.output, fprop.k))
        if bias is not None:
            taps = prod(p.kernel)
            bias = np.repeat(bias, taps) if p.layout == "nchw" else np.tile(bias, taps)
        self._plan.run(Buffers(dy, packed, result, workspace[result_bytes(p) :], bias))
        self._shuffle.run(Buffers(flat, None, dx))


def pointwise(problem: ConvProblem) -> ConvProblem:
    """The 1x1 convolution of dy with all taps of all channels."""
    return problem.replace(
        c=problem.k, k=problem.c * prod(problem.kernel), spatial=problem.output, kernel=(1, 1), stride=(1, 1),
        padding=((0, 0), (0, 0)), dilation=(1, 1), direction="fprop",
    )  # fmt: skip


def filters_in_place(problem: ConvProblem, w: np.ndarray) -> np.ndarray:
    """The filters (groups, c / groups * taps, k / groups, 1, 1), in the order of dx's channels and phases."""
    if problem.layout == "nhwc":
        return w.transpose(2, 3, 1, 0).reshape(1, -1, problem.k, 1, 1)
    return w.reshape(problem.groups, problem.group_k, -1).swapaxes(1, 2)[..., None, None]


def result_bytes(problem: ConvProblem) -> int:
    return round_up(prod(problem.x_shape) * problem.itemsize, ALIGNMENT)


class PixelShuffle(Algorithm[Config]):
    """float32, float64, 16 bits (in float32); NCHW, and NHWC of one group."""

    operator: ClassVar[str] = "dgrad"
    id: ClassVar[str] = "cpu.pixel_shuffle"
    summary: ClassVar[str] = "filters as large as their stride: one 1x1 convolution of dy, its results side by side"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        whole = tuple(size * step for size, step in zip(problem.output, problem.stride, strict=True))
        if problem.kernel != problem.stride or whole != problem.spatial or any(map(any, problem.padding)):
            return f"{BEYOND}not {problem.kernel} of stride {problem.stride} on {problem.spatial}"
        if set(problem.dilation) != {1} or prod(problem.stride) == 1:
            return f"takes a stride and no dilation, not {problem.stride} and {problem.dilation}"
        if problem.layout == "nhwc" and problem.groups > 1:
            return f"takes one group of channels last, not {problem.groups}"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """What is fastest, and what reads filters where they lie."""
        fprop = pointwise(problem)
        exact = (one for one in offers(fprop, device) if registry.get(one.algorithm).exact)
        fastest = next((one.algorithm, one.config) for one in exact if one.config is not None)
        found = [fastest, in_place(fprop, device, 1) or fastest]
        return [Config((part,)) for part in dict.fromkeys(found)]

    def part(self, config: Config) -> tuple[Algorithm[Any], Any]:
        ((identifier, part),) = config.parts
        return registry.get(identifier), part

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """The convolution, and a copy of every element."""
        one, part = self.part(config)
        shuffling = CALL_US + 1e-3 * prod(problem.x_shape) * JOIN_NS / device.threads
        return one.predict_us(pointwise(problem), part, device) + shuffling

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        one, part = self.part(config)
        inner = pointwise(problem)
        return one.pack_us(inner, part, device) + one.turned_us(inner, part, device, 1)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        one, part = self.part(config)
        return result_bytes(problem) + one.workspace_bytes(pointwise(problem), part, device)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return ShufflePlan(problem, self, config, device)
