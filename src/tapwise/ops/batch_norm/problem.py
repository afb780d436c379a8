"""Problems of batch normalisation in training: what it adds up for each channel, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from tapwise.activation import named_activation
from tapwise.channels_problem import DERIVATIVE_ROUNDINGS, ChannelsProblem
from tapwise.ops.batch_norm import reference
from tapwise.problem import DTYPES, Direction, Inputs, Second, sum_factor


@dataclass(frozen=True, kw_only=True)
class BatchNormProblem(ChannelsProblem):
    """fprop: y (2, c) is mean and biased variance of x (n, c, h, w) over n, h and w, in the accumulator's dtype. dgrad:
    y (n, c, h, w) is the gradient by x, and a second result (2, c) the sums of g = dy * activation'(u) and of g * xhat,
    where xhat = (x - mean) * invstd and u = xhat * weight + bias; x is dy, w is x in the same memory order, bias (4, c)
    is mean, invstd, weight and bias, which with the sums are of the accumulator's dtype.

    Raises InvalidProblem for sizes and words out of range, and for an activation of fprop.
    """

    name: ClassVar[str] = "batch_norm"
    directions: ClassVar[tuple[Direction, ...]] = ("fprop", "dgrad")
    example: ClassVar[str] = "batch_norm n32 c96 h56 w56 dgrad silu f16 nhwc"

    @property
    def w_is_image(self) -> bool:
        return self.direction == "dgrad"

    @property
    def bias(self) -> bool:
        """Whether there are parameters."""
        return self.direction == "dgrad"

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return (4, self.c)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.x_shape if self.w_is_image else (2, self.c)

    @property
    def y_dtype(self) -> np.dtype[Any]:
        return self.x_dtype if self.w_is_image else self.sums_dtype

    @property
    def sums_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.accumulator]

    @property
    def second(self) -> Second | None:
        return Second("sums", (2, self.c), self.sums_dtype) if self.w_is_image else None

    @property
    def flops(self) -> int:
        return prod(self.x_shape) * (4 if self.direction == "fprop" else 13)

    @property
    def bytes(self) -> int:
        """x is read; of the gradient dy, too, and as much is written."""
        return self.itemsize * prod(self.x_shape) * (3 if self.w_is_image else 1)

    def inputs(self, array: Callable[[tuple[int, ...]], Any]) -> Inputs:
        if not self.w_is_image:
            return Inputs(array(self.x_shape))
        vectors = array(self.bias_shape)
        if isinstance(vectors, np.ndarray):
            vectors = vectors.astype(self.sums_dtype)
        else:
            vectors = vectors.double() if self.dtype == "f64" else vectors.float()
        return Inputs(array(self.x_shape), array(self.x_shape), vectors)

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            y, bound = self._by_x(inputs) if self.w_is_image else self._moments(inputs.x)
            return y, bound + self.rounding(y)

    def second_reference(self, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            sums, bound, *_ = self._gradient(inputs)
            return sums, bound

    def _moments(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums of what is apart from the channel's first element, whose square is taken away again."""
        mean, variance = reference.moments(x)
        unit = self.roundoff * sum_factor(self.n * self.pixels)
        wide = x.astype(np.float64)
        apart = np.abs(wide - np.where(np.isfinite(wide[:1, :, :1, :1]), wide[:1, :, :1, :1], 0.0))
        first, second = apart.mean(axis=(0, 2, 3)), (apart * apart).mean(axis=(0, 2, 3))
        return np.stack((mean, variance)), unit * np.stack((first + np.abs(mean), second + 2 * first * first))

    def _by_x(self, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """Errors of g, of xhat and of both sums, and of five roundings."""
        sums, bounds, g, xhat, off, wrong = self._gradient(inputs)
        _, invstd, weight, _ = inputs.bias.astype(np.float64)[:, :, None, None]
        count = self.n * self.pixels
        of_g, of_gx = sums[:, None, :, None, None] / count
        off_g, off_gx = bounds[:, None, :, None, None] / count
        y = (g - of_g - xhat * of_gx) * invstd * weight
        sizes = np.abs(g) + np.abs(of_g) + np.abs(xhat * of_gx)
        error = off + off_g + np.abs(xhat) * off_gx + wrong * np.abs(of_gx) + 8 * self.roundoff * sizes
        return y, error * np.abs(invstd * weight)

    def _gradient(self, inputs: Inputs) -> tuple[np.ndarray, ...]:
        """(sums, their bounds, g, xhat, errors of g and of xhat). Errors of u go through derivatives, whose slopes are
        at most 1.2, but for those that jump."""
        g, xhat, u = reference.gradient_terms(inputs.x, inputs.w, inputs.bias, self.activation)
        mean, invstd, weight, bias = np.abs(inputs.bias.astype(np.float64))[:, :, None, None]
        dy, apart = np.abs(inputs.x.astype(np.float64)), np.abs(xhat)
        wrong = 4 * self.roundoff * (apart + mean * invstd)
        argument = wrong * weight + 4 * self.roundoff * (np.abs(u) + bias)
        off = 1.2 * argument + DERIVATIVE_ROUNDINGS * self.roundoff
        for kink in reference.KINKS.get(named_activation(self.activation)[0] or "", ()):
            off = np.where(np.abs(u - kink) <= 4 * argument, 1.0, off)
        off *= dy
        axes, unit = (0, 2, 3), self.roundoff * sum_factor(self.n * self.pixels)
        sums = np.stack((g.sum(axis=axes), (g * xhat).sum(axis=axes)))
        sizes = np.stack((np.abs(g).sum(axis=axes), np.abs(g * xhat).sum(axis=axes)))
        terms = np.stack((off.sum(axis=axes), (off * apart + np.abs(g) * wrong).sum(axis=axes)))
        kind = np.finfo(self.sums_dtype)
        bounds = unit * sizes + terms + float(kind.eps) / 2 * np.abs(sums) + float(kind.smallest_subnormal)
        return sums, bounds, g, xhat, off, wrong
