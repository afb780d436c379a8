"""What Winograd's method is on every backend: axes, tiles of outputs, and the bound of its errors.

Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, sqrt
from typing import ClassVar, Final

import numpy as np

from tapwise.integers import ceil_div
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.winograd.transforms import Axis, Transform, transposed_phases

# Products of the largest F on an axis when both axes have one, and when one has: their errors multiply.
MOST_PRODUCTS: Final = {2: 6, 1: 8}
VIEWS_KEPT: Final = 512
# Tiles of a vector of lanes are taken apart, and put together, by shuffles for these; more rows of products take too
# long to compile.
STEPS: Final = {1, 2, 4, 8}
MOST_ROWS: Final = 9


def axis_of(problem: ConvProblem, axis: int) -> Axis:
    """Of a problem of fprop."""
    taps, stride, dilation = problem.kernel[axis], problem.stride[axis], problem.dilation[axis]
    if taps == 1:
        return Axis(1, stride, 1, 1)
    common = gcd(stride, dilation)
    return Axis(taps, stride // common, dilation, dilation // common)


@dataclass(frozen=True)
class View:
    """A problem as a convolution: `fprop`, whose taps and steps are `axes`', of filters that are flipped along some."""

    fprop: ConvProblem
    axes: tuple[Axis, Axis]
    flipped: tuple[bool, bool] = (False, False)

    def filters(self, w: np.ndarray) -> np.ndarray:
        """w of dgrad (k, c / groups, r, s), as a view (groups, c / groups, k / groups, r, s)."""
        p = self.fprop
        grouped = w.reshape(p.groups, p.group_c, p.group_k, *w.shape[2:]).swapaxes(1, 2)
        rows, columns = (slice(None, None, -1 if flip else 1) for flip in self.flipped)
        return grouped[..., rows, columns]


