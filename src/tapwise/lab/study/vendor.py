"""The RGB report's and our question about the vendor's library: what its warm calls take, and what its first one."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product

from tapwise.baselines import PEERS
from tapwise.lab.study.findings import Choices, Columns, Conclusion, Findings, Value, bars, judge, pivot
from tapwise.lab.study.laboratory import CpuLaboratory, CudaLaboratory, Progress, filters, images, pictures
from tapwise.lab.study.pictures import STRIDES, cells, rivals


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


def cudnn_cpu(lab: CpuLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """The CPU's vendor libraries, warm and with their first call."""
    findings = Findings("cudnn", "The vendor's library, warm and with its first call", lab.kind, lab.device.name)
    names = [name for name in ("onednn", "mlas") if PEERS[name].installed]
    for side, stride in product(sides, STRIDES):
        progress(f"side {side}, stride {stride}")
        problem = pictures(side, stride)
        x, w = images(problem), filters(problem)
        run, good = lab.prepared(problem, x, w, "auto")
        # PyTorch has equal padding only: the same number of outputs, the odd rest left out.
        even = problem.replace(padding=tuple((a, a) for a, _ in problem.padding))
        wanted = {name: problem if name == "mlas" else even for name in names}
        peers, pauses = lab.peers(wanted, x, w, findings.notes)
        times = lab.times({"tapwise": run, **peers}, pauses)
        findings.add_all({"side": side, "stride": stride, "when": "warm"}, "method", times, {"tapwise": good})
    _first_calls(findings, sides, progress, (*names, "tapwise"), "cpu")
    if "onednn" in names:
        findings.notes.append(
            "oneDNN through PyTorch pads both sides alike: where that padding is odd, one row and column less."
        )
    return _vendor(findings, sides, names[0] if names else "onednn", "tapwise", tuple(names))


def _vendor(findings: Findings, sides: tuple[int, ...], vendor: str, ours: str, vendors: tuple[str, ...]) -> Findings:
    names, methods = findings.values("method", when="warm"), findings.values("method", when="first call")
    warm_ones: Columns = [(name, {"method": name, "when": "warm"}) for name in names]
    findings.tables.append(pivot(findings, "Warm", cells(sides), warm_ones))
    title = "In a process of its own, wall time (start: the library and, on a GPU, the context)"
    moments = [(when, {"stride": 1, "when": when}) for when in ("start", "first call", "second call")]
    processes: list[Choices] = [{"side": n, "method": m} for n in sides for m in methods]
    findings.tables.append(pivot(findings, title, processes, moments))
    at_one: Columns = [(name, {**choices, "stride": 1}) for name, choices in warm_ones]
    findings.charts.append(bars(findings, "stride 1: warm", at_one, "side", sides))

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
    findings.conclusions.append(judge("RGB report", "a hand-written kernel is faster than the library", pairs, what))
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
