"""cuda.tiles_mma of filters without a GPU: by emulation against float64, weights in two parts, and what is refused."""

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
from tapwise.ops.filter import cuda_tiles_mma as mma
from tapwise.ops.filter.cuda_strips import view_of
from tapwise.ops.filter.problem import FilterProblem
from tapwise.ops.filter.weights import in_two_parts
from tapwise.problem import Inputs
from tapwise.verify import compare

ALGORITHM: Any = registry.get("cuda.tiles_mma", "filter")
# Pictures within one tile and of several, rows that are aligned and not, windows larger than the picture; operands of
# whole steps, with halves behind them, and of so many steps that their sums are added up apart.
PROBLEMS = [
    "filter gaussian sigma1 h99 w77 u8",
    "filter gaussian sigma1 h100 w432 u8",
    "filter gaussian sigma1 h70 w330 u8 to:f32",
    "filter gaussian sigma2 h70 w300 i8 to:f16 nearest",
    "filter gaussian sigma5 h130 w61 c3 u8 wrap",
    "filter gaussian sigma2 h20 w20 c4 u8 to:f32",
    "filter gaussian sigma9 h40 w99 u8 to:f32 mirror",
    "filter gaussian sigma3 h50 w70 c4 i8 to:f32",
    "filter box size15 h50 w60 c3 u8 mirror",
    "filter box size4 h33 w1100 i8 constant",
    "filter box size99 h30 w40 c2 u8",
    "filter sobel h80 w333 u8 to:i16 constant",
    "filter laplace h30 w3 u8 to:u16",
    "filter laplace h60 w700 c2 u8 to:i16",
    "filter correlate h99 w177 c3 r7 s5 u8 mirror",
    "filter correlate h70 w301 c2 r4 s11 i8 to:f16 nearest",
    "filter correlate h1 w1000 s31 u8",
    "filter correlate h5 w5 r9 s11 u8 to:f32 wrap",
    "filter correlate d2 h60 w170 r15 s15 u8 constant",
    "filter correlate h40 w300 r35 s2 u8 to:f32",
    "filter correlate h20 w90 c3 r2 s70 i8",
    "filter correlate h9 w50 c7 s5 u8",
    "filter correlate h30 w20 c5 r5 u8 to:i16",
]
emulation = pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")


def filtered(
    problem: FilterProblem, config: mma.Config, x: np.ndarray, w: np.ndarray, backwards: bool = False
) -> np.ndarray:
    words, y = mma.pack(problem, w), np.zeros(problem.y_shape, problem.y_dtype)
    # Of few multiprocessors, so that blocks go down their strips in several steps.
    launch = ALGORITHM.launch(problem, config, replace(H200, multiprocessors=1), words[mma.KIND] == mma.SPLIT)
    emulated.run(launch, {"x": x, "list": words, "y": y}, backwards)
    return y


