"""Problems of batch normalisation in training: what it adds up for each channel, forward and backward."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Self

import numpy as np

from tapwise.activation import named_activation
from tapwise.arguments import number_in, one_of, shown, whole, words_of
from tapwise.errors import InvalidProblem
from tapwise.ops.batch_norm import reference
from tapwise.problem import DTYPES, LAYOUTS, Direction, Inputs, Problem, activation_word, sum_factor

SIZES: Final = "nchw"
NAME: Final = "batch_norm"
EXAMPLE: Final = f"{NAME} n32 c96 h56 w56 dgrad silu f16 nhwc"
_SIZE: Final = re.compile(rf"([{SIZES}])([0-9]+)")
# Roundings of an activation's derivative, in units of roundoff.
_DERIVATIVE: Final = 32.0


@dataclass(frozen=True, kw_only=True)
class BatchNormProblem(Problem):
    """fprop: y (2, c) is mean and biased variance of x (n, c, h, w) over n, h and w. dgrad: the sums of g = dy *
    activation'(u) and of g * xhat, where xhat = (x - mean) * invstd and u = xhat * weight + bias; x is dy, w is x in
    the same memory order, bias (4, c) is mean, invstd, weight and bias.

    y and bias are of the accumulator's dtype. Raises InvalidProblem for sizes and words out of range, and for an
    activation of fprop.
    """

    n: int
    c: int
    h: int
    w: int
    activation: str | None = None
    dtype: str = "f32"
    layout: str = "nchw"
    direction: Direction = "fprop"

    def __post_init__(self) -> None:
        for name in SIZES:
            least = 1 if name == "c" else 0
            size = whole(getattr(self, name), name)
            if size < least:
                raise InvalidProblem(f"{name}={size}: at least {least} is allowed")
            object.__setattr__(self, name, size)
        object.__setattr__(self, "activation", activation_word(self.activation))
        for name, allowed in (("dtype", tuple(DTYPES)), ("layout", LAYOUTS), ("direction", ("fprop", "dgrad"))):
            one_of(getattr(self, name), name, allowed)
        if self.direction == "fprop" and self.activation is not None:
            raise InvalidProblem(f"activation={self.activation}: None is allowed where moments are computed")
        self._check_extent()

    @property
    def operator(self) -> str:
        """The gradient has algorithms of its own."""
        return NAME if self.direction == "fprop" else f"{NAME}_dgrad"

    @property
    def w_is_image(self) -> bool:
        return self.direction == "dgrad"

    @property
    def bias(self) -> bool:
        """Whether there are parameters."""
        return self.direction == "dgrad"

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, self.h, self.w)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return (4, self.c)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (2, self.c)

    @property
    def y_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.accumulator]

    @property
    def pixels(self) -> int:
        return self.h * self.w

    @property
    def trivial(self) -> bool:
        return prod(self.x_shape) == 0

    @property
    def spatial_axes(self) -> int:
        return 2

    @property
    def flops(self) -> int:
        return prod(self.x_shape) * (4 if self.direction == "fprop" else 8)

    @property
    def bytes(self) -> int:
        """x is read, and of the gradient dy."""
        return self.itemsize * prod(self.x_shape) * (2 if self.w_is_image else 1)

    def inputs(self, array: Callable[[tuple[int, ...]], Any]) -> Inputs:
        if not self.w_is_image:
            return Inputs(array(self.x_shape))
        return Inputs(array(self.x_shape), array(self.x_shape), array(self.bias_shape).astype(self.y_dtype))

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            y, bound = self._gradient(inputs) if self.w_is_image else self._moments(inputs.x)
            return y, bound + self.rounding(y)

    def _moments(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums of what is apart from the channel's first element, whose square is taken away again."""
        mean, variance = reference.moments(x)
        unit = self.roundoff * sum_factor(self.n * self.pixels)
        wide = x.astype(np.float64)
        apart = np.abs(wide - np.where(np.isfinite(wide[:1, :, :1, :1]), wide[:1, :, :1, :1], 0.0))
        first, second = apart.mean(axis=(0, 2, 3)), (apart * apart).mean(axis=(0, 2, 3))
        return np.stack((mean, variance)), unit * np.stack((first + np.abs(mean), second + 2 * first * first))

    def _gradient(self, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """Errors of u go through derivatives, whose slopes are at most 1.2, but for those that jump."""
        g, xhat, u = reference.gradient_terms(inputs.x, inputs.w, inputs.bias, self.activation)
        mean, invstd, weight, bias = np.abs(inputs.bias.astype(np.float64))[:, :, None, None]
        dy, apart = np.abs(inputs.x.astype(np.float64)), np.abs(xhat)
        wrong = 4 * self.roundoff * (apart + mean * invstd)
        argument = wrong * weight + 4 * self.roundoff * (np.abs(u) + bias)
        off = 1.2 * argument + _DERIVATIVE * self.roundoff
        for kink in reference.KINKS.get(named_activation(self.activation)[0] or "", ()):
            off = np.where(np.abs(u - kink) <= 4 * argument, 1.0, off)
        off *= dy
        axes, unit = (0, 2, 3), self.roundoff * sum_factor(self.n * self.pixels)
        sums = np.stack((g.sum(axis=axes), (g * xhat).sum(axis=axes)))
        sizes = np.stack((np.abs(g).sum(axis=axes), np.abs(g * xhat).sum(axis=axes)))
        terms = np.stack((off.sum(axis=axes), (off * apart + np.abs(g) * wrong).sum(axis=axes)))
        return sums, unit * sizes + terms

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names: "batch_norm n32 c96 h56 w56 dgrad silu f16 nhwc"; without a word n is 1, the
        direction fprop, the dtype f32, the layout nchw, and there is no activation."""
        first, *words = words_of(text) or [""]
        fields: dict[str, Any] = {"n": 1}
        for word in words:
            size = _SIZE.fullmatch(word)
            kinds = {"direction": ("dgrad",), "dtype": tuple(DTYPES), "layout": LAYOUTS}
            name = size[1] if size else next((kind for kind, known in kinds.items() if word in known), "activation")
            if name in fields and name != "n":
                raise InvalidProblem(f"problem {shown(text)}: {shown(word)} has no place; an example is '{EXAMPLE}'")
            fields[name] = number_in(size[2], text) if size else word
        if first != NAME or not set(SIZES) <= set(fields):
            raise InvalidProblem(f"problem {shown(text)}: an example is '{EXAMPLE}'")
        return cls(**fields)

    def __str__(self) -> str:
        words = [NAME, *(f"{name}{getattr(self, name)}" for name in SIZES if name != "n" or self.n != 1)]
        words += ["dgrad"] if self.direction == "dgrad" else []
        words += [self.activation] if self.activation else []
        words += [self.dtype] if self.dtype != "f32" else []
        return " ".join(words + ([self.layout] if self.layout != "nchw" else []))
