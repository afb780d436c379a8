"""cpu.fprop_phases: dgrad by the CPU's algorithms of fprop, phase by phase (ops/conv/phases.py)."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import arrays
from tapwise.algorithm import Buffers, Device, Plan
from tapwise.ops.conv.cpu.direct.direct import Direct, DirectPlan
from tapwise.ops.conv.cpu.im2col_gemm import Im2colPlan
from tapwise.ops.conv.cpu.turned_filters import turn_us, turned
from tapwise.ops.conv.phases import Config, Phase, Phases, phases_of
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.reference import activate

# Measured: NumPy's copy to places a stride apart.
COPY_NS: Final = 1.0
CALL_US: Final = 10.0


class PhasesPlan(Plan):
    """A plan for each phase; their results are copied to places a stride apart."""

    def __init__(self, problem: ConvProblem, algorithm: Phases, config: Config, device: Device) -> None:
        self.problem, self._device = problem, device
        self.workspace_bytes = algorithm.workspace_bytes(problem, config, device)
        self._phases = algorithm.plans(problem, config, device)
        self._empty = [phase for phase in phases_of(problem) or () if phase.problem is None]
        self._inner_at, self._direct = algorithm.inner_at(problem, config), algorithm.joined_by_itself(problem)

    def pack(self, w: np.ndarray) -> list[Any]:
        """Each phase's filters, as its plan takes them."""
        return [self._packed(phase, plan, w) for phase, plan in self._phases]

    def _packed(self, phase: Phase, plan: Any, w: np.ndarray) -> Any:
        if lies_transposed(self.problem) and isinstance(plan, DirectPlan) and arrays.is_dense(w, "nchw"):
            return plan.pack_transposed(w)
        # BLAS has threads of its own, which wait where others have just worked.
        alone = isinstance(plan, Im2colPlan)
        return plan.pack(turned(self.problem, phase, w, replace(self._device, threads=1) if alone else self._device))

    def run(self, buffers: Buffers) -> None:
        dy, packed, dx, workspace, bias, *_ = buffers
        inner = None if workspace is None else workspace[self._inner_at :]
        for (phase, plan), w in zip(self._phases, packed, strict=True):
            assert phase.problem is not None
            result = dx if self._direct else self._part(workspace, phase.problem)
            plan.run(Buffers(dy, w, result, inner, bias))
            if not self._direct:
                self._places(dx, phase.first)[...] = result
        for phase in self._empty:
            value = np.zeros((self.problem.c, 1, 1), dx.dtype)
            if bias is not None:
                value += bias[:, None, None]
            wide = value.astype(np.float64)
            self._places(dx, phase.first)[...] = activate(self.problem.activation, wide)

    def _places(self, dx: np.ndarray, first: tuple[int, ...]) -> np.ndarray:
        """The phase's elements of dx."""
        rows, columns = (slice(at, None, step) for at, step in zip(first, self.problem.stride, strict=True))
        return dx[:, :, rows, columns]

    @staticmethod
    def _part(workspace: np.ndarray, problem: ConvProblem) -> np.ndarray:
        """A phase's result, in the first slot: it is copied before the next one."""
        n, c, *spatial = problem.y_shape
        flat = workspace[: prod(problem.y_shape) * problem.itemsize].view(problem.y_dtype)
        if problem.layout == "nchw":
            return flat.reshape(n, c, *spatial)
        return arrays.channels_first(flat.reshape(n, *spatial, c))


def lies_transposed(problem: ConvProblem) -> bool:
    """Whether w is a matrix that a phase's filters are the other way round."""
    return problem.groups == 1 and problem.kernel == (1, 1)


class _CpuPhases(Phases):
    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Filters turned, and packed; a matrix is packed as it lies."""
        us = 0.0
        for phase, (inner, one, part) in zip(self._parts(problem), self._pairs(problem, config), strict=True):
            if lies_transposed(problem) and isinstance(one, Direct):
                us += CALL_US + 1e-3 * COPY_NS / 4 * prod(problem.w_shape) / device.threads
            else:
                us += turn_us(problem, phase, device) + one.pack_us(inner, part, device)
        return us

    def join_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """A copy of every element, on one thread."""
        return CALL_US * prod(problem.stride) + 1e-3 * prod(problem.x_shape) * COPY_NS

    def inner_at(self, problem: ConvProblem, config: Config) -> int:
        """Behind one slot."""
        return 0 if self.joined_by_itself(problem) else self.slot_bytes(problem)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return PhasesPlan(problem, self, config, device)


class FpropPhases(_CpuPhases):
    """What an algorithm of fprop takes for each phase. float32, float64, float16 (in float32); NCHW and NHWC."""

    id: ClassVar[str] = "cpu.fprop_phases"


class WinogradDgrad(_CpuPhases):
    """cpu.winograd of dy with flipped filters: stride 1, what that takes; float64 when asked for by name."""

    id: ClassVar[str] = "cpu.winograd"
    summary: ClassVar[str] = "Winograd's fprop of dy with flipped filters"
    exact: ClassVar[bool] = False
    inexact: ClassVar[str] = "cpu.winograd"
