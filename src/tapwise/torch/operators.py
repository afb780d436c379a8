"""Operators of PyTorch: torch.ops.tapwise.conv2d, pooling, squeeze_excitation, softmax, im2col and their like.

Each has a schema, an implementation on CPU and CUDA, a fake (for torch.compile and torch.export), a rule of autocast,
and one of vmap. Results are dense: channels last where x, or what it is a slice of, is so and not contiguous, else
contiguous. Derivatives are in derivatives.py; what has none refuses a call whose gradient would be recorded.
conv_frozen is convolution of one or two axes with filters that are packed once (frozen.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final

import torch
from torch.nn import functional

import tapwise
from tapwise.errors import InvalidProblem
from tapwise.torch import gradients
from tapwise.torch.frozen import conv_frozen, words_of
from tapwise.torch.tensors import memory_format, ordered

NAMESPACE: Final = "tapwise"
# Kept for as long as the process lives: an operator goes with its library.
LIBRARY: Final = torch.library.Library(NAMESPACE, "DEF")
# A graph gives each operator what it was traced with: the result's order follows x's.
TAGS: Final = (torch.Tag.needs_exact_strides,)
SCHEMAS: Final = {
    "conv2d": (
        "(Tensor x, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, SymInt[] padding=[0, 0], "
        "SymInt[2] dilation=1, SymInt groups=1, Tensor? residual=None, *, str? activation=None, str math='ieee', "
        "str algorithm='auto') -> Tensor"
    ),
    "conv2d_input": (
        "(SymInt[] input_size, Tensor weight, Tensor grad_output, SymInt[2] stride=1, SymInt[] padding=[0, 0], "
        "SymInt[2] dilation=1, SymInt groups=1, *, str math='ieee') -> Tensor"
    ),
    "conv2d_weight": (
        "(Tensor x, SymInt[] weight_size, Tensor grad_output, SymInt[2] stride=1, SymInt[] padding=[0, 0], "
        "SymInt[2] dilation=1, SymInt groups=1, *, str math='ieee') -> Tensor"
    ),
    "conv_transpose2d": (
        "(Tensor x, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, SymInt[2] padding=0, "
        "SymInt[2] output_padding=0, SymInt groups=1, SymInt[2] dilation=1, *, str? activation=None, str math='ieee') "
        "-> Tensor"
    ),
    # `words` of a problem's string: "stride2 pad1 relu".
    "conv_frozen": "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str words) -> Tensor",
    "max_pool2d": (
        "(Tensor x, SymInt[2] kernel_size, SymInt[2] stride=[], SymInt[2] padding=0, SymInt[2] dilation=1, "
        "bool ceil_mode=False) -> Tensor"
    ),
    "max_pool2d_with_indices": (
        "(Tensor x, SymInt[2] kernel_size, SymInt[2] stride=[], SymInt[2] padding=0, SymInt[2] dilation=1, "
        "bool ceil_mode=False) -> (Tensor, Tensor)"
    ),
    "avg_pool2d": (
        "(Tensor x, SymInt[2] kernel_size, SymInt[2] stride=[], SymInt[2] padding=0, bool ceil_mode=False, "
        "bool count_include_pad=True, SymInt? divisor_override=None) -> Tensor"
    ),
    "global_avg_pool2d": "(Tensor x) -> Tensor",
    "squeeze_excitation": (
        "(Tensor x, Tensor weight, Tensor bias, str activation='relu', str gate='sigmoid') -> Tensor"
    ),
    "softmax": "(Tensor x, int dim=-1) -> Tensor",
    "log_softmax": "(Tensor x, int dim=-1) -> Tensor",
    "im2col": (
        "(Tensor x, SymInt[2] kernel_size, SymInt[2] dilation=1, SymInt[2] padding=0, SymInt[2] stride=1) -> Tensor"
    ),
    "col2im": (
        "(Tensor x, SymInt[2] output_size, SymInt[2] kernel_size, SymInt[2] dilation=1, SymInt[2] padding=0, "
        "SymInt[2] stride=1) -> Tensor"
    ),
    **gradients.SCHEMAS,
}  # fmt: skip

Words = Sequence[int]


def sides(padding: Words) -> tuple[tuple[int, int], tuple[int, int]]:
    """((top, bottom), (left, right)) of (rows, columns) or of all four."""
    if len(padding) == 2:
        return (padding[0], padding[0]), (padding[1], padding[1])
    if len(padding) == 4:
        return (padding[0], padding[1]), (padding[2], padding[3])
    raise InvalidProblem(f"padding={list(padding)}: (rows, columns) or (top, bottom, left, right) is allowed")


def conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Words = (1, 1),
    padding: Words = (0, 0), dilation: Words = (1, 1), groups: int = 1, residual: torch.Tensor | None = None, *,
    activation: str | None = None, math: str = "ieee", algorithm: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """activation(conv(x, weight) + bias + residual); shapes as of tapwise.conv2d, x and residual with a batch.

    `padding`: (rows, columns) or (top, bottom, left, right).
    """
    if x.ndim != 4:
        raise InvalidProblem(f"x has shape {tuple(x.shape)}: 4 axes (n, c, h, w) are allowed")
    words = tuple(stride), sides(padding), tuple(dilation), groups
    y = tapwise.conv2d(
        x, weight, bias, *words, activation=activation, residual=residual, math=math, algorithm=algorithm
    )
    return ordered(y, x)


def _output(
    x: torch.Tensor, weight: torch.Tensor, stride: Words, padding: Sequence[Words], dilation: Words, groups: int
) -> torch.Tensor:
    """A convolution's result; `padding` (before, after) of each axis."""
    torch._check(x.ndim == weight.ndim, lambda: f"x has {x.ndim} axes and weight {weight.ndim}: as many are allowed")
    sizes: list[Any] = [x.shape[0], weight.shape[0]]
    for axis, (before, after) in enumerate(padding):
        reach = dilation[axis] * (weight.shape[2 + axis] - 1) + 1
        sizes.append((x.shape[2 + axis] + before + after - reach) // stride[axis] + 1)
    torch._check(x.shape[1] == weight.shape[1] * groups, lambda: f"weight has {weight.shape[1]} channels a group")
    return torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def _conv2d_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Words = (1, 1),
    padding: Words = (0, 0), dilation: Words = (1, 1), groups: int = 1, residual: torch.Tensor | None = None,
    **_words: Any,
) -> torch.Tensor:  # fmt: skip
    torch._check(x.ndim == 4, lambda: f"x has {x.ndim} axes: 4 are allowed")
    return _output(x, weight, stride, sides(padding), dilation, groups)


