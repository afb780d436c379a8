"""What autocast and vmap do with the operators.

Autocast: convolution and squeeze_excitation compute in its dtype, softmax, log_softmax and their gradients in float32,
as PyTorch's own; others as they are called. vmap: a batch axis of x goes into its first axis; of other tensors each
call is made by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from tapwise.torch.operators import LIBRARY, NAMESPACE, SCHEMAS

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
CONVOLUTIONS: Final = ("conv2d", "conv2d_input", "conv2d_weight", "conv_transpose2d", "conv_frozen")
SOFTMAX: Final = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
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
        if isinstance(found[0], tuple):
            return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])
        return torch.stack(found), 0

    return rule


def _aligned(info: Any, in_dims: tuple[int | None, ...], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each with the batch as its first axis, the same values all along it where there was none."""
    dims = zip(tensors, in_dims, strict=False)
    return [x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in dims]


def _softmax(name: str) -> Callable[..., Any]:
    """vmap of softmax of x, or of its gradient of two tensors alike."""
    operator, count = getattr(getattr(torch.ops, NAMESPACE), name), 2 if name.endswith("_backward") else 1

    def rule(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> Any:
        tensors, dim = _aligned(info, in_dims, values[:count]), values[count] if len(values) > count else -1
        axes = tensors[0].ndim - 1
        if axes == 0:
            return torch.stack([operator(*one, dim) for one in zip(*tensors, strict=True)]), 0
        return operator(*tensors, dim % axes + 1), 0

    return rule


def _pool_gradient(name: str, count: int) -> Callable[..., Any]:
    """vmap of a gradient of `count` tensors and the size of x: the axis becomes part of the first one."""
    operator = getattr(getattr(torch.ops, NAMESPACE), name)

    def rule(info: Any, in_dims: tuple[int | None, ...], *values: Any, **named: Any) -> Any:
        tensors = _aligned(info, in_dims, values[:count])
        (first, *rest), words = values[count], values[count + 1 :]
        size = (first * info.batch_size, *rest)
        found = operator(*(x.flatten(0, 1) for x in tensors), size, *words, **named)
        return found.unflatten(0, (info.batch_size, first)), 0

    return rule


def _register() -> None:
    for device, name in (("CPU", "cpu"), ("CUDA", "cuda")):
        for operator in (*CONVOLUTIONS, "squeeze_excitation"):
            rule = _autocast(operator, device, partial(torch.get_autocast_dtype, name))
            LIBRARY.impl(operator, rule, f"Autocast{device}")
        for operator in SOFTMAX:
            LIBRARY.impl(operator, _autocast(operator, device, lambda: torch.float32), f"Autocast{device}")
    assert set(BATCHED) < set(SCHEMAS)
    for name in BATCHED:
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _folded(name), lib=LIBRARY)
    for name, count in (("max_pool2d_backward", 2), ("avg_pool2d_backward", 1)):
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _pool_gradient(name, count), lib=LIBRARY)
    for name in SOFTMAX:
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _softmax(name), lib=LIBRARY)
    biases = "bias_backward", "bias_activation_backward"
    for name in ("conv2d_input", "conv2d_weight", "batch_norm_stats", "batch_norm_backward", *biases):
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _each(name), lib=LIBRARY)
    # Those without a residual have no value in that place.
    for name, residual in (("conv2d", 7), ("conv_frozen", 3), ("squeeze_excitation", 5), ("conv_transpose2d", 8)):
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _convolved(name, residual), lib=LIBRARY)


_register()
