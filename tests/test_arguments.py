"""Bad arguments of every public function: an error that names the argument, in one line and at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tapwise
from argument_cases import CALLS, FILTERS, IMAGE, MATRIX, NAMES, PLANE, PROBLEMS, Hostile, Shapeless
from tapwise import arguments
from tapwise.cpu.device import host
from tapwise.errors import InvalidProblem, TapwiseError
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.filter.problem import FilterProblem
from tapwise.ops.patches.problem import Col2imProblem, Im2colProblem
from tapwise.ops.pool.problem import PoolProblem
from tapwise.ops.reduce.problem import ReduceProblem
from tapwise.ops.softmax.problem import SoftmaxProblem
from tapwise.registry import parse

# What an argument is called in an error.
CALLED = {
    "kernel_size": "kernel",
    "divisor": "divisor_override",
    "axes": "axis",
    "modes": "mode",
    "spatial": "",
    "n": "",
    "c": "",
    "k": "",
}


def rows() -> Iterator[Any]:
    for function, (_, _, bad) in CALLS.items():
        yield from (pytest.param(function, name, id=f"{function}-{name}") for name in bad)


def check(call: Callable[[], object], name: str, value: Any) -> None:
    start = time.perf_counter()
    try:
        call()
    except TapwiseError as error:
        message = str(error)
    except Exception as error:
        pytest.fail(f"{name}={arguments.shown(value)}: {type(error).__name__}: {str(error)[:200]}")
    else:
        pytest.fail(f"{name}={arguments.shown(value)}: no error")
    assert time.perf_counter() - start < 1.0, f"{name}={arguments.shown(value)} took long"
    assert CALLED.get(name, name) in message, f"{arguments.shown(value)}: {message}"
    assert "\n" not in message
    assert len(message) < 600, message


@pytest.mark.parametrize(("function", "name"), list(rows()))
def test_a_bad_argument_is_named(function: str, name: str) -> None:
    call, good, bad = CALLS[function]
    call(**good)
    for value in bad[name]:
        check(lambda value=value: call(**{**good, name: value}), name, value)  # type: ignore[misc]


def test_numbers_of_any_kind_are_numbers() -> None:
    """What is refused is no number: NumPy's whole numbers, lists and one-element tuples are."""
    wanted = tapwise.conv2d(IMAGE, FILTERS, stride=2, padding=1, groups=1)
    for two, one in ((np.int64(2), np.uint8(1)), ([2, 2], [1, 1]), ((2,), (1,)), ((np.int32(2), 2), ((1, 1), [1, 1]))):
        np.testing.assert_array_equal(tapwise.conv2d(IMAGE, FILTERS, stride=two, padding=one), wanted)
    assert tapwise.max_pool2d(IMAGE, 2, ceil_mode=np.True_).shape == (2, 4, 3, 3)
    assert tapwise.reduce(PLANE, "sum", np.int64(-1), keepdims=1).shape == (5, 1)
    assert tapwise.avg_pool2d(IMAGE, 1, stride=2**31 - 1).shape == (2, 4, 1, 1)
    problem = ConvProblem.parse("c4 h6 w6 k4 r3 s3")
    same = problem.replace(n=np.int64(1), spatial=[6, np.int32(6)], stride=[np.uint8(1), 1], padding=[[0, 0], (0, 0)])
    assert same == problem and hash(same) == hash(problem) and str(same) == str(problem)
    assert host(np.int64(2)) == host(2)


@pytest.mark.parametrize("text", PROBLEMS)
def test_a_bad_field_is_named(text: str) -> None:
    problem = parse(text)
    for name, values in PROBLEMS[text].items():
        for value in values:
            check(lambda name=name, value=value: problem.replace(**{name: value}), name, value)  # type: ignore[misc]


@pytest.mark.parametrize(
    "kind", [ConvProblem, PoolProblem, Im2colProblem, Col2imProblem, SoftmaxProblem, ReduceProblem, FilterProblem]
)
def test_a_bad_string_is_refused(kind: Any) -> None:
    texts = [
        *NAMES, "\0", "c", "conv", "reduce", "softmax", "maxpool",
        *[
            text.replace("6", digits).replace("7", digits)
            for text in PROBLEMS
            for digits in ("9" * 5000, "\u00b2", "\u0663", "1" * 19, "6:", ":", "-6", "6.0", "1e3", "x", "6x")
        ],
        *[
            f"{text} {word}"
            for text in PROBLEMS
            for word in ("axis" + "9" * 5000, "stride" + "9" * 5000, "pad\u00b2", "a" * 10**6)
        ],
    ]  # fmt: skip
    for text in texts:
        check(lambda text=text: kind.parse(text), "", text)  # type: ignore[misc]
        check(lambda text=text: parse(text), "", text)  # type: ignore[misc]


def test_sizes_beyond_any_memory_are_refused() -> None:
    for text in (
        "c4000000000 h4000000000 w6 k4 r3 s3", "n0 c4000000000 h4000000000 w6 k4 r3 s3",
        "c6 h6 w6 k9000000000000000000 r3 s3",
        "c1 h4 w4 k1 r1 s1 pad2147483647", "softmax 4000000000x4000000000", "softmax 0x4000000000x4000000000",
        "im2col c4 h1000000000 w1000000000 r9 s9",
    ):  # fmt: skip
        with pytest.raises(InvalidProblem, match=r"has shape .*: sizes whose product is below 2\^60 are allowed"):
            parse(text)
    with pytest.raises(InvalidProblem, match="padding="):
        tapwise.conv2d(IMAGE, FILTERS, padding=2**31 - 1)
    assert parse("maxpool c1 w68719476736 s68719476736").y_shape == (1, 1, 1)


class Odd:
    """An array of a library that fails in its own ways."""

    def __init__(self, place: Any, error: type[Exception]) -> None:
        self.place, self.error = place, error

    def __dlpack_device__(self) -> Any:
        return self.place

    def __dlpack__(self, **_: Any) -> Any:
        raise self.error("no memory")


@pytest.mark.parametrize("error", [KeyError, AssertionError, TypeError, BufferError])
@pytest.mark.parametrize("place", [7, None, (1, 0), (2, 0), ("x",)])
def test_what_another_library_raises_is_told_of(place: Any, error: type[Exception]) -> None:
    for call, name in (
        (lambda odd: tapwise.softmax(odd), "x"),
        (lambda odd: tapwise.conv2d(IMAGE, odd), "w"),
        (lambda odd: tapwise.softmax(PLANE, out=odd), "out"),
    ):
        check(lambda call=call: call(Odd(place, error)), name, Hostile())  # type: ignore[misc]


def test_a_value_in_an_error_is_one_short_line() -> None:
    assert arguments.shown(np.zeros((3, 4))) == "an array of shape (3, 4)"
    assert arguments.shown("two\nlines") == r"'two\nlines'"
    assert arguments.shown(10**5000) == "a int"
    assert arguments.shown(Hostile()) == "a Hostile"
    assert arguments.shown(Shapeless()) == "a Shapeless"
    assert len(arguments.shown("x" * 10**6)) < 110
    assert arguments.shown([MATRIX] * 9).count("\n") == 0
