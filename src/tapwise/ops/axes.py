"""Problems of arrays whose axes are all alike: a shape in C order, and the axes that are gone through."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import Any, Final

from tapwise.arguments import number_in, one_of, settle_flags, shown, whole, wholes
from tapwise.errors import InvalidProblem
from tapwise.problem import DTYPES, Problem

# Sums are kept in blocks: rounding errors grow with a block's length, not with the array's.
SUM_BLOCK: Final = 1024

# Axes that an array of NumPy's may have.
MOST_AXES: Final = 64
AXIS: Final = "None, a whole number or a tuple of them"

EXAMPLE: Final = "examples are 'softmax 64x1000 axis1 f16' and 'reduce sum 64x1000 axis1'"
_SHAPE = re.compile(r"[0-9]+(x[0-9]+)*|scalar")
_AXES = re.compile(r"axis(none|[0-9]+(?:,[0-9]+)*)?")


def normal_axes(axis: Any, axes: int) -> tuple[int, ...]:
    """Axis numbers from 0, ascending; None stands for all. InvalidProblem for one out of range or given twice."""
    if axis is None:
        return tuple(range(axes))
    result = []
    for one in axis if isinstance(axis, (tuple, list)) else (axis,):
        number = whole(one, "axis", AXIS)
        if not -axes <= number < axes:
            raise InvalidProblem(f"axis={shown(axis)}: {number} is out of range for an array of {axes} axes")
        if number % axes in result:
            raise InvalidProblem(f"axis={shown(axis)}: axis {number % axes} is given twice")
        result.append(number % axes)
    return tuple(sorted(result))


@dataclass(frozen=True)
class AxesProblem(Problem):
    """An array of `shape` in C order, and the axes that are gone through."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    _: KW_ONLY
    dtype: str = "f32"
    layout: str = "nchw"

    def _check(self) -> None:
        for field, name in (("shape", "shape"), ("axes", "axis")):
            object.__setattr__(self, field, wholes(getattr(self, field), name))
        settle_flags(self)
        if len(self.shape) > MOST_AXES:
            raise InvalidProblem(f"shape={shown(self.shape)}: at most {MOST_AXES} axes are allowed")
        if any(size < 0 for size in self.shape):
            raise InvalidProblem(f"shape={self.shape}: each size at least 0")
        if self.axes != normal_axes(self.axes, len(self.shape)):
            raise InvalidProblem(f"axis={shown(self.axes)}: ascending numbers from 0 are allowed")
        for name, allowed in (("dtype", tuple(DTYPES)), ("layout", ("nchw",))):
            one_of(getattr(self, name), name, allowed)
        self._check_extent()

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
    def collapsed(self) -> tuple[int, int, int] | None:
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

    @property
    def sizes(self) -> tuple[int, int, int]:
        """`collapsed` of axes that are neighbours."""
        assert self.collapsed is not None
        return self.collapsed


def rejects_apart(problem: AxesProblem) -> str | None:
    """The reason of algorithms for axes that are neighbours."""
    return None if problem.collapsed else f"takes axes that are neighbours, not {problem.axes} of {problem.shape}"


def shape_word(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def shape_and_axis(
    text: str, words: Sequence[str], options: dict[str, Any], flags: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape and axis of a problem string; dtype and flags go into options."""
    shape: tuple[int, ...] | None = None
    axis: tuple[int, ...] | None = None
    for word in words:
        if _SHAPE.fullmatch(word) and shape is None:
            shape = () if word == "scalar" else tuple(number_in(size, text) for size in word.split("x"))
        elif (match := _AXES.fullmatch(word)) and axis is None and match[1]:
            axis = () if match[1] == "none" else tuple(number_in(one, text) for one in match[1].split(","))
        elif word in DTYPES and "dtype" not in options:
            options["dtype"] = word
        elif word in flags and word not in options:
            options[word] = True
        else:
            raise InvalidProblem(f"problem {shown(text)}: word {shown(word)} is unknown, or there twice; {EXAMPLE}")
    if shape is None:
        raise InvalidProblem(f"problem {shown(text)}: no word gives the shape, such as 64x1000")
    return shape, axis
