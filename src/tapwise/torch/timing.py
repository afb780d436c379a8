"""Times of calls: on a GPU by its own clock, captured in CUDA graphs or enqueued; contestants take turns.

A graph holds as many calls as fill BLOCK_US, so launches from the host and the resolution of events do not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any, Final

import torch

from tapwise.torch.graphs import capture

BLOCK_US: Final = 300.0
MOST_CALLS: Final = 64
# Rounds that are run whatever they take.
LEAST_ROUNDS: Final = 3
# Budget of one choice: rounds and seconds of all contestants together on a GPU, calls and seconds of each on a CPU.
ROUNDS: Final = 7
CALLS: Final = 20
SECONDS: Final = 0.02

Call = Callable[[], object]
# Microseconds of a call in each round, by contestant.
Rounds = dict[str, tuple[float, ...]]


def in_turns(blocks: Mapping[str, Callable[[], float]], repeats: int, seconds: float = math.inf) -> Rounds:
    """What each block says, round by round, each round beginning with another.

    Rounds end when `seconds` are over, but not before the least number of them.
    """
    rounds: dict[str, list[float]] = {name: [] for name in blocks}
    names = list(blocks)
    began = time.perf_counter()
    for round_ in range(repeats):
        if round_ >= LEAST_ROUNDS and time.perf_counter() - began >= seconds:
            break
        first = round_ % len(names)
        for name in (*names[first:], *names[:first]):
            rounds[name].append(blocks[name]())
    return {name: tuple(values) for name, values in rounds.items()}


class Graph:
    """`calls` of a function captured one behind the other."""

    def __init__(self, run: Call, calls: int) -> None:
        self.calls = calls
        self._graph, _ = capture(run, calls)
        self._clock = Clock()

    def time_us(self, before: Call | None = None) -> float:
        """Microseconds of one call in one replay, after `before` has been enqueued."""
        if before is not None:
            before()
        return self._clock.us(self._graph.replay) / self.calls


class Clock:
    """Two events around what is enqueued."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def us(self, run: Call, calls: int = 1) -> float:
        """Microseconds of all calls together."""
        self._start.record()
        for _ in range(calls):
            run()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3


def captured_us(
    runs: Mapping[str, Call], *, repeats: int, seconds: float = math.inf, before: Call | None = None
) -> Rounds:
    """Of calls in CUDA graphs; with `before`, what is enqueued before each, one call a graph."""
    graphs: dict[str, Graph] = {}
    for name, run in runs.items():
        once = Graph(run, 1)
        once.time_us()
        # The fastest of some: a hiccup would make a graph of one call, whose launch would count.
        calls = 1 if before is not None else calls_in(BLOCK_US, min(once.time_us() for _ in range(LEAST_ROUNDS)))
        graphs[name] = once if calls == 1 else Graph(run, calls)

    def block(graph: Graph) -> Callable[[], float]:
        return lambda: graph.time_us(before)

    for graph in graphs.values():
        graph.time_us(before)
    return in_turns({name: block(graph) for name, graph in graphs.items()}, repeats, seconds)


def queued_us(runs: Mapping[str, Call], *, repeats: int, seconds: float, block_us: float = BLOCK_US) -> Rounds:
    """Of calls that are enqueued one behind the other, in blocks of so long.

    For what is captured already, and for eager calls, whose time is the host's where the host is slower.
    """
    clock = Clock()

    def block(run: Call, calls: int) -> float:
        # The GPU is busy when the clock starts, so that the first launch does not count.
        run()
        return clock.us(run, calls) / calls

    def blocks(run: Call) -> Callable[[], float]:
        block(run, 1)
        calls = calls_in(block_us, min(block(run, 3) for _ in range(LEAST_ROUNDS)))
        return lambda: block(run, calls)

    return in_turns({name: blocks(run) for name, run in runs.items()}, repeats, seconds)


def calls_in(block_us: float, call_us: float) -> int:
    """Calls that fill a block."""
    return max(1, min(MOST_CALLS, round(block_us / max(1.0, call_us))))


def medians(runs: Mapping[str, Call], device: torch.device, seconds: float = SECONDS) -> tuple[dict[str, float], str]:
    """(microseconds of a call by name, why no CUDA graph was captured) where a choice is to be made.

    On a GPU in CUDA graphs, which have no host in the way; where one cannot be captured, all by eager calls between
    events. On a CPU wall times, in turns, for so many `seconds` each, and no reason.
    """
    if device.type != "cuda":
        for run in runs.values():
            run()
        walls = {name: partial(_once_us, run) for name, run in runs.items()}
        taken = in_turns(walls, CALLS, seconds * len(runs))
        return {name: median(values) for name, values in taken.items()}, ""
    reason = ""
    with torch.cuda.device(device):
        try:
            rounds = captured_us(runs, repeats=ROUNDS, seconds=SECONDS)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            rounds = queued_us(runs, repeats=ROUNDS, seconds=SECONDS)
    return {name: median(values) for name, values in rounds.items()}, reason


def _once_us(run: Call) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def wall_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call with what it leaves on the GPU, the median of some, after one more."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    call()
    synchronize()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < LEAST_ROUNDS or (len(times) < CALLS and time.perf_counter() - began < SECONDS):
        start = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times)
