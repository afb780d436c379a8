"""cpu.simd of pooling: rows combined first, columns of the result then.

NCHW: the input rows that an output row sees are combined into a line, with what changes nothing (-infinity, or 0) to
its left and right and for rows outside; the line's columns are combined into the output row, strides of 2 and 4 by
shuffles. NHWC: lanes over channels, all taps of a pixel. Either way straight to y.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.arrays import DTYPES
from tapwise.cpu import jit
from tapwise.cpu.common import arithmetic, ceil_div
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import COMMON, Fields, KernelPlan
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target, target
from tapwise.cpu.vectors import larger
from tapwise.ops.conv.cpu.strips import deinterleave
from tapwise.ops.pool.cpu_serial import divisors
from tapwise.ops.pool.problem import PoolProblem

LARGEST: Final = 16
LARGEST_PIXELS: Final = 49
FIELDS: Final = (
    *COMMON, "identity", "row_counts", "col_counts", "channels", "h", "w_in", "p", "q", "stride_h", "stride_w",
    "pad_top", "pad_left", "dilation_h", "dilation_w", "planes", "block", "strips", "line",
)  # fmt: skip


@dataclass(frozen=True)
class Config(BaseConfig):
    """A task is `block` planes (NCHW) or images (NHWC), of one of `strips` parts of their output rows."""

    block: int
    strips: int


def generate(
    target: Target, *, dtype: str, storage: str, layout: str, op: str, r: int, s: int, stride: int, dilation: int
) -> Kernel:  # fmt: skip
    """The kernel of one instance, `task`. Stride and dilation are those of the columns, and 0 in NHWC."""
    k = Kernel(target, dtype)
    if layout == "nchw":
        _emit_planes(k, storage, op, r, s, stride, dilation)
    else:
        _emit_pixels(k, storage, op, r, s)
    return k


def _combine(k: Kernel, op: str, values: list[Any]) -> Any:
    """The largest, NaN before all, or the sum; pairwise."""

    def two(a: Any, b: Any) -> Any:
        if op == "avg":
            return k.add(a, b)
        return k.b.select(k.b.fcmp_unordered("uno", b, b), b, larger(k, a, b))

    while len(values) > 1:
        paired = [two(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[len(paired) * 2 :]
    return values[0]


def _columns(k: Kernel, line: Ptr, at: Int, lanes: int, s: int, stride: int, dilation: int) -> list[Any]:
    """A vector for each of s taps: element i of tap t is line[(at + i) * stride + t * dilation]."""
    here = line + at * stride
    if stride == 1 or lanes == 1:
        return [k.load(here + t * dilation, lanes) for t in range(s)]
    if stride in (2, 4) and dilation == 1:
        taps: list[Any] = []
        while len(taps) < s:
            taps += deinterleave(k, here + len(taps), stride, min(stride, s - len(taps)), lanes)
        return taps
    return [k.gather([here + (lane * stride + t * dilation) for lane in range(lanes)]) for t in range(s)]


def _emit_planes(k: Kernel, storage: str, op: str, r: int, s: int, stride: int, dilation: int) -> None:
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        line = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        identity = a.pointer("identity", storage)
        row_counts, col_counts = a.pointer("row_counts", k.dtype), a.pointer("col_counts", k.dtype)
        nothing = -np.inf if op == "max" else 0.0
        k.rows(a.line, lambda i, lanes: k.store(line + i, k.constant(nothing, lanes)))
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            strip, first = number % a.strips, number // a.strips * a.block
            p0, p1 = strip * a.p // a.strips, (strip + 1) * a.p // a.strips
            with k.loop(first, (first + a.block).min(a.planes)) as plane, k.loop(p0, p1) as p:
                x = a.pointer("x", storage) + plane * (a.h * a.w_in)
                y = a.pointer("y", storage) + (plane * a.p + p) * a.q
                top = p * a.stride_h - a.pad_top
                rows = []
                for tap in range(r):
                    h = top + a.dilation_h * tap
                    rows.append(k.select(k.both(h >= 0, h < a.h), x + h * a.w_in, identity))

                def down(i: Int, lanes: int, rows: list[Ptr] = rows) -> None:
                    k.store(line + a.pad_left + i, _combine(k, op, [k.load(row + i, lanes) for row in rows]))

                def across(i: Int, lanes: int, y: Ptr = y, p: Int = p) -> None:
                    value = _combine(k, op, _columns(k, line, i, lanes, s, stride, dilation))
                    if op == "avg":
                        count = k.mul(k.broadcast(row_counts + p, lanes), k.load(col_counts + i, lanes))
                        value = k.div(value, count)
                    k.store(y + i, value)

                k.rows(a.w_in, down)
                k.rows(a.q, across)


def _emit_pixels(k: Kernel, storage: str, op: str, r: int, s: int) -> None:
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        identity = a.pointer("identity", storage)
        row_counts, col_counts = a.pointer("row_counts", k.dtype), a.pointer("col_counts", k.dtype)
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            strip, first = number % a.strips, number // a.strips * a.block
            p0, p1 = strip * a.p // a.strips, (strip + 1) * a.p // a.strips
            with k.loop(first, (first + a.block).min(a.planes)) as image, k.loop(p0, p1) as p, k.loop(0, a.q) as q:
                x = a.pointer("x", storage) + image * (a.h * a.w_in) * a.channels
                y = a.pointer("y", storage) + ((image * a.p + p) * a.q + q) * a.channels
                taps = []
                for tap in range(r):
                    h = p * a.stride_h - a.pad_top + a.dilation_h * tap
                    inside = k.both(h >= 0, h < a.h)
                    for column in range(s):
                        v = q * a.stride_w - a.pad_left + a.dilation_w * column
                        both = k.both(inside, k.both(v >= 0, v < a.w_in))
                        taps.append(k.select(both, x + (h * a.w_in + v) * a.channels, identity))

                def body(
                    c: Int, lanes: int, taps: list[Ptr] = taps, y: Ptr = y, p: Int = p, q: Int = q
                ) -> None:  # fmt: skip
                    value = _combine(k, op, [k.load(there + c, lanes) for there in taps])
                    if op == "avg":
                        count = k.mul(k.broadcast(row_counts + p, lanes), k.broadcast(col_counts + q, lanes))
                        value = k.div(value, count)
                    k.store(y + c, value)

                k.rows(a.channels, body)


class PoolSimd(Algorithm[Config]):
    """Windows of up to 16 taps an axis (NHWC: 49 in all), any stride, padding and dilation; f32, f64, f16."""

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
        return None

    def configs(self, problem: PoolProblem, device: Device) -> Sequence[Config]:
        planes = problem.n * (problem.c if problem.layout == "nchw" else 1)
        wanted = 4 * device.threads
        # A few thousand outputs are done before a team has started.
        if prod(problem.y_shape) * prod(problem.kernel) <= 16384:
            return [Config(planes, 1)]
        block = max(1, planes // wanted)
        return [Config(block, max(1, min(problem.output[0], wanted // ceil_div(planes, block))))]

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        """Half a cycle a vector and tap, some a row, or the bytes over the memory's bandwidth."""
        costs = Costs(device, 8 if problem.dtype == "f64" else 4)
        tasks = self._tasks(problem, config)
        taps = sum(problem.kernel) if problem.layout == "nchw" else prod(problem.kernel)
        vectors = prod(problem.y_shape) * max(problem.stride) / costs.lanes
        rows = problem.n * problem.c * problem.output[0]
        cycles = max(0.8 * vectors * taps + 30 * rows, costs.stream(problem.bytes, problem.bytes))
        return costs.wall_us(cycles / max(1, tasks) + 40, tasks, device.threads)

    def _tasks(self, problem: PoolProblem, config: Config) -> int:
        planes = problem.n * (problem.c if problem.layout == "nchw" else 1)
        return ceil_div(planes, config.block) * config.strips

    def _line(self, problem: PoolProblem) -> int:
        """Elements of a line: the padded input, what a last window in ceil mode sees, and the widest vector's reads."""
        seen = (problem.output[1] - 1) * problem.stride[1] + problem.reach[1]
        padded = problem.spatial[1] + sum(problem.padding[1])
        return ceil_div(max(seen, padded) + 16 * max(problem.stride[1], 1) * 4, 16) * 16

    def workspace_bytes(self, problem: PoolProblem, config: Config, device: Device) -> int:
        size = 8 if problem.dtype == "f64" else 4
        workers = max(1, min(device.threads, self._tasks(problem, config)))
        return self._line(problem) * size * workers if problem.layout == "nchw" else 0

    def plan(self, problem: PoolProblem, config: Config, device: Device) -> Plan:
        dtype = arithmetic(problem)
        planar = problem.layout == "nchw"
        library = jit.load(
            "pool", generate, target(settings.cpu_target()), dtype=dtype, storage=problem.dtype, layout=problem.layout,
            op=problem.op, r=problem.kernel[0], s=problem.kernel[1], stride=problem.stride[1] if planar else 0,
            dilation=problem.dilation[1] if planar else 0,
        )  # fmt: skip
        rows, columns = divisors(problem, np.float64 if dtype == "f64" else np.float32)
        length = (problem.spatial[1] if planar else problem.c) + 64
        nothing = -np.inf if problem.op == "max" else 0.0
        line = self._line(problem)
        fields: dict[str, int | np.ndarray] = {
            "tasks": self._tasks(problem, config), "scratch_step": line * (8 if dtype == "f64" else 4) if planar else 0,
            "identity": np.full(length, nothing, DTYPES[problem.dtype]),
            "row_counts": rows, "col_counts": np.concatenate([columns, np.ones(64, columns.dtype)]),
            "channels": problem.c, "h": problem.spatial[0], "w_in": problem.spatial[1],
            "p": problem.output[0], "q": problem.output[1],
            "stride_h": problem.stride[0], "stride_w": problem.stride[1],
            "pad_top": problem.padding[0][0], "pad_left": problem.padding[1][0],
            "dilation_h": problem.dilation[0], "dilation_w": problem.dilation[1],
            "planes": problem.n * (problem.c if planar else 1), "block": config.block, "strips": config.strips,
            "line": line,
        }  # fmt: skip
        return KernelPlan(problem, device, library, FIELDS, fields)
