"""Compiled kernels on disk: found whole, or built once and published for every process.

A file is a checksum followed by the data, published by rename, so a reader sees all of it or nothing; one that is
damaged is built again with a warning. A folder that cannot be written costs a compile in each process, nothing else.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any


def load(path: Path, build: Callable[[], bytes]) -> bytes:
    """The file's data if it is there and whole, else what `build` gives, which is then kept; its errors pass."""
    data = _read(path)
    if data is not None:
        return data
    with _file_lock(path):
        data = _read(path)  # another process may have built it meanwhile
        if data is None:
            data = build()
            _publish(path, data)
    return data


def _file_lock(path: Path) -> Any:
    """A lock between processes, or none where the folder cannot be written."""
    import filelock

    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return nullcontext()
        lock = filelock.FileLock(path.with_suffix(".lock"), timeout=60)
        lock.acquire()
    except (OSError, filelock.Timeout):
        return nullcontext()
    return lock


def _read(path: Path) -> bytes | None:
    try:
        text = path.read_bytes()
    except OSError:
        return None
    checksum, data = text[:32], text[32:]
    if hashlib.sha256(data).digest() != checksum:
        warnings.warn(f"kernel cache: {path.name} is damaged and is built again", RuntimeWarning, stacklevel=2)
        return None
    return data


def _publish(path: Path, data: bytes) -> None:
    """Write beside the target, then rename: never half a file. A full or read-only disk only costs the cache."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        _warn_unwritable(str(path.parent), str(error))


@cache
def _warn_unwritable(folder: str, error: str) -> None:
    warnings.warn(
        f"kernel cache: {folder} cannot be written ({error}); kernels are kept in memory", RuntimeWarning, stacklevel=2
    )
