"""cpu.fprop_phases: dgrad by the CPU's algorithms of fprop, phase by phase (ops/conv/phases.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import arrays, registry
from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu.plan import KernelPlan
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cpu.joined_rows import join_rows
from tapwise.ops.conv.phases import ALIGNMENT, PROBLEMS_KEPT, Config, Phase, Phases, filters_of, phases_of, with_taps
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.reference import activate

# Measured: NumPy's copy to places a stride apart; rows joined.
COPY_NS, JOIN_NS = 1.0, 0.5
CALL_US: Final = 10.0
# What packing filters takes longer where a phase has taps that lie some apart: each phase brings all lines of w.
APART: Final = 3.0


class PhasesPlan(Plan):
    """A plan for each phase; their results are copied to places a stride apart."""

    def __init__(self, problem: ConvProblem, algorithm: Phases, config: Config, device: Device) -> None:
        self.problem, self._device = problem, device
        self.workspace_bytes = algorithm.workspace_bytes(problem, config, device)
        self._phases = algorithm.plans(problem, config, device)
        self._inner_at, self._direct = algorithm.inner_at(problem, config), algorithm.joined_by_itself(problem)
        self._slot_bytes, self._joins = algorithm.slot_bytes(problem), is_interleaved(problem)
        plans = {phase.first: plan for phase, plan in self._phases}
        # Where each phase's filters begin among those of all.
        self._packed_at = list(
            accumulate((round_up(plan.packed_bytes, ALIGNMENT) for plan in plans.values()), initial=0)
        )
        self.packed_bytes = self._packed_at[-1]
        # Phases of the same rows of dx, None for those without taps.
        self._rows: list[list[tuple[Phase, Plan | None]]] = [
            [(phase, plans.get(phase.first)) for phase in row]
            for _, row in groupby(phases_of(problem) or (), lambda phase: phase.first[0])
        ]

    def pack(self, w: np.ndarray) -> list[Any]:
        return self.pack_into(w, None)

    def pack_into(self, w: np.ndarray, memory: np.ndarray | None) -> list[Any]:
        """Each phase's filters, as its plan takes them."""
        result = []
        for (phase, plan), begin in zip(self._phases, self._packed_at, strict=False):
            filters = (own_filters if isinstance(plan, KernelPlan) else filters_of)(self.problem, phase, w)
            own = memory[begin : begin + plan.packed_bytes] if memory is not None and plan.packed_bytes else None
            result.append(plan.pack_into(filters, own))
        return result

    def run(self, buffers: Buffers) -> None:
        dy, packed, dx, workspace, bias, *_ = buffers
        inner = None if workspace is None else workspace[self._inner_at :]
        if self._direct:
            self._phases[0][1].run(Buffers(dy, packed[0], dx, inner, bias))
            return
        filters = iter(packed)
        for row in self._rows:
            # Zeros need not be written before they are put into their places.
            filled = bias is not None or self.problem.activation is not None
            present = tuple(plan is not None or filled for _, plan in row)
            for number, (phase, plan) in enumerate(row):
                part = self._part(workspace, number, phase)
                if plan is not None:
                    plan.run(Buffers(dy, next(filters), part, inner, bias))
                elif present[number] or not self._joins:
                    part[...] = self._nothing(dx, bias)
                if not self._joins:
                    self._places(dx, phase.first)[...] = part
            if self._joins:
                slot = self._slot_bytes // dx.itemsize
                parts = workspace[: len(row) * self._slot_bytes].view(dx.dtype)
                join_rows(self.problem, row[0][0].first[0], present, slot, parts, dx, self._device)

    def _nothing(self, dx: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """What elements are that no tap meets."""
        value = np.zeros((self.problem.c, 1, 1), dx.dtype)
        if bias is not None:
            value += bias[:, None, None]
        return np.asarray(activate(self.problem.activation, value.astype(np.float64)), dx.dtype)

    def _places(self, dx: np.ndarray, first: tuple[int, ...]) -> np.ndarray:
        """The phase's elements of dx."""
        rows, columns = (slice(at, None, step) for at, step in zip(first, self.problem.stride, strict=True))
        return dx[:, :, rows, columns]

    def _part(self, workspace: np.ndarray, number: int, phase: Phase) -> np.ndarray:
        """A phase's result: in a slot of its own among those of its row, or in the first one if copied at once."""
        p = self.problem
        rows, columns = (
            ceil_div(size - at, step) for size, at, step in zip(p.spatial, phase.first, p.stride, strict=True)
        )
        begin = number * self._slot_bytes if self._joins else 0
        flat = workspace[begin : begin + p.n * p.c * rows * columns * p.itemsize].view(p.x_dtype)
        if p.layout == "nchw":
            return flat.reshape(p.n, p.c, rows, columns)
        return arrays.channels_first(flat.reshape(p.n, rows, columns, p.c))


def apart(problem: ConvProblem) -> int:
    """How many elements apart channels, which are a phase's filters, lie in w."""
    return 1 if problem.layout == "nhwc" else prod(problem.kernel)


def is_interleaved(problem: ConvProblem) -> bool:
    """Whether a row of dx is made of those of several phases, one element after the other."""
    return problem.layout == "nchw" and 1 < problem.stride[1] <= problem.spatial[1]


def own_filters(problem: ConvProblem, phase: Phase, w: np.ndarray) -> np.ndarray:
    """A view of w: the phase's own filters (groups, c / groups, k / groups, ...)."""
    grouped = w.reshape(problem.groups, problem.group_k, problem.group_c, *problem.kernel)
    rows, columns = map(_slice, phase.taps)
    return grouped.swapaxes(1, 2)[..., rows, columns]


def _slice(taps: range) -> slice:
    end = taps[-1] + (1 if taps.step > 0 else -1)
    return slice(taps[0], None if end < 0 else end, taps.step)


@lru_cache(PROBLEMS_KEPT)
def in_place(problem: ConvProblem, device: Device, apart: int) -> tuple[str, BaseConfig] | None:
    """The fastest algorithm and config that reads filters where they lie, the first axis' `apart` elements apart."""
    best: tuple[float, str, BaseConfig] | None = None
    for one in registry.of_backend(device.kind):
        for config in one.in_place(problem, device, apart == 1) if one.refusal(problem, device) is None else ():
            us = one.predict_us(problem, config, device) + one.turned_us(problem, config, device, apart)
            if best is None or us < best[0]:
                best = us, one.id, config
    return None if best is None else best[1:]


class _CpuPhases(Phases):
    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Of all phases, their channels and filters swapped."""
        longer = APART if problem.stride[1] > 1 and apart(problem) > 1 else 1.0
        return sum(
            longer * one.pack_us(inner, part, device) + one.turned_us(inner, part, device, apart(problem))
            for inner, one, part in self._pairs(problem, config)
        )

    def join_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """A copy of every element; of pixels on one thread."""
        each = JOIN_NS / device.threads if is_interleaved(problem) else COPY_NS
        return CALL_US * prod(problem.stride) + 1e-3 * prod(problem.x_shape) * each

    def inner_at(self, problem: ConvProblem, config: Config) -> int:
        """Behind one slot, or those of a row."""
        if self.joined_by_itself(problem):
            return 0
        return self.slot_bytes(problem) * (problem.stride[1] if is_interleaved(problem) else 1)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return PhasesPlan(problem, self, config, device)


class FpropPhases(_CpuPhases):
    """What an algorithm of fprop takes for each phase. float32, float64, 16 bits (in float32); NCHW and NHWC."""

    id: ClassVar[str] = "cpu.fprop_phases"

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """Each phase by what is fastest; and by what reads its filters where they lie, which no call has to pack."""
        phases = [phase.problem for phase in with_taps(problem) if phase.problem is not None]
        found = (in_place(phase, device, apart(problem)) for phase in phases)
        parts = tuple(part for part in found if part is not None)
        own = [Config(parts)] if phases and len(parts) == len(phases) else []
        return [*super().configs(problem, device), *own]
