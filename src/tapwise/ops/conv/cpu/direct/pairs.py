"""cpu.direct on pairs of channels in bfloat16: a problem of half as many channels, whose elements are pairs.

Channels last, pairs are neighbours in memory, and the input is packed as if it were float32. In NCHW two planes are
interleaved while they are packed; a group of an odd number of channels ends with a pair of one and zeros.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tapwise.algorithm import Device
from tapwise.cpu.plan import KernelPlan
from tapwise.integers import ceil_div
from tapwise.ops.conv.problem import ConvProblem

# Channels of a group below which a pair saves nothing.
LEAST_CHANNELS: Final = 3
# Packing filters: pairs are put together first, by NumPy.
PAIR_NS: Final = 4.0


def takes_pairs(problem: ConvProblem, device: Device) -> bool:
    """Whether a problem is computed on pairs of channels."""
    if problem.dtype != "bf16" or not device.bf16_pairs or problem.group_c < LEAST_CHANNELS:
        return False
    return problem.layout == "nchw" or problem.group_c % 2 == 0


def paired(problem: ConvProblem) -> ConvProblem:
    """The problem with a channel in the place of each pair; stored as it is."""
    return problem.replace(c=problem.groups * ceil_div(problem.group_c, 2))


class PairPlan(KernelPlan):
    """Filters are put together in pairs before they are packed into panels."""

    def pack_into(self, w: np.ndarray, memory: np.ndarray | None) -> np.ndarray | None:
        axis = w.ndim - 3
        group_c, *window = w.shape[axis:]
        pairs = np.zeros((*w.shape[:axis], ceil_div(group_c, 2), *window, 2), w.dtype)
        for half in range(2):
            source = w[..., half::2, :, :]
            pairs[..., : source.shape[axis], :, :, half] = source
        return super().pack_into(pairs.view(np.float32)[..., 0], memory)
