"""cuda.van_herk of filters without a GPU: by emulation against the reference, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import drawn_edges
import numpy as np
import pytest

import emulated
from tapwise import registry
from tapwise.cuda.jit.compile import compile_now
from tapwise.cuda.jit.device import H200
from tapwise.cuda.jit.launch import Launch
from tapwise.ops.filter import cuda_van_herk as van_herk
from tapwise.ops.filter.cuda_down_rows import THREADS
from tapwise.ops.filter.problem import FilterProblem
from tapwise.problem import Inputs

ALGORITHM: Any = registry.get("cuda.van_herk", "filter")
# Rows that are aligned to 16 bytes, to 4 and not at all; windows of one row, of one column, larger than the picture.
PROBLEMS = [
    "filter maximum size5 h99 w176 u8",
    "filter minimum size9 h70 w304 c3 u8",
    "filter maximum size3 h40 w177 i8 constant",
    "filter minimum size4 h75 w300 c2 i8 nearest",
    "filter maximum size15 h150 w61 c4 u8 wrap",
    "filter maximum size2 h33 w1040 u8 mirror",
    "filter minimum size21 h9 w7 u8",
    "filter maximum size9 d2 h20 w36 c3 u8 mirror",
    "filter minimum size7 h1 w1 c3 i8 wrap",
    "filter maximum size1 h9 w50 u8",
]
emulation = pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")


def filtered(problem: FilterProblem, config: van_herk.Config, x: np.ndarray, backwards: bool = False) -> np.ndarray:
    y = np.zeros(problem.y_shape, problem.y_dtype)
    emulated.run(ALGORITHM.launch(problem, config), {"x": x, "y": y}, backwards)
    return y


def check(problem: FilterProblem, number: int, every: int) -> None:
    assert ALGORITHM.rejects(problem, H200) is None
    x = problem.random(np.random.default_rng(number), problem.x_shape)
    expected = problem.reference(Inputs(x, None))[0]
    configs = ALGORITHM.configs(problem, H200)
    for config in configs[:: 1 if number % every else 2]:
        np.testing.assert_array_equal(filtered(problem, config, x, number % 2 == 1), expected, str(config))


@emulation
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_against_reference(number: int) -> None:
    check(FilterProblem.parse(PROBLEMS[number]), number, 2)


@emulation
@pytest.mark.parametrize("number", drawn_edges.NUMBERS)
def test_edges(number: int) -> None:
    check(drawn_edges.draw(number, ("max", "min"), 12, whole=True)[0], number, 3)


def test_footprints_go_to_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = FilterProblem.parse("filter maximum size5 h99 w177 u8")
    tile = van_herk.tile_of(problem)
    assert tile in registry.get("cuda.tiles", "filter").configs(problem, H200)
    sources = ALGORITHM.sources(problem, ALGORITHM.configs(problem, H200)[0])
    assert [source.name for source in sources] == ["van_herk", "tiles"]
    monkeypatch.setattr(Launch, "load", lambda *_: None)
    monkeypatch.setattr(van_herk.VanHerkPlan, "uploaded", lambda _, host: host)
    plan = ALGORITHM.plan(problem, ALGORITHM.configs(problem, H200)[0], H200)
    assert [launch.source for launch in plan.launches] == sources
    assert plan.pack(None) == (None, plan.launches[0])
    words, launch = plan.pack(np.eye(5))
    assert launch is plan.launches[1] and np.count_nonzero(words[8:]) == 5


@pytest.mark.many
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80", "sm_100a"])
@pytest.mark.parametrize("text", [*PROBLEMS, "filter minimum size15 h99 w177 c3 i8"])
def test_kernels_compile_without_spills(
    text: str, architecture: str, share: Callable[[Iterable[Any]], list[Any]]
) -> None:
    problem = FilterProblem.parse(text)
    for config in share(ALGORITHM.configs(problem, H200)):
        _, used = compile_now(ALGORITHM.source(problem, config), architecture)
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{config}: {used}"


@pytest.mark.parametrize("width", [1, 20, 33, 176, 4096])
def test_every_element_is_one_threads(width: int) -> None:
    """A thread's rows are a first one and whole runs; what it loads is within its row."""
    problem = FilterProblem.parse(f"filter minimum size9 h400 w{width} c3 u8")
    for config in ALGORITHM.configs(problem, H200):
        layout = van_herk.Layout(problem, config)
        assert layout.rows % 9 == 1 and layout.segments * layout.rows >= 400
        assert layout.blocks * THREADS >= layout.across * layout.segments
        assert layout.side_blocks * THREADS * layout.side_rows >= layout.sides * 400
        assert layout.sides + layout.across * config.across == 3 * width and layout.left <= 3 * width
        if layout.across:
            first = layout.left - 12 - layout.skip
            last = first + (layout.across - 1) * config.across + layout.skip + layout.pairs + config.across // 2
            assert first >= 0 and last <= 3 * width


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("filter box size5 h9 w9 u8", "largest or smallest of bytes"),
        ("filter maximum size5 h9 w9 u16", "largest or smallest of bytes"),
        ("filter maximum size5 h9 w9 c5 u8", "channels"),
        ("filter maximum size99 h200 w200 c4 u8", "registers and shared memory"),
    ],
)
def test_refuses(text: str, reason: str) -> None:
    assert reason in ALGORITHM.rejects(FilterProblem.parse(text), H200)


def test_refuses_a_constant_that_is_no_byte() -> None:
    problem = replace(FilterProblem.parse("filter maximum size5 h9 w9 u8 constant"), cval=0.5)
    assert "cval" in ALGORITHM.rejects(problem, H200)
