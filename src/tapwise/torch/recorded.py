"""What a CUDA graph is on a GPU, on a CPU: the operators of one call, with the memory of their results, to run again.

Python and PyTorch's dispatcher take 50 us a layer in a model; a prepared operator on memory that stays takes 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from functools import partial
from itertools import groupby
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tapwise.algorithm import Steady
from tapwise.cpu import driver
from tapwise.cpu.pieces import Pieces
from tapwise.cpu.plan import KernelPlan
from tapwise.cpu.row_norms import RowNorms
from tapwise.torch import frozen, gates, pools
from tapwise.torch.events import COPIES, Event, kernel, memory_of, normed

# Results whose shape or value the next call may not have.
UNSTEADY: Final = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

# Our operators on memory that stays: what runs their kernels alone, of those with filters and of others.
STEADY: Final[dict[str, Callable[..., Steady | None]]] = {
    "tapwise.conv_frozen.default": frozen.steady,
    "tapwise.squeeze_excitation.default": gates.steady,
}
POOLS: Final[dict[str, Callable[..., Steady | None]]] = {
    "tapwise.max_pool2d.default": pools.steady_max,
    "tapwise.avg_pool2d.default": pools.steady_avg,
    "tapwise.global_avg_pool2d.default": pools.steady_mean,
}
# What gives memory whose elements are anything.
EMPTY: Final = (
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)  # fmt: skip
# Where results begin in the memory that they share: whole lines of a cache.
LINE: Final = 64


class Recorded:
    """One call of a function; `replay` overwrites its results."""

    def __init__(self, steps: list[Callable[[], Any]]) -> None:
        self._steps = steps

    @torch.no_grad()
    def replay(self) -> None:
        for step in self._steps:
            step()


def record(function: Callable[[], Any]) -> tuple[Recorded, Any]:
    """(a call of a function, its result, to be replayed first). The function works on the same tensors each time, and
    all that it does to their elements it does by PyTorch's operators.

    Raises what the function raises, and RuntimeError where what it does depends on elements.
    """
    with torch.inference_mode(False), torch.no_grad():
        function()
        with _Recorder() as recorder:
            result = function()
        # A tensor of its own: its memory is to be another.
        result = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        outputs = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        events = normed(recorder.events, outputs)
        moved = _share(events, outputs)
        steps = [
            _step(event, moved) for event in events if getattr(event.function, "overloadpacket", None) not in EMPTY
        ]
        return Recorded(_joined(steps)), result


class Joined:
    """Kernels that follow each other, with one start of the threads for all: of KernelPlans, copied pieces, normed
    rows."""

    def __init__(self, steps: list[Any]) -> None:
        # They have the arrays that the kernels read and write.
        self.steps = steps
        self._call = driver.sequence([launch for step in steps for launch in _launches(step)])

    def __call__(self) -> None:
        self._call()


def _launches(step: Any) -> list[driver.Launch]:
    return step.launches() if isinstance(step, Pieces | RowNorms) else step.plan.launches(step.buffers)


def _is_kernel(step: Any) -> bool:
    return isinstance(step, Pieces | RowNorms) or (isinstance(step, Steady) and isinstance(step.plan, KernelPlan))


def _joined(steps: list[Any]) -> list[Callable[[], Any]]:
    joined: list[Callable[[], Any]] = []
    for kernels, some in groupby(steps, _is_kernel):
        group: list[Any] = list(some)
        joined += [Joined(group)] if kernels else group
    return joined


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if UNSTEADY.intersection(function.tags):
            raise RuntimeError(f"{function}: what it gives depends on elements, which cannot be recorded")
        result = function(*args, **kwargs)
        results = pytree.tree_leaves(result)
        if not all(one is None or isinstance(one, torch.Tensor) for one in results):
            raise RuntimeError(f"{function}: a result is no tensor, which cannot be recorded")
        given = {memory_of(one) for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        fresh = [one is not None and memory_of(one) not in given for one in results]
        # Views see what is written to the memory that they share. What changes a tensor's shape in place does not do so
        # again, and events have tensors of their own, which keep their shapes.
        if any(fresh) or (function._schema.is_mutable and torch.Tag.inplace_view not in function.tags):
            words, named, own = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, results))
            self.events.append(Event(args, function, words, named, own, fresh))
        return result


def _share(events: list[Event], outputs: list[torch.Tensor]) -> Container[int]:
    """One memory for all results: what nobody reads any more is written again soon, while caches have it. Returns the
    memories that they had."""
    begins: dict[int, int] = {}
    ends: dict[int, float] = {}
    sizes: dict[int, int] = {}
    for number, event in enumerate(events):
        for one, own in zip(event.results, event.fresh, strict=True):
            if own and one is not None and one.untyped_storage().nbytes():
                begins.setdefault(memory_of(one), number)
        for one in event.tensors():
            if (memory := memory_of(one)) in begins:
                ends[memory], sizes[memory] = number, one.untyped_storage().nbytes()
    ends |= {memory: math.inf for memory in map(memory_of, outputs) if memory in begins}
    places: dict[int, int] = {}
    for memory, begin in begins.items():
        taken = sorted((places[one], places[one] + sizes[one]) for one in places if ends[one] >= begin)
        place = 0
        for first, end in taken:
            if place + sizes[memory] <= first:
                break
            place = max(place, -(-end // LINE) * LINE)
        places[memory] = place
    whole = torch.empty(max((places[one] + sizes[one] for one in places), default=0), dtype=torch.uint8)
    everything = [*outputs, *(one for event in events for one in event.tensors())]
    for one in {id(one): one for one in everything}.values():
        if (memory := memory_of(one)) in places:
            at = places[memory] // one.itemsize + one.storage_offset()
            one.set_(whole.untyped_storage(), at, one.shape, one.stride())
    return places


def _step(event: Event, moved: Container[int]) -> Any:
    """What computes an event again: a call, or pieces to be joined."""
    if (copied := kernel(event)) is not None:
        return copied
    steady = STEADY.get(str(event.function))
    if steady is not None and not event.kwargs:
        # What is kept is kept by the filters and offsets themselves.
        x, fixed = event.args[0], event.given[1:3]
        if all(one is None or memory_of(one) not in moved for one in fixed):
            step = steady(event.results[0], x, *fixed, *event.args[3:])
            if step is not None:
                return step
    function, args, kwargs, results, fresh = event[1:]
    if (pooled := POOLS.get(str(function))) is not None and not kwargs:
        step = pooled(results[0], *args)
        if step is not None:
            return step
    if function in COPIES:
        return partial(results[0].copy_, args[0])
    if all(fresh) and (into := _into(function, results)) is not None:
        return partial(into, *args, **kwargs)
    return partial(_again, function, args, kwargs, results, fresh)


def _into(function: Any, results: list[Any]) -> Callable[..., Any] | None:
    """The operator that writes its results straight to where they are, if PyTorch has code for that."""
    wanted = [(one.name, str(one.type)) for one in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        given = [(one.name, str(one.type)) for one in other._schema.arguments if not one.is_out]
        places = [one.name for one in other._schema.arguments if one.is_out]
        if given == wanted and len(places) == len(results) and torch.Tag.generated not in other.tags:
            return partial(other, **dict(zip(places, results, strict=True)))
    return None


def _again(function: Any, args: Any, kwargs: Any, results: list[torch.Tensor], fresh: list[bool]) -> None:
    for kept, new, own in zip(results, pytree.tree_leaves(function(*args, **kwargs)), fresh, strict=True):
        if own:
            kept.copy_(new)
