"""What algorithms share that read windows from an image's rows in shared memory: tiles of outputs, and a plan whose
filters are packed as the matrix instruction's operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, Final

from tapwise.algorithm import Device
from tapwise.arrays.device import DeviceArray, empty
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.integers import ceil_div
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 128
WARPS: Final = THREADS // 32
# Registers of a multiprocessor.
REGISTERS: Final = 1 << 16
# Strides of filters whose loaded launch a plan keeps.
STRIDES_KEPT: Final = 8
# A width of tiles is offered where it is that much less than the one before.
NARROWER: Final = 0.95


class FragmentPlan(CudaPlan):
    """The product; `packer` gives the launch that packs filters of such strides (elements) to `packed_bytes`."""

    def __init__(
        self, problem: ConvProblem, device: Device, launch: Launch, packer: Callable[[tuple[int, ...]], Launch],
        packed_bytes: int,
    ) -> None:  # fmt: skip
        super().__init__(problem, device, [launch])
        self._packed_bytes = packed_bytes

        @lru_cache(maxsize=STRIDES_KEPT)
        def loaded(steps: tuple[int, ...]) -> Launch:
            made = packer(steps)
            made.load(device.architecture, device.index)
            return made

        self._packer = loaded

    def pack(self, w: Any) -> DeviceArray:
        """The filters as the threads of the matrix instruction hold them."""
        size = w.dtype.itemsize
        launch = self._packer(tuple(step // size for step in w.strides))
        packed = empty((self._packed_bytes // size,), w.dtype, w)
        launch({"w": w.ptr, "y": packed.ptr}, w.stream)
        return packed


def min_blocks_per_sm(registers: int) -> int:
    """Blocks that a multiprocessor is to hold whose threads need so many registers: 2 to 6."""
    return max(2, min(6, REGISTERS // (THREADS * registers)))


def fits(shared_bytes: int, min_blocks_per_sm: int, device: Device) -> bool:
    """Whether as many blocks, three of them at least, have room in shared memory."""
    return shared_bytes <= (device.shared_bytes + 1024) // min(min_blocks_per_sm, 3) - 1024


def too_large(problem: ConvProblem) -> str | None:
    """Why a problem cannot be counted in 32 bits, if so."""
    if max(prod(problem.y_shape), prod(problem.x_shape)) >= INDEX_LIMIT or max(problem.stride) >= 1 << 15:
        return "takes fewer than 2^31 elements, and strides under 2^15"
    return None


def tiles_of(problem: ConvProblem, down: int, across: int) -> tuple[int, int, int]:
    """Tiles of an image along both axes, and all."""
    p, q = problem.output
    high, wide = ceil_div(p, down), ceil_div(q, across)
    return high, wide, problem.n * high * wide


def shapes(problem: ConvProblem, least: int, most: int, narrow: int, whole: int = 1) -> list[tuple[int, int]]:
    """(down, across) of tiles of `least` to `most` outputs: rows cut evenly down to `narrow` outputs, into multiples
    of `whole`; images that are smaller are a tile each."""
    p, q = problem.output
    found: list[tuple[int, int]] = []
    before = float("inf")
    for count in range(1, 1 + ceil_div(q, narrow // 2)):
        across = ceil_div(q, count)
        across += -across % whole
        if across <= NARROWER * before:
            before = across
            for down in (16, 8, 4, 2, 1):
                if least <= across * down <= most and (down == 1 or down < 2 * p):
                    found.append((down, across))
        if across <= narrow:
            break
    return found or [(min(p, 16), min(q + -q % whole, narrow))]
