"""Prepared convolution: what is packed once and called many times."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from convolution_calls import assert_right, expected, good, normal

import tapwise
from tapwise import arrays
from tapwise.arrays.workspaces import pool
from tapwise.errors import InvalidProblem, NotApplicable
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
            (lambda: tapwise.prepare(3, w), "problem is a int"),
            (lambda: tapwise.prepare(text, w, config="rows=1"), "algorithm='auto'"),
            (lambda: tapwise.prepare(text, w)(x[:1]), r"x has shape \(1, 6, 9, 8\): \(2, 6, 9, 8\)"),
            (lambda: tapwise.prepare(text, w)(x.astype(np.float64)), "x has dtype float64"),
            (lambda: tapwise.prepare(text, w)(x, out=x), "out has shape"),
        ):
            with pytest.raises(InvalidProblem, match=words):
                call()
        for text in ("c6 d3 h9 w8 k4 t1 r3 s3", "c6 h9 w8 k4 r3 s3 dgrad"):
            problem = ConvProblem.parse(text)
            with pytest.raises(NotApplicable, match=r"cpu\.serial"):
                tapwise.prepare(problem, normal(*problem.w_shape))

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
        free = pool(layer.plan.workspace_bytes).free
        free.clear()
        layer(x)
        (workspace,) = free
        layer(x[::-1])
        tapwise.conv2d(x, w, algorithm="cpu.im2col_gemm")
        assert len(free) == 1
        assert free[0] is workspace
