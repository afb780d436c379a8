"""torch.ops.tapwise of pooling's, softmax's and biases' gradients, and of batch normalisation in training: what
operators.py registers besides its own.

dx lies in grad_output's order: channels last where that is so and not contiguous, else contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

import tapwise
from tapwise.torch.tensors import memory_format, ordered

SCHEMAS: Final = {
    "max_pool2d_backward": (
        "(Tensor grad_output, Tensor indices, SymInt[] input_size, SymInt[2] kernel_size, SymInt[2] stride=[], "
        "SymInt[2] padding=0, SymInt[2] dilation=1, bool ceil_mode=False) -> Tensor"
    ),
    "avg_pool2d_backward": (
        "(Tensor grad_output, SymInt[] input_size, SymInt[2] kernel_size, SymInt[2] stride=[], SymInt[2] padding=0, "
        "bool ceil_mode=False, bool count_include_pad=True, SymInt? divisor_override=None) -> Tensor"
    ),
    "softmax_backward": "(Tensor grad_output, Tensor output, int dim=-1) -> Tensor",
    "log_softmax_backward": "(Tensor grad_output, Tensor output, int dim=-1) -> Tensor",
    "bias_backward": "(Tensor grad_output) -> Tensor",
    "bias_activation_backward": "(Tensor grad_output, Tensor y, str activation) -> (Tensor, Tensor)",
    "batch_norm_stats": "(Tensor x) -> Tensor",
    "batch_norm_backward": (
        "(Tensor grad_output, Tensor x, Tensor parameters, str? activation=None) -> (Tensor, Tensor)"
    ),
}

Words = Sequence[int]


def _max(
    grad_output: torch.Tensor, indices: torch.Tensor, input_size: Words, kernel_size: Words, stride: Words = (),
    padding: Words = (0, 0), dilation: Words = (1, 1), ceil_mode: bool = False,
) -> torch.Tensor:  # fmt: skip
    words = tuple(kernel_size), tuple(stride) or None, tuple(padding), tuple(dilation), ceil_mode
    dx = tapwise.max_pool2d_backward(grad_output, indices, tuple(input_size), *words)
    return ordered(dx, grad_output)


def _avg(
    grad_output: torch.Tensor, input_size: Words, kernel_size: Words, stride: Words = (), padding: Words = (0, 0),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> torch.Tensor:  # fmt: skip
    words = tuple(kernel_size), tuple(stride) or None, tuple(padding), ceil_mode, count_include_pad, divisor_override
    return ordered(tapwise.avg_pool2d_backward(grad_output, tuple(input_size), *words), grad_output)


def _sized(grad_output: torch.Tensor, input_size: Words) -> torch.Tensor:
    torch._check(
        len(input_size) == grad_output.ndim, lambda: f"input_size={input_size}: {grad_output.ndim} sizes are allowed"
    )
    order = memory_format(grad_output)
    return torch.empty(input_size, dtype=grad_output.dtype, device=grad_output.device, memory_format=order)


def _max_fake(
    grad_output: torch.Tensor, indices: torch.Tensor, input_size: Words, *_: Any, **_named: Any
) -> torch.Tensor:  # fmt: skip
    torch._check(indices.shape == grad_output.shape, lambda: f"indices has shape {tuple(indices.shape)}")
    return _sized(grad_output, input_size)


def _avg_fake(grad_output: torch.Tensor, input_size: Words, *_: Any, **_named: Any) -> torch.Tensor:
    return _sized(grad_output, input_size)


def _softmax(name: str, grad_output: torch.Tensor, output: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return ordered(getattr(tapwise, name)(grad_output, output, dim), grad_output)


def _softmax_fake(grad_output: torch.Tensor, output: torch.Tensor, dim: int = -1) -> torch.Tensor:
    axes = max(grad_output.ndim, 1)
    torch._check(-axes <= dim < axes, lambda: f"dim={dim}: grad_output has {grad_output.ndim} axes")
    torch._check(output.shape == grad_output.shape, lambda: f"output has shape {tuple(output.shape)}")
    return torch.empty(
        grad_output.shape, dtype=grad_output.dtype, device=grad_output.device, memory_format=memory_format(grad_output)
    )


def _bias_fake(grad_output: torch.Tensor) -> torch.Tensor:
    torch._check(grad_output.ndim == 4, lambda: f"grad_output has {grad_output.ndim} axes: 4 are allowed")
    return grad_output.new_empty(grad_output.shape[1])


def _bias_activation(grad_output: torch.Tensor, y: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    dz, db = tapwise.bias_activation_backward(grad_output, y, activation)
    return ordered(dz, grad_output), db


def _bias_activation_fake(
    grad_output: torch.Tensor, y: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    torch._check(y.shape == grad_output.shape, lambda: f"y has shape {tuple(y.shape)}")
    return _sized(grad_output, grad_output.shape), _bias_fake(grad_output)


def _stats_fake(x: torch.Tensor) -> torch.Tensor:
    torch._check(x.ndim == 4, lambda: f"x has {x.ndim} axes: 4 are allowed")
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return torch.empty((2, x.shape[1]), dtype=dtype, device=x.device)


def _norm(
    grad_output: torch.Tensor, x: torch.Tensor, parameters: torch.Tensor, activation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, sums = tapwise.batch_norm_backward(grad_output, x, parameters, activation)
    return ordered(dx, grad_output), sums


def _norm_fake(
    grad_output: torch.Tensor, x: torch.Tensor, parameters: torch.Tensor, activation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    torch._check(x.shape == grad_output.shape, lambda: f"x has shape {tuple(x.shape)}")
    return _sized(grad_output, grad_output.shape), _stats_fake(grad_output)


# (implementation, fake)
OPERATORS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "max_pool2d_backward": (_max, _max_fake),
    "avg_pool2d_backward": (_avg, _avg_fake),
    **{name: (partial(_softmax, name), _softmax_fake) for name in ("softmax_backward", "log_softmax_backward")},
    "bias_backward": (tapwise.bias_backward, _bias_fake),
    "bias_activation_backward": (_bias_activation, _bias_activation_fake),
    "batch_norm_stats": (tapwise.batch_norm_stats, _stats_fake),
    "batch_norm_backward": (_norm, _norm_fake),
}
