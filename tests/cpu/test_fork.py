"""Forked children: alive and right after parallel calls, and whatever other threads of the parent did meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="no fork here")

LAYERS = ["workqueue", *(["tbb"] if platform.machine() == "x86_64" else []), *(["omp"] if find_library("gomp") else [])]
# `work` is parallel (and says so), `small` is not; a child that hangs ends with SIGALRM.
PROGRAM = """
import os, signal, threading, time
import numpy as np
import tapwise
from tapwise import image
from tapwise.cpu import driver, jit

x = np.random.default_rng(0).integers(-3, 4, (1, 32, 80, 80)).astype(np.float32)
w = np.random.default_rng(1).integers(-3, 4, (16, 32, 1, 1)).astype(np.float32)
expected = np.einsum("nchw,kc->nkhw", x, w[:, :, 0, 0])


def work(filters=16):
    y = tapwise.conv2d(x, w[:filters], algorithm="cpu.direct")
    assert np.array_equal(y, expected[:, :filters]), "wrong"


def small():
    assert np.array_equal(image.maximum_filter(x[0, 0, :5, :5], 1), x[0, 0, :5, :5])


def child(does):
    pid = os.fork()
    if not pid:
        signal.alarm(40)
        try:
            does()
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
    return os.waitpid(pid, 0)[1]

"""


def run(program: str, **variables: str) -> str:
    """What it prints. Its kernels are those of this session, unless TAPWISE_CACHE_DIR is another folder."""
    environment = {**os.environ, "TAPWISE_NUM_THREADS": "2", **variables}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # The TBB layer tells of threads that it cannot join before a fork, on lines of their own, written when C likes.
    return "\n".join(line for line in result.stdout.splitlines() if line and not line.startswith("Unable to join"))


@pytest.mark.parametrize("layer", LAYERS)
def test_child_of_a_process_with_threads(layer: str) -> None:
    """And the child's own child; the parent goes on as before."""
    program = (
        "work()\nbefore = driver.layer()\n"
        "def nested():\n    work(); small(); assert driver.layer() == 'threads'; assert child(work) == 0\n"
        "print(child(nested), child(nested), before)\nwork()\nassert driver.layer() == before\n"
    )
    assert run(program, NUMBA_THREADING_LAYER=layer) == f"0 0 {layer}"


def test_child_of_a_process_without_threads_starts_its_own(tmp_path: Path) -> None:
    program = (
        "small()\ndef first():\n    work(); assert driver.layer() != 'threads'\nprint(child(first), child(first))\n"
    )
    assert run(program, TAPWISE_CACHE_DIR=str(tmp_path)) == "0 0"


def test_child_of_a_process_whose_own_functions_started_threads() -> None:
    program = (
        "import numba\n@numba.njit(parallel=True)\ndef f(a):\n    for i in numba.prange(len(a)): a[i] = i\n"
        "f(np.zeros(1000))\nprint(child(work))\n"
    )
    assert run(program) == "0"


def test_child_forked_while_another_thread_compiles(tmp_path: Path) -> None:
    """At many moments of making problems, plans, kernels and Numba's driver."""
    program = (
        "def toil():\n"
        "    for filters in range(1, 17):\n"
        "        work(filters); tapwise.conv2d(x[:, :2], w[:filters, :2], algorithm='cpu.serial', padding=filters)\n"
        "        tapwise.max_pool2d(x[:, :filters], 2)\n"
        "busy = threading.Thread(target=toil)\nbusy.start()\nfound = []\n"
        "while busy.is_alive() and len(found) < 12:\n"
        "    found.append(child(lambda: (work(3), work(15), tapwise.max_pool2d(x[:, :15], 2)))); time.sleep(0.05)\n"
        "busy.join()\nprint(set(found))\n"
    )
    assert run(program, TAPWISE_CACHE_DIR=str(tmp_path)) == "{0}"


