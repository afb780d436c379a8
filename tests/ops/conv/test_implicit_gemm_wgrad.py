"""cuda.implicit_gemm of wgrad without a GPU: kernels compile without spills, and by emulation compute the gradient."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from compiled_kernels import Share, compiled

import emulated
from emulated.verify import check
from tapwise.cuda.jit.device import H200
from tapwise.cuda.plan import CudaPlan
from tapwise.ops.conv.cuda.implicit_gemm_wgrad.config import Config
from tapwise.ops.conv.cuda.implicit_gemm_wgrad.view import View, sets_of_groups
from tapwise.ops.conv.cuda.implicit_gemm_wgrad.wgrad import ImplicitGemmWgrad, WeightGradientPlan, splits
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = ImplicitGemmWgrad()
COMPILED = [
    "n32 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc wgrad",
    "n32 c256 h14 w14 k1024 r1 s1 bf16 nhwc wgrad",
    "n32 c256 h28 w28 k256 r3 s3 stride2 pad1 bf16 nhwc wgrad",
    "n8 c64 h7 w7 k64 r2 s3 f16 nhwc wgrad",
]
# Tiles with another way of their sums to dw: odd channels, NCHW, sets of groups; and those of few channels.
COMPILED_STORES = [
    "n32 c24 h128 w128 k32 r3 s3 pad1 f16 nhwc wgrad",
    "n32 c166 h28 w28 k166 r3 s3 pad1 f16 nhwc wgrad",
    "n32 c3 h224 w224 k64 r7 s7 stride2 pad3 bf16 wgrad",
    "n32 c320 h28 w28 k320 r3 s3 pad1 groups64 f16 nhwc wgrad",
]
EMULATED = [
    "n2 c72 h9 w13 k40 r3 s3 pad1 f16 nhwc wgrad",
    "n3 c136 h7 w8 k192 r1 s1 bf16 nhwc wgrad",
    "n2 c128 h12 w9 k128 r3 s2 pad2:1x0:2 stride2x1 dilation2x1 groups2 f16 nhwc wgrad",
    "n2 c64 h12 w19 k72 r3 s2 pad2:1x0:1 dilation2x3 bf16 nhwc wgrad",
    "n2 c64 h9 w40 k64 r1 s3 f16 nhwc wgrad",
    "c8 h15 w13 k16 r5 s5 stride3 pad2 bf16 nhwc wgrad",
    "n2 c16 h9 w9 k8 r1 s1 stride2 f16 nhwc wgrad",
]


# (problem, words of its config): x or dy packed or both, of either order, odd channels; few channels with their taps,
# of a row and of all rows; blocks of 32 channels; groups that begin within a block, sets of them, the last not whole.
PACKED = [
    ("n2 c21 h9 w8 k19 r3 s3 pad1 f16 nhwc wgrad", "halo=True split_k=1"),
    ("n2 c16 h9 w8 k10 r3 s1 pad1 stride2 bf16 nhwc wgrad", "halo=False split_k=1"),
    ("n4 c3 h9 w8 k10 r3 s3 stride2 pad1 bf16 wgrad", "unfold=2 split_k=1"),
    ("n2 c3 h20 w17 k24 r7 s5 stride10x9 pad3 f16 nhwc wgrad", "unfold=2 split_k=1"),
    ("n3 c5 h11 w12 k16 r3 s2 pad1 f16 wgrad", "unfold=1 halo=True split_k=4"),
    ("n2 c20 h9 w8 k15 r3 s3 pad1 groups5 bf16 nhwc wgrad", "halo=False tile_columns=64 groups_per_tile=5 split_k=1"),
    ("n2 c72 h9 w9 k36 r3 s1 groups12 f16 nhwc wgrad", "halo=True groups_per_tile=8 split_k=1"),
    ("n5 c64 h6 w9 k64 r3 s3 pad1 groups16 f16 wgrad", "tile_filters=64 tile_columns=64 groups_per_tile=2 split_k=2"),
    ("n2 c24 h9 w13 k32 r3 s3 pad1 dilation1x2 f16 nhwc wgrad", "halo=True block_channels=32 split_k=1"),
    ("n3 c20 h9 w8 k72 r3 s3 pad1 stride2 bf16 wgrad", "tile_columns=96 tile_filters=64 block_channels=32"),
    ("n2 c112 h6 w6 k144 r3 s3 pad1 groups2 stride2 f16 nhwc wgrad", "halo=False tile_columns=64 split_k=1"),
]


# Parts added within clusters: of all tiles, and some of them by way of the workspace.
CLUSTERED = [
    ("n2 c72 h9 w13 k40 r3 s3 pad1 f16 nhwc wgrad", "halo=True cluster_k=2 split_k=2"),
    ("n9 c72 h7 w8 k72 r1 s1 bf16 nhwc wgrad", "tile_filters=128 tile_columns=64 cluster_k=4 split_k=4"),
    ("n9 c20 h9 w11 k72 r1 s1 bf16 nhwc wgrad", "tile_filters=64 tile_columns=64 cluster_k=2"),
    ("n9 c72 h9 w9 k36 r3 s1 groups12 f16 nhwc wgrad", "halo=False groups_per_tile=8 cluster_k=2"),
    # Tiles that share copies: of pixels and of windows, some of them of nothing.
    ("n9 c116 h7 w8 k72 r1 s1 f16 nhwc wgrad", "tile_filters=64 tile_columns=64 cluster_k=2 cluster_m=2 cluster_n=2"),
    ("n9 c56 h9 w11 k64 r2 s4 pad1 stride2 bf16 nhwc wgrad", "tile_columns=64 halo=False cluster_k=2 cluster_n=4"),
    (
        "n5 c40 h9 w7 k200 r3 s1 pad1x0 f16 nhwc wgrad",
        "tile_filters=64 tile_columns=64 halo=False cluster_k=2 cluster_m=4",
    ),
    ("n13 c436 h6 w7 k24 r1 s1 f16 nhwc wgrad", "tile_filters=64 tile_columns=64 cluster_k=4 cluster_n=2"),
    ("n7 c256 h6 w7 k496 r1 s1 groups2 f16 nhwc wgrad", "tile_columns=64 groups_per_tile=1 cluster_k=2 cluster_m=2"),
    # Tiles that follow each other along the filters, of clusters and of groups.
    ("n3 c528 h10 w9 k400 r1 s1 groups2 f16 nhwc wgrad", "tile_filters=64 tile_columns=128 cluster_k=2"),
    ("n6 c1288 h7 w7 k136 r1 s1 bf16 nhwc wgrad", "tile_filters=64 tile_columns=128 cluster_k=2 cluster_n=4"),
]


def kinds(problem: ConvProblem) -> Iterator[Config]:
    """The first config of each tile, with and without a split."""
    seen = set()
    for config in ALGORITHM.configs(problem, H200):
        kind = (config.halo, config.tile_filters, config.tile_columns, config.min_blocks_per_sm, config.split_k > 1)
        if kind not in seen and config.cluster_k == 1:
            seen.add(kind)
            yield config


def config_of(problem: ConvProblem, words: str) -> Config:
    return next(one for one in ALGORITHM.configs(problem, H200) if set(words.split()) <= set(str(one).split()))


def most_registers(problem: ConvProblem) -> list[Config]:
    """Of the halo kernel and of the other one the tile with most sums for its registers; the last with parts, too."""
    configs = ALGORITHM.configs(problem, H200)

    def crowded(config: Config) -> float:
        sums = config.tile_filters * config.tile_columns / config.warpgroups
        return sums * config.threads * config.min_blocks_per_sm

    chosen = [some for halo in (True, False) if (some := [one for one in configs if one.halo == halo])]
    tiles = [max(some, key=crowded) for some in chosen]
    return [*(replace(one, split_k=1) for one in tiles), replace(tiles[-1], split_k=9)]


@pytest.mark.many
@pytest.mark.parametrize("text", COMPILED + COMPILED_STORES)
def test_kernels_compile_without_spills_or_waits(text: str, share: Share) -> None:
    problem = ConvProblem.parse(text)
    configs = list(kinds(problem)) if text in COMPILED else most_registers(problem)
    for source in share(source for config in configs for source in ALGORITHM.sources(problem, config)):
        _, used, log = compiled(source, "sm_90a")
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), (source.text, used)
        # Products that do not run beside others, or registers that are not handed over.
        assert not re.search(r"C75\d\d", log), (source.text, log)


@pytest.mark.many
@pytest.mark.parametrize(("text", "words"), CLUSTERED)
def test_kernels_of_clusters_compile_without_spills_or_waits(text: str, words: str, share: Share) -> None:
    problem = ConvProblem.parse(text)
    config = config_of(problem, words)
    for source in share([ALGORITHM.source(problem, config)]):
        _, used, log = compiled(source, "sm_90a")
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), (source.text, used)
        assert not re.search(r"C75\d\d", log), (source.text, log)


def test_clusters_that_share_copies() -> None:
    """Of eight CTAs, in grids of whole clusters, few of their tiles of nothing; shared copies cost less."""
    problem = ConvProblem.parse("n32 c1184 h14 w14 k640 r1 s1 f16 nhwc wgrad")
    found = [one for one in ALGORITHM.configs(problem, H200) if one.ctas > one.cluster_k]
    assert {(one.cluster_m, one.cluster_n) for one in found} >= {(2, 2), (1, 4), (1, 2), (2, 1)}
    for config in found:
        alone = replace(config, cluster_m=1, cluster_n=1)
        tiles, before = View.of(problem, config).tiles, View.of(problem, alone).tiles
        assert config.ctas == 8 and before <= tiles <= 1.15 * before
        assert ALGORITHM.launches(problem, config, H200)[0].grid[0] == tiles * config.split_k
        assert tiles * config.split_k % config.ctas == 0
    config = replace(found[0], cluster_k=2, cluster_m=1, cluster_n=1, split_k=2, tile_filters=128, tile_columns=64)
    wide = replace(config, cluster_n=2)
    assert View.of(problem, wide).tiles > View.of(problem, config).tiles
    same = ConvProblem.parse("n32 c1024 h14 w14 k640 r1 s1 f16 nhwc wgrad")
    four, two, none = (ALGORITHM.predict_us(same, replace(config, cluster_n=count), H200) for count in (4, 2, 1))
    assert four < two < none


def test_tiles_follow_each_other_so_that_neighbours_read_less() -> None:
    """Along the filters where x is the larger of what tiles copy, and there are tiles enough to share it."""
    problem = ConvProblem.parse("n32 c512 h12 w12 k1024 r1 s1 f16 nhwc wgrad")
    wide = config_of(problem, "tile_filters=64 tile_columns=128 cluster_k=2 cluster_m=1 cluster_n=1")
    high = replace(wide, tile_filters=128, tile_columns=64)
    few = ConvProblem.parse("n32 c256 h12 w12 k256 r1 s1 f16 nhwc wgrad")
    cases = (problem, wide), (problem, high), (few, wide), (problem, replace(wide, cluster_m=4))
    assert [View.of(*case).filters_first for case in cases] == [True, False, False, False]
    assert "FILTERS_FIRST = true" in ALGORITHM.source(problem, wide).text
    both = ConvProblem.parse("n3 c528 h10 w9 k400 r1 s1 groups2 f16 nhwc wgrad"), ConvProblem.parse(CLUSTERED[-1][0])
    for case, (_, words) in zip(both, CLUSTERED[-2:], strict=True):
        assert View.of(case, config_of(case, words)).filters_first, words


@pytest.mark.many
@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("text", EMULATED)
def test_kernels_compute_the_gradient(text: str) -> None:
    problem = ConvProblem.parse(text)
    configs = list(kinds(problem))
    im2col = [one for one in configs if not one.halo]
    wide = max(im2col, key=lambda one: one.tile_filters * one.tile_columns)
    # As many parts as there are steps: several threads share a sum's.
    parts = replace(im2col[0], split_k=View.of(problem, im2col[0]).steps)
    chosen = {*[one for one in configs if one.halo][:1], wide, parts}
    for number, config in enumerate(sorted(chosen, key=str)):
        verdict = check(problem, ALGORITHM, config, backwards=number % 2 == 1)
        assert verdict, (config, verdict.message)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(("text", "words"), PACKED)
def test_packed_operands_and_groups(text: str, words: str) -> None:
    problem = ConvProblem.parse(text)
    verdict = check(problem, ALGORITHM, config_of(problem, words), backwards=len(text) % 2 == 0)
    assert verdict, verdict.message


@pytest.mark.many
@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(("text", "words"), CLUSTERED)
def test_clusters_add_parts(text: str, words: str) -> None:
    problem = ConvProblem.parse(text)
    config = config_of(problem, words)
    verdict = check(problem, ALGORITHM, config, backwards=len(text) % 2 == 0)
    assert verdict, verdict.message
    if config.ctas > config.cluster_k:
        # Stages that are copied to once more, when all have read them.
        config = replace(config, stages=3)
        assert (verdict := check(problem, ALGORITHM, config)), verdict.message
    split = replace(config, split_k=2 * config.cluster_k)
    if View.of(problem, split).steps >= split.split_k:
        assert (verdict := check(problem, ALGORITHM, split)), verdict.message


def test_shared_memory_and_splits_are_within_their_limits() -> None:
    for text in COMPILED + COMPILED_STORES + EMULATED + [text for text, _ in PACKED]:
        problem = ConvProblem.parse(text)
        configs = ALGORITHM.configs(problem, H200)
        assert configs and len(set(configs)) == len(configs)
        for config in configs:
            assert config.stages >= 2
            view = View.of(problem, config)
            assert config.min_blocks_per_sm * (view.shared_bytes + 1024) <= H200.shared_bytes + 1024
            assert config.split_k <= max(1, view.steps // 2)
            end = 0
            for place, after in view.workspace.values():
                assert place % 256 == 0 and end <= place < after
                end = after
            assert ALGORITHM.workspace_bytes(problem, config, H200) == end
            assert ("parts" in view.workspace) == (config.split_k > config.cluster_k)
            packed = problem.layout == "nchw" or problem.k % 8 > 0
            assert ("packed_dy" in view.workspace) == packed


@pytest.mark.parametrize(
    "text", ["n32 c64 h112 w112 k64 r1 s1", "n32 c512 h56 w56 k512 r3 s3 pad1", "c64 h9 w9 k64 r3 s3"]
)
def test_no_part_has_more_pixels_than_tensor_cores_add_well(text: str) -> None:
    problem = ConvProblem.parse(f"{text} f16 nhwc wgrad")
    for config in ALGORITHM.configs(problem, H200):
        assert -(-View.of(problem, config).steps // config.split_k) * 64 <= 32768, config


def test_splits_give_multiprocessors_whole_numbers_of_ctas() -> None:
    assert list(splits(12, 1000, 132, 3)) == [2, 5, 11, 22, 33, 66]
    # 2000 steps of 64 pixels: no part of more than 512 of them, if tiles alone fill the device.
    assert list(splits(400, 2000, 132, 1)) == [4]


def test_a_copy_s_latency_is_shared_by_stages_under_way() -> None:
    """Where a CTA has a multiprocessor alone, three stages of one warpgroup wait for every copy."""
    problem = ConvProblem.parse("n32 c128 h32 w32 k128 r3 s3 pad1 f16 nhwc wgrad")
    three, five = (Config(False, 64, 192, 1, stages, 2, 1) for stages in (3, 5))
    assert three.stages_ahead == 1 and five.stages_ahead == 3
    assert ALGORITHM.predict_us(problem, three, H200) > 1.05 * ALGORITHM.predict_us(problem, five, H200)


def test_dy_is_not_packed_once_and_for_all() -> None:
    problem = ConvProblem.parse(EMULATED[0])
    plan = WeightGradientPlan(View.of(problem, next(kinds(problem))), H200, [])
    dy = np.zeros(3)
    assert plan.pack(dy) is dy


def test_launches_get_their_places_in_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvProblem.parse("n2 c21 h9 w8 k19 r3 s3 pad1 f16 nhwc wgrad")
    view = View.of(problem, replace(next(kinds(problem)), split_k=2))
    given: dict[str, int] = {}
    monkeypatch.setattr(CudaPlan, "enqueue", lambda plan, addresses, stream: given.update(addresses))
    WeightGradientPlan(view, H200, []).enqueue({"x": 1, "w": 2, "y": 3, "workspace": 1 << 20}, 0)
    # 144 pixels of 24 channels each, of two bytes.
    assert (given["packed_x"], given["packed_dy"]) == (1 << 20, (1 << 20) + 6912)
    assert given["parts"] == (1 << 20) + 2 * 6912


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("c784 k784 groups14", [1]), ("c512 k512 groups32", [1, 4]), ("c256 k512 groups32", [1, 4, 8]),
        ("c75 k75 groups15", [8]), ("c20 k15 groups5", [5]), ("c64 k64", [1]), ("c100 k300 groups25", [2, 4, 16]),
    ],
)  # fmt: skip
def test_sets_of_groups_begin_at_whole_pieces(text: str, sets: list[int]) -> None:
    assert sets_of_groups(ConvProblem.parse(f"{text} h9 w9 r3 s3 f16 nhwc wgrad")) == sets


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c16 h9 w9 k16 r3 s3 f32 nhwc wgrad", "takes f16 and bf16"),
        ("c16 h9 w9 k16 r3 s3 f16 nhwc", "computes wgrad"),
        ("c16 h99 w9 k16 r3 s3 stride9 pad1 f16 nhwc wgrad", "a tensor map can express"),
        ("c16 h999 w9 k16 r3 s1 dilation200x1 f16 nhwc wgrad", "a tensor map can express"),
    ],
)
def test_what_it_does_not_take(text: str, why: str) -> None:
    assert why in str(ALGORITHM.refusal(ConvProblem.parse(text), H200))
