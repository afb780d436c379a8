"""cuda.few_channels in NCHW without a GPU: kernels compile, by emulation they compute the convolution."""

from __future__ import annotations

import re

import numpy as np
import pytest
from compiled_kernels import Cover, Share
from tensor_core_cases import A100, assert_no_spills, best_of

import emulated
from emulated.verify import check, launches, packed
from tapwise import dispatch
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda import few_channels_planes as planes
from tapwise.ops.conv.cuda.few_channels import FewChannels, rows_of
from tapwise.ops.conv.cuda.few_channels_rows import Config
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = FewChannels()
EMULATED = [
    "n2 c3 h17 w24 k10 r3 s3 stride2 pad1 f16",
    "n2 c3 h17 w16 k7 r3 s3 pad1 f16 residual",
    "n2 c3 h19 w21 k17 r3 s3 stride2 pad1 f16 bias residual silu",
    "c3 h30 w32 k18 r7 s7 stride2 pad3 f16 bias relu",
    "n2 c1 h13 w29 k5 r5 s1 pad2x0 dilation2 bf16",
    "c6 h20 w23 k20 r3 s5 pad1x2 dilation2x1 stride1x2 bf16 bias residual gelu",
    "c5 h21 w18 k33 r2 s4 stride3x1 pad0:1x2:0 f16",
    "c7 h15 w18 k48 r3 s3 stride1x3 pad1 bf16",
    "c8 h9 w70 k40 r7 s3 pad3 f16",
    "n2 c3 h14 w19 k12 r3 s3 pad1 tf32",
    "n2 c3 h25 w27 k19 r3 s3 stride2x3 pad1:0x0:2 tf32 bias residual relu6",
    "n2 c1 h7 w9 k3 r1 s1 tf32",
    "n2 c2 h5 w4 k56 r3 s3 pad4 stride5 f16",
    "c4 h16 w48 k24 r4 s4 stride4 f16 bias",
    "n2 c3 h24 w20 k33 r5 s5 pad2 bf16 residual relu",
    "c3 h37 w40 k70 r11 s11 stride4 pad2 f16 bias",
    "n3 c2 h12 w15 k9 r4 s4 stride2x3 pad2 f16 leaky_relu0.2",
    "n2 c3 h16 w28 k20 r3 s3 stride2 pad1 f16 bias residual",
]
COMPILED = [
    "n32 c3 h224 w224 k64 r7 s7 stride2 pad3 f16 bias relu",
    "n32 c3 h224 w224 k32 r3 s3 stride2 pad1 bf16",
    "n32 c3 h299 w299 k32 r3 s3 stride2 f16 bias silu residual",
    "n1 c3 h224 w224 k64 r3 s3 pad1 f16 bias relu",
    "n32 c3 h300 w300 k40 r3 s3 stride2 pad1 tf32 bias gelu",
    "n8 c1 h28 w28 k9 r5 s5 f16 residual",
    "n32 c3 h224 w224 k128 r4 s4 stride4 f16 bias gelu residual",
]


def best(problem: ConvProblem) -> list[Config]:
    return best_of(ALGORITHM, problem, H200, "rows", "filters", "order")


def some(problem: ConvProblem) -> dict[object, Config]:
    """One config of each count of outputs that are written at once, the best one, and the last of another kind."""
    kinds = best(problem)
    found: dict[object, Config] = {planes.beside(problem, config): config for config in kinds}
    return found | {name: one for name, one in (("best", kinds[0]), ("last", kinds[-1])) if one not in found.values()}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    assert_no_spills(share, ALGORITHM, ConvProblem.parse(text), architecture, "rows", "filters", "order")


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("text", EMULATED)
def test_kernels_compute_the_convolution(text: str, cover: Cover) -> None:
    """Shared memory that nobody wrote is NaN there: it has no part in any output."""
    problem = ConvProblem.parse(text)
    for number, config in enumerate(cover(text, EMULATED, lambda one: some(ConvProblem.parse(one)))):
        verdict = check(problem, ALGORITHM, config, backwards=number % 2 == 1)
        assert verdict, (config, verdict.message)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(
    "text",
    [
        "c3 h9 w16 k4 r3 s3 stride2 pad1 f16",
        "c3 h9 w15 k4 r3 s3 f16",
        "c3 h9 w9 k4 r1 s1 stride2 f16",
        "c3 h9 w14 k4 r3 s3 tf32",
        "c5 h9 w14 k4 r3 s5 stride1x2 f16",
    ],
)
def test_what_is_not_finite_stays_in_its_windows(text: str) -> None:
    problem = ConvProblem.parse(text)
    rng = np.random.default_rng(0)
    x, w = (rng.integers(1, 4, shape).astype(problem.y_dtype) for shape in (problem.x_shape, problem.w_shape))
    x[0, 0, 4, 5], x[0, 1, 0, 0], x[0, -1, -1, -1], x[0, -1, 2, 8] = np.inf, np.nan, -np.inf, np.inf
    with np.errstate(invalid="ignore"):
        expected = problem.convolve(x.astype(float), w.astype(float))
    assert not np.isfinite(expected).all() and np.isfinite(expected).any()
    for config in some(problem).values():
        y = np.zeros(problem.y_shape, problem.y_dtype)
        for launch in launches(problem, ALGORITHM, config):
            emulated.run(launch, {"x": x, "w": packed(problem, ALGORITHM, config, w), "y": y})
        assert np.array_equal(y.astype(float), expected, equal_nan=True), config


