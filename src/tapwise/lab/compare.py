"""Two runs of the same problems: FASTER, SLOWER, SAME or UNSURE a row, with the noise of both counted.

On a CPU absolute times of two runs differ by half without any change, so ours is divided by the time of libraries that
both runs measured beside it: what slows the machine slows them too. On a GPU times are its own clock's and steady, but
a library may choose another kernel in another run: of the change itself and the change against the libraries, the one
nearer to none counts, and no change where one is faster and the other slower.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tapwise import registry
from tapwise.errors import TapwiseError
from tapwise.lab.records import Record, geometric_mean
from tapwise.lab.report import microseconds, percent

# What two runs of the same code differ by, beyond the spread within a run: ratios to a library on a CPU, times of a
# GPU, times of a CPU (docs/measuring.md).
CPU_RESOLUTION: Final = 0.10
GPU_RESOLUTION: Final = 0.03
CPU_DRIFT: Final = 0.50
# So many spreads are noise.
SPREADS: Final = 2.0


class Verdict(StrEnum):
    """SAME: any change is within what two runs can tell apart. UNSURE: noise may hide a change, or there is none."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    UNSURE = "UNSURE"


@dataclass(frozen=True)
class Comparison:
    """One problem. `change`: new time over old, corrected by the peers that `against` names; `noise`: how far from 1
    it may be without a reason."""

    problem: str
    verdict: Verdict
    old_us: float | None = None
    new_us: float | None = None
    change: float | None = None
    noise: float | None = None
    against: tuple[str, ...] = ()
    reason: str = ""


def compare_runs(old: Sequence[Record], new: Sequence[Record]) -> list[Comparison]:
    """Each row of the new run against the row of the same problem in the old one."""
    before: dict[tuple[str, str | None], Record] = {}
    for record in old:
        # That of the same device first.
        for device in (record.device, None):
            before.setdefault((_canonical(record.problem), device), record)

    def found(problem: str, device: str) -> Record | None:
        return before.get((problem, device)) or before.get((problem, None))

    return [compare(found(_canonical(record.problem), record.device), record) for record in new]


def compare(old: Record | None, new: Record) -> Comparison:
    """One problem in two runs."""

    def without(verdict: Verdict, reason: str) -> Comparison:
        return Comparison(new.problem, verdict, old.time_us if old else None, new.time_us, reason=reason)

    if old is None:
        return without(Verdict.UNSURE, "not in the old run")
    if not old.time_us or not old.verified:
        return without(Verdict.UNSURE, "no verified time in the old run")
    if not new.time_us or not new.verified:
        return without(Verdict.SLOWER, f"no verified time any more: {new.reason}")
    if (old.device, old.threads) != (new.device, new.threads):
        return without(Verdict.UNSURE, f"the old run is of {old.device}, {old.threads} threads")
    change, noise = new.time_us / old.time_us, SPREADS * math.hypot(_spread(old), _spread(new))
    peers = tuple(sorted(name for name in old.ratios if old.ratios[name] and new.ratios.get(name)))
    changes = [old.ratios[name] / new.ratios[name] for name in peers]
    if (new.algorithm or "").startswith("cuda."):
        resolution = GPU_RESOLUTION
        against_peers = statistics.median(changes) if changes else change
        change, peers = min((change, ()), (against_peers, peers), key=lambda one: abs(math.log(one[0])))
        if (new.time_us > old.time_us) != (against_peers > 1):
            change = 1.0
    elif changes:
        resolution, change = CPU_RESOLUTION, statistics.median(changes)
        # Where libraries disagree on how far the machine drifted, one of them did not drift with it.
        noise = math.hypot(noise, (max(changes) - min(changes)) / 2)
    else:
        resolution, noise = CPU_RESOLUTION, math.hypot(noise, CPU_DRIFT)
    verdict = _verdict(change, noise, resolution)
    return Comparison(new.problem, verdict, old.time_us, new.time_us, change, max(noise, resolution), peers)


def _verdict(change: float, noise: float, resolution: float) -> Verdict:
    # A ratio and its inverse are equally far from 1.
    if abs(math.log(change)) > math.log1p(max(noise, resolution)):
        return Verdict.SLOWER if change > 1 else Verdict.FASTER
    return Verdict.UNSURE if noise > resolution else Verdict.SAME


def _spread(record: Record) -> float:
    """Half the interquartile range as a part of the time."""
    return (record.spread_us or 0.0) / (record.time_us or 1.0)


def _canonical(problem: str) -> str:
    """A problem's string as it is written now."""
    try:
        return str(registry.parse(problem))
    except TapwiseError:
        return problem


def print_comparisons(console: Console, rows: Sequence[Comparison]) -> bool:
    """A table and a summary; whether any row is slower."""
    table = Table(title="against the old run", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("problem", overflow="fold", ratio=1, min_width=20)
    for name in ("old", "new", "change", "noise"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    styles = {Verdict.SLOWER: "red", Verdict.FASTER: "green", Verdict.UNSURE: "yellow"}
    for row in rows:
        noise = "-" if row.noise is None else f"±{100 * row.noise:.0f} %"
        times = microseconds(row.old_us), microseconds(row.new_us)
        table.add_row(row.problem, *times, percent(row.change), noise, row.verdict, style=styles.get(row.verdict))
    console.print(table)
    for row in rows:
        if row.reason:
            console.print(f"{row.problem}: {row.reason}", soft_wrap=True)
    counts = ", ".join(f"{sum(row.verdict is verdict for row in rows)} {verdict}" for verdict in Verdict)
    mean = geometric_mean(row.change for row in rows if row.change)
    console.print(f"{counts}; geometric mean of the changes {percent(mean)}.")
    peers = sorted({name for row in rows for name in row.against})
    if peers:
        console.print(f"Changes are of the time over that of {', '.join(peers)} in the same run.", style="dim")
    return any(row.verdict is Verdict.SLOWER for row in rows)
