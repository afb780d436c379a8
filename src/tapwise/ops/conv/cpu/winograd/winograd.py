"""cpu.winograd: fewer products for filters of more than one tap, one row of the transform at a time.

An output tile of tile_h x tile_w is A_h^T [ (G_h w G_w^T) * (B_h^T x B_w) ] A_w, with one `Transform` an axis
(`transforms`): F(4x4, 3x3) takes 36 products instead of 144. The products are gone through in slices of one row i of
the transform: the input's row combination i, its column combinations, a matrix product over channels for each, their
column combinations, and A_h^T's column i adds the result to the output tiles. So scratch holds one slice rather than
the whole transformed input, which would be more than twice the input. Lanes run over tiles.

Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015.
"""

from __future__ import annotations

from math import sqrt
from typing import ClassVar

import numpy as np

from tapwise.algorithm import Device, Plan
from tapwise.cpu.plan import KernelPlan
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu.generated import GeneratedAlgorithm
from tapwise.ops.conv.cpu.winograd.blocking import Axis, Config, Geometry, candidates, tilings
from tapwise.ops.conv.cpu.winograd.cost import TaskCost, pack_us
from tapwise.ops.conv.cpu.winograd.kernel import FIELDS, generate
from tapwise.ops.conv.cpu.winograd.transforms import Transform
from tapwise.ops.conv.problem import ConvProblem


class Winograd(GeneratedAlgorithm[Config]):
    """Filters of 2 to 7 taps an axis where a tile saves products: 3x3 of stride 1 and 2, 5x5, 1x7 and 7x1 among them;
    any padding, dilation and groups; float32, float64, float16 (in float32); NCHW.

    Rounding errors are larger than those of a direct sum, so `auto` never takes it for float64, and its bound is in
    terms of |A^T| [ (|G| |w| |G^T|) * (|B^T| |x| |B|) ] |A|, the size of what it sums.
    """

    id: ClassVar[str] = "cpu.winograd"
    summary: ClassVar[str] = "F(4x4, 3x3) and its kin, sliced by transform row; lanes over tiles"
    exact: ClassVar[bool] = False
    layouts: ClassVar[tuple[str, ...]] = ("nchw",)
    candidates = staticmethod(candidates)
    cost: ClassVar = TaskCost

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if problem.depthwise:
            return "has no product over channels to save when each group has one"
        if not tilings(problem):
            size, stride = ("x".join(map(str, pair)) for pair in (problem.kernel, problem.stride))
            return f"takes filters whose tiles save products within its error bound, not {size} of stride {stride}"
        return None

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        return pack_us(problem, config, device)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        g = Geometry(problem, config, device)
        tile = {"tile_h": config.tile_h, "tile_w": config.tile_w, "m": config.m, "n": config.n}
        for suffix, axis in zip("hw", g.axes, strict=True):
            tile |= {f"taps_{suffix}": axis.taps, f"stride_{suffix}": axis.stride}
        library = self.load("winograd", generate, problem, **tile)
        return KernelPlan(
            problem, device, library, FIELDS, g.fields(), packed_size=g.products * problem.k * problem.group_c,
            pack_tasks=problem.groups * ceil_div(problem.group_k, config.filters),
        )  # fmt: skip

    def error_factor(self, problem: ConvProblem) -> float:
        """A few roundings in each transform, and a random walk over the channels."""
        return 4.0 + 0.25 * sqrt(problem.group_c)

    def magnitude(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """|A^T| [ (|G| |w| |G^T|) * (|B^T| |x| |B|) ] |A| of the largest tile, in float64; smaller ones stay below."""
        axes = [Axis.of(problem, axis) for axis in range(2)]
        sizes = tilings(problem)[0]
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
