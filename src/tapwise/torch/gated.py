"""Squeeze-and-excitation of a model: the mean, two convolutions of one tap and the product with their gate in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tapwise.ops.squeeze_excitation.problem import BETWEEN, GATES, SqueezeExcitationProblem
from tapwise.torch import gates
from tapwise.torch.folded import Folded
from tapwise.torch.fused import FusedConv
from tapwise.torch.fusion import MULTIPLIED, only_user, replace_chain, written
from tapwise.torch.nn import is_taken
from tapwise.torch.pools import Mean, Pooled
from tapwise.torch.tensors import alone


class Gated(Folded):
    """y = x * expand(reduce(pool(x))).

    `by_torch`: the three layers and PyTorch's product compute, each layer by its own choice; so it is until it is
    measured.
    """

    def __init__(self, pool: Pooled, reduce: FusedConv, expand: FusedConv) -> None:
        super().__init__(reduce, expand)
        self.pool, self.reduce, self.expand, self.by_torch = pool, reduce, expand, True

    def _convolutions(self) -> tuple[Any, Any]:
        reduce, expand = self.__dict__["parts"]
        return reduce.__dict__["parts"][0], expand.__dict__["parts"][0]

    def originals(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(one for conv in self._convolutions() for one in (conv.weight, conv.bias))

    def folded(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Filters (2, m, c) and offsets (m + c,)."""
        reduce, expand = self._convolutions()
        weight = torch.stack([reduce.weight.detach().flatten(1), expand.weight.detach().flatten(1).T])
        offsets = [
            torch.zeros_like(conv.weight[:, 0, 0, 0]) if conv.bias is None else conv.bias.detach()
            for conv in (reduce, expand)
        ]
        return weight, torch.cat(offsets)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = not self.by_torch and x.ndim == 4 and is_taken(x, *self.originals())
        if not taken:
            return self.by_pytorch(x)
        self.follow()
        return self.by_tapwise(x)

    def by_pytorch(self, x: torch.Tensor) -> torch.Tensor:
        """Layer by layer."""
        y: torch.Tensor = self.expand(self.reduce(self.pool(x))) * x
        return y

    def by_tapwise(self, x: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        if alone(x) and gates.is_taken(x):
            return gates.gate_frozen(x, self.weight, self.bias, *self._words())
        weight, bias = self.weight.to(x.dtype), self.bias.flatten().to(x.dtype)
        y: torch.Tensor = torch.ops.tapwise.squeeze_excitation(x, weight, bias, *self._words())
        return y

    def _words(self) -> tuple[str, str]:
        reduce, expand = self.__dict__["parts"]
        return reduce.activation, expand.activation

    def problem(self, x: torch.Tensor) -> SqueezeExcitationProblem:
        """What a call computes."""
        return gates.problem_of(x, self.weight.shape[1], self._words())


def replace(traced: fx.GraphModule) -> None:
    """A Gated in the place of pooling, two fused convolutions and a product, in place."""
    named = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        chain = _chain(node, named)
        if not chain:
            continue
        pool, reduce, expand = (named[str(one.target)] for one in chain)
        operands = chain[0].args[0], chain[-1]
        if written(chain[0], node, operands, named):
            continue
        replace_chain(traced, chain[0], node, Gated(pool, reduce, expand), operands[:1], chain[-1])
        for one in chain:
            traced.delete_submodule(str(one.target))
    traced.graph.lint()
    traced.recompile()


def _chain(product: fx.Node, named: dict[str, torch.nn.Module]) -> list[fx.Node]:
    """Pooling and two convolutions whose result scales what they were worked out from; empty where it is another
    product."""
    factors = [one for one in product.args if isinstance(one, fx.Node)]
    if product.op == "call_module" or product.target not in MULTIPLIED or product.kwargs or len(factors) != 2:
        return []
    for expand, x in (factors, factors[::-1]):
        reduce = expand.args[0] if _is_gate(expand, named, GATES) else None
        pool = reduce.args[0] if isinstance(reduce, fx.Node) and _is_gate(reduce, named, BETWEEN) else None
        if isinstance(pool, fx.Node) and _is_mean(pool, named) and pool.args == (x,):
            assert isinstance(reduce, fx.Node)
            return [pool, reduce, expand]
    return []


def _is_gate(node: fx.Node, named: dict[str, torch.nn.Module], words: tuple[str, ...]) -> bool:
    """Whether a node is a convolution of one tap with one of these activations, and nobody else wants its result."""
    layer = named.get(str(node.target)) if node.op == "call_module" else None
    if not isinstance(layer, FusedConv) or layer.activation not in words or len(node.args) != 1:
        return False
    conv, bn = layer.__dict__["parts"]
    plain = conv.kernel_size == (1, 1) and conv.stride == (1, 1) and conv.groups == 1 and not any(layer.sides)
    return bn is None and plain and only_user(node) is not None


def _is_mean(node: fx.Node, named: dict[str, torch.nn.Module]) -> bool:
    """Whether a node is the mean of whole images, with axes of one pixel, for one user."""
    layer = named.get(str(node.target)) if node.op == "call_module" else None
    if not isinstance(layer, Pooled) or layer.ours is not None or only_user(node) is None:
        return False
    return not isinstance(layer.theirs, Mean) or layer.theirs.keepdim