def test_child_forked_while_another_thread_calls_llvm() -> None:
    """The garbage collector does, too, in whatever thread it runs."""
    program = (
        "from llvmlite.binding import ffi\nheld = threading.Event()\n"
        "def call():\n    with ffi.lib._lock: held.set(); time.sleep(0.5)\n"
        "busy = threading.Thread(target=call)\nbusy.start(); held.wait()\n"
        "print(child(lambda: work(5)))\nbusy.join()\n"
    )
    assert run(program) == "0"


def test_a_fork_waits_no_longer_than_a_kernel_takes(tmp_path: Path) -> None:
    """The cache's lock has hooks of its own: they must not hold up the thread that the fork waits for."""
    program = (
        "from pathlib import Path\nfrom tapwise import disk_cache, forks\n"
        "inside = threading.Event()\n"
        "def build():\n    inside.set(); time.sleep(1); return b''\n"
        "def toil():\n    with forks.making: disk_cache.load(Path(os.environ['TAPWISE_CACHE_DIR'], 'x.o'), build)\n"
        "busy = threading.Thread(target=toil)\nbusy.start()\ninside.wait()\n"
        "began = time.perf_counter()\nassert child(small) == 0\nprint(time.perf_counter() - began < 15)\n"
    )
    assert run(program, TAPWISE_CACHE_DIR=str(tmp_path)) == "True"


def test_child_forked_while_another_thread_runs_a_kernel() -> None:
    program = (
        "work()\nstop = []\n"
        "def toil():\n    while not stop: work()\n"
        "busy = threading.Thread(target=toil)\nbusy.start()\n"
        "print({child(work) for _ in range(5)})\nstop.append(1)\nbusy.join()\n"
    )
    for layer in LAYERS:
        assert run(program, NUMBA_THREADING_LAYER=layer) == "{0}"


def test_pool_of_processes() -> None:
    program = (
        "import multiprocessing\nwork()\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n    print(pool.map(work, [16, 5, 7, 16]))\n"
    )
    assert run(program) == "[None, None, None, None]"


def test_child_of_a_process_whose_pytorch_had_a_team() -> None:
    """Of the libgomp that kernels would take."""
    pytest.importorskip("torch")
    program = (
        "import torch\ntorch.set_num_threads(2)\ntorch.rand(1 << 20) + 1\n"
        "before = child(work)\nwork()\nprint(before, child(work))\n"
    )
    assert run(program) == "0 0"


def test_data_loader_of_pytorch() -> None:
    """Its workers are forked; filters and convolutions in __getitem__, of arrays and of tensors."""
    pytest.importorskip("torch")
    program = (
        "import torch\n"
        "class Pictures(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, index):\n"
        "        work()\n"
        "        y = tapwise.conv2d(torch.from_numpy(x), torch.from_numpy(w))\n"
        "        spread = image.maximum_filter(x[0, index], 3)\n"
        "        return torch.from_numpy(spread).double().sum() + y.double().sum()\n"
        "pictures = Pictures()\nwanted = [float(pictures[index]) for index in range(6)]\n"
        "loader = torch.utils.data.DataLoader(pictures, num_workers=2, timeout=60, multiprocessing_context='fork')\n"
        "found = [float(one) for one in loader]\nprint('right' if found == wanted else (found, wanted))\n"
    )
    assert run(program) == "right"


def test_without_numbas_compiler() -> None:
    program = "work(); small()\nprint(driver.layer())\n"
    assert run(program, NUMBA_DISABLE_JIT="1", NUMBA_THREADING_LAYER="workqueue") == "threads"


def test_one_thread_of_numba() -> None:
    assert run("work(); print('right')\n", NUMBA_NUM_THREADS="1") == "right"


def test_fork_while_another_thread_has_the_lock_of_the_cache(tmp_path: Path) -> None:
    """filelock holds back threads that release a lock while it waits for a fork; the fork waits for kernels' makers."""
    code = """
import os, threading
import numpy as np, tapwise
busy = threading.Thread(target=lambda: [
    tapwise.max_pool2d(np.ones((1, 1, 20, 40), np.float32), (r, s)) for r in range(1, 6) for s in range(1, 6)
])
busy.start()
for _ in range(60):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
busy.join()
"""
    environment = {**os.environ, "TAPWISE_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, timeout=40, check=True)
