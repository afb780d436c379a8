"""The command `tapwise study`."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tapwise.cli.common import guarded, make_console, typed_command, warn_of_load


def study(
    names: Annotated[list[str] | None, typer.Argument(help="list, all, or names of studies")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:<number>; auto: a GPU where there is one")] = "auto",
    sides: Annotated[
        str | None,
        typer.Option(help="sides of the pictures, with commas; by default up to 4096 on a GPU, 2048 on a CPU"),
    ] = None,
    output: Annotated[Path, typer.Option(help="folder for JSON, a page and pictures")] = Path("tapwise-study"),
    stored: Annotated[list[Path] | None, typer.Option("--from", help="show a stored JSON; may be repeated")] = None,
) -> None:
    """Repeat the experiments of three reports here, and say which of their conclusions hold. Some minutes each."""
    from tapwise.errors import InvalidProblem
    from tapwise.lab import study as study_
    from tapwise.lab.study import show
    from tapwise.lab.study.findings import Findings

    console = make_console()
    if not stored and (names or ["list"]) == ["list"]:
        for one in study_.STUDIES.values():
            console.print(f"{one.name:16} {one.source:14} {one.summary}")
        return

    def lengths() -> tuple[int, ...] | None:
        words = [] if sides is None else sides.split(",")
        if not all(re.fullmatch("[0-9]{1,6}", word.strip()) for word in words):
            raise InvalidProblem(f"sides={sides!r}: whole numbers with commas are allowed")
        return tuple(map(int, words)) or None

    def place() -> str:
        from tapwise.cuda.jit.device import why_none

        return ("cuda" if why_none() is None else "cpu") if device == "auto" else device

    try:
        done = [Findings.load(path := one) for one in stored or ()]
    except (OSError, ValueError, TypeError, KeyError) as error:
        typer.echo(f"tapwise: {path}: {error}", err=True)
        raise typer.Exit(1) from None

    def finish(findings: Findings) -> None:
        show.print_findings(console, findings)
        try:
            written = show.write(findings, output)
        except OSError as error:
            typer.echo(f"tapwise: output={str(output)!r}: {error}", err=True)
            raise typer.Exit(1) from None
        for path in written:
            console.print(f"wrote {path}", soft_wrap=True)

    for findings in done:
        finish(findings)
    if not stored:
        chosen, wanted, where = guarded(lambda: study_.select(names or [])), guarded(lengths), guarded(place)
        if where == "cpu":
            warn_of_load()
        for one in chosen:
            with console.status(one.name) as status:
                done.append(guarded(partial(study_.run, one, where, wanted, status.update, typed_command())))
            finish(done[-1])
    if done and not any(findings.charts and list(output.glob("*.png")) for findings in done):
        console.print("no pictures: pip install 'tapwise[study]'", style="dim")
    if any(row.time_us is not None and not row.verified for findings in done for row in findings.rows):
        raise typer.Exit(1)
