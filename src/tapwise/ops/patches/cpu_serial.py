"""cpu.serial of im2col and col2im: an element of the result at a time, one thread; col2im gathers."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import numpy as np

from tapwise.algorithm import Buffers, Config, Device
from tapwise.cpu.interrupts import pieces
from tapwise.cpu.numba_loops import LoopAlgorithm, compiled
from tapwise.ops.patches.problem import PatchProblem
from tapwise.problem import DTYPES


def expand(x: Any, y: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, output: Any) -> None:
    """x (planes, d, h, w), y (planes, taps, patches)."""
    planes, depth, height, width = x.shape
    for plane in range(planes):
        for tap in range(y.shape[1]):
            t, r, s = tap // (kernel[1] * kernel[2]), tap // kernel[2] % kernel[1], tap % kernel[2]
            for patch in range(y.shape[2]):
                o, p, q = patch // (output[1] * output[2]), patch // output[2] % output[1], patch % output[2]
                d = o * stride[0] + t * dilation[0] - padding[0]
                h = p * stride[1] + r * dilation[1] - padding[1]
                v = q * stride[2] + s * dilation[2] - padding[2]
                if d >= 0 and d < depth and h >= 0 and h < height and v >= 0 and v < width:
                    y[plane, tap, patch] = x[plane, d, h, v]
                else:
                    y[plane, tap, patch] = 0


def gather(
    x: Any, y: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, output: Any, accumulate: bool
) -> None:
    """x (planes, taps, patches), y (planes, d, h, w)."""
    planes, depth, height, width = y.shape
    for plane in range(planes):
        for d in range(depth):
            for h in range(height):
                for v in range(width):
                    total = y[plane, d, h, v] if accumulate else y.dtype.type(0)
                    for tap in range(x.shape[1]):
                        t, r, s = tap // (kernel[1] * kernel[2]), tap // kernel[2] % kernel[1], tap % kernel[2]
                        o = d + padding[0] - t * dilation[0]
                        p = h + padding[1] - r * dilation[1]
                        q = v + padding[2] - s * dilation[2]
                        if o < 0 or p < 0 or q < 0 or o % stride[0] or p % stride[1] or q % stride[2]:
                            continue
                        o, p, q = o // stride[0], p // stride[1], q // stride[2]
                        if o < output[0] and p < output[1] and q < output[2]:
                            total += x[plane, tap, (o * output[1] + p) * output[2] + q]
                    y[plane, d, h, v] = total


class Im2colSerial(LoopAlgorithm):
    """Plain loops on one thread. float32, float64, float16, bfloat16; 1 to 3 spatial axes."""

    operator: ClassVar[str] = "im2col"
    id: ClassVar[str] = "cpu.serial"

    def predict_us(self, problem: PatchProblem, config: Config, device: Device) -> float:
        """8 ns an element of the columns: divisions find its place."""
        return 10.0 + 8e-3 * problem.flops * (1 if problem.operator == "im2col" else prod(problem.stride))

    def run(self, problem: PatchProblem, buffers: Buffers, us: float) -> None:
        p, x, y = problem.canonical(3), buffers.x, buffers.y
        dtype = DTYPES[p.accumulator]
        window = (p.kernel, p.stride, tuple(before for before, _ in p.padding), p.dilation, p.output)
        planes = p.n * p.c
        columns, image = (planes, prod(p.kernel), prod(p.output)), (planes, *p.spatial)
        if p.operator == "im2col":
            result = np.empty(columns, dtype)
            source = np.ascontiguousarray(x, dtype).reshape(image)
            for first, end in pieces(planes, us):
                compiled(expand)(source[first:end], result[first:end], *window)
        else:
            result = np.array(y, dtype).reshape(image) if p.accumulate else np.empty(image, dtype)
            source = np.ascontiguousarray(x, dtype).reshape(columns)
            for first, end in pieces(planes, us):
                compiled(gather)(source[first:end], result[first:end], *window, p.accumulate)
        y[...] = result.reshape(y.shape)


class Col2imSerial(Im2colSerial):
    """Plain loops on one thread, gathering. float32, float64, 16 bits (summed in float32); 1 to 3 spatial axes."""

    operator: ClassVar[str] = "col2im"
    id: ClassVar[str] = "cpu.serial"
