"""cuda.van_herk: the largest or smallest byte of a window, a thread some neighbouring elements down rows of its own.

Two elements are in a word. A row's window is joined of three, of nine, and so on. Down the column rows come in runs of
as many as a window has, which is the end of one run and the beginning of the next: three comparisons a row, whatever
the window.

Source: M. van Herk, "A fast algorithm for local minimum and maximum filters on rectangular and octagonal kernels",
Pattern Recognition Letters 13 (1992); J. Gil, M. Werman, "Computing 2-D min, median, and max filters", IEEE
Transactions on Pattern Analysis and Machine Intelligence 15 (1993).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, stream
from tapwise.cuda.types import DTYPES
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda.costs import cycles_us, joint_us
from tapwise.ops.filter import cuda_tiles
from tapwise.ops.filter.cuda_strips import refusal, view_of
from tapwise.ops.filter.edges import MODES
from tapwise.ops.filter.problem import FilterProblem

THREADS: Final = 128
# Elements of a thread (32 took longer), and rows of one at least.
ACROSS: Final = (16, 8)
LEAST_ROWS, LEAST_RUNS = 16, 2
# Registers of a thread, which hold a row's pairs of elements and words besides others.
REGISTERS, OTHERS = 255, 48


# Of the cost model: cycles of a scheduler for a warp's row besides its bytes, for an instruction of two bytes, for a
# tap at the sides; of memory's time; how much of both overlaps; microseconds of a launch.
ROW, HALF_RATE, SIDE_TAP, MEMORY, POWER, START_US = 120.0, 2.0, 8.0, 1.09, 2.0, 2.5
LANES, SCHEDULERS = 32, 4
# Of windows with a footprint, and shared memory that a multiprocessor has at least.
TILES: Final = cuda_tiles.FilterTiles()
LEAST_BYTES = 99 << 10


@dataclass(frozen=True)
class Config(BaseConfig):
    """Elements of a thread beside each other."""

    across: int


def tile_of(problem: FilterProblem) -> cuda_tiles.Config:
    """The tile of windows with a footprint: the first that fits everywhere, or the last."""
    configs = [cuda_tiles.Config(*tile, cuda_tiles.DEEP[0]) for tile in cuda_tiles.TILES]
    fitting = (one for one in configs if cuda_tiles.Layout(view_of(problem), one, False).shared_bytes <= LEAST_BYTES)
    return next(fitting, configs[-1])


class Layout:
    """What a thread sees and holds."""

    def __init__(self, problem: FilterProblem, config: Config) -> None:
        view = view_of(problem)
        (r, s), c = view.taps, view.c
        vector = min(config.across, 16)
        self.skip = -view.before[1] * c % vector
        self.pairs = config.across // 2 + (s - 1) * c
        loaded = round_up(self.skip + self.pairs + config.across // 2, vector)
        self.registers = self.pairs + loaded // 4 + config.across + OTHERS
        # A run of rows and what is behind it, of each thread.
        self.shared_bytes = 2 * config.across * THREADS * (r + 1)
        # A first row, and whole runs; at the sides one.
        self.rows, self.side_rows = 1 + r * max(LEAST_RUNS, ceil_div(LEAST_ROWS - 1, r)), 1 + r
        self.segments = ceil_div(view.height, self.rows)
        # Elements of the row on the left that windows pass the side from, and threads that load within the row.
        width, seen = view.width * c, view.before[1] * c + self.skip
        self.left = min(width, round_up(seen, config.across))
        self.across = max(0, (width - loaded + seen - self.left) // config.across + 1)
        self.sides = width - self.across * config.across
        self.blocks = ceil_div(self.across * self.segments, THREADS)
        self.side_blocks = ceil_div(self.sides * ceil_div(view.height, self.side_rows), THREADS)


class VanHerkPlan(cuda_tiles.TilesPlan):
    """A launch for whole windows, and that of cuda.tiles for footprints."""

    def __init__(self, problem: FilterProblem, device: Device, launch: Launch, footprint: Any) -> None:
        super().__init__(problem, device, {False: footprint})
        self.launches = (launch, *self.launches)
        launch.load(device.architecture, device.index)

    def pack(self, w: Any) -> tuple[Any, Launch]:
        """(nothing or the list on the GPU, the launch that takes it)."""
        return super().pack(w) if w is not None else (None, self.launches[0])

    def run(self, buffers: Buffers) -> None:
        x, (words, launch), y, *_ = buffers
        if words is not None:
            return super().run(buffers)
        launch({"x": x.ptr, "y": y.ptr}, stream(buffers))


class FilterVanHerk(CudaAlgorithm[Config]):
    """The largest or smallest of bytes over two axes, up to four channels, of windows whose rows registers hold."""

    operator: ClassVar[str] = "filter"
    id: ClassVar[str] = "cuda.van_herk"
    summary: ClassVar[str] = "largest and smallest bytes, two in a word; three comparisons a column's window"
    dtypes: ClassVar[None] = None

    def rejects(self, problem: FilterProblem, device: Device) -> str | None:
        if problem.op not in ("max", "min") or problem.dtype not in ("u8", "i8") or problem.to != problem.dtype:
            return "takes the largest or smallest of bytes, which stay such"
        if reason := refusal(problem, 1):
            return reason
        info = np.iinfo(problem.x_dtype)
        if "constant" in problem.modes and not (
            info.min <= problem.cval <= info.max and float(problem.cval).is_integer()
        ):
            return "takes a cval that is a byte, too"
        footprint = cuda_tiles.Layout(view_of(problem), tile_of(problem), False)
        if footprint.shared_bytes > device.shared_bytes or not self.configs(problem, device):
            return "takes windows that registers and shared memory hold"
        return None

    def configs(self, problem: FilterProblem, device: Device) -> Sequence[Config]:
        layouts = [(config, Layout(problem, config)) for config in map(Config, ACROSS)]
        return [
            config
            for config, layout in layouts
            if layout.registers <= REGISTERS and layout.shared_bytes <= device.shared_bytes
        ]

    def predict_us(self, problem: FilterProblem, config: Config, device: Device) -> float:
        """What warps issue, most of it at half the rate, and memory."""
        view, layout = view_of(problem), Layout(problem, config)
        (r, s), half = view.taps, config.across // 2
        joined, seen, taps = 0, layout.pairs, 1
        while taps < s:
            more = min(2 * taps, s - taps)
            taps, seen = taps + more, seen - more * view.c
            joined += seen
        each = ROW + HALF_RATE * (layout.pairs + joined + 4 * half)
        rows = layout.blocks * THREADS / LANES * (layout.rows + r - 1)
        side = layout.side_blocks * THREADS / LANES * (layout.side_rows + r - 1)
        issued = view.depth * (rows * each + side * (ROW + SIDE_TAP * s)) / (SCHEDULERS * device.multiprocessors)
        memory = MEMORY * problem.bytes / (device.gbps * 1e3)
        return START_US + joint_us(issued / cycles_us(device), memory, POWER)

    def plan(self, problem: FilterProblem, config: Config, device: Device) -> Plan:
        footprint = TILES.of_kind(problem, tile_of(problem), False, device)
        return VanHerkPlan(problem, device, self.launch(problem, config), footprint)

    def sources(self, problem: FilterProblem, config: Config) -> list[Source]:
        return [self.source(problem, config), TILES.source(problem, tile_of(problem))]

    def source(self, problem: FilterProblem, config: Config) -> Source:
        view, layout = view_of(problem), Layout(problem, config)
        words: dict[str, int | bool | str] = {
            "OP": "LARGEST" if problem.op == "max" else "SMALLEST", "C": view.c, "TAPS_W": view.taps[1],
            "SKIP": layout.skip, "ACROSS": config.across, "THREADS": THREADS, "CONSTANT": "constant" in view.modes,
        }  # fmt: skip
        declarations = traits(DTYPES[problem.dtype].cpp, words)
        return stub("ops/filter/van_herk.cu", "van_herk", "Traits", "VanHerk", THREADS, declarations=declarations)

    def launch(self, problem: FilterProblem, config: Config) -> Launch:
        view, layout = view_of(problem), Layout(problem, config)
        fields = {
            "height": view.height, "width": view.width * view.c, "before_h": view.before[0],
            "before_w": view.before[1] * view.c, "mode_h": MODES.index(view.modes[0]),
            "mode_w": MODES.index(view.modes[1]), "cval": int(problem.cval) if "constant" in problem.modes else 0,
            "taps_h": view.taps[0], "rows": layout.rows, "across": max(1, layout.across), "first": layout.left,
            "side_blocks": layout.side_blocks, "sides": max(1, layout.sides), "side_rows": layout.side_rows,
            "left_side": min(layout.left, layout.sides),
        }  # fmt: skip
        grid = layout.blocks + layout.side_blocks, 1, view.depth
        return Launch(self.source(problem, config), fields, grid, THREADS, layout.shared_bytes, dependent=True)
