"""cpu.simd of pooling: rows combined first, columns of the result then.

NCHW: the input rows that an output row sees are combined into one padded row, with what changes nothing
(-infinity, or 0) to its left and right and for rows outside; its columns are combined into the output row, strides of 2
and 4 by shuffles. NHWC: lanes over channels, all taps of a pixel. Either way straight to y.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar, Final

import numpy as np

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.cpu.common import PlaneConfig, load
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import KernelPlan
from tapwise.integers import ceil_div
from tapwise.ops.pool.cpu_kernel import FIELDS, generate
from tapwise.ops.pool.problem import PoolProblem
from tapwise.problem import DTYPES

LARGEST: Final = 16
# Columns of whole windows in a table of divisors: those of the widest vector.
WHOLE: Final = 64
# Elements of a padded row beyond those of the image: dilated windows of padding go to the plain loops.
MOST_PADDING: Final = 2**24
LARGEST_PIXELS: Final = 49


class PoolSimd(Algorithm[PlaneConfig]):
    """Windows of up to 16 taps an axis (NHWC: 49 in all), any stride, padding and dilation; f32, f64, f16, bf16."""

    operator: ClassVar[str] = "pool"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "rows of a window first, then its columns, in vectors"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: PoolProblem, device: Device) -> str | None:
        if problem.indices:
            return "finds no positions"
        if max(problem.kernel) > LARGEST:
            return f"takes kernels of up to {LARGEST} an axis, not {problem.kernel}"
        if problem.layout == "nhwc" and prod(problem.kernel) > LARGEST_PIXELS:
            return f"takes kernels of up to {LARGEST_PIXELS} taps in nhwc, not {problem.kernel}"
        if problem.layout == "nchw" and self._row_size(problem) > 4 * problem.spatial[1] + MOST_PADDING:
            return f"takes windows and padding that reach up to {MOST_PADDING} columns beyond the image"
        return None

    def configs(self, problem: PoolProblem, device: Device) -> Sequence[PlaneConfig]:
        work = prod(problem.y_shape) * prod(problem.kernel)
        return [PlaneConfig.shared_out(self._planes(problem), problem.output[0], device.threads, work)]

    def predict_us(self, problem: PoolProblem, config: PlaneConfig, device: Device) -> float:
        """Half a cycle a vector and tap, some a row, or the bytes over the memory's bandwidth."""
        costs = Costs(device, problem.accumulator_bytes)
        tasks = config.tasks(self._planes(problem))
        taps = sum(problem.kernel) if problem.layout == "nchw" else prod(problem.kernel)
        vectors = prod(problem.y_shape) * max(problem.stride) / costs.lanes
        rows = problem.n * problem.c * problem.output[0]
        cycles = max(0.8 * vectors * taps + 30 * rows, costs.stream(problem.bytes, problem.bytes))
        return costs.wall_us(cycles / max(1, tasks) + 40, tasks, device.threads)

    def _planes(self, problem: PoolProblem) -> int:
        """Planes (NCHW) or images (NHWC)."""
        return problem.n * (problem.c if problem.layout == "nchw" else 1)

    def _row_size(self, problem: PoolProblem) -> int:
        """Elements of a padded row: the padded input, or what a last window sees, and the widest vector's reads."""
        seen = (problem.output[1] - 1) * problem.stride[1] + problem.reach[1]
        padded = problem.spatial[1] + sum(problem.padding[1])
        return ceil_div(max(seen, padded) + 16 * max(problem.stride[1], 1) * 4, 16) * 16

    def workspace_bytes(self, problem: PoolProblem, config: PlaneConfig, device: Device) -> int:
        size = problem.accumulator_bytes
        workers = max(1, min(device.threads, config.tasks(self._planes(problem))))
        return self._row_size(problem) * size * workers if problem.layout == "nchw" else 0

    def plan(self, problem: PoolProblem, config: PlaneConfig, device: Device) -> Plan:
        planar = problem.layout == "nchw"
        (r, s), by_columns = problem.kernel, (problem.stride[1], problem.dilation[1]) if planar else (0, 0)
        window = {"op": problem.op, "r": r, "s": s, "stride": by_columns[0], "dilation": by_columns[1]}
        library = load("pool", generate, problem, layout=problem.layout, **window)
        (rows, row_edge, row_skip), (columns, col_edge, col_skip) = (_divisors(problem, axis) for axis in (0, 1))
        (top, bottom), height = problem.padding[0], problem.spatial[0]
        beyond = (problem.output[0] - 1) * problem.stride[0] + problem.reach[0] - top > height
        # Read for rows outside alone.
        length = 64 + (problem.c if not planar else problem.spatial[1] if top or bottom or beyond else 0)
        nothing = -np.inf if problem.op == "max" else 0.0
        row_size = self._row_size(problem)
        fields: dict[str, int | np.ndarray] = {
            "tasks": config.tasks(self._planes(problem)),
            "scratch_step": row_size * problem.accumulator_bytes if planar else 0,
            "identity": np.full(length, nothing, DTYPES[problem.dtype]),
            "row_counts": rows, "row_edge": row_edge, "row_skip": row_skip,
            "col_counts": columns, "col_edge": col_edge, "col_skip": col_skip,
            "channels": problem.c, "h": problem.spatial[0], "w_in": problem.spatial[1],
            "p": problem.output[0], "q": problem.output[1],
            "stride_h": problem.stride[0], "stride_w": problem.stride[1],
            "pad_top": problem.padding[0][0], "pad_left": problem.padding[1][0],
            "dilation_h": problem.dilation[0], "dilation_w": problem.dilation[1],
            "planes": self._planes(problem), "block": config.block, "row_blocks": config.row_blocks,
            "row_size": row_size,
        }  # fmt: skip
        return KernelPlan(problem, device, library, FIELDS, fields)


def _divisors(problem: PoolProblem, axis: int) -> tuple[np.ndarray, int, int]:
    """(factors that sums are divided by on one axis, outputs before the first whole window, outputs left out).

    Whole windows have one factor, so no more of them are kept than a vector needs: a table has the size of the edges.
    """
    dtype, count = np.dtype(f"f{problem.accumulator_bytes}"), problem.output[axis]
    if problem.op == "max":
        return np.ones(WHOLE, dtype), 0, 0
    first, end = (0, count) if problem.divisor is not None else problem.whole(axis)
    skip = max(0, end - first - WHOLE)
    kept = np.concatenate([np.arange(min(count, end - skip)), np.arange(end, count)])
    if problem.divisor is None:
        return problem.counts(axis, kept).astype(dtype), first, skip
    return np.full(len(kept), problem.divisor if axis == 0 else 1, dtype), first, skip
