"""cpu.simd of softmax: shifted by the largest element, with a vector exponential.

Along the last axis a row is read for its largest element, written as exponentials while they are summed, and scaled.
Rows longer than CHUNK are cut into chunks that go through the first two steps by themselves, each with a largest
element of its own; a second launch brings the chunks to the scale of the row. Along other axes lanes run over what
lies inside, and a vector of columns goes through the three steps.

float16 and bfloat16 are computed in float32, and their exponentials twice rather than rounded in between.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, for sums of chunks with their own
largest elements.
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
from tapwise.ops.softmax.cpu_kernel import FIELDS, generate
from tapwise.ops.softmax.problem import SoftmaxProblem

# Elements of a row that one task takes at most.
CHUNK: Final = 16384
# Rows up to this, which fit a core's own cache, are not cut where there are ENOUGH of them to share out.
WHOLE: Final = 65536
ENOUGH: Final = 16


class SoftmaxSimd(Algorithm[RowConfig]):
    """Softmax and its logarithm along any axis of a dense array; float32, float64, float16, bfloat16 (in float32)."""

    operator: ClassVar[str] = "softmax"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "shifted rows, vector exponential, rows in chunks where they are few"

    def rejects(self, problem: SoftmaxProblem, device: Device) -> str | None:
        return rejects_apart(problem)

    def configs(self, problem: SoftmaxProblem, device: Device) -> Sequence[RowConfig]:
        return row_configs(problem, device)

    def predict_us(self, problem: SoftmaxProblem, config: RowConfig, device: Device) -> float:
        """About 2.2 cycles an element of float32 for the exponential and the three passes, over the threads."""
        costs = Costs(device, problem.accumulator_bytes)
        outer, length, inner = problem.sizes
        tasks = config.fields(outer, length, inner)["tasks"]
        cycles = 2.2 * outer * length * inner * (8 / costs.lanes) / max(1, tasks) + 40
        return costs.wall_us(cycles, tasks, device.threads) + (6.0 if config.chunks > 1 else 0.0)

    def workspace_bytes(self, problem: SoftmaxProblem, config: RowConfig, device: Device) -> int:
        outer, _, inner = problem.sizes
        return config.workspace_bytes(outer, inner)

    def plan(self, problem: SoftmaxProblem, config: RowConfig, device: Device) -> Plan:
        outer, length, inner = problem.sizes
        library = load("softmax", generate, problem, log=problem.log, last=inner == 1)
        fields = config.fields(outer, length, inner)
        workspace = config.workspace_bytes(outer, inner)
        return ChunkPlan(problem, device, library, FIELDS, fields, "scale", False, workspace)


def row_configs(problem: SoftmaxProblem, device: Device) -> list[RowConfig]:
    """How rows or columns are shared out. Chunks do not depend on the number of threads: the same input gives the same
    bits."""
    outer, length, inner = problem.sizes
    if inner == 1:
        whole = length <= CHUNK or (length <= WHOLE and outer >= ENOUGH)
        chunks = 1 if whole else 4 * ceil_div(length, 4 * CHUNK)
        rows = max(1, min(CHUNK // length, ceil_div(outer, 4 * device.threads)))
        # One thread is done with so few before a team has started.
        rows = outer if outer * length <= 4096 else rows
        return [RowConfig(rows, 1, chunks)]
    lanes = lanes_of(problem, device)
    wanted = ceil_div(8 * device.threads, outer)
    width = max(4 * lanes, ceil_div(ceil_div(inner, wanted), 4 * lanes) * 4 * lanes)
    return [RowConfig(1, min(width, inner), 1)]
