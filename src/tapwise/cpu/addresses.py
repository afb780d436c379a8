"""Where an array's elements lie."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import numpy as np


def _plain_address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def _field_address(array: np.ndarray) -> int:
    return _word(id(array) + _HEAD).value


# NumPy's C interface reads the address from the word behind the object's head (PyArray_DATA), as every extension module
# does; so does this: asking for it in Python takes 1.5 us an array, as long as the team's start.
_HEAD = object.__basicsize__
_word = ctypes.c_ssize_t.from_address
_probe = np.zeros(3)[1:]
by_field = sys.implementation.name == "cpython" and _field_address(_probe) == _plain_address(_probe)
# Address of an array's first element.
address: Callable[[np.ndarray], int] = _field_address if by_field else _plain_address
