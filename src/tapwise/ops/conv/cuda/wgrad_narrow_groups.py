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

from collections.abc import Iterator
from math import gcd
from typing import ClassVar, Final

from tapwise.algorithm import Device
from tapwise.ops.conv.cuda.wgrad_narrow_groups_blocks import GROUPS, Config, pairs, tap_pairs, tiles, wide
from tapwise.ops.conv.cuda.wgrad_stages import Cost, StagedWgrad
from tapwise.ops.conv.cuda.wgrad_stages_blocks import Rows
from tapwise.ops.conv.problem import ConvProblem

# Fitted to times of 546 configs on 39 layers (H200); a load is of four matrices.
COST: Final = Cost(
    load=3.68, product=1.31, pixel=1.85, pixel_bytes=0.012, line=0.0, l2_bytes=26.7, stage=97.0, own_load=5.26,
    own_product=7.57, end=3380.0, code=2.29, start_us=1.22, second_us=1.41, parts_gbps=1460.0, exchange_us=0.42,
    power=2.78,
)  # fmt: skip
# Where warps copy: to 640 configs on 14 layers.
COPIED_COST: Final = Cost(
    load=3.5, product=0.91, pixel=0.0, pixel_bytes=0.0, line=0.0, l2_bytes=17.0, stage=81.0, own_load=9.2,
    own_product=5.3, end=1780.0, code=0.0, start_us=1.22, second_us=1.34, parts_gbps=1460.0, exchange_us=0.5,
    power=1.74,
)  # fmt: skip


class NarrowGroupsWgrad(StagedWgrad[Config]):
    """float16 and bfloat16, channels last, groups of 1, 2, 4, 8 or 16 channels and as many filters, channels
    in twos; any filter, stride, padding and dilation of which a block's rows find room. Compute capability 9.0 and
    newer."""

    id: ClassVar[str] = "cuda.narrow_groups"
    summary: ClassVar[str] = "tensor cores (mma.sync) on pixels as they lie, eights of channels, by TMA"
    kernel: ClassVar[str] = "wgrad_narrow_groups"
    cost: ClassVar[Cost] = COST
    unaligned_cost: ClassVar[Cost] = COPIED_COST

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if problem.groups == 1 or problem.group_c not in GROUPS or problem.group_k != problem.group_c:
            return "takes groups of 1, 2, 4, 8 or 16 channels and as many filters, several of them"
        return super().rejects(problem, device)

    def tiles(self, problem: ConvProblem, device: Device) -> Iterator[Config]:
        return tiles(problem, device)

    def work(self, problem: ConvProblem, config: Config, rows: Rows) -> tuple[float, float]:
        own, (stride_h, stride_w), s = pairs(config), problem.stride, problem.kernel[1]
        matrices = own * (rows.multiplied * s * gcd(stride_w, 2) + rows.stages * config.rows * wide(problem))
        return matrices / 2, rows.multiplied / stride_h * own * tap_pairs(problem, config.taps_h) * wide(problem)

    def unrolled(self, problem: ConvProblem, config: Config) -> int:
        return config.rows * pairs(config) * tap_pairs(problem, config.taps_h) * wide(problem)

    def words(self, problem: ConvProblem, config: Config) -> dict[str, int | bool | str]:
        return {"GROUP": problem.group_c, "UNITS": config.units, "COLUMNS_X": config.columns(problem)[0]}
