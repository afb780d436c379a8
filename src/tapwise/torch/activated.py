"""Activations behind batch normalisation, given to it in a model that is trained: they cost nothing in its kernels.

In torch.nn.Sequential the activation's module makes way. Of other modules, such as ResNet's blocks, forward becomes the
code that torch.fx traces, without those activations; the module stays of its own class.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import fx

from tapwise.torch.fusion import DROPOUTS, activation_of, hooked, only_user
from tapwise.torch.norms import TrainedBatchNorm2d

_CODE: Final = "_tapwise_forward"
_SEQUENCE: Final = torch.nn.Sequential.forward


def absorb(model: torch.nn.Module, inputs: tuple[Any, ...] | None) -> int:
    """How many TrainedBatchNorm2d took the activation behind them. Forward of other modules than Sequential is changed
    only where there are inputs, on which the model must give the same bits as before, in evaluation."""
    places = Counter(id(one) for _, one in model.named_modules(remove_duplicate=False))
    alone = {number for number, count in places.items() if count == 1}
    count = sum(_in_sequence(one, alone) for one in model.modules() if type(one).forward is _SEQUENCE)
    if inputs is None:
        return count
    wanted, changed = _evaluated(model, inputs), []
    for module in list(model.modules()):
        if _has_norm(module, alone) and (found := _traced(module, alone)) is not None:
            changed.append((module, type(module), found))
            _change(module, found)
    if changed and not _same(wanted, _evaluated(model, inputs)):
        for module, kind, found in changed:
            _undo(module, kind, found)
        return count
    return count + sum(len(found.words) for _, _, found in changed)


def _in_sequence(sequence: torch.nn.Module, alone: set[int]) -> int:
    """Of a Sequential, in place."""
    names, count = list(sequence._modules), 0
    for first, second in pairwise(names):
        norm, behind = sequence._modules[first], sequence._modules[second]
        if type(norm) is not TrainedBatchNorm2d or behind is None or id(norm) not in alone:
            continue
        call: Any = SimpleNamespace(op="call_module", target=second)
        word = None if hooked(norm) else activation_of(call, {second: behind})
        if word is not None and norm.activation is None:
            norm.activation = word
            sequence._modules[second] = torch.nn.Identity()
            count += 1
    return count


def _has_norm(module: torch.nn.Module, alone: set[int]) -> bool:
    own = type(module).forward not in (_SEQUENCE, torch.nn.Module.forward) and _CODE not in module.__dict__
    return own and any(
        type(one) is TrainedBatchNorm2d and one.activation is None and id(one) in alone for one in module.children()
    )


class _Found:
    """A module's forward as a graph, and the activations that its norms may take, by the norms' names."""

    def __init__(self, graph: fx.Graph, words: dict[str, str]) -> None:
        self.graph, self.words = graph, words


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True


def _graph(module: torch.nn.Module) -> fx.Graph | None:
    """What torch.fx makes of forward, where it is the same in training and in evaluation."""
    was, graphs = module.training, []
    try:
        for mode in (True, False):
            module.training = mode
            graphs.append(_Tracer().trace(module))
    except Exception:
        return None
    finally:
        module.training = was
    first, second = (graph.python_code("self").src for graph in graphs)
    plain = first == second and not any(_chances(node) for node in graphs[0].nodes)
    return graphs[0] if plain else None


def _chances(node: fx.Node) -> bool:
    """Whether a node is a function of dropout, whose flag tracing has taken for good."""
    return node.op == "call_function" and (node.target in DROPOUTS or "training" in node.kwargs)


def _traced(module: torch.nn.Module, alone: set[int]) -> _Found | None:
    graph = _graph(module)
    if graph is None:
        return None
    named = dict(module.named_children())
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    words: dict[str, str] = {}
    for node, follower, norm in _pairs(graph, named):
        word = activation_of(follower, named)
        if word is not None and id(norm) in alone and calls[str(node.target)] == 1 and norm.activation is None:
            words[str(node.target)] = word
    return _Found(graph, words) if words else None


def _pairs(graph: fx.Graph, named: dict[str, torch.nn.Module]) -> Iterator[tuple[fx.Node, fx.Node, TrainedBatchNorm2d]]:
    """Calls of norms, and what alone reads their results."""
    for node in graph.nodes:
        norm = named.get(str(node.target)) if node.op == "call_module" else None
        if type(norm) is TrainedBatchNorm2d and not hooked(norm) and (follower := only_user(node)) is not None:
            yield node, follower, norm


def _function(module: torch.nn.Module, graph: fx.Graph, taken: set[str]) -> Callable[..., Any]:
    """forward(self, ...) of a graph without the activations behind norms of these names."""
    for node, follower, _ in list(_pairs(graph, dict(module.named_children()))):
        if str(node.target) in taken:
            follower.replace_all_uses_with(node)
            graph.erase_node(follower)
    graph.lint()
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, f"<forward of {type(module).__name__}>", "exec"), scope)
    made: Callable[..., Any] = scope["forward"]
    return made


class _Activated:
    """Before a module's own class: forward is code that torch.fx traced; it is traced again for each copy."""

    # Of each module by itself: its code, a function of self.
    _tapwise_forward: Any

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._tapwise_forward(self, *inputs, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        base: Any = type(self).__bases__[1]
        state = {name: value for name, value in self.__dict__.items() if name != _CODE}
        return _restored, (base, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made, (base, state) = self.__reduce__()
        found = base.__new__(base)
        memo[id(self)] = found
        return made(base, copy.deepcopy(state, memo), found)


@cache
def _kind(base: Any) -> Any:
    return type(base.__name__, (_Activated, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


def _change(module: torch.nn.Module, found: _Found) -> None:
    for name, word in found.words.items():
        module.get_submodule(name).activation = word
    _rewrite(module, copy.deepcopy(found.graph), set(found.words))


def _rewrite(module: torch.nn.Module, graph: fx.Graph, taken: set[str]) -> None:
    module.__dict__[_CODE] = _function(module, graph, taken)
    kind: Any = type(module)
    module.__class__ = _kind(kind)


def _undo(module: torch.nn.Module, kind: type[torch.nn.Module], found: _Found) -> None:
    module.__class__ = kind
    del module.__dict__[_CODE]
    for name in found.words:
        module.get_submodule(name).activation = None


def _restored(base: Any, state: dict[str, Any], into: Any = None) -> Any:
    """A copy: the module's own forward traced again, without what its norms have."""
    module = base.__new__(base) if into is None else into
    module.__dict__.update(state)
    graph = _graph(module)
    assert graph is not None
    taken = {
        name for name, one in module.named_children() if type(one) is TrainedBatchNorm2d and one.activation is not None
    }
    _rewrite(module, graph, taken)
    return module


def _evaluated(model: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    """What it gives in evaluation: statistics of normalisation stay as they are."""
    modes = {one: one.training for one in model.modules()}
    try:
        with torch.no_grad():
            return model.eval()(*inputs)
    finally:
        for one, mode in modes.items():
            one.training = mode


def _same(wanted: Any, found: Any) -> bool:
    first, second = (torch.utils._pytree.tree_leaves(one) for one in (wanted, found))
    if len(first) != len(second):
        return False
    for one, other in zip(first, second, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            # NaN is as good as NaN.
            if one.shape != other.shape or not ((one == other) | (one.isnan() & other.isnan())).all():
                return False
        elif one is not other and one != other:
            return False
    return True
