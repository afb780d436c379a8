"""cuda.rolling of filters without a GPU: by emulation against float64, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import drawn_edges
import numpy as np
import pytest

import emulated
from tapwise import dispatch, registry
from tapwise.cuda.jit.compile import compile_now
from tapwise.cuda.jit.device import H200
from tapwise.ops.filter import cuda_rolling as rolling
from tapwise.ops.filter.problem import FilterProblem
from tapwise.problem import Inputs
from tapwise.verify import compare

ALGORITHM: Any = registry.get("cuda.rolling", "filter")
# Rows that are aligned and not; windows of one row, of one column, larger than the picture; every kind of result.
PROBLEMS = [
    "filter sobel h80 w336 u8 to:i16",
    "filter laplace h60 w700 c3 u8 to:i16",
    "filter laplace h30 w3 u8 to:u16 wrap",
    "filter sobel h41 w77 c2 i8 to:f32 constant",
    "filter correlate h70 w302 c4 r5 s3 i8 to:f16 nearest",
    "filter correlate h33 w160 r2 s5 u8 mirror",
    "filter correlate h1 w1000 s4 u8",
    "filter correlate h9 w50 r5 u8 to:f32",
    "filter box size5 h50 w60 c3 u8",
    "filter box size4 h30 w96 u8 to:i8",
    "filter correlate d2 h40 w170 r3 s3 u8 constant",
    "filter correlate h3 w2 r5 s5 u8 to:f32 wrap",
]
emulation = pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")


def filtered(
    problem: FilterProblem, config: rolling.Config, x: np.ndarray, w: np.ndarray, backwards: bool = False
) -> np.ndarray:
    words, y = rolling.pack(problem, w), np.zeros(problem.y_shape, problem.y_dtype)
    emulated.run(ALGORITHM.launch(problem, config), {"x": x, "list": words, "y": y}, backwards)
    return y


@emulation
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_against_float64(number: int) -> None:
    problem = FilterProblem.parse(PROBLEMS[number])
    assert ALGORITHM.rejects(problem, H200) is None
    x, w = problem.random(np.random.default_rng(number), problem.x_shape), problem.weights()
    expected = problem.reference(Inputs(x, w))
    for config in ALGORITHM.configs(problem, H200)[number % 2 :: 2]:
        verdict = compare(filtered(problem, config, x, w, number % 2 == 1), *expected, problem.y_dtype)
        assert verdict, f"{config}: {verdict.message}"


@emulation
@pytest.mark.parametrize("number", drawn_edges.NUMBERS)
def test_edges(number: int) -> None:
    """Whole numbers are exact."""
    problem, w = drawn_edges.draw(number, ("dense", "separable"), 6, whole=True)
    x = problem.random(np.random.default_rng(number), problem.x_shape)
    expected = problem.reference(Inputs(x, w))[0]
    for config in ALGORITHM.configs(problem, H200)[number % 2 :: 2]:
        np.testing.assert_array_equal(filtered(problem, config, x, w), expected, str(config))


@emulation
def test_results_that_are_held_within_their_range() -> None:
    problem = replace(FilterProblem.parse("filter correlate h30 w64 r3 s3 u8"), clip=True, recipe="")
    x, w = problem.random(np.random.default_rng(0), problem.x_shape), np.full((1, 3, 3), 0.17)
    y = filtered(problem, ALGORITHM.configs(problem, H200)[0], x, w)
    assert (verdict := compare(y, *problem.reference(Inputs(x, w)), problem.y_dtype)), verdict.message
    assert y.max() == 255


@pytest.mark.many
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80", "sm_100a"])
@pytest.mark.parametrize("text", [*PROBLEMS, "filter correlate h9 w9 c4 r5 s5 u8"])
def test_kernels_compile_without_spills(
    text: str, architecture: str, share: Callable[[Iterable[Any]], list[Any]]
) -> None:
    problem = FilterProblem.parse(text)
    for config in share(ALGORITHM.configs(problem, H200)):
        _, used = compile_now(ALGORITHM.source(problem, config), architecture)
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{config}: {used}"


@pytest.mark.parametrize("size", ["h4096 w4096", "h4096 w4096 c3", "h1080 w1920 c3"])
@pytest.mark.parametrize("text", ["sobel", "laplace", "correlate r3 s3"])
def test_small_windows_of_bytes_are_its_own(text: str, size: str) -> None:
    """Measured: two thirds of the time of cuda.tiles."""
    problem = FilterProblem.parse(f"filter {text} {size} u8 to:i16")
    assert dispatch.choose(problem, H200).algorithm == "cuda.rolling"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("filter maximum size3 h9 w9 u8", "takes sums"),
        ("filter laplace h9 w9", "takes bytes"),
        ("filter laplace h9 w9 c5 u8", "channels"),
        ("filter box size7 h9 w9 u8", "windows of up to 5 x 5"),
    ],
)
def test_refuses(text: str, reason: str) -> None:
    assert reason in ALGORITHM.rejects(FilterProblem.parse(text), H200)
