"""What several CPU algorithms share when they choose: lanes, even splits."""

from __future__ import annotations

from tapwise.algorithm import Device
from tapwise.integers import ceil_div
from tapwise.problem import Problem


def lanes_of(problem: Problem, device: Device) -> int:
    """Elements of the accumulator in a vector."""
    return device.vector_bytes // problem.accumulator_bytes


def splits(total: int, multiple: int, threads: int) -> list[int]:
    """The whole, and parts of it, each a multiple of the tile."""
    parts = {total}
    for count in (threads, 2 * threads, 4 * threads, 8 * threads):
        size = ceil_div(ceil_div(total, count), multiple) * multiple
        if size < total:
            parts.add(size)
    return sorted(parts)
