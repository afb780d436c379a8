"""Channel shuffles of a model, written out as views in between, in the memory order of what they shuffle."""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx

from tapwise.torch.fusion import written
from tapwise.torch.tensors import memory_format

VIEWS: Final = ("view", "reshape")
# What asks for sizes: erased where nobody needs them any more.
SIZES: Final = ("size", operator.getitem, operator.floordiv)


class Shuffle(torch.nn.Module):
    """Channel i * groups + j of the result is channel j * (c / groups) + i of x (n, c, h, w), which may come in parts,
    side by side in their channels: where each is a group, nobody puts them together first."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        first = parts[0]
        if len(parts) > 1 and len(parts) == self.groups and all(one.shape == first.shape for one in parts):
            if first.ndim != 4 or memory_format(first) is torch.contiguous_format:
                return torch.stack(parts, 2).flatten(1, 2)
            return torch.stack([one.permute(0, 2, 3, 1) for one in parts], 4).flatten(3).permute(0, 3, 1, 2)
        x = first if len(parts) == 1 else torch.cat(parts, 1)
        if x.ndim != 4 or memory_format(x) is torch.contiguous_format:
            return x.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)
        rows = x.permute(0, 2, 3, 1).unflatten(3, (self.groups, -1))
        return rows.transpose(3, 4).flatten(3).permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return str(self.groups)


def replace(traced: fx.GraphModule) -> None:
    """A Shuffle in the place of view, transpose, contiguous and view, in place."""
    graph, made = traced.graph, []
    for node in list(graph.nodes):
        chain, groups = _chain(node)
        # What comes next may rely on contiguous memory.
        if not chain or any(user.op == "call_method" and user.target == "view" for user in node.users):
            continue
        name = f"shuffle_{node.name}"
        while hasattr(traced, name):
            name += "_"
        traced.add_module(name, Shuffle(groups))
        with graph.inserting_before(node):
            shuffled = graph.call_module(name, (chain[-1].args[0],))
        node.replace_all_uses_with(shuffled)
        made.append(shuffled)
        for one in chain:
            graph.erase_node(one)
    for node in reversed(list(graph.nodes)):
        if node.target in SIZES and node.op != "call_module" and not node.users:
            graph.erase_node(node)
    _take_parts(traced, made)
    graph.lint()
    traced.recompile()


def _take_parts(traced: fx.GraphModule, made: list[fx.Node]) -> None:
    """Shuffles of a concatenation of channels that nobody else reads are given its parts."""
    named = dict(traced.named_modules())
    for shuffled in made:
        whole: Any = shuffled.args[0]
        if whole.op != "call_function" or whole.target not in (torch.cat, torch.concat) or len(whole.users) != 1:
            continue
        tensors, *rest = whole.args or [()]
        dim = rest[0] if rest else whole.kwargs.get("dim", 0)
        plain = isinstance(tensors, (tuple, list)) and set(whole.kwargs) <= {"dim"} and dim == 1
        if plain and not written(whole, shuffled, tuple(tensors), named):
            shuffled.args = tuple(tensors)
            traced.graph.erase_node(whole)


def _chain(node: fx.Node) -> tuple[list[fx.Node], int]:
    """(the nodes of a shuffle that ends here, the last first; its groups): none where it is something else."""
    nothing: tuple[list[fx.Node], int] = [], 0
    chain, sizes = [node], _sizes(node)
    before: Any = node.args[0] if node.args else None
    if _is_method(before, "contiguous") and len(before.args) == 1 and not before.kwargs:
        chain.append(before)
        before = before.args[0]
    swapped = isinstance(before, fx.Node) and before.target in ("transpose", torch.transpose) and not before.kwargs
    if len(sizes) != 4 or not swapped or before.op == "call_module" or before.args[1:] not in ((1, 2), (2, 1)):
        return nothing
    split = before.args[0]
    parts = _sizes(split)
    alone = all(len(one.users) == 1 for one in (*chain[1:], before, split))
    if not alone or len(parts) != 5 or not isinstance(parts[1], int):
        return nothing
    x, groups = split.args[0], parts[1]
    each = parts[2]
    divided = (
        isinstance(each, fx.Node) and each.target is operator.floordiv and each.args[1] == groups
        and _is_size(each.args[0], x, 1)
    )  # fmt: skip
    same = all(_is_size(sizes[axis], x, axis) and _is_size(parts[axis + (axis > 0)], x, axis) for axis in (0, 2, 3))
    if not same or not (divided or each == -1) or not (sizes[1] == -1 or _is_size(sizes[1], x, 1)):
        return nothing
    return [*chain, before, split], groups


def _is_method(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == name


def _sizes(node: Any) -> tuple[Any, ...]:
    """The sizes that a view is of; empty for another node."""
    if not any(_is_method(node, name) for name in VIEWS) or node.kwargs:
        return ()
    given = node.args[1:]
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def _is_size(value: Any, x: Any, axis: int) -> bool:
    """Whether a node is x.size(axis), in any of its forms."""
    if _is_method(value, "size"):
        return bool(value.args == (x, axis))
    if not isinstance(value, fx.Node) or value.target is not operator.getitem or value.args[1] != axis:
        return False
    sizes: Any = value.args[0]
    shape = isinstance(sizes, fx.Node) and sizes.target is getattr and sizes.args == (x, "shape")
    return shape or (_is_method(sizes, "size") and sizes.args == (x,))
