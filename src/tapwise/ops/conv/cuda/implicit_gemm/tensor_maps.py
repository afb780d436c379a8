"""The tensor maps of cuda.implicit_gemm: of x, of the packed filters, of y and of the residual."""

from __future__ import annotations

from math import gcd, prod
from typing import Final

from tapwise.cuda.jit.tensor_map import SWIZZLE_BYTES, TensorMap
from tapwise.integers import round_up
from tapwise.ops.conv.cuda import pack
from tapwise.ops.conv.cuda.implicit_gemm.config import HaloRowsConfig, HaloTileConfig
from tapwise.ops.conv.cuda.implicit_gemm.strips import Strips
from tapwise.ops.conv.cuda.implicit_gemm.view import (
    BLOCK,
    STEP_BYTES,
    View,
    chunk_bytes,
    corners_of,
    folded,
    has_group_axis,
    padded,
)
from tapwise.ops.conv.problem import ConvProblem

# Pixels of a residual that TMA brings at once.
LEAST_RESIDUAL_PIXELS: Final = 32


def map_x(view: View, last: bool = False) -> TensorMap:
    """x as packed, or as it lies; a copy is a chunk of the pixels of all windows, of padded rows, or of a rectangle.
    `last`: a tap's last chunk, or of planes the last block of a tile's pixels."""
    problem, config, size = view.seen, view.config, view.itemsize
    if config.transposed_pixels:
        return _map_planes(view, last)
    if view.strips:
        return _map_strips(view, view.strips)
    h, w = problem.spatial
    group_axis = has_group_axis(problem)
    channels = pack.wide(problem) if view.is_packed else problem.group_c
    pixel = (channels if view.is_packed else problem.c) * size
    sizes: tuple[int, ...] = (channels, w, h, problem.n)
    strides: tuple[int, ...] = (pixel, pixel * w, pixel * w * h)
    steps = problem.stride[::-1]
    if group_axis:
        sizes = (*sizes, problem.groups * pack.parts(problem))
        strides = (*strides, pixel * w * h * problem.n if view.is_packed else channels * size)
        steps = (*steps, 1)
    kind = "tf32" if problem.dtype == "f32" else problem.dtype
    chunk = (view.last_chunk_bytes if last else view.chunk_bytes) // size
    if isinstance(config, HaloTileConfig):
        box = (chunk, view.rectangle.wide, view.rectangle.high, *[1] * (len(sizes) - 3))
        return TensorMap(kind, sizes, strides, box, swizzle_bytes=view.chunk_bytes)
    corners, pixels = corners_of(problem), config.tile_pixels
    if isinstance(config, HaloRowsConfig):
        upper = [max(0, after - before) for before, after in problem.padding[::-1]]
        corners = corners[0], (*upper, 0) if group_axis else tuple(upper)
        pixels = view.halo_rows[1]
    return TensorMap(kind, sizes, strides, (chunk, pixels), corners, steps, view.chunk_bytes)


