"""Tables: in the terminal from records just made, in Markdown from benchmarks/results."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tapwise import registry
from tapwise.lab import records
from tapwise.lab.bench import select_best
from tapwise.lab.records import MODEL, ModelRecord, Record, geometric_mean
from tapwise.lab.study import show
from tapwise.lab.study.findings import Findings
from tapwise.lab.timing import UNSTABLE

# Each direction's operator.
_DIRECTIONS = {"fprop": "conv", "dgrad": "dgrad", "wgrad": "wgrad"}
_MARKED = re.compile(r"(<!-- (results|study|operators|directions)(?::([\w./-]+))? -->\n)(.*?)(<!-- /\2 -->)", re.DOTALL)


def microseconds(value: float | None) -> str:
    """Four figures with a unit."""
    if value is None:
        return "-"
    return f"{value:.1f} us" if value < 100 else f"{value:.0f} us" if value < 10_000 else f"{value / 1e3:.1f} ms"


def size(value: int | None) -> str:
    """Bytes in KB or MB."""
    if value is None:
        return "-"
    return f"{value / 1024:.0f} K" if value < 1 << 20 else f"{value / (1 << 20):.1f} M"


def percent(ratio: float | None) -> str:
    """What a ratio is above 1: "+4.2 %"."""
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def print_bench(console: Console, rows: Sequence[Record]) -> None:
    """Tables by class, geometric means, and what must be known to read them."""
    peers = list(dict.fromkeys(name for row in rows for name in (*row.ratios, *row.peers_missing)))
    for category in dict.fromkeys(row.category for row in rows):
        console.print(_table([row for row in rows if row.category == category], category, peers, console.width))
        for row in rows:
            if row.category == category and row.time_us is None:
                console.print(f"  {row.problem}: {row.reason}", style="red", soft_wrap=True)
    _print_means(console, rows, peers)


def _table(rows: Sequence[Record], title: str, peers: Sequence[str], width: int) -> Table:
    """A line a problem where all its figures fit into `width`; else the figures that matter, the rest in words."""
    fused = ["over\nplain"] if any(row.over_plain for row in rows) else []
    narrow = ["f32\n/ ours"] if any(row.f32_ratio for row in rows) else []
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.add_column("problem", overflow="fold", ratio=1, min_width=20)
    figures = ("time", "fastest\n/ ours", "GFLOP/s", "%roof", *peers, *narrow, *fused, "scratch")
    wide = 20 + 14 + 4 + sum(max(map(len, name.split("\n"))) + 2 for name in figures) + 7
    columns = ("ok", *figures) if wide <= width else ("ok", *figures[:2])
    table.add_column("algorithm", overflow="fold", min_width=13)
    for name in columns:
        table.add_column(name, justify="left" if name == "ok" else "right", no_wrap=True)
    for row in rows:
        # All of a table have the same device.
        algorithm = (row.algorithm or "-").split(".", 1)[-1]
        mark = Text("yes") if row.verified else Text("NO" if row.algorithm else "-", style="red")
        if row.time_us is None:
            table.add_row(row.problem, algorithm, mark, *["-"] * (len(columns) - 1))
            continue
        spread = 100 * (row.spread_us or 0.0) / row.time_us
        time = f"{microseconds(row.time_us)} ±{spread:.0f}%" + ("?" if spread > 100 * UNSTABLE else "")
        speed = f"{row.gflops:.{1 if (row.gflops or 0.0) < 1000 else 0}f}"
        roof = f"{100 * row.roof_us / row.time_us:.0f}" if row.roof_us else "-"
        ratios = [_ratio(row.ratios.get(peer)) for peer in peers]
        ratios += [_ratio(row.f32_ratio) for _ in narrow]
        over = [percent(row.over_plain.get(row.algorithm or "")) for _ in fused]
        cells: list[str | Text] = [time, _ratio(row.ratio), speed, roof, *ratios, *over, size(row.workspace_bytes)]
        if len(cells) == len(columns) - 1:
            table.add_row(row.problem, algorithm, mark, *cells)
            continue
        words = [
            f"{speed} GFLOP/s",
            f"{roof} % of the roof",
            *(f"{name} {row.ratios[name]:.2f}" for name in row.ratios),
        ]
        words += [f"our float32 {row.f32_ratio:.2f}"] if row.f32_ratio else []
        words += [f"{one} over plain" for one in over] + [f"scratch {size(row.workspace_bytes)}"]
        table.add_row(f"{row.problem}\n  {', '.join(words)}", algorithm, mark, *cells[:2])
    return table


def _ratio(value: float | None) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:.2f}", style="red" if value < 0.9 else "")


def _print_means(console: Console, rows: Sequence[Record], peers: Sequence[str]) -> None:
    timed = [row for row in rows if row.time_us is not None]
    verified = sum(row.verified for row in rows)
    console.print(f"\n{verified} of {len(rows)} verified, {len(timed)} timed.")
    compared = [row for row in timed if row.ratio is not None]
    if compared:
        title = "geometric mean of (fastest peer / ours)"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("class", "layers", "mean", "least", "under 0.9"):
            table.add_column(column, justify="left" if column == "class" else "right")
        for name in [*dict.fromkeys(row.category for row in compared), "all"]:
            ratios = [row.ratio for row in compared if row.ratio is not None and name in (row.category, "all")]
            mean, under = f"{geometric_mean(ratios) or 0.0:.2f}", str(sum(ratio < 0.9 for ratio in ratios))
            table.add_row(name, str(len(ratios)), mean, f"{min(ratios):.2f}", under, end_section=name != "all")
        console.print(table)
    over = [row.f32_ratio for row in timed if row.f32_ratio]
    if over:
        average = geometric_mean(over) or 0.0
        console.print(
            f"float32 of ours / ours: geometric mean {average:.2f}, least {min(over):.2f}, {len(over)} layers."
        )
    close, choices = select_best(rows)
    if choices:
        console.print(f"auto within 15 % of the best of ours on {close} of {choices} layers.")
    for peer in peers:
        reasons = Counter(row.peers_missing[peer] for row in rows if peer in row.peers_missing)
        for reason, count in sorted(reasons.items()):
            console.print(f"{peer} not measured on {count} problems: {reason}", soft_wrap=True)
    if far := [max(row.line_ns) for row in records.far(timed)]:
        console.print(
            f"{len(far)} of {len(timed)} were timed while two threads' cores were far from each other: "
            f"a line's round trip took up to {max(far):.0f} ns, and {records.near_ns(timed):.0f} at best."
        )
    console.print(
        "fastest / ours, or a library's name: its time over ours, in turns in one run; above 1 ours is faster. "
        "time: median ± half the interquartile range; ? where that is wide. %roof: of the larger of arithmetic and "
        "memory time at the ceilings measured here; Winograd and Strassen multiply less than is counted, "
        "and can pass 100.",
        style="dim",
    )


def print_model(console: Console, row: ModelRecord) -> None:
    """A line a variant, then why some have no time."""
    title = f"{row.name}, {row.dtype}, {row.n} × {row.size} × {row.size}, {row.device}"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("variant", overflow="fold", min_width=20)
    for name in ("by", "ms", "spread", "fastest\n/ this", "error", "top-1"):
        table.add_column(name, justify="left" if name == "by" else "right", no_wrap=True)
    for variant in row.variants:
        error, top = variant.get("error"), variant.get("top1")
        checked = "-" if error is None else f"{error:.1e}", "-" if top is None else f"{100 * top:.1f} %"
        if "time_us" not in variant:
            table.add_row(variant["name"], variant["by"], "-", "-", "-", *checked, style="dim")
            continue
        spread = 100 * variant["spread_us"] / variant["time_us"]
        noise = f"±{spread:.0f}%" + ("?" if spread > 100 * UNSTABLE else "")
        cells = f"{variant['time_us'] / 1e3:.3f}", noise, _ratio(variant.get("ratio"))
        table.add_row(variant["name"], variant["by"], *cells, *checked)
    console.print(table)
    for variant in row.variants:
        if variant["reason"]:
            console.print(f"{variant['name']}: {variant['reason']}", soft_wrap=True)
    if row.time_us is not None and row.ratios:
        best = min(row.ratios, key=row.ratios.__getitem__)
        console.print(f"{best}, the fastest other, over the fastest of tapwise: {row.ratio:.2f}")
    console.print(
        f"fastest / this: time of the fastest of PyTorch's ({row.fastest or 'none'}) over the variant's, in turns in "
        f"one run. error: of {row.images} images against float32, as a part of the largest output; {row.bound:.1e} is "
        "allowed. top-1: the same class. time: median ± half the interquartile range.",
        style="dim",
    )


def load(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All records below a results folder, by "<device>/<file stem>"."""
    paths = sorted(folder.glob("*/*.json"))
    return {f"{path.parent.name}/{path.stem}": json.loads(path.read_text(encoding="utf-8")) for path in paths}


