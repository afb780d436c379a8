"""cuda.rolling: sums of bytes over windows of few taps, a thread some neighbouring elements down rows of its own.

The sums of the rows of outputs that are under way are in registers, so a row of the picture is read once, and nothing
goes by way of shared memory. A kernel is compiled for the numbers of taps.

Source: rows of sums under way are those of cuda.depthwise that roll.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import arrays
from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, stream
from tapwise.cuda.types import DTYPES, tensor_core_type
from tapwise.ops.conv.cuda.costs import blocks_of, cycles_us, joint_us
from tapwise.ops.filter.cuda import ListPlan
from tapwise.ops.filter.cuda_down_rows import THREADS, Parts, unsuited
from tapwise.ops.filter.cuda_strips import view_of
from tapwise.ops.filter.problem import FilterProblem, limits
from tapwise.ops.filter.weights import rounded

# Words that a list begins with; taps of a window at most along an axis, and channels.
CONSTANTS, MOST_TAPS, MOST_CHANNELS = 8, 5, 4
ACROSS: Final = (8, 16)
ROWS: Final = (8, 12, 16)
SIDE_ROWS = 4
# Registers of a thread, and of them what are no values, sums and weights.
REGISTERS, OTHERS = 255, 40
# Of the cost model, fitted to 60 times of 10 problems (H200), of which it chooses within 1.03 of the best: cycles of a
# scheduler for a warp's element of x, an output and a column's sum that is truncated; of a multiprocessor for a row
# that a block waits for, for a row of a block at the sides, for a line of a store; of memory's time; how much of both
# overlaps; microseconds of a launch.
ELEMENT, OUTPUT, COLUMN = 9.35, 1.32, 2.48
ALONE, SIDE, STORED_LINE, MEMORY, POWER, START_US = 129.0, 1221.0, 13.9, 1.24, 4.0, 2.9


@dataclass(frozen=True)
class Config(BaseConfig):
    """Elements of a thread beside each other, and its rows."""

    across: int
    rows: int


class Layout(Parts):
    """What a thread sees and holds."""

    def __init__(self, problem: FilterProblem, config: Config) -> None:
        super().__init__(view_of(problem), config.across, config.rows, SIDE_ROWS)
        (r, s), separable = self.view.taps, problem.op == "separable"
        self.sums = self.seen if separable else config.across
        self.weights = r + s if separable else r * s
        rows = max(2, r) * (self.loaded // 4 + 1)
        self.registers = rows + r * self.sums + self.seen + self.weights + OTHERS


class RollingPlan(ListPlan):
    """A launch."""

    def pack(self, w: Any) -> Any:
        """The list on the GPU."""
        return self.uploaded(pack(self.problem, np.asarray(arrays.on_host(w), np.float64)))

    def run(self, buffers: Buffers) -> None:
        x, words, y, *_ = buffers
        self.launches[0]({"x": x.ptr, "y": y.ptr, "list": words.ptr}, stream(buffers))


def pack(problem: FilterProblem, w: np.ndarray) -> np.ndarray:
    """The list: cval, low, high, start, the epsilons of column and result, and from CONSTANTS on the column's weights
    and the row's, or the window's."""
    host = np.zeros(CONSTANTS + w.size, np.float32)
    host[:6] = (problem.cval, *limits(problem), *problem.rounding_epsilons(w.ravel()))
    host[CONSTANTS:] = rounded(w.ravel(), np.dtype(np.float32))
    return host


class FilterRolling(CudaAlgorithm[Config]):
    """Sums of bytes over windows of up to 5 x 5, up to four channels; weights are finite."""

    operator: ClassVar[str] = "filter"
    id: ClassVar[str] = "cuda.rolling"
    summary: ClassVar[str] = "small windows of bytes, sums under way in registers"
    dtypes: ClassVar[None] = None

    def rejects(self, problem: FilterProblem, device: Device) -> str | None:
        if problem.op not in ("dense", "separable"):
            return "takes sums"
        if reason := unsuited(problem):
            return reason
        if max(view_of(problem).taps) > MOST_TAPS:
            return f"takes windows of up to {MOST_TAPS} x {MOST_TAPS}"
        return None if self.configs(problem, device) else "takes windows whose sums registers hold"

    def configs(self, problem: FilterProblem, device: Device) -> Sequence[Config]:
        configs = [Config(across, rows) for across in ACROSS for rows in ROWS]
        return [config for config in configs if Layout(problem, config).registers <= REGISTERS]

    def predict_us(self, problem: FilterProblem, config: Config, device: Device) -> float:
        """What warps issue, and memory."""
        layout, (r, s) = Layout(problem, config), view_of(problem).taps
        products = r * layout.sums + (s * config.across if problem.op == "separable" else (s - 1) * r * config.across)
        each = ELEMENT * layout.seen + products + OUTPUT * config.across
        each += COLUMN * layout.seen * (problem.op == "separable" and problem.truncates_columns)
        cycles = layout.cycles(layout.rows + r - 1, each, ALONE, blocks_of(layout.registers, THREADS), device)
        cycles += layout.view.depth * layout.side_blocks * (SIDE_ROWS + r - 1) * SIDE / device.multiprocessors
        stored = STORED_LINE * layout.ragged_lines(problem.y_dtype.itemsize, device) / cycles_us(device)
        memory = MEMORY * problem.bytes / (device.gbps * 1e3) + stored
        return START_US + joint_us(cycles / cycles_us(device), memory, POWER)

    def plan(self, problem: FilterProblem, config: Config, device: Device) -> Plan:
        return RollingPlan(problem, device, [self.launch(problem, config)])

    def source(self, problem: FilterProblem, config: Config) -> Source:
        layout, separable = Layout(problem, config), problem.op == "separable"
        words = layout.words() | {
            "ACROSS": config.across, "SEPARABLE": separable, "TAPS_H": layout.view.taps[0], "OP": "SUM",
            "INTEGRAL": problem.integral, "CLIP": problem.clip, "TRUNCATE": separable and problem.truncates_columns,
        }  # fmt: skip
        of_y = tensor_core_type("f16") if problem.to == "f16" else DTYPES[problem.to].cpp
        declarations = traits(DTYPES[problem.dtype].cpp, words)
        file, template = "ops/filter/rolling.cu", "filter_rolling"
        return stub(file, template, f"Traits, {of_y}", "DownRows", THREADS, declarations=declarations)

    def launch(self, problem: FilterProblem, config: Config) -> Launch:
        layout = Layout(problem, config)
        source, fields = self.source(problem, config), layout.fields(problem)
        return Launch(source, fields, layout.grid, THREADS, dependent=True)
