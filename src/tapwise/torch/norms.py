"""Batch normalisation in training under torch.compile: what it adds up by kernels of ours, the rest by Inductor's.

Inductor reads x for mean and variance at a third of a GPU's bandwidth, and x and the gradient for the gradient's sums;
batch_norm_stats and batch_norm_backward at four fifths. What works on each element by itself stays PyTorch's operators
forward, which Inductor fuses with what comes before and behind; backward two convolutions read the result, for which
Inductor wrote it twice.
"""

from __future__ import annotations

from typing import Any, Final, Self

import torch

from tapwise.torch.activations import activated
from tapwise.torch.operators import NAMESPACE
from tapwise.torch.tensors import axes_as_named, axes_as_they_lie, memory_format, recast

_OPS: Final = getattr(torch.ops, NAMESPACE)
TAKEN: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _along(vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Vectors (v, c), each to go along an image's channels."""
    return vectors[:, None, :, None, None].unbind()


class _Norm(torch.autograd.Function):
    """(activation(batch_norm(x)), mean, biased variance): of x (n, c, h, w), and vectors in float32. Keeps x and four
    vectors for the gradient. The first as `axes_as_they_lie` makes it, channels `last` or not."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, activation: str | None, last: bool) -> Any:
        mean, variance = _OPS.batch_norm_stats(x).unbind()
        invstd = torch.rsqrt(variance + eps)
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        shift = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
        parameters = torch.stack((mean, invstd, scale, shift))
        mean_c, invstd_c, scale_c, shift_c = _along(parameters)
        u = (x.to(mean.dtype) - mean_c) * invstd_c * scale_c + shift_c
        ctx.save_for_backward(x, parameters)
        ctx.activation, ctx.last = activation, last
        ctx.dtypes = None if weight is None else weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance)
        return axes_as_they_lie(activated(u, activation).to(x.dtype), last), mean, variance

    @staticmethod
    def backward(ctx: Any, dz: Any, *_: Any) -> Any:
        x, parameters = ctx.saved_tensors
        dz = axes_as_named(dz, ctx.last).contiguous(memory_format=memory_format(x))
        dx, sums = _OPS.batch_norm_backward(dz, x, parameters, ctx.activation)
        weight_dtype, bias_dtype = ctx.dtypes
        of_bias = None if bias_dtype is None else sums[0].to(bias_dtype)
        of_weight = None if weight_dtype is None else sums[1].to(weight_dtype)
        return dx if ctx.needs_input_grad[0] else None, of_weight, of_bias, None, None, None


def by_kernels(x: torch.Tensor) -> bool:
    """Whether batch normalisation of x is to be ours, and not PyTorch's own: where Inductor fuses the rest of it."""
    return torch.compiler.is_compiling() and x.is_cuda


def _fits(x: torch.Tensor, vectors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether x, beside a norm's parameters and statistics, is ours to take. PyTorch says what is wrong with others."""
    if x.ndim != 4 or x.dtype not in TAKEN or torch._C._are_functorch_transforms_active():
        return False
    dtypes = (x.dtype,) if x.dtype in (torch.float32, torch.float64) else (x.dtype, torch.float32)
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    # PyTorch refuses one element a channel.
    return dense and x.numel() > x.shape[1] and all(one is None or one.dtype in dtypes for one in vectors)


class TrainedBatchNorm2d(torch.nn.BatchNorm2d):
    """torch.nn.BatchNorm2d, with an activation behind it where `activation` names one."""

    activation: str | None

    @classmethod
    def of(cls, module: torch.nn.BatchNorm2d, activation: str | None = None) -> Self:
        """A module with the parameters, statistics and hooks of torch.nn's own."""
        made = recast(module, cls)
        made.activation = activation
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        vectors = self.weight, self.bias, self.running_mean, self.running_var
        if not of_batch or not by_kernels(input) or not _fits(input, vectors):
            return activated(super().forward(input), self.activation)
        last = memory_format(input) is torch.channels_last
        y, mean, variance = _Norm.apply(input, self.weight, self.bias, self.eps, self.activation, last)
        if self.training and self.track_running_stats:
            self._keep(mean, variance, input.numel() // input.shape[1])
        return axes_as_named(y, last)

    @torch.no_grad()
    def _keep(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        """The running statistics with those of a batch of so many elements a channel."""
        factor: Any = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / self.num_batches_tracked.to(torch.float64)
        for running, found in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
            if running is not None:
                # In the wider dtype of both.
                running.copy_(found * factor + running * (1.0 - factor))

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", activation={self.activation}" if self.activation else "")
