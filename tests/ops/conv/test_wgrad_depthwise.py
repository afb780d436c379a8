"""cuda.depthwise of wgrad without a GPU: kernels compile without spills, and by emulation compute the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from compiled_kernels import Share, compiled

import emulated
from emulated.verify import check
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda import wgrad_depthwise_blocks as blocks
from tapwise.ops.conv.cuda.wgrad_depthwise import DepthwiseWgrad
from tapwise.ops.conv.cuda.wgrad_depthwise_blocks import Config, registers
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = DepthwiseWgrad()
COMPILED = [
    "n32 c64 h112 w112 k64 r3 s3 stride2 pad1 groups64 f16 nhwc",
    "n32 c144 h56 w56 k144 r3 s3 pad1 groups144 f16 nhwc",
    "n32 c240 h28 w28 k240 r5 s5 pad2 groups240 bf16 nhwc",
    "n32 c96 h56 w56 k96 r7 s7 pad3 groups96 f16 nhwc",
    "n32 c165 h14 w14 k165 r5 s5 pad2 groups165 bf16 nhwc",
    "n32 c64 h31 w31 k128 r3 s3 pad2 dilation2 groups64 f32 nhwc",
    "n32 c144 h56 w56 k144 r3 s3 pad1 groups144 f32",
    "n32 c384 h14 w14 k384 r7 s7 pad3 groups384 f16",
    "n8 c64 h31 w31 k64 r11 s11 pad5 groups64 f64",
]
# With the parts that the sum is split into: they begin and end within images.
EMULATED = [
    ("n2 c64 h10 w11 k64 r3 s3 pad1 groups64 f16 nhwc", "tma", 2),
    ("n2 c24 h9 w11 k24 r3 s3 pad1 groups24 f16 nhwc", "copies", 5),
    ("n3 c16 h10 w13 k16 r5 s3 stride2 pad2:1x1:0 groups16 bf16 nhwc", "tma", 4),
    ("n2 c8 h9 w8 k16 r3 s3 stride2x1 pad1 groups8 f16 nhwc", "tma", 1),
    ("c40 h4 w5 k120 r2 s2 groups40 bf16 nhwc", "copies", 1),
    ("n2 c9 h11 w12 k9 r3 s5 stride2 dilation3x2 pad2 groups9 f16 nhwc", "copies", 5),
    ("n2 c12 h12 w13 k12 r7 s7 pad3 groups12 f32 nhwc", "tma", 7),
    ("n2 c4 h5 w20 k4 r1 s13 pad0x6 stride3x1 groups4 f32 nhwc", "copies", 1),
    ("c6 h13 w12 k6 r11 s11 pad5 groups6 f64", "copies", 2),
    ("n3 c5 h8 w12 k10 r3 s3 pad1x0:2 groups5 f32", "copies", 5),
    ("n2 c7 h7 w7 k7 r3 s3 pad1 groups7 f16", "copies", 1),
    ("n2 c6 h9 w16 k6 r5 s4 stride2 pad2 groups6 bf16", "copies", 3),
    ("n2 c4 h6 w70 k4 r3 s2 stride1x3 dilation2 pad1 groups4 f32", "copies", 4),
    ("n3 c6 h5 w9 k6 r1 s1 pad2 groups6 f64 nhwc", "copies", 14),
    # Rows that begin within 16 bytes and columns that are no multiple of a thread's; an odd number of elements in all.
    ("n2 c49 h9 w11 k49 r3 s3 pad1 groups49 f16 nhwc", "rows", 3),
    ("n2 c20 h9 w14 k20 r5 s3 stride2 pad2:1x1:0 groups20 bf16 nhwc", "rows", 5),
    ("n3 c65 h7 w7 k65 r7 s7 pad3 groups65 f16 nhwc", "rows", 2),
    ("c67 h9 w9 k67 r3 s5 pad1x4 stride2 groups67 f16 nhwc", "rows", 1),
    ("n2 c66 h6 w9 k66 r2 s4 pad4 groups66 f64 nhwc", "rows", 7),
]


def best(problem: ConvProblem, by: str) -> Config:
    """The model's choice of those with rows that come in one way."""
    found = [one for one in ALGORITHM.configs(problem, H200) if one.by == by]
    return min(found, key=lambda one: ALGORITHM.predict_us(problem, one, H200))


def kinds(problem: ConvProblem) -> Iterator[Config]:
    """The model's best config of each way of copying, and one of other taps or channels."""
    configs = sorted(ALGORITHM.configs(problem, H200), key=lambda one: ALGORITHM.predict_us(problem, one, H200))
    for by in sorted({one.by for one in configs}):
        mine = [one for one in configs if one.by == by]
        yield mine[0]
        if by == "rows":
            # Those that hold a multiprocessor's registers.
            yield max(mine, key=lambda one: (registers(problem, one) * one.threads, one.channels))
        taken = mine[0].taps_h, mine[0].channels
        yield next((one for one in mine if (one.taps_h, one.channels) != taken), mine[-1])


