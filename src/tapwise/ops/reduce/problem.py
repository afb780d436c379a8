"""Problems of reduce and softmax: what is summed up, over which axes of which shape."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any, ClassVar, Final, Self

from tapwise.errors import InvalidProblem
from tapwise.problem import ITEMSIZE, Problem

REDUCTIONS: Final = (
    "sum", "mean", "max", "min", "prod", "argmax", "argmin", "norm1", "norm2", "sumsquare", "logsumexp",
)  # fmt: skip
# Nothing to choose from gives no result.
NEED_ELEMENTS: Final = ("max", "min", "argmax", "argmin")
POSITIONS: Final = ("argmax", "argmin")

_SHAPE = re.compile(r"\d+(x\d+)*|scalar")
_AXES = re.compile(r"axis(none|\d+(?:,\d+)*)?")


def normal_axes(axis: Any, axes: int) -> tuple[int, ...]:
    """Axis numbers from 0, ascending; None stands for all. InvalidProblem for one out of range or given twice."""
    if axis is None:
        return tuple(range(axes))
    result = []
    for one in axis if isinstance(axis, (tuple, list)) else (axis,):
        try:
            number = index(one)
        except TypeError:
            raise InvalidProblem(f"axis={axis!r}: None, a whole number or a tuple of them is allowed") from None
        if not -axes <= number < axes:
            raise InvalidProblem(f"axis={axis!r}: {number} is out of range for an array of {axes} axes")
        if number % axes in result:
            raise InvalidProblem(f"axis={axis!r}: axis {number % axes} is given twice")
        result.append(number % axes)
    return tuple(sorted(result))


@dataclass(frozen=True)
class _Reduction(Problem):
    """Shared by both: an array of `shape` in C order, and the axes that are gone through."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def _check(self) -> None:
        if any(size < 0 for size in self.shape):
            raise InvalidProblem(f"shape={self.shape}: each size at least 0")
        if self.axes != normal_axes(self.axes, len(self.shape)):
            raise InvalidProblem(f"axis={self.axes}: ascending numbers from 0 are allowed")
        if self.dtype not in ITEMSIZE:
            raise InvalidProblem(f"dtype={self.dtype!r}: one of {', '.join(ITEMSIZE)}")

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def length(self) -> int:
        """Elements that go into one result."""
        return prod(self.shape[axis] for axis in self.axes)

    @property
    def trivial(self) -> bool:
        return self.empty or self.length == 0

    @property
    def folded(self) -> tuple[int, int, int] | None:
        """(outer, length, inner) of the same problem with three axes; None where the axes are not neighbours.

        Axes of one element do not count.
        """
        real = [axis for axis in self.axes if self.shape[axis] != 1]
        if not real:
            return prod(self.shape), 1, 1
        between = [axis for axis in range(real[0], real[-1] + 1) if axis not in real and self.shape[axis] != 1]
        if between:
            return None
        return prod(self.shape[: real[0]]), self.length, prod(self.shape[real[-1] + 1 :])


def rejects_apart(problem: _Reduction) -> str | None:
    """The reason of algorithms for axes that are neighbours."""
    return None if problem.folded else f"takes axes that are neighbours, not {problem.axes} of {problem.shape}"


