"""What a config of cuda.implicit_gemm makes of a problem: lines and chunks of channels, slabs and boxes, tiles and
blocks, tensor maps."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod, sqrt
from typing import Any, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda import pack
from tapwise.cuda.jit.tensor_map import LINE_BYTES, TensorMap, legal
from tapwise.problem import ConvProblem

# Pixels that one copy takes.
MOST_LINES: Final = 256
# Elements and pixels are counted in 32 bits.
LARGEST: Final = 1 << 31
# Of 132 multiprocessors, clusters of four and eight find places on 120.
PLACED: Final = 10 / 11
# Bytes of the instruction's steps along gemm_k.
STEP_BYTES: Final = 32
# Filters of a tile that threads write 4 bytes at a time, or 2, and bytes of y that L2 keeps beside other things.
FEW_FILTERS, ODD_FILTERS = 64, 48
KEPT_BYTES: Final = 24 << 20
# Sums of a thread that may begin with the residual; of streams that load 16 bytes of two-byte outputs at once, from few
# pixels.
MOST_BEGUN, MOST_BEGUN_STREAM, FEW_PIXELS = 128, 160, 128
# Steps of a tile in whose second half the copy engine has time for a residual beside x.
LEAST_STEPS: Final = 24
# Staging parts of a warpgroup, or of a ring that two share.
MOST_STAGINGS: Final = 4


@dataclass(frozen=True)
class Config(BaseConfig):
    """`kernel`: stream, slab or box. A tile of pixels x filters; `rows` of the matrix instruction: pixels or filters;
    warpgroups that share a tile, or (`turns`) take tiles in turns; stages of the ring; `split` blocks of a cluster
    share gemm_k; `resident` blocks of a multiprocessor: as many as there is room for take the tiles in turns, or a
    cluster a tile where gemm_k is split. `held`: the filters stay in shared memory; `slabs` there; `gather`: bytes
    of the pieces in which warps copy x, 0 for the copy engine; `bundle`: groups whose channels share a line;
    `across`: outputs of a line of a box; `unfold`: last axes whose taps are packed side by side first."""

    kernel: str
    rows: str
    pixels: int
    filters: int
    warpgroups: int
    turns: bool
    stages: int
    split: int = 1
    resident: int = 1
    slabs: int = 0
    held: bool = False
    gather: int = 0
    bundle: int = 1
    across: int = 0
    unfold: int = 0


def folded(problem: ConvProblem) -> ConvProblem:
    """The same sums with fewer taps: windows that lie side by side along a line are pixels of s * c channels."""
    (_, s), (_, stride), (_, sides) = problem.kernel, problem.stride, problem.padding
    height, width = problem.spatial
    if (
        s == 1 or s != stride or problem.dilation[1] != 1 or sides != (0, 0) or problem.groups > 1
        or problem.layout != "nhwc" or problem.math == "3xtf32" or width != problem.output[1] * s
        or not is_whole(problem)
    ):  # fmt: skip
        return problem
    return problem.replace(
        c=problem.c * s, spatial=(height, width // s), kernel=(problem.kernel[0], 1), stride=(problem.stride[0], 1),
        padding=(problem.padding[0], (0, 0)),
    )  # fmt: skip


def unfolded(problem: ConvProblem, unfold: int) -> ConvProblem:
    """The same sums where a few channels of all taps along the last axes were packed side by side, for each output, and
    fill whole lines, which the copy engine takes faster."""
    if not unfold:
        return problem
    sizes: dict[str, list[Any]] = {
        name: list(getattr(problem, name)) for name in ("spatial", "kernel", "stride", "padding", "dilation")
    }
    channels = problem.c
    for axis in range(2 - unfold, 2):
        if problem.kernel[axis] > 1:
            channels *= problem.kernel[axis]
            ones = {"kernel": 1, "stride": 1, "padding": (0, 0), "dilation": 1, "spatial": problem.output[axis]}
            for name, value in ones.items():
                sizes[name][axis] = value
    if channels > problem.c:
        line = span(problem.replace(c=channels)) // pack.SIZES[problem.dtype]
        channels = -(-channels // line) * line
    return problem.replace(c=channels, **{name: tuple(values) for name, values in sizes.items()})


def unfoldings(problem: ConvProblem) -> list[int]:
    """Ways to compute the problem: as it is (0), and with few channels unfolded along one axis or both."""
    few = problem.groups == 1 and problem.c * pack.SIZES[problem.dtype] < STEP_BYTES
    ways = [0] + [count for count in (1, 2) if few and problem.kernel[2 - count] > 1]
    views = {way: unfolded(problem, way) for way in ways}
    return [
        way
        for way, view in views.items()
        if is_exact(problem, view)
        and legal(corners_of(view), last_offsets(view), view.stride)
        and (way == 0 or problem.n * prod(view.spatial) * view.c < LARGEST)
    ]


def is_exact(problem: ConvProblem, view: ConvProblem) -> bool:
    """Whether 3xtf32 keeps fp32's bound in a view: tensor cores cut off after each step of eight channels; with few of
    them in a step that adds up."""
    additions = 3 * prod(view.kernel) * -(-view.group_c // 8)
    return problem.math != "3xtf32" or additions <= 0.5 * problem.gemm_k + 2 * sqrt(problem.gemm_k)


def view_of(problem: ConvProblem, config: Config) -> ConvProblem:
    """The problem as a config sees its images: unfolded or folded, or with several groups as one."""
    if config.unfold:
        return unfolded(problem, config.unfold)
    if config.bundle > 1:
        return problem.replace(groups=problem.groups // config.bundle)
    return folded(problem)


def is_whole(problem: ConvProblem) -> bool:
    """Whether the copy engine can take the channels as they lie: pixels and groups in whole pieces of 16 bytes."""
    size = pack.SIZES[problem.dtype]
    return problem.c * size % 16 == 0 and problem.group_c * size % 16 == 0


def span(problem: ConvProblem) -> int:
    """Bytes of a line of channels in shared memory: as few as hold a group's channels, 128 at most."""
    size = problem.group_c * pack.SIZES[problem.dtype]
    return next((line for line in (32, 64) if size <= line), LINE_BYTES)


