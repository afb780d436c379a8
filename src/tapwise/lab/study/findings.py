"""What a study leaves: measured rows, tables and charts made of them, and which of the reports' conclusions hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from tapwise.lab.records import geometric_mean, rounded
from tapwise.lab.roofline import write_atomically

Value = str | int
Choices = Mapping[str, Value]
# Names with the choices that they stand for.
Columns = Sequence[tuple[str, Choices]]


@dataclass(frozen=True)
class Row:
    """One measurement: what was chosen, microseconds (median, half the interquartile range), and whether our result was
    within its bound (a peer's is not checked). Without a time, `note` says why."""

    choices: dict[str, Value]
    time_us: float | None = None
    spread_us: float = 0.0
    verified: bool = False
    note: str = ""


class Ratio(float):
    """A ratio of two times; `share`: what part of it their spreads leave open."""

    share: float

    def __new__(cls, over: Row, under: Row) -> Ratio:
        assert over.time_us and under.time_us
        made = super().__new__(cls, over.time_us / under.time_us)
        made.share = math.hypot(over.spread_us / over.time_us, under.spread_us / under.time_us)
        return made


@dataclass(frozen=True)
class Table:
    """Lines of words under a head."""

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """Bars of `series` (name -> label -> value), grouped by label."""

    title: str
    unit: str
    series: dict[str, dict[str, float]]
    log: bool = True


@dataclass(frozen=True)
class Conclusion:
    """A statement of a report, whether the figures bear it out (None: they do not tell), and the figures."""

    source: str
    text: str
    holds: bool | None
    figures: str


@dataclass
class Findings:
    """A study on one device."""

    study: str
    title: str
    kind: str
    device: str
    rows: list[Row] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    conclusions: list[Conclusion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    command: str = ""

    def add(self, choices: Choices, time: tuple[float, float] | None, verified: bool, note: str = "") -> None:
        """A row from (median, spread) in microseconds."""
        us, spread = time if time is not None else (None, 0.0)
        self.rows.append(Row(dict(choices), us, spread, verified, note))

    def add_all(
        self, choices: Choices, name: str, times: Mapping[str, tuple[float, float]], verified: Mapping[str, bool]
    ) -> None:
        """A row for each time; its name is the choice `name`. Rows that `verified` does not name are a peer's."""
        for value, time in times.items():
            self.add({**choices, name: value}, time, verified.get(value, True))

    def values(self, name: str, **choices: Value) -> tuple[str, ...]:
        """What was chosen for `name` among rows with these choices, in the order measured."""
        rows = (row.choices for row in self.rows if choices.items() <= row.choices.items())
        return tuple(dict.fromkeys(str(row[name]) for row in rows))

    def find(self, **choices: Value) -> list[Row]:
        """Timed rows with these choices."""
        wanted = choices.items()
        return [row for row in self.rows if row.time_us is not None and wanted <= row.choices.items()]

    def fastest(self, **choices: Value) -> Row | None:
        """The row of the shortest time among those with these choices."""
        return min(self.find(**choices), key=lambda row: row.time_us or 0.0, default=None)

    def us(self, **choices: Value) -> float | None:
        """The shortest time among rows with these choices."""
        row = self.fastest(**choices)
        return None if row is None else row.time_us

    def ratios(self, over: Choices, under: Choices) -> list[Ratio]:
        """Times with choices `over` over those with `under`, for all rows that have the rest in common."""
        result = []
        for row in self.find(**over):
            rest = {name: value for name, value in row.choices.items() if name not in over}
            other = self.fastest(**{**rest, **under})
            if other is not None and other.time_us and row.time_us:
                result.append(Ratio(row, other))
        return result

    def save(self, path: Path) -> None:
        """As JSON. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(rounded(asdict(self)), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Findings:
        """Raises OSError, ValueError for what is no study's file."""
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or "study" not in data:
            raise ValueError(f"{path} is not a study's JSON")
        data["rows"] = [Row(**row) for row in data["rows"]]
        tables = [(t["title"], tuple(t["head"]), tuple(map(tuple, t["lines"]))) for t in data["tables"]]
        data["tables"] = [Table(*table) for table in tables]
        data["charts"] = [Chart(**chart) for chart in data["charts"]]
        data["conclusions"] = [Conclusion(**one) for one in data["conclusions"]]
        return cls(**data)


# A spread that is said beside a time.
WIDE: Final = 0.05


def words_of(row: Row | None) -> str:
    """A time, with its spread where that is wide; or a dash."""
    if row is None or not row.time_us:
        return "-"
    share = row.spread_us / row.time_us
    return words_us(row.time_us) + (f" ±{100 * share:.0f}%" if share >= WIDE else "")


def words_us(us: float | None) -> str:
    """A time in words of three digits, or a dash."""
    if us is None:
        return "-"
    if us < 1e3:
        return f"{us:.3g} us"
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def judge(
    source: str, text: str, ratios: Sequence[float], what: str, holds: Callable[[float], bool] = lambda mean: mean > 1
) -> Conclusion:
    """A conclusion from the geometric mean of ratios; `what` names them. None is drawn within the spread of times."""
    mean = geometric_mean(ratios)
    if mean is None:
        return Conclusion(source, text, None, f"{what}: not measured")
    pairs = f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} pairs" if len(ratios) > 1 else "one pair"
    share = math.hypot(*(getattr(ratio, "share", 0.0) for ratio in ratios)) / len(ratios)
    figures = (
        f"{what}: {mean:.2f} ± {100 * share:.0f} % ({pairs})" if share >= 0.005 else f"{what}: {mean:.2f} ({pairs})"
    )
    held = holds(mean)
    if held != holds(mean * (1 + share)) or held != holds(mean / (1 + share)):
        return Conclusion(source, text, None, f"{figures}, within the spread of the times")
    return Conclusion(source, text, held, figures)


def pivot(findings: Findings, title: str, lines: Sequence[Choices], columns: Columns) -> Table:
    """Times with a line's and a column's choices together; a line's head is its choices."""
    names = tuple(lines[0]) if lines else ()
    times = [[words_of(findings.fastest(**{**line, **choices})) for _, choices in columns] for line in lines]
    body = [(*map(str, line.values()), *row) for line, row in zip(lines, times, strict=True)]
    return Table(title, (*names, *(name for name, _ in columns)), tuple(body))


def each(name: str, values: Iterable[str]) -> Columns:
    """A choice's values as columns of a table."""
    return [(value, {name: value}) for value in values]


def bars(findings: Findings, title: str, series: Columns, along: str, values: Sequence[Value]) -> Chart:
    """Times of each series at those values of the choice `along` where it has one."""

    def times(choices: Choices) -> dict[str, float]:
        found = {str(value): findings.us(**{**choices, along: value}) for value in values}
        return {value: us for value, us in found.items() if us}

    return Chart(title, "us", {name: times(choices) for name, choices in series})


def ladder(
    findings: Findings, source: str, of: str, names: Sequence[str], steps: Sequence[str], lines: str = "step"
) -> Findings:
    """A table and a chart of all `names` over the choice `of`, and whether each step is faster than the one before."""
    places, rungs = each(of, findings.values(of)), each("step", names)
    down, across = (rungs, places) if lines == "step" else (places, rungs)
    findings.tables.append(pivot(findings, "Rungs", [choices for _, choices in down], across))
    findings.charts.append(bars(findings, "Rungs", places, "step", names))
    for before, after in pairwise(steps):
        gains = findings.ratios({"step": before}, {"step": after})
        text = f"'{after}' is faster than '{before}'"
        findings.conclusions.append(judge(source, text, gains, f"{before} / {after}"))
    return findings
