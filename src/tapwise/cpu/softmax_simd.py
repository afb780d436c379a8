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
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit
from tapwise.cpu.common import arithmetic, ceil_div, rejects_reduction
from tapwise.cpu.cost import Costs
from tapwise.cpu.epilogue import exp_falling
from tapwise.cpu.jit import Library
from tapwise.cpu.plan import COMMON, Fields, KernelPlan
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target, target
from tapwise.cpu.vectors import WAYS, across, columns, fold_row, larger
from tapwise.problem_reduction import SoftmaxProblem

# Elements of a row that one task takes at most, and of a sum that is kept in one piece.
CHUNK: Final = 16384
BLOCK: Final = 512
FIELDS: Final = (*COMMON, "outer", "length", "inner", "chunk", "chunks", "rows", "row_blocks", "width", "widths")


@dataclass(frozen=True)
class Config(BaseConfig):
    """`rows` rows (or `width` columns of one) a task; a row in `chunks` chunks."""

    rows: int
    width: int
    chunks: int


def generate(target: Target, *, dtype: str, storage: str, log: bool, last: bool) -> Kernel:
    """The kernels of one instance: `task`, and `scale` for rows in chunks. `last`: along the last axis."""
    k = Kernel(target, dtype)
    if last:
        _emit_rows(k, storage, log)
        _emit_scale(k, storage, log)
    else:
        _emit_columns(k, storage, log)
    return k


def _row_top(k: Kernel, x: Ptr, count: Int) -> Any:
    """The largest of `count` elements; a NaN among them may be lost, and shows in the sum."""
    return fold_row(k, x, count, -np.inf, lambda value: value, lambda a, b: larger(k, a, b))


def _row_sum(k: Kernel, x: Ptr, count: Int, top: Any, y: Ptr | None) -> Any:
    """The sum of e^(x - top), in blocks; the terms are written to y where there is one."""

    def term(value: Any, at: Int) -> Any:
        e = exp_falling(k, k.sub(value, k.splat(top, k.lanes_of(value))))
        if y is not None:
            k.store(y + at, e)
        return e

    total = k.var(k.constant(0.0, 1))
    with k.loop(0, count, BLOCK * k.lanes) as block:
        size = (count - block).min(BLOCK * k.lanes)
        part = fold_row(
            k,
            x + block,
            size,
            0.0,
            lambda value: value,
            lambda a, b: k.add(a, b),
            lambda v, at: term(v, at + block),
            WAYS,
        )
        total.set(k.add(total.get(), part))
    return total.get()


def _finish_row(
    k: Kernel, x: Ptr, y: Ptr, count: Int, log: bool, again: bool, top: Any, total: Any, scale: Any
) -> None:
    """y from x and the row's largest element and sum: `scale` is what stored terms are multiplied by."""

    def body(i: Int, lanes: int) -> None:
        if log:
            value = k.sub(k.sub(k.load(x + i, lanes), k.splat(top, lanes)), k.splat(total, lanes))
        else:
            term = exp_falling(k, k.sub(k.load(x + i, lanes), k.splat(top, lanes))) if again else k.load(y + i, lanes)
            value = k.mul(term, k.splat(scale, lanes))
        k.store(y + i, value)

    if log or again:
        k.rows(count, body)
        return
    # Elements done twice would be scaled twice.
    vectors = count - count % k.lanes
    with k.loop(0, vectors, k.lanes) as i:
        body(i, k.lanes)
    with k.loop(vectors, count) as i:
        body(i, 1)


