"""Arguments as scipy.ndimage means them: each is checked and resolved here, before anything is computed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from tapwise import arrays
from tapwise.arguments import shown
from tapwise.arrays.device import DeviceArray
from tapwise.errors import InvalidPicture
from tapwise.image import values
from tapwise.ops.filter.edges import MODES

_ALIASES: Final = {"grid-mirror": "reflect", "grid-wrap": "wrap", "grid-constant": "constant"}


@dataclass(frozen=True)
class Call:
    """What every filter takes, resolved once.

    x: the input, a NumPy array or a DeviceArray of the same memory. y: the array that the result goes to. axes: those
    that are filtered, in the order given; modes: what lies beyond the edges of each. `result`: what the user gets.
    """

    x: Any
    y: Any
    axes: tuple[int, ...]
    modes: tuple[str, ...]
    cval: complex
    input: Any
    output: Any

    @classmethod
    def resolve(
        cls, input: Any, output: Any, mode: Any, cval: complex, axes: Any = None, channel_axis: int | None = None,
        complex_weights: bool = False,
    ) -> Self:  # fmt: skip
        """Raises InvalidPicture for an argument that is not allowed."""
        x = values.array(input, "input")
        # Sequences are copied.
        x = values.numbers(input, "input") if x is None else x
        if x.dtype.kind not in values.NUMBERS:
            raise InvalidPicture(f"input has dtype {x.dtype}: integers and real or complex floating point are taken")
        found = axes_of(axes, x.ndim, channel_axis)
        given = [mode_of(mode)] * len(found) if isinstance(mode, str) else each(mode, len(found), "mode")
        modes = tuple(mode_of(one) for one in given)
        is_complex, cval = x.dtype.kind == "c", values.constant(cval)
        if isinstance(cval, complex) and not is_complex:
            raise InvalidPicture(f"cval={shown(cval)}: Cannot provide a complex-valued cval when the input is real.")
        if complex_weights and isinstance(x, DeviceArray):
            raise InvalidPicture("weights are complex: on a GPU they are not taken")
        to = None if isinstance(output, np.ndarray) else values.array(output, "output")
        y = _output_of(output if to is None else to, x, is_complex or complex_weights)
        return cls(x, y, found, modes, cval, input, output)

    @property
    def constant(self) -> float:
        """`cval` of a real input."""
        return float(np.real(self.cval))

    def each(self, value: Any, name: str) -> list[Any]:
        """A value for each of the axes."""
        return each(value, len(self.axes), name)

    def befores(self, sizes: Sequence[int], origin: Any) -> tuple[int, ...]:
        """How many taps lie before an element on each of the axes."""
        return tuple(before_of(*pair) for pair in zip(sizes, self.each(origin, "origin"), strict=True))

    def result(self) -> Any:
        """The array given as output, else one of the input's kind."""
        if self.output is not None and not isinstance(self.output, (type, np.dtype, str)):
            return self.output
        if isinstance(self.y, DeviceArray):
            return arrays.like(self.y, self.input)
        plain = isinstance(self.input, np.ndarray) or not hasattr(self.input, "__dlpack__")
        return self.y if plain else arrays.like(self.y, self.input)


def mode_of(mode: Any) -> str:
    """One of MODES. Raises InvalidPicture for another."""
    found = _ALIASES.get(mode, mode) if isinstance(mode, str) else None
    if found not in MODES:
        raise InvalidPicture(f"mode={shown(mode)}: one of {', '.join((*MODES, *_ALIASES))}")
    return str(found)


def each(value: Any, count: int, name: str) -> list[Any]:
    """A value for each of so many axes: the same one, or those of a sequence of that length."""
    found = values.sequence(value, count)
    if found is None:
        return [value] * count
    if len(found) != count:
        words = "sequence argument must have length equal to input rank"
        raise InvalidPicture(f"{name}={shown(value)}: {words} ({count})")
    return found


class OneAxis(tuple[Any, ...]):
    """The axis of a function along one, which errors name so."""


def axis_of(axis: Any, ndim: int, name: str = "axis") -> int:
    """An axis counted from the front. Raises InvalidPicture out of range."""
    number = values.whole(axis, name)
    if not -ndim <= number < ndim:
        words = f"out of range, which is from {-ndim} to {ndim - 1} for input of {ndim} axes"
        raise InvalidPicture(f"{name}={number}: {words}")
    return number % ndim


