"""What cuda.implicit_gemm has to choose from, and what its model says of it, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from emulated_plans import SMALL, lent, memory_of, needs_compiler

from tapwise import dispatch
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.implicit_gemm import cost
from tapwise.ops.conv.cuda.implicit_gemm.config import Config, HaloRowsConfig, Im2colConfig
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.cuda.implicit_gemm.view import PLACED, View
from tapwise.ops.conv.problem import ConvProblem


def test_filters_stay_beside_halo_rows_in_several_sets() -> None:
    """Where blocks have several tiles; a ring of filters is there beside it, as its blocks may be more."""
    algorithm = ImplicitGemm()

    def found(text: str) -> set[tuple[str, int, bool]]:
        configs = algorithm.configs(ConvProblem.parse(text), H200)
        return {(one.kernel, one.tile_filters, one.filter_stationary) for one in configs if one.kernel != "im2col"}

    many = found("n32 c64 h56 w56 k128 r3 s3 pad1 f16 nhwc")
    assert {("halo_rows", 64, True), ("halo_rows", 64, False), ("halo_tile", 64, False)} <= many
    assert ("halo_tile", 64, True) not in many
    # One set stays wherever it has a place, and then there is no ring.
    assert {one[2] for one in found("n1 c16 h20 w20 k64 r3 s3 pad1 f16 nhwc") if one[1] == 64} == {True}
    few = found("n1 c64 h28 w28 k512 r3 s3 pad1 f16 nhwc")
    assert {one[2] for one in few if one[1] == 64} == {False}, "a block has one tile"
    grouped = ConvProblem.parse("n32 c128 h56 w56 k128 r3 s3 pad1 groups2 f16 nhwc")
    stays = [one for one in algorithm.configs(grouped, H200) if one.filter_stationary and one.kernel != "im2col"]
    assert {one.kernel for one in stays} == {"halo_rows"}
    assert not any(one.gather_bytes for one in stays)
    # A GPU of fewer multiprocessors than sets has no blocks for them.
    few_places = replace(H200, multiprocessors=16)
    wide = ConvProblem.parse("n32 c64 h56 w56 k1280 r3 s3 pad1 f16 nhwc")
    for device in (few_places, H200):
        assert all(View.of(wide, one).blocks(device) > 0 for one in algorithm.configs(wide, device))


def test_halo_buffers_of_few_taps_and_half_chunks() -> None:
    """Of windows of few taps there are more than two buffers where there is room; chunks are halved where that leaves
    out the half that has no channels, by TMA only."""
    algorithm = ImplicitGemm()

    def halos(text: str) -> list[Config]:
        return [one for one in algorithm.configs(ConvProblem.parse(text), H200) if one.halo_buffers]

    assert {one.halo_buffers for one in halos("n32 c80 h20 w20 k80 r3 s3 pad1 f16 nhwc")} == {2}
    few = halos("n32 c80 h1 w3000 k512 r1 s3 pad0x1 f16 nhwc")
    assert max(one.halo_buffers for one in few if one.chunk_bytes) == 4
    assert {one.halo_buffers for one in few if not one.chunk_bytes} == {2, 3}
    # No more than two where they would leave fewer than eight stages for filters that do not stay.
    assert all(one.halo_buffers == 2 for one in few if not one.filter_stationary and one.stages < 8)
    for text, halved in (
        ("n32 c96 h20 w20 k80 r3 s3 pad1 f16 nhwc", True),
        ("n32 c104 h20 w20 k80 r3 s3 pad1 f16 nhwc", False),
        ("n32 c64 h20 w20 k80 r3 s3 pad1 f16 nhwc", False),
        ("n32 c40 h20 w20 k80 r3 s3 pad1 f16 nhwc", False),
        ("n32 c96 h20 w20 k80 r3 s3 pad1 groups2 f16 nhwc", False),
        ("n32 c40 h20 w20 k80 r3 s3 pad1 tf32 nhwc", True),
        ("n32 c40 h20 w20 k80 r3 s3 pad1 3xtf32 nhwc", False),
        ("n32 c80 h20 w20 k80 r3 s3 pad1 f16", True),
    ):
        found = halos(text)
        assert {one.chunk_bytes for one in found} == ({0, 64} if halved else {0}), text
        assert all(not one.gather_bytes for one in found if one.chunk_bytes)


def test_predictions_tell_what_they_are_made_of() -> None:
    algorithm, problem = ImplicitGemm(), ConvProblem.parse("n32 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc")
    choice = dispatch.choose(problem, H200)
    text = algorithm.explain(problem, choice.config, H200)  # type: ignore[arg-type]
    assert re.search(r"tiles a multiprocessor .*bound by (products|copies).*memory", text)


def us(text: str, config: Config) -> float:
    return ImplicitGemm().predict_us(ConvProblem.parse(text), config, H200)


def test_what_costs_more() -> None:
    """Each term of the model by itself."""
    text = "n32 c64 h64 w64 k128 r3 s3 pad1 f16 nhwc"
    im2col: Config = Im2colConfig(False, 128, 128, 6, warpgroups=2)
    plain = us(text, im2col)
    # Chunks that end within sectors, windows packed outside, activations and residuals.
    assert us(text.replace("c64", "c44"), im2col) > plain
    assert us(text.replace(" nhwc", ""), im2col) > plain
    assert us(text + " silu", im2col) > plain
    assert us(text + " residual", im2col) > plain
    # Too few stages, where products are short.
    short = replace(im2col, tile_filters=32, warpgroups=1)
    assert us(text, replace(short, stages=3)) > us(text, short)
    # One wave more of tiles, 132 of which have a place.
    wave = "n132 c64 h8 w16 k128 r3 s3 pad1 f16 nhwc"
    assert 1.3 * us(wave, im2col) < us(wave.replace("n132", "n133"), im2col) < 2 * us(wave, im2col)
    # The next halo comes while the taps of those before it are multiplied: many, or of several buffers.
    halo: Config = HaloRowsConfig(False, 128, 32, 8)
    few = "n32 c256 h64 w64 k32 r1 s3 pad0x1 f16 nhwc"
    assert us(few, halo) > us(few, replace(halo, halo_buffers=3))
    many = few.replace("k32 r1 s3 pad0x1", "k128 r3 s3 pad1")
    wide = replace(halo, tile_filters=128)
    assert us(many, wide) == us(many, replace(wide, halo_buffers=3))
    # All filters beside a halo leave products more of shared memory's time.
    small = "n32 c64 h64 w64 k32 r3 s3 pad1 f16 nhwc"
    assert us(small, replace(halo, filter_stationary=True, stages=9)) < us(small, halo)
    # Clusters of four do not find a place on every multiprocessor.
    deep = ConvProblem.parse("n32 c512 h8 w8 k128 r3 s3 pad1 f16 nhwc")
    split = Im2colConfig(False, 64, 128, 8, split_k=4)
    assert cost.cost(View.of(deep, split), H200, 0).share == 2
    # Where two have room on one, what is beyond is shared.
    small_ring = replace(split, stages=3)
    assert cost.cost(View.of(deep, small_ring), H200, 0).share == 128 / (132 * PLACED)


def test_chunks_suffer_from_where_they_begin() -> None:
    for pixel, apart, line, wanted in (
        (128, 128, 128, 0.0),
        (192, 192, 128, 0.0),
        (160, 160, 128, cost.HALF_RAGGED * cost.SEVERAL_CHUNKS),
        (208, 208, 128, cost.SEVERAL_CHUNKS),
        (88, 88, 128, 1.0),
        (48, 48, 64, 1.0),
        (32, 96, 32, 0.0),
        (112, 224, 128, cost.HALF_RAGGED),
    ):
        assert cost.raggedness(pixel, apart, line) == wanted, (pixel, apart, line)


@needs_compiler
@pytest.mark.parametrize(
    ("text", "tile", "given"),
    [
        ("n2 c64 h9 w9 k24 r3 s3 pad1 f16 nhwc", 24, True),
        ("n2 c40 h9 w9 k24 r3 s3 pad1 f16 nhwc", 24, False),
        ("n2 c64 h9 w9 k24 r3 s3 pad1 f16 nhwc", 64, False),
    ],
)
def test_filters_that_need_no_packing_are_taken_as_given(emulation: None, text: str, tile: int, given: bool) -> None:
    """Channels last, whole chunks of channels and tiles; in another order of memory they are packed."""
    problem, algorithm = ConvProblem.parse(text), ImplicitGemm()
    found = (
        one
        for one in algorithm.configs(problem, SMALL)
        if one.tile_filters == tile and not (one.filter_stationary or Epilogue(View.of(problem, one)).permuted_n)
    )
    config = next(found)
    plan = algorithm.plan(problem, config, SMALL)
    values = np.random.default_rng(0).standard_normal(problem.w_shape).astype(problem.x_dtype)
    last, first = lent(np.ascontiguousarray(np.moveaxis(values, 1, -1))).transpose(0, 3, 1, 2), lent(values)
    assert (plan.pack(last) is last) is given
    packed = plan.pack(first)
    assert packed is not first
    assert (algorithm.pack_us(problem, config, SMALL) == 0) is given
    if given:
        assert np.array_equal(memory_of(packed), memory_of(last).transpose(0, 2, 3, 1).ravel())
