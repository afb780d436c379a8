"""cuda.warp_rows of filters without a GPU: by emulation against float64, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import drawn_edges
import numpy as np
import pytest

import emulated
from tapwise import dispatch, registry
from tapwise.cuda.jit.compile import compile_now
from tapwise.cuda.jit.device import H200
from tapwise.ops.filter import cuda_warp_rows as warp_rows
from tapwise.ops.filter.problem import FilterProblem
from tapwise.problem import Inputs
from tapwise.verify import compare

ALGORITHM: Any = registry.get("cuda.warp_rows", "filter")
# Rows of whole words and not, narrower than a lane and wider than a warp; every mode; up to four channels.
PROBLEMS = [
    "filter gaussian sigma1 h80 w520 u8",
    "filter gaussian sigma1 h41 w77 u8 mirror",
    "filter gaussian sigma1 h70 w300 c3 u8 constant",
    "filter box size5 h50 w60 c2 u8 nearest",
    "filter box size4 h30 w501 c4 u8 wrap",
    "filter gaussian sigma1 h5 w3 u8 wrap",
    "filter box size9 h1 w1000 u8",
]
emulation = pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")


def filtered(problem: FilterProblem, config: warp_rows.Config, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    words, y = warp_rows.pack(problem, w), np.zeros(problem.y_shape, problem.y_dtype)
    emulated.run(ALGORITHM.launch(problem, config), {"x": x, "list": words, "y": y}, config.rows == 24)
    return y


@emulation
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_against_float64(number: int) -> None:
    problem = FilterProblem.parse(PROBLEMS[number])
    assert ALGORITHM.rejects(problem, H200) is None
    x, w = problem.random(np.random.default_rng(number), problem.x_shape), problem.weights()
    expected = problem.reference(Inputs(x, w))
    for config in ALGORITHM.configs(problem, H200)[number % 2 :: 2]:
        y = filtered(problem, config, x, w)
        assert (verdict := compare(y, *expected, problem.y_dtype)), f"{config}: {verdict.message}"
        # Off by one only where float32 is as close to an integer as what makes up for its roundings.
        assert (y != expected[0]).mean() < 1e-3


@emulation
@pytest.mark.parametrize("number", drawn_edges.NUMBERS)
def test_edges(number: int) -> None:
    """Whole numbers are exact, also where sums are negative and results leave a byte's range."""
    drawn, w = drawn_edges.draw(number, ("separable", "separable"), 6, whole=True)
    # Of a column and a row, two taps at least.
    r, s = drawn.size[1:]
    w = np.concatenate([w[:r], [3.0] * (2 - r), w[r:], [-2.0] * (2 - s)])
    problem = replace(drawn, size=(1, max(2, r), max(2, s)), dtype="u8", to="u8")
    assert ALGORITHM.rejects(problem, H200) is None
    x = problem.random(np.random.default_rng(number), problem.x_shape)
    expected = problem.reference(Inputs(x, w))[0]
    np.testing.assert_array_equal(filtered(problem, warp_rows.Config(24), x, w), expected)


@emulation
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sums_that_are_simple_and_not(sign: float) -> None:
    """Nothing but zeros or 255, weights of a mean; and of negative weights, whose results keep low bits."""
    problem = FilterProblem.parse("filter gaussian sigma1 h20 w64 u8")
    w = problem.weights() * sign
    for value in (0, 255):
        x = np.full(problem.x_shape, value, np.uint8)
        y = filtered(problem, warp_rows.Config(24), x, w)
        assert bool(warp_rows.pack(problem, w)[4]) == (sign > 0)
        np.testing.assert_array_equal(y, problem.reference(Inputs(x, w))[0])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", ["gaussian sigma1", "gaussian sigma1 c3", "box size2 c4", "box size6"])
def test_kernels_compile_without_spills(architecture: str, text: str) -> None:
    problem = FilterProblem.parse(f"filter {text} h64 w640 u8")
    _, used = compile_now(ALGORITHM.source(problem, warp_rows.Config(64)), architecture)
    assert (used.stack_bytes, used.spill_bytes) == (0, 0)


def test_what_is_refused() -> None:
    for text in (
        "filter gaussian sigma2 h64 w64 u8", "filter gaussian sigma1 h64 w64", "filter laplace h64 w64 u8",
        "filter sobel h64 w64 u8 to:i16", "filter gaussian sigma1 h64 w64 i8", "filter maximum size3 h64 w64 u8",
        "filter gaussian sigma1 h64 w64 c5 u8",
    ):  # fmt: skip
        assert ALGORITHM.rejects(FilterProblem.parse(text), H200) is not None, text


def test_it_is_taken_only_where_it_is_asked_for() -> None:
    problem = FilterProblem.parse("filter gaussian sigma1 h4096 w4096 u8")
    assert dispatch.choose(problem, H200).algorithm == "cuda.tiles_mma"
    assert dispatch.choose(problem, H200, "cuda.warp_rows").algorithm == "cuda.warp_rows"
