"""Every environment variable that tapwise reads, in one place. Read when asked for, so tests and users can change
them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tapwise.arguments import shown
from tapwise.errors import InvalidProblem

# Each worker has scratch of its own.
MOST_THREADS: Final = 1024

VARIABLES = {
    "TAPWISE_NUM_THREADS": "worker threads of the CPU kernels (default: the cores this process may use)",
    "TAPWISE_CACHE_DIR": "folder of compiled kernels and measured ceilings (default: the user's cache folder)",
    "TAPWISE_CPU_TARGET": (
        "host, avx512-bf16, avx512, avx2, avx2-128, neon-bf16 or neon: the instruction set to generate for "
        "(default: host)"
    ),
}
CPU_TARGET = "TAPWISE_CPU_TARGET"
CACHE_DIR = "TAPWISE_CACHE_DIR"
NUM_THREADS = "TAPWISE_NUM_THREADS"


def threads() -> int:
    """Worker threads: TAPWISE_NUM_THREADS, else the cores that this process may run on."""
    text = os.environ.get(NUM_THREADS)
    if text is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, MOST_THREADS)
    # Only the digits 0 to 9; Python cannot read some of the others, nor thousands of any.
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MOST_THREADS):
        raise InvalidProblem(f"{NUM_THREADS}={shown(text)}: a whole number, 1 to {MOST_THREADS}, is allowed")
    return int(text)


def cache_dir() -> Path:
    """Folder of compiled kernels and measured ceilings. Not created here."""
    text = os.environ.get(CACHE_DIR)
    if text:
        return Path(text)
    import platformdirs

    return Path(platformdirs.user_cache_dir("tapwise", appauthor=False))


def cpu_target() -> str:
    """Instruction set of the CPU kernels: "host" or a name from `tapwise.cpu.simd`."""
    return os.environ.get(CPU_TARGET, "host")
