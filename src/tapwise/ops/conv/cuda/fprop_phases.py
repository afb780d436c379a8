"""cuda.fprop_phases: dgrad by the GPU's algorithms of fprop, phase by phase (ops/conv/phases.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import arrays, registry
from tapwise.algorithm import Algorithm, Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan, stream
from tapwise.cuda.types import INDEX_LIMIT, counter, neighbours, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.window import FpropFilters, OutputStrides
from tapwise.ops.conv.phases import MOST_PHASES, Config, Phase, Phases, phases_of, with_taps
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 256
# Filters and columns that a block turns.
SQUARE: Final = 32
# Filters of a group below which a tile would be mostly empty.
FEW: Final = 8
# Strides of filters whose launch is kept.
PLANS_KEPT: Final = 512
BLOCKS_EACH: Final = 16
# What memory reads and writes at least.
SECTOR_BYTES: Final = 32
# Microseconds of a launch, and the share of the bandwidth that putting dx together reaches. Not measured.
START_US, BYTES_SHARE = 2.0, 0.7
# Microseconds of the launches that turn filters and pack those of a phase, and bytes a microsecond (H100).
TURN_US, PACK_US, TURN_BYTES = 2.2, 2.0, 3.5e5
# Microseconds that a kernel takes longer that reads filters as they lie (14 layers, H200: -0.3 to 1.6).
IN_PLACE_US: Final = 0.6


class PhasesPlan(CudaPlan):
    """The launches of each phase's plan, then one for what they do not write to dx themselves."""

    def __init__(self, problem: ConvProblem, algorithm: CudaPhases, config: Config, device: Device) -> None:
        direct = algorithm.direct(problem, config)
        joins = [algorithm.join_launch(problem, direct, device)] if needs_join(problem, direct) else []
        super().__init__(problem, device, joins, algorithm.workspace_bytes(problem, config, device))
        self._phases = algorithm.plans(problem, config, device)
        if len(self._phases) > 1 and problem.depthwise and problem.layout == "nhwc":
            # Measured to pay for these alone.
            for launch in (one for _, plan in self._phases if isinstance(plan, CudaPlan) for one in plan.launches):
                launch.prefer_shared(device.architecture)
        self._direct, self._device, self._read = direct, device, algorithm.read_in_place(problem, config)
        self._slot, self._inner_at = algorithm.slot_bytes(problem), algorithm.inner_at(problem, config)

    def pack(self, w: DeviceArray) -> list[Any]:
        """Each phase's filters, as its plan takes them."""
        if is_turned_in_place(self.problem):
            pairs = zip(self._phases, self._read, strict=True)
            return [plan.pack(w if read else filters_in_place(self.problem, phase, w)) for (phase, plan), read in pairs]
        turned = turned_filters(self.problem, w, self._device)
        return [plan.pack(one) for (_, plan), one in zip(self._phases, turned, strict=True)]

    def run(self, buffers: Buffers) -> None:
        dy, packed, dx, workspace, bias, *_ = buffers
        on = stream(buffers)
        inner = None
        if workspace is not None:
            inner = shaped(workspace, workspace.ptr + self._inner_at, (self.workspace_bytes - self._inner_at,), "nchw")
        slots = 0
        for (phase, plan), w, direct in zip(self._phases, packed, self._direct, strict=True):
            assert phase.problem is not None
            result = dx
            if not direct:
                result = shaped(dx, workspace.ptr + slots * self._slot, phase.problem.y_shape, phase.problem.layout)
                slots += 1
            elif place := place_of(self.problem, phase):
                address = dx.ptr + place * self.problem.itemsize
                result = shaped(dx, address, phase.problem.y_shape, phase.problem.layout)
            plan.run(Buffers(dy, w, result, inner, bias, None, on))
        for launch in self.launches:
            parts = 0 if workspace is None else workspace.ptr
            launch({"parts": parts, "y": dx.ptr, "bias": 0 if bias is None else bias.ptr}, on)


