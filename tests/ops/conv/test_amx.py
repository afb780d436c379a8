"""cpu.amx: against float64, infinities and NaN where the definition has them, its code and its sizes on any machine."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import tapwise
from tapwise import registry, verify
from tapwise.algorithm import Buffers, Device
from tapwise.cpu import jit
from tapwise.cpu.amx import configs
from tapwise.cpu.device import host
from tapwise.cpu.simd import target
from tapwise.ops.conv.cpu.amx.amx import Geometry, pixel_of
from tapwise.ops.conv.cpu.amx.kernel import generate
from tapwise.ops.conv.problem import ConvProblem

AMX = registry.get("cpu.amx")
BF16 = ml_dtypes.bfloat16
# A device that has tile registers, whatever this one has.
WITH_AMX = Device("cpu", "Emerald Rapids", 2, 64, 32, 48 << 10, 2 << 20, 300 << 20, 172.8, 25.0, amx=True)
needs_amx = pytest.mark.skipif(not host().amx, reason="no AMX on this CPU")

CASES = [
    "c64 h14 w14 k64 r3 s3 pad1",
    # Few channels, whose taps lie side by side; odd numbers; one channel and one filter.
    "c3 h30 w31 k40 r7 s7 stride2 pad3",
    "c1 h9 w20 k1 r3 s3 pad1",
    "c5 h12 w13 k7 r5 s3 pad2x1",
    "c16 h11 w18 k24 r3 s3 pad1",
    "c31 h7 w7 k33 r3 s3 pad1",
    # A last vector of pairs that overlaps the one before it, with a pair of one channel or not.
    "c33 h12 w11 k70 r3 s3 pad2 dilation2",
    "c50 h17 w19 k33 r1 s1",
    "c97 h5 w6 k20 r1 s7 pad0x3",
    # Neither padding nor stride, and more than one tap.
    "c20 h7 w7 k40 r7 s7",
    # Strides: of one row and one column of taps, and of more.
    "c64 h15 w15 k70 r1 s1 stride2",
    "c34 h16 w9 k32 r1 s3 stride3x2 pad0x1",
    "c40 h16 w17 k32 r3 s1 stride2x3 pad1x0",
    "c32 h13 w40 k16 r4 s4 stride4",
    # Groups, images, padding beyond the image, more padding on one side, an image smaller than the filter.
    "n2 c48 h9 w9 k48 r3 s3 stride2 pad1 groups3",
    "n3 c24 h8 w5 k36 r3 s3 pad1 groups4",
    "c8 h3 w3 k8 r3 s3 pad4:5x3:6",
    "c36 h2 w3 k8 r5 s5 pad4",
    "c32 h1 w1 k16 r3 s3 pad3 dilation3",
    # What is fused.
    "n2 c40 h9 w20 k35 r3 s3 pad1 bias residual silu",
    "c6 h11 w45 k9 r5 s5 stride2 pad2 bias relu",
]


@pytest.mark.many
@needs_amx
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("text", CASES)
def test_tiles(text: str, layout: str) -> None:
    problem = ConvProblem.parse(f"{text} bf16 {layout}" if layout == "nhwc" else f"{text} bf16")
    found = AMX.configs(problem, host(2))
    for number, config in enumerate(found[:: max(1, len(found) // 4)]):
        verdict = verify.check(problem, "cpu.amx", config, device=host(2), integers=number % 2 > 0)
        assert verdict, f"{config}: {verdict.message}"


@needs_amx
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("channels", [3, 33, 40])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_counts_where_a_tap_meets_it(channels: int, value: float, layout: str) -> None:
    """Neither padding nor the room of a pixel behind its channels makes a NaN, and no neighbour does."""
    words = "h7 w9 k5 r3 s3 stride2 pad1"
    problem = ConvProblem.parse(f"c{channels} {words} bf16" + " nhwc" * (layout == "nhwc"))
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(BF16) for shape in (problem.x_shape, problem.w_shape))
    x[0, channels - 1, 2, 3] = value
    y = tapwise.conv2d(_laid(x, layout), _laid(w, layout), stride=2, padding=1, algorithm="cpu.amx")
    met = np.zeros((4, 5), bool)
    met[1, 1:3] = True
    assert (np.isfinite(y.astype(np.float32)) == ~met).all()


@needs_amx
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_nothing_beside_the_arrays_counts_or_changes(layout: str) -> None:
    problem = ConvProblem.parse("c35 h6 w7 k19 r3 s3 pad1 residual bf16" + " nhwc" * (layout == "nhwc"))
    rng = np.random.default_rng(0)

    def inside(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        size = int(np.prod(shape))
        around = np.full(size + 200, np.nan, BF16)
        middle = around[101 : 101 + size]
        middle[:] = rng.standard_normal(size).astype(BF16)
        n, c, *spatial = shape
        if layout == "nhwc":
            return around, np.moveaxis(middle.reshape(n, *spatial, c), -1, 1)
        return around, middle.reshape(shape)

    arrays = [inside(shape) for shape in (problem.x_shape, problem.y_shape, problem.y_shape)]
    (_, x), (around, y), (_, residual) = arrays
    w = rng.standard_normal(problem.w_shape).astype(BF16)
    for config in AMX.configs(problem, host(2))[::5]:
        plan = AMX.plan(problem, config, host(2))
        y[:] = np.nan
        workspace = np.full(plan.workspace_bytes // 4, np.nan, np.float32)
        plan.run(Buffers(x, plan.pack(w), y, workspace, None, residual))
        assert np.isfinite(y.astype(np.float32)).all()
        assert np.isnan(around[:101].astype(np.float32)).all() and np.isnan(around[-99:].astype(np.float32)).all()


@needs_amx
def test_filters_of_any_strides() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 40, 9, 9)).astype(BF16)
    w = rng.standard_normal((3, 3, 40, 20)).astype(BF16).transpose(3, 2, 1, 0)
    expected = tapwise.conv2d(x, np.ascontiguousarray(w), padding=1, algorithm="cpu.amx")
    found = tapwise.conv2d(x, w[::-1][::-1], padding=1, algorithm="cpu.amx")
    np.testing.assert_array_equal(found, expected)


@needs_amx
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("words", ["r3 s3 pad1", "r3 s3 stride2 pad1", "r5 s5 stride2 pad2 groups2"])
def test_gradients_by_x_are_convolutions_of_it(words: str, layout: str) -> None:
    """Filters turned around, channels and filters swapped, in views of w with negative strides."""
    problem = ConvProblem.parse(f"c64 h14 w15 k40 {words} bf16 dgrad" + " nhwc" * (layout == "nhwc"))
    phases = registry.get("cpu.fprop_phases", problem.operator)
    config = min(phases.configs(problem, host(2)), key=lambda one: phases.predict_us(problem, one, host(2)))
    assert "cpu.amx" in str(config)
    assert verify.check(problem, "cpu.fprop_phases", config, device=host(2))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("channels", [0, 3, 31])
def test_its_code(layout: str, channels: int) -> None:
    """Four products for four loads, and no vector that has no register."""
    kernel = generate(
        target("avx512-amx"), dtype="f32", storage="bf16", layout=layout, channels=channels, bias=True, residual=False,
        activation="relu",
    )  # fmt: skip
    assembly = jit.assembly(kernel)
    (loop,) = re.findall(r"tileloadd(?:(?!\.LBB).)*tdpbf16ps(?:(?!\.LBB).)*", assembly, re.DOTALL)
    assert loop.count("tileloadd") == loop.count("tdpbf16ps") == 4
    assert assembly.count("ldtilecfg") == assembly.count("tilerelease") == 1


@pytest.mark.parametrize("text", CASES)
def test_steps_hold_all_terms_once(text: str) -> None:
    """Terms of a tap's channels, by the offsets of the steps; what else a step has is the room behind them."""
    problem = ConvProblem.parse(f"{text} bf16")
    geometry = Geometry(problem, AMX.configs(problem, WITH_AMX)[0], WITH_AMX)
    room, step = pixel_of(problem)
    assert 1 <= step <= 16 and 2 * room >= problem.group_c
    places = (geometry.offsets()[:, None] + np.arange(step)).reshape(-1)
    r, s, pair = np.ogrid[: problem.kernel[0], : problem.kernel[1], :room]
    expected = (r * problem.dilation[0] * geometry.width + s * problem.dilation[1]) * room + pair
    np.testing.assert_array_equal(places, expected.reshape(-1))
    # The last pair of the last row of taps lies in what the task packs.
    assert places.max() + 1 <= geometry.reach[0] * geometry.width * room


