"""cpu.winograd of NCHW with lanes over channels: rows of x transposed on their way in, sums on their way to y."""

from dataclasses import replace

import numpy as np
import pytest

from tapwise import registry, verify
from tapwise.algorithm import Buffers
from tapwise.cpu.device import host
from tapwise.ops.conv.cpu.winograd.winograd import Config, Geometry, lanes_ways
from tapwise.ops.conv.problem import ConvProblem

WINOGRAD = registry.get("cpu.winograd")

PROBLEMS = [
    "c37 h7 w7 k21 r3 s3 pad1",
    "n2 c16 h9 w11 k40 r3 s3 pad1 bias relu",
    "c66 h13 w5 k34 r3 s3 pad0:2x1 groups2 residual",
    "c33 h8 w9 k70 r3 s3 stride2 pad1 bias residual gelu",
    "c16 h14 w13 k18 r3 s3 pad2 dilation2 bias",
    "n3 c20 h3 w17 k17 r1 s7 pad0x3",
    "c17 h21 w2 k16 r7 s1 pad3x0 silu",
    "c40 h5 w3 k33 r5 s5 pad2",
    "c32 h10 w10 k32 r2 s2 pad1:0 f64",
    "c35 h9 w10 k19 r3 s3 pad1 f16 bias residual",
    "n2 c34 h6 w7 k20 r3 s3 pad1 bf16 relu",
    "c48 h20 w6 k18 r3 s3 stride1x2 dilation3x1 pad3x1 groups3",
]


def over_channels(problem: ConvProblem) -> list[Config]:
    return [one for one in WINOGRAD.configs(problem, host()) if one.lanes == "channels"]


