"""What the pieces of a CPU kernel cost, for the cost models of cpu.direct, cpu.pointwise, cpu.depthwise and
cpu.winograd.

Everything is counted in cycles of one core, from few numbers that hold for cores with two vector FMA units and two
vector loads a cycle: so the model ranks configs and algorithms well and predicts times within some tens of percent.
Where units are half as wide as vectors (Zen 4's 512-bit ones), what goes by vectors takes twice as long.

- A register tile takes per term the larger of its arithmetic (m * n / 2) and its loads ((m + n) / 2), and per call the
  loading and storing of its sums. Where vectors go by halves loads are not hidden quite, vectors less than single
  numbers.
- Filters that a pass over the pixels streams come from the cache that holds them, at that cache's rate; the arithmetic
  hides them, so the larger of the two counts.
- Packing and finishing cost some cycles a row and some a vector.
- Tasks are drawn by `threads` workers: the time is that of ceil(tasks / threads) tasks, plus the start of a team.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tapwise.algorithm import Device
from tapwise.integers import ceil_div

# From Python to the kernel: the argument array, the call.
CALL_US: Final = 3.0
# Cycles of a term for each number and each vector that it loads, where vectors are 64 bytes. Where they go by halves
# (Zen 4) 8 x 3 sums took 3 to 30 % less than 12 x 2 on six 1x1 layers, and of 66 layers the choice took 1.037 of the
# best, 1.044 without. The same holds where whole vectors in two cache lines cost little (Zen 5): 1.04 of the best of
# some 24 configs on 98 layers, 1.14 with the others' model. Where they are loaded like two (Emerald Rapids) most lie in
# two lines: 8 x 3 takes 13.8 cycles from L1 and 16.2 not aligned, 3 x 7 14.8 and up to 20; of 109 layers 1.034, 1.13
# without this and PAGE_CYCLES.
LOADED: Final = 0.12, 0.3
LOADED_WHOLE: Final = 0.12, 0.2
# Where loads are split, of vectors that are pixels of planes, which lie apart: the same, and what a tile of fewer sums
# than so many takes longer, as fewer products hide a late load. With these and STRIP the choice of cpu.direct takes
# 1.09 of the best of some 40 configs on 147 layers, 1.105 before; with COLD_LINE 34 others, cut otherwise, take 0.94 of
# the time.
LOADED_PLANES: Final = 0.3, 0.2
LATE, ENOUGH_SUMS = 0.25, 24
# Lanes over channels, where loads across lines cost little: what a tile of so many sums takes longer, since they and
# pixels' addresses fill the registers (Zen 5: where it decides between 6 x 4 and 7 x 3, 1.02 on 15 layers).
MANY_SUMS, FULL = 24, 1.02
# There, too, of lanes over channels in NCHW: cycles of a line of filters that the first tile of pixels meets. Tasks of
# 14 pixels took 1.2 to 1.3 times as long as predicted beside those of many; channels last they do not.
COLD_LINE: Final = 3.0
# Cycles to enter and leave a register tile, and to begin a row of elements.
TILE_CALL: Final = 40.0
ROW_CALL: Final = 20.0
# Transposing (transposes.py): cycles a pixel's vector of channels, and a run of pixels for each of these vectors. Where
# vectors are loaded at once it takes 18 to 23 on an Emerald Rapids, of which some hide.
TRANSPOSED: Final = 1.2
TRANSPOSED_WHOLE: Final = 10.0
TRANSPOSED_RUN: Final = 30.0
# Of a panel of filters, what has to fit half of L1 for the next tile to find it there.
IN_L1: Final = 0.5
# Of L3, what may be filled by what is read over and over: other machines of the same processor have their part of it.
# Its size decides little (Zen 5: of 377 layers' choices 0.55 changes one). Of more than that a part is found there,
# down to nothing of L3_MOST: of 162 layers on a Zen 4 63, most of them 3x3 of 300 to 900 channels on small images, are
# then computed otherwise, in 0.92 of the time (0.62 to 1.27), 11 that go from cpu.direct to cpu.winograd in 0.70; of
# those of real models one, as fast (docs/study/cpu.md). Where vectors are loaded at once it was not measured.
L3_SHARE, L3_MOST = 0.5, 0.75
# Filters that L3 does not hold come so many times slower than what is copied from memory (Zen 5, four layers of
# 38 to 75 MB: the choice is 1.09 of the best, 1.13 without).
FROM_MEMORY: Final = 2.5
# Of the cycles of register tiles, what operands that stream from a cache are not hidden behind.
EXPOSED: Final = 0.32


@dataclass(frozen=True)
class Costs:
    """Cycle counts on one device for an arithmetic dtype of `itemsize` bytes."""

    device: Device
    itemsize: int
    # Tiles whose vectors are pixels of planes.
    planes: bool = False

    @property
    def lanes(self) -> int:
        return self.device.vector_bytes // self.itemsize

    @property
    def at_once(self) -> bool:
        """Whether vectors are as long as cache lines, and loaded at once."""
        return self.device.vector_bytes == 64 and self.device.vector_cycles == 1

    @property
    def whole(self) -> bool:
        """The same, and a vector in two lines is loaded like two."""
        return self.at_once and self.device.split_loads

    @property
    def loads(self) -> tuple[float, float]:
        """Cycles of a term for each number and each vector that it loads, beside what hides behind products."""
        if self.device.vector_bytes < 64:
            return 0.0, 0.0
        if not self.whole:
            return LOADED
        return LOADED_PLANES if self.planes else LOADED_WHOLE

    @property
    def cycles_per_us(self) -> float:
        """Clock in MHz, from the peak: two FMA units of four-byte lanes."""
        return self.device.gflops * 1e3 * self.device.vector_cycles / (self.device.vector_bytes // 4 * 4)

    def stream(self, size: float, own: float, shared: float | None = None) -> float:
        """Cycles to read `size` bytes of an operand that is read over and over: `own` bytes of it by a worker, whose
        caches may hold them, and `shared` (the same, if not given) by all."""
        d, shared = self.device, own if shared is None else shared
        if own <= d.l1_bytes / 2:
            rate = d.cache_rates[0]
        elif own <= d.l2_bytes * 0.75:
            rate = d.cache_rates[1]
        elif shared <= d.l3_bytes * L3_SHARE:
            rate = d.cache_rates[2]
        else:
            most = L3_SHARE if self.at_once else L3_MOST
            held = max(0.0, most - shared / d.l3_bytes) / (L3_MOST - L3_SHARE)
            memory = d.gbps * 1e3 / self.cycles_per_us / d.threads
            return size * (held / d.cache_rates[2] + (1.0 - held) / memory)
        return size / rate

    def filters(self, panel: float, passes: float, again: float, own: float, shared: float, images: int = 1) -> float:
        """Cycles to read filters of `panel` bytes for so many passes over each of some images: the first time of the
        `own` bytes of a worker's filters and the `shared` ones of all workers, for the next image of the panel, and
        between two passes of `again` bytes that stay."""
        first = self.stream(panel, own, shared)
        if self.at_once and shared > self.device.l3_bytes:
            first *= FROM_MEMORY
        first += (images - 1) * self.stream(panel, panel)
        return first + images * self.stream((passes - 1) * panel, again)

    def tile(self, m: int, n: int, terms: int) -> float:
        """One register tile over `terms` terms."""
        slow = self.device.vector_cycles
        # Fewer sums than the FMA's latency hides.
        per_term = max(slow * m * n / 2, (m + slow * n) / 2 + 0.5, 4 if m * n < 8 else 0)
        if m * n > 9:
            per_term += self.loads[0] * m + self.loads[1] * n
        # Few sums leave less room to hide a late load.
        late = 1.08 if m * n > 9 else 1.2
        if self.at_once and not self.whole and not self.planes and m * n >= MANY_SUMS:
            late *= FULL
        if self.whole and self.planes:
            late = 1.08 + LATE * max(0.0, ENOUGH_SUMS / (m * n) - 1.0)
        return terms * per_term * late + slow * m * n + TILE_CALL

    def block(self, m: int, n: int, rows: int, vectors: int, terms: int) -> float:
        """tile.block: rows x vectors in tiles of m x n, with its narrower edges."""
        whole_m, rest_m = divmod(rows, m)
        whole_n, rest_n = divmod(vectors, n)
        total = whole_m * whole_n * self.tile(m, n, terms)
        if rest_m:
            total += whole_n * self.tile(rest_m, n, terms)
        if rest_n:
            total += whole_m * self.tile(m, rest_n, terms)
        if rest_m and rest_n:
            total += self.tile(rest_m, rest_n, terms)
        return total

    def first_pass(self, filters_bytes: float, layout: str) -> float:
        """What the tiles of one block with lanes over channels take longer for filters that they meet first."""
        return COLD_LINE * filters_bytes / 64 if self.whole and layout == "nchw" else 0.0

    def row(self, length: int, per_vector: float, short: float = 3.0) -> float:
        """A row of elements moved in vectors; rows shorter than four elements go one by one."""
        if length < 4:
            return ROW_CALL + short * length
        return ROW_CALL + self.device.vector_cycles * per_vector * ceil_div(length, min(self.lanes, length))

    def transposing(self, channels: int, pixels: int, runs: int) -> float:
        """`runs` runs of so many pixels in all, of so many channels."""
        vectors = ceil_div(channels, self.lanes)
        each = TRANSPOSED_WHOLE if self.whole else self.device.vector_cycles * TRANSPOSED
        return vectors * (each * pixels + TRANSPOSED_RUN * runs)

    def wall_us(self, task_cycles: float, tasks: int, threads: int) -> float:
        """Wall time of `tasks` equal tasks."""
        workers = max(1, min(threads, tasks))
        drawn = ceil_div(tasks, workers) + (self.device.uneven if workers > 1 else 0.0)
        return CALL_US + (self.device.start_us if workers > 1 else 0) + drawn * task_cycles / self.cycles_per_us

    def waiting(self, tiles: float, streamed: float) -> float:
        """Cycles that register tiles wait for operands which take `streamed` cycles from their caches."""
        return max(0.0, EXPOSED * tiles + streamed - tiles)


@dataclass(frozen=True)
class Breakdown:
    """A predicted run: `cycles` of one task by what they go to, `tasks` shared by the threads."""

    costs: Costs
    cycles: Mapping[str, float]
    tasks: int

    @property
    def us(self) -> float:
        """Microseconds of a run; rounded, so that configs that cost the same tie and the first of them is taken."""
        return round(self.costs.wall_us(sum(self.cycles.values()), self.tasks, self.costs.device.threads), 6)

    def __str__(self) -> str:
        """The parts of a task, the largest first; those below half a percent left out."""
        total = sum(self.cycles.values())
        parts = [f"{name} {part / total:.0%}" for name, part in sorted(self.cycles.items(), key=lambda item: -item[1])]
        shown = ", ".join(part for part in parts if not part.endswith(" 0%"))
        workers = max(1, min(self.costs.device.threads, self.tasks))
        return f"{self.tasks} tasks on {workers} threads, each {_short(total / self.costs.cycles_per_us)} us: {shown}"


def _short(us: float) -> str:
    return f"{us:.0f}" if us >= 100 else f"{us:.2g}"