def test_tile_configs() -> None:
    """Bytes of a row and rows of each tile, as ldtilecfg reads them."""
    table = configs(11)
    assert table.shape == (16, 64) and (table[:, 0] == 1).all()
    one = table[6]
    assert list(one[16:32].view(np.uint16)) == [64, 64, 64, 64, 44, 44, 64, 64]
    assert list(one[48:56]) == [7, 7, 7, 7, 7, 7, 11, 11]


def test_choice() -> None:
    dense = ConvProblem.parse("c256 h14 w14 k256 r3 s3 pad1 bf16")
    assert AMX.refusal(dense, replace(WITH_AMX, amx=False)) == "needs a processor with AMX, and Linux"
    assert AMX.refusal(dense, WITH_AMX) is None
    assert "takes bf16" in str(AMX.refusal(dense.replace(dtype="f32"), WITH_AMX))
    best = min(AMX.predict_us(dense, config, WITH_AMX) for config in AMX.configs(dense, WITH_AMX))
    others = [registry.get(name) for name in ("cpu.direct", "cpu.winograd")]
    assert best < min(one.predict_us(dense, c, WITH_AMX) for one in others for c in one.configs(dense, WITH_AMX))


def _laid(array: np.ndarray, layout: str) -> np.ndarray:
    if layout == "nchw":
        return array
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