def conv2d_input(
    input_size: Words, weight: torch.Tensor, grad_output: torch.Tensor, stride: Words = (1, 1),
    padding: Words = (0, 0), dilation: Words = (1, 1), groups: int = 1, *, math: str = "ieee",
) -> torch.Tensor:  # fmt: skip
    """The gradient by x, of size `input_size`; padding as for conv2d. It lies in grad_output's order."""
    words = tuple(stride), sides(padding), tuple(dilation), groups
    return ordered(tapwise.conv2d_input(tuple(input_size), weight, grad_output, *words, math=math), grad_output)


def _input_fake(input_size: Words, weight: torch.Tensor, grad_output: torch.Tensor, *_: Any, **_n: Any) -> torch.Tensor:
    torch._check(len(input_size) == 4, lambda: f"input_size={input_size}: 4 numbers are allowed")
    order = memory_format(grad_output)
    return torch.empty(input_size, dtype=grad_output.dtype, device=grad_output.device, memory_format=order)


def conv2d_weight(
    x: torch.Tensor, weight_size: Words, grad_output: torch.Tensor, stride: Words = (1, 1),
    padding: Words = (0, 0), dilation: Words = (1, 1), groups: int = 1, *, math: str = "ieee",
) -> torch.Tensor:  # fmt: skip
    """The gradient by the filters, of size `weight_size`; padding as for conv2d. It lies in x's order."""
    words = tuple(stride), sides(padding), tuple(dilation), groups
    return ordered(tapwise.conv2d_weight(x, tuple(weight_size), grad_output, *words, math=math), x)


