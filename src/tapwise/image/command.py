"""`tapwise filter`: files in, files out, several at once, each by itself."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tapwise.arguments import shown
from tapwise.arrays import gpu_number
from tapwise.errors import InvalidPicture
from tapwise.image import bank, files, large
from tapwise.image.arguments import mode_of
from tapwise.image.work import Work

# Pictures at once, as each is in memory three times while it is filtered.
MOST_AT_ONCE = 8


@dataclass(frozen=True)
class Order:
    """What to do with every file; several filters one after the other. `text`: where the pixels go as text, too."""

    works: tuple[Work, ...]
    force: bool = False
    text: Path | None = None


def order(
    filters: Sequence[str], mode: str, cval: float, stride: int, size: str | None, text: Path | None, force: bool,
    device: str,
) -> Order:  # fmt: skip
    """Raises InvalidPicture. A stride and a size belong to the last filter."""
    if device != "cpu":
        gpu_number(device)
    named = [bank.parse(words) for words in filters]
    works = [Work(one, mode_of(mode), cval, device=device) for one in named]
    works[-1] = replace(works[-1], stride=stride, size=None if size is None else _size(size))
    return Order(tuple(works), force, text)


def _size(words: str) -> tuple[int, int]:
    """(rows, columns) from "640x480", width by height, or "512"."""
    match = re.fullmatch("([0-9]{1,9})(?:x([0-9]{1,9}))?", words.lower())
    if match is None:
        raise InvalidPicture(f"size={shown(words)}: width by height, such as 640x480")
    return int(match[2] or match[1]), int(match[1])


def targets(sources: Sequence[Path], out: Path) -> list[tuple[Path, Path]]:
    """Where each file goes: `out` itself for one, unless it is a folder; into the folder, by its own name, for several.

    Raises InvalidPicture where two would go to one file, or a file to itself.
    """
    folder = out.is_dir() and out.suffix.lower() != ".zarr"
    if len(sources) > 1 and not folder:
        if out.exists() or out.suffix:
            raise InvalidPicture(f"out={str(out)!r}: a folder for {len(sources)} pictures")
        out.mkdir(parents=True)
        folder = True
    pairs = [(source, out / source.name if folder else out) for source in sources]
    seen: dict[Path, Path] = {}
    for source, target in pairs:
        if target in seen:
            raise InvalidPicture(f"{seen[target]} and {source} would both go to {target}")
        seen[target] = source
    return pairs


def run(pairs: Sequence[tuple[Path, Path]], order: Order, done: Callable[[Path, str | None], None]) -> None:
    """Filter every file; done(file, None or what went wrong) as each is ready. Raises KeyboardInterrupt when stopped:
    files under way are given up without a trace, files done stay."""
    threads = os.cpu_count() or 1
    at_once = min(len(pairs), threads, MOST_AT_ONCE) if order.works[0].device == "cpu" else 1
    if at_once > 1:
        order = replace(order, works=tuple(replace(work, threads=max(1, threads // at_once)) for work in order.works))
    stop = threading.Event()

    def one(pair: tuple[Path, Path]) -> tuple[Path, str | None]:
        if stop.is_set():
            return pair[0], "stopped"
        try:
            filter_file(*pair, order)
        except MemoryError:
            return pair[0], f"{pair[0]}: not enough memory"
        except Exception as error:
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            named = str(pair[0]) in words or str(pair[1]) in words
            return pair[0], words if named else f"{pair[0]}: {words}"
        return pair[0], None

    if at_once == 1:
        for pair in pairs:
            done(*one(pair))
        return
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for result in pool.map(one, pairs):
                done(*result)
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def filter_file(source: Path, target: Path, order: Order) -> None:
    """One file. Raises OSError, InvalidPicture."""
    if target.exists() and not order.force:
        raise FileExistsError(f"{target} exists; --force replaces it")
    if large.is_large(source):
        if len(order.works) > 1 or order.text is not None:
            raise InvalidPicture(f"{source}: one filter at a time, and no text, for a picture that goes in strips")
        large.filter_large(source, target, order.works[0], order.force)
        return
    picture = files.read(source)
    for work in order.works:
        picture = picture.with_pixels(work(np.ascontiguousarray(picture.pixels)))
    files.write(target, picture, order.force)
    if order.text is not None:
        with files.replacing(order.text, order.force) as temporary:
            temporary.write_text(files.text(picture), encoding="utf-8")


def listing() -> list[tuple[str, str, str]]:
    """(filter with its parameters, what it is, its matrices as text) of every named filter."""
    rows = []
    for name, kind in bank.KINDS.items():
        found = bank.parse(name)
        rows.append((found.words, kind.summary, "\n\n".join(_matrix(one) for one in found.matrices)))
    blocks = []
    for number, one in enumerate(bank.BANK):
        planes = "\n\n".join(f"from {colour}:\n{_matrix(plane)}" for colour, plane in zip("RGB", one, strict=True))
        blocks.append(f"to {'RGB'[number]}\n{planes}")
    rows.append(("bank", "three filters of 3x3x3 that mix the colours", "\n\n".join(blocks)))
    return rows


def _matrix(matrix: np.ndarray) -> str:
    """Rows of numbers; of a large one, its size and its middle."""
    if max(matrix.shape) > 9:
        r, s = (n // 2 for n in matrix.shape)
        middle = _matrix(matrix[max(0, r - 3) : r + 4, max(0, s - 3) : s + 4])
        return f"{matrix.shape[0]} x {matrix.shape[1]}, the middle:\n{middle}"
    return "\n".join(" ".join(f"{value:9.3g}" for value in row) for row in matrix)
