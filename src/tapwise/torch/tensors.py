"""Questions that the operators ask of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar

import torch
from torch.autograd import forward_ad

from tapwise.errors import InvalidProblem

# Dtypes as problems name them.
NAMES: Final = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}

# How often a tensor was written.
_WRITES: Final[Any] = torch.Tensor._version.__get__


def memory_format(x: torch.Tensor) -> torch.memory_format:
    """That of a result: channels last where x, or what it is a slice of, is dense that way and not the other."""
    last = x.ndim == 4 and not x.is_contiguous() and (x.is_contiguous(memory_format=torch.channels_last) or _last(x))
    return torch.channels_last if last else torch.contiguous_format


def _last(x: torch.Tensor) -> bool:
    """Whether the axes lie in the order of channels last, with gaps, as of some of a tensor's channels."""
    reach: Any = 1
    for axis in (1, 3, 2, 0):
        if x.shape[axis] != 1:
            if x.stride(axis) < reach:
                return False
            reach = x.stride(axis) * x.shape[axis]
    return x.shape[1] != 1 and x.stride(1) == 1


Kind = TypeVar("Kind", bound=torch.nn.Module)


def recast(module: torch.nn.Module, kind: type[Kind]) -> Kind:
    """A module of that class with the parameters, buffers, hooks and words of another."""
    made: Kind = object.__new__(kind)
    made.__dict__.update(module.__dict__)
    return made


def axes_as_they_lie(y: torch.Tensor, last: bool) -> torch.Tensor:
    """y (n, c, h, w), where it is to lie channels `last` as (n, h, w, c), in the same memory.

    torch.compile makes the gradients of an autograd.Function contiguous: of channels last it would write each once
    more. Of axes as they lie it writes none.
    """
    return _moved(y, (0, 2, 3, 1)) if last else y


def axes_as_named(y: torch.Tensor, last: bool) -> torch.Tensor:
    """What axes_as_they_lie made of y, as (n, c, h, w) again."""
    return _moved(y, (0, 3, 1, 2)) if last else y


def _moved(y: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """No view to autograd: what is done to it in place would be done by way of all of it."""
    moved = y.permute(axes)
    made: torch.Tensor = torch.ops.aten._unsafe_view(moved, moved.shape)
    return made


def layout_of(x: torch.Tensor, weight: torch.Tensor) -> str:
    """A convolution's memory order. One pixel lies alike in both, and channels last has the faster kernels."""
    pixel = x.ndim == 4 and all(size == 1 for size in (*x.shape[2:], *weight.shape[2:]))
    return "nhwc" if pixel or memory_format(x) is torch.channels_last else "nchw"


def version(tensors: Iterable[torch.Tensor | None]) -> tuple[int, ...]:
    """What changes with a write to one of them, and with another tensor in its place. Asked for at each call."""
    there = [one for one in tensors if one is not None]
    try:
        writes: Any = map(_WRITES, there)
        return (*map(torch.Tensor.data_ptr, there), *writes)
    except RuntimeError:
        # Tensors of inference mode do not count.
        writes = (0 if one.is_inference() else one._version for one in there)
        return (*map(torch.Tensor.data_ptr, there), *writes)


def alone(x: torch.Tensor) -> bool:
    """Whether x is a CPU's tensor of which no gradient is recorded, and nobody looks on: no trace, transform, mode or
    autocast is to learn of an operator's call, which takes as long as a small layer."""
    return not torch.compiler.is_compiling() and (
        type(x) is torch.Tensor
        and x.is_cpu
        and not torch.is_grad_enabled()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and not torch.jit.is_tracing()
        and not torch.autograd._profiler_enabled()
    )


def ordered(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A result in the order that the fakes promise, of x's dtype where it is floating."""
    y = y.to(x.dtype) if y.is_floating_point() else y
    return y.contiguous(memory_format=memory_format(x)) if y.ndim == 4 else y.contiguous()


def records(values: tuple[Any, ...]) -> bool:
    """Whether a gradient is recorded of an operator's call."""
    return torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in values)


def refuse_gradients(name: str, values: tuple[Any, ...]) -> None:
    """Raises InvalidProblem where a gradient would be recorded: it would be lost without a word."""
    if records(values):
        raise InvalidProblem(
            f"torch.ops.tapwise.{name}: a tensor requires a gradient, and there is no derivative yet; call it under "
            "torch.no_grad(), or with detached tensors"
        )


def refuse_tangents(name: str, values: tuple[Any, ...]) -> None:
    """Raises InvalidProblem where a tangent would be lost."""
    if forward_ad._current_level >= 0:
        for value in values:
            if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
                raise InvalidProblem(
                    f"torch.ops.tapwise.{name}: a tensor has a tangent, and there is no derivative yet; use its primal"
                )
