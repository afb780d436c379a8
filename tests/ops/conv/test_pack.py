"""Filters in the order that tensor cores want, by emulation."""

from __future__ import annotations

import numpy as np
import pytest

import emulated
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda import pack
from tapwise.ops.conv.problem import ConvProblem


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 2, 3, 0)])
@pytest.mark.parametrize(
    ("text", "wide", "more", "order"),
    [
        ("c24 h9 w9 k19 r3 s2 f16 nhwc", 24, 0, 0),
        ("c24 h9 w9 k40 r3 s3 f16 nhwc", 32, 16, 32),
        ("c20 h9 w9 k18 r2 s3 f16 nhwc", 24, 0, 16),
        ("c7 h9 w9 k5 r3 s3 bf16 nhwc", 8, 3, 0),
        ("c16 h9 w9 k6 r1 s3 bf16 nhwc", 24, 8, 0),
    ],
)
def test_filters(text: str, wide: int, more: int, order: int, axes: tuple[int, ...]) -> None:
    problem = ConvProblem.parse(text)
    k, c, r, s = problem.w_shape
    memory = (np.arange(k * c * r * s) % 251).astype(problem.x_dtype).reshape([problem.w_shape[a] for a in axes])
    w = memory.transpose(np.argsort(axes))
    pitch = r * s * wide + more
    rows = pack.filter_rows(problem, order)
    steps = tuple(step // w.itemsize for step in w.strides)
    y = np.full((rows, pitch), -1, w.dtype)
    launch = pack.filters_launch(problem, (c, r, s), steps, wide, pitch, True, order, H200)
    emulated.run(launch, {"w": memory, "y": y})
    expected = np.zeros((rows, r * s, wide), w.dtype)
    expected[:k, :, :c] = w.reshape(k, c, r * s).swapaxes(1, 2)
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
