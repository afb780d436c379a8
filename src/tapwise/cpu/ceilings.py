"""What this machine can do: fused multiply-adds a second, and bytes a second; how far two cores are from each other.
Measured, not looked up."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from tapwise import settings
from tapwise.cpu import driver, jit
from tapwise.cpu.simd import BYTES, INT, Int, Kernel, Ptr, Target, target

_ROUNDS = 12
# Of a line between two cores: round trips, looks at it until a worker gives up (there is no other one, or it sleeps),
# and what it leaves there then.
_TRIPS, _LOOKS, _GIVEN_UP = 2000, 1 << 20, 1 << 40


def generate(target: Target, *, dtype: str) -> Kernel:
    """`fma`: independent chains of fused multiply-adds. `copy`: a shared array, a part for each worker. `exchange`: a
    number that two workers count up in turns, two for each round trip."""
    k = Kernel(target, dtype)
    with k.function("fma", public=True, args="i64", worker=INT) as (args, worker):
        data = k.pointer(k.load_int(args), dtype) + worker * 64
        factor = k.load(data)
        # From different places: chains that begin alike are one to LLVM.
        sums = [k.var(k.load(data + place)) for place in range(12 if target.registers == 16 else 24)]
        with k.loop(0, k.load_int(args + 1)):
            for total in sums:
                total.set(k.fma(total.get(), factor, factor))
        for total in sums:
            k.store(data, total.get())
            k.fence()
    with k.function("copy", public=True, args="i64", worker=INT) as (args, worker):
        length = k.load_int(args + 2)
        source = k.pointer(k.load_int(args), dtype) + worker * length
        out = k.pointer(k.load_int(args + 1), dtype) + worker * length
        with k.loop(0, length, 4 * k.lanes) as i:
            values = [k.load(source + i + j * k.lanes) for j in range(4)]
            for j, value in enumerate(values):
                k.store(out + i + j * k.lanes, value)
    with k.function("exchange", public=True, args="i64", worker=INT) as (args, worker):
        line = k.pointer(k.load_int(args), "i64")
        # The first worker counts to 1 and waits for 2, the second one waits for 1 and counts to 2.
        with k.loop(0, k.load_int(args + 1)) as trip, k.if_(worker < 2):
            with k.if_(worker.eq(0)):
                _set(k, line, trip * 2 + 1)
            _wait(k, line, trip * 2 + 2 - worker)
            with k.if_(worker.eq(1)):
                _set(k, line, trip * 2 + 2)
    return k


def _set(k: Kernel, line: Ptr, number: Int) -> None:
    """Not below what is there: who gave up has written more than all."""
    k.b.atomic_rmw("max", line.value, number.ir, "seq_cst")


def _wait(k: Kernel, line: Ptr, number: Int) -> None:
    """Until so much is there."""
    looks, head, end = k.var(k.integer(0)), k.b.append_basic_block("look"), k.b.append_basic_block("seen")
    k.b.branch(head)
    k.b.position_at_end(head)
    looks.set(looks.get() + 1)
    seen = k.b.icmp_signed(">=", k.b.load_atomic(line.value, "acquire", 8, typ=INT), number.ir)
    late = looks.get() >= _LOOKS
    k.b.cbranch(k.b.or_(seen, late), end, head)
    k.b.position_at_end(end)
    with k.if_(k.b.not_(seen)):
        _set(k, line, k.integer(_GIVEN_UP))


def line_ns() -> float | None:
    """Nanoseconds of a cache line's round trip between the cores of two threads: some 100 where they share a cache, 350
    and more where they do not. Of three times the shortest; None where no two threads run at once."""
    library = jit.load("ceilings", generate, target(settings.cpu_target()), dtype="f32")
    # A line of its own, and its neighbour.
    words = np.zeros(48, np.int64)
    line, best = words[-(words.ctypes.data // 8) % 16 :][:16], float("inf")
    args = np.array([line.ctypes.data, _TRIPS], np.int64)
    for _ in range(3):
        line[:] = 0
        began = time.perf_counter()
        driver.run(library.address("exchange"), args.ctypes.data, 2)
        if line[0] >= _GIVEN_UP:
            return None
        best = min(best, time.perf_counter() - began)
    return best / _TRIPS * 1e9


def _best_seconds(address: int, args: np.ndarray, threads: int) -> float:
    """Shortest of several runs on all threads."""
    times = []
    pointer = ctypes.c_void_p(args.ctypes.data).value or 0
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        driver.run(address, pointer, threads)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def fma_gflops(threads: int, dtype: str) -> float:
    """Peak of vector fused multiply-adds on that many threads, in GFLOP/s, for "f32" or "f64"."""
    vector = target(settings.cpu_target())
    library = jit.load("ceilings", generate, vector, dtype=dtype)
    kind = np.float64 if dtype == "f64" else np.float32
    data = np.full(64 * (threads + 1), 0.5, kind)
    repeats = 2_000_000
    args = np.array([data.ctypes.data, repeats], np.int64)
    chains = 12 if vector.registers == 16 else 24
    seconds = _best_seconds(library.address("fma"), args, threads)
    return 2e-9 * chains * vector.lanes(dtype) * repeats * threads / seconds


def copy_gbps(threads: int) -> float:
    """Bytes read plus bytes written a second, in GB/s, copying arrays well beyond the caches."""
    vector = target(settings.cpu_target())
    library = jit.load("ceilings", generate, vector, dtype="f32")
    length = (48 << 20) // BYTES["f32"]
    source, out = np.ones(length * threads, np.float32), np.empty(length * threads, np.float32)
    out.fill(0)
    args = np.array([source.ctypes.data, out.ctypes.data, length], np.int64)
    seconds = _best_seconds(library.address("copy"), args, threads)
    return 2e-9 * source.nbytes / seconds
