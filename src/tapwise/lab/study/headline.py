"""The experiments of conv2d_direct: direct convolution against the vendor's library, and the ladder of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from tapwise.lab.study.findings import Chart, Findings, Value, climb, judge, pivot
from tapwise.lab.study.laboratory import (
    CpuLaboratory,
    CudaLaboratory,
    filters,
    images,
    prepared,
    target,
    within,
)
from tapwise.ops.conv.problem import ConvProblem
from tapwise.problem import Inputs

HEADLINE: Final = "c6 h768 w512 k6 r6 s6"
RUNS: Final = 99
SIZES: Final = ((768, 512), (840, 1200), (960, 1440), (1200, 1680), (1440, 1920), (1920, 2400))
# Milliseconds of the document's tables on its machine: cuDNN and its kernel.
DOCUMENT: Final = {
    "3x3": ((0.106, 0.119), (0.300, 0.283), (0.408, 0.406), (0.593, 0.548), (0.745, 0.745), (1.349, 1.243)),
    "6x6": ((0.257, 0.160), (0.667, 0.378), (0.808, 0.449), (1.326, 0.743), (1.771, 0.971), (2.905, 1.583)),
}
LADDER: Final = (HEADLINE, "c3 h1920 w2400 k3 r6 s6", "c3 h1024 w1024 k3 r3 s3")

Progress = Callable[[str], None]


def shapes(largest: int) -> list[ConvProblem]:
    """The headline and the twelve shapes of the repository, of up to so many rows."""
    found = [ConvProblem.parse(HEADLINE)]
    for size in (3, 6):
        found += [ConvProblem.parse(f"c3 h{h} w{w} k3 r{size} s{size}") for h, w in SIZES if h <= largest]
    return found


def _name(problem: ConvProblem) -> str:
    (h, w), (r, s) = problem.spatial, problem.kernel
    return f"{problem.c}x{h}x{w}, {r}x{s}"


def direct_cuda(lab: CudaLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """cuda.direct and cuDNN: mean of 99 calls between events, the first left out, as conv2d_direct; in CUDA graphs."""
    import tapwise

    findings = Findings("direct", "Direct convolution against cuDNN", lab.kind, lab.device.name)
    for problem in shapes(max(sides)):
        progress(str(problem))
        x, w = lab.tensor(images(problem)), lab.tensor(filters(problem))
        operator = tapwise.prepare(problem, w, algorithm="cuda.direct")
        good = lab.within(problem, operator(x))
        runs: dict[str, Any] = {
            "cuda.direct": lambda op=operator, x=x: op(x),
            "cudnn": lab.convolution(problem, x, w),
            "cudnn-cl": lab.convolution(problem, x, w, True),
        }
        for run in runs.values():
            run()
        singles: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(RUNS):
            for name, run in runs.items():
                singles[name].append(lab.once(run))
        graphs = lab.times(runs)
        for name in runs:
            ok = good or name != "cuda.direct"
            base: dict[str, Value] = {"problem": _name(problem), "method": name}
            ordered = sorted(singles[name])
            findings.add(base | {"way": "mean of 99"}, (sum(ordered) / RUNS, 0.0), ok)
            spread = (ordered[3 * RUNS // 4] - ordered[RUNS // 4]) / 2
            findings.add(base | {"way": "median of 99"}, (ordered[RUNS // 2], spread), ok)
            findings.add(base | {"way": "graph"}, graphs[name], ok)
    return _direct(findings, "cuda.direct", ("cudnn", "cudnn-cl"), "graph")


def direct_cpu(lab: CpuLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """The chosen algorithm, cpu.direct and the CPU's libraries."""
    from tapwise.baselines import PEERS
    from tapwise.errors import PeerUnavailable

    findings = Findings("direct", "Direct convolution against the CPU's libraries", lab.kind, lab.device.name)
    rivals = [name for name in ("onednn", "onednn-cl", "mlas") if PEERS[name].installed]
    for problem in shapes(max(sides)):
        progress(str(problem))
        x, w = images(problem), filters(problem)
        operator = prepared(problem, w, "cpu.direct")
        good = within(problem, operator(x))
        runs: dict[str, Any] = {"cpu.direct": lambda op=operator, x=x: op(x)}
        pauses: dict[str, float] = {}
        for name in rivals:
            try:
                peer = PEERS[name].prepare(problem, Inputs(x, w), lab.device.threads)
                runs[name], pauses[name] = peer.run, peer.pause_s
            except PeerUnavailable as error:
                findings.notes.append(f"{name}: {error}")
        for name, time in lab.times(runs, pauses).items():
            choices: dict[str, Value] = {"problem": _name(problem), "method": name, "way": "median"}
            findings.add(choices, time, good or name != "cpu.direct")
    return _direct(findings, "cpu.direct", tuple(rivals), "median")


