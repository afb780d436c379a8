"""cuda.joined_pixels without a GPU: what it joins, its kernels compile, and plans compute convolutions by emulation."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from compiled_kernels import compiled
from emulated_plans import SMALL, needs_compiler, verdict_of

from tapwise import dispatch
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.fprop_phases import FpropPhases
from tapwise.ops.conv.cuda.implicit_gemm.config import HaloRowsConfig, HaloTileConfig, Im2colConfig
from tapwise.ops.conv.cuda.joined_pixels import JoinedPixels, join_source, joined
from tapwise.ops.conv.phases import with_taps
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = JoinedPixels()
PROBLEMS = [
    "n2 c12 h7 w8 k20 r3 s3 pad1 bias relu residual f16 nhwc",
    "n1 c18 h6 w8 k6 r3 s3 pad1 bias bf16 nhwc",
    "n2 c24 h5 w12 k32 r3 s3 pad1 f16 nhwc",
    "n1 c20 h9 w8 k13 r3 s3 stride2 pad1 bias silu f16 nhwc",
    "n1 c36 h5 w16 k36 r2 s5 stride1x3 pad0x1:2 dilation1x2 f16 nhwc",
    "n3 c20 h3 w4 k5 r1 s1 bias residual f16 nhwc",
    "n1 c16 h4 w24 k10 r1 s7 pad0x3 dilation1x3 f16 nhwc",
]


def some(problem: ConvProblem) -> list[Any]:
    """A config of each kernel and number of pixels, and one that splits gemm_k, drawn at random."""
    found = list(ALGORITHM.configs(problem, SMALL))
    random.Random(str(problem)).shuffle(found)
    kinds = {(type(one.part), one.pixels): one for one in found}
    split = [one for one in found if isinstance(one.part, Im2colConfig) and one.part.split_k > 1][:1]
    return [*kinds.values(), *split]


@needs_compiler
@pytest.mark.parametrize("text", PROBLEMS)
def test_is_the_convolution(emulation: None, text: str) -> None:
    problem = ConvProblem.parse(text)
    assert ALGORITHM.refusal(problem, SMALL) is None
    for config in some(problem):
        verdict = verdict_of(ALGORITHM, problem, config)
        assert verdict, f"{config}: {verdict.message}"


def test_all_kernels_are_drawn() -> None:
    kinds = {type(one.part) for text in PROBLEMS for one in some(ConvProblem.parse(text))}
    assert kinds == {Im2colConfig, HaloRowsConfig, HaloTileConfig}


def test_windows_reach_what_joined_outputs_see() -> None:
    """Pairs of outputs of 3x3 see three pairs of pixels; with a stride of two as many; fours of 1x1 one."""
    for text, pixels, kernel, padding, ahead in (
        ("c24 h9 w8 k8 r3 s3 pad1", 2, (3, 3), (1, 1), 1),
        ("c24 h9 w8 k8 r3 s3 stride2 pad1", 2, (3, 3), (1, 0), 1),
        ("c12 h9 w8 k8 r1 s1", 4, (1, 1), (0, 0), 0),
        ("c12 h9 w16 k8 r3 s3 pad1", 8, (3, 3), (1, 1), 1),
        ("c12 h9 w20 k8 r1 s9 pad0x4", 4, (1, 3), (1, 1), 1),
    ):
        problem = ConvProblem.parse(text + " f16 nhwc")
        found = joined(problem, pixels)
        assert found is not None
        fprop = found.fprop
        assert (fprop.kernel, fprop.padding[1], found.ahead) == (kernel, padding, ahead)
        assert (fprop.c, fprop.k) == (problem.c * pixels, problem.k * pixels)
        assert fprop.output[1] * pixels == problem.output[1]


@pytest.mark.parametrize(
    "words",
    [
        "c18 h9 w9 k8 r3 s3 pad1 f16 nhwc",
        "c18 h8 w8 k8 r3 s3 f16 nhwc",
        "c18 h8 w8 k8 r3 s3 pad1 f16",
        "c36 h8 w8 k36 r3 s3 pad1 groups2 f16 nhwc",
        "c100 h8 w8 k8 r3 s3 pad1 f16 nhwc",
        "c18 h8 w8 k8 r3 s3 pad1 3xtf32 nhwc",
        "c18 h8 w8 k8 r3 s3 pad1 nhwc",
    ],
)
def test_refuses(words: str) -> None:
    """Odd rows, of x or of pieces of 16 bytes; planes; groups; many channels; what has float32's bound."""
    assert ALGORITHM.refusal(ConvProblem.parse(words), H200)