def strides_of(problem: ConvProblem) -> OutputStrides:
    """Of a phase's result in dx, channels last."""
    pixel, row = problem.c, problem.c * problem.spatial[1]
    return OutputStrides(row * problem.spatial[0], row * problem.stride[0], pixel * problem.stride[1])


def place_of(problem: ConvProblem, phase: Phase) -> int:
    """Where a phase's result begins in dx, channels last, in elements."""
    return (phase.first[0] * problem.spatial[1] + phase.first[1]) * problem.c


def needs_join(problem: ConvProblem, direct: Sequence[bool]) -> bool:
    """Whether anything of dx is left when phases have run, of which those with taps may be `direct`."""
    return not all(direct) or any(phase.problem is None for phase in phases_of(problem) or ())


def is_turned_in_place(problem: ConvProblem) -> bool:
    """Whether a phase's filters are a view of w: of one channel a group, few enough to be packed from any order."""
    return problem.group_c == 1


def filters_in_place(problem: ConvProblem, phase: Phase, w: DeviceArray) -> DeviceArray:
    """A view of w (k, 1, ...): the phase's filters (c, k / groups, ...)."""
    rows, columns = phase.taps
    place = rows[0] * w.strides[2] + columns[0] * w.strides[3]
    strides = problem.group_k * w.strides[0], w.strides[0], rows.step * w.strides[2], columns.step * w.strides[3]
    shape = problem.c, problem.group_k, len(rows), len(columns)
    return DeviceArray(w.ptr + place, shape, strides, w.dtype, w.index, w.library, w.owner)


def fprop_filters(problem: ConvProblem, phase: Phase) -> FpropFilters:
    """The filters of a dgrad problem, as a product of a phase reads them."""
    first, step = tuple(taps[0] for taps in phase.taps), tuple(taps.step for taps in phase.taps)
    return FpropFilters(problem.kernel, first, step)


