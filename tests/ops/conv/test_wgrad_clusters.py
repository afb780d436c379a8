"""Weight gradients whose parts a cluster adds, without a GPU: which there are, and what blocks send each other."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from compiled_kernels import Share, compiled

import emulated
from emulated.verify import check, refusing
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda import wgrad_stages_blocks as blocks
from tapwise.ops.conv.cuda.wgrad_narrow_groups import NarrowGroupsWgrad
from tapwise.ops.conv.cuda.wgrad_narrow_groups_blocks import Config
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = NarrowGroupsWgrad()
COMPILED = [
    "n32 c224 h14 w14 k224 r3 s3 pad1 groups224 f16 nhwc",
    "n4 c128 h14 w14 k128 r3 s3 pad1 groups8 bf16 nhwc",
    "n32 c128 h7 w7 k128 r7 s7 pad3 groups128 bf16 nhwc",
]
# Shares that are no whole number of fours for each, blocks without a share, parts of no rows, sums of more fours than
# threads, channels that are not there, pieces of a filter, several blocks of channels, groups of all sizes.
EMULATED = [
    (
        "n3 c24 h13 w19 k24 r5 s5 pad2 stride2 groups24 bf16 nhwc",
        Config(32, 2, 1, 4, 2, 5, 3, 7, cluster=True),
    ),
    ("n5 c72 h7 w7 k72 r7 s7 pad3 groups72 f16 nhwc", Config(64, 1, 1, 2, 7, 7, 2, 3, cluster=True)),
    ("n4 c16 h7 w9 k16 r1 s1 groups16 bf16 nhwc", Config(16, 2, 2, 2, 1, 1, 2, 8, cluster=True)),
    ("c16 h3 w9 k16 r2 s3 groups8 f16 nhwc", Config(16, 1, 2, 1, 2, 2, 2, 4, cluster=True)),
    (
        "n3 c48 h12 w5 k48 r11 s1 stride3 pad5x0 groups48 f16 nhwc",
        Config(32, 1, 1, 2, 2, 4, 2, 5, cluster=True),
    ),
    ("n2 c64 h12 w12 k64 r3 s3 pad1 groups4 f16 nhwc", Config(32, 2, 2, 2, 2, 3, 4, 2, cluster=True)),
]


@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills(text: str, share: Share) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    clusters = [one for one in ALGORITHM.configs(problem, H200) if one.cluster]
    # The one that is chosen, and the one with most threads.
    chosen = min(clusters, key=lambda one: ALGORITHM.predict_us(problem, one, H200))
    fullest = max(clusters, key=lambda one: one.threads * blocks.min_blocks_per_sm(problem, one))
    sources = [source for one in (chosen, fullest) for source in ALGORITHM.sources(problem, one)]
    for source in share(dict.fromkeys(sources)):
        used = compiled(source, "sm_90a").resources
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), (chosen, fullest, used)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(("text", "config"), EMULATED)
def test_clusters_compute_the_gradient(text: str, config: Config) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    verdict = check(problem, ALGORITHM, config, backwards=config.parts % 2 == 1, once=True)
    assert verdict, verdict.message


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("backwards", [False, True])
def test_parts_are_added_in_the_order_of_ranks(backwards: bool) -> None:
    """Of three images, a part each, the first two cancel out; in another order the third would be rounded away."""
    problem = ConvProblem.parse("n3 c16 h1 w16 k16 r1 s3 pad0x1 groups16 f16 nhwc wgrad")
    x, dy = np.ones(problem.x_shape, np.float16), np.ones(problem.y_shape, np.float16)
    x[0], x[1], dy[:2] = 2048, -2048, 2048
    expected = problem.convolve(x, dy)
    assert np.array_equal(expected.reshape(-1, 3), np.tile([15, 16, 15], (16, 1)))
    y = np.full((16, 1, 3, 1), np.nan, np.float16)
    last = {"x": np.ascontiguousarray(np.moveaxis(x, 1, -1)), "w": np.ascontiguousarray(np.moveaxis(dy, 1, -1))}
    (launch,) = ALGORITHM.launches(problem, Config(16, 1, 2, 1, 1, 1, 2, 3, cluster=True), H200)
    emulated.run(refusing(launch), {**last, "y": y}, backwards)
    np.testing.assert_array_equal(np.moveaxis(y, -1, 1), expected)


@pytest.mark.parametrize("text", COMPILED)
def test_clusters_fit(text: str) -> None:
    """One launch of whole clusters, no workspace; sums that are sent find room beside the stages."""
    problem = ConvProblem.parse(f"{text} wgrad")
    clusters = [one for one in ALGORITHM.configs(problem, H200) if one.cluster]
    assert clusters
    for config in clusters:
        (launch,) = ALGORITHM.launches(problem, config, H200)
        assert 2 <= config.parts <= 8 and launch.grid[0] % config.parts == 0
        assert launch.grid[0] == config.parts * prod(blocks.blocks_of_part(problem, config))
        assert ALGORITHM.workspace_bytes(problem, config, H200) == 0
        alone = replace(config, cluster=False)
        assert blocks.shared_bytes(problem, alone) < blocks.shared_bytes(problem, config) <= H200.shared_bytes


def test_a_cluster_costs_less_than_a_second_launch_where_it_finds_places() -> None:
    """Fifteen clusters of eight run at once on an H200, so of sixteen two share multiprocessors."""
    fits = ConvProblem.parse("n32 c480 h14 w14 k480 r3 s3 pad1 groups480 f16 nhwc wgrad")
    shares = ConvProblem.parse("n32 c512 h14 w14 k512 r3 s3 pad1 groups512 f16 nhwc wgrad")
    cluster = Config(32, 2, 2, 2, 7, 3, 3, 8, cluster=True)
    second = replace(cluster, cluster=False)
    assert ALGORITHM.predict_us(fits, cluster, H200) < ALGORITHM.predict_us(fits, second, H200) - 0.8
    assert ALGORITHM.predict_us(shares, cluster, H200) > ALGORITHM.predict_us(shares, second, H200)
