"""Sums that are rounded and held within their dtype's range (`clip`), of either sign, by every algorithm of filters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import emulated
from tapwise import registry
from tapwise.algorithm import Buffers
from tapwise.cpu.device import host
from tapwise.cuda.jit.device import H200
from tapwise.ops.filter import cuda, cuda_rolling, cuda_tiles, cuda_tiles_mma
from tapwise.ops.filter.cuda_strips import view_of
from tapwise.ops.filter.problem import FilterProblem
from tapwise.problem import Inputs
from tapwise.verify import compare

# What is run of a problem: result of x and weights by an algorithm's first config.
Run = Callable[[FilterProblem, Any, np.ndarray, np.ndarray], np.ndarray]


def on_the_cpu(problem: FilterProblem, algorithm: Any, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    y, device = np.zeros(problem.y_shape, problem.y_dtype), host()
    plan = algorithm.plan(problem, algorithm.configs(problem, device)[0], device)
    plan.run(Buffers(x, plan.pack(w), y, np.zeros(max(1, plan.workspace_bytes), np.uint8)))
    return y


def emulate(problem: FilterProblem, algorithm: Any, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    config, y = algorithm.configs(problem, H200)[0], np.zeros(problem.y_shape, problem.y_dtype)
    one, separable = replace(H200, multiprocessors=1), problem.op == "separable"
    if algorithm.id == "cuda.sliding_window":
        words, launch = cuda.pack(problem, w)[0], algorithm.launch(problem, config, 0, one)
    elif algorithm.id == "cuda.tiles":
        layout = cuda_tiles.Layout(view_of(problem), config, separable)
        words = cuda_tiles.pack(problem, w, layout, separable)
        launch = algorithm.launch(problem, config, separable, one)
    elif algorithm.id == "cuda.tiles_mma":
        words, launch = cuda_tiles_mma.pack(problem, w), algorithm.launch(problem, config, one)
    else:
        words, launch = cuda_rolling.pack(problem, w), algorithm.launch(problem, config)
    emulated.run(launch, {"x": x, "list": words, "y": y})
    return y


RUNS: dict[str, Run] = {"cpu": on_the_cpu, "cuda": emulate}
SUMS = [name for name in registry.ALGORITHMS["filter"] if name != "cuda.van_herk"]


@pytest.mark.parametrize("to", ["i8", "i16", "u8"])
@pytest.mark.parametrize("identifier", SUMS)
def test_sums_of_either_sign_are_rounded_to_the_nearest(identifier: str, to: str) -> None:
    if identifier.startswith("cuda") and not emulated.available():
        pytest.skip("no compiler to emulate with")
    problem = FilterProblem("dense", (1, 19, 40), (1, 3, 3), (0, 1, 1), 1, dtype="i8", to=to, clip=True)
    algorithm, rng = registry.get(identifier, "filter"), np.random.default_rng(0)
    assert algorithm.refusal(problem, H200 if identifier.startswith("cuda") else host()) is None
    x, w = problem.random(rng, problem.x_shape), rng.standard_normal((1, 3, 3)) / 2
    expected = problem.reference(Inputs(x, w))
    y = RUNS[identifier.split(".")[0]](problem, algorithm, x, w)
    assert (verdict := compare(y, *expected, problem.y_dtype)), verdict.message
    info = np.iinfo(problem.y_dtype)
    assert y.min() == info.min if to != "i16" else y.min() < -100


@pytest.mark.parametrize("identifier", ["cpu.tiles", "cpu.serial"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_of_floating_point_too(identifier: str, dtype: str) -> None:
    problem = FilterProblem("separable", (1, 9, 33), (1, 3, 4), (0, 1, 2), 2, dtype=dtype, to="i32", clip=True)
    rng = np.random.default_rng(1)
    x, w = 50 * problem.random(rng, problem.x_shape), rng.standard_normal(7)
    y = on_the_cpu(problem, registry.get(identifier, "filter"), x.astype(problem.x_dtype), w)
    expected = problem.reference(Inputs(x.astype(problem.x_dtype), w))
    assert (verdict := compare(y, *expected, problem.y_dtype)), verdict.message
    assert y.min() < -50
