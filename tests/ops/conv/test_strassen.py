"""Strassen's products: parts and their edges, what vectors of terms are made of, and what it is not for."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tapwise import dispatch, registry
from tapwise.algorithm import Buffers
from tapwise.cpu.device import host
from tapwise.ops.conv.cpu.strassen.products import PRODUCTS
from tapwise.ops.conv.cpu.strassen.strassen import Config, Geometry
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import check

ID = "cpu.strassen"
# Odd and even numbers of pixels, blocks that do not divide them, filters that are no multiple of the tile, images.
PROBLEMS = [
    "c64 h8 w8 k64 r1 s1", "c38 h8 w5 k70 r1 s1 bias", "n2 c50 h7 w9 k82 r1 s1 residual nhwc",
    "c96 h7 w7 k160 r1 s1 bias residual relu", "c32 h3 w11 k224 r1 s1 bias silu",
    "n3 c64 h7 w7 k96 r1 s1", "c128 h9 w9 k64 r1 s1 nhwc", "n2 c32 h5 w13 k160 r1 s1 bias residual tanh nhwc",
    # Rows of planes, with and without padding; taps of pixels; rows of filters.
    "c32 h12 w15 k48 r1 s1 stride2 bias", "n2 c70 h9 w20 k34 r1 s1 stride1x3", "c32 h5 w5 k32 r1 s1 pad2",
    "n2 c64 h15 w12 k64 r3 s3 stride2 pad1 bias relu", "c40 h14 w17 k64 r3 s2 dilation2x3 stride1x2 pad3x1",
    "c38 h18 w24 k34 r3 s3 stride4x2 pad0:2x3:1", "c34 h13 w13 k64 r1 s1 stride2 relu nhwc",
    "n2 c36 h15 w12 k64 r3 s2 stride1x2 dilation2x1 nhwc", "n2 c3 h64 w96 k34 r8 s16 stride8x12 bias",
    "c2 h33 w140 k64 r3 s32 stride2x9",
]  # fmt: skip


def test_products_are_the_matrix_product() -> None:
    """Of two by two numbers, any: of unit matrices, so of all."""
    for w, x in product(np.eye(4, dtype=int), repeat=2):
        parts = [sum(np.multiply(one.w, w)) * sum(np.multiply(one.x, x)) for one in PRODUCTS]
        y = [sum(part * one.y[at] for part, one in zip(parts, PRODUCTS, strict=True)) for at in range(4)]
        assert y == (w.reshape(2, 2) @ x.reshape(2, 2)).reshape(-1).tolist()


@pytest.mark.many
@pytest.mark.parametrize(("number", "text"), [*enumerate(PROBLEMS)])
def test_every_shape_of_task(number: int, text: str) -> None:
    """With one of the register tiles, another for the next problem."""
    problem, device = ConvProblem.parse(text), host(2)
    configs = registry.get(ID).configs(problem, device)
    tiles = list(dict.fromkeys((config.m, config.n) for config in configs))
    for config in configs:
        if (config.m, config.n) == tiles[number % len(tiles)]:
            assert (verdict := check(problem, ID, config, device=device)), (config, verdict.message)


@pytest.mark.parametrize("text", PROBLEMS[:2])
def test_whole_numbers_come_out_exact(text: str) -> None:
    """All sums are whole numbers too."""
    problem, device, rng = ConvProblem.parse(text.partition(" bias")[0]), host(2), np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in (problem.x_shape, problem.w_shape))
    choice = dispatch.choose(problem, device, ID)
    plan = dispatch.plan_for(problem, choice, device)
    y, memory = np.full(problem.y_shape, np.nan, np.float32), np.zeros(plan.workspace_bytes, np.uint8)
    plan.run(Buffers(x, plan.pack(w), y, memory))
    assert np.array_equal(y, np.einsum("nchw,kc->nkhw", x, w[:, :, 0, 0]))


def test_same_bits_however_often() -> None:
    """Where the middle pixel is in both halves, and halves of it in two tasks."""
    problem, device = ConvProblem.parse("c64 h9 w9 k128 r1 s1"), host(2)
    inputs = problem.sample(np.random.default_rng(0))
    m, n = ((one := registry.get(ID).configs(problem, device)[0]).m, one.n)
    plan = registry.get(ID).plan(problem, Config(m, n, 6, 64), device)
    packed, memory = plan.pack(inputs.w), np.zeros(plan.workspace_bytes, np.uint8)
    results = []
    for _ in range(20):
        y = np.full(problem.y_shape, np.nan, np.float32)
        plan.run(Buffers(inputs.x, packed, y, memory))
        results.append(y)
    assert all(np.array_equal(results[0], y) for y in results)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c14 h8 w8 k64 r1 s1", "or more"), ("c64 h8 w8 k63 r1 s1", "even"), ("c21 h8 w8 k72 r1 s1", "even"),
        ("c64 h8 w8 k64 r1 s1 pad1 nhwc", "padding"), ("c64 h8 w8 k64 r1 s1 groups2", "ungrouped"),
        ("c64 h1 w3 k64 r1 s1", "pixels"), ("c64 h8 w8 k64 r1 s1 f64", "f32"), ("c64 h8 w8 k64 r1 s1 bf16", "f32"),
    ],
)  # fmt: skip
def test_what_it_does_not_take(text: str, why: str) -> None:
    reason = registry.get(ID).refusal(ConvProblem.parse(text), host(2))
    assert reason is not None and why in reason


def test_its_bound_holds_what_is_summed() -> None:
    """At least the definition's, and of equal parts four times as much."""
    problem = ConvProblem.parse("c64 h7 w7 k64 r1 s1")
    x, w = np.ones(problem.x_shape), np.ones(problem.w_shape)
    size = registry.get(ID).magnitude(problem, x, w)
    assert size.shape == problem.y_shape
    assert (size >= problem.magnitude(x, w)).all() and size.max() <= 6 * 64


def test_the_model_counts_the_rows_that_tasks_meet() -> None:
    """Of 28 pixels a row, tasks of 28 meet one each and tasks of 98 four; where a half ends within a row, one more."""
    even, odd = (ConvProblem.parse(f"c96 h{h} w56 k192 r2 s2 stride2") for h in (56, 58))
    counts = [Geometry(even, Config(7, 3, rows, 96), host(2)).rows_of_y() for rows in (28, 98)]
    assert counts == [1.0, 4.0]
    assert Geometry(odd, Config(7, 3, 406, 96), host(2)).rows_of_y() == 15.0
