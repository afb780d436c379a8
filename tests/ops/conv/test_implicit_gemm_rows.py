"""cuda.implicit_gemm_rows without a GPU: kernels compile without spills, and by emulation compute the convolution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from compiled_kernels import Cover, Share, compiled

import emulated
from emulated.verify import check, finite_elsewhere, run_once
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda import implicit_gemm_rows as rows_
from tapwise.ops.conv.cuda.implicit_gemm_rows import Config, ImplicitGemmRows
from tapwise.ops.conv.cuda.residue_classes import steps
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = ImplicitGemmRows()
COMPILED = [
    "n32 c24 h128 w128 k32 r3 s3 pad1 f16 nhwc bias silu residual",
    "n32 c44 h56 w56 k44 r3 s3 pad1 bf16 nhwc",
    "n32 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc relu",
    "n32 c288 h28 w28 k288 r5 s5 pad2 groups288 f16 nhwc bias silu residual",
    "n32 c256 h28 w28 k256 r7 s7 pad3 groups256 bf16 nhwc",
    "n32 c256 h56 w56 k256 r3 s3 stride2 pad1 groups32 f16 nhwc bias relu",
    "n32 c512 h14 w14 k512 r3 s3 pad1 groups32 f16 nhwc",
    "n32 c192 h28 w28 k192 r3 s3 pad1 groups4 f16 nhwc",
]
EMULATED = [
    "n2 c24 h9 w21 k20 r3 s3 pad1 f16 nhwc bias silu",
    "n3 c16 h11 w7 k26 r3 s5 pad1x2 bf16 nhwc residual",
    "c6 h12 w18 k10 r5 s5 stride2 pad2 f16 nhwc bias residual relu6",
    "n2 c44 h7 w19 k44 r3 s3 pad1 f16 nhwc hardswish",
    "c20 h14 w17 k12 r2 s4 pad0:1x2:1 bf16 nhwc bias",
    "n3 c8 h10 w12 k70 r1 s3 f16 nhwc",
    "n2 c12 h15 w16 k8 r3 s3 pad2 dilation2 f16 nhwc leaky_relu0.2",
    "n3 c20 h11 w7 k20 r4 s6 pad2:1x3:2 groups20 bf16 nhwc residual bias silu",
    "n2 c34 h9 w20 k34 r5 s5 pad2 groups34 f16 nhwc bias",
    "c32 h10 w15 k32 r3 s3 stride2 pad1 groups32 f16 nhwc",
    "n2 c24 h9 w22 k24 r3 s3 pad1 groups6 f16 nhwc residual",
    "n3 c12 h11 w13 k12 r3 s3 stride2x1 pad1 groups6 bf16 nhwc bias",
    "n2 c40 h9 w17 k40 r3 s3 stride2 pad1 groups5 f16 nhwc gelu",
    "c72 h9 w18 k72 r3 s3 pad1 groups3 f16 nhwc",
    "n2 c64 h8 w7 k64 r3 s3 pad1 groups4 bf16 nhwc bias relu",
]


def kinds(problem: ConvProblem) -> Iterator[Config]:
    """The model's best config of each way of copying, of one image and of two, and one of another shape."""
    configs = sorted(ALGORITHM.configs(problem, H200), key=lambda one: ALGORITHM.predict_us(problem, one, H200))
    for kind in sorted({(one.by, one.images, one.out_each) for one in configs}):
        mine = [one for one in configs if (one.by, one.images, one.out_each) == kind]
        yield mine[0]
        yield mine[len(mine) * 2 // 3]


def turns(text: str) -> dict[object, Config]:
    """Problems take turns: one the best configs of all kinds, the next the others."""
    problem, turn = ConvProblem.parse(text), EMULATED.index(text) % 2
    some = list(kinds(problem))[turn::2]
    return {(one.by, one.images, one.out_each, turn): one for one in some}


@pytest.mark.many
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    problem = ConvProblem.parse(text)
    found = list(kinds(problem))
    assert found
    for config in share(found if architecture == "sm_90a" else found[:1]):
        if architecture == "sm_80" and config.by == "tma":
            config = replace(config, by="pixels")
        used = compiled(ALGORITHM.source(problem, config), architecture).resources
        assert used.spill_bytes == 0, (config, used)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("text", EMULATED)
def test_kernels_compute_the_convolution(text: str, cover: Cover) -> None:
    problem = ConvProblem.parse(text)
    for number, config in enumerate(cover(text, EMULATED, turns), EMULATED.index(text)):
        verdict = check(problem, ALGORITHM, config, backwards=number % 2 == 1)
        assert verdict, (config, verdict.message)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("words", ["c16 k16 groups16", "c16 k16 groups4", "c16 k16 groups2", "c16 k16"])
def test_what_is_not_finite_stays_in_its_group(words: str) -> None:
    """Where the operands' zeros would spread it."""
    problem = ConvProblem.parse(f"{words} h9 w11 r3 s3 pad1 f16 nhwc")
    for config in kinds(problem):
        assert not (why := finite_elsewhere(problem, ALGORITHM, config)), (config, why)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
def test_nothing_is_computed_again_where_all_is_finite() -> None:
    """Shared memory that nobody wrote, behind the last rows, is NaN here: it has no part in any output."""
    problem = ConvProblem.parse("n3 c16 h9 w11 k16 r3 s3 pad1 groups8 f16 nhwc")
    for config in kinds(problem):
        run_once(problem, ALGORITHM, config)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c16 h9 w9 k16 r3 s3 f16", "channels last"),
        ("c15 h9 w9 k16 r3 s3 f16 nhwc", "even numbers"),
        ("c16 h9 w9 k96 r1 s1 f16 nhwc", "several taps"),
        ("c12 h9 w9 k24 r3 s3 groups2 f16 nhwc", "as many filters as channels"),
        ("c12 h9 w9 k12 r3 s3 groups2 f16 nhwc", "a multiple of 8, not 6"),
        ("c16 h9 w9 k16 r3 s3 stride3 f16 nhwc", "strides of up to 2"),
        ("c128 h9 w9 k16 r3 s3 f16 nhwc", "registers"),
        ("c64 h9 w9 k16 r5 s5 f16 nhwc", "registers"),
        ("c16 h99 w9 k16 r90 s1 groups16 f16 nhwc", "sums of 90 rows"),
    ],
)
def test_what_it_does_not_take(text: str, why: str) -> None:
    assert why in str(ALGORITHM.refusal(ConvProblem.parse(text), H200))


@pytest.mark.parametrize("text", COMPILED + EMULATED)
def test_warps_read_within_shared_memory(text: str) -> None:
    """The last row's, too, for outputs that are none: rows have no more columns than the others see. What they read
    behind a stage is no other's."""
    problem = ConvProblem.parse(text)
    for config in ALGORITHM.configs(problem, H200):
        (rows, columns), pixel = rows_._stage(problem, config), 16 * rows_.pitch(rows_._octets(problem, config))
        seen = (config.columns - 1) * steps(problem)[1] + problem.kernel[1]
        kept = 2 * config.images * rows_._live(problem) * config.columns * rows_.pitch(config.out) * 16
        last = (rows_.STAGES - 1) * rows_._stage_bytes(problem, config) + (config.images * rows - 1) * columns * pixel
        assert rows_.shared_bytes(problem, config) >= 1023 + kept + last + seen * pixel, config
        behind = (config.images * rows - 1) * columns * pixel + seen * pixel
        assert behind <= rows_._stage_bytes(problem, config), config
