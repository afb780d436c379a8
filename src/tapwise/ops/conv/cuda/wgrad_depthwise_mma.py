"""cuda.depthwise_mma: the weight gradient of depthwise convolution on tensor cores.

A product takes 8 columns of dy, 16 of x, and 16 places of an image that have them side by side; its diagonals are the
sums of a row of taps. Blocks hold images, or bands of rows, as planes of a channel in shared memory, and every element
of x and dy comes there once. The sum over pixels is split among blocks: a cluster adds their sums, or a second launch.

The floor is the bytes of x and dy. Products take less, but for filters of more than 100 taps: 128 pixels of a channel
take as many products of 16 x 8 x 16 as a filter has rows, up to 9 columns.

Source: PTX ISA on mma.sync and ldmatrix; Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014 (weight
gradients as sums over pixels).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.jit.occupancy import cluster_places
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import template_args, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import wgrad_parts, window
from tapwise.ops.conv.cuda.costs import blocks_of, cycles_us, joint_us
from tapwise.ops.conv.cuda.gradients import MOST_PART_PIXELS, WgradPlan
from tapwise.ops.conv.problem import ConvProblem

KERNEL: Final = "ops/conv/cuda/wgrad_depthwise_mma.cu"
# Columns of a group, and places of a product; lanes of a warp; bytes of a piece.
GROUP, PLACES, LANES, PIECE = 8, 16, 32, 16
# Of a block: channels, channels of a warp, warps that share a channel, warps at least and at most.
CHANNELS, EACH, SHARE, LEAST_WARPS, MOST_WARPS = (8, 16, 32), (1, 2), (1, 2), 8, 16
# Rows of a run; groups of a strip at most; pieces that a column of an image is cut into at most.
ROWS, MOST_GROUPS, MOST_BANDS = (7, 4, 3, 2, 1), 10, 16
# Least of the places of a chunk's products that are real, where there are such chunks.
LEAST_FILLED: Final = 0.6
# Sums of a thread at most; its registers at least, while pixels come, and for products; products of a group that are
# unrolled.
MOST_SUMS, LEAST_REGISTERS, LOAD_REGISTERS, PRODUCT_REGISTERS, MOST_PRODUCTS = 72, 66, 60, 40, 256
MOST_STRIDE: Final = 4
# Channels that a thread loads at once at most: eight take as many registers again while they are turned.
MOST_VECTOR: Final = 4
# Blocks of a cluster on every GPU that has clusters; warps of a block that adds parts.
LARGEST_CLUSTER, SUM_WARPS = 8, 8
# Of the cost model, fitted to times of 140 configs on 14 layers (H100), and what does not depend on pixels anew to 192
# on 10 layers (H200). Cycles of a multiprocessor: an instruction of a warp, a load of four matrices, a product; of a
# warp alone: a chunk's first loads, a turn of its loop, a load of matrices, a product, a block's end. Instructions of a
# turn by channels that are loaded at once.
ISSUE, MATRICES, PRODUCT = 0.41, 4.75, 1.14
WAIT, TURN, OWN_MATRICES, OWN_PRODUCT, END = 1280.0, 49.0, 9.0, 8.0, 2670.0
TURN_INSTRUCTIONS: Final = {4: 85, 2: 80, 1: 75}
# Bytes that lie in L2 from the launch before; bytes of a sector. By channels that a thread loads at once, bytes that
# come from there to a multiprocessor in a cycle, what lies beside a pixel's piece in its sectors included; of one
# channel fitted to 55 times on 5 layers, which had been held to take a quarter longer than they do.
IN_L2, SECTOR = 30e6, 32
L2_BYTES: Final = {4: 14.9, 2: 14.9, 1: 20.0}
# More than L2 holds: what lies beside a pixel's piece comes from memory again for other blocks.
ALL_L2, READ_AGAIN = 60e6, 2.0
# Microseconds of begin and end, of a cluster's sum, of a second launch; how much sooner what is placed early begins (in
# the mean of 41 layers).
START_US, CLUSTER_US, SECOND_US, EARLY_US = 0.73, 1.84, 2.52, 0.65


@dataclass(frozen=True)
class Config(BaseConfig):
    """A block has `channels`, a warp `each` of them, `share` warps the same; sums of taps_h rows of taps. A chunk is
    `runs` runs of `rows` rows of dy of each of so many `images`, in strips of `groups` groups of 8 columns. `parts` of
    the sum over chunks, which a `cluster` adds, or a second launch."""

    channels: int
    each: int
    share: int
    taps_h: int
    rows: int
    groups: int
    images: int
    runs: int
    parts: int
    cluster: bool

    @property
    def threads(self) -> int:
        return LANES * self.channels // self.each * self.share


def vector(problem: ConvProblem) -> int:
    """Channels that a thread loads at once."""
    return gcd(problem.c, MOST_VECTOR) if problem.layout == "nhwc" else 1


def tiles(problem: ConvProblem) -> int:
    """Of 16 columns of x that 8 columns of dy meet, of a class of columns."""
    return ceil_div((problem.kernel[1] - 1) * problem.dilation[1] // problem.stride[1] + GROUP, PLACES)


def sums(problem: ConvProblem, config: Config) -> int:
    """Registers of a thread."""
    return 4 * config.each * problem.stride[1] * tiles(problem) * config.taps_h


def slides(problem: ConvProblem, config: Config) -> bool:
    """Whether columns of x that two groups see stay in registers from one to the other."""
    return config.groups > 1 and tiles(problem) == 1 and problem.stride == problem.dilation == (1, 1)


def groups_x(problem: ConvProblem, config: Config) -> int:
    """Groups of a row of x in a plane, of a class."""
    return config.groups + 2 * tiles(problem) - 1


def rows_x(problem: ConvProblem, config: Config) -> int:
    """Rows of x in a plane for each image."""
    return (config.runs * config.rows - 1) * problem.stride[0] + (config.taps_h - 1) * problem.dilation[0] + 1


def pieces_of(rows: int, pitch: int, step: int) -> int:
    """Pieces in front of a row of a plane, where runs are `step` rows apart."""
    return rows * (pitch | 1) + (rows // 8 if step % 2 == 0 else 0)


def image_x(problem: ConvProblem, config: Config) -> int:
    """Pieces of an image in a plane of x: its runs are read from the banks that follow those of the image before."""
    pitch, step = problem.stride[1] * groups_x(problem, config), problem.stride[0] * config.rows
    least = pieces_of(rows_x(problem, config) - 1, pitch, step) + (pitch | 1)
    return least + (pieces_of(config.runs * step, pitch, step) - least) % GROUP


def planes(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """Pieces of a plane of x and of dy; the latter has zeros behind all images."""
    rows = config.images * config.runs * config.rows + config.rows + 1
    of_dy = pieces_of(rows, config.groups, config.rows)
    return round_up(config.images * image_x(problem, config), GROUP), round_up(of_dy, GROUP)


def cut(problem: ConvProblem, config: Config) -> tuple[int, int, int]:
    """Bands and strips of an image, and all chunks."""
    (p, q), images = problem.output, ceil_div(problem.n, config.images)
    bands, strips = ceil_div(p, config.runs * config.rows), ceil_div(q, GROUP * config.groups)
    return bands, strips, images * bands * strips


def blocks_of_part(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """Pieces of a filter, blocks of channels."""
    return ceil_div(problem.kernel[0], config.taps_h), ceil_div(problem.c, config.channels)


def shared_bytes(problem: ConvProblem, config: Config) -> int:
    """Planes, and in their place at the end the sums' terms."""
    vectors = config.channels // vector(problem)
    pieces = config.channels * sum(planes(problem, config)) + 2 * vectors * max(1, GROUP // vectors)
    taps = config.channels * config.taps_h * problem.kernel[1]
    return max(pieces * PIECE, taps * (GROUP * config.share + config.cluster) * 4)


def min_blocks_per_sm(problem: ConvProblem, config: Config) -> int:
    """Blocks that find room on a multiprocessor."""
    return blocks_of(registers(problem, config), config.threads, shared_bytes(problem, config))


def begins_early(problem: ConvProblem, config: Config, device: Device) -> bool:
    """Whether what comes next is placed early: where no multiprocessor could have more blocks than its share. Not of
    clusters (1.0 to 1.2 of the time)."""
    share = ceil_div(prod(blocks_of_part(problem, config)) * config.parts, device.multiprocessors)
    # Of one block each, launches are balanced.
    held = 1 if share == 1 else min_blocks_per_sm(problem, config)
    return not config.cluster and wgrad_parts.begins_early(problem, held, share)


def registers(problem: ConvProblem, config: Config) -> int:
    """Of a thread, about: while pixels come, or for products, with the places of rows that a run meets."""
    reach = rows_x(problem, replace(config, runs=1))
    rows = config.rows * (1 if slides(problem, config) else config.each)
    taken = sums(problem, config) + max(LOAD_REGISTERS, PRODUCT_REGISTERS + reach + 3 * rows)
    return max(LEAST_REGISTERS, taken)


def _blocks(problem: ConvProblem) -> Iterator[Config]:
    """Channels, warps and taps."""
    r, c = problem.kernel[0], problem.c
    for channels, each, share in product(CHANNELS, EACH, SHARE):
        if channels > round_up(c, GROUP) or not LEAST_WARPS <= channels // each * share <= MOST_WARPS:
            continue
        plain = Config(channels, each, share, 1, 1, 1, 1, 1, 1, False)
        pieces = next((count for count in range(1, r + 1) if _few_sums(problem, plain, ceil_div(r, count))), None)
        if pieces is not None:
            yield replace(plain, taps_h=ceil_div(r, pieces))


def _few_sums(problem: ConvProblem, config: Config, taps_h: int) -> bool:
    return sums(problem, replace(config, taps_h=taps_h)) <= MOST_SUMS


def _chunks(problem: ConvProblem, config: Config, device: Device) -> Iterator[Config]:
    """What a chunk has: whole images, or a band of one."""
    (p, q), most = problem.output, 4 * MOST_SUMS // sums(problem, replace(config, taps_h=1))
    across = ceil_div(q, GROUP)
    strips = ceil_div(across, MOST_GROUPS)
    for rows in ROWS:
        products = rows * sums(problem, config) // 4
        if rows > max(1, p) or (rows > 1 and products > MOST_PRODUCTS) or rows > most:
            continue
        runs = ceil_div(p, rows)
        plain = replace(config, rows=rows, groups=ceil_div(across, strips))
        whole = [replace(plain, images=1 << power, runs=runs) for power in range(6) if 1 << power < 2 * problem.n]
        counts = sorted({ceil_div(runs, count) for count in range(2, MOST_BANDS + 1)} - {runs})
        bands = [replace(plain, runs=count) for count in counts]
        fitting = [one for one in whole + bands if shared_bytes(problem, one) <= device.shared_bytes]
        full = [one for one in fitting if _filled(one) >= LEAST_FILLED]
        yield from [*[one for one in full if one.runs == runs][:3], *[one for one in full if one.runs < runs][:2]] or (
            sorted(fitting, key=_filled)[-1:]
        )


def _filled(config: Config) -> float:
    """How many of the places of a chunk's products are real."""
    places = config.images * config.runs
    return places / round_up(places, PLACES)


def _splits(problem: ConvProblem, config: Config, device: Device) -> Iterator[Config]:
    """Parts that fill the device once or half, or that clusters add."""
    blocks, (_, _, chunks) = prod(blocks_of_part(problem, config)), cut(problem, config)
    room = device.multiprocessors * min_blocks_per_sm(problem, config) / blocks
    least = ceil_div(problem.n * prod(problem.output), MOST_PART_PIXELS * GROUP)
    most = min(chunks, int(2 * room), LARGEST_CLUSTER) if has_dependent_launches(device.architecture) else 1
    even = max((count for count in range(1, most + 1) if chunks % count == 0), default=1)
    for parts in sorted({most, even, int(room), int(room / 2)}):
        one = replace(config, parts=parts, cluster=True)
        if max(2, least) <= parts <= most and shared_bytes(problem, one) <= device.shared_bytes:
            yield one
    for parts in sorted({max(least, min(chunks, max(1, int(room * share)))) for share in (0.5, 1, 2)}):
        one = replace(config, parts=parts)
        if parts <= chunks and parts * wgrad_parts.part_pitch(problem) * 4 <= wgrad_parts.PARTS_BYTES:
            yield one


class DepthwiseMmaWgrad(CudaAlgorithm[Config]):
    """float16 and bfloat16, one channel a group and one filter of it; both memory orders; strides of up to 4, any
    filter, padding and dilation. Compute capability 8.0 and newer."""

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cuda.depthwise_mma"
    summary: ClassVar[str] = "tensor cores (mma.sync), a filter's row as diagonals of x times dy"
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16")
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise or problem.group_k > 1:
            return "takes one channel a group, and one filter of it"
        if max(problem.stride) > MOST_STRIDE:
            return f"takes strides of up to {MOST_STRIDE}"
        if why := wgrad_parts.rejects(problem):
            return why
        found = (one for block in _blocks(problem) for one in _chunks(problem, block, device))
        return None if any(found) else "has no chunk that fits into shared memory"

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        return [
            one
            for block in _blocks(problem)
            for chunk in _chunks(problem, block, device)
            for one in _splits(problem, chunk, device)
        ]

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Chunks: what comes from memory and what a multiprocessor's warps issue for it, or a block's chain of loads
        and products; the sum of parts."""
        stride_w, (p, _), each = problem.stride[1], problem.output, vector(problem)
        bands, _, chunks = cut(problem, config)
        rows = min(problem.spatial[0], rows_x(problem, config)) if bands == 1 else rows_x(problem, config)
        rows_dy, warps = min(p, config.runs * config.rows), config.threads // LANES
        groups = rows * stride_w * real_groups(problem, config) + rows_dy * config.groups
        turns = config.images * groups * config.channels / each / LANES
        columns = min(problem.spatial[1], GROUP * stride_w * groups_x(problem, config))
        pixels = config.images * (rows * columns + rows_dy * min(problem.output[1], GROUP * config.groups))
        loaded = float(pixels * min(config.channels, problem.c) * problem.itemsize)
        from_l2 = loaded / L2_BYTES[each]
        if problem.layout == "nhwc":
            size = config.channels * problem.itemsize
            from_l2 *= 1 + (SECTOR - gcd(problem.c * problem.itemsize, size, SECTOR)) / size
        loaded *= device.multiprocessors * cycles_us(device) / (device.gbps * 1e3)
        if problem.bytes > ALL_L2:
            loaded *= READ_AGAIN
        loaded = from_l2 if problem.bytes < IN_L2 else joint_us(from_l2, loaded, 3.0)
        tap_tiles, count = stride_w * tiles(problem), config.rows * config.taps_h
        reach = rows_x(problem, replace(config, runs=1))
        matrices: float = (config.rows + 1) // 2 + tap_tiles * min(count, reach)
        if slides(problem, config):
            matrices = (config.rows + 1) // 2 + ceil_div(reach, 2) * (1 + 1 / config.groups)
        products = tap_tiles * count
        steps = ceil_div(ceil_div(config.images * config.runs, PLACES), config.share) * config.groups * config.each
        multiplied = warps * steps * (MATRICES * matrices + PRODUCT * products)
        own = steps * (OWN_MATRICES * matrices + OWN_PRODUCT * products)
        issued = (ISSUE * TURN_INSTRUCTIONS[each] + 4 * each) * turns + multiplied
        alone = WAIT + loaded + TURN * ceil_div(int(turns), warps) + max(multiplied, own)
        blocks = prod(blocks_of_part(problem, config)) * config.parts
        places = cluster_places(device, config.parts if config.cluster else 1)
        share, held = ceil_div(blocks, places), min_blocks_per_sm(problem, config)
        wave = joint_us(min(share, held) * max(loaded, issued), alone, 3.0)
        cycles = ceil_div(share, held) * (ceil_div(chunks, config.parts) * wave + END)
        us = START_US + cycles / cycles_us(device)
        if config.cluster:
            return us + CLUSTER_US
        us -= EARLY_US * begins_early(problem, config, device)
        if config.parts == 1:
            return us
        return us + SECOND_US + 2 * self.workspace_bytes(problem, config, device) / (device.gbps * 1e3)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        """Parts, where a second launch adds them."""
        return config.parts * prod(problem.w_shape) * 4 if config.parts > 1 and not config.cluster else 0

    def source(self, problem: ConvProblem, config: Config) -> Source:
        (stride_h, stride_w), (dilation_h, dilation_w) = problem.stride, problem.dilation
        words: dict[str, int | bool | str] = {
            "LAST": problem.layout == "nhwc", "V": vector(problem), "CHANNELS": config.channels, "EACH": config.each,
            "SHARE": config.share, "R": config.taps_h, "S": problem.kernel[1], "SH": stride_h, "SW": stride_w,
            "DH": dilation_h, "DW": dilation_w, "ROWS": config.rows, "GROUPS": config.groups,
            "REAL_X": real_groups(problem, config), "SLIDES": slides(problem, config),
            "CLUSTER": config.parts if config.cluster else 1,
            "SPLIT": config.parts > 1,
        }  # fmt: skip
        declarations, held = traits(tensor_core_type(problem.dtype), words), min_blocks_per_sm(problem, config)
        name, parameters, cluster = "wgrad_depthwise_mma", "DepthwiseWgradMma", config.parts if config.cluster else 1
        return stub(
            KERNEL, name, "Traits", parameters, config.threads, held, cluster=cluster, declarations=declarations
        )

    def sum_source(self, problem: ConvProblem) -> Source:
        words = template_args(tensor_core_type(problem.dtype), problem.layout == "nhwc", SUM_WARPS)
        return stub(KERNEL, "add_depthwise_parts", words, "DepthwiseWgradMma", SUM_WARPS * LANES)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        second = config.parts > 1 and not config.cluster
        return [self.source(problem, config)] + [self.sum_source(problem)] * second

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[Launch]:
        """The sums, and where parts are in the workspace their sum."""
        source, (pieces, channel_blocks) = self.source(problem, config), blocks_of_part(problem, config)
        bands, strips, chunks = cut(problem, config)
        plane_x, plane_dy = planes(problem, config)
        fields = window.window_fields(problem, source) | {
            "split": config.parts, "channel_blocks": channel_blocks, "pieces": pieces, "images": config.images,
            "runs": config.runs, "bands": bands, "strips": strips, "chunks": chunks,
            "rows_x": rows_x(problem, config), "image_x": image_x(problem, config), "plane_x": plane_x,
            "plane_dy": plane_dy,
        }  # fmt: skip
        names = {"parts": "workspace"}
        count = pieces * channel_blocks * config.parts
        shared = shared_bytes(problem, config)
        # Of several blocks each, and of clusters, it took longer (1.03 to 1.09).
        balance = int(count <= device.multiprocessors and not config.cluster)
        fields["early"] = int(begins_early(problem, config, device))
        shape = (count, 1, 1), config.threads, shared
        found = [Launch(source, fields, *shape, dependent=True, names_of=names, balance=balance)]
        if config.parts > 1 and not config.cluster:
            grid = (ceil_div(prod(problem.w_shape), LANES), 1, 1)
            second = self.sum_source(problem), fields, grid, SUM_WARPS * LANES
            found.append(Launch(*second, dependent=True, names_of=names))
        return found

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        launches = self.launches(problem, config, device)
        return WgradPlan(problem, device, launches, self.workspace_bytes(problem, config, device))


def real_groups(problem: ConvProblem, config: Config) -> int:
    """Groups of a row of x that may have columns of the image."""
    most = groups_x(problem, config)
    if cut(problem, config)[1] > 1:
        return most
    return min(most, ceil_div(problem.padding[1][0] + problem.spatial[1], GROUP * problem.stride[1]))
