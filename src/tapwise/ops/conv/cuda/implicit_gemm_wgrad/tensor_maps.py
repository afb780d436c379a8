"""The tensor maps of cuda.implicit_gemm of wgrad: of x and of dy, as they lie or packed."""

from __future__ import annotations

from math import prod
from typing import Final

from tapwise.cuda.jit.tensor_map import TensorMap, legal
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.ops.conv.cuda.implicit_gemm.view import corners_of, padded
from tapwise.ops.conv.cuda.implicit_gemm_wgrad.config import BLOCK, STEP_PIXELS
from tapwise.ops.conv.cuda.implicit_gemm_wgrad.view import View, is_pointwise, whole
from tapwise.ops.conv.problem import ConvProblem

# Pixels that the last tap of a row may be ahead of the first: a copy of the ring's first pixels lies behind its last.
MOST_APART: Final = STEP_PIXELS - 16

Corners = tuple[tuple[int, ...], tuple[int, ...]]


def has_halo(view: View) -> bool:
    """Whether the halo kernel takes it: stride 1, windows that begin within an image's padded rows."""
    problem, (high, wide), (p, q), steps = view.seen, padded(view.seen), view.seen.output, (1, 1)
    if problem.stride != steps or prod(problem.kernel) == 1 or p > high or q > wide:
        return False
    near = problem.reach[1] - 1 <= MOST_APART and problem.n * high * wide < INDEX_LIMIT - (1 << 20)
    down = 0 if view.tap_rows > 1 else problem.reach[0] - 1
    return near and legal(_corners_x(view), (0, down), steps) and legal(_corners_dy(view), (0, 0), steps)


def _corners_x(view: View) -> Corners:
    """Where the rows of x begin and end that a tile's first tap sees, innermost axis first: neighbours share their
    padding."""
    sides, (high, wide), (h, w) = view.seen.padding, view.image, view.seen.spatial
    (top, _), (left, _) = sides
    return (-left, -top), (wide - left - w, high - top - h)


def _corners_dy(view: View) -> Corners:
    """Outputs are counted like the pixels where their windows begin."""
    rows = zip(view.image[::-1], view.seen.output[::-1], strict=True)
    return (0, 0), tuple(size - count for size, count in rows)


def map_x(view: View, last: bool = False) -> TensorMap:
    """x as windows, as padded rows (halo), or as rows of pixels; a copy is a block of channels of a step's pixels.
    Beyond the last image it is zeros, as it is in padding. `last`: the block with the last channel."""
    problem, wide, copied = view.seen, view.config.block_channels, STEP_PIXELS // view.config.cluster_m
    block = view.last_blocks[0] if last else wide
    if is_pointwise(problem):
        return _rows(problem, view.x_channels, problem.n * prod(problem.spatial), block, wide, copied)
    corners = _corners_x(view) if view.config.halo else corners_of(whole(problem))
    return _windows(problem, view.x_channels, problem.spatial, corners, problem.stride[::-1], block, wide, copied)


def map_dy(view: View, last: bool = False) -> TensorMap:
    """dy as rows of pixels, or as padded rows (halo); a copy is 64 filters of a step's pixels, or zeros. `last`: the
    block with the last filter."""
    problem, block, corners = view.seen, view.last_blocks[1] if last else BLOCK, _corners_dy(view)
    if view.config.halo:
        return _windows(problem, view.dy_channels, problem.output, corners, (1, 1), block, BLOCK, STEP_PIXELS)
    pixels, copied = problem.n * prod(problem.output), STEP_PIXELS // view.config.cluster_n
    return _rows(problem, view.dy_channels, pixels, block, BLOCK, copied)


def _rows(problem: ConvProblem, channels: int, pixels: int, block: int, wide: int, copied: int) -> TensorMap:
    """A copy is `block` channels, in rows of shared memory that have room for `wide`."""
    size, box = problem.itemsize, (block, copied)
    return TensorMap(problem.dtype, (channels, pixels), (channels * size,), box, swizzle_bytes=wide * size)


def _windows(
    problem: ConvProblem, channels: int, image: tuple[int, ...], corners: Corners, steps: tuple[int, ...], block: int,
    wide: int, copied: int,
) -> TensorMap:  # fmt: skip
    (h, w), size = image, problem.itemsize
    sizes, pixel = (channels, w, h, problem.n), channels * size
    strides, box = (pixel, pixel * w, pixel * w * h), (block, copied)
    return TensorMap(problem.dtype, sizes, strides, box, corners, steps, wide * size)