def _weight_fake(x: torch.Tensor, weight_size: Words, *_: Any, **_n: Any) -> torch.Tensor:
    torch._check(len(weight_size) == 4, lambda: f"weight_size={weight_size}: 4 numbers are allowed")
    return torch.empty(weight_size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def conv_transpose2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Words = (1, 1),
    padding: Words = (0, 0), output_padding: Words = (0, 0), groups: int = 1, dilation: Words = (1, 1), *,
    activation: str | None = None, math: str = "ieee",
) -> torch.Tensor:  # fmt: skip
    """activation(conv_transpose(x, weight) + bias); shapes as of tapwise.conv_transpose2d, x with a batch."""
    if x.ndim != 4:
        raise InvalidProblem(f"x has shape {tuple(x.shape)}: 4 axes (n, c, h, w) are allowed")
    words = tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation)
    return ordered(tapwise.conv_transpose2d(x, weight, bias, *words, activation=activation, math=math), x)


def _transpose_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Words = (1, 1),
    padding: Words = (0, 0), output_padding: Words = (0, 0), groups: int = 1, dilation: Words = (1, 1), **_words: Any,
) -> torch.Tensor:  # fmt: skip
    torch._check(x.ndim == 4 == weight.ndim, lambda: f"x has {x.ndim} axes, weight {weight.ndim}: 4 are allowed")
    sizes: list[Any] = [x.shape[0], weight.shape[1] * groups]
    for a in range(2):
        reach = dilation[a] * (weight.shape[2 + a] - 1) + 1
        sizes.append((x.shape[2 + a] - 1) * stride[a] - 2 * padding[a] + reach + output_padding[a])
    return torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def _frozen_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, words: str
) -> torch.Tensor:
    return _output(x, weight, *words_of(words, x.ndim - 2).window)


def _like_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """A fake with the shapes of PyTorch's own function, in the order of ours."""

    def fake(x: torch.Tensor, *words: Any, **named: Any) -> Any:
        found = function(torch.empty_like(x, device="meta"), *words, **named)

        def empty(one: torch.Tensor) -> torch.Tensor:
            order = memory_format(x) if one.ndim == 4 else torch.contiguous_format
            return torch.empty(one.shape, dtype=one.dtype, device=x.device, memory_format=order)

        return tuple(map(empty, found)) if isinstance(found, tuple) else empty(found)

    return fake


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator on x from tapwise's function."""

    def compute(x: torch.Tensor, *words: Any, **named: Any) -> Any:
        found = function(x, *words, **named)
        return tuple(ordered(one, x) for one in found) if isinstance(found, tuple) else ordered(found, x)

    return compute


def _stride(stride: Words) -> tuple[int, ...] | None:
    return tuple(stride) or None


def _max_pool2d(
    x: Any, kernel_size: Words, stride: Words = (), padding: Words = (0, 0), dilation: Words = (1, 1),
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    return tapwise.max_pool2d(
        x, tuple(kernel_size), _stride(stride), tuple(padding), tuple(dilation), ceil_mode, return_indices
    )


def _max_pool2d_with_indices(
    x: Any, kernel_size: Words, stride: Words = (), padding: Words = (0, 0), dilation: Words = (1, 1),
    ceil_mode: bool = False,
) -> Any:  # fmt: skip
    return _max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices=True)


