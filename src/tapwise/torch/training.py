"""Training: convolutions whose three directions are computed by the faster library, each by itself.

A module stays torch.nn.Conv2d, with its parameters and state_dict. Forward, gradient by the input and gradient by the
filters are tapwise's operators or PyTorch's, as `measured` found for its size; nothing is folded or packed for good.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Final, Self

import torch

from tapwise.arguments import one_of
from tapwise.errors import InvalidProblem
from tapwise.ops.conv.problem import DIRECTIONS, MATHS, ConvProblem
from tapwise.torch import operators
from tapwise.torch.layers import Kind, Layer, table
from tapwise.torch.nn import DEVICES, FLOATS
from tapwise.torch.tensors import NAMES, memory_format
from tapwise.torch.timing import medians

_ATEN: Final = torch.ops.aten
Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def _operator(name: str) -> Callable[..., torch.Tensor]:
    """One of tapwise's: past PyTorch's dispatcher, which takes longer than a small layer, where nobody looks on."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        found: Callable[..., torch.Tensor] = getattr(torch.ops.tapwise, name)
        return found
    direct: Callable[..., torch.Tensor] = getattr(operators, name)
    return direct


def _fprop(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window, math: str, by_torch: bool
) -> torch.Tensor:
    stride, padding, dilation, groups = window
    if by_torch:
        return _ATEN.convolution(x, weight, bias, stride, padding, dilation, False, (0, 0), groups)
    return _operator("conv2d")(x, weight, bias, stride, padding, dilation, groups, math=math)


def _by_pytorch(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, dw) by PyTorch, those that are wanted."""
    stride, padding, dilation, groups = window
    mask = [*wanted, False]
    found = _ATEN.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, (0, 0), groups, mask
    )  # fmt: skip
    return found[0], found[1]


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window, math: str, by_torch: frozenset[str],
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(dx, dw), those that are wanted, each by the library that it is set to."""
    dy = dy.contiguous(memory_format=memory_format(x))
    theirs = wanted[0] and "dgrad" in by_torch, wanted[1] and "wgrad" in by_torch
    dx, dw = _by_pytorch(dy, x, weight, window, theirs) if any(theirs) else (None, None)
    if wanted[0] and not theirs[0]:
        dx = _operator("conv2d_input")(x.shape, weight, dy, *window, math=math)
    if wanted[1] and not theirs[1]:
        dw = _operator("conv2d_weight")(x, weight.shape, dy, *window, math=math)
    return dx, dw


class _Convolution(torch.autograd.Function):
    """Convolution with the library of each direction; its gradients have gradients, by the operators' own."""

    # With a setup_context of its own, PyTorch would look at this function's signature in each call.
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window, math: str,
        by_torch: frozenset[str],
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.words = window, math, by_torch
        return _fprop(x, weight, bias, window, math, "fprop" in by_torch)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs, (window, math, by_torch) = ctx.needs_input_grad, ctx.words
        dx, dw = _gradients(dy, x, weight, window, math, by_torch, (needs[0], needs[1]))
        db = dy.sum((0, 2, 3)).to(dy.dtype) if needs[2] else None
        return dx, dw, db, None, None, None


class TrainedConv2d(torch.nn.Conv2d):
    """torch.nn.Conv2d; `by_torch` names the directions that PyTorch computes."""

    math: str
    by_torch: frozenset[str]

    @classmethod
    def of(cls, module: torch.nn.Conv2d, math: str = "ieee") -> Self:
        """A module with the parameters and hooks of torch.nn's own."""
        made = cls.__new__(cls)
        made.__dict__.update(module.__dict__)
        made.math, made.by_torch = math, frozenset()
        return made

    @property
    def window(self) -> Window:
        assert not isinstance(self.padding, str)
        return self.stride, self.padding, self.dilation, self.groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.by_torch) == len(DIRECTIONS):
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if x.ndim != 4 or x.dtype not in FLOATS or x.dtype is not weight.dtype or x.device.type not in DEVICES:
            return super().forward(x)
        math = self.math if x.dtype is torch.float32 else "ieee"
        if torch._C._are_functorch_transforms_active():
            # The operator's own derivative knows of them.
            made: torch.Tensor = torch.ops.tapwise.conv2d(x, weight, bias, *self.window, math=math)
            return made
        return _Convolution.apply(x, weight, bias, self.window, math, self.by_torch)

    def problem(self, x: torch.Tensor, direction: str) -> ConvProblem:
        """What it computes for x in a direction."""
        last = memory_format(x) is torch.channels_last
        return ConvProblem(
            n=x.shape[0], c=self.in_channels, spatial=tuple(x.shape[2:]), k=self.out_channels,
            kernel=self.kernel_size, stride=self.stride, padding=tuple((pad, pad) for pad in self.window[1]),
            dilation=self.dilation, groups=self.groups, dtype=NAMES[x.dtype],
            math=self.math if x.dtype is torch.float32 else "ieee", layout="nhwc" if last else "nchw",
            direction=direction,  # type: ignore[arg-type]
        )  # fmt: skip

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", by_torch={sorted(self.by_torch)}" if self.by_torch else "")


