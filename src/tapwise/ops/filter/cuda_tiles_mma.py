"""cuda.tiles_mma: sums of bytes on tensor cores, a strip of the result a block, all that its windows see in shared
memory.

Pixels are float16 in shared memory, weights two float16 each. A row of taps is a banded matrix of elements by outputs,
a column of taps one of outputs by rows, and mma.sync multiplies them with pixels; of a column and a row, column sums go
from one to the other by way of shared memory. A kernel is compiled for the numbers of taps and the tile; matrices of
weights are a list in memory, in the order of lanes.

Source: PTX ISA on mma.sync and ldmatrix; strips are those of cuda.tiles. Numbers in parts: Markidis et al., "NVIDIA
tensor core programmability, performance & precision", IPDPSW 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp, prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import arrays
from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.jit.occupancy import MORE_BYTES
from tapwise.cuda.plan import CudaAlgorithm, stream
from tapwise.cuda.types import DTYPES, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda.costs import SHARED_BYTES, blocks_of, cycles_us, joint_us
from tapwise.ops.filter.cuda import ListPlan
from tapwise.ops.filter.cuda_strips import Segments, View, fields_of, no_byte, refusal, segments_of, view_of
from tapwise.ops.filter.problem import FilterProblem, limits
from tapwise.ops.filter.weights import in_two_parts

# Words that a list begins with; elements of a piece of the ring, and of half an operand; of a row that a warp has at a
# time; rows of an operand; lanes of a warp.
CONSTANTS, PIECE, ACROSS, DOWN, LANES = 16, 8, 32, 16, 32
# Kinds of sums, as the kernel has them, and their place: weights and column sums of one part; weights of two; both of
# two.
EXACT, PARTS, SPLIT = 0, 1, 2
KIND: Final = 6
# Column sums that are whole numbers in float16: what it holds, and once truncated.
WHOLE_SUMS, TRUNCATED_SUMS = 2048, 1022
# Column sums in two parts are at most 2 to this.
SUMS_EXPONENT: Final = 15
# How many times the rounding epsilon is that of float32: tensor cores round towards zero, by 2^-23 of a sum each time
# at most, and up to ten times before sums are added up in float32.
ROUNDINGS: Final = 3.0
# (rows, elements of a row, threads) of a tile.
TILES: Final = (
    (32, 256, 256), (32, 256, 128), (32, 128, 128), (32, 192, 192), (16, 256, 128), (64, 128, 256), (16, 128, 128),
    (32, 64, 128), (16, 64, 64),
)  # fmt: skip
# Threads of a multiprocessor that have registers: of a column and a row of few operands, of a window of few, of others.
FEW_SEPARABLE, FEW, THREADS = 768, 640, 512
# Of the cost model: instructions counted in kernels for sm_90a, then fitted to 57 times of 12 filters (H200; 29 of them
# of a version before): loads wait most. Instructions of a warp: a piece on its way to the ring; 16 x 16 column sums,
# and how many times that in two parts; 16 x 32 results, and of 4 bytes each; a row of taps and a step besides products;
# what it does once in a step of its block. Cycles of a multiprocessor: of an instruction, of a product of 16 x 8 x 16;
# of a block's step, its begin and end, and of one of a warp's own instructions. Memory and launch as in cuda.tiles.
LOAD, COLUMN, IN_PARTS, OUTPUT, WIDE_OUTPUT, ROW, STEP, ONCE = 98.5, 44.0, 1.4, 107.0, 70.0, 5.0, 3.0, 97.0
ISSUE, PRODUCT, TILE, OWN = 0.526, 5.48, 2600.0, 1.87
MEMORY, START_US = 1.09, 2.5


@dataclass(frozen=True)
class Config(BaseConfig):
    """A tile of `rows` rows of `columns` elements, and its block's threads."""

    rows: int
    columns: int
    threads: int


