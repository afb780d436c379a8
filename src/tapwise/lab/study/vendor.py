"""The RGB report's and our question about the vendor's library: what its warm calls take, and what its first one."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from typing import Any

from tapwise.lab.study.findings import Chart, Conclusion, Findings, Value, judge, pivot
from tapwise.lab.study.laboratory import CpuLaboratory, CudaLaboratory, filters, images, pictures, prepared, within
from tapwise.lab.study.pictures import STRIDES, Progress, rivals
from tapwise.problem import Inputs


def cudnn_cuda(lab: CudaLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """cuDNN warm and with its first call, in processes of their own."""
    findings = Findings("cudnn", "cuDNN, warm and with its first call", lab.kind, lab.device.name)
    for side, stride in product(sides, STRIDES):
        progress(f"side {side}, stride {stride}")
        rivals(lab, findings, side, stride)
    for row in findings.rows:
        row.choices["when"] = "warm"
    _first_calls(findings, sides, progress, ("cudnn", "cuda.direct"), "cuda")
    return _vendor(findings, sides, "cudnn", "cuda.direct", ("cudnn", "cudnn-cl"))


def vendor_cpu(lab: CpuLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """The CPU's vendor libraries, warm and with their first call."""
    from tapwise.baselines import PEERS
    from tapwise.errors import PeerUnavailable
    from tapwise.ops.conv.problem import ConvProblem

    findings = Findings("cudnn", "The vendor's library, warm and with its first call", lab.kind, lab.device.name)
    names = [name for name in ("onednn", "mlas") if PEERS[name].installed]
    for side, stride in product(sides, STRIDES):
        progress(f"side {side}, stride {stride}")
        problem = pictures(side, stride)
        x, w = images(problem), filters(problem)
        operator = prepared(problem, w, "auto")
        runs: dict[str, Any] = {"tapwise": lambda op=operator, x=x: op(x)}
        pauses: dict[str, float] = {}
        good = within(problem, operator(x))
        for name in names:
            # PyTorch has equal padding only: the same number of outputs, the odd rest left out.
            even = problem.replace(padding=tuple((a, a) for a, _ in problem.padding))
            wanted: ConvProblem = problem if name == "mlas" else even
            try:
                peer = PEERS[name].prepare(wanted, Inputs(x, w), lab.device.threads)
                runs[name], pauses[name] = peer.run, peer.pause_s
            except PeerUnavailable as error:
                findings.notes.append(f"{name}: {error}")
        for name, time in lab.times(runs, pauses).items():
            choices: dict[str, Value] = {"side": side, "stride": stride, "method": name, "when": "warm"}
            findings.add(choices, time, good or name != "tapwise")
    _first_calls(findings, sides, progress, (*names, "tapwise"), "cpu")
    if "onednn" in names:
        findings.notes.append(
            "oneDNN through PyTorch pads both sides alike: where that padding is odd, one row and column less."
        )
    return _vendor(findings, sides, names[0] if names else "onednn", "tapwise", tuple(names))


def _vendor(findings: Findings, sides: tuple[int, ...], vendor: str, ours: str, vendors: tuple[str, ...]) -> Findings:
    lines: list[dict[str, Value]] = [{"stride": s, "side": n} for s in STRIDES for n in sides]
    names = tuple(dict.fromkeys(str(row.choices["method"]) for row in findings.rows if row.choices["when"] == "warm"))
    findings.tables.append(pivot(findings, "Warm", lines, [(name, {"method": name, "when": "warm"}) for name in names]))
    moments = ("start", "first call", "second call")
    methods = tuple(dict.fromkeys(str(row.choices["method"]) for row in findings.rows if row.choices["when"] != "warm"))
    findings.tables.append(
        pivot(
            findings,
            "In a process of its own, wall time (start: the library and, on a GPU, the context)",
            [{"side": n, "method": m} for n in sides for m in methods],
            [(moment, {"stride": 1, "when": moment}) for moment in moments],
        )
    )
    findings.charts.append(
        Chart(
            "stride 1: warm",
            "us",
            {
                name: {str(n): us for n in sides if (us := findings.us(side=n, stride=1, method=name, when="warm"))}
                for name in names
            },
        )
    )

    def taken(side: int, stride: int, method: str, when: str) -> float:
        return findings.us(side=side, stride=stride, method=method, when=when) or 0.0

    starts = [taken(n, 1, vendor, "start") + taken(n, 1, vendor, "first call") for n in sides]
    warm = [taken(n, 1, vendor, "warm") for n in sides]
    if all(starts) and all(warm):
        figures = "; ".join(
            f"{n}: {start / 1e6:.2f} s with its start, {time / 1e3:.3g} ms warm"
            for n, start, time in zip(sides, starts, warm, strict=True)
        )
        share = max(time / (time + start) for time, start in zip(warm, starts, strict=True))
        findings.conclusions += [
            Conclusion("RGB report", "the library takes seconds, whatever the size (warm)", max(warm) > 1e6, figures),
            Conclusion("ours", "nearly all of a first call is start-up", share < 0.05, f"warm share: {share:.2%}"),
        ]
    pairs = []
    for n, s in product(sides, STRIDES):
        times, mine = [taken(n, s, name, "warm") for name in vendors], taken(n, s, ours, "warm")
        if mine and any(times):
            pairs.append(min(filter(None, times)) / mine)
    what = f"library / {ours}, warm"
    findings.conclusions.append(
        judge("RGB report", "a hand-written kernel is faster than the library", pairs, lambda m: m > 1, what)
    )
    return findings


def _first_calls(
    findings: Findings, sides: tuple[int, ...], progress: Progress, methods: tuple[str, ...], kind: str
) -> None:
    for side, method in product(sides, methods):
        progress(f"first call of {method}, side {side}")
        command = [sys.executable, "-m", "tapwise.lab.study.first_call", kind, method, str(side)]
        done = subprocess.run(command, capture_output=True, text=True)
        choices: dict[str, Value] = {"side": side, "stride": 1, "method": method}
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            findings.add(choices | {"when": "first call"}, None, False, lines[-1] if lines else "failed")
            continue
        for moment, us in json.loads(done.stdout.splitlines()[-1]).items():
            findings.add(choices | {"when": moment}, (us, 0.0), True)
