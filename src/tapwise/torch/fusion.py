"""Which nodes of a traced model become one convolution: padding before it, batch norm, residual, activation behind it.

What is fused has one user, so nobody else sees what lies between.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any, Final

import torch
from torch import fx
from torch.nn import functional

from tapwise.activation import LEAKY_RELU
from tapwise.problem import activation_word
from tapwise.torch import pools
from tapwise.torch.fused import FusedConv
from tapwise.torch.linear import FusedLinear

MODULES: Final[dict[type[torch.nn.Module], str]] = {
    torch.nn.ReLU: "relu", torch.nn.ReLU6: "relu6", torch.nn.SiLU: "silu", torch.nn.Sigmoid: "sigmoid",
    torch.nn.Tanh: "tanh", torch.nn.Hardswish: "hardswish", torch.nn.Hardsigmoid: "hardsigmoid",
}  # fmt: skip
CALLED: Final[dict[Any, str]] = {
    torch.relu: "relu", torch.relu_: "relu", functional.relu: "relu", functional.relu_: "relu",
    functional.relu6: "relu6", functional.silu: "silu", torch.sigmoid: "sigmoid", functional.sigmoid: "sigmoid",
    torch.tanh: "tanh", functional.tanh: "tanh", functional.hardswish: "hardswish",
    functional.hardsigmoid: "hardsigmoid", "relu": "relu", "relu_": "relu", "sigmoid": "sigmoid",
    "sigmoid_": "sigmoid", "tanh": "tanh", "tanh_": "tanh",
}  # fmt: skip
# torch.nn.GELU's words.
GELUS: Final = {"none": "gelu", "tanh": "gelu_tanh"}
ADDED: Final = (operator.add, operator.iadd, torch.add, "add", "add_")
MULTIPLIED: Final = (operator.mul, torch.mul, "mul")
# What writes into its first operand.
IN_PLACE: Final = (operator.iadd, "add_")
NORMS: Final = {torch.nn.Conv2d: torch.nn.BatchNorm2d, torch.nn.Conv1d: torch.nn.BatchNorm1d}
# What gives back what it is given, but in training.
IDENTITIES: Final = (
    torch.nn.Identity, torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d,
    torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout,
)  # fmt: skip
DROPOUTS: Final = (
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout,
)  # fmt: skip
# torchvision's, by name: it need not be there.
STOCHASTIC_DEPTH: Final = "torchvision.ops.stochastic_depth", "stochastic_depth"
PADS: Final = (torch.nn.ZeroPad1d, torch.nn.ZeroPad2d, torch.nn.ConstantPad1d, torch.nn.ConstantPad2d)


def remove_identities(traced: fx.GraphModule) -> None:
    """Takes dropout and its like out of a model that is not in training, in place."""
    named = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        plain = len(node.args) > 0 and isinstance(node.args[0], fx.Node)
        if plain and (type(_module(node, named)) in IDENTITIES or _dropped(node)):
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    traced.recompile()


def _dropped(node: fx.Node) -> bool:
    """Whether a node calls a function of dropout outside of training."""
    target: Any = node.target
    named = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if node.op != "call_function" or (target not in DROPOUTS and named != STOCHASTIC_DEPTH):
        return False
    # What is not said may be True.
    return inspect.signature(target).bind(*node.args, **node.kwargs).arguments.get("training") is False


def fuse(traced: fx.GraphModule, math: str) -> None:
    """Replaces convolutions and what follows them by FusedConv, in place."""
    named = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        conv = _module(node, named)
        if type(conv) not in NORMS or conv.padding_mode != "zeros" or len(node.args) != 1 or node.kwargs:
            continue
        pad, sides = _padded(node, named, len(conv.stride))
        start, last, bn = pad or node, node, None
        follower = only_user(last)
        found: Any = None if follower is None else _module(follower, named)
        if type(found) is NORMS[type(conv)] and found.track_running_stats and found.running_mean is not None:
            last, bn = follower, found
        behind = _followed(start, last, named)
        if behind is None:
            continue
        last, residual, activation = behind
        layer = FusedConv(conv, bn, activation, math, sides)
        replace_chain(traced, start, last, layer, (start.args[0], *residual), node)
    traced.graph.lint()
    traced.recompile()


def _followed(
    start: fx.Node, last: fx.Node, named: dict[str, torch.nn.Module]
) -> tuple[fx.Node, tuple[Any, ...], Any] | None:
    """(the last node, a residual, an activation) of what follows `last` and may be computed with what began at `start`;
    neither of them where an operand is written meanwhile, None where x itself is."""
    end, residual = _added(last)
    activation = None
    follower = only_user(end)
    if follower is not None and (activation := activation_of(follower, named)) is not None:
        end = follower
    if not written(start, end, (start.args[0], *residual), named):
        return end, residual, activation
    return None if written(start, last, (start.args[0],), named) else (last, (), None)


def fuse_linears(traced: fx.GraphModule, math: str) -> None:
    """Replaces linear layers and what follows them by FusedLinear, in place."""
    named = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        linear = _module(node, named)
        if type(linear) is not torch.nn.Linear or len(node.args) != 1 or node.kwargs:
            continue
        last, planar = _planar(node)
        last, scale = _scaled(last, traced, (linear.out_features, 1, 1) if planar else (linear.out_features,))
        behind = _followed(node, last, named)
        if behind is None:
            continue
        last, residual, activation = behind
        layer = FusedLinear(linear, scale, activation, math, planar)
        replace_chain(traced, node, last, layer, (node.args[0], *residual))
    traced.graph.lint()
    traced.recompile()


def _planar(node: fx.Node) -> tuple[fx.Node, bool]:
    """(the last node, whether it brings channels to the front) behind a node."""
    after = only_user(node)
    if after is None or after.target not in ("permute", torch.permute) or after.kwargs or after.args[0] is not node:
        return node, False
    order: Any = after.args[1] if len(after.args) == 2 else after.args[1:]
    planar = after.op != "call_module" and isinstance(order, (tuple, list)) and tuple(order) == (0, 3, 1, 2)
    return (after, True) if planar else (node, False)


def _scaled(node: fx.Node, traced: fx.GraphModule, shape: tuple[int, ...]) -> tuple[fx.Node, torch.Tensor | None]:
    """(the last node, the tensor that a node is multiplied by): of that shape, or with one more axis of one element."""
    product = only_user(node)
    if product is None or product.op == "call_module" or product.target not in MULTIPLIED or product.kwargs:
        return node, None
    others = [one for one in product.args if one is not node]
    if len(product.args) != 2 or len(others) != 1 or not isinstance(others[0], fx.Node) or others[0].op != "get_attr":
        return node, None
    scale: Any = traced
    for name in str(others[0].target).split("."):
        scale = getattr(scale, name)
    # Of a product with more axes than y the result has more, too.
    shapes = (shape, (1, *shape)) if len(shape) == 3 else (shape,)
    fits = isinstance(scale, torch.Tensor) and scale.is_floating_point() and tuple(scale.shape) in shapes
    return (product, scale) if fits else (node, None)


def alone(module: torch.nn.Module, math: str) -> torch.nn.Module:
    """What computes one of torch.nn's modules by itself: a fused convolution, a layer of pooling, or the module."""
    if hooked(module):
        return module
    if type(module) in NORMS and module.padding_mode == "zeros":
        return FusedConv(module, None, None, math)
    return pools.pooled(module) or module