def test_is_chosen_for_few_odd_channels() -> None:
    """Which cuda.implicit_gemm packs first: 12.3 us instead of 8.7 for 18 channels of 56x56."""
    for words in ("c18 h56 w56 k18", "c20 h112 w112 k20", "c12 h56 w56 k12"):
        choice = dispatch.choose(ConvProblem.parse(f"n32 {words} r3 s3 pad1 f16 nhwc"), H200)
        assert choice.algorithm == ALGORITHM.id, choice


def test_gradients_keep_infinities() -> None:
    """Phases of dgrad say that they do, so none of them is of joined pixels."""
    problem = ConvProblem.parse("n32 c20 h112 w112 k20 r3 s3 pad1 f16 nhwc dgrad")
    (phase,) = with_taps(problem)
    assert phase.problem is not None and ALGORITHM.refusal(phase.problem, H200) is None
    phases = FpropPhases()
    assert phases.keeps_infinities and not ALGORITHM.keeps_infinities
    parts = {name for config in phases.configs(problem, H200) for name, _ in config.parts}
    assert parts and ALGORITHM.id not in parts


def test_first_and_last_columns_of_taps_leave_out_zeros() -> None:
    """Of pairs of 24 channels the first column has the second pixel alone, the last one the first; of 1x1 nothing is
    left out."""
    pair = joined(ConvProblem.parse("c24 h9 w8 k8 r3 s3 pad1 f16 nhwc"), 2)
    assert pair is not None and (pair.filters.begin, pair.filters.end) == (48, 48)
    four = joined(ConvProblem.parse("c18 h9 w8 k8 r3 s3 pad1 f16 nhwc"), 4)
    assert four is not None and (four.filters.begin, four.filters.end) == (108, 36)
    whole = joined(ConvProblem.parse("c12 h9 w8 k8 r1 s1 f16 nhwc"), 2)
    assert whole is not None and (whole.filters.begin, whole.filters.end) == (0, 48)


@pytest.mark.parametrize(
    "text", ["n32 c24 h128 w128 k32 r3 s3 pad1", "n32 c18 h56 w56 k18 r3 s3 pad1 bias relu residual"]
)
def test_products_compile_without_spills_or_waits(text: str) -> None:
    """The fastest config of each kernel by the model."""
    problem = ConvProblem.parse(text + " f16 nhwc")
    ordered = sorted(ALGORITHM.configs(problem, H200), key=lambda one: ALGORITHM.predict_us(problem, one, H200))
    firsts: dict[type, Any] = {}
    for one in ordered:
        firsts.setdefault(type(one.part), one)
    assert len(firsts) == 3
    for config in firsts.values():
        _, used, log = compiled(ALGORITHM.sources(problem, config)[-1], "sm_90a")
        assert (used.stack_bytes, used.spill_bytes) == (0, 0)
        assert not re.search(r"C75\d\d", log), log


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_kernel_compiles_without_spills(architecture: str) -> None:
    for dtype in ("f16", "tf32"):
        source = join_source(ConvProblem.parse(f"c12 h8 w8 k8 r3 s3 pad1 {dtype} nhwc"))
        used = compiled(source, architecture).resources
        assert (used.stack_bytes, used.spill_bytes) == (0, 0)
