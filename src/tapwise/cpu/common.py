"""What several CPU algorithms share when they choose: refusals, dtypes, even splits."""

from __future__ import annotations

from typing import Any

from tapwise.algorithm import Device
from tapwise.ops.conv.problem import ConvProblem
from tapwise.problem import Problem


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def arithmetic(problem: Problem) -> str:
    """The dtype that sums are computed in."""
    return "f64" if problem.dtype == "f64" else "f32"


def rejects_foreign(problem: ConvProblem, device: Device) -> str | None:
    """What no CPU algorithm of ours takes."""
    if device.kind != "cpu":
        return f"runs on a CPU, not on {device.kind}"
    if problem.direction != "fprop":
        return f"computes fprop, not {problem.direction}"
    if problem.dtype == "bf16":
        return "takes f32, f64 and f16, not bf16"
    if len(problem.spatial) != 2:
        return f"takes 2 spatial axes, not {len(problem.spatial)}"
    return None


def rejects_all(problem: ConvProblem, device: Device) -> str | None:
    """What no algorithm takes but the last resort: the foreign, and problems without an output or a channel."""
    reason = rejects_foreign(problem, device)
    if reason is not None:
        return reason
    if problem.empty or problem.c == 0:
        return "has nothing to compute"
    return None


def rejects_plain(problem: Any, device: Device) -> str | None:
    """What no CPU algorithm of an operator without filters takes: another device, bf16, nothing."""
    if device.kind != "cpu":
        return f"runs on a CPU, not on {device.kind}"
    if problem.dtype == "bf16":
        return "takes f32, f64 and f16, not bf16"
    return "has nothing to compute" if problem.empty else None


def rejects_pool(problem: Any, device: Device) -> str | None:
    """The same, and anything but 2 spatial axes."""
    if len(problem.spatial) != 2:
        return f"takes 2 spatial axes, not {len(problem.spatial)}"
    return rejects_plain(problem, device)


def rejects_reduction(problem: Any, device: Device) -> str | None:
    """What reduce and softmax do not take: another device, bf16, axes that are not neighbours, nothing."""
    if device.kind != "cpu":
        return f"runs on a CPU, not on {device.kind}"
    if problem.dtype == "bf16":
        return "takes f32, f64 and f16, not bf16"
    if problem.folded is None:
        return f"takes axes that are neighbours, not {problem.axes} of {problem.shape}"
    if problem.empty or problem.length == 0:
        return "has nothing to compute"
    return None


def splits(total: int, multiple: int, threads: int) -> list[int]:
    """The whole, and parts of it, each a multiple of the tile."""
    parts = {total}
    for count in (threads, 2 * threads, 4 * threads, 8 * threads):
        size = ceil_div(ceil_div(total, count), multiple) * multiple
        if size < total:
            parts.add(size)
    return sorted(parts)
