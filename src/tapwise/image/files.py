"""Pictures in files: PNG, JPEG, WebP and what else imageio reads; TIFF by tifffile; with alpha, orientation, metadata.

A file is written under another name in its folder and then renamed, so there is never half of one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tapwise.errors import InvalidPicture

TIFF: Final = (".tif", ".tiff")
_ORIENTATION: Final = 0x0112
_KEPT: Final = ("icc_profile", "dpi", "xmp")
# Colours that are brought to RGB, by Pillow's names.
_CONVERTED: Final = ("CMYK", "YCbCr", "LAB", "HSV")
_MISSING: Final = "pip install 'tapwise[image]'"


@dataclass(frozen=True)
class Picture:
    """pixels (rows, columns, channels) without alpha; alpha (rows, columns, 1) or None; flat: a file of one channel.

    options: what the file says beside its pixels, as arguments for writing it.
    """

    pixels: np.ndarray
    alpha: np.ndarray | None = None
    flat: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def with_pixels(self, pixels: np.ndarray) -> Picture:
        """Other pixels. Alpha goes along only where the size is the same."""
        alpha = self.alpha if self.alpha is not None and self.alpha.shape[:2] == pixels.shape[:2] else None
        return replace(self, pixels=pixels, alpha=alpha, flat=pixels.shape[2] == 1)

    def array(self) -> np.ndarray:
        """As files have it: (rows, columns) or (rows, columns, channels)."""
        values = self.pixels if self.alpha is None else np.concatenate([self.pixels, self.alpha], axis=2)
        return values[..., 0] if values.shape[2] == 1 else values


def _picture(array: np.ndarray, options: dict[str, Any]) -> Picture:
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    if array.ndim == 2:
        return Picture(array[..., None], None, True, options)
    if array.ndim != 3 or array.shape[2] > 16:
        words = "one of rows, columns and channels is needed"
        raise InvalidPicture(f"an array of shape {array.shape} is no picture: {words}")
    if array.shape[2] in (2, 4):
        return Picture(array[..., :-1], array[..., -1:], array.shape[2] == 2, options)
    return Picture(array, None, array.shape[2] == 1, options)


def read(path: Path) -> Picture:
    """The first picture of a file, rotated as its EXIF orientation says.

    Raises OSError, and InvalidPicture for what is no picture.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix.lower() in TIFF:
        return _read_tiff(path)
    if path.suffix.lower() == ".png" and (deep := _read_deep_png(path)) is not None:
        return deep
    iio, image = _imageio()
    if not path.stat().st_size:
        raise InvalidPicture(f"{path} cannot be read: it is empty")
    with _reading(path, SyntaxError, EOFError), image_limit_off(image):
        with image.open(path) as opened:
            kept = {name: opened.info[name] for name in _KEPT if opened.info.get(name)}
            exif = opened.getexif()
            mode = opened.mode
        with iio.imopen(path, "r", plugin="pillow") as file:
            array = file.read(index=0, rotate=True, **({"mode": "RGB"} if mode in _CONVERTED else {}))
    if mode in _CONVERTED:
        kept.pop("icc_profile", None)  # of the colours before
    # The pixels are rotated already.
    if (exif and exif.pop(_ORIENTATION, None) is not None) or len(exif):
        kept["exif"] = exif.tobytes()
    return _picture(np.asarray(array), kept)


@contextmanager
def _reading(path: Path, *errors: type[BaseException]) -> Iterator[None]:
    """Errors of files and values, and those given, say that the file cannot be read."""
    caught: tuple[type[BaseException], ...] = (OSError, ValueError, *errors)
    try:
        yield
    except caught as error:
        raise InvalidPicture(f"{path} cannot be read: {reason(error)}") from None


def _read_deep_png(path: Path) -> Picture | None:
    """A PNG of 16 bits and several channels, which Pillow cuts down to 8; None for any other."""
    with _reading(path), path.open("rb") as file:
        head = file.read(26)
    if len(head) < 26 or head[24] != 16 or head[25] == 0:
        return None
    png = optional("png", "pypng")
    with _reading(path, png.Error):
        width, height, rows, info = png.Reader(filename=str(path)).asDirect()
        array = np.vstack([np.asarray(row, np.uint16) for row in rows]).reshape(height, width, info["planes"])
    return _picture(array, {})


def _read_tiff(path: Path) -> Picture:
    tifffile = optional("tifffile")
    with _reading(path, KeyError, IndexError, tifffile.TiffFileError), tifffile.TiffFile(path) as file:
        page: Any = file.pages[0]
        check_colours(path, page)
        array = page.asarray()
        if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE and array.dtype.kind == "u":
            array = np.iinfo(array.dtype).max - array
        if page.planarconfig == tifffile.PLANARCONFIG.SEPARATE and array.ndim == 3:
            array = np.moveaxis(array, 0, -1)
        options = tiff_options(page)
        turn = page.tags.get("Orientation")
    return _picture(_oriented(array, int(turn.value) if turn is not None else 1), options)


def check_colours(path: Path, page: Any) -> None:
    """Raises InvalidPicture for a TIFF page whose numbers are not brightness, red, green and blue."""
    kind = page.photometric.name if page.photometric is not None else ""
    words = {"SEPARATED": "CMYK", "PALETTE": "numbers of a palette"}.get(kind, kind)
    if kind not in ("", "MINISWHITE", "MINISBLACK", "RGB", "YCBCR"):
        raise InvalidPicture(f"{path} holds {words}: save it as RGB or grey first")


