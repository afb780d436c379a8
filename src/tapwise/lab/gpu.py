"""Times on a GPU: calls captured in CUDA graphs, replayed in turns, measured by the GPU's own clock.

PyTorch provides memory, graphs and events. A graph holds as many calls as fill BLOCK_US, so launches from the host and
the resolution of events do not count; contestants take turns in rounds, each round beginning with another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import numpy as np

from tapwise.algorithm import Device
from tapwise.errors import PeerUnavailable
from tapwise.lab.roofline import Ceilings
from tapwise.lab.timing import LEAST_ROUNDS, Timing

BLOCK_US: Final = 300.0
MOST_CALLS: Final = 64
# Of calls that are enqueued one by one.
QUEUED_US: Final = 10_000.0
EAGER_CALLS: Final = 200
# PyTorch's names of dtypes in which a GPU's ceiling is known.
DTYPES: Final = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16"}

Call = Callable[[], object]


def torch() -> Any:
    """PyTorch with CUDA. Raises PeerUnavailable where it is missing."""
    try:
        import torch as module
    except ImportError as error:
        raise PeerUnavailable(f"times on a GPU need PyTorch: {error}") from None
    if not module.cuda.is_available():
        raise PeerUnavailable("times on a GPU need PyTorch with CUDA: this one has none")
    return module


def on_host(tensor: Any) -> np.ndarray:
    """A tensor's values as NumPy has them; bfloat16 as float32."""
    if tensor.dtype is torch().bfloat16:
        tensor = tensor.float()
    values: np.ndarray = tensor.cpu().numpy()
    return values


class Graph:
    """`calls` of a function captured one behind the other."""

    def __init__(self, run: Call, calls: int) -> None:
        module = torch()
        self.calls = calls
        side = module.cuda.Stream()
        side.wait_stream(module.cuda.current_stream())
        with module.cuda.stream(side):
            for _ in range(3):
                run()
        module.cuda.current_stream().wait_stream(side)
        self._graph = module.cuda.CUDAGraph()
        with module.cuda.graph(self._graph):
            for _ in range(calls):
                run()
        self._events = [module.cuda.Event(enable_timing=True) for _ in range(2)]

    def time_us(self, before: Call | None = None) -> float:
        """Microseconds of one call in one replay, after `before` has been enqueued."""
        start, end = self._events
        if before is not None:
            before()
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.calls


def measure(runs: Mapping[str, Call], *, repeats: int = 15, cold: bool = False) -> dict[str, Timing]:
    """Times of contestants by name, on the GPU, in turns.

    `cold`: one call a replay, behind a write over more memory than L2 holds, so nothing is found in it.
    """
    graphs: dict[str, Graph] = {}
    for name, run in runs.items():
        once = Graph(run, 1)
        once.time_us()
        calls = 1 if cold else max(1, min(MOST_CALLS, round(BLOCK_US / max(1.0, once.time_us()))))
        graphs[name] = once if calls == 1 else Graph(run, calls)
    scrub = _scrubber() if cold else None
    rounds: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for graph in graphs.values():
        graph.time_us(scrub)
    for round_ in range(repeats):
        first = round_ % len(names)
        for name in (*names[first:], *names[:first]):
            rounds[name].append(graphs[name].time_us(scrub))
    return {name: Timing(tuple(values)) for name, values in rounds.items()}


def measure_queued(runs: Mapping[str, Call], *, seconds: float = 2.0, repeats: int = 15) -> dict[str, Timing]:
    """Times of contestants by name, on the GPU, in turns: of calls that are enqueued one behind the other.

    For what is captured already, and for eager calls, whose time is the host's where the host is slower. Rounds end
    when `seconds` are over, but not before the least number of them.
    """
    module = torch()
    start, end = (module.cuda.Event(enable_timing=True) for _ in range(2))

    def block_us(run: Call, calls: int) -> float:
        # The GPU is busy when the clock starts, so that the first launch does not count.
        run()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / calls

    calls = {}
    for name, run in runs.items():
        block_us(run, 1)
        calls[name] = max(1, min(MOST_CALLS, round(QUEUED_US / max(1.0, block_us(run, 3)))))
    rounds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    began = time.perf_counter()
    for round_ in range(repeats):
        if round_ >= LEAST_ROUNDS and time.perf_counter() - began >= seconds:
            break
        first = round_ % len(names)
        for name in (*names[first:], *names[:first]):
            rounds[name].append(block_us(runs[name], calls[name]))
    return {name: Timing(tuple(values)) for name, values in rounds.items()}


@cache
def _scrubber() -> Call:
    module = torch()
    memory = module.empty(256 << 20, dtype=module.uint8, device="cuda")
    return lambda: memory.zero_()


def wall_us(run: Call) -> float:
    """Microseconds of the host for one call that is not captured: arguments, allocation, launch; no waiting."""
    module = torch()
    best = float("inf")
    for _ in range(5):
        module.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(EAGER_CALLS):
            run()
        best = min(best, (time.perf_counter() - began) / EAGER_CALLS)
        module.cuda.synchronize()
    return best * 1e6


@cache
def ceilings(device: Device, dtype: str, math: str) -> Ceilings:
    """What PyTorch's matrix product and copy reach on this GPU: the measured roof."""
    module = torch()
    kind = getattr(module, DTYPES[dtype])
    module.backends.cuda.matmul.allow_tf32 = math == "tf32"
    size = 4096 if dtype == "f64" else 8192
    left, right = (module.randn(size, size, device="cuda").to(kind) for _ in range(2))
    out = module.empty(size, size, device="cuda", dtype=kind)
    # A kernel that copies: in a graph, copy_ is another engine's work, and slower.
    source = module.ones(1 << 28, device="cuda")
    target = module.empty_like(source)
    runs: dict[str, Call] = {
        "product": lambda: module.matmul(left, right, out=out),
        "copy": lambda: module.neg(source, out=target),
    }
    times = {name: min(timing.rounds_us) for name, timing in measure(runs, repeats=5).items()}
    return Ceilings(2 * size**3 / times["product"] / 1e3, 2 * (1 << 30) / times["copy"] / 1e3)
