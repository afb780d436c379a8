"""reduce, softmax and log_softmax: every algorithm against float64, and what users may hand over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapwise
from tapwise import registry
from tapwise.cpu import jit
from tapwise.cpu.simd import target
from tapwise.errors import InvalidProblem
from tapwise.ops.reduce import api as reductions
from tapwise.ops.reduce import cpu_kernel as reduce_kernel
from tapwise.ops.reduce import reference as reference_reduction
from tapwise.ops.reduce.problem import REDUCTIONS, ReduceProblem, SoftmaxProblem, normal_axes
from tapwise.ops.softmax import cpu_kernel as softmax_kernel

KINDS = {"f32": np.float32, "f64": np.float64, "f16": np.float16}
SHAPES = [(7,), (1,), (33, 19), (3, 5, 7, 11), (2, 40_000), (1500, 3), (4, 1, 1), (70_001,), (6, 600, 37)]
SOFTMAX = [name for name in registry.ALGORITHMS["softmax"] if name.startswith("cpu.")]
REDUCE = [name for name in registry.ALGORITHMS["reduce"] if name.startswith("cpu.")]


def data(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(KINDS[dtype])


def compare(y: Any, expected: tuple[np.ndarray, np.ndarray], dtype: Any) -> None:
    wanted, bound = expected
    y = np.asarray(y)
    assert y.shape == wanted.shape and y.dtype == dtype
    with np.errstate(invalid="ignore"):
        off = np.abs(y.astype(np.float64) - wanted)
    assert np.array_equal(np.isnan(y), np.isnan(wanted))
    fine = np.isnan(wanted) | (y == wanted) | (off <= bound)
    assert fine.all(), f"{off[~fine]} beyond {np.broadcast_to(bound, off.shape)[~fine]}"


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("identifier", SOFTMAX)
def test_softmax(identifier: str, shape: tuple[int, ...], dtype: str) -> None:
    x = data(shape, dtype) * KINDS[dtype](4)
    for axis in range(-len(shape), len(shape)):
        for log, call in ((False, tapwise.softmax), (True, tapwise.log_softmax)):
            problem = SoftmaxProblem(shape, normal_axes(axis, len(shape)), log=log, dtype=dtype)
            compare(call(x, axis, algorithm=identifier), reference_reduction.softmax(problem, x), KINDS[dtype])


@pytest.mark.parametrize("length", [5, 40_000])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("identifier", SOFTMAX)
def test_softmax_of_nan_and_infinity(identifier: str, axis: int, length: int) -> None:
    x = data((6, length), "f32")
    x[0, : length // 2], x[1], x[2, 1], x[3, 2], x[4, 3] = -np.inf, -np.inf, np.nan, np.inf, 3e38
    x = x if axis == 1 else np.ascontiguousarray(x.T)
    for log, call in ((False, tapwise.softmax), (True, tapwise.log_softmax)):
        problem = SoftmaxProblem(x.shape, (axis,), log=log)
        compare(call(x, axis, algorithm=identifier), reference_reduction.softmax(problem, x), np.float32)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("identifier", REDUCE)
def test_reduce(identifier: str, shape: tuple[int, ...], op: str, dtype: str) -> None:
    x = data(shape, dtype)
    if op == "prod":
        x = (1 + x / 64).astype(x.dtype)
    axes: list[Any] = [None, 0, -1]
    if op not in ("argmax", "argmin"):
        axes += [(), tuple(range(0, len(shape), 2))]
    for axis in axes:
        for keepdims in (False, True):
            problem = ReduceProblem(shape, normal_axes(axis, len(shape)), op=op, keepdims=keepdims, dtype=dtype)
            with np.errstate(over="ignore"):
                y = tapwise.reduce(x, op, axis, keepdims, algorithm=identifier)
            kind = np.int64 if op.startswith("arg") else KINDS[dtype]
            expected = reference_reduction.reduce(problem, x)
            if dtype == "f16" and not op.startswith("arg"):
                # What float16 cannot hold is infinite.
                wanted, bound = expected
                expected = np.where(np.abs(wanted) > 65519, np.copysign(np.inf, wanted), wanted), bound
            compare(y, expected, kind)


@pytest.mark.parametrize("op", ["max", "min", "argmax", "argmin", "sum", "logsumexp", "norm1"])
@pytest.mark.parametrize("identifier", REDUCE)
def test_reduce_of_nan_infinity_and_equals(identifier: str, op: str) -> None:
    for length in (9, 50_000):
        x = np.zeros((7, length), np.float32)
        x[0, 5], x[1, 3], x[2, 4], x[3] = np.nan, np.inf, -np.inf, -np.inf
        x[4, 6:8], x[5, :] = np.nan, np.inf
        x[6, 2] = x[6, 7] = 1
        for values, axis in ((x, 1), (np.ascontiguousarray(x.T), 0)):
            problem = ReduceProblem(values.shape, (axis,), op=op)
            y = tapwise.reduce(values, op, axis, algorithm=identifier)
            wanted, bound = reference_reduction.reduce(problem, values)
            assert np.array_equal(np.isfinite(y), np.isfinite(wanted))
            with np.errstate(invalid="ignore"):
                close = np.abs(y - wanted) <= np.nan_to_num(bound)
            same = (y == wanted) | (np.isnan(y) & np.isnan(wanted)) | close
            assert same.all(), (y, wanted)


def test_errors_do_not_grow_with_the_length() -> None:
    """Equal terms, whose rounding errors all have one sign: one running sum of so many would be off by percents."""
    tenth = float(np.float32(0.1))
    x = np.full(5_000_000, 0.1, np.float32)
    assert abs(float(tapwise.reduce(x, "sum")) / (5e6 * tenth) - 1) < 4e-6
    assert abs(float(tapwise.reduce(x.reshape(-1, 5), "mean", 0)[3]) / tenth - 1) < 1e-5


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_memory_orders_and_strides(order: tuple[int, ...]) -> None:
    x = data((6, 10, 14), "f32").transpose(order)
    for view in (x, x[::-1], x[:, 1:-1:2], x.astype(">f4"), np.broadcast_to(x[:1], x.shape)):
        plain = np.ascontiguousarray(view, np.float32)
        for axis in (None, 0, 1, -1, (0, 2), (0, 1), ()):
            for op in ("sum", "max", "norm2"):
                problem = ReduceProblem(plain.shape, normal_axes(axis, 3), op=op)
                compare(tapwise.reduce(view, op, axis), reference_reduction.reduce(problem, plain), np.float32)
        assert np.array_equal(tapwise.reduce(view, "argmax"), np.argmax(plain))
        assert np.array_equal(tapwise.reduce(view, "argmin", 1), np.argmin(plain, 1))
        problem2 = SoftmaxProblem(plain.shape, (1,))
        compare(tapwise.softmax(view, 1), reference_reduction.softmax(problem2, plain), np.float32)


def test_same_bits_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = data((3, 123_457), "f32")
    found = []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("TAPWISE_NUM_THREADS", threads)
        found.append((tapwise.reduce(x, "sum"), tapwise.reduce(x, "logsumexp", -1), tapwise.softmax(x)))
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_nothing_to_reduce() -> None:
    x = np.zeros((3, 0, 2), np.float32)
    assert tapwise.softmax(x).shape == x.shape
    for op, value in (("sum", 0.0), ("prod", 1.0), ("norm1", 0.0), ("norm2", 0.0), ("sumsquare", 0.0)):
        assert np.array_equal(tapwise.reduce(x, op, 1), np.full((3, 2), value, np.float32))
    assert np.isnan(tapwise.reduce(x, "mean", 1)).all()
    assert np.isneginf(tapwise.reduce(x, "logsumexp", 1)).all()
    assert tapwise.reduce(x, "max", 0).shape == (0, 2)


def test_softmax_out() -> None:
    x = data((6, 10, 14), "f32")
    for source in (x, x.transpose(2, 0, 1)):
        wanted = tapwise.softmax(source, 1)
        for out in (np.empty(source.shape, np.float32), np.empty(source.shape, np.float32, order="F")):
            assert tapwise.softmax(source, 1, out=out) is out
            assert np.array_equal(out, wanted)
    wrong: Any
    for wrong, word in (
        (x, "overlaps the input"),
        (np.empty((6, 10), np.float32), "shape"),
        (np.empty(x.shape), "float64"),
    ):
        with pytest.raises(InvalidProblem, match=word):
            tapwise.softmax(x, out=wrong)
    frozen = np.empty(x.shape, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(InvalidProblem, match="read-only"):
        tapwise.softmax(x, out=frozen)


def test_scalars_and_other_libraries() -> None:
    assert tapwise.softmax(np.full((), 3.0, np.float32)).shape == ()
    assert float(tapwise.reduce(np.full((), 2.5), "sum")) == 2.5
    torch = pytest.importorskip("torch")
    t = torch.randn(5, 6, 7).transpose(0, 2)
    y = tapwise.softmax(t, 1)
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y, torch.softmax(t, 1))
    torch.testing.assert_close(tapwise.reduce(t, "logsumexp", (0, 2)), torch.logsumexp(t, (0, 2)))


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda x: tapwise.reduce(x, "median"), "op='median'"),
        (lambda x: tapwise.reduce(x, "sum", 2), "axis=2"),
        (lambda x: tapwise.reduce(x, "sum", (0, -2)), "twice"),
        (lambda x: tapwise.reduce(x, "sum", 1.5), "axis=1.5"),
        (lambda x: tapwise.reduce(x[:0], "max", 0), "max of no element"),
        (lambda x: tapwise.reduce(x[:0], "argmin"), "argmin of no element"),
        (lambda x: tapwise.reduce(x[None], "argmax", (0, 1)), "argmax goes along one axis"),
        (lambda x: tapwise.reduce(x.astype(np.int32), "sum"), "int32"),
        (lambda x: tapwise.softmax(x, -3), "axis=-3"),
        (lambda x: tapwise.softmax(x, None), "axis=None"),
        (lambda x: tapwise.softmax(x, algorithm="cpu.fast"), "cpu.fast"),
    ],
)
def test_bad_arguments_are_named(call: Any, word: str) -> None:
    with pytest.raises(InvalidProblem, match=word):
        call(np.ones((3, 4), np.float32))


@pytest.mark.parametrize(
    "text",
    [
        "reduce sum 64x1000",
        "reduce argmax 64x1000 axis1 keepdims",
        "reduce norm2 3x4x5 axis0,2 f16",
        "reduce max 3 axisnone",
    ],
)
def test_reduce_strings(text: str) -> None:
    problem = ReduceProblem.parse(text)
    assert str(problem) == text and ReduceProblem.parse(str(problem)) == problem


@pytest.mark.parametrize("text", ["softmax 1024x1000", "log_softmax 8x64x49 axis1 f64", "softmax scalar"])
def test_softmax_strings(text: str) -> None:
    problem = SoftmaxProblem.parse(text)
    assert str(problem) == text and SoftmaxProblem.parse(str(problem)) == problem


@pytest.mark.parametrize("text", ["reduce sum", "reduce sum 3y4", "softmax 3 axis0 axis0", "reduce sum 3 4"])
def test_bad_strings(text: str) -> None:
    with pytest.raises(InvalidProblem, match="problem"):
        (ReduceProblem if text.startswith("reduce") else SoftmaxProblem).parse(text)


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon"])
@pytest.mark.parametrize("last", [True, False])
def test_every_target_gets_vector_code(name: str, last: bool) -> None:
    wide = {"avx512": "%zmm", "avx2": "%ymm", "neon": ".4s"}[name]
    kernels = [softmax_kernel.generate(target(name), dtype="f32", storage="f32", log=False, last=last)]
    kernels += [
        reduce_kernel.generate(target(name), dtype="f32", storage="f32", op=op, last=last)
        for op in ("sum", "argmax", "logsumexp")
    ]
    for kernel in kernels:
        assert wide in jit.assembly(kernel)


def test_calls_are_remembered_by_shape() -> None:
    x = data((4, 5), "f32")
    before = reductions._reduction.cache_info().hits
    tapwise.reduce(x, "sum", 1)
    tapwise.reduce(x + 1, "sum", 1)
    assert reductions._reduction.cache_info().hits > before


def test_what_was_called_before_makes_no_difference() -> None:
    x = np.ones((3, 4), np.float32)
    tapwise.reduce(x, "sum", 1), tapwise.reduce(x, "sum", (0, 1)), tapwise.softmax(x, 1)
    np.testing.assert_array_equal(tapwise.reduce(x, "sum", np.int64(1)), np.full(3, 4))
    axis: Any
    for axis in (1.0, (0.0, 1.0), np.array([1]), "1"):
        with pytest.raises(InvalidProblem, match="axis="):
            tapwise.reduce(x, "sum", axis)
    for axis in (1.0, (1,), np.array([1])):
        with pytest.raises(InvalidProblem, match="axis="):
            tapwise.softmax(x, axis)
