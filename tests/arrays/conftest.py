"""Calls on a GPU, without one: tensors of the host stand in, and a function for the driver's launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
from host_launches import Driver, Launched

import emulated
from tapwise import dispatch
from tapwise.arrays import device, replay
from tapwise.arrays.replay import Replays
from tapwise.cuda import copy
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit import device as gpus
from tapwise.cuda.jit import launch as launches
from tapwise.cuda.jit import occupancy
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv import api as conv
from tapwise.ops.conv import gradients, prepared
from tapwise.ops.conv.cuda import pack
from tapwise.ops.patches import api as patches
from tapwise.ops.pool import api as pool
from tapwise.ops.pool import gradients as pool_gradients
from tapwise.ops.reduce import api as reduce
from tapwise.ops.softmax import api as softmax
from tapwise.ops.softmax import gradients as softmax_gradients


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    import torch

    made = Driver()
    monkeypatch.setattr(launches, "_entry", lambda: made.launch)
    monkeypatch.setattr(launches, "_kernel", lambda *_: SimpleNamespace(function=77))
    # Nothing is loaded, so plans need not compile what they will load.
    monkeypatch.setattr(compiler, "cubin", lambda *_: b"")
    monkeypatch.setattr(launches, "count", lambda: 1)
    # No multiprocessor has room for more blocks than it has to have, so none are balanced.
    monkeypatch.setattr(launches, "gpu", lambda index: H200)
    monkeypatch.setattr(launches, "on_gpu", lambda index: nullcontext())
    monkeypatch.setattr(occupancy, "held", lambda *_: 1)
    monkeypatch.setattr(device, "_torch_words", lambda dtype, index: (getattr(torch, dtype.name), "cpu"))
    monkeypatch.setattr(replay, "FIRST_GPU", -1)
    monkeypatch.setattr(replay, "torch_stream", lambda: lambda index: 9)
    allocate: Callable[..., Any] = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
    monkeypatch.setattr(replay, "allocator", lambda torch, index: allocate)
    return made


@pytest.fixture
def launched(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Launches of operators that take the host's tensors for a GPU's."""
    import torch

    seen = Launched()
    places: dict[int, tuple[Any, Any]] = {}
    lock = Lock()
    arguments, of_torch = launches.Launch.arguments, device._of_torch

    def noted(self: launches.Launch, values: Any = None) -> launches.Arguments:
        made = arguments(self, values)
        places[ctypes.addressof(made[0])] = self, made[0]
        return made

    def launch(config: Any, *_: Any) -> int:
        one, words = places[config.value]
        if seen.computed:
            with lock:
                emulated.run_words(one, words[launches.FIRST :][: len(one.words)])
        own = {launches._Head.attributes.offset // 8, launches._Head.parameters.offset // 8}
        seen.append((one.source, [word for place, word in enumerate(words) if place not in own]))
        return 0

    monkeypatch.setattr(launches.Launch, "arguments", noted)
    monkeypatch.setattr(driver, "launch", launch)
    monkeypatch.setattr(launches, "template", lambda spec: tuple(range(16)))
    monkeypatch.setattr(device, "is_device", lambda value: isinstance(value, torch.Tensor))
    monkeypatch.setattr(device, "_of_torch", lambda *given: replace(of_torch(*given), index=0))
    monkeypatch.setattr(device, "torch_stream", lambda: lambda index: 9)
    monkeypatch.setattr(prepared, "synchronize", lambda array: array)
    for module in (gpus, copy):
        monkeypatch.setattr(module, "gpu", lambda index=0: H200)

    def forget() -> None:
        made = softmax._softmax_of, softmax_gradients._backward_of, reduce.reduction
        for kept in (copy.launch, pack._filters, dispatch._plan, *made):
            kept.cache_clear()
        for module in (conv, gradients, patches, pool, pool_gradients, reduce, softmax, softmax_gradients):
            for one in vars(module).values():
                if isinstance(one, Replays):
                    one._young, one._old = {}, {}

    forget()
    yield seen
    forget()
