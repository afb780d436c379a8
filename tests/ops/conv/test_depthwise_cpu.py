"""cpu.depthwise: every shape of tile that reads x in place against float64, and nothing beside the arrays counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tapwise
from tapwise import registry, verify
from tapwise.algorithm import Buffers, Device
from tapwise.cpu.device import host
from tapwise.ops.conv.cpu.depthwise import in_place_cost
from tapwise.ops.conv.cpu.depthwise.in_place_cost import InPlaceConfig
from tapwise.ops.conv.cpu.depthwise.pixels import Geometry as PixelsGeometry
from tapwise.ops.conv.cpu.depthwise.pixels import PixelsConfig
from tapwise.ops.conv.cpu.depthwise.small_planes import Plane
from tapwise.ops.conv.cpu.depthwise.small_planes_cost import SmallPlanesConfig
from tapwise.ops.conv.cpu.depthwise.tile import Rows, vectors_of
from tapwise.ops.conv.problem import ConvProblem

DEPTHWISE = registry.get("cpu.depthwise")
needs_whole_vectors = pytest.mark.skipif(host().vector_bytes < 64, reason="no masks of whole vectors on this CPU")
needs_masks = pytest.mark.skipif(host().vector_bytes < 32, reason="no masked loads on this CPU")

# (problem, (rows, vectors, planes, blocks) of a tile); a config that a narrower machine does not have is the nearest.
CASES = [
    ("c5 h7 w7 k5 r7 s7 pad3 groups5", (7, 1, 2, 1)),
    ("n3 c11 h7 w7 k11 r3 s3 pad1 groups11 bias relu", (3, 1, 4, 2)),
    ("c9 h14 w13 k9 r5 s5 pad2 groups9", (5, 1, 1, 4)),
    ("c3 h19 w19 k3 r3 s3 pad1 groups3 residual", (7, 2, 1, 1)),
    ("c3 h19 w20 k3 r3 s3 pad1 groups3", (10, 1, 2, 1)),
    ("c4 h11 w45 k4 r3 s3 pad1 groups4 bias residual silu", (4, 3, 1, 2)),
    ("c4 h11 w45 k4 r3 s3 pad1 groups4 residual", (6, 2, 1, 2)),
    ("c5 h14 w14 k5 r3 s3 stride2 pad1 groups5", (4, 1, 2, 1)),
    ("c5 h15 w27 k5 r5 s5 stride2 pad2 groups5", (8, 1, 1, 1)),
    ("c2 h13 w75 k2 r5 s5 stride2 pad2 groups2 bias", (4, 2, 1, 1)),
    ("c6 h7 w7 k6 r1 s5 pad0x2 groups6", (7, 1, 2, 2)),
    ("c6 h13 w7 k6 r11 s1 pad5x0 groups6", (13, 1, 1, 1)),
    ("c6 h9 w7 k6 r9 s9 pad4 groups6", (9, 1, 2, 1)),
    ("c4 h15 w15 k4 r19 s3 pad9x1 groups4", (5, 1, 2, 1)),
    ("c4 h9 w11 k4 r3 s4 pad0:2x3:0 groups4", (5, 1, 2, 1)),
    ("c4 h10 w12 k4 r3 s3 pad2x3 dilation2x3 groups4", (4, 1, 2, 1)),
    ("c4 h10 w12 k4 r3 s3 stride3x2 pad2 dilation1x2 groups4", (4, 1, 2, 1)),
    ("c4 h9 w11 k4 r2 s3 stride2x1 pad1 groups4", (5, 1, 2, 1)),
    # Whole rows of outputs that only padding meets, and an image narrower than any vector.
    ("c3 h2 w3 k3 r3 s3 pad4 groups3", (4, 1, 1, 1)),
    ("c3 h5 w2 k3 r3 s3 pad1 groups3 residual", (5, 1, 2, 1)),
    ("c5 h7 w9 k5 r3 s3 pad1 groups5 bias residual gelu f64", (4, 1, 2, 1)),
    ("c5 h9 w21 k5 r5 s5 stride2 pad2 groups5 f64", (5, 2, 1, 1)),
    ("c5 h7 w9 k5 r3 s3 pad1 groups5 bias residual f16", (4, 1, 2, 1)),
    ("c5 h9 w21 k5 r5 s5 stride2 pad2 groups5 f16", (5, 1, 2, 1)),
]


def in_place(problem: ConvProblem, device: Device) -> list[InPlaceConfig]:
    return [one for one in DEPTHWISE.configs(problem, device) if isinstance(one, InPlaceConfig)]


def nearest(problem: ConvProblem, wanted: tuple[int, int, int, int]) -> InPlaceConfig:
    def distance(one: InPlaceConfig) -> int:
        given = one.rows, one.vectors, one.planes, one.blocks
        return sum(abs(mine - other) for mine, other in zip(given, wanted, strict=True))

    return min(in_place(problem, host(2)), key=distance)


@pytest.mark.many
@needs_masks
@pytest.mark.parametrize(("text", "wanted"), CASES)
def test_tiles(text: str, wanted: tuple[int, int, int, int]) -> None:
    problem = ConvProblem.parse(text)
    if host().vector_bytes < 64 and not in_place(problem, host(2)):
        pytest.skip("packed on this CPU")
    config = nearest(problem, wanted)
    if host().vector_bytes == 64:
        assert config == InPlaceConfig(*wanted)
    verdict = verify.check(problem, "cpu.depthwise", config, device=host(2))
    assert verdict, verdict.message


def zen5() -> Device:
    """This CPU, with what is offered on a Zen 5."""
    return replace(host(2), split_loads=False)


ONCE = [
    ("c5 h14 w14 k5 r3 s3 stride2 pad1 groups5", (4, 1, 1, 1)),
    ("n2 c7 h15 w29 k7 r3 s3 stride2 pad1 groups7 bias", (8, 1, 1, 2)),
    ("c4 h9 w75 k4 r3 s3 stride2 pad2x1 groups4 residual relu", (3, 2, 1, 1)),
    ("c4 h6 w110 k4 r3 s3 stride1x2 groups4", (2, 3, 1, 1)),
    ("c4 h13 w40 k4 r3 s3 stride1x2 dilation1x3 pad1x2 groups4", (4, 1, 1, 1)),
    ("c5 h9 w21 k5 r1 s7 stride2 pad0x3 groups5 f16", (5, 1, 2, 1)),
    ("c5 h9 w33 k5 r3 s2 stride2 pad1 groups5 f64", (5, 2, 1, 1)),
]


@needs_whole_vectors
@pytest.mark.parametrize(("text", "wanted"), ONCE)
def test_rows_that_are_loaded_once(text: str, wanted: tuple[int, int, int, int]) -> None:
    problem, config = ConvProblem.parse(text), InPlaceConfig(*wanted, once=True)
    assert config in in_place(problem, zen5())
    verdict = verify.check(problem, "cpu.depthwise", config, device=zen5())
    assert verdict, verdict.message


# Half a vector that is left and less, one whole vector and several, odd numbers of channels, rows that end the image,
# windows beyond the edges, what stands behind sums, dtypes.
HALVES = [
    "c5 h9 w24 k5 r7 s7 pad3 groups5",
    "n2 c7 h12 w35 k7 r5 s5 pad2 groups7 bias residual relu",
    "c2 h7 w66 k2 r3 s3 pad1 groups2 residual",
    "c3 h11 w19 k3 r9 s9 pad4 groups3 bias silu",
    "c4 h10 w42 k4 r3 s4 pad2:0x0:3 dilation2x3 groups4",
    "c6 h8 w56 k6 r5 s3 groups6 f16",
    "c6 h8 w28 k6 r3 s3 pad1 groups6 f64",
]


@pytest.mark.many
@needs_whole_vectors
@pytest.mark.parametrize("text", HALVES)
def test_what_is_left_of_two_channels_rows_is_one_vector(text: str) -> None:
    problem = ConvProblem.parse(text)
    found = [one for one in in_place(problem, host(2)) if one.halves]
    assert found
    for config in {found[0], found[len(found) // 2], found[-1]}:
        verdict = verify.check(problem, "cpu.depthwise", config, device=host(2))
        assert verdict, (config, verdict.message)


@needs_whole_vectors
@pytest.mark.parametrize("text", ["c5 h9 w28 k5 r7 s7 pad3 groups5", "c5 h9 w16 k5 r3 s3 pad1 groups5",
                                  "c5 h9 w24 k5 r3 s3 stride2 pad1 groups5", "c1 h9 w24 k1 r3 s3 pad1 n2"])  # fmt: skip
def test_rows_that_leave_more_than_half_a_vector_go_alone(text: str) -> None:
    problem = ConvProblem.parse(text)
    assert not any(one.halves for one in in_place(problem, host(2)))


SMALL = [
    "n2 c9 h7 w7 k9 r3 s3 pad1 groups9",
    "c5 h7 w7 k5 r7 s7 pad3 groups5 bias residual silu",
    "c7 h4 w4 k7 r3 s3 pad1 groups7 residual",
    "c6 h5 w5 k6 r5 s5 pad2 groups6 f16",
    "c5 h14 w14 k5 r3 s3 pad1 groups5 bias relu",
    "c4 h11 w16 k4 r3 s3 pad1 groups4 residual",
    "c3 h2 w3 k3 r3 s3 pad4 groups3",
    "c6 h9 w6 k6 r3 s3 pad0x1 groups6",
    "c6 h11 w8 k6 r3 s4 pad2:0x0:3 dilation2x1 groups6",
    "c8 h12 w3 k8 r5 s3 pad4x1 groups8",
    "c8 h3 w3 k8 r9 s9 pad4 groups8 f64",
    "c3 h1 w1 k3 r3 s3 pad1 groups3",
]


def small(problem: ConvProblem) -> list[SmallPlanesConfig]:
    return [one for one in DEPTHWISE.configs(problem, zen5()) if isinstance(one, SmallPlanesConfig)]


@needs_whole_vectors
@pytest.mark.parametrize("text", SMALL)
def test_small_planes(text: str) -> None:
    """Vectors of several rows, which may begin above a plane or end below it; and of one."""
    problem = ConvProblem.parse(text)
    configs = small(problem)
    assert configs
    for config in (configs[0], configs[-1]):
        verdict = verify.check(problem, "cpu.depthwise", config, device=zen5())
        assert verdict, f"{config}: {verdict.message}"
    assert not any(one in configs for one in DEPTHWISE.configs(problem, replace(zen5(), split_loads=True)))


def test_vectors_of_several_rows() -> None:
    """3x3 on 3 x 5 pixels, two rows a vector: the second one's elements lie five on, the first vector begins above."""
    plane = Plane(3, 5, 3, 5, 3, 3, 1, 1, 1, 1, joined=2, lanes=16)
    assert plane.outputs == 2 and plane.stored(0) == 10 and plane.stored(1) == 5
    assert plane.users == {-1: [(0, 0)], 0: [(1, 0)], 1: [(2, 0), (0, 1)], 2: [(1, 1)]}
    assert [plane.loaded(row) for row in plane.users] == [0b1111100000, 0b1111111111, 0b1111111111, 0b11111]
    left, middle, right = (plane.picks(s)[:10] for s in range(3))
    assert left == [16, 0, 1, 2, 3, 16, 5, 6, 7, 8] and right == [1, 2, 3, 4, 16, 6, 7, 8, 9, 16]
    assert middle == list(range(10))


