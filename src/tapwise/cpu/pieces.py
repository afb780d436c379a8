"""Arrays copied to their places in others by one kernel, each element times a factor of its channel, plus an offset.

For memory that stays where it is: a table has a row a task, addresses in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import Final, NamedTuple

import numpy as np

from tapwise import settings
from tapwise.cpu import jit
from tapwise.cpu.activations import activate
from tapwise.cpu.addresses import address
from tapwise.cpu.copies import emit_copy_rows
from tapwise.cpu.device import host
from tapwise.cpu.driver import Launch
from tapwise.cpu.fields import entry
from tapwise.cpu.simd import Int, Kernel, Target, target
from tapwise.integers import ceil_div

FIELDS: Final = ("counter", "tasks", "workers", "table")
# Of a row: addresses of a block's source and result, its rows and their elements, the distances of rows in elements,
# addresses of the first factor and offset.
WORDS: Final = 8
# Elements of a task at least; of a row, of which there are many where they are shorter; blocks of a piece at most.
TASK: Final = 4096
ROW: Final = 8
BLOCKS: Final = 256
_CHANNEL: Final = 1


class Piece(NamedTuple):
    """`source` is copied to `result`, of the same shape; its first channel (axis 1) has factor `first`."""

    source: np.ndarray
    result: np.ndarray
    first: int = 0


class Scale(NamedTuple):
    """A factor and an offset a channel, and what is done with the sum."""

    factors: np.ndarray
    offsets: np.ndarray
    activation: str | None = None


class Axis(NamedTuple):
    size: int
    source: int
    result: int
    channel: bool


def generate(target: Target, *, factors: str, activation: str | None) -> Kernel:
    """`factors`: "" for none, "row" where a row of a block has one, "element" where each element has its own."""
    k = Kernel(target, "f32")
    with entry(k, FIELDS) as (a, worker), a.draws(worker) as number:
        words = [k.load_int(a.pointer("table", "i64") + (number * WORDS + word)) for word in range(WORDS)]
        source, result, factor, offset = (k.pointer(words[at], "f32") for at in (0, 1, 6, 7))
        rows, count, source_pitch, result_pitch = words[2:6]
        if factors == "":
            emit_copy_rows(k, source, source_pitch, result, result_pitch, rows, count)
        else:
            with k.loop(0, rows) as row:
                here, there = source + row * source_pitch, result + row * result_pitch
                each = [k.load(one + row, 1) for one in (factor, offset)] if factors == "row" else []

                def body(i: Int, lanes: int) -> None:
                    pair = [k.splat(one, lanes) for one in each] or [k.load(one + i, lanes) for one in (factor, offset)]
                    k.store(there + i, activate(k, activation, k.multiply_add(k.load(here + i, lanes), *pair)))

                k.rows(count, body)
    return k


class Pieces:
    """Copies of pieces, of which none reads what another writes."""

    def __init__(self, pieces: Sequence[Piece], scale: Scale | None = None) -> None:
        axes = [_axes(piece, scale is not None) for piece in pieces]
        factors = "" if scale is None else "element" if axes[0][-1].channel else "row"
        # Addresses point into them.
        self._kept = pieces, scale
        threads = host().threads
        size = max(TASK, ceil_div(sum(piece.source.size for piece in pieces), 4 * threads))
        rows = [row for piece, own in zip(pieces, axes, strict=True) for row in _rows(piece, own, scale, size)]
        self._table = np.array(rows, np.int64)
        activation = None if scale is None else scale.activation
        vectors = target(settings.cpu_target())
        self._task = jit.load("pieces", generate, vectors, factors=factors, activation=activation).address("task")
        self._workers = min(threads, len(rows))

    def launches(self) -> list[Launch]:
        """For driver.sequence."""
        values = 0, len(self._table), self._workers, address(self._table)
        return [Launch(self._task, (ctypes.c_int64 * len(FIELDS))(*values), self._workers)]


def suited(pieces: Sequence[Piece], scaled: bool = False) -> bool:
    """Whether all are of float32, and rows of elements that lie side by side; scaled, all with channels alike."""
    if not pieces or any(one.dtype != np.float32 or not one.size for piece in pieces for one in piece[:2]):
        return False
    found = [_axes(piece, scaled) for piece in pieces]
    if not all(axes and axes[-1][1:3] == (1, 1) and axes[-1].size >= ROW for axes in found):
        return False
    if scaled and (not all(any(one.channel for one in axes) for axes in found) or _mixed(found)):
        return False
    return all(prod(one.size for one in _split(axes)[0]) <= BLOCKS for axes in found)


def _mixed(found: list[list[Axis]]) -> bool:
    return len({axes[-1].channel for axes in found}) > 1


def _axes(piece: Piece, scaled: bool) -> list[Axis]:
    """A piece's axes, the slowest of the result first; neighbours that are one run in both are one."""
    source, result, _ = piece
    axes = [
        Axis(size, s // source.itemsize, r // result.itemsize, scaled and at == _CHANNEL)
        for at, (size, s, r) in enumerate(zip(source.shape, source.strides, result.strides, strict=True))
        if size > 1
    ]
    joined: list[Axis] = []
    for one in sorted(axes, key=lambda axis: -axis.result):
        before = joined[-1] if joined else None
        if before and not (before.channel or one.channel) and before[1:3] == (one.size * one[1], one.size * one[2]):
            joined[-1] = one._replace(size=before.size * one.size)
        else:
            joined.append(one)
    return joined


def _split(axes: list[Axis]) -> tuple[list[Axis], Axis, Axis]:
    """(axes of whose indices each pair has a block, a block's rows, a row's elements). Rows are channels where they
    are not the elements."""
    *outer, columns = axes
    rows = next((one for one in outer if one.channel), outer[-1] if outer else Axis(1, 0, 0, False))
    return [one for one in outer if one is not rows], rows, columns


def _rows(piece: Piece, axes: list[Axis], scale: Scale | None, size: int) -> Iterator[tuple[int, ...]]:
    """Rows of the table: blocks of about `size` elements."""
    outer, rows, columns = _split(axes)
    source, result = address(piece.source), address(piece.result)
    factors = () if scale is None else tuple(address(one) + 4 * piece.first for one in (scale.factors, scale.offsets))
    tall, wide = max(1, size // columns.size), max(size, ROW)
    starts = [*range(0, columns.size, wide)] if columns.size >= 2 * wide else [0]
    for place in product(*(range(one.size) for one in outer)):
        at = [sum(i * one[way] for i, one in zip(place, outer, strict=True)) for way in (1, 2)]
        for row in range(0, rows.size, tall):
            high = min(tall, rows.size - row)
            for start, end in pairwise([*starts, columns.size]):
                here, there = (at[way] + row * rows[1 + way] + start for way in (0, 1))
                step = start if columns.channel else row
                words = [one + 4 * step for one in factors] or [0, 0]
                yield (source + 4 * here, result + 4 * there, high, end - start, rows.source, rows.result, *words)
