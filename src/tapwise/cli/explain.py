"""The commands `tapwise explain` and `tapwise verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from tapwise.cli.common import Batch, Classes, Dtype, Layout, Targets, Where, guarded, make_console, problem_cases


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
    from tapwise.registry import parse

    parsed = guarded(lambda: parse(problem).canonical())
    filters = f"w {parsed.w_shape}, " if parsed.w_shape else ""
    here = guarded(lambda: device_of(device, threads))
    console = make_console()
    workers = f"{here.threads} threads" if here.kind == "cpu" else f"{here.multiprocessors} multiprocessors"
    console.print(
        f"{parsed}: x {parsed.x_shape}, {filters}y {parsed.y_shape}; {parsed.flops / 1e6:.1f} MFLOP, "
        f"{parsed.bytes / 1e6:.2f} MB; {here.name}, {workers}",
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("algorithm", "predicted", "packing", "scratch", "config, or why not"):
        figures = name in ("predicted", "packing", "scratch")
        table.add_column(name, overflow="fold", justify="right" if figures else "left")
    for row in guarded(lambda: dispatch.explain(parsed, here)):
        if row.reason is not None:
            table.add_row(row.algorithm, "-", "-", "-", row.reason, style="dim")
        else:
            times = microseconds(row.predicted_us), microseconds(row.pack_us)
            table.add_row(row.algorithm, *times, size(row.workspace_bytes), str(row.config) or "-")
    console.print(table)
    choice = guarded(lambda: dispatch.choose(parsed, here))
    made_of = registry.get(choice.algorithm, parsed.operator).explain(parsed, choice.config, here)
    if made_of:
        console.print(f"{choice.algorithm}: {made_of}", highlight=False)
    if not filters:
        console.print(f"{choice.algorithm}. {choice.reason}", highlight=False)
        return
    console.print(f"prepared: {choice.algorithm}. {choice.reason}", highlight=False)
    once = guarded(lambda: dispatch.choose(parsed, here, prepared=False))
    console.print(f"plain conv2d, which packs on each call: {once.algorithm}. {once.reason}", highlight=False)


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

    cases = problem_cases(targets or ["quick"], batch, dtype, layout, classes)
    for operator in {case.problem.operator for case in cases}:
        if algorithms != "all":
            guarded(lambda operator=operator: [registry.get(name, operator) for name in algorithms.split(",")])  # type: ignore[misc]
    console = make_console()
    here = guarded(lambda: device_of(device))
    failures = checked = 0
    for case in cases:
        problem = case.problem.canonical()
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
