"""cpu.depthwise on pairs of bfloat16: against float64, infinities and NaN where the definition has them, its choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import tapwise
from tapwise import registry, settings, verify
from tapwise.algorithm import Buffers, Device
from tapwise.cpu.device import host
from tapwise.cpu.simd import target
from tapwise.ops.conv.cpu.depthwise import in_place_cost
from tapwise.ops.conv.cpu.depthwise.in_place_cost import InPlaceConfig
from tapwise.ops.conv.problem import ConvProblem

DEPTHWISE = registry.get("cpu.depthwise")
BF16 = ml_dtypes.bfloat16
WITH_PAIRS = replace(host(2), vector_bytes=64, registers=32, vector_cycles=2.0, bf16_pairs=True)
# Also where the processor multiplies pairs no faster than float32.
HERE = replace(host(2), bf16_pairs=True)
needs_pairs = pytest.mark.skipif(
    not target(settings.cpu_target()).bf16_pairs, reason="no products of pairs on this CPU"
)

CASES = [
    # Even and odd numbers of columns and rows, one of them too; both strides.
    "c5 h14 w14 k5 r3 s3 pad1 groups5",
    "n2 c7 h7 w7 k7 r7 s7 pad3 groups7",
    "c3 h12 w23 k3 r4 s4 pad1:2x2:1 groups3",
    "c6 h9 w13 k6 r5 s2 pad2x1 groups6",
    "c5 h15 w27 k5 r5 s5 stride2 pad2 groups5",
    "c5 h14 w33 k5 r4 s4 stride2 pad1 groups5",
    "c4 h16 w15 k4 r6 s3 stride2 pad3x1 groups4",
    "c9 h10 w19 k9 r2 s3 stride2x1 pad1 groups9",
    "c4 h9 w21 k4 r7 s3 stride1x2 pad3x0 groups4",
    "c11 h7 w7 k11 r1 s5 pad0x2 groups11",
    "c4 h5 w40 k4 r1 s11 pad0x5 groups4",
    "c6 h14 w14 k6 r11 s1 pad5x0 groups6",
    "c6 h13 w7 k6 r4 s1 stride2 pad2x0 groups6",
    "c3 h13 w11 k3 r10 s11 pad5 groups3",
    "c3 h12 w9 k3 r11 s10 pad4:6x6:4 groups3",
    "c3 h9 w9 k3 r9 s9 pad4 groups3",
    # Rows apart; what is left of a tall filter goes in groups of weights.
    "c4 h13 w12 k4 r5 s3 pad4x1 dilation2x1 groups4",
    "c3 h17 w10 k3 r5 s1 stride2x1 pad6x0 dilation3x1 groups3",
    "c4 h15 w15 k4 r19 s3 pad9x1 groups4",
    # Narrow and tiny images, rows and columns of outputs that only padding meets.
    "c7 h2 w2 k7 r3 s3 pad1 groups7",
    "c3 h2 w3 k3 r5 s3 pad5 groups3",
    "c3 h1 w2 k3 r5 s5 pad2 groups3",
    "c2 h3 w75 k2 r3 s3 pad1 groups2",
    "c3 h6 w30 k3 r5 s5 pad0:3x4:0 groups3",
    # What is fused.
    "n3 c5 h9 w20 k5 r3 s3 pad1 groups5 bias residual silu",
    "c4 h11 w45 k4 r5 s5 stride2 pad2 groups4 bias relu",
    "c3 h8 w19 k3 r7 s7 pad3 groups3 residual gelu",
]  # fmt: skip


def pair_configs(text: str) -> tuple[ConvProblem, list[InPlaceConfig]]:
    """Every shape of tile, with channels in one task or several."""
    problem = ConvProblem.parse(f"{text} bf16")
    configs = [one for one in DEPTHWISE.configs(problem, HERE) if isinstance(one, InPlaceConfig)]
    assert configs and all(one.pairs for one in configs)
    return problem, list({(one.rows, one.vectors, one.planes): one for one in configs}.values())


@pytest.mark.many
@needs_pairs
@pytest.mark.parametrize("text", CASES)
def test_tiles_of_pairs(text: str, cover: Callable[..., list[InPlaceConfig]]) -> None:
    """Tiles on integers take turns with those on other numbers."""
    problem, _ = pair_configs(text)

    def four(text: str) -> dict[object, InPlaceConfig]:
        configs = pair_configs(text)[1][:: max(1, len(pair_configs(text)[1]) // 4)]
        return {(one.rows, one.vectors, one.planes > 1): one for one in configs}

    for number, config in enumerate(cover(text, CASES, four), CASES.index(text)):
        verdict = verify.check(problem, "cpu.depthwise", config, device=HERE, integers=number % 2 > 0)
        assert verdict, f"{config}: {verdict.message}"


def by_definition(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Sums in float64 of the taps that lie inside the image."""
    (height, width), y = problem.spatial, np.zeros(problem.y_shape)
    x, w = x.astype(np.float64), w.astype(np.float64)
    for p, q in np.ndindex(*problem.output):
        for r, s in np.ndindex(*problem.kernel):
            row = p * problem.stride[0] - problem.padding[0][0] + r * problem.dilation[0]
            column = q * problem.stride[1] - problem.padding[1][0] + s * problem.dilation[1]
            if 0 <= row < height and 0 <= column < width:
                y[:, :, p, q] += x[:, :, row, column] * w[:, 0, r, s]
    return y


