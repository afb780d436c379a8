"""Convolution that autograd records, each of its directions by tapwise or by PyTorch.

Directions are those of the convolution that goes from x to y: a transposed one goes back, so its forward is dgrad, the
gradient by its input fprop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from tapwise.torch import calls
from tapwise.torch.calls import Window
from tapwise.torch.tensors import NAMES, axes_as_named, axes_as_they_lie, memory_format

_OPS: Final = torch.ops.tapwise
_BACKWARD: Final = torch.ops.aten.convolution_backward.default
DEVICES: Final = ("cpu", "cuda")
NOTHING: Final[frozenset[str]] = frozenset()
# (rows, columns) more of a transposed convolution's result; None for one that is not transposed.
More = tuple[int, ...] | None


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window, more: More = None,
    math: str = "ieee", by_torch: frozenset[str] = NOTHING,
) -> torch.Tensor:  # fmt: skip
    """conv(x, weight) + bias, or with `more` conv_transpose, whose output_padding it is.

    x with a batch, all of one floating dtype on a CPU or GPU; shapes as of torch.nn.functional.conv2d and
    conv_transpose2d. `window`: (stride, padding, dilation, groups). `by_torch`: the directions that PyTorch computes.
    Gradients are recorded, also of gradients. Raises InvalidProblem for what does not fit.
    """
    if torch._C._are_functorch_transforms_active():
        # The operators' own derivatives know of them.
        stride, padding, dilation, groups = window
        made: torch.Tensor = (
            _OPS.conv2d(x, weight, bias, *window, math=math)
            if more is None
            else _OPS.conv_transpose2d(x, weight, bias, stride, padding, more, groups, dilation, math=math)
        )
        return made
    if not torch.is_grad_enabled():
        return forward(x, weight, bias, window, more, math, by_torch)
    if torch.compiler.is_compiling():
        last = memory_format(x) is torch.channels_last
        return axes_as_named(_Convolution.apply(x, weight, bias, window, more, math, by_torch, last), last)
    return _recorded(x, weight, bias, window, more, math, by_torch, False)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window, more: More, math: str,
    by_torch: frozenset[str],
) -> torch.Tensor:  # fmt: skip
    if more is None:
        if "fprop" in by_torch:
            return torch.conv2d(x, weight, bias, *window)
        return calls.fprop(x, weight, bias, window, math)
    stride, padding, dilation, groups = window
    if "dgrad" in by_torch:
        return torch.conv_transpose2d(x, weight, bias, stride, padding, more, groups, dilation)
    return calls.transposed(x, weight, bias, window, more, math)


def gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window, more: More, math: str,
    by_torch: frozenset[str], wanted: tuple[bool, ...],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(by x, by the filters, by the bias), those that are wanted, each by the library that it is set to."""
    dy = dy.contiguous(memory_format=memory_format(x))
    dx_by_torch = wanted[0] and ("dgrad" if more is None else "fprop") in by_torch
    dw_by_torch = wanted[1] and "wgrad" in by_torch
    dx = dw = db = None
    if dx_by_torch or dw_by_torch:
        stride, padding, dilation, groups = window
        # One call for all that PyTorch computes: its dispatcher takes as long as a small layer.
        words = stride, padding, dilation, more is not None, more or (0, 0), groups
        mask = [dx_by_torch, dw_by_torch, wanted[2]]
        dx, dw, db = _BACKWARD(dy, x, weight, [dy.shape[1]], *words, mask)
    elif wanted[2]:
        db = dy.sum((0, 2, 3))
    if wanted[0] and not dx_by_torch:
        if more is None:
            dx = calls.dgrad(x.shape, weight, dy, window, math)
        else:
            dx = calls.fprop(dy, weight, None, window, math)
    if wanted[1] and not dw_by_torch:
        image, result = (x, dy) if more is None else (dy, x)
        dw = calls.wgrad(image, weight.shape, result, window, math)
    return dx, dw, db


class _Convolution(torch.autograd.Function):
    """Its gradients have gradients by the operators' own. y and its gradient are as `axes_as_they_lie` makes them, of
    channels `last` or not: where torch.compile would copy others."""

    # With a setup_context of its own, PyTorch would look at this function's signature in each call.
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window, more: More,
        math: str, by_torch: frozenset[str], last: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.words, ctx.last = (window, more, math, by_torch), last
        return axes_as_they_lie(forward(x, weight, bias, window, more, math, by_torch), last)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        window, more, math, by_torch = ctx.words
        dy = axes_as_named(dy, ctx.last)
        found = gradients(dy, x, weight, window, more, math, by_torch, ctx.needs_input_grad)
        return *found, None, None, None, None, None


# PyTorch's own in C++, without what prepares a call for transforms of torch.func: a third of what both take.
_recorded: Final[Callable[..., torch.Tensor]] = super(torch.autograd.Function, _Convolution).apply


def cast(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Any, Any, Any]:
    """What autocast makes of (x, weight, bias), as PyTorch's own convolution: nothing of float64."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return _to(x, dtype), _to(weight, dtype), None if bias is None else _to(bias, dtype)


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype is dtype or x.dtype is torch.float64 else x.to(dtype)


def are_taken(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `convolution` takes them: of one floating dtype, on a CPU or GPU. PyTorch says what is wrong with others,
    or computes them."""
    dtype = x.dtype
    alike = weight.dtype is dtype and (bias is None or bias.dtype is dtype)
    return alike and dtype in NAMES and x.device.type in DEVICES


def fits(more: More, stride: tuple[int, ...]) -> bool:
    """Whether a transposed convolution is the gradient of one: PyTorch also takes output_padding below dilation."""
    return more is None or all(one < step for one, step in zip(more, stride, strict=True))
