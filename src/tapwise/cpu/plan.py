"""What the plans of all generated CPU kernels share: the argument array and the launch."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Final

import numpy as np

from tapwise.algorithm import Buffers, Device, Plan
from tapwise.cpu import builtin, driver, interrupts
from tapwise.cpu.addresses import address, by_field
from tapwise.cpu.driver import Launch
from tapwise.cpu.fields import COMMON, FILTER_STEPS
from tapwise.cpu.interrupts import LongPlan
from tapwise.cpu.jit import Library
from tapwise.problem import Problem

_X, _W, _Y, _BIAS, _RESIDUAL, _SCRATCH = (COMMON.index(n) for n in ("x", "w", "y", "bias", "residual", "scratch"))
_COUNTER, _TASKS, _WORKERS = (COMMON.index(name) for name in ("counter", "tasks", "workers"))
# As a counter (Kernel.draws): 2^31 drawn from the front and 2^30 from the back, with room for what workers still add.
NO_MORE: Final = (1 << 62) + (1 << 31)
# Filters below are packed by one thread.
ALONE_BYTES: Final = 1 << 17
_addressof = ctypes.addressof


class KernelPlan(Plan):
    """Launches `task` for a run, and what subclasses put behind it (`then`); `pack_task` for the filters.

    `fields` gives the kernel's own arguments and "tasks", "scratch_step"; tables among them are passed by address and
    kept alive here. A call changes only its own copy of the argument array. Without `pack_tasks` there are no filters.
    """

    # Whether calls differ by their arrays alone.
    _same_arguments = True

    def __init__(
        self, problem: Problem, device: Device, library: Library, names: Sequence[str],
        fields: Mapping[str, int | np.ndarray], packed_size: int = 0, pack_tasks: int = 0,
    ) -> None:  # fmt: skip
        self.problem = problem
        self._library = library
        self._tables = [value for value in fields.values() if isinstance(value, np.ndarray)]
        numbers = {n: address(v) if isinstance(v, np.ndarray) else int(v) for n, v in fields.items()}
        unknown = set(numbers) - set(names)
        if unknown:
            raise KeyError(f"fields {sorted(unknown)} have no place in the argument array")
        self._copy: Callable[[bytes], Any] = (ctypes.c_int64 * len(names)).from_buffer_copy
        self._workers = numbers["workers"] = max(1, min(device.threads, numbers["tasks"]))
        self._template = np.array([numbers.get(name, 0) for name in names], np.int64).tobytes()
        self.workspace_bytes = numbers.get("scratch_step", 0) * self._workers
        self._packed_size, self._pack_tasks, self._threads = packed_size, pack_tasks, device.threads
        self.packed_bytes = (packed_size + 32) * problem.accumulator_bytes if pack_tasks else 0
        # What a run launches, one behind the other: (the kernel, the same where there is but one worker, workers).
        self._kernels = [(library.address("task"), library.function("task"), self._workers)]
        if pack_tasks:
            self._pack_task, self._pack_serial = library.address("pack_task"), library.function("pack_task")
        # The same as builtin functions, and the team that they are for; none before the first run.
        self._builtins: tuple[object, list[Callable[..., None]]] = None, []
        # Where the kernel wants the filters' strides, if it takes any.
        self._filter_steps = [names.index(name) for name in FILTER_STEPS] if FILTER_STEPS[0] in names else []
        self._group_k = getattr(problem, "group_k", 0)

    def pack(self, w: np.ndarray) -> np.ndarray | None:
        """The filters (k, c / groups, ...), which may have an axis for groups in front, in the kernel's order: 64-byte
        aligned, in the arithmetic dtype."""
        return self.pack_into(w, None)

    def pack_into(self, w: np.ndarray, memory: np.ndarray | None) -> np.ndarray | None:
        """The same; `memory` is of bytes, 64-byte aligned too, or new."""
        if not self._pack_tasks:
            return None
        if not (self._filter_steps and w.dtype.isnative and w.flags.aligned):
            w = np.require(w, w.dtype if w.dtype.isnative else w.dtype.newbyteorder("="), ["C", "A"])
        dtype = np.dtype(f"f{self.problem.accumulator_bytes}")
        # Packing writes all that kernels read but what lies behind the end. Zeros would be written twice.
        size = self._packed_size + 32
        storage = np.empty(size, dtype) if memory is None else memory[: size * dtype.itemsize].view(dtype)
        storage[-48:] = 0
        start = -storage.ctypes.data % 64 // dtype.itemsize
        packed = storage[start : start + self._packed_size]
        args = self._copy(self._template)
        args[_X], args[_W], args[_TASKS] = address(w), address(packed), self._pack_tasks
        if self._filter_steps:
            steps = w.strides if w.ndim == len(self._filter_steps) else (w.strides[0] * self._group_k, *w.strides)
            for place, step in zip(self._filter_steps, steps, strict=True):
                args[place] = step // w.itemsize
        workers = 1 if packed.nbytes < ALONE_BYTES else max(1, min(self._threads, self._pack_tasks))
        args[_WORKERS] = workers
        if workers == 1:
            self._pack_serial(_addressof(args), 0)
        else:
            driver.run(self._pack_task, _addressof(args), workers)
        return packed

    def then(self, name: str, workers: int | None = None) -> None:
        """Another kernel of the library behind those that a run launches, on all workers or so many."""
        workers = self._workers if workers is None else workers
        self._kernels.append((self._library.address(name), self._library.function(name), workers))

    def run(self, buffers: Buffers) -> None:
        team, calls = self._builtins
        if calls and driver.current_team is team:
            for call in calls:
                call(*buffers)
            return
        for task, serial, workers in self._kernels:
            args = self._arguments(buffers)
            if workers == 1:
                serial(_addressof(args), 0)
            else:
                driver.run(task, _addressof(args), workers)
        self._make_builtins()

    def _make_builtins(self) -> None:
        """For the next run, where the same argument array serves all and no threads but OpenMP's are needed."""
        team = driver.current_team
        if by_field and self._same_arguments and (team or all(workers == 1 for *_, workers in self._kernels)):
            functions, template = team.functions if team else 0, np.frombuffer(self._template, np.int64)
            made = [builtin.make(task, workers, functions, template) for task, _, workers in self._kernels]
            self._builtins = team, made

    def launches(self, buffers: Buffers) -> list[Launch]:
        """What run launches, for driver.Sequence."""
        return [Launch(task, self._arguments(buffers), workers) for task, _, workers in self._kernels]

    def for_time(self, us: float) -> Plan:
        return LongPlan(self) if us > interrupts.LONG_US else self

    def stoppable(self) -> tuple[KernelPlan, Callable[[], None]]:
        """The plan for one call, and what makes that call's workers draw no further task."""
        one, calls, stopped = copy(self), [], threading.Event()

        def note(template: bytes) -> Any:
            args = self._copy(template)
            calls.append(args)
            if stopped.is_set():
                args[_TASKS] = 0
            return args

        def stop() -> None:
            stopped.set()
            for args in calls:
                args[_COUNTER] = NO_MORE

        one._copy, one._same_arguments, one._builtins = note, False, (None, [])
        return one, stop

    def _arguments(self, buffers: Buffers) -> Any:
        x, packed, y, workspace, bias, residual, _ = buffers
        args = self._copy(self._template)
        args[_X], args[_Y] = address(x), address(y)
        if packed is not None:
            args[_W] = address(packed)
        if workspace is not None:
            args[_SCRATCH] = address(workspace)
        if bias is not None:
            args[_BIAS] = address(bias)
        if residual is not None:
            args[_RESIDUAL] = address(residual)
        return args


