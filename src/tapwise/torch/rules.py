"""What autocast and vmap do with the operators.

Autocast: convolution and squeeze_excitation compute in its dtype, softmax and log_softmax in float32, as PyTorch's
own; others as they are called. vmap: a batch axis of x goes into its first axis; of other tensors each call is made by
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from tapwise.torch.operators import LIBRARY, NAMESPACE, SCHEMAS

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
CONVOLUTIONS: Final = ("conv2d", "conv2d_input", "conv2d_weight", "conv_transpose2d", "conv_frozen")
# Operators whose result's first axis is that of x.
BATCHED: Final = ("max_pool2d", "max_pool2d_with_indices", "avg_pool2d", "global_avg_pool2d", "im2col", "col2im")


def _autocast(name: str, device: str, dtype_of: Callable[[], torch.dtype]) -> Callable[..., Any]:
    operator = getattr(getattr(torch.ops, NAMESPACE), name)
    key = getattr(torch._C.DispatchKey, f"Autocast{device}")

    def rule(*values: Any, **named: Any) -> Any:
        dtype = dtype_of()

        def cast(place: Any, value: Any) -> Any:
            # Frozen filters are cast as they are packed.
            kept = name == "conv_frozen" and place in (1, 2)
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in FLOATS and not kept else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return operator(
                *(cast(place, value) for place, value in enumerate(values)),
                **{place: cast(place, value) for place, value in named.items()},
            )

    return rule


def _folded(name: str) -> Callable[..., Any]:
    """vmap of an operator on x alone: its axis becomes part of the first one."""
    operator = getattr(getattr(torch.ops, NAMESPACE), name)

    def rule(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, *words: Any, **named: Any) -> Any:
        assert in_dims[0] is not None
        moved = x.movedim(in_dims[0], 0)
        found = operator(moved.flatten(0, 1), *words, **named)
        sizes = moved.shape[:2]
        if isinstance(found, tuple):
            return tuple(one.unflatten(0, sizes) for one in found), (0,) * len(found)
        return found.unflatten(0, sizes), 0

    return rule


def _convolved(name: str, residual: int) -> Callable[..., Any]:
    """vmap of an operator on x and filters; a convolution's residual, which must go along with x, has that place."""
    folded, each = _folded(name), _each(name)

    def rule(info: Any, in_dims: tuple[Any, ...], *values: Any, **named: Any) -> Any:
        batched = [isinstance(dim, int) for dim in in_dims]
        if batched[0] and not any(batched[1:]) and values[residual : residual + 1] in ((), (None,)):
            return folded(info, in_dims, *values, **named)
        return each(info, in_dims, *values, **named)

    return rule


def _each(name: str) -> Callable[..., Any]:
    """vmap of an operator by a call for each."""
    operator = getattr(getattr(torch.ops, NAMESPACE), name)

    def rule(info: Any, in_dims: tuple[Any, ...], *values: Any, **named: Any) -> Any:
        # Of lists there is a list.
        batched = [isinstance(dim, int) for dim in in_dims]
        rows = [value.unbind(dim) if of else value for value, dim, of in zip(values, in_dims, batched, strict=True)]
        found = [
            operator(*(row[i] if of else row for row, of in zip(rows, batched, strict=True)), **named)
            for i in range(info.batch_size)
        ]
        return torch.stack(found), 0

    return rule


def _softmax(name: str) -> Callable[..., Any]:
    operator = getattr(getattr(torch.ops, NAMESPACE), name)

    def rule(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, dim: int = -1) -> Any:
        assert in_dims[0] is not None
        axes = x.ndim - 1
        if axes == 0:
            return torch.stack([operator(one, dim) for one in x.unbind(in_dims[0])]), 0
        return operator(x.movedim(in_dims[0], 0), dim % axes + 1), 0

    return rule


def _register() -> None:
    for device, name in (("CPU", "cpu"), ("CUDA", "cuda")):
        for operator in (*CONVOLUTIONS, "squeeze_excitation"):
            rule = _autocast(operator, device, partial(torch.get_autocast_dtype, name))
            LIBRARY.impl(operator, rule, f"Autocast{device}")
        for operator in ("softmax", "log_softmax"):
            LIBRARY.impl(operator, _autocast(operator, device, lambda: torch.float32), f"Autocast{device}")
    assert set(BATCHED) < set(SCHEMAS)
    for name in BATCHED:
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _folded(name), lib=LIBRARY)
    for name in ("softmax", "log_softmax"):
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _softmax(name), lib=LIBRARY)
    for name in ("conv2d_input", "conv2d_weight"):
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _each(name), lib=LIBRARY)
    # Those without a residual have no value in that place.
    for name, residual in (("conv2d", 7), ("conv_frozen", 3), ("squeeze_excitation", 5), ("conv_transpose2d", 8)):
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _convolved(name, residual), lib=LIBRARY)


_register()
