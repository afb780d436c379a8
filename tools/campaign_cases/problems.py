"""Random problems of every operator with windows or axes: each algorithm and config, guarded, against float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from math import prod
from typing import Any, Final

import numpy as np

from campaign_cases import Case, Family, Refused, pick
from tapwise import registry, verify
from tapwise.activation import ACTIVATIONS
from tapwise.algorithm import Device
from tapwise.errors import InvalidProblem, NotApplicable
from tapwise.ops.squeeze_excitation.problem import BETWEEN, GATES
from tapwise.problem import Problem
from tapwise.window_problem import INPUT_LETTERS, join

CONVOLUTION: Final = ("conv", "dgrad", "wgrad")
OPERATORS: Final = (
    "dgrad",
    "wgrad",
    "conv",
    "conv",
    "conv",
    "conv",
    "im2col",
    "col2im",
    "pool",
    "pool_dgrad",
    "softmax",
    "softmax_dgrad",
    "reduce",
    "squeeze_excitation",
    "batch_norm",
    "batch_norm_dgrad",
    "bias_activation_dgrad",
)
REDUCTIONS: Final = (
    *("sum", "mean", "max", "min", "prod", "argmax", "argmin", "norm1", "norm2", "sumsquare", "logsumexp"),
)
# Terms of a convolution, elements of the others: so many that the float64 reference takes a few milliseconds.
_MOST_TERMS: Final = 4e6
_MOST_ELEMENTS: Final = 3e5


def targets() -> list[str]:
    """Instruction sets that this machine can run."""
    from tapwise.cpu.device import features

    found, known = ["host"], set(features())
    found += ["avx2", "avx2-128"] if {"avx2", "fma"} <= known else []
    return found + (["avx512"] if "avx512f" in known else [])


def surroundings(rng: np.random.Generator, backend: str) -> Case:
    """Instruction set and threads, which every case of the CPU has."""
    if backend == "cuda":
        return {"backend": backend}
    return {"backend": backend, "target": pick(rng, "host", *targets()), "threads": pick(rng, 1, 2, 2, 3, 7)}


def enter(case: Case) -> Device:
    """The case's device, which every later call takes too."""
    if case["backend"] == "cuda":
        from tapwise.cuda.jit.device import gpu

        return gpu()
    from tapwise.cpu.device import host

    os.environ["TAPWISE_CPU_TARGET"] = case["target"]
    os.environ["TAPWISE_NUM_THREADS"] = str(case["threads"])
    return host()


def size(rng: np.random.Generator, most: int) -> int:
    """Small ones, sizes about powers of two, and any."""
    kind = rng.integers(4)
    if kind == 0:
        return int(rng.integers(1, 5))
    if kind == 1:
        return max(1, (1 << int(rng.integers(0, 8))) + int(rng.integers(-1, 2)))
    return int(rng.integers(1, most))


def draw_problem(rng: np.random.Generator, operator: str, backend: str) -> Problem:
    """A problem that is valid, most often; some have no element."""
    while True:
        if operator == "squeeze_excitation":
            text = _gate(rng)
        else:
            plain = operator.removesuffix("_dgrad")
            if plain in ("batch_norm", "bias_activation"):
                text = _sums(rng, plain)
                text += pick(rng, "", "", *(f" {word}" for word in ACTIVATIONS)) if plain != operator else ""
            else:
                text = _axes(rng, plain) if plain in ("softmax", "reduce") else _window(rng, plain, backend)
            text += " dgrad" if plain != operator else ""
        try:
            problem = registry.parse(text)
        except InvalidProblem:
            continue
        work = problem.flops / 2 if operator == "conv" else prod(problem.x_shape) + prod(problem.y_shape)
        if work <= (_MOST_TERMS if operator == "conv" else _MOST_ELEMENTS):
            return problem


def _sums(rng: np.random.Generator, operator: str) -> str:
    sizes = [f"{name}{size(rng, most)}" for name, most in zip("nchw", (5, 90, 40, 40), strict=True)]
    return " ".join([operator, *sizes, pick(rng, "nchw", "nhwc"), pick(rng, "f32", "f64", "f16", "bf16")])


