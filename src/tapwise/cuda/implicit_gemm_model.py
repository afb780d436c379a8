"""How long cuda.implicit_gemm will take: what a tile costs, how many of them a multiprocessor gets, and what memory
takes.

Constants were fitted to times of some 1300 configs on 87 layers (H200), by the mean error of the logarithm; they are
cycles of a multiprocessor under load, 1700 a microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CYCLES_US: Final = 1700.0
# Copying a line of pixels (stream, slab) and one of filters; bytes that arrive in a cycle; a piece that warps gather.
STREAM_LINE, SLAB_LINE, FILTER_LINE, FEED_BYTES, PIECE = 1.9, 6.2, 2.0, 66.0, 1.65
# What a step costs besides; a launch's beginning, and more of it where warpgroups take turns, of tiles and of slabs.
STEP, BEGIN, BEGIN_TURNS, BEGIN_SLAB = 56.0, 1820.0, 1420.0, 2530.0
# A tile's way to y, and each of its outputs.
FINISH, OUTPUT, SLAB_OUTPUT = 1510.0, 0.096, 0.228
# The same where gemm_k is split.
EXCHANGE, EXCHANGED = 2690.0, 0.485
# Bytes a microsecond from L2 to all multiprocessors together.
L2_BYTES: Final = 14.5e6
# Tiles, L2 and memory hide each other as a norm of that degree.
NORM: Final = 2.46
# A launch that packs x before; bytes a microsecond that it moves.
PACK_US, PACK_BYTES = 3.0, 3.5e6


@dataclass(frozen=True)
class Work:
    """A config on a problem in numbers: the instruction's rows and columns of a tile; steps of gemm_k of a block, the
    instruction's steps in each; lines of pixels and of filters that a tap brings (of a slab, its share), their bytes;
    bytes of gathered pieces; outputs of a tile; blocks; how tiles follow one another."""

    rows: int
    columns: int
    steps: int
    instructions: float
    pixel_lines: float
    filter_lines: float
    line_bytes: int
    slab: bool
    gather: int
    outputs: int
    written: int
    blocks: int
    split: int
    overlapped: str
    bytes: int
    packed_bytes: int


@dataclass(frozen=True)
class Cost:
    """Microseconds, and what they are made of: cycles of a step's products and of its copies, of a tile, tiles of the
    busiest multiprocessor, microseconds of memory, of packing x."""

    us: float
    product: float
    copies: float
    tile: float
    share: int
    memory_us: float
    packing_us: float

    def __str__(self) -> str:
        bound = "products" if self.product >= self.copies else "copies"
        packing = f", {self.packing_us:.1f} us to pack x" if self.packing_us else ""
        return (
            f"{self.share} tiles a multiprocessor of {self.tile / CYCLES_US:.2f} us (a step: {self.product:.0f} cycles "
            f"of products, {self.copies:.0f} of copies: bound by {bound}), memory {self.memory_us:.1f} us{packing}"
        )


def cost(work: Work, multiprocessors: int, gbps: float) -> Cost:
    """The predicted time of one call."""
    # Four instructions of 32 bytes a line of 128; each takes columns / 2 cycles, or what it reads of shared memory.
    product = work.rows / 64 * work.instructions * max(work.columns / 2, 16 + work.columns / 4)
    if work.gather:
        lines = work.pixel_lines * work.line_bytes / work.gather * PIECE
    else:
        lines = work.pixel_lines * (SLAB_LINE if work.slab else STREAM_LINE)
    lines += work.filter_lines * FILTER_LINE
    copies = max(lines, (work.pixel_lines + work.filter_lines) * work.line_bytes / FEED_BYTES)
    main = work.steps * (max(product, copies) + STEP)
    finish = FINISH + work.outputs * (SLAB_OUTPUT if work.slab else OUTPUT) * (8 / work.written) ** 0.5
    if work.split > 1:
        finish = EXCHANGE + work.outputs * EXCHANGED
    share = -(-work.blocks // multiprocessors)
    both = share * max(main, (main + finish) / 2)
    cycles = {
        "turns": both + finish / 2 + BEGIN + (BEGIN_SLAB if work.slab else BEGIN_TURNS),
        "resident": both + finish + BEGIN,
        "loop": share * (main + finish) + BEGIN,
        "once": share * (main + finish + 0.6 * BEGIN) + 0.4 * BEGIN,
    }[work.overlapped]
    memory = work.bytes / (gbps * 1e3)
    packing = PACK_US + 2 * work.packed_bytes / PACK_BYTES if work.packed_bytes else 0.0
    # What all multiprocessors ask of L2.
    shared = work.blocks * work.steps * (work.pixel_lines + work.filter_lines) * work.line_bytes / L2_BYTES
    us = ((cycles / CYCLES_US) ** NORM + memory**NORM + shared**NORM) ** (1 / NORM) + packing
    return Cost(us, product, copies, main + finish, share, memory, packing)
