"""The CPU as a Device: instruction set, caches, and estimates of its speed for the cost models."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

from tapwise import settings
from tapwise.algorithm import Device
from tapwise.arguments import shown, whole
from tapwise.errors import InvalidProblem
from tapwise.forks import making

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "": 1}


@cache
def name() -> str:
    """The CPU's model name; a virtual machine's often says no number, and gets LLVM's name of the cores."""
    import llvmlite.binding as llvm

    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    found = match[1].strip() if match else platform.processor() or platform.machine()
    return found if re.search(r"\d", found) else f"{found} {llvm.get_host_cpu_name()}"


@cache
def features() -> tuple[str, ...]:
    """Vector features of this CPU, as LLVM names them."""
    import llvmlite.binding as llvm

    wanted = re.compile(r"avx|fma|f16c|sse4|neon|sve|fullfp16|amx")
    return tuple(sorted(f for f, on in llvm.get_host_cpu_features().items() if on and wanted.match(f)))


@cache
def _cache_bytes(level: int) -> int | None:
    """Size of the data or unified cache of a level, from the kernel's description of CPU 0."""
    for index in sorted(_CACHES.glob("index*")):
        try:
            if int((index / "level").read_text()) == level and "Instruction" not in (index / "type").read_text():
                match = re.fullmatch(r"(\d+)([KM]?)", (index / "size").read_text().strip())
                return int(match[1]) * _UNITS[match[2]] if match else None
        except (OSError, ValueError):
            continue
    return None


def host(threads: int | None = None) -> Device:
    """This machine's CPU with that many worker threads (default: settings.threads()).

    Raises InvalidProblem, for an instruction set in the settings that it lacks too.
    """
    if threads is None:
        return _host(settings.threads(), settings.cpu_target())
    if not 1 <= whole(threads, "threads") <= settings.MOST_THREADS:
        raise InvalidProblem(f"threads={threads}: 1 to {settings.MOST_THREADS} is allowed")
    return _host(int(threads), settings.cpu_target())


def _speed(vector_bytes: int) -> tuple[float, float]:
    """(GHz, cycles of an operation on vectors, two FMAs at once): good enough to weigh arithmetic against memory.

    Units of Zen 4 are half as wide as its longest vectors.
    """
    import llvmlite.binding as llvm

    return (3.6, 2.0) if llvm.get_host_cpu_name() == "znver4" and vector_bytes == 64 else (2.7, 1.0)


@cache
def _host(threads: int, target_name: str) -> Device:
    import llvmlite.binding as llvm

    with making:
        from tapwise.cpu.amx import granted
        from tapwise.cpu.simd import runnable, target

    if target_name not in (here := runnable()):
        allowed = f"on this processor {', '.join(here)} is allowed"
        raise InvalidProblem(f"{settings.CPU_TARGET}={shown(target_name)}: {allowed}")
    vector = target(target_name)
    ghz, cycles = _speed(vector.vector_bytes)
    gflops = 2 * 2 * vector.lanes("f32") * ghz / cycles
    caches = _cache_bytes(1) or 32 << 10, _cache_bytes(2) or 512 << 10, _cache_bytes(3) or 16 << 20
    sizes = vector.vector_bytes, vector.registers, *caches
    speed = gflops, 25.0  # GB/s
    # On one of Intel's (Emerald Rapids) real layers by pairs took 1.4 times as long as in float32.
    pairs = vector.bf16_pairs and (vector.arm or llvm.get_host_cpu_name().startswith("znver"))
    tiles = vector.amx and granted()
    return Device("cpu", name(), threads, *sizes, *speed, vector_cycles=cycles, bf16_pairs=pairs, amx=tiles)
