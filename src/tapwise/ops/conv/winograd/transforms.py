"""Transforms of one axis of Winograd's method: m outputs from fewer products than m * taps.

A `Transform` computes y = A^T [(G g) * (B^T d)], * elementwise, for the m outputs of a tile that a filter g of some
taps makes of a span of inputs d. Two axes nest: A_h^T [(G_h g G_w^T) * (B_h^T d B_w)] A_w.

- Stride 1: F(m, taps) by Toom and Cook's construction, m + taps - 1 products.
- Stride s: tap r meets inputs of phase r mod s alone, so the axis falls into s convolutions of stride 1 whose products
  stand side by side. F(4, 3) of stride 2 is F(4, 2) on the even inputs and 4 plain products on the odd: 9 for 12.
- dgrad of stride s: outputs of a phase meet the taps of one rest by s alone, so the axis falls into s convolutions of
  stride 1 of the same inputs, whose outputs are interleaved: 5 products for 4 outputs of 3 taps, not 6.
- One tap: nothing to save; m plain products.

Source: Winograd, "Arithmetic Complexity of Computations", 1980; points in the order of Barabasz et al., "Error Analysis
and Improving the Accuracy of Winograd Convolution", 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Final

from tapwise.integers import ceil_div

Matrix = tuple[tuple[float, ...], ...]
Rows = Sequence[Sequence[Fraction]]

# Evaluation points besides infinity: small powers of two and their reciprocals lose least.
POINTS: Final = tuple(Fraction(text) for text in ("0", "1", "-1", "1/2", "-2", "-1/2", "2"))


@dataclass(frozen=True)
class Transform:
    """Matrices a_t (outputs, products), g (products, taps), b_t (products, span); tiles are `step` inputs apart."""

    a_t: Matrix
    g: Matrix
    b_t: Matrix
    step: int

    @property
    def outputs(self) -> int:
        return len(self.a_t)

    @property
    def products(self) -> int:
        return len(self.b_t)

    @property
    def span(self) -> int:
        return len(self.b_t[0])


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of prod(x - root), the constant first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [a - root * b for a, b in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return coefficients


def _toom_cook(outputs: int, taps: int) -> tuple[list[list[Fraction]], list[list[Fraction]], list[list[Fraction]]]:
    """(A^T, G, B^T) of F(outputs, taps).

    Row i of G evaluates a filter at point i, scaled by 1 / prod(a_i - a_j); row i of B^T holds the coefficients of
    prod over j != i of (x - a_j); the last row stands for infinity.
    """
    if taps == 1 or outputs == 1:
        size = outputs + taps - 1
        identity = [[Fraction(int(i == j)) for j in range(size)] for i in range(size)]
        if taps == 1:
            return identity, [[Fraction(1)] for _ in range(size)], identity
        return [[Fraction(1)] * size], identity, identity
    points = POINTS[: outputs + taps - 2]
    a_t = [[point**row for point in points] + [Fraction(int(row == outputs - 1))] for row in range(outputs)]
    g, b_t = [], []
    for i, point in enumerate(points):
        others = points[:i] + points[i + 1 :]
        scale = Fraction(1)
        for other in others:
            scale *= point - other
        g.append([point**power / scale for power in range(taps)])
        b_t.append([*_polynomial(others), Fraction(0)])
    g.append([Fraction(int(power == taps - 1)) for power in range(taps)])
    b_t.append(_polynomial(points))
    return a_t, g, b_t


@cache
def transform(outputs: int, taps: int, stride: int) -> Transform:
    """The transform of `outputs` outputs of a filter of `taps` taps, `stride` inputs apart."""
    span = (outputs - 1) * stride + taps
    a_t: list[list[Fraction]] = [[] for _ in range(outputs)]
    g, b_t = [], []
    for phase in range(min(stride, taps)):
        part_a, part_g, part_b = _toom_cook(outputs, ceil_div(taps - phase, stride))
        for row, part in zip(a_t, part_a, strict=True):
            row += part
        g += [_spread(row, phase, stride, taps) for row in part_g]
        b_t += [_spread(row, phase, stride, span) for row in part_b]

    return _frozen(a_t, g, b_t, outputs * stride)


def transposed_phases(taps: int, stride: int, first: int) -> list[tuple[range, int]]:
    """Of the outputs of each phase of dgrad, that at place j: the taps that it meets, in the order of the inputs, and
    the first of these, counted from j. `first`: the padding in front, modulo the stride."""
    found = []
    for phase in range(stride):
        last = taps - 1 - (taps - 1 - phase - first) % stride
        found.append((range(last, -1, -stride), (phase + first - last) // stride))
    return found


@cache
def transposed(outputs: int, taps: int, stride: int, first: int) -> Transform:
    """Of dgrad with a stride of up to `taps`: `outputs` elements of dx, from a multiple of the stride on."""
    phases, places = transposed_phases(taps, stride, first), outputs // stride
    ahead = min(start for _, start in phases)
    span = places + max(start + len(own) - 1 for own, start in phases) - ahead
    parts = [_toom_cook(places, len(own)) for own, _ in phases]
    a_t, g, b_t = [], [], []
    for place in range(places):
        for phase in range(stride):
            # Products of the other phases count nothing.
            rows = [a[place] if index == phase else [Fraction(0)] * len(b) for index, (a, _, b) in enumerate(parts)]
            a_t.append([value for row in rows for value in row])
    for (own, start), (_, part_g, part_b) in zip(phases, parts, strict=True):
        g += [_spread(row[::-1], own[-1], stride, taps) for row in part_g]
        b_t += [_spread(row, start - ahead, 1, span) for row in part_b]
    return _frozen(a_t, g, b_t, places)


def _frozen(a_t: Rows, g: Rows, b_t: Rows, step: int) -> Transform:
    def freeze(rows: Rows) -> Matrix:
        return tuple(tuple(float(value) for value in row) for row in rows)

    return Transform(freeze(a_t), freeze(g), freeze(b_t), step)


def _spread(row: Sequence[Fraction], phase: int, stride: int, length: int) -> list[Fraction]:
    """A row of `length` with `row` at phase, phase + stride, ..."""
    result = [Fraction(0)] * length
    for i, value in enumerate(row):
        result[phase + i * stride] = value
    return result


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a problem. A common factor of stride and dilation only thins the input out; what is left of
    the dilation makes `phases` interleaved convolutions, output `phases * i + a` being number a's. Input u of tile t is

        (t * step + u) * dilation + a * (the problem's stride) - padding

    `first` is of dgrad with a stride, whose outputs are a stride as many as the inputs: the padding in front, modulo
    the stride.
    """

    taps: int
    stride: int
    dilation: int
    phases: int
    first: int | None = None

    def transform(self, outputs: int) -> Transform:
        if self.first is not None:
            return transposed(outputs, self.taps, self.stride, self.first)
        return transform(outputs, self.taps, self.stride)

    def outputs(self, size: int) -> int:
        """Of a tile of `size` outputs of each of its convolutions of stride 1."""
        return size if self.first is None else size * self.stride
