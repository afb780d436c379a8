"""The roof: the time that a machine needs at least for a problem, from two ceilings that are measured and kept."""

from __future__ import annotations

import json
import math
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import tapwise
from tapwise import settings
from tapwise.disk_cache import contents
from tapwise.problem import Problem


@dataclass(frozen=True)
class Ceilings:
    """What the threads of this machine reach together: fused multiply-adds in one dtype (GFLOP/s), memory (GB/s)."""

    gflops: float
    gbps: float


def ceilings(threads: int, dtype: str = "f32") -> Ceilings:
    """This machine's ceilings: measured once by each process (about a second), the highest kept in the cache folder, as
    a process that others disturbed has measured too little.

    float16 and bfloat16 get that of float32, which products of pairs of bfloat16 can exceed. A damaged file gets a
    warning and is written anew.
    """
    arithmetic = "f64" if dtype == "f64" else "f32"
    key, kept = _key(threads, arithmetic), known(threads, dtype)
    if kept is not None and (_path(), key) in _measured_here:
        return kept
    from tapwise.cpu.ceilings import copy_gbps, fma_gflops

    found = Ceilings(fma_gflops(threads, arithmetic), copy_gbps(threads))
    if kept is not None:
        found = Ceilings(max(found.gflops, kept.gflops), max(found.gbps, kept.gbps))
    _keep(key, found)
    _measured_here.add((_path(), key))
    return found


def known(threads: int, dtype: str = "f32") -> Ceilings | None:
    """The kept ceilings, or None when they have not been measured on this machine with so many threads."""
    row = _read().get(_key(threads, "f64" if dtype == "f64" else "f32"))
    return None if row is None else Ceilings(row["gflops"], row["gbps"])


def roof_us(problem: Problem, ceilings: Ceilings) -> float:
    """The larger of arithmetic at the one ceiling and every operand moved once at the other, in microseconds.

    Arithmetic is counted by the definition, so an algorithm that multiplies less (Winograd) can be faster than this.
    """
    return max(problem.flops / (ceilings.gflops * 1e3), problem.bytes / (ceilings.gbps * 1e3))


# Cache files and keys.
_measured_here: set[tuple[Path, str]] = set()


def _path() -> Path:
    return settings.cache_dir() / "ceilings.json"


def _key(threads: int, arithmetic: str) -> str:
    """What the ceilings depend on; the version, because a new one may measure them better."""
    from tapwise.cpu.device import name

    return f"{name()} | {settings.cpu_target()} | threads={threads} | {arithmetic} | tapwise {tapwise.__version__}"


def _read() -> dict[str, dict[str, float]]:
    """All kept rows. What cannot be understood is left out, with a warning."""
    try:
        rows = json.loads(contents(_path()).decode())
        for row in rows.values():
            if not all(math.isfinite(row[name]) and row[name] > 0 for name in ("gflops", "gbps")):
                raise ValueError(f"{row} is no pair of ceilings")
    except OSError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"{_path()} is damaged ({error}); ceilings are measured again", RuntimeWarning, stacklevel=2)
        return {}
    return dict(rows)


def _keep(key: str, measured: Ceilings) -> None:
    """Write the file with this row added; a reader sees the old or the new file, never half of one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        rows = _read()
    rows[key] = {"gflops": measured.gflops, "gbps": measured.gbps}
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_path(), json.dumps(rows, indent=1) + "\n")
    except OSError:
        return


def write_atomically(path: Path, text: str) -> None:
    """Write a text file in its folder under another name, then rename it. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read.
        os.chmod(temporary, path.stat().st_mode if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