@pytest.mark.many
@needs_pairs
@pytest.mark.parametrize(
    "text",
    [
        "c4 h9 w21 k4 r3 s3 pad1 groups4",
        "c4 h9 w22 k4 r3 s3 stride2 pad1 groups4",
        "c3 h11 w18 k3 r5 s5 pad2 groups3",
        "c3 h12 w19 k3 r5 s5 stride2 pad1:2 groups3",
        "c3 h12 w9 k3 r7 s1 pad3x0 groups3",
        "c3 h12 w14 k3 r5 s3 pad4x1 dilation2x1 groups3",
        "c5 h7 w7 k5 r4 s7 pad2x3 groups5",
    ],
)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_counts_where_a_tap_meets_it(text: str, value: float) -> None:
    """Beside it stands the zero of a tap that is alone."""
    problem, configs = pair_configs(text)
    rng = np.random.default_rng(0)
    w = rng.standard_normal(problem.w_shape).astype(BF16)
    x = rng.standard_normal(problem.x_shape).astype(BF16)
    for channel in range(problem.c):
        x[0, channel, rng.integers(problem.spatial[0]), rng.integers(problem.spatial[1])] = value
        x[0, channel, -1, -1 - channel] = value
    with np.errstate(invalid="ignore"):
        expected = by_definition(problem, x, w)
    assert not np.isfinite(expected).all() and np.isfinite(expected).any()
    for config in configs[::3]:
        y = np.zeros(problem.y_shape, BF16)
        plan = DEPTHWISE.plan(problem, config, HERE)
        plan.run(Buffers(x, plan.pack(w), y))
        np.testing.assert_allclose(y.astype(np.float64), expected, rtol=1e-2, atol=2e-2)


