"""Without a GPU: some algorithm takes every problem there, and the plain ones are right in bfloat16, by emulation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import emulated
from tapwise import dispatch, registry
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.device import H200
from tapwise.cuda.types import WIDE
from tapwise.errors import InvalidProblem
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.reduce.problem import REDUCTIONS
from tapwise.problem import Problem
from tapwise.verify import compare

Draw = random.Random
DTYPES = ("f32", "f64", "f16", "bf16")
COUNT = 400


def convolution(draw: Draw) -> str:
    groups, each, filters = draw.choice([1, 1, 2, 3, 8]), draw.choice([1, 2, 3, 8, 33]), draw.choice([1, 2, 8, 31])
    high, wide = draw.choice([1, 9, 60, 50_000, 3_000_000_000]), draw.choice([1, 7, 60, 60_000])
    steps = f"stride{draw.choice([1, 2, 7, 70_000])} pad{draw.choice([0, 1, 20])} dilation{draw.choice([1, 2, 9])}"
    after = draw.choice(["", "bias", "silu residual"])
    return (
        f"n{draw.choice([0, 1, 32, 100_000])} c{groups * each} h{high} w{wide} k{groups * filters} groups{groups} "
        f"r{draw.choice([1, 3, 31, 40])} s{draw.choice([1, 3, 5, 40])} {steps} {draw.choice(['', 'nhwc'])} {after} "
        f"{draw.choice([*DTYPES, 'tf32', '3xtf32'])}"
    )


def pooling(draw: Draw) -> str:
    op = draw.choice(["maxpool", "avgpool", "maxpool indices"])
    high, wide = draw.choice([9, 100_000]), draw.choice([9, 100_000])
    return (
        f"{op} n{draw.choice([1, 3])} c{draw.choice([1, 64])} h{high} w{wide} "
        f"r{draw.choice([2, 9])} s{draw.choice([2, 3])} pad{draw.choice([0, 1])} {draw.choice(['', 'ceil'])} "
        f"{draw.choice(['', 'nhwc'])} {draw.choice(DTYPES)}"
    )


def run(draw: Draw) -> str:
    sizes = [draw.choice([1, 3, 7, 1000, 50_000]) for _ in range(draw.randint(1, 4))]
    op = draw.choice(["softmax", "log_softmax", *(f"reduce {one}" for one in REDUCTIONS)])
    return f"{op} {'x'.join(map(str, sizes))} axis{draw.randrange(len(sizes))} {draw.choice(DTYPES)}"


def patches(draw: Draw) -> str:
    high, wide = draw.choice([9, 90_000]), draw.choice([9, 90_000])
    return (
        f"{draw.choice(['im2col', 'col2im'])} n{draw.choice([1, 3])} c{draw.choice([1, 64])} h{high} w{wide} "
        f"r3 s{draw.choice([1, 5])} pad{draw.choice([0, 2])} {draw.choice(DTYPES)}"
    )


def filtering(draw: Draw) -> str:
    kind = draw.choice(["gaussian sigma1", "box size15", "sobel", "laplace", "correlate r3 s5", "maximum size5"])
    return (
        f"filter {kind} h{draw.choice([1, 50, 100_000])} w{draw.choice([1, 3_000_000_000])} c{draw.choice([1, 3])} "
        f"{draw.choice(['f32', 'f64', 'f16', 'u8', 'i16', 'u64'])} {draw.choice(['', 'to:f32', 'to:i16'])}"
    )


def gate(draw: Draw) -> str:
    sizes = {name: draw.choice([1, 7, 64, 5_000, 100_000]) for name in "nchwm"}
    words = " ".join(f"{name}{size}" for name, size in sizes.items())
    return f"squeeze_excitation {words} {draw.choice(['', 'silu'])} {draw.choice(['', 'nhwc'])} {draw.choice(DTYPES)}"


def norm(draw: Draw) -> str:
    sizes = {name: draw.choice([1, 7, 64, 5_000, 100_000]) for name in "nchw"}
    words = " ".join(f"{name}{size}" for name, size in sizes.items())
    rest = draw.choice(["", "dgrad", "dgrad silu"]), draw.choice(["", "nhwc"]), draw.choice(DTYPES)
    return " ".join([draw.choice(["batch_norm", "bias_activation"]), words, *rest])


@pytest.mark.parametrize("drawn", [convolution, pooling, run, patches, filtering, gate, norm])
def test_some_algorithm_takes_every_problem(drawn: Callable[[Draw], str]) -> None:
    draw, answered = random.Random(0), 0
    for text in [drawn(draw) for _ in range(COUNT)]:
        try:
            problem = registry.parse(text)
        except InvalidProblem:
            continue
        # No GPU has more memory.
        if problem.bytes > 1 << 38:
            continue
        assert dispatch.choose(problem, H200).algorithm.startswith("cuda."), text
        answered += 1
    assert answered > COUNT / 4


FAMILY = [
    "maxpool n2 c3 h9 w11 r3 s3 stride2 pad1",
    "maxpool c3 h9 w11 r3 s3 pad1 indices nhwc",
    "avgpool c3 h9 w11 r2 s3 stride2 ceil",
    "im2col n2 c3 h9 w10 r3 s3 pad1",
    "col2im c3 h9 w10 r3 s3 stride2",
    *(f"reduce {op} 3x40x3 axis1" for op in ("sum", "max", "argmin", "norm2", "logsumexp")),
    "softmax 5x40",
    "log_softmax 3x700",
]


# And how many elements the first config loads at once.
NEIGHBOURS = {
    "maxpool n2 c24 h13 w17 r3 s3 stride2 pad1 nhwc f16": 8,
    "maxpool n2 c12 h9 w7 r3 s2 stride1 pad1:0x1:1 nhwc f16 indices": 4,
    "avgpool n2 c6 h9 w8 r3 s3 pad1 exclude_pad nhwc": 2,
    "avgpool c8 h9 w9 r7 s6 stride1 nhwc bf16": 8,
    "reduce mean 3x50x24 axis1 f16": 8,
    "reduce sum 2x9000x8 axis1": 4,
    "reduce max 3x57x6 axis1 f64": 2,
    "reduce argmax 3x57x6 axis1": 1,
    "reduce norm2 33x5 axis0 bf16": 1,
}


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("text", [*(f"{text} bf16" for text in FAMILY), *NEIGHBOURS])
def test_the_family_by_emulation(text: str, large: bool) -> None:
    """`large`: places are counted in 64 bits. The algorithm that takes all stands last."""
    problem = registry.parse(text)
    algorithm = registry.of_backend("cuda", problem.operator)[-1]
    config = algorithm.configs(problem, H200)[0]
    if text in NEIGHBOURS:
        assert getattr(config, "channels" if problem.operator == "pool" else "neighbours") == NEIGHBOURS[text]
    found = getattr(algorithm, "launches", None)
    launches = found(problem, config) if found else [algorithm.launch(problem, config, H200)]  # type: ignore[attr-defined]
    inputs = problem.sample(np.random.default_rng(0), False)
    y, places = laid(problem, np.zeros(problem.y_shape, problem.y_dtype)), laid(problem, np.zeros(problem.y_shape, int))
    workspace = np.full(1 << 16, 0xFF, np.uint8)
    for launch in launches:
        if large:
            launch.source = replace(launch.source, text=WIDE + launch.source.text)
        emulated.run(launch, {"x": laid(problem, inputs.x), "y": y, "places": places, "workspace": workspace})
    verdict = compare(back(problem, y), *problem.reference(inputs, algorithm), problem.y_dtype)
    assert verdict, verdict.message
    if problem.second is not None:
        assert np.array_equal(back(problem, places), problem.second_reference(inputs)[0])


@pytest.mark.parametrize(
    "text",
    [
        "filter gaussian sigma1 h3 w3000000000 u8",
        "filter laplace h3 w3000000000 u64",
        "filter maximum size5 h9 w9 f16",
        "filter gaussian sigma1 h9 w9 f16 to:f32",
        "filter correlate r3 s3 h9 w9 f16 to:i16",
        "filter box size3 h9 w9 u8 to:f16",
        "maxpool c1 h3 w3000000000 r3 s3 f16",
        "im2col c1 h3 w3000000000 r3 s3",
        "col2im c1 h3 w3000000000 r3 s3 f16",
        "c1 h3 w3000000000 k1 r3 s3 nhwc bf16",
    ],
)
def test_what_is_large_or_half_compiles(text: str) -> None:
    problem = registry.parse(text)
    algorithm = registry.of_backend("cuda", problem.operator)[-1]
    config = algorithm.configs(problem, H200)[0]
    for source in algorithm.sources(problem, config):  # type: ignore[attr-defined]
        assert "f16" in text or "bf16" in text or WIDE in source.text
        _, used = compiler.compile_now(source, "sm_90a")
        assert used.spill_bytes == 0


def laid(problem: Problem, array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(array, 1, -1) if problem.layout == "nhwc" else array)


def back(problem: Problem, array: np.ndarray) -> np.ndarray:
    return np.moveaxis(array, -1, 1) if problem.layout == "nhwc" else array


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(
    "text",
    [
        "n2 c6 h9 w7 k8 r3 s2 pad1:0x2:1 stride2 groups2 nhwc bf16 bias silu residual",
        "c3 h8 w9 k4 r3 s3 pad2 dilation2 f64 nhwc",
        "c4 h6 w7 k6 r3 s3 groups2 bf16 bias",
    ],
)
def test_sliding_windows_in_any_order(text: str) -> None:
    from emulated.verify import check

    problem = ConvProblem.parse(text)
    algorithm = registry.get("cuda.sliding_window")
    config = algorithm.configs(problem, H200)[-1]
    assert config.partition == "run"  # type: ignore[attr-defined]
    verdict = check(problem, algorithm, config)
    assert verdict, verdict.message
