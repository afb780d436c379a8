"""Problems of reduce: one value for each run of elements."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, ClassVar, Final, Self

import numpy as np

from tapwise.arguments import shown, word, words_of
from tapwise.errors import InvalidProblem
from tapwise.ops.axes import SUM_BLOCK, AxesProblem, normal_axes, shape_and_axis, shape_word
from tapwise.ops.reduce import reference
from tapwise.problem import DTYPES, Inputs, sum_factor

REDUCTIONS: Final = (
    "sum", "mean", "max", "min", "prod", "argmax", "argmin", "norm1", "norm2", "sumsquare", "logsumexp",
)  # fmt: skip
OPS: Final = f"one of {', '.join(REDUCTIONS)}"
# Nothing to choose from gives no result.
NEED_ELEMENTS: Final = ("max", "min", "argmax", "argmin")
POSITIONS: Final = ("argmax", "argmin")


@dataclass(frozen=True)
class ReduceProblem(AxesProblem):
    """op over axes of an array: one of REDUCTIONS. Results of argmax and argmin are positions along one axis, or in the
    flattened array when the axes are all, as int64; other results have x's dtype.

    Raises InvalidProblem for an unknown op, a bad axis, a position along several axes that are not all, and the largest
    or smallest of nothing.
    """

    operator: ClassVar[str] = "reduce"

    op: str = "sum"
    keepdims: bool = False

    def __post_init__(self) -> None:
        if word(self.op, "op", OPS) not in REDUCTIONS:
            raise InvalidProblem(f"op={shown(self.op)}: {OPS} is allowed")
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
    def y_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int64) if self.op in POSITIONS else self.x_dtype

    @property
    def flops(self) -> int:
        return prod(self.shape)

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        """The bound holds where no sum, square or product on the way overflows or is subnormal in the accumulator."""
        with np.errstate(all="ignore"):
            y, size = (one.reshape(self.y_shape) for one in reference.reduce(self.op, inputs.x, self.axes))
            if self.op in POSITIONS:
                return y, size
            block = min(self.length, SUM_BLOCK)
            factor = 2.0 * self.length if self.op == "prod" else sum_factor(block)
            if self.op == "logsumexp":
                factor, size = 24.0, size + sqrt(block) / 8
            # What is multiplied may go below the range of normal numbers on the way, and come out as less.
            lost = float(np.finfo(DTYPES[self.accumulator]).smallest_normal) if self.op == "prod" else 0.0
            return y, self.roundoff * factor * size + self.rounding(y) + lost

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names: "reduce sum 64x1000 axis1 keepdims f16"; without an axis all are meant."""
        words = words_of(text)
        if words[:1] != ["reduce"] or len(words) < 3:
            raise InvalidProblem(f"problem {shown(text)}: an example is 'reduce sum 64x1000 axis1'")
        options: dict[str, Any] = {"op": words[1]}
        shape, axis = shape_and_axis(text, words[2:], options, ("keepdims",))
        return cls(shape, normal_axes(axis, len(shape)), **options)

    def __str__(self) -> str:
        words = ["reduce", self.op, shape_word(self.shape)]
        if self.axes != tuple(range(len(self.shape))):
            words.append("axis" + (",".join(map(str, self.axes)) or "none"))
        words += ["keepdims"] if self.keepdims else []
        return " ".join(words + ([self.dtype] if self.dtype != "f32" else []))
