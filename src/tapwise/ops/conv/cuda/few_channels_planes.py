"""cuda.few_channels in NCHW: runs of windows in rows of planes, pixels that are neighbours in y."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Final

from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import row_tiles
from tapwise.ops.conv.cuda.few_channels_rows import (
    PIECE_BYTES,
    TILES,
    Config,
    copy_bytes,
    kinds_of,
    lead_bytes,
    parity_of,
)
from tapwise.ops.conv.problem import ConvProblem

# Threads that hold the words of 16 bytes of gemm_k; banks of shared memory, and bytes of them all.
QUAD, BANKS, ALL_BANKS = 4, 32, 128
# Filters of the matrix instruction.
FILTERS: Final = 16


def _pieces(problem: ConvProblem, runs: int) -> int:
    """Of a run of S neighbours, where four threads hold words of so many runs."""
    run = problem.kernel[1] + (parity_of(problem) != "EVEN")
    return ceil_div(run * problem.itemsize, PIECE_BYTES // runs)


def _halves(problem: ConvProblem, runs: int) -> int:
    return ceil_div(problem.kernel[0] * problem.c, runs) * _pieces(problem, runs)


@lru_cache(maxsize=512)
def runs_of(problem: ConvProblem) -> int:
    """Runs whose words four threads hold together: such as leave the fewest idle. Rows of a window must be equally far
    from each other where that is more than one."""
    if problem.dilation[0] > 1 and problem.kernel[0] > 1:
        return 1
    return min((1, 2, 4), key=lambda runs: _halves(problem, runs))


def halves_of(problem: ConvProblem) -> int:
    """Pieces of 16 bytes of gemm_k."""
    return _halves(problem, runs_of(problem))


def rows_of(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """(rows of x of a tile, of all channels; bytes of each): of those that are read without, or with the fewest,
    conflicts of banks."""
    high = (config.down - 1) * problem.stride[0] + problem.reach[0]
    least = round_up(row_bytes(problem, config), PIECE_BYTES)
    return high * problem.c, _pitch(*_distances(problem, config.order), runs_of(problem), least)


def row_bytes(problem: ConvProblem, config: Config) -> int:
    """Bytes of a row that a tile reads, those before its first window and behind its last one included."""
    runs, size = runs_of(problem), problem.itemsize
    window = _pieces(problem, runs) * PIECE_BYTES // runs
    return lead_bytes(problem) + (config.across - 1) * problem.stride[1] * size + window


def slack_bytes(problem: ConvProblem, pitch: int) -> int:
    """What the last group of runs would read behind the rows where it is not full."""
    return -problem.kernel[0] * problem.c % runs_of(problem) * pitch


def _distances(problem: ConvProblem, order: int) -> tuple[int, int]:
    """Bytes of a row from one of four threads' pixels to the next one's, and between two of a thread."""
    pixel_bytes = problem.stride[1] * problem.itemsize
    return order // QUAD * pixel_bytes, kinds_of(problem) * pixel_bytes


def wavefronts(problem: ConvProblem, order: int, pitch: int) -> int:
    """Of reading a word of a block of 8 pixels: the most different words of one bank."""
    return _wavefronts(*_distances(problem, order), runs_of(problem), pitch)


@lru_cache(maxsize=4096)
def _pitch(next_thread: int, next_pixel: int, runs: int, least: int) -> int:
    pitches = range(least, least + ALL_BANKS, PIECE_BYTES) if runs > 1 else [least]
    return min(pitches, key=lambda pitch: _wavefronts(next_thread, next_pixel, runs, pitch))


@lru_cache(maxsize=4096)
def _wavefronts(next_thread: int, next_pixel: int, runs: int, pitch: int) -> int:
    found: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for t, e, thread in product(range(QUAD), range(2), range(QUAD)):
        run, word = divmod(thread, QUAD // runs)
        word += (t * next_thread + e * next_pixel) // 4
        found[(word + run * pitch // 4) % BANKS].add((run, word))
    return max(map(len, found.values()))


def beside(problem: ConvProblem, config: Config) -> int:
    """Outputs that a thread writes at once: neighbours of a row, or of rows that are wholly in a tile, one behind the
    other in y."""
    p, q = problem.output
    most = min(config.order // 4, 16 // problem.itemsize)
    whole = config.across == q

    def aligned(count: int) -> bool:
        rows = q % count == 0 and config.across % count == 0
        return rows or (whole and config.down * q % count == 0 and p * q % count == 0)

    return next(count for count in (8, 4, 2, 1) if count <= most and aligned(count))


def tiles(problem: ConvProblem) -> Iterator[tuple[int, int, int]]:
    """(down, across, order) of tiles: as many pixels are permuted together as are written at once, or half of them."""
    q, kinds = problem.output[1], kinds_of(problem)
    least = 8 * kinds
    whole = next(count for count in (8, 4, 2, 1) if q % count == 0 and count * problem.itemsize <= 16)
    for down, across in row_tiles.shapes(problem, *TILES, max(whole, kinds)):
        widest = Config(down, across, 1, FILTERS, 4 * 16 // problem.itemsize, 1)
        order = max(least, 4 * beside(problem, widest))
        yield down, across, order
        if order > max(least, 8):
            yield down, across, order // 2


def widths(problem: ConvProblem, most: int) -> list[int]:
    """Filters at a time, at most so many: such as divide them evenly."""
    sixteens = ceil_div(problem.k, FILTERS)
    found = {ceil_div(sixteens, count) * FILTERS for count in range(1, sixteens + 1)}
    return sorted((width for width in found if width <= most), reverse=True)[:6]


def copied_pieces(problem: ConvProblem, config: Config) -> int:
    """Of a row of x."""
    return ceil_div(row_bytes(problem, config), copy_bytes(problem) or 4)
