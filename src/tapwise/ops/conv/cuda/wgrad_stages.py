"""What weight gradients of rows that come in stages share (wgrad_stages.cuh): what they refuse, their cost, launches.

Rows of x and dy come by TMA, each once for all taps; where channels are no multiple of 8, warps copy them. The sum over
pixels is split among warps and blocks, whose sums are added in a fixed order: by a second launch, or by the blocks,
which then are a cluster and send them to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import ClassVar, Final

from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.jit.occupancy import cluster_places
from tapwise.cuda.jit.tensor_map import TensorMap
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import wgrad_parts, window
from tapwise.ops.conv.cuda.costs import cycles_us, joint_us
from tapwise.ops.conv.cuda.gradients import WgradPlan
from tapwise.ops.conv.cuda.wgrad_stages_blocks import (
    LANES,
    C,
    Rows,
    StagesConfig,
    aligned,
    all_rows,
    barriers_at,
    blocks_of_part,
    in_halves,
    min_blocks_per_sm,
    shared_bytes,
    splits,
    sums_of,
)
from tapwise.ops.conv.problem import ConvProblem

# Warps of a block that adds parts, and threads of all of them that share elements.
SUM_WARPS, MOST_ADDERS = 8, 1 << 18
# Rows of dy that a run counts more when rows are shared out.
RUN_ROWS: Final = 2
# How sharply the larger of blocks and memory decides (of 2 to 6 what is right for most of 23 layers).
MEMORY_POWER: Final = 4.0
# Bytes of a sector of L2, of a line of memory.
SECTOR, LINE = 32, 128


@dataclass(frozen=True)
class Cost:
    """Constants of a cost model. Cycles of a multiprocessor: a load of operands, a product, a pixel of a box, 32
    bytes of it and a second line of memory that it lies in; bytes of a cycle from L2; cycles of a warp alone: a stage,
    a load, a product; a block's begin and end, and instructions of a product that come for the first time.
    Microseconds of begin and end, of the second launch; gigabytes of parts a second; microseconds of a cluster that
    adds parts; how sharply the larger of what overlaps decides."""

    load: float
    product: float
    pixel: float
    pixel_bytes: float
    line: float
    l2_bytes: float
    stage: float
    own_load: float
    own_product: float
    end: float
    code: float
    start_us: float
    second_us: float
    parts_gbps: float
    exchange_us: float
    power: float


# Where warps copy (fitted to 300 configs of cuda.narrow_groups on 52 layers): cycles of a line that a request meets, of
# a request for a warp alone, and from a stage's copies to their arrival.
REQUEST_LINE, OWN_REQUEST, ARRIVAL = 1.9, 50.0, 3050.0


class StagedWgrad(CudaAlgorithm[C]):
    """float16 and bfloat16, channels last, channels in twos. Compute capability 9.0 and newer."""

    operator: ClassVar[str] = "wgrad"
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16")
    axes: ClassVar[tuple[int, ...]] = (2,)
    kernel: ClassVar[str]
    cost: ClassVar[Cost]
    # Of pixels that begin within 16 bytes.
    unaligned_cost: ClassVar[Cost]

    def tiles(self, problem: ConvProblem, device: Device) -> Iterator[C]:
        """All but the parts."""
        raise NotImplementedError

    def work(self, problem: ConvProblem, config: C, rows: Rows) -> tuple[float, float]:
        """Of a warp: loads of operands and products."""
        raise NotImplementedError

    def unrolled(self, problem: ConvProblem, config: C) -> int:
        """Products that are written out."""
        return 0

    def words(self, problem: ConvProblem, config: C) -> dict[str, int | bool | str]:
        """Of the kernel's traits, beside those of all."""
        raise NotImplementedError

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if problem.layout != "nhwc":
            return "takes channels last"
        if problem.c % 2:
            return "takes channels in twos"
        if not has_dependent_launches(device.architecture):
            return "takes GPUs of compute capability 9.0 and newer"
        if why := wgrad_parts.rejects(problem):
            return why
        return None if any(self.tiles(problem, device)) else "has no block that fits into registers and shared memory"

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[C]:
        found = (one for tile in self.tiles(problem, device) for one in splits(problem, tile, device))
        return list(dict.fromkeys(found))

    def predict_us(self, problem: ConvProblem, config: C, device: Device) -> float:
        """Blocks' stages: what warps load and multiply, what comes from L2, a warp's chain; parts and their launch."""
        cost = self.cost if aligned(problem) == 16 else self.unaligned_cost
        rows = Rows.of(problem, config)
        loads, products = self.work(problem, config, rows)
        warps, size = config.consumers // LANES, config.pixel_bytes(problem)
        issued = warps * (cost.load * loads + cost.product * products)
        sectors = 1 + (SECTOR - gcd(problem.c * problem.itemsize, size, SECTOR)) / size
        # Pieces that begin anywhere lie in two lines (size - step) / LINE of the time; over size fits times better.
        lines = (size - min(size, gcd(problem.c * problem.itemsize, LINE))) / size
        of_boxes = rows.box_pixels * (cost.pixel + cost.pixel_bytes * size / 32 + cost.line * lines)
        loaded = max(rows.bytes * sectors / cost.l2_bytes, of_boxes)
        own = cost.stage * rows.stages + cost.own_load * loads + cost.own_product * products
        if config.copiers > 1:
            boxes = config.columns(problem), config.box_rows(problem)
            pixels = rows.stages * config.images * sum(map(prod, zip(*boxes, strict=True)))
            loaded = max(loaded, REQUEST_LINE * pixels * (1 + lines * size / LINE))
            requests = pixels * size / (aligned(problem) * LANES)
            own = max(own, OWN_REQUEST * requests / config.copiers, ARRIVAL * rows.stages / (config.stages - 1))

        alone = cost.end + cost.code * self.unrolled(problem, config)

        def wave(blocks: int) -> float:
            both = joint_us(blocks * issued, blocks * loaded, cost.power)
            return joint_us(both, own, cost.power) + alone if blocks else 0.0

        blocks = prod(blocks_of_part(problem, config)) * config.parts
        places = cluster_places(device, config.blocks_of_cluster)
        share, held = ceil_div(blocks, places), min_blocks_per_sm(problem, config)
        busy = (share // held * wave(held) + wave(share % held)) / cycles_us(device)
        us = cost.start_us + joint_us(busy, problem.bytes / (device.gbps * 1e3), MEMORY_POWER)
        if not config.has_second:
            return us + cost.exchange_us * config.cluster
        return us + cost.second_us + 2 * self.workspace_bytes(problem, config, device) / (cost.parts_gbps * 1e3)

    def workspace_bytes(self, problem: ConvProblem, config: C, device: Device) -> int:
        return config.parts * prod(problem.w_shape) * 4 if config.has_second else 0

    def source(self, problem: ConvProblem, config: C) -> Source:
        (stride_h, stride_w), (dilation_h, dilation_w) = problem.stride, problem.dilation
        words = self.words(problem, config) | {
            "CHANNELS": config.channels, "SHARE": config.share, "IMAGES": config.images, "ROWS": config.rows,
            "STAGES": config.stages, "R": config.taps_h, "S": problem.kernel[1], "SH": stride_h, "SW": stride_w,
            "DH": dilation_h, "DW": dilation_w, "SPLIT": config.has_second, "CLUSTER": config.blocks_of_cluster,
            "COPIERS": config.copiers, "ALIGNED": aligned(problem),
            "PITCH": config.term_pitch(sums_of(problem, config)),
        }  # fmt: skip
        words |= dict(zip(("TAKES", "LEAVES"), config.registers_by_role, strict=True))
        held = min_blocks_per_sm(problem, config)
        words["EARLY"] = wgrad_parts.begins_early(problem, held)
        declarations = traits(tensor_core_type(problem.dtype), words)
        return stub(
            f"ops/conv/cuda/{self.kernel}.cu", self.kernel, "Traits", "StagedWgrad", config.threads, held,
            cluster=config.blocks_of_cluster, declarations=declarations,
        )  # fmt: skip

    def sources(self, problem: ConvProblem, config: C) -> list[Source]:
        return [self.source(problem, config)] + [sum_source(problem, config)] * config.has_second

    def launches(self, problem: ConvProblem, config: C, device: Device) -> list[Launch]:
        """The sums, and where there are parts their sum."""
        source, (pieces, channel_blocks) = self.source(problem, config), blocks_of_part(problem, config)
        rows, more = divmod(all_rows(problem, config, RUN_ROWS), config.parts)
        fields = window.window_fields(problem, source) | {
            "split": config.parts, "channel_blocks": channel_blocks, "pieces": pieces,
            "sets": ceil_div(problem.n, config.images), "run_rows": RUN_ROWS,
            "part_rows": rows, "more_parts": more, "barriers_at": barriers_at(problem, config),
        }  # fmt: skip
        maps = maps_of(problem, config) if config.copiers == 1 else {}
        names = {name: "x" if name.startswith("map_x") else "w" for name in maps} | {"parts": "workspace"}
        grid, shared = (pieces * channel_blocks * config.parts, 1, 1), shared_bytes(problem, config)
        found = [Launch(source, fields, grid, config.threads, shared, maps, dependent=True, names_of=names)]
        if config.has_second:
            each = LANES * SUM_WARPS // slices_of(problem, config)
            grid, second = (ceil_div(prod(problem.w_shape), each), 1, 1), sum_source(problem, config)
            found.append(Launch(second, fields, grid, SUM_WARPS * LANES, 0, maps, dependent=True, names_of=names))
        return found

    def plan(self, problem: ConvProblem, config: C, device: Device) -> Plan:
        launches = self.launches(problem, config, device)
        return WgradPlan(problem, device, launches, self.workspace_bytes(problem, config, device))


def sum_source(problem: ConvProblem, config: StagesConfig) -> Source:
    slices = slices_of(problem, config)
    early = wgrad_parts.begins_early(problem, min_blocks_per_sm(problem, config))
    words = template_args(tensor_core_type(problem.dtype), problem.group_c, SUM_WARPS, slices, early)
    return stub("ops/conv/cuda/wgrad_stages.cuh", "add_staged_parts", words, "StagedWgrad", SUM_WARPS * LANES)


def slices_of(problem: ConvProblem, config: StagesConfig) -> int:
    """Warps that share the parts of an element: as many as leave each two parts, of many elements fewer."""
    most = max(1, min(SUM_WARPS, config.parts // 2, MOST_ADDERS // prod(problem.w_shape)))
    return int(1 << (most.bit_length() - 1))


def maps_of(problem: ConvProblem, config: StagesConfig) -> dict[str, TensorMap]:
    """Of x and dy: a box's rows of a strip of a set of images. Of pixels of odd multiples of 8 bytes one for every
    second column, row and image, which lie at multiples of 16 from each other: the first axis has what is in front."""
    every, c, size = 2 if in_halves(problem) else 1, problem.c, config.pixel_bytes(problem)

    def one(area: tuple[int, ...], columns: int, rows: int, odd: tuple[int, ...]) -> TensorMap:
        (high, wide), (of_n, of_h, of_w) = area, odd
        counts = [ceil_div(all_ - first, every) for all_, first in zip((wide, high, problem.n), odd[::-1], strict=True)]
        # Where there is no such pixel, no element is one either.
        channels = ((of_n * high + of_h) * wide + of_w + 1) * c if min(counts) else 1
        strides = tuple(every * c * problem.itemsize * pixels for pixels in (1, wide, wide * high))
        box = (size // problem.itemsize, columns // every, rows, config.images // every)
        sizes = (channels, *(max(1, count) for count in counts))
        return TensorMap(problem.dtype, sizes, strides, box, swizzle_bytes=size)

    (columns_x, columns_dy), (rows_x, rows_dy) = config.columns(problem), config.box_rows(problem)
    found = {}
    for i, odd in enumerate(product(range(every), repeat=3)):
        found[f"map_x{i}_"] = one(problem.spatial, columns_x, rows_x, odd)
        found[f"map_dy{i}_"] = one(problem.output, columns_dy, rows_dy, odd)
    return found
