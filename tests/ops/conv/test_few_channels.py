"""cuda.few_channels without a GPU: kernels compile, rows and operands followed in NumPy compute the convolution."""

from __future__ import annotations

import re

import numpy as np
import pytest
from compiled_kernels import Share
from tensor_core_cases import A100, assert_no_spills, best_of, filter_of

from tapwise import dispatch
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda import few_channels as few
from tapwise.ops.conv.cuda import few_channels_rows as rows_of_x
from tapwise.ops.conv.cuda import row_tiles
from tapwise.ops.conv.cuda.few_channels import FewChannels
from tapwise.ops.conv.cuda.few_channels_rows import Config
from tapwise.ops.conv.problem import ConvProblem

FOLLOWED = [
    "n2 c3 h17 w24 k10 r3 s3 stride2 pad1 f16 nhwc",
    "n2 c3 h17 w19 k7 r3 s3 pad1 f16 nhwc",
    "n2 c1 h13 w29 k5 r5 s1 pad2x0 dilation2 bf16 nhwc",
    "n1 c5 h21 w18 k33 r2 s4 stride3x1 pad0:1x2:0 f16 nhwc",
    "n1 c7 h15 w18 k48 r3 s3 stride1x3 pad1 bf16 nhwc",
    "n1 c8 h9 w70 k40 r7 s3 pad3 f16 nhwc",
    "n2 c3 h14 w19 k12 r3 s3 pad1 tf32 nhwc",
    "n2 c1 h7 w9 k3 r1 s1 tf32 nhwc",
    "n2 c2 h5 w4 k56 r3 s3 pad4 stride5 f16 nhwc",
    "n1 c4 h16 w16 k24 r4 s4 stride4 f16 nhwc",
    "n1 c4 h9 w20 k8 r3 s3 stride2 pad1 f16 nhwc",
    "n1 c3 h30 w34 k18 r7 s7 stride2 pad3 f16 nhwc",
]
COMPILED = [
    "n32 c3 h224 w224 k64 r7 s7 stride2 pad3 f16 nhwc bias relu",
    "n32 c3 h224 w224 k32 r3 s3 stride2 pad1 bf16 nhwc",
    "n32 c3 h299 w299 k32 r3 s3 stride2 f16 nhwc bias silu residual",
    "n1 c3 h224 w224 k64 r3 s3 pad1 f16 nhwc bias relu",
    "n32 c3 h300 w300 k40 r3 s3 stride2 pad1 tf32 nhwc bias gelu",
    "n8 c1 h28 w28 k9 r5 s5 f16 nhwc residual",
]


def best(problem: ConvProblem) -> list[Config]:
    return best_of(FewChannels(), problem, H200, "rows", "filters", "order")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    assert_no_spills(share, FewChannels(), ConvProblem.parse(text), architecture, "rows", "filters", "order")


