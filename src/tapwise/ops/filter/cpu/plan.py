"""Plans of cpu.tiles: the kernel's arguments, and the record of taps that weights become."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Device
from tapwise.cpu import jit
from tapwise.cpu.plan import KernelPlan
from tapwise.cpu.simd import INTEGERS, target
from tapwise.ops.filter.cpu import taps
from tapwise.ops.filter.cpu.kernel import CONSTANTS, FIELDS, ROWS, generate
from tapwise.ops.filter.cpu.layout import Config, Layout, arithmetic
from tapwise.ops.filter.problem import DTYPES, FilterProblem, limits, ordered_terms
from tapwise.ops.filter.weights import rounded

# What a sweep costs beside its taps, in taps.
SWEEP: Final = 3
# Equal weights in a row, from so many on, are added in groups first.
GROUPED: Final = 8
# (places, weights) of a sweep.
Listed = tuple[np.ndarray, np.ndarray]


class TilesPlan(KernelPlan):
    """`pack` makes the record of taps."""

    def __init__(self, problem: FilterProblem, config: Config, device: Device) -> None:
        self._layout, self._dtype = Layout(problem, config), arithmetic(problem)
        op = problem.op if problem.op in ("max", "min") else "sum"
        truncate = op == "sum" and problem.truncates_columns
        flags = truncate, problem.ordered, problem.rounds_down
        library = _library(self._dtype, problem.dtype, problem.to, op, *flags)
        super().__init__(problem, device, library, FIELDS, self._fields(problem, config))

    def _fields(self, problem: FilterProblem, config: Config) -> dict[str, Any]:
        layout = self._layout
        (_, height, width), (t, r, s) = problem.spatial, problem.size
        row = width * problem.c
        planes, rows, columns = problem.sources()
        left = problem.before[2]
        beyond = np.concatenate([columns[:left], columns[left + width :]])
        elements = np.where(beyond[:, None] < 0, -1, beyond[:, None] * problem.c + np.arange(problem.c))
        constants = dict.fromkeys(CONSTANTS, 0.0) | {"cval": problem.cval}
        # Of the largest and smallest in integers, cval alone is needed, and the dtype may not hold the others.
        if self._dtype not in INTEGERS:
            constants["low"], constants["high"], constants["start"] = limits(problem)
        return {
            "planes": planes.astype(np.int64), "rows": rows.astype(np.int64),
            "columns": np.ascontiguousarray(elements.ravel(), np.int64),
            "constants": np.array([constants[name] for name in CONSTANTS]).astype(DTYPES[self._dtype]),
            "x_plane": height * row, "x_row": row, "height": height, "width": row, "window_rows": r,
            "window_planes": t, "left": left * problem.c, "right": (s - 1 - left) * problem.c, "band": config.band,
            "bands": layout.bands, "cols": config.cols, "strips": layout.strips, "pitch": layout.pitch,
            "column_sums": layout.column_sums, "group_sums": layout.group_sums, "tasks": layout.tasks,
            "scratch_step": layout.scratch_bytes,
        }  # fmt: skip

    def pack(self, w: np.ndarray | None) -> np.ndarray:
        """The record of taps (taps.py). Of the largest and the smallest, `w` is None or where it looks.

        A tap whose weight is 0 is left out, as in scipy: what it would see, infinity perhaps, does not count.
        """
        problem: FilterProblem = self.problem
        pitch, c, (_, r, s) = self._layout.pitch, problem.c, problem.size
        epsilons = (0.0, 0.0) if w is None else problem.rounding_epsilons(np.asarray(w, np.float64).ravel())
        if problem.op == "separable" or (w is None and problem.size[0] == 1):
            column, row = (np.ones(r), np.ones(s)) if w is None else (np.asarray(w[:r]), np.asarray(w[r:]))
            down, across = (np.arange(r) * pitch, column), (np.arange(s) * c, row)
            # Without a column the row is swept from the tile itself, and the other way round.
            if r == 1 and (w is None or column[0] == 1):
                return self._record([across], epsilons)
            if w is not None and not problem.ordered and self._better_at_once(column, row):
                weights = np.multiply.outer(np.asarray(column, np.float64), np.asarray(row, np.float64))
                i, j = np.indices(weights.shape)
                return self._record([((i * pitch + j * c).T.ravel(), weights.T.ravel())], epsilons, weights)
            if s == 1 and (w is None or row[0] == 1):
                return self._record([down], epsilons, column[:, None])
            return self._record([down, across], epsilons, column[:, None], group=w is not None)
        weights = np.ones(problem.size) if w is None else np.asarray(w).reshape(problem.size)
        t, i, j = np.indices(problem.size)
        places = ((t * self._layout.tile_rows + i) * pitch + j * c).transpose(0, 2, 1).ravel()
        window = weights[0] if len(weights) == 1 else None
        return self._record([(places, weights.transpose(0, 2, 1).ravel())], epsilons, window)

    def _better_at_once(self, column: np.ndarray, row: np.ndarray) -> bool:
        """Whether the window in one sweep takes less than a column and a row, and means the same."""
        problem: FilterProblem = self.problem
        counts = np.count_nonzero(column), np.count_nonzero(row)
        exact = bool(np.all(column == np.rint(column)) and np.all(row == np.rint(row)))
        same = exact or not (problem.integral and problem.truncate)
        return bool(counts[0] * counts[1] <= sum(counts) + SWEEP and same)

    def _record(
        self, sweeps: list[Listed], epsilons: tuple[float, float], window: np.ndarray | None = None, group: bool = False
    ) -> np.ndarray:
        """The record of one or two sweeps, each its places and weights.

        `window`: the first sweep's weights as rows and columns, to go by columns if it is high and without holes. The
        list has the columns' order, so that a row gets the same sum whether it goes alone or with others. `group`:
        equal weights of the second sweep may be added in groups.
        """
        dtype = DTYPES[self._dtype]
        places: dict[str, np.ndarray] = {}
        weights: dict[str, np.ndarray] = {}
        if self.problem.ordered:
            for name, (place, weight) in zip(("first", "second"), sweeps, strict=False):
                pairs, values = ordered_terms(np.asarray(weight, np.float64))
                places[name], weights[name] = place[pairs.ravel()], values.ravel()
            return taps.write(self._dtype, places, weights, 0, epsilons)
        for name, (place, weight) in zip(("first", "second"), sweeps, strict=False):
            seen = weight != 0
            # A sweep needs a tap; a weight of 0 then is one that counts.
            seen[0] |= not seen.any()
            places[name], weights[name] = place[seen], rounded(weight[seen].astype(np.float64), dtype)
            equal = bool(np.all(weight[seen] == weight[seen][0]))
            if name == "second" and group and equal and len(places[name]) >= GROUPED:
                places[name], places["groups"] = self._grouped(places[name])
                weights[name] = rounded(np.full(len(places[name]), weight[seen][0], np.float64), dtype)
                weights["groups"] = np.ones(len(places["groups"]), dtype)
        height = 0
        if window is not None and len(window) >= ROWS and np.all(window != 0):
            height = len(window)
            places["columns"], weights["columns"] = np.arange(window.shape[1]) * self.problem.c, weights["first"]
        return taps.write(self._dtype, places, weights, height, epsilons)

    def _grouped(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(places of the second sweep, of a group) for a row of equal taps: about as many groups as each has elements.

        A group's sum lies behind the column sums, where its first element lies in them; what is left over is read from
        the column sums.
        """
        size = round(len(row) ** 0.5)
        groups, step = len(row) // size, int(row[1] - row[0])
        sums = self._layout.group_sums + np.arange(groups) * size * step
        return np.concatenate([sums, row[size * groups :]]), row[:size]


@lru_cache(maxsize=256)
def _library(dtype: str, source: str, to: str, op: str, truncate: bool, ordered: bool, down: bool) -> Any:
    cpu = target(settings.cpu_target())
    words = {"dtype": dtype, "source": source, "to": to, "op": op, "truncate": truncate}
    # Words that are seldom wanted are named where they are: kernels keep their names.
    more = {"ordered": True} if ordered else {"down": True} if down else {}
    return jit.load("filter", generate, cpu, **words, **more)
