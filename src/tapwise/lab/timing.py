"""Fair times: contestants take turns in rounds, so that a change of clock speed or a noisy neighbour hits them all."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tapwise import settings

# A timed block is at least this long, or one call.
BLOCK_S = 0.002
# Pause behind a block, in which the threads of an OpenMP runtime stop spinning.
PAUSE_S = 0.005
# Threads, clocks and caches are woken by calls for this long before a block, and for longer behind a longer pause: the
# first milliseconds after an idle time run up to a third slower. Of calls of LONG_CALL_S one is enough, longer ones
# wake them by themselves.
WAKE_S = 0.004
WAKE_SHARE = 0.3
LONG_CALL_S = 0.02
LONGER_CALL_S = 0.1

LEAST_ROUNDS = 3
UNSTABLE = 0.15


@dataclass(frozen=True)
class Contestant:
    """`run` computes once, with threads that it has since its first call. `pause_s` is slept behind its blocks: longer
    where threads spin on for long."""

    name: str
    run: Callable[[], object]
    pause_s: float = PAUSE_S


@dataclass(frozen=True)
class Timing:
    """Time of one call in each round, in microseconds, in the order of rounds."""

    rounds_us: tuple[float, ...]

    @property
    def time_us(self) -> float:
        """Median."""
        return statistics.median(self.rounds_us)

    @property
    def spread_us(self) -> float:
        """Half of the interquartile range."""
        return half_spread(self.rounds_us)

    @property
    def unstable(self) -> bool:
        """The spread is too wide to draw conclusions from."""
        return self.spread_us > UNSTABLE * self.time_us

    def over(self, other: Timing) -> tuple[float, float]:
        """Median and half interquartile range of this time over the other's, round by round.

        Robust against drift: what slows a whole round cancels. Rounds that only one of them ran are left out.
        """
        ratios = [mine / theirs for mine, theirs in zip(self.rounds_us, other.rounds_us, strict=False)]
        return statistics.median(ratios), half_spread(ratios)


def busy_cores(seconds: float = 0.3) -> float:
    """Cores that work now, this process aside; 0 where the system does not tell."""

    def ticks() -> tuple[float, float]:
        text = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
        user, nice, system, _idle, _wait, *more = map(int, text.split()[1:])
        return (user + nice + system + sum(more[:3])) / os.sysconf("SC_CLK_TCK"), time.process_time()

    try:
        before = ticks()
        time.sleep(seconds)
        after = ticks()
    except (OSError, ValueError):
        return 0.0
    return max(0.0, (after[0] - before[0] - (after[1] - before[1])) / seconds)


def half_spread(values: Sequence[float]) -> float:
    """Half of the interquartile range; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def measure(
    contestants: Sequence[Contestant],
    *,
    seconds: float = 2.0,
    repeats: int = 15,
    clock: Callable[[], int] = time.perf_counter_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Timing]:
    """Times of contestants that take turns, by name.

    Each of at most `repeats` rounds times one block of calls of every contestant, each round beginning with
    another. Rounds end when
    `seconds` are over; a contestant that has used its share of them alone stands back, so one slow contestant does not
    rob the others of their rounds. Each runs at least LEAST_ROUNDS rounds (`repeats` if that is fewer), whatever it
    takes.

    An exception in a contestant's run is not caught. `clock` (nanoseconds) and `sleep` are for tests.
    """
    least = min(LEAST_ROUNDS, repeats)
    with _no_collection():
        call_s = {contestant.name: _calibrate(contestant, clock, sleep) for contestant in contestants}
        rounds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
        spent = dict.fromkeys(rounds, 0.0)
        paused_s = contestants[-1].pause_s
        start = clock()
        for round_ in range(repeats):
            over = (clock() - start) / 1e9 >= seconds
            if over and round_ >= least:
                break
            first = round_ % len(contestants)
            for contestant in (*contestants[first:], *contestants[:first]):
                name = contestant.name
                if round_ >= least and spent[name] > seconds / len(contestants):
                    continue
                began = clock()
                wake_s = max(WAKE_S, WAKE_SHARE * paused_s)
                with apart():
                    rounds[name].append(_block_us(contestant.run, call_s[name], clock, wake_s))
                spent[name] += (clock() - began) / 1e9
                paused_s = contestant.pause_s
                sleep(paused_s)
    return {name: Timing(tuple(values)) for name, values in rounds.items()}


def _calibrate(contestant: Contestant, clock: Callable[[], int], sleep: Callable[[float], None]) -> float:
    """Seconds of one warm call: the better of two, behind one that may compile and allocate."""
    contestant.run()
    best = float("inf")
    for _ in range(2):
        began = clock()
        contestant.run()
        best = min(best, (clock() - began) / 1e9)
        if best > LONG_CALL_S:
            break
    sleep(contestant.pause_s)
    return best


@contextmanager
def apart() -> Iterator[None]:
    """Keeps the caller on its core and this process's other threads off it, where the system lets them (Linux).

    Linux may wake two threads of a team on one core beside an idle one, and leave them there for 50 ms. Plain calls
    take as many threads as without.
    """
    mine, given = threading.get_native_id(), os.environ.get(settings.NUM_THREADS)
    kept: dict[int, set[int]] = {}
    os.environ[settings.NUM_THREADS] = str(settings.threads())
    try:
        if core := _core():
            for thread in map(int, os.listdir("/proc/self/task")):
                with suppress(OSError):
                    cores = os.sched_getaffinity(thread)
                    if wanted := core if thread == mine else cores - core:
                        os.sched_setaffinity(thread, wanted)
                        kept[thread] = cores
        yield
    finally:
        for thread, cores in kept.items():
            # It may have ended.
            with suppress(OSError):
                os.sched_setaffinity(thread, cores)
        del os.environ[settings.NUM_THREADS]
        if given is not None:
            os.environ[settings.NUM_THREADS] = given


def _core() -> set[int]:
    """The core that the calling thread is on; none where the system does not tell."""
    try:
        fields = Path("/proc/thread-self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return set()
    # The 39th of proc(5), the name of the program is the second.
    return {int(fields[36])}


def _block_us(run: Callable[[], object], call_s: float, clock: Callable[[], int], wake_s: float) -> float:
    """Microseconds of a call in a block of calls that follow each other."""
    if call_s < LONGER_CALL_S:
        for _ in range(_calls(wake_s, call_s) if call_s < LONG_CALL_S else 1):
            run()
    calls = _calls(BLOCK_S, call_s)
    began = clock()
    for _ in range(calls):
        run()
    return (clock() - began) / calls / 1e3


def _calls(block_s: float, call_s: float) -> int:
    """Calls that fill a block; 1000 a block are enough for any call."""
    return max(1, min(1000, round(block_s / max(call_s, 1e-9) + 0.5)))


@contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector rests."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
