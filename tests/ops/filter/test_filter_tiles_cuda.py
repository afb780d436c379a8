"""cuda.tiles of filters without a GPU: by emulation against float64, lists of weights, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import emulated
from tapwise import registry
from tapwise.cuda.jit.compile import compile_now
from tapwise.cuda.jit.device import H200
from tapwise.ops.filter import cuda_tiles as tiles
from tapwise.ops.filter.cuda_strips import view_of
from tapwise.ops.filter.problem import FilterProblem
from tapwise.problem import Inputs
from tapwise.verify import compare

ALGORITHM: Any = registry.get("cuda.tiles", "filter")
# Pictures within one tile and of several, rows that are aligned and not, windows larger than the picture.
PROBLEMS = [
    "filter gaussian sigma1 h99 w77",
    "filter gaussian sigma2 h70 w500",
    "filter gaussian sigma5 h130 w61 c3 u8 wrap",
    "filter gaussian sigma1 h100 w404 u8",
    "filter gaussian sigma2 h20 w20 c4 to:u8",
    "filter box size15 h50 w60 c3 u8 mirror",
    "filter box size4 h33 w1100 i8 constant",
    "filter sobel h80 w333 u8 to:i16 constant",
    "filter laplace h30 w3 i16 to:u16",
    "filter correlate h99 w177 c3 r7 s5 mirror",
    "filter correlate h70 w301 c2 r4 s11 f16 nearest",
    "filter correlate h1 w1000 s31 u16",
    "filter correlate h5 w5 r9 s11 f16 wrap",
    "filter correlate d2 h60 w170 r15 s15 constant",
    "filter correlate h40 w300 r35 s2",
    "filter correlate h9 w50 c7 s5",
    "filter correlate h30 w20 c5 r5",
    "filter gaussian sigma3 h150 w500 c3 to:i16 nearest",
    "filter maximum size5 h99 w177 u8",
    "filter maximum size9 h40 w130 c3 f16 mirror",
    "filter minimum size15 h9 w7 nearest",
    "filter minimum size4 h70 w300 c2 constant",
]
emulation = pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")


def filtered(
    problem: FilterProblem, config: tiles.Config, x: np.ndarray, w: np.ndarray | None, backwards: bool = False
) -> np.ndarray:
    separable = problem.op == "separable" or (problem.op != "dense" and w is None)
    layout = tiles.Layout(view_of(problem), config, separable)
    words, y = tiles.pack(problem, w, layout, separable), np.zeros(problem.y_shape, problem.y_dtype)
    # Of few multiprocessors, so that blocks go down their strips in several steps.
    launch = ALGORITHM.launch(problem, config, separable, replace(H200, multiprocessors=1))
    emulated.run(launch, {"x": x, "list": words, "y": y}, backwards)
    return y


@emulation
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_against_float64(number: int) -> None:
    problem = FilterProblem.parse(PROBLEMS[number])
    assert ALGORITHM.rejects(problem, H200) is None
    configs = ALGORITHM.configs(problem, H200)
    x = problem.random(np.random.default_rng(number), problem.x_shape)
    w = None if problem.op in ("max", "min") else problem.weights()
    expected = problem.reference(Inputs(x, w))
    for config in {configs[0], configs[-1], configs[number % len(configs)]}:
        verdict = compare(filtered(problem, config, x, w, number % 2 == 1), *expected, problem.y_dtype)
        assert verdict, f"{config}: {verdict.message}"


@emulation
@pytest.mark.parametrize("text", ["sobel h40 w140", "laplace h40 w140 constant", "gaussian sigma1 h40 w141 c3",
                                  "correlate h30 w150 r5 s11"])  # fmt: skip
def test_a_weight_of_0_counts_for_nothing(text: str) -> None:
    problem = FilterProblem.parse(f"filter {text}")
    x, w = problem.random(np.random.default_rng(0), problem.x_shape), problem.weights()
    x[0, 7, 9], x[0, 20, 70], x[0, 3, 139], x[0, 29, 0] = np.inf, np.nan, -np.inf, np.inf
    if problem.op == "dense":
        w = w * (np.random.default_rng(1).random(w.shape) < 0.7)
    expected, _ = problem.reference(Inputs(x, w))
    for config in ALGORITHM.configs(problem, H200)[::3]:
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(filtered(problem, config, x, w), expected, rtol=1e-4, atol=1e-4)


@emulation
@pytest.mark.parametrize("op", ["max", "min"])
def test_footprints(op: str) -> None:
    problem = replace(FilterProblem.parse("filter maximum size5 h70 w150 u8 constant"), op=op, recipe="", cval=7.0)
    mask = (np.random.default_rng(3).random((1, 5, 5)) < 0.5).astype(np.float64)
    x = problem.random(np.random.default_rng(0), problem.x_shape)
    config = ALGORITHM.configs(problem, H200)[0]
    np.testing.assert_array_equal(filtered(problem, config, x, mask), problem.reference(Inputs(x, mask))[0])


@emulation
def test_the_largest_of_what_is_no_number() -> None:
    """NaN is not larger; of nothing else it is the largest."""
    problem = FilterProblem.parse("filter maximum size3 h9 w20")
    x = problem.random(np.random.default_rng(0), problem.x_shape)
    x[0, :4, :5], x[0, 7, 12] = np.nan, np.inf
    y = filtered(problem, ALGORITHM.configs(problem, H200)[0], x, None)[0]
    assert np.isnan(y[:3, :4]).all() and np.isnan(y).sum() == 12
    assert (y[6:9, 11:14] == np.inf).all() and np.isinf(y).sum() == 9


@emulation
def test_sums_that_no_integer_holds() -> None:
    """They are held within what 32 bits hold, as limits() says, and keep its low bits."""
    problem = FilterProblem.parse("filter correlate h4 w8 to:u8")
    x = np.array([3e9, -3e9, 300.7, -3.2, 255.9, 0.0, 1e30, -1e30], np.float32).reshape(1, 1, 8).repeat(4, axis=1)
    y = filtered(problem, ALGORITHM.configs(problem, H200)[0], x, np.ones((1, 1, 1)))
    assert y[0, 0].tolist() == [0, 0, 44, 253, 255, 0, 0, 0]


def test_list_of_weights() -> None:
    problem = FilterProblem.parse("filter correlate h50 w40 r2 s11")
    config = ALGORITHM.configs(problem, H200)[0]
    layout = tiles.Layout(view_of(problem), config, False)
    words = tiles.pack(problem, np.arange(1.0, 23).reshape(1, 2, 11), layout, False)
    assert (layout.chunk, layout.chunks, layout.row_weights, len(words)) == (4, 3, 12, 8 + 24)
    assert words[8:20].tolist() == [*range(1, 12), 0] and words[20:].tolist() == [*range(12, 23), 0]
    assert words[6] == 1 and tiles.pack(problem, np.eye(2, 11)[None], layout, False)[6] == 0
    problem = FilterProblem.parse("filter sobel h50 w40 u8 to:i16")
    layout = tiles.Layout(view_of(problem), config, True)
    words = tiles.pack(problem, problem.weights(), layout, True)
    assert words[8:16].tolist() == [1, 2, 1, 0, 0, 0, 0, 0] and words[layout.row_at :].tolist() == [-1, 0, 1, 0]


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_blocks_of_a_strip_cover_its_rows(text: str, multiprocessors: int) -> None:
    problem, device = FilterProblem.parse(text), replace(H200, multiprocessors=multiprocessors)
    for height in (1, 99, 4096, 70_000):
        view = view_of(replace(problem, spatial=(1, height, 9000), recipe=""))
        for config in ALGORITHM.configs(problem, H200):
            for separable in tiles.kinds_of(problem):
                layout = tiles.Layout(view, config, separable)
                found = tiles.segments_for(view, layout, config, separable, device)
                last = found.blocks - found.number
                rest = layout.tiles[0] - found.number * found.steps
                assert found.number >= 0 <= last and found.last_steps <= found.steps
                assert (last - 1) * found.last_steps < rest <= last * found.last_steps or rest == last == 0
                assert max(found.steps, found.last_steps) * config.rows <= 64 + view.taps[0] + config.rows


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("filter gaussian sigma1 h9 w9 f64", "adds up in float32"),
        ("filter correlate d5 h9 w8 t3 r3 s3", "two axes"),
        ("filter gaussian sigma1 h9 w9 c5", "channels"),
        ("filter correlate h9 w9 r2000 s2000", "no tile"),
        ("filter correlate d65535 h9 w9 r2 s2", "on top of each other"),
    ],
)
def test_refused(text: str, reason: str) -> None:
    assert reason in ALGORITHM.rejects(FilterProblem.parse(text), H200)


def test_windows_along_one_axis_are_seen_as_columns() -> None:
    """Channels of a column are pixels; a row of many channels is a column."""
    view = view_of(FilterProblem.parse("filter correlate h30 w20 c5 r5"))
    assert (view.height, view.width, view.c, view.taps) == (30, 100, 1, (5, 1))
    view = view_of(FilterProblem.parse("filter correlate d2 h9 w50 c7 s5"))
    assert (view.depth, view.height, view.width, view.c, view.taps, view.before) == (18, 50, 7, 1, (5, 1), (2, 0))


@emulation
@pytest.mark.parametrize("modes", [("nearest", "mirror", "wrap"), ("wrap", "wrap", "constant")])
def test_the_largest_of_a_row_of_many_channels(modes: tuple[str, str, str]) -> None:
    """A row's mode is that of the column that it is seen as."""
    problem = FilterProblem("max", (2, 9, 40), (1, 1, 5), (0, 0, 3), 7, modes, cval=1.5)
    x = problem.random(np.random.default_rng(0), problem.x_shape)
    for w in (None, np.array([1.0, 0, 1, 1, 0]).reshape(1, 1, 5)):
        expected = problem.reference(Inputs(x, w))[0]
        for config in ALGORITHM.configs(problem, H200)[::3]:
            np.testing.assert_array_equal(filtered(problem, config, x, w), expected)


@pytest.mark.many
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80", "sm_100a"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_kernels_compile_without_spills(
    text: str, architecture: str, share: Callable[[Iterable[Any]], list[Any]]
) -> None:
    problem = FilterProblem.parse(text)
    configs = ALGORITHM.configs(problem, H200)[::3]
    for source in share(source for config in configs for source in ALGORITHM.sources(problem, config)):
        _, used = compile_now(source, architecture)
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{source.name}: {used}"
