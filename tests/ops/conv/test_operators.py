"""conv2d, conv1d and prepared operators against torch in float64: meanings, arrays of every kind, refusals."""

from __future__ import annotations

import warnings
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from convolution_calls import assert_right, channels_last, expected, good, normal

import tapwise
from tapwise import arrays, registry
from tapwise.activation import ACTIVATIONS
from tapwise.algorithm import Buffers, Config
from tapwise.cpu.device import host
from tapwise.errors import InvalidProblem, NotApplicable
from tapwise.ops.conv.problem import ConvProblem

SHAPES = [
    # n, c, (h, w), k, (r, s), stride, padding, dilation, groups
    (1, 3, (9, 11), 5, (3, 3), 1, 1, 1, 1),
    (2, 6, (13, 8), 4, (3, 5), (2, 1), (1, 2), 1, 2),
    (3, 7, (7, 7), 7, (3, 3), 2, 1, 1, 7),
    (1, 5, (6, 17), 15, (5, 2), (1, 3), ((0, 3), (2, 1)), (1, 2), 5),
    (2, 13, (5, 5), 17, (1, 1), 1, 0, 1, 1),
    (1, 11, (6, 9), 3, (1, 1), (2, 3), 0, 1, 1),
    (2, 31, (14, 14), 19, (3, 3), 1, 1, 1, 1),
    (1, 2, (3, 4), 3, (3, 4), 1, 0, 1, 1),
    (1, 2, (3, 3), 3, (3, 3), 1, 5, 1, 1),
    (1, 3, (4, 5), 2, (2, 3), 1, ((4, 4), (3, 3)), (5, 4), 1),
    (1, 1, (1, 1), 1, (1, 1), 1, 0, 1, 1),
    (2, 1, (31, 37), 1, (7, 6), 1, 0, 1, 1),
]
DTYPES = [np.float32, np.float64, np.float16]
# Each shape in float32 in both orders, in the other dtypes in one of them.
CALLS = [
    (shape, activation, dtype, order)
    for number, (shape, activation) in enumerate(zip(SHAPES, cycle([None, *ACTIVATIONS]), strict=False))
    for dtype in DTYPES
    for order in (("nchw", "nhwc") if dtype is np.float32 else (("nchw", "nhwc")[number % 2],))
]


