"""The comparator fails when it should, and so do checks of algorithms that are wrong in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import tapwise
from tapwise import dispatch, registry, verify
from tapwise.activation import ACTIVATIONS
from tapwise.algorithm import Algorithm, Buffers, Config, Device, Plan
from tapwise.errors import NotApplicable
from tapwise.ops.conv.problem import ConvProblem
from tapwise.problem import Inputs

PROBLEM = ConvProblem.parse("n2 c5 h9 w11 k7 r3 s3 pad1 bias")


@pytest.fixture
def result() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(actual, expected, bound): a float32 result that is right."""
    expected = np.random.default_rng(0).standard_normal((2, 7, 9, 11))
    return expected.astype(np.float32), expected, np.full(expected.shape, 1e-6)


def test_right_results_pass(result: tuple[np.ndarray, ...]) -> None:
    actual, expected, bound = result
    verdict = verify.compare(actual, expected, bound, np.float32)
    assert verdict.verified and verdict
    assert 0 < verdict.error <= verdict.bound == 1e-6
    ratio = np.abs(actual - expected) / bound
    assert verdict.error / verdict.bound == ratio.max()
    assert str(np.unravel_index(ratio.argmax(), ratio.shape)[3]) in verdict.message


@pytest.mark.parametrize(
    "value", [np.nan, np.inf, -np.inf, 1e30, 0.0], ids=["nan", "inf", "minus-inf", "huge", "not written"]
)
def test_one_wrong_element_fails(result: tuple[np.ndarray, ...], value: float) -> None:
    actual, expected, bound = result
    actual[1, 3, 4, 5] = value
    verdict = verify.compare(actual, expected, bound)
    assert not verdict.verified
    assert "1 of 1386 elements wrong" in verdict.message
    assert "[1, 3, 4, 5]" in verdict.message
    assert not verdict.error <= verdict.bound


def test_beyond_the_range_of_the_dtype_is_infinite() -> None:
    expected, bound = np.array([65883.0, -1e6, 65500.0]), np.full(3, 50.0)
    assert verify.compare(np.array([np.inf, -np.inf, np.inf], np.float16), expected, bound)
    assert verify.compare(np.array([np.inf, -np.inf, 65504.0], np.float16), expected, bound)
    assert not verify.compare(np.array([-np.inf, -np.inf, np.inf], np.float16), expected, bound)
    assert not verify.compare(np.array([65504.0, -np.inf, np.inf], np.float16), expected, bound)
    assert not verify.compare(np.array([np.inf, -np.inf, np.inf], np.float16), np.array([6e4, -1e6, 1e6]), bound)
    assert not verify.compare(np.array([np.nan, -np.inf, np.inf], np.float16), expected, bound)


def test_one_wrong_tile_fails(result: tuple[np.ndarray, ...]) -> None:
    """Small against the whole: a global measure of similarity would not see it."""
    actual, expected, bound = result
    actual[0, 2, 4:6, 4:8] += np.float32(2e-6)
    assert np.linalg.norm(actual - expected) < 1e-6 * np.linalg.norm(expected)
    verdict = verify.compare(actual, expected, bound)
    assert not verdict.verified
    assert "8 of 1386" in verdict.message


def test_nan_and_infinity_must_stand_where_expected() -> None:
    expected = np.array([1.0, np.nan, np.inf, -np.inf])
    bound = np.full(4, 0.1)
    assert verify.compare(expected.astype(np.float32), expected, bound).verified
    for index, value in ((1, 0.0), (1, np.inf), (2, -np.inf), (2, 3e38), (2, np.nan), (3, np.inf), (0, np.nan)):
        wrong = expected.copy()
        wrong[index] = value
        assert not verify.compare(wrong, expected, bound).verified, (index, value)


@pytest.mark.parametrize("allowed", [np.nan, np.inf, -1.0])
def test_a_bound_that_says_nothing_fails(allowed: float) -> None:
    expected = np.ones(3)
    assert not verify.compare(expected, expected, np.array([1.0, allowed, 1.0])).verified


def test_shape_and_dtype_must_agree(result: tuple[np.ndarray, ...]) -> None:
    actual, expected, bound = result
    for wrong in (actual[:, :, 1:], actual[:1], actual[None], actual[0, 0, 0, 0]):
        verdict = verify.compare(wrong, expected, bound)
        assert not verdict.verified
        assert "shape" in verdict.message
    verdict = verify.compare(actual.astype(np.float64), expected, bound, np.float32)
    assert not verdict.verified
    assert "dtype float64" in verdict.message


def test_zero_bound_means_equal() -> None:
    expected = np.array([0.0, 1.0, -3.0])
    assert verify.compare(np.array([-0.0, 1.0, -3.0]), expected, np.zeros(())).verified
    assert not verify.compare(np.array([0.0, np.nextafter(1.0, 2.0), -3.0]), expected, np.zeros(())).verified


