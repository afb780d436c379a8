"""cuda.narrow_groups of wgrad: groups of few channels, of one too, on tensor cores, pixels read as they lie.

Eight channels of eight pixels are a matrix as it lies in shared memory, and two of them, a tap apart, are half of a
product's operand; dy's are the other one. Rows of x and dy come by TMA, each once for all taps, and go to registers
once; where channels are no multiple of 8, warps copy them. The sum over pixels is split among warps and blocks, whose
sums are added in a fixed order: by a second launch, or by the blocks, which then are a cluster and send them to each
other.

The floor is the bytes of x and dy. A product of 2 x 8 x 8 x 16 is two taps of 16 pixels and 8 channels, whatever the
groups: 7x7 takes 28 of them for 128 elements of dy, which takes longer than memory does.

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
from tapwise.cuda.jit.tensor_map import TensorMap
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import template_args, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import boxes, wgrad_parts, window
from tapwise.ops.conv.cuda.costs import (
    MORE_BYTES,
    REGISTERS,
    SHARED_BYTES,
    blocks_of,
    cluster_places,
    cycles_us,
    joint_us,
)
from tapwise.ops.conv.cuda.gradients import MOST_PART_PIXELS, WgradPlan
from tapwise.ops.conv.problem import ConvProblem

KERNEL: Final = "ops/conv/cuda/wgrad_narrow_groups.cu"
GROUPS: Final = (1, 2, 4, 8, 16)
# Channels of a matrix, columns of a unit, lanes of a warp; bytes that a stage's boxes begin at multiples of.
OCTET, UNIT, LANES, ALIGNED = 8, 8, 32, 1024
# Of a block: channels, warps at least and at most; images of a set; rows of a stage, stages.
CHANNELS, LEAST_WARPS, MOST_WARPS = (64, 32, 16), 2, 16
IMAGES, ROWS, MOST_STAGES = (1, 2, 4, 8), (8, 7, 4, 2, 1), 8
# Units of a stage; pairs of units of a warp; products that are unrolled; bytes of a stage.
MOST_UNITS, MOST_PAIRS, MOST_PRODUCTS, MOST_STAGE = 16, 8, 420, 48 << 10
# Registers of a thread: sums at most, what it has beside sums and rows of dy, more where several blocks find room, all
# at most.
MOST_SUMS, OTHER_REGISTERS, SPARE, MOST_REGISTERS = 128, 42, 4, 248
# Warps that copy, by the bytes that pixels begin at multiples of; the registers of their threads, and what threads that
# multiply take more beside them (without it some configs spill).
COPIERS: Final = {16: (1,), 8: (4, 8), 4: (4, 8)}
COPIER_REGISTERS, BESIDE_COPIERS = 64, 24
# Rows of dy of a part at least; warps of a block that adds parts, and threads of all of them that share elements.
LEAST_ROWS, SUM_WARPS, MOST_ADDERS = 2, 8, 1 << 18
# Of the cost model, fitted to times of 2,000 configs on 80 layers (H200). Cycles of a multiprocessor: four matrices of
# an operand, a product, a pixel of a box and 32 bytes of it; bytes of a cycle from L2, and of a sector; of a warp
# alone: a stage, four matrices, a product; a block's begin and end.
MATRICES, PRODUCT, PIXEL, PIXEL_BYTES, L2_BYTES, SECTOR = 3.5, 0.91, 1.78, 0.147, 17.0, 32
STAGE, OWN_MATRICES, OWN_PRODUCT, END = 81.0, 9.2, 5.3, 1780.0
# Where warps copy (fitted to 640 configs on 14 layers): cycles of a request of a warp, of one and of a stage for a warp
# alone, and from a stage's copies to their arrival.
REQUEST, OWN_REQUEST, COPIED_STAGE, ARRIVAL = 17.0, 60.0, 600.0, 3000.0
# Microseconds of begin and end, of the second launch; gigabytes of parts a second.
START_US, SECOND_US, PARTS_GBPS = 1.22, 1.34, 1460.0
# Blocks of a cluster that add parts, and microseconds of it (of 0.3 to 1.7 the one that chooses best on 14 layers).
CLUSTERS: Final = (2, 4, 8)
EXCHANGE_US: Final = 0.5
# How sharply the larger of what overlaps decides.
POWER: Final = 1.74


@dataclass(frozen=True)
class Config(BaseConfig):
    """A block has `channels`, `share` warps the same; strips of `units` of 8 columns, sets of so many `images`, stages
    of so many `rows` of dy; sums of taps_h rows of taps. `parts` of the sum, which a second launch adds, or, where they
    are a `cluster`, its blocks. `copiers` warps bring rows: one by TMA, more where pixels begin within 16 bytes."""

    channels: int
    share: int
    units: int
    images: int
    rows: int
    taps_h: int
    stages: int
    parts: int
    cluster: bool = False
    copiers: int = 1

    @property
    def blocks_of_cluster(self) -> int:
        return self.parts if self.cluster else 1

    @property
    def has_second(self) -> bool:
        """Whether a second launch adds parts."""
        return self.parts > 1 and not self.cluster

    @property
    def consumers(self) -> int:
        return LANES * self.channels // OCTET * self.share

    @property
    def threads(self) -> int:
        """Those that multiply, and those that copy."""
        return self.consumers + LANES * self.copiers


def tap_pairs(problem: ConvProblem, taps_h: int) -> int:
    """Of so many rows of taps."""
    return taps_h * ceil_div(problem.kernel[1], 2)


def wide(problem: ConvProblem) -> int:
    """Eights of filters that eight channels meet."""
    return max(1, problem.group_c // OCTET)


def pairs(config: Config) -> int:
    """Of units of a warp."""
    return config.units * config.images // (2 * config.share)


def live_rows(problem: ConvProblem, config: Config) -> int:
    """Rows of dy that a row of x meets."""
    return (config.taps_h - 1) * problem.dilation[0] // problem.stride[0] + 1


def sums(problem: ConvProblem, taps_h: int) -> int:
    """Registers of a thread."""
    return 4 * wide(problem) * tap_pairs(problem, taps_h)


def registers(problem: ConvProblem, config: Config) -> int:
    """Of a thread, about: sums, rows of dy, what else it has."""
    live = 2 * live_rows(problem, config) * pairs(config) * wide(problem)
    # Places of a row's taps.
    more = 8 * max(0, ceil_div(problem.kernel[1], 2) - 4)
    multiplying = sums(problem, config.taps_h) + live + more + OTHER_REGISTERS
    return max(multiplying + BESIDE_COPIERS, COPIER_REGISTERS) if config.copiers > 1 else multiplying


def aligned(problem: ConvProblem) -> int:
    """Bytes that pixels begin at multiples of, up to 16."""
    return gcd(problem.c * problem.itemsize, 16)


def columns_x(problem: ConvProblem, config: Config) -> int:
    """Of x in a stage: those that its units meet, in eights."""
    reach = (UNIT * config.units - 1) * problem.stride[1] + (problem.kernel[1] - 1) * problem.dilation[1] + 1
    return round_up(reach, 8)


def box_bytes(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """Of a stage, of x and of dy."""
    pixel = config.channels * problem.itemsize * config.images * config.rows
    return pixel * problem.stride[0] * columns_x(problem, config), pixel * UNIT * config.units


def stage_bytes(problem: ConvProblem, config: Config) -> int:
    return sum(round_up(size, ALIGNED) for size in box_bytes(problem, config))


def barriers_at(problem: ConvProblem, config: Config) -> int:
    """Bytes of stages, or of the sums that take their place at the end: those of warps, and those that a block of a
    cluster adds."""
    kept = config.channels * problem.group_c * config.taps_h * problem.kernel[1]
    received = config.parts * ceil_div(kept, config.parts) if config.cluster else 0
    return round_up(max(config.stages * stage_bytes(problem, config), 4 * (config.share * kept + received)), 8)


def shared_bytes(problem: ConvProblem, config: Config) -> int:
    """Those, and barriers."""
    return barriers_at(problem, config) + 16 * config.stages + 8 * config.cluster


def min_blocks_per_sm(problem: ConvProblem, config: Config) -> int:
    """Blocks that find room on a multiprocessor."""
    return blocks_of(registers(problem, config) + SPARE, config.threads, shared_bytes(problem, config))


def strips_of(problem: ConvProblem, config: Config) -> int:
    return ceil_div(problem.output[1], UNIT * config.units)


def all_rows(problem: ConvProblem, config: Config) -> int:
    """Of dy, of all sets of images and strips."""
    return problem.output[0] * ceil_div(problem.n, config.images) * strips_of(problem, config)


def blocks_of_part(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """Pieces of a filter, blocks of channels."""
    return ceil_div(problem.kernel[0], config.taps_h), ceil_div(problem.c, config.channels)


def _shapes(problem: ConvProblem) -> Iterator[Config]:
    """Channels, warps, units, images: all but rows, stages and parts."""
    r, q = problem.kernel[0], ceil_div(problem.output[1], UNIT)
    taps = (ceil_div(r, count) for count in range(1, r + 1))
    taps_h = next((one for one in taps if sums(problem, one) <= MOST_SUMS), None)
    if taps_h is None:
        return
    even = {ceil_div(q, ceil_div(q, most)) for most in range(1, MOST_UNITS + 1)} if q else {1}
    counts = sorted(even | {2 * ceil_div(q, 2)})
    for channels in CHANNELS:
        if channels % problem.group_c or (channels > CHANNELS[-1] and channels >= 2 * problem.c):
            continue
        for share in (1, 2, 4):
            if not LEAST_WARPS <= channels // OCTET * share <= MOST_WARPS:
                continue
            for units in counts:
                for images, copiers in product(IMAGES, COPIERS[aligned(problem)]):
                    one = Config(channels, share, units, images, 1, taps_h, 2, 1, copiers=copiers)
                    if _is_even(one) and images < 2 * problem.n + (units % 2) * 2:
                        yield one


def _is_even(config: Config) -> bool:
    """Whether warps have as many pairs of units each, of whole images or of the same part of one."""
    if config.units * config.images % (2 * config.share):
        return False
    own, in_row = pairs(config), config.units if config.units % 2 else config.units // 2
    return own <= MOST_PAIRS and config.units * config.images <= MOST_UNITS and (own % in_row == 0 or in_row % own == 0)


def _tiles(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """All but the parts: stages of as many rows as are unrolled, for one block a multiprocessor, two and three."""
    for shape in _shapes(problem):
        most = min(MOST_REGISTERS, REGISTERS // round_up(shape.threads, 4 * LANES) // 8 * 8)
        if registers(problem, shape) > most or max(columns_x(problem, shape), problem.stride[0]) > boxes.MOST:
            continue
        products = pairs(shape) * tap_pairs(problem, shape.taps_h) * wide(problem)
        for rows in ROWS:
            one = replace(shape, rows=rows)
            large = stage_bytes(problem, one) > MOST_STAGE or rows * problem.stride[0] > boxes.MOST
            if rows > 1 and (rows * products > MOST_PRODUCTS or large or rows > problem.output[0]):
                continue
            for beside in (1, 2, 3):
                room = min(device.shared_bytes, SHARED_BYTES // beside - MORE_BYTES)
                stages = min(MOST_STAGES, room // (stage_bytes(problem, one) + 16))
                deep = replace(one, stages=stages)
                held = blocks_of(registers(problem, one) + SPARE, one.threads)
                if stages > 1 and beside <= held and shared_bytes(problem, deep) <= room:
                    yield deep


class NarrowGroupsWgrad(CudaAlgorithm[Config]):
    """float16 and bfloat16, channels last, groups of 1, 2, 4, 8 or 16 channels and as many filters, channels
    in twos; any filter, stride, padding and dilation of which a block's rows find room. Compute capability 9.0 and
    newer."""

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cuda.narrow_groups"
    summary: ClassVar[str] = "tensor cores (mma.sync) on pixels as they lie, eights of channels, by TMA"
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16")
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if problem.layout != "nhwc":
            return "takes channels last"
        if problem.groups == 1 or problem.group_c not in GROUPS or problem.group_k != problem.group_c:
            return "takes groups of 1, 2, 4, 8 or 16 channels and as many filters, several of them"
        if problem.c % 2:
            return "takes channels in twos"
        if not has_dependent_launches(device.architecture):
            return "takes GPUs of compute capability 9.0 and newer"
        if why := wgrad_parts.rejects(problem):
            return why
        return None if any(_tiles(problem, device)) else "has no block that fits into registers and shared memory"

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        return list(dict.fromkeys(one for tile in _tiles(problem, device) for one in _splits(problem, tile, device)))

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Blocks' stages: what warps load and multiply, what comes from L2, a warp's chain; parts and their launch."""
        work = _Work.of(problem, config)
        warps, size = config.consumers // LANES, config.channels * problem.itemsize
        issued = warps * (MATRICES * work.matrices + PRODUCT * work.products)
        sectors = 1 + (SECTOR - gcd(problem.c * problem.itemsize, size, SECTOR)) / size
        loaded = max(work.bytes * sectors / L2_BYTES, work.box_pixels * (PIXEL + PIXEL_BYTES * size / 32))
        own = STAGE * work.stages + OWN_MATRICES * work.matrices + OWN_PRODUCT * work.products
        if config.copiers > 1:
            requests = work.box_pixels * size / (aligned(problem) * LANES)
            loaded = REQUEST * requests
            copied = OWN_REQUEST * requests / config.copiers + COPIED_STAGE * work.stages
            own = max(own, copied, ARRIVAL * work.stages / (config.stages - 1))

        def wave(blocks: int) -> float:
            return joint_us(joint_us(blocks * issued, blocks * loaded, POWER), own, POWER) + END if blocks else 0.0

        blocks = prod(blocks_of_part(problem, config)) * config.parts
        places = cluster_places(device, config.blocks_of_cluster)
        share, held = ceil_div(blocks, places), min_blocks_per_sm(problem, config)
        us = START_US + (share // held * wave(held) + wave(share % held)) / cycles_us(device)
        if not config.has_second:
            return us + EXCHANGE_US * config.cluster
        return us + SECOND_US + 2 * self.workspace_bytes(problem, config, device) / (PARTS_GBPS * 1e3)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return config.parts * prod(problem.w_shape) * 4 if config.has_second else 0

    def source(self, problem: ConvProblem, config: Config) -> Source:
        (stride_h, stride_w), (dilation_h, dilation_w) = problem.stride, problem.dilation
        words: dict[str, int | bool | str] = {
            "CHANNELS": config.channels, "GROUP": problem.group_c, "SHARE": config.share, "UNITS": config.units,
            "IMAGES": config.images, "ROWS": config.rows, "STAGES": config.stages, "R": config.taps_h,
            "S": problem.kernel[1], "SH": stride_h, "SW": stride_w, "DH": dilation_h, "DW": dilation_w,
            "SPLIT": config.has_second, "CLUSTER": config.blocks_of_cluster, "COPIERS": config.copiers,
            "ALIGNED": aligned(problem),
        }  # fmt: skip
        declarations, held = traits(tensor_core_type(problem.dtype), words), min_blocks_per_sm(problem, config)
        name, parameters = "wgrad_narrow_groups", "NarrowGroupsWgrad"
        return stub(
            KERNEL, name, "Traits", parameters, config.threads, held, cluster=config.blocks_of_cluster,
            declarations=declarations,
        )  # fmt: skip

    def sum_source(self, problem: ConvProblem, config: Config) -> Source:
        slices = slices_of(problem, config)
        words = template_args(tensor_core_type(problem.dtype), problem.group_c, SUM_WARPS, slices)
        return stub(KERNEL, "add_narrow_groups_parts", words, "NarrowGroupsWgrad", SUM_WARPS * LANES)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        return [self.source(problem, config)] + [self.sum_source(problem, config)] * config.has_second

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[Launch]:
        """The sums, and where there are parts their sum."""
        source, (pieces, channel_blocks) = self.source(problem, config), blocks_of_part(problem, config)
        rows, more = divmod(all_rows(problem, config), config.parts)
        fields = window.window_fields(problem, source) | {
            "split": config.parts, "channel_blocks": channel_blocks, "pieces": pieces,
            "sets": ceil_div(problem.n, config.images), "part_rows": rows, "more_parts": more,
            "barriers_at": barriers_at(problem, config),
        }  # fmt: skip
        maps = maps_of(problem, config) if config.copiers == 1 else {}
        names = {"map_x": "x", "map_dy": "w", "parts": "workspace"}
        grid, shared = (pieces * channel_blocks * config.parts, 1, 1), shared_bytes(problem, config)
        found = [Launch(source, fields, grid, config.threads, shared, maps, dependent=True, names_of=names)]
        if config.has_second:
            each = LANES * SUM_WARPS // slices_of(problem, config)
            grid, second = (ceil_div(prod(problem.w_shape), each), 1, 1), self.sum_source(problem, config)
            found.append(Launch(second, fields, grid, SUM_WARPS * LANES, 0, maps, dependent=True, names_of=names))
        return found

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        launches = self.launches(problem, config, device)
        return WgradPlan(problem, device, launches, self.workspace_bytes(problem, config, device))


def maps_of(problem: ConvProblem, config: Config) -> dict[str, TensorMap]:
    """Of x and dy: a stage's rows of a strip of a set of images."""

    def one(sizes: tuple[int, ...], columns: int, rows: int) -> TensorMap:
        (high, wide), pixel = sizes, problem.c * problem.itemsize
        strides, box = (pixel, pixel * wide, pixel * wide * high), (config.channels, columns, rows, config.images)
        swizzle = config.channels * problem.itemsize
        return TensorMap(problem.dtype, (problem.c, wide, high, problem.n), strides, box, swizzle_bytes=swizzle)

    map_x = one(problem.spatial, columns_x(problem, config), config.rows * problem.stride[0])
    return {"map_x": map_x, "map_dy": one(problem.output, UNIT * config.units, config.rows)}


@dataclass(frozen=True)
class _Work:
    """Of a block, in the mean: stages; of a warp, matrices by fours and products; bytes that come, and pixels of
    their boxes."""

    stages: float
    matrices: float
    products: float
    bytes: float
    box_pixels: float

    @classmethod
    def of(cls, problem: ConvProblem, config: Config) -> _Work:
        (stride_h, stride_w), (p, q), (h, w), s = problem.stride, problem.output, problem.spatial, problem.kernel[1]
        rows = all_rows(problem, config) / config.parts
        # Runs of rows of an image: parts may begin and end within one.
        runs = max(1.0, rows / p) if rows % p == 0 or p % rows == 0 else (rows + p - 1) / p
        each, stage = rows / runs, config.rows * stride_h
        more = max(0, (config.taps_h - 1) * problem.dilation[0] + 1 - stride_h)
        real = min(h, each * stride_h + more)
        multiplied = runs * (round_up(h, stage) if each >= p else real + stage / 2)
        stages = runs * ((each * stride_h + more) / stage + 0.5)
        own, strips, channels = pairs(config), strips_of(problem, config), config.channels
        matrices = own * (multiplied * s * gcd(stride_w, 2) + stages * config.rows * wide(problem)) / 2
        products = multiplied / stride_h * own * tap_pairs(problem, config.taps_h) * wide(problem)
        across = min(w / strips + (s - 1 if strips > 1 else 0), columns_x(problem, config))
        pixels = min(config.images, problem.n) * runs * (real * across + each * min(q / strips, UNIT * config.units))
        box_pixels = config.images * runs * (real * columns_x(problem, config) + each * UNIT * config.units)
        there = problem.c / round_up(problem.c, channels) * channels
        return cls(stages, matrices, products, pixels * there * problem.itemsize, box_pixels)


def slices_of(problem: ConvProblem, config: Config) -> int:
    """Warps that share the parts of an element: as many as leave each two parts, of many elements fewer."""
    most = max(1, min(SUM_WARPS, config.parts // 2, MOST_ADDERS // prod(problem.w_shape)))
    return int(1 << (most.bit_length() - 1))


def _splits(problem: ConvProblem, config: Config, device: Device) -> Iterator[Config]:
    """Parts that fill the device once, twice or half."""
    room = device.multiprocessors * min_blocks_per_sm(problem, config) / prod(blocks_of_part(problem, config))
    least = ceil_div(problem.n * prod(problem.output), MOST_PART_PIXELS * config.share)
    most = max(least, all_rows(problem, config) // LEAST_ROWS)
    for parts in dict.fromkeys(min(max(least, int(room * share)), most) for share in (1, 0.5, 2)):
        one = replace(config, parts=parts)
        if parts * wgrad_parts.part_pitch(problem) * 4 <= wgrad_parts.PARTS_BYTES:
            yield one
    for parts in CLUSTERS:
        one = replace(config, parts=parts, cluster=True)
        if least <= parts <= most and shared_bytes(problem, one) <= device.shared_bytes:
            yield one
