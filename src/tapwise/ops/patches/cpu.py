"""cpu.simd of im2col and col2im: rows of patches as vector copies and vector sums.

im2col: a row of columns is a run of an image row, with zeros where the window sees padding. col2im gathers: a row of
the image is summed from the rows of columns that hold parts of it, in the order of the taps, in a line of its own for
each residue of the column stride; the lines are woven into the image's row. No two threads write the same element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final

from tapwise import settings
from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu import jit
from tapwise.cpu.common import arithmetic, ceil_div
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import COMMON, Fields, KernelPlan
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target, target
from tapwise.ops.conv.cpu.strips import emit_strided_copy
from tapwise.ops.patches.problem import PatchProblem

_AXES: Final = ("0", "1", "2")
FIELDS: Final = (
    *COMMON, *(name + axis for name in ("size", "out", "taps", "stride", "pad", "dilation") for axis in _AXES),
    "planes", "block", "strips", "line", "accumulate",
)  # fmt: skip


@dataclass(frozen=True)
class Config(BaseConfig):
    """A task is `block` planes of taps (im2col) or of the image (col2im), of one of `strips` parts of their rows."""

    block: int
    strips: int


def generate_im2col(target: Target, *, dtype: str, storage: str) -> Kernel:
    """`task`: `block` (plane, tap) pairs, row by row."""
    k = Kernel(target, dtype)
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        taps = a.taps0 * a.taps1 * a.taps2
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            strip, first = number % a.strips, number // a.strips * a.block
            rows = a.out0 * a.out1
            low, high = strip * rows // a.strips, (strip + 1) * rows // a.strips
            with k.loop(first, (first + a.block).min(a.planes * taps)) as pair:
                plane, tap = pair // taps, pair % taps
                t, r, s = tap // (a.taps1 * a.taps2), tap // a.taps2 % a.taps1, tap % a.taps2
                shift = s * a.dilation2 - a.pad2
                # Windows [begin, end) of a row see the image with this tap.
                begin = ((0 - shift).max(0) + (a.stride2 - 1)) // a.stride2
                end = ((a.size2 - shift).max(0) + (a.stride2 - 1)) // a.stride2
                begin, end = begin.min(a.out2), end.min(a.out2).max(begin.min(a.out2))
                with k.loop(low, high) as row:
                    d = row // a.out1 * a.stride0 + t * a.dilation0 - a.pad0
                    h = row % a.out1 * a.stride1 + r * a.dilation1 - a.pad1
                    inside = k.both(k.both(d >= 0, d < a.size0), k.both(h >= 0, h < a.size1))
                    y = a.pointer("y", storage) + (pair * rows + row) * a.out2
                    source = a.pointer("x", storage) + ((plane * a.size0 + d) * a.size1 + h) * a.size2 + shift
                    low_q = k.select(inside, begin, a.out2)
                    count = k.select(inside, end - begin, k.integer(0))
                    _zeros(k, y, low_q)
                    _zeros(k, y + low_q + count, a.out2 - low_q - count)
                    with k.if_else(a.stride2.eq(1)) as (dense, thin):
                        with dense:
                            _copy(k, source + low_q, y + low_q, count)
                        with thin:
                            emit_strided_copy(k, source + low_q * a.stride2, y + low_q, count, a.stride2)
    return k


def _zeros(k: Kernel, y: Ptr, count: Int) -> None:
    with k.if_(count > 0):
        k.rows(count, lambda i, lanes: k.store(y + i, k.constant(0.0, lanes)))


def _copy(k: Kernel, x: Ptr, y: Ptr, count: Int) -> None:
    with k.if_(count > 0):
        k.rows(count, lambda i, lanes: k.store(y + i, k.load(x + i, lanes)))


def _once(k: Kernel, count: Int, body: Callable[[Int, int], None]) -> None:
    """body(i, lanes) over i < count, each element once: vectors, half a vector, the rest one by one."""
    start = count - count % k.lanes
    with k.loop(0, start, k.lanes) as i:
        body(i, k.lanes)
    lanes = k.lanes // 2
    if lanes >= 2:
        following = count - count % lanes
        with k.if_(following > start):
            body(start, lanes)
        start = following
    with k.loop(start, count) as i:
        body(i, 1)


def generate_col2im(target: Target, *, dtype: str, storage: str) -> Kernel:
    """`task`: `block` planes of the image, row by row."""
    k = Kernel(target, dtype)
    with k.function("task", public=True, args="i64", worker=INT) as (args, worker):
        a = Fields(k, args, FIELDS)
        lines = k.pointer(a.scratch + worker * a.scratch_step, k.dtype)
        taps = a.taps0 * a.taps1 * a.taps2
        patches = a.out0 * a.out1 * a.out2
        with k.draws(a.counter, a.tasks, worker, a.workers) as number:
            strip, first = number % a.strips, number // a.strips * a.block
            rows = a.size0 * a.size1
            low, high = strip * rows // a.strips, (strip + 1) * rows // a.strips
            with k.loop(first, (first + a.block).min(a.planes)) as plane, k.loop(low, high) as row:
                y = a.pointer("y", storage) + (plane * rows + row) * a.size2
                x = a.pointer("x", storage) + plane * taps * patches
                k.rows(a.line * a.stride2, lambda i, lanes: k.store(lines + i, k.constant(0.0, lanes)))
                _add_rows(k, a, lines, x, row)
                _write_row(k, a, lines, y)
    return k


def _add_rows(k: Kernel, a: Fields, lines: Ptr, x: Ptr, row: Int) -> None:
    """Add to the lines what the columns hold of one row of the image."""
    d, h = row // a.size1, row % a.size1
    with k.loop(0, a.taps0) as t:
        o = d + a.pad0 - t * a.dilation0
        with k.if_(k.both(o >= 0, (o % a.stride0).eq(0))):
            o = o // a.stride0
            with k.if_(o < a.out0), k.loop(0, a.taps1) as r:
                p = h + a.pad1 - r * a.dilation1
                with k.if_(k.both(p >= 0, (p % a.stride1).eq(0))):
                    p = p // a.stride1
                    with k.if_(p < a.out1), k.loop(0, a.taps2) as s:
                        tap = (t * a.taps1 + r) * a.taps2 + s
                        source = x + ((tap * a.out0 + o) * a.out1 + p) * a.out2
                        # Window q of this tap lies at image column q * stride + shift; a multiple of the stride makes
                        # the division that of a positive number.
                        shift = s * a.dilation2 - a.pad2
                        lifted = shift + a.pad2 * a.stride2
                        residue, place = lifted % a.stride2, lifted // a.stride2 - a.pad2
                        begin = (0 - place).max(0).min(a.out2)
                        width = (a.size2 - residue + (a.stride2 - 1)) // a.stride2
                        count = ((width - place).max(0).min(a.out2) - begin).max(0)
                        line = lines + residue * a.line + (place + begin)
                        there = source + begin

                        def add(i: Int, lanes: int, line: Ptr = line, there: Ptr = there) -> None:
                            k.store(line + i, k.add(k.load(line + i, lanes), k.load(there + i, lanes)))

                        _once(k, count, add)


def _write_row(k: Kernel, a: Fields, lines: Ptr, y: Ptr) -> None:
    with k.if_else(a.stride2.eq(1)) as (dense, woven):
        with dense, k.if_else(a.accumulate.eq(0)) as (write, more):
            with write:
                k.rows(a.size2, lambda i, lanes: k.store(y + i, k.load(lines + i, lanes)))
            with more:
                _once(k, a.size2, lambda i, n: k.store(y + i, k.add(k.load(y + i, n), k.load(lines + i, n))))
        with woven, k.loop(0, a.stride2) as residue:
            line = lines + residue * a.line
            count = (a.size2 - residue + (a.stride2 - 1)) // a.stride2
            with k.loop(0, count) as i:
                there = y + residue + i * a.stride2
                value = k.var(k.load(line + i, 1))
                with k.if_(a.accumulate.eq(1)):
                    value.set(k.add(value.get(), k.load(there, 1)))
                k.store(there, value.get())


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
        costs = Costs(device, 8 if problem.dtype == "f64" else 4)
        units, _ = self._units(problem)
        tasks = ceil_div(units, config.block) * config.strips
        cycles = costs.stream(problem.bytes, problem.bytes) + 20 * problem.flops / max(1, problem.output[-1])
        return costs.wall_us(cycles / max(1, tasks) + 40, tasks, device.threads)

    def workspace_bytes(self, problem: PatchProblem, config: Config, device: Device) -> int:
        return 0

    def plan(self, problem: PatchProblem, config: Config, device: Device) -> Plan:
        library = jit.load(
            "im2col", generate_im2col, target(settings.cpu_target()), dtype=arithmetic(problem), storage=problem.dtype
        )
        return KernelPlan(problem, device, library, FIELDS, self._fields(problem, config))

    def _units(self, problem: PatchProblem) -> tuple[int, int]:
        """Planes that tasks are made of, and the rows of one."""
        p = problem.lifted()
        return p.n * p.c * prod(p.kernel), p.output[0] * p.output[1]

    def _fields(self, problem: PatchProblem, config: Config) -> dict[str, int]:
        p = problem.lifted()
        units, _ = self._units(problem)
        values = {
            "size": p.spatial, "out": p.output, "taps": p.kernel, "stride": p.stride,
            "pad": tuple(before for before, _ in p.padding), "dilation": p.dilation,
        }  # fmt: skip
        fields = {name + axis: sizes[int(axis)] for name, sizes in values.items() for axis in _AXES}
        tasks = ceil_div(units, config.block) * config.strips
        more = {"planes": p.n * p.c, "block": config.block, "strips": config.strips, "accumulate": int(p.accumulate)}
        return fields | more | {"tasks": tasks, "scratch_step": 0}


class Col2imSimd(Im2colSimd):
    """Vector sums that gather, in the order of the taps; any stride, padding and dilation, 1 to 3 spatial axes."""

    operator: ClassVar[str] = "col2im"
    id: ClassVar[str] = "cpu.simd"
    summary: ClassVar[str] = "rows of the image summed in lines, woven"

    def workspace_bytes(self, problem: PatchProblem, config: Config, device: Device) -> int:
        units, _ = self._units(problem)
        workers = max(1, min(device.threads, ceil_div(units, config.block) * config.strips))
        return self._line(problem) * problem.stride[-1] * (8 if problem.dtype == "f64" else 4) * workers

    def plan(self, problem: PatchProblem, config: Config, device: Device) -> Plan:
        library = jit.load(
            "col2im", generate_col2im, target(settings.cpu_target()), dtype=arithmetic(problem), storage=problem.dtype
        )
        line = self._line(problem)
        step = line * problem.stride[-1] * (8 if problem.dtype == "f64" else 4)
        fields = self._fields(problem, config) | {"line": line, "scratch_step": step}
        return KernelPlan(problem, device, library, FIELDS, fields)

    def _line(self, problem: PatchProblem) -> int:
        return ceil_div(ceil_div(problem.spatial[-1], problem.stride[-1]) + 16, 16) * 16

    def _units(self, problem: PatchProblem) -> tuple[int, int]:
        p = problem.lifted()
        return p.n * p.c, p.spatial[0] * p.spatial[1]
