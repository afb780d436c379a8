"""dgrad as convolutions of dy: one for each phase of the stride.

Elements of dx whose places leave the same rest, divided by the stride, meet the same taps, and see dy at stride 1:

    dx[n, c, a + stride * j] = sum over k and its taps t of dy[n, k, j + t * distance - before] * w[k, c, tap(t)]

So a phase is fprop of dy with some of w's taps, flipped, and its channels and filters swapped. At stride 1 there is one
phase, and its result is dx. Else an algorithm that can writes the result to where it lies in dx. Phases that no tap
meets are zeros; a 1x1 filter of stride 2 has three of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from tapwise import dispatch, registry
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.problem import ConvProblem

# Bytes that each phase's result, and the workspace of its algorithm, begin on a multiple of.
ALIGNMENT: Final = 256
# Phases beyond which a stride is left to another algorithm.
MOST_PHASES: Final = 64
PROBLEMS_KEPT: Final = 512


@dataclass(frozen=True)
class Phase:
    """Elements of dx from `first` on, a stride apart: `problem`, fprop of dy, gives them; None where no tap meets them.

    `taps`: those of w along each axis, in the order of the phase's own filters.
    """

    first: tuple[int, ...]
    problem: ConvProblem | None
    taps: tuple[range, ...] = ()


class _Axis(NamedTuple):
    """A phase along one axis: elements of dx from `first` on, taps of w, their distance in dy, and dy's padding."""

    first: int
    taps: range
    distance: int
    before: int
    after: int


@lru_cache(PROBLEMS_KEPT)
def phases_of(problem: ConvProblem) -> tuple[Phase, ...] | None:
    """The phases of a dgrad problem, row by row; None where one sees less of dy than there is, so that dy would have to
    be cut."""
    along = [_phases(problem, axis) for axis in range(2)]
    found = []
    for row in along[0]:
        for column in along[1]:
            both = row, column
            if not all(one.taps for one in both):
                found.append(Phase((row.first, column.first), None))
                continue
            if min(row.before, row.after, column.before, column.after) < 0:
                return None
            fprop = problem.replace(
                c=problem.k, k=problem.c, spatial=problem.output, kernel=tuple(len(one.taps) for one in both),
                stride=(1, 1), padding=tuple((one.before, one.after) for one in both),
                dilation=tuple(one.distance for one in both), direction="fprop",
            )  # fmt: skip
            found.append(Phase((row.first, column.first), fprop, (row.taps, column.taps)))
    return tuple(found)


def with_taps(problem: ConvProblem) -> list[Phase]:
    """The phases that have taps: none where no tap meets a small image."""
    return [phase for phase in phases_of(problem) or () if phase.problem is not None]


def _phases(problem: ConvProblem, axis: int) -> list[_Axis]:
    size, taps, outputs = problem.spatial[axis], problem.kernel[axis], problem.output[axis]
    stride, dilation, before = problem.stride[axis], problem.dilation[axis], problem.padding[axis][0]
    # Every so many taps one falls on the same rest, and sees dy so much further.
    apart, distance = stride // gcd(stride, dilation), dilation // gcd(stride, dilation)
    found = []
    for first in range(min(stride, size)):
        count = ceil_div(size - first, stride)
        here = [tap for tap in range(taps) if (first + before - tap * dilation) % stride == 0]
        if not here:
            found.append(_Axis(first, range(0), 1, 0, 0))
            continue
        # The last tap sees the first element of dy.
        start = (first + before - here[-1] * dilation) // stride
        reach = start + (len(here) - 1) * distance
        flipped = range(here[-1], here[0] - 1, -apart)
        found.append(_Axis(first, flipped, distance, -start, count - 1 + reach - (outputs - 1)))
    return found


