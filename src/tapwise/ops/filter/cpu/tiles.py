"""cpu.tiles of filters: a tile of the picture with its surroundings, brought into the arithmetic dtype, then swept.

kernel.py has what a task does, taps.py the record that it reads, plan.py what goes into that record, cost.py the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.ops.filter.cpu import cost
from tapwise.ops.filter.cpu.layout import Config, Layout
from tapwise.ops.filter.cpu.plan import TilesPlan
from tapwise.ops.filter.problem import FilterProblem


class Tiles(Algorithm[Config]):
    """Windows of any size up to what a tile holds; 8 to 64 bit integers, f16, f32, f64."""

    operator: ClassVar[str] = "filter"
    id: ClassVar[str] = "cpu.tiles"
    summary: ClassVar[str] = (
        "tiles in L2 with their surroundings, swept tap by tap in vectors; columns first, then rows"
    )
    dtypes: ClassVar[None] = None

    def rejects(self, problem: FilterProblem, device: Device) -> str | None:
        if cost.best_config(problem, device) is None:
            largest = cost.TILE_BYTES * cost.LARGER[-1][0] >> 20
            return f"takes windows whose surroundings fit {largest} MiB, not {problem.size}"
        return None

    def configs(self, problem: FilterProblem, device: Device) -> Sequence[Config]:
        config = cost.best_config(problem, device)
        assert config is not None
        return [config]

    def predict_us(self, problem: FilterProblem, config: Config, device: Device) -> float:
        return cost.predict_us(problem, config, device)

    def workspace_bytes(self, problem: FilterProblem, config: Config, device: Device) -> int:
        layout = Layout(problem, config)
        return layout.scratch_bytes * max(1, min(device.threads, layout.tasks))

    def plan(self, problem: FilterProblem, config: Config, device: Device) -> Plan:
        return TilesPlan(problem, config, device)
