"""x and filters in the order that tensor cores want, and the parts of 3xtf32: what algorithms begin with."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Final

from tapwise.algorithm import Device
from tapwise.cuda.arrays import DeviceArray, empty, stream_of
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.problem import ConvProblem

IMAGE_WORDS: Final = (
    "x", "y", "n", "groups", "channels", "wide", "pixels", "step_n", "step_c", "step_pixel", "tiles_pixels",
    "tiles_channels",
)  # fmt: skip
FILTER_WORDS: Final = (
    "w", "y", "k", "taps", "channels", "wide", "pitch", "step_k", "step_c", "step_r", "step_s", "taps_w",
)  # fmt: skip
TYPES: Final = {"f16": "f16", "bf16": "bf16", "f32": "float"}
SIZES: Final = {"f16": 2, "bf16": 2, "f32": 4}
THREADS: Final = 256
TILE: Final = 64
# Blocks a multiprocessor, of kernels that loop over what is beyond.
BLOCKS_EACH: Final = 16


def parts(problem: ConvProblem) -> int:
    """Numbers that stand for one of x: two in 3xtf32."""
    return 2 if problem.math == "3xtf32" else 1


def wide(problem: ConvProblem) -> int:
    """Channels of a group in packed x: whole pieces of 16 bytes."""
    piece = 16 // SIZES[problem.dtype]
    return -(-problem.group_c // piece) * piece


def images_source(problem: ConvProblem) -> Source:
    words = f"{TYPES[problem.dtype]}, {parts(problem)}"
    if problem.layout == "nchw":
        return stub("pack.cu", "pack_channels_first", words, "Images", THREADS)
    size = SIZES[problem.dtype]
    piece = next(
        count for count in (16, 8, 4, 2) if problem.c * size % count == 0 and problem.group_c * size % count == 0
    )
    return stub("pack.cu", "pack_channels_last", f"{words}, {piece}", "Images", THREADS)


def images_bytes(problem: ConvProblem) -> int:
    """What packed x takes."""
    return parts(problem) * problem.groups * problem.n * prod(problem.spatial) * wide(problem) * SIZES[problem.dtype]


def images(problem: ConvProblem, device: Device) -> Launch:
    """x, dense in the problem's layout, to "workspace": [part][group][n][h][w][channel]."""
    pixels = prod(problem.spatial)
    last = problem.layout == "nhwc"
    tiles = -(-pixels // TILE), -(-wide(problem) // TILE)
    fields = {
        "n": problem.n, "groups": problem.groups, "channels": problem.group_c, "wide": wide(problem), "pixels": pixels,
        "step_n": problem.c * pixels, "step_c": 1 if last else pixels, "step_pixel": problem.c if last else 1,
        "tiles_pixels": tiles[0], "tiles_channels": tiles[1],
    }  # fmt: skip
    grid = tiles[0] * tiles[1] * problem.groups * problem.n
    if last:
        pieces = problem.n * pixels * problem.groups * wide(problem) * SIZES[problem.dtype] // 16
        grid = max(1, min(-(-pieces // THREADS), BLOCKS_EACH * device.threads))
    return Launch(images_source(problem), IMAGE_WORDS, fields, (grid, 1, 1), (THREADS, 1, 1))


def filters_source(problem: ConvProblem, apart: bool = True) -> Source:
    count = parts(problem) if apart else 0
    return stub("pack.cu", "pack_filters", f"{TYPES[problem.dtype]}, {count}", "Filters", THREADS)


def filters(
    problem: ConvProblem, w: DeviceArray, line: int, device: Device, pitch: int = 0, apart: bool = True
) -> DeviceArray:
    """w (k, c / groups, r, s) of any strides as [k][tap][channel]; a line of a tap has `line` channels in each part.

    `pitch`: elements from one filter to the next, at least its own. `apart`: rounded to tf32, and 3xtf32 in parts.
    """
    size = w.dtype.itemsize
    pitch = pitch or prod(problem.kernel) * line * (3 if apart and parts(problem) == 2 else 1)
    packed = empty((problem.k * pitch,), w.dtype, w)
    launch = _filters(problem, tuple(step // size for step in w.strides), line, pitch, apart, device)
    launch({"w": w.ptr, "y": packed.ptr}, stream_of(w))
    return packed


@lru_cache(maxsize=512)
def _filters(
    problem: ConvProblem, steps: tuple[int, ...], line: int, pitch: int, apart: bool, device: Device
) -> Launch:
    """The loaded launch that packs filters of such strides."""
    fields = {
        "k": problem.k, "taps": prod(problem.kernel), "channels": problem.group_c, "wide": line, "pitch": pitch,
        "step_k": steps[0], "step_c": steps[1], "step_r": steps[2], "step_s": steps[3], "taps_w": problem.kernel[1],
    }  # fmt: skip
    blocks = max(1, min(-(-problem.k * pitch // THREADS), BLOCKS_EACH * device.threads))
    launch = Launch(filters_source(problem, apart), FILTER_WORDS, fields, (blocks, 1, 1), (THREADS, 1, 1))
    launch.load(device.architecture, device.index)
    return launch
