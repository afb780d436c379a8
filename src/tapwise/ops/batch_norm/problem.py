"""Problems of batch normalisation in training: what it adds up for each channel, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from tapwise.activation import named_activation
from tapwise.channels_problem import DERIVATIVE_ROUNDINGS, ChannelsProblem
from tapwise.ops.batch_norm import reference
from tapwise.problem import DTYPES, Direction, Inputs, sum_factor


@dataclass(frozen=True, kw_only=True)
class BatchNormProblem(ChannelsProblem):
    """fprop: y (2, c) is mean and biased variance of x (n, c, h, w) over n, h and w. dgrad: the sums of g = dy *
    activation'(u) and of g * xhat, where xhat = (x - mean) * invstd and u = xhat * weight + bias; x is dy, w is x in
    the same memory order, bias (4, c) is mean, invstd, weight and bias.

    y and bias are of the accumulator's dtype. Raises InvalidProblem for sizes and words out of range, and for an
    activation of fprop.
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
        return (2, self.c)

    @property
    def y_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.accumulator]

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
        vectors = array(self.bias_shape)
        if isinstance(vectors, np.ndarray):
            vectors = vectors.astype(self.y_dtype)
        else:
            vectors = vectors.double() if self.dtype == "f64" else vectors.float()
        return Inputs(array(self.x_shape), array(self.x_shape), vectors)

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
        off = 1.2 * argument + DERIVATIVE_ROUNDINGS * self.roundoff
        for kink in reference.KINKS.get(named_activation(self.activation)[0] or "", ()):
            off = np.where(np.abs(u - kink) <= 4 * argument, 1.0, off)
        off *= dy
        axes, unit = (0, 2, 3), self.roundoff * sum_factor(self.n * self.pixels)
        sums = np.stack((g.sum(axis=axes), (g * xhat).sum(axis=axes)))
        sizes = np.stack((np.abs(g).sum(axis=axes), np.abs(g * xhat).sum(axis=axes)))
        terms = np.stack((off.sum(axis=axes), (off * apart + np.abs(g) * wrong).sum(axis=axes)))
        return sums, unit * sizes + terms
