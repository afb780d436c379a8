"""What the commands share: options of problems, the console, and what a mistake looks like."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.progress import Progress

    from tapwise.lab.suites import Case

Targets = Annotated[
    list[str] | None, typer.Argument(help="suites, suite files, or problems such as 'c64 h56 w56 k64 r3 s3 pad1'")
]
Batch = Annotated[int | None, typer.Option(help="batch size of every problem", min=0)]
Dtype = Annotated[str | None, typer.Option(help="f32, f64, f16, bf16, tf32 or 3xtf32 for every problem")]
Layout = Annotated[str | None, typer.Option(help="nchw or nhwc for every problem")]
Where = Annotated[str, typer.Option(help="cpu, cuda or cuda:<number>")]
Classes = Annotated[list[str] | None, typer.Option("--class", help="only problems of this class; may be repeated")]


def make_console() -> Console:
    """Plain text of 100 columns where the output is no terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=100, no_color=True)


def guarded(work: Callable[[], Any]) -> Any:
    """Run; a mistake of the user's is one line and exit status 2."""
    from tapwise.errors import TapwiseError

    try:
        return work()
    except TapwiseError as error:
        typer.echo(f"tapwise: {error}", err=True)
        raise typer.Exit(2) from None


def problem_cases(
    targets: list[str], batch: int | None, dtype: str | None, layout: str | None, classes: list[str] | None
) -> list[Case]:
    """The cases that the words of a command name."""
    from tapwise.lab import suites

    cases: list[Case] = guarded(
        lambda: suites.select(targets, batch=batch, dtype=dtype, layout=layout, categories=classes or ())
    )
    return cases


def progress_bar(console: Console) -> Progress:
    """A bar with a count and the time, on a terminal only."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def typed_command() -> str:
    """The command as it was typed, to repeat a measurement."""
    return " ".join(["tapwise", *(f"'{word}'" if " " in word else word for word in sys.argv[1:])])
