"""`tapwise filter`: files of every format, many at once, mistakes."""

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
from pictures import photo, run
from PIL import Image

from tapwise.errors import InvalidPicture
from tapwise.image import bank, command, files
from tapwise.image.work import Work


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
        tmp_path / "a.tif",
        photo(),
        compression="deflate",
        resolution=(300, 300),
        description="words",
        metadata=None,
        photometric="rgb",
    )
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


def test_colours_that_are_not_rgb(tmp_path: Path) -> None:
    """CMYK, YCbCr and LAB become RGB; what TIFF holds besides is refused by name."""
    x = photo()
    for mode, name in (("CMYK", "a.jpg"), ("YCbCr", "b.jpg"), ("P", "c.png"), ("1", "d.png"), ("LA", "e.png")):
        Image.fromarray(x).convert("L" if mode == "LA" else "RGB").convert(mode).save(tmp_path / name)
        run(tmp_path / name, tmp_path / f"out-{name}", "-f", "box size=1")
        with Image.open(tmp_path / name) as before, Image.open(tmp_path / f"out-{name}") as after:
            kind = {"1": "L", "LA": "LA"}.get(mode, "RGB")
            assert after.mode == kind
            apart = np.asarray(before.convert(kind)).astype(int) - np.asarray(after).astype(int)
        assert np.abs(apart).mean() < 15, mode
    tifffile.imwrite(tmp_path / "f.tif", photo(channels=4), photometric="separated")
    assert "f.tif holds CMYK" in run(tmp_path / "f.tif", tmp_path / "g.tif", "-f", "box", status=1)
    palette = np.zeros((3, 256), np.uint16)
    tifffile.imwrite(tmp_path / "p.tif", x[..., 0], photometric="palette", colormap=palette)
    assert "p.tif holds numbers of a palette" in run(tmp_path / "p.tif", tmp_path / "g.tif", "-f", "box", status=1)
    tifffile.imwrite(tmp_path / "w.tif", x[..., 0], photometric="miniswhite")
    run(tmp_path / "w.tif", tmp_path / "v.tif", "-f", "box size=1")
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "v.tif"), 255 - x[..., 0])


def test_alpha_is_not_lost_in_silence(tmp_path: Path) -> None:
    x = photo(channels=4)
    Image.fromarray(x).save(tmp_path / "a.png")
    assert ".jpg holds no alpha" in run(tmp_path / "a.png", tmp_path / "a.jpg", "-f", "box", status=1)
    x[..., 3] = 255
    Image.fromarray(x).save(tmp_path / "b.png")
    run(tmp_path / "b.png", tmp_path / "b.jpg", "-f", "box")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.jpg", "b.png"]


def test_empty_and_broken_files(tmp_path: Path) -> None:
    for name, data in {"a.png": b"", "b.jpg": b"", "c.png": b"\x89PNG\r\n\x1a\n" + bytes(40), "d.webp": b"no"}.items():
        (tmp_path / name).write_bytes(data)
        words = run(tmp_path / name, tmp_path / "out.png", "-f", "box", status=1)
        assert f"{name} cannot be read: " in words and "plugin" not in words and "uri" not in words
        assert ("it is empty" in words) == (not data)
        assert len(words.strip().splitlines()) == 1


def test_a_counter_of_many(tmp_path: Path) -> None:
    for number in range(3):
        iio.imwrite(tmp_path / f"{number}.png", photo())
    words = run(*(tmp_path / f"{number}.png" for number in range(3)), tmp_path / "out", "-f", "box")
    assert all(f"[{number}/3]" in words for number in (1, 2, 3))


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


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
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
    ],
)
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
