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
from typing import ClassVar, Final

from tapwise.algorithm import Device
from tapwise.ops.conv.cuda.wgrad_depthwise_mma_sp_blocks import Config, tiles, unrolled
from tapwise.ops.conv.cuda.wgrad_stages import Cost, StagedWgrad
from tapwise.ops.conv.cuda.wgrad_stages_blocks import Rows
from tapwise.ops.conv.problem import ConvProblem

# Fitted to times of 434 configs on 31 layers (H200), and from there to 290 on 21 that were drawn. A load is of a word a
# lane.
COST: Final = Cost(
    load=0.673, product=1.36, pixel=1.85, pixel_bytes=0.0178, line=2.38, l2_bytes=27.9, stage=217.0, own_load=7.18,
    own_product=9.98, end=1760.0, code=5.44, start_us=0.628, second_us=1.83, parts_gbps=999.0, exchange_us=0.779,
    power=10.9,
)  # fmt: skip
# Where pixels are odd multiples of 8 bytes: to 441 configs on 12 layers, and 120 on 9. Loads of a warp meet in some
# banks.
HALVES_COST: Final = Cost(
    load=2.26, product=1.16, pixel=3.82, pixel_bytes=0.0112, line=0.0, l2_bytes=31.6, stage=128.0, own_load=21.3,
    own_product=8.41, end=2070.0, code=3.32, start_us=0.808, second_us=1.45, parts_gbps=1720.0, exchange_us=1.34,
    power=2.7,
)  # fmt: skip


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
