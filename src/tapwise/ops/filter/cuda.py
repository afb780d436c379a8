"""cuda.sliding_window of filters: one thread an element of the result; a separable filter in two launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise import arrays
from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.arrays import device as cuda
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan, stream
from tapwise.cuda.types import DTYPES, coordinates, counter, template_args
from tapwise.integers import ceil_div
from tapwise.ops.filter.edges import MODES
from tapwise.ops.filter.problem import FilterProblem, limits

_OPS: Final = {"dense": "SUM", "separable": "SUM", "max": "LARGEST", "min": "SMALLEST"}
# Bits of a place on each axis.
_AXIS_BITS: Final = 20
# Lists of taps that stay on the GPU, for each plan.
_LISTS_KEPT: Final = 16
BLOCKS_EACH: Final = 64


@dataclass(frozen=True)
class Config(BaseConfig):
    """threads of a block."""

    threads: int


class ListPlan(CudaPlan):
    """Launches that read a list of taps."""

    def __init__(
        self, problem: FilterProblem, device: Device, launches: Sequence[Launch], workspace_bytes: int = 0
    ) -> None:
        super().__init__(problem, device, launches, workspace_bytes)
        self._index, self._lists = device.index, dict[bytes, Any]()

    def uploaded(self, host: np.ndarray) -> Any:
        """A list on the GPU, where the last ones stay."""
        key = host.tobytes()
        if key not in self._lists:
            if len(self._lists) >= _LISTS_KEPT:
                self._lists.clear()
            self._lists[key] = cuda.upload(host, self._index)
        return self._lists[key]


class FilterPlan(ListPlan):
    """One launch, or two with the column's sums in the workspace between them."""

    def pack(self, w: Any) -> tuple[Any, int]:
        """(the lists of taps on the GPU, bytes to the second one)."""
        host, second = pack(self.problem, None if w is None else arrays.on_host(w))
        return self.uploaded(host), second * 8

    def run(self, buffers: Buffers) -> None:
        x, (lists, second), y, workspace, *_ = buffers
        on = stream(buffers)
        if len(self.launches) == 1:
            self.launches[0]({"x": x.ptr, "y": y.ptr, "list": lists.ptr}, on)
            return
        self.launches[0]({"x": x.ptr, "y": workspace.ptr, "list": lists.ptr}, on)
        self.launches[1]({"x": workspace.ptr, "y": y.ptr, "list": lists.ptr + second}, on)


def pack(problem: FilterProblem, w: Any) -> tuple[np.ndarray, int]:
    """Lists of taps as 8-byte words, one for each launch, and where the second begins.

    A list is cval, low, high, start, epsilon, how many taps, and for as many as the window has, places and weights.
    """
    low, high, start = limits(problem)
    if problem.op != "separable":
        weights = np.ones(problem.size) if w is None else np.asarray(w, np.float64).reshape(problem.size)
        epsilon = 0.0 if problem.op != "dense" else problem.rounding_epsilons(weights)[1]
        return _list((problem.cval, low, high, start, epsilon), weights), 0
    _, r, _ = problem.size
    column, row = np.asarray(w[:r], np.float64), np.asarray(w[r:], np.float64)
    first, last = problem.rounding_epsilons(np.concatenate([column, row]))
    down = _list((problem.cval, low, high, 0.0, first), column.reshape(1, -1, 1))
    across = _list((problem.constant_beside(column, first), low, high, start, last), row.reshape(1, 1, -1))
    return np.concatenate([down, across]), len(down)


def _list(constants: tuple[float, ...], weights: np.ndarray) -> np.ndarray:
    """Taps whose weight is 0 are left out, as in scipy: what they would see, infinity perhaps, does not count."""
    t, r, s = np.nonzero(weights)
    if not len(t):
        t, r, s = (np.zeros(1, np.int64),) * 3
    places = np.zeros(weights.size, np.int64)
    values = np.zeros(weights.size)
    places[: len(t)] = t << 2 * _AXIS_BITS | r << _AXIS_BITS | s
    values[: len(t)] = weights[t, r, s]
    return np.concatenate([np.array((*constants, float(len(t)))).view(np.int64), places, values.view(np.int64)])