def axes_of(axes: Any, ndim: int, channel_axis: int | None = None) -> tuple[int, ...]:
    """The axes that are filtered: all, or those given, but for the one of the channels."""
    channel = None if channel_axis is None else axis_of(channel_axis, ndim, "channel_axis")
    if axes is None:
        return tuple(axis for axis in range(ndim) if axis != channel)
    given = values.sequence(axes, ndim)
    name = "axis" if isinstance(axes, OneAxis) else "axes"
    found = tuple(axis_of(axis, ndim, name) for axis in ([axes] if given is None else given))
    if len(set(found)) != len(found):
        raise InvalidPicture(f"axes={shown(axes)}: axes must be unique")
    if channel in found:
        raise InvalidPicture(f"axes={shown(axes)}: channel_axis={channel_axis} is not filtered")
    return found


def before_of(size: int, origin: Any) -> int:
    """How many taps lie before an element. Raises InvalidPicture where the element is not under the window."""
    before = size // 2 + values.whole(origin, "origin")
    if not 0 <= before < size:
        raise InvalidPicture(f"origin={origin}: from {-(size // 2)} to {(size - 1) // 2} for {size} taps")
    return before


def sizes_of(size: Any, count: int, least: int = 0) -> list[int]:
    """Taps of each axis; 0 is 1, an axis that is not filtered. Raises InvalidPicture."""
    sizes = [values.whole(one, "size") for one in each(size, count, "size")]
    if sizes and min(sizes) < least:
        raise InvalidPicture(f"size={shown(size)}: incorrect filter size, each at least {least}")
    if sizes and max(sizes) > values.MOST_TAPS:
        raise InvalidPicture(f"size={shown(size)}: at most {values.MOST_TAPS} taps an axis are allowed")
    return [max(1, one) for one in sizes]


def _output_of(output: Any, source: Any, complex_output: bool) -> Any:
    """The array that a result goes to: a new one of the input's dtype or of the one given, or the array given.

    `complex_output`: the result is complex, and so must be its dtype.
    """
    if source.dtype.type is np.float16:
        raise InvalidPicture("input has dtype float16: not supported, as in scipy; convert it to float32")
    if isinstance(output, (np.ndarray, DeviceArray)):
        if isinstance(output, DeviceArray) != isinstance(source, DeviceArray):
            raise InvalidPicture("output lies elsewhere than input: one place is allowed")
        if output.shape != source.shape:
            raise InvalidPicture(f"output has shape {output.shape} and input {source.shape}: output shape not correct")
        if complex_output and output.dtype.kind != "c":
            raise InvalidPicture(f"output has dtype {output.dtype}: output must have complex dtype")
        if not arrays.writeable(output):
            raise InvalidPicture("output is read-only")
        return output
    if output is None:
        kind = np.promote_types(source.dtype, np.complex64) if complex_output else source.dtype.newbyteorder("=")
        return arrays.empty(source.shape, kind, "nchw", source)
    # NumPy raises many things for what is no dtype.
    try:
        kind = np.dtype(output)
    except Exception:
        raise InvalidPicture(f"output={shown(output)}: a NumPy array, a dtype or None is allowed") from None
    if isinstance(output, str):
        if complex_output and kind.kind != "c":
            raise InvalidPicture(f"output={shown(output)}: output must have complex dtype")
        if not issubclass(kind.type, np.number):
            raise InvalidPicture(f"output={shown(output)}: output must have numeric dtype")
    elif kind.kind not in values.NUMBERS:
        raise InvalidPicture(f"output={shown(output)}: a numeric dtype is allowed")
    elif complex_output and kind.kind != "c":
        warnings.warn("promoting specified output dtype to complex", UserWarning, stacklevel=4)
        kind = np.promote_types(kind, np.complex64)
    return arrays.empty(source.shape, kind, "nchw", source)


def sorted_axes(axes: Sequence[int], *others: Sequence[Any]) -> tuple[tuple[int, ...], list[list[Any]]]:
    """Axes in rising order, and what belongs to each of them in the same order."""
    order = sorted(range(len(axes)), key=lambda number: axes[number])
    return tuple(axes[number] for number in order), [[values[number] for number in order] for values in others]
