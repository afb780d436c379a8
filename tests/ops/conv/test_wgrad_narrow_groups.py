"""cuda.narrow_groups of wgrad without a GPU: kernels compile without spills, and by emulation compute the gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compiled_kernels import Share, compiled
from emulated_plans import check_what_is_not_finite

import emulated
from emulated.verify import check
from tapwise import dispatch
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.wgrad_narrow_groups import NarrowGroupsWgrad
from tapwise.ops.conv.cuda.wgrad_narrow_groups_blocks import Config
from tapwise.ops.conv.cuda.wgrad_stages import maps_of
from tapwise.ops.conv.cuda.wgrad_stages_blocks import min_blocks_per_sm, shared_bytes
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = NarrowGroupsWgrad()
COMPILED = [
    ("n32 c256 h28 w28 k256 r7 s7 pad3 groups256 f16 nhwc", "sm_90a"),
    ("n32 c728 h19 w19 k728 r3 s3 pad1 groups728 bf16 nhwc", "sm_90a"),
    ("n32 c512 h32 w32 k512 r3 s3 stride2 pad1 groups32 f16 nhwc", "sm_100a"),
    ("n32 c96 h120 w120 k96 r5 s5 stride2 pad2 groups96 f16 nhwc", "sm_90a"),
    ("n32 c300 h7 w7 k300 r7 s7 pad3 groups300 f16 nhwc", "sm_90a"),
    ("n32 c58 h28 w28 k58 r3 s3 pad1 groups58 bf16 nhwc", "sm_100a"),
]
# Units beside each other and of two images, images that are not there, channels that are not there, runs that begin
# within an image, parts with one row more, strips of columns, pieces of a filter, all strides and dilations, one part.
EMULATED = [
    ("n3 c24 h13 w19 k24 r5 s5 pad2 stride2 groups24 bf16 nhwc", Config(32, 2, 1, 4, 2, 5, 3, parts=7)),
    ("n2 c40 h9 w20 k40 r3 s3 pad1 groups20 f16 nhwc", Config(16, 1, 4, 1, 4, 3, 2, parts=5)),
    ("n5 c72 h7 w7 k72 r7 s7 pad3 groups72 f16 nhwc", Config(64, 1, 1, 2, 7, 7, 2, parts=3)),
    ("n2 c16 h13 w40 k16 r5 s3 pad2x1 dilation1x2 groups4 f16 nhwc", Config(16, 2, 2, 2, 1, 3, 8, parts=4)),
    ("n2 c64 h12 w12 k64 r3 s3 pad1 groups4 f16 nhwc", Config(32, 2, 2, 2, 2, 3, 4, parts=2)),
    ("c16 h11 w30 k16 r3 s4 dilation2 pad2:1x3:0 groups2 bf16 nhwc", Config(16, 1, 4, 1, 2, 3, 2, parts=1)),
    ("n3 c48 h12 w5 k48 r11 s1 stride3 pad5x0 groups48 f16 nhwc", Config(32, 1, 1, 2, 2, 11, 2, parts=3)),
    # Channels that warps copy, by 8 and by 4 bytes: pixels of one, two and four octets, of which some are not there.
    ("n3 c20 h13 w19 k20 r5 s5 pad2 stride2 groups20 bf16 nhwc", Config(32, 2, 1, 4, 2, 5, 3, 7, copiers=4)),
    ("n2 c10 h9 w20 k10 r3 s3 pad1 groups5 f16 nhwc", Config(16, 1, 4, 1, 4, 3, 2, 5, copiers=8)),
    ("n5 c68 h7 w7 k68 r7 s7 pad3 groups68 f16 nhwc", Config(64, 1, 1, 2, 7, 7, 2, 3, copiers=4)),
    ("n2 c12 h13 w40 k12 r5 s3 pad2x1 dilation1x2 groups3 f16 nhwc", Config(16, 2, 2, 2, 1, 3, 8, 4, copiers=8)),
    ("n3 c38 h9 w60 k38 r3 s3 pad1 groups38 f16 nhwc", Config(64, 1, 8, 1, 2, 3, 2, 2, True, copiers=4)),
    # Clusters, of which not all blocks have as many sums to add.
    ("n3 c40 h13 w19 k40 r5 s5 pad2 stride2 groups40 bf16 nhwc", Config(32, 2, 1, 4, 2, 5, 3, 8, cluster=True)),
    ("n2 c40 h9 w20 k40 r3 s3 pad1 groups20 f16 nhwc", Config(16, 1, 4, 1, 4, 3, 2, 4, cluster=True)),
    ("n5 c72 h7 w7 k72 r7 s7 pad3 groups72 f16 nhwc", Config(64, 1, 1, 2, 7, 7, 2, 2, cluster=True)),
]


@pytest.mark.parametrize(("text", "architecture"), COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    device = replace(H200, architecture=architecture)
    configs = ALGORITHM.configs(problem, device)
    # The chosen one, and the one with most registers.
    chosen = min(configs, key=lambda one: ALGORITHM.predict_us(problem, one, device))
    fullest = max(configs, key=lambda one: one.threads * min_blocks_per_sm(problem, one))
    cluster = min((one for one in configs if one.cluster), key=lambda one: ALGORITHM.predict_us(problem, one, device))
    sources = [source for config in (chosen, fullest, cluster) for source in ALGORITHM.sources(problem, config)]
    for source in share(dict.fromkeys(sources)):
        used = compiled(source, architecture).resources
        assert used.spill_bytes == 0, (chosen, fullest, used)


@pytest.mark.many
@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(("text", "config"), EMULATED)
def test_kernels_compute_the_gradient(text: str, config: Config) -> None:
    verdict = check(ConvProblem.parse(f"{text} wgrad"), ALGORITHM, config, once=True)
    assert verdict, verdict.message


@pytest.mark.parametrize(
    ("text", "units", "columns"),
    [
        ("h14 w14 r3 s3 pad1", 2, (16, 16)),
        ("h14 w28 r3 s3 pad1", 2, (24, 16)),
        ("h9 w31 r5 s5 pad2 stride2", 2, (40, 16)),
    ],
)
def test_a_row_comes_with_the_columns_that_dy_meets(text: str, units: int, columns: tuple[int, int]) -> None:
    """Columns of dy beyond the image are zeros: x has none for them, where a row is one strip."""
    problem = ConvProblem.parse(f"n8 c64 k64 {text} groups64 f16 nhwc wgrad")
    assert Config(32, 2, units, 4, 2, problem.kernel[0], 4, parts=4).columns(problem) == columns


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("number", [1, 4, 5, 8])
def test_what_is_not_finite_stays_with_its_taps_and_group(number: int) -> None:
    """Zeros beside rows and columns and other groups have no part in any sum: of parts, of one block."""
    text, config = EMULATED[number]
    check_what_is_not_finite(ConvProblem.parse(f"{text} wgrad"), ALGORITHM, config)


@pytest.mark.parametrize("text", [text for text, _ in COMPILED + EMULATED])
def test_configs_fit(text: str) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    configs = ALGORITHM.configs(problem, H200)
    assert 0 < len(configs) == len(set(configs))
    assert max(shared_bytes(problem, one) for one in configs) <= H200.shared_bytes
    assert all(one.channels % problem.group_c == 0 and one.parts > 0 for one in configs)
    assert all(map_.box[1] <= 256 for one in configs for map_ in maps_of(problem, one).values())


@pytest.mark.parametrize(
    "text",
    ["n32 c384 h14 w14 k384 r3 s3 pad1 groups384 f16 nhwc", "n32 c256 h56 w56 k256 r3 s3 pad1 groups32 bf16 nhwc"],
)
def test_the_model_chooses_it(text: str) -> None:
    assert dispatch.choose(ConvProblem.parse(f"{text} wgrad"), H200).algorithm == "cuda.narrow_groups"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c16 h9 w9 k16 r3 s3 groups16 f16 wgrad", "channels last"),
        ("c16 h9 w9 k16 r3 s3 f16 nhwc wgrad", "several of them"),
        ("c16 h9 w9 k32 r3 s3 groups16 f16 nhwc wgrad", "as many filters"),
        ("c48 h9 w9 k48 r3 s3 groups2 f16 nhwc wgrad", "groups of 1, 2, 4, 8 or 16"),
        ("c21 h9 w9 k21 r3 s3 groups21 f16 nhwc wgrad", "in twos"),
        ("c16 h9 w9 k16 r3 s3 groups16 f32 nhwc wgrad", "f16"),
        ("n40000 c16 h300 w300 k16 r3 s3 groups16 f16 nhwc wgrad", "2^31"),
        ("c16 h9 w700 k16 r3 s300 groups16 f16 nhwc wgrad", "registers"),
        ("c16 h9 w9000 k16 r3 s3 stride1x300 groups16 f16 nhwc wgrad", "registers"),
        ("c8 h2 w2 k8 r9 s9 pad6 groups8 bf16 nhwc wgrad", None),
    ],
)
def test_what_it_does_not_take(text: str, why: str | None) -> None:
    refusal = ALGORITHM.refusal(ConvProblem.parse(text), H200)
    assert refusal is None if why is None else why in str(refusal)


def test_it_needs_hopper() -> None:
    problem = ConvProblem.parse("c16 h9 w9 k16 r3 s3 groups16 f16 nhwc wgrad")
    assert "9.0" in str(ALGORITHM.refusal(problem, replace(H200, architecture="sm_80")))
