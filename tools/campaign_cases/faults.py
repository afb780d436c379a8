"""Damaged caches, full disks, forks, signals, several processes and threads at once: work goes on, and is right."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from campaign_cases import Case, Family, pick, plainly
from tapwise.disk_cache import sealed

CHILD: Final = str(Path(__file__).parent / "child.py")
DAMAGES: Final = (
    *("truncated", "flipped", "swapped", "empty", "garbage", "fifo", "directory", "missing", "link", "grown"),
)
FAULTS: Final = (
    *(*DAMAGES, "fork", "fork", "fork", "threads", "interrupt", "interrupt", "killed", "full", "file", "together"),
    "environment",
)
LAYERS: Final = ("", "", "omp", "tbb", "workqueue")
# Variables that must be refused by name.
VARIABLES: Final = (
    ("TAPWISE_CPU_TARGET", "neon"), ("TAPWISE_CPU_TARGET", "pentium"), ("TAPWISE_CPU_TARGET", ""),
    ("TAPWISE_NUM_THREADS", "0"), ("TAPWISE_NUM_THREADS", "-1"), ("TAPWISE_NUM_THREADS", "\u00b2"),
    ("TAPWISE_NUM_THREADS", "1.5"), ("TAPWISE_NUM_THREADS", "9" * 5000), ("TAPWISE_NUM_THREADS", ""),
    ("NUMBA_DISABLE_JIT", "1"), ("NUMBA_NUM_THREADS", "1"), ("TAPWISE_CACHE_DIR", "/dev/null/x"),
)  # fmt: skip


def draw(rng: np.random.Generator, backend: str) -> Case:
    faults = (*DAMAGES, "together", "killed", "full", "file") if backend == "cuda" else FAULTS
    found = {"fault": pick(rng, *faults), "layer": pick(rng, *LAYERS), "seed": int(rng.integers(1000))}
    if found["fault"] == "environment":
        found["variable"] = int(rng.integers(len(VARIABLES)))
    return {**found, "backend": backend}


def run(case: Case) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TAPWISE_CACHE_DIR": folder,
            "PYTHONWARNINGS": "default",
            "TAPWISE_NUM_THREADS": "2",
        }
        environment.pop("TAPWISE_CPU_TARGET", None)
        if case["layer"]:
            environment["NUMBA_THREADING_LAYER"] = case["layer"]
        fault = case["fault"]
        if fault == "environment":
            return _variable(*VARIABLES[case["variable"]], environment, case)
        if fault in ("fork", "threads", "interrupt"):
            return _judge(_start(fault, case, environment))
        if fault == "together":
            team = [_start("work", case, environment) for _ in range(3)]
            return next((one for one in map(_judge, team) if one), None)
        if fault == "file":
            inside = Path(folder) / "file"
            inside.write_text("not a folder")
            return _judge(_start("work", case, {**environment, "TAPWISE_CACHE_DIR": str(inside)}))
        if fault == "full":
            return _judge(_start("work", case, environment, file_bytes=2000))
        if fault == "killed":
            return _killed(case, environment, Path(folder))
        filled = _judge(_start("work", case, environment))
        if filled:
            return filled
        _damage(fault, [path for path in Path(folder).rglob("*") if _is_kernel(path)], case["seed"])
        return _judge(_start("work", case, environment)) or _judge(_start("work", case, environment))


def _is_kernel(path: Path) -> bool:
    return path.is_file() and path.suffix in (".o", ".cubin", ".json", ".bin") and path.stat().st_size > 0


def _start(action: str, case: Case, environment: dict[str, str], file_bytes: int = 0) -> subprocess.Popen[str]:
    words = [sys.executable, CHILD, action, str(case["seed"])]
    if case["backend"] == "cuda" and action in ("work", "forever"):
        words.append("cuda")

    def limit() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    pipes = subprocess.PIPE
    return subprocess.Popen(words, env=environment, stdout=pipes, stderr=pipes, text=True, preexec_fn=limit)


def _judge(child: subprocess.Popen[str]) -> str | None:
    try:
        said, complaints = child.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        child.kill()
        _, complaints = child.communicate()
        return f"hang: {_last(complaints)}"
    if child.returncode:
        return f"ended with {child.returncode}: {_last(complaints)}"
    return None if said.strip().endswith("right") else f"said {said!r}"


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing said"


def _variable(name: str, value: str, environment: dict[str, str], case: Case) -> str | None:
    """Right, or refused by name in the last line."""
    found = _judge(_start("work", case, {**environment, name: value}))
    if found is None or (found.startswith("ended with 1:") and name in found and "InvalidProblem" in found):
        return None
    return found


def _killed(case: Case, environment: dict[str, str], folder: Path) -> str | None:
    """kill -9 while kernels are compiled and written, a few times; then the work is right."""
    rng = np.random.default_rng(case["seed"])
    for _ in range(2):
        child = _start("forever", case, environment)
        time.sleep(float(rng.uniform(0.7, 2.5)))
        child.kill()
        child.communicate()
    return _judge(_start("work", case, environment))


def _damage(fault: str, files: list[Path], seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(files))
    contents = [path.read_bytes() for path in files]
    for number, path in enumerate(files):
        old = contents[number]
        if fault == "swapped":
            path.write_bytes(contents[order[number]])
        elif fault == "truncated":
            path.write_bytes(old[: int(rng.integers(len(old)))])
        elif fault == "flipped":
            place = int(rng.integers(len(old)))
            path.write_bytes(old[:place] + bytes([old[place] ^ 0x55]) + old[place + 1 :])
        elif fault == "empty":
            path.write_bytes(b"")
        elif fault == "grown":
            path.write_bytes(old + b"more")
        elif fault == "garbage":
            junk = rng.bytes(300)
            path.write_bytes(sealed(path.name, junk))
        else:
            path.unlink()
            if fault == "fifo":
                os.mkfifo(path)
            elif fault == "directory":
                path.mkdir()
            elif fault == "link":
                path.symlink_to(path)


def simpler(case: Case) -> Iterator[Case]:
    yield from plainly(case, {"layer": "", "seed": 0})


FAMILY: Final = Family(draw, run, simpler, share=0.8, patience=400.0)
