"""Filters over a Dask array: block by block with what surrounds each, on whatever cluster Dask runs on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tapwise.errors import InvalidPicture
from tapwise.image.arguments import mode_of
from tapwise.image.bank import parse
from tapwise.image.work import Work


def map_filter(
    array: Any, filter: str | Callable[..., Any], depth: int | dict[int, int] | None = None, mode: str = "reflect",
    cval: float = 0.0, **options: Any,
) -> Any:  # fmt: skip
    """The filter over a Dask array, lazily, with the values of one piece.

    filter: words as `tapwise filter` has them ("gaussian sigma=3"), over rows, columns and, if any, channels, or a
        function of tapwise.image with its `options`.
    depth: elements that an element sees on each side, for a function: one number for all axes, or {axis: number}.
    mode, cval: what lies beyond the array's edges.

    Blocks are computed on one thread each, as Dask runs many at once. Raises InvalidPicture.
    """
    try:
        import dask.array as da
    except ImportError as error:
        raise InvalidPicture(f"dask is not installed: pip install 'tapwise[dask]' ({error})") from None
    how = mode_of(mode)
    if isinstance(filter, str):
        if options or depth is not None:
            raise InvalidPicture(f"options={sorted(options)}, depth={depth}: go with a function, not with words")
        if array.ndim not in (2, 3):
            raise InvalidPicture(f"array has {array.ndim} axes: rows, columns and, if any, channels are needed")
        named = parse(filter)
        if named.bank is not None:
            raise InvalidPicture(f"filter={filter!r}: a bank mixes channels; a filter of one matrix is needed")
        # A window's larger half on both sides.
        depth = {0: named.size[0] // 2, 1: named.size[1] // 2}
        function: Callable[..., Any] = partial(_worked, Work(named, how, cval, threads=1))
    else:
        if depth is None:
            raise InvalidPicture("depth=None: a function needs the number of elements that it sees on each side")
        function = partial(filter, mode=how, cval=cval, **options)
    # A block at an edge has nothing beyond it, and so continues there as the whole array would; only what wraps lies
    # at the other end.
    boundary = "periodic" if how == "wrap" else "none"
    kind = function(np.zeros((1,) * array.ndim, array.dtype)).dtype
    return da.map_overlap(function, array, depth=depth, boundary=boundary, dtype=kind, meta=np.empty(0, kind))


def _worked(work: Work, block: np.ndarray) -> np.ndarray:
    """A picture of two or three axes."""
    flat = block.ndim == 2
    y = work(np.ascontiguousarray(block[..., None] if flat else block))
    return y[..., 0] if flat else y
