"""The largest and the smallest of neighbours."""

from __future__ import annotations

import warnings
from math import prod
from typing import Any, Final

import numpy as np

from tapwise.errors import InvalidPicture
from tapwise.image import arguments, values
from tapwise.image.arguments import Call, OneAxis
from tapwise.image.passes import Pass, apply, as_bytes, copy, in_pairs, limits_of

# Taps of a window up to which two axes go at once.
_TOGETHER: Final = 1 << 20


def maximum_filter1d(
    input: Any, size: int, axis: int = -1, output: Any = None, mode: str = "reflect", cval: float = 0.0, origin: int = 0
) -> Any:
    """The largest of `size` neighbours along one axis."""
    arguments.sizes_of(size, 1, 1)
    return _extreme("max", input, (size,), None, output, (mode,), cval, (origin,), OneAxis((axis,)), None)


def minimum_filter1d(
    input: Any, size: int, axis: int = -1, output: Any = None, mode: str = "reflect", cval: float = 0.0, origin: int = 0
) -> Any:
    """The smallest of `size` neighbours along one axis."""
    arguments.sizes_of(size, 1, 1)
    return _extreme("min", input, (size,), None, output, (mode,), cval, (origin,), OneAxis((axis,)), None)


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
    call = Call.resolve(input, output, mode, cval, axes, channel_axis)
    if call.x.dtype.kind == "c":
        raise InvalidPicture(f"input has dtype {call.x.dtype}: Complex type not supported, having no order")
    mask = None if footprint is None else _mask(footprint, len(call.axes))
    if mask is None and size is None:
        raise InvalidPicture("no footprint provided: size or footprint is needed")
    sizes = arguments.sizes_of(size, len(call.axes)) if mask is None else list(mask.shape)
    origins = call.each(origin, "origin")
    if mask is not None and not mask.all():
        if not isinstance(mode, str):
            raise InvalidPicture("A sequence of modes is not supported for non-separable footprints")
        # An origin belongs to the axis that is given, the footprint's axes go in rising order.
        order, (origins, modes) = arguments.sorted_axes(call.axes, origins, call.modes)
        befores, weights = call.befores(sizes, origins), mask.astype(np.float64)
        constant = _cut(call.constant, call.x.dtype)
        apply(call.x, call.y, Pass(op, order, mask.shape, befores, tuple(modes), constant, weights))
        return call.result()
    parts = zip(call.axes, sizes, call.befores(sizes, origins), call.modes, strict=True)
    # A function of one axis goes over it even with one tap: what the result does not hold is cut there.
    windows = [one for one in parts if one[1] > 1 or isinstance(axes, OneAxis)]
    if not windows:
        copy(call.x, call.y)
        return call.result()
    source, y = call.x, as_bytes(call.y)
    # What an integer does not hold is cut after each axis, in the order given.
    windows = sorted(windows) if (held := _held(call, y.dtype)) else windows
    held = held and prod(sizes) <= _TOGETHER
    for group in in_pairs(windows) if held else [[one] for one in windows]:
        order, taps, before, how = zip(*group, strict=True)
        apply(source, y, Pass(op, order, taps, before, how, call.constant))
        source = y
    if y is not call.y:
        np.not_equal(y, 0, out=call.y)
    return call.result()


def _held(call: Call, to: np.dtype[Any]) -> bool:
    """Whether the result's dtype has all numbers of the input, and the constant, within its range."""
    if to.kind == "f":
        return True
    if call.x.dtype.kind == "f":
        return False
    (low, high), (least, most) = limits_of(call.x.dtype), limits_of(to)
    constant = "constant" not in call.modes or least - 1 < call.constant < most + 1
    return constant and least <= low and high <= most


def _cut(constant: float, kind: np.dtype[Any]) -> float:
    """Beside a footprint the constant is a number of the input's dtype, as in scipy; integers keep its low bits."""
    if kind.kind == "f" or not abs(constant) < 2.0**63:
        return constant
    return float(np.array(int(constant)).astype(np.uint8 if kind.kind == "b" else kind))


def _mask(footprint: Any, count: int) -> np.ndarray:
    """Where to look, with one axis for each filtered one."""
    mask = values.numbers(footprint, "footprint").astype(bool)
    if not mask.any():
        raise InvalidPicture("All-zero footprint is not supported.")
    if mask.ndim != count:
        words = "sequence argument must have length equal to input rank: " if mask.all() else ""
        raise InvalidPicture(f"{words}footprint.ndim ({mask.ndim}) must match len(axes) ({count})")
    return mask
