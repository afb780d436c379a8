"""CUDA graphs of a function on tensors, on a CPU recordings: one for each kind of inputs, made at the first call of its
kind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tapwise.torch.recorded import record
from tapwise.torch.tensors import alone

PLAIN: Final = (int, float, bool, str, type(None))
# Calls before a capture: kernels are compiled, filters packed, memory is found.
WARM: Final = 3


def capture(function: Callable[[], Any], calls: int = 1) -> tuple[Any, Any]:
    """(a CUDA graph of `calls` of a function, the result of the last): each replay overwrites the result.

    Raises what the function raises, and RuntimeError where it cannot be captured.
    """
    here, side, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(here)
    result: Any = None
    # Around the capture too: one that fails leaves its stream as the current one.
    with torch.cuda.stream(side):
        for _ in range(WARM):
            function()
        try:
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                for _ in range(calls):
                    result = function()
        except Exception:
            _leave_capturing()
            raise
    here.wait_stream(side)
    return graph, result


def _leave_capturing() -> None:
    """After a capture that failed PyTorch's generator believes itself captured, and refuses, until one succeeds."""
    with suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        torch.zeros(1, device="cuda")


class _Captured(NamedTuple):
    graph: Any
    inputs: list[torch.Tensor]
    outputs: Any


class Graphs:
    """Calls of `function`, from graphs where its inputs lie on one GPU and no gradient is recorded; from recordings
    where all lie on a CPU, and `steady` says that the function works by PyTorch's operators alone.

    At most `kept` graphs, those that were used last; each has memory of its own, and results are copies. `version`:
    what a graph's values depend on besides its inputs; a graph of another version is captured again. What cannot be
    captured is called, and `refused` says why. Safe for many threads and streams.
    """

    def __init__(
        self, function: Callable[..., Any], version: Callable[[], Any], kept: int, steady: bool = False
    ) -> None:
        self._function, self._version, self._kept, self._steady = function, version, kept, steady
        self._graphs: OrderedDict[Any, tuple[Any, _Captured | None]] = OrderedDict()
        self._lock = Lock()
        self.refused = ""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        # A tree walk takes 0.1 ms behind a model, which leaves nothing of it in the caches.
        plain = not named and all(type(one) is torch.Tensor for one in inputs)
        leaves, form = ([*inputs], None) if plain else pytree.tree_flatten((inputs, named))
        tensors = leaves if plain else [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [] if plain else [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        # What else there is must be told apart by its repr.
        if not self._suited(tensors) or not all(type(leaf) in PLAIN for leaf in others):
            return self._function(*inputs, **named)
        key = self.key(leaves, form)
        with self._lock:
            version = self._version()
            kept = self._graphs.get(key)
            if kept is None or kept[0] != version:
                kept = version, self._capture(leaves, form)
                self._graphs[key] = kept
                while len(self._graphs) > self._kept:
                    self._graphs.popitem(last=False)
            self._graphs.move_to_end(key)
            captured = kept[1]
            if captured is not None:
                for static, given in zip(captured.inputs, tensors, strict=True):
                    static.copy_(given)
                captured.graph.replay()
                if type(captured.outputs) is torch.Tensor:
                    return captured.outputs.clone()
                return pytree.tree_map_only(torch.Tensor, torch.clone, captured.outputs)
        return self._function(*inputs, **named)

    def forget(self) -> None:
        with self._lock:
            self._graphs.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphs, (self._function, self._version, self._kept, self._steady)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        from copy import deepcopy

        return Graphs(deepcopy(self._function, memo), deepcopy(self._version, memo), self._kept, self._steady)

    def _suited(self, tensors: list[torch.Tensor]) -> bool:
        if self._steady and tensors and tensors[0].is_cpu:
            if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
                return False
            with torch.no_grad():
                return all(map(alone, tensors))
        return (
            bool(tensors)
            and all(one.is_cuda and one.device == tensors[0].device for one in tensors)
            and not torch.compiler.is_compiling()
            and not torch.cuda.is_current_stream_capturing()
            and not (torch.is_grad_enabled() and any(one.requires_grad for one in tensors))
            and not torch.is_autocast_enabled("cuda")
        )

    @staticmethod
    def key(leaves: list[Any], form: Any) -> Any:
        """What a graph is for: its tensors' kinds, all other values, and the stream."""
        kinds = tuple(
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in leaves
        )
        on_gpu = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else 0
        return kinds, form, stream

    def _capture(self, leaves: list[Any], form: Any) -> _Captured | None:
        # Ordinary tensors in inference mode too: they are written to.
        with torch.inference_mode(False), torch.no_grad():
            static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        inputs, named = (static, {}) if form is None else pytree.tree_unflatten(static, form)
        on_cpu = any(isinstance(leaf, torch.Tensor) and leaf.is_cpu for leaf in leaves)
        try:
            graph, outputs = (record if on_cpu else capture)(lambda: self._function(*inputs, **named))
        except Exception as error:
            self.refused = f"{type(error).__name__}: {error}".splitlines()[0]
            return None
        return _Captured(graph, [leaf for leaf in static if isinstance(leaf, torch.Tensor)], outputs)
