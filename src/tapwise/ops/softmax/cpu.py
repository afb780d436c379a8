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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Algorithm, Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit
from tapwise.cpu.common import arithmetic, ceil_div
from tapwise.cpu.cost import Costs
from tapwise.cpu.epilogue import LIFT, exp_lifted
from tapwise.cpu.jit import Library
from tapwise.cpu.plan import COMMON, Fields, KernelPlan
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target, Var, target
from tapwise.cpu.vectors import WAYS, Fold, across, columns, fold_row, fold_rows, larger
from tapwise.ops.reduce.problem import SoftmaxProblem, rejects_apart

# Elements of a row that one task takes at most, and of a sum that is kept in one piece.
CHUNK: Final = 16384
# Rows up to this, which fit a core's own cache, are not cut where there are ENOUGH of them to share out.
WHOLE: Final = 65536
ENOUGH: Final = 16
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


def _row_sum(k: Kernel, x: Ptr, count: Int, top: Any, y: Ptr | None, after: Ptr | None = None) -> tuple[Any, Any]:
    """(the sum of e^(x - top), in blocks; the largest element of the row `after`, which is looked through besides).

    The terms are written to y where there is one. The exponentials leave the loads and comparisons of another row
    room to hide in.
    """
    total, largest = k.var(k.constant(0.0, 1)), k.var(k.constant(-np.inf, 1))
    with k.loop(0, count, BLOCK * k.lanes) as block:

        def term(at: Int, lanes: int) -> Any:
            at = at + block
            e = exp_lifted(k, k.sub(k.load(x + at, lanes), k.splat(top, lanes)))
            if y is not None:
                k.store(y + at, e)
            return e

        folds = [Fold(0.0, term, lambda a, b: k.add(a, b))]
        if after is not None:
            there = after + block
            folds.append(Fold(-np.inf, lambda at, lanes: k.load(there + at, lanes), lambda a, b: larger(k, a, b)))
        values = fold_rows(k, (count - block).min(BLOCK * k.lanes), folds, WAYS, WAYS)
        total.set(k.add(total.get(), values[0]))
        if after is not None:
            largest.set(larger(k, largest.get(), values[1]))
    return total.get(), largest.get()


def _finished(
    k: Kernel, x: Ptr, terms: Ptr, log: bool, again: bool, top: Any, total: Any, scale: Any
) -> Callable[[Int, int], Any]:
    """y at (element, lanes) from x or its terms, and the row's largest element and sum.

    `scale` is what terms are multiplied by.
    """

    def body(i: Int, lanes: int) -> Any:
        if log:
            return k.sub(k.sub(k.load(x + i, lanes), k.splat(top, lanes)), k.splat(total, lanes))
        term = exp_lifted(k, k.sub(k.load(x + i, lanes), k.splat(top, lanes))) if again else k.load(terms + i, lanes)
        return k.mul(term, k.splat(scale, lanes))

    return body


def _write_row(k: Kernel, y: Ptr, count: Int, body: Callable[[Int, int], Any]) -> None:
    """y of a row from body(element, lanes), which may read y there."""
    lanes = k.lanes
    with k.if_else(count >= lanes) as (long, short):
        with long:
            # The last vector ends with the row: it is computed before the elements that it shares are replaced.
            last = body(count - lanes, lanes)
            many = count - count % (WAYS * lanes)
            with k.loop(0, many, WAYS * lanes) as i:
                for spot, n in across(k, i, [lanes] * WAYS):
                    k.store(y + spot, body(spot, n))
            with k.loop(many, count - lanes, lanes) as i:
                k.store(y + i, body(i, lanes))
            k.store(y + (count - lanes), last)
        with short, k.loop(0, count) as i:
            k.store(y + i, body(i, 1))


def _emit_rows(k: Kernel, storage: str, log: bool) -> None:
    """task: whole rows, or the first two steps of the chunks of rows, whose largest elements and sums go to scratch."""
    again = storage != k.dtype
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        x, y = a.pointer("x", storage), a.pointer("y", storage)
        parts = a.pointer("scratch", k.dtype)
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            with k.if_else(a.chunks.eq(1)) as (whole, cut):
                with whole:
                    first, end = number * a.rows, ((number + 1) * a.rows).min(a.outer)
                    next_top = k.var(_row_top(k, x + first * a.length, a.length))
                    with k.loop(first, end) as row:
                        _emit_row(k, x, y, row, end, a.length, log, again, next_top)
                with cut:
                    start = number % a.chunks * a.chunk
                    here = number // a.chunks * a.length + start
                    count = (a.length - start).min(a.chunk)
                    top = _row_top(k, x + here, count)
                    # A chunk of nothing but -infinity adds nothing, unless the whole row is so.
                    nothing = k.b.fcmp_ordered("==", top, k.constant(-np.inf, 1))
                    shift = k.select(nothing, k.constant(0.0, 1), top)
                    total, _ = _row_sum(k, x + here, count, shift, None if log or again else y + here)
                    k.store(parts + number * 2, top)
                    k.store(parts + (number * 2 + 1), total)