def separable(text: str, column: Any, row: Any, **changes: Any) -> tuple[FilterProblem, np.ndarray]:
    """A column and a row of weights on the picture of a problem's text."""
    problem = FilterProblem.parse(text)
    size = (1, len(column), len(row))
    before = (0, len(column) // 2, len(row) // 2)
    changed = replace(problem, op="separable", size=size, before=before, recipe="", **changes)
    return changed, np.concatenate([column, row]).astype(np.float64)


def kind_of(problem: FilterProblem, w: np.ndarray) -> int:
    return int(mma.pack(problem, w)[mma.KIND])


@pytest.mark.many
@emulation
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_against_float64(number: int) -> None:
    problem = FilterProblem.parse(PROBLEMS[number])
    assert ALGORITHM.rejects(problem, H200) is None
    configs = ALGORITHM.configs(problem, H200)
    x, w = problem.random(np.random.default_rng(number), problem.x_shape), problem.weights()
    expected = problem.reference(Inputs(x, w))
    for config in {configs[0], configs[-1], configs[number % len(configs)]}:
        verdict = compare(filtered(problem, config, x, w, number % 2 == 1), *expected, problem.y_dtype)
        assert verdict, f"{config}: {verdict.message}"


@emulation
@pytest.mark.parametrize("number", drawn_edges.NUMBERS)
def test_edges(number: int) -> None:
    """Whole numbers are exact."""
    problem, w = drawn_edges.draw(number, ("dense", "separable"), 12)
    x = problem.random(np.random.default_rng(number), problem.x_shape)
    expected = problem.reference(Inputs(x, w))[0]
    for config in ALGORITHM.configs(problem, H200)[number % 3 :: 3]:
        np.testing.assert_array_equal(filtered(problem, config, x, w), expected, str(config))


@emulation
@pytest.mark.parametrize(
    ("column", "row", "to", "kind"),
    [
        # Column sums of one part: truncated, whole, and not.
        ([0.25, 0.5, 0.25], [0.3, 0.3, 0.4], "u8", mma.PARTS),
        ([1, 2, 1], [-1, 0, 1], "i16", mma.EXACT),
        ([1, 2, 1], [-0.3, 0, 0.1], "f32", mma.PARTS),
        ([0.25, 0.5, 0.25], [1, 1], "f32", mma.SPLIT),
        # Sums beyond what float16 holds, and weights beyond 11 bits: all four products count.
        ([1, 9, 1, 300], [3, 1, 2], "i16", mma.SPLIT),
        ([1, 9, -1, 12], [2049, -1, 2], "f32", mma.SPLIT),
        ([1, 9, -1, 12], [0, 0, 1, 0, -1, 2049], "f32", mma.SPLIT),
        ([-0.7, 0.1, 0.2], [-0.3, 0.9], "i16", mma.PARTS),
        ([-2.7, 3.1, 1.2], [-0.3, 0.9], "i16", mma.SPLIT),
        # Of sizes that float16 does not have.
        ([1e-9, 3e-9], [2e12, 5e12, 1e-3], "f32", mma.SPLIT),
        ([3e20, 2e20], [1e-30, 4e-30], "f32", mma.SPLIT),
    ],
)
def test_kinds_of_column_sums(column: list[float], row: list[float], to: str, kind: int) -> None:
    problem, w = separable("filter sobel h70 w90 c2 u8", column, row, to=to)
    assert kind_of(problem, w) == kind
    x = problem.random(np.random.default_rng(0), problem.x_shape)
    y = filtered(problem, ALGORITHM.configs(problem, H200)[0], x, w)
    expected, bound = problem.reference(Inputs(x, w))
    if np.all(w == np.rint(w)):
        np.testing.assert_array_equal(y, expected)
    else:
        assert (verdict := compare(y, expected, bound, problem.y_dtype)), verdict.message


@pytest.mark.many
@emulation
@pytest.mark.parametrize("text", ["gaussian sigma1", "gaussian sigma3", "gaussian sigma5", "box size15", "box size7"])
@pytest.mark.parametrize("op", ["separable", "dense"])
def test_a_mean_of_equal_pixels_is_that_pixel(text: str, op: str) -> None:
    problem = FilterProblem.parse(f"filter {text} h31 w300 u8")
    w = problem.weights()
    if op == "dense":
        r = problem.size[1]
        problem, w = replace(problem, op="dense", recipe=""), np.outer(w[:r], w[r:])[None]
    config = ALGORITHM.configs(problem, H200)[1]
    for value in (1, 3, 129, 254, 255):
        x = np.full(problem.x_shape, value, np.uint8)
        np.testing.assert_array_equal(filtered(problem, config, x, w), x)


@emulation
@pytest.mark.parametrize("text", ["gaussian sigma1 h40 w140 u8", "correlate h30 w50 r5 s6 u8 to:i8"])
def test_results_that_are_held_within_their_range(text: str) -> None:
    problem = replace(FilterProblem.parse(f"filter {text}"), clip=True, recipe="")
    x = problem.random(np.random.default_rng(0), problem.x_shape)
    w = 1.5 * FilterProblem.parse(f"filter {text}").weights()
    y = filtered(problem, ALGORITHM.configs(problem, H200)[0], x, w)
    assert (verdict := compare(y, *problem.reference(Inputs(x, w)), problem.y_dtype)), verdict.message
    assert y.max() == np.iinfo(problem.y_dtype).max


@emulation
def test_small_weights_keep_their_bits() -> None:
    """One pixel shows each weight of a Gaussian, the least is a millionth of the largest."""
    problem = FilterProblem.parse("filter gaussian sigma2 h40 w60 u8 to:f32")
    x = np.zeros(problem.x_shape, np.uint8)
    x[0, 20, 31] = 255
    y = filtered(problem, ALGORITHM.configs(problem, H200)[0], x, problem.weights())
    assert (verdict := compare(y, *problem.reference(Inputs(x, problem.weights())))), verdict.message


def matrices(words: np.ndarray) -> np.ndarray:
    return words.view(np.float16).astype(np.float64)


@pytest.mark.parametrize("taps", [1, 3, 9, 10, 41])
def test_a_columns_matrices(taps: int) -> None:
    """Of each lane, as mma.sync has its left operand: 16 outputs by the rows that they see."""
    problem, w = separable("filter sobel h9 w9 u8", np.arange(1.0, taps + 1) / 7, [1.0])
    halves = (taps + 22) // 8
    found = matrices(mma.pack(problem, w)[16 : 16 + 128 * halves])
    _, _, exponent = in_two_parts(w[:taps])
    dense = np.zeros((16, 8 * halves))
    for half in range(halves):
        last = half == halves - 1 and halves % 2
        for lane in range(32):
            for e in range(4):
                g, k = lane // 4 + e // 2 * 8, 8 * half + lane % 4 * 2 + e % 2
                for part in range(2):
                    at = half // 2 * 512
                    at += lane * 8 + part * 4 if last else part * 256 + lane * 8 + half % 2 * 4
                    dense[g, k] += found[at + e]
    band = np.zeros_like(dense)
    for m in range(16):
        band[m, m : m + taps] = w[:taps]
    np.testing.assert_allclose(dense, np.ldexp(band, exponent), rtol=4 * 2.0**-24)


@pytest.mark.parametrize(("c", "taps"), [(1, 1), (1, 3), (1, 9), (2, 4), (3, 5), (4, 12)])
def test_a_rows_matrices(c: int, taps: int) -> None:
    """Of each lane, as mma.sync has its right operand: elements by 8 outputs, of each row of taps."""
    problem = FilterProblem.parse(f"filter correlate h9 w9 c{c} r2 s{taps} u8" if c > 1 else
                                  f"filter correlate h9 w9 r2 s{taps} u8")  # fmt: skip
    w = np.random.default_rng(0).standard_normal((1, 2, taps))
    view, layout = view_of(problem), mma.Layout(problem, ALGORITHM.configs(problem, H200)[0])
    rows = matrices(mma.pack(problem, w)[16:]).reshape(2, -1)
    _, _, exponent = in_two_parts(w.ravel())
    for r in range(2):
        dense = np.zeros((8 * layout.halves, 8))
        for half in range(layout.halves):
            last = half == layout.halves - 1 and layout.halves % 2
            for lane in range(32):
                for e in range(2):
                    for part in range(2):
                        at = half // 2 * 256
                        at += lane * 4 + part * 2 if last else lane * 8 + part * 4 + half % 2 * 2
                        dense[8 * half + lane % 4 * 2 + e, lane // 4] += rows[r, at + e]
        band = np.zeros_like(dense)
        for n in range(8):
            band[layout.skip + n + np.arange(taps) * view.c, n] = w[0, r]
        np.testing.assert_allclose(dense, np.ldexp(band, exponent), rtol=4 * 2.0**-24)


def test_weights_in_two_parts() -> None:
    """They keep 23 bits and their sum, and whole numbers of 11 bits have one part."""
    weights = FilterProblem.parse("filter gaussian sigma5 h9 w9 u8").weights()[:41]
    large, small, exponent = in_two_parts(weights)
    both = large.astype(np.float64) + small.astype(np.float64)
    assert 2.0**13 <= np.abs(large).max() < 2.0**14
    np.testing.assert_allclose(both, np.ldexp(weights, exponent), rtol=5 * 2.0**-24)
    assert abs(both.sum() / np.ldexp(weights.sum(), exponent) - 1) < 2.0**-30
    assert not in_two_parts(np.array([1.0, -4, 1, 2047]))[1].any()
    large, small, _ = in_two_parts(np.array([np.inf, 1.0, np.nan]))
    assert large[0] == np.inf and np.isnan(large[2]) and small.tolist() == [0, 0, 0]
    assert not in_two_parts(np.zeros(3))[0].any()


@pytest.mark.parametrize("text", PROBLEMS)
def test_rows_of_operands_lie_in_all_banks(text: str) -> None:
    problem = FilterProblem.parse(text)
    for config in ALGORITHM.configs(problem, H200):
        layout = mma.Layout(problem, config)
        assert {layout.pitch // 8 * row % 8 for row in range(8)} == set(range(8)) and layout.pitch % 8 == 0
        assert layout.width <= layout.pitch and config.threads // 32 % (config.rows // 16) == 0
        assert layout.shared_bytes <= layout.most_bytes <= H200.shared_bytes


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        ("gaussian sigma1 h9 w9 u16", {}, "sums of bytes"),
        ("maximum size3 h9 w9 u8", {}, "sums of bytes"),
        ("gaussian sigma1 h9 w9 u8 to:f64", {}, "adds up in float32"),
        ("gaussian sigma1 h9 w9 u8", {"double": True}, "adds up in float32"),
        ("correlate d5 h9 w8 t3 r3 s3 u8", {}, "two axes"),
        ("gaussian sigma1 h9 w9 c5 u8", {}, "channels"),
        ("correlate h9 w9 r200 s200 u8", {}, "no tile"),
        ("correlate d65535 h9 w9 r2 s2 u8", {}, "on top of each other"),
        *(("box size3 h9 w9 u8 to:f32 constant", {"cval": cval}, "cval")
          for cval in (-1.0, 256.0, 0.1, 1e9, float("inf"), float("nan"))),
        ("box size3 h9 w9 i8 constant", {"cval": 128.0}, "cval"),
    ],
)  # fmt: skip
def test_refused(text: str, changes: dict[str, Any], reason: str) -> None:
    problem = FilterProblem.parse(f"filter {text}")
    assert reason in ALGORITHM.rejects(replace(problem, **changes, recipe=problem.recipe), H200)


def test_a_constant_that_no_edge_shows_may_be_anything() -> None:
    problem = replace(FilterProblem.parse("filter box size3 h9 w9 u8"), cval=float("nan"))
    assert ALGORITHM.rejects(problem, H200) is None


@pytest.mark.many
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80", "sm_100a"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_kernels_compile_without_spills(
    text: str, architecture: str, share: Callable[[Iterable[Any]], list[Any]]
) -> None:
    problem = FilterProblem.parse(text)
    configs = ALGORITHM.configs(problem, H200)
    for source in share(source for config in configs for source in ALGORITHM.sources(problem, config)):
        _, used = compile_now(source, architecture)
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{source.name}: {used}"