def _emit_rows(k: Kernel, storage: str, log: bool) -> None:
    """task: whole rows, or the first two steps of the chunks of rows, whose largest elements and sums go to scratch."""
    again = storage != k.dtype
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        x, y = a.pointer("x", storage), a.pointer("y", storage)
        parts = a.pointer("scratch", k.dtype)
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            with k.if_else(a.chunks.eq(1)) as (whole, cut):
                with whole, k.loop(number * a.rows, ((number + 1) * a.rows).min(a.outer)) as row:
                    here = row * a.length
                    top = _row_top(k, x + here, a.length)
                    total = _row_sum(k, x + here, a.length, top, None if log or again else y + here)
                    one = k.constant(1.0, 1)
                    scale = one if log else k.div(one, total)
                    logarithm = k.intrinsic("llvm.log", total) if log else total
                    _finish_row(k, x + here, y + here, a.length, log, again, top, logarithm, scale)
                with cut:
                    start = number % a.chunks * a.chunk
                    here = number // a.chunks * a.length + start
                    count = (a.length - start).min(a.chunk)
                    top = _row_top(k, x + here, count)
                    # A chunk of nothing but -infinity adds nothing, unless the whole row is so.
                    nothing = k.b.fcmp_ordered("==", top, k.constant(-np.inf, 1))
                    shift = k.select(nothing, k.constant(0.0, 1), top)
                    total = _row_sum(k, x + here, count, shift, None if log or again else y + here)
                    k.store(parts + number * 2, top)
                    k.store(parts + (number * 2 + 1), total)


