"""What this machine can do: fused multiply-adds a second, and bytes a second. Measured, not looked up."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from tapwise import settings
from tapwise.cpu import driver, jit
from tapwise.cpu.simd import BYTES, INT, Kernel, Target, target

_ROUNDS = 12


def generate(target: Target, *, dtype: str) -> Kernel:
    """`fma`: independent chains of fused multiply-adds. `copy`: a shared array, a part for each worker."""
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
    return k


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
