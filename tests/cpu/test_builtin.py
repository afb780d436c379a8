"""Kernels as builtin functions beside the same through ctypes."""

from __future__ import annotations

import ctypes
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes.util import find_library
from typing import Any

import numpy as np
import pytest

from tapwise import dispatch
from tapwise.algorithm import Buffers
from tapwise.cpu import builtin, driver, jit
from tapwise.cpu.addresses import by_field
from tapwise.cpu.device import host
from tapwise.cpu.fields import COMMON
from tapwise.cpu.plan import InPlacePlan, KernelPlan
from tapwise.cpu.team import Team
from tapwise.ops.conv.problem import ConvProblem

pytestmark = pytest.mark.skipif(not by_field, reason="another Python, or its arrays are laid out otherwise")
CASES = [
    ("c7 h5 w5 k9 r1 s1", 1), ("c7 h5 w5 k9 r1 s1 bias", 1), ("c32 h40 w40 k32 r3 s3 pad1 bias residual relu", 2),
    ("c64 h30 w30 k64 r3 s3 pad1 groups64", 2), ("c16 h20 w20 k24 r3 s3 stride2 nhwc", 2),
]  # fmt: skip


def prepared(text: str, threads: int, **words: Any) -> tuple[Any, Buffers]:
    problem, device = ConvProblem.parse(text), host(threads)
    choice = dispatch.choose(problem, device, **words)
    plan = dispatch.plan_for(problem, choice, device)
    inputs = problem.sample(np.random.default_rng(0))
    y = np.full(problem.result_shape, np.nan, np.float32)
    if problem.layout == "nhwc":
        y = np.moveaxis(np.ascontiguousarray(np.moveaxis(y, 1, -1)), -1, 1)
    memory = np.zeros(max(64, plan.workspace_bytes), np.uint8)
    return plan, Buffers(inputs.x, plan.pack(inputs.w), y, memory, inputs.bias, inputs.residual)


@pytest.mark.parametrize(("text", "threads"), CASES)
def test_same_bits_as_through_ctypes(text: str, threads: int) -> None:
    plan, buffers = prepared(text, threads)
    assert isinstance(plan, KernelPlan)
    driver.start_threads()
    plan.run(buffers)
    assert not np.isnan(first := buffers.y.copy()).any()
    if driver.current_team is not None or threads == 1:
        assert plan._builtins[1], "made by the first run"
    for _ in range(3):
        buffers.y.fill(np.nan)
        plan.run(buffers)
        assert np.array_equal(buffers.y, first)


def test_arguments_that_are_given_by_a_call_go_through_ctypes() -> None:
    """Strides of filters that lie where they are."""
    plan, buffers = prepared("c64 h8 w8 k64 r1 s1", 1, algorithm="cpu.pointwise", prepared=False)
    if not isinstance(plan, InPlacePlan):
        pytest.skip("filters are packed here")
    plan.run(buffers)
    assert not plan._builtins[1]


def test_references_are_given_back() -> None:
    plan, buffers = prepared(CASES[1][0], 1)
    plan.run(buffers)
    held = [None, *(one for one in buffers if one is not None)]
    before = [sys.getrefcount(one) for one in held]
    for _ in range(1000):
        plan.run(buffers)
    assert all(abs(sys.getrefcount(one) - count) < 100 for one, count in zip(held, before, strict=True))


@pytest.mark.skipif(find_library("gomp") is None, reason="no libgomp")
def test_arrays_and_threads_of_a_call() -> None:
    """The threads are Python's here: they wait for a GIL that the caller does not hold meanwhile."""
    seen, length = [], len(COMMON) + 2

    @ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64 * length), ctypes.c_int64)
    def kernel(args: Any, worker: int) -> None:
        seen.append((worker, *args.contents))

    team, address = Team(), ctypes.cast(kernel, ctypes.c_void_p).value or 0
    template = range(100, 100 + length)
    x, y = np.zeros(5)[1:], np.zeros(3, np.float32)
    given = {name: 100 + place for place, name in enumerate(COMMON)} | {"x": x.ctypes.data, "y": y.ctypes.data}
    for workers in (1, 2):
        call = builtin.make(address, workers, team.functions, template)
        assert call(x, None, y, None, None, None, "more") is None
        wanted = [(worker, *given.values(), 110, 111) for worker in range(workers)]
        assert sorted(seen) == wanted
        seen.clear()


def test_threads_that_make_the_first_ones_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them hold the same PyMethodDef, which nobody drops: CPython's functions hold an address of it alone."""
    load, both = jit.load, threading.Barrier(2)

    def slow(*args: Any, **words: Any) -> Any:
        # Two at once, if they may.
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return load(*args, **words)

    def method_of(_: int) -> int:
        call = builtin.make(0, 1, 0, range(len(COMMON)))
        return int(ctypes.c_void_p.from_address(id(call) + object.__basicsize__).value or 0)

    monkeypatch.setattr(builtin, "_maker", [])
    monkeypatch.setattr(jit, "load", slow)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(method_of, range(2)))
    ((_, method, _),) = builtin._maker
    assert found == [ctypes.addressof(method)] * 2