def _window(rng: np.random.Generator, operator: str, backend: str) -> str:
    axes = pick(rng, 1, 2, 2, 2, 2) if operator in (*CONVOLUTION, "pool") else pick(rng, 1, 2, 2, 2, 3)
    square = rng.random() < 0.6
    one = pick(rng, 1, 1, 2, 3, 3, 3, 5, 7)
    kernel = [one if square else pick(rng, 1, 2, 3, 4, 5, 6, 7, 9, 11) for _ in range(axes)]
    stride = [pick(rng, 1, 1, 1, 2, 2, 3, 5) for _ in range(axes)]
    dilation = [pick(rng, 1, 1, 1, 1, 2, 3) for _ in range(axes)]
    pads = [[int(rng.integers(0, (r - 1) * d // 2 + 2)) for _ in "ab"] for r, d in zip(kernel, dilation, strict=True)]
    if rng.random() < 0.6:
        pads = [[a, a] for a, _ in pads]
    most = {1: 400, 2: 60, 3: 14}[axes]
    spatial = [size(rng, most) for _ in range(axes)]
    letters = zip(INPUT_LETTERS[axes], spatial, strict=True)
    words = [f"n{pick(rng, 0, 1, 1, 1, 1, 1, 1, 2, 3) if rng.random() < 0.9 else size(rng, 9)}"]
    groups, c, k = _channels(rng)
    words += [f"c{c}", *(f"{letter}{value}" for letter, value in letters)]
    words += [f"k{k}"] if operator in CONVOLUTION else []
    words += [f"{letter}{value}" for letter, value in zip({1: "s", 2: "rs", 3: "trs"}[axes], kernel, strict=True)]
    words += ["stride" + join(tuple(stride)), "pad" + join([f"{a}:{b}" for a, b in pads])]
    words += ["dilation" + join(tuple(dilation))]
    dtype = pick(rng, "f32", "f16", "bf16", "f64")
    if operator in CONVOLUTION:
        fused = {"conv": _fused(rng), "dgrad": [one for one in _fused(rng) if one != "residual"], "wgrad": []}
        words += [f"groups{groups}", *fused[operator], *([operator] if operator != "conv" else [])]
        if backend == "cuda":
            dtype = pick(rng, "f32", "f16", "f16", "bf16", "f64", "tf32", "3xtf32")
    if operator == "pool":
        words = [pick(rng, "maxpool", "avgpool"), *words]
        words += [word for word in ("ceil",) if rng.random() < 0.3]
        words += [pick(rng, "exclude_pad", "divisor3", "")] if words[0] == "avgpool" else [pick(rng, "indices", "", "")]
    if operator in ("im2col", "col2im"):
        words = [operator, *words]
    elif rng.random() < (0.4 if backend == "cpu" else 0.6):
        words.append("nhwc")
    return " ".join(word for word in [*words, dtype] if word)


def _channels(rng: np.random.Generator) -> tuple[int, int, int]:
    """(groups, c, k): dense, depthwise, and grouped."""
    kind = rng.integers(6)
    if kind == 0:
        groups = size(rng, 70)
        return groups, groups, groups * pick(rng, 1, 1, 1, 2, 3)
    if kind == 1:
        groups = pick(rng, 2, 3, 4, 8, 16)
        return groups, groups * size(rng, 20), groups * size(rng, 20)
    return 1, size(rng, 100), size(rng, 100)


def _fused(rng: np.random.Generator) -> list[str]:
    words = [word for word in ("bias", "residual") if rng.random() < 0.3]
    return [*words, pick(rng, *ACTIVATIONS, "leaky_relu0.2", "leaky_relu-3")] if rng.random() < 0.4 else words


def _axes(rng: np.random.Generator, operator: str) -> str:
    rank = int(rng.integers(1, 5))
    shape = [size(rng, {1: 30000, 2: 500, 3: 60, 4: 20}[rank]) for _ in range(rank)]
    if rng.random() < 0.1:
        shape[int(rng.integers(rank))] = int(rng.integers(2))
    dtype = pick(rng, "f32", "f16", "bf16", "f64")
    if operator == "softmax":
        words = [pick(rng, "softmax", "log_softmax"), "x".join(map(str, shape)), f"axis{int(rng.integers(rank))}"]
        return " ".join([*words, dtype])
    axes = [axis for axis in range(rank) if rng.random() < 0.5] or [int(rng.integers(rank))]
    words = ["reduce", pick(rng, *REDUCTIONS), "x".join(map(str, shape)), "axis" + ",".join(map(str, axes))]
    return " ".join([*words, *(["keepdims"] if rng.random() < 0.3 else []), dtype])


def _gate(rng: np.random.Generator) -> str:
    most = {"n": 5, "c": 300, "h": 30, "w": 30, "m": 60}
    sizes = [f"{name}{size(rng, largest)}" for name, largest in most.items()]
    words = [pick(rng, *BETWEEN), pick(rng, *GATES), pick(rng, "f32", "f16", "bf16", "f64"), pick(rng, "nchw", "nhwc")]
    return " ".join(["squeeze_excitation", *sizes, *words])


def draw(rng: np.random.Generator, backend: str) -> Case:
    operator = pick(rng, *OPERATORS)
    rows = [identifier for identifier in registry.ALGORITHMS[operator] if identifier.startswith(backend)]
    return {
        "problem": str(draw_problem(rng, operator, backend)),
        "algorithm": pick(rng, *rows),
        "config": round(float(rng.random()), 3),
        "integers": bool(rng.random() < 0.3),
        "seed": int(rng.integers(1 << 30)),
        **surroundings(rng, backend),
    }


def run(case: Case) -> str | None:
    """One config of the algorithm, on memory between guards, against the float64 reference."""
    device = enter(case)
    problem = registry.parse(case["problem"]).canonical()
    algorithm = registry.get(case["algorithm"], problem.operator)
    if algorithm.refusal(problem, device):
        raise Refused
    configs = list(algorithm.configs(problem, device))
    if not configs:
        return "raised nothing, but has no config"
    config = configs[min(int(case["config"] * len(configs)), len(configs) - 1)]
    try:
        verdict = verify.check(
            problem, case["algorithm"], config, device=device, seed=case["seed"], integers=case["integers"]
        )
    except NotApplicable as error:
        return f"raised NotApplicable where nothing was refused: {error}"
    return None if verdict else f"wrong ({config}): {verdict.message}"


def simpler_problem(text: str) -> Iterator[str]:
    """Problems with one field simpler."""
    problem: Any = registry.parse(text)
    for field in fields(problem):
        value = getattr(problem, field.name)
        for simple in _simpler_values(field.name, value, field.default):
            try:
                yield str(problem.replace(**{field.name: simple}))
            except InvalidProblem:
                continue


def _simpler_values(name: str, value: Any, default: Any) -> Iterator[Any]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        if name not in ("op", "direction") and value != default and isinstance(default, (bool, str, type(None))):
            yield default
        return
    if isinstance(value, int):
        yield from sorted({one for one in (1, value // 2, value - 1) if 0 < one < value})
        return
    for number, one in enumerate(value):
        for simple in (one // 2, one - 1) if isinstance(one, int) else ((0, 0), (one[0], 0), (0, one[1])):
            if simple != one and (not isinstance(simple, int) or simple >= (name != "padding" and name != "axes")):
                yield (*value[:number], simple, *value[number + 1 :])


def simpler(case: Case) -> Iterator[Case]:
    for text in simpler_problem(case["problem"]):
        yield {**case, "problem": text}
    for name, value in {"threads": 1, "target": "host", "config": 0.0, "integers": True, "seed": 0}.items():
        if name in case and case[name] != value:
            yield {**case, name: value}


FAMILY: Final = Family(draw, run, simpler, share=2.0)
