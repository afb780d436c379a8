"""What algorithms share whose threads go down rows of bytes by themselves (down_rows.cuh): which part of a picture is
whose, the words of a launch."""

from __future__ import annotations

from typing import Final

from tapwise.algorithm import Device
from tapwise.integers import ceil_div, round_up
from tapwise.ops.filter.cuda_strips import View, no_byte, refusal
from tapwise.ops.filter.edges import MODES
from tapwise.ops.filter.problem import FilterProblem

THREADS: Final = 128
LANES: Final = 32
# Bytes of a load at most, and of a line of memory.
VECTOR: Final = 16
LINE: Final = 128


def unsuited(problem: FilterProblem) -> str | None:
    """Why threads have no such parts of a problem, or None."""
    if problem.dtype not in ("u8", "i8"):
        return "takes bytes"
    return refusal(problem, 1) or no_byte(problem)


class Parts:
    """Of threads with `across` elements of `rows` rows within the sides, and with one of `side_rows` at them."""

    def __init__(self, view: View, across: int, rows: int, side_rows: int) -> None:
        (_, s), c, vector = view.taps, view.c, min(across, VECTOR)
        self.view, self.step, self.rows, self.side_rows = view, across, rows, side_rows
        # In front of what a thread sees, in its first vector; all that it sees, and loads.
        self.skip = -view.before[1] * c % vector
        self.seen = across + (s - 1) * c
        self.loaded = round_up(self.skip + self.seen, vector)
        # Elements of the row on the left that windows pass the side from, and threads that load within the row.
        width, before = view.width * c, view.before[1] * c + self.skip
        self.left = min(width, round_up(before, across))
        self.across = max(0, (width - self.loaded + before - self.left) // across + 1)
        self.sides = width - self.across * across
        self.segments = ceil_div(view.height, rows)
        self.blocks = ceil_div(self.across * self.segments, THREADS)
        self.side_blocks = ceil_div(self.sides * ceil_div(view.height, side_rows), THREADS)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.blocks + self.side_blocks, 1, self.view.depth

    def cycles(self, rows: int, each: float, alone: float, held: int, device: Device) -> float:
        """Of a multiprocessor's blocks within the sides, of so many rows of x: `each` cycles of a row that blocks issue
        one after the other, `alone` of a row that `held` blocks wait beside each other."""
        share = ceil_div(self.blocks * self.view.depth, device.multiprocessors)
        return rows * (share * each + ceil_div(share, held) * alone)

    def ragged_lines(self, itemsize: int, device: Device) -> float:
        """Lines of memory that stores touch beyond two each, of a multiprocessor, where rows of y begin anywhere, so
        that elements or words go one by one."""
        across = self.step
        if self.view.width * self.view.c % min(VECTOR // itemsize, across) == 0:
            return 0.0
        stores = self.blocks * self.view.depth * THREADS / LANES * self.rows * across / device.multiprocessors
        return stores * max(0, across * itemsize * LANES // LINE - 2)

    def words(self) -> dict[str, int | bool | str]:
        """Of the kernel's traits."""
        return {
            "C": self.view.c, "TAPS_W": self.view.taps[1], "SKIP": self.skip, "THREADS": THREADS,
            "CONSTANT": "constant" in self.view.modes,
        }  # fmt: skip

    def fields(self, problem: FilterProblem) -> dict[str, int]:
        """The numbers of `DownRows`."""
        view = self.view
        return {
            "height": view.height, "width": view.width * view.c, "before_h": view.before[0],
            "before_w": view.before[1] * view.c, "mode_h": MODES.index(view.modes[0]),
            "mode_w": MODES.index(view.modes[1]), "cval": int(problem.cval) if "constant" in problem.modes else 0,
            "taps_h": view.taps[0], "rows": self.rows, "across": max(1, self.across), "first": self.left,
            "side_blocks": self.side_blocks, "sides": max(1, self.sides), "side_rows": self.side_rows,
            "left_side": min(self.left, self.sides),
        }  # fmt: skip
