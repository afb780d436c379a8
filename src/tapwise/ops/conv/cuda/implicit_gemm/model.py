"""How long cuda.implicit_gemm will take: what a tile costs, how many of them a multiprocessor gets, and what L2 and
memory take.

Constants were fitted to 4667 times of configs on 404 problems (H200), by the error of the logarithm and by what
the choice loses; then, by themselves, CHAIN, BEGUN_CHAIN and BEGUN_TURNS with 672 times on 45 layers more, most of them
with activations, and ACTIVATIONS, TOGETHER and SLOWED with 449 times on 53; what steps, slabs and boxes cost besides
with 600 times on 51 layers, most of them such whose filters stay in several sets, and those of before; what slabs cost
and wait for with 511 times on 133 layers, most of them of half lines or few taps, and those of before. They are cycles
of a multiprocessor under load, 1700 a microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd, log2
from typing import Final

from tapwise.cuda.jit.tensor_map import LINE_BYTES
from tapwise.ops.conv.cuda.implicit_gemm.geometry import PLACED

CYCLES_US: Final = 1700.0
# A matrix instruction of 64 rows takes columns / 2 cycles, or what it reads of shared memory.
LEAST_PRODUCT, LEAST_COLUMN = 16.2, 0.324
# Copying a line of pixels (stream, slab) and one of filters; more for lines that begin and end within sectors of L2; of
# half the length the same times so much (stream, slab); bytes that arrive in a cycle; a piece that warps gather.
STREAM_LINE, SLAB_LINE, FILTER_LINE, RAGGED_LINE = 2.13, 6.04, 1.2, 1.66
NARROW, SLAB_NARROW = 0.822, 0.603
FEED_BYTES, PIECE = 84.6, 1.58
# Lines of a slab that are a part of a pixel's channels, and more for those that begin and end within sectors.
PARTED, PARTED_RAGGED = 0.78, 3.65
# From a slab's being free to the next one's bytes.
SLAB_LATENCY: Final = 1255.0
# How much of the first slab's copy a launch waits for, nothing being there to multiply.
FIRST_SLAB: Final = 0.359
# From a copy's begin to its bytes, and how much of its own time is added: what stages are there to hide, short of those
# that are multiplied.
OWN_COPY: Final = 0.816
LATENCY, FREE_STAGES, TURNS_STAGES = 572.0, 0.292, 1.54
# A block that is alone on its multiprocessor is not placed before the launch before has left.
ALONE: Final = 617.0
# What a step costs besides (stream, slab, slab with all filters beside it); a launch's beginning, and more of it where
# warpgroups take turns.
STEP, SLAB_STEP, HELD_STEP, BEGIN, BEGIN_TURNS, BEGIN_SLAB = 65.2, 67.1, 41.7, 1703.0, 623.0, 433.0
# From the last products of a tile to the first of the other warpgroup's.
TURN: Final = 175.0
# What a tile waits for beside the block that shares its multiprocessor.
CHAIN: Final = 500.0
# A tile's way to y, and each of its outputs: by threads (stream, slab), and by the copy engine.
FINISH, OUTPUT, SLAB_FINISH, SLAB_OUTPUT, BOX_FINISH, BOX_OUTPUT = 1124.0, 0.0653, 170.0, 0.181, 1479.0, 0.0885
# The same straight from registers, 16 bytes at a time.
ORDERED_FINISH, ORDERED_OUTPUT = 543.0, 0.0852
# Two bytes at a time from registers, through shared memory, and there by two warpgroups that share a tile, whose lines
# meet in L2.
ODD_ORDERED, ODD_OUTPUT, ODD_SHARED = 0.861, 0.932, 0.367
# More for each output: activation; residual, which competes with the products for shared memory and is not hidden by
# them, and the same where all of a tile is fetched ahead.
RESIDUAL, RESIDUAL_AHEAD = 0.135, 0.0556
# A residual that the copy engine brings from the middle of a tile's products on: until it is there, and for each
# output.
PACED, PACED_OUTPUT = 2010.0, 0.11
# Sums that begin with the residual: before a tile's products where its warpgroup is alone; where two take turns, after
# the tile before, and what that takes from the other's products.
BEGIN_SUMS, BEGUN, BEGUN_CHAIN, BEGUN_TURNS = 7.11, 0.138, 0.25, 0.05
ACTIVATIONS: Final = {"relu": 0.02, "relu6": 0.02, "silu": 0.13, "sigmoid": 0.13, "gelu": 0.26, "tanh": 0.5}
# Of two warpgroups that share a tile: its outputs' share of an activation is one half to this power. How much of it the
# other's products wait, where they take turns.
TOGETHER, SLOWED = 0.85, 0.1
# The same where gemm_k is split, and where two bytes are written at a time (that fitted to 51 times by itself).
EXCHANGE, EXCHANGED, EXCHANGED_ODD = 2130.0, 0.29, 0.9
# Bytes a microsecond from L2 to all multiprocessors together. Lines that several of them read at a time count less.
L2_BYTES, SHARING = 6.97e6, 0.359
# How much of that pixels cost whose distance is a multiple of 32 bytes, but of no more.
HALF_RAGGED: Final = 0.48
RAGGED_L2: Final = 0.767
# Groups whose channels are a part of a sector of L2: time grows as that power of sectors read for each that is
# needed.
SECTORS: Final = 0.354
# Memory writes fewer bytes a microsecond than it reads.
WRITTEN: Final = 0.808
# Tiles, L2 and memory hide each other as a norm of that degree.
NORM: Final = 3.35
# A launch that packs x before; bytes a microsecond that it moves as they are, and as windows.
PACK_US, PACK_BYTES, WINDOW_BYTES = 2.4, 3.5e6, 1.55e6


@dataclass(frozen=True)
class Work:
    """A config on a problem in numbers.

    The instruction's rows and columns of a tile; steps of gemm_k of a block, the instruction's steps in each; stages,
    and how many of them are multiplied at a time. Lines of pixels and of filters that a tap brings (of a slab, its
    share), their bytes; how many of them begin and end within sectors of L2 (`ragged`, 0 to 1); multiprocessors that
    read the same pixels, and the same filters, at a time; bytes of gathered pieces. Outputs of a tile, warpgroups
    that write them together, what else is done to them, whether all residuals of a tile are fetched `ahead`, or from
    the middle of its products on (`paced`); elements
    written at once, or `boxes` by the copy engine, or bytes that threads write at once from their registers
    (`ordered`); whether filters are `odd`, so that it is two bytes. Tiles; blocks that share one, and blocks that a
    multiprocessor has room for; how tiles follow one another: turns, resident, loop or once. Multiprocessors that work.
    Bytes of memory; `packed_bytes`, read and written, of a launch before, as `windows` or not. `sectors` of L2 read for
    each that a group has.
    """

    rows: int
    columns: int
    steps: int
    instructions: float
    stages: int
    flight: int
    pixel_lines: float
    filter_lines: float
    line_bytes: int
    parted: bool
    taps: int
    slabs: int
    ragged: float
    pixel_readers: float
    filter_readers: float
    slab: bool
    held: bool
    gather: int
    outputs: int
    together: int
    residual: bool
    ahead: bool
    paced: bool
    activation: str | None
    written: int
    boxes: bool
    ordered: int
    odd: bool
    tiles: int
    split: int
    room: int
    overlapped: str
    multiprocessors: int
    read_bytes: float
    written_bytes: int
    packed_bytes: int
    windows: bool
    sectors: float


@dataclass(frozen=True)
class Cost:
    """Microseconds, and what they are made of: cycles of a step's products and of its copies, of a tile, tiles of the
    busiest multiprocessor, microseconds of L2, of memory, of packing x."""

    us: float
    product: float
    copies: float
    tile: float
    share: float
    l2_us: float
    memory_us: float
    packing_us: float

    def __str__(self) -> str:
        bound = "products" if self.product >= self.copies else "copies"
        packing = f", {self.packing_us:.1f} us to pack x" if self.packing_us else ""
        return (
            f"{self.share:.3g} tiles a multiprocessor of {self.tile / CYCLES_US:.2f} us (a step: {self.product:.0f} "
            f"cycles of products, {self.copies:.0f} of copies: bound by {bound}), L2 {self.l2_us:.1f} us, "
            f"memory {self.memory_us:.1f} us{packing}"
        )


def raggedness(pixel_bytes: int, apart_bytes: int, line_bytes: int) -> float:
    """How much lines of a pixel's channels suffer from where they begin and end, 0 to 1."""
    grain = gcd(apart_bytes, line_bytes)
    if pixel_bytes % line_bytes == 0 or grain >= 64:
        return 0.0
    return HALF_RAGGED if grain == 32 else 1.0


