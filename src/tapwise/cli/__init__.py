"""The command line: bench, study, filter, explain, verify, info, report."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapwise.cli.filter import filter_pictures

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from tapwise.lab.suites import Case

app = typer.Typer(
    name="tapwise",
    help="Convolution operators, verified, measured and chosen for you.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Targets = Annotated[
    list[str] | None, typer.Argument(help="suites, suite files, or problems such as 'c64 h56 w56 k64 r3 s3 pad1'")
]
Batch = Annotated[int | None, typer.Option(help="batch size of every problem", min=0)]
Dtype = Annotated[str | None, typer.Option(help="f32, f64, f16, bf16, tf32 or 3xtf32 for every problem")]
Layout = Annotated[str | None, typer.Option(help="nchw or nhwc for every problem")]
Where = Annotated[str, typer.Option(help="cpu, cuda or cuda:<number>")]
Classes = Annotated[list[str] | None, typer.Option("--class", help="only problems of this class; may be repeated")]


def _console() -> Console:
    """Plain text of 100 columns where the output is no terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=100, no_color=True)


def _guarded(work: Callable[[], Any]) -> Any:
    """Run; a mistake of the user's is one line and exit status 2."""
    from tapwise.errors import TapwiseError

    try:
        return work()
    except TapwiseError as error:
        typer.echo(f"tapwise: {error}", err=True)
        raise typer.Exit(2) from None


def _cases(
    targets: list[str], batch: int | None, dtype: str | None, layout: str | None, classes: list[str] | None
) -> list[Case]:
    from tapwise.lab import suites

    cases: list[Case] = _guarded(
        lambda: suites.select(targets, batch=batch, dtype=dtype, layout=layout, categories=classes or ())
    )
    return cases


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="print the version and leave")] = False) -> None:
    """Convolution operators, verified, measured and chosen for you."""
    if version:
        import tapwise

        typer.echo(f"tapwise {tapwise.__version__}")
        raise typer.Exit


