"""cuda.tiles: filters on pictures, a strip of tiles of the result a block, with all that a tile's windows see in shared
memory.

A block goes down its strip; rows that the next tile sees, too, stay. The tile is float32, channels side by side as they
lie. Windows of a column and a row take a column's sums to shared memory and a row's from there, in one launch. A kernel
is compiled for the numbers of taps and the tile; weights are a list in memory, and the picture's size are words of the
launch.

Source: tiles with halos are those of direct convolution; rows that stay in registers while their outputs' windows go
over them are those of cuda.direct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
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
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda.costs import SHARED_BYTES, blocks_of, cycles_us, joint_us
from tapwise.ops.filter.cuda import ListPlan
from tapwise.ops.filter.cuda_strips import Segments, View, fields_of, refusal, segments_of, view_of
from tapwise.ops.filter.problem import FilterProblem, limits
from tapwise.ops.filter.weights import rounded

# Elements of a piece, which a thread loads at once; words that a list begins with; threads of a warp.
PIECE, CONSTANTS, LANES = 4, 8, 32
# Taps of a row that go at once where there are more.
CHUNKS: Final = (8, 4)
# By channels, of which there are no more: row sums of a thread.
ALONG: Final = {1: 8, 2: 8, 3: 12, 4: 16}
# (rows, elements of a row, threads) of a tile; rows of outputs of a thread.
TILES: Final = ((32, 128, 256), (32, 128, 128), (16, 128, 128), (32, 64, 128))
# The same of columns and rows besides, whose row sees more beside a tile the more channels there are.
WIDE_TILES: Final = {
    1: ((32, 192, 384),), 2: ((32, 192, 384),),
    3: ((16, 256, 192), (16, 256, 256), (8, 384, 256)), 4: ((16, 256, 192), (16, 256, 256), (8, 384, 256)),
}  # fmt: skip
DEEP: Final = (4, 2)
# Threads of a multiprocessor that have registers for columns and rows, or windows at once, by `deep`; and for windows
# of few taps.
BLOCKS_THREADS: Final = {(True, 4): 640, (True, 2): 1024, (False, 4): 512, (False, 2): 512}
FEW, FEW_THREADS = 9, {4: 896, 2: 1152}
# Of the cost model, fitted to times of 8 to 15 configs of 31 filters (H200). Instructions of a warp: a piece on its way
# to the ring, and where it is not float32; an element that is truncated or stored. Cycles: of an instruction of all
# warps of a multiprocessor, of one of a block's own, of a step's begin and end. How much longer than its bytes take
# memory takes; begin and end. How much longer a column of so many products takes, whose loop is not unrolled.
LOAD, CONVERT, TRUNCATE, STORE, ISSUE, OWN, TILE, MEMORY, START_US = (
    15.0,
    36.0,
    1.1,
    13.4,
    0.367,
    1.95,
    2600.0,
    1.09,
    2.5,
)
ROLLED, UNROLLED = 1.06, 800


@dataclass(frozen=True)
class Config(BaseConfig):
    """A tile of `rows` rows of `columns` elements or nearly as many, and its block's threads. `deep`: rows of outputs
    of a thread, twice as many of a column."""

    rows: int
    columns: int
    threads: int
    deep: int


def chunk_of(taps: int, c: int) -> int:
    """Taps of a row that go at once: all of a few, else what leaves the fewest over. Of several channels four: eight
    see too many elements."""
    chunks = CHUNKS if c == 1 else CHUNKS[1:]
    return taps if taps <= chunks[0] else min(chunks, key=lambda size: (round_up(taps, size), -size))


class Layout:
    """A tile's rows, pieces and words of shared memory. `separable`: a column and a row."""

    def __init__(self, view: View, config: Config, separable: bool) -> None:
        (r, s), c = view.taps, view.c
        self.chunk = chunk_of(s, c)
        self.chunks = ceil_div(s, self.chunk)
        self.row_weights = self.chunks * round_up(self.chunk, PIECE)
        self.skip = -view.before[1] * c % PIECE
        self.along = ALONG[c] if separable else PIECE
        self.columns = config.columns // self.along * self.along
        self.seen = ceil_div(self.skip + self.along + (self.chunk - 1) * c, PIECE)
        self.pieces = (self.columns - self.along) // PIECE + self.seen + (self.chunks - 1) * self.chunk * c // PIECE
        self.deep = config.deep * (1 + separable)
        # Rows of the ring: those of a step and, of windows at once, of the next one.
        self.ring = round_up(config.rows * (2 - separable) + r - 1, self.deep)
        self.row_at = CONSTANTS + (round_up(r, self.deep) if separable else 0)
        self.words = self.row_at + (1 if separable else r) * self.row_weights
        sums = config.rows * (self.pieces | 1) * separable
        self.shared_bytes = 4 * (self.words + PIECE * (self.ring * self.pieces + sums))
        self.tiles = ceil_div(view.height, config.rows), ceil_div(view.width * c, self.columns)