def filters_of(problem: ConvProblem, phase: Phase, w: np.ndarray) -> np.ndarray:
    """The phase's own filters (c, k / groups, ...) of w, in C order."""
    rows, columns = ([*taps] for taps in phase.taps)
    some = w[:, :, rows][..., columns].reshape(problem.groups, problem.group_k, problem.group_c, len(rows), -1)
    swapped = np.ascontiguousarray(some.swapaxes(1, 2))
    return swapped.reshape(problem.c, problem.group_k, len(rows), len(columns))


@dataclass(frozen=True)
class Joint:
    """The convolution of all phases (`fprop`): `phases` along each axis; how far `ahead` of an element's own place, a
    stride apart, its window begins."""

    fprop: ConvProblem
    phases: tuple[int, ...]
    ahead: tuple[int, ...]


@lru_cache(PROBLEMS_KEPT)
def joint(problem: ConvProblem) -> Joint:
    """Windows reach from the first place of dy that any phase sees to the last."""
    taps, padding, ahead, phases = [], [], [], []
    for axis in range(2):
        (before, _), stride, dilation = problem.padding[axis], problem.stride[axis], problem.dilation[axis]
        size, outputs = problem.spatial[axis], problem.output[axis]
        count, places = min(stride, size), ceil_div(size, stride)
        # An element sees dy from the last tap's place to the first's.
        first = -(((problem.kernel[axis] - 1) * dilation - before) // stride)
        last = (count - 1 + before) // stride
        start = min(0, first)
        # As many windows as places: all of dy and its padding.
        reach = max(last - start + 1, outputs - start - places + 1)
        taps.append(reach)
        padding.append((-start, places - outputs + start + reach - 1))
        ahead.append(-start)
        phases.append(count)
    fprop = problem.replace(
        c=problem.k, k=problem.c * prod(phases), spatial=problem.output, kernel=tuple(taps), stride=(1, 1),
        padding=tuple(padding), dilation=(1, 1), direction="fprop",
    )  # fmt: skip
    return Joint(fprop, tuple(phases), tuple(ahead))


@dataclass(frozen=True)
class Config(BaseConfig):
    """The algorithm and config of each phase that has taps, in their order."""

    parts: tuple[tuple[str, BaseConfig], ...]

    def __str__(self) -> str:
        """Phases that are computed alike are named once."""
        texts = [f"{identifier}({config})" for identifier, config in self.parts]
        return "parts=" + "+".join(dict.fromkeys(texts))


class Phases(Algorithm[Config]):
    """dgrad by algorithms of fprop; a backend adds how dx is put together."""

    operator: ClassVar[str] = "dgrad"
    summary: ClassVar[str] = "fprop of dy with flipped filters, a convolution for each phase of the stride"
    dtypes: ClassVar[tuple[str, ...] | None] = None
    axes: ClassVar[tuple[int, ...]] = (2,)
    # The one of fprop whose sums are not the definition's, where it is to be the only one.
    inexact: ClassVar[str] = ""

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if prod(problem.stride) > (1 if self.inexact else MOST_PHASES):
            return f"takes {'no stride' if self.inexact else f'up to {MOST_PHASES} phases'}, not {problem.stride}"
        phases = phases_of(problem)
        if phases is None:
            return "takes no padding from which an element of dx sees less than all of dy"
        for phase in phases:
            if phase.problem is not None and not self._offers(phase.problem, device):
                return f"finds no algorithm for '{phase.problem}'"
        return None

    def _offers(self, problem: ConvProblem, device: Device) -> list[dispatch.Candidate]:
        """The algorithms of fprop that may compute a phase, the fastest first."""
        return [one for one in offers(problem, device) if self._may(one.algorithm)]

    def _may(self, identifier: str) -> bool:
        if self.inexact:
            return identifier == self.inexact
        one = registry.get(identifier)
        return one.exact and one.keeps_infinities

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """The fastest algorithm of each phase; and each one that takes all of them."""
        phases = [phase.problem for phase in with_taps(problem) if phase.problem is not None]
        offers = [{one.algorithm: one.config or BaseConfig() for one in self._offers(one, device)} for one in phases]
        found = [Config(tuple(next(iter(offer.items())) for offer in offers))]
        for identifier in offers[0] if offers else ():
            if all(identifier in offer for offer in offers):
                found.append(Config(tuple((identifier, offer[identifier]) for offer in offers)))
        return list(dict.fromkeys(found))

    def _pairs(self, problem: ConvProblem, config: Config) -> list[tuple[ConvProblem, Algorithm[Any], Any]]:
        """(problem, algorithm, config) of each phase that has taps."""
        phases = [phase.problem for phase in with_taps(problem) if phase.problem is not None]
        return [(one, registry.get(name), part) for one, (name, part) in zip(phases, config.parts, strict=True)]

    def join_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Of putting dx together from its phases."""
        raise NotImplementedError

    def direct(self, problem: ConvProblem, config: Config) -> tuple[bool, ...]:
        """Of each phase that has taps, whether its algorithm writes its result to where it lies in dx."""
        return (self.joined_by_itself(problem),) * len(config.parts)

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """The times of all phases, one behind the other, and dx put together."""
        parts = sum(one.predict_us(phase, part, device) for phase, one, part in self._pairs(problem, config))
        return parts + (0.0 if self.joined_by_itself(problem) else self.join_us(problem, config, device))

    def after_us(self, problem: ConvProblem, config: Config) -> float:
        return max((one.after_us(phase, part) for phase, one, part in self._pairs(problem, config)), default=0.0)

    @staticmethod
    def joined_by_itself(problem: ConvProblem) -> bool:
        """Whether the only phase's result is dx."""
        return prod(problem.stride) == 1

    def slot_bytes(self, problem: ConvProblem) -> int:
        """Of one phase's result in the workspace, where it does not go to dx itself."""
        pixels = prod(ceil_div(size, step) for size, step in zip(problem.spatial, problem.stride, strict=True))
        return round_up(problem.n * problem.c * pixels * problem.itemsize, ALIGNMENT)

    def inner_at(self, problem: ConvProblem, config: Config) -> int:
        """Where in the workspace that of the phases' algorithms begins."""
        return self.slot_bytes(problem) * self.direct(problem, config).count(False)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        inner = [one.workspace_bytes(phase, part, device) for phase, one, part in self._pairs(problem, config)]
        return self.inner_at(problem, config) + max(inner, default=0)

    def compile(self, problem: ConvProblem, config: Config, device: Device) -> None:
        for phase, one, part in self._pairs(problem, config):
            one.compile(phase, part, device)

    def plans(self, problem: ConvProblem, config: Config, device: Device) -> list[tuple[Phase, Plan]]:
        """Each phase that has taps with its plan."""
        pairs = self._pairs(problem, config)
        return [
            (phase, one.plan(inner, part, device))
            for phase, (inner, one, part) in zip(with_taps(problem), pairs, strict=True)
        ]

    def error_factor(self, problem: ConvProblem) -> float:
        """Of the phases' algorithms: products rounded to tf32 have one that counts for all."""
        factors = [super().error_factor(problem)]
        for phase in with_taps(problem):
            assert phase.problem is not None
            if self.inexact:
                factors.append(registry.get(self.inexact).error_factor(phase.problem))
            elif problem.math == "tf32" and self.id.startswith("cuda"):
                factors.append(registry.get("cuda.implicit_gemm_mma").error_factor(phase.problem))
        return max(factors)

    def magnitude(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        if not self.inexact:
            return super().magnitude(problem, x, w)
        (phase,) = with_taps(problem)
        assert phase.problem is not None
        return registry.get(self.inexact).magnitude(phase.problem, x, filters_of(problem, phase, w))


@lru_cache(PROBLEMS_KEPT)
def offers(problem: ConvProblem, device: Device) -> list[dispatch.Candidate]:
    """What applies to a problem of fprop, the fastest first."""
    found = [one for one in dispatch.explain(problem, device) if one.predicted_us is not None]
    return sorted(found, key=lambda one: dispatch.cost(one, problem))
