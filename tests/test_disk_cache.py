"""The kernel cache: whatever lies where a kernel is looked for, work goes on, is right, and warns once."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from tapwise import disk_cache
from tapwise.cpu import jit
from tapwise.cpu.simd import INT, Kernel, Target, target
from tapwise.lab import roofline


def generate(target: Target, *, value: int) -> Kernel:
    k = Kernel(target, "f32")
    with k.function("task", public=True, args="i64", worker=INT) as (args, _):
        k.b.store(k.integer(value).ir, args.value)
    return k


def value_of(value: int) -> int:
    """What the kernel that stores `value` stores; loaded anew."""
    jit._libraries.clear()
    memory = np.zeros(1, np.int64)
    jit.load("test", generate, target(), value=value).function("task")(memory.ctypes.data, 0)
    return int(memory[0])


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """That of the kernels, in an empty cache."""
    monkeypatch.setenv("TAPWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_libraries", {})
    disk_cache._warn_unwritable.cache_clear()
    disk_cache._clear_abandoned.cache_clear()
    return tmp_path / "cpu"


def entry(folder: Path) -> Path:
    (path,) = folder.glob("*.o")
    return path


def test_swapped_files_are_built_again(folder: Path) -> None:
    assert value_of(3) == 3
    first = entry(folder)
    assert value_of(4) == 4
    (second,) = set(folder.glob("*.o")) - {first}
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    for value in (3, 4):
        with pytest.warns(RuntimeWarning, match="damaged"):
            assert value_of(value) == value
    assert (first.read_bytes(), second.read_bytes()) == (one, two)


@pytest.mark.parametrize("junk", [b"", b"no object", b"\x7fELF\x02\x01\x01" + bytes(range(200))])
def test_whole_file_that_is_no_object(folder: Path, junk: bytes) -> None:
    value_of(5)
    path = entry(folder)
    good = path.read_bytes()
    path.write_bytes(disk_cache.sealed(path.name, junk))
    with pytest.warns(RuntimeWarning, match="damaged") as seen:
        assert value_of(5) == 5
    assert len(seen) == 1 and path.read_bytes() == good


def test_generator_that_is_wrong_still_says_so(folder: Path) -> None:
    def wrong(*_: object, **__: object) -> Kernel:
        raise RuntimeError("generator")

    with pytest.raises(RuntimeError, match="generator"):
        jit.load("test", wrong, target(), value=6)


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir, a_loop, a_device])
def test_entry_that_is_no_file(folder: Path, kind: Callable[[Path], None]) -> None:
    """It is replaced, or the kernel kept in memory; nothing waits."""
    value_of(7)
    path = entry(folder)
    path.unlink()
    kind(path)
    found: list[int] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        thread = threading.Thread(target=lambda: found.append(value_of(7)), daemon=True)
        thread.start()
        thread.join(20)
    assert found == [7], "it waits"
    assert path.is_dir() or disk_cache._read(path) is not None
    assert [str(one.message) for one in seen if "cannot be written" not in str(one.message)] == []


def test_lock_that_is_no_file(folder: Path) -> None:
    value_of(8)
    path = entry(folder)
    path.unlink()
    lock = path.with_suffix(".lock")
    lock.unlink(missing_ok=True)
    lock.mkdir()
    assert value_of(8) == 8 and disk_cache._read(path) is not None


def test_what_killed_processes_left_is_removed(folder: Path) -> None:
    folder.mkdir()
    old, new = folder / "kernel.o.1234.tmp", folder / "kernel.o.5678.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 4000,) * 2)
    value_of(9)
    assert not old.exists() and new.exists()


def test_one_warning_for_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a name that is new each time")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left") as seen:
        assert [value_of(value) for value in (10, 11, 12)] == [10, 11, 12]
    assert len(seen) == 1
    assert not list(folder.glob("*.tmp")) and not list(folder.glob("*.o"))


def test_interrupted_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        value_of(13)
    assert not list(folder.glob("*.tmp"))


def test_ceilings_that_are_no_file(folder: Path) -> None:
    os.mkfifo(folder.parent / "ceilings.json")
    assert roofline._read() == {}


def test_whole_file_that_is_no_cubin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver of our own: it is asked to load junk, and then what is compiled anew."""
    driver = pytest.importorskip("cuda.bindings.driver")
    from tapwise.cuda.jit import compile as compiler
    from tapwise.cuda.jit import launch

    codes: list[bytes] = []

    def load_data(code: bytes, *_: object) -> tuple[object, int]:
        codes.append(code)
        wrong = driver.CUresult.CUDA_ERROR_INVALID_IMAGE
        return (wrong if code == b"junk" else driver.CUresult.CUDA_SUCCESS), 1

    monkeypatch.setattr(driver, "cuLibraryLoadData", load_data)
    monkeypatch.setattr(driver, "cuLibraryGetKernel", lambda *_: (driver.CUresult.CUDA_SUCCESS, 1))
    monkeypatch.setattr(launch, "on_gpu", lambda index: nullcontext())
    monkeypatch.setattr(compiler, "_compile", lambda *_: (b"good", ""))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.0")
    source = compiler.Source("kernel", "text")
    assert compiler.cubin(source, "sm_90a") == b"good"
    (path,) = (folder.parent / "cuda").glob("*.cubin")
    path.write_bytes(disk_cache.sealed(path.name, b"junk"))
    with pytest.warns(RuntimeWarning, match="damaged"):
        launch.Kernel(source, "sm_90a", 0, 0)
    assert codes == [b"junk", b"good"]
    assert disk_cache._read(path) == b"good"
