"""Serial algorithms: plain loops on one thread, compiled by Numba on first use and kept in its own disk cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

from tapwise.algorithm import Algorithm, Buffers, Config, Device, Plan
from tapwise.forks import making


@cache
def compiled(function: Callable[..., None], signature: Any = None) -> Any:
    """The function, compiled for a signature now, or for whatever it is called with."""
    with making:
        import numba

    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # no folder that Numba could write its cache to
        return numba.njit(signature, **options)(function)


class LoopAlgorithm(Algorithm[Config]):
    """Plain loops, one thread, nothing to choose, no workspace."""

    summary: ClassVar[str] = "plain loops, one thread"

    def configs(self, problem: Any, device: Device) -> Sequence[Config]:
        return [Config()]

    def workspace_bytes(self, problem: Any, config: Config, device: Device) -> int:
        return 0

    def plan(self, problem: Any, config: Config, device: Device) -> Plan:
        return LoopPlan(problem, self, self.predict_us(problem, config, device))

    def pack(self, problem: Any, w: Any) -> Any:
        """As Plan.pack."""
        return None

    @abstractmethod
    def run(self, problem: Any, buffers: Buffers, us: float) -> None:
        """As Plan.run; `us`: the predicted time, for what is long to go in `pieces`."""


class LoopPlan(Plan):
    """Has nothing but its problem: the loops are compiled when they are called first."""

    def __init__(self, problem: Any, algorithm: LoopAlgorithm, us: float) -> None:
        self.problem, self._algorithm, self._us = problem, algorithm, us

    def pack(self, w: Any) -> Any:
        return self._algorithm.pack(self.problem, w)

    def run(self, buffers: Buffers) -> None:
        self._algorithm.run(self.problem, buffers, self._us)
