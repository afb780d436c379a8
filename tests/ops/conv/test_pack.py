"""Filters and images in the order that tensor cores want, by emulation."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_plans import SMALL, emulation, needs_compiler, verdict_of

import emulated
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda import pack
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.problem import ConvProblem

__all__ = ["emulation"]


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 2, 3, 0)])
@pytest.mark.parametrize(
    ("text", "wide", "more", "order", "classes", "tile"),
    [
        ("c24 h9 w9 k19 r3 s2 f16 nhwc", 24, 0, 0, (1, 1), 1),
        ("c24 h9 w9 k40 r3 s3 f16 nhwc", 32, 16, 32, (1, 32), 48),
        ("c20 h9 w9 k18 r2 s3 f16 nhwc", 24, 0, 16, (1, 1), 24),
        ("c7 h9 w9 k5 r3 s3 bf16 nhwc", 8, 3, 0, (1, 1), 1),
        ("c16 h9 w9 k6 r1 s3 bf16 nhwc", 24, 8, 0, (1, 1), 16),
        ("c64 h9 w9 k6 r3 s1 bf16 nhwc", 64, 0, 0, (4, 32), 1),
        ("c128 h9 w9 k5 r1 s3 f16 nhwc", 128, 3, 16, (8, 64), 1),
    ],
)
def test_filters(
    text: str, wide: int, more: int, order: int, classes: tuple[int, int], tile: int, axes: tuple[int, ...]
) -> None:
    problem = ConvProblem.parse(text)
    k, c, r, s = problem.w_shape
    memory = (np.arange(k * c * r * s) % 251).astype(problem.x_dtype).reshape([problem.w_shape[a] for a in axes])
    w = memory.transpose(np.argsort(axes))
    pitch = r * s * wide + more
    rows = pack.filter_rows(problem, order, tile)
    assert rows % tile == 0
    steps = tuple(step // w.itemsize for step in w.strides)
    y = np.full((rows, pitch), -1, w.dtype)
    launch = pack.filters_launch(problem, (c, r, s), steps, wide, pitch, True, order, classes, tile, H200)
    emulated.run(launch, {"w": memory, "y": y})
    expected = np.zeros((rows, r * s, wide), w.dtype)
    count, chunk = classes
    channels = sorted(range(c), key=lambda one: (one // chunk, one % count))
    expected[:k, :, :c] = w.reshape(k, c, r * s)[:, channels].swapaxes(1, 2)
    if order:
        places = np.arange(order)
        there = places % 8 // 2 * (order // 4) + places // 8 * 2 + places % 2
        for first in range(0, rows, order):
            expected[first : first + order] = expected[first : first + order][there]
    flat = expected.reshape(rows, -1)
    np.testing.assert_array_equal(y[:, : flat.shape[1]], flat)
    assert not y[:, flat.shape[1] :].any()


@pytest.mark.parametrize(("layout", "channels"), [("nhwc", (21, 12)), ("nchw", (70, 9))])
def test_two_images_in_one_launch(layout: str, channels: tuple[int, int]) -> None:
    problems = [ConvProblem.parse(f"n3 c{c} h{7 + c} w11 k4 r3 s3 bf16 {layout}") for c in channels]
    arrays, expected = {}, []
    for i, problem in enumerate(problems):
        n, c, h, w = problem.x_shape
        pixels = (np.arange(n * h * w * c) % 253 + 1).astype(problem.x_dtype).reshape(n, h, w, c)
        arrays[f"x{i}"] = pixels if layout == "nhwc" else np.ascontiguousarray(np.moveaxis(pixels, -1, 1))
        expected.append(np.pad(pixels, [(0, 0)] * 3 + [(0, -c % 8)]))
        arrays[f"y{i}"] = np.full_like(expected[-1], -1)
    emulated.run(pack.pair(problems[0], problems[1], H200, {}), arrays)
    for i, wanted in enumerate(expected):
        np.testing.assert_array_equal(arrays[f"y{i}"], wanted)


@pytest.mark.parametrize("size", ["h7 w9", "h6 w9", "h12 w11", "h23 w3"])
@pytest.mark.parametrize(("channels", "dtype"), [(5, "f16"), (70, "bf16"), (12, "tf32"), (37, "tf32"), (6, "3xtf32")])
def test_images_from_channels_first(channels: int, dtype: str, size: str) -> None:
    """Planes of odd and even pixels, and of fours; several tiles, whose last ones are not full; numbers of 8 bits, so
    that tf32 holds them and the second part of 3xtf32 is zeros."""
    problem = ConvProblem.parse(f"n2 c{channels} {size} k4 r1 s1 {dtype}")
    n, c, h, w = problem.x_shape
    x = (np.arange(n * c * h * w) % 253 + 1).astype(problem.x_dtype).reshape(n, c, h, w)
    wanted = np.pad(np.moveaxis(x, 1, -1), [(0, 0)] * 3 + [(0, pack.wide(problem) - c)])
    y = np.full((pack.parts(problem), *wanted.shape), -1, x.dtype)
    emulated.run(pack.images(problem, H200), {"x": x, "y": y})
    np.testing.assert_array_equal(y[0], wanted)
    assert not y[1:].any()


@needs_compiler
@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("n2 c3 h13 w17 k24 r7 s5 stride2x3 pad3x2 f16", {1, 2}),
        ("n2 c5 h9 w12 k8 r3 s3 dilation1x2 bf16 nhwc", {1, 2}),
        # Of filters of one row, too, some rows may be left out.
        ("c1 h3 w1 k1 r1 s2 stride2x1 pad0x3:0 f16", {1}), ("n2 c3 h10 w9 k8 r1 s5 stride3x2 pad0x2 bf16", {1}),
        ("n2 c3 h10 w9 k8 r1 s5 stride3x2 pad0x2 f16 nhwc", {1}), ("n2 c3 h10 w9 k8 r1 s3 stride2 pad1 f16", {1}),
    ],
)  # fmt: skip
def test_taps_as_channels(emulation: None, text: str, ways: set[int]) -> None:
    problem, algorithm = ConvProblem.parse(text), ImplicitGemm()
    found = {one.unfold: one for one in algorithm.configs(problem, SMALL) if one.unfold}
    assert found.keys() == ways
    for config in found.values():
        verdict = verdict_of(algorithm, problem, config)
        assert verdict, f"{config}: {verdict.message}"


@pytest.mark.parametrize("size", ["h8 w16", "h7 w12", "h9 w8", "h9 w9", "h6 w10"])
@pytest.mark.parametrize(("channels", "dtype"), [(5, "f16"), (70, "bf16"), (37, "tf32"), (6, "3xtf32")])
@pytest.mark.parametrize("stride", ["stride2", "stride1x2", "stride3x2"])
def test_pixels_that_filters_with_a_stride_meet(channels: int, dtype: str, stride: str, size: str) -> None:
    """Rows of twice as many pixels as a thread loads at once, and others; several tiles."""
    problem = ConvProblem.parse(f"n2 c{channels} {size} k4 r1 s1 {stride} {dtype}")
    n, c, h, w = problem.x_shape
    x = (np.arange(n * c * h * w) % 253 + 1).astype(problem.x_dtype).reshape(n, c, h, w)
    met = np.moveaxis(x[:, :, :: problem.stride[0], :: problem.stride[1]], 1, -1)
    wanted = np.pad(met, [(0, 0)] * 3 + [(0, pack.wide(problem) - c)])
    y = np.full((pack.parts(problem), *wanted.shape), -1, x.dtype)
    emulated.run(pack.images(problem, H200, thin=True), {"x": x, "y": y})
    np.testing.assert_array_equal(y[0], wanted)
    assert not y[1:].any()


@pytest.mark.parametrize(
    ("text", "each"),
    [
        ("c8 h8 w16 k4 r1 s1 stride2 f16", 4), ("c8 h9 w8 k4 r1 s1 stride2 f16", 4),
        ("c8 h7 w12 k4 r1 s1 stride2 f16", 2), ("c8 h8 w16 k4 r1 s1 stride2 tf32", 2),
        ("c8 h8 w16 k4 r1 s1 stride3 f16", 1), ("c8 h8 w15 k4 r1 s1 stride2 f16", 1),
        ("c8 h7 w10 k4 r1 s1 stride3x2 f16", 1),
    ],
)  # fmt: skip
def test_how_many_of_them_are_loaded_at_once(text: str, each: int) -> None:
    assert pack._beside(ConvProblem.parse(text), True) == each