@app.command()
def bench(
    targets: Targets = None,
    batch: Batch = None,
    dtype: Dtype = None,
    layout: Layout = None,
    algorithms: Annotated[str, typer.Option(help="auto (the chosen one), all, or ids with commas")] = "auto",
    peers: Annotated[str, typer.Option(help="auto (the installed ones), none, or names with commas")] = "auto",
    threads: Annotated[int | None, typer.Option(help="worker threads, ours and the peers'", min=1)] = None,
    seconds: Annotated[float, typer.Option(help="budget of one problem", min=0.0)] = 2.0,
    repeats: Annotated[int, typer.Option(help="rounds at most", min=1)] = 15,
    classes: Classes = None,
    device: Where = "cpu",
    json: Annotated[Path | None, typer.Option(help="a .json file, or a folder of results")] = None,
) -> None:
    """Verify and time problems, against the installed peers, in turns. Exit status 1 when something is not verified."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tapwise import baselines as libraries
    from tapwise.lab import bench as bench_
    from tapwise.lab import records, report

    cases = _cases(targets or ["quick", "source_documents"], batch, dtype, layout, classes)
    chosen = tuple(_guarded(lambda: libraries.select(peers, device.partition(":")[0])))
    command = " ".join(["tapwise", *(f"'{word}'" if " " in word else word for word in sys.argv[1:])])
    options = bench_.Options(algorithms, chosen, threads, seconds, repeats, command, device)
    console = _console()
    rows: list[records.Record] = []
    stopped = False
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=len(cases))

        def done(record: records.Record) -> None:
            rows.append(record)
            progress.update(task, advance=1, description=record.problem[:40])
            if not console.is_terminal:
                typer.echo(
                    f"[{len(rows)}/{len(cases)}] {record.problem}: {report.microseconds(record.time_us)}", err=True
                )

        try:
            _guarded(lambda: bench_.run(cases, options, done))
        except KeyboardInterrupt:
            stopped = True
    if not rows:
        raise typer.Exit(130 if stopped else 0)
    report.print_bench(console, rows)
    if peers == "auto":
        for peer in libraries.PEERS.values():
            if not peer.installed and peer.device == device.partition(":")[0]:
                console.print(f"{peer.name} is not installed: {peer.install}", style="dim", highlight=False)
    if json is not None:
        try:
            for path in records.write(rows, json, records.folder(device, rows[0].device), batch):
                console.print(f"wrote {path}", highlight=False, soft_wrap=True)
        except OSError as error:
            typer.echo(f"tapwise: json={str(json)!r}: {error}", err=True)
            raise typer.Exit(1) from None
    if stopped:
        console.print(f"stopped after {len(rows)} of {len(cases)}")
        raise typer.Exit(130)
    if not all(row.verified for row in rows):
        raise typer.Exit(1)


@app.command()
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

    console = _console()
    if not stored and (names or ["list"]) == ["list"]:
        for one in study_.STUDIES.values():
            console.print(f"{one.name:16} {one.source:14} {one.summary}", highlight=False)
        return

    def lengths() -> tuple[int, ...] | None:
        if sides is None:
            return None
        words = sides.split(",")
        if not all(word.strip().isdigit() for word in words):
            raise InvalidProblem(f"sides={sides!r}: whole numbers with commas are allowed")
        return tuple(map(int, words))

    def place() -> str:
        from tapwise.cuda.jit.device import why_none

        return ("cuda" if why_none() is None else "cpu") if device == "auto" else device

    command = " ".join(["tapwise", *sys.argv[1:]])
    done: list[Findings] = []
    try:
        for path in stored or ():
            done.append(Findings.load(path))
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
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)

    for findings in done:
        finish(findings)
    if not stored:
        chosen, wanted, where = _guarded(lambda: study_.select(names or [])), _guarded(lengths), _guarded(place)
        for one in chosen:
            with console.status(one.name) as status:
                done.append(_guarded(partial(study_.run, one, where, wanted, status.update, command)))
            finish(done[-1])
    if done and not any(findings.charts and list(output.glob("*.png")) for findings in done):
        console.print("no pictures: pip install 'tapwise[study]'", style="dim", highlight=False)
    if any(row.time_us is not None and not row.verified for findings in done for row in findings.rows):
        raise typer.Exit(1)


app.command("filter")(filter_pictures)


@app.command()
def explain(
    problem: Annotated[str, typer.Argument(help="a problem such as 'c64 h56 w56 k64 r3 s3 pad1'")],
    threads: Annotated[int | None, typer.Option(help="worker threads", min=1)] = None,
    device: Where = "cpu",
) -> None:
    """Show every algorithm for a problem: whether it applies, predicted time, config, workspace; and the choice."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from tapwise import dispatch, registry
    from tapwise.lab.bench import device_of
    from tapwise.lab.report import microseconds, size
    from tapwise.ops.conv.api import as_images
    from tapwise.ops.conv.problem import ConvProblem
    from tapwise.registry import parse

    parsed = _guarded(lambda: parse(problem))
    filters = ""
    if isinstance(parsed, ConvProblem):
        parsed = as_images(parsed)
        filters = f"w {parsed.w_shape}, "
    here = _guarded(lambda: device_of(device, threads))
    console = _console()
    workers = "threads" if here.kind == "cpu" else "multiprocessors"
    console.print(
        f"{parsed}: x {parsed.x_shape}, {filters}y {parsed.y_shape}; {parsed.flops / 1e6:.1f} MFLOP, "
        f"{parsed.bytes / 1e6:.2f} MB; {here.name}, {here.threads} {workers}",
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("algorithm", "predicted", "packing", "scratch", "config, or why not"):
        table.add_column(
            name, overflow="fold", justify="left" if name in ("algorithm", "config, or why not") else "right"
        )
    for row in _guarded(lambda: dispatch.explain(parsed, here)):
        if row.reason is not None:
            table.add_row(row.algorithm, "-", "-", "-", row.reason, style="dim")
        else:
            times = microseconds(row.predicted_us), microseconds(row.pack_us)
            table.add_row(row.algorithm, *times, size(row.workspace_bytes), str(row.config) or "-")
    console.print(table)
    choice = _guarded(lambda: dispatch.choose(parsed, here))
    made_of = registry.get(choice.algorithm, parsed.operator).explain(parsed, choice.config, here)
    if made_of:
        console.print(f"{choice.algorithm}: {made_of}", highlight=False)
    if not filters:
        console.print(f"{choice.algorithm}. {choice.reason}", highlight=False)
        return
    console.print(f"prepared: {choice.algorithm}. {choice.reason}", highlight=False)
    once = _guarded(lambda: dispatch.choose(parsed, here, prepared=False))
    console.print(f"plain conv2d, which packs on each call: {once.algorithm}. {once.reason}", highlight=False)


@app.command()
def verify(
    targets: Targets = None,
    batch: Batch = None,
    dtype: Dtype = None,
    layout: Layout = None,
    algorithms: Annotated[str, typer.Option(help="all, or ids with commas")] = "all",
    integers: Annotated[bool, typer.Option(help="whole numbers: exact results wherever the arithmetic allows")] = False,
    seed: Annotated[int, typer.Option(help="of the random data")] = 0,
    classes: Classes = None,
    device: Where = "cpu",
) -> None:
    """Compare every algorithm that applies with float64. Exit status 1 when one is wrong."""
    from tapwise import registry
    from tapwise import verify as verify_
    from tapwise.lab.bench import device_of
    from tapwise.ops.conv.api import as_images
    from tapwise.ops.conv.problem import ConvProblem

    cases = _cases(targets or ["quick"], batch, dtype, layout, classes)
    for operator in {case.problem.operator for case in cases}:
        if algorithms != "all":
            _guarded(lambda operator=operator: [registry.get(name, operator) for name in algorithms.split(",")])  # type: ignore[misc]
    console = _console()
    here = _guarded(lambda: device_of(device))
    failures = checked = 0
    for case in cases:
        problem = as_images(case.problem) if isinstance(case.problem, ConvProblem) else case.problem
        console.print(str(problem), highlight=False)
        for name in registry.ALGORITHMS[problem.operator] if algorithms == "all" else algorithms.split(","):
            reason = registry.get(name, problem.operator).refusal(problem, here)
            if reason is not None:
                if algorithms != "all":
                    console.print(f"  {name:18} does not apply: it {reason}", highlight=False)
                continue
            verdict = verify_.check(problem, name, device=here, seed=seed, integers=integers)
            checked += 1
            failures += not verdict.verified
            style = None if verdict.verified else "bold red"
            word = "ok   " if verdict.verified else "WRONG"
            figures = f"error {verdict.error:.2g}, bound {verdict.bound:.2g}; {verdict.message}"
            console.print(f"  {name:18} {word} {figures}", style=style, highlight=False, soft_wrap=True)
    console.print(f"{checked - failures} of {checked} verified", highlight=False)
    if failures:
        raise typer.Exit(1)


@app.command()
def info() -> None:
    """Show the CPU, its caches and ceilings, threads, GPUs or why there is none, versions, and the cache folder."""
    from rich.table import Table

    from tapwise import settings
    from tapwise.cpu import device, driver
    from tapwise.cuda.jit.device import described as gpus
    from tapwise.lab import records, roofline

    here = _guarded(device.host)
    driver.settle()
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
    _console().print(table, highlight=False)


@app.command()
def report(
    documents: Annotated[list[Path] | None, typer.Argument(help="documents with markers")] = None,
    results: Annotated[Path, typer.Option(help="folder of results")] = Path("benchmarks/results"),
    check: Annotated[bool, typer.Option(help="change nothing; exit status 1 when a document is out of date")] = False,
) -> None:
    """Write the tables between markers of documents (<!-- results:NAME -->, <!-- study:NAME -->) from the results."""
    from tapwise.lab import report as report_

    rows, findings = report_.load(results), report_.studies(results)
    stale = []
    for path in documents or [Path("README.md"), *sorted(Path("docs").glob("**/*.md"))]:
        text = path.read_text(encoding="utf-8")
        try:
            new = report_.rewrite(text, rows, findings)
        except KeyError as error:
            typer.echo(f"tapwise: {path}: {error.args[0]}", err=True)
            raise typer.Exit(2) from None
        if new != text:
            stale.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        typer.echo(f"{path} {'is out of date' if check else 'rewritten'}")
    if stale and check:
        raise typer.Exit(1)
