"""cuda.im2col_gemm without a GPU: passes, partitions, and its library."""

from __future__ import annotations

import pytest

from tapwise import dispatch
from tapwise.cuda import partition as partitions
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda import im2col_gemm
from tapwise.ops.conv.cuda.im2col_gemm import Im2colGemm
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.patches import cuda as patches


def test_the_library_is_taken_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(im2col_gemm, "_library", lambda: True)
    problem = ConvProblem.parse("n2 c513 h7 w7 k512 r3 s3 pad1")
    assert any(not one.automatic for one in Im2colGemm().configs(problem, H200))
    assert "library" not in str(dispatch.choose(problem, H200, "cuda.im2col_gemm").config)
    assert all("library" not in str(one.config) for one in dispatch.explain(problem, H200))
    asked = dispatch.choose(problem, H200, "cuda.im2col_gemm", config="gemm=library images=2")
    assert str(asked.config) == "gemm=library filters=0 images=2 partition=run threads=0"


def test_im2col_gemm_covers_every_image() -> None:
    """Passes of a few images, and the rest."""
    algorithm = Im2colGemm()
    problem = ConvProblem.parse("n7 c3 h9 w11 k13 r3 s3 pad1")
    config = im2col_gemm.Config("shared", 8, 3)
    assert algorithm.workspace_bytes(problem, config, H200) == 3 * 27 * 99 * 4
    for images in (3, 1):
        first, second = algorithm.launches(problem, config, images, H200)
        assert second is not None
        words = dict(zip(second.names, second.words, strict=True))
        assert (words["batch"], words["m"], words["windows"], words["depth"]) == (images, 13, 99, 27)
        assert second.grid == (2 * 1, 1, images)
        assert dict(zip(first.names, first.words, strict=True))["planes"] == images * 3
    large = ConvProblem.parse("c64 h4096 w4096 k64 r3 s3 pad1")
    assert "GiB" in (algorithm.refusal(large, H200) or "")
    assert {one.images for one in algorithm.configs(problem.replace(n=4096), H200)} == {4096, 1}
    many = ConvProblem.parse("n1000 c64 h56 w56 k64 r3 s3 pad1")
    assert {one.images for one in algorithm.configs(many, H200)} == {(4 << 30) // (64 * 9 * 3136 * 4), 1}


def window_of(partition: str, threads: int, tile: int, number: int, rows: int, width: int) -> int:
    """What include/partitions.cuh computes, from the meaning of the words."""
    across, down = partitions.tile_shape(partition, threads)
    assert across * down == threads
    tiles = -(-width // across)
    row, column = tile // tiles * down + number // across, tile % tiles * across + number % across
    return row * width + column if row < rows and column < width else -1


@pytest.mark.parametrize("partition", partitions.PARTITIONS)
@pytest.mark.parametrize("threads", patches.PART_THREADS)
def test_partitions_cover_every_window_once(partition: str, threads: int) -> None:
    """The grids of both halves of im2col + GEMM reach each window once, at odd sizes."""
    problem = ConvProblem.parse("n2 c3 h37 w71 k5 r3 s3")
    rows, width = problem.output
    algorithm = Im2colGemm()
    for one in algorithm.configs(problem, H200):
        if (one.partition, one.threads) != (partition, threads):
            continue
        assert not one.automatic
        first, second = algorithm.launches(problem, one, 2, H200)
        assert second is not None
        words = dict(zip(second.names, second.words, strict=True))
        assert (words["rows"], words["width"]) == (rows, width)
        assert second.block[0] == first.block[0] == threads
        tiles = words["tiles_n"]
        assert second.grid == (tiles * words["tiles_m"], 1, 2)
        # A block of the expansion is a tile of one channel.
        assert first.grid[0] == min(tiles * 6, patches.BLOCKS_EACH * H200.multiprocessors)
        found = [window_of(partition, threads, tile, i, rows, width) for tile in range(tiles) for i in range(threads)]
        assert sorted(window for window in found if window >= 0) == list(range(rows * width))
