"""The RGB report's experiments: convolution of RGB images by im2col and a product; each half timed, and both.

On a GPU, the report's choices: sides x strides x threads x partition x memory x where the operands lie, and beside them
the product that is tuned and cuBLAS's. On a CPU: sides x strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final

from tapwise.lab.study.findings import Choices, Columns, Conclusion, Findings, Value, bars, judge, pivot
from tapwise.lab.study.laboratory import (
    BLAS_PAUSE_S,
    Call,
    CpuLaboratory,
    CudaLaboratory,
    Progress,
    filters,
    images,
    pictures,
    within,
)
from tapwise.lab.study.pictures import PLACES, STRIDES, cells, growth, splits, splits_chart, splits_table

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
    halves = [(part, gemm) for part in ("product", "both") for gemm in GEMMS]
    ways: Columns = [
        ("expansion", {"part": "expansion", **TUNED}),
        *((f"{part} {gemm}", {"part": part, "gemm": gemm, **TUNED}) for part, gemm in halves),
        ("sliding window", {"part": "window"}),
    ]
    for place in PLACES:
        columns = [(n, {**c, "place": place}) for n, c in ways]
        title = f"Each half by itself, operands in {place} memory"
        findings.tables.append(pivot(findings, title, cells(sides), columns))
    at_one = [(n, {**c, "stride": 1, "place": "device"}) for n, c in ways]
    findings.charts.append(bars(findings, "stride 1, device memory", at_one, "side", sides))
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

        expand = partial(first, to, lab.stream)
        if second is None:
            lab.torch.backends.cuda.matmul.allow_tf32 = False
            matrix, result = w.reshape(3, 27), y.reshape(3, -1)
            yield way, expand, partial(lab.torch.matmul, matrix, columns.reshape(27, -1), out=result)
        else:
            second.load(lab.device.architecture, lab.device.index)
            yield way, expand, partial(second, of, lab.stream)


def _im2col_conclusions(findings: Findings, where: str, choices: Choices, product: Choices) -> list[Conclusion]:
    window = {**choices, "part": "window", "gemm": "-"}
    both, alone = (findings.ratios({**choices, "part": part, **product}, window) for part in ("both", "product"))
    slower, why = f"{where}im2col is slower than the sliding window", "that is because the expansion is timed too"
    faster = f"{where}{why} (without it, it is faster)"
    return [
        judge("RGB report", slower, both, "expansion and product / window"),
        judge("RGB report", faster, alone, "product alone / window", lambda m: m < 1),
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
        both, both_good = lab.prepared(problem, x, w, "cpu.im2col_gemm")
        window, window_good = lab.prepared(problem, x, w, "cpu.direct")
        expand = partial(tapwise.im2col, x, 3, padding=problem.padding, stride=stride)
        out = expand()
        matrix, y = w.reshape(3, 27), out[0, :3].copy()
        multiply = partial(matrix.dot, out[0], out=y)
        multiply()
        whole = within(problem, y.reshape(problem.y_shape))
        runs: dict[str, Call] = {
            "expansion": partial(expand, out=out),
            "product": multiply,
            "both": both,
            "window": window,
        }
        times = lab.times(runs, {"product": BLAS_PAUSE_S, "both": BLAS_PAUSE_S})
        good = {"expansion": whole, "product": whole, "both": both_good, "window": window_good}
        findings.add_all(base, "part", times, good)
    ways: Columns = [
        ("expansion alone", {"part": "expansion"}),
        ("product alone (BLAS)", {"part": "product"}),
        ("cpu.im2col_gemm (in chunks)", {"part": "both"}),
        ("cpu.direct", {"part": "window"}),
    ]
    findings.tables.append(pivot(findings, "im2col on the CPU", cells(sides), ways))
    at_one = [(n, {**c, "stride": 1}) for n, c in ways]
    findings.charts.append(bars(findings, "stride 1", at_one, "side", sides))
    findings.conclusions = [
        growth(findings, sides, "time grows with the pixels", part="both"),
        *_im2col_conclusions(findings, "", {}, {"gemm": "-"}),
    ]
    return findings
