"""cpu.serial of gradients: plain loop nests. The last resort, and the yardstick of every other algorithm.

Compiled by Numba once for each dtype, when they are called first, and kept in Numba's own disk cache.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.interrupts import pieces
from tapwise.cpu.numba_loops import LoopAlgorithm, compiled
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.reference import activate
from tapwise.problem import DTYPES

# Measured for fprop (serial.py): a dependent multiply-add behind a bounds check.
MULTIPLY_ADD_NS: Final = 1.7
ELEMENT_NS: Final = 9.0
CALL_US: Final = 10.0


def gather(
    dy: Any, w: Any, dx: Any, groups: int, stride: Any, padding: Any, dilation: Any, first: int, end: int, zero: Any
) -> None:
    """Rows first..end of dx, term by term. `zero` has the dtype that sums are kept in; padding is (top, left)."""
    images, channels, _, width = dx.shape
    filters, height_out, width_out = dy.shape[1:]
    group_c, filter_height, filter_width = w.shape[1:]
    group_k = filters // groups
    for n in range(images):
        for c in range(channels):
            k0 = c // group_c * group_k
            for h in range(first, end):
                for v in range(width):
                    total = zero
                    for r in range(filter_height):
                        top = h + padding[0] - r * dilation[0]
                        if top < 0 or top % stride[0] or top // stride[0] >= height_out:
                            continue
                        for s in range(filter_width):
                            left = v + padding[1] - s * dilation[1]
                            if left < 0 or left % stride[1] or left // stride[1] >= width_out:
                                continue
                            for k in range(k0, k0 + group_k):
                                total += dy[n, k, top // stride[0], left // stride[1]] * w[k, c % group_c, r, s]
                    dx[n, c, h, v] = total


def correlate(x: Any, dy: Any, dw: Any, stride: Any, padding: Any, dilation: Any, first: int, end: int) -> None:
    """Adds to filters first..end of dw, of sums' dtype, term by term; padding is (top, left)."""
    images, _, height, width = x.shape
    filters, height_out, width_out = dy.shape[1:]
    group_c, filter_height, filter_width = dw.shape[1:]
    group_k = filters // (x.shape[1] // group_c)
    for k in range(first, end):
        for c in range(group_c):
            channel = k // group_k * group_c + c
            for r in range(filter_height):
                for s in range(filter_width):
                    total = dw[k, c, r, s]
                    for n in range(images):
                        for p in range(height_out):
                            h = p * stride[0] - padding[0] + r * dilation[0]
                            if h < 0 or h >= height:
                                continue
                            for q in range(width_out):
                                v = q * stride[1] - padding[1] + s * dilation[1]
                                if v >= 0 and v < width:
                                    total += x[n, channel, h, v] * dy[n, k, p, q]
                    dw[k, c, r, s] = total


class SerialDgrad(LoopAlgorithm):
    """The plain loop nest on one thread. float32, float64, float16, bfloat16 (computed in float32); NCHW and NHWC.

    No workspace. Rejects anything but two spatial axes.
    """

    operator: ClassVar[str] = "dgrad"
    id: ClassVar[str] = "cpu.serial"
    summary: ClassVar[str] = "the plain loop nest, one thread"
    axes: ClassVar[tuple[int, ...]] = (2,)
    takes_empty: ClassVar[bool] = True

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """A fixed time for each multiply-add and for each element of dx."""
        elements = problem.n * problem.c * problem.spatial[0] * problem.spatial[1]
        return CALL_US + 1e-3 * (problem.flops / 2 * MULTIPLY_ADD_NS + elements * ELEMENT_NS)

    def pack(self, problem: ConvProblem, w: np.ndarray) -> np.ndarray:
        """Filters stay as they are."""
        return np.array(w, DTYPES[problem.accumulator], order="C")

    def run(self, problem: ConvProblem, buffers: Buffers, us: float) -> None:
        """Image by image; 16 bits go through float32 copies."""
        dy, packed, dx, _, bias, _, _ = buffers
        dtype = DTYPES[problem.accumulator]
        steps = problem.stride, tuple(before for before, _ in problem.padding), problem.dilation
        loops = compiled(gather)
        for image in range(problem.n):
            one = slice(image, image + 1)
            sums = np.empty((1, *problem.x_shape[1:]), dtype)
            for first, end in pieces(problem.spatial[0], us / problem.n):
                loops(dy[one].astype(dtype), packed, sums, problem.groups, *steps, first, end, dtype.type(0))
            with np.errstate(all="ignore"):
                if bias is not None:
                    sums += bias.astype(dtype)[:, None, None]
                dx[one] = activate(problem.activation, sums)


class SerialWgrad(LoopAlgorithm):
    """The plain loop nest on one thread. float32, float64, float16, bfloat16 (computed in float32); NCHW and NHWC.

    No workspace. Rejects anything but two spatial axes.
    """

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cpu.serial"
    summary: ClassVar[str] = "the plain loop nest, one thread"
    axes: ClassVar[tuple[int, ...]] = (2,)
    takes_empty: ClassVar[bool] = True

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """A fixed time for each multiply-add."""
        return CALL_US + 1e-3 * problem.flops / 2 * MULTIPLY_ADD_NS

    def pack(self, problem: ConvProblem, w: np.ndarray) -> np.ndarray:
        """dy itself."""
        return w

    def run(self, problem: ConvProblem, buffers: Buffers, us: float) -> None:
        """Image by image; 16 bits go through float32 copies."""
        x, dy, dw, *_ = buffers
        dtype = DTYPES[problem.accumulator]
        steps = problem.stride, tuple(before for before, _ in problem.padding), problem.dilation
        loops, sums = compiled(correlate), np.zeros(problem.w_shape, dtype)
        for image in range(problem.n):
            one = slice(image, image + 1)
            for first, end in pieces(problem.k, us / problem.n):
                loops(x[one].astype(dtype), dy[one].astype(dtype), sums, *steps, first, end)
        with np.errstate(over="ignore"):
            dw[...] = sums
