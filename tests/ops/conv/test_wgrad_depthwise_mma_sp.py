"""cuda.depthwise_mma_sp of wgrad without a GPU: kernels compile without spills, emulated ones compute the gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import lcm

import pytest
from compiled_kernels import Share, compiled
from emulated_plans import check_what_is_not_finite

import emulated
from emulated.verify import check
from tapwise import dispatch
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.costs import TAKEN
from tapwise.ops.conv.cuda.wgrad_depthwise_mma_sp import DepthwiseMmaSpWgrad
from tapwise.ops.conv.cuda.wgrad_depthwise_mma_sp_blocks import PLACES, Config, live_rows, unrolled
from tapwise.ops.conv.cuda.wgrad_stages import maps_of
from tapwise.ops.conv.cuda.wgrad_stages_blocks import min_blocks_per_sm, shared_bytes
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = DepthwiseMmaSpWgrad()
COMPILED = [
    ("n32 c256 h28 w28 k256 r7 s7 pad3 groups256 f16 nhwc", "sm_90a"),
    ("n32 c288 h28 w28 k288 r5 s5 pad2 groups288 bf16 nhwc", "sm_90a"),
    ("n32 c728 h19 w19 k728 r3 s3 pad1 groups728 f16 nhwc", "sm_100a"),
    ("n32 c64 h33 w33 k64 r9 s9 pad4 groups64 bf16 nhwc", "sm_100a"),
    ("n32 c340 h19 w19 k340 r5 s5 pad2 groups340 f16 nhwc", "sm_90a"),
    ("n32 c300 h7 w7 k300 r7 s7 pad3 groups300 bf16 nhwc", "sm_100a"),
    ("n8 c960 h7 w7 k960 r5 s5 pad2 groups960 f16 nhwc", "sm_90a"),
    ("n32 c76 h75 w75 k76 r7 s7 pad3 groups76 f16 nhwc", "sm_90a"),
]
# Images and channels that are not there, units of fewer than 8 columns, places that are none, warps that
# share channels, runs that begin within an image, strips, pieces of a filter, dilations, warps of four and of eight
# channels, copying warps that give up registers, clusters, one part.
EMULATED = [
    ("n4 c16 h9 w8 k16 r3 s3 pad1 groups16 f16 nhwc", Config(16, 4, 1, 1, 8, 2, 4, 1, 3, 2, 1)),
    ("n5 c40 h13 w19 k40 r5 s5 pad2 groups40 bf16 nhwc", Config(32, 4, 1, 3, 7, 2, 4, 2, 5, 3, 5)),
    ("n7 c24 h13 w19 k24 r5 s5 pad2 groups24 f16 nhwc", Config(16, 4, 2, 5, 4, 1, 4, 1, 5, 3, 7)),
    ("n3 c72 h9 w20 k72 r3 s3 pad1 groups72 f16 nhwc", Config(64, 8, 1, 4, 5, 1, 4, 2, 3, 2, 2, True)),
    ("n2 c16 h13 w40 k16 r5 s3 pad2x1 dilation1x2 groups16 f16 nhwc", Config(16, 4, 2, 4, 4, 1, 8, 1, 3, 2, 3)),
    ("n5 c72 h7 w7 k72 r7 s7 pad3 groups72 f16 nhwc", Config(64, 4, 1, 1, 7, 2, 8, 1, 4, 2, 3)),
    ("n5 c16 h17 w12 k16 r3 s4 pad2:1x3:0 dilation2x1 groups16 bf16 nhwc", Config(16, 8, 1, 2, 6, 2, 8, 2, 2, 2, 2)),
    ("n6 c40 h9 w13 k40 r7 s7 pad3 groups40 f16 nhwc", Config(32, 4, 1, 2, 7, 2, 8, 1, 7, 3, 2, takes=True)),
    ("n5 c16 h6 w30 k16 r1 s11 pad0x5 groups16 bf16 nhwc", Config(16, 8, 1, 4, 5, 2, 4, 4, 1, 2, 8, True)),
    ("n3 c8 h2 w3 k8 r3 s3 pad2 groups8 f16 nhwc", Config(16, 4, 1, 1, 5, 1, 16, 1, 3, 2, 2)),
    # Pixels of odd multiples of 8 bytes: odd and even rows and images of x and dy, units and strips that begin at odd
    # columns, two tiles, blocks of channels that begin within 16 bytes, one row, one column.
    ("n5 c20 h9 w19 k20 r5 s5 pad2 groups20 f16 nhwc", Config(28, 4, 1, 4, 5, 2, 4, 1, 5, 3, 3)),
    ("n13 c60 h7 w7 k60 r7 s7 pad3 groups60 bf16 nhwc", Config(28, 4, 1, 1, 7, 2, 8, 2, 4, 2, 2, True)),
    ("n3 c100 h6 w14 k100 r3 s3 pad1 groups100 f16 nhwc", Config(60, 4, 1, 3, 5, 1, 4, 2, 3, 2, 3)),
    ("n2 c12 h5 w23 k12 r2 s4 pad1:0x2:1 dilation1x2 groups12 f16 nhwc", Config(28, 4, 2, 3, 2, 2, 8, 4, 2, 2, 2)),
    ("n5 c20 h9 w12 k20 r5 s5 pad2 groups20 f16 nhwc", Config(28, 4, 1, 3, 4, 1, 4, 2, 5, 3, 3)),
    ("n6 c28 h1 w11 k28 r3 s2 pad1x0 groups28 f16 nhwc", Config(48, 4, 1, 2, 6, 1, 4, 1, 3, 2, 2)),
    ("n1 c4 h8 w1 k4 r3 s3 pad1 groups4 bf16 nhwc", Config(28, 4, 1, 1, 3, 1, 4, 1, 3, 2, 1)),
    # More parts than eight warps load at once.
    ("n4 c16 h70 w8 k16 r3 s3 pad1 groups16 f16 nhwc", Config(16, 4, 1, 1, 8, 2, 4, 1, 3, 2, 70)),
]


@pytest.mark.parametrize(("text", "architecture"), COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    device = replace(H200, architecture=architecture)
    configs = ALGORITHM.configs(problem, device)
    # The chosen one, the one with most registers, with copying warps that give some up, and with places that are none.
    chosen = min(configs, key=lambda one: ALGORITHM.predict_us(problem, one, device))
    fullest = max(configs, key=lambda one: one.threads * one.registers(problem) * min_blocks_per_sm(problem, one))
    taking = max((one for one in configs if one.takes), key=lambda one: one.registers(problem), default=chosen)
    partial = [one for one in configs if one.units * one.images % PLACES and one.rows == 1]
    tried = (chosen, fullest, taking, max(partial, key=lambda one: one.registers(problem), default=chosen))
    sources = [source for config in tried for source in ALGORITHM.sources(problem, config)]
    for source in share(dict.fromkeys(sources)):
        used = compiled(source, architecture).resources
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), (tried, used)


@pytest.mark.many
@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(("text", "config"), EMULATED)
def test_kernels_compute_the_gradient(text: str, config: Config) -> None:
    for backwards in (False, True):
        verdict = check(ConvProblem.parse(f"{text} wgrad"), ALGORITHM, config, backwards=backwards, once=True)
        assert verdict, verdict.message


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("number", [1, 3, 4])
def test_what_is_not_finite_stays_with_its_taps_and_channel(number: int) -> None:
    """Zeros beside rows and columns, and a pair's other channel, have no part in any sum: of parts, of a cluster."""
    text, config = EMULATED[number]
    check_what_is_not_finite(ConvProblem.parse(f"{text} wgrad"), ALGORITHM, config)


