"""cuda.implicit_gemm_simt of wgrad without a GPU: its kernels by emulation and as compiled, its geometry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled_kernels import Share, compiled

import emulated
from emulated.verify import check
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.wgrad_simt import (
    CHAIN,
    TILES,
    TILES_F64,
    TILES_NCHW,
    TILES_NHWC,
    Config,
    ImplicitGemmSimtWgrad,
)
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = ImplicitGemmSimtWgrad()
# (problem, words of its config): each way of copying in both orders, pieces of 16 and 8 bytes and elements; windows
# that leave the image on every side, known by masks and (large filters) by coordinates; parts, clusters
# and none; slices.
EMULATED = [
    ("n2 c33 h8 w9 k37 r3 s3 pad1:0x0:2 stride1x2", "filters=64 columns=144 split_k=1"),
    ("n4 c33 h7 w19 k37 r3 s3 pad1:0x0:2 stride1x2 nhwc", "filters=64 columns=192 split_k=2"),
    ("n3 c3 h15 w13 k20 r7 s7 stride2 pad3 nhwc", "filters=32 columns=160 split_k=2 cluster=True"),
    ("n2 c12 h11 w9 k20 r3 s2 dilation2x3", "filters=32 columns=64 split_k=1"),
    ("n5 c40 h6 w8 k36 r1 s1", "filters=64 columns=64 thread_c=4 split_k=2"),
    ("n5 c16 h12 w9 k40 r3 s3 pad1", "filters=32 columns=32 split_k=4 cluster=True"),
    ("n3 c40 h7 w5 k70 r1 s1 f64", "filters=64 columns=64 split_k=1"),
    ("n9 c24 h9 w8 k24 r3 s3 pad1 groups3 tf32", "filters=8 columns=72 split_k=2"),
    ("n9 c24 h9 w8 k24 r3 s3 pad1 groups3 nhwc 3xtf32", "filters=8 columns=80 split_k=2"),
    ("n2 c6 h12 w10 k10 r5 s3 stride3x1 pad2x0 f64 nhwc", "filters=16 columns=64 split_k=1"),
    ("c1 h34 w34 k2 r31 s31 pad15 dilation1x1", "filters=4 columns=128 split_k=2"),
    ("c2 h20 w34 k2 r5 s31 pad2x15 nhwc", "filters=4 columns=128 split_k=1"),
    ("n7 c130 h3 w1 k150 r1 s1 nhwc", "filters=128 columns=128 split_k=1"),
]
COMPILED = [
    "n32 c64 h56 w56 k64 r3 s3 pad1",
    "n32 c64 h56 w56 k64 r3 s3 pad1 nhwc",
    "n32 c256 h14 w14 k1024 r1 s1",
    "n32 c3 h224 w224 k64 r7 s7 stride2 pad3 nhwc",
    "n32 c63 h7 w7 k63 r1 s1",
    "n32 c256 h56 w56 k256 r3 s3 pad1 groups32",
    "n32 c256 h56 w56 k256 r3 s3 pad1 groups32 nhwc",
    "n32 c96 h28 w28 k96 r3 s3 pad1 f64",
    "n32 c96 h28 w28 k96 r3 s3 pad1 f64 nhwc",
]


def config_of(problem: ConvProblem, words: str) -> Config:
    return next(one for one in ALGORITHM.configs(problem, H200) if set(words.split()) <= set(str(one).split()))


@pytest.mark.skipif(not emulated.available(), reason="needs g++")
@pytest.mark.parametrize(("text", "words"), EMULATED)
def test_kernels_by_emulation(text: str, words: str) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    assert ALGORITHM.refusal(problem, H200) is None
    verdict = check(problem, ALGORITHM, config_of(problem, words), backwards=len(text) % 2 == 0)
    assert verdict.verified, verdict.message


@pytest.mark.skipif(not emulated.available(), reason="needs g++")
def test_large_images_and_many_parts() -> None:
    """A number times a reciprocal is one too many at the last pixel here. Each part has one pixel more."""
    problem = ConvProblem.parse("c2 h1 w65537 k2 r1 s1 nhwc wgrad")
    config = config_of(problem, "filters=4 columns=32 split_k=16")
    x, dy = np.zeros((1, 1, 65537, 2), np.float32), np.ones((1, 1, 65537, 2), np.float32)
    sums, last = ALGORITHM.launches(problem, config, H200)
    part_steps = dict(zip(sums.names, sums.words, strict=True))["part_steps"]
    x[0, 0, :: part_steps * config.depth] = 1
    x[0, 0, -1] = 3, 4
    dw = np.full((2, 1, 1, 2), np.nan, np.float32)
    workspace = np.full(ALGORITHM.workspace_bytes(problem, config, H200), 0xFF, np.uint8)
    for launch in (sums, last):
        emulated.run(launch, {"x": x, "w": dy, "y": dw, "workspace": workspace})
    np.testing.assert_array_equal(dw.reshape(2, 2), [[19, 20], [19, 20]])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    device = replace(H200, architecture=architecture)
    configs = sorted(ALGORITHM.configs(problem, device), key=lambda one: ALGORITHM.predict_us(problem, one, device))
    # The tile that takes most registers, the one that takes least, and the one that is predicted to be the fastest.
    chosen = {configs[0]: None}
    for choose in (min, max):
        chosen[choose(configs, key=lambda one: ALGORITHM._registers(problem, one))] = None
    for source in share(source for config in chosen for source in ALGORITHM.sources(problem, config)):
        used = compiled(source, architecture).resources
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{source.text}: {used}"


@pytest.mark.parametrize("text", [*COMPILED, "c8 h9 w9 k8 r3 s3 nhwc", "c1 h9 w9 k1 r1 s1", "c1 h9 w9 k1 r1 s1 f64"])
def test_tiles_and_parts_cover_the_gradient(text: str) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    configs = ALGORITHM.configs(problem, H200)
    assert configs and len(set(configs)) == len(configs)
    count, pixels = int(np.prod(problem.w_shape)), problem.n * int(np.prod(problem.output))
    for config in configs:
        sums, *more = ALGORITHM.launches(problem, config, H200)
        words = dict(zip(sums.names, sums.words, strict=True))
        assert words["tiles_c"] * config.columns >= problem.gemm_k
        assert words["tiles_f"] * config.filters >= problem.group_k
        assert sums.grid[0] * sums.grid[1] == words["tiles_c"] * words["tiles_f"] * problem.groups * config.split_k
        assert (sums.grid[1] == 1) == (config.split_k == 1 or config.cluster)
        assert words["part_steps"] * (config.split_k - 1) < words["steps"] <= words["part_steps"] * config.split_k
        assert words["steps"] * config.depth >= pixels and sums.shared_bytes <= H200.shared_bytes
        assert len(more) == (config.split_k > 1 and not config.cluster)
        needed = problem.itemsize * count * config.split_k * len(more)
        assert ALGORITHM.workspace_bytes(problem, config, H200) >= needed
        if problem.dtype == "f32":
            assert words["part_steps"] * config.depth // config.slices <= CHAIN


def test_tiles_are_whole_warps() -> None:
    for tiles, vector in ((TILES, 4), (TILES_NHWC, 4), (TILES_NCHW, 1), (TILES_F64, 2)):
        for filters, columns, thread_f, thread_c, lanes_f, depth, slices in tiles:
            config = Config(filters, columns, thread_f, thread_c, lanes_f, depth, slices, 4, 1, False)
            assert config.threads % 32 == 0 and filters % (lanes_f * thread_f) == columns % thread_c == 0
            lanes_c = min(32, config.threads // slices) // lanes_f
            assert columns % (lanes_c * thread_c) == depth % slices == thread_f % vector == thread_c % vector == 0
            # NCHW reads whole pieces of a slice's pixels.
            assert tiles is TILES_NHWC or depth // slices % (2 if tiles is TILES_F64 else 4) == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c16 h9 w9 k16 r3 s3 f16 wgrad", "f32 and f64, not f16"),
        ("c16 h9 w9 k16 r3 s3", "computes wgrad, not conv"),
        ("n0 c16 h9 w9 k16 r3 s3 wgrad", "nothing to compute"),
        ("n32 c256 h512 w512 k16 r1 s1 wgrad", "2^31 elements"),
        ("c1 h1 w268435456 k1 r1 s1 wgrad", "2^28 rows"),
    ],
)
def test_what_it_does_not_take(text: str, why: str) -> None:
    assert why in str(ALGORITHM.refusal(ConvProblem.parse(text), H200))
