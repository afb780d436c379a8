"""cuda.narrow_groups without a GPU: kernels compile, pixels and operands followed in NumPy compute the convolution."""

from __future__ import annotations

import re

import numpy as np
import pytest
from compiled_kernels import Share
from tensor_core_cases import A100, assert_no_spills, best_of

from tapwise import dispatch
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda import narrow_groups as narrow
from tapwise.ops.conv.cuda.narrow_groups import Config, NarrowGroups
from tapwise.ops.conv.problem import ConvProblem

FOLLOWED = [
    "n2 c32 h9 w11 k32 r3 s3 pad1 groups8 f16 nhwc",
    "n1 c48 h9 w11 k96 r3 s3 stride2x1 pad1:0x0:2 groups12 bf16 nhwc",
    "n1 c64 h13 w9 k64 r3 s2 pad1 dilation2x1 groups8 f16 nhwc",
    "n1 c96 h9 w20 k64 r5 s3 pad2 groups4 f16 nhwc",
    "n1 c48 h7 w9 k64 r3 s3 pad1 dilation1x2 groups2 bf16 nhwc",
    "n2 c64 h6 w5 k32 r1 s1 groups8 f16 nhwc",
    "n1 c64 h8 w30 k128 r2 s2 stride2 groups16 f16 nhwc",
    "n1 c104 h9 w8 k104 r3 s3 pad1 groups13 f16 nhwc",
    "n1 c24 h7 w8 k24 r3 s3 groups6 bf16 nhwc",
]
COMPILED = [
    "n32 c256 h56 w56 k256 r3 s3 pad1 groups32 f16 nhwc",
    "n32 c128 h56 w56 k128 r3 s3 pad1 groups32 bf16 nhwc bias relu",
    "n32 c256 h28 w28 k256 r3 s3 pad1 groups32 f16 nhwc bias silu residual",
    "n8 c512 h14 w14 k512 r3 s3 pad1 groups32 f16 nhwc residual",
    "n8 c128 h28 w28 k128 r5 s5 stride2 pad2 groups32 f16 nhwc bias gelu residual",
]


def best(problem: ConvProblem) -> list[Config]:
    return best_of(NarrowGroups(), problem, H200, "rows", "groups_per_tile")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    assert_no_spills(share, NarrowGroups(), ConvProblem.parse(text), architecture, "rows", "groups_per_tile")


