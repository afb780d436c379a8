"""How long cuda.implicit_gemm will take: what a tile costs, how many of them a multiprocessor gets, and what L2 and
memory take.

Cycles are those of a multiprocessor under load. Constants were fitted to about 6900 times of configs on 770 problems
(H200), by the error of the logarithm and by what the choice loses, and again, from there, to 13,626 on 560 problems
(docs/study/implicit_gemm.md). Each term was switched off on 425 problems: docs/study/implicit_gemm_modes.md says what
that cost, and which terms went.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, gcd, log2, prod
from typing import Final

from tapwise.algorithm import Device
from tapwise.cuda.jit.tensor_map import SWIZZLE_BYTES
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import pack
from tapwise.ops.conv.cuda.implicit_gemm.config import Im2colConfig
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import KEPT_BYTES, Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.shifted_planes import ShiftedPlanes
from tapwise.ops.conv.cuda.implicit_gemm.strips import WARPS, Strips
from tapwise.ops.conv.cuda.implicit_gemm.view import BLOCK, PLACED, STEP_BYTES, View

CYCLES_US: Final = 1750.0

# Compute. A matrix instruction of 64 rows takes columns / 2 cycles, or what it reads of shared memory.
LEAST_PRODUCT, LEAST_COLUMN = 18.8, 0.371
# What a step costs besides: im2col, halo, halo with all filters beside it, im2col where CTAs share filters.
STEP, HALO_STEP, STATIONARY_STEP, SHARING_STEP = 71.7, 88.2, 34.8, 176.0

# Copies: a chunk of a pixel (im2col, halo) and of a filter; more for chunks that begin and end within sectors of L2; of
# half the length the same times so much (halo); bytes that arrive in a cycle; a piece that warps gather,
# and one of 8 bytes of planes (fitted to 342 times on 11 layers).
IM2COL_CHUNK, HALO_CHUNK, FILTER_CHUNK, RAGGED_CHUNK = 1.98, 5.05, 1.16, 1.94
HALF_HALO_CHUNK: Final = 0.477
FEED_BYTES, PIECE, PLANE_PIECE = 90.8, 1.97, 0.6
# How much less copies take of the share of multiprocessors that have no CTA.
IDLE: Final = 0.637
# A chunk of planes that are shifted: each of the copies that a warp's thread issues, and a piece of 16 bytes that each
# thread loads, shifts and stores (fitted to 65 times on 8 layers).
SHIFT_COPY, SHIFT_PIECE = 150.0, 85.0
# How much of that chunks cost whose distance is a multiple of 32 bytes, but of no more; and where the last of several
# comes in boxes of its own (fitted to 403 times on 31 layers).
HALF_RAGGED, SEVERAL_CHUNKS = 0.48, 0.5
# The same of rows of planes that begin within lines of 128 bytes, and within sectors of 32.
WITHIN_LINE, WITHIN_SECTOR = 0.3, 1.6
# Filters of fprop as they lie, of channels that are no multiple of 128 bytes: so much more for each halving of that.
RAGGED_FILTERS: Final = 0.861

# Latency: from a copy's begin to its bytes, and how much of its own time is added. Stages are there to hide it, short
# of those that are multiplied, and of more in ping-pong.
LATENCY, OWN_COPY, FREE_STAGES, PING_PONG_STAGES = 599.0, 0.809, 0.289, 1.63
# From a halo buffer's being free to the next one's bytes.
HALO_LATENCY: Final = 1590.0

# Planes of NCHW (fitted to some 700 times on 22 layers, the last to 500 on 36). From a strip's copy to its being
# transposed; from a halo buffer's being free to its first strip, which is there already. Bytes of strips a cycle that
# products lose to transposing. The table of places, and the first strips, which nothing hides.
STRIP_LATENCY, TRANSPOSED_LATENCY, TRANSPOSED_BYTES, BEGIN_STRIPS = 1576.0, 2024.0, 19.3, 2000.0

# Launch: its beginning, more of it in ping-pong (im2col, halo), and of a CTA that is alone on its multiprocessor, which
# is not placed before the launch before has left. How much of the first halo's copy a launch waits for.
BEGIN, BEGIN_PING_PONG, BEGIN_HALO, ALONE, FIRST_HALO = 2070.0, 531.0, 431.0, 490.0, 0.289

# Schedule: from the last products of a tile to the first of the other warpgroup's; what a tile waits for beside the CTA
# that shares its multiprocessor.
TURN, CHAIN = 164.0, 694.0

# Epilogue: a tile's way to y, and each of its outputs: by threads (im2col, halo), by TMA, straight from registers 16
# bytes at a time, and where split sums are exchanged.
THREADS, HALO_THREADS, TMA, DIRECT = (1100.0, 0.0612), (171.0, 0.177), (949.0, 0.0947), (482.0, 0.0883)
EXCHANGE: Final = (1500.0, 0.241)
# By threads from halos to planes of NCHW.
HALO_PLANES: Final = (591.0, 0.318)
# From im2col to planes of whole pieces of 16 bytes: a tile, and each round of up to 64 x 64 outputs, by threads, by TMA
# (these, WITHIN_LINE and WITHIN_SECTOR fitted to 371 times on 26 layers).
PLANES, TMA_PLANES = (780.0, 546.0), (890.0, 388.0)
# More for each output: activation (from hardswish on by their instructions); residual, which competes with the products
# for shared memory and is not hidden by them, and the same where all of a tile is fetched ahead; an accumulator that
# starts from the residual, where its warpgroup is alone, and in ping-pong.
ACTIVATIONS: Final = {
    "relu": 0.02, "relu6": 0.02, "silu": 0.13, "sigmoid": 0.13, "gelu": 0.26, "tanh": 0.5, "hardswish": 0.05,
    "hardsigmoid": 0.05, "leaky_relu": 0.05, "gelu_tanh": 0.17,
}  # fmt: skip
RESIDUAL, RESIDUAL_AHEAD, RESIDUAL_AS_C, RESIDUAL_AS_C_PING_PONG = 0.128, 0.0561, 0.131, 0.266

# Memory. Bytes a microsecond from L2 to all multiprocessors together; chunks that several of them read at a time count
# less, ragged ones more. Groups whose channels are a part of a sector of L2: time grows as that power of sectors read
# for each that is needed.
L2_BYTES, SHARING, RAGGED_L2, SECTORS = 6.67e6, 0.332, 1.02, 0.401
# Of y that L2 does not keep, each row of a tile that ends within a line of memory: lines that it takes longer.
SPLIT_LINES: Final = 1.35
# A launch that packs x before, channels last (fitted to 714 times on 63 layers), and planes; bytes a microsecond that
# it moves as they are, and as windows.
PACK_US, PACK_PLANES_US, PACK_BYTES, WINDOW_BYTES = 1.2, 2.4, 3.63e6, 1.55e6

# Tiles, L2 and memory hide each other as a norm of that degree.
NORM: Final = 3.09


@dataclass(frozen=True)
class Cost:
    """A predicted time and what it is made of: cycles of a step's products and of its copies, of a tile, tiles of the
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


