"""Problems of max and average pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.arguments import whole
from tapwise.errors import InvalidProblem
from tapwise.forks import cached_property
from tapwise.integers import ceil_div
from tapwise.ops.pool import reference
from tapwise.problem import LARGEST_INTEGER, LAYOUTS, Direction, Inputs, Second, sum_factor
from tapwise.window_problem import DTYPE_WORDS, WindowProblem, Words, choices, flag

OPS: Final = ("max", "avg")
DIRECTIONS: Final = ("fprop", "dgrad")


@dataclass(frozen=True, kw_only=True)
class PoolProblem(WindowProblem):
    """The largest or the mean of each window, of 1 or 2 spatial axes, as PyTorch and ONNX mean it.

    x (n, c, *spatial), y (n, c, *output). `padding` holds (before, after) an axis and is smaller than the dilated
    kernel: max never sees it, avg counts it unless `count_include_pad` is off. `ceil_mode`: a last window that only
    begins inside the input or the padding before it is kept; what it sees beyond the padding is not counted. `divisor`
    replaces the count. `indices` (max): positions in the plane besides values, -1 for a window of nothing but padding.

    `direction`: "fprop" is y of x; "dgrad" is dx of dy, and of those int64 positions where it is max.

    Raises InvalidProblem for sizes out of range, and a padded input smaller than the dilated kernel; in ceil mode it
    may be smaller by less than a stride.
    """

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
        choices("direction", DIRECTIONS),
    )
    ALLOWED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**WindowProblem.ALLOWED, "op": OPS, "direction": DIRECTIONS}

    op: str
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None
    indices: bool = False
    direction: Direction = "fprop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divisor is not None:
            object.__setattr__(self, "divisor", whole(self.divisor, "divisor_override"))
        if self.divisor == 0:
            raise InvalidProblem("divisor_override=0: a number other than 0 is allowed")
        if self.indices and self.direction == "dgrad":
            raise InvalidProblem("indices=True: a gradient has none; it is given those of max")
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
    def operator(self) -> str:
        """The gradient has algorithms of its own."""
        return "pool" if self.direction == "fprop" else "pool_dgrad"

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.y_shape if self.direction == "fprop" else self.x_shape

    @property
    def w_is_image(self) -> bool:
        return self.direction == "dgrad" and self.op == "max"

    @property
    def flops(self) -> int:
        return prod(self.y_shape) * (1 if self.w_is_image else prod(self.kernel))

    @property
    def bytes(self) -> int:
        """Of max's gradient the positions too."""
        return super().bytes + (8 * prod(self.y_shape) if self.w_is_image else 0)

    @property
    def windows(self) -> int:
        """Windows that one element of x is in, at most."""
        each = zip(self.output, self.kernel, self.stride, self.dilation, strict=True)
        # Starts that reach it with some tap are stride * d / gcd elements apart.
        return prod(min(count, (r - 1) * gcd(stride, d) // stride + 1) for count, r, stride, d in each)

    @property
    def exact_on_integers(self) -> bool:
        return self.w_is_image and LARGEST_INTEGER * self.windows < 1 / self.roundoff

    @property
    def second(self) -> Second | None:
        return Second("positions", self.y_shape, np.dtype(np.int64)) if self.indices else None

    def second_reference(self, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        return reference.indices(inputs.x, self.output, *self.window), np.zeros(())

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

    def inputs(self, array: Callable[[tuple[int, ...]], Any]) -> Inputs:
        """x; or dy, and for max w, positions that are still to be made."""
        if self.direction == "fprop":
            return Inputs(array(self.x_shape))
        return Inputs(array(self.y_shape), array(self.y_shape) if self.w_is_image else None)

    def sample(self, rng: np.random.Generator, integers: bool = False) -> Inputs:
        inputs = super().sample(rng, integers)
        return inputs._replace(w=self.random_positions(rng)) if self.w_is_image else inputs

    def random_positions(self, rng: np.random.Generator) -> np.ndarray:
        """For each window the int64 position of an element that it sees, -1 where it sees none."""
        place: np.ndarray = np.zeros(self.y_shape, np.int64)
        seen = np.ones((), bool)
        for axis, (size, stride, d) in enumerate(zip(self.spatial, self.stride, self.dilation, strict=True)):
            starts = np.arange(self.output[axis]) * stride - self.padding[axis][0]
            first, end = np.maximum(-(starts // d), 0), np.minimum(-((starts - size) // d), self.kernel[axis])
            shape = (1,) * (2 + axis) + (-1,) + (1,) * (len(self.spatial) - axis - 1)
            first, end = first.reshape(shape), end.reshape(shape)
            taps = rng.integers(first, np.maximum(end, first + 1), self.y_shape)
            place = place * size + starts.reshape(shape) + d * taps
            seen = seen & (first < end)
        return np.where(seen, place, -1)

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        """A maximum is exact, a mean and a gradient are off by their sums' roundings."""
        if self.direction == "dgrad":
            return self._gradient(inputs)
        largest = self.op == "max"
        with np.errstate(all="ignore"):
            seen = reference.windows(inputs.x, self.output, *self.window, -np.inf if largest else 0.0)
            if largest:
                return seen.max(axis=-1), np.zeros(())
            counts = [self.counts(axis).astype(np.float64) for axis in range(len(self.output))]
            count = self.divisor if self.divisor is not None else prod(np.ix_(*counts), start=np.ones(()))
            y, size = seen.sum(axis=-1) / count, np.abs(seen).sum(axis=-1) / np.abs(count)
            return y, sum_factor(prod(self.kernel)) * self.roundoff * size + self.rounding(y)

    def _gradient(self, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            dy = np.asarray(inputs.x, np.float64)
            if self.op == "max":
                dx, size = (reference.scatter(one, inputs.w, self.x_shape) for one in (dy, np.abs(dy)))
            else:
                counts = np.ix_(*(self.counts(axis).astype(np.float64) for axis in range(len(self.output))))
                dy = dy / (self.divisor if self.divisor is not None else prod(counts, start=np.ones(())))
                dx, size = (reference.spread(one, self.x_shape, *self.window) for one in (dy, np.abs(dy)))
            if inputs.integers and self.exact_on_integers:
                return dx.astype(self.x_dtype).astype(np.float64), np.zeros(())
            return dx, sum_factor(self.windows) * self.roundoff * size + self.rounding(dx)
