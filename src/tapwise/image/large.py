"""Pictures larger than memory: row by row of tiles, from and to tiled TIFF and zarr, with the pixels of one piece."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from tapwise.errors import InvalidPicture
from tapwise.image import files
from tapwise.image.work import Work
from tapwise.ops.filter.edges import source_index

# A picture of more bytes goes in strips; a strip with its surroundings has about so many.
LARGE_BYTES: Final = 256 << 20
STRIP_BYTES: Final = 24 << 20
TILE: Final = 256


def is_large(path: Path) -> bool:
    """Whether a file goes in strips: a zarr folder, or a TIFF of more than LARGE_BYTES of pixels."""
    if path.suffix.lower() == ".zarr":
        return True
    if path.suffix.lower() not in files.TIFF or not path.is_file():
        return False
    tifffile = files.optional("tifffile")
    try:
        with tifffile.TiffFile(path) as file:
            page: Any = file.pages[0]
            return int(np.prod(page.shape, dtype=np.int64)) * int(page.dtype.itemsize) > LARGE_BYTES
    except (OSError, ValueError, IndexError, tifffile.TiffFileError):
        return False


def _rows(source: Any, table: np.ndarray, cval: float) -> np.ndarray:
    """Rows of the picture by number, -1 for the constant, read in runs of neighbours."""
    result = np.empty((len(table), *source.shape[1:]), source.dtype)
    result[table < 0] = cval
    inside = np.flatnonzero(table >= 0)
    breaks = (np.diff(inside) > 1) | (np.abs(np.diff(table[inside])) > 1)
    for run in np.split(inside, np.flatnonzero(breaks) + 1):
        if len(run):
            numbers, to = table[run], result[run[0] : run[-1] + 1]
            low, high = int(numbers.min()), int(numbers.max())
            np.take(np.asarray(source[low : high + 1]), numbers - low, axis=0, out=to, mode="clip")
    return result


def strips(source: Any, work: Work, rows: int | None = None) -> Iterator[np.ndarray]:
    """The result of a filter in strips of `rows` rows, from the top.

    `source` (rows, columns[, channels]) gives rows when it is sliced. Raises InvalidPicture for a stride or a size.
    """
    if not work.plain:
        raise InvalidPicture("stride and size are for pictures that fit in memory")
    height = int(source.shape[0])
    if rows is None:
        row_bytes = int(np.prod(source.shape[1:])) * max(4, source.dtype.itemsize)
        rows = max(1, STRIP_BYTES // max(1, row_bytes) // TILE) * TILE
    above, below = work.reach()
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        table = source_index(np.arange(top - above, bottom + below), height, work.mode)
        strip = _rows(source, table, work.cval)
        pixels = strip if strip.ndim == 3 else strip[..., None]
        alpha = None
        if strip.ndim == 3 and strip.shape[2] in (2, 4):
            pixels, alpha = pixels[..., :-1], pixels[above : above + bottom - top, :, -1:]
        done = work(np.ascontiguousarray(pixels), full_height=False)[above : above + bottom - top]
        done = done if alpha is None else np.concatenate([done, alpha], axis=2)
        yield done if strip.ndim == 3 else done[..., 0]


def filter_large(source: Path, target: Path, work: Work, force: bool = False) -> None:
    """From a tiled or striped TIFF, or zarr, to a tiled TIFF or zarr. Raises OSError, InvalidPicture."""
    zarr = files.optional("zarr")
    if source.suffix.lower() == ".zarr":
        _copy(zarr.open_array(store=str(source), mode="r"), {}, target, work, force)
        return
    tifffile = files.optional("tifffile")
    try:
        with tifffile.TiffFile(source) as file:
            page: Any = file.pages[0]
            turn = page.tags.get("Orientation")
            files.check_colours(source, page)
            if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE:
                raise InvalidPicture(f"{source}: a picture in which zero is white does not go in strips")
            if page.planarconfig == tifffile.PLANARCONFIG.SEPARATE and len(page.shape) == 3:
                raise InvalidPicture(f"{source}: channels in planes of their own do not go in strips")
            if turn is not None and int(turn.value) != 1:
                raise InvalidPicture(f"{source}: a picture that is to be rotated does not go in strips")
            store = page.aszarr()
            try:
                _copy(zarr.open_array(store=store, mode="r"), files.tiff_options(page), target, work, force)
            finally:
                store.close()
    except tifffile.TiffFileError as error:
        raise InvalidPicture(f"{source} cannot be read: {files.reason(error)}") from None


def _copy(source: Any, options: dict[str, Any], target: Path, work: Work, force: bool) -> None:
    if source.ndim not in (2, 3):
        raise InvalidPicture(f"an array of shape {source.shape} is no picture")
    bank = work.filter.bank
    channels = 1 if source.ndim == 2 else source.shape[2]
    shape = source.shape if bank is None else (*source.shape[:2], bank.shape[0] + (channels in (2, 4)))
    if target.suffix.lower() == ".zarr":
        _write_zarr(source, shape, target, work, force)
        return
    if target.suffix.lower() not in files.TIFF:
        raise InvalidPicture(f"{target}: a picture this large goes to .tif or .zarr")
    options = {name: value for name, value in options.items() if name != "predictor"}
    options["photometric"] = "rgb" if len(shape) == 3 and shape[2] in (3, 4) else "minisblack"
    if len(shape) == 3 and shape[2] in (2, 4):
        options["extrasamples"] = ["unassalpha"]
    with files.replacing(target, force) as temporary:
        files.optional("tifffile").imwrite(
            temporary, _tiles(source, work), shape=shape, dtype=source.dtype, tile=(TILE, TILE),
            bigtiff=int(np.prod(shape, dtype=np.int64)) * source.dtype.itemsize > 1 << 31, metadata=None, **options,
        )  # fmt: skip


def _tiles(source: Any, work: Work) -> Iterator[np.ndarray]:
    """Tiles in the order of a TIFF, filled up with zeros at the right and below."""
    for strip in strips(source, work):
        height, width = strip.shape[:2]
        for top in range(0, height, TILE):
            for left in range(0, width, TILE):
                part = strip[top : top + TILE, left : left + TILE]
                tile = np.zeros((TILE, TILE, *strip.shape[2:]), strip.dtype)
                tile[: part.shape[0], : part.shape[1]] = part
                yield tile


def _write_zarr(source: Any, shape: tuple[int, ...], target: Path, work: Work, force: bool) -> None:
    zarr = files.optional("zarr")
    if target.exists() and not force:
        raise FileExistsError(f"{target} exists; --force replaces it")
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.stem}."))
    try:
        inside = folder / "array.zarr"
        out = zarr.open_array(
            store=str(inside), mode="w", shape=shape, dtype=source.dtype, chunks=(TILE * 4, TILE * 4, *shape[2:])
        )
        top = 0
        for strip in strips(source, work):
            out[top : top + len(strip)] = strip
            top += len(strip)
        if target.exists():
            shutil.rmtree(target)
        os.replace(inside, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
