"""Blocks of cuda.depthwise of wgrad: which there are, and what they take of a multiprocessor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from math import prod
from typing import Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cuda.jit.launch import has_dependent_launches
from tapwise.cuda.jit.occupancy import room_of
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import boxes
from tapwise.ops.conv.cuda.costs import REGISTERS, blocks_of
from tapwise.ops.conv.cuda.residue_classes import phases, steps
from tapwise.ops.conv.problem import ConvProblem

# Strides in a class that are unrolled; products of a stage's rows, more of which do not fit into the instruction cache.
MOST_STRIDE, MOST_PRODUCTS = 8, 1800
# Values that a thread may hold in registers, and the rest: of rows that are copied, of those by TMA.
MOST_VALUES, OTHER_REGISTERS, TMA_REGISTERS = 170, 62, 38
# Threads of a block, and so many at least where a row is long enough; bytes of a pixel's channels in a block.
LEAST_THREADS, MOST_THREADS, LEAST_BYTES, MOST_BYTES = 64, 288, 64, 256
# Columns of a thread, so many times as many as are there at most, and how many choices; taps of a piece in a row; of
# filters with more taps than this fewer rows are tried too; rows of a part at least.
COLUMNS: Final = (7, 8, 5, 4, 3, 2, 1)
IDLE, MOST_COLUMNS, MOST_TAPS_W, MANY_TAPS, LEAST_ROWS = 1.12, 4, 11, 25, 2
# Bytes that TMA brings are a multiple of; bytes of a stage that are so with it.
PIECE, TMA_ALIGNMENT = 16, 128
# Of blocks with whole rows: threads at most, rows of x and dy of a stage, stages.
MOST_ROW_THREADS, MOST_ROWS, MOST_STAGES = 960, 32, 4
# Lanes of a warp, banks of shared memory.
LANES, BANKS = 32, 32


@dataclass(frozen=True)
class Config(BaseConfig):
    """A thread has `channels` and `columns` of dy, and sums of taps_h x taps_w taps; a block `lanes` times so many
    channels and `groups` times so many columns. Rows come `by` "tma", as "rows" of all channels or "copies" of pixels
    (cp.async), in `stages`. `parts`: of the sum over pixels."""

    by: str
    channels: int
    columns: int
    lanes: int
    groups: int
    taps_h: int
    taps_w: int
    stages: int
    parts: int

    @property
    def threads(self) -> int:
        """Those that multiply, and a warp that copies rows."""
        return round_up(self.lanes * self.groups, LANES) + LANES * (self.by == "rows")


def tiles(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """All but how the sum is split."""
    q = ceil_div(problem.output[1], phases(problem)[1])
    for channels in channels_of(problem):
        for plain in threads_of(problem, channels, q):
            for (lanes, groups), by in product(shapes(problem, plain, q), ("tma", "copies")):
                deep = (replace(plain, lanes=lanes, groups=groups, by=by, stages=stages) for stages in (3, 2))
                if by == "tma" and not by_tma(problem, replace(plain, lanes=lanes, groups=groups), device):
                    continue
                yield from islice((one for one in deep if fits(problem, one, device)), 1)
            yield from row_blocks(problem, replace(plain, by="rows", stages=1), q, device)


def row_blocks(problem: ConvProblem, plain: Config, q: int, device: Device) -> Iterator[Config]:
    """Blocks of all channels to which rows come as they lie: one, two and three a multiprocessor, as deep as each
    finds room."""
    live, lanes = live_rows(problem, plain), ceil_div(problem.k, plain.channels)
    several = problem.group_k > 1 or live * (steps(problem)[0] + 1) > MOST_ROWS
    if (
        several
        or problem.layout != "nhwc"
        or max(problem.dilation) > 1
        or not has_dependent_launches(device.architecture)
    ):
        return
    needed = ceil_div(q, plain.columns)
    for groups in dict.fromkeys(ceil_div(needed, strips) for strips in range(1, needed + 1)):
        one = replace(plain, lanes=lanes, groups=groups)
        if LEAST_THREADS <= lanes * groups <= MOST_ROW_THREADS:
            found = (deepest(problem, one, device, beside) for beside in (1, 2, 3))
            yield from dict.fromkeys(deep for deep in found if deep is not None)


def deepest(problem: ConvProblem, config: Config, device: Device, beside: int) -> Config | None:
    """With as many stages as let so many blocks find room on a multiprocessor."""
    room = room_of(device, beside)
    deep = replace(config, stages=min(MOST_STAGES, room // (stage_bytes(problem, config) + 16)))
    held = blocks_of(registers(problem, deep), deep.threads)
    return deep if deep.stages > 1 and held >= beside and fits(problem, deep, device) else None


def channels_of(problem: ConvProblem) -> tuple[int, ...]:
    """Of a thread."""
    if problem.group_k > 1 or problem.layout == "nchw":
        return (1,)
    many = {2: (2, 4, 1), 4: (2, 1), 8: (1,)}[problem.itemsize]
    return tuple(channels for channels in many if problem.c % channels == 0)


def threads_of(problem: ConvProblem, channels: int, q: int) -> Iterator[Config]:
    """Taps and columns of a thread: as many taps as fit, of large filters fewer too; columns that leave few idle."""
    r, s = problem.kernel
    wide, found = ceil_div(s, ceil_div(s, MOST_TAPS_W)), 0
    for high in dict.fromkeys(ceil_div(r, pieces) for pieces in range(1, r + 1)):
        plain = (Config("copies", channels, columns, 1, 1, high, wide, 2, 1) for columns in COLUMNS if columns <= q)
        fitting = [one for one in plain if few_values(problem, one)]
        idle = [ceil_div(q, one.columns) * one.columns for one in fitting]
        yield from [one for one, waste in zip(fitting, idle, strict=True) if waste <= IDLE * min(idle)][:MOST_COLUMNS]
        found += bool(fitting)
        if found == (2 if r * s > MANY_TAPS else 1):
            return


def live_rows(problem: ConvProblem, config: Config) -> int:
    """Rows of dy under way."""
    return ceil_div(config.taps_h, steps(problem)[0])


def window_columns(problem: ConvProblem, config: Config) -> int:
    """Columns of x that a thread sees."""
    return (config.columns - 1) * steps(problem)[1] + config.taps_w


def values(problem: ConvProblem, config: Config) -> int:
    """Registers for sums, rows of dy, a row of x."""
    seen = live_rows(problem, config) * config.columns + window_columns(problem, config)
    return (config.taps_h * config.taps_w + seen) * config.channels * (2 if problem.dtype == "f64" else 1)


def few_values(problem: ConvProblem, config: Config) -> bool:
    """Whether registers and the instruction cache have room. A row of taps in one column is always taken."""
    products = live_rows(problem, config) * config.taps_h * config.taps_w * config.columns * config.channels
    smallest = config.taps_h == config.columns == 1
    return smallest or (products <= MOST_PRODUCTS and values(problem, config) <= MOST_VALUES)


def shapes(problem: ConvProblem, config: Config, q: int) -> Iterator[tuple[int, int]]:
    """(lanes, groups): lanes that leave few channels idle, groups that share a row evenly."""
    found, needed = ceil_div(problem.k, config.channels), ceil_div(q, config.columns)
    if problem.layout == "nchw":
        strips = dict.fromkeys(ceil_div(needed, count) for count in (1, 2, 3, 4, needed))
        both = [(threads, groups) for groups in strips for threads in (128, 64, 256) if groups <= threads]
        yield from dict.fromkeys((min(threads // groups, found), groups) for threads, groups in both)
        return
    each = config.channels * problem.itemsize
    bounds = max(1, LEAST_BYTES // each), max(1, MOST_BYTES // each)
    whole = max(1, PIECE // each) if problem.c * problem.itemsize % PIECE == 0 else 1
    lanes = {count for count in range(bounds[0], min(bounds[1], found) + 1) if count % whole == 0} or {found}
    idle = {count: ceil_div(found, count) * count / found for count in lanes}
    fitting = [count for count, waste in idle.items() if waste <= 1.05 * min(idle.values())]
    for count in sorted(fitting, key=lambda one: (abs(one - LANES), one))[:2]:
        most = max(1, MOST_THREADS // count)
        several = dict.fromkeys(ceil_div(needed, strips) for strips in range(1, needed + 1))
        some = [groups for groups in several if groups <= most]
        enough = [groups for groups in some if groups * count >= LEAST_THREADS] or some[:1]
        yield from ((count, groups) for groups in dict.fromkeys([*enough[:2], enough[-1]]))


def columns_x(problem: ConvProblem, config: Config) -> int:
    return (config.groups * config.columns - 1) * steps(problem)[1] + config.taps_w


def channels_x(problem: ConvProblem, config: Config) -> int:
    """Of x that a block reads, at most."""
    own, several = config.channels * config.lanes, problem.group_k
    if several == 1 or own % several == 0:
        return own // several
    return 1 if several % own == 0 else min(problem.c, (own - 2) // several + 2)


def copy_bytes(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """Of a copy of x and of dy: what lines and where they begin are a multiple of."""
    size, last = problem.itemsize, problem.layout == "nhwc"
    if config.by != "copies":
        return PIECE, PIECE
    own, several = config.channels * config.lanes, problem.group_k
    if last:
        # Where channels of a block do not begin at a multiple of theirs, elements come one by one.
        shared = own % several == 0
        multiples = ((problem.c, channels_x(problem, config) if shared else 1), (problem.k, own))
    else:
        dense = problem.dilation[1] == 1
        multiples = ((problem.spatial[1] if dense else 1, 0), (problem.output[1] if dense else 1, 0))
    sizes = PIECE, 8, 4, 2
    x, dy = (next(one for one in sizes if all(count * size % one == 0 for count in each)) for each in multiples)
    return x, dy


def lines_of(problem: ConvProblem, config: Config) -> tuple[int, int, int, int]:
    """Elements of a line of x and dy (WgradTile), and how many lines a stage has of each."""
    columns, columns_dy, live = columns_x(problem, config), config.groups * config.columns, live_rows(problem, config)
    rows, own, own_x = live * steps(problem)[0], config.channels * config.lanes, channels_x(problem, config)
    if problem.layout == "nhwc":
        return own_x, own, rows * columns, live * columns_dy
    each_x, each_dy = (size // problem.itemsize for size in copy_bytes(problem, config))
    line_x, line_dy = round_up(columns + each_x - 1, each_x), round_up(columns_dy + each_dy - 1, each_dy)
    return line_x, line_dy, rows * own_x, live * own


def pads(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """Bytes behind a channel's rows of x and of dy in a stage, so that a warp's lanes read from many banks."""
    if problem.layout == "nhwc":
        return 0, 0
    size, stride_w, live = problem.itemsize, steps(problem)[1], live_rows(problem, config)
    line_x, line_dy, _, _ = lines_of(problem, config)

    step, high = config.columns * size, live * steps(problem)[0]
    pad_x = _fewest_conflicts(line_x * size * high, step * stride_w, config.groups)
    return pad_x, _fewest_conflicts(line_dy * size * live, step, config.groups)


@lru_cache(1024)
def _fewest_conflicts(plane: int, step: int, groups: int) -> int:
    """The pad that spreads what a warp's lanes read over banks: `groups` of them `step` bytes apart in each plane."""

    def most(pad: int) -> int:
        """Words of one bank."""
        places = (lane // groups * (plane + pad) + lane % groups * step for lane in range(LANES))
        return max(Counter(word % BANKS for word in {place // 4 for place in places}).values())

    return min(range(0, 4 * BANKS, PIECE), key=most)


def copies_of(problem: ConvProblem, config: Config) -> int:
    """Of a thread for a stage."""
    line_x, line_dy, lines_x, lines_dy = lines_of(problem, config)
    pieces = [
        line * problem.itemsize // size
        for line, size in zip((line_x, line_dy), copy_bytes(problem, config), strict=True)
    ]
    down = [max(1, config.threads // count) for count in pieces]
    return sum(
        ceil_div(count, config.threads) * ceil_div(lines, each)
        for count, lines, each in zip(pieces, (lines_x, lines_dy), down, strict=True)
    )


def stage_bytes(problem: ConvProblem, config: Config) -> int:
    """Of x, then of dy."""
    if config.by == "rows":
        # WgradTile's row_bytes: with what lies in front and behind in pieces of 16 bytes.
        pixel, live = problem.k * problem.itemsize, live_rows(problem, config)
        most = (problem.spatial[1], columns_x(problem, config)), (problem.output[1], config.groups * config.columns)
        row_x, row_dy = ((min(each) * pixel + 2 * PIECE - 3) // PIECE * PIECE for each in most)
        return live * (steps(problem)[0] * row_x + row_dy)
    (line_x, line_dy, lines_x, lines_dy), (pad_x, pad_dy) = lines_of(problem, config), pads(problem, config)
    aligned, size = TMA_ALIGNMENT if config.by == "tma" else PIECE, problem.itemsize
    bytes_x = line_x * lines_x * size + pad_x * channels_x(problem, config)
    bytes_dy = line_dy * lines_dy * size + pad_dy * config.lanes
    return round_up(bytes_x, aligned) + round_up(bytes_dy, aligned)


def shared_bytes(problem: ConvProblem, config: Config) -> int:
    return config.stages * (stage_bytes(problem, config) + (0 if config.by == "copies" else 16))


def by_tma(problem: ConvProblem, config: Config, device: Device) -> bool:
    if problem.layout != "nhwc" or max(problem.dilation) > 1 or not has_dependent_launches(device.architecture):
        return False
    rows, own = live_rows(problem, config) * steps(problem)[0], config.channels * config.lanes
    multiples = problem.c, problem.k, channels_x(problem, config), own
    sizes = columns_x(problem, config), config.groups * config.columns, own, rows
    return all(count * problem.itemsize % PIECE == 0 for count in multiples) and max(sizes) <= boxes.MOST


def whole_sectors(problem: ConvProblem, config: Config, sector: int) -> bool:
    """Whether pixels' pieces, and where they begin, are multiples of so many bytes."""
    multiples = problem.c, problem.k, channels_x(problem, config), config.channels * config.lanes
    return all(count * problem.itemsize % sector == 0 for count in multiples)


def registers(problem: ConvProblem, config: Config) -> int:
    """Of a thread, that are certainly enough."""
    return values(problem, config) + (OTHER_REGISTERS if config.by == "copies" else TMA_REGISTERS)


def min_blocks_per_sm(problem: ConvProblem, config: Config) -> int:
    """Blocks that certainly find room on a multiprocessor."""
    return blocks_of(registers(problem, config), config.threads, shared_bytes(problem, config))


def fits(problem: ConvProblem, config: Config, device: Device) -> bool:
    """Registers and shared memory; two stages always have room for the block's sums of one tap."""
    fitting = registers(problem, config) * round_up(config.threads, 4 * LANES) <= REGISTERS
    return fitting and shared_bytes(problem, config) <= device.shared_bytes


def rows_of(problem: ConvProblem, strip: int) -> tuple[int, int]:
    """Rows of dy in a class, and those of all strips of so many columns, classes and images."""
    (p, q), (high, wide) = problem.output, phases(problem)
    strips = wide * ceil_div(ceil_div(q, wide), strip)
    return ceil_div(p, high), ceil_div(p, high) * high * strips * problem.n


def piece_counts(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """Pieces of a filter."""
    return ceil_div(problem.kernel[0], config.taps_h), ceil_div(problem.kernel[1], config.taps_w)


def channel_blocks(problem: ConvProblem, config: Config) -> int:
    return ceil_div(problem.k, config.channels * config.lanes)


def count(problem: ConvProblem, config: Config) -> int:
    return prod(piece_counts(problem, config)) * channel_blocks(problem, config) * config.parts


def split(problem: ConvProblem, config: Config, device: Device) -> Iterator[Config]:
    """Parts that fill the device once, twice, or half."""
    room = device.multiprocessors * min_blocks_per_sm(problem, config) / count(problem, config)
    most = max(1, rows_of(problem, config.groups * config.columns)[1] // LEAST_ROWS)
    for parts in dict.fromkeys(min(max(1, int(room * share)), most) for share in (1, 0.5, 2)):
        if count(problem, replace(config, parts=parts)) < INDEX_LIMIT:
            yield replace(config, parts=parts)
