"""The RGB report's experiments: convolution of RGB images by im2col and a product; each half timed, and both.

On a GPU, the report's choices: sides x strides x threads x partition x memory x where the operands lie, and beside them
the product that is tuned and cuBLAS's. On a CPU: sides x strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, Final

from tapwise.lab.study.findings import Chart, Choices, Conclusion, Findings, Value, judge, pivot
from tapwise.lab.study.laboratory import (
    BLAS_PAUSE_S,
    Call,
    CpuLaboratory,
    CudaLaboratory,
    filters,
    images,
    pictures,
    prepared,
    within,
)
from tapwise.lab.study.pictures import PLACES, STRIDES, Progress, growth, splits, splits_chart, splits_table

GEMMS: Final = ("global", "shared", "library")


# The choices of a product that is not split as the report did.
TUNED: Final[dict[str, Value]] = {"partition": "run", "threads": 0}


def im2col_cuda(lab: CudaLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """The columns in global memory, then a product; each half timed by itself too."""
    findings = Findings("im2col", "im2col + GEMM: expansion, product, both", lab.kind, lab.device.name)
    for side, stride, place in product(sides, STRIDES, PLACES):
        progress(f"side {side}, stride {stride}, {place} memory")
        _im2col_cell(lab, findings, side, stride, place)
    for place, (part, memory) in product(PLACES, (("both", "global"), ("both", "shared"), ("expansion", "-"))):
        what = "expansion alone" if part == "expansion" else f"expansion and product, the product from {memory} memory"
        title, choices = f"im2col, {what}, operands in {place} memory", {"place": place, "part": part, "gemm": memory}
        findings.tables.append(splits_table(findings, title, sides, choices))
    ways: list[tuple[str, Choices]] = [("expansion", {"part": "expansion", **TUNED})]
    for part in ("product", "both"):
        ways += [(f"{part} {gemm}", {"part": part, "gemm": gemm, **TUNED}) for gemm in GEMMS]
    ways.append(("sliding window", {"part": "window"}))
    for place in PLACES:
        lines: list[dict[str, Value]] = [{"stride": s, "side": n} for s in STRIDES for n in sides]
        columns: list[tuple[str, Choices]] = [(n, {**c, "place": place}) for n, c in ways]
        findings.tables.append(pivot(findings, f"Each half by itself, operands in {place} memory", lines, columns))
    findings.charts.append(
        Chart(
            "stride 1, device memory",
            "us",
            {
                n: {
                    str(s): us for s in sides if (us := findings.us(**{**c, "side": s, "stride": 1, "place": "device"}))
                }
                for n, c in ways
            },
        )
    )
    for place in PLACES:
        where, both = f"[{place} memory] ", {"place": place, "part": "both"}
        findings.charts.append(splits_chart(findings, sides[-1], both, "gemm"))
        findings.conclusions += [
            growth(findings, sides, f"{where}time grows with the pixels", **both),
            *splits(findings, where, both, "gemm"),
            *_im2col_conclusions(findings, where, {"place": place}, {"gemm": "shared", **TUNED}),
        ]
    return findings


def _im2col_cell(lab: CudaLaboratory, findings: Findings, side: int, stride: int, place: str) -> None:
    """Every way for one picture."""
    from tapwise.ops.conv.cuda.sliding_window import SlidingWindow

    problem, pinned = pictures(side, stride), place == "pinned"
    x, w = lab.tensor(images(problem), pinned), lab.tensor(filters(problem), pinned)
    y, columns = lab.empty(problem.y_shape, pinned), lab.empty((27 * prod(problem.output),), pinned)
    base: dict[str, Value] = {"side": side, "stride": stride, "place": place}
    expanded = set()
    for way, expand, multiply in _ways(lab, side, stride, x, w, columns, y, pinned):

        def both(expand: Call = expand, multiply: Call = multiply) -> None:
            expand()
            multiply()

        if not pinned:
            columns.fill_(float("nan"))
        y.fill_(float("nan"))
        lab.torch.cuda.synchronize()
        both()
        lab.torch.cuda.synchronize()
        good = lab.within(problem, y)
        for part, run in (("expansion", expand), ("product", multiply), ("both", both)):
            choices = {**way, "part": part}
            if part == "expansion":
                # The same for each product.
                choices["gemm"] = "-"
                if (way["partition"], way["threads"]) in expanded:
                    continue
                expanded.add((way["partition"], way["threads"]))
            findings.add(base | choices, lab.time(run) if good else None, good)
    window = SlidingWindow()
    best = min(window.configs(problem, lab.device), key=lambda c: window.predict_us(problem, c, lab.device))
    launch = window.launch(problem, best)
    launch.load(lab.device.architecture, lab.device.index)
    at = {"x": x.data_ptr(), "w": w.data_ptr(), "y": y.data_ptr()}
    launch(at, lab.stream)
    lab.torch.cuda.synchronize()
    good = lab.within(problem, y)
    findings.add(base | {"gemm": "-", "part": "window"}, lab.time(lambda: launch(at, lab.stream)), good)


def _ways(
    lab: CudaLaboratory, side: int, stride: int, x: Any, w: Any, columns: Any, y: Any, pinned: bool
) -> Iterator[tuple[dict[str, Value], Call, Call]]:
    """(choices, expansion, product): the best tiles of each product, cuBLAS in device memory, the report's splits."""
    from tapwise.ops.conv.cuda.im2col_gemm import Im2colGemm

    algorithm, problem, seen = Im2colGemm(), pictures(side, stride), set()
    for config in algorithm.configs(problem, lab.device):
        way: dict[str, Value] = {"gemm": config.gemm, "partition": config.partition, "threads": config.threads}
        if tuple(way.values()) in seen or (config.gemm == "library" and pinned):
            continue
        seen.add(tuple(way.values()))
        first, second = algorithm.launches(problem, config, 1, lab.device)
        first.load(lab.device.architecture, lab.device.index)
        to = {"x": x.data_ptr(), "y": columns.data_ptr()}
        of = {"x": columns.data_ptr(), "w": w.data_ptr(), "y": y.data_ptr()}

        def expand(first: Any = first, to: dict[str, int] = to) -> None:
            first(to, lab.stream)

        def product(second: Any = second, of: dict[str, int] = of) -> None:
            second(of, lab.stream)

        if second is None:
            lab.torch.backends.cuda.matmul.allow_tf32 = False
            yield way, expand, lambda: lab.torch.matmul(w.reshape(3, 27), columns.reshape(27, -1), out=y.reshape(3, -1))
        else:
            second.load(lab.device.architecture, lab.device.index)
            yield way, expand, product


