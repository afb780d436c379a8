"""Implicit GEMM without a GPU: kernels compile, maps, schedules and slabs are followed in NumPy, refusals,
predictions."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from math import prod
from pathlib import Path

import numpy as np
import pytest

from tapwise import dispatch, registry, verify
from tapwise.algorithm import Device
from tapwise.cuda import implicit_gemm_configs as configs
from tapwise.cuda import implicit_gemm_geometry as geometry
from tapwise.cuda import implicit_gemm_mma, pack
from tapwise.cuda import implicit_gemm_model as model
from tapwise.cuda.arrays import DeviceArray
from tapwise.cuda.implicit_gemm import ImplicitGemm
from tapwise.cuda.implicit_gemm_geometry import Config, folded, span
from tapwise.cuda.implicit_gemm_mma import ImplicitGemmMma
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.device import H200
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.jit.tensor_map import WORDS, TensorMap, legal
from tapwise.cuda.plan import CudaPlan
from tapwise.lab.study import gemm
from tapwise.problem import ConvProblem
from tapwise.reference import convolve

A100 = Device(kind="cuda", name="NVIDIA A100", threads=108, gflops=360.0, gbps=1400.0, architecture="sm_80",
              shared_bytes=166912)  # fmt: skip
COMPILED = [
    "n32 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc",
    "n32 c64 h56 w56 k64 r3 s3 pad1 bf16 nhwc bias residual relu",
    "n32 c1280 h14 w14 k320 r1 s1 f16 nhwc",
    "n1 c512 h7 w7 k512 r3 s3 pad1 f16 nhwc bias silu",
    "n32 c44 h56 w56 k44 r3 s3 pad1 f16 nhwc",
    "n2 c33 h20 w20 k37 r3 s3 stride2 f16 nhwc residual",
    "n8 c128 h28 w28 k128 r3 s3 pad1 groups4 f16",
    "n8 c256 h14 w14 k256 r3 s3 pad1 tf32 nhwc gelu",
    "n8 c64 h14 w14 k64 r3 s3 pad1 3xtf32 nhwc bias",
    "n32 c32 h112 w112 k192 r4 s4 stride4 f16 nhwc",
    "n32 c3 h224 w224 k64 r7 s7 stride2 pad3 f16 bias relu",
]
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
]


def some(problem: ConvProblem, device: Device = H200) -> list[Config]:
    """The model's best config of each kind."""
    algorithm = ImplicitGemm()
    kinds: dict[tuple[object, ...], Config] = {}
    for config in sorted(
        algorithm.configs(problem, device), key=lambda one: algorithm.predict_us(problem, one, device)
    ):
        kind = (
            config.kernel,
            config.rows,
            config.warpgroups,
            config.turns,
            config.split > 1,
            config.gather,
            config.bundle,
            config.held,
            config.unfold,
        )
        kinds.setdefault(kind, config)
    return list(kinds.values())


@pytest.mark.parametrize("text", COMPILED)
def test_wgmma_kernels_compile_without_spills_or_waits(text: str) -> None:
    algorithm, problem = ImplicitGemm(), ConvProblem.parse(text)
    kinds = some(problem)
    # The best ones, and one whose gemm_k is split.
    for config in kinds[:3] + [one for one in kinds[3:] if one.split > 1][:1]:
        for source in algorithm.sources(problem, config):
            code, log = compiler._compile(source, "sm_90a", no_cache=True)
            used = compiler._resources(log, source)
            assert code[:4] == b"\x7fELF"
            assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{config}: {used}"
            # C7510 and its kin: products that do not run beside others, or registers that are not handed over.
            assert not re.search(r"C75\d\d", log), f"{config}: {log}"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_mma_kernels_compile_without_spills(architecture: str) -> None:
    algorithm = ImplicitGemmMma()
    for text in (COMPILED[1], COMPILED[4], COMPILED[5], COMPILED[6], COMPILED[8]):
        problem = ConvProblem.parse(text)
        configs = sorted(algorithm.configs(problem, H200), key=lambda one: algorithm.predict_us(problem, one, H200))
        for config in (configs[0], next(one for one in configs if one.split > 1))[: 2 if "bias" in text else 1]:
            for source in algorithm.sources(problem, config):
                _, used = compiler.compile_now(source, architecture)
                assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{text}, {config}: {used}"


