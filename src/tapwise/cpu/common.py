"""What several CPU algorithms share: lanes, loading, even splits, tasks of rows and of planes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapwise import settings
from tapwise.algorithm import Config, Device
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


@dataclass(frozen=True)
class RowConfig(Config):
    """`rows` rows (or `width` columns) a task; a row or column in `chunks` partial results."""

    rows: int
    width: int
    chunks: int

    def workspace_bytes(self, outer: int, inner: int) -> int:
        """Two numbers, of at most 8 bytes, a chunk."""
        return 16 * self.chunks * outer * inner if self.chunks > 1 else 0

    def fields(self, outer: int, length: int, inner: int) -> dict[str, int]:
        """What a kernel over an array (outer, length, inner) knows of its tasks."""
        widths = ceil_div(inner, self.width)
        whole = inner == self.chunks == 1
        return {
            "tasks": ceil_div(outer, self.rows) if whole else outer * self.chunks * widths,
            "outer": outer, "length": length, "inner": inner, "chunk": ceil_div(length, self.chunks),
            "chunks": self.chunks, "rows": self.rows, "width": self.width, "widths": widths,
        }  # fmt: skip


@dataclass(frozen=True)
class PlaneConfig(Config):
    """A task is `block` planes in one of `row_blocks` blocks of their rows."""

    block: int
    row_blocks: int

    @staticmethod
    def shared_out(planes: int, rows: int, threads: int, work: int) -> PlaneConfig:
        """Tasks for all threads; one for the few thousand elements that are done before a team has started."""
        if work <= 16384:
            return PlaneConfig(planes, 1)
        block = max(1, planes // (4 * threads))
        return PlaneConfig(block, max(1, min(rows, 4 * threads // ceil_div(planes, block))))

    def tasks(self, planes: int) -> int:
        return ceil_div(planes, self.block) * self.row_blocks