@pytest.mark.parametrize("text", [text for text, _ in COMPILED + EMULATED])
def test_configs_fit(text: str) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    configs = ALGORITHM.configs(problem, H200)
    assert 0 < len(configs) == len(set(configs))
    assert max(shared_bytes(problem, one) for one in configs) <= H200.shared_bytes
    assert all(map_.box[1] <= 256 for one in configs for map_ in maps_of(problem, one).values())
    # Places of a set are warps' in sixteens, and all columns are in a unit.
    assert all(one.units * one.images <= 16 * one.share and one.images % 4 == 0 for one in configs)
    reach = (problem.kernel[1] - 1) * problem.dilation[1]
    assert all(one.width + reach <= 8 * one.tiles and one.width <= 8 for one in configs)
    assert all(unrolled(problem, one) % lcm(one.rows, live_rows(problem, one)) == 0 for one in configs)


def test_registers_that_warps_take_are_those_of_the_launch() -> None:
    """What a warpgroup gives up is all that the others get: a block that asks for more waits forever."""
    for warps, (taken, left) in TAKEN.items():
        threads = 32 * (warps + 4)
        launched = (1 << 16) // threads // 8 * 8
        assert 32 * warps * taken + 128 * left <= launched * threads
        assert taken % 8 == left % 8 == 0 and 24 <= left < launched < taken <= 240


