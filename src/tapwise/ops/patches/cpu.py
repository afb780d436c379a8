"""cpu.simd of im2col and col2im: rows of patches as vector copies and vector sums.

im2col: a row of columns is a run of an image row, with zeros where the window sees padding. col2im gathers: a row of
the image is summed from the rows of columns that hold parts of it, in the order of the taps, in a buffer for each
residue of the column stride; these are interleaved into the image's row. No two threads write the same element.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar, Final

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.cpu.common import PlaneConfig, load
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import KernelPlan
from tapwise.integers import ceil_div
from tapwise.ops.patches.cpu_kernel import AXES, FIELDS, generate_col2im, generate_im2col
from tapwise.ops.patches.problem import PatchProblem

# Elements of the buffers of a row, of which each residue of the stride has one, beyond four times the row.
LARGEST_ROW: Final = 2**22


class Im2colSimd(Algorithm[PlaneConfig]):
    """Vector copies, any stride, padding and dilation, 1 to 3 spatial axes; float32, float64, 16 bits."""

    operator: ClassVar[str] = "im2col"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "runs of image rows as vector copies"

    def configs(self, problem: PatchProblem, device: Device) -> Sequence[PlaneConfig]:
        return [PlaneConfig.shared_out(*self._units(problem), device.threads, problem.flops)]

    def predict_us(self, problem: PatchProblem, config: PlaneConfig, device: Device) -> float:
        """The bytes over the memory's bandwidth, and some cycles a row."""
        costs = Costs(device, problem.accumulator_bytes)
        tasks = config.tasks(self._units(problem)[0])
        cycles = costs.stream(problem.bytes, problem.bytes) + 20 * problem.flops / max(1, problem.output[-1])
        return costs.wall_us(cycles / max(1, tasks) + 40, tasks, device.threads)

    def workspace_bytes(self, problem: PatchProblem, config: PlaneConfig, device: Device) -> int:
        return 0

    def plan(self, problem: PatchProblem, config: PlaneConfig, device: Device) -> Plan:
        library = load("im2col", generate_im2col, problem)
        return KernelPlan(problem, device, library, FIELDS, self._fields(problem, config))

    def _units(self, problem: PatchProblem) -> tuple[int, int]:
        """Planes that tasks are made of, and the rows of one."""
        p = problem.canonical(3)
        return p.n * p.c * prod(p.kernel), p.output[0] * p.output[1]

    def _fields(self, problem: PatchProblem, config: PlaneConfig) -> dict[str, int]:
        p = problem.canonical(3)
        values = {
            "size": p.spatial, "out": p.output, "taps": p.kernel, "stride": p.stride,
            "pad": tuple(before for before, _ in p.padding), "dilation": p.dilation,
        }  # fmt: skip
        fields = {name + axis: sizes[int(axis)] for name, sizes in values.items() for axis in AXES}
        tasks = config.tasks(self._units(problem)[0])
        fields |= {"planes": p.n * p.c, "block": config.block, "row_blocks": config.row_blocks, "tasks": tasks}
        return fields | {"accumulate": int(p.accumulate), "scratch_step": 0}


class Col2imSimd(Im2colSimd):
    """Vector sums that gather, in the order of the taps; any stride, padding and dilation, 1 to 3 spatial axes."""

    operator: ClassVar[str] = "col2im"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "rows of the image summed by residue of the stride, interleaved"

    def rejects(self, problem: PatchProblem, device: Device) -> str | None:
        if self._row_size(problem) * problem.stride[-1] > 4 * problem.spatial[-1] + LARGEST_ROW:
            return f"takes strides whose buffers of a row hold up to {LARGEST_ROW} elements, not {problem.stride}"
        return None

    def workspace_bytes(self, problem: PatchProblem, config: PlaneConfig, device: Device) -> int:
        workers = max(1, min(device.threads, config.tasks(self._units(problem)[0])))
        return self._row_size(problem) * problem.stride[-1] * problem.accumulator_bytes * workers

    def plan(self, problem: PatchProblem, config: PlaneConfig, device: Device) -> Plan:
        library = load("col2im", generate_col2im, problem)
        row_size = self._row_size(problem)
        step = row_size * problem.stride[-1] * problem.accumulator_bytes
        fields = self._fields(problem, config) | {"row_size": row_size, "scratch_step": step}
        return KernelPlan(problem, device, library, FIELDS, fields)

    def _row_size(self, problem: PatchProblem) -> int:
        return ceil_div(ceil_div(problem.spatial[-1], problem.stride[-1]) + 16, 16) * 16

    def _units(self, problem: PatchProblem) -> tuple[int, int]:
        p = problem.canonical(3)
        return p.n * p.c, p.spatial[0] * p.spatial[1]
