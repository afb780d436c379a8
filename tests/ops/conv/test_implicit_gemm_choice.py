"""What cuda.implicit_gemm has to choose from, and what its model says of it, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tapwise import dispatch
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.implicit_gemm import configs, geometry, model
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.problem import ConvProblem


@pytest.mark.parametrize(
    ("text", "pixels", "grain", "widths"),
    [
        # 57 x 57 x 32 pixels in 7, 8 and 9 waves of 132 tiles, half of them for 64 of 128 filters.
        ("n32 c128 h56 w56 k128 r3 s3 pad1 f16 nhwc", 57 * 57 * 32, 8, (232, 200, 176)),
        ("n4 c512 h33 w33 k256 r3 s3 pad12 dilation12 f16 nhwc", 33 * 33 * 4, 16, (144, 80)),
        ("n1 c64 h9 w9 k64 r3 s3 pad1 f16 nhwc", 81, 16, ()),
    ],
)
def test_tiles_that_fill_waves(text: str, pixels: int, grain: int, widths: tuple[int, ...]) -> None:
    problem = ConvProblem.parse(text)
    found = configs._filling(problem, H200, pixels, grain)
    assert tuple(width for _, width, filters in found if filters == 64) == widths
    for rows, width, filters in found:
        across = -(-problem.group_k // filters)
        tiles, more = (across * -(-pixels // one) for one in (width, width - grain))
        # The next narrower ones would need one wave more.
        assert rows == "filters" and -(-tiles // 132) < -(-more // 132) and width % grain == 0
    taken = {(one.kernel, one.rows, one.pixels, one.filters) for one in ImplicitGemm().configs(problem, H200)}
    kernel = "slab" if grain == 8 else "stream"
    assert {(kernel, *one) for one in found if kernel == "stream" or one[2] == 64} <= taken


def test_filters_stay_beside_slabs_in_several_sets() -> None:
    """Where blocks have several tiles; a ring of filters is there beside it, as its blocks may be more."""
    algorithm = ImplicitGemm()

    def found(text: str) -> set[tuple[str, int, bool]]:
        configs = algorithm.configs(ConvProblem.parse(text), H200)
        return {(one.kernel, one.filters, one.held) for one in configs if one.kernel != "stream"}

    many = found("n32 c64 h56 w56 k128 r3 s3 pad1 f16 nhwc")
    assert {("slab", 64, True), ("slab", 64, False), ("box", 64, True), ("box", 64, False)} <= many
    # One set stays wherever it has a place, and then there is no ring.
    assert {one[2] for one in found("n1 c16 h20 w20 k64 r3 s3 pad1 f16 nhwc") if one[1] == 64} == {True}
    few = found("n1 c64 h28 w28 k512 r3 s3 pad1 f16 nhwc")
    assert {one[2] for one in few if one[1] == 64} == {False}, "a block has one tile"
    grouped = ConvProblem.parse("n32 c128 h56 w56 k128 r3 s3 pad1 groups2 f16 nhwc")
    stays = [one for one in algorithm.configs(grouped, H200) if one.held and one.kernel != "stream"]
    assert {one.kernel for one in stays} == {"slab", "box"}
    assert not any(one.gather for one in stays)
    # A GPU of fewer multiprocessors than sets has no blocks for them.
    few_places = replace(H200, multiprocessors=16)
    wide = ConvProblem.parse("n32 c64 h56 w56 k1280 r3 s3 pad1 f16 nhwc")
    for device in (few_places, H200):
        assert all(geometry.blocks_of(wide, one, device) > 0 for one in algorithm.configs(wide, device))


def test_slabs_of_few_taps_and_of_half_lines() -> None:
    """Of windows of few taps there are more slabs than two where there is room; lines are halved where that leaves out
    the half of a chunk that has no channels, by the copy engine only."""
    algorithm = ImplicitGemm()

    def slabs(text: str) -> list[geometry.Config]:
        return [one for one in algorithm.configs(ConvProblem.parse(text), H200) if one.slabs]

    assert {one.slabs for one in slabs("n32 c80 h20 w20 k80 r3 s3 pad1 f16 nhwc")} == {2}
    few = slabs("n32 c80 h1 w3000 k512 r1 s3 pad0x1 f16 nhwc")
    assert max(one.slabs for one in few if one.line) == 4 and {one.slabs for one in few if not one.line} == {2, 3}
    # No more than two where they would leave fewer than eight stages for filters that do not stay.
    assert all(one.slabs == 2 for one in few if not one.held and one.stages < 8)
    for text, halved in (
        ("n32 c96 h20 w20 k80 r3 s3 pad1 f16 nhwc", True), ("n32 c104 h20 w20 k80 r3 s3 pad1 f16 nhwc", False),
        ("n32 c64 h20 w20 k80 r3 s3 pad1 f16 nhwc", False), ("n32 c40 h20 w20 k80 r3 s3 pad1 f16 nhwc", False),
        ("n32 c96 h20 w20 k80 r3 s3 pad1 groups2 f16 nhwc", False), ("n32 c40 h20 w20 k80 r3 s3 pad1 tf32 nhwc", True),
        ("n32 c40 h20 w20 k80 r3 s3 pad1 3xtf32 nhwc", False), ("n32 c80 h20 w20 k80 r3 s3 pad1 f16", True),
    ):  # fmt: skip
        found = slabs(text)
        assert {one.line for one in found} == ({0, 64} if halved else {0}), text
        assert all(not one.gather for one in found if one.line)


def test_predictions_tell_what_they_are_made_of() -> None:
    algorithm, problem = ImplicitGemm(), ConvProblem.parse("n32 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc")
    choice = dispatch.choose(problem, H200)
    text = algorithm.explain(problem, choice.config, H200)  # type: ignore[arg-type]
    assert re.search(r"tiles a multiprocessor .*bound by (products|copies).*memory", text)
    work = model.Work(
        rows=128, columns=128, steps=36, instructions=4, stages=6, flight=2, pixel_lines=128, filter_lines=128,
        line_bytes=128, parted=False, taps=9, slabs=0, ragged=0.0, pixel_readers=2, filter_readers=66, slab=False,
        held=False, gather=0,
        outputs=128 * 128, together=1, residual=False, ahead=False, paced=False, activation=None, written=8,
        boxes=True, tiles=132, split=1, room=1, overlapped="loop", multiprocessors=132, read_bytes=10**6,
        written_bytes=10**6, packed_bytes=0,
        windows=False, ordered=0, odd=False, sectors=1.0,
    )  # fmt: skip
    one = model.cost(work, 4280.0)
    assert one.share == 1
    twice = model.cost(replace(work, tiles=133), 4280.0)
    assert twice.share == 2
    assert 1.5 * one.us < twice.us < 2 * one.us
    # What costs more: lines that end within pieces, windows outside, too few stages, threads that write.
    for worse in (
        replace(work, ragged=1.0), replace(work, stages=3), replace(work, boxes=False, written=2),
        replace(work, packed_bytes=10**6), replace(work, residual=True), replace(work, activation="silu"),
        replace(work, pixel_readers=1), replace(work, boxes=False, odd=True),
    ):  # fmt: skip
        assert model.cost(worse, 4280.0).us > one.us
    # All filters beside a slab leave products more of shared memory's time.
    slab = replace(work, slab=True, slabs=2, pixel_lines=16)
    assert model.cost(replace(slab, held=True), 4280.0).us < model.cost(slab, 4280.0).us
    # The next slab comes while the taps of those before it are multiplied: many, or of several slabs.
    few = replace(slab, taps=3, columns=32)
    assert model.cost(few, 4280.0).us > 1.1 * model.cost(replace(few, slabs=3), 4280.0).us
    assert model.cost(few, 4280.0).us > 1.1 * model.cost(replace(few, taps=9), 4280.0).us
    assert model.cost(replace(slab, slabs=3), 4280.0).us == model.cost(slab, 4280.0).us
    # Clusters of four do not find a place on every multiprocessor.
    split = replace(work, tiles=32, split=4, overlapped="once")
    assert model.cost(split, 4280.0).share == 2
    assert model.cost(replace(split, room=2), 4280.0).share < 1.1


def test_lines_suffer_from_where_they_begin() -> None:
    for pixel, apart, line, wanted in (
        (128, 128, 128, 0.0), (192, 192, 128, 0.0), (160, 160, 128, model.HALF_RAGGED), (88, 88, 128, 1.0),
        (48, 48, 64, 1.0), (32, 96, 32, 0.0), (112, 224, 128, model.HALF_RAGGED),
    ):  # fmt: skip
        assert model.raggedness(pixel, apart, line) == wanted, (pixel, apart, line)
