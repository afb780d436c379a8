"""Ctrl-C during long calls: Python hears of it between two of its instructions, and a kernel is one.

A long kernel that the main thread calls runs beside it in another thread, while it waits where Ctrl-C is heard; then no
further task is drawn, and a call ends when each worker has done the one that it is at.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Final

from tapwise.algorithm import Buffers, Plan
from tapwise.cpu import driver

# From so long on a plan is worth a thread, whose start takes some tens of microseconds.
LONG_US: Final = 1e5


def pieces(count: int, us: float) -> Iterator[tuple[int, int]]:
    """From where to where the parts of a serial loop go that takes so long, none of them long."""
    size = max(1, int(count * LONG_US / max(us, LONG_US)))
    for first in range(0, count, size):
        yield first, min(count, first + size)


class LongPlan(Plan):
    """A plan whose calls take so long that Ctrl-C ends them early; what they have written then has no meaning."""

    def __init__(self, plan: Any) -> None:
        self.problem, self.workspace_bytes, self._plan = plan.problem, plan.workspace_bytes, plan

    def pack(self, w: Any) -> Any:
        return self._plan.pack(w)

    def run(self, buffers: Buffers) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._plan.run(buffers)
            return
        one, stop = self._plan.stoppable()
        done: Future[None] = Future()

        def work() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                one.run(buffers)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        try:
            threading.Thread(target=work, daemon=True).start()
            done.result()
        except BaseException:
            # Cancelled: it has not begun, and will not.
            if not done.cancel():
                stop()
                driver.finish([done])
            raise