def turned_filters(problem: ConvProblem, w: DeviceArray, device: Device) -> list[DeviceArray]:
    """The filters (c, k / groups, ...) of each phase that has taps, filters of w innermost in memory: one launch."""
    phases = with_taps(problem)
    memory = arrays.empty((prod(problem.w_shape),), w.dtype, "nchw", w)
    launch = _turn(problem, tuple(step // w.dtype.itemsize for step in w.strides), device)
    launch({"w": w.ptr, "y": memory.ptr}, w.stream)
    found, at = [], 0
    for phase in phases:
        shape = problem.c, problem.group_k, *map(len, phase.taps)
        found.append(shaped(memory, memory.ptr + at, shape, "nhwc"))
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


def _bits(flags: Iterable[bool]) -> int:
    """A word of 64 bits, the first flag lowest."""
    word = sum(1 << at for at, flag in enumerate(flags) if flag)
    return word - (word >> 63 << 64)


def _writes_strided(algorithm: Algorithm[Any], problem: ConvProblem, config: Any) -> bool:
    return isinstance(algorithm, CudaAlgorithm) and algorithm.writes_strided(problem, config)


def shaped(like: DeviceArray, address: int, shape: tuple[int, ...], layout: str) -> DeviceArray:
    """Memory at an address, dense, of the dtype of an array that owns it."""
    order = range(len(shape)) if layout == "nchw" else (0, *range(2, len(shape)), 1)
    steps, step = dict.fromkeys(order, 0), like.dtype.itemsize
    for axis in reversed(order):
        steps[axis], step = step, step * shape[axis]
    strides = tuple(steps[axis] for axis in range(len(shape)))
    return DeviceArray(address, shape, strides, like.dtype, like.index, like.library, like.owner)


class CudaPhases(Phases, CudaAlgorithm[Config]):
    """Phases on a GPU, those written to dx themselves where their algorithms can, and a launch for the rest of dx."""

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if prod(problem.w_shape) >= INDEX_LIMIT:
            return "takes filters of fewer than 2^31 elements"
        return super().rejects(problem, device)

    def direct(self, problem: ConvProblem, config: Config) -> tuple[bool, ...]:
        """Where algorithms can, channels last, in pieces of a sector at least."""
        if not self._is_strided(problem):
            return super().direct(problem, config)
        return tuple(_writes_strided(one, phase, part) for phase, one, part in self._pairs(problem, config))

    def _is_strided(self, problem: ConvProblem) -> bool:
        """Whether phases may be direct, though dx has several."""
        pieces = problem.layout == "nhwc" and problem.c * problem.itemsize >= SECTOR_BYTES
        return pieces and not self.joined_by_itself(problem) and prod(problem.x_shape) < INDEX_LIMIT

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """Beside the others the fastest of each phase among those that write to dx themselves, and among those of them
        that read w as it lies."""
        found = list(super().configs(problem, device))
        if not self._is_strided(problem):
            return found
        for in_place in (False, True)[: 1 + problem.depthwise]:
            parts = [self._strided(problem, phase, in_place, device) for phase in with_taps(problem)]
            strided = Config(tuple(one for one in parts if one is not None))
            if len(strided.parts) == len(parts):
                found.append(strided)
        return list(dict.fromkeys(found))

    def _strided(
        self, problem: ConvProblem, phase: Phase, in_place: bool, device: Device
    ) -> tuple[str, BaseConfig] | None:
        inner = phase.problem
        assert inner is not None
        for offer in self._offers(inner, device):
            one: Any = registry.get(offer.algorithm)

            def suits(config: Any, one: Any = one) -> bool:
                if not _writes_strided(one, inner, config):
                    return False
                return not in_place or one.reads_in_place(inner, config, fprop_filters(problem, phase))

            if suits(offer.config):
                return offer.algorithm, offer.config or BaseConfig()
            others = [other for other in one.configs(inner, device) if other.automatic and suits(other)]
            if others:
                return offer.algorithm, min(others, key=lambda other: one.predict_us(inner, other, device))
        return None

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """The launch that turns filters, those that pack each phase's, and what they move."""
        moved = prod(problem.w_shape) * problem.itemsize / TURN_BYTES
        read = self.read_in_place(problem, config)
        if all(read):
            return IN_PLACE_US * len(read)
        turning = 0.0 if is_turned_in_place(problem) else TURN_US
        return turning + IN_PLACE_US * sum(read) + PACK_US * read.count(False) + moved

    def join_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        return self.joined_us(problem, self.direct(problem, config), device)

    def joined_us(self, problem: ConvProblem, written: Sequence[bool], device: Device) -> float:
        """What lies in slots read, and written to dx with what no tap meets; pieces that end within a sector, of which
        memory reads and writes the rest."""
        direct = dict(zip(with_taps(problem), written, strict=True))
        piece = problem.c * problem.itemsize
        sectors = (piece + SECTOR_BYTES - gcd(piece, SECTOR_BYTES)) // SECTOR_BYTES
        moved = 0
        for phase in phases_of(problem) or ():
            each = 2 * (sectors * SECTOR_BYTES - piece) if direct.get(phase) else piece * (1 + (phase in direct))
            pixels = zip(problem.spatial, phase.first, problem.stride, strict=True)
            moved += each * problem.n * prod(ceil_div(size - first, step) for size, first, step in pixels)
        start = START_US if needs_join(problem, tuple(direct.values())) else 0.0
        return start + moved / (device.gbps * 1e3 * BYTES_SHARE)

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

    def join_launch(self, problem: ConvProblem, direct: Sequence[bool], device: Device) -> Launch:
        """Of the phases with taps those are `direct` that have written to dx."""
        (height, width), (stride_h, stride_w) = problem.spatial, problem.stride
        phases = phases_of(problem) or ()
        written = {phase for phase, one in zip(with_taps(problem), direct, strict=True) if one}
        empty = _bits(phase.problem is None for phase in phases)
        joined = _bits(phase.problem is not None and phase not in written for phase in phases)
        fields = {
            "n": problem.n, "c": problem.c, "height": height, "width": width, "stride_h": stride_h,
            "stride_w": stride_w, "across": min(stride_w, width), "empty": empty,
            "joined": joined, "slot": self.slot_bytes(problem) // problem.itemsize,
        }  # fmt: skip
        blocks = ceil_div(prod(problem.x_shape), THREADS * self._vector(problem))
        grid = (min(blocks, BLOCKS_EACH * device.multiprocessors), 1, 1)
        return Launch(self.join_source(problem), fields, grid, THREADS, dependent=True)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        found = [] if is_turned_in_place(problem) else [turn_source(problem, last) for last in (False, True)]
        direct = self.direct(problem, config)
        found += [self.join_source(problem)] if needs_join(problem, direct) else []
        pairs: list[Any] = self._pairs(problem, config)
        for (phase, one, part), given in zip(pairs, self._given(problem, config), strict=True):
            found += one.sources(phase, part, **given)
        return list(dict.fromkeys(found))

    def read_in_place(self, problem: ConvProblem, config: Config) -> list[bool]:
        """Of each phase that has taps, whether its algorithm reads w as it lies."""
        turned = is_turned_in_place(problem) and problem.group_k == 1
        return [
            turned and isinstance(one, CudaAlgorithm) and one.reads_in_place(inner, part, fprop_filters(problem, phase))
            for phase, (inner, one, part) in zip(with_taps(problem), self._pairs(problem, config), strict=True)
        ]

    def _given(self, problem: ConvProblem, config: Config) -> list[dict[str, Any]]:
        """What each phase's algorithm is given beside its problem and config."""
        direct, read = self.direct(problem, config), self.read_in_place(problem, config)
        strides = {"strides": strides_of(problem)} if self._is_strided(problem) else {}
        given: list[dict[str, Any]] = [
            (strides if written else {}) | ({"filters": fprop_filters(problem, phase)} if in_place else {})
            for phase, written, in_place in zip(with_taps(problem), direct, read, strict=True)
        ]
        # Each writes elements of its own.
        if all(direct) and {name for name, _ in config.parts} == {"cuda.depthwise"}:
            for one in given[1:]:
                one["beside"] = True
        return given

    def plans(self, problem: ConvProblem, config: Config, device: Device) -> list[tuple[Phase, Plan]]:
        pairs: list[Any] = self._pairs(problem, config)
        return [
            (phase, one.plan(inner, part, device, **given))
            for phase, (inner, one, part), given in zip(
                with_taps(problem), pairs, self._given(problem, config), strict=True
            )
        ]

    def compile(self, problem: ConvProblem, config: Config, device: Device) -> None:
        CudaAlgorithm.compile(self, problem, config, device)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return Phases.workspace_bytes(self, problem, config, device)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return PhasesPlan(problem, self, config, device)


class FpropPhases(CudaPhases):
    """What an algorithm of fprop takes for each phase: every dtype, NCHW and NHWC."""

    id: ClassVar[str] = "cuda.fprop_phases"


class WinogradDgrad(CudaPhases):
    """cuda.winograd of dy with flipped filters: stride 1, what that takes; float64 when asked for by name."""

    id: ClassVar[str] = "cuda.winograd"
    summary: ClassVar[str] = "Winograd's fprop of dy with flipped filters"
    exact: ClassVar[bool] = False
    inexact: ClassVar[str] = "cuda.winograd"

    def magnitude_there(self, problem: ConvProblem, x: Any, w: Any, device: Device) -> np.ndarray:
        (phase,) = with_taps(problem)
        assert phase.problem is not None
        inner = registry.get(self.inexact)
        (turned,) = turned_filters(problem, w, device)
        return inner.magnitude_there(phase.problem, x, turned, device)