@pytest.mark.many
@pytest.mark.parametrize(("shape", "activation", "dtype", "order"), CALLS)
def test_conv2d(shape: tuple[Any, ...], activation: str | None, dtype: Any, order: str) -> None:
    n, c, spatial, k, kernel, stride, padding, dilation, groups = shape
    x = arrays.dense(normal(n, c, *spatial, dtype=dtype), order)
    w = normal(k, c // groups, *kernel, dtype=dtype)
    bias = normal(k, dtype=dtype, seed=1)
    value, size = expected(x, w, bias, stride, padding, dilation, groups)
    residual = arrays.dense(normal(*value.shape, dtype=dtype, seed=2), {"nchw": "nhwc", "nhwc": "nchw"}[order])
    result = expected(x, w, bias, stride, padding, dilation, groups, activation, residual)
    y = tapwise.conv2d(x, w, bias, stride, padding, dilation, groups, activation=activation, residual=residual)
    assert_right(y, result, dtype, w[0].size)
    assert arrays.is_dense(y, arrays.layout_of(x))
    y = tapwise.conv2d(x, w, bias, stride, padding, dilation, groups, algorithm="cpu.im2col_gemm")
    assert_right(y, (value, size), dtype, w[0].size)


@pytest.mark.many
@pytest.mark.parametrize("algorithm", ["auto", "cpu.direct", "cpu.im2col_gemm", "cpu.serial"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, ("leaky_relu", 0.2), ("leaky_relu", -3)])
def test_activations(activation: str | tuple[str, float], algorithm: str) -> None:
    x, w, bias = normal(1, 4, 7, 9) * 3, normal(5, 4, 3, 3), normal(5)
    wanted = expected(x, w, bias, padding=1, activation=activation)
    assert_right(tapwise.conv2d(x, w, bias, padding=1, activation=activation, algorithm=algorithm), wanted)
    layer = tapwise.prepare(x.shape, w, bias, padding=1, activation=activation, algorithm=algorithm)
    assert_right(layer(x), wanted)


@pytest.mark.parametrize("order", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_conv1d(dtype: Any, order: str) -> None:
    x, w = arrays.dense(normal(2, 6, 23, dtype=dtype), order), normal(4, 3, 5, dtype=dtype)
    bias = normal(4, dtype=dtype)
    y = tapwise.conv1d(x, w, bias, 2, 3, 2, 2, activation="relu")
    assert_right(y, expected(x, w, bias, 2, 3, 2, 2, "relu"), dtype)
    assert arrays.is_dense(y, order)
    assert_right(tapwise.conv1d(x[0], w, groups=2), expected(x[0], w, groups=2), dtype)
    out = np.empty(y.shape, dtype)
    assert tapwise.conv1d(x, w, bias, 2, ((3, 3),), 2, 2, activation="relu", out=out) is out
    np.testing.assert_array_equal(out, y)


def test_unbatched() -> None:
    x, w = normal(3, 8, 9), normal(4, 3, 3, 3)
    residual = normal(4, 6, 7)
    y = tapwise.conv2d(x, w, residual=residual)
    assert_right(y, expected(x, w, residual=residual))
    np.testing.assert_array_equal(y, tapwise.conv2d(x[None], w, residual=residual[None])[0])
    turned = channels_last(x[None])[0]
    y = tapwise.conv2d(turned, w)
    assert arrays.is_dense(y[None], "nhwc")


@pytest.mark.parametrize("padding", [0, 2, (1, 2), [2, 0], "valid", "same", (1,), np.int64(1)])
@pytest.mark.parametrize("kernel", [(3, 3), (4, 2), (1, 5)])
def test_padding_means_what_it_means_in_torch(padding: Any, kernel: tuple[int, int]) -> None:
    x, w = normal(1, 2, 9, 10), normal(3, 2, *kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that uneven "same" padding is slow
        result = expected(x, w, padding=int(padding) if isinstance(padding, np.int64) else padding, dilation=(1, 2))
    assert_right(tapwise.conv2d(x, w, padding=padding, dilation=(1, 2)), result)


def test_four_sides() -> None:
    x, w = normal(1, 2, 5, 6), normal(3, 2, 3, 3)
    padding = ((0, 3), (2, 1))
    assert_right(tapwise.conv2d(x, w, padding=padding), expected(x, w, padding=padding))
    mixed = tapwise.conv2d(x, w, padding=(1, (2, 0)))
    assert_right(mixed, expected(x, w, padding=((1, 1), (2, 0))))


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation", "wanted", "sides"),
    [
        (9, 3, 1, 1, 9, (1, 1)),
        (9, 4, 1, 1, 9, (1, 2)),
        (9, 3, 2, 1, 5, (1, 1)),
        (10, 3, 2, 1, 5, (0, 1)),
        (10, 3, 2, 1, 4, (0, 0)),
        (9, 3, 1, 2, 12, (3, 4)),
        (7, 2, 3, 1, 4, (2, 2)),
        (5, 5, 1, 1, 1, (0, 0)),
    ],
)
def test_output_size_works_the_padding_out(
    size: int, kernel: int, stride: int, dilation: int, wanted: int, sides: tuple[int, int]
) -> None:
    x, w = normal(1, 2, size, 6), normal(3, 2, kernel, 2)
    y = tapwise.conv2d(x, w, stride=(stride, 1), dilation=(dilation, 1), output_size=(wanted, 6))
    assert y.shape[2:] == (wanted, 6)
    padding = (sides, (0, 1))
    assert_right(y, expected(x, w, stride=(stride, 1), dilation=(dilation, 1), padding=padding))


def test_torch_tensors() -> None:
    x, w, bias = normal(2, 6, 9, 7), normal(4, 6, 3, 3), normal(4)
    tensors: Any = [torch.from_numpy(array) for array in (x, w, bias)]
    y = tapwise.conv2d(tensors[0], tensors[1], tensors[2], padding=1)
    assert isinstance(y, torch.Tensor)
    np.testing.assert_array_equal(y.numpy(), tapwise.conv2d(x, w, bias, padding=1))
    y = tapwise.conv2d(tensors[0].to(memory_format=torch.channels_last), w, tensors[2], padding=1)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_right(y, expected(x, w, bias, padding=1))
    out = torch.empty(y.shape)
    assert tapwise.conv2d(tensors[0], tensors[1], tensors[2], padding=1, out=out) is out
    assert_right(out, expected(x, w, bias, padding=1))
    assert isinstance(tapwise.conv2d(x, tensors[1]), np.ndarray), "the result is of x's kind"
    with pytest.raises(InvalidProblem, match=r"w requires a gradient.*w.detach\(\)"):
        tapwise.conv2d(tensors[0], tensors[1].clone().requires_grad_())


def test_any_strides_byte_order_and_alignment() -> None:
    x, w = normal(2, 6, 9, 8), normal(4, 6, 3, 3)
    result = expected(x, w)
    storage = np.zeros(x.nbytes + 1, np.uint8)
    misaligned = storage[1:].view(np.float32).reshape(x.shape)
    misaligned[...] = x
    wide = np.zeros((2, 6, 18, 24), np.float32)
    wide[:, :, ::2, ::3] = x
    read_only = x.copy()
    read_only.flags.writeable = False
    variants = {
        "negative": np.ascontiguousarray(x[:, ::-1, ::-1, ::-1])[:, ::-1, ::-1, ::-1],
        "gaps": wide[:, :, ::2, ::3],
        "transposed": np.ascontiguousarray(x.transpose(3, 2, 0, 1)).transpose(2, 3, 1, 0),
        "fortran": np.asfortranarray(x),
        "misaligned": misaligned,
        "byte order": x.astype(x.dtype.newbyteorder()),
        "read only": read_only,
    }
    turned = np.ascontiguousarray(w[:, ::-1, :, ::-1])[:, ::-1, :, ::-1]
    for variant in variants.values():
        y = tapwise.conv2d(variant, turned, np.zeros(8, np.float32)[::-2])
        assert_right(y, result)
        assert_right(tapwise.prepare("n2 c6 h9 w8 k4 r3 s3", turned)(variant), result)
    flat = np.broadcast_to(np.float32(2), x.shape)
    assert_right(
        tapwise.conv2d(flat, np.broadcast_to(w[0, 0], w.shape)), expected(flat.copy(), np.tile(w[0, 0], (4, 6, 1, 1)))
    )


def test_out() -> None:
    x, w = normal(2, 6, 9, 8), normal(4, 6, 3, 3)
    y = tapwise.conv2d(x, w)
    wide = np.full((2, 4, 14, 6), 7, np.float32)
    for out in (np.empty_like(y), channels_last(np.empty_like(y)), wide[:, :, ::2], wide[:, ::-1, ::2, ::-1]):
        assert tapwise.conv2d(x, w, out=out) is out
        np.testing.assert_array_equal(out, y)
    assert (wide[:, :, 1::2] == 7).all(), "what lies between is left alone"


@pytest.mark.parametrize("algorithm", ["auto", "cpu.im2col_gemm"])
@pytest.mark.parametrize(("n", "c", "h", "k"), [(0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 5, 0), (0, 0, 5, 0)])
def test_nothing_to_sum(n: int, c: int, h: int, k: int, algorithm: str) -> None:
    x, w, bias = np.ones((n, c, h, 6), np.float32), np.ones((k, c, 3, 3), np.float32), normal(k)
    y = tapwise.conv2d(x, w, bias, padding=1, activation="sigmoid", algorithm=algorithm)
    assert y.shape == (n, k, h, 6)
    if y.size:
        np.testing.assert_allclose(y, np.broadcast_to(1 / (1 + np.exp(-bias))[:, None, None], y.shape), rtol=1e-6)
    prepared = tapwise.prepare(f"n{n} c{c} h{h} w6 k{k} r3 s3 pad1 sigmoid", w, bias, algorithm=algorithm)
    np.testing.assert_array_equal(prepared(x), y)


def test_padded_image_without_pixels() -> None:
    x, w = np.ones((1, 2, 0, 3), np.float32), normal(4, 2, 2, 2)
    np.testing.assert_array_equal(tapwise.conv2d(x, w, padding=1), np.zeros((1, 4, 1, 4), np.float32))


@pytest.mark.parametrize("algorithm", ["cpu.direct", "cpu.im2col_gemm", "cpu.serial"])
def test_nan_and_infinity(algorithm: str) -> None:
    x, w = normal(1, 2, 9, 9), np.abs(normal(3, 2, 3, 3)) + np.float32(0.1)
    x[0, 1, 4, 4], x[0, 0, 0, 0] = np.nan, np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = tapwise.conv2d(x, w, padding=1, activation="relu", algorithm=algorithm)
    assert np.isnan(y[:, :, 3:6, 3:6]).all()
    assert np.isinf(y[:, :, :2, :2]).all()
    assert np.isfinite(y).sum() == 3 * (81 - 9 - 4)


@pytest.mark.parametrize("algorithm", ["auto", "cpu.im2col_gemm", "cpu.serial"])
def test_more_than_two_to_the_31_elements(algorithm: str) -> None:
    """Pages that nobody touches cost nothing: only a few pixels, far apart, are read."""
    width = (1 << 30) + 7
    x = np.zeros((1, 3, 1, width), np.float32)
    x[0, 2, 0, 1 << 30] = 5
    x[0, 1, 0, 0] = 3
    w = np.array([1, 10, 100], np.float32).reshape(1, 3, 1, 1)
    y = tapwise.conv2d(x, w, stride=(1, 1 << 30), algorithm=algorithm)
    np.testing.assert_array_equal(y, [[[[30, 500]]]])


OVERLAPPING = normal(2, 6, 9, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": normal(9, 8)}, ["x has shape (9, 8)", "4 axes"]),
        ({"w": normal(4, 6, 3)}, ["w has shape (4, 6, 3)"]),
        ({"w": normal(4, 5, 3, 3)}, ["w has shape (4, 5, 3, 3)", "c / groups = 6"]),
        ({"bias": normal(5)}, ["bias has shape (5,)", "(4,)"]),
        ({"residual": normal(2, 4, 7, 7)}, ["residual has shape", "(2, 4, 7, 6)"]),
        ({"groups": 4}, ["groups=4", "c=6"]),
        ({"groups": 0}, ["groups=0"]),
        ({"groups": 1.0}, ["groups=1.0", "whole number"]),
        ({"stride": 0}, ["stride=(0, 0)", "at least 1"]),
        ({"stride": (1, 2, 3)}, ["stride=(1, 2, 3)", "2 axes"]),
        ({"stride": 1.5}, ["stride=1.5"]),
        ({"dilation": -1}, ["dilation=(-1, -1)"]),
        ({"dilation": 5}, ["dilation=(5, 5)", "spans 11"]),
        ({"padding": -1}, ["padding", "-1"]),
        ({"padding": "full"}, ["padding='full'", "'same'", "'valid'"]),
        ({"padding": ((1, 2, 3), (1, 1))}, ["padding=((1, 2, 3), (1, 1))"]),
        ({"padding": "same", "stride": 2}, ["padding='same'", "stride=(2, 2)", "stride 1"]),
        ({"padding": 1, "output_size": 9}, ["output_size=9", "padding=1"]),
        ({"output_size": 5}, ["output_size=5", "impossible", "7"]),
        ({"output_size": 0}, ["output_size=0"]),
        ({"activation": "swish"}, ["activation='swish'", "silu"]),
        ({"math": "exact"}, ["math='exact'", "tf32"]),
        ({"algorithm": "cpu.fft"}, ["algorithm='cpu.fft'", "'auto'", "cpu.serial"]),
        ({"x": np.zeros((2, 6, 9, 8), np.int32)}, ["x has dtype int32", "float32"]),
        ({"x": np.zeros((2, 6, 9, 8), np.complex64)}, ["x has dtype complex64"]),
        ({"x": np.zeros((2, 6, 9, 8), bool)}, ["x has dtype bool"]),
        ({"w": normal(4, 6, 3, 3, dtype=np.float64)}, ["w has dtype float64", "float32, as x"]),
        ({"bias": np.zeros(4, np.int64)}, ["bias has dtype int64"]),
        ({"residual": normal(2, 4, 7, 6, dtype=np.float16)}, ["residual has dtype float16"]),
        ({"x": [[1.0]]}, ["x is a list"]),
        ({"out": np.zeros((2, 4, 7, 7), np.float32)}, ["out has shape", "(2, 4, 7, 6)"]),
        ({"out": np.zeros((2, 4, 7, 6))}, ["out has dtype float64"]),
        ({"out": np.broadcast_to(np.float32(0), (2, 4, 7, 6))}, ["out is read-only"]),
        ({"x": OVERLAPPING, "out": OVERLAPPING[:, :4, :7, :6]}, ["out overlaps x"]),
        ({"out": 3}, ["out is a int"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        tapwise.conv2d(**(good() | change))
    assert type(error.value) is InvalidProblem
    for word in words:
        assert word in str(error.value)


def test_algorithm_that_does_not_apply_says_why() -> None:
    with pytest.raises(NotApplicable, match=r"cpu.pointwise.*1x1"):
        tapwise.conv2d(**good(), algorithm="cpu.pointwise")


def test_math_is_a_permission() -> None:
    y = tapwise.conv2d(**good())
    np.testing.assert_array_equal(tapwise.conv2d(**good(), math="tf32"), y)
    wide = {name: array.astype(np.float64) for name, array in good().items()}
    assert_right(tapwise.conv2d(**wide, math="tf32"), expected(*wide.values()), np.float64)


def test_plain_call_sees_changed_filters() -> None:
    arguments = good()
    first = tapwise.conv2d(**arguments)
    arguments["w"][...] *= 2
    arguments["bias"][...] *= 2
    np.testing.assert_array_equal(tapwise.conv2d(**arguments), 2 * first)


def test_canonical_form_keeps_sizes_and_work() -> None:
    problem = ConvProblem.parse("n2 c6 w23 k4 s5 stride2 pad1:2 dilation2 bias nhwc")
    images = problem.canonical()
    assert images.y_shape == (2, 4, 1, problem.output[0])
    assert images.flops == problem.flops
    assert images.canonical() is images


def test_serial_works_where_numba_cannot_write_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    from tapwise.ops.conv.cpu import serial

    real = numba.njit

    def njit(*signatures: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*signatures, **options)

    monkeypatch.setattr(numba, "njit", njit)
    monkeypatch.setattr(serial, "_compiled", serial._compiled.__wrapped__)
    problem = ConvProblem.parse("c2 h5 w6 k3 r2 s2 tanh")
    plan = serial.Serial().plan(problem, Config(), host())
    x, w, y = normal(*problem.x_shape), normal(*problem.w_shape), np.empty(problem.y_shape, np.float32)
    plan.run(Buffers(x, plan.pack(w), y))
    assert_right(y, expected(x, w, activation="tanh"))


def test_a_known_call_does_not_hide_a_wrong_one() -> None:
    """Problems of calls are kept by their words: 1 and 1.0 are equal, but only one of them is allowed."""
    x, w = np.ones((1, 2, 5, 6), np.float32), np.ones((3, 2, 3, 3), np.float32)
    expected = tapwise.conv2d(x, w, stride=1, padding=((1, 0), (1, 1)))
    assert np.array_equal(tapwise.conv2d(x, w, stride=[1, 1], padding=[[1, 0], [1, 1]]), expected)
    assert np.array_equal(tapwise.conv2d(x, w, stride=np.int64(1), padding=((1, 0), (1, 1))), expected)
    for wrong in ({"stride": 1.0}, {"padding": ((1, 0), (1.0, 1))}, {"groups": 1.0}, {"activation": ["relu"]}):
        with pytest.raises(InvalidProblem):
            tapwise.conv2d(x, w, **{"stride": 1, "padding": ((1, 0), (1, 1)), **wrong})


@pytest.mark.parametrize("identifier", ["cpu.pointwise", "cpu.direct", "cpu.serial"])
def test_activations_at_extremes(identifier: str) -> None:
    """silu and sigmoid below -88, where e^-x overflows, are tiny numbers; infinities and NaN are PyTorch's."""
    values = [
        -1e3, -104, -100, -95, -89, -88.8, -88.5, -87, -20, -1e-40, -0.0, 1e-40, 88, 89, 3e38, np.inf, -np.inf, np.nan,
    ]  # fmt: skip
    x = np.array(values, np.float32).reshape(1, 1, 1, -1)
    w = np.ones((1, 1, 1, 1), np.float32)
    exact = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        for name, wanted in (("sigmoid", 1 / (1 + np.exp(-exact))), ("silu", exact / (1 + np.exp(-exact)))):
            y = tapwise.conv2d(x, w, activation=name, algorithm=identifier)
            np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=104 * 2.0**-149)
        for other in ("hardswish", "hardsigmoid", "gelu_tanh", "leaky_relu", ("leaky_relu", 0), ("leaky_relu", -2.0)):
            y = tapwise.conv2d(x, w, activation=other, algorithm=identifier)
            np.testing.assert_allclose(y, expected(x, w, activation=other)[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(("c", "groups"), [(4, 1), (4, 4), (8, 2)])
def test_padding_is_zeros_that_are_multiplied(c: int, groups: int, layout: str, value: float) -> None:
    x = np.ones((1, c, 12, 12), np.float32)
    x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) if layout == "nhwc" else x
    w = np.zeros((c, c // groups, 3, 3), np.float32)
    w[:, :, 0, 0] = value
    problem = ConvProblem.parse(f"c{c} h12 w12 k{c} r3 s3 pad1 groups{groups} {layout}")
    for identifier in registry.ALGORITHMS["conv"]:
        if not identifier.startswith("cpu.") or registry.get(identifier, "conv").refusal(problem, host()):
            continue
        y = tapwise.conv2d(x, w, padding=1, groups=groups, algorithm=identifier)
        # Depthwise and direct kernels leave out taps outside the image.
        unseen = identifier in ("cpu.depthwise", "cpu.direct")
        for edge in (y[:, :, 0], y[:, :, 1:, 0]):
            assert (np.isnan(edge) | (unseen & (edge == 0))).all(), identifier
        if identifier != "cpu.winograd":
            assert np.array_equal(y[:, :, 1:, 1:], np.full((1, c, 11, 11), value, np.float32), equal_nan=True), (
                identifier
            )
