"""cuda.block_reduction of softmax and reduce without a GPU: every config by emulation, and what is no number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import emulated
from tapwise import registry
from tapwise.cuda.jit.compile import compile_now
from tapwise.cuda.jit.device import H200
from tapwise.problem import Inputs
from tapwise.verify import compare

# Runs of whole pieces of 16 bytes and not, kept in registers, of clusters, in parts; along the last axis and others.
PROBLEMS = [
    "softmax 23x77", "softmax 9x197 f16", "log_softmax 5x1030 f16", "softmax 40x128", "softmax 3x21x40x37 axis1",
    "log_softmax 3x20004", "softmax 2x9001 f64", "log_softmax 17x35 f64", "softmax 1x70000", "softmax 5x1",
    "softmax 3x20003 f16",
    "log_softmax 2x50257 bf16", "softmax 2x30001", "log_softmax 9x37 bf16", "log_softmax 3x1001",
    "reduce argmax 9x1000 axis1", "reduce argmin 3x50001 axis1", "reduce argmax 40x33x7 axis1 f16",
    "reduce argmin 5x300 axis1 f64", "reduce mean 31x224 axis1", "reduce logsumexp 20x4000 axis1 f16",
    "reduce sum 64x3x24x23 axis0", "reduce max 64x3x24x24 axis0", "reduce prod 9x33 axis1", "reduce norm2 70001",
    "reduce argmin 7x1003 axis1 f16", "reduce sum 9x203 axis1 bf16",
]  # fmt: skip
emulation = pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")


def results(text: str, x: np.ndarray, most: int = 99) -> Any:
    """(problem, config, y) of every config but the plain ones, whose threads have whole runs."""
    problem: Any = registry.parse(text)
    algorithm: Any = registry.get("cuda.block_reduction", problem.operator)
    configs: list[Any] = list(algorithm.configs(problem, H200))
    length = problem.collapsed[1]
    some = [one for one in configs if one.threads // max(1, one.groups) > 1 or length < 4096]
    for number, config in enumerate(some[:most]):
        y = np.full(problem.result_shape, 7, problem.y_dtype)
        workspace = np.full(max(16, algorithm.workspace_bytes(problem, config, H200)), 0xFF, np.uint8)
        for launch in algorithm.launches(problem, config):  # type: ignore[attr-defined]
            emulated.run(launch, {"x": x, "y": y, "workspace": workspace}, backwards=number % 2 == 1)
        yield problem, config, y


@pytest.mark.many
@emulation
@pytest.mark.parametrize("text", PROBLEMS)
def test_every_config(text: str) -> None:
    given: Any = registry.parse(text)
    inputs = given.sample(np.random.default_rng(0), False)
    expected = given.reference(inputs)
    for problem, config, y in results(text, np.ascontiguousarray(inputs.x)):
        verdict = compare(y, expected[0], expected[1], problem.y_dtype)
        assert verdict, f"{config}: {verdict.message}"


@emulation
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("shape", [(6, 77), (6, 512), (6, 20000)])
def test_softmax_of_what_is_no_number(shape: tuple[int, int], log: bool) -> None:
    """A NaN or +infinity makes NaN of its run, as does nothing but -infinity; -infinity alone counts for nothing."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[0, 3], x[1, -1], x[2], x[3, : shape[1] - 5] = np.nan, np.inf, -np.inf, -np.inf
    text = f"{'log_' * log}softmax {'x'.join(map(str, shape))}"
    with np.errstate(all="ignore"):
        expected = registry.parse(text).reference(Inputs(x, None))[0]
        assert np.isnan(expected[:3]).all() and not np.isnan(expected[3:]).any()
        for _, config, y in results(text, x):
            np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6, err_msg=str(config))


@emulation
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_logarithm_of_sums_of_what_is_no_number(dtype: str) -> None:
    """As numpy has it: infinity of its like, -infinity of nothing else, NaN of one."""
    x = np.random.default_rng(0).standard_normal((7, 1003)).astype(registry.parse(f"softmax 2 {dtype}").x_dtype)
    x[0, 3], x[1, -1], x[2], x[3, :998], x[4, 5:7] = np.nan, np.inf, -np.inf, -np.inf, np.inf
    x[5, [0, 9]], x[6, ::2] = (np.inf, np.nan), -np.inf
    with np.errstate(all="ignore"):
        expected = np.logaddexp.reduce(x.astype(np.float64), axis=1)
    for _, config, y in results(f"reduce logsumexp 7x1003 axis1 {dtype}", x):
        np.testing.assert_allclose(y.astype(np.float64), expected, rtol=2e-3, atol=1e-3, err_msg=str(config))


@emulation
@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_of_what_is_no_number(op: str, axis: int, dtype: str) -> None:
    """As numpy has them: a NaN wins wherever it stands, infinities are numbers."""
    x = np.random.default_rng(0).standard_normal((8, 36)).astype(registry.parse(f"softmax 2 {dtype}").x_dtype)
    x[0, 0], x[1, -1], x[2, 5], x[3], x[4], x[5, 3] = np.nan, np.nan, np.inf, -np.inf, np.inf, -np.inf
    expected = getattr(np, op)(x, axis=axis)
    assert 0 < np.isnan(expected).sum() < expected.size
    for _, config, y in results(f"reduce {op} 8x36 axis{axis} {dtype}", x):
        np.testing.assert_array_equal(y, expected, err_msg=str(config))


@emulation
@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_places_of_equals_and_of_no_numbers(op: str) -> None:
    """As numpy has them: the first of equals, zeros of either sign among them, and the first NaN before all."""
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (12, 1000)).astype(np.float32)
    x[[0, 1, 7]] = 0.0
    x[1, ::2], x[7, 1::2], x[2, 500], x[2, 700], x[3, 999] = -0.0, -0.0, np.nan, np.nan, np.nan
    x[4], x[5], x[6, 8] = np.inf, -np.inf, -np.inf
    for _, config, y in results(f"reduce {op} 12x1000 axis1", x):
        np.testing.assert_array_equal(y, getattr(np, op)(x, axis=1), err_msg=str(config))


@pytest.mark.many
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_kernels_compile_without_spills(
    text: str, architecture: str, share: Callable[[Iterable[Any]], list[Any]]
) -> None:
    problem: Any = registry.parse(text)
    algorithm: Any = registry.get("cuda.block_reduction", problem.operator)
    for config in share(list(algorithm.configs(problem, H200))[::2]):
        for source in algorithm.sources(problem, config):  # type: ignore[attr-defined]
            if architecture == "sm_80" and getattr(config, "cluster", False):
                continue
            _, used = compile_now(source, architecture)
            assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{config}: {used}"
