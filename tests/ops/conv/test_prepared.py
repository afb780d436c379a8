"""Prepared convolution: what is packed once and called many times."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from convolution_calls import assert_right, expected, good, normal

import tapwise
from tapwise import arrays, registry
from tapwise.arrays.workspaces import pool
from tapwise.cpu.device import host
from tapwise.errors import InvalidProblem, NotApplicable
from tapwise.ops.conv.prepared import BATCHES_KEPT
from tapwise.ops.conv.problem import ConvProblem


class TestPrepared:
    def test_copies_what_it_is_given(self) -> None:
        arguments = good()
        x, w, bias = arguments.values()
        result = expected(x, w, bias)
        layer = tapwise.prepare("n2 c6 h9 w8 k4 r3 s3", w, bias)
        assert layer.problem.bias
        w[...] = bias[...] = np.nan
        assert_right(layer(x), result)

    @pytest.mark.parametrize("algorithm", ["auto", "cpu.direct", "cpu.im2col_gemm", "cpu.serial"])
    @pytest.mark.parametrize(
        "text", ["n2 c6 h9 w8 k4 r3 s3 pad1 silu", "n2 c6 h9 w8 k4 r3 s3 pad1 silu nhwc", "n2 c6 h9 w8 k4 r1 s1 f16"]
    )
    def test_is_conv2d(self, text: str, algorithm: str) -> None:
        problem = ConvProblem.parse(text)
        dtype = problem.x_dtype.type
        x, w, bias = (array.astype(dtype) for array in good().values())
        w = w[:, :, : problem.kernel[0], : problem.kernel[1]]
        result = expected(x, w, bias, 1, problem.padding, activation=problem.activation)
        layer = tapwise.prepare(problem, w, bias, algorithm=algorithm)
        out = np.empty(problem.y_shape, dtype)
        for given in (x, arrays.dense(x, problem.layout), x[::-1][::-1], x.astype(x.dtype.newbyteorder())):
            y = layer(given)
            assert_right(y, result, dtype)
            assert arrays.is_dense(y, problem.layout)
            assert layer(given, out=out) is out
            np.testing.assert_array_equal(out, y)
        tensor = layer(torch.from_numpy(x))
        assert isinstance(tensor, torch.Tensor)
        np.testing.assert_array_equal(tensor.numpy(), y)
        assert layer.choice.algorithm == (layer.choice.algorithm if algorithm == "auto" else algorithm)
        assert str(problem.replace(bias=True)) in repr(layer)

    def test_residual_and_one_image(self) -> None:
        x, w, bias = good().values()
        x, residual = x[0], normal(4, 7, 6)
        layer = tapwise.prepare("c6 h9 w8 k4 r3 s3 residual", w, bias)
        y = layer(x, residual)
        assert_right(y, expected(x, w, bias, residual=residual))
        np.testing.assert_array_equal(layer(x[None], residual[None]), y[None])
        with pytest.raises(InvalidProblem, match="residual=None"):
            layer(x)
        with pytest.raises(InvalidProblem, match="the problem has none"):
            tapwise.prepare("c6 h9 w8 k4 r3 s3", w)(x, residual)

    def test_one_axis(self) -> None:
        x, w = normal(2, 6, 23), normal(4, 6, 5)
        layer = tapwise.prepare("n2 c6 w23 k4 s5 stride2 pad1:2", w)
        assert_right(layer(x), expected(x, w, stride=2, padding=((1, 2),)))
        assert layer.plan.problem.spatial == (1, 23)
        with pytest.raises(InvalidProblem, match="x has shape"):
            layer(x[:, :, None])

    def test_arguments_that_do_not_fit(self) -> None:
        x, w, bias = good().values()
        text = "n2 c6 h9 w8 k4 r3 s3"
        for call, words in (
            (lambda: tapwise.prepare(text, w[:3]), "w has shape"),
            (lambda: tapwise.prepare(text, w.astype(np.float64)), "w has dtype float64"),
            (lambda: tapwise.prepare(text, w, bias[:3]), "bias has shape"),
            (lambda: tapwise.prepare(text + " bias", w), "bias=None"),
            (lambda: tapwise.prepare(text + " pad", w), "'pad'"),
            (lambda: tapwise.prepare(3, w), "problem=3: a ConvProblem"),
            (lambda: tapwise.prepare(text, w, config="rows=1"), "algorithm='auto'"),
            (lambda: tapwise.prepare(text, w)(x[:, :5]), r"x has shape \(2, 5, 9, 8\): \(n, 6, 9, 8\)"),
            (lambda: tapwise.prepare(text, w)(x.astype(np.float64)), "x has dtype float64"),
            (lambda: tapwise.prepare(text, w)(x, out=x), "out has shape"),
        ):
            with pytest.raises(InvalidProblem, match=words):
                call()
        problem = ConvProblem.parse("c6 d3 h9 w8 k4 t1 r3 s3")
        with pytest.raises(NotApplicable, match=r"cpu\.serial"):
            tapwise.prepare(problem, normal(*problem.w_shape))
        with pytest.raises(InvalidProblem, match="problem is of wgrad"):
            tapwise.prepare("c6 h9 w8 k4 r3 s3 wgrad", normal(4, 6, 3, 3))

    @pytest.mark.parametrize("words", ["", "nhwc bias relu"])
    def test_dgrad(self, words: str) -> None:
        problem = ConvProblem.parse(f"n2 c6 h9 w8 k4 r3 s3 stride2 pad1 dgrad {words}")
        w, bias, dy = normal(*problem.w_shape), normal(6) if problem.bias else None, normal(*problem.y_shape)
        made = tapwise.prepare(problem, w, bias)
        expected = problem.convolve(dy, w, bias)
        np.testing.assert_allclose(made(dy), expected, atol=1e-4)
        np.testing.assert_allclose(made(dy[1]), expected[1], atol=1e-4)
        with pytest.raises(InvalidProblem, match="x has shape"):
            made(normal(*problem.x_shape))

    def test_out_may_not_overlap_the_input(self) -> None:
        x = normal(1, 4, 6, 6)
        layer = tapwise.prepare("c4 h6 w6 k4 r3 s3 pad1", normal(4, 4, 3, 3))
        with pytest.raises(InvalidProblem, match="out overlaps x"):
            layer(x, out=x)

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("algorithm", ["auto", "cpu.im2col_gemm", "cpu.serial"])
    def test_four_threads_call_one_operator(self, algorithm: str, threads: int) -> None:
        w = normal(12, 8, 3, 3)
        layer = tapwise.prepare("c8 h17 w19 k12 r3 s3 pad1 relu", w, algorithm=algorithm, threads=threads)
        images = [normal(1, 8, 17, 19, seed=seed) for seed in range(16)]
        alone = [layer(image) for image in images]
        for image, y in zip(images[:2], alone, strict=False):
            assert_right(y, expected(image, w, padding=1, activation="relu"))
        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                for y, single in zip(pool.map(layer, images), alone, strict=True):
                    np.testing.assert_array_equal(y, single)

    def test_workspaces_are_used_again(self) -> None:
        x, w, _ = good().values()
        layer = tapwise.prepare("n2 c6 h9 w8 k4 r3 s3", w, algorithm="cpu.im2col_gemm")
        free = pool(layer.plan.workspace_bytes, layer.problem.x_dtype).free
        free.clear()
        layer(x)
        (workspace,) = free
        layer(x[::-1])
        tapwise.conv2d(x, w, algorithm="cpu.im2col_gemm")
        assert len(free) == 1
        assert free[0] is workspace


def test_any_batch_size() -> None:
    rng = np.random.default_rng(0)
    w, bias = rng.standard_normal((7, 5, 3, 3), dtype=np.float32), rng.standard_normal(7, dtype=np.float32)
    layer = tapwise.prepare("n2 c5 h9 w11 k7 r3 s3 pad1 relu nhwc", w, bias)
    for n in (2, 1, 5, 0, 3, *range(6, 20), 5):
        x = rng.standard_normal((n, 5, 9, 11), dtype=np.float32)
        y = layer(x)
        assert (y.shape == (n, 7, 9, 11) and arrays.layout_of(y) == "nhwc") or n < 2
        wanted = tapwise.conv2d(x, w, bias, padding=1, activation="relu")
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(layer(x[0]), layer(x)[0])
    assert len(layer._others) == BATCHES_KEPT
    w[...] = 0
    assert layer(np.ones((21, 5, 9, 11), np.float32)).any()
    with pytest.raises(InvalidProblem, match=r"x has shape \(2, 5, 9, 12\): \(n, 5, 9, 11\) is allowed; prepare anot"):
        layer(np.ones((2, 5, 9, 12), np.float32))
    with pytest.raises(InvalidProblem, match="x has shape"):
        layer(np.array(1, np.float32))


def test_another_batch_with_a_config_by_name() -> None:
    """One config of each route and tile, since only those are kernels of their own, and others between."""
    w = np.ones((40, 5, 3, 3), np.float32)
    problem = ConvProblem.parse("n4 c5 h9 w11 k40 r3 s3")
    configs = registry.get("cpu.direct").configs(problem, host())
    kernels = {(one.route, one.lanes, one.m, one.n, one.panels): one for one in configs}
    for config in [*list(kernels.values())[::3], *configs[::40]]:
        layer = tapwise.prepare(problem, w, algorithm="cpu.direct", config=config)
        np.testing.assert_array_equal(layer(np.ones((3, 5, 9, 11), np.float32)), np.full((3, 40, 7, 9), 45.0))


def test_batches_from_many_threads() -> None:
    w = np.ones((3, 5, 3, 3), np.float32)
    layer = tapwise.prepare("c5 h9 w11 k3 r3 s3", w)
    with ThreadPoolExecutor(8) as pool:
        shapes = list(pool.map(lambda n: layer(np.ones((n % 12, 5, 9, 11), np.float32)).sum(), range(200)))
    assert shapes == [45.0 * 3 * 63 * (n % 12) for n in range(200)]


def test_copied_and_pickled() -> None:
    rng = np.random.default_rng(0)
    w, bias = rng.standard_normal((7, 5, 3, 3), dtype=np.float32), rng.standard_normal(7, dtype=np.float32)
    x = rng.standard_normal((1, 5, 9, 11), dtype=np.float32)
    layer = tapwise.prepare("c5 h9 w11 k7 r3 s3", w, bias, algorithm="cpu.direct", threads=1)
    assert copy.copy(layer) is layer and copy.deepcopy(layer) is layer
    data = pickle.dumps(layer)
    wanted = layer(x)
    code = "import pickle, sys; layer, x = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(layer(x).tobytes())"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps((layer, x)), capture_output=True, check=True)
    assert done.stdout == wanted.tobytes()
    again = pickle.loads(data)
    assert again.choice == layer.choice and again.device == layer.device and again.problem == layer.problem
    np.testing.assert_array_equal(again(x), wanted)


@pytest.mark.parametrize(
    ("shape", "filters", "options"),
    [
        ((2, 6, 9, 11), (4, 3, 3, 2), {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "groups": 2}),
        ((1, 5, 9, 11), (4, 5, 3, 3), {"padding": "same", "activation": "silu", "layout": "nhwc"}),
        ((1, 5, 40), (4, 5, 3), {"dilation": 2, "output_size": 20, "stride": 2}),
        ([1, 5, 9, 11], (4, 5, 3, 3), {"residual": True, "math": "tf32"}),
    ],
)
def test_from_a_shape_with_the_arguments_of_conv2d(
    shape: Any, filters: tuple[int, ...], options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(shape, dtype=np.float32), rng.standard_normal(filters, dtype=np.float32)
    bias = rng.standard_normal(4, dtype=np.float32)
    layer = tapwise.prepare(shape, w, bias, **options)
    layout, wants_residual = options.pop("layout", "nchw"), options.pop("residual", False)
    assert layer.problem.layout == layout
    residual = rng.standard_normal(layer.problem.y_shape, dtype=np.float32) if wants_residual else None
    call = tapwise.conv1d if len(shape) == 3 else tapwise.conv2d
    wanted = call(x, w, bias, **options, residual=residual)
    found = layer(x, residual) if wants_residual else layer(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert layer.problem.dtype == "f32"


@pytest.mark.parametrize(
    ("problem", "options", "said"),
    [
        ("c5 h9 w11 k4 r3 s3", {"stride": 2}, "stride=2: goes with a shape of x"),
        ("c5 h9 w11 k4 r3 s3", {"residual": True}, "residual=True: goes with"),
        ("c5 h9 w11 k4 r3 s3", {"layout": "nhwc"}, "layout='nhwc': goes with"),
        ("c5 h9 w11 k4 r3 s3", {"padding": np.ones(3)}, "padding=an array"),
        ((1, 5, 9), {}, "w has shape"),
        ((5, 9), {}, r"problem=\(5, 9\): the shape of x"),
        ((1, 5, 9, 11.5), {}, r"problem=11.5"),
        ((1, 6, 9, 11), {}, "w has shape"),
        ((1, 5, 9, 11), {"layout": "nwhc"}, "layout='nwhc'"),
        (7, {}, "problem=7: a ConvProblem"),
    ],
)
def test_bad_shapes_and_words_are_named(problem: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidProblem, match=said):
        tapwise.prepare(problem, np.ones((4, 5, 3, 3), np.float32), **options)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_part_of_the_channels_of_one_image_is_not_copied(layout: str) -> None:
    """Its strides are those of a dense array but for the axis of one image."""
    x = np.random.default_rng(0).standard_normal((1, 12, 7, 9)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((5, 6, 3, 3)).astype(np.float32)
    made = tapwise.prepare((1, 6, 7, 9), w, padding=1, layout=layout)
    part = x[:, 6:] if layout == "nchw" else np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)[:, 6:]
    dense = made._dense(part)
    assert (dense is None) == (layout == "nhwc")
    assert dense is None or (np.shares_memory(dense, x) and np.array_equal(dense, part))
    y = np.full_like(made(part), np.nan)
    step = made.steady(part, y)
    assert (step is None) == (layout == "nhwc")
    expected = tapwise.conv2d(np.ascontiguousarray(part), w, padding=1)
    np.testing.assert_allclose(made(part), expected, rtol=1e-5, atol=1e-5)
    if step is not None:
        step()
        np.testing.assert_array_equal(y, made(part))
    assert made._dense(x) is None and made._dense(np.zeros((0, 6, 7, 9), np.float32)) is None
