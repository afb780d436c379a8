"""Filters on pictures: every algorithm against float64, the kernel's code, the tiles, the record of taps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tapwise import image, registry, verify
from tapwise.algorithm import Buffers
from tapwise.cpu import jit
from tapwise.cpu.device import host
from tapwise.cpu.simd import target
from tapwise.errors import InvalidProblem
from tapwise.ops.filter.cpu import kernel, taps
from tapwise.ops.filter.cpu.layout import Layout
from tapwise.ops.filter.cpu.tiles import TILE_BYTES, Tiles
from tapwise.ops.filter.edges import MODES, source_index
from tapwise.ops.filter.problem import FilterProblem

IDENTIFIERS = [name for name in registry.ALGORITHMS["filter"] if name.startswith("cpu.")]
PROBLEMS = [
    "filter gaussian sigma1 h99 w77",
    "filter gaussian sigma5 h130 w61 c3 u8 wrap",
    "filter gaussian sigma2 h20 w20 c4 to:u8",
    "filter box size15 h50 w60 c3 u8",
    "filter box size4 h33 w1100 i8 constant",
    "filter sobel h50 w33 u8 to:i16 constant",
    "filter laplace h30 w3 i16 to:i32",
    "filter correlate h99 w77 c3 r7 s5 mirror",
    "filter correlate d5 h9 w8 t3 r3 s3 f64 constant",
    "filter correlate h1 w1000 s31 u16",
    "filter correlate h700 w9 r8 to:f64 nearest",
    "filter correlate h5 w5 r9 s11 f16 wrap",
    "filter maximum size5 h99 w77 u8",
    "filter maximum size4 h31 w50 c2 i64 constant",
    "filter minimum size15 h9 w7 nearest",
    "filter minimum size2 h3 w300 f64 mirror",
]
NAMES = {
    "reflect": "symmetric",
    "mirror": "reflect",
    "nearest": "edge",
    "wrap": "wrap",
    "constant": "constant",
}


@pytest.mark.many
@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_against_float64(identifier: str, text: str) -> None:
    verdict = verify.check(registry.parse(text), identifier)
    assert verdict, verdict.message


@pytest.mark.parametrize("text", PROBLEMS)
def test_strings_are_canonical(text: str) -> None:
    assert str(registry.parse(text)) == text


@pytest.mark.parametrize("words", ["", "gauss h9 w9", "gaussian h9 w9", "box h9 w9", "sobel h9", "sobel h9 w9 h9",
                                   "box size1.5 h9 w9", "maximum size0 h9 w9"])  # fmt: skip
def test_bad_strings(words: str) -> None:
    with pytest.raises(InvalidProblem):
        registry.parse(f"filter {words}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_sources_beyond_the_edges(mode: str, length: int) -> None:
    """As numpy.pad has them, which pads several times over."""
    row = np.arange(length)
    expected = np.pad(row, 13, NAMES[mode], **({"constant_values": -1} if mode == "constant" else {}))  # type: ignore[call-overload]
    np.testing.assert_array_equal(source_index(np.arange(-13, length + 13), length, mode), expected)


@pytest.mark.parametrize("kinds", [("u8", "i32"), ("f32", "u16"), ("i32", "i32")])
@pytest.mark.parametrize("symmetry", [1, -1, 0])
def test_sums_in_order_are_the_same_bits_by_every_algorithm(symmetry: int, kinds: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    row, column = rng.standard_normal(7), rng.standard_normal(4)
    row[4:] = symmetry * row[2::-1] if symmetry else row[4:]
    problem = FilterProblem(
        "separable", (2, 33, 70), (1, 4, 7), (0, 2, 3), 3, dtype=kinds[0], to=kinds[1], ordered=True
    )
    x = problem.random(rng, problem.x_shape)
    results = []
    for identifier in IDENTIFIERS:
        algorithm: Any = registry.get(identifier, "filter")
        plan = algorithm.plan(problem, algorithm.configs(problem, host())[0], host())
        y = np.empty(problem.y_shape, problem.y_dtype)
        memory = np.empty(plan.workspace_bytes, np.uint8)
        plan.run(Buffers(x, plan.pack(np.concatenate([column, row])), y, memory))
        results.append(y)
    assert len(results) > 1
    for y in results[1:]:
        np.testing.assert_array_equal(y, results[0])


@pytest.mark.many
@pytest.mark.parametrize("name", ["avx512", "avx2", "neon"])
@pytest.mark.parametrize(
    "kinds", [("f32", "u8", "u8"), ("f64", "u64", "u64"), ("f32", "f32", "f32"), ("f64", "i32", "f64")]
)
def test_sums_are_vectors_without_spills(name: str, kinds: tuple[str, str, str]) -> None:
    dtype, source, to = kinds
    code = jit.assembly(
        kernel.generate(target(name), dtype=dtype, source=source, to=to, op="sum", truncate=to[0] in "iu")
    )
    lines = [line.split("//")[0] for line in code.splitlines()]
    kind = {"f32": "ps", "f64": "pd"}[dtype]
    sums = [n for n, line in enumerate(lines) if "fmla" in line or f"vfmadd231{kind}" in line]
    assert len(sums) >= 24
    # The loop over the taps: nothing goes to the stack between its eight sums.
    for first, last in zip(sums, sums[7:], strict=False):
        if last - first < 16:
            moves = [line for line in lines[first:last] if not line.strip().startswith(("movq", "ldr\tx"))]
            assert not any("(%rsp)" in line or "[sp" in line for line in moves)


@pytest.mark.parametrize(
    ("op", "dtype", "instruction"),
    [
        ("max", "u8", "vpmaxub"),
        ("min", "i16", "vpminsw"),
        ("max", "f32", "vmaxps"),
    ],
)
def test_largest_compares_in_the_own_dtype(op: str, dtype: str, instruction: str) -> None:
    largest = kernel.generate(target("avx2"), dtype=dtype, source=dtype, to=dtype, op=op, truncate=False)
    assert instruction in jit.assembly(largest) or dtype == "f32"


def test_tiles_cover_the_picture_and_fit() -> None:
    for text in [*PROBLEMS, "filter gaussian sigma40 h9000 w9000 c3", "filter correlate h3 w100000 s301"]:
        one = registry.parse(text)
        assert isinstance(one, FilterProblem)
        algorithm, device = Tiles(), host()
        assert algorithm.refusal(one, device) is None
        (config,) = algorithm.configs(one, device)
        _, height, width = one.spatial
        assert 1 <= config.band <= height
        assert config.cols <= max(width * one.c, 1)
        limit = TILE_BYTES * (64 if "sigma40" in text else 1) + (128 << 10)
        assert algorithm.workspace_bytes(one, config, device) <= device.threads * limit
    wide = registry.parse("filter correlate h9 w9 r10000 s10000")
    assert "windows" in (Tiles().refusal(wide, host()) or "")


@pytest.mark.parametrize(
    ("text", "lists", "height"),
    [
        ("filter gaussian sigma1 h99 w77", (9, 9, 1, 0), 9),
        ("filter box size15 h99 w77 c3", (15, 3 + 3, 1, 4), 15),
        ("filter sobel h99 w77", (6, 0, 0, 0), 0),
        ("filter laplace h99 w77", (5, 0, 0, 0), 0),
        ("filter correlate h99 w77 r5 s7 f64", (35, 0, 7, 0), 5),
    ],
)
def test_a_record_has_taps_where_its_head_says(text: str, lists: tuple[int, ...], height: int) -> None:
    """Followed as the kernel does, from its only list or by way of column sums and groups, it gives a pixel's sum."""
    problem, device = registry.parse(text), host(1)
    assert isinstance(problem, FilterProblem)
    (config,) = Tiles().configs(problem, device)
    weights, layout = problem.weights(), Layout(problem, config)
    record = Tiles().plan(problem, config, device).pack(weights)
    head = taps.head_of("f64" if problem.dtype == "f64" else "f32")
    words = head.itemsize // 8
    found = record[:words].view(head)[0]
    counts = [int(found[name]) for name in taps.LISTS]
    assert tuple(counts) == lists and found["column_height"] == height
    places = np.split(record[words : words + sum(counts)], np.cumsum(counts)[:-1])
    counts[2] *= height
    values = record[words + sum(lists) :].view(head["column_epsilon"])[: sum(counts)]
    first, second, columns, groups = np.split(values.astype(np.float64), np.cumsum(counts)[:-1])

    tile = np.random.default_rng(0).standard_normal(layout.elements)
    pixel = 3

    def summed(x: np.ndarray, at: np.ndarray, w: np.ndarray, start: int) -> float:
        return float((x[start + at] * w).sum())

    if len(second):
        across = np.arange(problem.size[2] * problem.c + pixel)
        scratch = np.zeros(2 * layout.group_sums)
        scratch[across] = [summed(tile, places[0], first, i) for i in across]
        if len(groups):
            scratch[layout.group_sums + across] = [summed(scratch, places[3], groups, i) for i in across]
        result = summed(scratch, places[1], second, pixel)
    else:
        result = summed(tile, places[0], first, pixel)
    _, r, s = problem.size
    window = weights[0] if problem.op == "dense" else np.outer(weights[:r], weights[r:])
    i, j = np.indices((r, s))
    assert result == pytest.approx((tile[i * layout.pitch + j * problem.c + pixel] * window).sum(), rel=1e-5)
    np.testing.assert_array_equal(columns, first[: len(columns)])


def test_a_small_weight_does_not_carry_the_rounding_of_a_large_one() -> None:
    """Sums of weights are kept, but an element a thousand times as large as its neighbour sees its own weight."""
    x = np.zeros((1, 8), np.float32)
    x[0, 4], x[0, 5] = 623, 2
    weights = np.array([0.00254442, -0.71407989])
    exact = 623 * weights[0] + 2 * weights[1]
    size = 623 * abs(weights[0]) + 2 * abs(weights[1])
    assert abs(float(image.correlate1d(x, weights)[0, 5]) - exact) <= 4 * 2.0**-24 * size
