"""What all CUDA algorithms and their plans share: kernels that are known by their sources, launches in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tapwise.algorithm import Algorithm, Buffers, C, Device, Plan
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.launch import Launch

# The arrays of `Buffers`, by their names in a launch: all but the stream.
_ARRAYS: Final = Buffers._fields[:-1]


def stream(buffers: Buffers) -> int:
    """The handle of the stream to launch on."""
    return int(buffers.x.stream if buffers.stream is None else buffers.stream)


class CudaPlan(Plan):
    """Launches kernels one behind the other on the stream of x. Of an array it needs the address, `ptr`."""

    def __init__(self, problem: Any, device: Device, launches: Sequence[Launch], workspace_bytes: int = 0) -> None:
        self.problem, self.launches, self.workspace_bytes = problem, tuple(launches), workspace_bytes
        for launch in self.launches:
            launch.load(device.architecture, device.index)

    def run(self, buffers: Buffers) -> None:
        addresses = {name: array.ptr for name, array in zip(_ARRAYS, buffers, strict=False) if array is not None}
        if buffers.w is not None and buffers.w.synchronized:
            addresses["weights_ready"] = 1
        self.enqueue(addresses, stream(buffers))

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
        """Launch the kernels on a stream, with the addresses of their arrays by name; "weights_ready" is 1 where the
        filters were packed before all that is still to run."""
        for launch in self.launches:
            launch(addresses, stream)


class CudaAlgorithm(Algorithm[C]):
    """An algorithm whose plans launch kernels of CUDA C++."""

    def source(self, problem: Any, config: C) -> Source:
        """The kernel that computes. Pure."""
        raise NotImplementedError

    def sources(self, problem: Any, config: C) -> list[Source]:
        """All kernels that a plan will load, and those that pack its filters. Pure."""
        return [self.source(problem, config)]

    def compile(self, problem: Any, config: C, device: Device) -> None:
        """All kernels of a plan, to the cache on disk."""
        for source in self.sources(problem, config):
            compiler.cubin(source, device.architecture)

    def writes_strided(self, problem: Any, config: C) -> bool:
        """Whether `plan` and `sources` take `strides`, and then write y a stride apart (ops/conv/cuda/window.py)."""
        return False

    def reads_in_place(self, problem: Any, config: C, filters: Any) -> bool:
        """Whether `plan` and `sources` take these `filters`, those of another direction, and read them as they lie
        (window.py there)."""
        return False

    def workspace_bytes(self, problem: Any, config: C, device: Device) -> int:
        return 0
