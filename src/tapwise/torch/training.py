"""Training: convolutions whose three directions are computed by the faster library, each by itself.

A module stays torch.nn.Conv2d or ConvTranspose2d, with its parameters and state_dict. Forward, gradient by the input
and gradient by the filters are tapwise's operators or PyTorch's, as `directions.measured` found for its size; nothing
is folded or packed for good.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from tapwise.arguments import one_of
from tapwise.errors import InvalidProblem
from tapwise.ops.conv.problem import DIRECTIONS, MATHS, ConvProblem
from tapwise.torch.activated import absorb
from tapwise.torch.calls import Window, transposed_size
from tapwise.torch.convolution import More, are_taken, cast, convolution, fits
from tapwise.torch.directions import measured
from tapwise.torch.layers import Layer, table
from tapwise.torch.nn import MaxPool2d, transposed_more
from tapwise.torch.norms import TrainedBatchNorm2d, by_kernels
from tapwise.torch.tensors import NAMES, memory_format, recast


class Trained:
    """What TrainedConv2d and TrainedConvTranspose2d share, before torch.nn's. `by_torch` names the directions, of the
    convolution that goes from x to y, that PyTorch computes."""

    # torch.nn's.
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    math: str
    by_torch: frozenset[str]

    @classmethod
    def of(cls, module: torch.nn.Module, math: str = "ieee") -> Self:
        """A module with the parameters and hooks of torch.nn's own."""
        made: Any = recast(module, cls)
        made.math, made.by_torch = math, frozenset()
        return made

    @property
    def window(self) -> Window:
        return self.stride, self.padding, self.dilation, self.groups

    def more(self, x: torch.Tensor, *output_size: Any) -> More:
        """The output_padding of a call; None where nothing is transposed."""
        return None

    def math_of(self, dtype: torch.dtype) -> str:
        return self.math if dtype is torch.float32 else "ieee"

    def forward(self, input: torch.Tensor, *output_size: Any) -> torch.Tensor:
        if len(self.by_torch) < len(DIRECTIONS) and input.ndim == 4:
            x, weight, bias = cast(input, self.weight, self.bias)
            more = self.more(input, *output_size)
            if are_taken(x, weight, bias) and fits(more, self.stride):
                return convolution(x, weight, bias, self.window, more, self.math_of(x.dtype), self.by_torch)
        y: torch.Tensor = super().forward(input, *output_size)  # type: ignore[misc]
        return y

    def sizes(self, x: torch.Tensor, more: More) -> tuple[tuple[int, ...], int]:
        """(the shape of the image, the channels of the result) of the convolution that goes from x to y."""
        return tuple(x.shape), self.weight.shape[0]

    def problem(self, x: torch.Tensor, more: More, direction: str) -> ConvProblem:
        """What it computes for its input x in a direction."""
        (n, c, *spatial), k = self.sizes(x, more)
        last = memory_format(x) is torch.channels_last
        return ConvProblem(
            n=n, c=c, spatial=tuple(spatial), k=k, kernel=tuple(self.weight.shape[2:]), stride=self.stride,
            padding=tuple((pad, pad) for pad in self.padding), dilation=self.dilation, groups=self.groups,
            dtype=NAMES[x.dtype], math=self.math_of(x.dtype), layout="nhwc" if last else "nchw",
            direction=direction,  # type: ignore[arg-type]
        )  # fmt: skip

    def extra_repr(self) -> str:
        said = str(super().extra_repr())  # type: ignore[misc]
        return said + (f", by_torch={sorted(self.by_torch)}" if self.by_torch else "")


class TrainedConv2d(Trained, torch.nn.Conv2d):
    """torch.nn.Conv2d; forward is fprop, its gradients dgrad and wgrad."""


class TrainedConvTranspose2d(Trained, torch.nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d; forward is dgrad, its gradients fprop and wgrad."""

    def forward(self, input: torch.Tensor, output_size: Any = None) -> torch.Tensor:
        return super().forward(input, output_size)

    def more(self, x: torch.Tensor, *output_size: Any) -> More:
        return transposed_more(self, x, *output_size)

    def sizes(self, x: torch.Tensor, more: More) -> tuple[tuple[int, ...], int]:
        assert more is not None
        return transposed_size(x.shape, self.weight.shape, self.window, more), x.shape[1]


class TrainedMaxPool2d(MaxPool2d):
    """torch.nn.MaxPool2d, by our kernels under torch.compile: Inductor gathers the gradient at a third of a GPU's
    bandwidth."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) if by_kernels(x) else torch.nn.MaxPool2d.forward(self, x)


KINDS: dict[type[torch.nn.Module], type[TrainedConv2d | TrainedConvTranspose2d]] = {
    torch.nn.Conv2d: TrainedConv2d, torch.nn.ConvTranspose2d: TrainedConvTranspose2d
}  # fmt: skip


@dataclass
class TrainingReport:
    """What became of a model: its convolutions, its batch norms and how many took the activation behind them, its max
    pools, and where directions were measured their times."""

    convolutions: int = 0
    norms: int = 0
    pools: int = 0
    activations: int = 0
    layers: list[Layer] = field(default_factory=list)

    def __str__(self) -> str:
        kept = sum(not layer.by_torch for layer in self.layers)
        lines = [f"{self.convolutions} convolutions replaced, {self.norms} batch norms, {self.pools} max pools"]
        lines += [f"{self.activations} activations given to the norm before them"] if self.activations else []
        return "\n".join([*lines, f"{kept} of {len(self.layers)} directions by tapwise:", table(self.layers)])


def for_training(
    model: torch.nn.Module, inputs: tuple[Any, ...] | None, math: str = "ieee", captured: bool = False
) -> tuple[torch.nn.Module, TrainingReport]:
    """A copy of a model with its convolutions replaced; with inputs every direction of every size is timed, and
    computed by the faster library. `captured`: without the host's time."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidProblem(f"model is a {type(model).__name__}: a torch.nn.Module is allowed")
    one_of(math, "math", MATHS)
    own, done = copy.deepcopy(model), TrainingReport()
    own = _replaced(own, math, {})
    modules = {name: one for name, one in own.named_modules() if isinstance(one, Trained)}
    done.convolutions = len(modules)
    done.norms = sum(type(one) is TrainedBatchNorm2d for one in own.modules())
    done.pools = sum(type(one) is TrainedMaxPool2d for one in own.modules())
    done.activations = absorb(own, inputs)
    if inputs is not None:
        done.layers = measured(own, modules, inputs, captured)
    return own, done


Seen = dict[int, tuple[torch.nn.Module, torch.nn.Module]]


def _replaced(module: torch.nn.Module, math: str, seen: Seen) -> torch.nn.Module:
    """A module with its convolutions, batch norms and max pools replaced, in place. `seen`: those that were, by their
    ids, with what has come of them: what has two places is one module."""
    if id(module) not in seen:
        seen[id(module)] = module, _replacement(module, math)
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _replaced(child, math, seen)
    return seen[id(module)][1]


def _replacement(module: torch.nn.Module, math: str) -> torch.nn.Module:
    if type(module) is torch.nn.BatchNorm2d:
        return TrainedBatchNorm2d.of(module)
    if type(module) is torch.nn.MaxPool2d:
        return recast(module, TrainedMaxPool2d)
    made: Any = KINDS.get(type(module))
    if made is None or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return module
    return made.of(module, math)
