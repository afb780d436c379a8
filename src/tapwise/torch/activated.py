"""Activations behind batch normalisation, given to it in a model that is trained: they cost nothing in its kernels.

In torch.nn.Sequential the activation's module makes way. Of other modules, such as ResNet's blocks, forward becomes the
code that torch.fx traces, without those activations; the module stays of its own class.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from torch import fx

from tapwise.torch.fusion import activation_of, hooked, only_user
from tapwise.torch.norms import TrainedBatchNorm2d
from tapwise.torch.traces import graph_of

_CODE: Final = "_tapwise_forward"
_SEQUENCE: Final = torch.nn.Sequential.forward
# How a module is copied and pickled: a changed one does it in its own way.
_COPIED: Final = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")


class _Change(NamedTuple):
    """So many activations given to norms, and what takes them back."""

    given: int
    undo: Callable[[], None]


def absorb(model: torch.nn.Module, inputs: tuple[Any, ...] | None) -> int:
    """How many TrainedBatchNorm2d took the activation behind them.

    With inputs the model must give the same bits on them as before, in evaluation, or what was changed is undone.
    Without, only Sequentials change that are called as a whole, as far as torch.fx can see.
    """
    places = Counter(id(one) for _, one in model.named_modules(remove_duplicate=False))
    alone = {number for number, count in places.items() if count == 1}
    if inputs is None:
        return sum(change.given for change in _in_sequences(model, alone, _called(model)))
    wanted, count = _evaluated(model, inputs), 0
    for changed in (partial(_in_sequences, called=None), _in_forwards):
        changes = changed(model, alone)
        if changes and not _gives(model, inputs, wanted):
            for change in changes:
                change.undo()
        else:
            count += sum(change.given for change in changes)
    return count


class _Called(NamedTuple):
    """Ids of modules that are called, and of those among them that code calls, not a Sequential that holds them."""

    anyhow: set[int]
    by_code: set[int]


def _called(model: torch.nn.Module) -> _Called:
    """What torch.fx sees: modules that only others call are not among them."""
    found = _Called({id(model)}, set())
    for module in model.modules():
        if _is_sequence(module):
            if id(module) in found.anyhow:
                found.anyhow.update(map(id, module.children()))
        elif module._modules and (graph := graph_of(module)) is not None:
            named = dict(module.named_modules())
            calls = {id(named[str(node.target)]) for node in graph.nodes if node.op == "call_module"}
            found.anyhow.update(calls)
            found.by_code.update(calls)
    return found


def _is_sequence(module: torch.nn.Module) -> bool:
    return getattr(type(module), "forward", None) is _SEQUENCE and "forward" not in module.__dict__


def _looked_at(module: torch.nn.Module) -> bool:
    """Whether somebody is to learn of each call or gradient, or has put a forward of theirs in its place."""
    backward = module._backward_hooks or module._backward_pre_hooks
    return hooked(module) or bool(backward) or "forward" in module.__dict__


def _in_sequences(model: torch.nn.Module, alone: set[int], called: _Called | None) -> list[_Change]:
    """`called`: of Sequentials that are among them."""
    changes = []
    for sequence in filter(_is_sequence, list(model.modules())):
        if called is not None and id(sequence) not in called.anyhow:
            continue
        for first, second in pairwise(list(sequence._modules)):
            norm, behind = sequence._modules[first], sequence._modules[second]
            if type(norm) is not TrainedBatchNorm2d or behind is None or not _is_free(norm, alone):
                continue
            call: Any = SimpleNamespace(op="call_module", target=second)
            word = None if _looked_at(behind) else activation_of(call, {second: behind})
            if word is None or (called is not None and {id(norm), id(behind)} & called.by_code):
                continue
            norm.activation = word
            sequence._modules[second] = torch.nn.Identity().train(behind.training)
            changes.append(_Change(1, partial(_put_back, sequence, norm, second, behind)))
    return changes


def _put_back(
    sequence: torch.nn.Module, norm: TrainedBatchNorm2d, second: str, behind: torch.nn.Module
) -> None:  # fmt: skip
    norm.activation = None
    sequence._modules[second] = behind


def _is_free(norm: TrainedBatchNorm2d, alone: set[int]) -> bool:
    """Whether a norm may take an activation."""
    return norm.activation is None and id(norm) in alone and not _looked_at(norm)


def _in_forwards(model: torch.nn.Module, alone: set[int]) -> list[_Change]:
    changes = []
    for module in list(model.modules()):
        if not _has_norm(module, alone) or (graph := graph_of(module)) is None:
            continue
        words = _words(module, graph, alone)
        if words:
            kind = type(module)
            for name, word in words.items():
                module.get_submodule(name).activation = word
            _rewrite(module, graph, frozenset(words))
            changes.append(_Change(len(words), partial(_undo, module, kind, tuple(words))))
    return changes


def _has_norm(module: torch.nn.Module, alone: set[int]) -> bool:
    """Whether a module's forward may be changed, and a norm of its own may take an activation."""
    kind = type(module)
    own = getattr(kind, "forward", _SEQUENCE) is not _SEQUENCE and not {_CODE, "forward"} & module.__dict__.keys()
    plain = all(getattr(kind, name, None) is getattr(torch.nn.Module, name, None) for name in _COPIED)
    return own and plain and any(
        type(one) is TrainedBatchNorm2d and _is_free(one, alone) for one in module.children()
    )  # fmt: skip


