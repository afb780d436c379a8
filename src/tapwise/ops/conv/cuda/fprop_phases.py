"""cuda.fprop_phases: dgrad by the GPU's algorithms of fprop, phase by phase (ops/conv/phases.py)."""

from __future__ import annotations

from functools import lru_cache
from math import gcd, prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import arrays, registry
from tapwise.algorithm import Buffers, Device, Plan
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan, stream
from tapwise.cuda.types import INDEX_LIMIT, counter, neighbours, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.phases import MOST_PHASES, Config, Phases, phases_of
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 256
# Filters and columns that a block turns.
SQUARE: Final = 32
# Filters of a group below which a tile would be mostly empty.
FEW: Final = 8
# Strides of filters whose launch is kept.
PLANS_KEPT: Final = 512
BLOCKS_EACH: Final = 16
# Microseconds of a launch, and the share of the bandwidth that putting dx together reaches. Not measured.
START_US, BYTES_SHARE = 2.0, 0.7


class PhasesPlan(CudaPlan):
    """The launches of each phase's plan, then one that puts their results together."""

    def __init__(self, problem: ConvProblem, algorithm: _CudaPhases, config: Config, device: Device) -> None:
        joins = [] if algorithm.joined_by_itself(problem) else [algorithm.join_launch(problem, device)]
        super().__init__(problem, device, joins, algorithm.workspace_bytes(problem, config, device))
        self._phases = algorithm.plans(problem, config, device)
        self._device = device
        self._slot, self._inner_at = algorithm.slot_bytes(problem), algorithm.inner_at(problem)

    def pack(self, w: DeviceArray) -> list[Any]:
        """Each phase's filters, as its plan takes them."""
        turned = turned_filters(self.problem, w, self._device)
        return [plan.pack(one) for (_, plan), one in zip(self._phases, turned, strict=True)]

    def run(self, buffers: Buffers) -> None:
        dy, packed, dx, workspace, bias, *_ = buffers
        on = stream(buffers)
        inner = None
        if workspace is not None:
            inner = _shaped(workspace, workspace.ptr + self._inner_at, (self.workspace_bytes - self._inner_at,), "nchw")
        for number, phase in enumerate(phases_of(self.problem) or ()):
            found = next(((plan, w) for (one, plan), w in zip(self._phases, packed, strict=True) if one is phase), None)
            if found is None:
                continue
            plan, w = found
            assert phase.problem is not None
            result = dx
            if self.launches:
                address = workspace.ptr + number * self._slot
                result = _shaped(dx, address, phase.problem.y_shape, phase.problem.layout)
            plan.run(Buffers(dy, w, result, inner, bias, None, on))
        for launch in self.launches:
            launch({"parts": workspace.ptr, "y": dx.ptr, "bias": 0 if bias is None else bias.ptr}, on)


