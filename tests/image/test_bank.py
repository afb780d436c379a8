"""Named filters and matrices against float64: what each does to a picture, strides and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import photo
from scipy import ndimage

from tapwise.errors import InvalidPicture
from tapwise.image import bank
from tapwise.image.work import Work


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


@pytest.mark.many
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
