"""Calls on arrays whose axes are all alike: brought into an order that kernels take, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tapwise import arrays, dispatch
from tapwise.algorithm import Buffers, Plan
from tapwise.arguments import shown, whole
from tapwise.arrays.workspaces import workspace
from tapwise.errors import InvalidProblem
from tapwise.ops.axes import AXIS
from tapwise.ops.parameters import device_of
from tapwise.problem import Problem

# Calls remembered by shape, strides and arguments: a small reduction takes less time than choosing for it.
KEPT: Final = 1024


def plain_axis(axis: Any) -> Any:
    """An axis argument in plain numbers, as calls are remembered by it: 1.0 equals 1, and is no axis."""
    if axis is None or type(axis) is int:
        return axis
    if isinstance(axis, (tuple, list)):
        return tuple(whole(one, "axis", AXIS) for one in axis)
    return whole(axis, "axis", AXIS)


def synonym(value: Any, name: str, default: Any, other: Any, other_name: str) -> Any:
    """An argument that may go by PyTorch's name instead. Raises InvalidProblem where both are given."""
    if other is None:
        return value
    if value is not default:
        raise InvalidProblem(f"{other_name}={shown(other)}: {name}={shown(value)} is given too; one of them is allowed")
    return other


@dataclass(frozen=True)
class PreparedCall:
    """What a call needs besides its array: axes in the order of the kernel's problem, its plan, the way back.

    Without a plan there is nothing to compute: every result is `value`.
    """

    order: tuple[int, ...] | None
    plan: Plan | None
    result: tuple[int, ...]
    back: tuple[int, ...] | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    value: float = 0.0


def memory_order(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Axes by falling stride: the order in which a transposed array lies dense."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -abs(strides[axis])))


def unless_same(order: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if order == tuple(range(len(order))) else order


def in_order(source: Any, order: tuple[int, ...] | None) -> Any:
    """The array with its axes in that order, in C order and aligned; a copy only where it is not."""
    if order is not None:
        source = source.transpose(*order)
    if not isinstance(source, np.ndarray):
        return arrays.dense(source, "nchw")
    flags = source.flags
    if flags.c_contiguous and flags.aligned:
        return source
    return np.array(source, order="C")


def compute(problem: Problem, algorithm: str, x: Any, y: Any) -> Plan | None:
    """Fill y, an array or what else the operator's plans take, where x lies; nothing where there is no element.

    The plan that did it.
    """
    if problem.empty:
        return None
    device = device_of(x)
    plan = dispatch.plan_for(problem, dispatch.choose(problem, device, algorithm), device)
    run(plan, x, y)
    return plan


def run(plan: Plan, x: Any, y: Any) -> None:
    """One run of a plan without filters."""
    with workspace(plan.workspace_bytes, x) as memory:
        plan.run(Buffers(x, None, y, memory))