def tiff_options(page: Any) -> dict[str, Any]:
    """A TIFF page's compression, resolution, description and colour profile."""
    options: dict[str, Any] = {"compression": page.compression}
    if page.predictor not in (None, 1):
        options["predictor"] = page.predictor
    if "XResolution" in page.tags:
        options["resolution"] = (page.tags["XResolution"].value, page.tags["YResolution"].value)
        if "ResolutionUnit" in page.tags:
            options["resolutionunit"] = page.tags["ResolutionUnit"].value
    if "InterColorProfile" in page.tags:
        options["iccprofile"] = page.tags["InterColorProfile"].value
    if page.description:
        options["description"] = page.description
    return options


def _oriented(array: np.ndarray, orientation: int) -> np.ndarray:
    """Upright, from an EXIF orientation of 1 to 8."""
    if orientation in (5, 6, 7, 8):
        array = array.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        array = array[:, ::-1]
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    return array


def write(path: Path, picture: Picture, force: bool = False) -> None:
    """Raises FileExistsError unless `force`, OSError, and InvalidPicture where the format does not hold the pixels."""
    array = np.ascontiguousarray(picture.array())
    suffix = path.suffix.lower()
    with replacing(path, force) as temporary:
        try:
            if suffix in TIFF:
                optional("tifffile").imwrite(temporary, array, **_tiff_arguments(picture, array))
            elif suffix == ".png" and array.dtype == np.uint16 and array.ndim == 3:
                _write_deep_png(temporary, array)
            else:
                iio, image = _imageio()
                image.init()
                if image.registered_extensions().get(suffix) not in image.SAVE:
                    raise InvalidPicture(f"{path}: {suffix or 'no suffix'} is no format that pictures are written in")
                options: dict[str, Any] = _kept(picture, ("exif", *_KEPT))
                if suffix in (".jpg", ".jpeg", ".webp"):
                    options |= {"quality": 95}
                if suffix in (".jpg", ".jpeg"):
                    if picture.alpha is not None and (picture.alpha != np.iinfo(picture.alpha.dtype).max).any():
                        raise InvalidPicture(f"{path}: {suffix} holds no alpha; .png, .webp and .tif do")
                    array = picture.pixels[..., 0] if picture.pixels.shape[2] == 1 else picture.pixels
                if array.dtype.kind == "f" or array.dtype.itemsize > (2 if suffix == ".png" else 1):
                    raise InvalidPicture(f"{path}: {suffix} does not hold {array.dtype}; .tif does")
                iio.imwrite(temporary, array, plugin="pillow", extension=suffix, **options)
        except InvalidPicture:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidPicture(f"{path} cannot be written: {reason(error)}") from None


def _kept(picture: Picture, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: picture.options[name] for name in names if name in picture.options}


def _tiff_arguments(picture: Picture, array: np.ndarray) -> dict[str, Any]:
    names = ("compression", "predictor", "resolution", "resolutionunit", "iccprofile", "description")
    options = _kept(picture, names)
    if "dpi" in picture.options and "resolution" not in options:
        options |= {"resolution": picture.options["dpi"], "resolutionunit": 2}
    channels = picture.pixels.shape[2]
    options["photometric"] = "rgb" if channels == 3 else "minisblack"
    if picture.alpha is not None:
        options["extrasamples"] = ["unassalpha"]
    return options | {"metadata": None}


def _write_deep_png(path: Path, array: np.ndarray) -> None:
    png = optional("png", "pypng")
    height, width, planes = array.shape
    writer = png.Writer(width, height, bitdepth=16, greyscale=planes < 3, alpha=planes in (2, 4))
    with path.open("wb") as file:
        writer.write(file, array.reshape(height, width * planes).tolist())


def text(picture: Picture) -> str:
    """The RGB report's layout: for each channel a line for each row of pixels, then an empty line."""
    blocks = []
    for channel in range(picture.pixels.shape[2]):
        rows = picture.pixels[..., channel]
        blocks.append("\n".join(" ".join(str(value) for value in row.tolist()) for row in rows) + "\n")
    return "\n".join(blocks)


@contextmanager
def replacing(path: Path, force: bool) -> Iterator[Path]:
    """A name in the same folder to write to; renamed to `path` when all is written, removed when not.

    Raises FileExistsError where `path` exists, unless `force`.
    """
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists; --force replaces it")
    if not path.parent.is_dir():
        raise NotADirectoryError(f"{path.parent} is no folder")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
        os.chmod(temporary, mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def optional(name: str, package: str = "") -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise InvalidPicture(f"{package or name} is not installed: {_MISSING} ({error})") from None


def _imageio() -> tuple[Any, Any]:
    return optional("imageio.v3", "imageio"), optional("PIL.Image", "pillow")


@contextmanager
def image_limit_off(image: Any) -> Iterator[None]:
    """Pillow refuses pictures of more than 179 million pixels; a user's own files may be larger."""
    before, image.MAX_IMAGE_PIXELS = image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        image.MAX_IMAGE_PIXELS = before