class InPlacePlan(KernelPlan):
    """Of a kernel that reads the filters where they lie, in the arithmetic dtype.

    `side_by_side`: it loads vectors of filters, which have to be neighbours.
    """

    _same_arguments = False

    def __init__(
        self, problem: Problem, device: Device, library: Library, names: Sequence[str],
        fields: Mapping[str, int | np.ndarray], side_by_side: bool,
    ) -> None:  # fmt: skip
        super().__init__(problem, device, library, names, fields)
        self._side_by_side = side_by_side

    def pack_into(self, w: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
        """A view of the filters, or a copy where the kernel cannot read them as they are."""
        w = np.require(w, np.dtype(f"f{self.problem.accumulator_bytes}"), ["A"])
        if w.ndim < len(self._filter_steps):
            w = w.reshape(-1, self._group_k, *w.shape[1:])
        if self._side_by_side and w.strides[1] != w.itemsize:
            w = np.moveaxis(np.ascontiguousarray(np.moveaxis(w, 1, -1)), -1, 1)
        return w

    def _arguments(self, buffers: Buffers) -> Any:
        args = super()._arguments(buffers)
        w = buffers.w
        for place, step in zip(self._filter_steps, w.strides, strict=True):
            args[place] = step // w.itemsize
        return args


class ChunkPlan(KernelPlan):
    """Launches `task`, and a kernel `behind` it where rows or columns are cut into chunks.

    `alone`: that has so little to do that the first worker does it.
    """

    def __init__(
        self, problem: Problem, device: Device, library: Library, names: Sequence[str], fields: Mapping[str, int],
        behind: str, alone: bool, workspace_bytes: int,
    ) -> None:  # fmt: skip
        super().__init__(problem, device, library, names, fields)
        self.workspace_bytes = workspace_bytes
        if fields["chunks"] > 1:
            self.then(behind, 1 if alone else None)
