"""cuda.implicit_gemm of dgrad: the kernels of fprop, filters read as they lie.

A phase is a convolution of dy (ops/conv/phases.py) whose filters are w's channels: in w (k, r, s, c) these are side by
side, and gemm_k, the filters k of fprop, is the slow axis. The matrix instruction takes such an operand as transposed,
so nothing is turned or packed before. Phases of a stride are one launch, whose CTAs take tiles of all of them, also of
those that no tap meets (implicit_gemm_phases.cu); or a launch each, which does not wait for the one before it: it
begins while that runs, and fills the multiprocessors that it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final, TypeVar

from tapwise import arrays
from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.fprop_phases import FpropPhases, fprop_filters, needs_join, place_of, strides_of
from tapwise.ops.conv.cuda.implicit_gemm import configs, launches
from tapwise.ops.conv.cuda.implicit_gemm.config import Config as TileConfig
from tapwise.ops.conv.cuda.implicit_gemm.cost import BEGIN, CYCLES_US, cost, phases_us
from tapwise.ops.conv.cuda.implicit_gemm.view import View, is_aligned, unfoldings
from tapwise.ops.conv.phases import Phase, phases_of, with_taps
from tapwise.ops.conv.problem import ConvProblem

T = TypeVar("T")
# Launches that are worth their while.
MOST_LAUNCHES: Final = 16
# Writes what no tap meets.
JOIN: Final = FpropPhases()


# Phases of one launch.
PHASES: Final = 4


@dataclass(frozen=True)
class Config(BaseConfig):
    """The config of each phase that has taps, in their order. `order`: of the tiles where phases are one launch, by
    "place" or by "phase", up to four with those that no tap meets; else "", a launch each."""

    parts: tuple[TileConfig, ...]
    order: str = ""

    def __str__(self) -> str:
        """Phases that are computed alike are named once."""
        parts = "+".join(dict.fromkeys(f"({part})" for part in self.parts))
        return f"{parts} order={self.order}" if self.order else parts


class EmptyView(View):
    """A phase that no tap meets: tiles without steps, of an image of its own size, of which nothing is read. Words of
    filters that phases share are those of one that has taps."""

    steps = 0

    @classmethod
    def of_phase(cls, problem: ConvProblem, phase: Phase, config: TileConfig) -> View:
        pixels = zip(problem.spatial, phase.first, problem.stride, strict=True)
        sizes = tuple(ceil_div(size - first, step) for size, first, step in pixels)
        ones = {"kernel": (1, 1), "stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
        inner = problem.replace(c=problem.k, k=problem.c, spatial=sizes, direction="fprop", **ones)
        return cls.of(inner, config, strides_of(problem), fprop_filters(problem, with_taps(problem)[0]))


class InPlacePlan(CudaPlan):
    """A launch for what no tap meets, and those of phases, at their places in dx."""

    def __init__(
        self, problem: ConvProblem, device: Device, parts: Sequence[tuple[Sequence[int], Launch]], joins: list[Launch]
    ) -> None:
        super().__init__(problem, device, [*joins, *(launch for _, launch in parts)])
        self._parts, self._joins = parts, joins

    def pack(self, w: Any) -> Any:
        """The filters as they lie, channels last."""
        return arrays.dense(w, "nhwc")

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
        # Filters may come from the launch before.
        addresses = {**addresses, "weights_ready": 0}
        for launch in self._joins:
            launch(addresses, stream)
        y = addresses["y"]
        for places, launch in self._parts:
            phases = {f"y{number}": y + place for number, place in enumerate(places)}
            launch({**addresses, "y": y + places[0], **phases}, stream)


class ImplicitGemmDgrad(window.TensorCoreAlgorithm[Config]):
    """Channels and filters of a group in multiples of 8; strides, padding and dilation whose phases a tensor map can
    express; NHWC; float16 and bfloat16. Hopper."""

    operator: ClassVar[str] = "dgrad"
    id: ClassVar[str] = "cuda.implicit_gemm"
    summary: ClassVar[str] = "tensor cores (wgmma) fed by TMA, filters as they lie"
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16")
    layouts: ClassVar[tuple[str, ...]] = ("nhwc",)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if device.architecture != "sm_90a":
            return f"needs Hopper (sm_90a), not {device.architecture}"
        if max(map(prod, (problem.x_shape, problem.y_shape, problem.w_shape))) >= INDEX_LIMIT:
            return "takes fewer than 2^31 elements"
        if problem.group_c % 8 or not is_aligned(problem.replace(c=problem.k, k=problem.c, direction="fprop")):
            counts = f"{problem.group_c} and {problem.group_k}"
            return f"takes channels and filters of each group in multiples of 8, not {counts}"
        if prod(problem.stride) > MOST_LAUNCHES:
            return f"takes up to {MOST_LAUNCHES} phases, not {problem.stride}"
        if phases_of(problem) is None:
            return "takes no padding from which an element of dx sees less than all of dy"
        for phase in with_taps(problem):
            assert phase.problem is not None
            if 0 not in unfoldings(phase.problem):
                return f"takes padding and dilation that a tensor map can express, not those of '{problem}'"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """Of one phase all; of several the fastest of each together, and the fastest of each schedule."""
        found = []
        for phase in with_taps(problem):
            assert phase.problem is not None
            ones = configs.all_configs(phase.problem, device, fprop_filters(problem, phase))
            # Tiles that share filters are not made for y with strides.
            if prod(problem.stride) > 1:
                ones = [one for one in ones if one.share_filters == 1]
            timed = {one: cost(_view(problem, phase, one), device, 0).us for one in ones}
            found.append(sorted(ones, key=timed.__getitem__))
        if not found:
            return [Config(())]
        if len(found) == 1:
            joint = self._one_launch(problem, device) if _empty(problem, True) else []
            return [*joint, *(Config((one,)) for one in found[0])]
        schedules: list[dict[object, TileConfig]] = [{} for _ in found]
        for ordered, firsts in zip(found, schedules, strict=True):
            for one in ordered:
                firsts.setdefault(_schedule(one), one)
        alike = [schedule for schedule in schedules[0] if all(schedule in firsts for firsts in schedules)]
        together = [tuple(firsts[schedule] for firsts in schedules) for schedule in alike]
        apart = [Config(parts) for parts in dict.fromkeys([tuple(ordered[0] for ordered in found), *together])]
        return [*self._one_launch(problem, device), *apart]

    @staticmethod
    def _one_launch(problem: ConvProblem, device: Device) -> list[Config]:
        """Those whose phases, up to four of them, are one launch."""
        phases, empty = with_taps(problem), _empty(problem, True)
        most = max(phases, key=lambda phase: prod(map(len, phase.taps)))
        assert most.problem is not None
        count = min(len(phases) + len(empty), PHASES)
        ones = configs.phased_configs(most.problem, count, device, fprop_filters(problem, most))
        return [Config((one,) * len(phases), order) for one in ones for order in ("place", "phase")]

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Of all phases, of which only the first launch's beginning is not hidden; cost.py says what each takes."""
        views = [view for _, view in self._views(problem, config)]
        joined = JOIN.joined_us(problem, [True] * len(config.parts), device) if self._joins(problem, config) else 0.0
        if config.order:
            times = [phases_us(some, config.order == "place", device) for some in _launched(views, PHASES)]
        else:
            times = [cost(view, device, 0).us for view in views]
        return sum(times) - max(0, len(times) - 1) * BEGIN / CYCLES_US + joined

    @staticmethod
    def _views(problem: ConvProblem, config: Config) -> list[tuple[int, View]]:
        """(bytes into dx, view) of each phase, those with most steps first: short ones fill what these leave."""
        found = [
            (phase, _view(problem, phase, part)) for phase, part in zip(with_taps(problem), config.parts, strict=True)
        ]
        for phase in _empty(problem, config.order != ""):
            found.append((phase, EmptyView.of_phase(problem, phase, config.parts[0])))
        placed = [(place_of(problem, phase) * problem.itemsize, view) for phase, view in found]
        return sorted(placed, key=lambda one: -one[1].steps)

    @staticmethod
    def _joins(problem: ConvProblem, config: Config) -> bool:
        """Whether a launch in front writes what no tap meets."""
        return needs_join(problem, [True] * len(config.parts)) and not _empty(problem, config.order != "")

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        joins = self._joins(problem, config)
        views = [view for _, view in self._views(problem, config)]
        if config.order:
            views = views[::PHASES]
        found = [
            launches.source(view, before > 0, config.order != "", bool(_empty(problem, config.order != "")))
            for before, view in enumerate(views, start=joins)
        ]
        return list(dict.fromkeys([*found, *([JOIN.join_source(problem)] if joins else [])]))

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        joins = [JOIN.join_launch(problem, [True] * len(config.parts), device)] if self._joins(problem, config) else []
        return InPlacePlan(problem, device, self.launches(problem, config, device), joins)

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[tuple[tuple[int, ...], Launch]]:
        """(bytes into dx of its phases, launch) of each launch, in order."""
        views, joins = self._views(problem, config), self._joins(problem, config)
        found = []
        for before, some in enumerate(_launched(views, PHASES if config.order else 1), start=joins):
            places, these = zip(*some, strict=True)
            if config.order:
                launch = launches.phases_launch(these, config.order == "place", device, before > 0)
            else:
                launch = launches.launch(these[0], device, before > 0)
            found.append((places, launch))
        return found


def _empty(problem: ConvProblem, one_launch: bool) -> list[Phase]:
    """Phases that no tap meets, where one launch takes all."""
    phases = phases_of(problem) or ()
    some = one_launch and len(phases) <= PHASES and bool(with_taps(problem))
    return [phase for phase in phases if phase.problem is None] if some else []


def _launched(views: Sequence[T], most: int) -> list[Sequence[T]]:
    """Those of each launch, at `most` so many."""
    return [views[first : first + most] for first in range(0, len(views), most)]


def _schedule(config: TileConfig) -> tuple[object, ...]:
    """What says how a launch shares multiprocessors with the one before it."""
    return (
        config.kernel, config.swap_ab, config.warpgroups, config.ping_pong, config.split_k, config.min_blocks_per_sm,
        config.filter_stationary,
    )  # fmt: skip


def _view(problem: ConvProblem, phase: Phase, config: TileConfig) -> View:
    assert phase.problem is not None
    strides = None if prod(problem.stride) == 1 else strides_of(problem)
    return View.of(phase.problem, config, strides, fprop_filters(problem, phase))
