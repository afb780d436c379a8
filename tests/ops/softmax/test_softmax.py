"""softmax and log_softmax: every algorithm against float64, and what users may hand over."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tapwise
from tapwise import registry, verify
from tapwise.cpu import jit
from tapwise.cpu.simd import target
from tapwise.errors import InvalidProblem
from tapwise.ops.axes import normal_axes
from tapwise.ops.softmax import cpu_kernel as softmax_kernel
from tapwise.ops.softmax.problem import SoftmaxProblem
from tapwise.problem import Inputs

KINDS = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
SHAPES = [(7,), (1,), (33, 19), (3, 5, 7, 11), (2, 40_000), (1500, 3), (4, 1, 1), (70_001,), (6, 600, 37)]
# 16 bits in turn.
CASES = [(shape, dtype) for number, shape in enumerate(SHAPES) for dtype in ("f32", "f64", ("f16", "bf16")[number % 2])]
SOFTMAX = [name for name in registry.ALGORITHMS["softmax"] if name.startswith("cpu.")]


def data(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(KINDS[dtype])


def compare(y: Any, expected: tuple[np.ndarray, np.ndarray], dtype: Any) -> None:
    verdict = verify.compare(np.asarray(y), *expected, dtype)
    assert verdict, verdict.message


@pytest.mark.many
@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.parametrize("identifier", SOFTMAX)
def test_softmax(identifier: str, shape: tuple[int, ...], dtype: str) -> None:
    x = data(shape, dtype) * KINDS[dtype](4)
    for axis in range(-len(shape), len(shape)):
        for log, call in ((False, tapwise.softmax), (True, tapwise.log_softmax)):
            problem = SoftmaxProblem(shape, normal_axes(axis, len(shape)), log=log, dtype=dtype)
            compare(call(x, axis, algorithm=identifier), problem.reference(Inputs(x)), KINDS[dtype])


@pytest.mark.parametrize("length", [5, 40_000])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("identifier", SOFTMAX)
def test_softmax_of_nan_and_infinity(identifier: str, axis: int, length: int) -> None:
    x = data((6, length), "f32")
    x[0, : length // 2], x[1], x[2, 1], x[3, 2], x[4, 3] = -np.inf, -np.inf, np.nan, np.inf, 3e38
    x = x if axis == 1 else np.ascontiguousarray(x.T)
    for log, call in ((False, tapwise.softmax), (True, tapwise.log_softmax)):
        problem = SoftmaxProblem(x.shape, (axis,), log=log)
        compare(call(x, axis, algorithm=identifier), problem.reference(Inputs(x)), np.float32)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_memory_orders_and_strides(order: tuple[int, ...]) -> None:
    x = data((6, 10, 14), "f32").transpose(order)
    for view in (x, x[::-1], x[:, 1:-1:2], x.astype(">f4"), np.broadcast_to(x[:1], x.shape)):
        plain = np.ascontiguousarray(view, np.float32)
        problem = SoftmaxProblem(plain.shape, (1,))
        compare(tapwise.softmax(view, 1), problem.reference(Inputs(plain)), np.float32)


def test_same_bits_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = data((3, 123_457), "f32")
    found = []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("TAPWISE_NUM_THREADS", threads)
        found.append(tapwise.softmax(x))
    for other in found[1:]:
        assert np.array_equal(found[0], other)


def test_nothing_to_do() -> None:
    x = np.zeros((3, 0, 2), np.float32)
    assert tapwise.softmax(x).shape == x.shape


def test_softmax_out() -> None:
    x = data((6, 10, 14), "f32")
    for source in (x, x.transpose(2, 0, 1)):
        wanted = tapwise.softmax(source, 1)
        for out in (np.empty(source.shape, np.float32), np.empty(source.shape, np.float32, order="F")):
            assert tapwise.softmax(source, 1, out=out) is out
            assert np.array_equal(out, wanted)
    wrong: Any
    for wrong, word in (
        (x, "overlaps x"),
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
    torch = pytest.importorskip("torch")
    t = torch.randn(5, 6, 7).transpose(0, 2)
    y = tapwise.softmax(t, 1)
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y, torch.softmax(t, 1))


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda x: tapwise.softmax(x, -3), "axis=-3"),
        (lambda x: tapwise.softmax(x, None), "axis=None"),
        (lambda x: tapwise.softmax(x, algorithm="cpu.fast"), "cpu.fast"),
    ],
)
def test_bad_arguments_are_named(call: Any, word: str) -> None:
    with pytest.raises(InvalidProblem, match=word):
        call(np.ones((3, 4), np.float32))


@pytest.mark.parametrize("text", ["softmax 1024x1000", "log_softmax 8x64x49 axis1 f64", "softmax scalar"])
def test_softmax_strings(text: str) -> None:
    problem = SoftmaxProblem.parse(text)
    assert str(problem) == text and SoftmaxProblem.parse(str(problem)) == problem


@pytest.mark.parametrize("text", ["softmax 3 axis0 axis0", "softmax", "log_softmax 3y4"])
def test_bad_strings(text: str) -> None:
    with pytest.raises(InvalidProblem, match="problem"):
        SoftmaxProblem.parse(text)


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon"])
@pytest.mark.parametrize("last", [True, False])
def test_every_target_gets_vector_code(name: str, last: bool) -> None:
    kernel = softmax_kernel.generate(target(name), dtype="f32", storage="f32", log=False, last=last)
    assert {"avx512": "%zmm", "avx2": "%ymm", "neon": ".4s"}[name] in jit.assembly(kernel)


def test_what_was_called_before_makes_no_difference() -> None:
    x = np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(tapwise.softmax(x, 1), np.full((3, 4), 0.25))
    for axis in (1.0, (1,), np.array([1])):
        with pytest.raises(InvalidProblem, match="axis="):
            tapwise.softmax(x, axis)  # type: ignore[arg-type]


def test_dim_is_axis() -> None:
    x = data((3, 4, 5), "f32")
    for call in (tapwise.softmax, tapwise.log_softmax):
        assert np.array_equal(call(x, dim=1), call(x, 1))
        with pytest.raises(InvalidProblem, match="dim=1: axis=0 is given too"):
            call(x, 0, dim=1)
