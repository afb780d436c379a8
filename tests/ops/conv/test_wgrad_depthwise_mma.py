"""cuda.depthwise_mma of wgrad without a GPU: kernels compile without spills, and by emulation compute the gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compiled_kernels import Share, compiled
from emulated_plans import check_what_is_not_finite

import emulated
from emulated.verify import check
from tapwise import dispatch, registry
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.wgrad_depthwise_mma import Config, DepthwiseMmaWgrad, begins_early, shared_bytes
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = DepthwiseMmaWgrad()
COMPILED = [
    ("n32 c256 h28 w28 k256 r7 s7 pad3 groups256 f16 nhwc", "sm_90a"),
    ("n32 c49 h75 w75 k49 r3 s3 pad1 groups49 bf16 nhwc", "sm_90a"),
    ("n32 c96 h120 w120 k96 r5 s5 stride2 pad2 groups96 f16 nhwc", "sm_80"),
    ("n8 c64 h31 w31 k64 r31 s31 pad15 groups64 f16", "sm_100a"),
]
# Chunks of several images whose last has fewer, bands of rows, strips of columns, pieces of a filter, runs that end
# behind an image, odd channels, classes of columns, more than one tile.
EMULATED = [
    (
        "n3 c20 h10 w13 k20 r5 s3 stride2 pad2:1x1:0 groups20 bf16 nhwc",
        Config(8, 1, 1, 5, 2, 1, 2, 3, parts=2, cluster=True),
    ),
    ("n2 c9 h10 w17 k9 r5 s7 pad2x3 groups9 f16 nhwc", Config(8, 1, 1, 3, 2, 2, 1, 3, parts=4, cluster=False)),
    ("n5 c6 h7 w7 k6 r9 s9 pad4 groups6 f16 nhwc", Config(8, 2, 2, 9, 4, 1, 4, 2, parts=1, cluster=False)),
    ("c10 h11 w12 k10 r3 s5 dilation3x2 pad2 groups10 f16 nhwc", Config(8, 1, 1, 3, 1, 1, 1, 3, 3, cluster=True)),
    ("n2 c4 h9 w40 k4 r2 s13 pad0x6 stride3x1 groups4 bf16", Config(8, 1, 1, 2, 1, 5, 2, 3, parts=1, cluster=False)),
    ("c7 h9 w30 k7 r3 s4 stride1x2 pad1 groups7 f16", Config(8, 2, 2, 3, 7, 1, 1, 1, parts=4, cluster=True)),
]


@pytest.mark.parametrize(("text", "architecture"), COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    device = replace(H200, architecture=architecture)
    config = min(ALGORITHM.configs(problem, device), key=lambda one: ALGORITHM.predict_us(problem, one, device))
    for source in share(ALGORITHM.sources(problem, config)):
        used = compiled(source, architecture).resources
        assert used.spill_bytes == 0, (config, used)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(("text", "config"), EMULATED)
def test_kernels_compute_the_gradient(text: str, config: Config) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    verdict = check(problem, ALGORITHM, config, backwards=config.cluster)
    assert verdict, verdict.message


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_is_not_finite_stays_with_its_taps(number: int) -> None:
    """Zeros beside rows and columns have no part in any sum: of a cluster, of a second launch, of one block."""
    text, config = EMULATED[number]
    check_what_is_not_finite(ConvProblem.parse(f"{text} wgrad"), ALGORITHM, config)


@pytest.mark.parametrize("text", [text for text, _ in COMPILED + EMULATED])
def test_configs_fit(text: str) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    configs = ALGORITHM.configs(problem, H200)
    assert 0 < len(configs) == len(set(configs))
    assert max(shared_bytes(problem, one) for one in configs) <= H200.shared_bytes
    assert all(one.parts <= 8 for one in configs if one.cluster)
    assert not any(one.cluster for one in ALGORITHM.configs(problem, replace(H200, architecture="sm_80")))


def test_the_model_chooses_it() -> None:
    problem = ConvProblem.parse("n32 c300 h7 w7 k300 r9 s9 pad4 groups300 f16 nhwc wgrad")
    assert dispatch.choose(problem, H200).algorithm == "cuda.depthwise_mma"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c16 h9 w9 k16 r3 s3 f16 nhwc wgrad", "one channel a group"),
        ("c16 h9 w9 k32 r3 s3 groups16 f16 nhwc wgrad", "one filter of it"),
        ("c16 h9 w9 k16 r3 s3 groups16 f32 nhwc wgrad", "f16"),
        ("c16 h90 w90 k16 r3 s3 stride5 groups16 f16 nhwc wgrad", "strides of up to 4"),
        ("n40000 c16 h300 w300 k16 r3 s3 groups16 f16 nhwc wgrad", "2^31"),
        ("c16 h20000 w3 k16 r10000 s3 groups16 f16 nhwc wgrad", "shared memory"),
        ("c3 h2 w2 k3 r9 s9 pad6 groups3 bf16 wgrad", None),
    ],
)
def test_what_it_does_not_take(text: str, why: str | None) -> None:
    refusal = ALGORITHM.refusal(ConvProblem.parse(text), H200)
    assert refusal is None if why is None else why in str(refusal)


@pytest.mark.parametrize(
    "text",
    ["n8 c48 h14 w14 k48 r3 s3 stride2 pad1 groups48", "c166 h7 w7 k166 r3 s3 pad1 groups166",
     "c192 h7 w7 k192 r3 s3 stride2 pad1 groups192"],
)  # fmt: skip
def test_few_terms_of_many_sums_are_not_left_to_the_definition(text: str) -> None:
    """A block a sum: 5 to 9 us where others take 2.3 to 2.6 (H200)."""
    problem = ConvProblem.parse(f"{text} f16 nhwc wgrad")
    plain = registry.get("cuda.grid_stride", "wgrad")
    assert dispatch.choose(problem, H200).algorithm != plain.id
    assert 4.5 < plain.predict_us(problem, plain.configs(problem, H200)[0], H200) < 9


@pytest.mark.parametrize(
    ("size", "config", "early"),
    [
        # One block a multiprocessor; two, where each has two; three would fit where each has two.
        ("n8 c24 h24 w24 k24", Config(8, 1, 1, 5, 1, 3, 1, 24, parts=24, cluster=False), True),
        ("n32 c512 h12 w12 k512", Config(16, 2, 1, 5, 3, 2, 4, 4, parts=8, cluster=False), True),
        ("n32 c51 h30 w30 k51", Config(8, 1, 1, 5, 2, 4, 1, 15, parts=32, cluster=False), False),
        # Clusters, and more than L2 holds.
        ("n32 c512 h12 w12 k512", Config(16, 2, 1, 5, 3, 2, 4, 4, parts=4, cluster=True), False),
        ("n256 c512 h32 w32 k512", Config(16, 2, 1, 5, 3, 2, 4, 4, parts=8, cluster=False), False),
    ],
)
def test_what_comes_next_is_placed_early(size: str, config: Config, early: bool) -> None:
    """Where no multiprocessor could have more blocks than others."""
    problem = ConvProblem.parse(f"{size} r5 s5 pad2 groups{size.rpartition('k')[2]} f16 nhwc wgrad")
    assert begins_early(problem, config, H200) == early
    launches = ALGORITHM.launches(problem, config, H200)
    assert [one.words[one.names.index("early")] for one in launches] == [early] * (1 if config.cluster else 2)