@lru_cache(VIEWS_KEPT)
def view(problem: ConvProblem) -> View | None:
    """A problem of fprop is its own. Of dgrad, fprop of dy with the channels and filters of w swapped; None where an
    element of dx meets no tap, or sees less of dy than there is, and with a stride and a dilation."""
    if problem.direction == "fprop":
        return View(problem, (axis_of(problem, 0), axis_of(problem, 1)))
    axes, padding = [], []
    for i, (taps, stride, dilation) in enumerate(zip(problem.kernel, problem.stride, problem.dilation, strict=True)):
        before = problem.padding[i][0]
        front = (taps - 1) * dilation - before
        if stride > 1:
            if dilation > 1 or taps < stride:
                return None
            front = -(before // stride) - min(start for _, start in transposed_phases(taps, stride, before % stride))
        reach = 0 if stride > 1 else (taps - 1) * dilation
        padding.append((front, problem.spatial[i] + reach - problem.output[i] - front))
        if min(padding[i]) < 0:
            return None
        axes.append(Axis(taps, stride, 1, 1, before % stride) if stride > 1 else None)
    fprop = problem.replace(
        c=problem.k, k=problem.c, spatial=problem.output, stride=(1, 1), padding=tuple(padding), direction="fprop",
        kernel=tuple(taps if axis is None else 1 for taps, axis in zip(problem.kernel, axes, strict=True)),
    )  # fmt: skip
    high, wide = (axis_of(fprop, i) if axis is None else axis for i, axis in enumerate(axes))
    return View(fprop, (high, wide), (axes[0] is None, axes[1] is None))


def tilings(problem: ConvProblem) -> list[tuple[int, int]]:
    """(tile_h, tile_w) that save products and keep the error small; none where no tile does."""
    seen = view(problem)
    if seen is None:
        return []
    axes = seen.axes
    long = sum(axis.taps > axis.stride for axis in axes)
    result = []
    for size in (4, 2):
        sizes = [size if axis.taps > axis.stride else 1 for axis in axes]
        both = [axis.outputs(size) for axis, size in zip(axes, sizes, strict=True)]
        parts = [axis.transform(outputs) for axis, outputs in zip(axes, both, strict=True)] if long else []
        if not parts or any({part.step, part.outputs} - STEPS or part.products > MOST_ROWS for part in parts):
            continue
        largest = max(outputs + ceil_div(axis.taps, axis.stride) - 1 for axis, outputs in zip(axes, sizes, strict=True))
        products = parts[0].products * parts[1].products
        if largest <= MOST_PRODUCTS[long] and products < sizes[0] * sizes[1] * axes[0].taps * axes[1].taps:
            result.append((both[0], both[1]))
    return result


class WinogradSums:
    """Mixin of the algorithms: what they sum, and the bound of its errors."""

    exact: ClassVar[bool] = False

    def error_factor(self, problem: ConvProblem) -> float:
        """A few roundings in each transform, and a random walk over the channels that are summed."""
        return 4.0 + 0.25 * sqrt(problem.group_k if problem.direction == "dgrad" else problem.group_c)

    def magnitude(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """|A^T| [ (|G| |w| |G^T|) * (|B^T| |x| |B|) ] |A| of the largest tile, in float64; smaller ones stay below.
        x is dy in dgrad."""
        seen, sizes = view(problem), tilings(problem)[0]
        assert seen is not None
        if problem.direction == "dgrad":
            w = seen.filters(w)
            w = w.reshape(-1, *w.shape[2:])
        problem, axes = seen.fprop, seen.axes
        high, wide = (axis.transform(size) for axis, size in zip(axes, sizes, strict=True))
        v = np.abs(np.asarray(x, np.float64))
        for axis, part, transformed in zip(axes, (high, wide), (2, 3), strict=True):
            v = _tiles(problem, axis, part, v, transformed)
        # v: (n, c, phases and tiles of rows, of cols, span, span)
        v = np.einsum("ia,nctuab,jb->ijnctu", np.abs(high.b_t), v, np.abs(wide.b_t), optimize=True)
        u = np.einsum(
            "ia,kcab,jb->ijkc", np.abs(high.g), np.abs(np.asarray(w, np.float64)), np.abs(wide.g), optimize=True
        )
        products, (rows, cols) = high.products * wide.products, v.shape[-2:]
        v = v.reshape(products, problem.n, problem.groups, problem.group_c, rows * cols)
        u = u.reshape(products, 1, problem.groups, problem.group_k, problem.group_c)
        sums = np.matmul(u, v).reshape(high.products, wide.products, problem.n, problem.k, rows, cols)
        y = np.einsum("pi,ijnktu,qj->nktpuq", np.abs(high.a_t), sums, np.abs(wide.a_t), optimize=True)
        # Tile t of phase a makes outputs phases * (t * size + p) + a.
        split = [rows // axes[0].phases, axes[0].phases, sizes[0], cols // axes[1].phases, axes[1].phases, sizes[1]]
        y = y.reshape(problem.n, problem.k, *split).transpose(0, 1, 2, 4, 3, 5, 7, 6)
        p, q = problem.output
        return y.reshape(problem.n, problem.k, rows * sizes[0], cols * sizes[1])[:, :, :p, :q]


def _tiles(problem: ConvProblem, axis: Axis, part: Transform, v: np.ndarray, number: int) -> np.ndarray:
    """The spans of one spatial axis: v with that axis turned into tiles, t * phases + a, and a last axis of span."""
    index = number - 2
    count = ceil_div(problem.output[index], part.outputs * axis.phases)
    tile_, phase, tap = np.ogrid[:count, : axis.phases, : part.span]
    at = (tile_ * part.step + tap) * axis.dilation + phase * problem.stride[index] - problem.padding[index][0]
    at = at.reshape(-1, part.span)
    inside = (at >= 0) & (at < problem.spatial[index])
    # Spans of an earlier axis stand last: count axes from the front.
    taken = np.take(v, np.where(inside, at, 0).reshape(-1), axis=number)
    taken = taken.reshape(*v.shape[:number], *at.shape, *v.shape[number + 1 :])
    mask = inside.reshape(*[1] * number, *at.shape, *[1] * (v.ndim - number - 1))
    return np.moveaxis(np.where(mask, taken, 0.0), number + 1, -1)