def _avg_pool2d(
    x: Any, kernel_size: Words, stride: Words = (), padding: Words = (0, 0), ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    return tapwise.avg_pool2d(
        x, tuple(kernel_size), _stride(stride), tuple(padding), ceil_mode, count_include_pad, divisor_override
    )


def _global_avg_pool2d(x: Any) -> Any:
    return tapwise.reduce(x, "mean", (2, 3), True)


def _global_fake(x: torch.Tensor) -> torch.Tensor:
    torch._check(x.ndim == 4, lambda: f"x has {x.ndim} axes: 4 are allowed")
    sizes = (*x.shape[:2], 1, 1)
    return torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def _im2col(
    x: Any, kernel_size: Words, dilation: Words = (1, 1), padding: Words = (0, 0), stride: Words = (1, 1)
) -> Any:
    return tapwise.im2col(x, tuple(kernel_size), tuple(dilation), tuple(padding), tuple(stride))


def _col2im(
    x: Any, output_size: Words, kernel_size: Words, dilation: Words = (1, 1), padding: Words = (0, 0),
    stride: Words = (1, 1),
) -> Any:  # fmt: skip
    return tapwise.col2im(x, tuple(output_size), tuple(kernel_size), tuple(dilation), tuple(padding), tuple(stride))


def _softmax(x: Any, dim: int = -1) -> Any:
    return tapwise.softmax(x, dim)


def _log_softmax(x: Any, dim: int = -1) -> Any:
    return tapwise.log_softmax(x, dim)


def _squeeze_excitation(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str = "relu", gate: str = "sigmoid"
) -> torch.Tensor:
    """x * gate(expand @ activation(reduce @ mean(x))), as tapwise.squeeze_excitation."""
    return ordered(tapwise.squeeze_excitation(x, weight, bias, activation, gate), x)


def _squeeze_excitation_fake(x: torch.Tensor, weight: torch.Tensor, *_words: Any, **_named: Any) -> torch.Tensor:
    torch._check(x.ndim == 4, lambda: f"x has {x.ndim} axes: 4 are allowed")
    torch._check(weight.ndim == 3, lambda: f"weight has {weight.ndim} axes: 3 are allowed")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def _softmax_fake(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    torch._check(-max(x.ndim, 1) <= dim < max(x.ndim, 1), lambda: f"dim={dim}: x has {x.ndim} axes")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def _indices(x: torch.Tensor, *words: Any, **named: Any) -> Any:
    return functional.max_pool2d_with_indices(x, *words, **named)


# (implementation, fake)
OPERATORS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "conv2d": (conv2d, _conv2d_fake),
    "conv2d_input": (conv2d_input, _input_fake),
    "conv2d_weight": (conv2d_weight, _weight_fake),
    "conv_transpose2d": (conv_transpose2d, _transpose_fake),
    "conv_frozen": (conv_frozen, _frozen_fake),
    "max_pool2d": (_computed(_max_pool2d), _like_torch(functional.max_pool2d)),
    "max_pool2d_with_indices": (_computed(_max_pool2d_with_indices), _like_torch(_indices)),
    "avg_pool2d": (_computed(_avg_pool2d), _like_torch(functional.avg_pool2d)),
    "global_avg_pool2d": (_computed(_global_avg_pool2d), _global_fake),
    "squeeze_excitation": (_squeeze_excitation, _squeeze_excitation_fake),
    "softmax": (_computed(_softmax), _softmax_fake),
    "log_softmax": (_computed(_log_softmax), _softmax_fake),
    "im2col": (_computed(_im2col), _like_torch(functional.unfold)),
    "col2im": (_computed(_col2im), _like_torch(functional.fold)),
    **gradients.OPERATORS,
}


def _tell_inductor() -> None:
    """Make the operators known to Inductor, where it is loaded.

    At the first use of an operator that it does not know, Inductor before PyTorch 2.13 puts into words what its
    arguments are computed from: behind sixteen residual additions this takes minutes.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    make, constraint = (getattr(lowering, name, None) for name in ("make_fallback", "tag_to_layout_constraint"))
    known = getattr(lowering, "lowerings", None)
    if make is None or constraint is None or known is None:
        return
    for name in OPERATORS:
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        if operator not in known:
            make(operator, layout_constraint=constraint(*TAGS), warn=False)


def _traced(fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake, which Inductor's compiler calls before it lowers a graph."""

    @wraps(fake)
    def told(*words: Any, **named: Any) -> Any:
        _tell_inductor()
        return fake(*words, **named)

    return told


def _register() -> None:
    for name, (implementation, fake) in OPERATORS.items():
        LIBRARY.define(name + SCHEMAS[name], tags=TAGS)
        for backend in ("CPU", "CUDA"):
            LIBRARY.impl(name, implementation, backend)
        torch.library.register_fake(f"{NAMESPACE}::{name}", _traced(fake), lib=LIBRARY)


_register()
