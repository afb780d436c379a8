"""Run a kernel on several threads.

A kernel is `void task(int64 *args, int64 worker)`. Its first task follows from its own number; further ones it draws
from the counter args[0] until they run out, so a slow thread holds nobody up. It finds its own scratch by `worker`, so
two calls at once never share any.

Threads are those of OpenMP where there is a libgomp (team.py), else of Numba's layers, or of the one that
NUMBA_THREADING_LAYER asks for; Numba is imported on the first parallel call only. None of them survive a fork, and
OpenMP ends a child that starts a team after its parent had one. Such a child calls kernels from threads of Python's
own, as does one whose parent had PyTorch: that may have had a team of the same libgomp.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tapwise.forks import making
from tapwise.settings import MOST_THREADS

if TYPE_CHECKING:
    from tapwise.cpu.team import Team

_run: Callable[[int, int, int], None] | None = None
_layer: str | None = None
current_team: Team | None = None


class Launch(NamedTuple):
    """A kernel's address, its argument array (of ctypes) and its workers."""

    task: int
    args: Any
    workers: int


def layer() -> str | None:
    """The threading layer in use by Numba's names, "threads" for Python's own, or None before the first parallel
    call."""
    return _layer


def run(address: int, args: int, workers: int) -> None:
    """Call the kernel at `address` with (args, 0) ... (args, workers - 1) in parallel; returns when all have ended."""
    (_run or start_threads())(address, args, workers)


def start_threads() -> Callable[[int, int, int], None]:
    """Load or start what runs kernels now rather than in the first parallel call."""
    global _run, _layer, current_team
    with making:
        if _run is None:
            current_team = _of_openmp()
            _run, _layer = (current_team.run, "omp") if current_team is not None else _make()
        return _run


def sequence(launches: Sequence[Launch]) -> Callable[[], None]:
    """What launches kernels one behind the other, each when the one before has ended: one start of the team for all
    of them, where threads are OpenMP's. Their argument arrays are nobody else's; not for two threads at once."""
    start_threads()
    team = current_team
    fast = None if team is None else team.sequence([(task, ctypes.addressof(args), n) for task, args, n in launches])

    def call() -> None:
        # Not in a forked child.
        if fast is not None and current_team is team:
            fast()
            return
        for task, args, workers in launches:
            args[0] = 0
            run(task, ctypes.addressof(args), workers)

    return call


def _of_openmp() -> Team | None:
    """None where there is no libgomp, or Numba's words ask for something else."""
    if any(name in os.environ for name in ("NUMBA_THREADING_LAYER", "NUMBA_THREADING_LAYER_PRIORITY")):
        return None
    from tapwise.cpu.team import Team

    try:
        return Team()
    except OSError:
        return None


def _offer_tbb() -> None:
    """Load the tbb package's library, which lies where the system's loader does not look, for Numba's TBB layer to
    find."""
    for name in ("libtbb.so.12", "libtbb.12.dylib"):
        path = Path(sys.prefix) / "lib" / name
        if path.exists():
            with suppress(OSError):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _make() -> tuple[Callable[[int, int, int], None], str]:
    import numba

    if numba.config.DISABLE_JIT:
        return _python_team(), "threads"
    if "NUMBA_THREADING_LAYER" not in os.environ and "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
        # OpenMP starts a team in 2 us, TBB and workqueue in 20 to 30; without OpenMP Numba goes on to the next.
        numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    _offer_tbb()
    from tapwise.cpu import parallel

    most = int(numba.config.NUMBA_NUM_THREADS)

    # The first call compiles or loads the driver and starts the layer; no worker runs.
    parallel.for_each_worker(0, 0, 0)
    # The compiled function itself: finding it by the types of its arguments costs a microsecond a call.
    (compiled,) = parallel.for_each_worker.overloads.values()
    enter = compiled.entry_point
    default = int(numba.get_num_threads())
    # Numba keeps the number of threads a thread of the caller, and so does this, to set it only when it changes.
    here = threading.local()

    def run_pool(address: int, args: int, workers: int) -> None:
        if getattr(here, "workers", default) != workers:
            numba.set_num_threads(min(workers, most))
            here.workers = workers
        enter(address, args, workers)

    name = str(numba.threading_layer())
    if name != "workqueue":
        return run_pool, name
    turn = threading.Lock()  # workqueue cannot be entered by two threads at once

    def run_alone(address: int, args: int, workers: int) -> None:
        with turn:
            run_pool(address, args, workers)

    return run_alone, name


def _python_team() -> Callable[[int, int, int], None]:
    """Threads of Python's own, as a kernel needs no GIL: slower to start by tens of microseconds."""
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
    team = ThreadPoolExecutor(MOST_THREADS)

    def run_team(address: int, args: int, workers: int) -> None:
        kernel = prototype(address)
        others: list[Future[None]] = []
        try:
            for worker in range(1, workers):
                others.append(team.submit(kernel, args, worker))
            kernel(args, 0)
        finally:
            finish(others)

    return run_team


def finish(futures: Iterable[Future[Any]]) -> None:
    """Wait until all are done, which use memory of this call; then raise what came meanwhile, such as Ctrl-C."""
    came: BaseException | None = None
    for future in futures:
        while not future.done():
            try:
                wait([future])
            except BaseException as error:
                came = error
    if came is not None:
        raise came


def _in_child() -> None:
    global _run, _layer, current_team
    current_team = None
    numba = sys.modules.get("numba.np.ufunc.parallel")
    if _run is not None or getattr(numba, "_is_initialized", False) or "torch" in sys.modules:
        _run, _layer = _python_team(), "threads"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