def replace_pools(traced: fx.GraphModule) -> None:
    """Pooling by either library in the place of torch.nn's, in place."""
    pools.replace(traced, {name: one for name, one in traced.named_modules() if not hooked(one)})


def _module(node: fx.Node, named: dict[str, torch.nn.Module]) -> Any:
    """The module that a node calls, if it does no more than its kind: hooks are to be called."""
    module = named.get(str(node.target)) if node.op == "call_module" else None
    return None if module is None or hooked(module) else module


def hooked(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _padded(node: fx.Node, named: dict[str, torch.nn.Module], axes: int) -> tuple[fx.Node | None, tuple[int, ...]]:
    """(the node, its sides) that puts zeros around what a convolution of so many axes reads, and nobody else."""
    pad = node.args[0]
    if not isinstance(pad, fx.Node) or len(pad.users) != 1:
        return None, ()
    module = _module(pad, named)
    if type(module) in PADS:
        sides, words = module.padding, {"value": getattr(module, "value", 0)}
    elif pad.op == "call_function" and pad.target is functional.pad:
        names = ("input", "pad", "mode", "value")
        words = dict(zip(names, pad.args, strict=False)) | pad.kwargs
        sides = words["pad"]
    else:
        return None, ()
    sizes = tuple(sides) if isinstance(sides, (tuple, list)) else ()
    plain = len(pad.args) > 0 and words.get("mode", "constant") == "constant" and words.get("value") in (None, 0)
    # Sizes that are worked out from the image's are nodes.
    if not plain or len(sizes) not in (2, 2 * axes) or not all(isinstance(one, int) and one >= 0 for one in sizes):
        return None, ()
    return pad, sizes + (0,) * (2 * axes - len(sizes))


def _added(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """(the last node, what is added) behind a node: itself and nothing where it is not a plain sum of two tensors."""
    sum_ = only_user(node)
    if sum_ is None or sum_.op not in ("call_function", "call_method") or sum_.target not in ADDED:
        return node, ()
    if len(sum_.args) != 2 or sum_.kwargs or not all(isinstance(one, fx.Node) for one in sum_.args):
        return node, ()
    first, second = sum_.args
    other = second if first is node else first
    # Written into, the other operand is what its later users see.
    if other is node or (sum_.target in IN_PLACE and first is not node):
        return node, ()
    return sum_, (other,)


def activation_of(node: fx.Node, named: dict[str, torch.nn.Module]) -> str | None:
    """The word of the activation that a node is."""
    module = _module(node, named)
    if type(module) is torch.nn.GELU:
        return GELUS.get(module.approximate)
    if type(module) is torch.nn.LeakyReLU:
        return activation_word((LEAKY_RELU, module.negative_slope))
    if module is not None:
        return MODULES.get(type(module))
    if node.op not in ("call_function", "call_method") or not set(node.kwargs) <= {
        "inplace", "approximate", "negative_slope",
    }:  # fmt: skip
        return None
    if node.target is functional.gelu and len(node.args) == 1:
        return GELUS.get(str(node.kwargs.get("approximate", "none")))
    if node.target is functional.leaky_relu:
        slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
        return activation_word((LEAKY_RELU, slope)) if isinstance(slope, float) else None
    return CALLED.get(node.target) if len(node.args) == 1 else None


def written(first: fx.Node, last: fx.Node, operands: tuple[Any, ...], named: dict[str, torch.nn.Module]) -> bool:
    """Whether between two nodes something writes into what the later one is to read."""
    node = first.next
    while node is not last:
        target = node.target
        module = named.get(str(target)) if node.op == "call_module" else None
        writes = (
            target in IN_PLACE
            or (node.op == "call_method" and str(target).endswith("_") and not str(target).endswith("__"))
            or (node.op == "call_function" and getattr(target, "__name__", "").endswith("_"))
            or node.kwargs.get("inplace", False)
            or node.kwargs.get("out") is not None
            or getattr(module, "inplace", False)
            or target is operator.setitem
        )
        if writes and any(one in operands for one in node.all_input_nodes):
            return True
        node = node.next
    return False


def replace_chain(
    traced: fx.GraphModule, first: fx.Node, last: fx.Node, layer: torch.nn.Module, operands: tuple[Any, ...],
    named: fx.Node | None = None,
) -> None:  # fmt: skip
    """A layer in the place of a chain, of which each has one user; its name is that of a node, by default the first."""
    graph, name = traced.graph, f"fused_{str((named or first).target).replace('.', '_')}"
    while hasattr(traced, name):
        name += "_"
    traced.add_module(name, layer)
    with graph.inserting_before(last):
        made = graph.call_module(name, operands)
    last.replace_all_uses_with(made)
    chain = [first]
    while chain[-1] is not last:
        chain.append(next(iter(chain[-1].users)))
    for node in reversed(chain):
        graph.erase_node(node)
