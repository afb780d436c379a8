"""cpu.strassen: 1x1 filters with seven eighths of the multiplications.

y = w * x, filters by channels and channels by pixels, each in two by two parts: Strassen's seven products of sums of
parts instead of eight (`products`). Sums of the filters' parts are made when filters are packed. A task makes those of
x, of some pixels of each half, computes the seven products with some filters of each half on register tiles, and adds
them up to the four parts of y.

Source: V. Strassen, "Gaussian Elimination is not Optimal", 1969; errors: N. Higham, "Exploiting Fast Matrix
Multiplication Within the Level 3 BLAS", 1990.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import settings
from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cpu import tile
from tapwise.cpu.common import lanes_of, splits
from tapwise.cpu.cost import IN_L1, TRANSPOSED_RUN, Breakdown
from tapwise.cpu.plan import KernelPlan
from tapwise.cpu.simd import target
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cpu import generated
from tapwise.ops.conv.cpu.direct.direct import CHANNELS_WHOLE
from tapwise.ops.conv.cpu.strassen.kernel import FIELDS, generate
from tapwise.ops.conv.cpu.strassen.products import PRODUCTS
from tapwise.ops.conv.problem import ConvProblem

# Cycles of a pixel's vector of channels: transposed from planes, in all sums of x, added up to y, and transposed to
# planes of y. Fitted to some 36 configs of each of six layers on a Zen 5.
TO_PIXELS: Final = 5.0
TO_PIXELS_STRIDED: Final = 3.0
SUMS: Final = 12.0
COMBINED: Final = 8.0
TO_PLANES: Final = 6.0
# Sums of x of which half of L2 holds no more: cycles for each byte beyond.
LOST: Final = 0.08
# What a task takes longer than its parts, which are in each other's way in the caches: the mean of 16 drawn layers.
LONGER: Final = 1.04
# Drawing a task and working out its place.
TASK: Final = 500.0


@dataclass(frozen=True)
class Config(BaseConfig):
    """The register tile m x n; a task: `rows` pixels and `filters` output channels of each half."""

    m: int
    n: int
    rows: int
    filters: int


class Geometry(generated.Geometry):
    """Sizes of one problem and config. Lengths are in elements unless named otherwise."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device) -> None:
        super().__init__(problem, config, device)
        self.device, itemsize = device, problem.accumulator_bytes
        self.pixels = prod(problem.output)
        self.half_p, self.half_c, self.half_k = ceil_div(self.pixels, 2), problem.c // 2, problem.k // 2
        self.filter_pad = round_up(self.half_k, self.lanes)
        # An odd number of cache lines: pixels lie in different sets.
        line = 64 // itemsize
        self.pitch = (ceil_div(self.half_c, line) | 1) * line
        count, (_, q), across = len(PRODUCTS), problem.output, problem.stride[1]
        self.strided = set(problem.stride) != {1}
        # What is read of a row of x, and rows of it and of y that a task meets at most; with what lies between.
        self.row_length = (q - 1) * across + 1
        self.slots = ((config.rows + q - 2) // q + 1) * self.row_length if self.strided else config.rows
        # Behind the sums of x there is room for a vector of channels of each part.
        self.products_at = count * config.rows * self.pitch + 4 * self.slots * self.lanes
        size = self.products_at + count * config.rows * config.n * self.lanes
        self.scratch_bytes = round_up(size * itemsize, 64)
        self.row_blocks, self.filter_blocks = ceil_div(self.half_p, config.rows), ceil_div(self.half_k, config.filters)
        self.tasks = self.row_blocks * self.filter_blocks * problem.n

    def fields(self) -> dict[str, Any]:
        p, c = self.problem, self.config
        rows, columns = (np.arange(size, dtype=np.int64) for size in p.output)
        # Of each pixel of y: where it is among transposed rows or, channels last, in the image.
        row = self.row_length if p.layout == "nchw" else p.stride[0] * p.spatial[1]
        return {
            "plane": prod(p.spatial), "q": p.output[1], "row_step": p.stride[0] * p.spatial[1],
            "row_length": self.row_length, "slots": self.slots,
            "places": (rows[:, None] * row + columns * p.stride[1]).reshape(-1),
            "tasks": self.tasks, "scratch_step": self.scratch_bytes, "products_at": self.products_at,
            "half_c": self.half_c, "half_k": self.half_k, "filter_pad": self.filter_pad, "half_p": self.half_p,
            "pixels": self.pixels, "odd": self.pixels % 2, "rows": c.rows, "row_blocks": self.row_blocks,
            "filter_block": c.filters,
            "filter_blocks": self.filter_blocks, "pitch": self.pitch,
            "offsets": np.arange(self.half_c, dtype=np.int64), "matrix": self.half_c * self.filter_pad,
        }  # fmt: skip


def candidates(problem: ConvProblem, device: Device) -> Iterator[Config]:
    half_p, half_k, lanes = ceil_div(prod(problem.output), 2), problem.k // 2, lanes_of(problem, device)
    for m, n in tile.shapes(target(settings.cpu_target()), "channels", device.split_loads):
        for rows in sorted({ceil_div(half_p, count) for count in (1, 2, 3, 4, 6, 7, 8, 14)}, reverse=True):
            for filters in splits(half_k, n * lanes, device.threads):
                yield Config(m, n, rows, filters)


class TaskCost(generated.TaskCost):
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar = Geometry

    def breakdown(self) -> Breakdown:
        g, c, p, costs = self.geometry, self.config, self.problem, self.costs
        vectors = ceil_div(c.filters, costs.lanes)
        panel = c.filters * g.half_c * costs.itemsize
        passes, columns, count = ceil_div(c.rows, c.m), ceil_div(vectors, c.n), len(PRODUCTS)
        tiles = costs.block(c.m, c.n, c.rows, vectors, g.half_c) * (CHANNELS_WHOLE if costs.whole else 1.0)
        tiles += costs.first_pass(panel, p.layout)
        share = max(1.0, g.tasks / self.device.threads)
        whole = count * g.half_k * g.half_c * costs.itemsize
        own = min(whole, count * panel * share)
        x = c.rows * g.pitch * costs.itemsize
        streamed = costs.filters(panel, passes, IN_L1 * panel / columns, own, whole)
        streamed += columns * costs.stream(x, count * x)
        sums, slow = c.rows * vectors, costs.device.vector_cycles
        channels = ceil_div(g.half_c, costs.lanes)
        finishing, transposing = c.rows * costs.row(c.filters, 1.5), 0.0
        if p.layout == "nchw":
            # Runs of pixels are transposed in whole vectors.
            finishing = TO_PLANES * slow * vectors * round_up(c.rows, costs.lanes)
            runs, run = 1.0, TO_PIXELS * round_up(c.rows, costs.lanes)
            if g.strided:
                runs, run = c.rows / p.output[1] + 0.5, TO_PIXELS_STRIDED * g.row_length
            transposing = channels * runs * (slow * run + TRANSPOSED_RUN)
        cycles: Mapping[str, float] = {
            "products": count * tiles,
            "waiting for operands": count * costs.waiting(tiles, streamed),
            "sums of products": COMBINED * slow * sums,
            "finishing": 4 * finishing,
            "writing y": 0.2 * costs.stream(4 * sums * self.device.vector_bytes, p.bytes),
            "sums of x": SUMS * slow * channels * c.rows,
            "transposing x": 4 * transposing,
            "reading x": costs.stream(4 * c.rows * g.half_c * costs.itemsize, p.bytes),
            "lines that L2 lost": LOST * max(0.0, count * x - costs.device.l2_bytes / 2),
            "start": TASK,
        }
        return Breakdown(costs, {part: LONGER * count for part, count in cycles.items()}, g.tasks)


def _total(factors: Sequence[int], parts: Sequence[np.ndarray]) -> Any:
    return np.sum([part for factor, part in zip(factors, parts, strict=True) if factor], 0)


class Strassen(generated.GeneratedAlgorithm[Config]):
    """1x1 filters of any stride without padding and groups, even numbers of channels and filters; float32; NCHW, NHWC.

    Rounding errors are larger than those of a direct sum: its bound is in terms of the sizes of the sums of parts that
    it multiplies and adds. An infinity or NaN reaches a pixel of the other half too.
    """

    id: ClassVar[str] = "cpu.strassen"
    summary: ClassVar[str] = "1x1 as a matrix product of two by two parts: seven products for eight"
    dtypes: ClassVar[tuple[str, ...] | None] = ("f32",)
    exact: ClassVar[bool] = False
    candidates = staticmethod(candidates)
    cost: ClassVar = TaskCost

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if set(problem.kernel) != {1} or any(map(any, problem.padding)):
            return "takes 1x1 filters without padding"
        least, pixels = 2 * lanes_of(problem, device), prod(problem.output)
        if problem.groups > 1 or problem.c % 2 or problem.k % 2:
            return f"takes even numbers of ungrouped channels and filters, not {problem.c} and {problem.k}"
        if min(problem.c, problem.k, pixels) < least:
            return f"takes {least} channels, filters and pixels or more, not {problem.c}, {problem.k} and {pixels}"
        return None

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Nearly two elements for one, transposed in vectors."""
        return 10.0 + 1e-3 * problem.k * problem.c * 2.0 / device.threads

    def magnitude(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """What is multiplied and added, all of it positive."""
        n, c, k, pixels = problem.n, problem.c, problem.k, prod(problem.output)
        half = ceil_div(pixels, 2)
        seen = np.asarray(x)[:, :, :: problem.stride[0], :: problem.stride[1]]
        planes, matrix = np.abs(seen, dtype=np.float64).reshape(n, c, pixels), np.abs(w, dtype=np.float64).reshape(k, c)
        xs = [rows[..., at : at + half] for rows in np.split(planes, 2, 1) for at in (0, pixels - half)]
        ws = [part for rows in np.split(matrix, 2) for part in np.split(rows, 2, 1)]
        y = np.zeros((n, k, pixels))
        for part in range(4):
            first, at = part // 2 * (k // 2), part % 2 * (pixels - half)
            size = np.zeros((n, k // 2, half))
            for product in PRODUCTS:
                if product.y[part]:
                    size += _total(product.w, ws) @ _total(product.x, xs)
            # The middle pixel of an odd number is in two parts.
            np.maximum(here := y[:, first : first + k // 2, at : at + half], size, out=here)
        return y.reshape(problem.result_shape)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        g = Geometry(problem, config, device)
        shape = {"layout": problem.layout, "strided": g.strided, "m": config.m, "n": config.n}
        library = self.load("strassen", generate, problem, **shape)
        size, tasks = len(PRODUCTS) * g.half_c * g.filter_pad, g.filter_pad // g.lanes
        return KernelPlan(problem, device, library, FIELDS, g.fields(), packed_size=size, pack_tasks=tasks)
