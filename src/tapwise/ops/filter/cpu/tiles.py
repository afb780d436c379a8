"""cpu.tiles of filters: a tile of the picture with its surroundings, brought into the arithmetic dtype, then swept.

kernel.py has what a task does, taps.py the record that it reads, plan.py what goes into that record.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import ClassVar, Final

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.cpu.cost import Costs
from tapwise.cpu.simd import BYTES
from tapwise.integers import ceil_div
from tapwise.ops.filter.cpu.layout import Config, Layout, arithmetic, halo, pitch_of
from tapwise.ops.filter.cpu.plan import TilesPlan
from tapwise.ops.filter.problem import FilterProblem

# Bytes of a tile: half of a common L2. A window that does not fit gets so many times that, at so much a tap.
TILE_BYTES: Final = 224 << 10
LARGER: Final = ((1, 1.0), (8, 1.5), (64, 2.5))
WIDTHS: Final = (256, 512, 1024, 2048, 4096)
# Cycles to fetch and store a vector, and for a tap.
FETCH: Final = 8.0
TAP: Final = 0.75
# Elements of a row whose fetching takes as long as memory takes to begin.
START: Final = 64
# Cycles to begin a task.
TASK: Final = 100
# Tasks for each thread, and taps in all from which on a picture is divided for the threads.
TASKS_EACH: Final = 4
SMALL: Final = 1 << 14


def best_config(problem: FilterProblem, device: Device) -> Config | None:
    """The tile with the least fetching and summing beside the results; None where no tile holds the window."""
    depth, height, width = problem.spatial
    width *= problem.c
    itemsize = BYTES[arithmetic(problem)]
    beside, (t, r, s) = halo(problem), problem.size
    best: tuple[float, int, int] | None = None
    for (times, slower), cols in product(LARGER, sorted({min(cols, width) for cols in WIDTHS})):
        rows = times * TILE_BYTES // itemsize // (pitch_of(problem, cols) * t) - (r - 1)
        if rows < 1:
            continue
        band = min(rows, height)
        # Cycles a vector of the result: fetching rows above and beside it, too, and two sweeps.
        across = 1 + beside / cols
        fetch = FETCH * (1 + (r - 1) / band) * t * across * (1 + START / (cols + beside))
        cycles = fetch + TAP * slower * (r * across + s)
        if best is None or cycles < best[0]:
            best = (cycles, band, cols)
    if best is None:
        return None
    _, band, cols = best
    # Enough tasks for all threads, of even height.
    bands = ceil_div(height, band)
    if height * width * depth * problem.taps > SMALL:
        strips = ceil_div(width, cols) * depth
        bands = max(bands, min(height, ceil_div(TASKS_EACH * device.threads, strips)))
    return Config(ceil_div(height, bands), cols)


class Tiles(Algorithm[Config]):
    """Windows of any size up to what a tile holds; 8 to 64 bit integers, f16, f32, f64."""

    operator: ClassVar[str] = "filter"
    id: ClassVar[str] = "cpu.tiles"
    summary: ClassVar[str] = (
        "tiles in L2 with their surroundings, swept tap by tap in vectors; columns first, then rows"
    )
    dtypes: ClassVar[None] = None

    def rejects(self, problem: FilterProblem, device: Device) -> str | None:
        if best_config(problem, device) is None:
            largest = TILE_BYTES * LARGER[-1][0] >> 20
            return f"takes windows whose surroundings fit {largest} MiB, not {problem.size}"
        return None

    def configs(self, problem: FilterProblem, device: Device) -> Sequence[Config]:
        config = best_config(problem, device)
        assert config is not None
        return [config]

    def predict_us(self, problem: FilterProblem, config: Config, device: Device) -> float:
        """TAP cycles a tap and vector, and FETCH; or the bytes over the bandwidth."""
        costs = Costs(device, BYTES[arithmetic(problem)])
        depth, height, width = problem.spatial
        vectors = depth * height * width * problem.c / costs.lanes
        compute = vectors * (TAP * problem.taps + FETCH)
        memory = costs.stream(problem.bytes, problem.bytes) * device.threads
        tasks = Layout(problem, config).tasks
        return costs.wall_us(max(compute, memory) / tasks + TASK, tasks, device.threads)

    def workspace_bytes(self, problem: FilterProblem, config: Config, device: Device) -> int:
        layout = Layout(problem, config)
        return layout.scratch_bytes * max(1, min(device.threads, layout.tasks))

    def plan(self, problem: FilterProblem, config: Config, device: Device) -> Plan:
        return TilesPlan(problem, config, device)