def test_nothing_to_compare_is_right() -> None:
    assert verify.compare(np.empty((0, 3)), np.empty((0, 3)), np.empty((0, 3))).verified


SABOTAGE: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {}


def sabotage(function: Callable[[np.ndarray, np.ndarray], None]) -> Callable[[np.ndarray, np.ndarray], None]:
    SABOTAGE[function.__name__] = function
    return function


@sabotage
def leaves_an_element_out(y: np.ndarray, workspace: np.ndarray) -> None:
    y[1, 6, 8, 10] = np.nan


@sabotage
def is_off_by_a_little(y: np.ndarray, workspace: np.ndarray) -> None:
    y[0, 0, 0, 0] += np.float32(1e-3)


@sabotage
def swaps_two_rows(y: np.ndarray, workspace: np.ndarray) -> None:
    y[0, 1, [2, 3]] = y[0, 1, [3, 2]]


@sabotage
def reads_its_workspace(y: np.ndarray, workspace: np.ndarray) -> None:
    y[0, 0, 0, 0] += workspace.view(np.float32)[3]


@sabotage
def writes_before_its_output(y: np.ndarray, workspace: np.ndarray) -> None:
    np.lib.stride_tricks.as_strided(y[::-1, ::-1, ::-1, ::-1], (y.size + 1,), (-4,))[-1] = 0


@sabotage
def writes_behind_its_output(y: np.ndarray, workspace: np.ndarray) -> None:
    np.lib.stride_tricks.as_strided(y, (y.size + 1,), (4,))[-1] = 0


@sabotage
def writes_behind_its_workspace(y: np.ndarray, workspace: np.ndarray) -> None:
    np.lib.stride_tricks.as_strided(workspace, (workspace.size + 8,), (1,))[-8:] = 0


class SabotagedPlan(Plan):
    workspace_bytes = 256

    def __init__(self, plan: Plan, name: str) -> None:
        self.problem = plan.problem
        self._plan, self._spoil = plan, SABOTAGE[name]

    def pack(self, w: np.ndarray) -> Any:
        return self._plan.pack(w)

    def run(self, buffers: Buffers) -> None:
        y, workspace = buffers.y, buffers.workspace
        assert np.isnan(y).all() and np.isnan(workspace.view(np.float32)).all()
        self._plan.run(buffers._replace(workspace=None))
        self._spoil(y, workspace)


class Sabotaged(Algorithm[Config]):
    id = "cpu.sabotaged"
    summary = "the serial loops with one thing wrong"

    def __init__(self, name: str) -> None:
        self._name = name

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        return [Config()]

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        return 1.0

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return SabotagedPlan.workspace_bytes

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        serial = registry.get("cpu.serial")
        return SabotagedPlan(serial.plan(problem, serial.configs(problem, device)[0], device), self._name)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Algorithm[Any]], None]]:
    """Make registry.get know one more algorithm."""
    real = registry.get

    def add(algorithm: Algorithm[Any]) -> None:
        def get(name: str, operator: str = "conv") -> Algorithm[Any]:
            return algorithm if name == algorithm.id else real(name, operator)

        monkeypatch.setattr(registry, "get", get)
        dispatch._choose.cache_clear()
        dispatch._plan.cache_clear()

    yield add
    dispatch._choose.cache_clear()
    dispatch._plan.cache_clear()


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("name", SABOTAGE)
def test_check_sees_what_is_wrong(name: str, integers: bool, register: Callable[[Algorithm[Any]], None]) -> None:
    register(Sabotaged(name))
    verdict = verify.check(PROBLEM, "cpu.sabotaged", integers=integers)
    assert not verdict.verified
    place = {"writes_behind_its_workspace": "workspace"}.get(name, "output" if name.startswith("writes") else "wrong")
    assert place in verdict.message


def test_integers_see_an_error_below_the_bound(
    monkeypatch: pytest.MonkeyPatch, register: Callable[[Algorithm[Any]], None]
) -> None:
    def next_float(y: np.ndarray, workspace: np.ndarray) -> None:
        y[0, 0, 0, 0] = np.nextafter(y[0, 0, 0, 0], np.float32(np.inf))

    monkeypatch.setitem(SABOTAGE, "next_float", next_float)
    register(Sabotaged("next_float"))
    assert verify.check(PROBLEM, "cpu.sabotaged").verified
    assert not verify.check(PROBLEM, "cpu.sabotaged", integers=True).verified


