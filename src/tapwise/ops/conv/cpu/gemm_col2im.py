"""cpu.gemm_col2im: dgrad as one 1x1 convolution of dy with all taps of all channels, and the sums of what overlaps.

A row of w (c, r, s) is as many filters side by side, so that they are read where they lie: nothing is packed. Each
product is an element of im2col's matrix of dx; those of the same element are added up in the taps' order, and finished
with bias, residual and activation.

Source: the backward pass of Chellapilla et al., "High performance convolutional neural networks for document
processing", 2006.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cpu.common import lanes_of, load
from tapwise.cpu.cost import Costs
from tapwise.cpu.plan import KernelPlan
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cpu.dgrad_direct import WAYS
from tapwise.ops.conv.cpu.fprop_phases import in_place
from tapwise.ops.conv.cpu.gemm_col2im_kernel import FIELDS, generate
from tapwise.ops.conv.cpu.pixel_shuffle import PixelShuffle, filters_in_place, pointwise
from tapwise.ops.conv.phases import ALIGNMENT, PROBLEMS_KEPT, Config
from tapwise.ops.conv.problem import ConvProblem

# Images are computed together as long as their products take up no more than such a share of the last cache.
SHARE: Final = 0.5
# Measured on a Zen 4 (80 layers drawn): cycles of a row of dx, of each vector of products that is added to it, and of
# what reading products from their cache is not hidden behind.
ROW, ADDED, EXPOSED = 40.0, 10.0, 0.5
# Elements of dx that one thread sums up before a team has begun.
FEW: Final = 1 << 12


def at_once(problem: ConvProblem, device: Device) -> int:
    """Images whose products are in the workspace at a time, a divisor of all."""
    images = int(SHARE * device.l3_bytes) // max(1, products_bytes(problem.replace(n=1)))
    return next(count for count in range(max(1, min(images, problem.n)), 0, -1) if problem.n % count == 0)


def products_bytes(problem: ConvProblem) -> int:
    """Of all images of a problem."""
    return round_up(prod(pointwise(problem).y_shape) * problem.itemsize, ALIGNMENT)


class Col2imPlan(Plan):
    def __init__(self, problem: ConvProblem, algorithm: GemmCol2im, config: Config, device: Device) -> None:
        self.problem = problem
        self.workspace_bytes = algorithm.workspace_bytes(problem, config, device)
        self._some = problem.replace(n=at_once(problem, device))
        self._fprop = pointwise(self._some).replace(bias=False, residual=False, activation=None)
        self._products_bytes = products_bytes(self._some)
        one, part = algorithm.part(config)
        self._plan, self._sum = one.plan(self._fprop, part, device), sum_plan(self._some, device)
        self.packed_bytes = self._plan.packed_bytes

    def pack(self, w: np.ndarray) -> Any:
        return self.pack_into(w, None)

    def pack_into(self, w: np.ndarray, memory: np.ndarray | None) -> Any:
        """The filters (groups, c / groups * taps, k / groups, 1, 1), mostly as they lie."""
        return self._plan.pack_into(filters_in_place(self.problem, w), memory)

    def run(self, buffers: Buffers) -> None:
        dy, packed, dx, workspace, bias, residual, _ = buffers
        products = workspace[: prod(self._fprop.y_shape) * dx.itemsize].view(dx.dtype).reshape(self._fprop.y_shape)
        inner = workspace[self._products_bytes :]
        for first in range(0, self.problem.n, self._some.n):
            images = slice(first, first + self._some.n)
            self._plan.run(Buffers(dy[images], packed, products, inner, None))
            added = None if residual is None else residual[images]
            self._sum.run(Buffers(products, None, dx[images], inner, bias, added))


@lru_cache(PROBLEMS_KEPT)
def sum_plan(problem: ConvProblem, device: Device) -> KernelPlan:
    """Of products (n, c, taps, p, q): dx."""
    library = load(
        "gemm_col2im", generate, problem, ways=problem.stride[1], bias=problem.bias, residual=problem.residual,
        activation=problem.activation,
    )  # fmt: skip
    planes, lanes = problem.n * problem.c, lanes_of(problem, device)
    tasks = 1 if prod(problem.x_shape) < FEW else min(planes, 4 * device.threads)
    block = ceil_div(planes, tasks)
    vectors = ceil_div(ceil_div(problem.spatial[1], problem.stride[1]), lanes)
    fields = _tables(problem, lanes, vectors) | {
        "planes": planes, "block": block, "channels": problem.c, "height": problem.spatial[0],
        "width": problem.spatial[1], "products": prod(problem.kernel) * prod(problem.output), "vectors": vectors,
        "tasks": ceil_div(planes, block), "scratch_step": _row_bytes(problem, device),
    }  # fmt: skip
    return KernelPlan(problem, device, library, FIELDS, fields)


def _row_bytes(problem: ConvProblem, device: Device) -> int:
    """Of the sums of a row: whole vectors of each phase."""
    lanes, ways = lanes_of(problem, device), problem.stride[1]
    return round_up(ceil_div(ceil_div(problem.spatial[1], ways), lanes) * lanes * ways * problem.itemsize, ALIGNMENT)


def _tables(problem: ConvProblem, lanes: int, vectors: int) -> dict[str, np.ndarray]:
    """Which products lie in which element of dx."""
    (rows, columns), (taps_h, taps_w), (height, _) = problem.output, problem.kernel, problem.spatial
    (down, across), dilation = problem.stride, problem.dilation
    row_starts, row_offsets, tap_starts, tap_offsets, masks = [0], [], [0], [], []
    for h in range(height):
        for r in range(taps_h):
            place, rest = divmod(h + problem.padding[0][0] - r * dilation[0], down)
            if rest == 0 and 0 <= place < rows:
                row_offsets.append((r * taps_w * rows + place) * columns)
        row_starts.append(len(row_offsets))
    for way in range(across):
        for s in range(taps_w):
            shift, rest = divmod(way + problem.padding[1][0] - s * dilation[1], across)
            if rest == 0:
                tap_offsets.append(s * rows * columns + shift)
                met = [[0 <= v * lanes + lane + shift < columns for lane in range(lanes)] for v in range(vectors)]
                masks += [sum(on << lane for lane, on in enumerate(vector)) for vector in met]
        tap_starts.append(len(tap_offsets))
    tables = {
        "row_starts": row_starts, "row_offsets": row_offsets, "tap_starts": tap_starts, "tap_offsets": tap_offsets,
        "masks": masks,
    }  # fmt: skip
    return {name: np.array(table, np.int64) for name, table in tables.items()}


@lru_cache(PROBLEMS_KEPT)
def fastest(problem: ConvProblem, device: Device) -> tuple[str, BaseConfig] | None:
    """Of a 1x1 convolution, the algorithm and config that reads filters where they lie."""
    return in_place(problem, device, 1)


class GemmCol2im(PixelShuffle):
    """float32, float64; NCHW; strides of columns of 1, 2 and 4; any filter, padding, dilation and groups."""

    id: ClassVar[str] = "cpu.gemm_col2im"
    summary: ClassVar[str] = "one 1x1 convolution of dy with all taps, filters as they lie; what overlaps is added up"
    dtypes: ClassVar[tuple[str, ...] | None] = ("f32", "f64")
    layouts: ClassVar[tuple[str, ...]] = ("nchw",)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if problem.stride[1] not in WAYS:
            return f"takes a stride whose columns are 1, 2 or 4, not {problem.stride}"
        if not self.configs(problem, device):
            return "takes what a 1x1 convolution reads with filters where they lie, which none does here"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """What is fastest with filters where they lie."""
        found = fastest(self.inner(problem, device), device)
        return [] if found is None else [Config((found,))]

    def inner(self, problem: ConvProblem, device: Device) -> ConvProblem:
        """The 1x1 convolution of the images that are computed together."""
        some = problem.replace(n=at_once(problem, device))
        return pointwise(some).replace(bias=False, residual=False, activation=None)

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Products, written and read again, and their sums."""
        one, part = self.part(config)
        inner = self.inner(problem, device)
        times = problem.n // inner.n
        product = one.predict_us(inner, part, device) + one.turned_us(inner, part, device, 1)
        return times * (product + self._sum_us(problem.replace(n=inner.n), device))

    def _sum_us(self, problem: ConvProblem, device: Device) -> float:
        costs, lanes = Costs(device, problem.accumulator_bytes), lanes_of(problem, device)
        ways, rows = problem.stride[1], problem.n * problem.c * problem.spatial[0]
        vectors = ways * ceil_div(ceil_div(problem.spatial[1], ways), lanes)
        added = vectors * prod(problem.kernel) / prod(problem.stride)
        size = products_bytes(problem)
        cycles = rows * (ROW + added * ADDED) + EXPOSED * costs.stream(size, size)
        tasks = 1 if prod(problem.x_shape) < FEW else 4 * device.threads
        return costs.wall_us(cycles / tasks, tasks, device.threads)

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        return 0.0

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        one, part = self.part(config)
        some = problem.replace(n=at_once(problem, device))
        own = _row_bytes(problem, device) * device.threads
        return products_bytes(some) + max(own, one.workspace_bytes(self.inner(problem, device), part, device))

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return Col2imPlan(problem, self, config, device)
