"""What several CPU algorithms share: lanes, even splits, loading their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tapwise import settings
from tapwise.algorithm import Device
from tapwise.cpu import jit
from tapwise.cpu.simd import Kernel, target
from tapwise.integers import ceil_div
from tapwise.problem import Problem


def load(name: str, generate: Callable[..., Kernel], problem: Problem, **parameters: Any) -> jit.Library:
    """The kernels of a problem's dtypes, for the target in the settings."""
    vector = target(settings.cpu_target())
    return jit.load(name, generate, vector, dtype=problem.accumulator, storage=problem.dtype, **parameters)


def lanes_of(problem: Problem, device: Device) -> int:
    """Elements of the accumulator in a vector."""
    return device.vector_bytes // problem.accumulator_bytes


def splits(total: int, multiple: int, threads: int) -> list[int]:
    """The whole, and parts of it, each a multiple of the tile."""
    sizes = [ceil_div(ceil_div(total, count * threads), multiple) * multiple for count in (1, 2, 4, 8)]
    return sorted({total, *(size for size in sizes if size < total)})
