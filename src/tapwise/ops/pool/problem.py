"""Problems of max and average pooling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.arguments import whole
from tapwise.errors import InvalidProblem
from tapwise.forks import cached_property
from tapwise.integers import ceil_div
from tapwise.ops.pool import reference
from tapwise.problem import LAYOUTS, Inputs, sum_factor
from tapwise.window_problem import DTYPE_WORDS, WindowProblem, Words, choices, flag

OPS: Final = ("max", "avg")


@dataclass(frozen=True, kw_only=True)
class PoolProblem(WindowProblem):
    """The largest or the mean of each window, of 1 or 2 spatial axes, as PyTorch and ONNX mean it.

    x (n, c, *spatial), y (n, c, *output). `padding` holds (before, after) an axis and is smaller than the dilated
    kernel: max never sees it, avg counts it unless `count_include_pad` is off. `ceil_mode`: a last window that only
    begins inside the input or the padding before it is kept; what it sees beyond the padding is not counted. `divisor`
    replaces the count. `indices` (max): positions in the plane besides values, -1 for a window of nothing but padding.

    Raises InvalidProblem for sizes out of range, and a padded input smaller than the dilated kernel; in ceil mode it
    may be smaller by less than a stride.
    """

    operator: ClassVar[str] = "pool"
    NAMES: ClassVar[Mapping[str, Mapping[str, Any]]] = {"maxpool": {"op": "max"}, "avgpool": {"op": "avg"}}
    EXAMPLE: ClassVar[str] = "maxpool c64 h112 w112 r3 s3 stride2 pad1"
    AXES: ClassVar[tuple[int, ...]] = (1, 2)
    STRIDE_IS_KERNEL: ClassVar[bool] = True
    WORDS: ClassVar[tuple[Words, ...]] = (
        flag("ceil", "ceil_mode"),
        flag("exclude_pad", "count_include_pad", False),
        Words("divisor"),
        flag("indices", "indices"),
        DTYPE_WORDS,
        choices("layout", LAYOUTS),
    )
    ALLOWED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**WindowProblem.ALLOWED, "op": OPS}

    op: str
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None
    indices: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divisor is not None:
            object.__setattr__(self, "divisor", whole(self.divisor, "divisor_override"))
        if self.divisor == 0:
            raise InvalidProblem("divisor_override=0: a number other than 0 is allowed")
        for reach, pair in zip(self.reach, self.padding, strict=True):
            if max(pair) >= reach:
                raise InvalidProblem(f"padding={self.padding}: each side below the dilated kernel's {reach}")
        self._check_extent()

    def _least_padded(self, axis: int) -> int:
        return max(1, self.reach[axis] - self.stride[axis] + 1) if self.ceil_mode else self.reach[axis]

    @cached_property
    def output(self) -> tuple[int, ...]:
        result = []
        for size, (before, after), reach, stride in zip(
            self.spatial, self.padding, self.reach, self.stride, strict=True
        ):
            room = size + before + after - reach
            count = (ceil_div(room, stride) if self.ceil_mode else room // stride) + 1
            # A window wholly in the padding behind is dropped.
            if self.ceil_mode and (count - 1) * stride >= size + before:
                count -= 1
            result.append(count)
        return tuple(result)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.output)

    @property
    def flops(self) -> int:
        return prod(self.y_shape) * prod(self.kernel)

    @property
    def gives_positions(self) -> bool:
        return self.indices

    def positions(self, x: np.ndarray) -> np.ndarray:
        return reference.indices(x, self.output, *self.window)

    def counted(self, axis: int) -> tuple[int, int]:
        """From where to where an average counts what a window sees on one axis; the input is from 0 to its size."""
        size, (before, after) = self.spatial[axis], self.padding[axis]
        return (-before, size + after) if self.count_include_pad else (0, size)

    def whole(self, axis: int) -> tuple[int, int]:
        """The first output on one axis whose window is counted whole, and the first behind it that is not."""
        (low, high), stride, before = self.counted(axis), self.stride[axis], self.padding[axis][0]
        first = min(self.output[axis], ceil_div(low + before, stride))
        return first, min(self.output[axis], max(first, (high - self.reach[axis] + before) // stride + 1))

    def counts(self, axis: int, outputs: np.ndarray | None = None) -> np.ndarray:
        """Taps that an average counts on one axis, for each of these outputs (all of them by default), as int64."""
        outputs = np.arange(self.output[axis]) if outputs is None else outputs
        (low, high), dilation = self.counted(axis), self.dilation[axis]
        starts = outputs * self.stride[axis] - self.padding[axis][0]
        first = np.maximum(-((starts - low) // dilation), 0)
        end = np.minimum(-((starts - high) // dilation), self.kernel[axis])
        return np.maximum(end - first, 0)

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        """A maximum is exact, a mean is off by its sum's roundings."""
        largest = self.op == "max"
        with np.errstate(all="ignore"):
            seen = reference.windows(inputs.x, self.output, *self.window, -np.inf if largest else 0.0)
            if largest:
                return seen.max(axis=-1), np.zeros(())
            counts = [self.counts(axis).astype(np.float64) for axis in range(len(self.output))]
            count = self.divisor if self.divisor is not None else prod(np.ix_(*counts), start=np.ones(()))
            y, size = seen.sum(axis=-1) / count, np.abs(seen).sum(axis=-1) / np.abs(count)
            return y, sum_factor(prod(self.kernel)) * self.roundoff * size + self.rounding(y)
