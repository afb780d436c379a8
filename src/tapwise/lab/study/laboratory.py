"""Where studies measure: arrays, times and checked results on a GPU or on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

import numpy as np

import tapwise
from tapwise import arrays, registry, verify
from tapwise.algorithm import Device
from tapwise.baselines import PEERS
from tapwise.errors import PeerUnavailable
from tapwise.lab import gpu, timing
from tapwise.ops.conv.problem import ConvProblem
from tapwise.problem import Inputs, Problem

Call = Callable[[], object]
Progress = Callable[[str], None]
# Seconds in which the threads of NumPy's BLAS stop spinning.
BLAS_PAUSE_S: Final = 0.1
# A call that takes longer is timed by itself, and a few times only, or once.
LONG_US: Final = 20_000.0
VERY_LONG_US: Final = 400_000.0


def pictures(side: int, stride: int, layout: str = "nchw") -> ConvProblem:
    """The RGB report's problem: an RGB image, three 3x3x3 filters, padding for an output of (side - 2) x (side - 2).

    The odd rest is at the bottom and right.
    """
    total = (side - 3) * stride + 3 - side
    pair = (total // 2, total - total // 2)
    plain = ConvProblem.parse(f"c3 h{side} w{side} k3 r3 s3 stride{stride}")
    return plain.replace(padding=(pair, pair), layout=layout)


def images(problem: Problem, seed: int = 0) -> np.ndarray:
    """Normal data for x."""
    data = np.random.default_rng(seed).standard_normal(problem.x_shape, dtype=np.float32)
    return arrays.dense(data.astype(problem.x_dtype, copy=False), problem.layout)  # type: ignore[no-any-return]


def filters(problem: ConvProblem) -> np.ndarray:
    """Normal data for w."""
    return np.random.default_rng(1).standard_normal(problem.w_shape, dtype=np.float32)


class CpuLaboratory:
    """The CPU: wall times of warm calls."""

    kind = "cpu"

    def __init__(self, seconds: float = 0.4) -> None:
        from tapwise.cpu.device import host

        self.device: Device = host()
        self.seconds = seconds

    def times(self, runs: dict[str, Call], pauses: Mapping[str, float] | None = None) -> dict[str, tuple[float, float]]:
        """(median, spread) of contestants, in turns; `pauses` in seconds behind those whose threads go on spinning."""
        known = pauses or {}
        contestants = [timing.Contestant(name, run, known.get(name, timing.PAUSE_S)) for name, run in runs.items()]
        measured = timing.measure(contestants, seconds=self.seconds * len(runs), repeats=9)
        return {name: (one.time_us, one.spread_us) for name, one in measured.items()}

    def time(self, run: Call) -> tuple[float, float]:
        return self.times({"": run})[""]

    def prepared(
        self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, algorithm: str, threads: int | None = None
    ) -> tuple[Call, bool]:
        """A call of an operator, and whether its result is within the bound of a direct sum."""
        operator = tapwise.prepare(problem, w, algorithm=algorithm, threads=threads)
        return lambda: operator(x), within(problem, operator(x))

    def peers(
        self, problems: Mapping[str, ConvProblem], x: np.ndarray, w: np.ndarray, notes: list[str]
    ) -> tuple[dict[str, Call], dict[str, float]]:
        """(calls, pauses) of libraries by name, each on its problem; why one cannot goes to `notes`."""
        calls: dict[str, Call] = {}
        pauses: dict[str, float] = {}
        for name, problem in problems.items():
            try:
                peer = PEERS[name].prepare(problem, Inputs(x, w), self.device.threads)
                calls[name], pauses[name] = peer.run, peer.pause_s
            except PeerUnavailable as error:
                notes.append(f"{name}: {error}")
        return calls, pauses

    def widths(self) -> list[tuple[str, int]]:
        """(target, bytes of its vectors): 16 bytes, and the CPU's own."""
        own = self.device.vector_bytes
        narrow = [("avx2-128", 16)] if own > 16 else []
        return [*narrow, ("host", own)]


@contextmanager
def target(name: str) -> Iterator[None]:
    """Kernels for that CPU target meanwhile."""
    from tapwise.settings import CPU_TARGET

    before = os.environ.get(CPU_TARGET)
    os.environ[CPU_TARGET] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[CPU_TARGET]
        else:
            os.environ[CPU_TARGET] = before


@lru_cache(maxsize=2)
def expected(problem: ConvProblem) -> tuple[np.ndarray, np.ndarray]:
    """(y64, bound) of a direct sum over `images` and `filters`, in float64 on the CPU."""
    algorithm = registry.get("cpu.serial")
    return problem.reference(Inputs(images(problem), filters(problem)), algorithm)


