"""The command line: bench, study, filter, explain, verify, info, report."""

from __future__ import annotations

from typing import Annotated

import typer

from tapwise.cli import bench, explain, filter, report, study

app = typer.Typer(
    name="tapwise",
    help="Convolution operators, verified, measured and chosen for you.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="print the version and leave")] = False) -> None:
    """Convolution operators, verified, measured and chosen for you."""
    if version:
        import tapwise

        typer.echo(f"tapwise {tapwise.__version__}")
        raise typer.Exit


app.command()(bench.bench)
app.command()(study.study)
app.command("filter")(filter.filter_pictures)
app.command()(explain.explain)
app.command()(explain.verify)
app.command()(report.info)
app.command()(report.report)