def most_threads(layout: Layout, config: Config, separable: bool) -> int:
    """Of a multiprocessor, for which the compiler leaves registers: of blocks that find shared memory."""
    held = SHARED_BYTES // (layout.shared_bytes + MORE_BYTES)
    return max(config.threads, min(BLOCKS_THREADS[separable, config.deep], held * config.threads))


class TilesPlan(ListPlan):
    """A launch for windows of a column and a row, or at once; of the largest and the smallest both, by whether there is
    a footprint."""

    def __init__(self, problem: FilterProblem, device: Device, launches: dict[bool, tuple[Layout, Launch]]) -> None:
        super().__init__(problem, device, [launch for _, launch in launches.values()])
        self._by_kind = launches

    def pack(self, w: Any) -> tuple[Any, Launch]:
        """(the list on the GPU, the launch that takes it)."""
        host = None if w is None else np.asarray(arrays.on_host(w), np.float64)
        separable = self.problem.op == "separable" or (self.problem.op != "dense" and host is None)
        layout, launch = self._by_kind[separable]
        return self.uploaded(pack(self.problem, host, layout, separable)), launch

    def run(self, buffers: Buffers) -> None:
        x, (words, launch), y, *_ = buffers
        launch({"x": x.ptr, "y": y.ptr, "list": words.ptr}, stream(buffers))


def pack(problem: FilterProblem, w: np.ndarray | None, layout: Layout, separable: bool) -> np.ndarray:
    """The list: cval, low, high, start, the epsilons of column and result; weights of the column and of the row, or of
    the window's rows, each row in chunks, with zeros behind them, behind whether none of the weights is 0."""
    view = view_of(problem)
    r, s = view.taps
    if w is None:
        w = np.ones(r + s if separable else (r, s))
    epsilons = problem.rounding_epsilons(w.ravel()) if problem.op in ("dense", "separable") else (0.0, 0.0)
    host = np.zeros(layout.words, np.float32)
    host[:6] = (problem.cval, *limits(problem), *epsilons)
    w = rounded(w.ravel(), np.dtype(np.float32))
    host[6] = np.all(w != 0)
    column, rows = (w[:r], w[r:].reshape(1, s)) if separable else (w[:0], w.reshape(r, s))
    host[CONSTANTS : CONSTANTS + len(column)] = column
    padded = np.zeros((len(rows), layout.chunks * layout.chunk), np.float32)
    padded[:, :s] = rows
    chunks = padded.reshape(len(rows), layout.chunks, layout.chunk)
    host[layout.row_at :].reshape(len(rows), layout.chunks, -1)[:, :, : layout.chunk] = chunks
    return host


