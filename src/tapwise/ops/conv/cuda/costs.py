"""Parts of the cost models of cuda.depthwise and cuda.implicit_gemm_rows, and blocks that a multiprocessor holds.

Their constants were fitted to times of layers drawn for it on an H200, N=1 and N=32.
"""

from __future__ import annotations

from typing import Final

from tapwise.algorithm import Device
from tapwise.cuda.jit.occupancy import MORE_BYTES
from tapwise.integers import ceil_div, round_up
from tapwise.problem import Problem

# Of a multiprocessor (Hopper): registers, shared memory, threads.
REGISTERS: Final = 1 << 16
SHARED_BYTES, THREADS, MOST_BLOCKS = 228 << 10, 2048, 16
# Of a multiprocessor: warps go to them in turn.
SCHEDULERS: Final = 4
# Warps of a warpgroup, which gives up registers; registers of a thread that multiplies and of one that gives them up,
# by the warps that multiply.
WARPGROUP: Final = 4
TAKEN: Final = {8: (240, 24), 12: (152, 56)}


def blocks_of(registers: int, threads: int, shared_bytes: int = 0) -> int:
    """Blocks of threads with so many registers: warps of a multiprocessor come in fours, registers in eights."""
    for blocks in range(min(MOST_BLOCKS, THREADS // threads, SHARED_BYTES // (shared_bytes + MORE_BYTES)), 1, -1):
        if REGISTERS // round_up(blocks * threads, 128) // 8 * 8 >= registers:
            return blocks
    return 1


def warps_and_idle(blocks: int, threads: int) -> float:
    """Warps of a block, of so many beside each other, with those for which schedulers without one wait while others
    have one more."""
    return round_up(blocks * (threads // 32), SCHEDULERS) / blocks


def cycles_us(device: Device) -> float:
    """Cycles of a microsecond."""
    return device.gflops / 256 * 1e3


def blocks_us(blocks: int, held: int, each: float, alone: float, device: Device) -> float:
    """Microseconds of a multiprocessor's blocks, wave by wave of `held` of them: a wave takes `alone` cycles, a block's
    latency, and `each` for what a block issues."""
    share = ceil_div(blocks, device.multiprocessors)
    return (share * each + ceil_div(share, held) * alone) / cycles_us(device)


def memory_us(problem: Problem, device: Device, piece: int, penalty: float) -> float:
    """All arrays once; pixels' pieces of few bytes take longer, by `penalty` at 32 bytes."""
    return problem.bytes / (device.gbps * 1e3) * (1 + penalty * 32 / piece)


def joint_us(blocks: float, memory: float, power: float) -> float:
    """Of what overlaps in part: between the larger and the sum."""
    return float((blocks**power + memory**power) ** (1 / power))
