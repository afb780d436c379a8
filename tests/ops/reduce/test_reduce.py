"""reduce: every algorithm against float64, and what users may hand over."""

from __future__ import annotations

from math import fsum
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tapwise
from tapwise import dispatch, registry, verify
from tapwise.cpu import jit
from tapwise.cpu.simd import target
from tapwise.cuda.jit.device import H200
from tapwise.errors import InvalidProblem
from tapwise.ops.axes import normal_axes
from tapwise.ops.reduce import api as reductions
from tapwise.ops.reduce import cpu_kernel as reduce_kernel
from tapwise.ops.reduce import reference
from tapwise.ops.reduce.problem import REDUCTIONS, ReduceProblem
from tapwise.problem import Inputs

KINDS = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
SHAPES = [(7,), (1,), (33, 19), (3, 5, 7, 11), (2, 40_000), (1500, 3), (4, 1, 1), (70_001,), (6, 600, 37)]
# 16 bits in turn.
CASES = [(shape, dtype) for number, shape in enumerate(SHAPES) for dtype in ("f32", "f64", ("f16", "bf16")[number % 2])]
REDUCE = [name for name in registry.ALGORITHMS["reduce"] if name.startswith("cpu.")]


def data(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(KINDS[dtype])


def compare(y: Any, expected: tuple[np.ndarray, np.ndarray], dtype: Any) -> None:
    verdict = verify.compare(np.asarray(y), *expected, dtype)
    assert verdict, verdict.message


@pytest.mark.many
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize(("shape", "dtype"), CASES)
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
            expected = problem.reference(Inputs(x))
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
            wanted, bound = problem.reference(Inputs(values))
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
                compare(tapwise.reduce(view, op, axis), problem.reference(Inputs(plain)), np.float32)
        assert np.array_equal(tapwise.reduce(view, "argmax"), np.argmax(plain))
        assert np.array_equal(tapwise.reduce(view, "argmin", 1), np.argmin(plain, 1))


def test_same_bits_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = data((3, 123_457), "f32")
    found = []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("TAPWISE_NUM_THREADS", threads)
        found.append((tapwise.reduce(x, "sum"), tapwise.reduce(x, "logsumexp", -1)))
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_nothing_to_reduce() -> None:
    x = np.zeros((3, 0, 2), np.float32)
    for op, value in (("sum", 0.0), ("prod", 1.0), ("norm1", 0.0), ("norm2", 0.0), ("sumsquare", 0.0)):
        assert np.array_equal(tapwise.reduce(x, op, 1), np.full((3, 2), value, np.float32))
    assert np.isnan(tapwise.reduce(x, "mean", 1)).all()
    assert np.isneginf(tapwise.reduce(x, "logsumexp", 1)).all()
    assert tapwise.reduce(x, "max", 0).shape == (0, 2)


def test_scalars_and_other_libraries() -> None:
    assert float(tapwise.reduce(np.full((), 2.5), "sum")) == 2.5
    torch = pytest.importorskip("torch")
    t = torch.randn(5, 6, 7).transpose(0, 2)
    y = tapwise.reduce(t, "sum", 1)
    assert isinstance(y, torch.Tensor)
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


@pytest.mark.parametrize("text", ["reduce sum", "reduce sum 3y4", "reduce sum 3 4"])
def test_bad_strings(text: str) -> None:
    with pytest.raises(InvalidProblem, match="problem"):
        ReduceProblem.parse(text)


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon"])
@pytest.mark.parametrize("last", [True, False])
def test_every_target_gets_vector_code(name: str, last: bool) -> None:
    for op in ("sum", "argmax", "logsumexp"):
        kernel = reduce_kernel.generate(target(name), dtype="f32", storage="f32", op=op, last=last)
        assert {"avx512": "%zmm", "avx2": "%ymm", "neon": ".4s"}[name] in jit.assembly(kernel)


def test_calls_are_remembered_by_shape() -> None:
    x = data((4, 5), "f32")
    before = reductions.reduction.cache_info().hits
    tapwise.reduce(x, "sum", 1)
    tapwise.reduce(x + 1, "sum", 1)
    assert reductions.reduction.cache_info().hits > before


def test_what_was_called_before_makes_no_difference() -> None:
    x = np.ones((3, 4), np.float32)
    tapwise.reduce(x, "sum", 1), tapwise.reduce(x, "sum", (0, 1))
    np.testing.assert_array_equal(tapwise.reduce(x, "sum", np.int64(1)), np.full(3, 4))
    axis: Any
    for axis in (1.0, (0.0, 1.0), np.array([1]), "1"):
        with pytest.raises(InvalidProblem, match="axis="):
            tapwise.reduce(x, "sum", axis)


def test_names_of_pytorch() -> None:
    x = data((3, 4, 5), "f32")
    assert np.array_equal(tapwise.reduce(x, "sum", dim=1, keepdim=True), tapwise.reduce(x, "sum", 1, True))
    assert np.array_equal(tapwise.reduce(x, "max", dim=(0, 2)), x.max((0, 2)))
    with pytest.raises(InvalidProblem, match="dim=1: axis=0 is given too"):
        tapwise.reduce(x, "sum", 0, dim=1)
    with pytest.raises(InvalidProblem, match="keepdim=True: keepdims=True is given too"):
        tapwise.reduce(x, "sum", 0, True, keepdim=True)


@pytest.mark.parametrize("identifier", REDUCE)
def test_ranges_are_as_documented(identifier: str) -> None:
    for op, values, wanted in (
        ("norm2", [1e30], np.inf), ("norm2", [1e-38], 0), ("mean", [3e38, 3e38], np.inf),
        ("prod", [1e30, 1e30, 1e-30], np.inf), ("norm2", [3e18, 4e18], 5e18), ("norm2", [3e-15, 4e-15], 5e-15),
    ):  # fmt: skip
        y = tapwise.reduce(np.array(values, np.float32), op, algorithm=identifier)
        np.testing.assert_allclose(y, wanted, rtol=1e-6)


def test_the_reference_of_float64_is_better_than_float64() -> None:
    """NumPy adds along an outer axis one after the other."""
    x = np.random.default_rng(0).random((100_000, 2))
    exact = [fsum(column) for column in x.T]
    if np.finfo(np.longdouble).eps < np.finfo(np.float64).eps:
        assert np.abs(reference.reduce("sum", x, (0,))[0] - exact).max() <= np.spacing(max(exact))


@pytest.mark.parametrize(
    ("text", "threads", "block"),
    [
        # Many outputs of an inner axis have a thread each, in the blocks that come out more even: of 75,264 outputs 294
        # blocks of 256 are three at most on 132 multiprocessors, 588 of 128 five.
        ("reduce sum 48x75264 axis0", 1, 128), ("reduce max 32x90112 axis0 f16", 1, 256),
        # Few have several, and runs of neighbours always: a warp reads them together.
        ("reduce sum 4096x512 axis0", None, 256), ("reduce sum 60000x48 axis1", None, 256),
        ("reduce argmax 48x4096 axis0", None, 256),
    ],
)  # fmt: skip
def test_threads_of_a_run_on_a_gpu(text: str, threads: int | None, block: int) -> None:
    config: Any = dispatch.choose(registry.parse(text), H200).config
    assert config.threads == block
    assert config.down == threads if threads else config.down > 1
