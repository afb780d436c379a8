"""Values as users give them to filters: numbers, sequences, arrays; or InvalidPicture that names the argument."""

from __future__ import annotations

from itertools import islice
from math import isfinite
from typing import Any, Final

import numpy as np

from tapwise import arguments, arrays
from tapwise.arguments import shown
from tapwise.arrays import device as cuda
from tapwise.arrays.device import DeviceArray
from tapwise.errors import InvalidPicture, InvalidProblem

# Taps of an axis: what kernels count with, and more than anybody waits for.
MOST_TAPS: Final = 1 << 20
# Kinds of numbers that are taken, as NumPy names them.
NUMBERS: Final = "biufc"
_ON_GPU: Final = {*(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float32", "float64"}


def whole(value: Any, name: str) -> int:
    """A whole number; floating point that is one, too."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    try:
        # scipy's words come first.
        return arguments.whole(value, name, "cannot be interpreted as an integer; a whole number")
    except InvalidProblem as error:
        raise InvalidPicture(str(error)) from None


def real(value: Any, name: str) -> float:
    """A finite number."""
    number = _number(value, float)
    if number is None or not isfinite(number):
        raise InvalidPicture(f"{name}={shown(value)}: a finite number is allowed")
    return float(number)


def constant(cval: Any) -> complex:
    """What lies beyond the edges: any number, infinity and NaN too."""
    number = _number(cval, complex if isinstance(cval, complex | np.complexfloating) else float)
    if number is None:
        raise InvalidPicture(f"cval={shown(cval)}: a number is allowed")
    found: complex = number
    return found


def _number(value: Any, kind: type[Any]) -> Any:
    """None of what is no number; a word is none, nor is a sequence of one."""
    if isinstance(value, str | bytes | bytearray):
        return None
    # Another library's code: it may raise anything.
    try:
        return kind(value) if np.ndim(value) == 0 else None
    except Exception:
        return None


def sequence(value: Any, most: int) -> list[Any] | None:
    """The values of a sequence, `most` and one at most; None of what is none."""
    if isinstance(value, tuple | list):
        return list(value)
    # A string is one word. Another library's sequence may raise anything.
    try:
        return None if isinstance(value, str) else list(islice(iter(value), most + 1))
    except Exception:
        return None


def array(value: Any, name: str) -> Any:
    """A NumPy array of the same memory, or a DeviceArray; None of what is no array."""
    if isinstance(value, type | np.generic):
        return None
    if cuda.is_device(value):
        dtype = str(getattr(value, "dtype", "float32")).removeprefix("torch.")
        if dtype not in _ON_GPU:
            raise InvalidPicture(f"{name} has dtype {dtype}: on a GPU integers, float32 and float64 are taken")
        return cuda.view(value, name)
    return arrays.view(value, name) if hasattr(value, "__dlpack__") else None


def numbers(value: Any, name: str) -> np.ndarray:
    """An array of numbers in this machine's memory, of an array or of nested sequences."""
    found = array(value, name)
    if isinstance(found, DeviceArray):
        raise InvalidPicture(f"{name} lies on a GPU: this machine's memory is allowed")
    # Nested sequences may have any kind of objects.
    try:
        found = np.asarray(value) if found is None else found
    except Exception:
        found = None
    if found is None or found.dtype.kind not in NUMBERS:
        kind = "" if found is None else f" of dtype {found.dtype}"
        raise InvalidPicture(f"{name}={shown(value)}{kind}: an array of numbers is allowed")
    return np.asarray(found)