@needs_pairs
@pytest.mark.parametrize("stride", [1, 2])
def test_nothing_beside_the_arrays_counts_or_changes(stride: int) -> None:
    """x, w, residual and y in the middle of larger arrays of NaN."""
    text = f"c3 h6 w7 k3 r5 s5 stride{stride} pad3 groups3 residual"
    problem, configs = pair_configs(text)
    rng = np.random.default_rng(0)

    def middle(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        size = int(np.prod(shape))
        around = np.full(size + 128, np.nan, BF16)
        around[64:-64] = rng.standard_normal(size)
        return around, around[64:-64].reshape(shape)

    (_, x), (_, w), (_, residual) = (middle(one) for one in (problem.x_shape, problem.w_shape, problem.y_shape))
    expected = by_definition(problem, x, w) + residual.astype(np.float64)
    for config in configs[::3]:
        around, y = middle(problem.y_shape)
        plan = DEPTHWISE.plan(problem, config, HERE)
        plan.run(Buffers(x, plan.pack(w), y, None, None, residual))
        np.testing.assert_allclose(y.astype(np.float64), expected, rtol=1e-2, atol=2e-2)
        assert np.isnan(around[:64]).all() and np.isnan(around[-64:]).all()


@needs_pairs
@pytest.mark.parametrize(("taps_h", "taps_w"), [(1, 2), (3, 3), (4, 1), (4, 4), (5, 3), (6, 5)])
def test_filters_in_pairs(taps_h: int, taps_w: int) -> None:
    """Columns by twos; an odd one by rows: by twos where there are more than three, else each with a zero."""
    problem, configs = pair_configs(f"c3 h9 w9 k3 r{taps_h} s{taps_w} groups3")
    w = np.random.default_rng(0).standard_normal(problem.w_shape).astype(BF16)
    expected = []
    for channel in w[:, 0].view(np.uint16).tolist():
        pairs = [(row[s], row[s + 1]) for s in range(0, taps_w - 1, 2) for row in channel]
        last = [row[-1] for row in channel] if taps_w % 2 else []
        if taps_h > 3:
            pairs += [(last[r], last[r + 1] if r + 1 < taps_h else 0) for r in range(0, len(last), 2)]
        else:
            pairs += [(one, 0) for one in last]
        expected += [lower | upper << 16 for lower, upper in pairs]
    packed = DEPTHWISE.plan(problem, configs[0], HERE).pack(w)
    assert packed is not None and packed.view(np.uint32).tolist() == expected


@needs_pairs
def test_arrays_of_other_strides() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, 11, 14, 20)).astype(BF16)[:, ::2, ::-1, 3:17]
    w = rng.standard_normal((5, 3, 1, 12)).astype(BF16).transpose(3, 2, 0, 1)[::2]
    problem = ConvProblem.parse("n2 c6 h14 w14 k6 r5 s3 pad2x1 groups6 bf16")
    y = tapwise.conv2d(x, w, padding=(2, 1), groups=6)
    np.testing.assert_allclose(y.astype(np.float64), by_definition(problem, x, w), rtol=1e-2, atol=2e-2)


def chosen(text: str, device: Device) -> InPlaceConfig:
    problem = ConvProblem.parse(text)
    config = min(DEPTHWISE.configs(problem, device), key=lambda one: DEPTHWISE.predict_us(problem, one, device))
    assert isinstance(config, InPlaceConfig)
    return config


@pytest.mark.parametrize(
    ("change", "pairs"),
    [
        ("r3 s3 pad1 bf16", True),
        ("r3 s3 stride2 pad1 bf16", True),
        ("r3 s3 pad2x1 dilation2x1 bf16", True),
        ("r11 s1 pad5x0 bf16", True),
        ("r11 s1 pad5x0 dilation1x2 bf16", True),
        # Taps apart, one tap, few rows of one, another dtype.
        ("r3 s3 pad1x2 dilation1x2 bf16", False),
        ("r3 s1 pad1x0 bf16", False),
        ("r3 s3 pad1 f16", False),
        ("r3 s3 pad1", False),
    ],
)
def test_pairs_are_taken_where_they_save_products(change: str, pairs: bool) -> None:
    text = f"c96 h20 w20 k96 groups96 {change}"
    assert chosen(text, WITH_PAIRS).pairs == pairs
    assert not chosen(text, replace(WITH_PAIRS, bf16_pairs=False)).pairs


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("c256 h28 w28 k256 r7 s7 pad3 groups256", 1.4),
        ("c96 h60 w60 k96 r5 s5 stride2 pad2 groups96", 1.6),
        ("c512 h14 w14 k512 r3 s3 pad1 groups512", 1.1),
        ("c300 h7 w7 k300 r7 s7 pad3 groups300", 1.15),
        ("c48 h28 w28 k48 r11 s1 pad5x0 groups48", 1.15),
    ],
)
def test_costs_of_pairs(text: str, least: float) -> None:
    """What they save of the same tile's cycles."""
    problem = ConvProblem.parse(f"{text} bf16")
    config = chosen(str(problem), WITH_PAIRS)
    alone = in_place_cost.TaskCost(problem, replace(config, pairs=False), WITH_PAIRS).breakdown().cycles
    pairs = in_place_cost.PairsCost(problem, config, WITH_PAIRS).breakdown().cycles
    assert least < sum(alone.values()) / sum(pairs.values()) < 3
