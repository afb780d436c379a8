"""Modules: torch.nn's, with tapwise's operators inside.

Parameters, arguments and state_dict are torch.nn's own, so that one may take the other's place. Filters are packed once
for each weight and image size. Where a gradient is recorded, and for what tapwise does not take, PyTorch computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Self

import torch
from torch.nn import functional

from tapwise.activation import LEAKY_RELU, named_activation
from tapwise.arguments import one_of
from tapwise.ops.conv.problem import MATHS
from tapwise.problem import activation_word

FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DEVICES: Final = ("cpu", "cuda")
# What PyTorch computes in their place.
FUNCTIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "relu": functional.relu, "relu6": functional.relu6, "silu": functional.silu, "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"), "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "hardswish": functional.hardswish, "hardsigmoid": functional.hardsigmoid,
}  # fmt: skip


def activated(word: str | None, y: torch.Tensor) -> torch.Tensor:
    """An activation by PyTorch; `word`: of a problem's string."""
    name, slope = named_activation(word)
    if name is None:
        return y
    return functional.leaky_relu(y, slope) if name == LEAKY_RELU else FUNCTIONS[name](y)


def is_taken(*tensors: torch.Tensor | None) -> bool:
    """Whether tapwise's operators take them: floating, on a CPU or GPU, and no gradient is recorded."""
    recorded = torch.is_grad_enabled()
    return all(
        tensor is None
        or (tensor.dtype in FLOATS and tensor.device.type in DEVICES and not (recorded and tensor.requires_grad))
        for tensor in tensors
    )


def words_of(module: Any, activation: str | None, math: str, sides: Sequence[int] | None = None) -> str:
    """The words of a problem's string that say what one of torch.nn's convolutions computes.

    `sides`: zeros around x, before and after, from the last axis to the first, in the place of the module's padding.
    """
    axes = len(module.stride)
    if sides is None:
        sides = module._reversed_padding_repeated_twice if module.padding_mode == "zeros" else [0, 0] * axes
    pairs = [f"{sides[2 * axis]}:{sides[2 * axis + 1]}" for axis in reversed(range(axes))]
    words = [
        "stride" + "x".join(map(str, module.stride)), "pad" + "x".join(pairs),
        "dilation" + "x".join(map(str, module.dilation)), f"groups{module.groups}", activation or "",
        math if math != "ieee" else "",
    ]  # fmt: skip
    return " ".join(word for word in words if word)


class _Conv:
    """What Conv1d and Conv2d share, before torch.nn's."""

    # torch.nn's.
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    _reversed_padding_repeated_twice: list[int]

    def __init__(
        self, *arguments: Any, activation: str | tuple[str, float] | None = None, math: str = "ieee", **named: Any
    ) -> None:
        """As torch.nn's; `activation` and `math` as of tapwise.conv2d."""
        super().__init__(*arguments, **named)
        self._say(activation, math)

    def _say(self, activation: str | tuple[str, float] | None, math: str) -> None:
        one_of(math, "math", MATHS)
        self.activation, self.math = activation_word(activation), math
        self.words = words_of(self, self.activation, math)

    @classmethod
    def of(cls, module: torch.nn.Module, activation: str | tuple[str, float] | None = None, math: str = "ieee") -> Self:
        """A module with the parameters and buffers of torch.nn's own."""
        made = cls.__new__(cls)
        made.__dict__.update(module.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            made.__dict__[name] = dict(module.__dict__[name])
        made._say(activation, math)
        return made

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """activation(conv(x) + bias + residual)."""
        weight, bias = self.weight, self.bias
        if not is_taken(x, weight, bias, residual):
            return self._unfused(x, residual)
        if self.padding_mode != "zeros":
            x = functional.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        single = x.ndim == weight.ndim - 1
        if single:
            x, residual = x[None], None if residual is None else residual[None]
        words = self.words if x.dtype is torch.float32 else self.words.replace(f" {self.math}", "")
        y = torch.ops.tapwise.conv_frozen(x, weight, bias, residual, words)
        return y[0] if single else y

    def _unfused(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        y = super().forward(x)  # type: ignore[misc]
        y = y if residual is None else y + residual
        return activated(self.activation, y)

    def extra_repr(self) -> str:
        more = [f", activation={self.activation}"] if self.activation else []
        more += [f", math={self.math}"] if self.math != "ieee" else []
        return str(super().extra_repr()) + "".join(more)  # type: ignore[misc]


class Conv2d(_Conv, torch.nn.Conv2d):
    """torch.nn.Conv2d with an activation and a residual: y = activation(conv(x) + bias + residual)."""


class Conv1d(_Conv, torch.nn.Conv1d):
    """torch.nn.Conv1d with an activation and a residual: y = activation(conv(x) + bias + residual)."""


class MaxPool2d(torch.nn.MaxPool2d):
    """torch.nn.MaxPool2d."""

    def forward(self, x: torch.Tensor) -> Any:
        if not is_taken(x) or x.ndim != 4:
            return super().forward(x)
        operators = torch.ops.tapwise
        operator = operators.max_pool2d_with_indices if self.return_indices else operators.max_pool2d
        sizes = (_pair(one) for one in (self.kernel_size, self.stride, self.padding, self.dilation))
        return operator(x, *sizes, self.ceil_mode)


class AvgPool2d(torch.nn.AvgPool2d):
    """torch.nn.AvgPool2d."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_taken(x) or x.ndim != 4:
            return super().forward(x)
        sizes = (_pair(one) for one in (self.kernel_size, self.stride, self.padding))
        words = self.ceil_mode, self.count_include_pad, self.divisor_override
        return torch.ops.tapwise.avg_pool2d(x, *sizes, *words)


class Softmax(torch.nn.Softmax):
    """torch.nn.Softmax, of a named axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_taken(x) or self.dim is None:
            return super().forward(x)
        return torch.ops.tapwise.softmax(x, self.dim)


class LogSoftmax(torch.nn.LogSoftmax):
    """torch.nn.LogSoftmax, of a named axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_taken(x) or self.dim is None:
            return super().forward(x)
        return torch.ops.tapwise.log_softmax(x, self.dim)


class Unfold(torch.nn.Unfold):
    """torch.nn.Unfold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_taken(x) or x.ndim != 4:
            return super().forward(x)
        sizes = (_pair(one) for one in (self.kernel_size, self.dilation, self.padding, self.stride))
        return torch.ops.tapwise.im2col(x, *sizes)


class Fold(torch.nn.Fold):
    """torch.nn.Fold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_taken(x) or x.ndim != 3:
            return super().forward(x)
        sizes = (_pair(one) for one in (self.output_size, self.kernel_size, self.dilation, self.padding, self.stride))
        return torch.ops.tapwise.col2im(x, *sizes)


def _pair(size: Any) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)
