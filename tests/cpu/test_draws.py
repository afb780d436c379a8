"""Tasks that workers draw: each once, by any number of workers, in parallel and one behind the other."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tapwise import settings
from tapwise.cpu import jit
from tapwise.cpu.fields import COMMON, entry
from tapwise.cpu.simd import Kernel, Target, target

# More than the number of any worker.
ONCE = 100


def generate(target: Target) -> Kernel:
    """y[number] += ONCE and the worker's number, from 1 on."""
    k = Kernel(target, "f32")
    with entry(k, COMMON) as (a, worker):
        y = a.pointer("y", "i64")
        with a.draws(worker) as number:
            k.store_int(y + number, k.load_int(y + number) + worker + (ONCE + 1))
    return k


def drawn(tasks: int, workers: int, parallel: bool, counter: int = 0) -> np.ndarray:
    word = ctypes.c_int64
    task = jit.load("draws", generate, target(settings.cpu_target())).address("task")
    call = ctypes.CFUNCTYPE(None, word, word)(task)
    y, args = np.zeros(tasks + 1, np.int64), np.zeros(len(COMMON), np.int64)
    for name, value in {"counter": counter, "tasks": tasks, "workers": workers, "y": y.ctypes.data}.items():
        args[COMMON.index(name)] = value
    if parallel:
        with ThreadPoolExecutor(workers) as team:
            list(team.map(lambda worker: call(args.ctypes.data, worker), range(workers)))
    else:
        for worker in range(workers):
            call(args.ctypes.data, worker)
    return y


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("tasks", [0, 1, 2, 3, 5, 8, 1000])
def test_every_task_is_drawn_once(tasks: int, workers: int, parallel: bool) -> None:
    y = drawn(tasks, workers, parallel)
    assert (y[:tasks] // ONCE == 1).all() and y[tasks] == 0
    assert (y[:tasks] % ONCE <= workers).all()
    if not parallel and tasks >= workers:
        # The first worker leaves the others one each: even ones at the front, odd ones at the back.
        front, back = range(2, workers, 2), range(1, workers, 2)
        expected = np.ones(tasks, np.int64)
        expected[: len(front) + 1] = [1, *(worker + 1 for worker in front)]
        expected[tasks - len(back) :] = [worker + 1 for worker in reversed(back)]
        np.testing.assert_array_equal(y[:tasks] - ONCE, expected)


def test_none_is_drawn_behind_a_counter_that_says_no_more() -> None:
    """But for the first of each worker."""
    from tapwise.cpu.plan import NO_MORE

    np.testing.assert_array_equal(drawn(9, 2, False, NO_MORE), [ONCE + 1, *[0] * 7, ONCE + 2, 0])
