"""Pooling of a model, here or in PyTorch: the layers, and the nodes of a traced model that are such."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import fx
from torch.nn import functional

from tapwise import dispatch
from tapwise.algorithm import Buffers, Steady
from tapwise.arrays.host import numpy_of
from tapwise.arrays.workspaces import aligned
from tapwise.cpu.device import host
from tapwise.ops.orders import in_order
from tapwise.ops.parameters import window
from tapwise.ops.pool.api import problem_of
from tapwise.ops.pool.problem import PoolProblem
from tapwise.ops.reduce.api import reduction
from tapwise.problem import Problem
from tapwise.torch import nn as modules
from tapwise.torch.gates import is_taken
from tapwise.torch.tensors import NAMES, memory_format, recast

OURS: Final[dict[type[torch.nn.Module], type[torch.nn.Module]]] = {
    torch.nn.MaxPool2d: modules.MaxPool2d, torch.nn.AvgPool2d: modules.AvgPool2d
}  # fmt: skip
# Of functions: the module that does the same, and the names of its arguments.
_MAX: Final = torch.nn.MaxPool2d, ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVG_WORDS: Final = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
CALLED: Final[dict[Any, tuple[type[torch.nn.Module], tuple[str, ...]]]] = {
    functional.max_pool2d: _MAX, torch.max_pool2d: _MAX,
    functional.avg_pool2d: (torch.nn.AvgPool2d, _AVG_WORDS),
    functional.adaptive_avg_pool2d: (torch.nn.AdaptiveAvgPool2d, ("output_size",)),
}  # fmt: skip
MEANS: Final = ("mean", torch.mean)


class Mean(torch.nn.Module):
    """x.mean(dim, keepdim)."""

    def __init__(self, dim: tuple[int, ...], keepdim: bool = False) -> None:
        super().__init__()
        self.dim, self.keepdim = dim, keepdim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.dim, self.keepdim)


class Pooled(torch.nn.Module):
    """Pooling of x (n, c, h, w) by PyTorch's module `theirs`, or by tapwise.

    `by_torch`: which one. Averages of whole images are PyTorch's until they are measured.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs, self.ours = theirs, _ours(theirs)
        self.by_torch = self.ours is None

    def forward(self, x: torch.Tensor) -> Any:
        taken = not self.by_torch and x.ndim == 4 and modules.is_taken(x)
        return self.by_tapwise(x) if taken else self.by_pytorch(x)

    def by_pytorch(self, x: torch.Tensor) -> Any:
        return self.theirs(x)

    def by_tapwise(self, x: torch.Tensor) -> Any:
        if self.ours is not None:
            return self.ours(x)
        y = torch.ops.tapwise.global_avg_pool2d(x)
        return y.flatten(1) if isinstance(self.theirs, Mean) and not self.theirs.keepdim else y

    def problem(self, x: torch.Tensor) -> Problem:
        """What a call computes."""
        layout = "nhwc" if memory_format(x) is torch.channels_last else "nchw"
        n, c, *spatial = x.shape
        pool: Any = self.ours
        words: dict[str, Any] = {"ceil_mode": False}
        sizes: tuple[Any, ...] = tuple(spatial), None, 0, 1
        if pool is not None:
            sizes = pool.kernel_size, pool.stride, pool.padding, getattr(pool, "dilation", 1)
            words["ceil_mode"] = pool.ceil_mode
        if isinstance(pool, torch.nn.AvgPool2d):
            words |= {"count_include_pad": pool.count_include_pad, "divisor": pool.divisor_override}
        words["op"] = "max" if isinstance(pool, torch.nn.MaxPool2d) else "avg"
        words["indices"] = getattr(pool, "return_indices", False)
        kernel, stride, *rest = sizes
        windows = window(tuple(spatial), kernel, kernel if stride is None else stride, *rest)
        return PoolProblem(n=n, c=c, dtype=NAMES[x.dtype], layout=layout, **words, **windows)


def steady_max(
    y: torch.Tensor, x: torch.Tensor, kernel_size: Any, stride: Any = (), padding: Any = (0, 0),
    dilation: Any = (1, 1), ceil_mode: bool = False,
) -> Steady | None:  # fmt: skip
    """What computes y again, the result of the operator max_pool2d for tensors of a CPU that stay where they are; None
    for those that it would copy. Defaults are the operator's: PyTorch leaves them out."""
    return _steady("max", y, x, kernel_size, stride, padding, dilation, ceil_mode, False)