@dataclass(frozen=True)
class ReduceProblem(_Reduction):
    """op over axes of an array: one of REDUCTIONS. Results of argmax and argmin are positions along one axis, or in the
    flattened array when the axes are all, as int64; other results have x's dtype.

    Raises InvalidProblem for an unknown op, a bad axis, a position along several axes that are not all, and the largest
    or smallest of nothing.
    """

    operator: ClassVar[str] = "reduce"

    op: str = "sum"
    keepdims: bool = False
    dtype: str = "f32"
    layout: str = "nchw"

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            raise InvalidProblem(f"op={self.op!r}: one of {', '.join(REDUCTIONS)}")
        self._check()
        if self.op in POSITIONS and len(self.axes) not in (1, len(self.shape)):
            raise InvalidProblem(f"axis={self.axes}: {self.op} goes along one axis, or along all of them")
        if self.op in NEED_ELEMENTS and self.length == 0:
            raise InvalidProblem(f"axis={self.axes} of shape {self.shape}: {self.op} of no element")

    @property
    def y_shape(self) -> tuple[int, ...]:
        if self.keepdims:
            return tuple(1 if axis in self.axes else size for axis, size in enumerate(self.shape))
        return tuple(size for axis, size in enumerate(self.shape) if axis not in self.axes)

    @property
    def flops(self) -> int:
        return prod(self.shape)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names: "reduce sum 64x1000 axis1 keepdims f16"; without an axis all are meant."""
        words = text.split()
        if words[:1] != ["reduce"] or len(words) < 3:
            raise InvalidProblem(f"problem {text!r}: an example is 'reduce sum 64x1000 axis1'")
        options: dict[str, Any] = {"op": words[1]}
        shape, axis = _shape_and_axis(text, words[2:], options, ("keepdims",))
        return cls(shape, normal_axes(axis, len(shape)), **options)

    def __str__(self) -> str:
        words = ["reduce", self.op, _shape_word(self.shape)]
        if self.axes != tuple(range(len(self.shape))):
            words.append("axis" + (",".join(map(str, self.axes)) or "none"))
        words += ["keepdims"] if self.keepdims else []
        return " ".join(words + ([self.dtype] if self.dtype != "f32" else []))


@dataclass(frozen=True)
class SoftmaxProblem(_Reduction):
    """e^x over its sum along one axis, shifted by the largest element; or the logarithm of that."""

    operator: ClassVar[str] = "softmax"

    log: bool = False
    dtype: str = "f32"
    layout: str = "nchw"

    def __post_init__(self) -> None:
        self._check()
        if len(self.axes) != 1 and self.shape:
            raise InvalidProblem(f"axis={self.axes}: one axis is allowed")

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def flops(self) -> int:
        return 4 * prod(self.shape)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names: "softmax 1024x1000 axis1" or "log_softmax ..."; the last axis by default."""
        words = text.split()
        if words[:1] not in (["softmax"], ["log_softmax"]) or len(words) < 2:
            raise InvalidProblem(f"problem {text!r}: an example is 'softmax 1024x1000 axis1'")
        options: dict[str, Any] = {"log": words[0] == "log_softmax"}
        shape, axis = _shape_and_axis(text, words[1:], options, ())
        return cls(shape, normal_axes(-1 if axis is None else axis, len(shape)) if shape else (), **options)

    def __str__(self) -> str:
        words = ["log_softmax" if self.log else "softmax", _shape_word(self.shape)]
        if self.axes not in ((len(self.shape) - 1,), ()):
            words.append(f"axis{self.axes[0]}")
        return " ".join(words + ([self.dtype] if self.dtype != "f32" else []))


def _shape_word(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _shape_and_axis(
    text: str, words: Sequence[str], options: dict[str, Any], flags: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape and axis of a problem string; dtype and flags go into options."""
    shape: tuple[int, ...] | None = None
    axis: tuple[int, ...] | None = None
    for word in words:
        if _SHAPE.fullmatch(word) and shape is None:
            shape = () if word == "scalar" else tuple(map(int, word.split("x")))
        elif (match := _AXES.fullmatch(word)) and axis is None and match[1]:
            axis = () if match[1] == "none" else tuple(map(int, match[1].split(",")))
        elif word in ITEMSIZE and "dtype" not in options:
            options["dtype"] = word
        elif word in flags and word not in options:
            options[word] = True
        else:
            raise InvalidProblem(f"problem {text!r}: word {word!r} is not known, or stands there twice")
    if shape is None:
        raise InvalidProblem(f"problem {text!r}: no word gives the shape, such as 64x1000")
    return shape, axis
