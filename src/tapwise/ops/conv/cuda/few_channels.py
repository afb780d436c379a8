"""cuda.few_channels: the first layers of networks on tensor cores, windows read from the image's own rows.

A pixel's window of x is a run of neighbours in each of its rows, in NCHW one in each row of each channel. A block
copies the rows that its tile of outputs reaches to shared memory, once, and a warp's matrix instructions take their
operand of pixels straight from there: no window is built, neither in shared memory nor anywhere else.

Source: PTX ISA on mma.sync (which thread holds what); Chetlur et al., "cuDNN: efficient primitives for deep learning",
2014 (the product whose matrix is never built).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from tapwise.algorithm import Device
from tapwise.cuda.types import reciprocal, template_args, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import few_channels_planes as planes
from tapwise.ops.conv.cuda import row_tiles, window
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

# Channels of x; pieces of 16 bytes of a window, for which the kernel has code of its own each.
MOST_CHANNELS: Final = 8
MOST_PIECES: Final = 64
# Rows of 16 pixels of a warp. Sums of a thread for 16 pixels x 8 filters, and of all that a warp takes at a time.
ROWS: Final = (4, 3, 2)
MOST_BLOCKS: Final = 32
# Registers of a thread beside sums, operands and places of pixels; for bias and the like, and where that many steps are
# unrolled.
OTHER_REGISTERS, MORE_REGISTERS, MANY_STEPS = 24, 12, 12
# Cycles: an operand's word, a row's places, a store, an output (so many times more with a function, with a residual), a
# piece of x.
OPERAND, PLACE, STORE, OUTPUT, FUNCTION, RESIDUAL, COPY = 0.85, 1.9, 6.3, 0.43, 7.5, 10.0, 0.2
# A store of one element in NCHW, eight filters a warp (fitted to 168 times on 12 layers): of V it takes less than each,
# as they fill more of their sectors.
STORE_PLANES: Final = 24.0
# Of warps without a tile left; code beyond so many products is too long for the instruction cache.
WAITING, LONG_CODE, MOST_PRODUCTS = 0.31, 0.0085, 800
# A block alone: a warp tile, a step, a product, and until its rows are there; blocks that hide nothing; a launch.
CHAIN, STEP, PRODUCT, LOAD, HIDDEN, START, CYCLES_US = 61.0, 42.0, 9.8, 249.0, 0.77, 520.0, 1700.0
# Of memory's bandwidth, as fitted (part of x and y stays in L2); what the smaller of compute and memory adds;
# microseconds of a launch.
MEMORY, BOTH, LAUNCH_US = 1.8, 0.59, 1.4


class FewChannels(row_tiles.RowTiles[Config]):
    """Up to 8 channels in one group, NCHW and channels last; any stride and padding, dilation along rows of filters of
    one column only; float16, bfloat16, and float32 with math="tf32". Compute capability 8.0 and newer."""

    id: ClassVar[str] = "cuda.few_channels"
    summary: ClassVar[str] = "tensor cores (mma.sync) on the image's own rows in shared memory: few channels"
    kernel: ClassVar[str] = "few_channels"
    layouts: ClassVar[tuple[str, ...]] = ("nchw", "nhwc")
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16", "tf32")

    def unsuited(self, problem: ConvProblem) -> str | None:
        if problem.groups > 1 or problem.c > MOST_CHANNELS:
            return f"takes up to {MOST_CHANNELS} channels in one group, not {problem.c} in {problem.groups}"
        if problem.dilation[1] != 1 and problem.kernel[1] > 1:
            return f"takes windows without gaps along their rows, not dilation={problem.dilation}"
        if (found := _halves(problem)) > MOST_PIECES:
            return f"takes windows of up to {MOST_PIECES} pieces of 16 bytes, not {found}"
        return None

    def kernel_of(self, problem: ConvProblem) -> str:
        return "few_channels_planes" if _is_planes(problem) else self.kernel

    def fitting(self, problem: ConvProblem, device: Device) -> Iterator[Config]:
        for down, across, rows, filters, order in _choices(problem):
            min_blocks_per_sm = row_tiles.min_blocks_per_sm(registers_of(problem, rows, filters, device))
            config = Config(down, across, rows, filters, order, min_blocks_per_sm)
            if row_tiles.fits(self.shared_bytes(problem, config), min_blocks_per_sm, device):
                yield config

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """What the blocks of a multiprocessor issue together, or a block's own chain of latencies where they are few;
        and memory. Constants are cycles (H200), fitted to 759 times on 31 problems, channels last: the error of the
        logarithm is 0.17, the choice 5 % slower than the best timed config, 1.36 times at worst."""
        tiles = row_tiles.tiles_of(problem, config.down, config.across)[2]
        high, pitch = rows_of(problem, config)
        steps, chunks, eights = _steps(problem), ceil_div(problem.k, config.filters), config.filters // 8
        kinds, conflicts, filter_kinds, copied_bytes = kinds_of(problem), 1, 1, pitch
        store = STORE / _beside(problem, config)
        if _is_planes(problem):
            # A warp has both kinds of pixels, and reads both kinds of filters.
            conflicts = planes.wavefronts(problem, config.order, pitch)
            kinds, filter_kinds, copied_bytes = 1, kinds, planes.row_bytes(problem, config)
            store = STORE_PLANES / _beside(problem, config) ** 1.5
        warp_tiles = kinds * ceil_div((config.across // kinds) * config.down, 16 * config.rows)
        longest = ceil_div(warp_tiles, row_tiles.WARPS)
        # Of a warp tile: operands from shared memory, places of pixels, outputs and stores.
        operands = steps * (4 * config.rows * conflicts + 2 * eights * filter_kinds)
        outputs = config.rows * config.filters // 2
        more = 1 + FUNCTION * (problem.activation in window.FUNCTIONS) + RESIDUAL * problem.residual
        warp_tile = PLACE * config.rows + chunks * (OPERAND * operands + store * outputs + OUTPUT * outputs * more)
        products = steps * config.rows * eights
        copied = high * copied_bytes / (copy_bytes(problem) or 2) * COPY
        # Warps that have no tile left wait for the others.
        work = (warp_tiles * (1 - WAITING) + row_tiles.WARPS * longest * WAITING) * warp_tile + copied
        work *= 1 + LONG_CODE * max(0, products - MOST_PRODUCTS)
        chain = longest * (CHAIN + chunks * (STEP * steps + PRODUCT * products)) + LOAD
        together = min(config.min_blocks_per_sm, ceil_div(tiles, device.multiprocessors))
        share = ceil_div(tiles, device.multiprocessors * config.min_blocks_per_sm)
        compute = (share * max((together + HIDDEN) * work, chain) + START) / CYCLES_US
        memory = problem.bytes / (device.gbps * 1e3 * MEMORY)
        return float((compute**3 + memory**3) ** (1 / 3) + BOTH * min(compute, memory) + LAUNCH_US)

    def template(self, problem: ConvProblem, config: Config) -> str:
        words = (
            tensor_core_type(problem.dtype), problem.c, *problem.kernel, config.filters, config.rows, config.order,
            _beside(problem, config), copy_bytes(problem), parity_of(problem),
            *([planes.runs_of(problem)] if _is_planes(problem) else []), problem.bias, problem.residual,
            window.activation(problem.activation),
        )  # fmt: skip
        return f"{'Planes' if _is_planes(problem) else 'Few'}<{template_args(*words)}>"

    def fields(self, problem: ConvProblem, config: Config) -> dict[str, int]:
        high, pitch = rows_of(problem, config)
        columns, pieces = config.across // kinds_of(problem), pitch // (copy_bytes(problem) or 4)
        if _is_planes(problem):
            columns, pieces = config.across, planes.copied_pieces(problem, config)
        return {
            "image_rows": high, "pitch": pitch, "columns": columns, "pieces": pieces,
            "per_column": reciprocal(columns), "per_piece": reciprocal(pieces),
        }  # fmt: skip

    def fragment_fields(self, problem: ConvProblem, config: Config) -> dict[str, int]:
        return super().fragment_fields(problem, config) | {"chunks": ceil_div(problem.k, config.filters)}

    def filter_bytes(self, problem: ConvProblem, config: Config) -> int:
        """All filters as operands, for each kind of window."""
        return kinds_of(problem) * ceil_div(problem.k, config.filters) * _steps(problem) * config.filters // 8 * 256

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        """The filters, and the rows of two tiles."""
        high, pitch = rows_of(problem, config)
        slack = planes.slack_bytes(problem, pitch) if _is_planes(problem) else 0
        return self.filter_bytes(problem, config) + 2 * high * pitch + slack


def _is_planes(problem: ConvProblem) -> bool:
    return problem.layout == "nchw"


def _choices(problem: ConvProblem) -> Iterator[tuple[int, int, int, int, int]]:
    """down, across, rows, filters and order of configs."""
    if _is_planes(problem):
        for width in planes.widths(problem, 8 * MOST_BLOCKS // 2):
            for rows in ROWS:
                for down, across, order in planes.tiles(problem):
                    if rows * width // 8 <= MOST_BLOCKS and 16 * rows % order == 0:
                        yield down, across, rows, width, order
        return
    shapes = row_tiles.shapes(problem, *TILES, kinds_of(problem))
    for order in orders_of(problem):
        for width in _widths(problem, order):
            for rows in ROWS:
                if rows * width // 8 <= MOST_BLOCKS:
                    yield from ((down, across, rows, width, order) for down, across in shapes)


def registers_of(problem: ConvProblem, rows: int, filters: int, device: Device) -> int:
    """Of a thread."""
    registers = rows * filters // 2 + 8 * rows + filters // 4 + OTHER_REGISTERS
    registers += MORE_REGISTERS * (_steps(problem) > MANY_STEPS)
    registers += MORE_REGISTERS * (problem.activation in window.FUNCTIONS)
    # Measured on Hopper; ptxas wants some more for others.
    registers += 0 if device.architecture == "sm_90a" else MORE_REGISTERS
    return registers + MORE_REGISTERS * (problem.bias or problem.residual or problem.activation is not None)


def orders_of(problem: ConvProblem) -> list[int]:
    """Filters that are permuted so that threads write neighbours, a quarter of them each: 16 bytes, 8, or fewer."""
    most = 64 // problem.itemsize
    return [order for order in (32, 16) if order <= most and problem.k % (order // 4) == 0] or [8]


def _widths(problem: ConvProblem, order: int) -> list[int]:
    """Filters at a time: such as divide them evenly, in whole orders."""
    orders = ceil_div(problem.k, order)
    widths = {ceil_div(orders, count) * order for count in range(1, orders + 1)}
    return sorted((width for width in widths if width <= 8 * MOST_BLOCKS // 2), reverse=True)[:6]


def _beside(problem: ConvProblem, config: Config) -> int:
    """Outputs that a thread writes at once."""
    if _is_planes(problem):
        return planes.beside(problem, config)
    most = config.order // 4
    return most if problem.k % most == 0 else 1


def _pieces(problem: ConvProblem) -> int:
    """Pieces of 16 bytes of a window's run in one row."""
    run = problem.c * problem.kernel[1] + (parity_of(problem) != "EVEN")
    return ceil_div(run * problem.itemsize, PIECE_BYTES)


def _halves(problem: ConvProblem) -> int:
    """Pieces of 16 bytes of a window."""
    return planes.halves_of(problem) if _is_planes(problem) else problem.kernel[0] * _pieces(problem)


def _steps(problem: ConvProblem) -> int:
    """Steps of the matrix instruction: two pieces each."""
    return ceil_div(_halves(problem), 2)


def rows_of(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """(rows of x of a tile, bytes of each)."""
    if _is_planes(problem):
        return planes.rows_of(problem, config)
    high = (config.down - 1) * problem.stride[0] + problem.reach[0]
    along = (config.across - 1) * problem.stride[1] * problem.c * problem.itemsize
    return high, round_up(lead_bytes(problem) + along + PIECE_BYTES * _pieces(problem), PIECE_BYTES)
