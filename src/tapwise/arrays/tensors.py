"""Which of PyTorch's tensors are taken, and in words why one is not.

A tensor is memory with more to it: gradients and tangents that are recorded, a trace, a batch axis of vmap, bits that
stand for a sign. What is read as memory alone would lose the rest without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from tapwise.errors import InvalidProblem

ALLOWED: Final = "float32, float64, float16 or bfloat16"
_CALLED_OUTSIDE: Final = "call tapwise outside of it"


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_proxy(value: Any) -> bool:
    """Whether it is what torch.fx puts in a tensor's place: it has every attribute, and no memory."""
    return type(value).__module__ == "torch.fx.proxy"


def recording(torch: Any) -> bool:
    """Whether PyTorch does more with tensors now than compute, gradients aside."""
    return bool(recorder(torch)())


@cache
def recorder(torch: Any) -> Callable[[], Any]:
    """`recording` as a function that has looked up what it asks: each quick call asks it."""
    forward_ad, c = torch.autograd.forward_ad, torch._C
    tracing, transform = c._get_tracing_state, c._functorch.peek_interpreter_stack
    modes = c._len_torch_dispatch_stack
    return lambda: forward_ad._current_level >= 0 or tracing() is not None or transform() is not None or modes()


def check_unrecorded(torch: Any, tensor: Any, name: str) -> None:
    """Raises InvalidProblem where PyTorch records what is done with a tensor: it would not see a call."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidProblem(
            f"{name} requires a gradient: tapwise computes no gradients yet; use {name}.detach(), or call it under "
            "torch.no_grad()"
        )
    if recording(torch) and (reason := _recorded(torch, tensor)):
        raise InvalidProblem(f"{name} {reason}")


def _recorded(torch: Any, tensor: Any) -> str | None:
    c = torch._C
    if c._get_tracing_state() is not None:
        return f"is traced by torch.jit.trace: the result would be a constant of the trace; {_CALLED_OUTSIDE}"
    if c._functorch.is_batchedtensor(tensor):
        return f"is batched by torch.vmap: {_CALLED_OUTSIDE}, with the batch as an axis"
    if c._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        return f"is followed by a transform of torch.func (grad, jvp, functionalize ...): {_CALLED_OUTSIDE}"
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and forward.unpack_dual(tensor).tangent is not None:
        return "has a tangent of forward-mode differentiation: tapwise computes none; use its primal alone"
    if c._get_dispatch_mode(c._TorchDispatchModeKey.PROXY) is not None:
        return f"is traced by make_fx: the result would be a constant of the graph; {_CALLED_OUTSIDE}"
    return None


def is_fake(tensor: Any) -> bool:
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def why_not(torch: Any, tensor: Any) -> str:
    """Why the memory of a tensor cannot be taken as it is, and what to do about it."""
    reason = _recorded(torch, tensor)
    if reason is not None:
        return reason
    if is_fake(tensor):
        return "is a fake tensor, as of torch.export and make_fx: it has no values; call tapwise on real tensors"
    if tensor.device.type == "meta":
        return "lies on the meta device: it has a shape and no values; 'cpu' or 'cuda' is allowed"
    if tensor.is_nested:
        return "is a nested tensor: one dense tensor is allowed; call tapwise for each of its parts"
    if tensor.layout is not torch.strided:
        return f"is a tensor of layout {tensor.layout}: dense memory is allowed; use to_dense()"
    if tensor.is_quantized:
        return f"is a quantized tensor ({tensor.dtype}): {ALLOWED} is allowed; use dequantize()"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"lies on {tensor.device}: 'cpu' or 'cuda' is allowed"
    # Before what is said of its dtype: pictures may be integers or complex.
    if tensor.is_neg():
        return "has its negative bit set, so its memory holds -x: use resolve_neg()"
    if tensor.is_conj():
        return "has its conjugate bit set, so its memory holds the conjugate: use resolve_conj()"
    if tensor.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        allowed = f"{ALLOWED}, and integers of pictures, are" if tensor.is_cuda else f"{ALLOWED} is"
        return f"has dtype {str(tensor.dtype).removeprefix('torch.')}: {allowed} allowed"
    if tensor.is_cuda:
        return "lies on a GPU and x in this machine's memory: one place is allowed"
    return f"is a {type(tensor).__name__} that shares no memory: a plain dense tensor of {ALLOWED} is allowed"
