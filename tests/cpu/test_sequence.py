"""Kernels one behind the other with one start of the threads."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

from tapwise import settings
from tapwise.cpu import driver, jit
from tapwise.cpu.fields import COMMON, entry
from tapwise.cpu.simd import Kernel, Target, target


def generate(target: Target) -> Kernel:
    """y[task] = x[tasks - 1 - task] + 1: what another worker has written, by the kernel before."""
    k = Kernel(target, "f32")
    with entry(k, COMMON) as (fields, worker):
        x, y = fields.pointer("x", "f32"), fields.pointer("y", "f32")
        with fields.draws(worker) as task:
            k.store(y + task, k.add(k.load(x + (fields.tasks - 1 - task), 1), k.constant(1.0, 1)))
    return k


def launches(x: np.ndarray, y: np.ndarray, count: int, workers: int) -> list[driver.Launch]:
    """From x to y and back."""
    task = jit.load("turned", generate, target(settings.cpu_target())).address("task")
    made = []
    for number in range(count):
        args = (ctypes.c_int64 * len(COMMON))()
        source, result = (x, y) if number % 2 == 0 else (y, x)
        values = {"tasks": len(x), "workers": workers, "x": source.ctypes.data, "y": result.ctypes.data}
        for name, value in values.items():
            args[COMMON.index(name)] = value
        made.append(driver.Launch(task, args, workers))
    return made


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("openmp", [True, False])
def test_each_sees_what_the_one_before_wrote(workers: int, openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again; by the team of OpenMP's, where there is one, and launch by launch."""
    x, y = np.arange(257, dtype=np.float32), np.zeros(257, np.float32)
    driver.start_threads()
    if not openmp:
        monkeypatch.setattr(driver, "current_team", None)
    call = driver.sequence(launches(x, y, 40, workers))
    for times in range(1, 30):
        call()
        assert np.array_equal(x, np.arange(257) + 40 * times)


def test_a_launch_alone_leaves_its_arguments() -> None:
    """Not every kernel's begin with a counter."""
    x, y = np.arange(65, dtype=np.float32), np.zeros(65, np.float32)
    (one,) = launches(x, y, 1, 2)
    driver.run(one.task, ctypes.addressof(one.args), one.workers)
    assert np.array_equal(y, x[::-1] + 1) and one.args[0] > 0


def test_a_child_goes_on_with_a_sequence_of_its_parent() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    program = (
        "import os, signal, sys\nimport numpy as np\nsys.path.insert(0, sys.argv[1])\n"
        "from test_sequence import driver, launches\n"
        "x, y = np.arange(99, dtype=np.float32), np.zeros(99, np.float32)\n"
        "call = driver.sequence(launches(x, y, 4, 2))\ncall()\npid = os.fork()\n"
        "if not pid:\n    signal.alarm(20); call(); os._exit(not np.array_equal(x, np.arange(99) + 8))\n"
        "sys.exit(os.waitpid(pid, 0)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, os.path.dirname(__file__)], timeout=60, check=False)
    assert done.returncode == 0