def _map_planes(view: View, last: bool) -> TensorMap:
    """x in NCHW; a copy is a chunk of channels of 64 pixels. Planes that are no whole pieces of 16 bytes: planes of so
    many channels as make some are seen as one, and a copy is a tile's pixels of one of these in a chunk, or all."""
    problem, size, shifted = view.seen, view.itemsize, view.shifted
    together = shifted.classes if shifted else 1
    plane, channels = prod(problem.spatial) * together, problem.group_c // together
    strides = (plane * size, plane * size * channels, plane * size * channels * problem.groups)
    sizes = (plane, channels, problem.groups, problem.n)
    if not shifted:
        pixels = view.last_pixels if last else BLOCK
        return TensorMap(problem.dtype, sizes, strides, (pixels, view.chunk_bytes // size, 1, 1))
    behind = (view.chunk_bytes // size // together, 1, 1)
    if shifted.whole:
        pieces = plane * size // 8
        return TensorMap("f64", (pieces, *sizes[1:]), strides, (pieces, *behind), swizzle_bytes=0)
    return TensorMap(problem.dtype, sizes, strides, (shifted.row_bytes // size, *behind), swizzle_bytes=0)


def _map_strips(view: View, strips: Strips) -> TensorMap:
    """x in NCHW; a copy is a strip of a chunk of channels, or of those of one class, whose first planes together are
    what its first axis runs along."""
    problem, size = view.seen, view.itemsize
    (h, w), channels, classes = problem.spatial, problem.group_c, strips.classes
    plane, images = h * w * size, problem.n * problem.groups
    sizes = (w * h * classes, 1, channels // classes, images) if strips.flat else (w, h, channels, images)
    row = plane * classes if strips.flat else w * size
    box = (strips.pitch, (strips.rows - 1) * strips.grain + 1, view.chunk_bytes // size // classes, 1)
    strides = (row, plane * classes, plane * channels)
    return TensorMap(problem.dtype, sizes, strides, box, steps=(1, strips.grain, 1, 1), swizzle_bytes=0)


def filter_channels(problem: ConvProblem) -> int:
    """Channels of a tap's part of the packed filters: whole chunks, which TMA takes faster; where taps side by side are
    seen as channels, no more than there are. All configs have the same packed filters."""
    if folded(problem) != problem:
        return problem.group_c
    return round_up(problem.group_c, chunk_bytes(problem) // problem.itemsize)


def map_w(view: View, rows: int, last: bool = False) -> TensorMap:
    """The packed filters, of which a view of the problem may see fewer taps: `rows` of them, a tile's a copy. Those of
    fprop as they lie, [group][k][r][s][c]: a copy is a block of channels, the product's filters, of a chunk of k, or of
    the `last` one's."""
    if view.filters is not None:
        return _map_fprop_filters(view, view.last_chunk_steps * STEP_BYTES if last else view.chunk_bytes)
    base, seen, size = view.unfolded, folded(view.unfolded), view.itemsize
    along = filter_channels(base) * view.parts * base.kernel[1] // seen.kernel[1]
    chunk, taps = view.config.chunk_bytes or chunk_bytes(seen), prod(seen.kernel)
    sizes, box = (along, taps, rows), (chunk // size, 1, view.config.tile_filters)
    return TensorMap(seen.dtype, sizes, (along * size, along * taps * size), box, swizzle_bytes=chunk)


def _map_fprop_filters(view: View, chunk_bytes: int) -> TensorMap:
    assert view.filters is not None
    problem, (r, s) = view.seen, view.filters.kernel
    filters = problem.group_k * view.itemsize
    axes = 5 if has_group_axis(problem) else 4
    sizes = problem.group_k, s, r, problem.group_c, problem.groups
    strides = filters, filters * s, filters * s * r, filters * s * r * problem.group_c
    box = BLOCK, 1, 1, chunk_bytes // view.itemsize, 1
    return TensorMap(problem.dtype, sizes[:axes], strides[: axes - 1], box[:axes])


def map_y(view: View, last_stored: int = 0) -> TensorMap:
    """y as pixels of groups of filters, or in NCHW planes of these; a box is a row of 128 bytes of 64 pixels, or of
    filters, or has `last_stored` of the instruction's columns. With strides they are windows of 1 x 1, whose pixels go
    on in the next row, and in the next image."""
    problem, size, y = view.seen, view.itemsize, view.strides
    nchw, pixels = problem.layout == "nchw", prod(problem.output)
    row, others = SWIZZLE_BYTES // size, 64
    if last_stored and view.config.swap_ab == nchw:
        row = last_stored
    elif last_stored:
        others = last_stored
    if y is not None:
        return TensorMap(
            problem.dtype, (problem.k, *problem.output[::-1], problem.n),
            tuple(step * size for step in (y.column, y.row, y.image)), (row, others), ((0, 0), (0, 0)), (1, 1),
        )  # fmt: skip
    if nchw:
        strides: tuple[int, ...] = pixels * size, pixels * size * problem.group_k, pixels * size * problem.k
        sizes: tuple[int, ...] = pixels, problem.group_k, problem.groups, problem.n
        return TensorMap(problem.dtype, sizes, strides, (row, others, 1, 1))
    sizes = (problem.group_k, problem.groups, problem.n * pixels)
    strides = (problem.group_k * size, problem.k * size)
    return TensorMap(problem.dtype, sizes, strides, (row, 1, others))


def map_residual(view: View) -> TensorMap:
    """The residual as windows of 1 x 1, whose pixels are counted as halo rows count them, with padding. Small boxes
    take longer than the products of short tiles: with the last of 200 pixels 24 come that the next tile has too."""
    problem, size, (p, q) = view.seen, view.itemsize, view.seen.output
    high, wide = padded(problem)
    pixels = max(LEAST_RESIDUAL_PIXELS, gcd(view.config.tile_pixels, 64)) if view.config.swap_ab else 64
    row = problem.k * size
    return TensorMap(
        problem.dtype, (problem.k, q, p, problem.n), (row, row * q, row * q * p), (SWIZZLE_BYTES // size, pixels),
        ((0, 0), (wide - q, high - p)), (1, 1),
    )  # fmt: skip
