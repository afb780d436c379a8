"""cuda.warp_rows: a column and a row of taps over bytes, a warp down rows of its own.

What a row's taps see of other lanes comes by shfl.sync; nothing goes by way of shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import arrays
from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, stream
from tapwise.cuda.types import DTYPES
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda.costs import cycles_us, joint_us
from tapwise.ops.filter.cuda import ListPlan
from tapwise.ops.filter.cuda_down_rows import unsuited
from tapwise.ops.filter.cuda_strips import view_of
from tapwise.ops.filter.edges import MODES
from tapwise.ops.filter.problem import FilterProblem, limits
from tapwise.ops.filter.weights import rounded

# Words that a list begins with; taps of a column and a row.
CONSTANTS, LEAST_TAPS, MOST_TAPS = 8, 2, 9
LANES, ACROSS = 32, 8
# Rows of a warp: so many, or what lets all warps run in one turn or two.
ROWS: Final = (32, 64)
LEAST_ROWS, MOST_ROWS, TURNS = 8, 256, (1, 2)
# Warps of a multiprocessor that registers have room for, of one channel and of more.
WARPS: Final = (16, 12)
# Of the cost model, reckoned, not fitted: instructions of an element beside the taps'; memory's time; how much of both
# overlaps; microseconds of a launch.
ELEMENT, MEMORY, POWER, START_US = 12.0, 1.3, 4.0, 2.0
# So many times as long it is held to take until a GPU has timed it: it is taken where it is asked for.
UNTIMED: Final = 10.0


@dataclass(frozen=True)
class Config(BaseConfig):
    """Rows of a warp."""

    rows: int


class WarpRowsPlan(ListPlan):
    """A launch."""

    def pack(self, w: Any) -> Any:
        """The list on the GPU."""
        return self.uploaded(pack(self.problem, np.asarray(arrays.on_host(w), np.float64)))

    def run(self, buffers: Buffers) -> None:
        x, words, y, *_ = buffers
        self.launches[0]({"x": x.ptr, "y": y.ptr, "list": words.ptr}, stream(buffers))


def pack(problem: FilterProblem, w: np.ndarray) -> np.ndarray:
    """The list: low, high, the epsilons of column and result, whether sums are simple, and from CONSTANTS on the
    column's weights and the row's."""
    host, r = np.zeros(CONSTANTS + w.size, np.float32), view_of(problem).taps[0]
    epsilons = problem.rounding_epsilons(w.ravel())
    host[:4] = (*limits(problem)[:2], *epsilons)
    # Nothing is negative, and a byte holds column sums and results.
    most = [255.0 * float(part.sum()) + epsilon for part, epsilon in zip((w[:r], w[r:]), epsilons, strict=True)]
    host[4] = bool((w >= 0).all()) and max(most) < 256.0
    host[CONSTANTS:] = rounded(w.ravel(), np.dtype(np.float32))
    return host


class FilterWarpRows(CudaAlgorithm[Config]):
    """A column and a row of up to 9 taps each over uint8, truncated in between; up to four channels."""

    operator: ClassVar[str] = "filter"
    id: ClassVar[str] = "cuda.warp_rows"
    summary: ClassVar[str] = "a column and a row of bytes, neighbours from the lanes beside"
    dtypes: ClassVar[None] = None

    def rejects(self, problem: FilterProblem, device: Device) -> str | None:
        if problem.op != "separable" or not problem.truncates_columns:
            return "takes a column and a row, truncated in between"
        if (problem.dtype, problem.to) != ("u8", "u8"):
            return "takes uint8, to uint8"
        if reason := unsuited(problem):
            return reason
        taps = view_of(problem).taps
        return None if min(taps) >= LEAST_TAPS and max(taps) <= MOST_TAPS else f"takes up to {MOST_TAPS} taps an axis"

    def configs(self, problem: FilterProblem, device: Device) -> Sequence[Config]:
        view, strip = view_of(problem), _grid(problem, Config(MOST_ROWS))[0] * view_of(problem).depth
        at_once = WARPS[view.c > 1] * device.multiprocessors
        turns = (ceil_div(view.height, max(1, turn * at_once // max(1, strip))) for turn in TURNS)
        found = (min(MOST_ROWS, max(LEAST_ROWS, rows)) for rows in turns)
        return [Config(rows) for rows in dict.fromkeys((*found, *ROWS))]

    def predict_us(self, problem: FilterProblem, config: Config, device: Device) -> float:
        """What warps issue, in rounds of those that a multiprocessor has at once, and memory."""
        view, (across, strips) = view_of(problem), _grid(problem, config)
        # Of a scheduler, of which a multiprocessor has four.
        share = ceil_div(across * strips * view.depth, 4 * device.multiprocessors)
        cycles = share * (config.rows + view.taps[0] - 1) * ACROSS * (ELEMENT + sum(view.taps))
        memory = MEMORY * problem.bytes / (device.gbps * 1e3)
        return UNTIMED * (START_US + joint_us(cycles / cycles_us(device), memory, POWER))

    def plan(self, problem: FilterProblem, config: Config, device: Device) -> Plan:
        return WarpRowsPlan(problem, device, [self.launch(problem, config)])

    def source(self, problem: FilterProblem, config: Config) -> Source:
        view = view_of(problem)
        before = view.before[1] * view.c
        words: dict[str, int | bool | str] = {
            "C": view.c, "TAPS_H": view.taps[0], "TAPS_W": view.taps[1], "BEFORE": before,
            "LEAD": round_up(before, 4), "ROWS": round_up(config.rows, 32),
        }  # fmt: skip
        declarations = traits(DTYPES[problem.dtype].cpp, words)
        file, arguments = "ops/filter/warp_rows.cu", f"Traits, {DTYPES[problem.to].cpp}"
        warps = WARPS[view.c > 1]
        return stub(file, "filter_warp_rows", arguments, "WarpRows", LANES, warps, declarations=declarations)

    def launch(self, problem: FilterProblem, config: Config) -> Launch:
        view, (across, strips) = view_of(problem), _grid(problem, config)
        fields = {
            "height": view.height, "width": view.width * view.c, "before_h": view.before[0],
            "mode_h": MODES.index(view.modes[0]), "mode_w": MODES.index(view.modes[1]),
            "cval": int(problem.cval) if "constant" in problem.modes else 0, "rows": config.rows, "across": across,
        }  # fmt: skip
        grid = (across * strips, 1, view.depth)
        return Launch(self.source(problem, config), fields, grid, LANES, dependent=True)


def _grid(problem: FilterProblem, config: Config) -> tuple[int, int]:
    """Warps beside each other, and strips of their rows."""
    view = view_of(problem)
    before, window = view.before[1] * view.c, (view.taps[1] - 1) * view.c
    results = (LANES * ACROSS - round_up(before, 4) - (window - before)) // 4 * 4
    return ceil_div(view.width * view.c, results), ceil_div(view.height, config.rows)
