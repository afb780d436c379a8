"""Problems of im2col and col2im: patches of an image as columns, and their sums back in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from tapwise.errors import InvalidProblem
from tapwise.ops.patches import reference
from tapwise.problem import Inputs, sum_factor
from tapwise.window_problem import DTYPE_WORDS, WindowProblem, Words, flag


@dataclass(frozen=True, kw_only=True)
class PatchProblem(WindowProblem):
    """Image (n, c, *spatial) and columns (n, c * prod(kernel), prod(output)), of 1 to 3 spatial axes.

    Column l holds the elements of window l, channel by channel, tap by tap. `accumulate` (col2im): add to what is
    there. Raises InvalidProblem for sizes out of range, and a padded image smaller than the dilated kernel.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**WindowProblem.ALLOWED, "layout": ("nchw",)}

    accumulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_extent()

    @property
    def columns_shape(self) -> tuple[int, ...]:
        return (self.n, self.c * prod(self.kernel), prod(self.output))

    @property
    def flops(self) -> int:
        return prod(self.columns_shape)


@dataclass(frozen=True, kw_only=True)
class Im2colProblem(PatchProblem):
    """Image in, columns out."""

    operator: ClassVar[str] = "im2col"
    NAMES: ClassVar[Mapping[str, Mapping[str, Any]]] = {"im2col": {}}
    EXAMPLE: ClassVar[str] = "im2col c64 h56 w56 r3 s3 pad1"

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.columns_shape

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        """Nothing is rounded."""
        return reference.im2col(inputs.x, *self.window), np.zeros(())


@dataclass(frozen=True, kw_only=True)
class Col2imProblem(PatchProblem):
    """Columns in, image out: the adjoint of im2col."""

    operator: ClassVar[str] = "col2im"
    NAMES: ClassVar[Mapping[str, Mapping[str, Any]]] = {"col2im": {}}
    EXAMPLE: ClassVar[str] = "col2im c64 h56 w56 r3 s3 pad1"
    WORDS: ClassVar[tuple[Words, ...]] = (flag("accumulate", "accumulate"), DTYPE_WORDS)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self.columns_shape

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.spatial)

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        """`residual` of the inputs is what `accumulate` adds the sums to."""
        if self.accumulate != (inputs.residual is not None):
            raise InvalidProblem("accumulate: what the sums are added to is given as the residual, or not at all")
        x = np.asarray(inputs.x, np.float64)
        y, size = (reference.col2im(values, self.y_shape, *self.window) for values in (x, np.abs(x)))
        if inputs.residual is not None:
            y, size = y + inputs.residual, size + np.abs(inputs.residual)
        return y, sum_factor(prod(self.kernel)) * self.roundoff * size + self.rounding(y)