@pytest.mark.parametrize(
    "text",
    [
        "n2 c19 h14 w13 k19 r5 s5 stride2 pad2 groups19 nhwc",
        "c3 h2 w3 k3 r3 s3 pad4 groups3 nhwc",
        "c40 h11 w9 k40 r3 s3 pad4:1x2 dilation3x2 groups40 residual nhwc",
        "c20 h4 w9 k20 r3 s3 pad6 dilation5 stride3x1 groups20 nhwc",
    ],
)
def test_rows_of_taps_outside_the_image_are_left_out_in_nhwc(text: str) -> None:
    """In tasks of all rows and of some."""
    problem = ConvProblem.parse(text)
    packed = [one for one in DEPTHWISE.configs(problem, host(2)) if not isinstance(one, PixelsConfig)]
    configs = {one.task_rows: one for one in packed}
    for config in (configs[max(configs)], configs[min(configs)]):
        verdict = verify.check(problem, "cpu.depthwise", config, device=host(2))
        assert verdict, verdict.message


PIXELS = [
    "n2 c67 h14 w23 k67 r5 s5 stride2 pad2 groups67",
    "c64 h2 w15 k64 r3 s3 pad4 groups64 bias",
    "c40 h11 w19 k40 r3 s3 pad4:1x2 dilation3x2 groups40 bias residual silu",
    "c34 h4 w19 k34 r3 s3 pad6 dilation5 stride3x1 groups34 residual",
    "c33 h9 w17 k33 r2 s4 pad1:0x3:0 groups33",
    "c50 h7 w14 k50 r7 s7 pad3 groups50 relu",
    "c48 h3 w33 k48 r1 s11 pad0x5 groups48",
    "c19 h9 w18 k19 r3 s3 pad1 groups19 f64",
    "c35 h8 w5 k35 r3 s7 pad1x9 groups35",
]