def studies(folder: Path) -> dict[str, Findings]:
    """All findings of studies below a results folder, by "<device>/<study>"."""
    paths = sorted(folder.glob("*/study/*.json"))
    return {f"{path.parent.parent.name}/{path.stem}": Findings.load(path) for path in paths}


def markdown(name: str, results: dict[str, list[dict[str, Any]]]) -> str:
    """The text of a marked section: "summary" (a line a results file), "models" (a line a model) or "<device>/<file
    stem>" (a line a problem)."""
    if name == "summary":
        return _summary({name: rows for name, rows in results.items() if not _of_models(rows)})
    if name == "models":
        return _models([row for rows in results.values() if _of_models(rows) for row in rows])
    if name not in results:
        raise KeyError(f"results:{name}: there are {', '.join(results) or 'no results'}")
    return _models(results[name]) if _of_models(results[name]) else _problems(results[name])


def _of_models(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row.get("suite") == MODEL for row in rows)


def _models(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a model: the fastest variant of ours and the fastest other."""
    lines = [["device", "model", "ours", "time", "fastest other", "time", "fastest other / ours"], ["---"] * 7]
    for row in rows:
        other = min(row["peers"], key=row["peers"].get, default="-")
        ours, ratio = (row["algorithm"] or "-").split(".", 1)[-1], row["ratio"]
        times = [microseconds(row["time_us"]), microseconds(row["peers"].get(other))]
        result = row["reason"] if ratio is None else f"{ratio:.2f}"
        lines.append([row["device"], row["problem"], ours, times[0], other, times[1], result])
    return _cells(lines)


def _cells(rows: Iterable[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _summary(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = [["device", "suite", "layers", "verified", "geometric mean", "least", "under 0.9"], ["---"] * 7]
    for name, rows in results.items():
        ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
        if not ratios:
            continue
        device, suite = name.split("/")
        counts = str(len(rows)), str(sum(row["verified"] for row in rows))
        under = str(sum(ratio < 0.9 for ratio in ratios))
        lines.append([device, suite, *counts, f"**{geometric_mean(ratios):.2f}**", f"{min(ratios):.2f}", under])
    peers = sorted({peer for rows in results.values() for row in rows for peer in row["peers"]})
    names = ", ".join(peers)
    note = (
        f"Time of the fastest of {names} over ours, in one run, prepared operators; above 1 ours is faster. "
        "A CPU's row is from two threads, or from one (threads1), a GPU's in CUDA graphs.\n"
    )
    return _cells(lines) + "\n" + note if len(lines) > 2 else ""


def _problems(rows: list[dict[str, Any]]) -> str:
    head = ["class", "problem", "algorithm", "time", "GFLOP/s", "% roof", "fastest peer / ours"]
    fused = ["over the plain layer", "the peer's"] if any(row.get("over_plain") for row in rows) else []
    narrow = ["our float32 / ours"] if any(row.get("f32_ratio") for row in rows) else []
    head += narrow
    lines = [[*head, *fused], ["---"] * (len(head) + len(fused))]
    for row in rows:
        if row["time_us"] is None:
            empty = [""] * (3 + len(narrow) + len(fused))
            lines.append([row["class"], row["problem"], row["algorithm"] or "-", row["reason"], *empty])
            continue
        ratios = [row["ratio"], *(row.get("f32_ratio") for _ in narrow)]
        roof = f"{100 * row['roof_us'] / row['time_us']:.0f}"
        time = microseconds(row["time_us"])
        over, fastest = row.get("over_plain", {}), min(row["peers"], key=row["peers"].get, default="")
        more = [percent(over.get(name)) for name in (row["algorithm"], fastest)] if fused else []
        more = [*("-" if one is None else f"{one:.2f}" for one in ratios), *more]
        lines.append([row["class"], row["problem"], row["algorithm"], time, f"{row['gflops']:.1f}", roof, *more])
    return _cells(lines)


def rewrite(text: str, results: dict[str, list[dict[str, Any]]], findings: Mapping[str, Findings] | None = None) -> str:
    """A document with the text between its markers generated anew. Raises KeyError for results that are not there."""

    known = findings or {}
    of_registry = {"operators": operators, "directions": directions}

    def section(match: re.Match[str]) -> str:
        kind, name = match[2], match[3]
        if kind == "study" and name not in known:
            raise KeyError(f"study:{name}: there are {', '.join(known) or 'no studies'}")
        if kind == "study":
            made = show.markdown(known[name]) + "\n"
        else:
            made = of_registry[kind]() if kind in of_registry else markdown(name, results)
        return match[1] + made + match[5]

    return _MARKED.sub(section, text)


def operators() -> str:
    """The operators with their algorithms, from the registry, in Markdown; links are those of the README."""
    lines = [["operator", "algorithms"], ["---"] * 2]
    for operator, names in registry.FUNCTIONS.items():
        called = ", ".join(f"`{name}`" for name in names)
        rows = registry.ALGORITHMS[operator]
        algorithms = [f"`{identifier}`: {registry.get(identifier, operator).summary}" for identifier in rows]
        lines.append([f"[{called}](docs/operators/{operator}.md)", "<br>".join(algorithms)])
    return _cells(lines)


def directions() -> str:
    """Algorithms of convolution by direction, with the backends that have them, from the registry, in Markdown; links
    are those of docs."""
    tables = {direction: registry.ALGORITHMS[operator] for direction, operator in _DIRECTIONS.items()}
    names = dict.fromkeys(identifier.partition(".")[2] for rows in tables.values() for identifier in rows)
    lines = [["algorithm", *tables], ["---"] * (1 + len(tables))]
    for name in names:
        backends = [
            ", ".join(backend for backend in ("cpu", "cuda") if f"{backend}.{name}" in rows) for rows in tables.values()
        ]
        # Those of gradients alone are on their operator's page.
        first = next(operator for operator, here in zip(_DIRECTIONS.values(), backends, strict=True) if here)
        page = f"algorithms/{name}.md" if first == "conv" else f"operators/{first}.md"
        lines.append([f"[{name}]({page})", *(here or "-" for here in backends)])
    return _cells(lines)