@dataclass(frozen=True)
class Copied:
    """What a step copies: chunks of pixels (of a halo, its share) and of filters; how much the pixels' suffer from
    where they begin and end, 0 to 1; bytes of packed x read and written by the launch before."""

    pixels: float
    filters: float
    ragged: float
    packed_bytes: int

    @classmethod
    def of(cls, view: View, device: Device, packed_bytes: int) -> Copied:
        problem, config = view.seen, view.config
        im2col = isinstance(config, Im2colConfig)
        halo = view.strips.pixels if view.strips else view.halo_pixels
        pixels = view.copied_pixels if im2col else halo / prod(problem.kernel)
        filters: float = view.copied_filters
        if view.transposed_filters:
            apart = problem.group_k * problem.groups * view.itemsize
            filters *= 1 + RAGGED_FILTERS * log2(SWIZZLE_BYTES / gcd(apart, SWIZZLE_BYTES))
        if config.filter_stationary:
            # A CTA copies them once.
            filters = filters / ceil_div(view.tiles, view.blocks(device)) if im2col else 0
        pixel = pixel_bytes(view, packed_bytes)
        apart = pixel if packed_bytes else problem.c * view.itemsize
        moved = 0
        if packed_bytes:
            # Rows are read whole.
            rows = view.original.stride[0] if pack.is_thinned(view.original) else 1
            moved = packed_bytes + prod(view.original.x_shape) * view.itemsize // rows
        ragged = 0.0 if view.strips else raggedness(pixel, apart, view.chunk_bytes)
        if view.shifted:
            # Rows of planes that come early have 144 bytes for 128, anywhere in sectors.
            ragged = HALF_RAGGED
        elif config.transposed_pixels and not config.gather_bytes:
            between = gcd(prod(problem.output), config.tile_pixels if view.tiles_p > 1 else 0) * view.itemsize
            ragged = WITHIN_SECTOR if between % 32 else WITHIN_LINE if between % SWIZZLE_BYTES else 0.0
        return cls(pixels, filters, ragged, moved)


