"""cuda.implicit_gemm_simt without a GPU: its kernels by emulation and as compiled, its geometry and its choice."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_kernels import Share, compiled

import emulated
from emulated.verify import check
from tapwise import dispatch
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.implicit_gemm_simt import TILES, TILES_F64, Config, ImplicitGemmSimt
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = ImplicitGemmSimt()
# (problem, words of its config): each memory order with terms one by one and channels in steps, whole and not; copies
# of one, two and four pixels; warps along pixels alone; parts, added up in a cluster and by a second launch.
EMULATED = [
    ("n2 c3 h9 w11 k5 r3 s3 pad1 bias relu", "filters=8 split_k=2"),
    ("n3 c33 h5 w5 k33 r3 s3 pad2 dilation2 nhwc residual", "pixels=64 filters=64 thread_m=4 split_k=1"),
    ("n1 c31 h7 w7 k66 r3 s3 pad1:0x0:2 stride2x1 nhwc bias gelu residual", "pixels=128 filters=64 split_k=1"),
    ("n1 c64 h5 w4 k24 r3 s2 pad0:1x1:0", "pixels=32 filters=32 split_k=8"),
    ("n3 c20 h7 w6 k17 r1 s1", "pixels=128 filters=32 split_k=1"),
    ("n3 c48 h8 w6 k40 r1 s1 silu", "pixels=64 filters=32 split_k=1"),
    ("n3 c30 h7 w6 k10 r1 s1 residual hardswish", "pixels=128 filters=16 split_k=1"),
    ("n2 c32 h8 w7 k24 r3 s3 pad1 groups2 stride1x2 nhwc", "filters=16 pixels=128 split_k=4"),
    ("n2 c12 h9 w9 k24 r3 s3 pad1 groups12 nhwc tanh", "filters=4 split_k=1"),
    ("n2 c17 h13 w11 k130 r3 s3 pad1 bias residual relu", "thread_m=16 split_k=4"),
    ("n2 c20 h9 w13 k70 r3 s3 pad1 f64 residual leaky_relu0.2", "pixels=128 thread_m=8 filters=128 split_k=1"),
    ("n2 c24 h9 w13 k12 r3 s3 pad1 nhwc hardsigmoid", "filters=16 split_k=2"),
    ("n2 c19 h9 w8 k47 r2 s3 pad1:0x0 bias gelu_tanh", "pixels=256 filters=48 split_k=1"),
    ("n2 c32 h9 w8 k190 r3 s1 nhwc residual", "pixels=128 filters=96 split_k=2"),
    ("n2 c17 h8 w9 k40 r3 s3 pad1 f64 bias sigmoid", "pixels=64 filters=32 split_k=4"),
    ("n2 c16 h5 w5 k34 r1 s1 f64 nhwc residual", "pixels=128 filters=64 split_k=1"),
    ("n1 c64 h5 w4 k24 r3 s3 pad1 bias relu residual", "pixels=32 filters=32 split_k=12"),
    ("n2 c48 h4 w5 k33 r3 s3 pad1 nhwc bias residual", "pixels=64 filters=32 split_k=12"),
    ("n2 c32 h4 w3 k300 r3 s3 bias relu", "pixels=8 filters=256 split_k=4"),
    ("n9 c48 h1 w1 k260 r1 s1 nhwc residual", "pixels=8 filters=256 split_k=1"),
]
COMPILED = [
    "n32 c64 h56 w56 k64 r3 s3 pad1",
    "n32 c256 h14 w14 k1024 r1 s1 bias relu residual",
    "n32 c3 h224 w224 k64 r7 s7 stride2 pad3 bias gelu",
    "n32 c96 h28 w28 k96 r3 s3 pad1 nhwc bias silu residual",
    "n2 c33 h20 w20 k37 r3 s3 nhwc tanh",
    "c3 h640 w640 k96 r3 s3",
    "c64 h64 w64 k96 r1 s1 silu residual nhwc",
    "n2 c64 h20 w20 k64 r3 s3 pad1 f64 nhwc bias gelu residual",
    "n2 c5 h20 w20 k7 r3 s3 f64 tanh",
]


def config_of(problem: ConvProblem, words: str) -> Config:
    return next(one for one in ALGORITHM.configs(problem, H200) if set(words.split()) <= set(str(one).split()))


@pytest.mark.skipif(not emulated.available(), reason="needs g++")
@pytest.mark.parametrize(("text", "words"), EMULATED)
def test_kernels_by_emulation(text: str, words: str) -> None:
    problem = ConvProblem.parse(text)
    verdict = check(problem, ALGORITHM, config_of(problem, words), backwards=len(text) % 2 == 0)
    assert verdict.verified, verdict.message


def in_order(problem: ConvProblem, config: Config, w: np.ndarray) -> np.ndarray:
    """Filters as [group][tap, then channel, up to whole steps][filter, up to whole pieces of 16 bytes]."""
    taps = problem.kernel[0] * problem.kernel[1]
    wide = ALGORITHM._wide(problem, config)
    found = np.zeros((problem.groups, taps, wide, problem.group_k), problem.x_dtype)
    terms = w.reshape(problem.groups, problem.group_k, problem.group_c, taps)
    found[:, :, : problem.group_c] = terms.transpose(0, 3, 2, 1)
    packed = np.zeros(ALGORITHM.packed(problem, config), problem.x_dtype)
    packed[:, : taps * wide, : problem.group_k] = found.reshape(problem.groups, taps * wide, problem.group_k)
    return packed


@pytest.mark.skipif(not emulated.available(), reason="needs g++")
@pytest.mark.parametrize("text", ["c40 h9 w9 k37 r3 s3", "c5 h9 w9 k70 r2 s3", "c12 h9 w9 k12 r1 s1 f64 groups4"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)])
def test_filters_are_packed_from_any_strides(text: str, order: tuple[int, ...]) -> None:
    problem = ConvProblem.parse(text)
    config = ALGORITHM.configs(problem, H200)[0]
    memory = np.random.default_rng(0).random([problem.w_shape[axis] for axis in order]).astype(problem.x_dtype)
    w = memory.transpose(np.argsort(order))
    wanted = in_order(problem, config, w)
    packed = np.full_like(wanted, np.nan)
    launch = ALGORITHM.pack_launch(problem, config, tuple(step // w.itemsize for step in w.strides))
    emulated.run(launch, {"w": memory, "y": packed})
    np.testing.assert_array_equal(packed, wanted)


@pytest.mark.many
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    problem = ConvProblem.parse(text)
    configs = ALGORITHM.configs(problem, H200)
    kinds = {(config.threads * config.thread_m * config.thread_n, config.cluster): config for config in configs}
    if architecture != "sm_90a":
        # The smallest and the largest tile.
        kinds = {kind: kinds[kind] for kind in (min(kinds), max(kinds))}
    for source in share(source for config in kinds.values() for source in ALGORITHM.sources(problem, config)):
        if architecture == "sm_80" and "__cluster_dims__" in source.text:
            continue
        used = compiled(source, architecture).resources
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{source.text}: {used}"


@pytest.mark.parametrize("text", ["c64 h9 w9 k64 r3 s3", "c3 h9 w9 k256 r3 s3 nhwc", "c40 h9 w9 k12 r1 s1 f64 groups4"])
def test_parts_cover_gemm_k(text: str) -> None:
    """And tiles cover y."""
    problem = ConvProblem.parse(text)
    for config in ALGORITHM.configs(problem, H200):
        product, *more = ALGORITHM.launches(problem, config, H200)
        words = dict(zip(product.names, product.words, strict=True))
        assert words["steps"] * config.depth >= problem.gemm_k
        assert words["part_steps"] * config.split_k >= words["steps"]
        assert len(more) == (config.split_k > 1 and not config.cluster)
        blocks, rest = divmod(product.grid[0] * product.grid[1], config.split_k)
        tiles = blocks // (words["tiles_k"] * problem.groups)
        assert rest == 0 and (product.grid[1] == 1 or not config.cluster)
        assert tiles * config.pixels >= words["pixels"] > (tiles - 1) * config.pixels
        assert ALGORITHM.workspace_bytes(problem, config, H200) % problem.itemsize == 0


def test_tiles_are_whole_warps() -> None:
    for tiles, size in ((TILES, 4), (TILES_F64, 8)):
        for pixels, filters, thread_m, thread_n, lanes_n, depth in tiles:
            config = Config(pixels, filters, thread_m, thread_n, lanes_n, depth, 4, 1, False)
            assert config.threads % 32 == 0
            assert pixels % (32 // lanes_n * thread_m) == filters % (lanes_n * thread_n) == 0
            assert thread_m * size % 16 == thread_n * size % 16 == 0


def test_what_it_refuses() -> None:
    for text, says in (
        ("c1 h50000 w50000 k1 r1 s1", "2^31"),
        ("c4 h5 w5 k4 r3 s3 f16", "f32 and f64"),
        ("c1073741824 h1 w1 k1 r1 s1", "2^30"),
    ):
        assert says in (ALGORITHM.refusal(ConvProblem.parse(text), H200) or ""), text
    large = ConvProblem.parse("n70000 c64 h56 w56 k64 r3 s3 pad1 nhwc")
    assert ALGORITHM.refusal(large, H200) is None
    assert ALGORITHM.launches(large, ALGORITHM.configs(large, H200)[1], H200)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_auto_answers_in_both_orders(dtype: str, layout: str) -> None:
    for text in ("n1 c512 h7 w7 k512 r3 s3 pad1", "n32 c96 h28 w28 k96 r3 s3 pad1 groups3", "c3 h70 w70 k64 r7 s7"):
        choice = dispatch.choose(ConvProblem.parse(f"{text} {dtype} {layout}"), H200)
        assert layout == "nchw" or choice.algorithm in ("cuda.winograd", "cuda.implicit_gemm_simt")


def test_a_small_problem_fills_the_gpu() -> None:
    problem = ConvProblem.parse("n1 c512 h7 w7 k512 r3 s3 pad1")
    choice = dispatch.choose(problem, H200, "cuda.implicit_gemm_simt")
    assert isinstance(choice.config, Config)
    product = ALGORITHM.launches(problem, choice.config, H200)[0]
    assert product.grid[0] * product.grid[1] > 0.9 * H200.multiprocessors
