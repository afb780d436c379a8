"""Sums of neighbours with weights that the caller gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tapwise import arrays
from tapwise.arguments import shown
from tapwise.arrays.device import DeviceArray
from tapwise.errors import InvalidPicture
from tapwise.image import arguments, values
from tapwise.image.arguments import Call, OneAxis
from tapwise.image.passes import Pass, apply, copy
from tapwise.image.weights import factors

# sweep(x, weights, y, cval) of real arrays.
Sweep = Callable[[Any, np.ndarray, Any, float], None]


def correlate1d(
    input: Any, weights: Any, axis: int = -1, output: Any = None, mode: str = "reflect", cval: complex = 0.0,
    origin: int = 0,
) -> Any:  # fmt: skip
    """y[i] = sum of weights[k] * x[i + k - len(weights) // 2 - origin] along an axis; complex weights conjugated."""
    return _correlate(input, _row(weights), output, (mode,), cval, (origin,), OneAxis((axis,)))


def convolve1d(
    input: Any, weights: Any, axis: int = -1, output: Any = None, mode: str = "reflect", cval: complex = 0.0,
    origin: int = 0,
) -> Any:  # fmt: skip
    """correlate1d with the weights flipped, and not conjugated."""
    return _correlate(input, _row(weights), output, (mode,), cval, (origin,), OneAxis((axis,)), flipped=True)


def _row(weights: Any) -> np.ndarray:
    w = values.numbers(weights, "weights")
    if w.ndim != 1 or len(w) < 1:
        raise InvalidPicture(f"weights has shape {w.shape}: no filter weights given; a sequence of numbers is needed")
    return w


def correlate(
    input: Any, weights: Any, output: Any = None, mode: str = "reflect", cval: complex = 0.0, origin: Any = 0, *,
    axes: Any = None, channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """y[i] = sum of weights[k] * x[i + k - shape(weights) // 2 - origin]; weights have one axis for each filtered one.

    Complex weights are conjugated. Weights that are a column times a row, or a few such products, are found and go in
    passes where that is faster and the result is not integral. A weight of 0 counts for nothing.
    """
    return _correlate(
        input, values.numbers(weights, "weights"), output, _single(mode), cval, origin, axes, channel_axis
    )


def convolve(
    input: Any, weights: Any, output: Any = None, mode: str = "reflect", cval: complex = 0.0, origin: Any = 0, *,
    axes: Any = None, channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """correlate with the weights flipped along each axis, and not conjugated."""
    return _correlate(
        input, values.numbers(weights, "weights"), output, _single(mode), cval, origin, axes, channel_axis, flipped=True
    )


def _single(mode: Any) -> str:
    if not isinstance(mode, str):
        raise InvalidPicture(f"mode={shown(mode)}: a sequence of modes is not supported")
    return mode


def _correlate(
    input: Any, weights: Any, output: Any, mode: Any, cval: complex, origin: Any, axes: Any,
    channel_axis: int | None = None, flipped: bool = False,
) -> Any:  # fmt: skip
    w = values.numbers(weights, "weights")
    call = Call.resolve(input, output, mode, cval, axes, channel_axis, complex_weights=w.dtype.kind == "c")
    if w.ndim != len(call.axes) or 0 in w.shape:
        raise InvalidPicture(
            f"weights.ndim ({w.ndim}) must match len(axes) ({len(call.axes)}), those of input without channel_axis, "
            f"each at least 1: {shown(w)}"
        )
    # An origin belongs to the axis that is given, the weights' axes go in rising order.
    given = [values.whole(one, "origin") for one in call.each(origin, "origin")]
    order, (origins, modes) = arguments.sorted_axes(call.axes, given, call.modes)
    if flipped:
        w = np.flip(w)
        origins = [-one - (size + 1) % 2 for one, size in zip(origins, w.shape, strict=True)]
    elif w.dtype.kind == "c":
        w = w.conj()
    in_order = isinstance(axes, OneAxis)
    dense = Pass("dense", order, w.shape, call.befores(w.shape, origins), tuple(modes), ordered=in_order)

    def sweep(x: Any, real: np.ndarray, y: Any, constant: float) -> None:
        if not order:
            copy(x * real, y)
            return
        found = factors(real, y.dtype, modes[0], constant) if len(order) == 2 else None
        if found is None or (len(found) > 1 and isinstance(x, DeviceArray)):
            apply(x, y, replace(dense, cval=constant, weights=real))
            return
        separable = replace(dense, op="separable", cval=constant, truncate=False)
        source = arrays.copy(x) if arrays.overlap(x, y) else x
        apply(source, y, replace(separable, weights=found[0]))
        for more in found[1:]:
            term = np.empty(y.shape, y.dtype)
            apply(source, term, replace(separable, weights=more))
            y += term

    _by_parts(call, w, sweep)
    return call.result()


def _by_parts(call: Call, w: np.ndarray, sweep: Sweep) -> None:
    """sweep over the real and imaginary parts of the input and of the weights."""
    x, y = call.x, call.y
    complex_x, complex_w = x.dtype.kind == "c", w.dtype.kind == "c"
    real = (w.real if complex_w else w).astype(np.float64)
    if not complex_x and not complex_w:
        sweep(x, real, y, call.constant)
        return
    if np.may_share_memory(x, y):
        x = x.copy()
    if not complex_x:
        sweep(x, real, y.real, call.constant)
        sweep(x, w.imag.astype(np.float64), y.imag, call.constant)
        return
    parts = ((x.real, y.real, call.constant), (x.imag, y.imag, float(np.imag(call.cval))))
    for source, to, constant in parts:
        sweep(source, real, to, constant)
    if not complex_w:
        return
    imaginary, term = w.imag.astype(np.float64), np.empty(y.shape, y.real.dtype)
    (real_x, _, real_cval), (imag_x, _, imag_cval) = parts
    sweep(imag_x, imaginary, term, imag_cval)
    y.real -= term
    sweep(real_x, imaginary, term, real_cval)
    y.imag += term
