"""cpu.simd of im2col and col2im: rows of patches as vector copies and vector sums.

im2col: a row of columns is a run of an image row, with zeros where the window sees padding. col2im gathers: a row of
the image is summed from the rows of columns that hold parts of it, in the order of the taps, in a buffer for each
residue of the column stride; these are interleaved into the image's row. No two threads write the same element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from tapwise import settings
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import KernelPlan
from tapwise.cpu.simd import target
from tapwise.integers import ceil_div
from tapwise.ops.patches.cpu_kernel import AXES, FIELDS, generate_col2im, generate_im2col
from tapwise.ops.patches.problem import PatchProblem


@dataclass(frozen=True)
class Config(BaseConfig):
    """A task is `block` planes of taps (im2col) or of the image (col2im), in one of `row_blocks` blocks of rows."""

    block: int
    row_blocks: int


class Im2colSimd(Algorithm[Config]):
    """Vector copies, any stride, padding and dilation, 1 to 3 spatial axes; float32, float64, float16."""

    operator: ClassVar[str] = "im2col"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "runs of image rows as vector copies"

    def configs(self, problem: PatchProblem, device: Device) -> Sequence[Config]:
        units, rows = self._units(problem)
        wanted = 4 * device.threads
        if problem.flops <= 16384:
            return [Config(units, 1)]
        block = max(1, units // wanted)
        return [Config(block, max(1, min(rows, wanted // ceil_div(units, block))))]

    def predict_us(self, problem: PatchProblem, config: Config, device: Device) -> float:
        """The bytes over the memory's bandwidth, and some cycles a row."""
        costs = Costs(device, problem.accumulator_bytes)
        units, _ = self._units(problem)
        tasks = ceil_div(units, config.block) * config.row_blocks
        cycles = costs.stream(problem.bytes, problem.bytes) + 20 * problem.flops / max(1, problem.output[-1])
        return costs.wall_us(cycles / max(1, tasks) + 40, tasks, device.threads)

    def workspace_bytes(self, problem: PatchProblem, config: Config, device: Device) -> int:
        return 0

    def plan(self, problem: PatchProblem, config: Config, device: Device) -> Plan:
        library = jit.load(
            "im2col", generate_im2col, target(settings.cpu_target()), dtype=problem.accumulator, storage=problem.dtype
        )
        return KernelPlan(problem, device, library, FIELDS, self._fields(problem, config))

    def _units(self, problem: PatchProblem) -> tuple[int, int]:
        """Planes that tasks are made of, and the rows of one."""
        p = problem.canonical(3)
        return p.n * p.c * prod(p.kernel), p.output[0] * p.output[1]

    def _fields(self, problem: PatchProblem, config: Config) -> dict[str, int]:
        p = problem.canonical(3)
        units, _ = self._units(problem)
        values = {
            "size": p.spatial, "out": p.output, "taps": p.kernel, "stride": p.stride,
            "pad": tuple(before for before, _ in p.padding), "dilation": p.dilation,
        }  # fmt: skip
        fields = {name + axis: sizes[int(axis)] for name, sizes in values.items() for axis in AXES}
        tasks = ceil_div(units, config.block) * config.row_blocks
        fields |= {"planes": p.n * p.c, "block": config.block, "row_blocks": config.row_blocks, "tasks": tasks}
        return fields | {"accumulate": int(p.accumulate), "scratch_step": 0}


class Col2imSimd(Im2colSimd):
    """Vector sums that gather, in the order of the taps; any stride, padding and dilation, 1 to 3 spatial axes."""

    operator: ClassVar[str] = "col2im"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "rows of the image summed by residue of the stride, interleaved"

    def workspace_bytes(self, problem: PatchProblem, config: Config, device: Device) -> int:
        units, _ = self._units(problem)
        workers = max(1, min(device.threads, ceil_div(units, config.block) * config.row_blocks))
        return self._row_size(problem) * problem.stride[-1] * problem.accumulator_bytes * workers

    def plan(self, problem: PatchProblem, config: Config, device: Device) -> Plan:
        library = jit.load(
            "col2im", generate_col2im, target(settings.cpu_target()), dtype=problem.accumulator, storage=problem.dtype
        )
        row_size = self._row_size(problem)
        step = row_size * problem.stride[-1] * problem.accumulator_bytes
        fields = self._fields(problem, config) | {"row_size": row_size, "scratch_step": step}
        return KernelPlan(problem, device, library, FIELDS, fields)

    def _row_size(self, problem: PatchProblem) -> int:
        return ceil_div(ceil_div(problem.spatial[-1], problem.stride[-1]) + 16, 16) * 16

    def _units(self, problem: PatchProblem) -> tuple[int, int]:
        p = problem.canonical(3)
        return p.n * p.c, p.spatial[0] * p.spatial[1]