class Layout:
    """A tile's rows, operands and bytes of shared memory."""

    def __init__(self, problem: FilterProblem, config: Config) -> None:
        view, separable, bytes_each = view_of(problem), problem.op == "separable", problem.y_dtype.itemsize
        (r, s), c = view.taps, view.c
        self.separable, self.skip = separable, -view.before[1] * c % 4
        # Halves of operands that 8 outputs see of a row, and 16 of a column.
        self.halves = ceil_div(8 + self.skip + (s - 1) * c, 8)
        self.column_halves = ceil_div(DOWN + r - 1, 8)
        self.pieces = ceil_div(self.skip + config.columns + (s - 1) * c, PIECE)
        self.width = config.columns + 16 * (self.halves // 2)
        # Rows of an odd number of pieces, so that eight of them lie in all banks.
        self.pitch = 8 * (max(self.width // 8, self.pieces) | 1)
        # Rows of the ring: those that operands see, or, of windows at once, those of the next step besides.
        self.ring = config.rows - DOWN + 8 * self.column_halves if separable else 2 * config.rows + r - 1
        self.column_words = self.column_halves * 128 if separable else 0
        self.row_words = self.halves * 64
        few = self.halves <= 2 and self.column_halves <= 3 if separable else r <= 3 and self.halves == 2
        self.threads = (FEW_SEPARABLE if separable else FEW) if few else THREADS
        self.words = CONSTANTS + self.column_words + (1 if separable else r) * self.row_words
        scratch = 0 if bytes_each == 4 else config.threads // LANES * DOWN * (ACROSS * bytes_each + 16)
        self.shared_bytes = 4 * self.words + 2 * self.pitch * self.ring + scratch
        # Of column sums in one part, which truncated ones have but for large weights, or in two.
        self.sums_bytes = 2 * self.pitch * config.rows * separable
        self.most_bytes = self.shared_bytes + 2 * self.sums_bytes
        self.shared_bytes += self.sums_bytes * (1 if problem.truncates_columns else 2)
        self.tiles = ceil_div(view.height, config.rows), ceil_div(view.width * c, config.columns)


def most_threads(layout: Layout, config: Config) -> int:
    """Of a multiprocessor, for which the compiler leaves registers: of blocks that find shared memory."""
    held = SHARED_BYTES // (layout.shared_bytes + MORE_BYTES)
    return max(config.threads, min(layout.threads, held * config.threads))


class TilesMmaPlan(ListPlan):
    """A launch with shared memory for column sums of one part, or of two; of windows at once one launch."""

    def pack(self, w: Any) -> tuple[Any, Launch]:
        """(the list on the GPU, the launch that takes it)."""
        host = pack(self.problem, np.asarray(arrays.on_host(w), np.float64))
        return self.uploaded(host), self.launches[-1 if host[KIND] == SPLIT else 0]

    def run(self, buffers: Buffers) -> None:
        x, (words, launch), y, *_ = buffers
        launch({"x": x.ptr, "y": y.ptr, "list": words.ptr}, stream(buffers))


def pack(problem: FilterProblem, w: np.ndarray) -> np.ndarray:
    """The list: constants as the kernel has them; the column's matrices, of 16 x 16 (large parts of all lanes, small
    ones) and the last perhaps of 16 x 8 (of each lane both); the window's rows' or the row's, of 16 x 8 (of each lane
    both) and perhaps 8 x 8. float32 words, of which those of matrices are two float16 each."""
    view = view_of(problem)
    (r, s), separable = view.taps, problem.op == "separable"
    column, rows = (w.ravel()[:r], w.ravel()[r:].reshape(1, s)) if separable else (np.zeros(0), w.reshape(r, s))
    large_column, small_column, column_exponent = in_two_parts(column)
    large, small, exponent = in_two_parts(rows.ravel())
    words = [_row_matrices(view, *both) for both in zip(large.reshape(-1, s), small.reshape(-1, s), strict=True)]
    if separable:
        words.insert(0, _column_matrices(large_column, small_column))
    host = np.zeros(CONSTANTS, np.float32)
    epsilons = [min(0.25, ROUNDINGS * one) for one in problem.rounding_epsilons(w.ravel())]
    host[:6] = (problem.cval, *limits(problem), *epsilons)
    # Column sums: the largest, and whether float16 holds them as they are.
    info = np.iinfo(problem.x_dtype)
    largest = max(-float(info.min), float(info.max)) * float(np.abs(column).sum())
    whole = problem.truncates_columns or bool(np.all(column == np.rint(column)))
    most = TRUNCATED_SUMS if problem.truncates_columns else WHOLE_SUMS
    split = separable and np.isfinite(largest) and not (whole and largest <= most)
    parts = bool(np.any(small)) or bool(np.any(small_column))
    rescale = SUMS_EXPONENT - frexp(largest)[1] if split else 0
    first, second = (0, rescale) if problem.truncates_columns else (rescale, 0)
    scales = (first - column_exponent if separable else 0), second, -exponent - rescale
    host[KIND] = SPLIT if split else PARTS if parts else EXACT
    # Where float32 does not hold one, sums are 0 or infinite.
    host[7:10] = [2.0 ** min(max(one, -149), 127) for one in scales]
    host[10] = bool(np.all(w == np.rint(w)))
    return np.concatenate([host, *words])


def _words(halves: np.ndarray) -> np.ndarray:
    """Neighbours of the last axis in a word, which all lie behind each other."""
    return np.ascontiguousarray(halves, np.float16).ravel().view(np.float32)


def _column_matrices(large: np.ndarray, small: np.ndarray) -> np.ndarray:
    """Row m of 16 outputs sees row k with tap k - m. Lane (g, q) has rows g and g + 8 of two neighbours 2 q, of each
    half of 8."""
    halves = ceil_div(DOWN + len(large) - 1, 8)
    tap = np.arange(8 * halves) - np.arange(DOWN)[:, None]
    within = (tap >= 0) & (tap < len(large))
    # (part, half, g, q, row of eight, neighbour).
    both = [np.where(within, one[np.clip(tap, 0, len(one) - 1)], 0) for one in (large, small)]
    lanes = np.stack(both).reshape(2, 2, 8, halves, 4, 2).transpose(0, 3, 2, 4, 1, 5)
    steps = lanes[:, : halves // 2 * 2].reshape(2, halves // 2, 2, 8, 4, 2, 2).transpose(1, 0, 3, 4, 2, 5, 6)
    return np.concatenate([_words(steps), _words(lanes[:, halves // 2 * 2 :].transpose(1, 2, 3, 0, 4, 5))])


def _row_matrices(view: View, large: np.ndarray, small: np.ndarray) -> np.ndarray:
    """Output n of 8 sees element k with tap (k - skip - n) / channels. Lane (g, q) has two neighbours 2 q of column g,
    of each half of 8."""
    skip, s = -view.before[1] * view.c % 4, len(large)
    halves = ceil_div(8 + skip + (s - 1) * view.c, 8)
    ahead = np.arange(8 * halves)[:, None] - skip - np.arange(8)
    within = (ahead >= 0) & (ahead % view.c == 0) & (ahead // view.c < s)
    both = [np.where(within, one[np.clip(ahead // view.c, 0, s - 1)], 0) for one in (large, small)]
    # (part, half, q, neighbour, g) -> (half, g, q, part, neighbour).
    lanes = np.stack(both).reshape(2, halves, 4, 2, 8).transpose(1, 4, 2, 0, 3)
    steps = lanes[: halves // 2 * 2].reshape(halves // 2, 2, 8, 4, 2, 2).transpose(0, 2, 3, 4, 1, 5)
    return np.concatenate([_words(steps), _words(lanes[halves // 2 * 2 :])])


class FilterTilesMma(CudaAlgorithm[Config]):
    """Sums of bytes over two axes, up to four channels, as large as shared memory takes; weights are finite. Compute
    capability 8.0 and newer."""

    operator: ClassVar[str] = "filter"
    id: ClassVar[str] = "cuda.tiles_mma"
    summary: ClassVar[str] = "sums of bytes on tensor cores (mma.sync), weights in two parts of float16"
    dtypes: ClassVar[None] = None

    def rejects(self, problem: FilterProblem, device: Device) -> str | None:
        if problem.dtype not in ("u8", "i8") or problem.op not in ("dense", "separable"):
            return "takes sums of bytes"
        if reason := refusal(problem, DOWN) or no_byte(problem):
            return reason
        if not self.configs(problem, device):
            return "has no tile that fits into shared memory"
        return None

    def configs(self, problem: FilterProblem, device: Device) -> Sequence[Config]:
        configs = (Config(*tile) for tile in TILES)
        return [one for one in configs if Layout(problem, one).most_bytes <= device.shared_bytes]

    def predict_us(self, problem: FilterProblem, config: Config, device: Device) -> float:
        """Memory, and steps: what all warps of a multiprocessor issue, its tensor cores, or a block's own chain."""
        view, layout = view_of(problem), Layout(problem, config)
        (r, _), threads = view.taps, config.threads
        segments = self.segments(problem, config, device)
        steps = max(1, layout.tiles[0] / segments.blocks)
        warps = threads // LANES
        issued = (config.rows + (r - 1) / steps) * layout.pieces / LANES * LOAD + warps * ONCE
        outputs, in_row = config.rows * config.columns / (DOWN * ACROSS), layout.halves / 2
        store = WIDE_OUTPUT if problem.y_dtype.itemsize == 4 else OUTPUT
        if layout.separable:
            split = not problem.truncates_columns
            twos, in_column = config.rows * layout.width / (DOWN * 16), layout.column_halves / 2
            products = twos * in_column * 4 + outputs * in_row * 4 * (3 if split else 2)
            issued += twos * (COLUMN * (IN_PARTS if split else 1.0) + in_column * STEP)
            issued += outputs * (store + in_row * STEP)
        else:
            products = outputs * r * in_row * 8
            issued += outputs * (store + r * (ROW + in_row * STEP))
        issued += products
        own = TILE + OWN * issued / warps
        share = view.depth * prod(layout.tiles) / device.multiprocessors
        held = blocks_of((1 << 16) // most_threads(layout, config), threads, layout.shared_bytes)
        beside = min(held, max(1, share / steps))
        cycles = max(1, share / beside) * joint_us(beside * joint_us(issued * ISSUE, products * PRODUCT, 3.0), own, 3.0)
        memory = MEMORY * problem.bytes / (device.gbps * 1e3)
        return START_US + joint_us(cycles / cycles_us(device), memory, 3.0)

    def plan(self, problem: FilterProblem, config: Config, device: Device) -> Plan:
        kinds = (False, True) if problem.op == "separable" else (False,)
        return TilesMmaPlan(problem, device, [self.launch(problem, config, device, split) for split in kinds])

    def segments(self, problem: FilterProblem, config: Config, device: Device) -> Segments:
        layout = Layout(problem, config)
        held = blocks_of((1 << 16) // most_threads(layout, config), config.threads, layout.shared_bytes)
        return segments_of(view_of(problem), layout.tiles, config.rows, held * device.multiprocessors)

    def source(self, problem: FilterProblem, config: Config) -> Source:
        view, layout = view_of(problem), Layout(problem, config)
        words: dict[str, int | bool | str] = {
            "C": view.c, "SEPARABLE": layout.separable, "TAPS_H": view.taps[0], "TAPS_W": view.taps[1],
            "SKIP": layout.skip, "ROWS": config.rows, "COLUMNS": config.columns, "THREADS": config.threads,
            "PIECES": layout.pieces, "PITCH": layout.pitch, "RING": layout.ring, "INTEGRAL": problem.integral,
            "CLIP": problem.clip, "TRUNCATE": layout.separable and problem.truncates_columns,
        }  # fmt: skip
        of_y = tensor_core_type("f16") if problem.to == "f16" else DTYPES[problem.to].cpp
        return stub(
            "ops/filter/tiles_mma.cu", "filter_tiles_mma", f"Traits, {of_y}", "FilterTiles", config.threads,
            most_threads(layout, config) // config.threads, declarations=traits(DTYPES[problem.dtype].cpp, words),
        )  # fmt: skip

    def launch(self, problem: FilterProblem, config: Config, device: Device, split: bool = True) -> Launch:
        view, layout = view_of(problem), Layout(problem, config)
        segments = self.segments(problem, config, device)
        grid = layout.tiles[1], segments.blocks, view.depth
        shared = layout.most_bytes - (0 if split else layout.sums_bytes)
        source, fields = self.source(problem, config), fields_of(view, segments)
        return Launch(source, fields, grid, config.threads, shared, dependent=True)
