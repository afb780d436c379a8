"""cuda.implicit_gemm_mma of wgrad without a GPU: its kernels by emulation and as compiled, its geometry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled_kernels import Share, compiled

import emulated
from emulated.verify import check
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.wgrad_mma import NARROW, TILES, Config, ImplicitGemmMmaWgrad
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = ImplicitGemmMmaWgrad()
# (problem, words of its config): each way of copying in both orders, pieces of 16, 8 and 4 bytes and elements; windows
# that leave the image on every side; parts and none; warps along columns and filters; several groups a CTA.
EMULATED = [
    ("n3 c3 h15 w13 k20 r7 s7 stride2 pad3 bf16", "columns=160 filters=32 split_k=1"),
    ("n4 c33 h7 w19 k37 r3 s3 pad1:0x0:2 stride1x2 bf16 nhwc", "columns=64 filters=64 split_k=2"),
    ("n2 c33 h8 w9 k37 r3 s3 pad1:0x0:2 stride1x2 f16", "columns=96 filters=64 split_k=1"),
    ("n1 c12 h11 w9 k20 r3 s2 dilation2x3 pad2 f16 nhwc", "columns=80 filters=16 split_k=1"),
    ("n6 c40 h6 w8 k36 r1 s1 f16", "columns=64 filters=64 split_k=2"),
    ("n2 c40 h6 w7 k18 r1 s1 bf16", "columns=64 filters=32 split_k=1"),
    ("n2 c20 h9 w8 k15 r3 s3 pad1 groups5 bf16 nhwc", "columns=48 filters=8 groups_per_tile=2 split_k=1"),
    ("n5 c64 h9 w8 k64 r3 s3 pad1 groups8 bf16 nhwc", "columns=80 filters=8 groups_per_tile=4 split_k=2"),
    ("n2 c2 h11 w13 k1 r11 s11 pad5 f16 nhwc", "columns=256 filters=8 split_k=1"),
    ("n80 c130 h1 w1 k150 r1 s1 f16 nhwc", "columns=128 filters=128 split_k=1"),
    ("n2 c3 h13 w14 k20 r7 s7 stride2 pad3 f16 nhwc", "columns=160 filters=32 split_k=1"),
    ("n3 c3 h9 w12 k20 r4 s5 stride1x4 pad0:1x2:1 bf16 nhwc", "columns=64 filters=32 split_k=1"),
    ("n51 c5 h5 w5 k3 r3 s3 pad1 f16 nhwc", "columns=32 filters=8 split_k=8"),
    ("n3 c3 h15 w13 k20 r7 s7 stride2 pad3 tf32", "columns=160 filters=32 split_k=1"),
    ("n4 c33 h7 w19 k37 r3 s3 pad1:0x0:2 stride1x2 tf32 nhwc", "columns=64 filters=64 split_k=2"),
    ("n2 c44 h8 w9 k36 r3 s3 pad1:0x0:2 stride1x2 tf32 nhwc", "columns=96 filters=64 split_k=1"),
    ("n6 c40 h6 w8 k36 r1 s1 tf32", "columns=64 filters=64 split_k=2"),
    ("n2 c20 h9 w8 k15 r3 s3 pad1 groups5 tf32 nhwc", "columns=48 filters=8 groups_per_tile=2 split_k=1"),
    ("n5 c32 h9 w8 k64 r3 s3 pad1 groups8 tf32 nhwc", "columns=48 filters=8 groups_per_tile=4 split_k=2"),
    ("n80 c130 h1 w1 k150 r1 s1 tf32 nhwc", "columns=128 filters=128 split_k=1"),
    ("n3 c3 h9 w12 k20 r4 s5 stride1x4 pad0:1x2:1 tf32 nhwc", "columns=64 filters=32 split_k=1"),
    ("n5 c16 h9 w8 k16 r1 s3 pad0x1 tf32 nhwc", "columns=80 filters=16 split_k=1"),
]  # fmt: skip
COMPILED = [
    "n32 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc",
    "n32 c256 h14 w14 k1024 r1 s1 bf16",
    "n32 c3 h224 w224 k64 r7 s7 stride2 pad3 f16 nhwc",
    "n32 c63 h7 w7 k63 r3 s3 pad1 f16",
    "n32 c256 h56 w56 k256 r3 s3 pad1 groups32 f16 nhwc",
    "n32 c33 h28 w28 k37 r3 s3 pad1 bf16 nhwc",
    "n32 c256 h14 w14 k1024 r1 s1 tf32 nhwc",
    "n32 c63 h7 w7 k63 r3 s3 pad1 tf32",
]


def config_of(problem: ConvProblem, words: str) -> Config:
    return next(one for one in ALGORITHM.configs(problem, H200) if set(words.split()) <= set(str(one).split()))


@pytest.mark.skipif(not emulated.available(), reason="needs g++")
@pytest.mark.parametrize(("text", "words"), EMULATED)
def test_kernels_by_emulation(text: str, words: str) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    verdict = check(problem, ALGORITHM, config_of(problem, words), backwards=len(text) % 2 == 0)
    assert verdict.verified, verdict.message


@pytest.mark.skipif(not emulated.available(), reason="needs g++")
def test_large_images_and_many_parts() -> None:
    """A number times a reciprocal is one too many at the last pixel here. Each part has one pixel more."""
    problem = ConvProblem.parse("c2 h1 w65537 k2 r1 s1 f16 nhwc wgrad")
    config = config_of(problem, "columns=16 filters=8 split_k=32")
    x, dy = np.zeros((1, 1, 65537, 2), np.float16), np.ones((1, 1, 65537, 2), np.float16)
    (words,) = (dict(zip(one.names, one.words, strict=True)) for one in ALGORITHM.launches(problem, config, H200)[:1])
    x[0, 0, :: words["part_steps"] * 32] = 1
    x[0, 0, -1] = 3, 4
    dw = np.full((2, 1, 1, 2), np.nan, np.float16)
    workspace = np.full(ALGORITHM.workspace_bytes(problem, config, H200), 0xFF, np.uint8)
    for launch in ALGORITHM.launches(problem, config, H200):
        emulated.run(launch, {"x": x, "w": dy, "y": dw, "workspace": workspace})
    np.testing.assert_array_equal(dw.reshape(2, 2), [[35, 36], [35, 36]])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    device = replace(H200, architecture=architecture)
    configs = sorted(ALGORITHM.configs(problem, device), key=lambda one: ALGORITHM.predict_us(problem, one, device))
    # The tile that takes most registers, and the one that is predicted to be the fastest.
    largest = max(configs, key=lambda one: ALGORITHM._registers(problem, one))
    for source in share(source for config in (configs[0], largest) for source in ALGORITHM.sources(problem, config)):
        used = compiled(source, architecture).resources
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{source.text}: {used}"


@pytest.mark.parametrize("text", [*COMPILED, "c8 h9 w9 k8 r3 s3 f16 nhwc", "c1 h9 w9 k1 r1 s1 f16"])
def test_tiles_and_parts_cover_the_gradient(text: str) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    configs = ALGORITHM.configs(problem, H200)
    assert configs and len(set(configs)) == len(configs)
    for config in configs:
        sums, *more = ALGORITHM.launches(problem, config, H200)
        words = dict(zip(sums.names, sums.words, strict=True))
        assert words["tiles_c"] * config.columns >= problem.gemm_k
        assert words["tiles_f"] * config.filters >= problem.group_k
        tiles_g, rest = divmod(sums.grid[0], words["tiles_c"] * words["tiles_f"])
        assert rest == 0 and tiles_g * config.groups_per_tile >= problem.groups
        assert words["part_steps"] * (config.split_k - 1) < words["steps"] <= words["part_steps"] * config.split_k
        assert words["steps"] * 32 >= words["pixels"] and sums.shared_bytes <= H200.shared_bytes
        assert len(more) == (config.split_k > 1)
        count = int(np.prod(problem.w_shape))
        assert ALGORITHM.workspace_bytes(problem, config, H200) >= 4 * count * config.split_k * (config.split_k > 1)


@pytest.mark.parametrize("text", ["n32 c64 h112 w112 k64 r1 s1 f16", "n32 c33 h56 w56 k37 r3 s3 pad1 bf16 nhwc"])
def test_no_part_has_more_pixels_than_tensor_cores_add_well(text: str) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    for config in ALGORITHM.configs(problem, H200):
        assert -(-ALGORITHM.steps(problem) // config.split_k) * 32 <= 32768, config


@pytest.mark.parametrize(
    ("text", "words", "of_x", "of_dy"),
    [
        ("c150 h28 w28 k150 r3 s3 pad1 f16 nhwc", "columns=128 filters=256", (8, 4), (16, 4)),
        ("c33 h28 w28 k37 r3 s3 pad1 f16 nhwc", "columns=64 filters=64", (16, 2), (16, 2)),
        ("c40 h14 w14 k40 r1 s1 f16", "columns=64 filters=64 warps_c=2", (4, 8), (4, 8)),
        ("c64 h9 w9 k64 r3 s3 f16", "columns=64 filters=64 warps_c=2", (16, 2), (16, 2)),
        ("c256 h32 w32 k256 r3 s3 pad1 groups32 f16 nhwc", "columns=80 filters=8 groups_per_tile=4", (11, 16), (1, 16)),
    ],
)
def test_copies_that_a_thread_issues_a_step(
    text: str, words: str, of_x: tuple[int, int], of_dy: tuple[int, int]
) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    config = config_of(problem, words)
    assert [ALGORITHM._turns(problem, config, operand) for operand in (True, False)] == [of_x, of_dy]


def test_warps_share_copies_where_a_cta_has_a_multiprocessor_alone() -> None:
    """Measured on an H100: 115 and 82 us."""
    problem = ConvProblem.parse("n32 c3 h224 w224 k64 r7 s7 stride2 pad3 f16 nhwc wgrad")
    five, ten = (Config(160, 64, 1, 5, warps_f, 4, 131) for warps_f in (1, 2))
    assert ALGORITHM.predict_us(problem, five, H200) > 1.25 * ALGORITHM.predict_us(problem, ten, H200)


def test_tiles_are_whole_warps() -> None:
    for columns, filters, warps_c, warps_f in [*TILES, *((*tile, 1, 1) for tile in NARROW)]:
        assert columns % (16 * warps_c) == filters % (8 * warps_f) == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c16 h9 w9 k16 r3 s3 wgrad", "f16, bf16 and tf32, not f32"),
        ("c16 h9 w9 k16 r3 s3 3xtf32 wgrad", "f16, bf16 and tf32, not 3xtf32"),
        ("c16 h9 w9 k16 r3 s3 f16", "computes wgrad, not conv"),
        ("n0 c16 h9 w9 k16 r3 s3 f16 wgrad", "nothing to compute"),
        ("n32 c256 h512 w512 k16 r1 s1 f16 wgrad", "2^31 elements"),
        ("c1 h1 w268435456 k1 r1 s1 f16 wgrad", "2^28 rows"),
    ],
)
def test_what_it_does_not_take(text: str, why: str) -> None:
    assert why in str(ALGORITHM.refusal(ConvProblem.parse(text), H200))
