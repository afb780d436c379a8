"""The team of OpenMP's threads beside others that spin."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from ctypes.util import find_library
from typing import Any

import pytest

from tapwise import dispatch, registry
from tapwise.cpu.device import host
from tapwise.cpu.team import SPINS, Team
from tapwise.ops.conv.problem import ConvProblem

PROGRAM = """
import os
from tapwise.cpu import driver
before = dict(os.environ)
driver.start_threads()
assert os.environ == before, "the environment is the user's"
"""


@pytest.mark.skipif(find_library("gomp") is None, reason="no libgomp")
@pytest.mark.parametrize(("given", "spins"), [({}, SPINS), ({"GOMP_SPINCOUNT": "77"}, "77")])
def test_threads_that_wait_sleep_early(given: dict[str, str], spins: str) -> None:
    """libgomp says itself what it was told."""
    silent = {name: text for name, text in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "NUMBA_"))}
    environment = {**silent, **given, "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr) == [spins]


@pytest.mark.skipif(find_library("gomp") is None, reason="no libgomp")
@pytest.mark.parametrize(
    ("allowed", "core", "sets"),
    [
        ([0b11, 2], 1, [[0b01, 2], [0b11, 2]]),
        ([0b11, 2], 65, [[0b11, 0], [0b11, 2]]),
        ([0, 0b11], 64, [[0, 0b10], [0, 0b11]]),
        ([0b10, 0], 1, []),
        ([0b11, 2], 1024, []),
    ],
)
def test_a_thread_on_the_core_of_the_caller_leaves_it(allowed: list[int], core: int, sets: list[list[int]]) -> None:
    """Where cores are as many as threads, with a system that is made up."""
    team, found, where = Team(), [], threading.get_ident()
    words = ctypes.POINTER(ctypes.c_int64 * 16)
    affinity = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64, words)

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def get_core() -> int:
        return core if together or threading.get_ident() == where else core + 1

    @affinity
    def get(thread: int, size: int, mask: Any) -> int:
        mask.contents[:] = [*allowed, *14 * [0]]
        return 0

    @affinity
    def set_(thread: int, size: int, mask: Any) -> int:
        found.append((thread, size, threading.get_ident() == where, mask.contents[:2]))
        return 0

    @ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
    def kernel(args: int, worker: int) -> None:
        ran.append(worker)

    fakes = [ctypes.cast(one, ctypes.c_void_p).value or 0 for one in (get_core, get, set_)]
    team._functions[-3:] = fakes
    address = ctypes.cast(kernel, ctypes.c_void_p).value or 0
    for together in (False, True):
        ran: list[int] = []
        team.run(address, 0, 2)
        assert sorted(ran) == [0, 1]
        assert found == [(0, 128, False, one) for one in sets if together]


def test_blas_counts_what_its_threads_take_from_the_next() -> None:
    """Of two that take as long, "auto" takes the other; of phases by BLAS likewise."""
    problem, device = ConvProblem.parse("c512 h28 w28 k128 r1 s1"), host(2)
    found = {one.algorithm: one for one in dispatch.explain(problem, device) if one.predicted_us is not None}
    blas = found["cpu.im2col_gemm"]
    assert blas.predicted_us is not None and dispatch.cost(blas, problem) > blas.predicted_us + 500
    assert dispatch.cost(found["cpu.direct"], problem) == found["cpu.direct"].predicted_us
    gradient = ConvProblem.parse("c64 h28 w28 k64 r3 s3 pad1 stride2 dgrad")
    phases = registry.get("cpu.fprop_phases", "dgrad")
    by_blas = [c for c in phases.configs(gradient, device) if "im2col_gemm" in str(c)]
    assert by_blas and all(phases.after_us(gradient, config) > 500 for config in by_blas)
