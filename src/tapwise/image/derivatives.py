"""Differences of neighbours: gradients, and sums of second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from tapwise import arrays
from tapwise.arguments import shown
from tapwise.arrays.device import DeviceArray
from tapwise.errors import InvalidPicture
from tapwise.image import arguments
from tapwise.image.arguments import Call
from tapwise.image.passes import Along, Pass, apply, apply_along, copy
from tapwise.image.smoothing import gaussians
from tapwise.image.weights import gaussian_weights

_FIRST: Final = (-1.0, 0.0, 1.0)
_SECOND: Final = (1.0, -2.0, 1.0)
_SAME: Final = (0.0, 1.0, 0.0)
_SOBEL: Final = (1.0, 2.0, 1.0)
_PREWITT: Final = (1.0, 1.0, 1.0)
# Axes that one pass takes.
_MOST_AXES: Final = 3


def prewitt(
    input: Any, axis: int = -1, output: Any = None, mode: Any = "reflect", cval: complex = 0.0, *,
    channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """The difference (-1, 0, 1) along an axis, summed (1, 1, 1) along the others."""
    return _gradient(input, axis, output, mode, cval, _PREWITT, channel_axis)


def sobel(
    input: Any, axis: int = -1, output: Any = None, mode: Any = "reflect", cval: complex = 0.0, *,
    channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """The difference (-1, 0, 1) along an axis, summed (1, 2, 1) along the others."""
    return _gradient(input, axis, output, mode, cval, _SOBEL, channel_axis)


def _gradient(
    input: Any, axis: int, output: Any, mode: Any, cval: complex, smooth: Sequence[float], channel_axis: int | None
) -> Any:
    call = Call.resolve(input, output, mode, cval)
    channel = None if channel_axis is None else arguments.axis_of(channel_axis, call.x.ndim, "channel_axis")
    along = arguments.axis_of(axis, call.x.ndim)
    if axis == -1 and along == channel:
        along -= 1
    if along == channel or along < 0:
        raise InvalidPicture(f"axis={axis}: channel_axis={shown(channel_axis)} is not filtered")
    others = [Along(one, np.array(smooth), 1, call.modes[one]) for one in call.axes if one not in (along, channel)]
    parts = [Along(along, np.array(_FIRST), 1, call.modes[along]), *others]
    apply_along(call.x, call.y, parts, cval)
    return call.result()


def laplace(
    input: Any, output: Any = None, mode: Any = "reflect", cval: complex = 0.0, *, axes: Any = None,
    channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """The sum of second differences (1, -2, 1) along each axis."""
    call = Call.resolve(input, output, mode, cval, axes, channel_axis)
    x, count, on_gpu = call.x, len(call.axes), isinstance(call.x, DeviceArray)

    def second(number: int) -> list[Along]:
        return [Along(call.axes[number], np.array(_SECOND), 1, call.modes[number])]

    # In one pass, unless sums are to be cut along each axis.
    kinds = x.dtype.kind, call.y.dtype.kind
    fused = kinds[0] != "c" and kinds[1] != "b" and (kinds[0] != "f" or kinds[1] == "f") and count <= _MOST_AXES
    if count and (on_gpu or fused):
        _at_once(call, lambda number: [np.array(_SECOND if one == number else _SAME) for one in range(count)])
    else:
        _sum_over(call, second)
    return call.result()


def gaussian_laplace(
    input: Any, sigma: Any, output: Any = None, mode: Any = "reflect", cval: complex = 0.0, *, axes: Any = None,
    channel_axis: int | None = None, truncate: float = 4.0, radius: Any = None,
) -> Any:  # fmt: skip
    """The sum of second derivatives of a Gaussian along each axis; truncate and radius as in gaussian_filter."""
    call = Call.resolve(input, output, mode, cval, axes, channel_axis)
    sigmas, radii = call.each(sigma, "sigma"), call.each(radius, "radius")

    def weights(number: int) -> list[np.ndarray]:
        pairs = enumerate(zip(sigmas, radii, strict=True))
        return [gaussian_weights(spread, 2 * (one == number), reach, truncate) for one, (spread, reach) in pairs]

    # As in scipy, an axis's mode is that of all axes for its term.
    def second(number: int) -> list[Along]:
        return gaussians(call, sigmas, weights(number), [call.modes[number]] * len(sigmas))

    if call.axes and isinstance(call.x, DeviceArray):
        if call.constant and len(call.axes) > 1 and "constant" in call.modes:
            # Each axis would see the constant beside what the others made.
            raise InvalidPicture(f"cval={call.constant}: on a GPU 0 is allowed, over several axes with mode='constant'")
        _at_once(call, weights)
    else:
        _sum_over(call, second)
    return call.result()


def _at_once(call: Call, weights: Callable[[int], list[np.ndarray]]) -> None:
    """The sum over the axes in one pass, all taps of the window."""
    count = len(call.axes)
    if count > _MOST_AXES:
        raise InvalidPicture(f"axes={call.axes}: up to three at once on a GPU")
    total: Any = 0.0
    for number in range(count):
        term: Any = 1.0
        for row in weights(number):
            term = np.multiply.outer(term, row)
        total = total + term
    order, (modes,) = arguments.sorted_axes(call.axes, call.modes)
    total = total.transpose(np.argsort(call.axes))
    befores = tuple(size // 2 for size in total.shape)
    apply(call.x, call.y, Pass("dense", order, total.shape, befores, tuple(modes), call.constant, total))


def _sum_over(call: Call, derivative: Callable[[int], list[Along]]) -> None:
    """y = sum over the axes of what derivative(number of the axis) says."""
    x, y = call.x, call.y
    if not call.axes:
        copy(x, y)
        return
    source = arrays.copy(x) if arrays.overlap(x, y) else x
    apply_along(source, y, derivative(0), call.cval)
    for number in range(1, len(call.axes)):
        term = np.empty(y.shape, y.dtype)
        apply_along(source, term, derivative(number), call.cval)
        y += term
