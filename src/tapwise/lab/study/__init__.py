"""The experiments of three reports, repeated on the user's machine, and which of their conclusions hold there.

conv2d_direct: a hand-written CUDA direct convolution with a public repository. Board report: convolution, im2col,
pooling, reduce and softmax on a small board with an Arm CPU and a GPU. RGB report: CUDA convolution of RGB images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from tapwise.errors import InvalidProblem
from tapwise.lab import records
from tapwise.lab.study.findings import Findings


@dataclass(frozen=True)
class Study:
    """`home` is the module with a function for each kind of device, <name>_cpu and <name>_cuda: (laboratory, sides,
    progress) -> Findings."""

    name: str
    source: str
    summary: str
    home: str


_ALL: Final = (
    Study(
        "sliding-window",
        "RGB report",
        "one thread an output: memory, split, threads, where the operands lie",
        "pictures",
    ),
    Study("im2col", "RGB report", "the picture as a matrix, and a product: each half timed", "im2col"),
    Study("cudnn", "RGB report", "the vendor's library, warm and with its first call", "vendor"),
    Study("direct", "conv2d_direct", "direct convolution against the vendor's library, thirteen shapes", "headline"),
    Study("ladder", "conv2d_direct", "the steps to the fast direct kernel, one by one", "headline"),
    Study("gemm-ladder", "ours", "implicit GEMM on tensor cores, one idea more on each rung", "gemm"),
    Study("operators", "board report", "convolution, im2col, pooling, softmax, sum: plain, vectors, GPU", "operators"),
)
STUDIES: Final = {study.name: study for study in _ALL}
SIDES: Final = {"cuda": (1024, 2048, 4096), "cpu": (512, 1024, 2048)}


def select(names: list[str]) -> list[Study]:
    """The studies of these names; "all". Raises InvalidProblem for another."""
    if names == ["all"]:
        return list(STUDIES.values())
    for name in names:
        if name not in STUDIES:
            raise InvalidProblem(f"study {name!r}: all, or of {', '.join(STUDIES)}")
    return [STUDIES[name] for name in names]


def run(
    study: Study,
    device: str,
    sides: tuple[int, ...] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    command: str = "",
) -> Findings:
    """Measure a study on "cpu", "cuda" or "cuda:<number>"; sides as in SIDES by default.

    Raises InvalidProblem, DeviceUnavailable, PeerUnavailable.
    """
    from tapwise.lab.bench import device_of
    from tapwise.lab.study.laboratory import CpuLaboratory, CudaLaboratory

    here = device_of(device)
    sides = SIDES[here.kind] if sides is None else sides
    if not sides or min(sides) < 4:
        raise InvalidProblem(f"sides={sides}: each at least 4")
    laboratory: Any = CpuLaboratory() if here.kind == "cpu" else CudaLaboratory(here.index)
    measure = getattr(import_module(f"{__name__}.{study.home}"), f"{study.name.replace('-', '_')}_{here.kind}")
    findings: Findings = measure(laboratory, tuple(sorted(sides)), progress)
    findings.versions, findings.commit, findings.command = records.versions(), records.commit(), command
    return findings
