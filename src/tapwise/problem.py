"""Problems: what is to be computed, apart from any array and any algorithm.

A problem is frozen and hashable, has one string form that names it everywhere (command line, suite files, test ids,
databases), and knows what differs between operators: shapes, floating-point operations, the bytes it must move, sample
inputs, and the result in float64 with what it may be off by.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan, prod, sqrt
from numbers import Real
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, Self

import ml_dtypes
import numpy as np

from tapwise.activation import ACTIVATIONS, LEAKY_RELU, LEAKY_SLOPE
from tapwise.arguments import LARGEST, one_of, shown
from tapwise.errors import InvalidProblem
from tapwise.forks import cached_property

Direction = Literal["fprop", "dgrad", "wgrad"]

LAYOUTS: Final = ("nchw", "nhwc")
# How a leaky_relu's slope is written.
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")
_LARGEST_SLOPE: Final = float(np.finfo(np.float32).max)
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
# Whole numbers of either sign up to this are what inputs are made of where results are to be exact.
LARGEST_INTEGER: Final = 3
# Random numbers at most, a prime: an index that is off does not find its own number again.
_DRAWN: Final = 8_388_593


def sum_factor(terms: int) -> float:
    """c in the bound c * u * (sum of absolute terms) of a sum in any order: errors add up like a random walk."""
    return 8.0 + 2.0 * sqrt(terms)


def activation_word(value: Any) -> str | None:
    """The word of an activation: its name, with a leaky_relu's slope behind it where that is not 0.01.

    `value`: None, a name, a word, or ("leaky_relu", slope). Raises InvalidProblem for anything else, and for a slope
    that no float32 holds.
    """
    if value is None or (isinstance(value, str) and value in ACTIVATIONS):
        return value
    slope: Any = None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and value[0] == LEAKY_RELU:
        slope = value[1]
    elif isinstance(value, str) and value.startswith(LEAKY_RELU) and _NUMBER.fullmatch(value, len(LEAKY_RELU)):
        slope = float(value[len(LEAKY_RELU) :])
    else:
        one_of(value, "activation", (None, *ACTIVATIONS))
    try:
        number = float(slope) if isinstance(slope, Real) and not isinstance(slope, bool) else nan
    except OverflowError:
        number = inf
    if not abs(number) <= _LARGEST_SLOPE:
        raise InvalidProblem(f"activation={shown(value)}: a leaky_relu's slope is a number that float32 holds")
    # Without a sign where it is zero.
    number += 0.0
    return LEAKY_RELU + ("" if number == LEAKY_SLOPE else repr(number).removesuffix(".0"))


class Inputs(NamedTuple):
    """What an operator is given: x, and w, bias and residual where it has them. `integers`: all are small ones."""

    x: Any
    w: Any = None
    bias: Any = None
    residual: Any = None
    integers: bool = False


class Second(NamedTuple):
    """A second result; dense in the problem's layout."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Accuracy(Protocol):
    """What a bound depends on besides the problem: see `Algorithm`."""

    exact: ClassVar[bool]

    def error_factor(self, problem: Any) -> float: ...

    def magnitude(self, problem: Any, x: np.ndarray, w: np.ndarray) -> np.ndarray: ...


