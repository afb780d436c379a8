"""cpu.direct and cpu.depthwise of wgrad against float64, over shapes, memory orders, threads and configs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tapwise import arrays, dispatch, registry, verify
from tapwise.algorithm import Buffers, Config
from tapwise.arrays.workspaces import scratch
from tapwise.cpu.device import host
from tapwise.ops.conv.cpu.wgrad_direct import DirectWgrad, Geometry
from tapwise.ops.conv.problem import ConvProblem

DENSE = [
    "n2 c32 h9 w11 k24 r3 s3 pad1",
    "n2 c5 h7 w9 k4 r3 s3 pad1",
    "c3 h9 w35 k33 r7 s7 stride2 pad3",
    "n2 c12 h14 w14 k24 r5 s3 groups2 stride2 pad2x1 dilation1x2",
    "n3 c40 h13 w13 k21 r1 s1 stride2",
    "n2 c6 h11 w9 k4 r3 s2 stride2x3 pad1:2x0:1 dilation2x1 groups2",
    "c20 h1 w1 k9 r3 s3 stride4 pad1",
    "n2 c48 h17 w16 k20 r5 s5 pad2",
    "n2 c17 h9 w33 k17 r2 s2 stride3 pad4 dilation2",
    "n2 c32 h7 w6 k16 r3 s3 pad0:1x2:0 groups2",
    "c71 h5 w6 k9 r2 s2",
    "c85 h4 w5 k7 r3 s3 pad1",
]
DEPTHWISE = [
    "n2 c32 h9 w11 k32 r3 s3 pad1 groups32",
    "n3 c21 h12 w30 k21 r3 s3 stride2 pad1 groups21",
    "n2 c3 h7 w9 k3 r5 s5 pad2 groups3",
    "c20 h14 w14 k40 r7 s7 pad3 groups20",
    "n2 c17 h9 w10 k17 r2 s4 pad2:1x0:3 stride1x3 dilation2x1 groups17",
    "n2 c24 h5 w6 k24 r5 s11 pad5 groups24",
    "n2 c9 h8 w8 k9 r3 s3 stride4 pad4 dilation2 groups9",
]
# float32 in both memory orders, another dtype in one of them.
WORDS = (
    ("f32", "f32 nhwc", "f64"),
    ("f32", "f32 nhwc", "f16 nhwc"),
    ("f32 nhwc", "bf16", "f64 nhwc"),
    ("f16", "bf16 nhwc"),
)
CASES = [
    (f"{text} {words} wgrad", identifier, 1 + (number + place) % 3)
    for identifier, texts in (("cpu.direct", DENSE), ("cpu.depthwise", DEPTHWISE))
    for number, text in enumerate(texts)
    for place, words in enumerate(WORDS[number % len(WORDS)])
]


def some(configs: Sequence[Config], seed: int) -> list[Config]:
    """The first of all configs, and another."""
    return [configs[0], random.Random(seed).choice(configs)]


def taken(text: str, identifier: str) -> bool:
    problem = ConvProblem.parse(text)
    return registry.get(identifier, "wgrad").refusal(problem, host(1)) is None


@pytest.mark.many
@pytest.mark.parametrize(("text", "identifier", "threads"), [case for case in CASES if taken(*case[:2])])
def test_against_float64(text: str, identifier: str, threads: int, request: pytest.FixtureRequest) -> None:
    """Kernels as users have them with one thread."""
    if threads > 1:
        request.getfixturevalue("quick_code")
    problem, device = ConvProblem.parse(text), host(threads)
    configs = list(registry.get(identifier, "wgrad").configs(problem, device))
    for integers, config in enumerate(some(configs, len(text))):
        verdict = verify.check(problem, identifier, config, device=device, integers=bool(integers))
        assert verdict, f"{config}: {verdict.message}"


@pytest.mark.parametrize(("text", "identifier"), [(DENSE[0], "cpu.direct"), (DEPTHWISE[1], "cpu.depthwise")])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_threads_do_not_change_the_bits(text: str, identifier: str, layout: str) -> None:
    problem = ConvProblem.parse(f"n5 {text.partition(' ')[2]} wgrad {layout}")
    algorithm = registry.get(identifier, "wgrad")
    x, dy = (arrays.dense(one, layout) for one in problem.sample(np.random.default_rng(3))[:2])
    for config in list(algorithm.configs(problem, host(2)))[::9]:
        results = []
        for threads in (1, 2, 3, 3):
            plan = algorithm.plan(problem, config, host(threads))
            dw = arrays.empty(problem.w_shape, problem.y_dtype, layout, x)
            plan.run(Buffers(x, plan.pack(dy), dw, scratch(plan.workspace_bytes, x)))
            results.append(dw)
        assert all(np.array_equal(results[0], one) for one in results[1:]), config


@pytest.mark.parametrize(
    ("text", "identifier"),
    [
        ("c64 h28 w28 k64 r3 s3 pad1", "cpu.direct"),
        ("n8 c256 h14 w14 k256 r1 s1", "cpu.direct"),
        ("c3 h224 w224 k64 r7 s7 stride2 pad3", "cpu.direct"),
        ("c512 h7 w7 k512 r3 s3 pad1", "cpu.direct"),
        ("c144 h56 w56 k144 r3 s3 pad1 groups144", "cpu.depthwise"),
        ("n8 c96 h28 w28 k96 r5 s5 pad2 groups96", "cpu.depthwise"),
    ],
)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_is_chosen(text: str, identifier: str, layout: str) -> None:
    problem = ConvProblem.parse(f"{text} wgrad {layout}")
    assert dispatch.choose(problem, host(2)).algorithm == identifier


@pytest.mark.parametrize("parts", [1, 2])
def test_one_tap_of_channels_that_are_no_whole_vectors(parts: int) -> None:
    """Rows of sums are rows of dw, copied from where they are kept or added up."""
    problem, device = ConvProblem.parse("n2 c41 h6 w7 k13 r1 s1 wgrad"), host(2)
    configs = registry.get("cpu.direct", "wgrad").configs(problem, device)
    config = next(one for one in configs if not one.swap and one.parts == parts)  # type: ignore[attr-defined]
    assert (verdict := verify.check(problem, "cpu.direct", config, device=device)), verdict.message


@pytest.mark.parametrize("l2_bytes", [8 << 10, 12 << 10, 16 << 10])
def test_parts_have_the_same_number_of_bands(l2_bytes: int) -> None:
    """Of 19 rows: bands of at most as many as L2 holds, the same number in each of two parts."""
    problem, device = ConvProblem.parse("c33 h19 w6 k13 r3 s3 pad1 wgrad"), replace(host(2), l2_bytes=l2_bytes)
    config = next(one for one in DirectWgrad().configs(problem, device) if one.parts == 2)
    geometry = Geometry(problem, config, device)
    edges = [band * 19 // geometry.row_blocks for band in range(geometry.bands + 1)]
    assert geometry.bands == 2 * geometry.part_bands > 2
    assert max(end - begin for begin, end in itertools.pairwise(edges)) <= config.rows
    assert (verdict := verify.check(problem, "cpu.direct", config, device=device)), verdict.message
