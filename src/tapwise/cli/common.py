"""What the commands share: options of problems, the console, and what a mistake looks like."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.progress import Progress

    from tapwise.lab.suites import Case

# Columns of what is piped.
UNCUT: Final = 200

Targets = Annotated[
    list[str] | None, typer.Argument(help="suites, suite files, or problems such as 'c64 h56 w56 k64 r3 s3 pad1'")
]
Batch = Annotated[int | None, typer.Option("--batch", "--n", help="batch size of every problem", min=0)]
Dtype = Annotated[
    str | None, typer.Option(help="f32, f64, f16, bf16, tf32 or 3xtf32 for every problem; float32, fp32, half too")
]
Layout = Annotated[str | None, typer.Option(help="nchw or nhwc for every problem")]
Direction = Annotated[str | None, typer.Option(help="fprop, dgrad or wgrad for every problem: y, dx or dw")]
Where = Annotated[str, typer.Option(help="cpu, cuda or cuda:<number>")]
Classes = Annotated[list[str] | None, typer.Option("--class", help="only problems of this class; may be repeated")]


def make_console() -> Console:
    """As wide as the terminal. Where the output is none: plain text as wide as COLUMNS says, or else never cut.

    What is printed is not read for markup: problems, reasons and names of packages have brackets.
    """
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(markup=False, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if re.fullmatch("[0-9]{1,4}", columns) and int(columns) else UNCUT
    return Console(width=width, no_color=True, markup=False, highlight=False)


def guarded(work: Callable[[], Any]) -> Any:
    """Run; a mistake of the user's is one line and exit status 2."""
    from tapwise.errors import TapwiseError

    try:
        return work()
    except TapwiseError as error:
        typer.echo(f"tapwise: {error}", err=True)
        raise typer.Exit(2) from None


def mistake(text: str) -> None:
    """Raises InvalidProblem of a command's words."""
    from tapwise.errors import InvalidProblem

    raise InvalidProblem(text)


def problem_cases(
    targets: list[str], batch: int | None, dtype: str | None, layout: str | None, classes: list[str] | None,
    device: str = "cuda", direction: str | None = None,
) -> list[Case]:  # fmt: skip
    """The cases that the words of a command name, on a device: no tensor cores on a CPU."""
    from tapwise.errors import InvalidProblem
    from tapwise.lab import suites

    def select() -> list[Case]:
        words = {"batch": batch, "dtype": dtype, "layout": layout, "direction": direction}
        cases = suites.select(targets, **words, categories=classes or ())  # type: ignore[arg-type]
        for math in (case.problem.math for case in cases if device == "cpu"):
            if math != "ieee":
                raise InvalidProblem(f"dtype={math!r}: arithmetic of a GPU's tensor cores; on a CPU f32 is allowed")
        return cases

    found: list[Case] = guarded(select)
    return found


def list_suites(console: Console) -> None:
    """The suites of the package, a line each, and how else problems are named."""
    from tapwise.lab import suites

    console.print("Suites of the package:")
    for name in suites.names():
        cases = suites.load(name)
        console.print(f"  {name:18} {len(cases):3} problems, such as '{cases[0].problem}'", soft_wrap=True)
    console.print(
        "Or a suite file of your own, or a problem: tapwise bench 'c64 h56 w56 k64 r3 s3 pad1'", soft_wrap=True
    )


def warn_of_load() -> None:
    """A line where other processes keep the cores busy: times are then of little worth."""
    from tapwise.lab.timing import busy_cores

    busy, cores = busy_cores(), os.cpu_count() or 1
    if busy > 0.15 * cores:
        typer.echo(f"tapwise: {busy:.1f} of {cores} cores are busy with other work: times will be wide", err=True)


def progress_bar(console: Console) -> Progress:
    """A bar with a count and the time, on a terminal only."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def typed_command() -> str:
    """The command as it was typed, to repeat a measurement; of absolute paths, which are a machine's, the last name."""

    def shown(word: str) -> str:
        option, equals, value = word.rpartition("=")
        return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else word

    words = map(shown, sys.argv[1:])
    return " ".join(["tapwise", *(f"'{word}'" if " " in word else word for word in words)])
