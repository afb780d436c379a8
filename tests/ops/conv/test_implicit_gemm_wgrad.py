"""cuda.implicit_gemm of wgrad without a GPU: kernels compile without spills, and by emulation compute the gradient."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import emulated
from emulated.verify import check
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.implicit_gemm_wgrad.wgrad import (
    Config,
    Grid,
    ImplicitGemmWgrad,
    WeightGradientPlan,
    splits,
)
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = ImplicitGemmWgrad()
COMPILED = [
    "n32 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc wgrad",
    "n32 c256 h14 w14 k1024 r1 s1 bf16 nhwc wgrad",
    "n32 c256 h28 w28 k256 r3 s3 stride2 pad1 bf16 nhwc wgrad",
    "n8 c64 h7 w7 k64 r2 s3 f16 nhwc wgrad",
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


def kinds(problem: ConvProblem) -> Iterator[Config]:
    """The first config of each tile, with and without a split."""
    seen = set()
    for config in ALGORITHM.configs(problem, H200):
        kind = (config.halo, config.tile_filters, config.tile_columns, config.min_blocks_per_sm, config.split_k > 1)
        if kind not in seen:
            seen.add(kind)
            yield config


@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills_or_waits(text: str) -> None:
    problem = ConvProblem.parse(text)
    for config in kinds(problem):
        for source in ALGORITHM.sources(problem, config):
            _, log = compiler._compile(source, "sm_90a")
            used = compiler._resources(log, source)
            assert (used.stack_bytes, used.spill_bytes) == (0, 0), (config, used)
            # Products that do not run beside others, or registers that are not handed over.
            assert not re.search(r"C75\d\d", log), (config, log)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("text", EMULATED)
def test_kernels_compute_the_gradient(text: str) -> None:
    problem = ConvProblem.parse(text)
    configs = list(kinds(problem))
    im2col = [one for one in configs if not one.halo]
    wide = max(im2col, key=lambda one: one.tile_filters * one.tile_columns)
    # As many parts as there are steps: several threads share a sum's.
    parts = replace(im2col[0], split_k=Grid.of(problem, im2col[0]).steps)
    chosen = {*[one for one in configs if one.halo][:1], wide, parts}
    for number, config in enumerate(sorted(chosen, key=str)):
        verdict = check(problem, ALGORITHM, config, backwards=number % 2 == 1)
        assert verdict, (config, verdict.message)


def test_shared_memory_and_splits_are_within_their_limits() -> None:
    for text in COMPILED + EMULATED:
        problem = ConvProblem.parse(text)
        configs = ALGORITHM.configs(problem, H200)
        assert configs and len(set(configs)) == len(configs)
        for config in configs:
            assert config.stages >= 2
            each = Grid.of(problem, config).shared_bytes(config)
            assert config.min_blocks_per_sm * (each + 1024) <= H200.shared_bytes + 1024
            assert config.split_k <= max(1, Grid.of(problem, config).steps // 2)
            assert (ALGORITHM.workspace_bytes(problem, config, H200) > 0) == (config.split_k > 1)


@pytest.mark.parametrize(
    "text", ["n32 c64 h112 w112 k64 r1 s1", "n32 c512 h56 w56 k512 r3 s3 pad1", "c64 h9 w9 k64 r3 s3"]
)
def test_no_part_has_more_pixels_than_tensor_cores_add_well(text: str) -> None:
    problem = ConvProblem.parse(f"{text} f16 nhwc wgrad")
    for config in ALGORITHM.configs(problem, H200):
        assert -(-Grid.of(problem, config).steps // config.split_k) * 64 <= 32768, config


def test_splits_give_multiprocessors_whole_numbers_of_ctas() -> None:
    grid = Grid(4, 3, 12, 4, 1000, 0)
    assert list(splits(grid, 132, 3)) == [2, 5, 11, 22, 33, 66]
    # 2000 steps of 64 pixels: no part of more than 512 of them, if tiles alone fill the device.
    assert list(splits(Grid(40, 10, 400, 4, 2000, 0), 132, 1)) == [4]


def test_a_copy_s_latency_is_shared_by_stages_under_way() -> None:
    """Where a CTA has a multiprocessor alone, three stages of one warpgroup wait for every copy."""
    problem = ConvProblem.parse("n32 c128 h32 w32 k128 r3 s3 pad1 f16 nhwc wgrad")
    three, five = (Config(False, 64, 192, 1, stages, 2, 1) for stages in (3, 5))
    assert three.stages_ahead == 1 and five.stages_ahead == 3
    assert ALGORITHM.predict_us(problem, three, H200) > 1.2 * ALGORITHM.predict_us(problem, five, H200)


def test_dy_is_not_packed() -> None:
    plan, dy = WeightGradientPlan(ConvProblem.parse(EMULATED[0]), H200, []), np.zeros(3)
    assert plan.pack(dy) is dy


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c16 h9 w9 k16 r3 s3 f16 wgrad", "channels-last"),
        ("c16 h9 w9 k16 r3 s3 f32 nhwc wgrad", "takes f16 and bf16"),
        ("c16 h9 w9 k16 r3 s3 f16 nhwc", "computes wgrad"),
        ("c12 h9 w9 k16 r3 s3 f16 nhwc wgrad", "multiples of 8, not 12 and 16"),
        ("c16 h9 w9 k20 r3 s3 f16 nhwc wgrad", "multiples of 8, not 16 and 20"),
        ("c64 h9 w9 k64 r3 s3 groups2 f16 nhwc wgrad", "of each group in multiples of 64, not 32 and 32"),
        ("c16 h99 w9 k16 r3 s3 stride9 pad1 f16 nhwc wgrad", "a tensor map can express"),
        ("c16 h999 w9 k16 r3 s1 dilation200x1 f16 nhwc wgrad", "a tensor map can express"),
    ],
)
def test_what_it_does_not_take(text: str, why: str) -> None:
    assert why in str(ALGORITHM.refusal(ConvProblem.parse(text), H200))
