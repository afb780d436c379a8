"""cpu.simd of softmax: shifted by the largest element, with a vector exponential.

Along the last axis a row is read for its largest element, written as exponentials while they are summed, and scaled.
Rows longer than CHUNK are cut into chunks that go through the first two steps by themselves, each with a largest
element of its own; a second launch brings the chunks to the scale of the row. Along other axes lanes run over what
lies inside, and a vector of columns goes through the three steps.

float16 is computed in float32, and its exponentials twice rather than rounded in between.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, for sums of chunks with their own
largest elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from tapwise import settings
from tapwise.algorithm import Algorithm, Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit
from tapwise.cpu.common import lanes_of
from tapwise.cpu.cost import Costs
from tapwise.cpu.jit import Library
from tapwise.cpu.plan import KernelPlan
from tapwise.cpu.simd import target
from tapwise.integers import ceil_div
from tapwise.ops.axes import rejects_apart
from tapwise.ops.softmax.cpu_kernel import FIELDS, generate
from tapwise.ops.softmax.problem import SoftmaxProblem

# Elements of a row that one task takes at most.
CHUNK: Final = 16384
# Rows up to this, which fit a core's own cache, are not cut where there are ENOUGH of them to share out.
WHOLE: Final = 65536
ENOUGH: Final = 16


@dataclass(frozen=True)
class Config(BaseConfig):
    """`rows` rows (or `width` columns of one) a task; a row in `chunks` chunks."""

    rows: int
    width: int
    chunks: int


class SoftmaxPlan(KernelPlan):
    """Launches `task`, and `scale` behind it where rows are cut."""

    def __init__(self, problem: SoftmaxProblem, device: Device, library: Library, fields: dict[str, int]) -> None:
        super().__init__(problem, device, library, FIELDS, fields)
        self._chunks, self._outer = fields["chunks"], fields["outer"]
        if self._chunks > 1:
            self.workspace_bytes = 2 * 8 * self._chunks * self._outer
            self._scale, self._scale_serial = library.address("scale"), library.function("scale")

    def run(self, buffers: Buffers) -> None:
        self.launch(self._task, self._serial, buffers)
        if self._chunks > 1:
            self.launch(self._scale, self._scale_serial, buffers)


class SoftmaxSimd(Algorithm[Config]):
    """Softmax and its logarithm along any axis of a dense array; float32, float64, float16 (in float32)."""

    operator: ClassVar[str] = "softmax"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "shifted rows, vector exponential, rows in chunks where they are few"

    def rejects(self, problem: SoftmaxProblem, device: Device) -> str | None:
        return rejects_apart(problem)

    def configs(self, problem: SoftmaxProblem, device: Device) -> Sequence[Config]:
        collapsed = problem.collapsed
        assert collapsed is not None
        outer, length, inner = collapsed
        if inner == 1:
            # Chunks do not depend on the number of threads: the same input gives the same bits.
            whole = length <= CHUNK or (length <= WHOLE and outer >= ENOUGH)
            chunks = 1 if whole else 4 * ceil_div(length, 4 * CHUNK)
            rows = max(1, min(CHUNK // length, ceil_div(outer, 4 * device.threads)))
            # One thread is done with so few before a team has started.
            rows = outer if outer * length <= 4096 else rows
            return [Config(rows, 1, chunks)]
        lanes = lanes_of(problem, device)
        wanted = ceil_div(ceil_div(8 * device.threads, outer), 1)
        width = max(4 * lanes, ceil_div(ceil_div(inner, wanted), 4 * lanes) * 4 * lanes)
        return [Config(1, min(width, inner), 1)]

    def predict_us(self, problem: SoftmaxProblem, config: Config, device: Device) -> float:
        """About 2.2 cycles an element of float32 for the exponential and the three passes, over the threads."""
        costs = Costs(device, problem.accumulator_bytes)
        collapsed = problem.collapsed
        assert collapsed is not None
        outer, length, inner = collapsed
        tasks = _tasks(outer, inner, config)
        cycles = 2.2 * outer * length * inner * (8 / costs.lanes) / max(1, tasks) + 40
        return costs.wall_us(cycles, tasks, device.threads) + (6.0 if config.chunks > 1 else 0.0)

    def workspace_bytes(self, problem: SoftmaxProblem, config: Config, device: Device) -> int:
        collapsed = problem.collapsed
        assert collapsed is not None
        if config.chunks > 1:
            return 2 * 8 * config.chunks * collapsed[0]
        return 0

    def plan(self, problem: SoftmaxProblem, config: Config, device: Device) -> Plan:
        collapsed = problem.collapsed
        assert collapsed is not None
        outer, length, inner = collapsed
        library = jit.load(
            "softmax", generate, target(settings.cpu_target()), dtype=problem.accumulator, storage=problem.dtype,
            log=problem.log, last=inner == 1,
        )  # fmt: skip
        fields = {
            "tasks": _tasks(outer, inner, config), "outer": outer, "length": length, "inner": inner,
            "chunk": ceil_div(length, config.chunks), "chunks": config.chunks, "rows": config.rows,
            "width": config.width, "widths": ceil_div(inner, config.width),
        }  # fmt: skip
        return SoftmaxPlan(problem, device, library, fields)


def _tasks(outer: int, inner: int, config: Config) -> int:
    if inner > 1:
        return outer * ceil_div(inner, config.width)
    return outer * config.chunks if config.chunks > 1 else ceil_div(outer, config.rows)
