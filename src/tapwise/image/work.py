"""A named filter over a picture (rows, columns, channels): modes, strides, sizes, clipping, on the CPU or a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import tapwise
from tapwise.errors import InvalidPicture
from tapwise.image.bank import Filter
from tapwise.image.passes import Pass, apply
from tapwise.image.weights import factors
from tapwise.integers import ceil_div
from tapwise.ops.filter.edges import source_index


@dataclass(frozen=True)
class Work:
    """What is done to a picture.

    mode, cval: what lies beyond the edges. stride: every so many rows and columns. size: (rows, columns) of the result,
    for which the picture is continued or cropped on all sides alike, an odd rest below and to the right; without it the
    result has the picture's size, or 1 / stride of it. threads: of the CPU. device: "cpu" or "cuda".
    """

    filter: Filter
    mode: str = "reflect"
    cval: float = 0.0
    stride: int = 1
    size: tuple[int, int] | None = None
    threads: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise InvalidPicture(f"stride={self.stride}: at least 1")
        if self.size is not None and min(self.size) < 1:
            raise InvalidPicture(f"size={self.size}: at least 1x1")

    @property
    def plain(self) -> bool:
        """Whether the result has the picture's own pixels."""
        return self.stride == 1 and self.size is None

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the result."""
        return self.size or (ceil_div(height, self.stride), ceil_div(width, self.stride))

    def reach(self) -> tuple[int, int]:
        """Rows above and below that a row of the result sees."""
        r = self.filter.size[0]
        return r // 2, r - 1 - r // 2

    def __call__(self, x: np.ndarray, full_height: bool = True) -> np.ndarray:
        """The result, of the picture's dtype; integers are rounded and held within its range.

        x (rows, columns, channels). `full_height`: the first and last rows are the picture's. Else they are continued
        by themselves, as the caller throws them away.
        """
        if self.plain and self.device == "cpu" and self.filter.bank is None:
            modes = (self.mode if full_height else "nearest", self.mode)
            if len(self.filter.matrices) == 1 and x.dtype.kind in "iuf":
                return self._sweep(x, self.filter.matrices[0], modes, x.dtype)
            parts = [self._sweep(x, one, modes, np.dtype(np.float32)) for one in self.filter.matrices]
            return _stored(np.hypot(*parts) if len(parts) == 2 else parts[0], x.dtype)
        return self._convolved(x)

    def _sweep(self, x: np.ndarray, matrix: np.ndarray, modes: tuple[str, str], to: np.dtype[Any]) -> np.ndarray:
        y = np.empty(x.shape, to)
        befores = (matrix.shape[0] // 2, matrix.shape[1] // 2)
        common = {"cval": self.cval, "clip": to.kind in "iu", "truncate": False, "threads": self.threads}
        found = factors(matrix, np.dtype(np.float32), self.mode, self.cval)
        op, weights = ("dense", matrix.ravel()) if found is None or len(found) > 1 else ("separable", found[0])
        apply(x, y, Pass(op, (0, 1), matrix.shape, befores, modes, weights=weights, **common))  # type: ignore[arg-type]
        return y

    def _convolved(self, x: np.ndarray) -> np.ndarray:
        """By tapwise.conv2d, over the rows and columns that the result sees."""
        height, width, channels = x.shape
        r, s = self.filter.size
        bank = self.filter.bank
        if bank is not None and bank.shape[1] != channels:
            raise InvalidPicture(f"filter {self.filter.words!r} is for {bank.shape[1]} channels, not {channels}")
        rows, columns = self.shape(height, width)
        seen = x.astype(np.float32)
        for axis, (length, taps, count) in enumerate(((height, r, rows), (width, s, columns))):
            total = (count - 1) * self.stride + taps - length
            before = total // 2 if self.size is not None else taps // 2
            table = source_index(np.arange((count - 1) * self.stride + taps) - before, length, self.mode)
            seen = np.take(seen, np.maximum(table, 0), axis=axis)
            seen[(slice(None),) * axis + (table < 0,)] = self.cval
        device = None if self.device == "cpu" else self.device
        options: dict[str, Any] = {"stride": self.stride, "device": device}
        if bank is not None:
            y = tapwise.conv2d(seen.transpose(2, 0, 1)[None], bank.astype(np.float32), **options)[0]
            return _stored(y.transpose(1, 2, 0), x.dtype)
        images = np.ascontiguousarray(seen.transpose(2, 0, 1))[:, None]
        parts = [
            tapwise.conv2d(images, matrix[None, None].astype(np.float32), **options)[:, 0]
            for matrix in self.filter.matrices
        ]
        return _stored((np.hypot(*parts) if len(parts) == 2 else parts[0]).transpose(1, 2, 0), x.dtype)


def _stored(y: np.ndarray, to: np.dtype[Any]) -> np.ndarray:
    """In the picture's dtype: integers rounded, and held within its range."""
    if to.kind not in "iu":
        return np.ascontiguousarray(y, to)
    info = np.iinfo(to)
    held: np.ndarray = np.clip(np.rint(y), info.min, info.max).astype(to)
    return held