class FilterSlidingWindow(CudaAlgorithm[Config]):
    """Windows of fewer than 2^20 taps an axis; all dtypes, any number of elements."""

    operator: ClassVar[str] = "filter"
    id: ClassVar[str] = "cuda.sliding_window"
    summary: ClassVar[str] = "one thread an element goes through a list of taps; columns first, then rows"
    dtypes: ClassVar[None] = None

    def rejects(self, problem: FilterProblem, device: Device) -> str | None:
        if problem.ordered:
            return "adds up in the order of its list, not in scipy's"
        if max(problem.size) >= 1 << _AXIS_BITS:
            return f"takes fewer than 2^{_AXIS_BITS} taps an axis"
        return None

    def configs(self, problem: FilterProblem, device: Device) -> Sequence[Config]:
        return [Config(256), Config(128)]

    def predict_us(self, problem: FilterProblem, config: Config, device: Device) -> float:
        """The bytes at seven tenths of the bandwidth, or two taps a cycle of a multiprocessor and 32 threads."""
        gigahertz = device.gflops / 256
        taps = prod(problem.x_shape) * problem.taps / (8 * device.multiprocessors * gigahertz * 1e3)
        return max(problem.bytes / (device.gbps * 1e3 * 0.7), taps) * (1 + (256 - config.threads) / 1e4) + 4.0

    def workspace_bytes(self, problem: FilterProblem, config: Config, device: Device) -> int:
        return prod(problem.x_shape) * (4 if problem.single else 8) if problem.op == "separable" else 0

    def plan(self, problem: FilterProblem, config: Config, device: Device) -> Plan:
        launches = [self.launch(problem, config, part, device) for part in _parts(problem)]
        return FilterPlan(problem, device, launches, self.workspace_bytes(problem, config, device))

    def sources(self, problem: FilterProblem, config: Config) -> list[Source]:
        return [self.source(problem, config, part) for part in _parts(problem)]

    def source(self, problem: FilterProblem, config: Config, part: int = 0) -> Source:
        """The kernel of the only launch, or of the column's (0) or the row's (1)."""
        sums = "float" if problem.single else "double"
        two = problem.op == "separable"
        source = sums if two and part else DTYPES[problem.dtype].cpp
        to = sums if two and not part else DTYPES[problem.to].cpp
        integral = problem.integral and not (two and not part)
        words = (
            source, to, sums, _OPS[problem.op], integral, integral and problem.to == "u64",
            two and not part and problem.truncates_columns, problem.clip, counter(prod(problem.x_shape)),
        )  # fmt: skip
        # Places beyond an edge are reflected at up to twice the size.
        header = coordinates(*(2 * (size + taps) for size, taps in zip(problem.spatial, problem.size, strict=True)))
        return stub("ops/filter/filter.cu", "filter", template_args(*words), "Filter", config.threads, header=header)

    def launch(self, problem: FilterProblem, config: Config, part: int, device: Device) -> Launch:
        depth, height, width = problem.spatial
        size, before = problem.size, problem.before
        if problem.op == "separable":
            size, before = ((1, size[1], 1), (0, before[1], 0)) if part == 0 else ((1, 1, size[2]), (0, 0, before[2]))
        fields = {"depth": depth, "height": height, "width": width, "channels": problem.c, "taps": prod(size)}
        for axis in range(3):
            fields |= {f"size{axis}": size[axis], f"before{axis}": before[axis]}
            fields[f"mode{axis}"] = MODES.index(problem.modes[axis])
        blocks = min(ceil_div(prod(problem.x_shape), config.threads), BLOCKS_EACH * device.multiprocessors)
        return Launch(self.source(problem, config, part), fields, (blocks, 1, 1), config.threads)


def _parts(problem: FilterProblem) -> range:
    """Launches: of a separable filter the column's and the row's."""
    return range(2 if problem.op == "separable" else 1)
