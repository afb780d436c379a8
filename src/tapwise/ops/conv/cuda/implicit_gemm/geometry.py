"""What a config of cuda.implicit_gemm makes of a problem: lines and chunks of channels, slabs and boxes, tiles and
blocks, tensor maps."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.tensor_map import LINE_BYTES, TensorMap, legal
from tapwise.ops.conv.cuda import pack
from tapwise.ops.conv.problem import ConvProblem

# Pixels that one copy takes.
MOST_LINES: Final = 256
# Elements and pixels are counted in 32 bits.
LARGEST: Final = 1 << 31
# Of 132 multiprocessors, clusters of four and eight find places on 120.
PLACED: Final = 10 / 11
# Bytes of the instruction's steps along gemm_k.
STEP_BYTES: Final = 32


@dataclass(frozen=True)
class Config(BaseConfig):
    """`kernel`: stream, slab or box. A tile of pixels x filters; `rows` of the matrix instruction: pixels or filters;
    warpgroups that share a tile, or (`turns`) take tiles in turns; stages of the ring; `split` blocks of a cluster
    share gemm_k; `resident` blocks of a multiprocessor: as many as there is room for take the tiles in turns, or a
    cluster a tile where gemm_k is split. `held`: the filters stay in shared memory; `slabs` there; `gather`: bytes
    of the pieces in which warps copy x, 0 for the copy engine; `bundle`: groups whose channels share a line;
    `across`: outputs of a line of a box; `unfold`: last axes whose taps are packed side by side first; `line`: bytes of
    a line of channels in shared memory, 0 for `span`."""

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
    line: int = 0


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
        line = span(problem.replace(c=channels)) // problem.itemsize
        channels = -(-channels // line) * line
    return problem.replace(c=channels, **{name: tuple(values) for name, values in sizes.items()})


def unfoldings(problem: ConvProblem) -> list[int]:
    """Ways to compute the problem: as it is (0), and with few channels unfolded along one axis or both."""
    few = problem.groups == 1 and problem.c * problem.itemsize < STEP_BYTES
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
    size = problem.itemsize
    return problem.c * size % 16 == 0 and problem.group_c * size % 16 == 0


def span(problem: ConvProblem) -> int:
    """Bytes of a line of channels in shared memory: as few as hold a group's channels, 128 at most."""
    size = problem.group_c * problem.itemsize
    return next((line for line in (32, 64) if size <= line), LINE_BYTES)


def line_bytes(problem: ConvProblem, config: Config) -> int:
    """Bytes of a line of channels as a config keeps them in shared memory."""
    return config.line or span(problem)


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


def map_x(
    problem: ConvProblem, line: int, lines: int, packed: bool, slab: bool = False, box: tuple[int, ...] = ()
) -> TensorMap:
    """x as packed, or as it lies; `lines` pixels a copy, `line` bytes of each; pixels of all windows, or of the padded
    image for a slab."""
    size, (h, w) = problem.itemsize, problem.spatial
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
        return TensorMap(kind, sizes, strides, (line // size, *box, *ones), line_bytes=line)
    if slab:
        upper = [max(0, after - before) for before, after in problem.padding[::-1]]
        corners = corners[0], (*upper, 0) if five else tuple(upper)
    return TensorMap(kind, sizes, strides, (line // size, lines), corners, steps, line)


def filter_line(problem: ConvProblem) -> int:
    """Channels of a tap's part of the packed filters: whole chunks of `span`, which the copy engine takes faster; where
    taps side by side are seen as channels, no more than there are. All configs have the same packed filters."""
    if folded(problem) is not problem:
        return problem.group_c
    line, size = span(problem), problem.itemsize
    return -(-problem.group_c * size // line) * line // size


def map_w(problem: ConvProblem, config: Config, rows: int) -> TensorMap:
    """The packed filters, of which a view of the problem may see fewer taps: `rows` of them, a tile's a copy."""
    size, seen = problem.itemsize, folded(problem)
    along = filter_line(problem) * (3 if problem.math == "3xtf32" else 1) * problem.kernel[1] // seen.kernel[1]
    line, taps = line_bytes(seen, config), prod(seen.kernel)
    return TensorMap(
        seen.dtype, (along, taps, rows), (along * size, along * taps * size), (line // size, 1, config.filters),
        line_bytes=line,
    )  # fmt: skip


def chunks_of(problem: ConvProblem, config: Config) -> int:
    """Lines that a group's channels fill."""
    return -(-problem.group_c * problem.itemsize // line_bytes(problem, config))


def steps_of(problem: ConvProblem, config: Config) -> int:
    """Steps of gemm_k: chunks of all taps and parts."""
    return prod(problem.kernel) * chunks_of(problem, config) * (3 if problem.math == "3xtf32" else 1)


def last_steps(problem: ConvProblem, config: Config) -> int:
    """The instruction's steps in a tap's last chunk of channels."""
    before = (chunks_of(problem, config) - 1) * line_bytes(problem, config)
    rest = problem.group_c * problem.itemsize - before
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
    most = min(tiles, device.multiprocessors * config.resident)
    if config.held:
        most -= most % (across * problem.groups)
    return most
