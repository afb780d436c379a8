"""What a measurement leaves: one record a problem, as JSON, with all that is needed to repeat and to judge it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tapwise import registry
from tapwise.errors import InvalidProblem
from tapwise.lab.roofline import write_atomically

LIBRARIES = (
    "tapwise",
    "numpy",
    "numba",
    "llvmlite",
    "torch",
    "torchvision",
    "onnxruntime",
    "cuda-core",
    "cuda-bindings",
)

MODEL = "model"
# A cache line's round trip that is so many times as long as another is one of cores that share no cache.
FAR: Final = 2.0
# Of a model's images, where nothing else is asked for.
IMAGE_SIZE = 224


@dataclass
class Record:
    """Times in microseconds: medians, and as spread half the interquartile range. ratio: best peer / ours, the median
    over rounds. `reason` is why there is no time, or why this algorithm. On a GPU times are its own; `cold_us` with
    nothing in L2, `wall_us` what an eager call takes of the host; `over_plain`: the time over that of the same
    convolution without bias, activation and residual, by whoever computes it, measured in turns; `f32_ratio`: of 16
    bits on a CPU, the time of the same problem in float32, by the algorithm chosen for that, over this one, in turns
    too. `line_ns`: how far two threads' cores were from each other on a CPU, the round trip of a cache line in
    nanoseconds, before and behind the times. `threads` of a CPU, or multiprocessors of a GPU; `prepared`: not a plain
    call of conv2d, which packs the filters."""

    problem: str
    suite: str
    category: str
    uses: int
    direction: str
    dtype: str
    math: str
    layout: str
    device: str
    threads: int
    algorithm: str | None = None
    config: str | None = None
    reason: str = ""
    predicted_us: float | None = None
    time_us: float | None = None
    spread_us: float | None = None
    roof_us: float | None = None
    gflops: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    peers_missing: dict[str, str] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None
    f32_ratio: float | None = None
    algorithms: dict[str, float] = field(default_factory=dict)
    cold_us: dict[str, float] = field(default_factory=dict)
    wall_us: dict[str, float] = field(default_factory=dict)
    over_plain: dict[str, float] = field(default_factory=dict)
    line_ns: list[float] = field(default_factory=list)
    error: float | None = None
    bound: float | None = None
    verified: bool = False
    workspace_bytes: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    command: str = ""
    prepared: bool = True

    def as_json(self) -> dict[str, object]:
        """A plain dictionary; `category` under its suite name `class`, floats to six digits."""
        return {"class" if name == "category" else name: rounded(value) for name, value in asdict(self).items()}


@dataclass
class ModelRecord(Record):
    """Of a whole model: `algorithms` are tapwise's variants, `peers` the others, `algorithm` and `time_us` of the
    fastest of ours. `variants`: of each name, who computes it, time, spread, ratio (the fastest of PyTorch's over it),
    largest error as a part of the largest output, part of the images with the same class, or the reason why there is no
    time. `layers`: what optimize measured. `images` that were compared."""

    name: str = ""
    n: int = 1
    size: int = 0
    images: int = 0
    fastest: str = ""
    variants: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def file_name(self) -> str:
        """model-<name>-<dtype>-n<batch>.json; sizes other than 224 are in the name too."""
        size = "" if self.size == IMAGE_SIZE else f"-{self.size}"
        return f"model-{self.name}{size}-{self.dtype}-n{self.n}.json"


def read(path: Path) -> list[Record]:
    """The records of a .json file, of those in a folder, or of those in a folder of devices' folders, as `bench --json`
    writes them. Raises InvalidProblem for what is none."""
    known = {field.name for field in fields(Record)}
    found = []
    try:
        inside = (sorted(path.glob("*.json")) or sorted(path.glob("*/*.json"))) if path.is_dir() else [path]
        for file in inside:
            for row in json.loads(file.read_text(encoding="utf-8")):
                named = {"category" if name == "class" else name: value for name, value in row.items()}
                found.append(Record(**{name: value for name, value in named.items() if name in known}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidProblem(f"{file}: no records of bench: {error}") from None
    if not found:
        raise InvalidProblem(f"{path}: no records")
    return found


def rounded(value: Any) -> Any:
    """Floats within it to six digits; None for infinity and NaN, which JSON has not."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def versions() -> dict[str, str]:
    """Versions of what takes part, as far as it is installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the sources, with "+" when they were changed since; "" outside a repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


# Words of a processor's name that do not tell it from another.
_LEGAL: Final = re.compile(r"\((R|TM)\)| Processor\b| CPU\b")


def slug(text: str) -> str:
    """A device's name as a folder's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def folder(kind: str, name: str) -> str:
    """The folder of a device's results: "cpu-amd-epyc", "cpu-intel-xeon-emeraldrapids", "h200"."""
    return slug(f"cpu {_LEGAL.sub('', name)}") if kind == "cpu" else slug(name.removeprefix("NVIDIA"))


def near_ns(rows: Iterable[Record]) -> float:
    """The shortest round trip of a cache line between two threads' cores, 0 where none was timed."""
    return min((min(row.line_ns) for row in rows if row.line_ns), default=0.0)


def far(rows: Sequence[Record]) -> list[Record]:
    """Those that were timed while two threads' cores were far from each other."""
    near = near_ns(rows)
    return [row for row in rows if row.line_ns and max(row.line_ns) > FAR * near]


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _kind(record: Record) -> str:
    """What the records of a file share: suite, direction, arithmetic and layout; one thread is said."""
    if isinstance(record, ModelRecord):
        return record.file_name
    dtype = record.math if record.math != "ieee" else record.dtype
    layout = "" if record.layout == "nchw" else f"-{record.layout}"
    unprepared = "" if record.prepared else "-unprepared"
    threads = "-threads1" if record.threads == 1 else ""
    return f"{record.suite}-{record.direction}-{dtype}{layout}{unprepared}{threads}"


def file_name(records: Sequence[Record], batch: int | None) -> str:
    """<suite>-<direction>-<dtype>-n<batch>.json of records of one kind, with more words between where they are of
    another layout, not prepared, or of one thread; the batch is that of most problems."""
    if isinstance(records[0], ModelRecord):
        return records[0].file_name
    sizes = Counter(int(getattr(registry.parse(record.problem), "n", 1)) for record in records)
    return f"{_kind(records[0])}-n{batch or sizes.most_common(1)[0][0]}.json"


def check_target(target: Path) -> None:
    """Raises InvalidProblem for a place that `write` cannot write to. Makes its folder."""
    if target.suffix not in ("", ".json") and not target.is_dir():
        raise InvalidProblem(f"json={str(target)!r}: a .json file, or a folder")
    if target.suffix == ".json" and target.is_dir():
        raise InvalidProblem(f"json={str(target)!r}: is a folder; a .json file in it is allowed, or another name")
    folder = target.parent if target.suffix == ".json" else target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidProblem(f"json={str(target)!r}: {error}") from None


def write(records: Sequence[Record], target: Path, device: str, batch: int | None) -> list[Path]:
    """Write records to a .json file, or to a folder as <device>/<suite>-....json, one file a suite. Raises OSError.

    `device` is the folder's name, e.g. "cpu-amd-epyc".
    """
    if target.suffix == ".json":
        groups = {target: list(records)}
    else:
        kinds: dict[str, list[Record]] = {}
        for record in records:
            kinds.setdefault(_kind(record), []).append(record)
        groups = {target / device / file_name(rows, batch): rows for rows in kinds.values()}
    for path, rows in groups.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    return list(groups)
