"""cuda.block_reduction of batch normalisation."""

from __future__ import annotations

from typing import ClassVar

from tapwise.ops.batch_norm.cuda_sums import ChannelSums


class BatchNormBlockReduction(ChannelSums):
    """Any sizes, both memory orders; float32, float64, float16 and bfloat16 (in float32)."""

    operator: ClassVar[str] = "batch_norm"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "blocks add up parts of the rows, a second launch the parts, in order"
    sums: ClassVar[str] = "MOMENTS"
    ways: ClassVar[tuple[tuple[int, int], tuple[int, int]]] = (4, 4), (4, 4)


class BatchNormDgradBlockReduction(BatchNormBlockReduction):
    """The same of the gradient's sums."""

    operator: ClassVar[str] = "batch_norm_dgrad"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "the activation's argument worked out again, sums as forward"
    sums: ClassVar[str] = "NORM_GRADIENT"
    ways: ClassVar[tuple[tuple[int, int], tuple[int, int]]] = (4, 2), (2, 3)
