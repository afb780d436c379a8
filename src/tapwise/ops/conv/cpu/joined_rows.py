"""Rows of dx from those of the phases that meet them (ops/conv/phases.py): columns of a stride, interleaved.

Pixels of channels last whose phases lie side by side are put into rows of dx by copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np

from tapwise.algorithm import Buffers, Device
from tapwise.cpu.common import load
from tapwise.cpu.copies import emit_copy_rows, interleave
from tapwise.cpu.fields import COMMON, entry
from tapwise.cpu.jit import Library
from tapwise.cpu.plan import KernelPlan
from tapwise.cpu.simd import Int, Kernel, Ptr, Target
from tapwise.integers import ceil_div
from tapwise.ops.conv.problem import ConvProblem

FIELDS: Final = (*COMMON, "planes", "block", "rows", "width", "slot", "plane", "row_step", "row_phases")
PLANS_KEPT: Final = 256
# Strides whose vectors are interleaved; others go one by one.
INTERLEAVED: Final = (2, 4)
# Elements that one thread joins before a team has begun.
FEW: Final = 1 << 14


def generate(target: Target, *, dtype: str, storage: str, present: tuple[bool, ...], together: bool) -> Kernel:
    """`task`: planes of y, rows of it `row_step` apart, of arrays (planes, rows, columns), dense, in x; zeros for those
    that are not `present`.

    `together`: a plane's `row_phases` times `ways` arrays (rows, columns) follow each other; so do rows of y of phases.
    """
    k, ways = Kernel(target, dtype), len(present)
    with entry(k, FIELDS) as (a, worker), a.draws(worker) as number:
        first, count = number * a.block, a.width // ways
        columns = [(a.width + (ways - 1 - way)) // ways for way in range(ways)]
        with k.loop(first, (first + a.block).min(a.planes)) as plane, k.loop(0, a.row_phases) as phase:
            with k.loop(0, a.rows) as row:
                out = a.pointer("y", storage) + (plane * a.plane + phase * a.width + row * a.row_step)
                if together:
                    rows = [(((plane * a.row_phases + phase) * ways + way) * a.rows + row) for way in range(ways)]
                    parts = [a.pointer("x", storage) + one * count for one in rows]
                else:
                    here = plane * a.rows + row
                    parts = [a.pointer("x", storage) + (a.slot * way + here * columns[way]) for way in range(ways)]
                there = [part if real else None for part, real in zip(parts, present, strict=True)]
                _interleave_row(k, there, out, count, a.width)
    return k


def _interleave_row(k: Kernel, parts: Sequence[Ptr | None], out: Ptr, count: Int, width: Int) -> None:
    """out[i * ways + way] = parts[way][i], up to `width` elements; all parts have at least `count`, None has zeros."""
    ways = len(parts)

    def load(part: Ptr | None, i: Int, lanes: int) -> Any:
        return k.constant(0.0, lanes) if part is None else k.load(part + i, lanes)

    start = count - count % k.lanes if ways in INTERLEAVED else k.integer(0)
    if ways in INTERLEAVED:
        with k.loop(0, start, k.lanes) as i:
            for at, vector in enumerate(interleave(k, [load(part, i, k.lanes) for part in parts])):
                k.store(out + (i * ways + at * k.lanes), vector, exact=True)
    with k.loop(start, count) as i:
        for way, part in enumerate(parts):
            k.store(out + (i * ways + way), load(part, i, 1), exact=True)
    for way, part in enumerate(parts[:-1]):
        with k.if_(count * ways + way < width):
            k.store(out + (count * ways + way), load(part, count, 1), exact=True)


def generate_pixels(target: Target, *, dtype: str, storage: str) -> Kernel:
    """`task`: rows of y (planes, row_phases, slot, width) from x (planes, slot, row_phases, width), all dense."""
    k = Kernel(target, dtype)
    with entry(k, FIELDS) as (a, worker), a.draws(worker) as number:
        first = number * a.block
        with k.loop(first, (first + a.block).min(a.planes)) as plane, k.loop(0, a.row_phases) as phase:
            line = a.row_phases * a.width
            there = a.pointer("x", storage) + (plane * a.slot * line + phase * a.width)
            here = a.pointer("y", storage) + (plane * line + phase * a.width) * a.slot
            emit_copy_rows(k, there, line, here, a.width, a.slot, a.width)
    return k


def join_rows(
    problem: ConvProblem, first: int, present: tuple[bool, ...], slot: int, parts: np.ndarray, dx: np.ndarray,
    device: Device,
) -> None:  # fmt: skip
    """dx (NCHW, dense), every stride-th row from `first` on, of its phases' results, `slot` elements apart.

    Where a phase is not `present`, dx is zero.
    """
    _rows_plan(problem, first, present, slot, device).run(Buffers(parts, None, dx[:, :, first:], None, None))


@lru_cache(PLANS_KEPT)
def _rows_plan(problem: ConvProblem, first: int, present: tuple[bool, ...], slot: int, device: Device) -> KernelPlan:
    (height, width), (down, _) = problem.spatial, problem.stride
    fields = {
        "planes": problem.n * problem.c, "rows": ceil_div(height - first, down), "width": width, "slot": slot,
        "plane": height * width, "row_step": down * width, "row_phases": 1,
    }  # fmt: skip
    return _plan(problem, device, load("joined_rows", generate, problem, present=present, together=False), fields)


@lru_cache(PLANS_KEPT)
def shuffle_plan(problem: ConvProblem, device: Device) -> KernelPlan:
    """Of a dx that is made of all phases of its pixels: x (n, c, phases, p, q) or, channels last, (n, p, q, phases, c).

    Phases go row by row.
    """
    (height, width), (down, across), (rows, columns) = problem.spatial, problem.stride, problem.output
    if problem.layout == "nhwc":
        fields = {"planes": problem.n * rows, "slot": columns, "width": across * problem.c, "row_phases": down}
        return _plan(problem, device, load("joined_pixels", generate_pixels, problem), fields)
    fields = {
        "planes": problem.n * problem.c, "rows": rows, "width": width, "plane": height * width,
        "row_step": down * width, "row_phases": down,
    }  # fmt: skip
    return _plan(
        problem, device, load("joined_rows", generate, problem, present=(True,) * across, together=True), fields
    )


def _plan(problem: ConvProblem, device: Device, library: Library, fields: dict[str, int]) -> KernelPlan:
    planes = fields["planes"]
    tasks = 1 if prod(problem.x_shape) < FEW else min(planes, 4 * device.threads)
    block = ceil_div(planes, tasks)
    return KernelPlan(
        problem, device, library, FIELDS, fields | {"block": block, "tasks": ceil_div(planes, block), "scratch_step": 0}
    )
