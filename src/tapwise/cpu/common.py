"""What several CPU algorithms share when they choose: dtypes, lanes, even splits."""

from __future__ import annotations

from tapwise.algorithm import Device
from tapwise.integers import ceil_div
from tapwise.problem import Problem


def arithmetic(problem: Problem) -> str:
    """The dtype that sums are computed in."""
    return "f64" if problem.dtype == "f64" else "f32"


def sum_bytes(problem: Problem) -> int:
    """Bytes of an element of that dtype."""
    return 8 if problem.dtype == "f64" else 4


def lanes_of(problem: Problem, device: Device) -> int:
    """Elements of that dtype in a vector."""
    return device.vector_bytes // sum_bytes(problem)


def splits(total: int, multiple: int, threads: int) -> list[int]:
    """The whole, and parts of it, each a multiple of the tile."""
    parts = {total}
    for count in (threads, 2 * threads, 4 * threads, 8 * threads):
        size = ceil_div(ceil_div(total, count), multiple) * multiple
        if size < total:
            parts.add(size)
    return sorted(parts)
