"""cpu.strassen: convolution with seven eighths of the multiplications.

y = w * x, filters by terms and terms by pixels, each in two by two parts: Strassen's seven products of sums of parts
instead of eight (`products`). Sums of the filters' parts are made when filters are packed. A task makes those of x, of
some pixels of each half, computes the seven products with some filters of each half on register tiles, and adds them up
to the four parts of y.

Source: V. Strassen, "Gaussian Elimination is not Optimal", 1969; errors: N. Higham, "Exploiting Fast Matrix
Multiplication Within the Level 3 BLAS", 1990.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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
# What a task takes longer than its parts, which are in each other's way in the caches: the mean of 16 drawn layers on a
# Zen 5; and of 16 on an Emerald Rapids, whose shuffles and products of long vectors share a unit.
LONGER, LONGER_SPLIT = 1.04, 1.17
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
        self.half_terms, self.source = problem.gemm_k // 2, source_of(problem, self.lanes)
        # An odd number of cache lines: pixels lie in different sets.
        line = 64 // itemsize
        self.pitch = (ceil_div(self.half_terms, line) | 1) * line
        count, (_, q), across = len(PRODUCTS), problem.output, problem.stride[1]
        # What is read of a row of x, and pixels of x that are transposed for a task at most.
        self.row_length = (q - 1) * across + (problem.kernel[1] - 1) * problem.dilation[1] + 1
        rows = (config.rows + q - 2) // q + 1
        self.slots = {"planes": config.rows, "rows": rows * self.row_length}.get(self.source, 0)
        # Behind the sums of x there is room for a vector of channels of each part.
        self.products_at = count * config.rows * self.pitch + 4 * self.slots * self.lanes
        size = self.products_at + count * config.rows * config.n * self.lanes
        self.scratch_bytes = round_up(size * itemsize, 64)
        self.row_blocks, self.filter_blocks = ceil_div(self.half_p, config.rows), ceil_div(self.half_k, config.filters)
        self.tasks = self.row_blocks * self.filter_blocks * problem.n

    def rows_of_y(self) -> float:
        """That have pixels of a task, of one half, in the mean."""
        begins = np.arange(0, self.half_p, self.config.rows)
        ends, q = np.minimum(begins + self.config.rows, self.half_p) - 1, self.problem.output[1]
        halves = [(ends + half) // q - (begins + half) // q + 1 for half in (0, self.pixels - self.half_p)]
        return float(np.mean(halves))

    def fields(self) -> dict[str, Any]:
        p, c = self.problem, self.config
        rows, columns = (np.arange(size, dtype=np.int64) for size in p.output)
        # Of each pixel of y: where it is among transposed rows or in the image.
        row = self.row_length if self.source == "rows" else p.stride[0] * p.spatial[1]
        return {
            "plane": prod(p.spatial), "w_in": p.spatial[1], "image": p.c * prod(p.spatial), "q": p.output[1],
            "stride_h": p.stride[0], "dilation_h": p.dilation[0], "dilation_w": p.dilation[1],
            "taps_h": p.kernel[0], "taps_w": p.kernel[1], "h": p.spatial[0],
            "pad_top": p.padding[0][0], "pad_left": p.padding[1][0], "row_length": self.row_length, "slots": self.slots,
            "places": (rows[:, None] * row + columns * p.stride[1]).reshape(-1),
            "tasks": self.tasks, "scratch_step": self.scratch_bytes, "products_at": self.products_at,
            "half_c": self.half_c, "half_terms": self.half_terms, "half_k": self.half_k,
            "filter_pad": self.filter_pad, "half_p": self.half_p,
            "pixels": self.pixels, "odd": self.pixels % 2, "rows": c.rows, "row_blocks": self.row_blocks,
            "filter_block": c.filters,
            "filter_blocks": self.filter_blocks, "pitch": self.pitch,
            "offsets": np.arange(self.half_terms, dtype=np.int64), "matrix": self.half_terms * self.filter_pad,
        }  # fmt: skip


def source_of(problem: ConvProblem, lanes: int) -> str:
    """What vectors of terms are made of, as the kernel says; "" where it takes none of them."""
    if problem.groups > 1 or problem.gemm_k % 2:
        return ""
    padded, (taps_h, taps_w), planar = any(map(any, problem.padding)), problem.kernel, problem.layout == "nchw"
    if planar and not padded and taps_w % lanes == 0 and problem.dilation == (1, 1) and problem.c * taps_h % 2 == 0:
        return "taps"
    if problem.c % 2 or problem.c < 2 * lanes or (padded and not planar):
        return ""
    if not planar:
        return "pixels"
    return "planes" if {*problem.kernel, *problem.stride} == {1} and not padded else "rows"


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
        panel = c.filters * g.half_terms * costs.itemsize
        passes, columns, count = ceil_div(c.rows, c.m), ceil_div(vectors, c.n), len(PRODUCTS)
        tiles = costs.block(c.m, c.n, c.rows, vectors, g.half_terms) * (CHANNELS_WHOLE if costs.whole else 1.0)
        tiles += costs.first_pass(panel, p.layout)
        share = max(1.0, g.tasks / self.device.threads)
        whole = count * g.half_k * g.half_terms * costs.itemsize
        own = min(whole, count * panel * share)
        x = c.rows * g.pitch * costs.itemsize
        streamed = costs.filters(panel, passes, IN_L1 * panel / columns, own, whole)
        streamed += columns * costs.stream(x, count * x)
        sums, slow = c.rows * vectors, costs.device.vector_cycles
        channels, terms = ceil_div(g.half_c, costs.lanes), ceil_div(g.half_terms, costs.lanes)
        finishing, transposing = c.rows * costs.row(c.filters, 1.5), 0.0
        if p.layout == "nchw":
            # Runs of pixels are transposed in whole vectors.
            finishing = TO_PLANES * slow * vectors * round_up(c.rows, costs.lanes)
        if g.source == "planes":
            transposing = channels * (TO_PIXELS * slow * round_up(c.rows, costs.lanes) + TRANSPOSED_RUN)
        elif g.source == "rows":
            runs = p.kernel[0] * g.rows_of_y()
            transposing = channels * runs * (TO_PIXELS_STRIDED * slow * g.row_length + TRANSPOSED_RUN)
        cycles: Mapping[str, float] = {
            "products": count * tiles,
            "waiting for operands": count * costs.waiting(tiles, streamed),
            "sums of products": COMBINED * slow * sums,
            "finishing": 4 * finishing,
            "writing y": 0.2 * costs.stream(4 * sums * self.device.vector_bytes, p.bytes),
            "sums of x": SUMS * slow * terms * c.rows,
            "transposing x": 4 * transposing,
            "reading x": costs.stream(4 * c.rows * g.half_terms * costs.itemsize, p.bytes),
            "lines that L2 lost": LOST * max(0.0, count * x - costs.device.l2_bytes / 2),
            "start": TASK,
        }
        longer = LONGER_SPLIT if self.device.split_loads else LONGER
        return Breakdown(costs, {part: longer * count for part, count in cycles.items()}, g.tasks)


def _total(factors: Sequence[int], parts: Sequence[np.ndarray]) -> Any:
    return np.sum([part for factor, part in zip(factors, parts, strict=True) if factor], 0)


class StrassenPlan(KernelPlan):
    """Filters are packed from where their terms lie in the order of those of x: of each half (tap, channel)."""

    def pack_into(self, w: np.ndarray, memory: np.ndarray | None) -> np.ndarray | None:
        p = self.problem
        assert isinstance(p, ConvProblem)
        return super().pack_into(w.reshape(p.k, 2, p.c // 2, -1).swapaxes(2, 3), memory)


class Strassen(generated.GeneratedAlgorithm[Config]):
    """Ungrouped float32 of even numbers of channels and filters, at least two vectors; NCHW, and NHWC without padding.

    Rounding errors are larger than those of a direct sum: its bound is in terms of the sizes of the sums of parts that
    it multiplies and adds. An infinity or NaN reaches pixels of the other half too.
    """

    id: ClassVar[str] = "cpu.strassen"
    summary: ClassVar[str] = "a matrix product of two by two parts: seven products of sums for eight"
    dtypes: ClassVar[tuple[str, ...] | None] = ("f32",)
    exact: ClassVar[bool] = False
    candidates = staticmethod(candidates)
    cost: ClassVar = TaskCost

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        least, pixels = 2 * lanes_of(problem, device), prod(problem.output)
        if not source_of(problem, least // 2):
            return f"takes {least} ungrouped channels or more, an even number, and no padding channels last"
        if problem.k % 2 or min(problem.k, pixels) < least:
            return f"takes {least} filters or more, an even number, and as many pixels, not {problem.k} and {pixels}"
        return None

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Nearly two elements for one, transposed in vectors."""
        each = 2.0 if prod(problem.kernel) == 1 else 8.0
        return 10.0 + 1e-3 * problem.k * problem.gemm_k * each / device.threads

    def magnitude(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """What is multiplied and added, all of it positive."""
        n, k, pixels = problem.n, problem.k, prod(problem.output)
        half = ceil_div(pixels, 2)
        taps = [
            [slice(t * d, t * d + (p - 1) * s + 1, s) for t in range(size)]
            for size, p, s, d in zip(problem.kernel, problem.output, problem.stride, problem.dilation, strict=True)
        ]
        x = np.pad(np.abs(x, dtype=np.float64), ((0, 0), (0, 0), *problem.padding))
        seen = np.stack([x[:, :, *tap] for tap in product(*taps)], 2).reshape(n, -1, pixels)
        matrix = np.abs(w, dtype=np.float64).reshape(k, -1)
        xs = [rows[..., at : at + half] for rows in np.split(seen, 2, 1) for at in (0, pixels - half)]
        ws = [part for rows in np.split(matrix, 2) for part in np.split(rows, 2, 1)]
        y = np.zeros((n, k, pixels))
        for part in range(4):
            first, at = part // 2 * (k // 2), part % 2 * (pixels - half)
            size = np.zeros((n, k // 2, half))
            for one in PRODUCTS:
                if one.y[part]:
                    size += _total(one.w, ws) @ _total(one.x, xs)
            # The middle pixel of an odd number is in two parts.
            np.maximum(here := y[:, first : first + k // 2, at : at + half], size, out=here)
        return y.reshape(problem.result_shape)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        g = Geometry(problem, config, device)
        shape = {"layout": problem.layout, "source": g.source, "m": config.m, "n": config.n}
        library = self.load("strassen", generate, problem, **shape)
        size, tasks = len(PRODUCTS) * g.half_terms * g.filter_pad, g.filter_pad // g.lanes
        kind = KernelPlan if prod(problem.kernel) == 1 or g.source == "taps" else StrassenPlan
        return kind(problem, device, library, FIELDS, g.fields(), packed_size=size, pack_tasks=tasks)
