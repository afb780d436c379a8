"""A module's forward as a graph of torch.fx, where the graph says all that forward does, in training and elsewhere.

torch.fx takes for good whatever does not depend on its inputs, and leaves out what is no operation on them. A module is
refused where that would matter.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from tapwise.torch.convolution import DEVICES
from tapwise.torch.fusion import DROPOUTS

_PLAIN: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_HELD: Final = (list, set, dict)


class _Refused(RuntimeError):
    """Forward does what its graph would not."""


class _Nothing(TorchDispatchMode):
    """Nothing is computed meanwhile: it would be a constant of the graph, or a write that the graph lacks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Refused(f"{func} is computed without its inputs")


def _modes() -> tuple[Any, ...]:
    """What decides, beside its inputs, what an operation does and what autograd records of it."""
    autocast = tuple((torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in DEVICES)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, hooks


class _Tracer(fx.Tracer):
    # A buffer's values are no constants.
    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.modes = _modes()

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_node(self, *words: Any, **named: Any) -> fx.Node:
        if _modes() != self.modes:
            raise _Refused("under no_grad, autocast, a checkpoint, or in an autograd function")
        return super().create_node(*words, **named)


def _training(module: torch.nn.Module) -> bool:
    raise _Refused("forward reads `training`")


@contextmanager
def _watched(module: torch.nn.Module) -> Iterator[None]:
    """Whoever reads the module's `training` is refused."""
    kind: Any = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"training": property(_training), "__module__": kind.__module__})
    try:
        yield
    finally:
        module.__class__ = kind


@contextmanager
def _set(on: bool) -> Iterator[None]:
    """Gradients are recorded, and autocast is, or neither."""
    was = {one: torch.is_autocast_enabled(one) for one in DEVICES}
    try:
        for one in DEVICES:
            torch.set_autocast_enabled(one, on)
        with torch.set_grad_enabled(on):
            yield
    finally:
        for one, value in was.items():
            torch.set_autocast_enabled(one, value)


@contextmanager
def _unwritten(module: torch.nn.Module) -> Iterator[None]:
    """Attributes are as before; whoever writes one is refused."""
    before = dict(module.__dict__)
    held = {name: value.copy() for name, value in before.items() if type(value) in _HELD}
    try:
        yield
        after = module.__dict__
        alike = after.keys() == before.keys() and all(after[name] is value for name, value in before.items())
        if not alike or any(_items(before[name]) != _items(value) for name, value in held.items()):
            raise _Refused("forward writes attributes")
    finally:
        module.__dict__.clear()
        module.__dict__.update(before)
        for name, value in held.items():
            if _items(before[name]) != _items(value):
                before[name].clear()
                (before[name].extend if isinstance(value, list) else before[name].update)(value)


def _items(held: Any) -> list[tuple[int, ...]]:
    """Which things a list, set or dict has."""
    pairs = held.items() if isinstance(held, dict) else ((one,) for one in held)
    return [tuple(map(id, pair)) for pair in pairs]


@contextmanager
def _certain() -> Iterator[None]:
    """Whoever draws random numbers is refused."""
    was, numbers = random.getstate(), np.random.get_state()
    try:
        yield
        same = all(np.array_equal(one, other) for one, other in zip(np.random.get_state(), numbers, strict=True))
        if random.getstate() != was or not same:
            raise _Refused("forward draws random numbers")
    finally:
        random.setstate(was)
        np.random.set_state(numbers)


def graph_of(module: torch.nn.Module) -> fx.Graph | None:
    """Forward's graph, in which each of the modules that it calls is one node; None where a graph cannot say it.

    That is where torch.fx cannot trace it; where it reads `training` or buffers' values, draws random numbers, computes
    something without its inputs, or writes attributes; in which something is under no_grad, autocast or a checkpoint,
    or in an autograd function; and with arguments that may be left out. Attributes are taken as they are.
    """
    if not _is_plain(getattr(type(module), "forward", None)):
        return None
    parts = {one: one.training for one in module.modules()}
    graphs = []
    try:
        for mode in (True, False):
            for one in parts:
                one.__dict__["training"] = mode
            with _unwritten(module), _certain(), _watched(module), _set(mode), _Nothing():
                graphs.append(_Tracer().trace(module))
    except Exception:
        return None
    finally:
        for one, was in parts.items():
            one.__dict__["training"] = was
    first, second = (graph.python_code("self").src for graph in graphs)
    return graphs[0] if first == second and not any(_chances(node) for node in graphs[0].nodes) else None


def _is_plain(forward: Any) -> bool:
    """Whether all arguments of a function must be given."""
    if not inspect.isfunction(forward):
        return False
    words = list(inspect.signature(forward).parameters.values())[1:]
    return all(one.kind in _PLAIN and one.default is inspect.Parameter.empty for one in words)


def _chances(node: fx.Node) -> bool:
    """Whether a node is a function of dropout, whose flag tracing has taken for good."""
    return node.op == "call_function" and (node.target in DROPOUTS or "training" in node.kwargs)
