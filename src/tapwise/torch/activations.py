"""Activations by their words, and gradients before them, by PyTorch's operators."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch.nn import functional

from tapwise.activation import LEAKY_RELU, named_activation

_ATEN: Final = torch.ops.aten


def activated(u: torch.Tensor, activation: str | None) -> torch.Tensor:
    """The activation of that word."""
    name, slope = named_activation(activation)
    if name is None:
        return u
    if name == LEAKY_RELU:
        return functional.leaky_relu(u, slope)
    if name in ("gelu", "gelu_tanh"):
        return functional.gelu(u, approximate="tanh" if name == "gelu_tanh" else "none")
    return cast(torch.Tensor, getattr(functional, name)(u))


def result_says(activation: str | None) -> bool:
    """Whether an activation's derivative follows from its result."""
    name, slope = named_activation(activation)
    return name in ("relu", "relu6", "tanh", "sigmoid") or (name == LEAKY_RELU and slope > 0)


def through(activation: str | None, dy: torch.Tensor, y: Any) -> torch.Tensor:
    """The gradient before an activation; y: its result where that says enough, else its argument."""
    name, slope = named_activation(activation)
    found: Any
    if name is None:
        found = dy
    elif name == "relu":
        found = _ATEN.threshold_backward(dy, y, 0)
    elif name == "relu6":
        found = _ATEN.hardtanh_backward(dy, y, 0, 6)
    elif name == LEAKY_RELU:
        found = _ATEN.leaky_relu_backward(dy, y, slope, slope > 0)
    elif name in ("gelu", "gelu_tanh"):
        found = _ATEN.gelu_backward(dy, y, approximate="tanh" if name == "gelu_tanh" else "none")
    elif name == "silu" and torch.is_grad_enabled():
        # PyTorch's kernel has no derivative.
        s = torch.sigmoid(y)
        found = dy * s * (1 + y * (1 - s))
    else:
        found = getattr(_ATEN, f"{name}_backward")(dy, y)
    return cast(torch.Tensor, found)