def pixel_configs(problem: ConvProblem) -> list[PixelsConfig]:
    return [one for one in DEPTHWISE.configs(problem, host(2)) if isinstance(one, PixelsConfig)]


@pytest.mark.parametrize("text", PIXELS)
def test_pixels_where_they_lie(text: str) -> None:
    """Each tile, tasks of some rows and channels, and of all."""
    problem = ConvProblem.parse(f"{text} nhwc")
    configs = pixel_configs(problem)
    tiles = {(one.pixels, one.vectors): one for one in configs}
    few = min(configs, key=lambda one: (one.rows, one.channels)) if configs else None
    if host().vector_bytes == 64:
        assert configs or problem.output[1] < 5
    for config in dict.fromkeys([*tiles.values(), *([few] if few else [])]):
        verdict = verify.check(problem, "cpu.depthwise", config, device=host(2))
        assert verdict, f"{config}: {verdict.message}"


@pytest.mark.parametrize("text", PIXELS)
def test_inner_columns_see_no_padding(text: str) -> None:
    problem = ConvProblem.parse(f"{text} nhwc")
    q, width, (left, _) = problem.output[1], problem.spatial[1], problem.padding[1]
    reach = (problem.kernel[1] - 1) * problem.dilation[1]
    starts = [column * problem.stride[1] - left for column in range(q)]
    inside = [column for column, start in enumerate(starts) if start >= 0 and start + reach < width]
    for config in pixel_configs(problem)[:1]:
        g = PixelsGeometry(problem, config, host(2))
        assert list(range(g.inner, g.inner_end)) == inside


