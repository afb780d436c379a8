"""Plain loops of the serial algorithms, compiled by Numba on first use and kept in its own disk cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled(function: Callable[..., None]) -> Any:
    """The function, compiled for whatever it is called with."""
    import numba

    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except (RuntimeError, OSError):  # no folder that Numba could write its cache to
        return numba.njit(**options)(function)
