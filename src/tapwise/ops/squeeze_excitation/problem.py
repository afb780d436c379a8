"""Problems of squeeze-and-excitation: channels of an image scaled by a gate that is worked out from their means."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final, Self

import numpy as np

from tapwise.activation import ACTIVATIONS
from tapwise.arguments import number_in, one_of, shown, whole, words_of
from tapwise.errors import InvalidProblem
from tapwise.ops.squeeze_excitation import reference
from tapwise.problem import DTYPES, LAYOUTS, Inputs, Problem, sum_factor

GATES: Final = ("sigmoid", "hardsigmoid")
# Those without a parameter that are no gates.
BETWEEN: Final = tuple(word for word in ACTIVATIONS if word not in (*GATES, "leaky_relu"))
SIZES: Final = "nchwm"
NAME: Final = "squeeze_excitation"
EXAMPLE: Final = f"{NAME} n32 c96 h56 w56 m4 silu sigmoid f16 nhwc"

_SIZE: Final = re.compile(rf"([{SIZES}])([0-9]+)")
# What the derivatives of activations are below, and what rounding in one is below, in units of roundoff.
_STEEPEST: Final = 1.5
_FUNCTION: Final = 16.0


def _settled(error: np.ndarray) -> np.ndarray:
    """Functions that make an infinity finite make it exact."""
    return np.asarray(np.where(np.isfinite(error), error, 0.0))


@dataclass(frozen=True, kw_only=True)
class SqueezeExcitationProblem(Problem):
    """y = x * gate(expand @ activation(reduce @ mean(x) + bias) + bias), the mean over h and w of each channel.

    x and y (n, c, h, w). w (2, m, c): the filters that bring c means to m values, and, transposed, those that bring m
    values to c gates; bias (m + c,) in that order. Raises InvalidProblem for sizes and words out of range.
    """

    operator: ClassVar[str] = NAME
    # Fused into it, always.
    bias: ClassVar[bool] = True

    n: int
    c: int
    h: int
    w: int
    m: int
    activation: str = "relu"
    gate: str = "sigmoid"
    dtype: str = "f32"
    layout: str = "nchw"

    def __post_init__(self) -> None:
        for name in SIZES:
            least = 1 if name in "cm" else 0
            size = whole(getattr(self, name), name)
            if size < least:
                raise InvalidProblem(f"{name}={size}: at least {least} is allowed")
            object.__setattr__(self, name, size)
        one_of(self.activation, "activation", BETWEEN)
        one_of(self.gate, "gate", GATES)
        one_of(self.dtype, "dtype", tuple(DTYPES))
        one_of(self.layout, "layout", LAYOUTS)
        self._check_extent()

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, self.h, self.w)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.x_shape

    @property
    def w_shape(self) -> tuple[int, ...]:
        return (2, self.m, self.c)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return (self.m + self.c,)

    @property
    def _shaped_by(self) -> str:
        return f"; m={self.m}"

    @property
    def pixels(self) -> int:
        return self.h * self.w

    @property
    def spatial_axes(self) -> int:
        return 2

    @property
    def flops(self) -> int:
        return self.n * self.c * (2 * self.pixels + 4 * self.m)

    @property
    def bytes(self) -> int:
        """x is read, y is written, and so are the filters read once."""
        return super().bytes + self.itemsize * (prod(self.w_shape) + prod(self.bias_shape))

    def inputs(self, array: Callable[[tuple[int, ...]], Any]) -> Inputs:
        return Inputs(array(self.x_shape), array(self.w_shape), array(self.bias_shape))

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        """Errors of the means go through both products and both functions, whose slopes are at most 1.5."""
        with np.errstate(all="ignore"):
            found = reference.squeeze_excitation(inputs.x, inputs.w, inputs.bias, self.activation, self.gate)
            x = np.abs(inputs.x.astype(np.float64))
            reduce, expand = np.abs(inputs.w.astype(np.float64))
            bias = np.abs(inputs.bias.astype(np.float64))
            u = self.roundoff
            means = u * sum_factor(self.pixels) * x.mean(axis=(2, 3))
            terms = np.abs(found.means) @ reduce.T + bias[: self.m]
            squeezed = _settled(_STEEPEST * (means @ reduce.T + u * sum_factor(self.c) * terms))
            squeezed = squeezed + u * _FUNCTION * np.abs(found.squeezed)
            terms = np.abs(found.squeezed) @ expand + bias[self.m :]
            gates = _settled(_STEEPEST * (squeezed @ expand + u * sum_factor(self.m) * terms)) + u * _FUNCTION
            return found.y, x * (gates + u)[:, :, None, None] + self.rounding(found.y)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names: "squeeze_excitation n32 c96 h56 w56 m4 silu sigmoid f16 nhwc"; without a
        word n is 1, the activation relu, the gate sigmoid, the dtype f32, the layout nchw."""
        first, *words = words_of(text) or [""]
        fields: dict[str, Any] = {"n": 1}
        for word in words:
            size = _SIZE.fullmatch(word)
            kinds = {"activation": BETWEEN, "gate": GATES, "dtype": tuple(DTYPES), "layout": LAYOUTS}
            name = size[1] if size else next((kind for kind, known in kinds.items() if word in known), "")
            if not name or (name in fields and name != "n"):
                raise InvalidProblem(f"problem {shown(text)}: {shown(word)} has no place; an example is '{EXAMPLE}'")
            fields[name] = number_in(size[2], text) if size else word
        if first != NAME or not set(SIZES) <= set(fields):
            raise InvalidProblem(f"problem {shown(text)}: an example is '{EXAMPLE}'")
        return cls(**fields)

    def __str__(self) -> str:
        words = [NAME, *(f"{name}{getattr(self, name)}" for name in SIZES if name != "n" or self.n != 1)]
        words += [self.activation, self.gate]
        words += [self.dtype] if self.dtype != "f32" else []
        return " ".join(words + ([self.layout] if self.layout != "nchw" else []))
