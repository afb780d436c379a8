"""cuda.implicit_gemm in NCHW without a GPU: planes that come to halo tiles as they lie, in strips that are transposed.
Plans run by emulation, against float64; kernels as compiled."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from compiled_kernels import Share, compiled
from emulated_plans import SMALL, emulation, lent, memory_of, needs_compiler, verdict_of

import emulated
from tapwise.algorithm import Buffers
from tapwise.cuda.jit.device import H200
from tapwise.cuda.jit.launch import Launch
from tapwise.ops.conv.cuda.implicit_gemm import cost
from tapwise.ops.conv.cuda.implicit_gemm.config import Config, HaloTileConfig
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.cuda.implicit_gemm.strips import Strips, strips_of
from tapwise.ops.conv.cuda.implicit_gemm.view import View
from tapwise.ops.conv.problem import ConvProblem

__all__ = ["emulation"]
ALGORITHM = ImplicitGemm()


def staged(problem: ConvProblem) -> list[Config]:
    """Those that read planes as they lie; of each kind of strips and product the smallest tile and the largest."""
    found: dict[tuple[object, ...], list[Config]] = {}
    for one in sorted(ALGORITHM.configs(problem, SMALL), key=lambda one: one.tile_pixels * one.tile_filters):
        if one.staged_strips:
            kind = View.of(problem, one).flat_planes, one.chunk_bytes, one.swap_ab
            found.setdefault(kind, []).append(one)
    # Each kind with the other number of staging buffers than the kind before.
    chosen = [(ones[0], ones[-1])[i // 2 % 2] for i, ones in enumerate(found.values())]
    other = [(ones[-1], ones[0])[i // 2 % 2] for i, ones in enumerate(found.values())]
    return list(dict.fromkeys([*chosen, *other]))


@pytest.mark.many
@needs_compiler
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        # Rectangles and whole rows of rows of whole pieces; several chunks, the last one not full.
        ("n1 c72 h7 w16 k24 r3 s3 pad1 f16", {(False, 1), (True, 1)}),
        ("n2 c80 h3 w24 k20 r3 s3 pad1 groups2 bf16 bias relu residual", {(False, 1), (True, 1)}),
        ("n1 c24 h11 w24 k16 r5 s5 pad2x1 f16 bias", {(False, 1), (True, 1)}),
        ("n2 c8 h12 w16 k16 r3 s3 dilation2x1 pad2x0 bf16", {(False, 1), (True, 1)}),
        # Whole rows of planes of whole pieces.
        ("n2 c36 h4 w14 k24 r1 s7 pad0x3 f16", {(True, 1)}), ("n1 c17 h10 w12 k9 r2 s3 pad1 f16", {(True, 1)}),
        # Planes that begin with several remainders.
        ("n2 c64 h5 w7 k24 r3 s3 pad1 f16", {(True, 8)}), ("n2 c128 h9 w9 k36 r3 s3 pad1 groups2 bf16", {(True, 8)}),
        ("n1 c192 h13 w11 k16 r1 s7 pad0x3 f16 residual", {(True, 8)}),
        ("n3 c32 h11 w10 k16 r5 s5 pad2x1 f16", {(True, 4)}), ("n2 c64 h3 w6 k72 r3 s3 pad2 f16 relu", {(True, 4)}),
        ("n2 c16 h5 w12 k16 r3 s3 bf16", {(True, 2)}), ("n2 c96 h14 w6 k40 r3 s1 pad1x0 f16", {(True, 2)}),
        # Strides: all residues, some, one; rows that no tap meets; one tap of several chunks, a last one not full.
        ("n2 c40 h18 w32 k24 r3 s3 stride2 pad1 f16 bias", {(False, 1), (True, 1)}),
        ("n1 c24 h11 w24 k16 r5 s2 stride3x2 pad2x1 bf16", {(False, 1), (True, 1)}),
        ("n2 c16 h16 w32 k20 r4 s4 stride4 f16 residual", {(True, 1)}),
        ("n1 c72 h13 w24 k16 r1 s1 stride2 f16", {(False, 1)}), ("n9 c200 h9 w16 k8 r1 s1 stride2 f16", {(False, 1)}),
        ("n30 c24 h9 w16 k8 r1 s1 stride2 f16", {(False, 1)}), ("n2 c32 h11 w10 k8 r1 s2 stride3x2 bf16", {(True, 4)}),
        ("n1 c32 h15 w32 k16 r3 s3 stride2 dilation2 pad2 f16", {(False, 1)}),
        ("n1 c16 h12 w16 k16 r2 s2 stride4x3 dilation2x1 pad1 f16", {(False, 1)}),
        ("n1 c16 h14 w32 k16 r3 s3 stride2x1 dilation3x1 pad3x1 groups2 f16", {(False, 1), (True, 1)}),
        ("n2 c64 h9 w7 k24 r3 s3 stride2 pad1 f16", {(True, 8)}),
        ("n1 c64 h10 w14 k16 r2 s2 stride2 bf16", {(True, 2)}), ("n1 c128 h7 w9 k16 r1 s1 stride2 f16", {(True, 8)}),
        ("n2 c32 h14 w14 k16 r7 s7 stride2 pad3 f16", {(True, 2)}),
    ],
)  # fmt: skip
def test_planes_are_transposed(
    emulation: None, monkeypatch: pytest.MonkeyPatch, text: str, kinds: set[tuple[bool, int]], backwards: bool
) -> None:
    monkeypatch.setattr(Launch, "__call__", lambda self, addresses, _: emulated.run_at(self, addresses, backwards))
    problem = ConvProblem.parse(text)
    some = staged(problem)
    assert {(view.flat_planes, view.plane_classes) for view in (View.of(problem, one) for one in some)} == kinds
    for config in some[backwards::2]:
        assert ALGORITHM.workspace_bytes(problem, config, SMALL) == 0
        verdict = verdict_of(ALGORITHM, problem, config)
        assert verdict, f"{config}: {verdict.message}"


@needs_compiler
@pytest.mark.parametrize(
    "text", ["n2 c32 h9 w16 k16 r3 s3 pad1 groups2 f16", "n2 c128 h9 w7 k16 r3 s3 pad1 groups2 f16"]
)
def test_values_that_are_not_finite_stay_where_windows_meet_them(emulation: None, text: str) -> None:
    """Of an image, of a group, and of the last row and column of a plane, behind which the next one begins."""
    problem = ConvProblem.parse(text)
    inputs = problem.sample(np.random.default_rng(0), False)
    plain = inputs.x.copy()
    inputs.x[0, 1, -1, :], inputs.x[0, 2, :, -1], inputs.x[1, -1, 0, 0] = np.nan, np.inf, np.nan
    expected = problem.convolve(plain, inputs.w)
    touched = np.zeros(problem.y_shape, bool)
    half = problem.group_k
    touched[0, :half, -2:], touched[0, :half, :, -2:], touched[1, half:, :2, :2] = True, True, True
    for config in staged(problem):
        plan, y = ALGORITHM.plan(problem, config, SMALL), lent(np.full(problem.y_shape, np.nan, problem.y_dtype))
        plan.run(Buffers(lent(inputs.x), plan.pack(lent(inputs.w)), y, None, None, None, 0))
        result = memory_of(y)
        np.testing.assert_allclose(result[~touched], expected[~touched], rtol=2e-2, atol=2e-2, err_msg=str(config))
        assert not np.isfinite(result[touched]).any(), config


@pytest.mark.parametrize(
    ("text", "tile", "expected"),
    [
        # 7 and 56 pixels are eight pieces; a row and not to meet the same banks, one more.
        ("c64 h160 w160 k64 r3 s3 pad1 f16", (54, 4, 64), Strips(False, 1, 6, 6, 1, 72, 8)),
        ("c16 h160 w160 k64 r3 s3 pad1 f16", (40, 6, 16), Strips(False, 1, 3, 8, 3, 56, 7)),
        ("c64 h56 w56 k64 r3 s3 pad1 bf16", (56, 4, 64), Strips(True, 1, 6, 6, 1, 56, 7)),
        ("c64 h14 w14 k64 r3 s3 pad1 f16", (14, 14, 64), Strips(True, 2, 6, 16, 1, 40, 5)),
        ("c64 h7 w7 k64 r3 s3 pad1 f16", (7, 7, 64), Strips(True, 8, 3, 9, 1, 24, 3)),
        ("c40 h14 w14 k64 r3 s3 pad1 f16", (14, 14, 32), None),
        ("c32 h7 w7 k64 r3 s3 pad1 f16", (7, 7, 32), None),
        ("c64 h28 w28 k64 r3 s3 pad1 f16", (14, 14, 64), None),
        ("c64 h4 w512 k64 r3 s3 pad1 f16", (254, 1, 64), None),
        ("c64 h56 w56 k64 r3 s3 pad1 f16 nhwc", (56, 4, 64), None),
        ("c64 h56 w56 k64 r3 s3 pad1 tf32", (56, 4, 32), None),
    ],
)
def test_strips(text: str, tile: tuple[int, int, int], expected: Strips | None) -> None:
    assert strips_of(ConvProblem.parse(text), *tile) == expected


@pytest.mark.many
@pytest.mark.parametrize(
    "text",
    [
        "n32 c64 h160 w160 k64 r3 s3 pad1 f16", "n32 c72 h56 w56 k128 r3 s3 pad1 f16 bias",
        "n32 c768 h15 w15 k768 r3 s3 pad1 groups6 bf16", "n32 c16 h96 w96 k16 r3 s3 pad1 f16",
        "n32 c64 h112 w112 k96 r3 s3 stride2 pad1 f16 bias", "n32 c96 h56 w56 k64 r1 s1 stride2 f16",
        "n32 c32 h112 w112 k192 r4 s4 stride4 f16", "n32 c512 h32 w32 k512 r3 s3 stride2 pad1 groups32 f16",
    ],
)  # fmt: skip
def test_geometry(text: str) -> None:
    """Strips bring all of a halo; copies are what TMA takes; what the kernel lays into shared memory fits."""
    problem = ConvProblem.parse(text)
    some = [one for one in ALGORITHM.configs(problem, H200) if isinstance(one, HaloTileConfig) and one.staged_strips]
    assert {one.staged_strips for one in some} == {3, 6}
    for config in some:
        view, launch = View.of(problem, config), ALGORITHM.launch(problem, config, H200)
        strips, tile, box = view.strips, view.rectangle, launch.maps["x"].box
        assert strips is not None
        assert strips.pitch // 8 % 2 == 1
        assert strips.pieces * 8 <= strips.pitch <= 256
        if strips.flat:
            assert strips.count * strips.pieces * 8 >= strips.high * problem.spatial[1]
            assert strips.high == (tile.down - 1) * problem.stride[0] + problem.reach[0]
        else:
            assert strips.count * strips.rows >= strips.high
            assert (strips.high - 1) * strips.grain == (tile.down - 1) * problem.stride[0] + problem.reach[0] - 1
            assert strips.pieces * 8 >= (config.across - 1) * problem.stride[1] + problem.reach[1]
        # Each output's windows lie within a residue's part.
        assert (tile.high - tile.down + 1) * problem.stride[0] >= problem.reach[0]
        assert (tile.wide - config.across + 1) * problem.stride[1] >= problem.reach[1]
        assert tile.apart >= tile.high * tile.wide
        assert all(stride % 16 == 0 for stride in launch.maps["x"].strides)
        assert max(box) <= 256
        assert launch.maps["x"].swizzle_bytes == 0
        rows = (box[1] - 1) // strips.grain + 1
        assert (rows, box[1] % strips.grain) == (strips.rows, 1 % strips.grain)
        assert box[0] * rows * box[2] * strips.classes == strips.rows * strips.pitch * view.chunk_bytes // 2
        # As HaloLayout, behind at most 1023 bytes that align it.
        words = dict(zip(launch.names, launch.words, strict=True))
        row, way = view.chunk_bytes, Epilogue(view)
        halos = config.halo_buffers * (words["halo_pixels"] + words["copy_pixels"]) * row
        ring = -(-halos // 1024) * 1024 + config.stages * view.copied_filters * row
        spare = -(-ring // 128) * 128 + config.staged_strips * strips.rows * strips.pitch * row
        buffers = -(-(spare + 512 + 4 * words["table_words"]) // 1024) * 1024 + 2 * way.epilogue_buffers * 64 * 64 * 2
        runs = config.tile_pixels + way.runs * way.run_vector + -(-config.tile_pixels // 64) + 2
        tables = buffers + 2 * 4 * (config.tile_pixels + (runs + 1) // 2 * 2 * (way.run_vector > 0))
        biases = tables + 2 * 4 * config.tile_filters * problem.bias
        end = biases + 8 + 16 * (config.halo_buffers + config.stages) + 8 * config.staged_strips
        assert 1023 + end <= launch.shared_bytes <= H200.shared_bytes


def test_filters_are_sorted_where_planes_are(emulation: None) -> None:
    for text, sorted_ in (("n2 c64 h14 w14 k64 r3 s3 pad1 f16", True), ("n2 c64 h16 w16 k64 r3 s3 pad1 f16", False)):
        problem = ConvProblem.parse(text)
        for config in staged(problem):
            plan = ALGORITHM.plan(problem, config, H200)
            assert plan._as_given is not sorted_  # type: ignore[attr-defined]
            assert (plan._classes[0] > 1) is sorted_  # type: ignore[attr-defined]


def test_what_reads_planes_packs_nothing() -> None:
    problem = ConvProblem.parse("n2 c64 h16 w16 k64 r3 s3 pad1 f16")
    for config in ALGORITHM.configs(problem, H200):
        packs = not config.staged_strips
        assert (ALGORITHM.workspace_bytes(problem, config, H200) > 0) is packs
        assert len(ALGORITHM.sources(problem, config)) == 2 + packs
    for changed in (
        {"layout": "nhwc"}, {"dtype": "f32", "math": "tf32"}, {"kernel": (1, 1), "padding": ((0, 0), (0, 0))},
        {"stride": (4, 4), "dilation": (3, 3)},
    ):  # fmt: skip
        other = problem.replace(**changed)
        assert not any(one.staged_strips for one in ALGORITHM.configs(other, H200)), str(other)


def test_what_strips_take() -> None:
    """More where a warp waits for each of its strips, less than packing."""
    problem = ConvProblem.parse("n32 c64 h160 w160 k64 r3 s3 pad1 f16")
    config = HaloTileConfig(True, 224, 64, 9, True, across=54, staged_strips=6)
    views = [View.of(problem, replace(config, staged_strips=count)) for count in (6, 3, 0)]
    twice, once, packed = (cost.cost(view, H200, 0 if view.strips else 10) for view in views)
    assert once.copies > twice.copies
    assert packed.packing_us > 0
    assert twice.packing_us == 0


@pytest.mark.many
@pytest.mark.parametrize(
    "text",
    [
        "n32 c64 h160 w160 k64 r3 s3 pad1 f16", "n32 c128 h56 w56 k128 r3 s3 pad1 bf16 bias gelu residual",
        "n32 c16 h96 w96 k16 r3 s3 pad1 f16 bias tanh", "n32 c32 h28 w28 k72 r3 s3 pad1 f16 gelu",
        "n32 c512 h7 w7 k512 r3 s3 pad1 f16 bias silu", "n32 c64 h15 w15 k63 r3 s3 pad1 f16 bias residual tanh",
        "n32 c256 h14 w14 k256 r3 s3 pad1 f16 bias relu residual", "n32 c32 h30 w30 k36 r3 s3 pad1 bf16 tanh",
        "n32 c128 h64 w64 k256 r3 s3 stride2 pad1 f16 bias relu", "n32 c64 h28 w28 k128 r3 s3 stride2 pad1 bf16",
        "n32 c128 h14 w14 k256 r2 s2 stride2 f16 bias", "n32 c96 h56 w56 k192 r1 s1 stride2 f16 bias residual",
        "n32 c32 h112 w112 k192 r4 s4 stride4 f16", "n32 c512 h32 w32 k512 r3 s3 stride2 pad1 groups32 f16 bias relu",
    ],
)  # fmt: skip
def test_kernels_compile_without_spills_or_waits(text: str, share: Share) -> None:
    """Those with the most sums, of each kind of strips."""
    problem = ConvProblem.parse(text)
    kinds: dict[tuple[object, ...], Config] = {}
    for config in sorted(
        ALGORITHM.configs(problem, H200), key=lambda one: one.tile_pixels * one.tile_filters, reverse=True
    ):
        if config.staged_strips:
            kinds.setdefault((View.of(problem, config).flat_planes, config.staged_strips, config.swap_ab), config)
    for config in share(kinds.values()):
        _, used, log = compiled(ALGORITHM.source(problem, config), "sm_90a")
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{config}: {used}"
        assert not re.search(r"C75\d\d", log), f"{config}: {log}"