class FilterTiles(CudaAlgorithm[Config]):
    """Windows over two axes, up to four channels, of up to 16 bits or float32, as large as shared memory takes."""

    operator: ClassVar[str] = "filter"
    id: ClassVar[str] = "cuda.tiles"
    summary: ClassVar[str] = "tiles in shared memory, rows in registers; a column and a row in one launch"
    dtypes: ClassVar[None] = None

    def rejects(self, problem: FilterProblem, device: Device) -> str | None:
        if reason := refusal(problem, TILES[2][0]):
            return reason
        if not self.configs(problem, device):
            return "has no tile that fits into shared memory"
        return None

    def configs(self, problem: FilterProblem, device: Device) -> Sequence[Config]:
        view, kinds = view_of(problem), kinds_of(problem)
        tiles = TILES + (WIDE_TILES[view.c] if kinds[0] else ())
        return [
            config
            for config in (Config(*tile, deep) for tile in tiles for deep in DEEP)
            if config.rows % (config.deep * (1 + kinds[0])) == 0
            and all(Layout(view, config, kind).shared_bytes <= device.shared_bytes for kind in kinds)
        ]

    def predict_us(self, problem: FilterProblem, config: Config, device: Device) -> float:
        """Memory, and steps: what all warps of a multiprocessor issue, or a block's own chain of loads and sums."""
        view, separable = view_of(problem), kinds_of(problem)[0]
        layout, (r, s), threads = Layout(view, config, separable), view.taps, config.threads
        words, sums = layout.row_weights // PIECE, 4 * layout.deep
        segments = segments_for(view, layout, config, separable, device)
        steps = max(1, layout.tiles[0] / segments.blocks)
        # (items of a step, instructions of each).
        parts = [((config.rows + (r - 1) / steps) * layout.pieces, LOAD + CONVERT * (problem.x_dtype.itemsize < 4))]
        if separable:
            column: float = r + layout.deep + ceil_div(r, PIECE) + r * sums + layout.deep * 2 + 20
            column += sums * TRUNCATE * problem.truncates_columns
            column *= ROLLED if r * sums > UNROLLED else 1.0
            moved = (layout.chunks - 1) * layout.chunk * view.c / PIECE
            row = layout.seen + moved + words + s * layout.along + layout.along * STORE + 30
            parts += [(config.rows * layout.pieces // layout.deep, column)]
            parts += [(config.rows * layout.columns // layout.along, row)]
        else:
            at_once = layout.chunks * (layout.deep - 1 + r) * layout.seen + r * (words + s * sums)
            parts += [(config.rows * layout.columns // sums, at_once + sums * STORE + layout.deep * 12 + 25)]
        issued = ISSUE * sum(items / LANES * each for items, each in parts)
        own = TILE + OWN * sum(ceil_div(ceil(items), threads) * each for items, each in parts)
        most = FEW_THREADS[config.deep] if not separable and r * s <= FEW else most_threads(layout, config, separable)
        share = view.depth * prod(layout.tiles) / device.multiprocessors
        held = blocks_of((1 << 16) // most, threads, layout.shared_bytes)
        beside = min(held, max(1, share / steps))
        cycles = max(1, share / beside) * joint_us(beside * issued, own, 3.0)
        memory = MEMORY * problem.bytes / (device.gbps * 1e3)
        return START_US + joint_us(cycles / cycles_us(device), memory, 3.0)

    def plan(self, problem: FilterProblem, config: Config, device: Device) -> Plan:
        kinds = {kind: self.of_kind(problem, config, kind, device) for kind in kinds_of(problem)}
        return TilesPlan(problem, device, kinds)

    def of_kind(self, problem: FilterProblem, config: Config, kind: bool, device: Device) -> tuple[Layout, Launch]:
        """What a plan has of a kind of windows."""
        return Layout(view_of(problem), config, kind), self.launch(problem, config, kind, device)

    def sources(self, problem: FilterProblem, config: Config) -> list[Source]:
        return [self.source(problem, config, kind) for kind in kinds_of(problem)]

    def source(self, problem: FilterProblem, config: Config, separable: bool = False) -> Source:
        view = view_of(problem)
        layout = Layout(view, config, separable)
        words: dict[str, int | bool | str] = {
            "OP": {"max": "LARGEST", "min": "SMALLEST"}.get(problem.op, "SUM"), "C": view.c, "SEPARABLE": separable,
            "TAPS_H": view.taps[0], "TAPS_W": view.taps[1], "PIECES": layout.pieces, "CHUNK": layout.chunk,
            "SKIP": layout.skip, "ROWS": config.rows, "RING": layout.ring,
            "COLUMNS": layout.columns, "ALONG": layout.along, "DEEP": layout.deep, "THREADS": config.threads,
            "INTEGRAL": problem.integral, "CLIP": problem.clip,
            "TRUNCATE": separable and problem.op == "separable" and problem.truncates_columns,
        }  # fmt: skip
        of_x, of_y = (tensor_core_type(one) if one == "f16" else DTYPES[one].cpp for one in (problem.dtype, problem.to))
        return stub(
            "ops/filter/tiles.cu", "filter_tiles", f"Traits, {of_y}", "FilterTiles", config.threads,
            most_threads(layout, config, separable) // config.threads, declarations=traits(of_x, words),
        )  # fmt: skip

    def launch(self, problem: FilterProblem, config: Config, separable: bool, device: Device) -> Launch:
        view = view_of(problem)
        layout = Layout(view, config, separable)
        segments = segments_for(view, layout, config, separable, device)
        fields = fields_of(view, segments)
        grid, source = (layout.tiles[1], segments.blocks, view.depth), self.source(problem, config, separable)
        return Launch(source, fields, grid, config.threads, layout.shared_bytes, dependent=True)


def segments_for(view: View, layout: Layout, config: Config, separable: bool, device: Device) -> Segments:
    """Of blocks as many of which run at once as registers and shared memory hold."""
    held = blocks_of((1 << 16) // most_threads(layout, config, separable), config.threads, layout.shared_bytes)
    return segments_of(view, layout.tiles, config.rows, held * device.multiprocessors)


def kinds_of(problem: FilterProblem) -> tuple[bool, ...]:
    """Whether kernels are of a column and a row: those that a plan may need, the one without a footprint first."""
    return {"separable": (True,), "dense": (False,)}.get(problem.op, (True, False))
