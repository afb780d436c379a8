"""The kernel cache, the driver and start-up: damaged files, folders that cannot be written, processes at once."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import warnings
from ctypes.util import find_library
from pathlib import Path

import numpy as np
import pytest

import tapwise
from tapwise import disk_cache
from tapwise.cpu import jit
from tapwise.cpu.simd import INT, Kernel, Target, target
from tapwise.errors import CompileError

# The tbb package has no wheels for other machines; OpenMP is the system's libgomp.
LAYERS = ["workqueue"]
LAYERS += ["tbb"] if platform.machine() == "x86_64" else []
LAYERS += ["omp"] if find_library("gomp") else []
PROBLEM = "c6 h11 w9 k5 r3 s3 pad1"
RUN = (
    "import numpy as np, tapwise\n"
    f"w = np.random.default_rng(0).standard_normal((5, 6, 3, 3), dtype=np.float32)\n"
    "x = np.random.default_rng(1).standard_normal((1, 6, 11, 9), dtype=np.float32)\n"
    f"y = tapwise.prepare('{PROBLEM}', w, algorithm='cpu.direct')(x)\n"
    "print(float(np.abs(y).sum()))\n"
)


def expected() -> float:
    w = np.random.default_rng(0).standard_normal((5, 6, 3, 3), dtype=np.float32)
    x = np.random.default_rng(1).standard_normal((1, 6, 11, 9), dtype=np.float32)
    return float(np.abs(tapwise.ConvProblem.parse(PROBLEM).convolve(x, w)).sum())


def run(folder: Path, program: str = RUN, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TAPWISE_CACHE_DIR": str(folder)} | variables
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def generate(target: Target, *, value: int) -> Kernel:
    k = Kernel(target, "f32")
    with k.function("task", public=True, args="i64", worker=INT) as (args, _):
        k.b.store(k.integer(value).ir, args.value)
    return k


def call(library: jit.Library) -> int:
    memory = np.zeros(1, np.int64)
    library.function("task")(memory.ctypes.data, 0)
    return int(memory[0])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache on disk and in memory."""
    monkeypatch.setenv("TAPWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_libraries", {})
    return tmp_path / "cpu"


def test_second_load_comes_from_disk(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(jit.load("test", generate, target(), value=7)) == 7
    assert len(list(fresh.glob("*.o"))) == 1
    jit._libraries.clear()

    def never(*_: object, **__: object) -> Kernel:
        raise AssertionError("compiled again")

    assert call(jit.load("test", never, target(), value=7)) == 7
    with pytest.raises(AssertionError, match="again"):
        jit.load("test", never, target(), value=8)


@pytest.mark.parametrize("damage", [b"", b"half", None])
def test_damaged_file_is_built_again(fresh: Path, damage: bytes | None) -> None:
    jit.load("test", generate, target(), value=9)
    (path,) = fresh.glob("*.o")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    jit._libraries.clear()
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert call(jit.load("test", generate, target(), value=9)) == 9
    assert path.read_bytes() == whole


def test_folder_that_cannot_be_written(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TAPWISE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    disk_cache._warn_unwritable.cache_clear()
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert call(jit.load("test", generate, target(), value=5)) == 5


def test_full_disk(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tapwise.disk_cache.os.fsync", full)
    disk_cache._warn_unwritable.cache_clear()
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert call(jit.load("test", generate, target(), value=6)) == 6
    assert not [path for path in fresh.iterdir() if path.suffix != ".lock"]


def test_invalid_code_is_a_compile_error() -> None:
    k = Kernel(target(), "f32")
    with k.function("task", public=True, args="i64", worker=INT) as (args, _):
        k.b.store(k.integer(1).ir, args.value)
    k.module.add_metadata([])
    k.module.globals["task"].blocks[0].instructions.pop()  # no return
    k.module.globals["task"].blocks[0].terminator = None
    with pytest.raises(CompileError):
        jit.lower(k)


def test_two_processes_build_the_same_cache(tmp_path: Path) -> None:
    environment = os.environ | {"TAPWISE_CACHE_DIR": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", RUN], env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    for process in both:
        output, _ = process.communicate()
        assert float(output) == pytest.approx(expected(), rel=1e-5)
    assert len(list((tmp_path / "cpu").glob("direct-*.o"))) == 1


@pytest.mark.parametrize("layer", LAYERS)
def test_four_threads_call_one_operator_in_every_layer(tmp_path: Path, layer: str) -> None:
    program = (
        "import threading, numpy as np, tapwise\n"
        "from tapwise.cpu import driver\n"
        "rng = np.random.default_rng(0)\n"
        "w = rng.standard_normal((32, 24, 3, 3), dtype=np.float32)\n"
        "layer = tapwise.prepare('c24 h30 w31 k32 r3 s3 pad1', w, algorithm='cpu.direct', threads=2)\n"
        "xs = rng.standard_normal((4, 1, 24, 30, 31), dtype=np.float32)\n"
        "expected = [layer(x) for x in xs]\n"
        "wrong = []\n"
        "def work(i):\n"
        "    for _ in range(50):\n"
        "        if not np.array_equal(layer(xs[i]), expected[i]): wrong.append(i)\n"
        "threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(driver.layer(), len(wrong))\n"
    )
    result = run(tmp_path, program, NUMBA_THREADING_LAYER=layer)
    assert result.stdout.split() == [layer, "0"], result.stderr


@pytest.mark.parametrize("threads", ["1", "2", "3"])
def test_number_of_threads(tmp_path: Path, threads: str) -> None:
    result = run(tmp_path, TAPWISE_NUM_THREADS=threads)
    assert float(result.stdout) == pytest.approx(expected(), rel=1e-5), result.stderr


def test_concurrent_calls_do_not_share_scratch() -> None:
    rng = np.random.default_rng(0)
    operator = tapwise.prepare("c16 h20 w20 k16 r3 s3 pad1", rng.standard_normal((16, 16, 3, 3), dtype=np.float32))
    xs = rng.standard_normal((4, 1, 16, 20, 20), dtype=np.float32)
    wanted = [operator(x) for x in xs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(100):
            if not np.array_equal(operator(xs[index]), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_import_is_light() -> None:
    program = (
        "import sys, time\nstart = time.perf_counter()\nimport tapwise\ntook = time.perf_counter() - start\n"
        "print(took, [name for name in ('numba', 'llvmlite', 'torch', 'tapwise.cpu') if name in sys.modules])\n"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split(maxsplit=1)
        for _ in range(3)
    ]
    assert all(loaded.strip() == "[]" for _, loaded in outputs)
    assert min(float(took) for took, _ in outputs) < 0.15


def test_serial_plan_never_loads_numba(tmp_path: Path) -> None:
    result = run(tmp_path, RUN + "import sys; print('numba' in sys.modules)", TAPWISE_NUM_THREADS="1")
    assert result.stdout.split()[-1] == "False", result.stderr


def test_no_warning_in_ordinary_use(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run(tmp_path, "import warnings\nwarnings.simplefilter('error')\n" + RUN)
    assert result.returncode == 0, result.stderr
