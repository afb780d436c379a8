"""The commands `tapwise info` and `tapwise report`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tapwise.cli.common import guarded, make_console, mistake


def info() -> None:
    """Show the CPU, its caches and ceilings, threads, GPUs or why there is none, versions, and the cache folder."""
    from rich.table import Table

    from tapwise import settings
    from tapwise.cpu import device, driver
    from tapwise.cuda.jit.device import described as gpus
    from tapwise.lab import records, roofline

    here = guarded(device.host)
    driver.start_threads()
    known = roofline.known(here.threads)
    folder = settings.cache_dir()
    files = [path.stat().st_size for path in folder.glob("**/*") if path.is_file()] if folder.is_dir() else []
    rows = {
        "cpu": here.name,
        "features": " ".join(device.features()),
        "vectors": f"{here.vector_bytes * 8} bit, {here.registers} registers; target {settings.cpu_target()}",
        "caches": f"L1 {here.l1_bytes >> 10} K, L2 {here.l2_bytes >> 10} K a core; L3 {here.l3_bytes >> 20} M",
        "threads": f"{here.threads}, Numba layer {driver.layer()}",
        "ceilings": "not measured yet (tapwise bench does)"
        if known is None
        else f"{known.gflops:.0f} GFLOP/s of float32, {known.gbps:.1f} GB/s",
        "gpu": gpus(),
        "cache": f"{folder}: {len(files)} files, {sum(files) / 1e6:.1f} MB",
        "versions": ", ".join(f"{name} {version}" for name, version in records.versions().items()),
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, text)
    make_console().print(table)


def report(
    documents: Annotated[list[Path] | None, typer.Argument(help="documents with markers")] = None,
    results: Annotated[Path, typer.Option(help="folder of results")] = Path("benchmarks/results"),
    check: Annotated[bool, typer.Option(help="change nothing; exit status 1 when a document is out of date")] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="OLD and NEW, .json files or folders of them: which rows are slower; exit status 1 if any"),
    ] = None,
) -> None:
    """Write the tables between markers of documents (<!-- results:NAME -->, <!-- study:NAME -->) from the results."""
    from tapwise.lab import records
    from tapwise.lab import report as report_
    from tapwise.lab.compare import compare_runs, print_comparisons

    if compare is not None:
        old, new = (guarded(partial(records.read, path)) for path in compare)
        if print_comparisons(make_console(), compare_runs(old, new)):
            raise typer.Exit(1)
        return
    if not documents and not (Path("README.md").is_file() and Path("docs").is_dir()):
        guarded(lambda: mistake("no documents: name some, or go to a clone with README.md and docs"))
    if not results.is_dir():
        guarded(lambda: mistake(f"results={str(results)!r}: a folder of results"))
    stale = []
    path = results
    try:
        rows, findings = report_.load(results), report_.studies(results)
        for path in documents or [Path("README.md"), *sorted(Path("docs").glob("**/*.md"))]:
            text = path.read_text(encoding="utf-8")
            rewritten = report_.rewrite(text, rows, findings)
            if rewritten != text:
                stale.append(path)
                if not check:
                    path.write_text(rewritten, encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        why = error.args[0] if isinstance(error, KeyError) else error
        typer.echo(f"tapwise: {path}: {why}", err=True)
        raise typer.Exit(2) from None
    for path in stale:
        typer.echo(f"{path} {'is out of date' if check else 'rewritten'}")
    if stale and check:
        raise typer.Exit(1)
