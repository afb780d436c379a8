"""cpu.simd of reduce: vectors of partial results, rows in chunks where they are few or long.

Along the last axis a row is folded into four vectors, these into one, its lanes into a value. Along other axes lanes
run over what lies inside, and columns are folded row by row in blocks. Either way elements beyond a chunk go to a
partial result of their own, which `join` folds in the order of the chunks: so errors do not grow with the length, and
the same input gives the same bits whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Algorithm, Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit
from tapwise.cpu.common import arithmetic, ceil_div
from tapwise.cpu.cost import Costs
from tapwise.cpu.jit import Library
from tapwise.cpu.plan import COMMON, Fields, KernelPlan
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target, Var, target
from tapwise.cpu.vectors import ROW_WAYS, Fold, across, columns, fold_lanes, fold_row, fold_rows, larger, smaller
from tapwise.ops.reduce import logsumexp
from tapwise.ops.reduce.positions import Positions
from tapwise.ops.reduce.problem import POSITIONS, ReduceProblem, rejects_apart

# Elements of a row and of a column in one partial result, and of a row in sums that are kept in one piece.
ROW_CHUNK: Final = 32768
ROW_BLOCK: Final = 4096
COLUMN_CHUNK: Final = 512
# Elements that one thread is done with before a team has started.
ALONE: Final = 16384
FIELDS: Final = (*COMMON, "outer", "length", "inner", "chunk", "chunks", "rows", "width", "widths")


@dataclass(frozen=True)
class Config(BaseConfig):
    """`rows` rows (or `width` columns) a task; a row or column in `chunks` partial results."""

    rows: int
    width: int
    chunks: int


class _Op:
    """What one op does to elements and partial results."""

    def __init__(self, k: Kernel, name: str) -> None:
        self.k, self.name = k, name
        self.identity = {"prod": 1.0, "max": -np.inf, "min": np.inf}.get(name, 0.0)

    def prepare(self, value: Any) -> Any:
        if self.name == "norm1":
            return self.k.intrinsic("llvm.fabs", value)
        return self.k.mul(value, value) if self.name in ("norm2", "sumsquare") else value

    def combine(self, a: Any, b: Any) -> Any:
        k = self.k
        if self.name == "prod":
            return k.mul(a, b)
        if self.name in ("max", "min"):
            # The choice loses a NaN in b, and keeps one in a: so a NaN in b is put back.
            return k.b.select(k.b.fcmp_unordered("uno", b, b), b, self.choose(a, b))
        return k.add(a, b)

    @property
    def chooses(self) -> bool:
        """Whether the value is one of the elements."""
        return self.name in ("max", "min")

    def choose(self, a: Any, b: Any) -> Any:
        """combine for numbers that are no NaN: one instruction where that takes three."""
        return larger(self.k, a, b) if self.name == "max" else smaller(self.k, a, b)

    def trace(self, trace: Any, value: Any) -> Any:
        """0 as long as every value was finite, then NaN."""
        return self.k.fma(value, self.k.constant(0.0, self.k.lanes_of(value)), trace)

    def doubtful(self, traces: Sequence[Any]) -> Any:
        """Whether a trace saw NaN or infinity."""
        k = self.k
        total = traces[0]
        for trace in traces[1:]:
            total = k.add(total, trace)
        total = fold_lanes(k, total, k.add)
        return k.b.fcmp_unordered("uno", total, total)

    def finish(self, value: Any, length: Int) -> Any:
        k = self.k
        if self.name == "mean":
            lanes = k.lanes_of(value)
            count = k.b.sitofp(length.ir, k.scalar)
            return k.div(value, k.splat(count, lanes))
        return k.intrinsic("llvm.sqrt", value) if self.name == "norm2" else value


def generate(target: Target, *, dtype: str, storage: str, op: str, last: bool) -> Kernel:
    """The kernels of one instance: `task`, and `join` for partial results. `last`: along the last axis."""
    k = Kernel(target, dtype)
    if op in POSITIONS:
        positions = Positions(k, FIELDS, storage, op == "argmin")
        (positions.emit_rows if last else positions.emit_columns)()
        positions.emit_join()
    elif op == "logsumexp":
        (logsumexp.emit_rows if last else logsumexp.emit_columns)(k, FIELDS, storage)
        logsumexp.emit_join(k, FIELDS, storage)
    else:
        what = _Op(k, op)
        (_emit_rows if last else _emit_columns)(k, storage, what)
        _emit_join(k, storage, what)
    return k


def _emit_rows(k: Kernel, storage: str, op: _Op) -> None:
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        x, y, parts = a.pointer("x", storage), a.pointer("y", storage), a.pointer("scratch", k.dtype)

        def fold(here: Ptr, count: Int) -> Any:
            if op.chooses:
                return _chosen(k, here, count, op)
            total = k.var(k.constant(op.identity, 1))
            with k.loop(0, count, ROW_BLOCK) as block:
                size = (count - block).min(ROW_BLOCK)
                part = fold_row(k, here + block, size, op.identity, op.prepare, op.combine)
                total.set(op.combine(total.get(), part))
            return total.get()

        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            with k.if_else(a.chunks.eq(1)) as (whole, cut):
                with whole, k.loop(number * a.rows, ((number + 1) * a.rows).min(a.outer)) as row:
                    k.store(y + row, op.finish(fold(x + row * a.length, a.length), a.length))
                with cut:
                    start = number % a.chunks * a.chunk
                    here = x + number // a.chunks * a.length + start
                    k.store(parts + number, fold(here, (a.length - start).min(a.chunk)))


def _chosen(k: Kernel, x: Ptr, count: Int, op: _Op) -> Any:
    """The largest or smallest of a row: as if there were no NaN, and again where there is one, or an infinity."""

    def element(at: Int, lanes: int) -> Any:
        return k.load(x + at, lanes)

    best, trace = fold_rows(
        k, count, [Fold(op.identity, element, op.choose), Fold(0.0, element, op.trace)], ROW_WAYS // 2
    )
    result = k.var(best)
    with k.if_(op.doubtful([trace])):
        result.set(fold_row(k, x, count, op.identity, op.prepare, op.combine))
    return result.get()


def _emit_columns(k: Kernel, storage: str, op: _Op) -> None:
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            first = number % a.widths * a.width
            chunk, outer = number // a.widths % a.chunks, number // a.widths // a.chunks
            start = chunk * a.chunk
            count = (a.length - start).min(a.chunk)
            x = a.pointer("x", storage) + ((outer * a.length + start) * a.inner + first)
            y = a.pointer("y", storage) + (outer * a.inner + first)
            parts = a.pointer("scratch", k.dtype) + ((outer * a.chunks + chunk) * a.inner + first)

            def body(b: Int, lanes: list[int]) -> None:
                spots = across(k, b, lanes)
                ahead = b + len(spots) * k.lanes
                sums = [k.var(k.constant(op.identity, n)) for _, n in spots]

                def fold(combine: Callable[[Any, Any], Any], traces: Sequence[Var]) -> None:
                    for total in sums:
                        total.set(k.constant(op.identity, k.lanes_of(total.get())))
                    with k.loop(0, count) as r:
                        k.prefetch_rows([x], r * a.inner + ahead, len(spots) * k.lanes)
                        for total, trace, (spot, n) in zip_longest(sums, traces, spots):
                            value = k.load(x + r * a.inner + spot, n)
                            total.set(combine(total.get(), op.prepare(value)))
                            if trace is not None:
                                trace.set(op.trace(trace.get(), value))

                if op.chooses:
                    traces = [k.var(k.constant(0.0, n)) for _, n in spots]
                    fold(op.choose, traces)
                    with k.if_(op.doubtful([trace.get() for trace in traces])):
                        fold(op.combine, ())
                else:
                    fold(op.combine, ())
                with k.if_else(a.chunks.eq(1)) as (whole, cut):
                    with whole:
                        for total, (spot, _) in zip(sums, spots, strict=True):
                            k.store(y + spot, op.finish(total.get(), a.length))
                    with cut:
                        for total, (spot, _) in zip(sums, spots, strict=True):
                            k.store(parts + spot, total.get())

            columns(k, (a.inner - first).min(a.width), body)


def _emit_join(k: Kernel, storage: str, op: _Op) -> None:
    """join: partial results (outer, chunks, inner) into y, by the first worker alone: there are few."""
    with k.function("join", public=True, args="i64", worker=INT) as (args, _):
        a = Fields(k, args, FIELDS)
        y, parts = a.pointer("y", storage), a.pointer("scratch", k.dtype)
        with k.loop(0, a.outer) as outer, k.loop(0, a.inner) as b:
            here = parts + (outer * a.chunks * a.inner + b)
            total = k.var(k.constant(op.identity, 1))
            # Blocks here too: a row may have many chunks.
            with k.loop(0, a.chunks, COLUMN_CHUNK) as block:
                part = k.var(k.constant(op.identity, 1))
                with k.loop(block, (block + COLUMN_CHUNK).min(a.chunks)) as c:
                    part.set(op.combine(part.get(), k.load(here + c * a.inner, 1)))
                total.set(op.combine(total.get(), part.get()))
            k.store(y + outer * a.inner + b, op.finish(total.get(), a.length))


class ReducePlan(KernelPlan):
    """Launches `task`, and `join` behind it where there are partial results."""

    def __init__(self, problem: ReduceProblem, device: Device, library: Library, fields: dict[str, int]) -> None:
        super().__init__(problem, device, library, FIELDS, fields)
        self._chunks = fields["chunks"]
        if self._chunks > 1:
            self.workspace_bytes = 16 * self._chunks * fields["outer"] * fields["inner"]
            self._join = library.function("join")

    def run(self, buffers: Buffers) -> None:
        self.launch(self._task, self._serial, buffers)
        if self._chunks > 1:
            self.launch_one(self._join, buffers)


class ReduceSimd(Algorithm[Config]):
    """Every op along neighbouring axes; float32, float64, float16 (in float32)."""

    operator: ClassVar[str] = "reduce"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "vectors of partial results, in chunks"

    def rejects(self, problem: ReduceProblem, device: Device) -> str | None:
        return rejects_apart(problem)

    def configs(self, problem: ReduceProblem, device: Device) -> Sequence[Config]:
        """One: chunks follow from the shape alone, so that the bits do."""
        outer, length, inner = _folded(problem)
        if inner == 1:
            chunks = 2 * ceil_div(length, 2 * ROW_CHUNK) if length > ROW_CHUNK else 1
            rows = max(1, min(ROW_CHUNK // length, ceil_div(outer, 4 * device.threads)))
            rows = outer if outer * length <= ALONE else rows
            return [Config(rows, 1, chunks)]
        lanes = device.vector_bytes // (8 if problem.dtype == "f64" else 4)
        chunks = 1 if problem.op in POSITIONS else ceil_div(length, COLUMN_CHUNK)
        wanted = ceil_div(4 * device.threads, outer * chunks)
        width = ceil_div(ceil_div(inner, wanted), 4 * lanes) * 4 * lanes
        width = inner if outer * length * inner <= ALONE else width
        return [Config(1, min(width, inner), chunks)]

    def predict_us(self, problem: ReduceProblem, config: Config, device: Device) -> float:
        """An eighth of a cycle an element of float32 from cache, or the bytes over the memory's bandwidth."""
        costs = Costs(device, 8 if problem.dtype == "f64" else 4)
        tasks = _tasks(problem, config)
        cycles = max(problem.flops / costs.lanes, costs.stream(problem.bytes, problem.bytes))
        return costs.wall_us(cycles / max(1, tasks) + 40, tasks, device.threads) + (2.0 if config.chunks > 1 else 0.0)

    def workspace_bytes(self, problem: ReduceProblem, config: Config, device: Device) -> int:
        outer, _, inner = _folded(problem)
        return 16 * config.chunks * outer * inner if config.chunks > 1 else 0

    def plan(self, problem: ReduceProblem, config: Config, device: Device) -> Plan:
        outer, length, inner = _folded(problem)
        library = jit.load(
            "reduce", generate, target(settings.cpu_target()), dtype=arithmetic(problem), storage=problem.dtype,
            op=problem.op, last=inner == 1,
        )  # fmt: skip
        chunk = COLUMN_CHUNK if inner > 1 and config.chunks > 1 else ceil_div(length, config.chunks)
        fields = {
            "tasks": _tasks(problem, config), "outer": outer, "length": length, "inner": inner, "chunk": chunk,
            "chunks": config.chunks, "rows": config.rows, "width": config.width,
            "widths": ceil_div(inner, config.width),
        }  # fmt: skip
        return ReducePlan(problem, device, library, fields)


def _folded(problem: ReduceProblem) -> tuple[int, int, int]:
    folded = problem.folded
    assert folded is not None
    return folded


def _tasks(problem: ReduceProblem, config: Config) -> int:
    outer, _, inner = _folded(problem)
    if inner > 1:
        return outer * config.chunks * ceil_div(inner, config.width)
    return outer * config.chunks if config.chunks > 1 else ceil_div(outer, config.rows)
