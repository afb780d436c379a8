"""cpu.direct of dgrad: all phases of a stride in one launch, dy packed once for them, rows of dx written whole.

A task packs the places of dy that a block of rows of dx sees. A register tile holds a vector of places of some channels
and rows for each phase of the columns (ops/conv/phases.py); its phases meet other taps at the same places, and are
interleaved on their way to dx. Filters are read where they lie. For groups of few channels, depthwise among them, whose
phases alone are done before a team of threads has started.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cpu.cost import Breakdown
from tapwise.cpu.plan import InPlacePlan
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cpu import generated
from tapwise.ops.conv.cpu.dgrad_direct_kernel import FIELDS, generate
from tapwise.ops.conv.cpu.packed_tile import packed_tile
from tapwise.ops.conv.phases import joint
from tapwise.ops.conv.problem import ConvProblem

# Phases of columns whose vectors can be interleaved.
WAYS: Final = (1, 2, 4)
# Terms of all phases: more would have to go in blocks that stay in L1 (2304 take 1.2 times as long as by phases).
MOST_TERMS: Final = 1300
SCRATCH_BYTES: Final = 1 << 20
# Tiles (channels, rows) by number of vector registers and phases.
_TILES: Final = {
    16: {1: ((4, 3), (1, 6)), 2: ((3, 2), (1, 5)), 4: ((1, 3),)},
    32: {1: ((4, 5), (8, 3), (1, 12)), 2: ((4, 3), (2, 5), (1, 10)), 4: ((2, 3), (1, 6))},
}
# Tiles whose part of dy leaves L1 fetch it again for each tile of channels: what they take longer, by its share of L1.
REFETCHED: Final = 0.1
# What products take longer where a vector is loaded at once: by halves, vectors across lines cost nothing more. Of 25
# drawn layers the choice takes 1.07 of the best then, and 1.16 without.
WHOLE_VECTORS: Final = 1.6
# Cycles of a tile, a finished row and a vector of it; of packing a plane, a row and a vector.
TILE: Final = 20.0
ROW: Final = 14.0
VECTOR: Final = 3.0
PACK_PLANE: Final = 40.0
PACK_ROW: Final = 4.0
PACK_VECTOR: Final = 2.0
STORE_EXPOSED: Final = 0.5


@dataclass(frozen=True)
class Config(BaseConfig):
    """A tile: `m` channels and `n` rows of each phase; a task: `rows` places of rows, of `groups` groups."""

    m: int
    n: int
    rows: int
    groups: int


class Geometry(generated.Geometry):
    """Sizes and tables of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, config, device)
        self.joint = joint(problem)
        self.places = self.joint.fprop.output
        self.packed = packed_tile(self.joint.fprop, config.rows, self.places[1], self.lanes)
        self.vectors = ceil_div(self.places[1], self.lanes)
        self.ways = problem.stride[1]
        self.terms = problem.group_k * prod(problem.kernel)
        itemsize = problem.accumulator_bytes
        # What the last vector of a row reads beyond the packed planes.
        self.steps_at = round_up((problem.group_k * self.packed.plane + 2 * self.lanes) * itemsize, 64)
        self.sums_at = self.steps_at + round_up(8 * self.terms, 64)
        sums = config.m * config.n * self.vectors * self.ways * self.lanes
        self.scratch_bytes = self.sums_at + round_up(sums * itemsize, 64)

    @property
    def blocks(self) -> tuple[int, int]:
        return ceil_div(self.places[0], self.config.rows), ceil_div(self.problem.groups, self.config.groups)

    @property
    def tasks(self) -> int:  # type: ignore[override]
        return prod(self.blocks) * self.problem.n

    def fields(self) -> dict[str, Any]:
        p = self.problem
        starts, offsets, taps = self.tables()
        return self.packed.fields() | {
            "tasks": self.tasks, "scratch_step": self.scratch_bytes, "steps_at": self.steps_at, "sums_at": self.sums_at,
            "starts": starts, "offsets": offsets, "taps": taps, "terms": self.terms,
            "groups": p.groups, "group_c": p.group_c, "group_k": p.group_k, "dx_h": p.spatial[0], "dx_w": p.spatial[1],
            "down": p.stride[0], "rows": self.config.rows, "row_blocks": self.blocks[0], "vectors": self.vectors,
            "group_block": self.config.groups, "group_blocks": self.blocks[1],
        }  # fmt: skip

    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of terms, int64: where those of each phase begin; where each reads a packed tile; its filter, row, column."""
        p, pitch = self.problem, self.packed.pitch
        along = [[self._taps(axis, phase) for phase in range(p.stride[axis])] for axis in range(2)]
        starts, offsets, taps = [0], [], []
        for rows in along[0]:
            for columns in along[1]:
                for k in range(p.group_k):
                    for r, row in rows:
                        for s, column in columns:
                            offsets.append(k * self.packed.plane + row * pitch + column)
                            taps.append((k, r, s))
                starts.append(len(offsets))
        return np.array(starts, np.int64), np.array(offsets, np.int64), np.array(taps, np.int64).reshape(-1)

    def _taps(self, axis: int, phase: int) -> list[tuple[int, int]]:
        """(tap, place in the window) of the taps that elements of a phase meet along an axis."""
        p = self.problem
        step, before, ahead = p.stride[axis], p.padding[axis][0], self.joint.ahead[axis]
        seen = ((tap, phase + before - tap * p.dilation[axis]) for tap in range(p.kernel[axis]))
        return [(tap, at // step + ahead) for tap, at in seen if at % step == 0]


def tiles(registers: int, ways: int) -> tuple[tuple[int, int], ...]:
    """(channels, rows) of tiles whose sums fit, the most balanced first."""
    return _TILES[registers][ways]


def candidates(problem: ConvProblem, device: Device) -> Iterator[Config]:
    places = joint(problem).fprop.output[0]
    groups = {1, *(ceil_div(problem.groups, count * device.threads) for count in (1, 2, 4, 16))}
    for m, n in tiles(device.registers, problem.stride[1]):
        if m > 1 and m >= 2 * problem.group_c:
            continue
        rows = {ceil_div(places, min(places, count)) for count in (1, 2, 3, 4, 6, 8, 16)}
        for row in sorted(rows, reverse=True):
            for block in sorted(groups):
                config = Config(m, n, row, block)
                if Geometry(problem, config, device).scratch_bytes <= SCRATCH_BYTES or row == min(rows):
                    yield config


class TaskCost(generated.TaskCost):
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar = Geometry

    def breakdown(self) -> Breakdown:
        p, c, g, costs = self.problem, self.config, self.geometry, self.costs
        phases = p.stride[0]
        tiles = phases * g.vectors * (ceil_div(p.group_c, c.m) * ceil_div(c.rows, c.n))
        # Each term belongs to one phase.
        products = g.vectors * costs.block(c.m, c.n, p.group_c, c.rows, g.terms)
        reach = g.joint.fprop.kernel[0] + c.n - 1
        # Vectors begin anywhere in a cache line, so every other one is in two.
        footprint = 1.5 * 64 * p.group_k * reach
        held = footprint / self.device.l1_bytes
        products *= 1.0 + REFETCHED * held if held > 1.0 else 1.0
        if costs.at_once:
            products *= WHOLE_VECTORS
        rows = phases * c.rows * p.group_c
        # Of a row, what does not go straight to dx.
        plain = not (p.bias or p.residual or p.activation)
        step = p.stride[1] * costs.lanes
        straight = plain and p.spatial[1] >= step and p.spatial[1] % p.stride[1] == 0
        buffered = 0 if straight else p.spatial[1] % step if plain else p.spatial[1]
        source = p.group_k * (c.rows + g.packed.row_shift) * g.packed.pitch
        group = {
            "products": products,
            "tiles": tiles * TILE,
            "finishing": rows * (ROW + VECTOR * ceil_div(buffered, costs.lanes)) if buffered else 0.0,
            "packing": p.group_k * (PACK_PLANE + (c.rows + g.packed.row_shift) * (PACK_ROW + PACK_VECTOR * g.vectors)),
            "reading dy": costs.stream(source * p.itemsize, p.bytes),
            "writing dx": STORE_EXPOSED * costs.stream(rows * p.spatial[1] * p.itemsize, p.bytes),
        }
        cycles = {name: min(c.groups, p.groups) * part for name, part in group.items()}
        zeros = p.group_k * g.packed.plane / costs.lanes
        return Breakdown(costs, cycles | {"zeros": zeros}, g.tasks)


class DgradDirect(generated.GeneratedAlgorithm[Config]):
    """float32, float64; NCHW; strides of columns of 1, 2 and 4; few channels a group."""

    operator: ClassVar[str] = "dgrad"
    id: ClassVar[str] = "cpu.direct"
    summary: ClassVar[str] = "register tiles of all phases of a stride, interleaved on their way to dx"
    dtypes: ClassVar[tuple[str, ...] | None] = ("f32", "f64")
    layouts: ClassVar[tuple[str, ...]] = ("nchw",)
    candidates = staticmethod(candidates)
    cost: ClassVar = TaskCost

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if prod(problem.stride) == 1 or problem.stride[1] not in WAYS:
            return f"takes a stride whose columns are 1, 2 or 4, not {problem.stride}"
        terms = problem.group_k * prod(problem.kernel)
        if terms > MOST_TERMS:
            return f"takes up to {MOST_TERMS} terms of group_k and taps, not {terms}"
        return None

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        library = self.load("dgrad_direct", generate, problem, m=config.m, n=config.n, ways=problem.stride[1])
        return InPlacePlan(problem, device, library, FIELDS, Geometry(problem, config, device).fields(), False)
