"""The command `tapwise filter`."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Annotated

import typer

from tapwise.cli.common import Where, make_console, progress_bar
from tapwise.errors import InvalidPicture, TapwiseError

_LISTS = "show the named filters with their matrices, and leave"


def filter_pictures(
    paths: Annotated[list[Path] | None, typer.Argument(metavar="IN... OUT", help="pictures, and where they go")] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", "-f", help="such as 'gaussian sigma=3', bank, or a matrix's file; several go in turn"),
    ] = None,
    stride: Annotated[int, typer.Option(help="every so many rows and columns", min=1)] = 1,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT of the result, padded alike on all sides")] = None,
    mode: Annotated[str, typer.Option(help="beyond the edges: reflect, constant, nearest, mirror, wrap")] = "reflect",
    cval: Annotated[float, typer.Option(help="what mode constant has there")] = 0.0,
    text: Annotated[Path | None, typer.Option(help="write the pixels as text too, a block for each channel")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace files that exist")] = False,
    device: Where = "cpu",
    list_: Annotated[
        bool, typer.Option("--list", help="show the named filters with their matrices, and leave")
    ] = False,
) -> None:
    """Filter pictures: PNG, JPEG, WebP, TIFF, zarr. Exit status 1 when one could not be filtered; others are done."""
    from tapwise.image import command

    console = make_console()

    if list_:
        for words, summary, matrix in command.listing():
            console.print(words, style="bold")
            console.print(indent(f"{summary}\n{matrix}\n", "  "))
        return
    if paths is None or len(paths) < 2:
        typer.echo("tapwise: IN... OUT: a picture or more, and where it goes", err=True)
        raise typer.Exit(2)
    if not filters:
        typer.echo("tapwise: --filter is needed; tapwise filter --list shows what there is", err=True)
        raise typer.Exit(2)
    *sources, out = paths
    try:
        wanted = command.order(filters, mode, cval, stride, size, text, force, device)
        if text is not None and len(sources) > 1:
            raise InvalidPicture(f"text={str(text)!r}: for one picture, not {len(sources)}")
        pairs = command.targets(sources, out)
    except (TapwiseError, OSError) as error:
        typer.echo(f"tapwise: {error}", err=True)
        raise typer.Exit(2) from None
    failed = ready = 0
    with progress_bar(console) as progress:
        task = progress.add_task("filtering", total=len(pairs))

        def done(source: Path, problem: str | None) -> None:
            nonlocal failed, ready
            ready += 1
            if not console.is_terminal and len(pairs) > 1:
                typer.echo(f"[{ready}/{len(pairs)}] {source}", err=True)
            progress.update(task, advance=1, description=source.name[:40])
            if problem is not None:
                failed += 1
                typer.echo(f"tapwise: {problem}", err=True)

        try:
            command.run(pairs, wanted, done)
        except KeyboardInterrupt:
            typer.echo("tapwise: stopped; pictures that were done are kept", err=True)
            raise typer.Exit(1) from None
    if failed:
        if len(pairs) > 1:
            typer.echo(f"tapwise: {failed} of {len(pairs)} pictures failed", err=True)
        raise typer.Exit(1)