def vector_of(problem: ConvProblem) -> int:
    """Elements of y that are written at once: they lie in one group, and begin on a multiple of themselves."""
    most = 16 // pack.SIZES[problem.dtype]
    inner = problem.group_k if problem.layout == "nhwc" else prod(problem.output)
    return next(count for count in (most, most // 2, most // 4, 1) if count and inner % count == 0)


def written_of(problem: ConvProblem, config: Config) -> int:
    """Elements of y that a kernel writes at once: slabs in NCHW count pixels otherwise than y does."""
    return 1 if config.kernel != "stream" and problem.layout == "nchw" else vector_of(problem)


def is_packed(problem: ConvProblem, config: Config) -> bool:
    """Whether x has to be brought into another order first."""
    if config.unfold:
        return True
    return not config.gather and (problem.layout == "nchw" or problem.math == "3xtf32" or not is_whole(problem))


def has_groups(problem: ConvProblem) -> bool:
    """Whether the map of x has an axis for groups and parts."""
    return problem.groups > 1 or problem.math == "3xtf32"


def corners_of(problem: ConvProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where windows begin, innermost axis first: from -padding to the last window's place relative to the edge."""
    lower, upper = [], []
    for (before, after), reach in zip(problem.padding[::-1], problem.reach[::-1], strict=True):
        lower.append(-before)
        upper.append(after - (reach - 1))
    if has_groups(problem):
        lower, upper = [*lower, 0], [*upper, 0]
    return tuple(lower), tuple(upper)


def last_offsets(problem: ConvProblem) -> tuple[int, ...]:
    """How far the last tap lies from the first, innermost axis first."""
    return tuple(reach - 1 for reach in problem.reach[::-1]) + ((0,) if has_groups(problem) else ())


def padded(problem: ConvProblem) -> tuple[int, int]:
    """(high, wide) of an image in a slab: neighbours share their padding."""
    high, wide = (size + max(sides) for size, sides in zip(problem.spatial, problem.padding, strict=True))
    return high, wide


def slab_lines(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """(lines of a slab, lines of one of its copies): a tile's pixels, and what their windows reach. Of a box, which is
    one copy: (its lines, lines behind it)."""
    if config.kernel == "box":
        _, wide, high, behind = box_shape(problem, config)
        return wide * high, behind
    (reach_h, reach_w), (_, wide) = problem.reach, padded(problem)
    lines = config.pixels + (reach_h - 1) * wide + reach_w - 1
    copies = -(-lines // MOST_LINES)
    each = -(-lines // (8 * copies)) * 8
    return copies * each, each


def map_x(problem: ConvProblem, lines: int, packed: bool, slab: bool = False, box: tuple[int, ...] = ()) -> TensorMap:
    """x as packed, or as it lies; `lines` pixels a copy; pixels of all windows, or of the padded image for a
    slab."""
    size, (h, w) = pack.SIZES[problem.dtype], problem.spatial
    five = has_groups(problem)
    channels = pack.wide(problem) if packed else problem.group_c
    pixel = (channels if packed else problem.c) * size
    sizes: tuple[int, ...] = (channels, w, h, problem.n)
    strides: tuple[int, ...] = (pixel, pixel * w, pixel * w * h)
    steps = problem.stride[::-1]
    if five:
        sizes = (*sizes, problem.groups * pack.parts(problem))
        strides = (*strides, pixel * w * h * problem.n if packed else channels * size)
        steps = (*steps, 1)
    kind = "tf32" if problem.dtype == "f32" else problem.dtype
    corners = corners_of(problem)
    if box:
        ones = (1,) * (len(sizes) - 3)
        return TensorMap(kind, sizes, strides, (span(problem) // size, *box, *ones), line_bytes=span(problem))
    if slab:
        upper = [max(0, after - before) for before, after in problem.padding[::-1]]
        corners = corners[0], (*upper, 0) if five else tuple(upper)
    return TensorMap(kind, sizes, strides, (span(problem) // size, lines), corners, steps, span(problem))


def filter_line(problem: ConvProblem) -> int:
    """Channels of a tap's part of the packed filters: whole chunks, which the copy engine takes faster; where taps
    side by side are seen as channels, no more than there are."""
    if folded(problem) is not problem:
        return problem.group_c
    return chunks_of(problem) * (span(problem) // pack.SIZES[problem.dtype])


def map_w(problem: ConvProblem, lines: int, rows: int) -> TensorMap:
    """The packed filters, of which a view of the problem may see fewer taps: `rows` of them, `lines` a copy."""
    size, seen = pack.SIZES[problem.dtype], folded(problem)
    line = filter_line(problem) * (3 if problem.math == "3xtf32" else 1) * problem.kernel[1] // seen.kernel[1]
    problem = seen
    taps = prod(problem.kernel)
    return TensorMap(
        problem.dtype, (line, taps, rows), (line * size, line * taps * size),
        (span(problem) // size, 1, lines), line_bytes=span(problem),
    )  # fmt: skip


def chunks_of(problem: ConvProblem) -> int:
    """Lines that a group's channels fill."""
    return -(-problem.group_c * pack.SIZES[problem.dtype] // span(problem))


def steps_of(problem: ConvProblem) -> int:
    """Steps of gemm_k: chunks of all taps and parts."""
    return prod(problem.kernel) * chunks_of(problem) * (3 if problem.math == "3xtf32" else 1)


def last_steps(problem: ConvProblem) -> int:
    """The instruction's steps in a tap's last chunk of channels."""
    rest = problem.group_c * pack.SIZES[problem.dtype] - (chunks_of(problem) - 1) * span(problem)
    return -(-rest // STEP_BYTES)


def box_shape(problem: ConvProblem, config: Config) -> tuple[int, int, int, int]:
    """(outputs down a box, its lines' length, its lines' count, lines behind it that shifted operands read)."""
    (reach_h, reach_w), across = problem.reach, config.across
    wide = across + reach_w - 1
    down = config.pixels // wide
    return down, wide, down + reach_h - 1, -(-(reach_w - 1 + config.pixels - down * wide) // 8) * 8


def sides_of(config: Config) -> tuple[int, int]:
    """Rows and columns of the matrix instruction that make a tile."""
    pair = config.pixels, config.filters
    return pair if config.rows == "pixels" else pair[::-1]


def shared_bytes(problem: ConvProblem, config: Config) -> int:
    """The ring or the split sums, the staging part, the tables of places, barriers, and what aligns them."""
    line = span(problem)
    filters = config.filters * line // config.bundle
    ring = config.stages * config.pixels * line + (steps_of(problem) if config.held else config.stages) * filters
    ring += 2048 if config.held else 0
    if config.kernel != "stream":
        lines, behind = slab_lines(problem, config)
        lines += -(-lines // 8) * 8 - lines + behind if config.kernel == "box" else 0
        filters = config.stages * config.filters // config.bundle
        ring = (config.slabs * lines + filters) * line + 16 * config.slabs + 2048
    each = 64 * 64 * pack.SIZES[problem.dtype] * stagings_of(problem, config)
    delivered = is_delivered(problem, config)
    rings = 1 if delivered and config.turns else config.warpgroups
    staging = config.pixels * config.filters * 4 if config.split > 1 else rings * each
    share = config.pixels if config.rows == "filters" or config.turns else config.pixels // config.warpgroups
    tables = config.warpgroups * (share + config.filters * problem.bias) * 4
    barriers = 16 * (config.stages + delivered * rings * stagings_of(problem, config))
    return ring + staging + tables + barriers + 2048


def rounds_of(config: Config) -> int:
    """Rounds of 64 x 64 in which a warpgroup's outputs go to y."""
    rows, columns = sides_of(config)
    return rows // 64 // (1 if config.turns else config.warpgroups) * -(-columns // 64)


def order_of(problem: ConvProblem, config: Config) -> int:
    """So many filters are turned when they are packed, so that threads write y straight from their registers; 0: none.

    A thread then has a quarter of them, side by side: 16 bytes or 8, of few filters 4. Where that measured faster than
    the way through shared memory; the copy engine is better at writing more than L2 holds, and for two warpgroups on a
    tile."""
    size, columns = pack.SIZES[problem.dtype], config.filters // config.bundle
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
    return pack.SIZES[problem.dtype] * (order // 4 if order and vector_of(problem) > 1 else min(order, 1))


def stagings_of(problem: ConvProblem, config: Config) -> int:
    """Parts of shared memory, of 64 x 64 outputs each, through which a warpgroup's outputs go to y: one more where one
    may be on its way; one for each round where a residual is fetched there and nothing else hides how long it takes."""
    size = pack.SIZES[problem.dtype]
    if order_of(problem, config):
        return 0
    if is_delivered(problem, config):
        return max(2, min(rounds_of(config), MOST_STAGINGS))
    fetched = problem.residual and config.split == 1 and written_of(problem, config) * size >= 4
    if fetched and size == 2 and not config.turns and 2 < rounds_of(config) <= MOST_STAGINGS:
        return rounds_of(config)
    return 2 if fetched or (boxes_of(problem, config) and size == 2) else 1


def may_begin(problem: ConvProblem, config: Config, whole: bool) -> bool:
    """Whether sums may begin with the residual, which threads load in `whole` pieces of 16 bytes or not: in fp32 those
    of products would lose digits beside a large one; beside many sums there are few registers to load it."""
    short = whole and config.kernel == "stream" and config.pixels <= FEW_PIXELS and pack.SIZES[problem.dtype] == 2
    most = MOST_BEGUN_STREAM if short else MOST_BEGUN
    return problem.math != "3xtf32" and not (config.turns and prod(sides_of(config)) // 128 > most)


def is_delivered(problem: ConvProblem, config: Config) -> bool:
    """Whether the copy engine brings the residual, where sums cannot begin with it: to slabs; to streams in turns that
    have more sums than leave registers to fetch it in time; to warpgroups that share a tile of two rounds at
    most, and of many steps: fetching would keep them from products."""
    whole = vector_of(problem) * pack.SIZES[problem.dtype] == 16 and problem.layout == "nhwc"
    if config.kernel == "stream" and config.turns:
        wanted = prod(sides_of(config)) // 128 > MOST_BEGUN
    elif config.kernel == "stream":
        wanted = config.warpgroups == 2 and rounds_of(config) <= 2 and steps_of(problem) >= LEAST_STEPS
    else:
        wanted = config.kernel == "slab"
    return problem.residual and whole and wanted and not config.gather and not order_of(problem, config)


def is_ahead(problem: ConvProblem, config: Config) -> bool:
    """Whether a tile's residual is fetched as a whole while its products run."""
    if is_delivered(problem, config):
        return True
    return config.split == 1 and not config.turns and stagings_of(problem, config) >= rounds_of(config)


def boxes_of(problem: ConvProblem, config: Config) -> int:
    """How the copy engine writes y: not (0), 64 filters at a time (1), or all of it (2): no tile has fewer."""
    whole = vector_of(problem) * pack.SIZES[problem.dtype] == 16 and not order_of(problem, config)
    if config.kernel != "stream" or config.split > 1 or problem.layout == "nchw" or not whole:
        return 0
    if config.filters % 64 == 0 or tiles_of(problem, config)[0] == 1:
        return 2
    return 1 if config.filters > 64 else 0


def map_y(problem: ConvProblem, config: Config) -> TensorMap:
    """y as pixels of groups of filters; a box is a line of 128 bytes of as many pixels as all tiles are made of."""
    size = pack.SIZES[problem.dtype]
    pixels = 64 if config.rows == "pixels" else gcd(config.pixels, 64)
    return TensorMap(
        problem.dtype, (problem.group_k, problem.groups, problem.n * prod(problem.output)),
        (problem.group_k * size, problem.k * size), (LINE_BYTES // size, 1, pixels),
    )  # fmt: skip


def map_residual(problem: ConvProblem, config: Config) -> TensorMap:
    """The residual as windows of 1 x 1, whose pixels are counted as tiles count them: a slab's with padding."""
    size, (p, q) = pack.SIZES[problem.dtype], problem.output
    high, wide = padded(problem) if config.kernel == "slab" else (p, q)
    pixels = 64 if config.rows == "pixels" else gcd(config.pixels, 64)
    line = problem.k * size
    return TensorMap(
        problem.dtype, (problem.k, q, p, problem.n), (line, line * q, line * q * p), (LINE_BYTES // size, pixels),
        ((0, 0), (wide - q, high - p)), (1, 1),
    )  # fmt: skip


def tiles_of(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """Tiles along the filters of a group, and all."""
    across = -(-problem.group_k // config.filters)
    if config.kernel == "box":
        down = box_shape(problem, config)[0]
        p, q = problem.output
        return across, across * problem.n * -(-p // down) * -(-q // config.across) * problem.groups
    pixels = problem.n * prod(padded(problem) if config.kernel == "slab" else problem.output)
    return across, across * -(-pixels // config.pixels) * problem.groups


def blocks_of(problem: ConvProblem, config: Config, device: Device) -> int:
    """Blocks of the launch; where filters stay, so many that each of them keeps its filters."""
    across, tiles = tiles_of(problem, config)
    if config.split > 1:
        return tiles * config.split
    most = min(tiles, device.threads * config.resident)
    if config.kernel == "stream" and config.held:
        most -= most % (across * problem.groups)
    return most