@pytest.mark.many
@pytest.mark.usefixtures("quick_code")
@pytest.mark.parametrize("text", PROBLEMS)
def test_planes_are_transposed(text: str) -> None:
    """Blocks of rows and filters that leave a rest, and those that leave none."""
    problem = ConvProblem.parse(text)
    configs = over_channels(problem)
    assert {one.lanes for one in WINOGRAD.configs(problem, host())} == {"tiles", "channels"}
    tiles = {(one.tile_h, one.tile_w): one for one in configs}
    for config in dict.fromkeys([configs[0], configs[len(configs) // 3], configs[-1], *tiles.values()]):
        verdict = verify.check(problem, "cpu.winograd", config)
        assert verdict, f"{config}: {verdict.message}"


def test_few_channels_make_no_vector() -> None:
    few, enough = (f"c{host().vector_bytes // 4 + more} h9 w9 k9 r3 s3" for more in (-1, 0))
    assert lanes_ways(ConvProblem.parse(few), host()) == ["tiles"]
    assert lanes_ways(ConvProblem.parse(enough), host()) == ["tiles", "channels"]
    assert lanes_ways(ConvProblem.parse(f"{few} nhwc"), host()) == ["channels"]


@pytest.mark.many
@pytest.mark.usefixtures("quick_code")
@pytest.mark.parametrize(
    "text",
    [
        "n2 c20 h11 w14 k36 r3 s3 stride2 pad1 dgrad", "c40 h13 w20 k33 r4 s4 stride2 pad1 nhwc bias relu dgrad",
        "c33 h9 w8 k20 r5 s5 stride2 pad2 dgrad", "c32 h9 w12 k40 r3 s3 stride2x1 pad0x1 groups2 bias gelu dgrad",
        "c19 h21 w30 k18 r5 s5 stride4x2 pad3 f16 dgrad", "c32 h9 w12 k40 r3 s5 pad2 dilation2 dgrad",
        "n2 c16 h6 w7 k20 r2 s3 stride2 pad1:0x0:1 f64 dgrad", "c16 h17 w2 k17 r7 s1 stride2x1 pad3x0 nhwc dgrad",
    ],
)  # fmt: skip
def test_tiles_of_dx_have_all_phases(text: str) -> None:
    """Every kind of tile, a row of tiles a task and all of them; paddings and rests of any kind."""
    problem, algorithm = ConvProblem.parse(text), registry.get("cpu.winograd", "dgrad")
    assert algorithm.refusal(problem, host()) is None
    kinds: dict[tuple[int, int, str], list[Config]] = {}
    for config in algorithm.configs(problem, host()):
        kinds.setdefault((config.tile_h, config.tile_w, config.lanes), []).append(config)
    for configs in kinds.values():
        for config in {configs[0], configs[-1]}:
            verdict = verify.check(problem, "cpu.winograd", config)
            assert verdict, f"{config}: {verdict.message}"


@pytest.mark.parametrize(
    "text",
    [
        "c8 h12 w12 k8 r3 s3 stride3 pad1 dgrad", "c8 h12 w12 k8 r1 s1 stride2 dgrad", "c8 h9 w9 k1 r3 s3 pad1 dgrad",
        "c8 h12 w12 k8 r3 s3 stride2 pad1 dilation2 dgrad", "c8 h12 w12 k8 r3 s3 pad3 dgrad",
    ],
)  # fmt: skip
def test_dgrad_that_has_no_tile(text: str) -> None:
    assert registry.get("cpu.winograd", "dgrad").refusal(ConvProblem.parse(text), host())


@pytest.mark.parametrize("text", PROBLEMS)
def test_rows_that_a_task_sees(text: str) -> None:
    """As many of x as any block of rows of tiles reads, counted tap by tap."""
    problem = ConvProblem.parse(text)
    for config in over_channels(problem)[::7]:
        g = Geometry(problem, config, host())
        high, phases = g.axes[0], g.axes[0].phases
        most = 0
        for row0 in range(0, g.phase_rows, config.rows):
            seen = {
                row // phases * high.dilation * g.high.step + row % phases * problem.stride[0] + high.dilation * tap
                for row in range(row0, min(row0 + config.rows, g.phase_rows))
                for tap in range(g.high.span)
            }
            inside = [row for row in (one - problem.padding[0][0] for one in seen) if 0 <= row < problem.spatial[0]]
            most = max(most, max(inside) - min(inside) + 1) if inside else most
        assert most <= g.transposed_rows <= problem.spatial[0]
        assert g.input_at - g.transposed_at >= g.transposed_rows * problem.spatial[1] * problem.group_c


def test_what_lies_around_is_not_touched() -> None:
    """The last planes of x and of y end with their arrays."""
    problem = ConvProblem.parse("c19 h7 w7 k18 r3 s3 pad1")
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape, dtype=np.float32) for shape in (problem.x_shape, problem.w_shape))
    for config in over_channels(problem)[::5]:
        plan = WINOGRAD.plan(problem, config, host())
        whole = np.full(problem.k * 49 + 64, np.float32(7))
        y = whole[32:-32].reshape(problem.y_shape)
        scratch = np.empty(plan.workspace_bytes + 64, np.uint8)
        plan.run(Buffers(x, plan.pack(w), y, scratch[-scratch.ctypes.data % 64 :]))
        assert np.all(whole[:32] == 7) and np.all(whole[-32:] == 7)
        assert np.all(y != 7)


@pytest.mark.usefixtures("quick_code")
@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("c37 h7 w7 k21 r3 s3 pad1", 3),
        ("c400 h6 w6 k20 r3 s3 pad1", 4),
        ("c36 h9 w9 k50 r3 s3 pad1 groups2 nhwc", 2),
        ("c24 h8 w9 k40 r3 s3 stride2 pad1 dgrad", 2),
    ],
)
def test_threads_share_the_packing_of_one_block(text: str, threads: int) -> None:
    """Channels of a block of all filters, a rest and several blocks of them: as one thread packs them."""
    problem, device = ConvProblem.parse(text), host()
    algorithm = registry.get("cpu.winograd", problem.operator)
    rng = np.random.default_rng(5)
    w = rng.standard_normal(problem.w_shape).astype(np.float32)
    every = Geometry(problem, algorithm.configs(problem, device)[0], device).problem.group_k
    for config in [one for one in algorithm.configs(problem, device) if one.filters >= every][::7]:
        geometry = Geometry(problem, config, replace(device, threads=threads))
        assert geometry.pack_tasks > geometry.problem.groups
        many, alone = (
            algorithm.plan(problem, config, replace(device, threads=count)).pack(w) for count in (threads, 1)
        )
        np.testing.assert_array_equal(many, alone)
