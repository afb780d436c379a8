"""Implicit GEMM without a GPU: kernels compile, geometry, refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from compiled_kernels import Share
from tensor_core_cases import A100, COMPILED, some

from tapwise import dispatch, registry
from tapwise.algorithm import Buffers, Device
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.device import H200
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.jit.tensor_map import WORDS, legal
from tapwise.cuda.plan import CudaPlan
from tapwise.lab.study import gemm
from tapwise.ops.conv.cuda import implicit_gemm_mma
from tapwise.ops.conv.cuda.implicit_gemm import epilogue
from tapwise.ops.conv.cuda.implicit_gemm.config import Config, HaloRowsConfig, Im2colConfig
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.cuda.implicit_gemm.view import View, folded
from tapwise.ops.conv.cuda.implicit_gemm_mma import ImplicitGemmMma
from tapwise.ops.conv.problem import ConvProblem
from tapwise.problem import Inputs


@pytest.mark.many
@pytest.mark.parametrize("text", COMPILED)
def test_geometry(text: str, share: Share) -> None:
    """Shared memory and boxes within what the hardware allows; every stage and slab begins on a swizzled pattern."""
    algorithm, problem = ImplicitGemm(), ConvProblem.parse(text)
    configs = algorithm.configs(problem, H200)
    assert len(configs) == len(set(configs)) == len({str(config) for config in configs})
    for config in share(configs):
        launch = algorithm.launch(problem, config, H200)
        assert launch.shared_bytes * config.min_blocks_per_sm <= H200.shared_bytes + 1024
        assert launch.grid[0] % config.split_k == 0
        assert launch.dependent
        for name, map_ in launch.maps.items():
            assert map_.box[0] * problem.itemsize <= map_.swizzle_bytes or not map_.swizzle_bytes
            assert max(map_.box) <= 256
            assert all(stride % 16 == 0 for stride in map_.strides), (name, map_)
            assert map_.corners is None or len(map_.corners[0]) == len(map_.sizes) - 2
        for side in (config.tile_pixels, config.tile_filters):
            assert side % 8 == 0
        view = View.of(problem, config)
        sets = view.tiles_f * view.seen.groups
        if config.filter_stationary:
            # The next tile of a CTA has the same filters.
            assert launch.grid[0] % sets == 0
            assert launch.grid[0] > 0
            assert view.tiles > launch.grid[0] or (sets == 1 and config.kernel != "im2col")
        if config.kernel == "halo_rows":
            pixels, each = view.halo_rows
            assert pixels % each == 0
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
        Launch(launch.source, {}, (1, 1, 1), 32, maps={"z": launch.maps["x"]})


def test_filters_are_fetched_ahead_only_where_they_are_ready() -> None:
    """A launch may read filters before the one before has ended: not those that it has just packed."""
    problem = ConvProblem.parse(COMPILED[0])
    for config in some(problem):
        assert "weights_ready" in ImplicitGemm().launch(problem, config, H200)._open
    seen: list[Mapping[str, int]] = []

    class Plan(CudaPlan):
        def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
            seen.append(addresses)

    array = DeviceArray(1 << 20, (1,), (2,), np.dtype(np.float16), 0, "other", None)
    for packed in (array, replace(array, synchronized=True)):
        Plan(problem, H200, []).run(Buffers(array, packed, array, stream=0))
    assert [addresses.get("weights_ready", 0) for addresses in seen] == [0, 1]


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
        ("c64 h9 w9 k64 r3 s3 f16 dgrad", "computes conv"),
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
    reason = ImplicitGemm().refusal(problem, H200)
    assert reason is not None
    assert re.search(says, reason)
    assert "Hopper" in (ImplicitGemm().refusal(ConvProblem.parse(COMPILED[0]), A100) or "")
    assert "GPU" in (ImplicitGemm().refusal(ConvProblem.parse(COMPILED[0]), Device("cpu", "a CPU", 2)) or "")
    if says not in ("tensor map", "2\\^31", "channels"):
        assert re.search(says, ImplicitGemmMma().refusal(problem, H200) or "")


def test_other_gpus_get_the_other_instructions() -> None:
    problem = ConvProblem.parse(COMPILED[0])
    assert dispatch.choose(problem, H200).algorithm == "cuda.implicit_gemm"
    assert dispatch.choose(problem, A100).algorithm == "cuda.implicit_gemm_mma"
    for text in COMPILED:
        assert ImplicitGemmMma().refusal(ConvProblem.parse(text), A100) is None
        assert ImplicitGemmMma().configs(ConvProblem.parse(text), A100)


def test_patches_side_by_side_are_channels() -> None:
    problem = ConvProblem.parse("n2 c32 h112 w112 k192 r4 s4 stride4 f16 nhwc")
    assert str(folded(problem)) == "n2 c128 h112 w28 k192 r4 s1 stride4x1 f16 nhwc"
    for text in (
        "c32 h112 w114 k192 r4 s4 stride4 f16 nhwc",
        "c32 h112 w112 k192 r4 s4 stride4 f16",
        "c3 h112 w112 k192 r4 s4 stride4 f16 nhwc",
        "c32 h112 w112 k192 r4 s4 stride4 pad4 f16 nhwc",
        "c32 h112 w112 k192 r4 s4 stride4 groups2 f16 nhwc",
        "c32 h112 w112 k192 r3 s3 f16 nhwc",
    ):
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
    expected, bound = problem.reference(Inputs(x, w), ImplicitGemm())
    assert (np.abs(problem.convolve(*cut) - expected) <= bound).all()
    ieee = problem.replace(math="3xtf32").reference(Inputs(x, w), ImplicitGemm())[1]
    assert not (np.abs(problem.convolve(*cut) - expected) <= ieee).all()


def test_ways_to_y() -> None:
    """From registers, by TMA or through shared memory: one of them, and buffers for all rounds of a tile where a
    residual is fetched and nothing else hides how long that takes."""
    plain = ConvProblem.parse("n32 c512 h30 w30 k1024 r3 s3 f16 nhwc")
    ways, counts, by_tma = set(), set(), set()
    for problem in (plain, plain.replace(residual=True), plain.replace(k=40), plain.replace(layout="nchw")):
        for config in ImplicitGemm().configs(problem, H200):
            way = Epilogue(View.of(problem, config))
            assert not (way.permuted_n and way.tma_store)
            assert (way.epilogue_buffers == 0) == (way.permuted_n > 0)
            assert config.tile_filters % max(way.permuted_n, 1) == 0
            late = problem.residual and config.split_k == 1 and not config.ping_pong
            if way.tma_residual:
                many = config.tile_pixels * config.tile_filters > 128 * epilogue.MOST_C_SUMS
                assert many or config.swap_ab
                by_tma.add(config.kernel)
                assert way.epilogue_buffers == max(2, min(way.rounds, epilogue.MOST_BUFFERS))
            elif not way.permuted_n:
                several = late and 2 < way.rounds <= epilogue.MOST_BUFFERS
                assert way.epilogue_buffers == (way.rounds if several else min(way.epilogue_buffers, 2))
            ways.add((way.permuted_n, way.tma_store))
            counts.add(way.epilogue_buffers)
    assert {(32, False), (16, False), (8, False), (0, True), (0, False)} <= ways
    assert counts == {0, 1, 2, 3, 4}
    assert by_tma == {"halo_rows"}


def test_order_of_filters() -> None:
    """Permuted only where filters are the instruction's columns, and outputs of a thread lie side by side in y."""
    halo = HaloRowsConfig(False, 128, 32, 8)
    im2col = Im2colConfig(False, 128, 32, 8, warpgroups=2, ping_pong=True)
    configs: tuple[tuple[str, Config, int], ...] = (
        ("c64 h9 w9 k64 r3 s3 f16 nhwc", halo, 32),
        ("c64 h9 w9 k40 r3 s3 f16 nhwc", halo, 32),
        ("c64 h9 w9 k44 r3 s3 f16 nhwc", halo, 16),
        ("c64 h9 w9 k46 r3 s3 f16 nhwc", halo, 8),
        ("c64 h9 w9 k45 r3 s3 f16 nhwc", halo, 8),
        ("c64 h9 w9 k40 r3 s3 tf32 nhwc", halo, 16),
        # Two bytes at a time.
        ("c64 h9 w9 k57 r3 s3 f16 nhwc", replace(halo, tile_filters=64), 0),
        ("c64 h9 w9 k57 r3 s3 tf32 nhwc", replace(halo, tile_filters=64), 8),
        ("c64 h9 w9 k64 r3 s3 f16", halo, 0),
        ("c64 h9 w9 k64 r3 s3 f16 nhwc", replace(halo, swap_ab=True), 0),
        ("c64 h9 w9 k64 r3 s3 3xtf32 nhwc residual", halo, 0),
        ("c64 h9 w9 k64 r3 s3 3xtf32 nhwc", halo, 16),
        # The next group's filters follow.
        ("c64 h9 w9 k80 r3 s3 groups2 f16 nhwc", halo, 8),
        ("c64 h9 w9 k96 r3 s3 groups2 f16 nhwc", halo, 16),
        ("c64 h9 w9 k64 r3 s3 f16 nhwc", replace(im2col, split_k=4), 0),
        ("c64 h9 w9 k64 r3 s3 f16 nhwc", replace(im2col, ping_pong=False), 0),
        ("c64 h9 w9 k64 r3 s3 f16 nhwc", replace(im2col, ping_pong=False, warpgroups=1), 32),
        ("n64 c64 h90 w90 k64 r3 s3 f16 nhwc", im2col, 0),
        ("n64 c64 h90 w90 k64 r3 s3 f16 nhwc residual", im2col, 32),
    )
    for text, config, wanted in configs:
        assert Epilogue(View.of(ConvProblem.parse(text), config)).permuted_n == wanted, (text, config)


def test_mma_words_and_grid() -> None:
    algorithm = ImplicitGemmMma()
    for text in (*COMPILED, "n2 c256 h14 w14 k256 r3 s3 pad1 groups32 f16 nhwc"):
        problem = ConvProblem.parse(text)
        for config in algorithm.configs(problem, H200):
            launch = algorithm.launch(problem, config)
            p = dict(zip(launch.names, launch.words, strict=True))
            assert p["tiles_k"] * config.filters >= problem.group_k
            assert p["tiles_g"] * config.groups_per_tile >= problem.groups
            assert launch.grid[0] // (p["tiles_k"] * p["tiles_g"]) * config.pixels >= p["pixels"]
            assert p["part_steps"] * config.split_k >= p["steps"]
            assert launch.grid[1] == config.split_k
            assert launch.shared_bytes <= H200.shared_bytes
            assert launch.block[0] % 32 == 0
            # Pieces of a line and groups are fixed for a thread.
            across = implicit_gemm_mma.SPAN // (algorithm._piece(problem) or 16)
            assert launch.block[0] % (across * config.groups_per_tile) == 0, config


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
