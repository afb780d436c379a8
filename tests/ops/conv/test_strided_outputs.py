"""dgrad whose phases write to where their elements lie in dx: plans run by emulation, against float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from compiled_kernels import Share, compiled
from emulated_plans import SMALL, needs_compiler, verdict_of

from tapwise import registry
from tapwise.algorithm import Config as BaseConfig
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.fprop_phases import FpropPhases, needs_join, place_of, strides_of
from tapwise.ops.conv.cuda.implicit_gemm.dgrad import ImplicitGemmDgrad
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.view import View
from tapwise.ops.conv.phases import Config, phases_of, with_taps
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = FpropPhases()


def way(problem: ConvProblem, config: Any) -> tuple[object, ...]:
    """How outputs of cuda.implicit_gemm go to dx."""
    epilogue = Epilogue(View.of(problem, config, strides_of(problem)))
    stored = "tma" if epilogue.tma_store else "registers" if epilogue.permuted_n else "threads"
    return config.kernel, bool(config.gather_bytes), stored, config.swap_ab, config.split_k > 1


def chosen(problem: ConvProblem, identifier: str, key: Callable[[ConvProblem, Any], Any]) -> Config:
    """Of each phase the config whose key is the least."""
    algorithm, parts = registry.get(identifier), []
    for phase in phases_of(problem) or ():
        if (inner := phase.problem) is not None:
            parts.append((identifier, min(algorithm.configs(inner, SMALL), key=lambda one: key(inner, one))))
    return Config(tuple(parts))


def smallest(problem: ConvProblem, wanted: tuple[object, ...]) -> Config:
    """Of each phase the config of cuda.implicit_gemm that has the smallest tile and goes the way wanted, else any."""

    def key(phase: ConvProblem, config: Any) -> Any:
        return bool(config.unfold), way(phase, config) != wanted, config.tile_pixels * config.tile_filters, str(config)

    return chosen(problem, "cuda.implicit_gemm", key)


@pytest.mark.many
@needs_compiler
@pytest.mark.parametrize(
    ("text", "kernel", "gathers", "stored", "swap_ab", "splits"),
    [
        ("n2 c72 h11 w13 k64 r3 s3 stride2 pad1 bias relu f16 nhwc dgrad", "im2col", False, "tma", True, False),
        ("n3 c136 h15 w15 k40 r3 s2 stride3x2 bias bf16 nhwc dgrad", "im2col", False, "tma", False, False),
        ("n2 c72 h11 w13 k64 r3 s3 stride2 pad1 bias relu f16 nhwc dgrad", "im2col", False, "registers", False, False),
        ("n2 c37 h12 w15 k64 r2 s2 stride2 bias silu f16 nhwc dgrad", "im2col", False, "threads", False, False),
        ("n2 c72 h11 w13 k64 r3 s3 stride2 pad1 bias relu f16 nhwc dgrad", "im2col", False, "threads", True, True),
        ("n2 c72 h15 w16 k24 r5 s5 stride2 pad2 bias f16 nhwc dgrad", "halo_rows", False, "threads", True, False),
        ("n2 c64 h17 w14 k32 r8 s6 stride3x2 pad2 relu bf16 nhwc dgrad", "halo_tile", False, "registers", False, False),
        ("n2 c48 h15 w16 k40 r5 s5 stride2 pad2 groups2 f16 nhwc dgrad", "halo_rows", True, "registers", False, False),
        ("n2 c64 h9 w12 k40 r1 s1 stride2 bias silu f16 nhwc dgrad", "im2col", False, "tma", False, False),
    ],
)
def test_tensor_cores_write_strided(
    emulation: None, text: str, kernel: str, gathers: bool, stored: str, swap_ab: bool, splits: bool
) -> None:
    problem, wanted = ConvProblem.parse(text), (kernel, gathers, stored, swap_ab, splits)
    config = smallest(problem, wanted)
    inner = [phase.problem for phase in phases_of(problem) or () if phase.problem is not None]
    assert any(way(one, part) == wanted for one, (_, part) in zip(inner, config.parts, strict=True))
    assert all(ALGORITHM.direct(problem, config)) and ALGORITHM.workspace_bytes(problem, config, SMALL) == 0
    assert (verdict := verdict_of(ALGORITHM, problem, config)), verdict.message


@pytest.mark.many
@needs_compiler
@pytest.mark.parametrize(
    ("number", "text"),
    list(
        enumerate(
            [
                "n2 c72 h9 w10 k40 r3 s3 pad1 bias relu f16 nhwc dgrad",
                "n2 c24 h7 w9 k24 r3 s2 stride2 pad1x0 bf16 nhwc dgrad",
                "n2 c136 h8 w7 k72 r1 s3 stride1x2 dilation1x2 bias f16 nhwc dgrad",
                "n2 c48 h9 w9 k80 r2 s2 stride2 f16 nhwc dgrad",
                "n2 c64 h7 w8 k40 r1 s1 stride2 bias silu f16 nhwc dgrad",
                "n2 c16 h12 w11 k136 r5 s5 pad2 bf16 nhwc dgrad",
            ]
        )
    ),
)
def test_filters_are_read_as_they_lie(emulation: None, number: int, text: str) -> None:
    """Of each schedule the smallest tile, in turns."""
    problem, algorithm = ConvProblem.parse(text), ImplicitGemmDgrad()
    kinds: dict[object, Any] = {}
    for config in algorithm.configs(problem, SMALL):
        one = config.parts[0]
        kind = one.kernel, one.swap_ab, one.split_k > 1, one.filter_stationary
        best = kinds.setdefault(kind, config)
        if one.tile_pixels * one.tile_filters < best.parts[0].tile_pixels * best.parts[0].tile_filters:
            kinds[kind] = config
    for config in list(kinds.values())[number % 3 :: 3]:
        assert (verdict := verdict_of(algorithm, problem, config)), f"{config}: {verdict.message}"


@pytest.mark.many
@needs_compiler
@pytest.mark.parametrize(
    ("text", "swap_ab", "ping_pong", "beside", "order"),
    [
        ("n2 c72 h13 w14 k64 r3 s3 stride2 pad1 bias relu", True, True, 1, "place"),
        ("n3 c64 h11 w13 k72 r3 s3 stride2 pad1 bias silu", True, False, 1, "phase"),
        ("n3 c48 h18 w13 k40 r4 s4 stride2 pad1", False, True, 1, "phase"),
        ("n2 c136 h9 w16 k24 r3 s5 stride2x3 pad1x2 dilation2x1", False, False, 2, "place"),
        ("n2 c48 h12 w13 k80 r3 s3 stride2 pad1 bias", False, False, 2, "phase"),
        ("n2 c64 h1 w37 k16 r1 s16 stride1x8 pad0x4", True, True, 1, "phase"),
        # Some of them, or all but one, no tap meets.
        ("n2 c72 h13 w14 k64 r1 s1 stride2 bias silu", True, True, 1, "place"),
        ("n3 c64 h11 w12 k40 r1 s1 stride2", False, False, 1, "phase"),
        ("n3 c136 h9 w13 k72 r3 s1 stride2 pad1x0 bias gelu", False, True, 1, "place"),
        ("n2 c48 h16 w15 k80 r1 s2 stride2", True, False, 1, "phase"),
        ("n3 c64 h12 w31 k24 r1 s1 stride1x3 bias relu", False, False, 2, "place"),
        ("n2 c40 h17 w14 k16 r2 s1 stride4x1", False, False, 1, "phase"),
    ],
)
def test_phases_in_one_launch(
    emulation: None, text: str, swap_ab: bool, ping_pong: bool, beside: int, order: str
) -> None:
    problem, algorithm = ConvProblem.parse(f"{text} f16 nhwc dgrad"), ImplicitGemmDgrad()
    ones = {config: config.parts[0] for config in algorithm.configs(problem, SMALL) if config.order == order}
    wanted = [
        config for config, one in ones.items()
        if (one.swap_ab, one.ping_pong, one.min_blocks_per_sm) == (swap_ab, ping_pong, beside)
    ]  # fmt: skip
    config = min(wanted, key=lambda config: (ones[config].tile_pixels * ones[config].tile_filters, str(config)))
    launches = algorithm.launches(problem, config, SMALL)
    # With those that no tap meets, where they are up to four.
    phases = len(phases_of(problem) or ())
    assert len(launches) == -(-(phases if phases <= 4 else len(config.parts)) // 4)
    assert launches[0][1].grid[0] <= SMALL.multiprocessors * beside
    assert (verdict := verdict_of(algorithm, problem, config)), verdict.message


@needs_compiler
@pytest.mark.parametrize(
    "text", ["n2 c8 h1 w1 k8 r1 s1 stride2 pad1", "n2 c16 h1 w9 k8 r1 s1 stride2 pad1x0 bias silu"]
)
def test_a_small_image_that_no_tap_meets(emulation: None, text: str) -> None:
    """Its only rows lie between those that taps meet: a launch writes what nothing is added to."""
    problem = ConvProblem.parse(f"{text} f16 nhwc dgrad")
    assert not with_taps(problem)
    for algorithm in (ImplicitGemmDgrad(), ALGORITHM):
        assert algorithm.rejects(problem, SMALL) is None
        (config,) = algorithm.configs(problem, SMALL)
        assert algorithm.predict_us(problem, config, SMALL) > 0
        assert (verdict := verdict_of(algorithm, problem, config)), verdict.message


@needs_compiler
@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize(
    "text",
    [
        "n2 c20 h9 w13 k136 r4 s3 stride2x3 pad1x0 dilation1x2 groups2 bias relu bf16 nhwc dgrad",
        "n2 c19 h9 w8 k136 r1 s1 stride2 bias silu f16 nhwc dgrad",
    ],
)
def test_mma_writes_strided(emulation: None, text: str, split_k: int) -> None:
    problem = ConvProblem.parse(text)

    def key(phase: ConvProblem, config: Any) -> Any:
        return config.split_k != split_k, config.split_k, config.pixels * config.filters, str(config)

    config = chosen(problem, "cuda.implicit_gemm_mma", key)
    assert {part.split_k for _, part in config.parts} == {split_k}  # type: ignore[attr-defined]
    assert all(ALGORITHM.direct(problem, config))
    assert (verdict := verdict_of(ALGORITHM, problem, config)), verdict.message


@needs_compiler
@pytest.mark.parametrize("kind", ["Streamed", "Rows", "Columns"])
def test_depthwise_writes_strided(emulation: None, kind: str) -> None:
    problem = ConvProblem.parse("n2 c24 h11 w9 k24 r2 s2 stride2 groups24 bias silu f16 nhwc dgrad")
    config = chosen(problem, "cuda.depthwise", lambda _, one: (type(one).__name__ != kind, str(one)))
    assert {type(part).__name__ for _, part in config.parts} == {kind}
    assert all(ALGORITHM.direct(problem, config))
    assert (verdict := verdict_of(ALGORITHM, problem, config)), verdict.message


def test_depthwise_phases_do_not_wait_for_each_other() -> None:
    """But for the first one, and where a launch puts dx together behind them."""
    problem = ConvProblem.parse("n2 c24 h11 w9 k24 r3 s3 stride2 pad1 groups24 f16 nhwc dgrad")
    config = chosen(problem, "cuda.depthwise", lambda _, one: (type(one).__name__ != "Streamed", str(one)))
    texts = [source.text for source in ALGORITHM.sources(problem, config)]
    assert sum("#define BESIDE" in text and "end_beside<true>(); }" in text for text in texts) == len(texts) - 1 == 3
    planar, mixed = problem.replace(layout="nchw"), problem.replace(kernel=(1, 1), padding=((0, 0), (0, 0)))
    for other in (planar, mixed):
        configs = ALGORITHM.configs(other, H200)
        assert not any("BESIDE" in source.text for one in configs for source in ALGORITHM.sources(other, one)), other


def test_small_depthwise_phases_may_read_filters_in_place() -> None:
    """Of a small image packing takes longer than the sums."""
    problem = ConvProblem.parse("n32 c96 h10 w10 k96 r3 s3 stride2 pad1 groups96 f16 nhwc dgrad")
    read = [config for config in ALGORITHM.configs(problem, H200) if all(ALGORITHM.read_in_place(problem, config))]
    best = min(
        ALGORITHM.configs(problem, H200),
        key=lambda one: ALGORITHM.predict_us(problem, one, H200) + ALGORITHM.pack_us(problem, one, H200),
    )
    assert best in read


@needs_compiler
@pytest.mark.parametrize(
    "text",
    [
        "n2 c24 h9 w7 k24 r5 s3 stride2 pad2x1 groups24 f16 nhwc dgrad", "n2 c5 h9 w9 k15 r3 s3 pad1 groups5 dgrad",
        "n2 c19 h8 w9 k19 r3 s3 pad1 groups19 bf16 nhwc bias dgrad",
    ],
)  # fmt: skip
def test_filters_of_lone_channels_are_views(emulation: None, text: str) -> None:
    """Nothing is turned; by two algorithms that take each phase and are emulated."""
    problem = ConvProblem.parse(text)
    assert not any(
        "turn" in source.entry for source in ALGORITHM.sources(problem, ALGORITHM.configs(problem, SMALL)[0])
    )
    for identifier in ("cuda.depthwise", "cuda.sliding_window") if problem.dtype == "f32" else ("cuda.depthwise",):
        phases = [phase.problem for phase in phases_of(problem) or () if phase.problem is not None]
        if not any(registry.get(identifier).refusal(one, SMALL) for one in phases):
            config = chosen(problem, identifier, lambda _, one: str(one))
            assert (verdict := verdict_of(ALGORITHM, problem, config)), verdict.message


@needs_compiler
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_some_phases_are_joined(emulation: None, layout: str) -> None:
    """One of the two that have taps goes by way of the workspace, or both where channels are outside."""
    text = f"n2 c16 h9 w8 k24 r2 s1 stride2x3 bias silu bf16 {layout} dgrad"
    problem = ConvProblem.parse(text)
    names = "cuda.implicit_gemm_mma", "cuda.sliding_window"
    taps = [phase for phase in phases_of(problem) or () if phase.problem is not None]
    config = Config(
        tuple((name, registry.get(name).configs(one.problem, SMALL)[0]) for name, one in zip(names, taps, strict=True))
    )
    direct = ALGORITHM.direct(problem, config)
    assert direct == (layout == "nhwc", False) and needs_join(problem, direct)
    slots = direct.count(False) * ALGORITHM.slot_bytes(problem)
    assert ALGORITHM.workspace_bytes(problem, config, SMALL) == ALGORITHM.inner_at(problem, config) == slots
    assert (verdict := verdict_of(ALGORITHM, problem, config)), verdict.message


def test_phases_are_direct_in_pieces_of_a_sector() -> None:
    def direct(text: str) -> set[bool]:
        problem = ConvProblem.parse(f"n2 {text} dgrad")
        configs = ALGORITHM.configs(problem, H200)
        return set(ALGORITHM.direct(problem, min(configs, key=lambda one: ALGORITHM.predict_us(problem, one, H200))))

    assert direct("c128 h56 w56 k256 r3 s3 stride2 pad1 f16 nhwc") == {True}
    assert direct("c128 h56 w56 k256 r1 s1 stride2 tf32 nhwc") == {True}
    assert direct("c128 h56 w56 k256 r3 s3 stride2 pad1 f16 nchw") == {False}
    assert direct("c8 h56 w56 k256 r3 s3 stride2 pad1 f16 nhwc") == {False}
    # Of one phase the result is dx.
    assert direct("c8 h56 w56 k256 r3 s3 pad1 f16 nchw") == {True}


def test_time_of_phases_has_no_copy_where_they_are_direct() -> None:
    problem = ConvProblem.parse("n32 c128 h56 w56 k256 r3 s3 stride2 pad1 f16 nhwc dgrad")
    config = ALGORITHM.configs(problem, H200)[0]
    assert all(ALGORITHM.direct(problem, config)) and ALGORITHM.join_us(problem, config, H200) == 0
    ragged = problem.replace(c=120)
    assert 0 < ALGORITHM.join_us(ragged, ALGORITHM.configs(ragged, H200)[0], H200) < 10
    empty = problem.replace(kernel=(1, 1), padding=((0, 0), (0, 0)))
    nchw = empty.replace(layout="nchw")
    times = [ALGORITHM.join_us(one, ALGORITHM.configs(one, H200)[0], H200) for one in (empty, nchw)]
    assert 0 < times[0] < times[1]


def test_groups_are_not_written_by_tma() -> None:
    """Beyond the last pixel its walk goes on in the next group."""
    problem = ConvProblem.parse("n2 c128 h16 w16 k128 r1 s1 stride2 groups2 f16 nhwc dgrad")
    (phase,) = (one.problem for one in phases_of(problem) or () if one.problem is not None)
    for config in registry.get("cuda.implicit_gemm").configs(phase, H200):
        assert Epilogue(View.of(phase, config, strides_of(problem))).tma_store == 0


def test_words_of_sixty_four_phases() -> None:
    problem = ConvProblem.parse("n2 c16 h9 w9 k16 r1 s1 stride8 f16 nhwc dgrad")
    launch = ALGORITHM.join_launch(problem, [True], H200)
    words = dict(zip(launch.names, launch.words, strict=True))
    assert (words["empty"], words["joined"]) == (-2, 0)
    assert place_of(problem, (phases_of(problem) or ())[9]) == (9 + 1) * 16


@pytest.mark.many
@pytest.mark.parametrize(
    "text",
    [
        "n32 c128 h56 w56 k256 r3 s3 stride2 pad1 f16 nhwc dgrad",
        "n32 c256 h28 w28 k512 r5 s5 stride2 pad2 bf16 nhwc bias silu dgrad",
        "n32 c128 h56 w56 k256 r1 s1 stride2 tf32 nhwc bias gelu dgrad",
        "n32 c100 h28 w28 k64 r4 s4 stride2 pad1 f16 nhwc bias dgrad",
        "n32 c128 h28 w28 k128 r3 s3 stride2 pad1 groups4 f16 nhwc dgrad",
        "n32 c96 h28 w28 k96 r5 s5 stride2 pad2 groups96 f16 nhwc bias silu dgrad",
    ],
)
def test_kernels_compile_without_spills_or_waits(text: str, share: Share) -> None:
    problem = ConvProblem.parse(text)
    phase = max((one.problem for one in phases_of(problem) or () if one.problem), key=lambda one: one.gemm_k)
    sources: dict[Any, BaseConfig] = {}
    for identifier in ("cuda.implicit_gemm", "cuda.implicit_gemm_mma", "cuda.depthwise"):
        algorithm: Any = registry.get(identifier)
        if algorithm.refusal(phase, H200) is not None:
            continue
        times = {one: algorithm.predict_us(phase, one, H200) for one in algorithm.configs(phase, H200)}
        kinds: dict[Any, BaseConfig] = {}
        for config in sorted(times, key=lambda one: times[one]):
            if algorithm.writes_strided(phase, config):
                kind = type(config), identifier.endswith("gemm") and way(phase, config)
                kinds.setdefault(kind, config)
        for config in list(kinds.values())[:6]:
            sources |= dict.fromkeys(algorithm.sources(phase, config, strides_of(problem)), config)
    for source in share(sources):
        _, used, log = compiled(source, "sm_90a")
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), (sources[source], used)
        assert not re.search(r"C75\d\d", log), (sources[source], log)


@pytest.mark.parametrize("k", [8, 16, 24, 32, 40, 72])
@pytest.mark.parametrize("stride", ["", "stride2"])
def test_filters_that_lie_begin_where_their_pattern_does(k: int, stride: str) -> None:
    """Behind the pixels of a stage, whose rows are short where there are few channels."""
    problem = ConvProblem.parse(f"n32 c112 h28 w28 k{k} r3 s3 pad1 {stride} f16 nhwc dgrad")
    parts = {part for config in ImplicitGemmDgrad().configs(problem, H200) for part in config.parts}
    seen = phases_of(problem) or ()
    assert seen[0].problem is not None
    for part in parts:
        if part.kernel == "im2col" and not part.filter_stationary:
            view = View.of(seen[0].problem, part)
            assert part.tile_pixels * view.chunk_bytes % 1024 == 0, part