def operands(problem: ConvProblem, config: Config, w: np.ndarray) -> np.ndarray:
    """What pack_fragments leaves, by its launch's words: [kind][chunk][step][8 filters][thread][2 words][element]."""
    launch = FewChannels().pack_launch(problem, config, (1, 1, 1, 1))
    p = dict(zip(launch.names, launch.words, strict=True))
    each = 4 // problem.itemsize
    (r_, s_), c_ = problem.kernel, problem.c
    blocks, parity = config.filters // 8, rows_of_x.parity_of(problem)
    pieces, steps = few._pieces(problem), few._steps(problem)
    kinds = 2 if parity == "BOTH" else 1
    out = np.zeros((kinds, p["chunks"], steps, blocks, 32, 2, each))
    assert p["words"] == out.size // each
    assert FewChannels().filter_bytes(problem, config) == 4 * p["words"]
    for kind, chunk, step, block, lane, half in np.ndindex(*out.shape[:-1]):
        odd = kind if parity == "BOTH" else int(parity == "ODD")
        filter_ = filter_of(chunk * config.filters + block * 8 + lane // 4, config.order)
        r, piece = divmod(2 * step + half, pieces)
        for e in range(each):
            element = (piece * 4 + lane % 4) * each - odd + e
            if r < r_ and 0 <= element < s_ * c_ and filter_ < problem.k:
                s, c = divmod(element, c_)
                out[kind, chunk, step, block, lane, half, e] = w[filter_, c, r, s]
    return out


def follow(problem: ConvProblem, config: Config, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What the kernel computes, by its own index arithmetic. Where x is not, and where nothing was copied, is NaN: it
    must be masked."""
    launch = FewChannels().launch(problem, config, H200)
    p = dict(zip(launch.names, launch.words, strict=True))
    size, c = problem.itemsize, problem.c
    each, copy, parity = 4 // size, rows_of_x.copy_bytes(problem), rows_of_x.parity_of(problem)
    grain, kinds = (copy or 4) // size, 2 if parity == "BOTH" else 1
    pieces, steps, run = few._pieces(problem), few._steps(problem), c * problem.kernel[1]
    right = operands(problem, config, w)
    flat = x.transpose(0, 2, 3, 1).reshape(problem.n, p["height"], p["width"] * c)
    y = np.full((problem.n * p["p"] * p["q"], problem.k), np.nan)
    columns, warp_tiles = p["columns"], -(-p["columns"] * p["down"] // (16 * config.rows))
    assert p["pieces"] * (copy or 4) == p["pitch"]
    for tile in range(p["tiles"]):
        n, rest = divmod(tile, p["tiles_h"] * p["tiles_w"])
        h, q = (at * side for at, side in zip(divmod(rest, p["tiles_w"]), (p["down"], p["across"]), strict=True))
        first = (q * p["stride_w"] - p["pad_w"]) * c
        lead = first % grain
        rows = np.zeros((p["image_rows"], p["pitch"] // size))
        for line, at in np.ndindex(*rows.shape):
            row, element = h * p["stride_h"] - p["pad_h"] + line, first - lead + at
            if 0 <= row < p["height"] and 0 <= element < p["width"] * c:
                rows[line, at] = flat[n, row, element]
        memory = np.concatenate([rows.reshape(-1), np.full(4096, np.nan)])
        for warp_tile in range(kinds * warp_tiles):
            odd = warp_tile // warp_tiles if parity == "BOTH" else int(parity == "ODD")
            for pixel in range(
                warp_tile % warp_tiles * 16 * config.rows, (warp_tile % warp_tiles + 1) * 16 * config.rows
            ):
                row = pixel * p["per_column"] >> 32 if p["per_column"] else pixel
                assert row == pixel // columns
                column = pixel - row * columns
                if parity == "BOTH":
                    column = 2 * column + (odd ^ lead & 1)
                if row >= p["down"] or column >= p["across"] or h + row >= p["p"] or q + column >= p["q"]:
                    continue
                element = lead + column * p["stride_w"] * c - odd
                assert element % each == 0
                # A run and its last piece end within the line.
                assert element * size + pieces * rows_of_x.PIECE_BYTES <= p["pitch"]
                window = row * p["stride_h"] * p["pitch"] // size + element
                sums = np.zeros((p["k"] + 256,))
                for step in range(steps):
                    for half in range(2):
                        r, piece = divmod(2 * step + half, pieces)
                        if r >= problem.kernel[0]:
                            continue
                        at = window + r * p["dilation_h"] * p["pitch"] // size + piece * 4 * each
                        left = memory[at : at + 4 * each].copy()
                        within = piece * 4 * each + np.arange(4 * each) - odd
                        left[(within < 0) | (within >= run)] = 0
                        for chunk in range(right.shape[1]):
                            part = right[odd if kinds == 2 else 0, chunk, step, :, :, half]
                            # [8 filters][filter][thread of four and element]
                            part = part.reshape(-1, 8, 4 * each)
                            sums[chunk * config.filters : (chunk + 1) * config.filters] += (part @ left).reshape(-1)
                place = (n * p["p"] + h + row) * p["q"] + q + column
                assert np.isnan(y[place]).all(), "written twice"
                for one in range(-(-problem.k // config.filters) * config.filters):
                    if filter_of(one, config.order) < problem.k:
                        y[place, filter_of(one, config.order)] = sums[one]
    return y.reshape(problem.n, p["p"], p["q"], problem.k).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("text", FOLLOWED)
def test_rows_and_operands_compute_the_convolution(text: str) -> None:
    problem = ConvProblem.parse(text)
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(float) for shape in (problem.x_shape, problem.w_shape))
    expected = problem.convolve(x, w)
    kinds = best(problem)
    for config in {kinds[0], kinds[-1]}:
        assert np.array_equal(follow(problem, config, x, w), expected), config


def test_infinities_beside_a_window_are_masked() -> None:
    problem = ConvProblem.parse("n1 c3 h6 w9 k4 r1 s1 stride2 f16 nhwc")
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(float) for shape in (problem.x_shape, problem.w_shape))
    expected = problem.convolve(x, w)
    x[:, :, 1::2] = np.inf
    x[:, :, :, 1::2] = np.nan
    assert np.array_equal(follow(problem, best(problem)[0], x, w), expected)


def test_geometry() -> None:
    for text in FOLLOWED + COMPILED:
        problem = ConvProblem.parse(text)
        configs = FewChannels().configs(problem, H200)
        assert len(configs) == len(set(configs)) > 0
        for config in configs:
            launch = FewChannels().launch(problem, config, H200)
            p = dict(zip(launch.names, launch.words, strict=True))
            assert launch.shared_bytes <= H200.shared_bytes
            assert p["pitch"] % rows_of_x.PIECE_BYTES == 0
            assert p["tiles_w"] * p["across"] >= p["q"]
            assert p["tiles_h"] * p["down"] >= p["p"]
            assert config.filters % config.order == 0
            assert rows_of_x.parity_of(problem) != "BOTH" or config.across % 2 == 0


def test_tiles_cut_rows_evenly() -> None:
    for text, whole in (
        (FOLLOWED[0], 1),
        ("c3 h20 w1000 k8 r3 s3 pad1 f16 nhwc", 2),
        ("c3 h7 w5 k8 r3 s3 f16 nhwc", 1),
    ):
        problem = ConvProblem.parse(text)
        shapes = row_tiles.shapes(problem, 64, 2048, 32, whole)
        assert shapes and len(shapes) == len(set(shapes)) < 130
        assert all(across % whole == 0 for _, across in shapes)
        assert min(across for _, across in shapes) <= 32
        # A tile more would not be needed.
        q = problem.output[1]
        assert all(across * -(-q // across) < q + whole * -(-q // across) for _, across in shapes)


def test_where_windows_begin() -> None:
    for text, parity, copy in (
        ("c3 h224 w224 k64 r7 s7 stride2 pad3 f16 nhwc", "ODD", 16),
        ("c3 h224 w224 k64 r3 s3 pad1 f16 nhwc", "BOTH", 16),
        ("c3 h300 w300 k64 r3 s3 stride2 f16 nhwc", "EVEN", 8),
        ("c4 h30 w31 k64 r3 s3 pad1 bf16 nhwc", "EVEN", 8),
        ("c3 h299 w299 k64 r3 s3 pad1 tf32 nhwc", "EVEN", 4),
        ("c3 h299 w299 k64 r3 s3 stride2 f16 nhwc", "EVEN", 0),
        ("c3 h224 w224 k64 r7 s7 stride2 pad3 f16", "ODD", 16),
        ("c2 h300 w300 k64 r3 s3 pad1 f16", "BOTH", 8),
        ("c4 h30 w30 k64 r3 s3 stride2 pad2 bf16", "EVEN", 4),
        ("c8 h9 w9 k64 r3 s3 stride2 f16", "EVEN", 0),
    ):
        problem = ConvProblem.parse(text)
        assert (rows_of_x.parity_of(problem), rows_of_x.copy_bytes(problem)) == (parity, copy), text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("c3 h9 w9 k64 r3 s3 nhwc", "tensor cores"),
        ("c3 h9 w9 k64 r3 s3 3xtf32 nhwc", "3xtf32"),
        ("c9 h9 w9 k64 r3 s3 f16 nhwc", "8 channels"),
        ("c4 h9 w9 k64 r3 s3 groups2 f16 nhwc", "one group"),
        ("c3 h9 w9 k64 r3 s3 dilation2 f16 nhwc", "gaps"),
        ("c3 h64 w64 k64 r16 s16 f16 nhwc", "pieces"),
        ("n0 c3 h9 w9 k64 r3 s3 f16 nhwc", "nothing"),
        ("c3 h9 w9 k64 r3 s3 f16 nhwc dgrad", "computes conv"),
        ("n40000 c3 h256 w256 k2 r1 s1 f16 nhwc", "2\\^31"),
        ("c8 h30 w30 k2000 r7 s8 f16 nhwc", "shared memory"),
    ],
)
def test_refusals_say_why(text: str, says: str) -> None:
    assert re.search(says, FewChannels().refusal(ConvProblem.parse(text), H200) or "")


def test_first_layers_go_here() -> None:
    for text in COMPILED[:4]:
        assert dispatch.choose(ConvProblem.parse(text), H200).algorithm == "cuda.few_channels"
        assert dispatch.choose(ConvProblem.parse(text), A100).algorithm == "cuda.few_channels"
    patches = ConvProblem.parse("n32 c3 h224 w224 k768 r16 s16 stride16 f16 nhwc")
    assert dispatch.choose(patches, H200).algorithm == "cuda.implicit_gemm"
