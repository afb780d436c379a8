"""What the cost models of cuda.depthwise share.

Their constants were fitted to times of 29 layers on an H200, N=1 and N=32. Rolling and banded kernels issue fewer
instructions since: these are counted anew, the constants are the former ones.
"""

from __future__ import annotations

from tapwise.algorithm import Device
from tapwise.integers import ceil_div
from tapwise.problem import Problem


def cycles_us(device: Device) -> float:
    """Cycles of a microsecond."""
    return device.gflops / 256 * 1e3


def blocks_us(blocks: int, held: int, each: float, alone: float, device: Device) -> tuple[float, float]:
    """Microseconds of a multiprocessor's blocks by their instructions' rate, `each` cycles a block, and by their
    latency, `alone` cycles a wave of `held` blocks."""
    share = ceil_div(blocks, device.multiprocessors)
    return share * each / cycles_us(device), ceil_div(share, held) * alone / cycles_us(device)


def memory_us(problem: Problem, device: Device, piece: int, penalty: float) -> float:
    """All arrays once; pixels' pieces of few bytes take longer, by `penalty` at 32 bytes."""
    return problem.bytes / (device.gbps * 1e3) * (1 + penalty * 32 / piece)


def joint_us(*parts: float) -> float:
    """Of what overlaps in part: between the largest and the sum."""
    return float(sum(part**2.5 for part in parts) ** 0.4)
