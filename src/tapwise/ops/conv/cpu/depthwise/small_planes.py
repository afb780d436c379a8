"""cpu.depthwise where a row of x fits into a vector (NCHW, stride 1): a plane's rows are loaded once, then shifted.

A vector has one row of a plane, or, of planes as narrow as half a vector, several that follow each other. What a column
of taps reads is such a vector with its elements moved along, zeros where the row ends: an instruction between registers
instead of a load of its own, which mostly lies in two cache lines (two cycles on a Zen 5, where a product takes half of
one). All is known when the kernel is compiled: products with rows outside the image are left out.

A column of taps at a time, if registers hold all rows of x; else a row of x at a time, if they hold all weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tapwise.cpu.epilogue import Epilogue, Sums
from tapwise.cpu.fields import COMMON, entry, unravel
from tapwise.cpu.simd import Kernel, Target
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.depthwise.kernel import emit_filters

FIELDS: Final = (*COMMON, "channels", "multiplier", "blocks", "taps", "taps_h", "taps_w")
# Sums in flight that hide a product's latency; vector registers besides those that are counted.
IN_FLIGHT: Final = 8
OTHERS: Final = 5


@dataclass(frozen=True)
class Plane:
    """What a kernel is compiled for: a plane of h x w and its p x q outputs, the filter, how it is padded and dilated;
    rows and lanes of a vector."""

    h: int
    w: int
    p: int
    q: int
    taps_h: int
    taps_w: int
    pad_h: int
    pad_w: int
    dilation_h: int
    dilation_w: int
    joined: int
    lanes: int

    @property
    def outputs(self) -> int:
        """Vectors of y."""
        return ceil_div(self.p, self.joined)

    @property
    def users(self) -> dict[int, list[tuple[int, int]]]:
        """(row of taps, vector of y) that meet each vector of x, by the row that it begins with."""
        found: dict[int, list[tuple[int, int]]] = {}
        for output in range(self.outputs):
            for r in range(self.taps_h):
                row = output * self.joined + r * self.dilation_h - self.pad_h
                if -self.joined < row < self.h:
                    found.setdefault(row, []).append((r, output))
        return dict(sorted(found.items()))

    def loaded(self, row: int) -> int:
        """Elements of the vector of x from a row on that are there, as bits."""
        rows = [i for i in range(self.joined) if 0 <= row + i < self.h]
        return sum(((1 << self.w) - 1) << i * self.w for i in rows)

    def picks(self, s: int) -> list[int]:
        """For each element of a vector of y which one of x column `s` of the taps meets, `lanes` for zero. What is
        behind those of y is nobody's."""
        shift, found = s * self.dilation_w - self.pad_w, list(range(self.lanes))
        for i in range(self.joined):
            for column in range(self.q):
                inside = 0 <= column + shift < self.w
                found[i * self.q + column] = i * self.w + column + shift if inside else self.lanes
        return found

    def stored(self, output: int) -> int:
        """Elements of a vector of y."""
        return min(self.joined, self.p - output * self.joined) * self.q

    @property
    def sums(self) -> int:
        """Vectors of sums: twice those of y where these alone do not hide a product's latency."""
        return self.outputs * (2 if self.outputs < IN_FLIGHT else 1)

    def by_columns(self, registers: int) -> bool:
        """Whether registers hold all rows of x, and a column's weights."""
        return len(self.users) + self.sums + self.taps_h + OTHERS <= registers

    def by_rows(self, registers: int) -> bool:
        """Whether they hold all weights, and what each column makes of a row."""
        return self.sums + (self.taps_h + 1) * self.taps_w + OTHERS <= registers


def generate(
    target: Target, *, dtype: str, storage: str, plane: Plane, columns: bool, bias: bool, residual: bool,
    activation: str | None,
) -> Kernel:  # fmt: skip
    """The kernels of one instance: `task` and `pack_task`. `columns`: a column of taps at a time."""
    k = Kernel(target, dtype)
    _emit_tile(k, Epilogue(k, storage, True, bias, residual, activation), plane, columns)
    _emit_task(k, storage, plane)
    emit_filters(k, FIELDS, storage, True, 1)
    return k


def _emit_tile(k: Kernel, epilogue: Epilogue, plane: Plane, columns: bool) -> None:
    """tile(x, w, bias, residual, y): one plane."""
    storage, users, lanes = epilogue.storage, plane.users, plane.lanes
    with k.function(
        "tile", x=storage, w=k.dtype, bias=storage, residual=storage, y=storage
    ) as (x, w, bias, residual, y):  # fmt: skip
        sums = [k.constant(0.0, lanes) for _ in range(plane.sums)]
        zeros, turn = k.constant(0.0, lanes), 0

        def row_of(row: int) -> Any:
            return k.load(x + row * plane.w, lanes, k.mask(k.integer(plane.loaded(row)), lanes))

        def column_of(s: int) -> list[Any]:
            return [k.broadcast(w + (s * plane.taps_h + r), lanes) for r in range(plane.taps_h)]

        def products(row: int, loaded: Any, s: int, weights: list[Any]) -> None:
            nonlocal turn
            picks = plane.picks(s)
            shifted = loaded if picks == list(range(lanes)) else k.shuffle(loaded, zeros, picks)
            for r, output in users[row]:
                place = output + plane.outputs * (turn % 2 if plane.sums > plane.outputs else 0)
                sums[place] = k.fma(weights[r], shifted, sums[place])
            turn += 1

        if columns:
            rows = {row: row_of(row) for row in users}
            for s in range(plane.taps_w):
                weights = column_of(s)
                for row, loaded in rows.items():
                    products(row, loaded, s, weights)
        else:
            all_weights = [column_of(s) for s in range(plane.taps_w)]
            for row in users:
                loaded = row_of(row)
                for s, weights in enumerate(all_weights):
                    products(row, loaded, s, weights)
        found = []
        for output in range(plane.outputs):
            total = sums[output]
            if plane.sums > plane.outputs:
                total = k.add(total, sums[output + plane.outputs])
            count, at = plane.stored(output), output * plane.joined * plane.q
            # The next vector, stored later, overwrites what passes the end of this one.
            ends = at + lanes > plane.p * plane.q
            mask = k.mask(k.integer((1 << count) - 1), lanes) if ends else None
            found.append(Sums(total, bias, residual + at, y + at, mask))
        epilogue.store(found)


def _emit_task(k: Kernel, storage: str, plane: Plane) -> None:
    with entry(k, FIELDS) as (a, worker):
        x, y, w = a.pointer("x", storage), a.pointer("y", storage), a.pointer("w", k.dtype)
        bias, residual = a.pointer("bias", storage), a.pointer("residual", storage)
        with a.draws(worker) as number:
            block, image = unravel(number, a.blocks)
            with k.loop(block * a.channels // a.blocks, (block + 1) * a.channels // a.blocks) as c:
                there = image * a.channels + c
                out = there * (plane.p * plane.q)
                k.call("tile", x + there * (plane.h * plane.w), w + c * a.taps, bias + c, residual + out, y + out)