def _im2col_conclusions(findings: Findings, where: str, choices: Choices, product: Choices) -> list[Conclusion]:
    window = {**choices, "part": "window", "gemm": "-"}
    return [
        judge(
            "RGB report",
            f"{where}im2col is slower than the sliding window",
            findings.ratios({**choices, "part": "both", **product}, window),
            lambda m: m > 1,
            "expansion and product / window",
        ),
        judge(
            "RGB report",
            f"{where}that is because the expansion is timed too (without it, it is faster)",
            findings.ratios({**choices, "part": "product", **product}, window),
            lambda m: m < 1,
            "product alone / window",
        ),
    ]


def im2col_cpu(lab: CpuLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """cpu.im2col_gemm against cpu.direct; the expansion by itself is tapwise.im2col."""
    import tapwise

    findings = Findings("im2col", "im2col + GEMM on the CPU", lab.kind, lab.device.name)
    for side, stride in product(sides, STRIDES):
        progress(f"side {side}, stride {stride}")
        problem = pictures(side, stride)
        x, w = images(problem), filters(problem)
        base: dict[str, Value] = {"side": side, "stride": stride, "gemm": "-"}
        gemm, direct = (prepared(problem, w, name) for name in ("cpu.im2col_gemm", "cpu.direct"))
        out = tapwise.im2col(x, 3, padding=problem.padding, stride=stride)
        good = within(problem, gemm(x)), within(problem, direct(x))
        matrix, y = w.reshape(3, 27), out[0, :3].copy()

        def expand(x: Any = x, out: Any = out, problem: Any = problem, stride: int = stride) -> None:
            tapwise.im2col(x, 3, padding=problem.padding, stride=stride, out=out)

        def multiply(matrix: Any = matrix, out: Any = out, y: Any = y) -> None:
            matrix.dot(out[0], out=y)

        multiply()
        whole = within(problem, y.reshape(problem.y_shape))
        runs = {
            "expansion": expand,
            "product": multiply,
            "both": lambda op=gemm, x=x: op(x),
            "window": lambda op=direct, x=x: op(x),
        }
        pauses = {"product": BLAS_PAUSE_S, "both": BLAS_PAUSE_S}
        times = lab.times(runs, pauses)  # type: ignore[arg-type]
        for part, time in times.items():
            findings.add(base | {"part": part}, time, {"both": good[0], "window": good[1]}.get(part, whole))
    ways: list[tuple[str, Choices]] = [
        ("expansion alone", {"part": "expansion"}),
        ("product alone (BLAS)", {"part": "product"}),
        ("cpu.im2col_gemm (in chunks)", {"part": "both"}),
        ("cpu.direct", {"part": "window"}),
    ]
    lines: list[dict[str, Value]] = [{"stride": s, "side": n} for s in STRIDES for n in sides]
    findings.tables.append(pivot(findings, "im2col on the CPU", lines, ways))
    series = {n: {str(s): us for s in sides if (us := findings.us(**{**c, "side": s, "stride": 1}))} for n, c in ways}
    findings.charts.append(Chart("stride 1", "us", series))
    findings.conclusions = [
        growth(findings, sides, "time grows with the pixels", part="both"),
        *_im2col_conclusions(findings, "", {}, {"gemm": "-"}),
    ]
    return findings
