"""Bad values for every argument of a filter: one line that names the argument, soon."""

from __future__ import annotations

from decimal import Decimal
from itertools import count
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from tapwise import image
from tapwise.errors import InvalidPicture, InvalidProblem

_X = np.ones((9, 11), np.float32)
_OTHERS: list[Any] = ["abc", "2x", b"relu", [1, [2]], len, object(), np.array(["a"])]
# function, its good options, and of an argument the values that are bad beside those of all.
_NUMBERS: list[tuple[str, dict[str, Any], str, list[Any]]] = [
    ("gaussian_filter", {}, "sigma", [None, nan, inf, -1, 2**31, 10**400, (1, 2, 3), count()]),
    ("gaussian_filter", {"sigma": 1}, "truncate", [None, np.ones(2), nan, inf, -inf, 2**40, (1, 2)]),
    ("gaussian_filter", {"sigma": 1}, "order", [None, "", nan, -1, 1.5, 2**31, 10**30]),
    ("gaussian_laplace", {"sigma": 1}, "radius", [nan, inf, -1, 1.5, 2**31, (1,)]),
    ("gaussian_filter1d", {"sigma": 1}, "axis", [2, -3, 1.5, True, 2**63, Decimal(1), (0, 1)]),
    ("gaussian_filter", {"sigma": 1}, "axes", [2, (0, 0), (0, None), 1.5, 2**63, count()]),
    ("uniform_filter", {}, "size", [None, {}, -1, nan, inf, 2.5, 2**31, 2**63, (1, 2, 3)]),
    ("maximum_filter", {}, "size", [-1, nan, 2**21]),
    ("uniform_filter", {}, "origin", [9, nan, 2**63, 0.5]),
    ("correlate", {"weights": np.ones((3, 3))}, "origin", [9, nan, 2**63, 0.5]),
    ("correlate", {}, "weights", [np.ones(3, "M8[s]"), [[1, 2], [3]], 1.0]),
    ("correlate1d", {}, "weights", [np.ones((2, 2))]),
    ("maximum_filter", {}, "footprint", [np.zeros((3, 3)), np.ones((2, 2), "M8[s]")]),
    ("sobel", {}, "channel_axis", [2, 1.5, 2**63]),
    ("sobel", {}, "mode", ["edge", 3, nan]),
    ("sobel", {}, "cval", [None, np.ones(1), 1j, 10**400, (1, 2)]),
    ("sobel", {}, "output", [{}, 1.5, "abc", "M8[s]", nan, "float16x"]),
    ("sobel", {}, "input", [np.ones((3, 3), "M8[s]"), np.ones((3, 3), [("a", "f4")]), [[1, 2], [3]]]),
]
_CASES = [(*case, value) for *case, own in _NUMBERS for value in [*own, *_OTHERS]]


@pytest.mark.parametrize(("name", "good", "argument", "value"), _CASES)
def test_bad_values_are_named(name: str, good: dict[str, Any], argument: str, value: Any) -> None:
    with pytest.raises(InvalidProblem, match=argument) as found:
        getattr(image, name)(**{"input": _X, **good, argument: value})
    text = str(found.value)
    assert "\n" not in text and len(text) < 300


def test_tensors_that_are_no_plain_memory() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(9, 9)
    for value in (
        x.to_sparse(),
        x.to("meta"),
        x.bfloat16(),
        x.to_mkldnn(),
        torch.ones(2, 2, dtype=torch.complex64).conj(),
    ):
        for argument in ("input", "weights"):
            with pytest.raises(InvalidProblem, match=argument):
                image.correlate(**{"input": _X, "weights": np.ones((3, 3)), argument: value})
        for argument in ("sigma", "truncate", "radius", "cval", "order"):
            with pytest.raises(InvalidPicture, match=argument):
                image.gaussian_filter(**{"input": _X, "sigma": 1.0, argument: value})


def test_numbers_of_other_kinds() -> None:
    want = image.uniform_filter(_X, 3)
    for size in (3.0, np.int64(3), np.array(3), [3, np.uint8(3)], range(3, 4).stop - 1):
        np.testing.assert_array_equal(image.uniform_filter(_X, size), want)
    assert image.gaussian_filter(_X, Decimal("1.5"), cval=np.float32(2)).shape == _X.shape


def test_the_largest_of_a_window_far_larger_than_the_picture() -> None:
    assert (image.maximum_filter(np.arange(12.0).reshape(3, 4), 2**17) == 11).all()
