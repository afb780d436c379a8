"""A process that does a little of everything and checks it: what faults are tried on.

child.py ACTION SEED: work; or fork, threads, interrupt, forever, which do the work in a way of their own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings

import numpy as np


def work(seed: int, backend: str = "") -> None:
    """Raises AssertionError for a result that is wrong."""
    import tapwise
    from tapwise import image

    rng = np.random.default_rng(seed)
    n, c, k, r = (int(rng.integers(1, most)) for most in (3, 20, 20, 4))
    x = rng.integers(-3, 4, (n, c, 12, 37)).astype(np.float32)
    w = rng.integers(-3, 4, (k, c, r, r)).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x, (r, r), (2, 3))
    device = backend or None
    y = tapwise.conv2d(x, w, device=device, algorithm="auto")
    assert np.abs(y - np.einsum("nchwrs,kcrs->nkhw", windows, w)).max() < 0.01, "conv2d is wrong"
    pooled = tapwise.max_pool2d(x, r, 1, device=device)
    assert np.array_equal(pooled, windows.max((-1, -2))), "max_pool2d is wrong"
    total = tapwise.reduce(x, "sum", (2, 3), device=device)
    assert np.array_equal(total, x.sum((2, 3))), "reduce is wrong"
    even = tapwise.softmax(x, 1, device=device)
    assert np.abs(even.sum(1) - 1).max() < 1e-5, "softmax is wrong"
    if not backend:
        spread = image.maximum_filter(x[0, 0], 3)
        padded = np.pad(x[0, 0], 1, mode="symmetric")
        seen = np.lib.stride_tricks.sliding_window_view(padded, (3, 3))
        assert np.array_equal(spread, seen.max((-1, -2))), "maximum_filter is wrong"
        big = rng.integers(-3, 4, (1, 32, 80, 80)).astype(np.float32)  # by all threads
        filters = rng.integers(-3, 4, (16, 32, 1, 1)).astype(np.float32)
        mixed = np.einsum("nchw,kc->nkhw", big, filters[:, :, 0, 0])
        assert np.abs(tapwise.conv2d(big, filters) - mixed).max() < 0.01, "conv2d by all threads is wrong"


def fork(seed: int) -> None:
    """Children of a process that has done the same, or other work, while another thread is at it."""
    rng = np.random.default_rng(seed)
    if rng.random() < 0.7:
        work(seed)

    def toil() -> None:
        for other in range(seed, seed + 3):
            work(other)

    busy = threading.Thread(target=toil, daemon=True)
    if rng.random() < 0.6:
        busy.start()
        time.sleep(float(rng.random()))
    for number in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            signal.alarm(40)  # a hang ends it
            try:
                work(seed + number)
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"a forked child ended with status {status}"
    if busy.ident is not None:
        busy.join()


def threads(seed: int) -> None:
    """The same in several threads at once, some with the same kernels."""
    failures: list[BaseException] = []

    def one(number: int) -> None:
        try:
            work(seed + number % 2)
        except BaseException as error:
            failures.append(error)

    team = [threading.Thread(target=one, args=(number,)) for number in range(5)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    if failures:
        raise failures[0]


def interrupt(seed: int) -> None:
    """Ctrl-C at any time, and the work afterwards."""
    # Python leaves a module that Ctrl-C stops half imported, and Numba is no more then.
    work(seed)
    delay = float(np.random.default_rng(seed).uniform(0.05, 3.0))
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        while True:
            work(seed)
            time.sleep(0.01)
    except KeyboardInterrupt:
        work(seed)


def forever(seed: int) -> None:
    """Until it is killed."""
    while True:
        work(seed)
        seed += 1


def main() -> None:
    action, seed = sys.argv[1], int(sys.argv[2])
    if action == "work":
        work(seed, *sys.argv[3:])
    else:
        {"fork": fork, "threads": threads, "interrupt": interrupt, "forever": forever}[action](seed)
    print("right")


if __name__ == "__main__":
    main()