def pixel_bytes(view: View, packed_bytes: int) -> int:
    """Bytes of a group's channels of a pixel, as the kernel reads them."""
    return (pack.wide(view.seen) if packed_bytes else view.seen.group_c) * view.itemsize


def raggedness(pixel: int, apart: int, chunk: int) -> float:
    """How much chunks of `chunk` bytes suffer from where they begin and end, for pixels of so many bytes that lie so
    many bytes apart."""
    grain = gcd(apart, chunk)
    if pixel % chunk == 0 or grain >= 64:
        return 0.0
    return (HALF_RAGGED if grain == 32 else 1.0) * (SEVERAL_CHUNKS if pixel > chunk else 1.0)


def cost(view: View, device: Device, packed_bytes: int) -> Cost:
    """The predicted time of one call. `packed_bytes`: what packed x takes, 0 where it is read as it lies."""
    problem, config, epilogue = view.seen, view.config, Epilogue(view)
    im2col, taps, steps = isinstance(config, Im2colConfig), prod(problem.kernel), ceil_div(view.steps, config.split_k)
    copied = Copied.of(view, device, packed_bytes)
    # Two warpgroups and the one that copies need all registers.
    room = 1 if config.warpgroups == 2 else (device.shared_bytes + 1024) // (epilogue.shared_bytes + 1024)
    places = float(device.multiprocessors)
    if config.filter_stationary:
        places = min(device.multiprocessors, view.blocks(device))
    if config.cluster > 2:
        places *= PLACED
    blocks = view.units * config.cluster
    # CTAs beside each other on a multiprocessor share it.
    share = max(1.0, blocks / places) if config.split_k > 1 and room > 1 else float(ceil(blocks / places))

    busy = min(1.0, blocks / device.multiprocessors)
    product, copies, main = _main(view, copied, steps, share if config.split_k == 1 else 1, busy)
    outputs = config.tile_pixels * config.tile_filters
    finish = _epilogue(view, epilogue)
    as_c = problem.residual and epilogue.permuted_n > 0
    if as_c and config.ping_pong:
        finish += outputs * RESIDUAL_AS_C_PING_PONG
    elif as_c:
        main += outputs * RESIDUAL_AS_C
    cycles = BEGIN + (ALONE if room == 1 else 0.0) + (_shifting(view, view.shifted) if view.shifted else 0.0)
    beside = config.min_blocks_per_sm > 1 and blocks > device.multiprocessors
    if beside:
        cycles += share * max(main, (main + finish + CHAIN) / 2) + finish
    elif config.ping_pong:
        cycles += share * max(main + TURN, (main + TURN + finish) / 2) + finish / 2
        cycles += BEGIN_PING_PONG if im2col else BEGIN_HALO + FIRST_HALO * taps * copies
        cycles += BEGIN_STRIPS if view.strips else 0.0
    else:
        cycles += share * main + (share if config.split_k == 1 else ceil(share)) * finish
    if problem.residual and not as_c:
        cycles += share * outputs * (RESIDUAL_AHEAD if epilogue.is_ahead else RESIDUAL)

    l2_us = _l2_us(view, copied, device, blocks * steps)
    memory_us = _memory_us(view, device)
    packing_us = 0.0
    if copied.packed_bytes:
        packing_us = PACK_PLANES_US if view.original.layout == "nchw" else PACK_US
        packing_us += copied.packed_bytes / (WINDOW_BYTES if config.unfold else PACK_BYTES)
    us = ((cycles / CYCLES_US) ** NORM + memory_us**NORM + l2_us**NORM) ** (1 / NORM)
    if problem.groups > 1:
        us *= max(1.0, 32 / pixel_bytes(view, packed_bytes)) ** SECTORS
    return Cost(us + packing_us, product, copies, main + finish, share, l2_us, memory_us, packing_us)