def _emit_scale(k: Kernel, storage: str, log: bool) -> None:
    """scale: the last step of the chunks of rows."""
    again = storage != k.dtype
    with k.function("scale", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        x, y = a.pointer("x", storage), a.pointer("y", storage)
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            row, chunk = number // a.chunks, number % a.chunks
            parts = a.pointer("scratch", k.dtype) + row * a.chunks * 2
            top = k.var(k.constant(-np.inf, 1))
            with k.loop(0, a.chunks) as c:
                top.set(larger(k, top.get(), k.load(parts + c * 2, 1)))
            total = k.var(k.constant(0.0, 1))
            with k.loop(0, a.chunks) as c:
                share = _share(k, k.load(parts + c * 2, 1), top.get())
                total.set(k.fma(k.load(parts + (c * 2 + 1), 1), share, total.get()))
            start = chunk * a.chunk
            here = row * a.length + start
            count = (a.length - start).min(a.chunk)
            one = k.constant(1.0, 1)
            if log:
                scale, last = one, k.intrinsic("llvm.log", total.get())
            else:
                share = one if again else _share(k, k.load(parts + chunk * 2, 1), top.get())
                scale, last = k.div(share, total.get()), one
            _finish_row(k, x + here, y + here, count, log, again, top.get(), last, scale)


def _share(k: Kernel, part: Any, top: Any) -> Any:
    """What terms relative to a chunk's largest element become relative to the row's."""
    return exp_falling(k, k.sub(part, top))


def _emit_columns(k: Kernel, storage: str, log: bool) -> None:
    """task: `width` columns of one outer index, a vector of them through all three steps at a time."""
    again = storage != k.dtype
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            first = number % a.widths * a.width
            at = number // a.widths * a.length * a.inner + first
            x, y = a.pointer("x", storage) + at, a.pointer("y", storage) + at

            def body(b: Int, lanes: list[int], x: Ptr = x, y: Ptr = y) -> None:
                spots = across(k, b, lanes)
                tops = [k.var(k.constant(-np.inf, n)) for _, n in spots]
                sums = [k.var(k.constant(0.0, n)) for _, n in spots]
                with k.loop(0, a.length) as r:
                    for top, (spot, n) in zip(tops, spots, strict=True):
                        top.set(larger(k, top.get(), k.load(x + r * a.inner + spot, n)))
                with k.loop(0, a.length, BLOCK) as block:
                    parts = [k.var(k.constant(0.0, n)) for _, n in spots]
                    with k.loop(block, (block + BLOCK).min(a.length)) as r:
                        for part, top, (spot, n) in zip(parts, tops, spots, strict=True):
                            e = exp_falling(k, k.sub(k.load(x + r * a.inner + spot, n), top.get()))
                            if not log and not again:
                                k.store(y + r * a.inner + spot, e)
                            part.set(k.add(part.get(), e))
                    for total, part in zip(sums, parts, strict=True):
                        total.set(k.add(total.get(), part.get()))
                ones = [k.constant(1.0, n) for _, n in spots]
                ends = [
                    k.intrinsic("llvm.log", total.get()) if log else k.div(one, total.get())
                    for one, total in zip(ones, sums, strict=True)
                ]
                with k.loop(0, a.length) as r:
                    for end, top, (spot, n) in zip(ends, tops, spots, strict=True):
                        here = r * a.inner + spot
                        if log:
                            value = k.sub(k.sub(k.load(x + here, n), top.get()), end)
                        elif again:
                            value = k.mul(exp_falling(k, k.sub(k.load(x + here, n), top.get())), end)
                        else:
                            value = k.mul(k.load(y + here, n), end)
                        k.store(y + here, value)

            columns(k, (a.inner - first).min(a.width), body)


class SoftmaxPlan(KernelPlan):
    """Launches `task`, and `scale` behind it where rows are cut."""

    def __init__(self, problem: SoftmaxProblem, device: Device, library: Library, fields: dict[str, int]) -> None:
        super().__init__(problem, device, library, FIELDS, fields)
        self._chunks, self._outer = fields["chunks"], fields["outer"]
        if self._chunks > 1:
            self.workspace_bytes = 2 * 8 * self._chunks * self._outer
            self._scale, self._scale_serial = library.address("scale"), library.function("scale")

    def run(
        self, x: Any, packed: Any, y: Any, workspace: Any = None, *, bias: Any = None, residual: Any = None,
        stream: Any = None,
    ) -> None:  # fmt: skip
        self.launch(self._task, self._serial, x, y, workspace)
        if self._chunks > 1:
            self.launch(self._scale, self._scale_serial, x, y, workspace)


class SoftmaxSimd(Algorithm[Config]):
    """Softmax and its logarithm along any axis of a dense array; float32, float64, float16 (in float32)."""

    operator: ClassVar[str] = "softmax"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "shifted rows, vector exponential, rows in chunks where they are few"

    def rejects(self, problem: SoftmaxProblem, device: Device) -> str | None:
        return rejects_reduction(problem, device)

    def configs(self, problem: SoftmaxProblem, device: Device) -> Sequence[Config]:
        folded = problem.folded
        assert folded is not None
        outer, length, inner = folded
        if inner == 1:
            # Chunks do not depend on the number of threads: the same input gives the same bits.
            chunks = 4 * ceil_div(length, 4 * CHUNK) if length > CHUNK else 1
            rows = max(1, min(CHUNK // length, ceil_div(outer, 4 * device.threads)))
            # One thread is done with so few before a team has started.
            rows = outer if outer * length <= 4096 else rows
            return [Config(rows, 1, chunks)]
        lanes = device.vector_bytes // (8 if problem.dtype == "f64" else 4)
        wanted = ceil_div(ceil_div(8 * device.threads, outer), 1)
        width = max(4 * lanes, ceil_div(ceil_div(inner, wanted), 4 * lanes) * 4 * lanes)
        return [Config(1, min(width, inner), 1)]

    def predict_us(self, problem: SoftmaxProblem, config: Config, device: Device) -> float:
        """About 2.2 cycles an element of float32 for the exponential and the three passes, over the threads."""
        costs = Costs(device, 8 if problem.dtype == "f64" else 4)
        folded = problem.folded
        assert folded is not None
        outer, length, inner = folded
        tasks = _tasks(outer, inner, config)
        cycles = 2.2 * outer * length * inner * (8 / costs.lanes) / max(1, tasks) + 40
        return costs.wall_us(cycles, tasks, device.threads) + (6.0 if config.chunks > 1 else 0.0)

    def workspace_bytes(self, problem: SoftmaxProblem, config: Config, device: Device) -> int:
        folded = problem.folded
        assert folded is not None
        return 2 * 8 * config.chunks * folded[0] if config.chunks > 1 else 0

    def plan(self, problem: SoftmaxProblem, config: Config, device: Device) -> Plan:
        folded = problem.folded
        assert folded is not None
        outer, length, inner = folded
        library = jit.load(
            "softmax", generate, target(settings.cpu_target()), dtype=arithmetic(problem), storage=problem.dtype,
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
