"""Pictures in strips and Dask arrays: pixels are those of one piece."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from pictures import photo, run

from tapwise import image
from tapwise.errors import InvalidPicture
from tapwise.image import bank, large
from tapwise.image.work import Work


@pytest.mark.parametrize("mode", ["reflect", "constant", "nearest", "mirror", "wrap"])
@pytest.mark.parametrize("words", ["gaussian sigma=3", "sobel", "box size=21"])
def test_strips_are_the_picture_in_one_piece(words: str, mode: str) -> None:
    x = photo(97, 53)
    work = Work(bank.parse(words), mode, 17.0)
    whole = work(x)
    for rows in (1, 7, 32, 97):
        np.testing.assert_array_equal(np.concatenate(list(large.strips(x, work, rows))), whole)
    flat = np.ascontiguousarray(x[..., 0])
    np.testing.assert_array_equal(np.concatenate(list(large.strips(flat, work, 10))), work(x[..., :1].copy())[..., 0])
    with pytest.raises(InvalidPicture, match="stride"):
        list(large.strips(x, Work(bank.parse(words), stride=2)))


@pytest.mark.parametrize("suffix", [".tif", ".zarr"])
def test_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    import zarr

    monkeypatch.setattr(large, "LARGE_BYTES", 1000)
    monkeypatch.setattr(large, "STRIP_BYTES", 1)
    x = photo(700, 600, 4)
    source, target = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    if suffix == ".tif":
        tifffile.imwrite(
            source, x, tile=(64, 64), photometric="rgb", extrasamples=["unassalpha"], compression="deflate"
        )
    else:
        zarr.save_array(str(source), x)
    run(source, target, "-f", "gaussian sigma=2")
    y = tifffile.imread(target) if suffix == ".tif" else np.asarray(zarr.open_array(str(target), mode="r"))
    np.testing.assert_array_equal(y[..., :3], Work(bank.parse("gaussian sigma=2"))(np.ascontiguousarray(x[..., :3])))
    np.testing.assert_array_equal(y[..., 3], x[..., 3])
    assert "--force" in run(source, target, "-f", "box", status=1)
    assert "strips" in run(source, target, "-f", "box", "-f", "box", "--force", status=1)
    run(source, target, "-f", "box", "--force")
    assert len(list(tmp_path.iterdir())) == 2


def test_what_does_not_go_in_strips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "LARGE_BYTES", 1000)
    x = photo(90, 80)
    tifffile.imwrite(tmp_path / "planes.tif", x.transpose(2, 0, 1), planarconfig="separate", photometric="rgb")
    tifffile.imwrite(tmp_path / "rotated.tif", x, photometric="rgb", extratags=[(274, "H", 1, 6, True)])
    for name, says in (("planes", "planes"), ("rotated", "is to be rotated")):
        assert says in run(tmp_path / f"{name}.tif", tmp_path / "out.tif", "-f", "box", status=1)
    assert not (tmp_path / "out.tif").exists()


_MEASURED = """
import sys
from pathlib import Path
from tapwise.image.work import Work
from tapwise.image import bank, large
large.filter_large(Path(sys.argv[1]), Path(sys.argv[2]), Work(bank.parse("gaussian sigma=3")))
# Not ru_maxrss, which begins with that of the process that started this one.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_20000_by_20000_in_500_megabytes(tmp_path: Path) -> None:
    side, tile = 20_000, 512
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (tile, tile), dtype=np.uint8)

    def tiles() -> Any:
        for row in range(-(-side // tile)):
            for column in range(-(-side // tile)):
                yield np.roll(noise, (7 * row, 13 * column), (0, 1))

    source, target = tmp_path / "a.tif", tmp_path / "b.tif"
    tifffile.imwrite(source, tiles(), shape=(side, side), dtype=np.uint8, tile=(tile, tile), photometric="minisblack")
    run_ = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(source), str(target)], capture_output=True, text=True, check=True
    )
    assert int(run_.stdout) < 500_000
    import zarr

    with tifffile.imread(source, aszarr=True) as before, tifffile.imread(target, aszarr=True) as after:
        x, y = zarr.open_array(before, mode="r"), zarr.open_array(after, mode="r")
        assert y.shape == (side, side)
        work = Work(bank.parse("gaussian sigma=3"))
        for top, left in ((0, 0), (8100, 9000), (side - 300, side - 400)):
            a, b = max(0, top - 20), max(0, left - 20)
            piece = work(np.ascontiguousarray(np.asarray(x[a : top + 300, b : left + 400])[..., None]))[..., 0]
            seen = np.asarray(y[top : top + 280, left : left + 380])
            bottom, right = (None if top + 300 >= side else -20), (None if left + 400 >= side else -20)
            piece = piece[top - a : bottom, left - b : right]
            rows, columns = min(280, piece.shape[0]), min(380, piece.shape[1])
            np.testing.assert_array_equal(seen[:rows, :columns], piece[:rows, :columns])


@pytest.mark.parametrize("mode", ["reflect", "constant", "nearest", "mirror", "wrap"])
def test_dask_blocks_are_the_array_in_one_piece(mode: str) -> None:
    da = pytest.importorskip("dask.array")
    from tapwise.image.dask import map_filter

    x = photo(120, 90)
    blocks = da.from_array(x, chunks=(40, 33, 3))
    work = Work(bank.parse("gaussian sigma=2"), mode, 9.0)
    y = map_filter(blocks, "gaussian sigma=2", mode=mode, cval=9.0)
    assert y.dtype == np.uint8 and y.shape == x.shape
    np.testing.assert_array_equal(y.compute(scheduler="threads"), work(x))
    grey = x[..., 0].astype(np.float32)
    done = map_filter(da.from_array(grey, chunks=50), image.gaussian_filter, depth=9, mode=mode, cval=9.0, sigma=2)
    np.testing.assert_allclose(done.compute(), image.gaussian_filter(grey, 2, mode=mode, cval=9.0), rtol=1e-6)
    wrong: list[tuple[Any, dict[str, Any]]] = [("bank", {}), ("box", {"depth": 3}), (image.laplace, {})]
    for function, options in wrong:
        with pytest.raises(InvalidPicture):
            map_filter(blocks, function, **options)


def test_dask_on_a_cluster_of_processes() -> None:
    da = pytest.importorskip("dask.array")
    distributed = pytest.importorskip("distributed")
    from tapwise.image.dask import map_filter

    x = photo(300, 200)
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster):
        y = map_filter(da.from_array(x, chunks=(64, 70, 3)), "unsharp sigma=2").compute()
    np.testing.assert_array_equal(y, Work(bank.parse("unsharp sigma=2"))(x))