@dataclass
class TrainingReport:
    """What became of a model: its convolutions, and where they were measured each direction's times."""

    convolutions: int = 0
    layers: list[Layer] = field(default_factory=list)

    def __str__(self) -> str:
        kept = sum(not layer.by_torch for layer in self.layers)
        lines = [f"{self.convolutions} convolutions replaced"]
        return "\n".join([*lines, f"{kept} of {len(self.layers)} directions by tapwise:", table(self.layers)])


def for_training(
    model: torch.nn.Module, inputs: tuple[Any, ...] | None, math: str = "ieee"
) -> tuple[torch.nn.Module, TrainingReport]:
    """A copy of a model with its convolutions replaced; with inputs every direction of every size is timed, and
    computed by the faster library."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidProblem(f"model is a {type(model).__name__}: a torch.nn.Module is allowed")
    one_of(math, "math", MATHS)
    own, done = copy.deepcopy(model), TrainingReport()
    own = _replaced(own, math)
    modules = {name: one for name, one in own.named_modules() if isinstance(one, TrainedConv2d)}
    done.convolutions = len(modules)
    if inputs is not None:
        done.layers = measured(own, modules, inputs)
    return own, done


def _replaced(module: torch.nn.Module, math: str) -> torch.nn.Module:
    """A module with its convolutions replaced, in place."""
    if type(module) is torch.nn.Conv2d:
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return TrainedConv2d.of(module, math) if plain else module
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _replaced(child, math)
    return module


def measured(
    model: torch.nn.Module, modules: dict[str, TrainedConv2d], inputs: tuple[Any, ...]
) -> list[Layer]:  # fmt: skip
    """Each module set to compute every direction by whichever library is faster on the model's inputs; their times."""
    seen: dict[str, Kind] = {}

    def record(name: str, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        x = arguments[0]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        seen.setdefault(name, Kind(meta, x.device))

    hooks = [one.register_forward_pre_hook(partial(record, name)) for name, one in modules.items()]
    # Statistics of normalisation stay as they are.
    was = model.training
    try:
        with torch.no_grad():
            model.eval()(*inputs)
    finally:
        model.train(was)
        for hook in hooks:
            hook.remove()
    times: dict[str, tuple[float, float, str]] = {}
    found = []
    for name, kind in seen.items():
        module, theirs = modules[name], set()
        for direction in DIRECTIONS:
            text = str(module.problem(kind.meta, direction))
            if text not in times:
                times[text] = _times(module, kind, direction)
            ours, other, why = times[text]
            found.append(Layer(f"{name} {direction}", text, 1, ours, other, why))
            if why:
                theirs.add(direction)
        module.by_torch = frozenset(theirs)
    return found


def _times(module: TrainedConv2d, kind: Kind, direction: str) -> tuple[float, float, str]:
    """Microseconds here and in PyTorch, and why it is PyTorch's."""
    with torch.no_grad():
        x, weight, window = kind.random(), module.weight.detach().to(kind.meta.dtype), module.window
        math = module.math if x.dtype is torch.float32 else "ieee"
        dy = torch.randn_like(_ATEN.convolution(x, weight, None, *window[:3], False, (0, 0), window[3]))
        dy = dy.contiguous(memory_format=memory_format(x))

        def run(by_torch: bool) -> Callable[[], object]:
            if direction == "fprop":
                return lambda: _fprop(x, weight, None, window, math, by_torch)
            wanted = direction == "dgrad", direction == "wgrad"
            library = frozenset((direction,)) if by_torch else frozenset()
            return lambda: _gradients(dy, x, weight, window, math, library, wanted)

        runs, refused = {"PyTorch": run(True)}, ""
        try:
            run(False)()
            runs["tapwise"] = run(False)
        except Exception as error:
            refused = f"refused: {error}"
        taken, _ = medians(runs, x.device)
    ours, theirs = taken.get("tapwise", inf), taken["PyTorch"]
    return ours, theirs, refused or ("PyTorch is faster" if ours > theirs else "")
