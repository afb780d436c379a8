"""The kernel of cuda.depthwise on sparse tensor cores: emulated against float64; compiled, its blocks' geometry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled_kernels import Share, compiled
from emulated_plans import lent, memory_of, needs_compiler, verdict_of

from tapwise.algorithm import Buffers
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.costs import warps_and_idle
from tapwise.ops.conv.cuda.depthwise import sparse
from tapwise.ops.conv.cuda.depthwise.depthwise import Depthwise
from tapwise.ops.conv.cuda.depthwise.sparse import Sparse
from tapwise.ops.conv.cuda.fprop_phases import FpropPhases
from tapwise.ops.conv.phases import Config, with_taps
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = Depthwise()
AMPERE = replace(H200, architecture="sm_80")
# (problem, (channels, share, tiles, units, width, images, parts, stage_rows, stages, takes)): images that are not
# there, a last block that begins earlier, fewer channels than a block, strips, parts of rows that end within a line, of
# several lines, places that are none, dilations, filters of one row, wider than images and than what a place has left,
# uneven padding, more of it than rows of taps, stages that begin above x and end below it.
EMULATED = [
    ("n5 c40 h13 w19 k40 r5 s5 pad2 groups40 f16 nhwc bias relu", (32, 2, 1, 3, 7, 4, 13, 2, 3)),
    ("n3 c24 h9 w14 k24 r7 s7 pad3 groups24 bf16 nhwc", (16, 1, 1, 2, 7, 4, 5, 2, 2)),
    ("n2 c8 h7 w7 k8 r3 s5 pad1x2 groups8 f16 nhwc bias", (16, 1, 1, 1, 7, 2, 3, 1, 8)),
    ("n1 c72 h20 w30 k72 r5 s5 pad2 groups72 f16 nhwc hardswish", (64, 1, 2, 4, 8, 1, 7, 2, 4)),
    ("n2 c32 h15 w33 k32 r5 s5 pad0x2 groups32 f16 nhwc", (32, 1, 1, 3, 8, 2, 3, 2, 5)),
    ("n2 c16 h12 w21 k16 r3 s5 pad4x4 dilation3x2 groups16 bf16 nhwc silu", (16, 1, 1, 2, 6, 2, 12, 1, 3)),
    ("n4 c16 h5 w9 k16 r1 s11 pad0x5 groups16 f16 nhwc", (16, 1, 1, 2, 5, 4, 2, 2, 2)),
    ("n1 c16 h11 w3 k16 r11 s5 pad5x2 groups16 f16 nhwc", (16, 1, 1, 1, 3, 1, 11, 2, 2)),
    ("n9 c16 h1 w8 k16 r3 s9 pad1x4 groups16 f16 nhwc", (16, 1, 1, 1, 8, 8, 1, 1, 2)),
    ("n2 c16 h6 w6 k16 r5 s5 pad4:1x0:5 groups16 f16 nhwc", (16, 1, 1, 2, 4, 2, 7, 2, 2)),
    ("n1 c16 h3 w6 k16 r5 s5 pad7x2 groups16 f16 nhwc", (16, 1, 1, 1, 6, 1, 4, 2, 2)),
    ("n3 c32 h17 w15 k32 r9 s9 pad4 groups32 bf16 nhwc", (32, 1, 1, 3, 5, 2, 9, 1, 3, True)),
    ("n6 c16 h11 w8 k16 r5 s5 pad2 groups16 f16 nhwc", (16, 1, 1, 1, 8, 2, 2, 1, 8)),
]


@needs_compiler
@pytest.mark.parametrize(("text", "fields"), EMULATED)
def test_the_kernel_computes_the_convolution(text: str, fields: tuple[int, ...], emulation: None) -> None:
    verdict = verdict_of(ALGORITHM, ConvProblem.parse(text), Sparse(*fields))
    assert verdict, verdict.message


@needs_compiler
def test_what_is_not_finite_stays_with_its_windows(emulation: None) -> None:
    """Zeros beside the taps, and beside rows, have no part in any sum."""
    problem = ConvProblem.parse("n2 c16 h9 w14 k16 r5 s5 pad2 groups16 bias f16 nhwc")
    inputs = problem.sample(np.random.default_rng(0), False)
    x = inputs.x.copy()
    x[0, 1, 0, 0], x[-1, 2, -1, -1], x[0, 3, 4, -1], x[1, 15, 3, 6] = np.inf, np.nan, -np.inf, np.inf
    with np.errstate(all="ignore"):
        expected = problem.convolve(x, inputs.w, inputs.bias)
    plan = ALGORITHM.plan(problem, Sparse(16, 1, 1, 2, 7, 4, 5, 2, 2), H200)
    last = lent(np.ascontiguousarray(np.moveaxis(x, 1, -1))).transpose(0, 3, 1, 2)
    y = lent(np.full((2, 9, 14, 16), 7, np.float16)).transpose(0, 3, 1, 2)
    plan.run(Buffers(last, plan.pack(lent(inputs.w)), y, None, lent(inputs.bias), None, 0))
    assert not np.isfinite(expected).all()
    np.testing.assert_allclose(memory_of(y).astype(np.float64), expected, rtol=2e-2, atol=1e-1)


@pytest.mark.parametrize(
    ("text", "architecture"),
    [
        ("n32 c256 h28 w28 k256 r7 s7 pad3 groups256 f16 nhwc", "sm_90a"),
        ("n32 c288 h28 w28 k288 r5 s5 pad2 groups288 bf16 nhwc bias silu", "sm_90a"),
        ("n32 c152 h32 w32 k152 r7 s7 pad3 groups152 f16 nhwc bias gelu", "sm_100a"),
        ("n32 c64 h33 w33 k64 r9 s9 pad4 groups64 f16 nhwc bias", "sm_90a"),
        ("n1 c320 h7 w7 k320 r7 s7 pad3 groups320 bf16 nhwc", "sm_100a"),
    ],
)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    problem, device = ConvProblem.parse(text), replace(H200, architecture=architecture)
    found = list(sparse.configs(problem, device))
    chosen = min(found, key=lambda one: sparse.predict_us(problem, one, device))
    fullest = max(found, key=lambda one: one.threads * sparse.min_blocks_per_sm(problem, one))
    largest = max(found, key=lambda one: sparse.registers(problem, one))
    for source in share(dict.fromkeys(sparse.source(problem, one) for one in (chosen, fullest, largest))):
        used = compiled(source, architecture).resources
        assert used.spill_bytes == 0, (text, used)


@pytest.mark.parametrize(
    "text",
    [
        "n2 c16 h9 w9 k16 r3 s3 pad1 groups16 f16 nhwc", "n2 c16 h9 w9 k16 r5 s5 pad2 groups16 f32 nhwc",
        "n2 c16 h9 w9 k16 r5 s5 pad2 stride2 groups16 f16 nhwc", "n2 c12 h9 w9 k12 r5 s5 pad2 groups12 f16 nhwc",
        "n2 c16 h9 w9 k32 r5 s5 pad2 groups16 f16 nhwc", "n2 c16 h9 w9 k16 r5 s5 pad2 groups16 f16",
        "n2 c16 h9 w9 k16 r5 s5 pad2 groups16 f16 nhwc residual", "n2 c16 h9 w30 k16 r5 s17 groups16 f16 nhwc",
    ],
)  # fmt: skip
def test_it_leaves_the_rest_to_others(text: str) -> None:
    assert not list(sparse.configs(ConvProblem.parse(text), H200))


def test_it_takes_hopper_and_newer() -> None:
    problem = ConvProblem.parse("n2 c16 h9 w9 k16 r5 s5 pad2 groups16 f16 nhwc")
    assert list(sparse.configs(problem, H200))
    assert not list(sparse.configs(problem, AMPERE))


def test_loads_meet_in_banks_where_places_are_a_multiple_apart() -> None:
    """Rows of two columns more than a multiple of four lie in other banks; of one image, all places in the same."""
    apart, together, alone = (sparse.conflicts(64, *one) for one in ((18, 8, 4), (16, 8, 4), (18, 8, 1)))
    assert (apart, together, alone) == (2, 4, 4)
    problem = ConvProblem.parse("n32 c256 h28 w28 k256 r7 s7 pad3 groups256 f16 nhwc")
    chosen = min(sparse.configs(problem, H200), key=lambda one: sparse.predict_us(problem, one, H200))
    pixel = chosen.channels * problem.itemsize
    assert sparse.conflicts(pixel, sparse.columns_x(problem, chosen), chosen.width, chosen.images) == 2


@pytest.mark.parametrize(
    ("blocks", "threads", "warps"), [(1, 160, 8), (2, 160, 6), (4, 160, 5), (3, 96, 4), (1, 128, 4)]
)
def test_schedulers_without_a_warp_wait(blocks: int, threads: int, warps: float) -> None:
    assert warps_and_idle(blocks, threads) == warps


def test_rows_have_room_for_what_is_read_beyond_them() -> None:
    """Seven columns of outputs of the last of four units see 16 columns from 21 on, of 34 that come of each image."""
    problem = ConvProblem.parse("n32 c256 h28 w28 k256 r7 s7 pad3 groups256 f16 nhwc")
    config = Sparse(32, 1, 1, 4, 7, 2, 28, 1, 8)
    assert sparse.columns_x(problem, config) == 34
    assert sparse.row_bytes(problem, config) == (5 * 1024, 4 * 1024)


@pytest.mark.parametrize(
    "size", ["c256 h28 w28 k256 r7 s7 pad3", "c72 h21 w37 k72 r5 s5 pad2", "c16 h9 w5 k16 r3 s13 pad1x6"]
)
def test_no_unit_reads_beyond_its_row(size: str) -> None:
    problem = ConvProblem.parse(f"n7 {size} groups{size.split()[0][1:]} f16 nhwc")
    found = list(sparse.configs(problem, H200))
    assert found
    for one in found:
        last = (one.images - 1) * sparse.columns_x(problem, one) + (one.units - 1) * one.width + sparse.COLUMNS
        assert sparse.row_bytes(problem, one)[0] >= last * one.channels * problem.itemsize


# Of stride 2 a phase has every second tap of each axis.
GRADIENTS = ("c24 h9 w11 k24 r5 s7 pad2x3 groups24 f16", "c16 h12 w17 k16 r10 s11 pad4x5 stride2 groups16 bf16")


@needs_compiler
@pytest.mark.parametrize("text", GRADIENTS)
def test_gradients_read_filters_as_they_lie(text: str, emulation: None) -> None:
    problem = ConvProblem.parse(f"n2 {text} nhwc dgrad")
    phases = [phase.problem for phase in with_taps(problem) if phase.problem is not None]
    parts = [next(iter(sparse.configs(phase, H200))) for phase in phases]
    config = Config(tuple(("cuda.depthwise", part) for part in parts))
    assert all(FpropPhases().read_in_place(problem, config))
    verdict = verdict_of(FpropPhases(), problem, config)
    assert verdict, verdict.message