@pytest.mark.many
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    found = [one for one in kinds(problem) if one.by == "copies" or architecture != "sm_80"]
    some = found if architecture == "sm_90a" else found[:1]
    for source in share(source for config in some for source in ALGORITHM.sources(problem, config)):
        used = compiled(source, architecture).resources
        assert used.spill_bytes == 0, (source.text, used)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(("text", "by", "parts"), EMULATED)
def test_kernels_compute_the_gradient(text: str, by: str, parts: int) -> None:
    problem = ConvProblem.parse(f"{text} wgrad")
    config = replace(best(problem, by), parts=parts)
    verdict = check(problem, ALGORITHM, config, backwards=parts % 2 == 1)
    assert verdict, (config, verdict.message)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("number", [0, 2, 9, 11, 14, 15])
def test_what_is_not_finite_stays_with_its_taps(number: int) -> None:
    """Rows and columns of a block that are not dy's have no part in any sum."""
    text, by, parts = EMULATED[number]
    problem = ConvProblem.parse(f"{text} wgrad")
    inputs, last = problem.sample(np.random.default_rng(0), False), problem.layout == "nhwc"
    x, dy = inputs.x.copy(), inputs.w.copy()
    x[0, 1, 0, 0], x[1, 2, -1, -1], x[0, 3, 4, -1] = np.inf, np.nan, -np.inf
    # Padding, which the reference multiplies, is left out where rows come as they lie.
    inner = by == "rows"
    dy[0, 4, 2 * inner, 2 * inner], dy[1, 0, 2, 2 if inner else -1] = np.inf, np.nan
    with np.errstate(all="ignore"):
        expected = problem.convolve(x, dy)

    def laid(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(array, 1, -1) if last else array)

    config = replace(best(problem, by), parts=parts)
    y, size = laid(np.zeros(problem.w_shape, problem.y_dtype)), ALGORITHM.workspace_bytes(problem, config, H200)
    arrays = {"x": laid(x), "w": laid(dy), "y": y, "workspace": np.full(size, 0xFF, np.uint8)}
    for launch in ALGORITHM.launches(problem, config, H200):
        emulated.run(launch, arrays)
    found = (np.moveaxis(y, -1, 1) if last else y).astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-1)


def test_problems_without_a_small_part_are_taken_whole() -> None:
    """No workspace and one launch where blocks of channels are enough."""
    problem = ConvProblem.parse("c4096 h2 w2 k4096 r3 s3 pad1 groups4096 f32 nhwc wgrad")
    config = ALGORITHM.configs(problem, H200)[0]
    assert config.parts == 1 and ALGORITHM.workspace_bytes(problem, config, H200) == 0
    assert len(ALGORITHM.launches(problem, config, H200)) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c16 h9 w9 k16 r3 s3 f16 nhwc wgrad", "one channel a group"),
        ("c16 h9 w9 k16 r3 s3 groups8 f16 nhwc wgrad", "one channel a group"),
        ("c1 h9 w9 k16 r3 s3 f16 nhwc wgrad", "several groups"),
        ("c16 h9 w9 k16 r3 s3 groups16 f16 nhwc", "computes wgrad, not conv"),
        ("c16 h90 w90 k16 r3 s3 stride9 groups16 f16 nhwc wgrad", "strides of up to 8"),
        ("n40000 c16 h300 w300 k16 r3 s3 groups16 f16 nhwc wgrad", "rows of dy"),
        ("n300 c2 h2000000 w2 k2 r1 s1 groups2 f16 nhwc wgrad", "sizes under 2^20"),
        ("n2 c2 h20 w5 k4 r2 s2 stride1x3 pad2 dilation2x4 groups2 bf16 nhwc wgrad", None),
        ("c16 h90 w90 k16 r3 s3 stride9 dilation9 pad9 groups16 f16 nhwc wgrad", None),
    ],
)
def test_what_it_does_not_take(text: str, why: str | None) -> None:
    refusal = ALGORITHM.refusal(ConvProblem.parse(text), H200)
    assert refusal is None if why is None else why in str(refusal)


def test_few_blocks_lie_on_multiprocessors_of_their_own() -> None:
    """A launch asks to be balanced, also where that is one block each; blocks themselves ask for what they need."""
    problem = ConvProblem.parse("n32 c224 h14 w14 k224 r3 s3 pad1 groups224 f16 nhwc wgrad")
    config = best(problem, "tma")
    for parts in (1, 200):
        launch = ALGORITHM.launches(problem, replace(config, parts=parts), H200)[0]
        assert launch.balance == 1
        assert launch.shared_bytes == blocks.shared_bytes(problem, config)


@pytest.mark.parametrize(("images", "early"), [(32, True), (600, False)])
def test_what_comes_next_is_placed_early_where_l2_holds_what_is_read(images: int, early: bool) -> None:
    """Of the launch of sums, and of that which adds parts."""
    problem = ConvProblem.parse(f"n{images} c224 h14 w14 k224 r3 s3 pad1 groups224 f16 nhwc wgrad")
    launches = ALGORITHM.launches(problem, replace(best(problem, "tma"), parts=8), H200)
    assert [one.words[one.names.index("early")] for one in launches] == [early, early]