class Memory:
    """An array in memory as a tensor map sees it: elements by their distance from the start."""

    def __init__(self, array: np.ndarray) -> None:
        self.flat = array.reshape(-1)

    def read(self, map_: TensorMap, size: int, place: tuple[int, ...]) -> np.ndarray:
        """The innermost line at a place of the outer axes, zeros where it leaves the tensor."""
        count = map_.box[0]
        line = np.zeros(count)
        first, *outer = place
        if all(0 <= at < extent for at, extent in zip(outer, map_.sizes[1:], strict=True)):
            start = sum(at * stride // size for at, stride in zip(outer, map_.strides, strict=True))
            held = max(0, min(count, map_.sizes[0] - first))
            line[:held] = self.flat[start + first : start + first + held]
        return line

    def boxes(self, map_: TensorMap, size: int, place: tuple[int, ...]) -> np.ndarray:
        """A copy of a box of lines."""
        channel, w, h, *rest = place
        _, wide, high, *_ = map_.box
        return np.array([
            self.read(map_, size, (channel, w + i % wide, h + i // wide, *rest)) for i in range(wide * high)
        ])  # fmt: skip

    def windows(self, map_: TensorMap, size: int, place: tuple[int, ...], offsets: tuple[int, ...]) -> np.ndarray:
        """A copy in im2col mode: pixels from a place on, within the map's corners, each moved by the offsets."""
        assert map_.corners is not None
        lower, upper = map_.corners
        channel, *at = place
        spatial = len(lower)
        last = [map_.sizes[1 + axis] - 1 + upper[axis] for axis in range(spatial)]
        lines = []
        for _ in range(map_.box[1]):
            moved = [at[axis] + offsets[axis] for axis in range(spatial)]
            lines.append(self.read(map_, size, (channel, *moved, at[spatial])))
            for axis in range(spatial):
                at[axis] += map_.steps[axis]
                if at[axis] <= last[axis]:
                    break
                at[axis] = lower[axis]
            else:
                at[spatial] += 1
        return np.array(lines)


def packed_images(problem: ConvProblem, x: np.ndarray) -> np.ndarray:
    """What pack_images leaves, straight from its definition; parts of 3xtf32 are x and zeros here."""
    n, _, h, w = problem.x_shape
    out = np.zeros((pack.parts(problem), problem.groups, n, h, w, pack.wide(problem)))
    split = x.reshape(n, problem.groups, problem.group_c, h, w)
    out[0, ..., : problem.group_c] = split.transpose(1, 0, 3, 4, 2)
    return out


def packed_windows(problem: ConvProblem, view: ConvProblem, x: np.ndarray) -> np.ndarray:
    """What pack_windows leaves, by its launch's words; parts of 3xtf32 are x and zeros here."""
    launch = pack.windows(problem, view, H200)
    p = dict(zip(launch.names, launch.words, strict=True))
    flat = (x.transpose(0, 2, 3, 1) if problem.layout == "nhwc" else x).reshape(-1)
    flat = (x.transpose(0, 2, 3, 1) if problem.layout == "nhwc" else x).reshape(-1)
    out = np.zeros((pack.parts(problem), 1, p["n"], p["lines"], p["across"], p["wide"]))
    assert launch.grid[0] * launch.block[0] * 16 >= p["across"] * p["wide"] * pack.SIZES[problem.dtype]
    for *at, tap, channel in np.ndindex(p["n"], p["lines"], p["across"], p["taps"], p["channels"]):
        n, line, pixel = at
        r, s = divmod(tap, p["taps_w"])
        h = line * p["up_h"] - p["pad_h"] + r * p["dilation_h"]
        w = pixel * p["up_w"] - p["pad_w"] + s * p["dilation_w"]
        if 0 <= h < p["height"] and 0 <= w < p["width"]:
            value = flat[n * p["step_n"] + channel * p["step_c"] + h * p["step_h"] + w * p["step_w"]]
            out[0, 0, n, line, pixel, tap * p["channels"] + channel] = value
    return out


def packed_filters(view: ConvProblem, w: np.ndarray, line: int) -> np.ndarray:
    """The same of filters: of a view with fewer taps, each is several of w's side by side."""
    taps = prod(view.kernel)
    parts = 3 if view.math == "3xtf32" else 1
    out = np.zeros((view.k, taps, parts, line))
    lines = w.transpose(0, 2, 3, 1).reshape(view.k, taps, -1)
    for part in (0, 2) if parts == 3 else (0,):
        out[:, :, part, : lines.shape[2]] = lines
    return out


def follow(problem: ConvProblem, config: Config, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What the kernels compute, by their own index arithmetic, from the launch's words and maps."""
    algorithm = ImplicitGemm()
    launch = algorithm.launch(problem, config, H200)
    p = dict(zip(launch.names, launch.words, strict=True))
    size = pack.SIZES[problem.dtype]
    base = geometry.unfolded(problem, config.unfold)
    if config.unfold:
        images = Memory(packed_windows(problem, base, x))
    else:
        images = Memory(packed_images(problem, x) if geometry.is_packed(problem, config) else x.transpose(0, 2, 3, 1))
    filters = Memory(packed_filters(base, w, geometry.filter_line(base)))
    view = geometry.view_of(problem, config)
    (out_h, out_w), groups, group_k = view.output, view.groups, view.group_k
    line = span(view) // size
    steps = line if geometry.last_steps(view) * 32 == span(view) else geometry.last_steps(view) * 32 // size
    five = geometry.has_groups(view)
    taps = prod(view.kernel)
    y = np.full((problem.n * out_h * out_w, problem.k), np.nan)
    chunks, part = p["chunks"], p["part_chunks"]

    def chunk_of(chunk: int, group: int) -> tuple[int, int]:
        second = chunk >= 2 * part
        return (chunk - 2 * part if second else chunk % part) * line, group + second * groups

    for tile in range(p["tiles"]):
        rest, tile_f = divmod(tile, p["tiles_f"])
        filter0, group, pixel0 = tile_f * config.filters, rest % groups, rest // groups * config.pixels
        sums = np.zeros((config.pixels, config.filters))
        for chunk in range(chunks):
            channel, g = chunk_of(chunk, group)
            used = steps if (chunk + 1) % part == 0 else line
            slab = np.zeros((0, line))
            if config.kernel == "slab":
                for first in range(0, p["lines"], p["copy_lines"]):
                    n, at = divmod(pixel0 + first, p["wide"] * p["high"])
                    h, v = divmod(at, p["wide"])
                    if config.gather:
                        lines = gathered(problem, p, x, pixel0 + first, p["copy_lines"], group, chunk, line)
                    else:
                        more = (g + n // p["n"],) if five else ()
                        images_n = n % p["n"] if five else n
                        place = (channel, v - p["pad_w"], h - p["pad_h"], images_n, *more)
                        lines = images.windows(launch.maps["x"], size, place, (0,) * len(view.spatial) + (0,) * five)
                    slab = np.concatenate([slab, lines])
            if config.kernel == "box":
                n, h, v = corner(p, pixel0 // config.pixels)
                more = (g,) if five else ()
                slab = images.boxes(launch.maps["x"], size, (channel, v - p["pad_w"], h - p["pad_h"], n, *more))
                slab = np.concatenate([slab, np.full((p["copy_lines"], line), 7.0)])
            for tap in range(taps):
                r, s = divmod(tap, view.kernel[1])
                if config.kernel != "stream":
                    shift = r * p["dilation_h"] * p["wide"] + s * p["dilation_w"]
                    lines = slab[shift : shift + config.pixels]
                    assert len(lines) == config.pixels
                else:
                    n, at = divmod(pixel0, out_h * out_w)
                    h, v = divmod(at, out_w)
                    place = (channel, v * p["stride_w"] - p["pad_w"], h * p["stride_h"] - p["pad_h"], n)
                    more = (g,) if five else ()
                    offsets = (s * p["dilation_w"], r * p["dilation_h"], *((0,) if five else ()))
                    lines = images.windows(launch.maps["x"], size, (*place, *more), offsets)
                right = np.array([
                    filters.read(launch.maps["w"], size, (chunk * line, tap, group * group_k + filter0 + one))
                    for one in range(config.filters)
                ])  # fmt: skip
                if config.bundle == 1:
                    sums += lines[:, :used] @ right[:, :used].T
                    continue
                wide, high = line // config.bundle, config.filters // config.bundle
                for one in range(config.bundle):
                    mine = slice(one * high, (one + 1) * high)
                    sums[:, mine] += lines[:, one * wide : (one + 1) * wide] @ right[mine].T
        if geometry.boxes_of(view, config) == 2:
            store_boxes(launch.maps["out"], config, y.reshape(-1), sums, (filter0, group, pixel0))
            continue
        for one in range(config.pixels):
            if config.kernel == "box":
                n, h, v = corner(p, pixel0 // config.pixels)
                row, column = divmod(one, p["wide"])
                if row >= p["down"] or column >= p["across"] or h + row >= out_h or v + column >= out_w:
                    continue
                pixel = (n * out_h + h + row) * out_w + v + column
            elif config.kernel == "slab":
                n, at = divmod(pixel0 + one, p["wide"] * p["high"])
                h, v = divmod(at, p["wide"])
                if n >= p["n"] or h >= out_h or v >= out_w:
                    continue
                pixel = (n * out_h + h) * out_w + v
            else:
                pixel = pixel0 + one
                if pixel >= p["pixels"]:
                    continue
            count = min(config.filters, group_k - filter0)
            to = y[pixel, group * group_k + filter0 : group * group_k + filter0 + count]
            assert np.isnan(to).all(), "written twice"
            to[:] = sums[one, :count]
    return y.reshape(problem.n, out_h, out_w, problem.k).transpose(0, 3, 1, 2)


def store_boxes(map_: TensorMap, config: Config, y: np.ndarray, sums: np.ndarray, place: tuple[int, int, int]) -> None:
    """A tile's sums as the copy engine writes them: boxes of 64 filters and of so many pixels as divide all tiles."""
    inner, _, pixels = map_.box
    size = map_.strides[0] // max(1, map_.sizes[0])
    filter0, group, pixel0 = place
    assert config.pixels % pixels == 0
    for first in range(0, -(-config.filters // 64) * 64, inner):
        for line in range(config.pixels):
            for i in range(inner):
                filter_, pixel = filter0 + first + i, pixel0 + line
                if filter_ >= map_.sizes[0] or pixel >= map_.sizes[2]:
                    continue
                assert first + i < config.filters, "what was not computed is not written"
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
    """Lines of a slab as warps gather them."""
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


@pytest.mark.parametrize("text", FOLLOWED)
def test_maps_schedules_and_slabs_compute_the_convolution(text: str) -> None:
    problem = ConvProblem.parse(text)
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(float) for shape in (problem.x_shape, problem.w_shape))
    expected = convolve(problem, x, w)
    kernels, ways = set(), set()
    for config in some(problem):
        if config.pixels > 128:
            continue
        ways.add(config.unfold)
        if not config.unfold:
            kernels.add(config.kernel)
        assert np.array_equal(follow(problem, config, x, w), expected), config
    assert ways == set(geometry.unfoldings(problem))
    if 0 not in ways:
        return
    unit = set(folded(problem).stride) == {1} and prod(problem.kernel) >= configs.LEAST_TAPS and "pad4" not in text
    assert kernels - {"box"} == ({"stream", "slab"} if unit else {"stream"})
    # Boxes need whole pieces of channels, or packed ones, and lines of four outputs.
    whole = geometry.is_whole(problem) or problem.layout == "nchw" or problem.math == "3xtf32"
    taps = set(folded(problem).stride) == {1} and prod(problem.kernel) >= configs.LEAST_TAPS
    assert ("box" in kernels) == (taps and whole and problem.output[1] >= configs.LEAST_ACROSS)


def test_a_wrong_corner_is_seen() -> None:
    problem = ConvProblem.parse(FOLLOWED[0])
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(float) for shape in (problem.x_shape, problem.w_shape))
    config = next(one for one in some(problem) if one.kernel == "stream")
    wrong = problem.replace(padding=((1, 1), (0, 2)))
    assert not np.array_equal(follow(wrong, config, x, w), convolve(problem, x, w))


@pytest.mark.parametrize("text", COMPILED)
def test_geometry(text: str) -> None:
    """Shared memory and boxes within what the hardware allows; every stage and slab begins on a swizzled pattern."""
    algorithm, problem = ImplicitGemm(), ConvProblem.parse(text)
    configs = algorithm.configs(problem, H200)
    assert len(configs) == len(set(configs)) == len({str(config) for config in configs})
    for config in configs:
        launch = algorithm.launch(problem, config, H200)
        assert launch.shared_bytes * config.resident <= H200.shared_bytes + 1024
        assert launch.grid[0] % config.split == 0
        assert launch.dependent
        for name, map_ in launch.maps.items():
            assert map_.box[0] * pack.SIZES[problem.dtype] <= 128
            assert max(map_.box) <= 256
            assert all(stride % 16 == 0 for stride in map_.strides), (name, map_)
            assert map_.corners is None or len(map_.corners[0]) == len(map_.sizes) - 2
        for side in (config.pixels, config.filters):
            assert side % 8 == 0
        tiles_f, tiles = geometry.tiles_of(geometry.view_of(problem, config), config)
        if config.kernel == "stream" and config.held:
            # The next tile of a block has the same filters.
            assert launch.grid[0] % (tiles_f * geometry.view_of(problem, config).groups) == 0
            assert tiles > launch.grid[0] > 0
        if config.kernel == "slab":
            lines, each = geometry.slab_lines(geometry.view_of(problem, config), config)
            assert lines % each == 0
            assert each % 8 == 0


def test_a_map_is_sixteen_words_whose_first_is_an_address() -> None:
    algorithm, problem = ImplicitGemm(), ConvProblem.parse(COMPILED[0])
    launch = algorithm.launch(problem, some(problem)[0], H200)
    assert set(launch.maps) >= {"x", "w"}
    names = list(launch.names)
    for index, name in enumerate(("x", "w")):
        assert names.index(f"{name}0") == index * WORDS, "maps begin on multiples of 64 bytes"
    assert {"y", "bias", "residual"} <= set(launch._open)
    with pytest.raises(KeyError, match="z0"):
        Launch(launch.source, ("y",), {}, (1, 1, 1), (32, 1, 1), maps={"z": launch.maps["x"]})


def test_filters_are_fetched_ahead_only_where_they_are_settled() -> None:
    """A launch may read filters before the one before has ended: not those that it has just packed."""
    problem = ConvProblem.parse(COMPILED[0])
    for config in some(problem):
        assert "settled" in ImplicitGemm().launch(problem, config, H200)._open
    seen: list[Mapping[str, int]] = []

    class Plan(CudaPlan):
        def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
            seen.append(addresses)

    array = DeviceArray(1 << 20, (1,), (2,), np.dtype(np.float16), 0, "other", None)
    for packed in (array, replace(array, settled=True)):
        Plan(problem, H200, []).run(array, packed, array, stream=0)
    assert [addresses.get("settled", 0) for addresses in seen] == [0, 1]


def test_what_a_map_can_express() -> None:
    assert legal(((-1, -1), (-1, -1)), (2, 2), (1, 2))
    assert not legal(((-129, 0), (0, 0)), (2, 2), (1, 1))
    assert legal(((-12, -12, 0), (-12, -12, 0)), (24, 24, 0), (1, 1, 1))
    assert not legal(((-17, 0, 0), (0, 0, 0)), (2, 2, 0), (1, 1, 1))
    assert not legal(((0, 0), (0, 0)), (0, 0), (9, 1))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("c64 h9 w9 k64 r3 s3", "tensor cores"),
        ("c64 h9 w9 k64 r3 s3 f64", "tensor cores"),
        ("c64 h9 w9 k64 r3 s3 f16 dgrad", "fprop"),
        ("c64 w9 k64 s3 f16", "spatial"),
        ("n0 c64 h9 w9 k64 r3 s3 f16", "nothing"),
        ("c64 h90 w90 k64 r3 s3 stride9 f16", "tensor map"),
        ("c64 h900 w900 k64 r3 s3 dilation200 f16", "tensor map"),
        ("c4 h70 w131 k4 r8 s8 groups4 3xtf32", "channels"),
        ("n70000 c64 h32 w32 k64 r1 s1 f16", "2\\^31"),
    ],
)
def test_refusals_say_why(text: str, says: str) -> None:
    problem = ConvProblem.parse(text)
    reason = ImplicitGemm().rejects(problem, H200)
    assert reason is not None
    assert re.search(says, reason)
    assert "Hopper" in (ImplicitGemm().rejects(ConvProblem.parse(COMPILED[0]), A100) or "")
    assert "GPU" in (ImplicitGemm().rejects(ConvProblem.parse(COMPILED[0]), Device("cpu", "a CPU", 2)) or "")
    if says not in ("tensor map", "2\\^31", "channels"):
        assert re.search(says, ImplicitGemmMma().rejects(problem, H200) or "")


def test_other_gpus_get_the_other_instructions() -> None:
    problem = ConvProblem.parse(COMPILED[0])
    assert dispatch.choose(problem, H200).algorithm == "cuda.implicit_gemm"
    assert dispatch.choose(problem, A100).algorithm == "cuda.implicit_gemm_mma"
    for text in COMPILED:
        assert ImplicitGemmMma().rejects(ConvProblem.parse(text), A100) is None
        assert ImplicitGemmMma().configs(ConvProblem.parse(text), A100)


def test_patches_side_by_side_are_channels() -> None:
    problem = ConvProblem.parse("n2 c32 h112 w112 k192 r4 s4 stride4 f16 nhwc")
    assert str(folded(problem)) == "n2 c128 h112 w28 k192 r4 s1 stride4x1 f16 nhwc"
    for text in (
        "c32 h112 w114 k192 r4 s4 stride4 f16 nhwc", "c32 h112 w112 k192 r4 s4 stride4 f16",
        "c3 h112 w112 k192 r4 s4 stride4 f16 nhwc", "c32 h112 w112 k192 r4 s4 stride4 pad4 f16 nhwc",
        "c32 h112 w112 k192 r4 s4 stride4 groups2 f16 nhwc", "c32 h112 w112 k192 r3 s3 f16 nhwc",
    ):  # fmt: skip
        assert folded(ConvProblem.parse(text)) == ConvProblem.parse(text)


def test_bounds_of_tensor_cores() -> None:
    """tf32 is allowed what cutting off thirteen bits loses; 3xtf32 hardly more than fp32."""
    for algorithm in (ImplicitGemm(), ImplicitGemmMma()):
        plain, tf32, three = (
            algorithm.error_factor(ConvProblem.parse(f"c64 h9 w9 k64 r3 s3 {word}"))
            for word in ("f16", "tf32", "3xtf32")
        )
        assert tf32 - plain == 2.0**15
        assert three == plain
    problem = ConvProblem.parse("c64 h9 w9 k64 r3 s3 tf32")
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (problem.x_shape, problem.w_shape))
    cut = [(array.view(np.uint32) & 0xFFFFE000).view(np.float32) for array in (x, w)]
    expected, bound = verify.expectation(problem, ImplicitGemm(), x, w)
    assert (np.abs(convolve(problem, *cut) - expected) <= bound).all()
    ieee = verify.expectation(problem.replace(math="3xtf32"), ImplicitGemm(), x, w)[1]
    assert not (np.abs(convolve(problem, *cut) - expected) <= ieee).all()


def test_predictions_tell_what_they_are_made_of() -> None:
    algorithm, problem = ImplicitGemm(), ConvProblem.parse(COMPILED[0])
    choice = dispatch.choose(problem, H200)
    text = algorithm.explain(problem, choice.config, H200)  # type: ignore[arg-type]
    assert re.search(r"tiles a multiprocessor .*bound by (products|copies).*memory", text)
    work = model.Work(
        rows=128, columns=128, steps=36, instructions=4, stages=6, flight=2, pixel_lines=128, filter_lines=128,
        line_bytes=128, ragged=0.0, pixel_readers=2, filter_readers=66, slab=False, gather=0,
        outputs=128 * 128, together=1, residual=False, ahead=False, activation=None, written=8, boxes=True, tiles=132,
        split=1, room=1, overlapped="loop", multiprocessors=132, read_bytes=10**6, written_bytes=10**6, packed_bytes=0,
        windows=False,
    )  # fmt: skip
    one = model.cost(work, 4280.0)
    assert one.share == 1
    twice = model.cost(replace(work, tiles=133), 4280.0)
    assert twice.share == 2
    assert 1.5 * one.us < twice.us < 2 * one.us
    # What costs more: lines that end within pieces, windows outside, too few stages, threads that write.
    for worse in (
        replace(work, ragged=1.0), replace(work, stages=3), replace(work, boxes=False),
        replace(work, packed_bytes=10**6), replace(work, residual=True), replace(work, activation="silu"),
        replace(work, pixel_readers=1),
    ):  # fmt: skip
        assert model.cost(worse, 4280.0).us > one.us
    # Clusters of four do not find a place on every multiprocessor.
    split = replace(work, tiles=32, split=4, overlapped="once")
    assert model.cost(split, 4280.0).share == 2
    assert model.cost(replace(split, room=2), 4280.0).share < 1.1


def test_mma_words_and_grid() -> None:
    algorithm = ImplicitGemmMma()
    for text in (*COMPILED, "n2 c256 h14 w14 k256 r3 s3 pad1 groups32 f16 nhwc"):
        problem = ConvProblem.parse(text)
        for config in algorithm.configs(problem, H200):
            launch = algorithm.launch(problem, config)
            p = dict(zip(launch.names, launch.words, strict=True))
            assert p["tiles_k"] * config.filters >= problem.group_k
            assert p["tiles_g"] * config.bundle >= problem.groups
            assert launch.grid[0] // (p["tiles_k"] * p["tiles_g"]) * config.pixels >= p["pixels"]
            assert p["part_steps"] * config.split >= p["steps"]
            assert launch.grid[1] == config.split
            assert launch.shared_bytes <= H200.shared_bytes
            assert launch.block[0] % 32 == 0
            # Pieces of a line and groups are fixed for a thread.
            across = implicit_gemm_mma.SPAN // (algorithm._piece(problem) or 16)
            assert launch.block[0] % (across * config.bundle) == 0, config


@pytest.mark.parametrize("identifier", ["cuda.implicit_gemm", "cuda.implicit_gemm_mma"])
def test_configs_are_named_by_their_strings(identifier: str) -> None:
    problem = ConvProblem.parse(COMPILED[0])
    algorithm = registry.get(identifier)
    config = algorithm.configs(problem, H200)[3]
    assert dispatch.choose(problem, H200, identifier, config=str(config)).config == config


def test_rungs_of_the_ladder_add_configs() -> None:
    """Each rung of `study gemm-ladder` takes what the one before took, and the last one everything."""
    algorithm = ImplicitGemm()
    for text in gemm.LAYERS:
        configs = algorithm.configs(ConvProblem.parse(text), H200)
        taken: list[Config] = []
        for name, takes in gemm.RUNGS:
            more = [config for config in configs if takes(config)]
            assert more, f"{text}: {name}"
            assert set(taken) <= set(more), name
            taken = more
        assert taken == list(configs)


def instructions(source: compiler.Source, architecture: str, folder: Path) -> set[str]:
    """The names of the machine instructions of a kernel."""
    (program,) = [file for file in metadata.files("nvidia-cuda-nvdisasm") or () if file.name.startswith("nvdisasm")]
    path = folder / "kernel.cubin"
    path.write_bytes(compiler.cubin(source, architecture))
    text = subprocess.run(
        [str(program.locate()), "-c", str(path)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return set(re.findall(r"\b([A-Z][A-Z0-9]+)[. ]", text))


def test_machine_code_has_the_matrix_instructions(tmp_path: Path) -> None:
    problem = ConvProblem.parse(COMPILED[0])
    engine, threads = ImplicitGemm(), ImplicitGemmMma()
    for config in some(problem)[:4]:
        found = instructions(engine.source(problem, config), "sm_90a", tmp_path)
        assert {"HGMMA", "UTMALDG"} <= found, config
        assert not found & {"HMMA", "LDL", "STL"}
    for architecture in ("sm_80", "sm_90a"):
        found = instructions(threads.source(problem, threads.configs(problem, H200)[0]), architecture, tmp_path)
        assert {"HMMA", "LDSM", "LDGSTS"} <= found
        assert not found & {"HGMMA", "LDL", "STL"}
