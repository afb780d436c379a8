"""What lies beyond the edges of a picture."""

from __future__ import annotations

from typing import Final

import numpy as np

MODES: Final = ("reflect", "constant", "nearest", "mirror", "wrap")


def source_index(index: np.ndarray, length: int, mode: str) -> np.ndarray:
    """Where elements beyond the edges of an axis come from, -1 for the constant; `index` of any size, length >= 1."""
    found: np.ndarray
    if mode == "constant":
        found = np.where((index >= 0) & (index < length), index, -1)
    elif mode == "nearest":
        found = np.clip(index, 0, length - 1)
    elif mode == "wrap":
        found = index % length
    else:
        period = max(1, 2 * length - (2 if mode == "mirror" else 0))
        place = index % period
        found = np.where(place < length, place, period - place - (0 if mode == "mirror" else 1))
    return found


def window_sources(length: int, size: int, before: int, mode: str) -> np.ndarray:
    """source_index of the length + size - 1 elements that an axis's windows see; `before`: taps before an element."""
    return source_index(np.arange(-before, length + size - 1 - before), length, mode)
