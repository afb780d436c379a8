"""cuda.depthwise of wgrad: the weight gradient of depthwise convolution, x and dy read once for all taps.

All sums of a filter, or of a piece of a large one, are a thread's; it goes down columns of dy, whose rows under way are
in registers too, while rows of x and dy come through shared memory. The sum over pixels is split among blocks: their
parts go to the workspace and are added in a fixed order.

The floor is the larger of the bytes of x and dy over the memory's bandwidth and n * k * p * q * r * s multiply-adds
over 128 a cycle and multiprocessor. In float16 on an H200 they meet at 5 x 5: 3 x 3 is bound by memory, 7 x 7 by
multiply-adds, of which all else that a thread does is 15 to 40 % more.

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014 (weight gradients as sums over pixels).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar, Final

from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.jit.tensor_map import WORDS, TensorMap
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import streamed_rows, wgrad_parts, window
from tapwise.ops.conv.cuda import wgrad_depthwise_blocks as blocks
from tapwise.ops.conv.cuda.costs import cycles_us, joint_us
from tapwise.ops.conv.cuda.gradients import WgradPlan
from tapwise.ops.conv.cuda.residue_classes import phases, steps
from tapwise.ops.conv.cuda.wgrad_depthwise_blocks import LANES, MOST_STRIDE, Config
from tapwise.ops.conv.problem import ConvProblem

KERNEL: Final = "ops/conv/cuda/wgrad_depthwise.cu"
# Warps of a block that adds parts.
SUM_WARPS: Final = 16
# Fitted to times of 336 configs on 14 layers (H100). Cycles of a multiprocessor: an instruction of a warp, a block's
# stage, a pixel's piece by TMA that is not whole sectors; of a warp alone: an instruction. Instructions of a copy.
ISSUE, STAGE, UNALIGNED, LATENCY, COPY = 0.34, 139.0, 7.5, 2.25, 36
# Times as many instructions where a strip's last columns are not there, and with a stride (10 layers, H200); bytes of a
# sector.
PARTIAL, STRIDED, SECTOR = 1.22, 1.12, 32
# Microseconds of begin and end, anew on 74 layers (H200); of the second launch (assumed: the data tell its sum with the
# first's); how much sooner what is placed early begins (in the mean of 52 layers).
START_US, SECOND_US, EARLY_US = 4.6, 1.0, 0.4


class DepthwiseWgrad(CudaAlgorithm[Config]):
    """One channel a group, any number of filters of it; both memory orders; any filter, padding and dilation."""

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cuda.depthwise"
    summary: ClassVar[str] = "all taps' sums in registers, rows of x and dy streamed through shared memory"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise:
            return "takes one channel a group, and several groups"
        if not streamed_rows.is_small(problem) or blocks.rows_of(problem, 1)[1] >= INDEX_LIMIT:
            return "takes sizes under 2^20, images of fewer than 2^29 elements, fewer than 2^31 rows of dy"
        if max(steps(problem)) > MOST_STRIDE:
            return f"takes strides of up to {MOST_STRIDE}, but for what they share with the dilation"
        return None if any(blocks.tiles(problem, device)) else "has no block that fits into shared memory"

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        return [one for tile in blocks.tiles(problem, device) for one in blocks.split(problem, tile, device)]

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Instructions of a multiprocessor's warps, or a warp's chain of them behind the block's copies; memory; parts,
        which are written and read, and the second launch."""
        stride_h, halves, words = steps(problem)[0], problem.itemsize == 2, 2 if problem.dtype == "f64" else 1
        v, tx, taps = config.channels, config.columns, config.taps_h * config.taps_w
        live = blocks.live_rows(problem, config)
        # Of a row of dy: what is loaded, and instructions.
        seen = blocks.window_columns(problem, config) * stride_h + tx
        instructions: float = taps * tx * v * words + seen * (1 + v * halves) + config.taps_h * 3 + stride_h * 6
        if config.by == "copies":
            instructions += COPY * blocks.copies_of(problem, config) / live
        strip = config.groups * config.columns
        if problem.output[1] % (phases(problem)[1] * strip):
            instructions *= PARTIAL
        if stride_h > 1:
            instructions *= STRIDED
        class_rows, all_rows = blocks.rows_of(problem, strip)
        rows = all_rows / config.parts
        # Every run has some rows of x more, and a stage that is not full.
        runs = 1 + max(0.0, rows - 1) / class_rows
        rows_x = rows * stride_h + runs * max(0, config.taps_h - stride_h)
        copied = STAGE * (rows_x / (live * stride_h) + runs / 2)
        if config.by == "tma" and not blocks.whole_sectors(problem, config, SECTOR):
            copied += UNALIGNED * (rows_x * blocks.columns_x(problem, config) + rows * strip)
        chain = rows_x / stride_h * instructions
        share = ceil_div(blocks.count(problem, config), device.multiprocessors)
        held = blocks.min_blocks_per_sm(problem, config)
        together, warps = min(share, held), config.threads // LANES
        wave = joint_us(together * warps * ISSUE * chain, LATENCY * chain + together * copied, 3.0)
        busy = START_US + ceil_div(share, held) * wave / cycles_us(device)
        parts_us = 0.0
        if config.parts > 1:
            parts_us = SECOND_US + 2 * self.workspace_bytes(problem, config, device) / (device.gbps * 1e3)
        early_us = EARLY_US * wgrad_parts.begins_early(problem, 1)
        return joint_us(busy, problem.bytes / (device.gbps * 1e3), 2.0) + parts_us - early_us

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        """Parts in the accumulator's type."""
        each = prod(problem.w_shape) * (8 if problem.dtype == "f64" else 4)
        return config.parts * each if config.parts > 1 else 0

    def source(self, problem: ConvProblem, config: Config) -> Source:
        (stride_h, stride_w), last = steps(problem), problem.layout == "nhwc"
        (copy_x, copy_dy), (pad_x, pad_dy) = blocks.copy_bytes(problem, config), blocks.pads(problem, config)
        strip = phases(problem)[1] * config.groups * config.columns
        words: dict[str, int | bool | str] = {
            "LAST": last, "R": config.taps_h, "S": config.taps_w, "SH": stride_h, "SW": stride_w,
            "V": config.channels, "TX": config.columns, "LANES": config.lanes, "GROUPS": config.groups,
            "C_X": blocks.channels_x(problem, config), "SAME": problem.group_k == 1, "STAGES": config.stages,
            "BY": config.by.upper(), "COPY_X": copy_x, "COPY_DY": copy_dy, "PAD_X": pad_x, "PAD_DY": pad_dy,
            "MOST_X": problem.spatial[1], "MOST_DY": problem.output[1],
            "WHOLE": problem.output[1] % strip == 0, "SPLIT": config.parts > 1,
        }  # fmt: skip
        declarations, held = traits(tensor_core_type(problem.dtype), words), blocks.min_blocks_per_sm(problem, config)
        name, parameters = "wgrad_depthwise", "DepthwiseWgrad"
        return stub(KERNEL, name, "Traits", parameters, config.threads, held, declarations=declarations)

    def sum_source(self, problem: ConvProblem) -> Source:
        arguments = f"{tensor_core_type(problem.dtype)}, {SUM_WARPS}"
        return stub(KERNEL, "add_wgrad_parts", arguments, "WgradParts", SUM_WARPS * LANES)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        return [self.source(problem, config)] + [self.sum_source(problem)] * (config.parts > 1)

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[Launch]:
        """The parts of the sums, and where there are several their sum."""
        source, split = self.source(problem, config), config.parts > 1
        class_rows, all_rows = blocks.rows_of(problem, config.groups * config.columns)
        fields = window.window_fields(problem, source)
        fields |= dict(zip(("phases_h", "phases_w"), phases(problem), strict=True))
        fields |= dict(zip(("pieces_h", "pieces_w"), blocks.piece_counts(problem, config), strict=True))
        fields |= {
            "multiplier": problem.group_k, "parts": config.parts, "class_rows": class_rows, "all_rows": all_rows,
            "channel_blocks": blocks.channel_blocks(problem, config),
        }  # fmt: skip
        maps: dict[str, TensorMap] = {}
        if config.by == "tma":
            maps = maps_of(problem, config)
        else:
            fields |= {f"{name}{word}": 0 for name in ("map_x", "map_dy") for word in range(WORDS)}
        names = {"map_x": "x", "map_dy": "w", "sums": "workspace" if split else "y"}
        count = blocks.count(problem, config)
        # As launches are balanced, no multiprocessor has more blocks than its share.
        early = int(wgrad_parts.begins_early(problem, 1))
        shape = (count, 1, 1), config.threads, blocks.shared_bytes(problem, config)
        sums = Launch(source, fields | {"early": early}, *shape, maps, dependent=True, names_of=names, balance=1)
        if not split:
            return [sums]
        fields = {"k": problem.k, "taps": prod(problem.kernel), "count": config.parts, "early": early}
        grid = (ceil_div(prod(problem.w_shape), LANES), 1, 1)
        second = self.sum_source(problem), fields, grid, SUM_WARPS * LANES
        return [sums, Launch(*second, dependent=True, names_of={"parts": "workspace"})]

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        launches = self.launches(problem, config, device)
        return WgradPlan(problem, device, launches, self.workspace_bytes(problem, config, device))


def maps_of(problem: ConvProblem, config: Config) -> dict[str, TensorMap]:
    """Of x and dy: a stage's rows of a block's columns and channels."""

    def one(channels: int, sizes: tuple[int, ...], box: tuple[int, int, int]) -> TensorMap:
        (high, wide), pixel = sizes, channels * problem.itemsize
        strides = pixel, pixel * wide, pixel * wide * high
        return TensorMap(problem.dtype, (channels, wide, high, problem.n), strides, (*box, 1), swizzle_bytes=0)

    live = blocks.live_rows(problem, config)
    box_x = blocks.channels_x(problem, config), blocks.columns_x(problem, config), live * steps(problem)[0]
    box_dy = config.channels * config.lanes, config.groups * config.columns, live
    return {"map_x": one(problem.c, problem.spatial, box_x), "map_dy": one(problem.k, problem.output, box_dy)}
