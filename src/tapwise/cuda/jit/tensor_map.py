"""Tensor maps: what TMA has to know of an array in global memory.

A map is 16 words, made by the driver, and holds the array's address. It is made once when a launch is loaded; a call
puts its own address into the word where the driver keeps it, which is found by making the map twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from tapwise.cuda.jit.device import check

WORDS: Final = 16
# Addresses that maps are tried with; nothing is read there.
_TRIED: Final = (1 << 40, (1 << 40) + (1 << 20))
_KINDS: Final = {"f16": "FLOAT16", "bf16": "BFLOAT16", "f32": "FLOAT32", "f64": "FLOAT64", "tf32": "TFLOAT32"}
# Bytes that a pattern of swizzled pieces spans at most.
SWIZZLE_BYTES: Final = 128


@dataclass(frozen=True)
class TensorMap:
    """A tensor of up to five axes, innermost first, and the box that one copy takes of it.

    `dtype`: f16, bf16, f32, f64 or tf32; `sizes` in elements, `strides` in bytes of all axes but the innermost. A tiled
    box has a size on each axis, of which it takes every element, or with `steps` one at each step, from the first on.
    With `corners`, a copy takes windows (im2col): `box` is (channels, pixels), the pixels walk within the corners
    (lower, upper) of each spatial axis, innermost first, in `steps` of elements; the last axis is the batch.
    `swizzle_bytes`: of rows in shared memory, whose 16-byte pieces are swizzled; 0 for none.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    corners: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    steps: tuple[int, ...] = ()
    swizzle_bytes: int = SWIZZLE_BYTES


def legal(corners: tuple[tuple[int, ...], tuple[int, ...]], reach: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Whether TMA can express windows of 2 (a map of 4 axes) or 3 spatial axes (5 axes)."""
    bits = 8 if len(reach) == 2 else 5
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return (
        all(low <= corner <= high for side in corners for corner in side)
        and all(one < 1 << bits for one in reach)
        and all(1 <= step <= 8 for step in steps)
    )


@lru_cache(maxsize=4096)
def encode(spec: TensorMap, address: int) -> tuple[int, ...]:
    """The map's words for an array at an address. Raises DeviceUnavailable where the driver refuses it."""
    from cuda.bindings import driver

    kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_KINDS[spec.dtype]}")
    rank, swizzle = len(spec.sizes), f"{spec.swizzle_bytes}B" if spec.swizzle_bytes else "NONE"
    sizes = [driver.cuuint64_t(size) for size in spec.sizes]
    strides = [driver.cuuint64_t(stride) for stride in spec.strides]
    how: tuple[Any, ...] = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if spec.corners is None:
        steps = [driver.cuuint32_t(step) for step in spec.steps or (1,) * rank]
        box = [driver.cuuint32_t(size) for size in spec.box]
        made = check(driver.cuTensorMapEncodeTiled(kind, rank, address, sizes, strides, box, steps, *how))
    else:
        channels, pixels = spec.box
        steps = [driver.cuuint32_t(step) for step in (1, *spec.steps, 1)]
        lower, upper = map(list, spec.corners)
        windows = lower, upper, channels, pixels, steps
        made = check(driver.cuTensorMapEncodeIm2col(kind, rank, address, sizes, strides, *windows, *how))
    return tuple(int(word) for word in made.opaque)


@lru_cache(maxsize=4096)
def template(spec: TensorMap) -> tuple[int, ...] | None:
    """The words of a map whose first is its array's address and no other changes with it; None where that is not so."""
    first, second = (encode(spec, address) for address in _TRIED)
    if (first[0], second[0]) == _TRIED and first[1:] == second[1:]:
        return first
    return None
