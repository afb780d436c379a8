"""im2col and col2im: every algorithm against PyTorch and float64, and what users may hand over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapwise
from tapwise import registry, verify
from tapwise.cpu import jit
from tapwise.cpu.device import host
from tapwise.cpu.simd import target
from tapwise.errors import InvalidProblem
from tapwise.ops.patches import cpu_kernel as patches_kernel
from tapwise.ops.patches.problem import Col2imProblem, Im2colProblem
from tapwise.problem import Inputs
from tapwise.registry import parse

IDENTIFIERS = [name for name in registry.ALGORITHMS["im2col"] if name.startswith("cpu.")]
WINDOWS = [
    "n2 c3 h13 w17 r3 s3 stride2 pad1",
    "c4 h9 w9 r2 s2",
    "n2 c5 h20 w33 r3 s2 stride1x4 pad1",
    "c2 h15 w40 r3 s3 stride3 pad0:1x2:0 dilation1x2",
    "c3 h5 w4 r3 s3 pad4",
    "c2 h11 w26 r1 s7 stride1x3 pad0x5",
    "n3 c2 w50 s5 stride2 pad3:1",
    "c2 d5 h6 w19 t2 r3 s3 stride1x2x2 pad1 dilation2x1x1",
]


# 16 bits in turn.
CASES = [
    f"{text} {dtype}" for number, text in enumerate(WINDOWS) for dtype in ("f32", "f64", ("f16", "bf16")[number % 2])
]


@pytest.mark.many
@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("operator", ["im2col", "col2im"])
@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_against_float64(identifier: str, operator: str, text: str) -> None:
    verdict = verify.check(parse(f"{operator} {text}"), identifier)
    assert verdict, verdict.message


@pytest.mark.parametrize("text", WINDOWS)
def test_adjoint(text: str) -> None:
    """<im2col(x), c> = <x, col2im(c)>."""
    problem = Im2colProblem.parse(f"im2col {text} f64")
    rng = np.random.default_rng(0)
    x, c = rng.standard_normal(problem.x_shape), rng.standard_normal(problem.columns_shape)
    window = (problem.kernel, problem.dilation, problem.padding, problem.stride)
    left = np.vdot(tapwise.im2col(x, *window), c)
    right = np.vdot(x, tapwise.col2im(c, problem.spatial, *window))
    assert abs(left - right) < 1e-9 * np.abs(c).sum()


@pytest.mark.parametrize("identifier", IDENTIFIERS)
@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding", "dilation"),
    [((2, 3, 13, 17), 3, 2, 1, 1), ((3, 20, 33), (3, 2), (1, 4), 1, 1), ((1, 2, 15, 40), 3, 3, 1, 2)],
)
def test_against_torch(
    identifier: str, shape: tuple[int, ...], kernel: Any, stride: Any, padding: int, dilation: int
) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(shape)
    wanted = torch.nn.functional.unfold(x, kernel, dilation, padding, stride)
    cols = tapwise.im2col(x, kernel, dilation, padding, stride, algorithm=identifier)
    torch.testing.assert_close(cols, wanted, rtol=0, atol=0)
    image = tapwise.col2im(cols, shape[-2:], kernel, dilation, padding, stride, algorithm=identifier)
    torch.testing.assert_close(image, torch.nn.functional.fold(wanted, shape[-2:], kernel, dilation, padding, stride))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_accumulate_adds(identifier: str, stride: int) -> None:
    problem = Col2imProblem.parse(f"col2im n2 c3 h10 w23 r3 s3 stride{stride} pad1 accumulate")
    rng = np.random.default_rng(0)
    cols = rng.standard_normal(problem.columns_shape, dtype=np.float32)
    before = rng.standard_normal(problem.y_shape, dtype=np.float32)
    out = before.copy()
    assert tapwise.col2im(cols, (10, 23), 3, 1, 1, stride, out=out, accumulate=True, algorithm=identifier) is out
    assert verify.compare(out, *problem.reference(Inputs(cols, residual=before)))


def test_what_users_hand_over() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 11), dtype=np.float32)
    wanted = tapwise.im2col(x, 3, padding=1)
    assert np.array_equal(tapwise.im2col(x[0], 3, padding=1), wanted[0])
    for other in (x[::-1].copy()[::-1], x.astype(">f4"), np.asfortranarray(x)):
        assert np.array_equal(tapwise.im2col(other, 3, padding=1), wanted)
    out = np.empty(wanted.shape, np.float32)
    assert tapwise.im2col(x, 3, padding=1, out=out) is out and np.array_equal(out, wanted)
    assert tapwise.im2col(x[:0], 3).shape == (0, 27, 54)
    assert tapwise.im2col(x[:, :, 0], (3,)).shape == (2, 9, 9)
    assert np.array_equal(
        tapwise.col2im(wanted[0], (8, 11), 3, padding=1), tapwise.col2im(wanted, (8, 11), 3, padding=1)[0]
    )
    with_nan = x.copy()
    with_nan[0, 0, 0, 0] = np.nan
    assert np.isnan(tapwise.im2col(with_nan, 3, padding=1)).sum() == 4


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda x: tapwise.im2col(x, 0), "kernel_size"),
        (lambda x: tapwise.im2col(x, 3, stride=0), "stride"),
        (lambda x: tapwise.im2col(x, 9), "larger than the padded input"),
        (lambda x: tapwise.im2col(x[0, 0], 3), "x has shape"),
        (lambda x: tapwise.im2col(x, 2, out=np.empty((1, 2, 3))), "out has shape"),
        (lambda x: tapwise.col2im(x[0, 0][None], (6, 6), 4), "cols has shape"),
        (lambda x: tapwise.col2im(np.ones((1, 9, 5), np.float32), (6, 6), 3), "cols has shape"),
        (lambda x: tapwise.col2im(np.ones((1, 9, 16), np.float32), (6, 6), 3, accumulate=True), "accumulate"),
        (lambda x: tapwise.im2col(x, 3, algorithm="cpu.fast"), "cpu.fast"),
    ],
)
def test_bad_arguments_are_named(call: Any, word: str) -> None:
    with pytest.raises(InvalidProblem, match=word):
        call(np.ones((1, 2, 6, 6), np.float32))


@pytest.mark.parametrize("text", [*(f"im2col {t}" for t in WINDOWS), "col2im c3 h9 w9 r2 s2 accumulate f16"])
def test_strings(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize("text", ["im2col c3", "im2col c3 h4 w4 r2 s2 accumulate", "col2im c3 h4 w4 r0 s2"])
def test_bad_strings(text: str) -> None:
    with pytest.raises(InvalidProblem, match="problem"):
        parse(text)


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon"])
def test_every_target_gets_vector_code(name: str) -> None:
    for generate in (patches_kernel.generate_im2col, patches_kernel.generate_col2im):
        kernel = generate(target(name), dtype="f32", storage="f32")
        assert {"avx512": "%zmm", "avx2": "%ymm", "neon": "q0"}[name] in jit.assembly(kernel)


def test_strides_far_larger_than_the_image() -> None:
    columns = np.ones((1, 4, 1), np.float32)
    image = tapwise.col2im(columns, (4, 4), 2, stride=2**31 - 1)
    assert image.sum() == 4 and image[0, 0, :2, :2].sum() == 4
    problem = Col2imProblem.parse("col2im c1 h4 w4 r2 s2 stride2147483647")
    assert "strides" in str(registry.get("cpu.simd", "col2im").refusal(problem, host()))