def _emit_row(k: Kernel, x: Ptr, y: Ptr, row: Int, end: Int, length: Int, log: bool, again: bool, top: Var) -> None:
    """A row through all steps. `top` holds its largest element, and then that of the next row before `end`."""
    here, after = row * length, (row + 1).min(end - 1) * length
    largest = top.get()
    total, following = _row_sum(k, x + here, length, largest, None if log or again else y + here, x + after)
    top.set(following)
    one = k.constant(1.0, 1)
    scale = one if log else k.div(one, total)
    logarithm = _logarithm(k, total) if log else total
    _write_row(k, y + here, length, _finished(k, x + here, y + here, log, again, largest, logarithm, scale))


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
                scale, last = one, _logarithm(k, total.get())
            else:
                share = one if again else _share(k, k.load(parts + chunk * 2, 1), top.get())
                scale, last = k.div(share, total.get()), one
            _write_row(k, y + here, count, _finished(k, x + here, y + here, log, again, top.get(), last, scale))


def _share(k: Kernel, part: Any, top: Any) -> Any:
    """What terms relative to a chunk's largest element become relative to the row's."""
    return _let_down(k, exp_lifted(k, k.sub(part, top)))


def _let_down(k: Kernel, value: Any) -> Any:
    """What a lifted exponential, or a sum of such, stands for."""
    return k.mul(value, k.constant(2.0**-LIFT, k.lanes_of(value)))


def _logarithm(k: Kernel, total: Any) -> Any:
    return k.intrinsic("llvm.log", _let_down(k, total))


def _emit_columns(k: Kernel, storage: str, log: bool) -> None:
    """task: `width` columns of one outer index, a vector of them through all three steps at a time."""
    again = storage != k.dtype
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            first = number % a.widths * a.width
            at = number // a.widths * a.length * a.inner + first
            x, y = a.pointer("x", storage) + at, a.pointer("y", storage) + at

            def body(b: Int, lanes: list[int]) -> None:
                # As one long vector they take each step of the exponential together.
                _column_steps(k, x, y, b, sum(lanes), a.length, a.inner, log, again)

            columns(k, (a.inner - first).min(a.width), body)


def _column_steps(
    k: Kernel, x: Ptr, y: Ptr, first: Int, lanes: int, length: Int, inner: Int, log: bool, again: bool
) -> None:
    """`lanes` columns from `first` on, side by side through all three steps."""
    top = k.var(k.constant(-np.inf, lanes))
    with k.loop(0, length) as r:
        k.prefetch_rows([x, y], r * inner + first + lanes, lanes)
        top.set(larger(k, top.get(), k.load(x + (r * inner + first), lanes)))

    def term(r: Int) -> Any:
        here = r * inner + first
        e = exp_lifted(k, k.sub(k.load(x + here, lanes), top.get()))
        if not log and not again:
            k.store(y + here, e)
        return e

    total = _block_sum(k, lanes, length, term)
    end = _logarithm(k, total) if log else k.div(k.constant(1.0, lanes), total)
    with k.loop(0, length) as r:
        here = r * inner + first
        if log:
            value = k.sub(k.sub(k.load(x + here, lanes), top.get()), end)
        elif again:
            value = k.mul(exp_lifted(k, k.sub(k.load(x + here, lanes), top.get())), end)
        else:
            value = k.mul(k.load(y + here, lanes), end)
        k.store(y + here, value)


def _block_sum(k: Kernel, lanes: int, length: Int, term: Callable[[Int], Any]) -> Any:
    """Sum of the vectors term(row), in blocks."""
    total = k.var(k.constant(0.0, lanes))
    with k.loop(0, length, BLOCK) as block:
        part = k.var(k.constant(0.0, lanes))
        with k.loop(block, (block + BLOCK).min(length)) as r:
            part.set(k.add(part.get(), term(r)))
        total.set(k.add(total.get(), part.get()))
    return total.get()


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
        folded = problem.folded
        assert folded is not None
        outer, length, inner = folded
        if inner == 1:
            # Chunks do not depend on the number of threads: the same input gives the same bits.
            whole = length <= CHUNK or (length <= WHOLE and outer >= ENOUGH)
            chunks = 1 if whole else 4 * ceil_div(length, 4 * CHUNK)
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
        if config.chunks > 1:
            return 2 * 8 * config.chunks * folded[0]
        return 0

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