@pytest.mark.parametrize(
    "text",
    [
        "n32 c192 h28 w28 k192 r7 s7 pad3 groups192 f16 nhwc",
        "n32 c384 h14 w14 k384 r7 s7 pad3 groups384 f16 nhwc",
        "n32 c672 h14 w14 k672 r5 s5 pad2 groups672 bf16 nhwc",
        "n32 c728 h19 w19 k728 r3 s3 pad1 groups728 bf16 nhwc",
    ],
)
def test_the_model_chooses_it(text: str) -> None:
    assert dispatch.choose(ConvProblem.parse(f"{text} wgrad"), H200).algorithm == "cuda.depthwise_mma_sp"


def test_a_row_comes_without_columns_that_no_kept_tap_meets() -> None:
    """Four units of five columns of 19, and two more of x: 22 are two more than a multiple of four."""
    problem = ConvProblem.parse("n32 c728 h19 w19 k728 r3 s3 pad1 groups728 f16 nhwc wgrad")
    config = Config(64, 8, 1, 4, 5, 1, 4, 1, 3, 8, 8)
    assert config.columns(problem) == (22, 22)
    # A unit's last columns are read beyond the last image's row, which has room for one more of each array.
    assert config.stage_bytes(problem) == 2 * 12 * 1024 >= 2 * (4 * 22 + 1) * 128


def test_the_model_knows_lines_of_memory_and_instructions_that_come_first() -> None:
    """Pieces of 64 bytes in two lines take longer each than those in one; stages of four rows were slower than of two
    (7.8 and 6.3 us)."""
    whole, across = (
        ConvProblem.parse(f"n32 c{c} h56 w56 k{c} r5 s5 pad2 groups{c} f16 nhwc wgrad") for c in (256, 240)
    )
    config = Config(32, 4, 1, 4, 7, 2, 4, 1, 5, 8, 16, takes=True)
    each_across, each_whole = (ALGORITHM.predict_us(one, config, H200) / one.c for one in (across, whole))
    assert each_across > 1.04 * each_whole
    small = ConvProblem.parse("n32 c960 h7 w7 k960 r5 s5 pad2 groups960 f16 nhwc wgrad")
    four, two = (Config(32, 4, 1, 2, 4, 1, 8, rows, 5, 8 // (rows // 2), 4, True) for rows in (4, 2))
    assert ALGORITHM.predict_us(small, four, H200) > 1.02 * ALGORITHM.predict_us(small, two, H200)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c16 h9 w9 k16 r3 s3 groups16 f16 wgrad", "channels last"),
        ("c16 h9 w9 k16 r3 s3 groups2 f16 nhwc wgrad", "one channel and filter"),
        ("c16 h9 w9 k32 r3 s3 groups16 f16 nhwc wgrad", "one channel and filter"),
        ("c18 h9 w9 k18 r3 s3 groups18 f16 nhwc wgrad", "in fours"),
        ("c16 h9 w9 k16 r3 s3 stride2x1 groups16 f16 nhwc wgrad", "strides of 1"),
        ("c16 h9 w9 k16 r3 s3 groups16 f32 nhwc wgrad", "f16"),
        ("n40000 c16 h300 w300 k16 r3 s3 groups16 f16 nhwc wgrad", "2^31"),
        ("c16 h9 w700 k16 r3 s30 groups16 f16 nhwc wgrad", "registers"),
        ("c8 h2 w2 k8 r9 s9 pad6 groups8 bf16 nhwc wgrad", None),
    ],
)
def test_what_it_does_not_take(text: str, why: str | None) -> None:
    refusal = ALGORITHM.refusal(ConvProblem.parse(text), H200)
    assert refusal is None if why is None else why in str(refusal)


@pytest.mark.parametrize(("taps", "tiles"), [(3, 1), (5, 2), (7, 2), (9, 2), (11, 2)])
def test_lanes_keep_terms_in_banks_of_their_own(taps: int, tiles: int) -> None:
    """A store's lanes have the same tap of up to four columns."""
    width = min(8, 8 * tiles - taps + 1)
    pitch = Config(32, 4, 1, 4, width, tiles, 4, 1, taps, 8, 1).term_pitch(32 * taps * taps)
    for tile, second in product(range(tiles), range(2)):
        lanes = ((lane // 4, 8 * tile + lane % 4 * 2 + second - lane // 4) for lane in range(32))
        banks = [(column * pitch + tap) % 32 for column, tap in lanes if 0 <= tap < taps and column < width]
        assert banks and len(banks) == len(set(banks))


def test_it_needs_hopper() -> None:
    problem = ConvProblem.parse("c16 h9 w9 k16 r3 s3 groups16 f16 nhwc wgrad")
    assert "9.0" in str(ALGORITHM.refusal(problem, replace(H200, architecture="sm_80")))