def phases_us(views: Sequence[View], by_place: bool, device: Device) -> float:
    """The predicted time of phases of dgrad in one launch, the tiles of all of them in a CTA's turn: `by_place` all
    phases of a place, which read dy once; else a phase behind the other."""
    first = views[0]
    config, epilogue = first.config, Epilogue(first)
    places, finish = device.multiprocessors, _epilogue(first, epilogue)
    each, l2_us = [], 0.0
    for view in views:
        copied = Copied.of(view, device, 0)
        _, _, main = _main(view, copied, view.steps, len(views))
        if config.ping_pong:
            each.append(max(main + TURN, (main + TURN + finish) / 2))
        elif config.min_blocks_per_sm > 1:
            each.append(max(main, (main + finish + CHAIN) / 2))
        else:
            each.append(main + finish)
        l2_us += _l2_us(view, copied, device, view.tiles * view.steps)
    if by_place:
        cycles = sum(ceil_div(view.tiles, places) * one for view, one in zip(views, each, strict=True))
    else:
        # The first multiprocessor has the first tile of each round.
        ends = list(accumulate(view.tiles for view in views))
        cycles = sum(each[bisect_right(ends, number)] for number in range(0, ends[-1], places))
    cycles += BEGIN + (BEGIN_PING_PONG + finish / 2 if config.ping_pong else finish * (config.min_blocks_per_sm > 1))
    if config.warpgroups == 2 or 2 * epilogue.shared_bytes > device.shared_bytes:
        cycles += ALONE
    dy = prod(first.original.x_shape)
    read = sum(view.steps > 0 for view in views)
    again = 1 if by_place or dy * first.itemsize <= KEPT_BYTES else read
    moved = again * dy + sum(prod(one.original.w_shape) * (one.steps > 0) + prod(one.original.y_shape) for one in views)
    memory_us = moved * first.itemsize / (device.gbps * 1e3)
    return float(((cycles / CYCLES_US) ** NORM + memory_us**NORM + l2_us**NORM) ** (1 / NORM))


def _main(view: View, copied: Copied, steps: int, rounds: float, busy: float = 1.0) -> tuple[float, float, float]:
    """Cycles of a step's products, of its copies, and of all `steps` of a tile; `rounds` of tiles that a CTA takes;
    `busy`: the share of multiprocessors that have one."""
    config, taps = view.config, prod(view.seen.kernel)
    im2col = isinstance(config, Im2colConfig)
    product, copies = _product(view), _copies(view, copied) * (1 - IDLE * (1 - busy))
    if view.strips:
        product += copied.pixels * view.chunk_bytes / TRANSPOSED_BYTES
    if im2col and steps * rounds > config.stages:
        in_flight = 1 if view.cooperative == 2 else 2
        free = FREE_STAGES - (PING_PONG_STAGES if config.ping_pong else 0.0)
        copies = max(copies, (LATENCY + OWN_COPY * copies) / max(config.stages - in_flight + free, 0.3))
    step = STEP if im2col else STATIONARY_STEP if config.filter_stationary else HALO_STEP
    if config.share_filters > 1:
        step = SHARING_STEP
    main = steps * (max(product, copies) + step)
    if not (im2col or config.gather_bytes):
        # A halo comes while those before it are multiplied.
        alone = (TRANSPOSED_LATENCY if view.strips else HALO_LATENCY) + taps * (copies + product + step)
        main = max(main, steps / taps * alone / config.halo_buffers)
    return product, copies, main


def _product(view: View) -> float:
    """Cycles of a step's products."""
    config, chunks = view.config, view.chunks
    steps = (chunks - 1) * view.chunk_bytes // STEP_BYTES + view.last_chunk_steps
    instructions = steps / chunks
    if partial := view.partial_taps:
        columns, left = view.seen.kernel[1], ceil_div(partial.end, STEP_BYTES) - partial.begin // STEP_BYTES
        instructions *= (columns - 1 + left / steps) / columns
    columns = config.instruction_n
    return config.tile_m / 64 * instructions * max(columns / 2, LEAST_PRODUCT + LEAST_COLUMN * columns)


