"""The experiments of conv2d_direct: direct convolution against the vendor's library, and the ladder of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tapwise.baselines import PEERS
from tapwise.lab.study.findings import Chart, Choices, Findings, Value, judge, ladder, pivot
from tapwise.lab.study.laboratory import Call, CpuLaboratory, CudaLaboratory, Progress, filters, images, target
from tapwise.ops.conv.problem import ConvProblem

HEADLINE: Final = "c6 h768 w512 k6 r6 s6"
RUNS: Final = 99
SIZES: Final = ((768, 512), (840, 1200), (960, 1440), (1200, 1680), (1440, 1920), (1920, 2400))
# Milliseconds of the document's tables on its machine: cuDNN and its kernel.
DOCUMENT: Final = {
    "3x3": ((0.106, 0.119), (0.300, 0.283), (0.408, 0.406), (0.593, 0.548), (0.745, 0.745), (1.349, 1.243)),
    "6x6": ((0.257, 0.160), (0.667, 0.378), (0.808, 0.449), (1.326, 0.743), (1.771, 0.971), (2.905, 1.583)),
}
LADDER: Final = (HEADLINE, "c3 h1920 w2400 k3 r6 s6", "c3 h1024 w1024 k3 r3 s3")


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
    findings = Findings("direct", "Direct convolution against cuDNN", lab.kind, lab.device.name)
    for problem in shapes(max(sides)):
        progress(str(problem))
        runs, good = lab.direct(problem)
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
    findings = Findings("direct", "Direct convolution against the CPU's libraries", lab.kind, lab.device.name)
    rivals = [name for name in ("onednn", "onednn-cl", "mlas") if PEERS[name].installed]
    for problem in shapes(max(sides)):
        progress(str(problem))
        x, w = images(problem), filters(problem)
        run, good = lab.prepared(problem, x, w, "cpu.direct")
        peers, pauses = lab.peers(dict.fromkeys(rivals, problem), x, w, findings.notes)
        times = lab.times({"cpu.direct": run, **peers}, pauses)
        findings.add_all({"problem": _name(problem), "way": "median"}, "method", times, {"cpu.direct": good})
    return _direct(findings, "cpu.direct", tuple(rivals), "median")


def _direct(findings: Findings, ours: str, rivals: Sequence[str], way: str) -> Findings:
    names, ways = findings.values("problem"), findings.values("way")
    columns = [(f"{m}, {w}", {"method": m, "way": w}) for w in ways for m in (ours, *rivals)]
    findings.tables.append(pivot(findings, "Times", [{"problem": name} for name in names], columns))

    def ratio(name: str, way: str) -> float | None:
        mine = findings.us(problem=name, method=ours, way=way)
        best = [us for rival in rivals if (us := findings.us(problem=name, method=rival, way=way))]
        return min(best) / mine if mine and best else None

    series = {w: {name: one for name in names if (one := ratio(name, w))} for w in ways}
    findings.charts.append(Chart("library / ours", "times", series, log=False))

    def over(some: Iterable[str]) -> list[float]:
        return [one for name in some if (one := ratio(name, way))]

    def rgb(size: str) -> list[str]:
        return [name for name in names if name.startswith("3x") and name.endswith(size)]

    headline = _name(ConvProblem.parse(HEADLINE))
    small, large = (
        f"RGB pictures, {kind} ({min(claims):.2f} to {max(claims):.2f} there)"
        for kind, rows in DOCUMENT.items()
        if (claims := [cudnn / own for cudnn, own in rows])
    )
    source, what, least = "conv2d_direct", "library / ours", [min(over(names), default=0.0)]
    never_slower = "no slower than the library on any of the shapes"
    findings.conclusions = [
        judge(source, "1.2 x the library on the headline shape", over([headline]), what, lambda m: m >= 1.2),
        judge(source, f"level with the library on {small}", over(rgb("3x3")), what, lambda m: 0.85 < m < 1.15),
        judge(source, f"ahead of it on {large}", over(rgb("6x6")), what),
        judge("ours", never_slower, least, f"the least of {what}", lambda m: m >= 1),
    ]
    return findings


def ladder_cuda(lab: CudaLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """The steps of cuda.direct, each with its best predicted config."""
    from tapwise.ops.conv.cuda.direct import STEPS

    findings = Findings("ladder", "The ladder: one idea more on each rung", lab.kind, lab.device.name)
    steps = tuple(reversed(STEPS))
    for text in LADDER:
        problem = ConvProblem.parse(text)
        progress(text)
        x, w = lab.tensor(images(problem)), lab.tensor(filters(problem))
        runs: dict[str, Call] = {}
        good = {}
        for step in steps:
            runs[step], good[step] = lab.prepared(problem, x, w, "cuda.direct", f"step={step}")
        times = lab.times(runs | lab.cudnn(problem, x, w))
        findings.add_all({"problem": _name(problem)}, "step", times, good)
    return ladder(findings, "conv2d_direct", "problem", (*steps, "cudnn", "cudnn-cl"), steps)


def ladder_cpu(lab: CpuLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """From plain loops to the chosen algorithm on all threads."""
    findings = Findings("ladder", "The ladder: one idea more on each rung", lab.kind, lab.device.name)
    widths, threads = lab.widths(), lab.device.threads
    # The CPU's own vectors are those of the target "host".
    tiles = [(f"register tile, {size}-byte vectors", "cpu.direct", name, 1) for name, size in widths]
    many = [(f"{threads} threads", "cpu.direct", "host", threads)] if threads > 1 else []
    plain, chosen = ("plain loops", "cpu.serial", "host", 1), ("the chosen algorithm", "auto", "host", threads)
    rungs = [plain, *tiles, *many, chosen]
    for text in (*LADDER, "c64 h56 w56 k64 r3 s3 pad1"):
        progress(text)
        problem = ConvProblem.parse(text)
        climb_cpu(lab, findings, {"problem": _name(problem)}, problem, rungs)
    names = tuple(name for name, *_ in rungs)
    return ladder(findings, "conv2d_direct", "problem", names, names)


def climb_cpu(
    lab: CpuLaboratory,
    findings: Findings,
    choices: Choices,
    problem: ConvProblem,
    rungs: Sequence[tuple[str, str, str, int | None]],
) -> None:
    """A row for each rung: its name, algorithm, CPU target and threads."""
    x, w = images(problem), filters(problem)
    runs: dict[str, Call] = {}
    good = {}
    for name, algorithm, where, threads in rungs:
        with target(where):
            runs[name], within = lab.prepared(problem, x, w, algorithm, threads)
        # Winograd sums something else, and has a bound of its own.
        good[name] = algorithm == "auto" or within
    findings.add_all(choices, "step", lab.times(runs), good)
