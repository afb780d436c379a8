"""What several CPU algorithms share when they choose: refusals, dtypes, even splits."""

from __future__ import annotations

from tapwise.problem import Problem


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def arithmetic(problem: Problem) -> str:
    """The dtype that sums are computed in."""
    return "f64" if problem.dtype == "f64" else "f32"


def splits(total: int, multiple: int, threads: int) -> list[int]:
    """The whole, and parts of it, each a multiple of the tile."""
    parts = {total}
    for count in (threads, 2 * threads, 4 * threads, 8 * threads):
        size = ceil_div(ceil_div(total, count), multiple) * multiple
        if size < total:
            parts.add(size)
    return sorted(parts)
