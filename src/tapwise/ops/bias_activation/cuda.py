"""cuda.block_reduction of bias and activation's gradient."""

from __future__ import annotations

from typing import ClassVar

from tapwise.ops.batch_norm.cuda_sums import ChannelSums


class BiasActivationDgradBlockReduction(ChannelSums):
    """Any sizes, both memory orders; float32, float64, float16 and bfloat16 (in float32)."""

    operator: ClassVar[str] = "bias_activation_dgrad"
    id: ClassVar[str] = "cuda.block_reduction"
    summary: ClassVar[str] = "blocks multiply, write and add up parts of the rows, a second launch adds up the parts"
    sums: ClassVar[str] = "BIAS_GRADIENT"
    ways: ClassVar[tuple[tuple[int, int], tuple[int, int]]] = (4, 3), (4, 3)
