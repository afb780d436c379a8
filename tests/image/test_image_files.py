"""`tapwise filter`: named filters, files of every format, many at once, mistakes, pictures in strips, Dask."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
import tifffile
from PIL import Image
from scipy import ndimage
from typer.testing import CliRunner

from tapwise import image
from tapwise.cli import app
from tapwise.errors import InvalidPicture
from tapwise.image import bank, command, files, large
from tapwise.image.work import Work

RUNNER = CliRunner()


def photo(height: int = 41, width: int = 53, channels: int = 3, kind: Any = np.uint8) -> np.ndarray:
    """Something smooth with a little noise."""
    rng = np.random.default_rng(0)
    y, x = np.indices((height, width))
    top = 255 if kind == np.uint8 else 65535 if kind == np.uint16 else 1.0
    base = 0.5 + 0.3 * np.sin(x / 7)[..., None] * np.cos(y / 9)[..., None] + 0.1 * np.arange(channels)
    noisy = (base + 0.05 * rng.standard_normal((height, width, channels))).clip(0, 1) * top
    return noisy.astype(kind) if channels > 1 else noisy[..., 0].astype(kind)


def run(*words: Any, status: int = 0) -> str:
    result = RUNNER.invoke(app, ["filter", *map(str, words)])
    assert result.exit_code == status, result.output
    return result.output


def by_definition(x: np.ndarray, matrix: np.ndarray, mode: str = "reflect", cval: float = 0.0) -> np.ndarray:
    """In float64 by scipy, rounded and held within the dtype's range."""
    planes = [ndimage.correlate(x[..., c].astype(np.float64), matrix, mode=mode, cval=cval) for c in range(x.shape[2])]
    y = np.stack(planes, -1)
    if x.dtype.kind == "f":
        return y.astype(x.dtype)
    return np.clip(np.floor(y + 0.5), 0, np.iinfo(x.dtype).max).astype(x.dtype)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("name", bank.KINDS)
def test_named_filters(name: str, kind: Any) -> None:
    x = photo(kind=kind)
    one = bank.parse(name)
    y = Work(one)(x)
    if len(one.matrices) == 1:
        want = by_definition(x, one.matrices[0]).astype(np.float64)
    else:
        parts = [by_definition(x.astype(np.float32), m).astype(np.float64) for m in one.matrices]
        want = np.hypot(*parts)
        want = want if kind == np.float32 else np.clip(np.rint(want), 0, np.iinfo(kind).max)
    assert y.dtype == kind
    np.testing.assert_allclose(y, want, atol=1 if kind != np.float32 else 2e-6 * max(1.0, np.abs(want).max()))
    assert np.mean(y.astype(np.float64) != want) < 0.02 or kind == np.float32


