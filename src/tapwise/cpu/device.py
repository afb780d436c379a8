"""The CPU as a Device: instruction set, caches, and estimates of its speed for the cost models."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

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


def _speed(vector_bytes: int) -> dict[str, Any]:
    """Of a core, for cost models: its peak from its clock and two FMAs at once, memory, and how it loads vectors.

    Good enough to weigh arithmetic against memory. Units of Zen 4 are half as wide as its longest vectors. On two
    threads of an Emerald Rapids two tasks take a tenth longer in all than sixteen, of four algorithms alike (182
    layers), on a Zen 5 they do not; a team begins there in less than half of the time.
    """
    import llvmlite.binding as llvm

    core = llvm.get_host_cpu_name()
    lanes = vector_bytes // 4
    if core == "znver5":
        waits = {"uneven": 0.0, "start_us": 1.3}
        rates = (64.0, 40.0, 20.0)
        return {"gflops": 4 * lanes * 4.5, "gbps": 80.0, "split_loads": False, "cache_rates": rates, **waits}
    if core == "znver4" and vector_bytes == 64:
        return {"gflops": 2 * lanes * 3.6, "gbps": 25.0, "vector_cycles": 2.0}
    return {"gflops": 4 * lanes * 2.7, "gbps": 25.0}


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
    caches = _cache_bytes(1) or 32 << 10, _cache_bytes(2) or 512 << 10, _cache_bytes(3) or 16 << 20
    sizes = vector.vector_bytes, vector.registers, *caches
    # On one of Intel's (Emerald Rapids) real layers by pairs took 1.4 times as long as in float32.
    pairs = vector.bf16_pairs and (vector.arm or llvm.get_host_cpu_name().startswith("znver"))
    tiles = vector.amx and granted()
    return Device("cpu", name(), threads, *sizes, bf16_pairs=pairs, amx=tiles, **_speed(vector.vector_bytes))
