"""Findings to look at: tables in the terminal, pictures, and a page in one file."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Final, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid

from tapwise.lab.study.findings import Chart, Conclusion, Findings, Table

WORDS: Final = {True: "holds here", False: "does not hold here", None: "not decided here"}
STYLES: Final = {True: "green", False: "red", None: "dim"}
# Ratio of the longest to the shortest bar that a linear scale shows.
LINEAR: Final = 20.0
_PAGE_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
.True { color: #167a2f; } .False { color: #b3261e; } .None { color: #777; }
footer { color: #777; font-size: 13px; margin-top: 2rem; }
"""


def print_findings(console: Console, findings: Findings) -> None:
    """Tables, then the documents' conclusions."""
    console.print(f"\n{findings.title}", style="bold")
    console.print(findings.device, style="dim")
    for table in findings.tables:
        for part, columns in enumerate(_parts(table, console.width)):
            title = table.title + (", continued" if part else "")
            grid = Grid(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
            for number in columns:
                least = _least(table, number) if number else None
                side: Literal["left", "right"] = "right" if number else "left"
                grid.add_column(table.head[number], justify=side, overflow="fold", min_width=least)
            for line in table.lines:
                grid.add_row(*(line[number] for number in columns))
            console.print(grid)
    for one in findings.conclusions:
        console.print(f"[{one.source}] {one.text}: {WORDS[one.holds]}", style=STYLES[one.holds])
        console.print(f"    {one.figures}", style="dim")
    for note in findings.notes:
        console.print(f"note: {note}", style="dim")
    wrong = sum(1 for row in findings.rows if row.time_us is not None and not row.verified)
    if wrong:
        console.print(f"{wrong} of {len(findings.rows)} rows are NOT verified", style="bold red")


def _least(table: Table, number: int) -> int:
    """Characters of a column whose figures are on one line, and its name's words whole."""
    texts = (*table.head[number].split(), *(line[number] for line in table.lines))
    return max(map(len, texts), default=0)


def _parts(table: Table, width: int) -> list[list[int]]:
    """The columns of each of the tables into which a wide one falls, the first column in all of them."""
    longest = max(len(line[0]) for line in (table.head, *table.lines))
    first = min(longest, width // 3)
    parts, used = [[0]], first
    for number in range(1, len(table.head)):
        # A column stands two apart from the next, and the grid's edges take their share.
        needed = _least(table, number) + 3
        if used + needed > width and len(parts[-1]) > 1:
            parts.append([0])
            used = first
        parts[-1].append(number)
        used += needed
    return parts


def picture(chart: Chart) -> bytes:
    """A chart as PNG. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = list(dict.fromkeys(label for values in chart.series.values() for label in values))
    figure, axes = pyplot.subplots(figsize=(max(7.0, 0.22 * len(labels) * len(chart.series) + 3), 4.2))
    width = 0.8 / max(1, len(chart.series))
    for number, (name, values) in enumerate(chart.series.items()):
        places = [at + (number + 0.5) * width - 0.4 for at, label in enumerate(labels) if label in values]
        axes.bar(places, [values[label] for label in labels if label in values], width, label=name)
    axes.set_xticks(range(len(labels)))
    long = max((len(label) for label in labels), default=0) * len(labels) > 70
    axes.set_xticklabels(labels, rotation=30 if long else 0, ha="right" if long else "center")
    axes.set_title(chart.title, loc="left")
    axes.set_ylabel(chart.unit)
    # On a logarithmic scale bars have no foot: only where they differ by more than a linear one shows.
    sizes = [value for values in chart.series.values() for value in values.values()]
    if chart.log and max(sizes) > LINEAR * min(sizes):
        axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.series) > 1:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return file.getvalue()


def pictures(findings: Findings) -> dict[str, bytes]:
    """PNGs by file name: <study>-<number>.png; none without matplotlib."""
    try:
        return {
            f"{findings.study}-{number}.png": picture(chart)
            for number, chart in enumerate(findings.charts, 1)
            if any(chart.series.values())
        }
    except ImportError:
        return {}


def page(findings: Findings, images: dict[str, bytes]) -> str:
    """One HTML file that needs nothing else."""
    parts = [f"<h1>{html.escape(findings.title)}</h1>", f"<p>{html.escape(findings.device)}</p>"]
    if findings.conclusions:
        parts += ["<h2>The documents' conclusions</h2>", "<ul>", *map(_conclusion, findings.conclusions), "</ul>"]
    for name, data in images.items():
        coded = base64.b64encode(data).decode()
        parts.append(f'<p><img alt="{html.escape(name)}" src="data:image/png;base64,{coded}"></p>')
    parts += map(_table, findings.tables)
    parts += [f"<p>{html.escape(note)}</p>" for note in findings.notes]
    versions = ", ".join(f"{name} {version}" for name, version in findings.versions.items())
    parts.append(f"<footer>{html.escape(findings.command)}<br>{html.escape(findings.commit)}; {html.escape(versions)}")
    parts.append("<br>Times are medians of verified results.</footer>")
    body = "\n".join(parts)
    title = html.escape(f"tapwise study {findings.study}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    head += f"<style>{_PAGE_STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _conclusion(one: Conclusion) -> str:
    verdict = f'<b class="{one.holds}">{WORDS[one.holds]}</b>'
    return f"<li>{html.escape(one.source)}: {html.escape(one.text)}: {verdict}<br>{html.escape(one.figures)}</li>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.head)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(word)}</td>" for word in line) + "</tr>" for line in table.lines
    )
    return f"<table><caption>{html.escape(table.title)}</caption><tr>{head}</tr>\n{body}</table>"


def markdown(findings: Findings) -> str:
    """Conclusions and tables for a documentation page."""
    found = [f"- {one.source}: {one.text}: **{WORDS[one.holds]}**. {one.figures}" for one in findings.conclusions]
    parts = [line.replace("[", "(").replace("]", ")") for line in found]
    for table in findings.tables:
        lines = [table.head, tuple("---" for _ in table.head), *table.lines]
        parts += ["", f"{table.title}:", "", *("| " + " | ".join(line) + " |" for line in lines)]
    return "\n".join(parts)


def write(findings: Findings, folder: Path) -> list[Path]:
    """<study>.json, <study>.html and <study>-<number>.png in a folder. Raises OSError."""
    images = pictures(findings)
    json_path, page_path = folder / f"{findings.study}.json", folder / f"{findings.study}.html"
    findings.save(json_path)
    page_path.write_text(page(findings, images), encoding="utf-8")
    for name, data in images.items():
        (folder / name).write_bytes(data)
    return [json_path, page_path, *(folder / name for name in images)]
