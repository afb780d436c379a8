"""Filters of a phase of dgrad (ops/conv/phases.py), as convolution takes them: some of w's taps, flipped, channels and
filters swapped. Blocks of channels go to threads; a row of taps is a few loads and stores."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Final

import numpy as np

from tapwise.algorithm import Buffers, Device
from tapwise.cpu.common import load
from tapwise.cpu.fields import COMMON, entry
from tapwise.cpu.plan import KernelPlan
from tapwise.cpu.simd import Kernel, Target
from tapwise.integers import ceil_div
from tapwise.ops.conv.phases import Phase
from tapwise.ops.conv.problem import ConvProblem

FIELDS: Final = (
    *COMMON, "group_k", "group_c", "block", "blocks", "taps_h", "step_k", "step_c", "step_r", "step_s", "first",
)  # fmt: skip
# Channels that a task turns: as many as are written to at a time.
BLOCK: Final = 16
PLANS_KEPT: Final = 256
# Measured on one thread, an element of a filter of several taps and of one; what a call takes beside.
ELEMENT_NS, LONE_NS, CALL_US = 0.45, 1.5, 5.0


def generate(target: Target, *, dtype: str, storage: str, taps_w: int) -> Kernel:
    """`task`: a block of channels of a group, from x to y: (c, k / groups, taps_h, taps_w), dense."""
    k = Kernel(target, dtype)
    with entry(k, FIELDS) as (a, worker), a.draws(worker) as number:
        channel0, group = number % a.blocks * a.block, number // a.blocks
        channels = (a.group_c - channel0).min(a.block)
        w, y = a.pointer("x", storage), a.pointer("y", storage)
        source = w + (group * a.group_k * a.step_k + channel0 * a.step_c + a.first)
        out = y + (group * a.group_c + channel0) * a.group_k * a.taps_h * taps_w
        with k.loop(0, a.group_k) as filter_, k.loop(0, channels) as channel, k.loop(0, a.taps_h) as r:
            here = source + (filter_ * a.step_k + channel * a.step_c + r * a.step_r)
            there = out + ((channel * a.group_k + filter_) * a.taps_h + r) * taps_w
            for s in range(taps_w):
                k.store(there + s, k.load(here + a.step_s * s, 1))
    return k


def turned(problem: ConvProblem, phase: Phase, w: np.ndarray, device: Device) -> np.ndarray:
    """The phase's own filters (c, k / groups, ...), dense."""
    if not (w.dtype.isnative and w.flags.aligned):
        w = np.array(w, w.dtype.newbyteorder("="))
    steps = tuple(step // w.itemsize for step in w.strides)
    out = np.empty((problem.c, problem.group_k, *map(len, phase.taps)), w.dtype)
    _plan(problem, phase.taps, steps, device).run(Buffers(w, None, out, None, None))
    return out


def turn_us(problem: ConvProblem, phase: Phase, device: Device) -> float:
    """Of one phase."""
    taps = prod(map(len, phase.taps))
    each = ELEMENT_NS if taps > 1 else LONE_NS
    return CALL_US + 1e-3 * each * problem.c * problem.group_k * taps / device.threads


@lru_cache(PLANS_KEPT)
def _plan(problem: ConvProblem, taps: tuple[range, ...], steps: tuple[int, ...], device: Device) -> KernelPlan:
    rows, columns = taps
    blocks = ceil_div(problem.group_c, BLOCK)
    few = problem.c * problem.group_k * len(rows) * len(columns) < 1 << 14
    fields = {
        "group_k": problem.group_k, "group_c": problem.group_c, "block": BLOCK, "blocks": blocks, "taps_h": len(rows),
        "step_k": steps[0], "step_c": steps[1], "step_r": steps[2] * rows.step, "step_s": steps[3] * columns.step,
        "first": steps[2] * rows[0] + steps[3] * columns[0], "tasks": blocks * problem.groups, "scratch_step": 0,
    }  # fmt: skip
    library = load("turned_filters", generate, problem, taps_w=len(columns))
    return KernelPlan(problem, replace(device, threads=1) if few else device, library, FIELDS, fields)