def turned_filters(problem: ConvProblem, w: DeviceArray, device: Device) -> list[DeviceArray]:
    """The filters (c, k / groups, ...) of each phase that has taps, filters of w innermost in memory: one launch."""
    phases = [phase for phase in phases_of(problem) or () if phase.problem is not None]
    memory = arrays.empty((prod(problem.w_shape),), w.dtype, "nchw", w)
    launch = _turn(problem, tuple(step // w.dtype.itemsize for step in w.strides), device)
    launch({"w": w.ptr, "y": memory.ptr}, w.stream)
    found, at = [], 0
    for phase in phases:
        shape = problem.c, problem.group_k, *map(len, phase.taps)
        found.append(_shaped(memory, memory.ptr + at, shape, "nhwc"))
        at += prod(shape) * w.dtype.itemsize
    return found


def turn_source(problem: ConvProblem, last: bool) -> Source:
    words = template_args({2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}[problem.itemsize], last)
    entry = "turn_few" if problem.group_k < FEW else "turn_filters"
    return stub("ops/conv/cuda/fprop_phases.cu", entry, words, "Filters", THREADS)


def turn_launch(problem: ConvProblem, steps: tuple[int, ...]) -> Launch:
    """Of filters with such strides, in elements."""
    last = abs(steps[1]) < abs(steps[3])
    fields: dict[str, int] = {
        "groups": problem.groups, "group_k": problem.group_k, "group_c": problem.group_c, "step_k": steps[0],
        "step_c": steps[1], "step_r": steps[2], "step_s": steps[3],
        "down": min(problem.stride[0], problem.spatial[0]),
        "across": min(problem.stride[1], problem.spatial[1]), "tiles_k": ceil_div(problem.group_k, SQUARE),
        "tiles_columns": ceil_div(problem.gemm_k, SQUARE),
    }  # fmt: skip
    for axis, name in enumerate("hw"):
        stride, dilation = problem.stride[axis], problem.dilation[axis]
        fields |= {
            f"taps_{name}": problem.kernel[axis], f"stride_{name}": stride,
            f"first_{name}": -problem.padding[axis][0] % stride, f"turn_{name}": dilation % stride,
            f"apart_{name}": stride // gcd(stride, dilation),
        }  # fmt: skip
    at, bases = 0, [0] * MOST_PHASES
    for number, phase in enumerate(phases_of(problem) or ()):
        bases[number] = at
        at += prod(map(len, phase.taps)) * problem.c * problem.group_k if phase.problem is not None else 0
    fields |= {f"base{number}": base for number, base in enumerate(bases)}
    blocks = fields["tiles_k"] * fields["tiles_columns"] * problem.groups
    if problem.group_k < FEW:
        blocks = ceil_div(prod(problem.w_shape), THREADS)
    return Launch(turn_source(problem, last), fields, (blocks, 1, 1), THREADS, dependent=True)


@lru_cache(PLANS_KEPT)
def _turn(problem: ConvProblem, steps: tuple[int, ...], device: Device) -> Launch:
    launch = turn_launch(problem, steps)
    launch.load(device.architecture, device.index)
    return launch


def _shaped(like: DeviceArray, address: int, shape: tuple[int, ...], layout: str) -> DeviceArray:
    """Memory at an address, dense, of the dtype of an array that owns it."""
    order = range(len(shape)) if layout == "nchw" else (0, *range(2, len(shape)), 1)
    steps, step = dict.fromkeys(order, 0), like.dtype.itemsize
    for axis in reversed(order):
        steps[axis], step = step, step * shape[axis]
    strides = tuple(steps[axis] for axis in range(len(shape)))
    return DeviceArray(address, shape, strides, like.dtype, like.index, like.library, like.owner)


class _CudaPhases(Phases, CudaAlgorithm[Config]):
    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if prod(problem.w_shape) >= INDEX_LIMIT:
            return "takes filters of fewer than 2^31 elements"
        return super().rejects(problem, device)

    def join_us(self, problem: ConvProblem, device: Device) -> float:
        """The phases' results read, and dx written."""
        return START_US + 2 * prod(problem.x_shape) * problem.itemsize / (device.gbps * 1e3 * BYTES_SHARE)

    def join_source(self, problem: ConvProblem) -> Source:
        last = problem.layout == "nhwc"
        words = template_args(
            tensor_core_type(problem.dtype), last, self._vector(problem), window.activation(problem.activation),
            counter(prod(problem.x_shape)),
        )  # fmt: skip
        return stub("ops/conv/cuda/fprop_phases.cu", "join_phases", words, "Join", THREADS)

    @staticmethod
    def _vector(problem: ConvProblem) -> int:
        return neighbours(problem.c, problem.itemsize) if problem.layout == "nhwc" else 1

    def join_launch(self, problem: ConvProblem, device: Device) -> Launch:
        (height, width), (stride_h, stride_w) = problem.spatial, problem.stride
        empty = sum(1 << at for at, phase in enumerate(phases_of(problem) or ()) if phase.problem is None)
        fields = {
            "n": problem.n, "c": problem.c, "height": height, "width": width, "stride_h": stride_h,
            "stride_w": stride_w, "across": min(stride_w, width), "empty": empty,
            "slot": self.slot_bytes(problem) // problem.itemsize,
        }  # fmt: skip
        blocks = ceil_div(prod(problem.x_shape), THREADS * self._vector(problem))
        grid = (min(blocks, BLOCKS_EACH * device.multiprocessors), 1, 1)
        return Launch(self.join_source(problem), fields, grid, THREADS, dependent=True)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        found = [turn_source(problem, last) for last in (False, True)]
        found += [] if self.joined_by_itself(problem) else [self.join_source(problem)]
        for phase, one, part in self._pairs(problem, config):
            found += one.sources(phase, part)  # type: ignore[attr-defined]
        return list(dict.fromkeys(found))

    def compile(self, problem: ConvProblem, config: Config, device: Device) -> None:
        CudaAlgorithm.compile(self, problem, config, device)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return Phases.workspace_bytes(self, problem, config, device)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return PhasesPlan(problem, self, config, device)


class FpropPhases(_CudaPhases):
    """What an algorithm of fprop takes for each phase: every dtype, NCHW and NHWC."""

    id: ClassVar[str] = "cuda.fprop_phases"


class WinogradDgrad(_CudaPhases):
    """cuda.winograd of dy with flipped filters: stride 1, what that takes; float64 when asked for by name."""

    id: ClassVar[str] = "cuda.winograd"
    summary: ClassVar[str] = "Winograd's fprop of dy with flipped filters"
    exact: ClassVar[bool] = False
    inexact: ClassVar[str] = "cuda.winograd"

    def magnitude_there(self, problem: ConvProblem, x: Any, w: Any, device: Device) -> np.ndarray:
        (phase,) = self._parts(problem)
        assert phase.problem is not None
        inner = registry.get(self.inexact)
        (turned,) = turned_filters(problem, w, device)
        return inner.magnitude_there(phase.problem, x, turned, device)
