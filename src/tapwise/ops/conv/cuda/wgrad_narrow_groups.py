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

from collections.abc import Sequence
from math import gcd, prod
from typing import ClassVar, Final

from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.jit.tensor_map import TensorMap
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import wgrad_parts, window
from tapwise.ops.conv.cuda.costs import cluster_places, cycles_us, joint_us
from tapwise.ops.conv.cuda.gradients import WgradPlan
from tapwise.ops.conv.cuda.wgrad_narrow_groups_blocks import (
    GROUPS,
    LANES,
    UNIT,
    Config,
    Work,
    aligned,
    all_rows,
    barriers_at,
    blocks_of_part,
    columns_x,
    min_blocks_per_sm,
    shared_bytes,
    splits,
    tiles,
)
from tapwise.ops.conv.problem import ConvProblem

KERNEL: Final = "ops/conv/cuda/wgrad_narrow_groups.cu"
# Warps of a block that adds parts, and threads of all of them that share elements.
SUM_WARPS, MOST_ADDERS = 8, 1 << 18
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
# Microseconds of a cluster that adds parts (of 0.3 to 1.7 the one that chooses best on 14 layers).
EXCHANGE_US: Final = 0.5
# How sharply the larger of what overlaps decides.
POWER: Final = 1.74


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
        return None if any(tiles(problem, device)) else "has no block that fits into registers and shared memory"

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        return list(dict.fromkeys(one for tile in tiles(problem, device) for one in splits(problem, tile, device)))

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Blocks' stages: what warps load and multiply, what comes from L2, a warp's chain; parts and their launch."""
        work = Work.of(problem, config)
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


def slices_of(problem: ConvProblem, config: Config) -> int:
    """Warps that share the parts of an element: as many as leave each two parts, of many elements fewer."""
    most = max(1, min(SUM_WARPS, config.parts // 2, MOST_ADDERS // prod(problem.w_shape)))
    return int(1 << (most.bit_length() - 1))
