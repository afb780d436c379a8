"""cpu.serial: the plain loop nest. The last resort, and the yardstick of every other algorithm.

Compiled by Numba once for each dtype, when a plan is made, and kept in Numba's own disk cache; all sizes are run-time
arguments.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.activation import ACTIVATIONS, named_activation
from tapwise.algorithm import Buffers, Config, Device, Plan
from tapwise.cpu.interrupts import pieces
from tapwise.cpu.numba_loops import LoopAlgorithm, compiled
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.reference import GELU_CUBIC, GELU_LINEAR
from tapwise.problem import DTYPES

# Measured: a dependent multiply-add behind a bounds check; a channel's first element, often not in the first cache.
MULTIPLY_ADD_NS: Final = 1.7
CHANNEL_NS: Final = 4.0
OUTPUT_NS: Final = 5.0
CALL_US: Final = 10.0

# Numbers of the activations inside the compiled loops; 0 is none.
CODES: Final = {None: 0} | {name: number for number, name in enumerate(ACTIVATIONS, 1)}
RELU: Final = CODES["relu"]
RELU6: Final = CODES["relu6"]
SILU: Final = CODES["silu"]
GELU: Final = CODES["gelu"]
SIGMOID: Final = CODES["sigmoid"]
TANH: Final = CODES["tanh"]
HARDSWISH: Final = CODES["hardswish"]
HARDSIGMOID: Final = CODES["hardsigmoid"]
GELU_TANH: Final = CODES["gelu_tanh"]


def convolve(
    x: Any, w: Any, bias: Any, residual: Any, y: Any, groups: int, stride: Any, padding: Any, dilation: Any,
    activation: int, slope: Any, zero: Any,
) -> None:  # fmt: skip
    """The definition, term by term. `zero` has the dtype that sums are kept in; padding is (top, left). `slope`: of a
    leaky_relu."""
    images, output_channels, output_height, output_width = y.shape
    height, width = x.shape[2:]
    group_channels, filter_height, filter_width = w.shape[1:]
    group_outputs = output_channels // groups
    for n in range(images):
        for k in range(output_channels):
            first = k // group_outputs * group_channels
            for p in range(output_height):
                for q in range(output_width):
                    total = zero
                    for c in range(group_channels):
                        for r in range(filter_height):
                            h = p * stride[0] + r * dilation[0] - padding[0]
                            for s in range(filter_width):
                                v = q * stride[1] + s * dilation[1] - padding[1]
                                # Padding is zeros, which make a NaN of a filter's NaN and infinity.
                                inside = h >= 0 and h < height and v >= 0 and v < width
                                value = x[n, first + c, h, v] if inside else zero
                                total += value * w[k, c, r, s]
                    total += bias[k]
                    total += residual[n, k, p, q]
                    one, two = zero + 1, zero + 2
                    if activation in (RELU, RELU6):
                        # Written so that NaN stays NaN.
                        if total < 0:
                            total = zero
                        if activation == RELU6 and total > 6:
                            total = zero + 6
                    elif activation in (SILU, SIGMOID, GELU_TANH):
                        argument = total
                        if activation == GELU_TANH:
                            argument *= zero + GELU_LINEAR + (zero + GELU_CUBIC) * (total * total)
                        # By e^-|argument|, which does not overflow where the result is tiny.
                        power = math.exp(-abs(argument))
                        factor = one if activation == SIGMOID else total
                        total = (factor * power if argument < 0 else factor) / (one + power)
                    elif activation == GELU:
                        total = total * (one + math.erf(total * (zero + 0.7071067811865476))) / two
                    elif activation == TANH:
                        total = math.tanh(total)
                    elif activation in (HARDSWISH, HARDSIGMOID):
                        hard = total + 3
                        if hard < 0:
                            hard = zero
                        if hard > 6:
                            hard = zero + 6
                        total = (total if activation == HARDSWISH else one) * (hard / 6)
                    elif activation > 0 and not total > 0:
                        total *= slope
                    y[n, k, p, q] = total


@cache
def _compiled(dtype: np.dtype[Any]) -> Any:
    """The loops for one dtype, from Numba's disk cache where it has one."""
    import numba
    from numba import types

    scalar = numba.from_dtype(dtype)

    def array(axes: int, readonly: bool = True) -> Any:
        return types.Array(scalar, axes, "A", readonly=readonly)

    pair = types.UniTuple(types.int64, 2)
    signature = types.void(
        array(4),
        array(4),
        array(1),
        array(4),
        array(4, False),
        types.int64,
        pair,
        pair,
        pair,
        types.int64,
        scalar,
        scalar,
    )
    return compiled(convolve, signature)


class Serial(LoopAlgorithm):
    """The plain loop nest on one thread. float32, float64, float16, bfloat16 (computed in float32); NCHW and NHWC.

    No workspace. Rejects other directions, and anything but two spatial axes. Taps in the padding are skipped.
    """

    id: ClassVar[str] = "cpu.serial"
    summary: ClassVar[str] = "the plain loop nest, one thread"
    axes: ClassVar[tuple[int, ...]] = (2,)
    takes_empty: ClassVar[bool] = True

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """A fixed time for each multiply-add, each channel of each output, and each output; on one thread."""
        each = problem.gemm_k * MULTIPLY_ADD_NS + problem.group_c * CHANNEL_NS + OUTPUT_NS
        return CALL_US + 1e-3 * problem.gemm_n * problem.k * each

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        _compiled(DTYPES[problem.accumulator])
        return super().plan(problem, config, device)

    def pack(self, problem: ConvProblem, w: np.ndarray) -> np.ndarray:
        """Filters stay as they are."""
        return np.array(w, DTYPES[problem.accumulator], order="C")

    def run(self, problem: ConvProblem, buffers: Buffers, us: float) -> None:
        """16 bits go through float32 copies of one image at a time."""
        x, packed, y, _, bias, residual, _ = buffers
        dtype = DTYPES[problem.accumulator]
        zero = dtype.type(0)
        if bias is None:
            bias = np.broadcast_to(zero, (problem.k,))
        if residual is None:
            residual = np.broadcast_to(zero, y.shape)
        loops = _compiled(dtype)
        start = tuple(before for before, _ in problem.padding)
        name, slope = named_activation(problem.activation)
        rest = problem.dilation, CODES[name], dtype.type(slope), zero

        def convolve_part(x: np.ndarray, residual: np.ndarray, y: np.ndarray) -> None:
            for first, end in pieces(y.shape[2], us * len(y) / problem.n):
                # Rows from `first` on are those of an image with so much less padding.
                padding = start[0] - first * problem.stride[0], start[1]
                part = residual[:, :, first:end], y[:, :, first:end]
                loops(x, packed, bias, *part, problem.groups, problem.stride, padding, *rest)

        if not problem.widened:
            for first, end in pieces(len(y), us):
                convolve_part(x[first:end], residual[first:end], y[first:end])
            return
        bias = bias.astype(dtype)
        for image in range(len(y)):
            one = slice(image, image + 1)
            sums = np.empty(y[one].shape, dtype)
            convolve_part(x[one].astype(dtype), residual[one].astype(dtype), sums)
            with np.errstate(over="ignore"):
                y[one] = sums