def _words(module: torch.nn.Module, graph: fx.Graph, alone: set[int]) -> dict[str, str]:
    """The activations that a module's norms may take, by the norms' names."""
    named = dict(module.named_children())
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    words: dict[str, str] = {}
    for node, follower, norm in _pairs(graph, named):
        behind = named.get(str(follower.target)) if follower.op == "call_module" else None
        word = None if behind is not None and _looked_at(behind) else activation_of(follower, named)
        if word is not None and calls[str(node.target)] == 1 and _is_free(norm, alone):
            words[str(node.target)] = word
    return words


def _pairs(graph: fx.Graph, named: dict[str, torch.nn.Module]) -> Iterator[tuple[fx.Node, fx.Node, TrainedBatchNorm2d]]:
    """Calls of norms, and what alone reads their results."""
    for node in graph.nodes:
        norm = named.get(str(node.target)) if node.op == "call_module" else None
        if type(norm) is TrainedBatchNorm2d and (follower := only_user(node)) is not None:
            yield node, follower, norm


def _function(module: torch.nn.Module, graph: fx.Graph, taken: frozenset[str]) -> Any:
    """forward(self, ...) of a graph without the activations behind norms of these names, which it has as `taken`."""
    for node, follower, _ in list(_pairs(graph, dict(module.named_children()))):
        if str(node.target) in taken:
            follower.replace_all_uses_with(node)
            graph.erase_node(follower)
    graph.lint()
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, f"<forward of {type(module).__name__}>", "exec"), scope)
    made = scope["forward"]
    made.taken = taken
    return made


class _Activated:
    """Before a module's own class: forward is code that torch.fx traced; it is traced again where it is loaded."""

    # Of each module by itself: its code, a function of self.
    _tapwise_forward: Any

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._tapwise_forward(self, *inputs, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = self.__class__.__new__(self.__class__)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        return _blank, (_own_kind(self), state.pop(_CODE).taken), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        module: Any = self
        # So far what `_blank` left there.
        kind, taken = type(module), self.__dict__.pop(_CODE)
        module.__class__ = _own_kind(self)
        graph = graph_of(module)
        if graph is None:
            raise RuntimeError(f"{kind.__name__}.forward is not what it was when activations were given to its norms")
        module.__dict__[_CODE] = _function(module, graph, taken)
        module.__class__ = kind


def _own_kind(module: Any) -> Any:
    kinds = type(module).__mro__
    return kinds[kinds.index(_Activated) + 1]


@cache
def _kind(base: Any) -> Any:
    return type(base.__name__, (_Activated, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


def _blank(base: Any, taken: frozenset[str]) -> Any:
    """A changed module without its state."""
    kind = _kind(base)
    made = kind.__new__(kind)
    made.__dict__[_CODE] = taken
    return made


def _rewrite(module: torch.nn.Module, graph: fx.Graph, taken: frozenset[str]) -> None:
    module.__dict__[_CODE] = _function(module, graph, taken)
    kind: Any = type(module)
    module.__class__ = _kind(kind)


def _undo(module: torch.nn.Module, kind: type[torch.nn.Module], names: tuple[str, ...]) -> None:
    module.__class__ = kind
    del module.__dict__[_CODE]
    for name in names:
        module.get_submodule(name).activation = None


def _evaluated(model: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    """What it gives in evaluation: statistics of normalisation stay as they are."""
    modes = {one: one.training for one in model.modules()}
    try:
        with torch.no_grad():
            return model.eval()(*inputs)
    finally:
        for one, mode in modes.items():
            one.training = mode


def _gives(model: torch.nn.Module, inputs: tuple[Any, ...], wanted: Any) -> bool:
    """Whether it still gives that."""
    try:
        return _same(wanted, _evaluated(model, inputs))
    except Exception:
        return False


def _same(wanted: Any, found: Any) -> bool:
    (first, one_tree), (second, other_tree) = (torch.utils._pytree.tree_flatten(one) for one in (wanted, found))
    if one_tree != other_tree:
        return False
    for one, other in zip(first, second, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            # NaN is as good as NaN.
            if one.shape != other.shape or not ((one == other) | (one.isnan() & other.isnan())).all():
                return False
        elif one is not other and one != other:
            return False
    return True
