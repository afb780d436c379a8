"""How the outputs of cuda.implicit_gemm's tiles go to y, and how residuals come to them: from registers, through shared
memory, by the copy engine; and what shared memory all of that takes."""

from __future__ import annotations

from math import gcd, prod
from typing import Final

from tapwise.cuda.jit.tensor_map import LINE_BYTES, TensorMap
from tapwise.ops.conv.cuda.implicit_gemm import geometry
from tapwise.ops.conv.cuda.implicit_gemm.geometry import Config
from tapwise.ops.conv.problem import ConvProblem

# Filters of a tile that threads write 4 bytes at a time, or 2, and bytes of y that L2 keeps beside other things.
FEW_FILTERS, ODD_FILTERS = 64, 48
KEPT_BYTES: Final = 24 << 20
# Sums of a thread that may begin with the residual; of streams that load 16 bytes of two-byte outputs at once, from few
# pixels.
MOST_BEGUN, MOST_BEGUN_STREAM, FEW_PIXELS = 128, 160, 128
# Pixels of a residual that the copy engine brings at once.
LEAST_BROUGHT: Final = 32
# Staging parts of a warpgroup, or of a ring that two share.
MOST_STAGINGS: Final = 4


def vector_of(problem: ConvProblem) -> int:
    """Elements of y that are written at once: they lie in one group, and begin on a multiple of themselves."""
    most = 16 // problem.itemsize
    inner = problem.group_k if problem.layout == "nhwc" else prod(problem.output)
    return next(count for count in (most, most // 2, most // 4, 1) if count and inner % count == 0)


def written_of(problem: ConvProblem, config: Config) -> int:
    """Elements of y that a kernel writes at once: slabs in NCHW count pixels otherwise than y does."""
    return 1 if config.kernel != "stream" and problem.layout == "nchw" else vector_of(problem)


def rounds_of(config: Config) -> int:
    """Rounds of 64 x 64 in which a warpgroup's outputs go to y."""
    rows, columns = geometry.sides_of(config)
    return rows // 64 // (1 if config.turns else config.warpgroups) * -(-columns // 64)


def may_begin(problem: ConvProblem, config: Config, whole: bool) -> bool:
    """Whether sums may begin with the residual, which threads load in `whole` pieces of 16 bytes or not: in fp32 those
    of products would lose digits beside a large one; beside many sums there are few registers to load it."""
    short = whole and config.kernel == "stream" and config.pixels <= FEW_PIXELS and problem.itemsize == 2
    most = MOST_BEGUN_STREAM if short else MOST_BEGUN
    return problem.math != "3xtf32" and not (config.turns and prod(geometry.sides_of(config)) // 128 > most)


def order_of(problem: ConvProblem, config: Config) -> int:
    """So many filters are turned when they are packed, so that threads write y straight from their registers; 0: none.

    A thread then has a quarter of them, side by side: 16 bytes or 8, of few filters 4. Where that measured faster than
    the way through shared memory; the copy engine is better at writing more than L2 holds, and for two warpgroups on a
    tile."""
    size, columns = problem.itemsize, config.filters // config.bundle
    if config.rows == "filters" or config.split > 1 or problem.layout == "nchw":
        return 0
    whole = 64 // size
    order = next(
        (
            count
            for count in (whole, 16)
            if columns % count == problem.group_k % (count // 4 if problem.groups == 1 else count) == 0
        ),
        0,
    )
    if problem.residual and not may_begin(problem, config, order == whole):
        return 0
    if config.kernel != "stream":
        # Of an odd number of filters two bytes are written at a time, which is slow for many.
        most = FEW_FILTERS if problem.group_k * size % 4 == 0 else ODD_FILTERS
        return order or (8 if columns <= most else 0)
    if config.turns and not problem.residual:
        return order if order == whole and prod(problem.y_shape) * size <= KEPT_BYTES else 0
    return order if config.turns or config.warpgroups == 1 else 0


def ordered_bytes(problem: ConvProblem, config: Config) -> int:
    """Bytes of y that a thread writes at once straight from its registers; 0 where sums pass shared memory."""
    order = order_of(problem, config)
    return problem.itemsize * (order // 4 if order and vector_of(problem) > 1 else min(order, 1))


def is_delivered(problem: ConvProblem, config: Config) -> bool:
    """Whether TMA brings the residual: to slabs, where sums cannot begin with it."""
    whole = vector_of(problem) * problem.itemsize == 16 and problem.layout == "nhwc"
    wanted = config.kernel == "slab" and problem.residual and whole
    return wanted and not config.gather and not order_of(problem, config)


def stagings_of(problem: ConvProblem, config: Config) -> int:
    """Parts of shared memory, of 64 x 64 outputs each, through which a warpgroup's outputs go to y: one more where one
    may be on its way; one for each round where a residual is fetched there and nothing else hides how long it takes."""
    size = problem.itemsize
    if order_of(problem, config):
        return 0
    if is_delivered(problem, config):
        return max(2, min(rounds_of(config), MOST_STAGINGS))
    fetched = problem.residual and config.split == 1 and written_of(problem, config) * size >= 4
    if fetched and size == 2 and not config.turns and 2 < rounds_of(config) <= MOST_STAGINGS:
        return rounds_of(config)
    return 2 if fetched or (boxes_of(problem, config) and size == 2) else 1


def is_ahead(problem: ConvProblem, config: Config) -> bool:
    """Whether a tile's residual is fetched as a whole while its products run."""
    if is_delivered(problem, config):
        return True
    return config.split == 1 and not config.turns and stagings_of(problem, config) >= rounds_of(config)


def boxes_of(problem: ConvProblem, config: Config) -> int:
    """How the copy engine writes y: not (0), 64 filters at a time (1), or all of it (2): no tile has fewer."""
    whole = vector_of(problem) * problem.itemsize == 16 and not order_of(problem, config)
    if config.kernel != "stream" or config.split > 1 or problem.layout == "nchw" or not whole:
        return 0
    if config.filters % 64 == 0 or geometry.tiles_of(problem, config)[0] == 1:
        return 2
    return 1 if config.filters > 64 else 0


def map_y(problem: ConvProblem, config: Config) -> TensorMap:
    """y as pixels of groups of filters; a box is a line of 128 bytes of as many pixels as all tiles are made of."""
    size = problem.itemsize
    pixels = 64 if config.rows == "pixels" else gcd(config.pixels, 64)
    return TensorMap(
        problem.dtype, (problem.group_k, problem.groups, problem.n * prod(problem.output)),
        (problem.group_k * size, problem.k * size), (LINE_BYTES // size, 1, pixels),
    )  # fmt: skip


def map_residual(problem: ConvProblem, config: Config) -> TensorMap:
    """The residual as windows of 1 x 1, whose pixels are counted as tiles count them: a slab's with padding. Small
    boxes take longer than the products of short tiles: with the last of 200 pixels, say, 24 come that the next tile has
    too."""
    size, (p, q) = problem.itemsize, problem.output
    high, wide = geometry.padded(problem) if config.kernel == "slab" else (p, q)
    pixels = 64 if config.rows == "pixels" else max(LEAST_BROUGHT, gcd(config.pixels, 64))
    line = problem.k * size
    return TensorMap(
        problem.dtype, (problem.k, q, p, problem.n), (line, line * q, line * q * p), (LINE_BYTES // size, pixels),
        ((0, 0), (wide - q, high - p)), (1, 1),
    )  # fmt: skip


def shared_bytes(problem: ConvProblem, config: Config) -> int:
    """The ring or the split sums, the staging part, the tables of places, barriers, and what aligns them."""
    line = geometry.line_bytes(problem, config)
    filters = config.filters * line // config.bundle
    kept = geometry.steps_of(problem, config) if config.held else config.stages
    ring = config.stages * config.pixels * line + kept * filters + (2048 if config.held else 0)
    if config.kernel != "stream":
        lines, behind = geometry.slab_lines(problem, config)
        lines += -(-lines // 8) * 8 - lines + behind if config.kernel == "box" else 0
        filters = config.stages * config.filters // config.bundle
        ring = (config.slabs * lines + filters) * line + 16 * config.slabs + 2048
    each = 64 * 64 * problem.itemsize * stagings_of(problem, config)
    delivered = is_delivered(problem, config)
    rings = 1 if delivered and config.turns else config.warpgroups
    staging = config.pixels * config.filters * 4 if config.split > 1 else rings * each
    share = config.pixels if config.rows == "filters" or config.turns else config.pixels // config.warpgroups
    tables = config.warpgroups * (share + config.filters * problem.bias) * 4
    barriers = 16 * (config.stages + delivered * rings * stagings_of(problem, config))
    return ring + staging + tables + barriers + 2048
