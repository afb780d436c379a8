"""Ctrl-C during a long call: it ends soon, as KeyboardInterrupt, and the next call is right."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tapwise import dispatch, registry, verify
from tapwise.algorithm import Buffers
from tapwise.cpu import interrupts
from tapwise.cpu.device import host
from tapwise.cpu.interrupts import LongPlan, pieces

PROGRAM = """
import os, signal, threading, time
import numpy as np
import tapwise

x, w = np.ones((LARGE, 64, 112, 112), np.float32), np.ones((64, 64, 31, 31), np.float32)
small = np.ones((2, 3, 3, 3), np.float32)
tapwise.conv2d(x[:1, :3, :20, :20], small, algorithm=ALGORITHM)
operator = tapwise.prepare(x.shape, w, padding=15, algorithm=ALGORITHM)
# Where Ctrl-C is ignored, as in a shell's background, that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
began = time.perf_counter()
try:
    operator(x)
except KeyboardInterrupt:
    print("interrupted", round(time.perf_counter() - began, 1))
assert (tapwise.conv2d(x[:1, :3], small, algorithm=ALGORITHM) == 27).all()
"""


@pytest.mark.parametrize(("algorithm", "images", "threads"), [("direct", 48, 2), ("direct", 24, 1), ("serial", 1, 1)])
def test_a_long_call_ends_early(algorithm: str, images: int, threads: int) -> None:
    program = PROGRAM.replace("LARGE", str(images)).replace("ALGORITHM", f"'cpu.{algorithm}'")
    environment = {**os.environ, "TAPWISE_NUM_THREADS": str(threads)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100
    )
    assert result.stdout.startswith("interrupted"), result.stdout + result.stderr
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[1]) < 6


@pytest.mark.parametrize(
    "text",
    [
        "c9 h9 w11 k8 r3 s3 pad1 n3 bias", "c3 h17 w9 k4 r3 s3 stride2 n2", "c4 h8 w8 k4 r3 s3 f16",
        "maxpool n2 c3 h11 w9 r3 s3 stride2 pad1 indices", "avgpool n2 c3 h11 w9 r3 s3 stride2 pad1",
        "maxpool n2 c3 h11 w9 r3 s3 stride2 pad1 dgrad", "avgpool n2 c3 h11 w9 r3 s3 stride2 pad1 dgrad",
        "softmax 7x33", "softmax 7x33 dgrad", "reduce sum 7x33",
        "im2col n2 c3 h9 w8 r3 s3", "col2im n2 c3 h9 w8 r3 s3",
    ],
)  # fmt: skip
def test_long_calls_give_the_same(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """As if everything took long: serial loops in the smallest pieces, kernels beside the main thread."""
    problem, device = registry.parse(text), host(2)
    monkeypatch.setattr(interrupts, "LONG_US", 1e-3)
    beside: list[LongPlan] = []
    plain = LongPlan.run

    def run(plan: LongPlan, buffers: Buffers) -> None:
        beside.append(plan)
        plain(plan, buffers)

    monkeypatch.setattr(LongPlan, "run", run)
    dispatch._plan.cache_clear()
    for algorithm in registry.of_backend("cpu", problem.operator):
        if algorithm.refusal(problem, device) is None:
            assert verify.check(problem, algorithm.id, device=device), algorithm.id
    dispatch._plan.cache_clear()
    # Positions come from plain loops.
    assert beside or "indices" in text


def test_pieces() -> None:
    assert list(pieces(10, 1.0)) == [(0, 10)] and list(pieces(0, 1e9)) == []
    assert list(pieces(5, 2.5e5)) == [(0, 2), (2, 4), (4, 5)]
    assert len(list(pieces(5, 1e12))) == 5
