"""Filters on arrays of any number of axes, with scipy.ndimage's arguments and meanings.

What all functions take, besides what is their own:

input: integers, floating point, or (sums only) complex; of NumPy, a PyTorch tensor, or another array in this
    machine's memory or, but for complex, on a GPU, which then computes. Not changed unless it is also the output.
output: an array to write to, or the result's dtype; the input's dtype by default. Integers are cut off towards zero
    and to their low bits, after each axis, as in scipy; a sum that misses a whole number by its roundings counts as it.
mode: what lies beyond the edges, one for all axes or one for each: reflect or grid-mirror (d c b a | a b c d | d c b
    a), constant or grid-constant (`cval`), nearest, mirror (d c b | a b c d | c b a), wrap or grid-wrap.
origin: how far the window is shifted to the left, 0 for one about the element.
axes: which are filtered, all by default. channel_axis: one that is not, whose elements are colours, say.

All raise InvalidPicture, with the argument's name, for what is not allowed. Sums of float32 are in float32, of float64
in float64; of integers in whichever makes whole-number weights exact. Source: scipy.ndimage, whose manual defines
these functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tapwise import arrays
from tapwise.arrays import device as cuda
from tapwise.arrays.device import DeviceArray
from tapwise.errors import InvalidPicture
from tapwise.image import arguments
from tapwise.image.passes import Pass, apply
from tapwise.image.weights import factors, gaussian_weights

_SOBEL: Final = (1.0, 2.0, 1.0)
_PREWITT: Final = (1.0, 1.0, 1.0)
_SECOND: Final = (1.0, -2.0, 1.0)


def _input(value: Any) -> Any:
    """A NumPy array of the same memory, or a DeviceArray; sequences are copied."""
    if isinstance(value, np.ndarray):
        return arrays.view(value, "input")
    if cuda.is_device(value):
        return cuda.view(value, "input")
    if hasattr(value, "__dlpack__") and not isinstance(value, np.generic):
        return arrays.view(value, "input")
    return np.asarray(value)


def _output(value: Any) -> Any:
    """A dtype, or a NumPy array of the same memory, or a DeviceArray."""
    if not isinstance(value, type) and cuda.is_device(value):
        return cuda.view(value, "output")
    is_array = hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, np.generic, type))
    return arrays.view(value, "output") if is_array else value


def _result(y: Any, input: Any, output: Any) -> Any:
    """The array given as output, else one like the input."""
    if output is not None and not isinstance(output, (type, np.dtype, str)):
        return output
    if isinstance(y, DeviceArray):
        return arrays.like(y, input)
    return y if isinstance(input, np.ndarray) or not hasattr(input, "__dlpack__") else arrays.like(y, input)


def _copy(x: Any, y: Any) -> Any:
    if isinstance(y, DeviceArray):
        one = Pass("dense", (0,), (1,), (0,), ("nearest",), weights=np.ones(1))
        if x is not y:
            apply(x, y, one)
        return y
    np.copyto(y, x, casting="unsafe")
    return y


# Sums with weights


def correlate1d(
    input: Any, weights: Any, axis: int = -1, output: Any = None, mode: str = "reflect", cval: complex = 0.0,
    origin: int = 0,
) -> Any:  # fmt: skip
    """y[i] = sum of weights[k] * x[i + k - len(weights) // 2 - origin] along an axis; complex weights conjugated."""
    x, w = _input(input), np.asarray(weights)
    if w.ndim != 1 or len(w) < 1:
        raise InvalidPicture(f"weights has shape {w.shape}: no filter weights given; a sequence of numbers is needed")
    number, how = arguments.axis_of(axis, x.ndim), arguments.mode_of(mode)
    before = arguments.before_of(len(w), origin)

    def sweep(part: np.ndarray, real: np.ndarray, to: np.ndarray, constant: float) -> None:
        apply(part, to, Pass("dense", (number,), (len(w),), (before,), (how,), constant, real))

    return _result(_summed(x, w.conj(), _output(output), cval, sweep), input, output)


def convolve1d(
    input: Any, weights: Any, axis: int = -1, output: Any = None, mode: str = "reflect", cval: complex = 0.0,
    origin: int = 0,
) -> Any:  # fmt: skip
    """correlate1d with the weights turned round, and not conjugated."""
    w = np.asarray(weights)
    if w.ndim != 1 or len(w) < 1:
        raise InvalidPicture(f"weights has shape {w.shape}: no filter weights given; a sequence of numbers is needed")
    return correlate1d(input, w[::-1].conj(), axis, output, mode, cval, -origin - (len(w) + 1) % 2)


def correlate(
    input: Any, weights: Any, output: Any = None, mode: str = "reflect", cval: complex = 0.0, origin: Any = 0, *,
    axes: Any = None, channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """y[i] = sum of weights[k] * x[i + k - shape(weights) // 2 - origin]; weights have one axis for each filtered one.

    Complex weights are conjugated. Weights that are a column times a row, or a few such products, are found and go in
    passes where that is faster and the result is no whole number. A weight of 0 counts for nothing.
    """
    return _correlate(input, np.asarray(weights), output, mode, cval, origin, axes, channel_axis, False)


def convolve(
    input: Any, weights: Any, output: Any = None, mode: str = "reflect", cval: complex = 0.0, origin: Any = 0, *,
    axes: Any = None, channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """correlate with the weights turned round along each axis, and not conjugated."""
    return _correlate(input, np.asarray(weights), output, mode, cval, origin, axes, channel_axis, True)


def _correlate(
    input: Any, w: np.ndarray, output: Any, mode: Any, cval: complex, origin: Any, axes: Any, channel_axis: int | None,
    turned: bool,
) -> Any:  # fmt: skip
    x = _input(input)
    where = arguments.axes_of(axes, x.ndim, channel_axis)
    if w.ndim != len(where) or 0 in w.shape:
        raise InvalidPicture(f"weights.ndim ({w.ndim}) must match len(axes) ({len(where)}), each at least 1: {w.shape}")
    if not isinstance(mode, str):
        raise InvalidPicture(f"mode={mode!r}: a sequence of modes is not supported")
    how = arguments.mode_of(mode)
    # An origin belongs to the axis that is given, the weights' axes go in rising order.
    order, (origins,) = arguments.sorted_axes(where, arguments.each(origin, len(where), "origin"))
    if turned:
        w = np.flip(w)
        origins = [-one - (size + 1) % 2 for one, size in zip(origins, w.shape, strict=True)]
    elif w.dtype.kind == "c":
        w = w.conj()
    befores = [arguments.before_of(size, one) for size, one in zip(w.shape, origins, strict=True)]
    modes = (how,) * len(order)

    def sweep(part: np.ndarray, real: np.ndarray, to: np.ndarray, constant: float) -> None:
        if not order:
            _copy(part * real, to)
            return
        found = factors(real, to.dtype, how, constant) if len(order) == 2 else None
        if found is None or (len(found) > 1 and isinstance(part, DeviceArray)):
            apply(part, to, Pass("dense", order, w.shape, tuple(befores), modes, constant, real))
            return
        separable = Pass("separable", order, w.shape, tuple(befores), modes, constant, truncate=False)
        source = arrays.copy(part) if arrays.overlap(part, to) else part
        apply(source, to, replace(separable, weights=found[0]))
        for more in found[1:]:
            term = np.empty(to.shape, to.dtype)
            apply(source, term, replace(separable, weights=more))
            to += term

    return _result(_summed(x, w, _output(output), cval, sweep), input, output)


def _summed(
    x: Any, w: np.ndarray, output: Any, cval: complex,
    sweep: Callable[[np.ndarray, np.ndarray, np.ndarray, float], None],
) -> Any:  # fmt: skip
    """sweep(x, weights, y, cval) over the real and imaginary parts of both."""
    complex_x, complex_w = x.dtype.kind == "c", w.dtype.kind == "c"
    if complex_w and isinstance(x, DeviceArray):
        raise InvalidPicture("weights are complex: on a GPU they are not taken")
    y = arguments.output_of(output, x, complex_x or complex_w)
    if not complex_x and not complex_w:
        constant = float(np.real(cval))
        if np.iscomplexobj(cval):
            raise InvalidPicture("cval is complex and the input is real")
        sweep(x, w.astype(np.float64), y, constant)
        return y
    if np.iscomplexobj(cval) and not complex_x:
        raise InvalidPicture("Cannot provide a complex-valued cval when the input is real.")
    if np.may_share_memory(x, y):
        x = x.copy()
    parts = (x.real, x.imag) if complex_x else (x,)
    constants = (float(np.real(cval)), float(np.imag(cval)))
    inputs = list(zip(parts, constants, strict=False))
    real = w.real.astype(np.float64)
    for part, (source, constant) in zip((y.real, y.imag), inputs, strict=False):
        sweep(source, real, part, constant)
    if not complex_x:
        sweep(inputs[0][0], w.imag.astype(np.float64), y.imag, inputs[0][1])
    elif complex_w:
        imaginary = w.imag.astype(np.float64)
        term = np.empty(y.shape, y.real.dtype)
        sweep(inputs[1][0], imaginary, term, inputs[1][1])
        y.real -= term
        sweep(inputs[0][0], imaginary, term, inputs[0][1])
        y.imag += term
    return y


def _along(
    x: Any, y: Any, axes: Sequence[int], weights: Sequence[np.ndarray], origins: Sequence[Any],
    modes: Sequence[str], cval: complex, clip: bool = False,
) -> Any:  # fmt: skip
    """Weights along one axis after the other, in that order; two neighbours at a time go together."""
    if x.dtype.kind == "c":
        if np.may_share_memory(x, y):
            x = x.copy()
        for one, to, constant in ((x.real, y.real, np.real(cval)), (x.imag, y.imag, np.imag(cval))):
            _along(one, to, axes, weights, origins, modes, float(constant))
        return y
    if not axes:
        return _copy(x, y)
    befores = [arguments.before_of(len(w), origin) for w, origin in zip(weights, origins, strict=True)]
    source, done = x, 0
    # From the last: what is left over goes by itself, first.
    groups = [[number] for number in range(len(axes) % 2)] + [
        [number, number + 1] for number in range(len(axes) % 2, len(axes), 2)
    ]
    for group in groups:
        for part in _pairs(group, axes, weights, modes, cval, y.dtype):
            order, (numbers,) = arguments.sorted_axes([axes[number] for number in part], part)
            pair = len(numbers) == 2
            w = np.concatenate([weights[number] for number in numbers])
            sweep = Pass(
                "separable" if pair else "dense", order, tuple(len(weights[number]) for number in numbers),
                tuple(befores[number] for number in numbers), tuple(modes[number] for number in numbers),
                float(np.real(cval)), w, clip=clip,
            )  # fmt: skip
            apply(source, y, sweep)
            source, done = y, done + 1
    return y


def _pairs(
    group: list[int], axes: Sequence[int], weights: Sequence[np.ndarray], modes: Sequence[str], cval: complex,
    to: np.dtype[Any],
) -> list[list[int]]:  # fmt: skip
    """A pair as it is where both axes together mean the same as one after the other, else each by itself.

    They do not where a constant other than 0 lies beyond an edge and the weights change it, nor with the later axis
    first and sums that are cut off, nor with unsigned integers of 64 bits, of which float64 does not hold all.
    """
    if len(group) == 1:
        return [group]
    one, two = group
    constant = cval != 0 and "constant" in (modes[one], modes[two])
    same = all(abs(float(weights[number].sum()) - 1.0) < 1e-9 for number in group)
    whole = all(np.all(weights[number] == np.rint(weights[number])) for number in group)
    if (constant and not same) or to == np.uint64 or (axes[one] > axes[two] and not whole):
        return [[one], [two]]
    return [group]


# Gaussian, mean


def gaussian_filter1d(
    input: Any, sigma: float, axis: int = -1, order: int = 0, output: Any = None, mode: str = "reflect",
    cval: complex = 0.0, truncate: float = 4.0, *, radius: int | None = None,
) -> Any:  # fmt: skip
    """A Gaussian of standard deviation `sigma`, or its `order`-th derivative, along one axis.

    It has radius taps to each side, int(truncate * sigma + 0.5) by default.
    """
    return gaussian_filter(
        input, (sigma,), (order,), output, (mode,), cval, truncate, radius=None if radius is None else (radius,),
        axes=(axis,),
    )  # fmt: skip


def gaussian_filter(
    input: Any, sigma: Any, order: Any = 0, output: Any = None, mode: Any = "reflect", cval: complex = 0.0,
    truncate: float = 4.0, *, radius: Any = None, axes: Any = None, channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """gaussian_filter1d along each axis; sigma, order, mode and radius one for all or one for each."""
    x = _input(input)
    where = arguments.axes_of(axes, x.ndim, channel_axis)
    count = len(where)
    sigmas, orders = arguments.each(sigma, count, "sigma"), arguments.each(order, count, "order")
    radii = arguments.each(radius, count, "radius")
    modes = [arguments.mode_of(mode) for mode in arguments.each(mode, count, "mode")]
    weights = [gaussian_weights(*one, truncate) for one in zip(sigmas, orders, radii, strict=True)]
    kept = [number for number in range(count) if sigmas[number] > 1e-15]
    y = arguments.output_of(_output(output), x, x.dtype.kind == "c")
    _along(
        x, y, [where[n] for n in kept], [weights[n] for n in kept], [0] * len(kept), [modes[n] for n in kept], cval
    )  # fmt: skip
    return _result(y, input, output)


def uniform_filter1d(
    input: Any, size: int, axis: int = -1, output: Any = None, mode: str = "reflect", cval: complex = 0.0,
    origin: int = 0,
) -> Any:  # fmt: skip
    """The mean of `size` neighbours along one axis."""
    arguments.sizes_of(size, 1, 1)
    return uniform_filter(input, (size,), output, (mode,), cval, (origin,), axes=(axis,))


def uniform_filter(
    input: Any, size: Any = 3, output: Any = None, mode: Any = "reflect", cval: complex = 0.0, origin: Any = 0, *,
    axes: Any = None, channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """The mean of a box of `size` elements; size, mode and origin one for all axes or one for each."""
    x = _input(input)
    where = arguments.axes_of(axes, x.ndim, channel_axis)
    sizes = arguments.sizes_of(size, len(where))
    origins = arguments.each(origin, len(where), "origin")
    modes = [arguments.mode_of(one) for one in arguments.each(mode, len(where), "mode")]
    kept = [number for number, one in enumerate(sizes) if one > 1]
    for number in range(len(where)):
        arguments.before_of(sizes[number], origins[number])
    y = arguments.output_of(_output(output), x, x.dtype.kind == "c")
    _along(
        x, y, [where[n] for n in kept], [np.full(sizes[n], 1.0 / sizes[n]) for n in kept], [origins[n] for n in kept],
        [modes[n] for n in kept], cval,
    )  # fmt: skip
    return _result(y, input, output)


# Derivatives


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
    x = _input(input)
    channel = None if channel_axis is None else arguments.axis_of(channel_axis, x.ndim)
    number = arguments.axis_of(axis, x.ndim)
    if axis == -1 and number == channel:
        number -= 1
    if number == channel or number < 0:
        raise InvalidPicture(f"axis={axis}: channel_axis={channel_axis} is not filtered")
    modes = [arguments.mode_of(one) for one in arguments.each(mode, x.ndim, "mode")]
    order = [number, *(one for one in range(x.ndim) if one not in (number, channel))]
    weights = [np.array((-1.0, 0.0, 1.0)), *(np.array(smooth) for _ in order[1:])]
    y = arguments.output_of(_output(output), x, x.dtype.kind == "c")
    _along(x, y, order, weights, [0] * len(order), [modes[one] for one in order], cval)
    return _result(y, input, output)


def laplace(
    input: Any, output: Any = None, mode: Any = "reflect", cval: complex = 0.0, *, axes: Any = None,
    channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """The sum of second differences (1, -2, 1) along each axis."""
    x = _input(input)
    where = arguments.axes_of(axes, x.ndim, channel_axis)
    modes = [arguments.mode_of(one) for one in arguments.each(mode, len(where), "mode")]
    y = arguments.output_of(_output(output), x)
    # In one pass, unless what is cut off would be cut off along each axis.
    fused = x.dtype.kind != "f" or y.dtype.kind == "f" or isinstance(x, DeviceArray)
    if x.dtype.kind in "iufb" and 1 <= len(where) <= 3 and fused:
        weights = np.zeros((3,) * len(where))
        for number in range(len(where)):
            weights[tuple(slice(None) if one == number else 1 for one in range(len(where)))] += _SECOND
        order, (modes,) = arguments.sorted_axes(where, modes)
        ones = (1,) * len(where)
        apply(x, y, Pass("dense", order, weights.shape, ones, tuple(modes), float(np.real(cval)), weights))
        return _result(y, input, output)

    def second(source: np.ndarray, axis: int, to: np.ndarray, mode: str) -> None:
        correlate1d(source, _SECOND, axis, to, mode, cval)

    return _result(_sum_over(x, y, where, modes, second), input, output)


def gaussian_laplace(
    input: Any, sigma: Any, output: Any = None, mode: Any = "reflect", cval: complex = 0.0, *, axes: Any = None,
    channel_axis: int | None = None, **options: Any,
) -> Any:  # fmt: skip
    """The sum of second derivatives of a Gaussian along each axis; options (truncate, radius) as in gaussian_filter."""
    x = _input(input)
    where = arguments.axes_of(axes, x.ndim, channel_axis)
    modes = [arguments.mode_of(one) for one in arguments.each(mode, len(where), "mode")]
    sigmas = arguments.each(sigma, len(where), "sigma")
    y = arguments.output_of(_output(output), x)
    if isinstance(x, DeviceArray):
        return _result(_laplace_there(x, y, where, sigmas, modes, cval, options), input, output)

    def second(source: np.ndarray, axis: int, to: np.ndarray, mode: str) -> None:
        orders = [2 if one == axis else 0 for one in where]
        gaussian_filter(source, sigmas, orders, to, mode, cval, axes=where, **options)

    return _result(_sum_over(x, y, where, modes, second), input, output)


def _laplace_there(
    x: DeviceArray, y: DeviceArray, axes: Sequence[int], sigmas: Sequence[Any], modes: Sequence[str], cval: complex,
    options: dict[str, Any],
) -> DeviceArray:  # fmt: skip
    """gaussian_laplace on a GPU: all taps of the window at once."""
    order, (sigmas, modes) = arguments.sorted_axes(axes, sigmas, modes)
    if not 1 <= len(order) <= 3:
        raise InvalidPicture(f"axes={axes}: up to three at once on a GPU")
    radii = arguments.each(options.get("radius"), len(order), "radius")
    truncate = options.get("truncate", 4.0)
    total: Any = 0.0
    for axis in range(len(order)):
        term: Any = 1.0
        for number, (sigma, radius) in enumerate(zip(sigmas, radii, strict=True)):
            term = np.multiply.outer(term, gaussian_weights(sigma, 2 * (number == axis), radius, truncate))
        total = total + term
    befores = tuple(size // 2 for size in total.shape)
    apply(x, y, Pass("dense", order, total.shape, befores, tuple(modes), float(np.real(cval)), total))
    return y


def _sum_over(
    x: Any, y: Any, axes: Sequence[int], modes: Sequence[str],
    derivative: Callable[[np.ndarray, int, np.ndarray, str], None],
) -> Any:  # fmt: skip
    """y = sum of derivative(x, axis, ., mode) over the axes."""
    if not axes:
        return _copy(x, y)
    source = arrays.copy(x) if arrays.overlap(x, y) else x
    derivative(source, axes[0], y, modes[0])
    for axis, mode in zip(axes[1:], modes[1:], strict=True):
        term = np.empty(y.shape, y.dtype)
        derivative(source, axis, term, mode)
        y += term
    return y


# The largest, the smallest


def maximum_filter1d(
    input: Any, size: int, axis: int = -1, output: Any = None, mode: str = "reflect", cval: float = 0.0, origin: int = 0
) -> Any:
    """The largest of `size` neighbours along one axis."""
    arguments.sizes_of(size, 1, 1)
    return _extreme("max", input, (size,), None, output, (mode,), cval, (origin,), (axis,), None)


def minimum_filter1d(
    input: Any, size: int, axis: int = -1, output: Any = None, mode: str = "reflect", cval: float = 0.0, origin: int = 0
) -> Any:
    """The smallest of `size` neighbours along one axis."""
    arguments.sizes_of(size, 1, 1)
    return _extreme("min", input, (size,), None, output, (mode,), cval, (origin,), (axis,), None)


def maximum_filter(
    input: Any, size: Any = None, footprint: Any = None, output: Any = None, mode: Any = "reflect", cval: float = 0.0,
    origin: Any = 0, *, axes: Any = None, channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """The largest element of a box of `size`, or of where `footprint` is true."""
    return _extreme("max", input, size, footprint, output, mode, cval, origin, axes, channel_axis)


def minimum_filter(
    input: Any, size: Any = None, footprint: Any = None, output: Any = None, mode: Any = "reflect", cval: float = 0.0,
    origin: Any = 0, *, axes: Any = None, channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """The smallest element of a box of `size`, or of where `footprint` is true."""
    return _extreme("min", input, size, footprint, output, mode, cval, origin, axes, channel_axis)


def _extreme(
    op: str, input: Any, size: Any, footprint: Any, output: Any, mode: Any, cval: float, origin: Any, axes: Any,
    channel_axis: int | None,
) -> Any:  # fmt: skip
    if size is not None and footprint is not None:
        warnings.warn("ignoring size because footprint is set", UserWarning, stacklevel=3)
    x = _input(input)
    where = arguments.axes_of(axes, x.ndim, channel_axis)
    mask: np.ndarray | None = None
    if footprint is None:
        if size is None:
            raise InvalidPicture("no footprint provided: size or footprint is needed")
        sizes = arguments.sizes_of(size, len(where))
    else:
        mask = np.asarray(footprint, bool)
        if not mask.any():
            raise InvalidPicture("All-zero footprint is not supported.")
        if mask.ndim != len(where):
            words = "sequence argument must have length equal to input rank: " if mask.all() else ""
            raise InvalidPicture(f"{words}footprint.ndim ({mask.ndim}) must match len(axes) ({len(where)})")
        sizes = list(mask.shape)
        mask = None if mask.all() else mask
    if x.dtype.kind == "c":
        raise InvalidPicture("Complex type not supported: numbers that have an order are needed")
    if mask is not None and not isinstance(mode, str):
        raise InvalidPicture("A sequence of modes is not supported for non-separable footprints")
    y = arguments.output_of(_output(output), x)
    modes = [arguments.mode_of(one) for one in arguments.each(mode, len(where), "mode")]
    origins = arguments.each(origin, len(where), "origin")
    befores = [arguments.before_of(*pair) for pair in zip(sizes, origins, strict=True)]
    constant = float(np.real(cval))
    if mask is not None:
        # An origin belongs to the axis that is given, the footprint's axes go in rising order.
        order, (origins,) = arguments.sorted_axes(where, origins)
        befores = [arguments.before_of(*pair) for pair in zip(mask.shape, origins, strict=True)]
        sweep = Pass(op, order, mask.shape, tuple(befores), tuple(modes), constant, mask.astype(np.float64))
        apply(x, y, sweep)
        return _result(y, input, output)
    order, (sizes, befores, modes) = arguments.sorted_axes(where, sizes, befores, modes)
    kept = [number for number, one in enumerate(sizes) if one > 1]
    source = x
    groups = [[number] for number in kept[: len(kept) % 2]]
    rest = kept[len(kept) % 2 :]
    groups += [rest[number : number + 2] for number in range(0, len(rest), 2)]
    for group in groups:
        sweep = Pass(
            op, tuple(order[n] for n in group), tuple(sizes[n] for n in group), tuple(befores[n] for n in group),
            tuple(modes[n] for n in group), constant,
        )  # fmt: skip
        apply(source, y, sweep)
        source = y
    return _result(y if kept else _copy(x, y), input, output)
