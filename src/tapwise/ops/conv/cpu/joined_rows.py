"""Rows of dx from those of the phases that meet them (ops/conv/phases.py): columns of a stride, interleaved."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from tapwise.algorithm import Buffers, Device
from tapwise.cpu.common import load
from tapwise.cpu.copies import interleave
from tapwise.cpu.fields import COMMON, entry
from tapwise.cpu.plan import KernelPlan
from tapwise.cpu.simd import Kernel, Target
from tapwise.integers import ceil_div
from tapwise.ops.conv.problem import ConvProblem

FIELDS: Final = (*COMMON, "planes", "block", "rows", "width", "slot", "plane", "row_step")
PLANS_KEPT: Final = 256
# Strides whose vectors are interleaved; others go one by one.
INTERLEAVED: Final = (2, 4)
# Elements that one thread joins before a team has begun.
FEW: Final = 1 << 14


def generate(target: Target, *, dtype: str, storage: str, ways: int) -> Kernel:
    """`task`: planes of y, rows of it `row_step` apart, of `ways` arrays (planes, rows, columns), dense, in x."""
    k = Kernel(target, dtype)
    with entry(k, FIELDS) as (a, worker), a.draws(worker) as number:
        first, count = number * a.block, a.width // ways
        with k.loop(first, (first + a.block).min(a.planes)) as plane, k.loop(0, a.rows) as row:
            out = a.pointer("y", storage) + (plane * a.plane + row * a.row_step)
            columns = [(a.width + (ways - 1 - way)) // ways for way in range(ways)]
            parts = [
                a.pointer("x", storage) + (a.slot * way + (plane * a.rows + row) * columns[way]) for way in range(ways)
            ]
            start = count - count % k.lanes if ways in INTERLEAVED else k.integer(0)
            if ways in INTERLEAVED:
                with k.loop(0, start, k.lanes) as i:
                    for at, vector in enumerate(interleave(k, [k.load(part + i, k.lanes) for part in parts])):
                        k.store(out + (i * ways + at * k.lanes), vector)
            with k.loop(start, count) as i:
                for way, part in enumerate(parts):
                    k.store(out + (i * ways + way), k.load(part + i, 1))
            for way, part in enumerate(parts[:-1]):
                with k.if_(count * ways + way < a.width):
                    k.store(out + (count * ways + way), k.load(part + count, 1))
    return k


def join_rows(problem: ConvProblem, first: int, slot: int, parts: np.ndarray, dx: np.ndarray, device: Device) -> None:
    """dx (NCHW, dense), every stride-th row from `first` on, of its phases' results, `slot` elements apart."""
    _plan(problem, first, slot, device).run(Buffers(parts, None, dx[:, :, first:], None, None))


@lru_cache(PLANS_KEPT)
def _plan(problem: ConvProblem, first: int, slot: int, device: Device) -> KernelPlan:
    (height, width), (down, across) = problem.spatial, problem.stride
    planes, rows = problem.n * problem.c, ceil_div(height - first, down)
    tasks = 1 if planes * rows * width < FEW else min(planes, 4 * device.threads)
    block = ceil_div(planes, tasks)
    fields = {
        "planes": planes, "block": block, "rows": rows, "width": width, "slot": slot, "plane": height * width,
        "row_step": down * width, "tasks": ceil_div(planes, block), "scratch_step": 0,
    }  # fmt: skip
    library = load("joined_rows", generate, problem, ways=across)
    return KernelPlan(problem, device, library, FIELDS, fields)
