"""The board report's table: each operator plain, with vectors, and on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

from tapwise import arrays, dispatch, registry, verify
from tapwise.algorithm import Buffers, Device
from tapwise.arrays.workspaces import scratch
from tapwise.lab.study.findings import Findings, bars, each, judge, pivot
from tapwise.lab.study.laboratory import BLAS_PAUSE_S, Call, CpuLaboratory, CudaLaboratory, Progress
from tapwise.problem import Problem

# The board report's 640x640 picture of one channel, 3x3, and its softmax.
PROBLEMS: Final = {
    "conv2d 3x3": "c1 h640 w640 k1 r3 s3",
    "im2col": "im2col c1 h640 w640 r3 s3",
    "maxpool": "maxpool c1 h640 w640 r3 s3 stride1",
    "avgpool": "avgpool c1 h640 w640 r3 s3 stride1",
    "softmax": "softmax 100000",
    "reduce sum": "reduce sum 409600",
}
GEMM: Final = {"cpu": "cpu.im2col_gemm", "cuda": "cuda.im2col_gemm"}


def operators_cpu(lab: CpuLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """Plain loops on one thread, and the chosen vector algorithm on all threads."""
    findings = Findings("operators", "Operators: plain, vectors, GPU", lab.kind, lab.device.name)
    for name, text in PROBLEMS.items():
        progress(text)
        _measure_cpu(lab, findings, name, registry.parse(text))
    return _operators(findings)


def operators_cuda(lab: CudaLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """The same on the GPU's host, and on the GPU: one thread an output, and the chosen config."""
    findings = Findings("operators", "Operators: plain, vectors, GPU", lab.kind, lab.device.name)
    host = CpuLaboratory()
    findings.notes.append(f"host: {host.device.name}, {host.device.threads} threads")
    for name, text in PROBLEMS.items():
        progress(text)
        problem = registry.parse(text)
        _measure_cpu(host, findings, name, problem)
        for way, identifier, config in _ways_cuda(problem, lab.device):
            verdict = verify.check(problem, identifier, config, device=lab.device)
            run = _caller(lab, problem, identifier, config)
            findings.add({"operator": name, "way": way}, lab.time(run) if verdict else None, bool(verdict))
    return _operators(findings)


def _ways_cuda(problem: Problem, device: Device) -> list[tuple[str, str, Any]]:
    """(way, algorithm, config) on a GPU."""
    chosen = dispatch.choose(problem, device)
    ways = [("GPU, chosen", chosen.algorithm, chosen.config)]
    plain = {"conv": "cuda.sliding_window", "pool": "cuda.sliding_window", "im2col": "cuda.grid_stride"}
    if problem.operator in plain:
        identifier = plain[problem.operator]
        configs = registry.get(identifier, problem.operator).configs(problem, device)
        one = next((c for c in configs if getattr(c, "vector", 1) == 1), configs[0])
        ways.append(("GPU, a thread an output", identifier, one))
    if problem.operator == "conv":
        gemm = dispatch.choose(problem, device, GEMM["cuda"])
        ways.append(("GPU, im2col + GEMM", gemm.algorithm, gemm.config))
    return ways


def _caller(lab: CudaLaboratory, problem: Problem, identifier: str, config: Any) -> Call:
    plan = dispatch.plan_for(problem, dispatch.choose(problem, lab.device, identifier, config=config), lab.device)
    inputs = problem.sample(np.random.default_rng(0))
    x = arrays.anywhere(lab.tensor(arrays.dense(inputs.x, problem.layout)), "x", lab.device.index)
    w = None if inputs.w is None else arrays.anywhere(lab.tensor(inputs.w), "w", lab.device.index)
    y = arrays.empty(problem.y_shape, problem.y_dtype, problem.layout, x)
    buffers = Buffers(x, plan.pack(w), y, scratch(plan.workspace_bytes, x))
    return partial(plan.run, buffers)


def _measure_cpu(lab: CpuLaboratory, findings: Findings, name: str, problem: Problem) -> None:
    runs: dict[str, Call] = {}
    good = {}
    ways = {"CPU, plain": "cpu.serial", "CPU, vectors": "auto"}
    if problem.operator == "conv":
        ways["CPU, im2col + GEMM"] = GEMM["cpu"]
    inputs = problem.sample(np.random.default_rng(0))
    x = arrays.dense(inputs.x, problem.layout)
    for way, identifier in ways.items():
        choice = dispatch.choose(problem, lab.device, identifier)
        good[way] = bool(verify.check(problem, choice.algorithm, choice.config, device=lab.device))
        plan = dispatch.plan_for(problem, choice, lab.device)
        y = arrays.empty(problem.y_shape, problem.y_dtype, problem.layout)
        buffers = Buffers(x, plan.pack(inputs.w), y, scratch(plan.workspace_bytes, x))
        runs[way] = partial(plan.run, buffers)
    times = lab.times(runs, {"CPU, im2col + GEMM": BLAS_PAUSE_S})
    findings.add_all({"operator": name}, "way", times, good)


def _operators(findings: Findings) -> Findings:
    names, ways = findings.values("operator"), each("way", findings.values("way"))
    title = "640x640, one channel, 3x3; softmax of 100,000; sum of 409,600"
    findings.tables.append(pivot(findings, title, [{"operator": name} for name in names], ways))
    findings.charts.append(bars(findings, "Operators", ways, "operator", names))

    def over(slow: str, fast: str, *only: str) -> list[float]:
        pairs = [findings.ratios({"operator": n, "way": slow}, {"operator": n, "way": fast}) for n in only or names]
        return [ratio for pair in pairs for ratio in pair]

    source, plain, vectors, thread = "board report", "CPU, plain", "CPU, vectors", "GPU, a thread an output"
    softmax, pools = over(plain, vectors, "softmax"), over(thread, vectors, "maxpool", "avgpool")
    gemm = over(thread, "GPU, im2col + GEMM", "conv2d 3x3")
    findings.conclusions = [
        judge(source, "vector code is faster than plain loops", over(plain, vectors), "plain / vectors"),
        judge(source, "softmax gains three to six times by vectors", softmax, "plain / vectors", lambda m: m >= 3),
        judge(source, "vector code on the CPU beats the GPU at pooling", pools, "GPU / vectors"),
        judge(source, "im2col + GEMM beats a thread an output on the GPU", gemm, "thread an output / im2col + GEMM"),
    ]
    if findings.kind == "cpu":
        gemm = over(vectors, "CPU, im2col + GEMM", "conv2d 3x3")
        text = "im2col + GEMM beats the direct loop nest on the CPU"
        findings.conclusions = [one for one in findings.conclusions if one.holds is not None]
        findings.conclusions.append(judge(source, text, gemm, "vectors / im2col + GEMM"))
    return findings