def terms(problem: ConvProblem, number: int) -> list[tuple[int, int]]:
    """(tap, channel) of the eight terms of a half of an operand; taps behind the last are zeros."""
    if problem.group_c == 4:
        return [(2 * number + at // 4, at % 4) for at in range(8)]
    tap, part = divmod(number, problem.group_c // 8)
    return [(tap, part * 8 + at) for at in range(8)]


def operands(problem: ConvProblem, config: Config, w: np.ndarray) -> np.ndarray:
    """What pack_fragments leaves, by its launch's words: [group][step][8 filters][thread][2 words][element]."""
    launch = NarrowGroups().pack_launch(problem, config, (1, 1, 1, 1))
    steps, blocks = -(-narrow._halves(problem) // 2), -(-problem.group_k // 8)
    groups = -(-problem.groups // config.groups_per_tile) * config.groups_per_tile
    out = np.zeros((groups, steps, blocks, 32, 2, 2))
    assert dict(zip(launch.names, launch.words, strict=True))["words"] == out.size // 2
    taps = problem.kernel[0] * problem.kernel[1]
    for group, step, block, lane, half, e in np.ndindex(*out.shape):
        filter_ = block * 8 + lane // 4
        tap, c = terms(problem, 2 * step + half)[lane % 4 * 2 + e]
        if filter_ < problem.group_k and group < problem.groups and tap < taps:
            r, s = divmod(tap, problem.kernel[1])
            out[group, step, block, lane, half, e] = w[group * problem.group_k + filter_, c, r, s]
    return out


def follow(problem: ConvProblem, config: Config, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What the kernel computes, by its own index arithmetic; what was not copied is NaN."""
    launch = NarrowGroups().launch(problem, config, H200)
    p = dict(zip(launch.names, launch.words, strict=True))
    right, each = operands(problem, config, w), narrow.TOGETHER // problem.group_k
    channels, taps = config.groups_per_tile * problem.group_c, problem.kernel[0] * problem.kernel[1]
    pixel = channels + 8
    y = np.full((problem.n * p["p"] * p["q"], problem.k), np.nan)
    assert launch.grid[0] % p["group_tiles"] == 0
    for group_tile, tile in np.ndindex(p["group_tiles"], p["tiles"]):
        n, rest = divmod(tile, p["tiles_h"] * p["tiles_w"])
        h, q = (at * side for at, side in zip(divmod(rest, p["tiles_w"]), (p["down"], p["across"]), strict=True))
        memory = np.full((p["image_rows"] * p["columns"], pixel), np.nan)
        for at in range(len(memory)):
            line, column = divmod(at, p["columns"])
            row, left = h * p["stride_h"] - p["pad_h"] + line, q * p["stride_w"] - p["pad_w"] + column
            inside = 0 <= row < p["height"] and 0 <= left < p["width"]
            first = group_tile * channels
            memory[at, :channels] = 0
            if inside:
                held = min(channels, problem.c - first)
                memory[at, :held] = x[n, first : first + held, row, left]
        flat = memory.reshape(-1)
        warp_tiles = -(-p["down"] * p["across"] // (16 * config.rows))
        for one, part in np.ndindex(warp_tiles * 16 * config.rows, config.groups_per_tile // each):
            row = one * p["per_across"] >> 32 if p["per_across"] else one
            column = one - row * p["across"]
            if row >= p["down"] or h + row >= p["p"] or q + column >= p["q"]:
                continue
            place = (n * p["p"] + h + row) * p["q"] + q + column
            for group in range(part * each, (part + 1) * each):
                window = (row * p["stride_h"] * p["columns"] + column * p["stride_w"]) * pixel + group * problem.group_c
                sums = np.zeros(right.shape[2] * 8)
                for number in range(narrow._halves(problem)):
                    left = np.zeros(8)
                    for at, (tap, c) in enumerate(terms(problem, number)):
                        if tap < taps:
                            r, s = divmod(tap, problem.kernel[1])
                            there = (r * p["dilation_h"] * p["columns"] + s * p["dilation_w"]) * pixel + c
                            left[at] = flat[window + there]
                    operand = right[group_tile * config.groups_per_tile + group, number // 2, :, :, number % 2].reshape(
                        -1, 8, 8
                    )
                    sums += (operand @ left).reshape(-1)
                if group_tile * config.groups_per_tile + group >= problem.groups:
                    assert not sums.any()
                    continue
                first = (group_tile * config.groups_per_tile + group) * problem.group_k
                to = y[place, first : first + problem.group_k]
                assert np.isnan(to).all(), "written twice"
                to[:] = sums[: problem.group_k]
    return y.reshape(problem.n, p["p"], p["q"], problem.k).transpose(0, 3, 1, 2)


@pytest.mark.many
@pytest.mark.parametrize("text", FOLLOWED)
def test_pixels_and_operands_compute_the_convolution(text: str) -> None:
    problem = ConvProblem.parse(text)
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(float) for shape in (problem.x_shape, problem.w_shape))
    kinds = best(problem)
    for config in {kinds[0], kinds[-1]}:
        assert np.array_equal(follow(problem, config, x, w), problem.convolve(x, w)), config


def test_geometry() -> None:
    for text in FOLLOWED + COMPILED:
        problem = ConvProblem.parse(text)
        configs = NarrowGroups().configs(problem, H200)
        assert len(configs) == len(set(configs)) > 0
        for config in configs:
            launch = NarrowGroups().launch(problem, config, H200)
            p = dict(zip(launch.names, launch.words, strict=True))
            assert launch.shared_bytes <= H200.shared_bytes
            assert p["tiles_w"] * p["across"] >= p["q"]
            assert p["tiles_h"] * p["down"] >= p["p"]
            assert config.groups_per_tile * problem.group_k % narrow.TOGETHER == 0
            # Each block has a tile of its groups.
            assert p["group_tiles"] <= launch.grid[0] <= p["group_tiles"] * p["tiles"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("c32 h9 w9 k32 r3 s3 groups8 nhwc", "tensor cores"),
        ("c32 h9 w9 k32 r3 s3 groups8 tf32 nhwc", "f16 and bf16"),
        ("c32 h9 w9 k32 r3 s3 groups8 f16", "NCHW"),
        ("c48 h9 w9 k32 r3 s3 groups8 f16 nhwc", "groups of"),
        ("c12 h9 w9 k24 r3 s3 groups3 f16 nhwc", "multiples of 8"),
        ("c64 h9 w9 k64 r9 s9 pad4 groups8 f16 nhwc", "pieces"),
        ("n0 c32 h9 w9 k32 r3 s3 groups8 f16 nhwc", "nothing"),
        ("n2000 c256 h70 w70 k256 r3 s3 groups32 f16 nhwc", "2\\^31"),
        ("c128 h90 w90 k128 r7 s7 stride7 groups4 f16 nhwc", "pieces|shared memory"),
    ],
)
def test_refusals_say_why(text: str, says: str) -> None:
    assert re.search(says, NarrowGroups().refusal(ConvProblem.parse(text), H200) or "")


def test_narrow_groups_go_here() -> None:
    """Groups of other numbers of filters than channels; square ones where filters stay in registers."""
    for words in ("n32 c256 h28 w28 k256", "n32 c128 h56 w56 k128", "n32 c256 h56 w56 k256 stride2"):
        square = ConvProblem.parse(f"{words} r3 s3 pad1 groups32 f16 nhwc")
        assert dispatch.choose(square, H200).algorithm == "cuda.implicit_gemm_rows"
    other = ConvProblem.parse("n32 c128 h28 w28 k256 r3 s3 pad1 groups32 f16 nhwc")
    for device in (H200, A100):
        assert dispatch.choose(other, device).algorithm == "cuda.narrow_groups"
    wide = ConvProblem.parse("n32 c768 h15 w15 k768 r3 s3 pad1 groups6 f16 nhwc")
    assert dispatch.choose(wide, H200).algorithm == "cuda.implicit_gemm"
