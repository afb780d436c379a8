"""cpu.simd of reduce: vectors of partial results, rows in chunks where they are few or long.

Along the last axis a row is reduced to four vectors, these into one, its lanes into a value. Along other axes lanes
run over what lies inside, and columns are reduced row by row in blocks. Either way elements beyond a chunk go to a
partial result of their own, which `join` folds in the order of the chunks: so errors do not grow with the length, and
the same input gives the same bits whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.cpu.common import RowConfig, lanes_of, load
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import ChunkPlan
from tapwise.integers import ceil_div
from tapwise.ops.axes import rejects_apart
from tapwise.ops.reduce.cpu_kernel import FIELDS, generate
from tapwise.ops.reduce.problem import POSITIONS, ReduceProblem

# Elements of a row and of a column in one partial result.
ROW_CHUNK: Final = 32768
COLUMN_CHUNK: Final = 512
# Elements that one thread is done with before a team has started.
ALONE: Final = 16384


class ReduceSimd(Algorithm[RowConfig]):
    """Every op along neighbouring axes; float32, float64, float16, bfloat16 (in float32)."""

    operator: ClassVar[str] = "reduce"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "vectors of partial results, in chunks"

    def rejects(self, problem: ReduceProblem, device: Device) -> str | None:
        return rejects_apart(problem)

    def configs(self, problem: ReduceProblem, device: Device) -> Sequence[RowConfig]:
        """One: chunks follow from the shape alone, so that the bits do."""
        outer, length, inner = problem.sizes
        if inner == 1:
            chunks = 2 * ceil_div(length, 2 * ROW_CHUNK) if length > ROW_CHUNK else 1
            rows = max(1, min(ROW_CHUNK // length, ceil_div(outer, 4 * device.threads)))
            rows = outer if outer * length <= ALONE else rows
            return [RowConfig(rows, 1, chunks)]
        lanes = lanes_of(problem, device)
        chunks = 1 if problem.op in POSITIONS else ceil_div(length, COLUMN_CHUNK)
        wanted = ceil_div(4 * device.threads, outer * chunks)
        width = ceil_div(ceil_div(inner, wanted), 4 * lanes) * 4 * lanes
        width = inner if outer * length * inner <= ALONE else width
        return [RowConfig(1, min(width, inner), chunks)]

    def predict_us(self, problem: ReduceProblem, config: RowConfig, device: Device) -> float:
        """An eighth of a cycle an element of float32 from cache, or the bytes over the memory's bandwidth."""
        costs = Costs(device, problem.accumulator_bytes)
        tasks = config.fields(*problem.sizes)["tasks"]
        cycles = max(problem.flops / costs.lanes, costs.stream(problem.bytes, problem.bytes))
        return costs.wall_us(cycles / max(1, tasks) + 40, tasks, device.threads) + (2.0 if config.chunks > 1 else 0.0)

    def workspace_bytes(self, problem: ReduceProblem, config: RowConfig, device: Device) -> int:
        outer, _, inner = problem.sizes
        return config.workspace_bytes(outer, inner)

    def plan(self, problem: ReduceProblem, config: RowConfig, device: Device) -> Plan:
        outer, length, inner = problem.sizes
        library = load("reduce", generate, problem, op=problem.op, last=inner == 1)
        fields = config.fields(outer, length, inner)
        if inner > 1 and config.chunks > 1:
            fields["chunk"] = COLUMN_CHUNK
        workspace = config.workspace_bytes(outer, inner)
        return ChunkPlan(problem, device, library, FIELDS, fields, "join", True, workspace)