def test_pixels_are_read_alone() -> None:
    """x in the middle of NaN, y in the middle of what must stay."""
    problem = ConvProblem.parse("c37 h6 w17 k37 r5 s3 pad2x1 groups37 nhwc")
    rng = np.random.default_rng(0)
    around = np.full(6 * 17 * 37 + 64, np.nan, np.float32)
    x = around[32:-32].reshape(1, 6, 17, 37)
    x[:] = rng.standard_normal(x.shape, dtype=np.float32)
    w = rng.standard_normal((37, 1, 5, 3), dtype=np.float32)
    for config in pixel_configs(problem)[::5]:
        whole = np.full(around.size, np.float32(7))
        plan = DEPTHWISE.plan(problem, config, host(2))
        plan.run(Buffers(x, plan.pack(w), whole[32:-32]))
        assert np.all(whole[:32] == 7) and np.all(whole[-32:] == 7)
        assert not np.isnan(whole).any() and np.all(whole[32:-32] != 7)


@pytest.mark.parametrize(
    ("text", "rows", "vectors"),
    [
        ("c5 h7 w7 k5 r7 s7 pad3 groups5", 7, 1),
        ("c4 h20 w45 k4 r3 s3 pad1 groups4 bias residual silu", 5, 2),
        ("n2 c7 h15 w27 k7 r5 s5 stride2 pad2 groups7", 4, 1),
        ("c4 h9 w11 k4 r3 s4 pad0:2x3:0 groups4 f16", 5, 1),
        ("c4 h10 w40 k4 r3 s3 pad2x3 dilation2x3 groups4 f64", 3, 3),
    ],
)
def test_packed_planes(text: str, rows: int, vectors: int) -> None:
    """What other processors take for these problems."""
    problem = ConvProblem.parse(text)
    others = InPlaceConfig, SmallPlanesConfig
    packed = [one for one in DEPTHWISE.configs(problem, host(2)) if not isinstance(one, others)]
    config = min(packed, key=lambda one: abs(one.rows - rows) + abs(one.vectors - vectors))
    verdict = verify.check(problem, "cpu.depthwise", config, device=host(2))
    assert verdict, verdict.message