def _copies(view: View, copied: Copied) -> float:
    """Cycles of a step's copies, nothing else being in their way."""
    config = view.config
    if config.gather_bytes:
        each = PLANE_PIECE if isinstance(config, Im2colConfig) else PIECE
        issued = copied.pixels * view.chunk_bytes / config.gather_bytes * each
    elif view.shifted:
        issued = _shifting(view, view.shifted) / view.shifted.teams
    elif view.strips:
        issued = _strips(view, view.strips) / prod(view.seen.kernel)
    else:
        each = IM2COL_CHUNK
        if not isinstance(config, Im2colConfig):
            each = HALO_CHUNK * HALF_HALO_CHUNK ** log2(SWIZZLE_BYTES / view.chunk_bytes)
        issued = copied.pixels * (each + RAGGED_CHUNK * copied.ragged)
    issued += copied.filters / config.share_filters * FILTER_CHUNK
    return max(issued, (copied.pixels + copied.filters) * view.chunk_bytes / FEED_BYTES)


def _shifting(view: View, shifted: ShiftedPlanes) -> float:
    """Cycles of a team that shifts a chunk."""
    copies = 1 if shifted.whole else shifted.classes
    pieces = view.config.tile_pixels * view.chunk_bytes / 16 / 32
    return (copies * SHIFT_COPY + pieces * SHIFT_PIECE) / shifted.warps


def _strips(view: View, strips: Strips) -> float:
    """Cycles in which warps bring the strips of a halo, each by way of its own part of the staging buffers."""
    return ceil_div(strips.count, WARPS) * STRIP_LATENCY / (view.config.staged_strips / WARPS)


def _epilogue(view: View, epilogue: Epilogue) -> float:
    """Cycles of a tile's way to y."""
    problem, config = view.seen, view.config
    outputs, im2col = config.tile_pixels * config.tile_filters / view.cooperative, isinstance(config, Im2colConfig)
    if config.split_k > 1:
        fixed, each = EXCHANGE
    elif epilogue.direct_bytes:
        fixed, each = DIRECT[0], DIRECT[1] * (16 / epilogue.direct_bytes) ** 0.5
    elif im2col and problem.layout == "nchw" and epilogue.whole:
        tile, round_of_it = TMA_PLANES if epilogue.tma_store else PLANES
        fixed, each = tile + epilogue.rounds * round_of_it, 0.0
    elif epilogue.tma_store:
        # A round has whole rows of 64 filters, or a row of as many boxes.
        fixed, each = TMA
        if not config.swap_ab:
            outputs *= round_up(config.tile_filters, BLOCK) / config.tile_filters
    else:
        of_halo = HALO_PLANES if problem.layout == "nchw" else HALO_THREADS
        fixed, each = THREADS if im2col else of_halo
        each *= (8 / epilogue.vector) ** 0.5
    return fixed + outputs * (each + (ACTIVATIONS[problem.activation_name] if problem.activation_name else 0.0))


def _l2_us(view: View, copied: Copied, device: Device, steps: int) -> float:
    """Microseconds of L2, of which so many steps of all CTAs read."""
    across, multiprocessors = view.tiles_f, device.multiprocessors
    high = view.tiles / across / view.seen.groups
    pixel_readers = min(across, multiprocessors)
    filter_readers = max(1.0, min(multiprocessors / across / view.seen.groups, high))
    pixels = copied.pixels * (1 + RAGGED_L2 * copied.ragged) / pixel_readers**SHARING
    filters = copied.filters / view.config.share_filters / filter_readers**SHARING
    return steps * (pixels + filters) * view.chunk_bytes / L2_BYTES


def _memory_us(view: View, device: Device) -> float:
    """Microseconds of memory: every operand once. Rows between strides are not read."""
    problem = view.original
    seen = prod(min(1.0, taps / stride) for taps, stride in zip(problem.kernel, problem.stride, strict=True))
    read = prod(problem.x_shape) * seen + prod(problem.w_shape) + prod(problem.y_shape) * (1 + problem.residual)
    return read * problem.itemsize / (device.gbps * 1e3) + _split_us(view, device)


def _split_us(view: View, device: Device) -> float:
    """More for y, channels last, that L2 does not keep, where rows of tiles end within lines of memory."""
    problem, config = view.seen, view.config
    y = prod(problem.y_shape) * problem.itemsize
    if problem.layout == "nchw" or view.tiles_f * problem.groups == 1 or y <= KEPT_BYTES:
        return 0.0
    row = min(config.tile_filters, problem.group_k) * problem.itemsize
    apart = gcd(row, problem.group_k * problem.itemsize, SWIZZLE_BYTES)
    return SPLIT_LINES * (1 - apart / SWIZZLE_BYTES) * SWIZZLE_BYTES / row * y / (device.gbps * 1e3)