class Problem:
    """What every problem has: frozen, hashable, named by its string.

    `operator` is its key in the registry, `layout` the memory order of its arrays. flops and bytes are those of the
    definition, every operand moved once.
    """

    dtype: str
    layout: str
    # Of operators that know but one.
    direction: Direction = "fprop"
    math: str = "ieee"

    @property
    def operator(self) -> str:
        raise NotImplementedError

    @property
    def x_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def w_shape(self) -> tuple[int, ...]:
        """Of the filters; () where an operator has none."""
        return ()

    @property
    def y_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Of what is computed: y, or the gradient that the direction names."""
        return self.y_shape

    @property
    def x_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @property
    def y_dtype(self) -> np.dtype[Any]:
        return self.x_dtype

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element of x."""
        return self.x_dtype.itemsize

    @property
    def accumulator(self) -> str:
        """The dtype that sums are computed in."""
        return "f64" if self.dtype == "f64" else "f32"

    @property
    def widened(self) -> bool:
        """Whether sums are computed in a wider dtype than that of the arrays."""
        return self.dtype != self.accumulator

    @property
    def accumulator_bytes(self) -> int:
        return 8 if self.accumulator == "f64" else 4

    @property
    def roundoff(self) -> float:
        """Half a unit in the last place of 1.0 in the accumulator."""
        return 2.0**-53 if self.accumulator == "f64" else 2.0**-24

    @property
    def flops(self) -> int:
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Bytes that must move when every operand moves once."""
        return self.itemsize * (prod(self.x_shape) + prod(self.y_shape))

    @property
    def empty(self) -> bool:
        """No element of the result at all."""
        return prod(self.result_shape) == 0

    @property
    def trivial(self) -> bool:
        """No element of the result, or nothing that goes into one."""
        return self.empty

    @property
    def spatial_axes(self) -> int:
        """Spatial axes; 0 where axes are all alike."""
        return 0

    @property
    def exact_on_integers(self) -> bool:
        """Whether direct sums of inputs up to LARGEST_INTEGER are exact, and rounded once to the output's dtype."""
        return False

    @property
    def second(self) -> Second | None:
        """What plans write besides, as a pair (result, second); None where they write one array."""
        return None

    @property
    def w_is_image(self) -> bool:
        """Whether w lies in the problem's memory order, as x does; plans take it as it is."""
        return False

    def random_positions(self, rng: np.random.Generator) -> np.ndarray | None:
        """What w is where it is positions, and no array of x's dtype."""
        return None

    def second_reference(self, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """As `reference`, of the second result."""
        raise NotImplementedError

    def canonical(self, axes: int = 2) -> Self:
        """The same problem in the form that algorithms take, with so many spatial axes; itself where it has that."""
        return self

    def bare(self) -> Self:
        """Without what is fused behind it."""
        return self

    def sample(self, rng: np.random.Generator, integers: bool = False) -> Inputs:
        """Random inputs in C order: normal ones, or whole numbers from -LARGEST_INTEGER to LARGEST_INTEGER."""
        return self.inputs(lambda shape: self.random(rng, shape, integers))._replace(integers=integers)

    def inputs(self, array: Callable[[tuple[int, ...]], Any]) -> Inputs:
        """Inputs made by a function that gives an array of x's dtype for a shape."""
        return Inputs(array(self.x_shape))

    def random(self, rng: np.random.Generator, shape: tuple[int, ...], integers: bool = False) -> np.ndarray:
        """Random data of x's dtype."""
        if integers:
            return rng.integers(-LARGEST_INTEGER, LARGEST_INTEGER + 1, shape).astype(self.x_dtype)
        # Many numbers are some drawn again and again: drawing takes longer than all that is done with them.
        drawn = shape if prod(shape) <= _DRAWN else _DRAWN
        return np.resize(rng.standard_normal(drawn, dtype=np.float32).astype(self.x_dtype, copy=False), shape)

    def reference(
        self, inputs: Inputs, /, accuracy: Accuracy | None = None, sums: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(y64, bound): the exact result in float64, and what each element may be off by.

        `accuracy`: the algorithm that computed it, where bounds differ; by default the plain sum. `sums`: the sums and
        those of absolute values in float64, where they have been worked out before.
        """
        raise NotImplementedError

    def rounding(self, y: np.ndarray) -> np.ndarray:
        """What rounding exact values to the output's dtype may be off by."""
        kind = ml_dtypes.finfo(self.y_dtype)  # type: ignore[no-untyped-call]
        # The instruction of AVX-512 that rounds to bfloat16 makes zeros of subnormal numbers.
        least = kind.smallest_normal if self.dtype == "bf16" else kind.smallest_subnormal
        return np.asarray(float(kind.eps) / 2 * np.abs(y) + float(least))

    def _check_extent(self) -> None:
        """Raises InvalidProblem where an array is larger than any memory."""
        for name, shape in (("x", self.x_shape), ("w", self.w_shape), ("y", self.y_shape)):
            # NumPy counts an axis of no element as one.
            if 8 * prod(shape or (1,)) > LARGEST or (0 in shape and 8 * prod(size or 1 for size in shape) > LARGEST):
                raise InvalidProblem(
                    f"{name} has shape {shown(shape)}: sizes whose product is below 2^60 are allowed{self._shaped_by}"
                )

    @property
    def _shaped_by(self) -> str:
        """What else than x gives the result its shape, in words."""
        return ""

    def replace(self, **changes: object) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]
