"""Problems of softmax and its logarithm."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, ClassVar, Self

import numpy as np

from tapwise.arguments import shown, words_of
from tapwise.errors import InvalidProblem
from tapwise.ops.axes import SUM_BLOCK, AxesProblem, normal_axes, shape_and_axis, shape_word
from tapwise.ops.softmax import reference
from tapwise.problem import Inputs


@dataclass(frozen=True)
class SoftmaxProblem(AxesProblem):
    """e^x over its sum along one axis, shifted by the largest element; or the logarithm of that."""

    operator: ClassVar[str] = "softmax"

    log: bool = False

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

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            y, shifted = reference.softmax(inputs.x, self.axes[0] if self.shape else None, self.log)
            factor = 16.0 + 2.0 * sqrt(min(self.length, SUM_BLOCK))
            if self.log:
                bound = factor + 2.0 * np.abs(shifted) + 2.0 * np.abs(y)
            else:
                # The difference is rounded before it is an exponent.
                bound = y * (factor + np.where(np.isfinite(shifted), np.abs(shifted), 0.0))
            return y, self.roundoff * bound + self.rounding(y)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names: "softmax 1024x1000 axis1" or "log_softmax ..."; the last axis by default."""
        words = words_of(text)
        if words[:1] not in (["softmax"], ["log_softmax"]) or len(words) < 2:
            raise InvalidProblem(f"problem {shown(text)}: an example is 'softmax 1024x1000 axis1'")
        options: dict[str, Any] = {"log": words[0] == "log_softmax"}
        shape, axis = shape_and_axis(text, words[1:], options, ())
        return cls(shape, normal_axes(-1 if axis is None else axis, len(shape)) if shape else (), **options)

    def __str__(self) -> str:
        words = ["log_softmax" if self.log else "softmax", shape_word(self.shape)]
        if self.axes not in ((len(self.shape) - 1,), ()):
            words.append(f"axis{self.axes[0]}")
        return " ".join(words + ([self.dtype] if self.dtype != "f32" else []))