def test_geometry() -> None:
    for text in EMULATED + COMPILED:
        problem = ConvProblem.parse(text)
        configs = ALGORITHM.configs(problem, H200)
        assert len(configs) == len(set(configs)) > 0
        for config in configs:
            launch = ALGORITHM.launch(problem, config, H200)
            p = dict(zip(launch.names, launch.words, strict=True))
            assert launch.shared_bytes <= H200.shared_bytes
            assert p["pitch"] % 16 == 0
            assert planes.row_bytes(problem, config) <= p["pitch"]
            assert p["tiles_w"] * p["across"] >= p["q"]
            assert p["tiles_h"] * p["down"] >= p["p"]
            assert 16 * config.rows % config.order == 0 == config.filters % 16


@pytest.mark.parametrize(
    ("text", "runs", "halves"),
    [
        ("c3 h224 w224 k64 r7 s7 stride2 pad3 f16", 1, 21),
        ("c3 h224 w224 k64 r3 s3 stride2 pad1 f16", 2, 5),
        ("c3 h224 w224 k64 r4 s4 stride4 f16", 2, 6),
        ("c3 h224 w224 k64 r5 s5 pad2 f16", 4, 12),
        ("c3 h224 w224 k64 r3 s3 pad1 dilation2x1 f16", 1, 9),
        ("c3 h224 w224 k64 r3 s3 pad1 tf32", 1, 9),
        ("c3 h224 w224 k64 r1 s1 tf32", 4, 1),
    ],
)
def test_words_of_four_threads(text: str, runs: int, halves: int) -> None:
    problem = ConvProblem.parse(text)
    assert (planes.runs_of(problem), planes.halves_of(problem)) == (runs, halves)


@pytest.mark.parametrize(
    ("text", "down", "across", "most"),
    [
        ("c3 h224 w224 k64 r3 s3 stride2 pad1 f16", 4, 112, 8),
        ("c3 h224 w224 k64 r3 s3 stride2 pad1 f16", 4, 56, 8),
        ("c3 h224 w224 k64 r3 s3 stride2 pad1 tf32", 4, 56, 4),
        ("c3 h300 w300 k64 r3 s3 stride2 pad1 f16", 4, 150, 4),
        ("c3 h300 w300 k64 r3 s3 stride2 pad1 f16", 1, 150, 2),
        ("c3 h300 w300 k64 r3 s3 stride2 pad1 f16", 4, 50, 2),
        ("c3 h240 w240 k64 r3 s3 stride4 pad1 f16", 2, 60, 8),
        ("c3 h240 w240 k64 r3 s3 stride4 pad1 f16", 2, 32, 4),
        ("c3 h299 w299 k64 r3 s3 stride2 f16", 8, 149, 1),
    ],
)
def test_outputs_that_are_written_at_once(text: str, down: int, across: int, most: int) -> None:
    problem = ConvProblem.parse(text)
    config = Config(down, across, 4, 64, 32, 2)
    assert planes.beside(problem, config) == min(most, 16 // problem.itemsize)
    assert planes.beside(problem, Config(down, across, 4, 64, 8, 2)) == min(most, 2)


def test_banks() -> None:
    """Words of one bank are counted, not those that threads share."""
    problem = ConvProblem.parse("c3 h224 w224 k64 r3 s3 stride2 pad1 f16")
    assert planes.runs_of(problem) == 2
    assert planes.wavefronts(problem, 32, 16) == 1
    assert planes.wavefronts(problem, 32, 32) == 2
    assert planes.wavefronts(problem, 32, 0) == 2
    patches = ConvProblem.parse("c3 h224 w224 k64 r4 s4 stride4 f16")
    assert planes.wavefronts(patches, 32, 16) == 2
    assert planes.wavefronts(patches, 16, 16) == 1
    for config in ALGORITHM.configs(problem, H200):
        assert planes.wavefronts(problem, config.order, rows_of(problem, config)[1] % 128) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("c3 h9 w9 k64 r3 s3", "tensor cores"),
        ("c9 h9 w9 k64 r3 s3 f16", "8 channels"),
        ("c3 h9 w9 k64 r3 s3 dilation2 f16", "gaps"),
        ("c3 h64 w64 k64 r16 s16 f16", "64 pieces of 16 bytes, not 108"),
        ("n0 c3 h9 w9 k64 r3 s3 f16", "nothing"),
        ("n40000 c3 h256 w256 k2 r1 s1 f16", "2\\^31"),
        ("c8 h30 w30 k2000 r7 s7 stride2 f16", "shared memory"),
    ],
)
def test_refusals_say_why(text: str, says: str) -> None:
    assert re.search(says, ALGORITHM.refusal(ConvProblem.parse(text), H200) or "")


def test_first_layers_go_here() -> None:
    for text in (*COMPILED[:2], COMPILED[3]):
        assert dispatch.choose(ConvProblem.parse(text), H200).algorithm == "cuda.few_channels"
        assert dispatch.choose(ConvProblem.parse(text), A100).algorithm == "cuda.few_channels"
    # An odd count of columns in an odd count of rows is stored one by one.
    assert dispatch.choose(ConvProblem.parse(COMPILED[2]), H200).algorithm == "cuda.implicit_gemm"
