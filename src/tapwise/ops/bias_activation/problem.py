"""Problems of the gradient of activation(z + bias): by z, and by bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from tapwise.channels_problem import DERIVATIVE_ROUNDINGS, ChannelsProblem
from tapwise.ops.bias_activation import reference
from tapwise.problem import Direction, Inputs, Second, sum_factor


@dataclass(frozen=True, kw_only=True)
class BiasActivationProblem(ChannelsProblem):
    """dgrad: y (n, c, h, w) is dy * activation', and a second result (c,) the sums of that over n, h and w; without an
    activation these sums are y. x is dy, w, in the same memory order, is what the derivative is taken from: what the
    activation gave for tanh and sigmoid, what it was given for others.

    All of one dtype; relu, relu6, and leaky_relu with a positive slope may be given either. Raises InvalidProblem for
    sizes and words out of range.
    """

    name: ClassVar[str] = "bias_activation"
    directions: ClassVar[tuple[Direction, ...]] = ("dgrad",)
    example: ClassVar[str] = "bias_activation n32 c96 h56 w56 dgrad relu f16 nhwc"

    direction: Direction = "dgrad"

    @property
    def w_is_image(self) -> bool:
        return self.activation is not None

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.c,) if self.activation is None else self.x_shape

    @property
    def second(self) -> Second | None:
        return None if self.activation is None else Second("bias gradient", (self.c,), self.x_dtype)

    @property
    def flops(self) -> int:
        return prod(self.x_shape) * (1 if self.activation is None else 3)

    @property
    def bytes(self) -> int:
        """dy is read; with an activation w, too, and as much is written."""
        return self.itemsize * prod(self.x_shape) * (1 if self.activation is None else 3)

    def inputs(self, array: Callable[[tuple[int, ...]], Any]) -> Inputs:
        return Inputs(array(self.x_shape), array(self.x_shape) if self.w_is_image else None)

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        if self.activation is None:
            return self._sums(inputs)
        with np.errstate(all="ignore"):
            y = reference.before(inputs.x, inputs.w, self.activation)
            return y, self._error(inputs) + self.rounding(y)

    def second_reference(self, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        return self._sums(inputs)

    def _error(self, inputs: Inputs) -> np.ndarray:
        return np.asarray(DERIVATIVE_ROUNDINGS * self.roundoff * np.abs(inputs.x.astype(np.float64)))

    def _sums(self, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """Of terms with their errors."""
        with np.errstate(all="ignore"):
            terms, axes = reference.before(inputs.x, inputs.w, self.activation), (0, 2, 3)
            y, unit = terms.sum(axis=axes), self.roundoff * sum_factor(self.n * self.pixels)
            off = 0.0 if self.activation is None else self._error(inputs).sum(axis=axes)
            return y, unit * np.abs(terms).sum(axis=axes) + off + self.rounding(y)