def test_matrices_are_the_known_ones() -> None:
    assert bank.parse("box").matrices[0].tolist() == np.full((3, 3), 1 / 9).tolist()
    assert bank.parse("sobel axis=1").matrices[0].tolist() == [[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]
    assert bank.parse("scharr axis=0").matrices[0].tolist() == [[-3, -10, -3], [0, 0, 0], [3, 10, 3]]
    for name in ("box", "gaussian", "motion angle=30 length=11", "unsharp", "sharpen", "emboss"):
        assert bank.parse(name).matrices[0].sum() == pytest.approx(1.0), name
    for name in ("laplacian", "log", "sobel axis=0"):
        assert bank.parse(name).matrices[0].sum() == pytest.approx(0.0, abs=2e-3), name
    across = bank.parse("motion length=5").matrices[0]
    assert across[2].tolist() == [0.2] * 5
    assert across[[0, 1, 3, 4]].sum() == 0
    wave = bank.parse("gabor sigma=3 wave=6 angle=90").matrices[0]
    np.testing.assert_allclose(wave, bank.parse("gabor sigma=3 wave=6").matrices[0].T, atol=1e-12)


@pytest.mark.parametrize("words", ["nothing", "gaussian sigma=0", "gaussian size=3", "box size=4", "motion length=2.5",
                                   "gabor wave=-1", "sobel axis=3", "gaussian sigma=x", ""])  # fmt: skip
def test_bad_filters(words: str) -> None:
    with pytest.raises(InvalidPicture):
        bank.parse(words)


def test_matrices_from_files(tmp_path: Path) -> None:
    matrix = np.arange(6.0).reshape(2, 3)
    np.save(tmp_path / "m.npy", matrix)
    np.savetxt(tmp_path / "m.txt", matrix)
    np.savetxt(tmp_path / "m.csv", matrix, delimiter=",")
    for name in ("m.npy", "m.txt", "m.csv"):
        np.testing.assert_array_equal(bank.parse(str(tmp_path / name)).matrices[0], matrix)
    np.save(tmp_path / "bank.npy", np.ones((2, 3, 3, 3)))
    assert bank.parse(str(tmp_path / "bank.npy")).bank is not None
    (tmp_path / "bad.txt").write_text("1 2\n3\n")
    np.save(tmp_path / "nan.npy", np.full((3, 3), np.nan))
    for name in ("bad.txt", "nan.npy"):
        with pytest.raises(InvalidPicture, match="matrix"):
            bank.parse(str(tmp_path / name))


def test_the_bank_mixes_channels() -> None:
    x = photo()
    y = Work(bank.parse("bank"))(x)
    planes = x.astype(np.float64).transpose(2, 0, 1)
    want = [sum(ndimage.correlate(plane, m) for plane, m in zip(planes, one, strict=True)) for one in bank.BANK]
    np.testing.assert_allclose(y, np.clip(np.rint(np.stack(want, -1)), 0, 255), atol=1)
    with pytest.raises(InvalidPicture, match="3 channels"):
        Work(bank.parse("bank"))(x[..., :1])


@pytest.mark.parametrize("mode", ["reflect", "constant", "nearest", "mirror", "wrap"])
@pytest.mark.parametrize("size", [None, (39, 51), (45, 60), (11, 7)])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_strides_and_sizes(stride: int, size: tuple[int, int] | None, mode: str) -> None:
    """As from a picture that is continued far to all sides."""
    x = photo(kind=np.float32)
    one = bank.parse("gaussian sigma=1.3")
    y = Work(one, mode, 0.25, stride, size)(x)
    r, s = one.size
    rows, columns = size or (-(-41 // stride), -(-53 // stride))
    assert y.shape == (rows, columns, 3)
    far = 120
    names: dict[str, Any] = {"reflect": "symmetric", "mirror": "reflect", "nearest": "edge", "wrap": "wrap"}
    options: dict[str, Any] = {"constant_values": 0.25} if mode == "constant" else {}
    wide = np.pad(x, ((far, far), (far, far), (0, 0)), names.get(mode, "constant"), **options)
    whole = by_definition(wide, one.matrices[0])
    before = [
        (((count - 1) * stride + taps - length) // 2 if size else taps // 2)
        for count, taps, length in ((rows, r, 41), (columns, s, 53))
    ]
    first = [far - b + taps // 2 for b, taps in zip(before, (r, s), strict=True)]
    want = whole[first[0] :: stride, first[1] :: stride][:rows, :columns]
    np.testing.assert_allclose(y, want, atol=2e-6)


# Files


@pytest.mark.parametrize(("name", "kind", "channels"), [
    ("a.png", np.uint8, 1), ("a.png", np.uint8, 3), ("a.png", np.uint8, 4), ("a.png", np.uint8, 2),
    ("a.png", np.uint16, 1), ("a.png", np.uint16, 3), ("a.png", np.uint16, 4),
    ("a.tif", np.uint8, 3), ("a.tif", np.uint16, 4), ("a.tiff", np.float32, 1), ("a.tif", np.float32, 3),
    ("a.webp", np.uint8, 3), ("a.jpg", np.uint8, 3), ("a.jpg", np.uint8, 1),
])  # fmt: skip
def test_every_format_there_and_back(tmp_path: Path, name: str, kind: Any, channels: int) -> None:
    x = photo(channels=channels, kind=kind)
    alpha = channels in (2, 4)
    whole = x if x.ndim == 3 else x[..., None]
    files.write(tmp_path / name, files.Picture(whole[..., :-1] if alpha else whole, whole[..., -1:] if alpha else None))
    run(tmp_path / name, tmp_path / f"out{name}", "-f", "gaussian sigma=2")
    before, after = files.read(tmp_path / name), files.read(tmp_path / f"out{name}")
    assert after.pixels.dtype == kind and after.array().shape == x.shape
    want = Work(bank.parse("gaussian sigma=2"))(np.ascontiguousarray(before.pixels))
    lossy = name.endswith(("jpg", "webp"))
    np.testing.assert_allclose(after.pixels.astype(float), want.astype(float), atol=12 if lossy else 0)
    if alpha:
        np.testing.assert_array_equal(after.alpha, whole[..., -1:])
    if not lossy:
        np.testing.assert_array_equal(before.pixels, whole[..., :-1] if alpha else whole)


def test_orientation_and_metadata(tmp_path: Path) -> None:
    y, x = np.indices((30, 50))
    x = np.stack([8 * y, 5 * x, 4 * y + 2 * x], -1).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    profile = b"not really a profile, but kept as it is"
    Image.fromarray(x).save(tmp_path / "a.jpg", exif=exif.tobytes(), icc_profile=profile, dpi=(123, 123), quality=98)
    run(tmp_path / "a.jpg", tmp_path / "b.jpg", "-f", "box size=1")
    with Image.open(tmp_path / "b.jpg") as out:
        assert out.size == (30, 50)
        assert 0x0112 not in out.getexif() or out.getexif()[0x0112] == 1
        assert out.getexif()[0x010F] == "a camera"
        assert out.info["icc_profile"] == profile and round(out.info["dpi"][0]) == 123
        turned = np.asarray(out).astype(int)
    assert np.abs(turned - np.rot90(x, -1).astype(int)).mean() < 6


def test_tiff_keeps_its_compression_and_resolution(tmp_path: Path) -> None:
    tifffile.imwrite(
        tmp_path / "a.tif", photo(), compression="deflate", resolution=(300, 300), description="words", metadata=None,
        photometric="rgb",
    )  # fmt: skip
    run(tmp_path / "a.tif", tmp_path / "b.tif", "-f", "sharpen")
    with tifffile.TiffFile(tmp_path / "b.tif") as out:
        page: Any = out.pages[0]
        assert page.compression.name in ("DEFLATE", "ADOBE_DEFLATE")
        assert page.description == "words" and page.tags["XResolution"].value == (300, 1)


def test_text_has_a_block_for_each_channel(tmp_path: Path) -> None:
    iio.imwrite(tmp_path / "a.png", photo(4, 5))
    run(tmp_path / "a.png", tmp_path / "b.png", "-f", "bank", "--text", tmp_path / "b.txt")
    blocks = (tmp_path / "b.txt").read_text().split("\n\n")
    assert len(blocks) == 3
    pixels = iio.imread(tmp_path / "b.png")
    for channel, block in enumerate(blocks):
        rows = [[int(word) for word in line.split()] for line in block.strip().splitlines()]
        np.testing.assert_array_equal(rows, pixels[..., channel])


def test_many_files_and_one_that_is_broken(tmp_path: Path) -> None:
    names = [f"p{number}.png" for number in range(5)]
    for name in names:
        iio.imwrite(tmp_path / name, photo())
    whole = (tmp_path / "p2.png").read_bytes()
    (tmp_path / "p2.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "p3.png").write_text("no picture")
    words = run(*(tmp_path / name for name in names), tmp_path / "out", "-f", "gaussian", status=1)
    assert "p2.png cannot be read" in words and "p3.png cannot be read" in words and "2 of 5" in words
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["p0.png", "p1.png", "p4.png"]


def test_filters_in_turn(tmp_path: Path) -> None:
    iio.imwrite(tmp_path / "a.png", photo())
    run(tmp_path / "a.png", tmp_path / "b.png", "-f", "gaussian", "-f", "sobel axis=0", "--stride", "2")
    first = Work(bank.parse("gaussian"))(photo())
    np.testing.assert_array_equal(iio.imread(tmp_path / "b.png"), Work(bank.parse("sobel axis=0"), stride=2)(first))


def test_existing_files_are_kept(tmp_path: Path) -> None:
    iio.imwrite(tmp_path / "a.png", photo())
    (tmp_path / "b.png").write_text("kept")
    assert "--force" in run(tmp_path / "a.png", tmp_path / "b.png", "-f", "box", status=1)
    assert (tmp_path / "b.png").read_text() == "kept"
    run(tmp_path / "a.png", tmp_path / "b.png", "-f", "box", "--force")
    assert iio.imread(tmp_path / "b.png").shape == (41, 53, 3)
    run(tmp_path / "a.png", tmp_path / "a.png", "-f", "box", "--force")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


@pytest.mark.parametrize(("words", "status", "says"), [
    (["a.png", "b.png"], 2, "--filter"),
    (["a.png"], 2, "IN... OUT"),
    (["a.png", "b.png", "-f", "nothing"], 2, "nothing"),
    (["a.png", "b.png", "-f", "box", "--mode", "edge"], 2, "mode='edge'"),
    (["a.png", "b.png", "-f", "box", "--size", "big"], 2, "size='big'"),
    (["a.png", "b.png", "-f", "box", "--device", "tpu"], 2, "device='tpu'"),
    (["a.png", "a.png", "b.png", "-f", "box"], 2, "folder"),
    (["missing.png", "b.png", "-f", "box"], 1, "does not exist"),
    (["a.png", "no/b.png", "-f", "box"], 1, "no folder"),
    (["a.png", "b.xyz", "-f", "box"], 1, "b.xyz"),
    (["f.tif", "b.png", "-f", "box"], 1, ".tif does"),
    (["a.png", "b.png", "-f", "box", "--size", "0x5"], 2, "size="),
])  # fmt: skip
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    iio.imwrite("a.png", photo())
    tifffile.imwrite("f.tif", photo(kind=np.float32), photometric="rgb")
    output = run(*words, status=status)
    assert says in output and output.startswith("tapwise: ") and len(output.strip().splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "f.tif"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    iio.imwrite(tmp_path / "a.png", photo())
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    run(tmp_path / "a.png", folder / "b.png", "-f", "box", status=1)


def test_a_disk_that_fills_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iio.imwrite(tmp_path / "a.png", photo())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(iio, "imwrite", full)
    assert "No space left" in run(tmp_path / "a.png", tmp_path / "b.png", "-f", "box", status=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_two_to_one_place(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidPicture, match="both"):
        command.targets([tmp_path / "a.png", tmp_path / "x" / "a.png"], tmp_path / "out")


def test_ctrl_c_leaves_no_half_files(tmp_path: Path) -> None:
    for number in range(40):
        tifffile.imwrite(tmp_path / f"p{number:02}.tif", photo(700, 700))
    words = [
        sys.executable,
        "-m",
        "tapwise",
        "filter",
        *sorted(map(str, tmp_path.glob("p*.tif"))),
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen([*words, "-f", "gaussian sigma=6"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(tmp_path.glob("out/p*.tif"))) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    done = list((tmp_path / "out").iterdir())
    if len(done) < 40:
        assert process.returncode == 1 and "stopped" in errors
    assert all(path.name.startswith("p") for path in done)
    for path in done:
        assert tifffile.imread(path).shape == (700, 700, 3)


def test_list_shows_every_filter() -> None:
    words = run("--list")
    for name in (*bank.KINDS, "bank"):
        assert name in words
    assert "-1         5        -1" in words


# Larger than memory


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
    tifffile.imwrite(tmp_path / "turned.tif", x, photometric="rgb", extratags=[(274, "H", 1, 6, True)])
    for name, says in (("planes", "planes"), ("turned", "turned")):
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


# Dask


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