def cost(work: Work, gbps: float) -> Cost:
    """The predicted time of one call."""
    # Four instructions of 32 bytes a line of 128.
    least = LEAST_PRODUCT + LEAST_COLUMN * work.columns
    product = work.rows / 64 * work.instructions * max(work.columns / 2, least)
    if work.gather:
        lines = work.pixel_lines * work.line_bytes / work.gather * PIECE
    else:
        halved = log2(LINE_BYTES / work.line_bytes)
        if work.slab:
            each = SLAB_LINE * (PARTED if work.parted else SLAB_NARROW**halved)
        else:
            each = STREAM_LINE * NARROW**halved
        each += (PARTED_RAGGED if work.parted else RAGGED_LINE) * work.ragged
        lines = work.pixel_lines * each
    lines += work.filter_lines * FILTER_LINE
    copies = max(lines, (work.pixel_lines + work.filter_lines) * work.line_bytes / FEED_BYTES)
    blocks = work.tiles * work.split
    places = work.multiprocessors * (PLACED if work.split > 2 else 1)
    # Blocks beside each other on a multiprocessor share it.
    share = max(1.0, blocks / places) if work.split > 1 and work.room > 1 else float(ceil(blocks / places))
    free = FREE_STAGES - (TURNS_STAGES if work.overlapped == "turns" else 0.0)
    if not work.slab and work.steps * (share if work.split == 1 else 1) > work.stages:
        copies = max(copies, (LATENCY + OWN_COPY * copies) / max(work.stages - work.flight + free, 0.3))
    step = (HELD_STEP if work.held else SLAB_STEP) if work.slab else STEP
    main = work.steps * (max(product, copies) + step)
    if work.slab and not work.gather:
        # A slab comes while those before it are multiplied.
        alone = SLAB_LATENCY + work.taps * (copies + product + step)
        main = max(main, work.steps / work.taps * alone / work.slabs)
    outputs = work.outputs / work.together
    if work.split > 1:
        finish = EXCHANGE + outputs * (EXCHANGED_ODD if work.odd else EXCHANGED)
    elif work.ordered:
        finish = ORDERED_FINISH + outputs * (ODD_ORDERED if work.odd else ORDERED_OUTPUT * (16 / work.ordered) ** 0.5)
    elif work.boxes:
        finish = BOX_FINISH + outputs * BOX_OUTPUT
    else:
        fixed, output = (SLAB_FINISH, SLAB_OUTPUT) if work.slab else (FINISH, OUTPUT)
        odd = ODD_SHARED if work.together > 1 else ODD_OUTPUT
        finish = fixed + outputs * (odd if work.odd else output * (8 / work.written) ** 0.5)
    function = work.outputs * (ACTIVATIONS[work.activation] if work.activation else 0.0)
    finish += function / work.together**TOGETHER
    if work.overlapped == "turns":
        main += function * SLOWED
    if work.ordered and work.residual:
        if work.overlapped == "turns":
            finish += work.outputs * BEGUN_CHAIN
            main += work.outputs * BEGUN_TURNS
        else:
            main += BEGIN_SUMS + work.outputs * BEGUN
    turn = main + (TURN if work.overlapped == "turns" else 0.0)
    waits = CHAIN if work.overlapped == "resident" else 0.0
    both = share * max(turn, (turn + finish + waits) / 2)
    begin = BEGIN + (ALONE if work.room == 1 else 0.0)
    follow = {
        "turns": both + finish / 2 + (BEGIN_SLAB + FIRST_SLAB * work.taps * copies if work.slab else BEGIN_TURNS),
        "resident": both + finish,
        "loop": share * (main + finish),
        "once": share * main + ceil(share) * finish,
    }
    residual = (RESIDUAL_AHEAD if work.ahead else RESIDUAL) * work.outputs
    cycles = begin + follow[work.overlapped]
    if work.residual and not work.ordered:
        cycles += share * residual
    if work.paced:
        cycles += share * max(0.0, PACED + PACED_OUTPUT * work.outputs - main / 2)
    memory = work.read_bytes / (gbps * 1e3) + work.written_bytes / (gbps * 1e3 * WRITTEN)
    pixels = work.pixel_lines * (1 + RAGGED_L2 * work.ragged) / work.pixel_readers**SHARING
    filters = work.filter_lines / work.filter_readers**SHARING
    shared = blocks * work.steps * (pixels + filters) * work.line_bytes / L2_BYTES
    rate = WINDOW_BYTES if work.windows else PACK_BYTES
    packing = PACK_US + work.packed_bytes / rate if work.packed_bytes else 0.0
    us = ((cycles / CYCLES_US) ** NORM + memory**NORM + shared**NORM) ** (1 / NORM) * work.sectors**SECTORS + packing
    return Cost(us, product, copies, main + finish, share, shared, memory, packing)
