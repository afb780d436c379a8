"""cuda.depthwise_mma_sp of wgrad: depthwise on sparse tensor cores, pixels read as they lie.

A product has places of the images as its inner dimension, each with two channels: columns of x are its columns, the
same columns of dy its rows, once for each channel, with zeros for the other one, which mma.sp leaves out. Its diagonals
are sums of one row of taps. Operands are words of shared memory as TMA leaves them there: nothing is transposed. Rows
of x and dy come once for all taps, and go to registers once.

The floor is the bytes of x and dy. Of 7x7, 14 products have all taps of 128 pixels and two channels, a quarter of what
cuda.narrow_groups needs.

Source: PTX ISA on mma.sp; Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014 (weight gradients as
sums over pixels).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Final

from tapwise.algorithm import Device
from tapwise.ops.conv.cuda.wgrad_depthwise_mma_sp_blocks import Config, tiles, unrolled
from tapwise.ops.conv.cuda.wgrad_stages import Cost, StagedWgrad
from tapwise.ops.conv.cuda.wgrad_stages_blocks import Rows
from tapwise.ops.conv.problem import ConvProblem

# Fitted to times of 434 configs on 31 layers (H200). A load is of a word a lane.
COST: Final = Cost(
    load=0.825, product=1.56, pixel=1.96, pixel_bytes=0.018, line=1.64, l2_bytes=23.5, stage=129.0, own_load=4.83,
    own_product=12.2, end=2510.0, code=3.67, start_us=1.04, second_us=1.98, parts_gbps=1160.0, exchange_us=1.53,
    power=6.0,
)  # fmt: skip
# Where pixels are odd multiples of 8 bytes: to 441 configs on 12 layers. Loads of a warp meet in some banks.
HALVES_COST: Final = replace(COST, load=2.36, own_load=23.3, pixel_bytes=0.011, line=0.0, power=2.38)


class DepthwiseMmaSpWgrad(StagedWgrad[Config]):
    """float16 and bfloat16, channels last, one channel and filter a group, channels in fours, stride 1;
    any filter, padding and dilation of which a block's rows find room. Compute capability 9.0 and newer."""

    id: ClassVar[str] = "cuda.depthwise_mma_sp"
    summary: ClassVar[str] = "diagonals of sparse tensor core products (mma.sp) on pixels as they lie, by TMA"
    kernel: ClassVar[str] = "wgrad_depthwise_mma_sp"
    cost: ClassVar[Cost] = COST
    unaligned_cost: ClassVar[Cost] = HALVES_COST

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise or problem.group_k > 1:
            return "takes groups of one channel and filter, several of them"
        if problem.c % 4:
            return "takes channels in fours"
        if problem.stride != (1, 1):
            return "takes strides of 1"
        return super().rejects(problem, device)

    def tiles(self, problem: ConvProblem, device: Device) -> Iterator[Config]:
        return tiles(problem, device)

    def work(self, problem: ConvProblem, config: Config, rows: Rows) -> tuple[float, float]:
        own = config.each // 2 * config.tiles
        loads = 4 * (rows.multiplied * own + rows.stages * config.rows * config.each // 2)
        return loads, rows.multiplied * own * config.taps_h

    def unrolled(self, problem: ConvProblem, config: Config) -> int:
        return unrolled(problem, config)

    def words(self, problem: ConvProblem, config: Config) -> dict[str, int | bool | str]:
        return {"EACH": config.each, "UNITS": config.units, "WIDTH": config.width, "TILES": config.tiles}
