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

from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, stream
from tapwise.cuda.types import DTYPES
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda.costs import blocks_of, cycles_us, joint_us
from tapwise.ops.filter import cuda_tiles
from tapwise.ops.filter.cuda_down_rows import THREADS, Parts, unsuited
from tapwise.ops.filter.cuda_strips import view_of
from tapwise.ops.filter.problem import FilterProblem

# Elements of a thread (32 took longer), and rows of one at least.
ACROSS: Final = (16, 8)
LEAST_ROWS, LEAST_RUNS = 16, 2
# Registers of a thread, which hold a row's pairs of elements and words besides others.
REGISTERS, OTHERS = 255, 48

# Of the cost model, fitted to 22 times of 11 problems (H200), within 9 %: cycles of a scheduler for a warp's
# instruction of two bytes; of a multiprocessor for a row that a block waits for, for a row of a block at the sides and
# for a tap of it, for a line of a store; how much of it and memory's time overlaps; microseconds of a launch.
HALF_RATE, ALONE, SIDE_ROW, SIDE_TAP, STORED_LINE, POWER, START_US = 1.6, 232.0, 821.0, 60.0, 4.3, 2.0, 2.0
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


class Layout(Parts):
    """What a thread sees and holds."""

    def __init__(self, problem: FilterProblem, config: Config) -> None:
        view = view_of(problem)
        r, across = view.taps[0], config.across
        # A first row, and whole runs; at the sides one.
        super().__init__(view, across, 1 + r * max(LEAST_RUNS, ceil_div(LEAST_ROWS - 1, r)), 1 + r)
        self.pairs = self.seen - across // 2
        self.registers = self.pairs + self.loaded // 4 + across + OTHERS
        # A run of rows and what is behind it, of each thread.
        self.shared_bytes = 2 * across * THREADS * (r + 1)


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
        if reason := unsuited(problem):
            return reason
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
        each = HALF_RATE * (layout.pairs + joined + 4 * half)
        held = blocks_of(layout.registers, THREADS, layout.shared_bytes)
        cycles = layout.cycles(layout.rows + r - 1, each, ALONE, held, device)
        side = view.depth * layout.side_blocks * (layout.side_rows + r - 1)
        cycles += side * (SIDE_ROW + SIDE_TAP * s) / device.multiprocessors
        stored = STORED_LINE * layout.ragged_lines(1, device) / cycles_us(device)
        return START_US + joint_us(cycles / cycles_us(device), problem.bytes / (device.gbps * 1e3) + stored, POWER)

    def plan(self, problem: FilterProblem, config: Config, device: Device) -> Plan:
        footprint = TILES.of_kind(problem, tile_of(problem), False, device)
        return VanHerkPlan(problem, device, self.launch(problem, config), footprint)

    def sources(self, problem: FilterProblem, config: Config) -> list[Source]:
        return [self.source(problem, config), TILES.source(problem, tile_of(problem))]

    def source(self, problem: FilterProblem, config: Config) -> Source:
        op, layout = "LARGEST" if problem.op == "max" else "SMALLEST", Layout(problem, config)
        declarations = traits(DTYPES[problem.dtype].cpp, layout.words() | {"OP": op, "ACROSS": config.across})
        return stub("ops/filter/van_herk.cu", "van_herk", "Traits", "DownRows", THREADS, declarations=declarations)

    def launch(self, problem: FilterProblem, config: Config) -> Launch:
        layout, source = Layout(problem, config), self.source(problem, config)
        fields = layout.fields(problem)
        return Launch(source, fields, layout.grid, THREADS, layout.shared_bytes, dependent=True, balance=2)
