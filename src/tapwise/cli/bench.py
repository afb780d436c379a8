"""The command `tapwise bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapwise.cli import common
from tapwise.cli.common import guarded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from tapwise.lab.bench import Options
    from tapwise.lab.records import Record
    from tapwise.lab.suites import Case


def bench(
    targets: common.Targets = None,
    batch: common.Batch = None,
    dtype: common.Dtype = None,
    layout: common.Layout = None,
    direction: common.Direction = None,
    algorithms: Annotated[str, typer.Option(help="auto (the chosen one), all, or ids with commas")] = "auto",
    peers: Annotated[str, typer.Option(help="auto (the installed ones), none, or names with commas")] = "auto",
    threads: Annotated[int | None, typer.Option(help="worker threads, ours and the peers'", min=1)] = None,
    seconds: Annotated[
        float | None, typer.Option(help="budget of one problem (2) or of a model's variants (20)", min=0.0)
    ] = None,
    repeats: Annotated[int, typer.Option(help="rounds at most", min=1)] = 15,
    classes: common.Classes = None,
    device: common.Where = "cpu",
    json: Annotated[Path | None, typer.Option(help="a .json file, or a folder of results")] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="a .json file, or a folder of them, of an earlier run: which rows are slower or faster now"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="a whole model, not problems: torchvision's name, file.py:function or MODEL.onnx"),
    ] = None,
    unprepared: Annotated[
        bool, typer.Option("--unprepared", help="conv2d as a function, which packs the filters in each call")
    ] = False,
    size: Annotated[int | None, typer.Option(help="height and width of a model's images (224)", min=1)] = None,
    layers: Annotated[bool, typer.Option("--layers", help="of a model: what optimize measured, by layer")] = False,
    max_autotune: Annotated[
        bool, typer.Option("--max-autotune", help="of a model: torch.compile with max-autotune too")
    ] = False,
) -> None:
    """Verify and time problems, in turns with installed peers, or a whole model against PyTorch.

    Exit status 1 on a wrong row, or one that got slower.
    """
    from tapwise import baselines as libraries
    from tapwise.lab import bench as bench_
    from tapwise.lab import records, report

    console = common.make_console()
    if model is not None:
        given = targets or layout or direction or classes or threads or unprepared
        if given or algorithms != "auto" or peers != "auto":
            why = "problems, layout, direction, class, algorithms, peers, unprepared and threads (TAPWISE_NUM_THREADS)"
            guarded(lambda: common.mistake(f"model={model!r}: goes without {why}"))
        words = {
            "name": model, "n": 1 if batch is None else batch, "dtype": dtype or "f32", "device": device,
            "max_autotune": max_autotune, "seconds": 20.0 if seconds is None else seconds, "repeats": repeats,
        }  # fmt: skip
        _bench_model(words if size is None else {**words, "size": size}, layers, json, compare)
        return
    if size is not None or layers or max_autotune:
        guarded(lambda: common.mistake("size, layers, max-autotune: go with --model"))
    if not targets:
        common.list_suites(console)
        raise typer.Exit(2)
    cases = common.problem_cases(targets, batch, dtype, layout, classes, device, direction)
    guarded(lambda: bench_.check_ids(algorithms, cases))
    if json is not None:
        guarded(lambda: records.check_target(json))
    chosen = tuple(guarded(lambda: libraries.select(peers, device.partition(":")[0])))
    # Read before anything is measured: --json may write to the same file.
    before = None if compare is None else guarded(lambda: records.read(compare))
    budget = 2.0 if seconds is None else seconds
    command = common.typed_command()
    options = bench_.Options(algorithms, chosen, threads, budget, repeats, command, device, not unprepared)
    if device == "cpu":
        common.warn_of_load()
    rows, stopped = _measure(cases, options)
    if not rows:
        raise typer.Exit(130 if stopped else 0)
    report.print_bench(console, rows)
    if peers == "auto":
        for peer in libraries.PEERS.values():
            if not peer.installed and peer.device == device.partition(":")[0]:
                console.print(f"{peer.name} is not installed: {peer.install}", style="dim")
    slower = _kept(console, rows, json, records.folder(device, rows[0].device), batch, before)
    if stopped:
        console.print(f"stopped after {len(rows)} of {len(cases)}")
        raise typer.Exit(130)
    if slower or not all(row.verified for row in rows):
        raise typer.Exit(1)


def _bench_model(words: dict[str, Any], layers: bool, json: Path | None, compare: Path | None) -> None:
    """A whole model; `words` are those of lab.model.Options."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        why = str(error)
        guarded(lambda: common.mistake(f"model={words['name']!r}: PyTorch cannot be imported: {why}"))
    from tapwise.lab import model, records, report

    console = common.make_console()
    if json is not None:
        guarded(lambda: records.check_target(json))
    before = None if compare is None else guarded(lambda: records.read(compare))
    options = model.Options(**words, command=common.typed_command())

    def said(text: str) -> None:
        typer.echo(f"  {text}", err=True)
        if text == model.TIMES and options.device == "cpu":
            common.warn_of_load()

    row, report_of_layers = guarded(lambda: model.measure(options, said))
    report.print_model(console, row)
    if layers:
        console.print(report_of_layers, soft_wrap=True)
    slower = _kept(console, [row], json, records.folder(options.device, row.device), None, before)
    if slower or not row.verified:
        raise typer.Exit(1)


def _kept(
    console: Console, rows: Sequence[Record], json: Path | None, folder: str, batch: int | None,
    before: Sequence[Record] | None,
) -> bool:  # fmt: skip
    """Records written, and held against those of an earlier run: whether any is slower."""
    from tapwise.lab import records
    from tapwise.lab.compare import compare_runs, print_comparisons

    if json is not None:
        try:
            for path in records.write(rows, json, folder, batch):
                console.print(f"wrote {path}", soft_wrap=True)
        except OSError as error:
            typer.echo(f"tapwise: json={str(json)!r}: {error}", err=True)
            raise typer.Exit(1) from None
    return before is not None and print_comparisons(console, compare_runs(before, rows))


def _measure(cases: Sequence[Case], options: Options) -> tuple[list[Record], bool]:
    """(the records, whether the user stopped before the last)."""
    from tapwise.lab import bench as bench_
    from tapwise.lab import report

    console = common.make_console()
    rows: list[Record] = []
    with common.progress_bar(console) as progress:
        task = progress.add_task("measuring", total=len(cases))

        def done(record: Record) -> None:
            rows.append(record)
            progress.update(task, advance=1, description=record.problem[:40])
            if not console.is_terminal:
                count = f"[{len(rows)}/{len(cases)}]"
                typer.echo(f"{count} {record.problem}: {report.microseconds(record.time_us)}", err=True)

        def again(count: int) -> None:
            text = f"{count} again: two threads' cores were far from each other"
            progress.update(task, description=text)
            if not console.is_terminal:
                typer.echo(text, err=True)

        try:
            guarded(lambda: bench_.run(cases, options, done, again))
        except KeyboardInterrupt:
            return rows, True
    return rows, False
