"""The commands `tapwise explain` and `tapwise verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from tapwise.cli.common import (
    Batch,
    Classes,
    Dtype,
    Layout,
    Targets,
    Where,
    guarded,
    make_console,
    problem_cases,
)


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
        console.print(f"{choice.algorithm}: {made_of}")
    if not filters:
        console.print(f"{choice.algorithm}. {choice.reason}")
        return
    console.print(f"prepared: {choice.algorithm}. {choice.reason}")
    once = guarded(lambda: dispatch.choose(parsed, here, prepared=False))
    console.print(f"plain conv2d, which packs on each call: {once.algorithm}. {once.reason}")


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
    """Compare every algorithm that applies with float64. Exit status 1 when one is wrong, or none applies."""
    from tapwise import registry
    from tapwise import verify as verify_
    from tapwise.errors import NotApplicable
    from tapwise.lab.bench import check_ids, device_of

    cases = problem_cases(targets or ["quick"], batch, dtype, layout, classes, device)
    guarded(lambda: check_ids(algorithms, cases))
    console = make_console()
    here = guarded(lambda: device_of(device))
    failures = checked = untried = 0
    all_of_them = algorithms in ("all", "auto")
    for case in cases:
        problem = case.problem.canonical()
        console.print(str(case.problem), soft_wrap=True)
        rows, refusals, before = registry.ALGORITHMS[problem.operator], [], checked
        every = [one.id for one in registry.of_backend(here.kind, problem.operator)]
        for name in every if all_of_them else [name for name in algorithms.split(",") if name in rows]:
            try:
                verdict = verify_.check(problem, name, device=here, seed=seed, integers=integers)
            except NotApplicable:
                reason = registry.get(name, problem.operator).refusal(problem, here)
                refusals.append(f"  {name:22} does not apply: it {reason or 'has no config for it'}")
                continue
            checked += 1
            failures += not verdict.verified
            style = None if verdict.verified else "bold red"
            word = "ok   " if verdict.verified else "WRONG"
            figures = f"error {verdict.error:.2g}, bound {verdict.bound:.2g}; {verdict.message}"
            console.print(f"  {name:22} {word} {figures}", style=style, soft_wrap=True)
        untried += checked == before
        for line in refusals if not all_of_them or checked == before else ():
            console.print(line, soft_wrap=True)
    console.print(f"{checked - failures} of {checked} verified")
    if untried and (all_of_them or not checked):
        failures += untried
        console.print(f"no algorithm takes {untried} of {len(cases)} problems", style="bold red")
    if failures:
        raise typer.Exit(1)