@needs_masks
@pytest.mark.parametrize("stride", [1, 2])
def test_nothing_beside_the_arrays_counts_or_changes(stride: int) -> None:
    """x, residual and y in the middle of larger arrays of NaN."""
    problem = ConvProblem.parse(f"c3 h6 w7 k3 r5 s5 stride{stride} pad3 groups3 residual")
    rng = np.random.default_rng(0)

    def middle(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        size = int(np.prod(shape))
        around = np.full(size + 128, np.nan, np.float32)
        around[64:-64] = rng.standard_normal(size, dtype=np.float32)
        return around, around[64:-64].reshape(shape)

    _, x = middle(problem.x_shape)
    _, residual = middle(problem.y_shape)
    w = rng.standard_normal(problem.w_shape, dtype=np.float32)
    expected = problem.convolve(x.astype(np.float64), w.astype(np.float64), None, residual.astype(np.float64))
    for config in [*in_place(problem, host(2))[::3], *small(problem)[::2]]:
        around, y = middle(problem.y_shape)
        plan = DEPTHWISE.plan(problem, config, host(2))
        plan.run(Buffers(x, plan.pack(w), y, None, None, residual))
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
        assert np.isnan(around[:64]).all() and np.isnan(around[-64:]).all()


@needs_masks
def test_chosen_for_small_images() -> None:
    """Through the public function, with channels and images that no number of tasks divides."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 31, 7, 7), dtype=np.float32)
    w = rng.standard_normal((31, 1, 3, 3), dtype=np.float32)
    problem = ConvProblem.parse("n2 c31 h7 w7 k31 r3 s3 pad1 groups31")
    y = tapwise.conv2d(x, w, padding=1, groups=31)
    np.testing.assert_allclose(y, problem.convolve(x.astype(np.float64), w.astype(np.float64)), rtol=1e-4, atol=1e-4)
    assert isinstance(tapwise.dispatch.choose(problem, host(2)).config, InPlaceConfig | SmallPlanesConfig)
    assert tapwise.conv2d(x[:0], w, padding=1, groups=31).shape == (0, 31, 7, 7)
    empty = tapwise.conv2d(x[:, :0], w[:0, :0], padding=1, groups=31)
    assert empty.shape == (2, 0, 7, 7)


@pytest.mark.parametrize("change", ["stride3", "nhwc", "two outputs", "one column", "no masks", "f16 on AVX2"])
def test_other_problems_are_packed(change: str) -> None:
    base, device = ConvProblem.parse("c6 h9 w9 k6 r3 s3 pad1 groups6"), replace(host(2), vector_bytes=64, registers=32)
    changes = {
        "stride3": {"stride": (3, 3)}, "nhwc": {"layout": "nhwc"}, "two outputs": {"k": 12},
        "one column": {"spatial": (9, 1)}, "f16 on AVX2": {"dtype": "f16"},
    }  # fmt: skip
    there = {"no masks": replace(device, vector_bytes=16), "f16 on AVX2": replace(device, vector_bytes=32)}
    assert in_place(base, device)
    assert not in_place(base.replace(**changes.get(change, {})), there.get(change, device))


def test_vectors_cover_a_row_with_less_than_a_half_too_much() -> None:
    assert [vectors_of(q, 16) for q in (3, 5, 8, 9, 16, 19, 23, 25, 36)] == [
        (4,), (8,), (8,), (16,), (16,), (16, 4), (16, 8), (16, 16), (16, 16, 4)
    ]  # fmt: skip
    for lanes in (4, 8, 16):
        for q in range(1, 70):
            assert 0 <= sum(vectors_of(q, lanes)) - q < max(4, lanes // 2)


@pytest.mark.parametrize(
    ("h", "pad", "taps", "stride", "dilation"), [(7, 3, 7, 1, 1), (14, 1, 3, 2, 1), (9, 4, 3, 3, 4)]
)
def test_rows_of_tiles(h: int, pad: int, taps: int, stride: int, dilation: int) -> None:
    """Each output meets each tap inside the image once, and no other."""
    p = (h + 2 * pad - (taps - 1) * dilation - 1) // stride + 1
    for rows in range(1, p + 1):
        place, met = Rows(h, p, rows, pad, taps, stride, dilation), set()
        for inside, first, count in place.runs():
            for start in range(first, first + count * rows, rows):
                assert place.inside(start) == inside and start + rows <= p
                for row in range(*inside):
                    met |= {
                        (start + output, tap, start * stride - pad + row)
                        for tap, output in place.users(row, range(taps))
                    }
        every = {(output, tap, output * stride - pad + tap * dilation) for output in range(p) for tap in range(taps)}
        assert met == {one for one in every if 0 <= one[2] < h}


def test_tall_images_take_tiles_in_a_loop() -> None:
    place = Rows(200, 200, 4, 1, 3, 1, 1)
    assert [(first, count) for _, first, count in place.runs()] == [(0, 1), (4, 48), (196, 1)]


def test_costs_of_what_a_tile_does() -> None:
    """Padding costs no products; memory counts where nothing stays in the caches."""
    device = replace(host(2), vector_bytes=64, registers=32)

    def cycles(text: str, config: InPlaceConfig) -> dict[str, float]:
        return dict(in_place_cost.TaskCost(ConvProblem.parse(text), config, device).breakdown().cycles)

    config = InPlaceConfig(7, 1, 1, 2)
    padded, wide = "c64 h7 w7 k64 r7 s7 pad3 groups64", "c64 h13 w7 k64 r7 s7 pad0x3 groups64"
    assert cycles(padded, config)["products"] < cycles(wide, config)["products"]
    assert cycles(padded, config)["memory"] == 0
    assert cycles("c960 h56 w56 k960 r3 s3 pad1 groups960", config)["memory"] > 0
