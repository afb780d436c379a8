"""Modules: torch.nn's, with tapwise's operators inside.

Parameters, arguments and state_dict are torch.nn's own, so that one may take the other's place. Where no gradient is
recorded, filters of convolutions are packed once for each weight and image size; where one is, tapwise computes too,
and its gradients. PyTorch computes what tapwise does not take: dtypes that are no floats, tensors of several dtypes,
other devices than CPUs and GPUs, and where a class says more.
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
from tapwise.torch.convolution import DEVICES, More, are_taken, cast, convolution, fits
from tapwise.torch.tensors import NAMES, records

FLOATS: Final = tuple(NAMES)
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
    return is_floating(*tensors) and not records(tensors)


def is_floating(*tensors: torch.Tensor | None) -> bool:
    """Whether they have a floating dtype and lie on a CPU or GPU."""
    return all(one is None or (one.dtype in FLOATS and one.device.type in DEVICES) for one in tensors)


def transposed_more(module: Any, x: torch.Tensor, output_size: Any = None) -> tuple[int, ...]:
    """The output_padding of a call of a transposed convolution of torch.nn. Raises ValueError for a bad output_size."""
    sizes = module.stride, module.padding, module.kernel_size
    return tuple(module._output_padding(x, output_size, *sizes, len(module.stride), module.dilation))


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
        if not is_floating(x, weight, bias, residual):
            return self._unfused(x, residual)
        if records((x, weight, bias, residual)):
            return self._recorded(x, residual)
        if self.padding_mode != "zeros":
            x = functional.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        single = x.ndim == weight.ndim - 1
        if single:
            x, residual = x[None], None if residual is None else residual[None]
        words = self.words if x.dtype is torch.float32 else self.words.replace(f" {self.math}", "")
        y = torch.ops.tapwise.conv_frozen(x, weight, bias, residual, words)
        return y[0] if single else y

    def _recorded(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """With gradients: of the convolution tapwise's, of what follows PyTorch's."""
        image, weight, bias = cast(x, self.weight, self.bias)
        if not are_taken(image, weight, bias) or x.ndim not in (weight.ndim, weight.ndim - 1):
            return self._unfused(x, residual)
        sides = self._reversed_padding_repeated_twice
        if self.padding_mode != "zeros":
            image, sides = functional.pad(image, sides, mode=self.padding_mode), [0] * len(sides)
        pairs = [(sides[at], sides[at + 1]) for at in range(len(sides) - 2, -1, -2)]
        even = all(before == after for before, after in pairs)
        padding = tuple(before for before, _ in pairs) if even else tuple(side for pair in pairs for side in pair)
        y = _convolved(self, image, weight, bias, padding, None, self.math)
        return activated(self.activation, y if residual is None else y + residual)

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


class _ConvTranspose:
    """What ConvTranspose1d and ConvTranspose2d share, before torch.nn's."""

    # torch.nn's.
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def __init__(self, *arguments: Any, math: str = "ieee", **named: Any) -> None:
        """As torch.nn's; `math` as of tapwise.conv_transpose2d."""
        super().__init__(*arguments, **named)
        one_of(math, "math", MATHS)
        self.math = math

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        """conv_transpose(input) + bias."""
        x, weight, bias = cast(input, self.weight, self.bias)
        if are_taken(x, weight, bias) and x.ndim in (weight.ndim, weight.ndim - 1):
            more = transposed_more(self, input, output_size)
            if fits(more, self.stride):
                return _convolved(self, x, weight, bias, self.padding, more, self.math)
        y: torch.Tensor = super().forward(input, output_size)  # type: ignore[misc]
        return y

    def extra_repr(self) -> str:
        return str(super().extra_repr()) + (f", math={self.math}" if self.math != "ieee" else "")  # type: ignore[misc]


class ConvTranspose2d(_ConvTranspose, torch.nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d. PyTorch computes output_padding that is not less than the stride."""


class ConvTranspose1d(_ConvTranspose, torch.nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d. PyTorch computes output_padding that is not less than the stride."""


def _convolved(
    module: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, ...],
    more: More, math: str,
) -> torch.Tensor:  # fmt: skip
    """A module's convolution of x with or without a batch, of one axis or two."""
    stride, dilation, single, line = module.stride, module.dilation, x.ndim < weight.ndim, weight.ndim == 3
    x = x[None] if single else x
    if line:
        # As an image of height one.
        x, weight, stride, dilation = x[:, :, None], weight[:, :, None], (1, *stride), (1, *dilation)
        padding = (0,) * (len(padding)) + padding
        more = None if more is None else (0, *more)
    math = math if x.dtype is torch.float32 else "ieee"
    y = convolution(x, weight, bias, (stride, padding, dilation, module.groups), more, math)
    y = y[:, :, 0] if line else y
    return y[0] if single else y


class MaxPool2d(torch.nn.MaxPool2d):
    """torch.nn.MaxPool2d."""

    def forward(self, x: torch.Tensor) -> Any:
        if not is_floating(x) or x.ndim != 4:
            return super().forward(x)
        operators = torch.ops.tapwise
        sizes = (_pair(one) for one in (self.kernel_size, self.stride, self.padding, self.dilation))
        # The gradient wants the places of the largest.
        if self.return_indices or records((x,)):
            found = operators.max_pool2d_with_indices(x, *sizes, self.ceil_mode)
            return found if self.return_indices else found[0]
        return operators.max_pool2d(x, *sizes, self.ceil_mode)


class AvgPool2d(torch.nn.AvgPool2d):
    """torch.nn.AvgPool2d."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_floating(x) or x.ndim != 4:
            return super().forward(x)
        sizes = (_pair(one) for one in (self.kernel_size, self.stride, self.padding))
        words = self.ceil_mode, self.count_include_pad, self.divisor_override
        return torch.ops.tapwise.avg_pool2d(x, *sizes, *words)


class Softmax(torch.nn.Softmax):
    """torch.nn.Softmax, of a named axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_floating(x) or self.dim is None:
            return super().forward(x)
        return torch.ops.tapwise.softmax(x, self.dim)


class LogSoftmax(torch.nn.LogSoftmax):
    """torch.nn.LogSoftmax, of a named axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_floating(x) or self.dim is None:
            return super().forward(x)
        return torch.ops.tapwise.log_softmax(x, self.dim)


class Unfold(torch.nn.Unfold):
    """torch.nn.Unfold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_floating(x) or x.ndim != 4:
            return super().forward(x)
        sizes = (_pair(one) for one in (self.kernel_size, self.dilation, self.padding, self.stride))
        return torch.ops.tapwise.im2col(x, *sizes)


class Fold(torch.nn.Fold):
    """torch.nn.Fold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_floating(x) or x.ndim != 3:
            return super().forward(x)
        sizes = (_pair(one) for one in (self.output_size, self.kernel_size, self.dilation, self.padding, self.stride))
        return torch.ops.tapwise.col2im(x, *sizes)


def _pair(size: Any) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)
