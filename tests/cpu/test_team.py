"""The team of OpenMP's threads beside others that spin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from ctypes.util import find_library

import pytest

from tapwise import dispatch, registry
from tapwise.cpu.device import host
from tapwise.cpu.team import SPINS
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