def _direct(findings: Findings, ours: str, rivals: Sequence[str], way: str) -> Findings:
    names = tuple(dict.fromkeys(str(row.choices["problem"]) for row in findings.rows))
    ways = tuple(dict.fromkeys(str(row.choices["way"]) for row in findings.rows))
    columns = [(f"{m}, {w}", {"method": m, "way": w}) for w in ways for m in (ours, *rivals)]
    findings.tables.append(pivot(findings, "Times", [{"problem": name} for name in names], columns))

    def ratio(name: str, way: str) -> float | None:
        mine = findings.us(problem=name, method=ours, way=way)
        best = [us for rival in rivals if (us := findings.us(problem=name, method=rival, way=way))]
        return min(best) / mine if mine and best else None

    findings.charts.append(
        Chart(
            "library / ours",
            "times",
            {w: {name: one for name in names if (one := ratio(name, w))} for w in ways},
            log=False,
        )
    )

    def over(part: Callable[[str], bool]) -> list[float]:
        return [one for name in names if part(name) and (one := ratio(name, way))]

    headline = _name(ConvProblem.parse(HEADLINE))
    there = {}
    for kind, rows in DOCUMENT.items():
        claims = [cudnn / own for cudnn, own in rows]
        there[kind] = f"({min(claims):.2f} to {max(claims):.2f} there)"
    findings.conclusions = [
        judge("conv2d_direct", "1.2 x the library on the headline shape", over(lambda n: n == headline),
              lambda m: m >= 1.2, "library / ours"),
        judge("conv2d_direct", f"level with the library on RGB pictures, 3x3 {there['3x3']}",
              over(lambda n: n.startswith("3x") and n.endswith("3x3")), lambda m: 0.85 < m < 1.15, "library / ours"),
        judge("conv2d_direct", f"ahead of it on RGB pictures, 6x6 {there['6x6']}",
              over(lambda n: n.startswith("3x") and n.endswith("6x6")), lambda m: m > 1, "library / ours"),
        judge("ours", "no slower than the library on any of the shapes", [min(over(lambda n: True), default=0.0)],
              lambda m: m >= 1, "the least of library / ours"),
    ]  # fmt: skip
    return findings


def ladder_cuda(lab: CudaLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """The steps of cuda.direct, each with its best predicted config."""
    import tapwise
    from tapwise.ops.conv.cuda.direct import STEPS

    findings = Findings("ladder", "The ladder: one idea more on each rung", lab.kind, lab.device.name)
    for text in LADDER:
        problem = ConvProblem.parse(text)
        progress(text)
        x, w = lab.tensor(images(problem)), lab.tensor(filters(problem))
        runs: dict[str, Any] = {}
        good = {}
        for step in reversed(STEPS):
            operator = tapwise.prepare(problem, w, algorithm="cuda.direct", config=f"step={step}")
            runs[step] = lambda op=operator, x=x: op(x)
            good[step] = lab.within(problem, operator(x))
        runs |= {"cudnn": lab.convolution(problem, x, w), "cudnn-cl": lab.convolution(problem, x, w, True)}
        for name, time in lab.times(runs).items():
            findings.add({"problem": _name(problem), "step": name}, time, good.get(name, True))
    return _ladder(findings, (*reversed(STEPS), "cudnn", "cudnn-cl"), tuple(reversed(STEPS)))


def ladder_cpu(lab: CpuLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """From plain loops to the chosen algorithm on all threads."""
    findings = Findings("ladder", "The ladder: one idea more on each rung", lab.kind, lab.device.name)
    rungs = [("plain loops", "cpu.serial", "host", 1)]
    widths = lab.widths()
    if len(widths) > 1:
        rungs.append((f"register tile, {widths[0][1]}-byte vectors", "cpu.direct", widths[0][0], 1))
    rungs.append((f"register tile, {widths[-1][1]}-byte vectors", "cpu.direct", "host", 1))
    if lab.device.threads > 1:
        rungs.append((f"{lab.device.threads} threads", "cpu.direct", "host", lab.device.threads))
    rungs.append(("the chosen algorithm", "auto", "host", lab.device.threads))
    for text in (*LADDER, "c64 h56 w56 k64 r3 s3 pad1"):
        problem = ConvProblem.parse(text)
        progress(text)
        x, w = images(problem), filters(problem)
        runs: dict[str, Any] = {}
        good = {}
        for name, algorithm, where, threads in rungs:
            with target(where):
                operator = prepared(problem, w, algorithm, threads)
            runs[name] = lambda op=operator, x=x: op(x)
            # Winograd sums something else, and has a bound of its own.
            good[name] = algorithm == "auto" or within(problem, operator(x))
        for name, time in lab.times(runs).items():
            findings.add({"problem": _name(problem), "step": name}, time, good[name])
    names = tuple(name for name, *_ in rungs)
    return _ladder(findings, names, names)


def _ladder(findings: Findings, names: tuple[str, ...], steps: tuple[str, ...]) -> Findings:
    problems = tuple(dict.fromkeys(str(row.choices["problem"]) for row in findings.rows))
    findings.tables.append(
        pivot(findings, "Rungs", [{"step": name} for name in names], [(p, {"problem": p}) for p in problems])
    )
    findings.charts.append(
        Chart("Rungs", "us", {p: {n: us for n in names if (us := findings.us(problem=p, step=n))} for p in problems})
    )
    findings.conclusions += climb(findings, "conv2d_direct", "problem", steps)
    return findings