def within(problem: ConvProblem, y: np.ndarray) -> bool:
    """Whether a result on the CPU is within the bound of a direct sum."""
    plain = problem.replace(layout="nchw")
    return verify.compare(y, *expected(plain), problem.x_dtype).verified


class CudaLaboratory:
    """A GPU: its own times, of calls in CUDA graphs; PyTorch holds the memory."""

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        from tapwise.cuda.jit.device import gpu as device

        self.torch = gpu.torch()
        self.device: Device = device(index)
        self.torch.backends.cudnn.benchmark = True
        self.torch.backends.cudnn.allow_tf32 = False
        self._expected: tuple[ConvProblem, Any, Any] | None = None

    def tensor(self, array: np.ndarray, pinned: bool = False) -> Any:
        """A copy in the GPU's memory, or in pinned memory of the host that the GPU reads over the bus."""
        tensor = self.torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory() if pinned else tensor.cuda(self.device.index)

    def empty(self, shape: tuple[int, ...], pinned: bool = False) -> Any:
        where = {"pin_memory": True} if pinned else {"device": "cuda"}
        return self.torch.empty(shape, dtype=self.torch.float32, **where)

    @property
    def stream(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream)

    def once(self, run: Call) -> float:
        """Microseconds of one call between two events."""
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def times(self, runs: dict[str, Call]) -> dict[str, tuple[float, float]]:
        """(median, spread) of contestants, in turns; long calls by themselves."""
        first = {}
        for name, run in runs.items():
            run()
            first[name] = self.once(run)
        if max(first.values()) < LONG_US:
            measured = gpu.measure(runs, repeats=7)
            return {name: (one.time_us, one.spread_us) for name, one in measured.items()}
        result = {}
        for name, run in runs.items():
            more = 0 if first[name] > VERY_LONG_US else 3
            one = timing.Timing(tuple(self.once(run) for _ in range(more)) or (first[name],))
            result[name] = (one.time_us, one.spread_us)
        return result

    def time(self, run: Call) -> tuple[float, float]:
        return self.times({"": run})[""]

    def prepared(self, problem: ConvProblem, x: Any, w: Any, algorithm: str, config: Any = None) -> tuple[Call, bool]:
        """A call of an operator, and whether its result is within the bound of a direct sum."""
        operator = tapwise.prepare(problem, w, algorithm=algorithm, config=config)
        return lambda: operator(x), self.within(problem, operator(x))

    def cudnn(self, problem: ConvProblem, x: Any, w: Any) -> dict[str, Call]:
        """cuDNN, NCHW and channels last."""
        return {"cudnn": self.convolution(problem, x, w), "cudnn-cl": self.convolution(problem, x, w, True)}

    def direct(self, problem: ConvProblem) -> tuple[dict[str, Call], bool]:
        """(cuda.direct and cuDNN on a problem, whether the first is within its bound)."""
        x, w = self.tensor(images(problem)), self.tensor(filters(problem))
        run, good = self.prepared(problem, x, w, "cuda.direct")
        return {"cuda.direct": run, **self.cudnn(problem, x, w)}, good

    def convolution(self, problem: ConvProblem, x: Any, w: Any, last: bool = False) -> Call:
        """cuDNN through PyTorch, NCHW or channels last. Padding of unequal sides is a copy that is timed too."""
        functional = self.torch.nn.functional
        order = self.torch.channels_last if last else self.torch.contiguous_format
        x, w = x.contiguous(memory_format=order), w.contiguous(memory_format=order)
        (top, bottom), (left, right) = problem.padding
        equal = top == bottom and left == right

        def run() -> Any:
            padded = x if equal else functional.pad(x, (left, right, top, bottom))
            sides = (top, left) if equal else 0
            return functional.conv2d(padded, w, None, problem.stride, sides, problem.dilation, problem.groups)

        return run

    def within(self, problem: ConvProblem, y: Any) -> bool:
        """Whether a result is within the bound of a direct sum, by float64 on the GPU (cuDNN's)."""
        if self._expected is None or self._expected[0] != problem:
            x, w = self.tensor(images(problem)).double(), self.tensor(filters(problem)).double()
            factor = registry.get("cuda.sliding_window").error_factor(problem) * 2.0**-24
            sums: Any = self.convolution(problem, x, w)()
            size: Any = self.convolution(problem, x.abs(), w.abs())()
            self._expected = problem, sums, size * factor + sums.abs() * 2.0**-24
        _, sums, bound = self._expected
        return bool(((y.to(sums.device).double() - sums).abs() <= bound).all())