def steady_avg(
    y: torch.Tensor, x: torch.Tensor, kernel_size: Any, stride: Any = (), padding: Any = (0, 0),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Steady | None:  # fmt: skip
    """The same of avg_pool2d."""
    return _steady("avg", y, x, kernel_size, stride, padding, 1, ceil_mode, count_include_pad, divisor_override)


def _steady(op: str, y: torch.Tensor, x: torch.Tensor, *words: Any) -> Steady | None:
    order = memory_format(x)
    if not (is_taken(x) and y.is_contiguous(memory_format=order)):
        return None
    layout = "nhwc" if order is torch.channels_last else "nchw"
    plain = tuple(tuple(word) if isinstance(word, list) else word for word in words)
    return _on(problem_of(op, tuple(x.shape), NAMES[x.dtype], layout, plain), numpy_of(x), numpy_of(y))


def steady_mean(y: torch.Tensor, x: torch.Tensor) -> Steady | None:
    """The same of global_avg_pool2d."""
    if not is_taken(x):
        return None
    image, means = numpy_of(x), numpy_of(y)
    call = reduction("mean", image.shape, image.strides, image.dtype, (2, 3), True, "auto", host())
    ordered, flat = in_order(image, call.order), means.reshape(call.result)
    # Of both a view.
    if call.plan is None or call.back or not all(map(np.may_share_memory, (ordered, flat), (image, means))):
        return None
    return Steady(call.plan, Buffers(ordered, None, flat, aligned(call.plan.workspace_bytes)))


def _on(problem: Problem, x: np.ndarray, y: np.ndarray) -> Steady:
    plan = dispatch.plan_for(problem, dispatch.choose(problem, host()), host())
    return Steady(plan, Buffers(x, None, y, aligned(plan.workspace_bytes)))


def _ours(theirs: Any) -> torch.nn.Module | None:
    """tapwise's own module in the place of torch.nn's; None for averages of whole images."""
    if type(theirs) not in OURS:
        return None
    return recast(theirs, OURS[type(theirs)])


def pooled(module: Any) -> Pooled | None:
    """A layer that does what one of torch.nn's pooling modules does, or None."""
    whole = type(module) is torch.nn.AdaptiveAvgPool2d and _pair(module.output_size) == (1, 1)
    return Pooled(module) if type(module) in OURS or whole else None


def called(node: fx.Node) -> Pooled | None:
    """A layer that does what a call of a function does, or None."""
    # All but x are constants.
    if node.op not in ("call_function", "call_method") or node.all_input_nodes != list(node.args[:1]):
        return None
    if node.target in MEANS:
        words = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | node.kwargs
        dim: Any = words.get("dim")
        # Both of an image's axes.
        if _pair(dim) is None or isinstance(dim, int) or sorted(one % 4 for one in dim) != [2, 3]:
            return None
        return Pooled(Mean(tuple(dim), **words)) if words.pop("dim") and set(words) <= {"keepdim"} else None
    if node.target not in CALLED:
        return None
    kind, names = CALLED[node.target]
    words = dict(zip(names, node.args[1:], strict=False)) | node.kwargs
    # An empty stride is the kernel's size.
    words = {name: value for name, value in words.items() if name != "stride" or value not in (None, (), [])}
    sizes = [words.get(name, 1) for name in ("kernel_size", "stride", "padding", "dilation", "output_size")]
    if not set(words) <= set(names) or None in map(_pair, sizes):
        return None
    # Lists are torch.fx's own, which torch.compile does not take.
    return pooled(kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in words.items()}))


def _pair(size: Any) -> tuple[int, int] | None:
    """A size of both axes; None for what is none."""
    sizes = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, (tuple, list)) else ()
    return sizes if len(sizes) == 2 and all(isinstance(one, int) for one in sizes) else None


def replace(traced: fx.GraphModule, named: dict[str, Any]) -> None:
    """Layers of pooling in the place of a traced model's, in place. `named`: modules that may be replaced."""
    for node in list(traced.graph.nodes):
        module = named.get(str(node.target)) if node.op == "call_module" else None
        made = pooled(module) if module is not None else called(node)
        if made is None or len(node.all_input_nodes) != 1:
            continue
        name = f"pool_{node.name if module is None else str(node.target).replace('.', '_')}"
        while hasattr(traced, name):
            name += "_"
        traced.add_module(name, made)
        with traced.graph.inserting_before(node):
            layer = traced.graph.call_module(name, (node.all_input_nodes[0],))
        node.replace_all_uses_with(layer)
        traced.graph.erase_node(node)
    traced.graph.lint()
    traced.recompile()
