"""Problems of softmax and its logarithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, Final, Self

import numpy as np

from tapwise.arguments import one_of, shown, words_of
from tapwise.errors import InvalidProblem
from tapwise.ops.axes import SUM_BLOCK, AxesProblem, normal_axes, shape_and_axis, shape_word
from tapwise.ops.softmax import reference
from tapwise.problem import Direction, Inputs, sum_factor

DIRECTIONS: Final = ("fprop", "dgrad")
# Roundings that an exponential takes.
_EXPONENTIAL: Final = 16.0


@dataclass(frozen=True)
class SoftmaxProblem(AxesProblem):
    """e^x over its sum along one axis, shifted by the largest element; or the logarithm of that.

    `direction`: "fprop" is y of x; "dgrad" is dx of dy, and of y, which is w.
    """

    log: bool = False
    direction: Direction = "fprop"

    def __post_init__(self) -> None:
        self._check()
        one_of(self.direction, "direction", DIRECTIONS)
        if len(self.axes) != 1 and self.shape:
            raise InvalidProblem(f"axis={self.axes}: one axis is allowed")

    @property
    def operator(self) -> str:
        """The gradient has algorithms of its own."""
        return "softmax" if self.direction == "fprop" else "softmax_dgrad"

    @property
    def w_is_image(self) -> bool:
        return self.direction == "dgrad"

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def flops(self) -> int:
        return 4 * prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of the gradient dy, y and dx."""
        return super().bytes + (self.itemsize * prod(self.shape) if self.w_is_image else 0)

    def inputs(self, array: Callable[[tuple[int, ...]], Any]) -> Inputs:
        return Inputs(array(self.shape), array(self.shape) if self.w_is_image else None)

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        if self.direction == "dgrad":
            return self._gradient(inputs)
        with np.errstate(all="ignore"):
            y, shifted = reference.softmax(inputs.x, self.axes[0] if self.shape else None, self.log)
            factor = 16.0 + 2.0 * sqrt(min(self.length, SUM_BLOCK))
            if self.log:
                bound = factor + 2.0 * np.abs(shifted) + 2.0 * np.abs(y)
            else:
                # The difference is rounded before it is an exponent.
                bound = y * (factor + np.where(np.isfinite(shifted), np.abs(shifted), 0.0))
            return y, self.roundoff * bound + self.rounding(y)

    def _gradient(self, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """Off by the sum's roundings, and by those of the difference and the exponential behind it."""
        axis = self.axes[0] if self.shape else None
        with np.errstate(all="ignore"):
            dy, y = inputs.x.astype(np.float64), inputs.w.astype(np.float64)
            terms, factor = (dy, np.exp(y)) if self.log else (dy * y, y)
            total = terms.sum(axis=axis, keepdims=True)
            size = sum_factor(min(self.length, SUM_BLOCK)) * np.abs(terms).sum(axis=axis, keepdims=True)
            if self.log:
                dx, bound = dy - factor * total, np.abs(dy) + factor * (size + _EXPONENTIAL * np.abs(total))
            else:
                dx, bound = (dy - total) * y, np.abs(y) * (size + 2.0 * np.abs(dy) + 2.0 * np.abs(total))
            return dx, self.roundoff * bound + self.rounding(dx)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names: "softmax 1024x1000 axis1" or "log_softmax ..."; the last axis by default.

        "dgrad" behind it: the gradient.
        """
        words = words_of(text)
        if words[:1] not in (["softmax"], ["log_softmax"]) or len(words) < 2:
            raise InvalidProblem(f"problem {shown(text)}: an example is 'softmax 1024x1000 axis1'")
        options: dict[str, Any] = {"log": words[0] == "log_softmax"}
        shape, axis = shape_and_axis(text, words[1:], options, ("dgrad",))
        if options.pop("dgrad", False):
            options["direction"] = "dgrad"
        return cls(shape, normal_axes(-1 if axis is None else axis, len(shape)) if shape else (), **options)

    def __str__(self) -> str:
        words = ["log_softmax" if self.log else "softmax", shape_word(self.shape)]
        if self.axes not in ((len(self.shape) - 1,), ()):
            words.append(f"axis{self.axes[0]}")
        words += [self.dtype] if self.dtype != "f32" else []
        return " ".join(words + (["dgrad"] if self.direction == "dgrad" else []))
