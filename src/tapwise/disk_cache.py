"""Compiled kernels on disk: found whole, or built once and published for every process.

A file is a checksum of its name and the data, followed by the data, published by rename, so a reader sees all of it or
nothing; one that is damaged, or another's, is built again with a warning. A folder that cannot be written costs a
compile in each process, nothing else.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

_CHECKSUM_BYTES: Final = 32
_TEMPORARY: Final = ".tmp"
# No write takes so long: an older one is a killed process's.
_ABANDONED_SECONDS: Final = 3600


def load(path: Path, build: Callable[[], bytes], unusable: bool = False) -> bytes:
    """The file's data if it is there and whole, else what `build` gives, which is then kept; its errors pass.

    `unusable`: what this gave before is whole, and no kernel; it is built again.
    """
    data = None if unusable else _read(path)
    if data is not None:
        return data
    if unusable:
        _warn_damaged(path)
    with _file_lock(path):
        # Another process may have built it meanwhile.
        data = None if unusable else _read(path)
        if data is None:
            data = build()
            _publish(path, data)
    return data


def sealed(name: str, data: bytes) -> bytes:
    """What a file of that name holds: the checksum and the data."""
    return hashlib.sha256(name.encode() + b"\0" + data).digest() + data


def contents(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError for anything else, which could be waited for without end."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is no regular file")
        return file.read()


def _file_lock(path: Path) -> Any:
    """A lock between processes, or none where the folder cannot be written."""
    import filelock

    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return nullcontext()
        return filelock.FileLock(path.with_suffix(".lock"), timeout=60).acquire()
    except (OSError, filelock.Timeout):
        return nullcontext()


def _read(path: Path) -> bytes | None:
    try:
        text = contents(path)
    except OSError:
        return None
    data = text[_CHECKSUM_BYTES:]
    if sealed(path.name, data) != text:
        _warn_damaged(path)
        return None
    return data


def _warn_damaged(path: Path) -> None:
    warnings.warn(f"kernel cache: {path.name} is damaged and is built again", RuntimeWarning, stacklevel=4)


def _publish(path: Path, data: bytes) -> None:
    """Write beside the target, then rename: never half a file. A full or read-only disk only costs the cache."""
    _clear_abandoned(path.parent)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=_TEMPORARY)
        with os.fdopen(handle, "wb") as file:
            file.write(sealed(path.name, data))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        # The rest of its message has a name that is new each time.
        _warn_unwritable(str(path.parent), error.strerror or type(error).__name__)
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


@cache
def _clear_abandoned(folder: Path) -> None:
    """Remove what killed processes were writing; once for each folder."""
    oldest = time.time() - _ABANDONED_SECONDS
    with suppress(OSError):
        for path in folder.glob(f"*{_TEMPORARY}"):
            if path.stat().st_mtime < oldest:
                path.unlink()


@cache
def _warn_unwritable(folder: str, error: str) -> None:
    warnings.warn(
        f"kernel cache: {folder} cannot be written ({error}); kernels are kept in memory", RuntimeWarning, stacklevel=3
    )
