"""Implicit GEMM without a GPU: maps, schedules, slabs and packing are followed in NumPy and compute the convolution."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import gcd, prod

import numpy as np
import pytest
from followed_memory import Memory, packed_filters, packed_images, packed_windows
from tensor_core_cases import filter_of, some

from tapwise.cuda.jit.device import H200
from tapwise.cuda.jit.tensor_map import TensorMap
from tapwise.ops.conv.cuda.implicit_gemm import configs, launches, tensor_maps
from tapwise.ops.conv.cuda.implicit_gemm.config import Config
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.cuda.implicit_gemm.view import View, folded, has_group_axis, is_aligned, unfoldings
from tapwise.ops.conv.problem import ConvProblem

FOLLOWED = [
    "n2 c9 h7 w9 k10 r3 s3 pad1 f16 nhwc",
    "n3 c70 h5 w6 k66 r3 s3 pad2:1x0:2 bf16 nhwc",
    "n2 c16 h9 w8 k24 r3 s2 stride2x1 pad1 f16 nhwc",
    "n2 c24 h9 w7 k16 r2 s3 pad1 dilation2x1 groups2 f16 nhwc",
    "n2 c6 h7 w8 k7 r3 s3 pad1 tf32",
    "n2 c12 h6 w7 k9 r3 s3 pad1 groups3 3xtf32 nhwc",
    "n1 c40 h6 w6 k8 r1 s1 3xtf32",
    "n2 c8 h8 w12 k16 r4 s4 stride4 f16 nhwc",
    "n4 c8 h5 w5 k8 r3 s3 pad1:2x2:1 f16",
    "n2 c8 h9 w9 k8 r1 s5 pad0x2 f16 nhwc",
    "n2 c8 h4 w5 k8 r3 s3 pad4 f16 nhwc",
    "n1 c64 h6 w7 k64 r3 s3 pad1 groups4 f16 nhwc",
    "n1 c64 h6 w7 k32 r3 s3 stride2 groups4 tf32 nhwc",
    "n2 c3 h11 w9 k10 r3 s3 stride2 pad1 f16 nhwc",
    "n2 c3 h9 w10 k8 r3 s3 pad1 bf16",
    "n2 c2 h9 w13 k5 r5 s7 pad2:1x3:0 stride1x3 dilation1x2 tf32 nhwc",
    "n1 c3 h32 w48 k8 r16 s16 stride16 f16",
    "n2 c5 h8 w9 k6 r7 s5 pad3x2 3xtf32",
    "n3 c1 h9 w11 k8 r5 s1 pad2x0 f16 nhwc",
    "n2 c16 h6 w7 k40 r3 s3 pad1 bf16 nhwc",
    "n2 c80 h6 w5 k24 r3 s3 pad1 f16 nhwc",
    "n1 c72 h5 w6 k16 r1 s5 pad0x2 groups2 tf32 nhwc",
    "n2 c48 h7 w10 k8 r3 s2 stride1x2 f16 nhwc",
    "n1 c8 h9 w6 k72 r1 s1 f16 nhwc",
    "n1 c24 h6 w6 k44 r2 s2 tf32 nhwc",
    "n1 c160 h5 w6 k16 r1 s3 pad0x1 groups2 f16 nhwc",
]


def follow(problem: ConvProblem, config: Config, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What the kernels compute, by their own index arithmetic, from the launch's words and maps."""
    algorithm = ImplicitGemm()
    launch = algorithm.launch(problem, config, H200)
    p = dict(zip(launch.names, launch.words, strict=True))
    size = problem.itemsize
    seen_as = View.of(problem, config)
    base, view, way = seen_as.unfolded, seen_as.seen, Epilogue(seen_as)
    if config.unfold:
        images = Memory(packed_windows(problem, base, x))
    else:
        images = Memory(packed_images(problem, x) if seen_as.is_packed else x.transpose(0, 2, 3, 1))
    order = way.permuted_n
    whole = launches.filter_tile(seen_as)
    filters = Memory(packed_filters(base, w, tensor_maps.filter_channels(base), order, whole))
    # Copies of packed filters stay within them, or are few.
    assert base.groups > 1 or config.filter_stationary or launch.maps["w"].sizes[2] % config.tile_filters == 0
    (out_h, out_w), groups, group_k = view.output, view.groups, view.group_k
    line, steps = seen_as.chunk_bytes // size, seen_as.last_chunk_steps * 32 // size
    # What comes fills chunks of shared memory and no more.
    assert launch.maps["w"].box[0] * config.groups_per_tile == line
    assert config.gather_bytes or launch.maps["x"].box[0] == line
    five = has_group_axis(view)
    taps = prod(view.kernel)
    y = np.full((problem.n * out_h * out_w, problem.k), np.nan)
    chunks, part = p["chunks"], p["part_chunks"]

    def chunk_of(chunk: int, group: int) -> tuple[int, int]:
        second = chunk >= 2 * part
        return (chunk - 2 * part if second else chunk % part) * line, group + second * groups

    for tile in range(p["units" if config.kernel == "im2col" else "tiles"]):
        rest, tile_f = divmod(tile, p["tiles_f"])
        filter0, group, pixel0 = tile_f * config.tile_filters, rest % groups, rest // groups * config.tile_pixels
        sums = np.zeros((config.tile_pixels, config.tile_filters))
        for chunk in range(chunks):
            channel, g = chunk_of(chunk, group)
            last = (chunk + 1) % part == 0
            used, map_x = steps if last else line, "x_last" if last and seen_as.is_narrow else "x"
            slab = np.zeros((0, line))
            if config.kernel == "halo_rows":
                for first in range(0, p["halo_pixels"], p["copy_pixels"]):
                    n, at = divmod(pixel0 + first, p["wide"] * p["high"])
                    h, v = divmod(at, p["wide"])
                    if config.gather_bytes:
                        lines = gathered(view, p, x, pixel0 + first, p["copy_pixels"], group, chunk, line)
                    else:
                        more = (g + n // p["n"],) if five else ()
                        images_n = n % p["n"] if five else n
                        place = (channel, v - p["pad_w"], h - p["pad_h"], images_n, *more)
                        lines = images.windows(launch.maps[map_x], size, place, (0,) * len(view.spatial) + (0,) * five)
                        lines = in_rows(lines, line, view)
                    slab = np.concatenate([slab, lines])
            if config.kernel == "halo_tile":
                n, h, v = corner(p, pixel0 // config.tile_pixels)
                more = (g,) if five else ()
                slab = images.boxes(launch.maps[map_x], size, (channel, v - p["pad_w"], h - p["pad_h"], n, *more))
                slab = in_rows(slab, line, view)
                slab = np.concatenate([slab, np.full((p["copy_pixels"], line), 7.0)])
            for tap in range(taps):
                r, s = divmod(tap, view.kernel[1])
                if config.kernel != "im2col":
                    shift = r * p["dilation_h"] * p["wide"] + s * p["dilation_w"]
                    lines = slab[shift : shift + config.tile_pixels]
                    assert len(lines) == config.tile_pixels
                else:
                    n, at = divmod(pixel0, out_h * out_w)
                    h, v = divmod(at, out_w)
                    place = (channel, v * p["stride_w"] - p["pad_w"], h * p["stride_h"] - p["pad_h"], n)
                    more = (g,) if five else ()
                    offsets = (s * p["dilation_w"], r * p["dilation_h"], *((0,) if five else ()))
                    lines = in_rows(images.windows(launch.maps[map_x], size, (*place, *more), offsets), line, view)
                right = np.array(
                    [
                        filters.read(launch.maps["w"], size, (chunk * line, tap, group * group_k + filter0 + one))
                        for one in range(config.tile_filters)
                    ]
                )
                if config.groups_per_tile == 1:
                    sums += lines[:, :used] @ right[:, :used].T
                    continue
                wide, high = line // config.groups_per_tile, config.tile_filters // config.groups_per_tile
                for one in range(config.groups_per_tile):
                    mine = slice(one * high, (one + 1) * high)
                    sums[:, mine] += lines[:, one * wide : (one + 1) * wide] @ right[mine].T
        # Sums stand in the order of packed filters.
        places = [filter_of(one, order) for one in range(config.tile_filters)]
        assert sorted(places) == list(range(config.tile_filters))
        sums = sums[:, np.argsort(places)]
        if way.tma_store and view.layout == "nhwc":
            store_boxes(launch.maps, config, y.reshape(-1), sums, (filter0, group, pixel0))
            continue
        for one in range(config.tile_pixels):
            if config.kernel == "halo_tile":
                n, h, v = corner(p, pixel0 // config.tile_pixels)
                row, column = divmod(one, p["wide"])
                if row >= p["down"] or column >= p["across"] or h + row >= out_h or v + column >= out_w:
                    continue
                pixel = (n * out_h + h + row) * out_w + v + column
            elif config.kernel == "halo_rows":
                n, at = divmod(pixel0 + one, p["wide"] * p["high"])
                h, v = divmod(at, p["wide"])
                if n >= p["n"] or h >= out_h or v >= out_w:
                    continue
                pixel = (n * out_h + h) * out_w + v
            else:
                pixel = pixel0 + one
                if pixel >= p["pixels"]:
                    continue
            count = min(config.tile_filters, group_k - filter0)
            to = y[pixel, group * group_k + filter0 : group * group_k + filter0 + count]
            assert np.isnan(to).all(), "written twice"
            to[:] = sums[one, :count]
    return y.reshape(problem.n, out_h, out_w, problem.k).transpose(0, 3, 1, 2)


def in_rows(lines: np.ndarray, line: int, view: ConvProblem) -> np.ndarray:
    """Narrow boxes in rows of shared memory: behind them is what was there before, of a single chunk zeros."""
    before = 0.0 if view.group_c <= line else 7.0
    return np.pad(lines, ((0, 0), (0, line - lines.shape[1])), constant_values=before)


def store_boxes(
    maps: Mapping[str, TensorMap], config: Config, y: np.ndarray, sums: np.ndarray, place: tuple[int, int, int]
) -> None:
    """A tile's sums as TMA writes them: boxes of a row of filters and of 64 pixels, the last ones of what is left."""
    row, _, others = maps["out"].box
    filter0, group, pixel0 = place
    for first in range(0, config.tile_filters, row):
        for line0 in range(0, config.tile_pixels, others):
            ends = first + row > config.tile_filters or line0 + others > config.tile_pixels
            map_ = maps["out_last"] if ends else maps["out"]
            size = map_.strides[0] // max(1, map_.sizes[0])
            for line, i in product(range(line0, line0 + map_.box[2]), range(map_.box[0])):
                filter_, pixel = filter0 + first + i, pixel0 + line
                if filter_ >= map_.sizes[0] or pixel >= map_.sizes[2]:
                    continue
                assert first + i < config.tile_filters, "what was not computed is not written"
                at = filter_ + group * (map_.strides[0] // size) + pixel * (map_.strides[1] // size)
                assert np.isnan(y[at]), "written twice"
                y[at] = sums[line, first + i]


def corner(p: dict[str, int], tile: int) -> tuple[int, int, int]:
    """Image, line and column of a box's first output."""
    n, rest = divmod(tile, p["tiles_h"] * p["tiles_w"])
    row, column = divmod(rest, p["tiles_w"])
    return n, row * p["down"], column * p["across"]


def gathered(
    problem: ConvProblem, p: dict[str, int], x: np.ndarray, pixel: int, count: int, group: int, chunk: int, line: int
) -> np.ndarray:
    """Lines of a slab as warps gather them, from x as the view has it."""
    x = x.transpose(0, 2, 3, 1).reshape(problem.n, *problem.spatial, problem.c).transpose(0, 3, 1, 2)
    lines = np.zeros((count, line))
    first = chunk * line
    held = max(0, min(line, problem.group_c - first))
    for i in range(count):
        n, at = divmod(pixel + i, p["wide"] * p["high"])
        h, v = divmod(at, p["wide"])
        y, z = h - p["pad_h"], v - p["pad_w"]
        if n < p["n"] and 0 <= y < p["height"] and 0 <= z < p["width"]:
            channel = group * problem.group_c + first
            lines[i, :held] = x[n, channel : channel + held, y, z]
    return lines


@pytest.mark.many
@pytest.mark.parametrize("text", FOLLOWED)
def test_maps_schedules_and_slabs_compute_the_convolution(text: str) -> None:
    problem = ConvProblem.parse(text)
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(float) for shape in (problem.x_shape, problem.w_shape))
    expected = problem.convolve(x, w)
    kernels, ways = set(), set()
    for config in some(problem):
        if config.tile_pixels > 128:
            continue
        ways.add(config.unfold)
        if not config.unfold:
            kernels.add(config.kernel)
        assert np.array_equal(follow(problem, config, x, w), expected), config
    assert ways == set(unfoldings(problem))
    if 0 not in ways:
        return
    unit = set(folded(problem).stride) == {1} and prod(problem.kernel) >= configs.LEAST_TAPS and "pad4" not in text
    assert kernels - {"halo_tile"} == ({"im2col", "halo_rows"} if unit else {"im2col"})
    # Slabs of half lines where the last of whole ones would be half empty.
    size = folded(problem).group_c * problem.itemsize
    halved = unit and problem.math != "3xtf32" and size > 128 and 0 < size % 128 <= 64
    assert {config.chunk_bytes for config in some(problem)} == ({0, 64} if halved else {0})
    # Boxes need whole pieces of channels, or packed ones, and lines of four outputs.
    whole = is_aligned(problem) or problem.layout == "nchw" or problem.math == "3xtf32"
    taps = set(folded(problem).stride) == {1} and prod(problem.kernel) >= configs.LEAST_TAPS
    assert ("halo_tile" in kernels) == (taps and whole and problem.output[1] >= configs.LEAST_ACROSS)


@pytest.mark.parametrize(
    "text",
    [
        "n3 c8 h5 w6 k72 r3 s3 pad1 f16 nhwc residual",
        "n2 c8 h7 w6 k40 r2 s3 pad2:1x0:2 tf32 nhwc residual",
        "n2 c32 h9 w7 k80 r3 s3 pad1 dilation2x1 groups2 bf16 nhwc residual",
        "n5 c8 h3 w4 k8 r3 s3 pad0:2x1 3xtf32 nhwc residual",
        "n2 c8 h9 w7 k72 r5 s5 pad2 f16 nhwc residual",
    ],
)
def test_residuals_come_to_the_epilogue_buffers(text: str) -> None:
    """Each round's copies hold the residual of its outputs, as halo rows count them."""
    problem = ConvProblem.parse(text)
    size, (out_h, out_w) = problem.itemsize, problem.output
    residual = np.arange(1.0, 1 + prod(problem.y_shape)).reshape(problem.y_shape)
    memory = Memory(residual.transpose(0, 2, 3, 1))
    configs_ = [one for one in ImplicitGemm().configs(problem, H200) if Epilogue(View.of(problem, one)).tma_residual]
    assert {one.tile_pixels % 64 for one in configs_} >= {0, 8, 16, 32, 48}
    for config in configs_:
        launch = ImplicitGemm().launch(problem, config, H200)
        p, map_ = dict(zip(launch.names, launch.words, strict=True)), launch.maps["res"]
        inner, box = map_.box
        wide, high = p["wide"], p["high"]
        assert inner * size == 128
        # Whole boxes, but of 32 pixels at least: then some come that the next tile has too.
        assert box == (max(32, gcd(config.tile_pixels, 64)) if config.swap_ab else 64)
        for tile in range(p["tiles"]):
            rest, tile_f = divmod(tile, p["tiles_f"])
            filter0, group, pixel0 = (
                tile_f * config.tile_filters,
                rest % problem.groups,
                rest // problem.groups * config.tile_pixels,
            )
            for first in range(0, config.tile_pixels, box):
                n, at = divmod(pixel0 + first, wide * high)
                h, v = divmod(at, wide)
                for part in range(0, 64, inner):
                    filter_ = group * problem.group_k + filter0 + part
                    lines = memory.windows(map_, size, (filter_, v, h, n), (0, 0))
                    for line in range(box):
                        n_, at = divmod(pixel0 + first + line, wide * high)
                        y, z = divmod(at, wide)
                        count = min(inner, problem.group_k - filter0 - part)
                        if n_ < problem.n and y < out_h and z < out_w and count > 0:
                            wanted = residual[n_, filter_ : filter_ + count, y, z]
                            assert np.array_equal(lines[line, :count], wanted), config


def test_a_wrong_corner_is_seen() -> None:
    problem = ConvProblem.parse(FOLLOWED[0])
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(float) for shape in (problem.x_shape, problem.w_shape))
    config = next(one for one in some(problem) if one.kernel == "im2col")
    wrong = problem.replace(padding=((1, 1), (0, 2)))
    assert not np.array_equal(follow(wrong, config, x, w), problem.convolve(x, w))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_rows_between_buffers_and_y_are_swizzled_alike(vector: int, size: int) -> None:
    """Threads move each element of a buffer of 64 x 64 once, from where it was written: `BufferRows` of
    epilogue_buffers.cuh adds a constant to a thread's first address, and flips the bits of the swizzle."""
    if vector * size > 16:
        return
    inner, piece = 128 // size, 16 // size
    threads = np.arange(128)[:, None]
    across = 64 // vector
    lines = 128 // across
    moved = np.arange(64 // lines)[None, :]

    def staged(line: np.ndarray, at: np.ndarray) -> np.ndarray:
        within = at % inner
        return (at // inner * 64 + line) * 128 + ((within // piece ^ line % 8) << 4) + within % piece * size

    row, first = threads // across, threads % across * vector
    addresses = (staged(row, first) ^ lines * moved % 8 * 16) + lines * moved * 128
    assert np.array_equal(addresses, staged(lines * moved + row, first + 0 * moved))
    assert len(np.unique(addresses)) == addresses.size == 64 * across
    assert np.all(addresses % (vector * size) == 0)