def test_when_integers_are_exact() -> None:
    assert PROBLEM.exact_on_integers
    assert PROBLEM.replace(dtype="f16", activation="relu6").exact_on_integers
    assert not PROBLEM.replace(activation="tanh").exact_on_integers
    assert not PROBLEM.replace(activation="leaky_relu").exact_on_integers
    deep = ConvProblem.parse(f"c{1 << 21} h1 w1 k1 r1 s1")
    assert not deep.exact_on_integers
    assert deep.replace(dtype="f64").exact_on_integers

    class Inexact(Sabotaged):
        exact = False

    inputs = PROBLEM.sample(np.random.default_rng(0), integers=True)
    assert not PROBLEM.reference(inputs, registry.get("cpu.serial"))[1].any()
    assert PROBLEM.reference(inputs, Inexact("is_off_by_a_little"))[1].all()


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS, "leaky_relu-2.5"])
def test_bounds_hold_and_are_tight(dtype: str, activation: str | None) -> None:
    """The loop nest keeps its bound, and a bound is no more than some thousand roundings of a result."""
    problem = PROBLEM.replace(dtype=dtype, activation=activation, residual=True)
    verdict = verify.check(problem, "cpu.serial")
    assert verdict.verified, verdict.message
    unit = {"f32": 2.0**-24, "f64": 2.0**-53, "f16": 2.0**-11}[dtype]
    assert verdict.error <= verdict.bound < 4000 * unit


# What each algorithm of the CPU must take; all others refuse.
TAKEN = {
    "n2 c5 h9 w11 k7 r3 s3 pad1 bias silu": ("winograd", "direct", "im2col_gemm", "serial"),
    "c6 h7 w5 k6 r1 s1 f16": ("pointwise", "direct", "im2col_gemm", "serial"),
    "c6 h9 w5 k6 r3 s3 groups6": ("depthwise", "direct", "im2col_gemm", "serial"),
}


@pytest.mark.parametrize(("text", "name"), [(text, name) for text, names in TAKEN.items() for name in names])
def test_check_runs_every_algorithm(text: str, name: str) -> None:
    for integers in (False, True):
        verdict = verify.check(ConvProblem.parse(text), f"cpu.{name}", integers=integers)
        assert verdict.verified, verdict.message


@pytest.mark.parametrize("text", TAKEN)
def test_check_refuses_what_does_not_apply(text: str) -> None:
    taken = {f"cpu.{name}" for name in TAKEN[text]}
    for algorithm in registry.of_backend("cpu"):
        if algorithm.id not in taken:
            with pytest.raises(NotApplicable):
                verify.check(ConvProblem.parse(text), algorithm.id)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize(
    "text", ["n2 c5 h9 w11 k7 r3 s3 pad1 bias", "c5 w11 k7 s3 residual relu", "c3 h5 w6 k4 r2 s2 nhwc f16"]
)
def test_prepared_operators(text: str, integers: bool) -> None:
    problem = ConvProblem.parse(text)
    dtype = {"f32": np.float32, "f16": np.float16}[problem.dtype]
    rng = np.random.default_rng(1)
    w = rng.integers(-3, 4, problem.w_shape).astype(dtype)
    bias = rng.integers(-3, 4, problem.k).astype(dtype) if problem.bias else None
    prepared = tapwise.prepare(problem, w, bias, algorithm="cpu.im2col_gemm")
    verdict = verify.check_operator(prepared, w, bias, integers=integers)
    assert verdict.verified, verdict.message
    assert not verify.check_operator(prepared, w + dtype(1), bias, integers=integers).verified


def test_images_are_compared_one_by_one_where_sums_are_given() -> None:
    problem = ConvProblem.parse("n3 c4 h9 w9 k6 r3 s3 f16 bias residual relu")
    rng = np.random.default_rng(0)
    x, w, bias, residual = (
        rng.standard_normal(shape).astype(np.float16)
        for shape in (problem.x_shape, problem.w_shape, (problem.k,), problem.y_shape)
    )
    plain = problem.bare()
    algorithm = registry.get("cpu.serial")
    y, inputs = problem.convolve(x, w, bias, residual).astype(np.float16), Inputs(x, w, bias, residual)

    def verdict() -> verify.Verdict:
        sums = plain.convolve(x, w), plain.convolve(abs(x), abs(w))
        return verify._verdict(problem, algorithm, inputs, y, sums)

    whole = verify._verdict(problem, algorithm, inputs, y)
    assert verdict()
    assert (verdict().error, verdict().bound) == (whole.error, whole.bound)
    y[2, 1, 3, 3] += 1
    assert not verdict()
    assert "image 2" in verdict().message


def test_positions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = registry.parse("maxpool n2 c3 h9 w11 r3 s3 stride2 indices")
    assert verify.check(problem, "cpu.serial")
    right = type(problem).second_reference

    def wrong(self: Any, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        places, bound = right(self, inputs)
        places[1, 2, 3, 3] += 1
        return places, bound

    monkeypatch.setattr(type(problem), "second_reference", wrong)
    verdict = verify.check(problem, "cpu.serial")
    assert not verdict
    assert "positions: 1 of" in verdict.message
    assert "[1, 2, 3, 3]" in verdict.message
