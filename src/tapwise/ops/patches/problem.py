"""Problems of im2col and col2im: patches of an image as columns, and their sums back in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from tapwise.errors import InvalidProblem
from tapwise.ops.patches import reference
from tapwise.problem import Accuracy, Inputs
from tapwise.window_problem import DTYPE_WORDS, Pair, WindowProblem, Words, flag


@dataclass(frozen=True)
class PatchProblem(WindowProblem):
    """Image (n, c, *spatial) and columns (n, c * prod(kernel), prod(output)), of 1 to 3 spatial axes.

    Column l holds the elements of window l, channel by channel, tap by tap. `accumulate` (col2im): add to what is
    there. Raises InvalidProblem for sizes out of range, and a padded image smaller than the dilated kernel.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**WindowProblem.ALLOWED, "layout": ("nchw",)}

    n: int
    c: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[Pair, ...]
    dilation: tuple[int, ...]
    accumulate: bool = False
    dtype: str = "f32"
    layout: str = "nchw"

    def __post_init__(self) -> None:
        self._check_window()

    @property
    def columns_shape(self) -> tuple[int, ...]:
        return (self.n, self.c * prod(self.kernel), prod(self.output))

    @property
    def flops(self) -> int:
        return prod(self.columns_shape)


@dataclass(frozen=True)
class Im2colProblem(PatchProblem):
    """Image in, columns out."""

    operator: ClassVar[str] = "im2col"
    NAMES: ClassVar[Mapping[str, Mapping[str, Any]]] = {"im2col": {}}
    EXAMPLE: ClassVar[str] = "im2col c64 h56 w56 r3 s3 pad1"

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.columns_shape

    def reference(
        self, inputs: Inputs, accuracy: Accuracy | None = None, sums: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        return reference.im2col(self, inputs.x)


@dataclass(frozen=True)
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
        return self.image_shape

    def reference(
        self, inputs: Inputs, accuracy: Accuracy | None = None, sums: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.accumulate:
            raise InvalidProblem("accumulate: what the sums are added to is not part of a problem")
        return reference.col2im(self, inputs.x)
