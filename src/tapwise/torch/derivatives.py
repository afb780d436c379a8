"""Derivatives of the operators, by operators: those of convolution are convolutions, so they may be derived again.

An activation's derivative is taken from the result where that says enough (relu, relu6, tanh, sigmoid, leaky_relu with
a positive slope); else the convolution is computed once more without it. So are those of pooling and softmax; what is
left of their second derivatives is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.nn import functional

from tapwise.torch.activations import result_says, through
from tapwise.torch.operators import LIBRARY, NAMESPACE, OPERATORS
from tapwise.torch.tensors import memory_format, records, refuse_gradients, refuse_tangents

Tensors = tuple[torch.Tensor | None, ...]
Needs = Sequence[bool]
_ATEN: Final = torch.ops.aten
_OPS: Final = getattr(torch.ops, NAMESPACE)


class Derivative(NamedTuple):
    """`saved` gives the tensors that `gradient` wants, of (values, named words, result); `gradient` one for each value,
    of (saved, values that are no tensors, named words, which are needed, gradients of the results)."""

    saved: Callable[[tuple[Any, ...], dict[str, Any], Any], Tensors]
    gradient: Callable[..., Sequence[torch.Tensor | None]]


def _in_one_pass(dy: torch.Tensor) -> bool:
    """Whether a bias's gradient and that before its activation are: on a GPU, unless they are to be derived again or
    belong to a transform of torch.func."""
    return dy.is_cuda and not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()


def _before(
    activation: str | None, dy: torch.Tensor, y: Any, x: torch.Tensor, needs: Needs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the gradient before activation and bias, in x's memory order; the bias's, if it is needed)."""
    order, bias = memory_format(x), len(needs) > 2 and needs[2]
    if bias and _in_one_pass(dy):
        dy = dy.contiguous(memory_format=order)
        if activation is None:
            return dy, _OPS.bias_backward(dy)
        return _OPS.bias_activation_backward(dy, y, activation)
    dz = through(activation, dy, y).contiguous(memory_format=order)
    return dz, dz.sum((0, 2, 3)).to(x.dtype) if bias else None


def _conv2d_saved(values: tuple[Any, ...], named: dict[str, Any], y: torch.Tensor) -> Tensors:
    x, weight, bias = (*values, None)[:3]
    residual = values[7] if len(values) > 7 else None
    activation = named.get("activation")
    again = activation is not None and not result_says(activation)
    return x, weight, bias if again else None, residual if again else None, None if activation is None or again else y


def _conv2d_gradient(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, dy: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    x, weight, bias, residual, y = saved
    assert x is not None and weight is not None
    activation, math = named.get("activation"), {"math": named.get("math", "ieee")}
    words = _words(values, 3)
    if activation is not None and y is None:
        y = _OPS.conv2d(x, weight, bias, *words, residual, **math)
    dz, db = _before(activation, dy, y, x, needs)
    dx = _OPS.conv2d_input(x.shape, weight, dz, *words, **math) if needs[0] else None
    dw = _OPS.conv2d_weight(x, weight.shape, dz, *words, **math) if needs[1] else None
    added = dz if len(needs) > 7 and needs[7] else None
    return (dx, dw, db, None, None, None, None, added)[: len(needs)]


def _words(values: tuple[Any, ...], first: int) -> tuple[Any, ...]:
    """(stride, padding, dilation, groups) from a place on, with what a call left out."""
    given = values[first : first + 4]
    return (*given, *((1, 1), (0, 0), (1, 1), 1)[len(given) :])


def _two(first: int, second: int) -> Callable[[tuple[Any, ...], dict[str, Any], Any], Tensors]:
    return lambda values, named, y: (values[first], values[second])


def _input_gradient(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, g: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """conv2d_input is linear in the filters and in grad_output."""
    weight, dy = saved
    assert weight is not None and dy is not None
    words, g = _words(values, 3), g.contiguous(memory_format=memory_format(dy))
    dw = _OPS.conv2d_weight(g, weight.shape, dy, *words, **named) if needs[1] else None
    ddy = _OPS.conv2d(g, weight, None, *words, **named) if needs[2] else None
    return None, dw, ddy, *(None,) * (len(needs) - 3)


def _weight_gradient(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, g: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """conv2d_weight is linear in x and in grad_output."""
    x, dy = saved
    assert x is not None and dy is not None
    words = _words(values, 3)
    dy = dy.contiguous(memory_format=memory_format(x))
    dx = _OPS.conv2d_input(x.shape, g, dy, *words, **named) if needs[0] else None
    ddy = _OPS.conv2d(x, g, None, *words, **named) if needs[2] else None
    return dx, None, ddy, *(None,) * (len(needs) - 3)


def _transpose_saved(values: tuple[Any, ...], named: dict[str, Any], y: torch.Tensor) -> Tensors:
    activation = named.get("activation")
    again = activation is not None and not result_says(activation)
    bias = values[2] if len(values) > 2 and again else None
    return values[0], values[1], bias, None if activation is None or again else y


def _transpose_gradient(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, dy: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    x, weight, bias, y = saved
    assert x is not None and weight is not None
    activation, math = named.get("activation"), {"math": named.get("math", "ieee")}
    given, defaults = values[3:8], ((1, 1), (0, 0), (0, 0), 1, (1, 1))
    words: tuple[Any, ...] = (*given, *defaults[len(given) :])
    stride, padding, more, groups, dilation = words
    if activation is not None and y is None:
        y = _OPS.conv_transpose2d(x, weight, bias, stride, padding, more, groups, dilation, **math)
    dz, db = _before(activation, dy, y, x, needs)
    words = stride, padding, dilation, groups
    rows, columns = (size // step for size, step in zip(more, stride, strict=True))
    if rows or columns:
        # A convolution of the result's size gives so many more, which met zeros.
        x = functional.pad(x, (0, columns, 0, rows))
    dx = _OPS.conv2d(dz, weight, None, *words, **math) if needs[0] else None
    dw = _OPS.conv2d_weight(dz, weight.shape, x, *words, **math) if needs[1] else None
    if dx is not None and (rows or columns):
        dx = dx[:, :, : dx.shape[2] - rows, : dx.shape[3] - columns].contiguous(memory_format=memory_format(dx))
    return (dx, dw, db, *(None,) * 5)[: len(needs)]


def _pool_words(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of max_pool2d, with what a call left out."""
    given = values[1:]
    return (*given, *((), (0, 0), (1, 1), False)[len(given) - 1 :])


def _max_gradient(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, dy: torch.Tensor, *_: Any
) -> Sequence[torch.Tensor | None]:
    x, places = saved
    assert x is not None
    words = _pool_words(values)
    if places is None:
        places = _OPS.max_pool2d_with_indices(x.detach(), *words)[1]
    dy = dy.contiguous(memory_format=memory_format(x))
    return _OPS.max_pool2d_backward(dy, places, x.shape, *words), *(None,) * (len(needs) - 1)


def _max_second(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, g: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """max_pool2d_backward is linear in grad_output: each window takes what its position names."""
    (places,) = saved
    assert places is not None
    chosen = g.flatten(-2).gather(-1, places.clamp(min=0).flatten(-2)).reshape(places.shape)
    return torch.where(places >= 0, chosen, 0), *(None,) * (len(needs) - 1)


def _avg_gradient(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, dy: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    (x,) = saved
    assert x is not None
    dy = dy.contiguous(memory_format=memory_format(x))
    return _OPS.avg_pool2d_backward(dy, x.shape, *values[1:]), *(None,) * (len(needs) - 1)


def _avg_second(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, g: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """avg_pool2d_backward is linear in grad_output."""
    return _OPS.avg_pool2d(g, *values[2:]), *(None,) * (len(needs) - 1)


def _global_gradient(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, dy: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    (x,) = saved
    assert x is not None
    return ((dy / (x.shape[2] * x.shape[3])).expand(x.shape).contiguous(memory_format=memory_format(x)),)


def _softmax_gradient(name: str) -> Callable[..., Sequence[torch.Tensor | None]]:
    backward = getattr(_OPS, f"{name}_backward")

    def gradient(
        saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, dy: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        (y,) = saved
        assert y is not None
        dy = dy.contiguous(memory_format=memory_format(y))
        return backward(dy, y, *values[1:]), *(None,) * (len(needs) - 1)

    return gradient


def _softmax_second(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, g: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """Softmax's gradient is its own adjoint in grad_output."""
    dy, y = saved
    assert dy is not None and y is not None
    dim = values[2] if len(values) > 2 else -1
    ddy = _OPS.softmax_backward(g.contiguous(memory_format=memory_format(y)), y, dim) if needs[0] else None
    second = None
    if needs[1]:
        second = g * (dy - (dy * y).sum(dim, True)) - dy * (g * y).sum(dim, True)
    return (ddy, second, None)[: len(needs)]


def _log_softmax_second(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, g: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    dy, y = saved
    assert dy is not None and y is not None
    dim, terms = values[2] if len(values) > 2 else -1, g * y.exp()
    ddy = g - terms.sum(dim, True) if needs[0] else None
    return (ddy, -terms * dy.sum(dim, True) if needs[1] else None, None)[: len(needs)]


def _im2col_gradient(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, dy: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    (x,) = saved
    assert x is not None
    return _OPS.col2im(dy, x.shape[2:], *values[1:]), *(None,) * (len(needs) - 1)


def _col2im_gradient(
    saved: Tensors, values: tuple[Any, ...], named: dict[str, Any], needs: Needs, dy: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    return _OPS.im2col(dy, *values[2:]), *(None,) * (len(needs) - 1)


DERIVATIVES: Final = {
    "conv2d": Derivative(_conv2d_saved, _conv2d_gradient),
    "conv2d_input": Derivative(_two(1, 2), _input_gradient),
    "conv2d_weight": Derivative(_two(0, 2), _weight_gradient),
    "conv_transpose2d": Derivative(_transpose_saved, _transpose_gradient),
    "max_pool2d": Derivative(lambda values, named, y: (values[0], None), _max_gradient),
    "max_pool2d_with_indices": Derivative(lambda values, named, y: (values[0], y[1]), _max_gradient),
    "avg_pool2d": Derivative(lambda values, named, y: (values[0],), _avg_gradient),
    "global_avg_pool2d": Derivative(lambda values, named, y: (values[0],), _global_gradient),
    "softmax": Derivative(lambda values, named, y: (y,), _softmax_gradient("softmax")),
    "log_softmax": Derivative(lambda values, named, y: (y,), _softmax_gradient("log_softmax")),
    "max_pool2d_backward": Derivative(lambda values, named, y: (values[1],), _max_second),
    "avg_pool2d_backward": Derivative(lambda values, named, y: (), _avg_second),
    "softmax_backward": Derivative(_two(0, 1), _softmax_second),
    "log_softmax_backward": Derivative(_two(0, 1), _log_softmax_second),
    "im2col": Derivative(lambda values, named, y: (values[0],), _im2col_gradient),
    "col2im": Derivative(lambda values, named, y: (), _col2im_gradient),
}


def _recorded(name: str, derivative: Derivative, below: Callable[..., Any]) -> Any:
    """The operator as a function that autograd records: apply(keys, named, *values)."""

    def forward(keys: Any, named: dict[str, Any], *values: Any) -> Any:
        # Autograd turns recording off here, which is the next transform's to decide.
        on = torch._C._are_functorch_transforms_active()
        with torch.set_grad_enabled(on), torch._C._AutoDispatchBelowAutograd():
            return below(keys, *values, **named)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], result: Any) -> None:
        _, named, *values = inputs
        ctx.save_for_backward(*derivative.saved(tuple(values), named, result))
        ctx.named = named
        ctx.values = tuple(None if isinstance(value, torch.Tensor) else value for value in values)
        if isinstance(result, tuple):
            ctx.mark_non_differentiable(*(one for one in result if not one.is_floating_point()))

    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        needs = ctx.needs_input_grad[2:]
        found = derivative.gradient(ctx.saved_tensors, ctx.values, ctx.named, needs, *gradients)
        return None, None, *found

    methods: dict[str, Any] = {
        "forward": staticmethod(forward), "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
    }  # fmt: skip
    base = torch.autograd.function._SingleLevelFunction
    return type(f"Tapwise_{name}", (base,), methods)


def _rule(name: str) -> Callable[..., Any]:
    """What an operator does where gradients could be recorded: record them or refuse, or go on."""
    operator, after = getattr(_OPS, name).default, torch._C._after_autograd_keyset

    def below(keys: Any, *values: Any, **named: Any) -> Any:
        return operator.redispatch(keys & after, *values, **named)

    derivative = DERIVATIVES.get(name)
    recorded = None if derivative is None else _recorded(name, derivative, below)

    def rule(keys: Any, *values: Any, **named: Any) -> Any:
        refuse_tangents(name, values)
        if recorded is not None and records(values):
            # A transform of torch.func has taken its own level off already: one of autograd's is left.
            with enable_single_level_autograd_function():
                return recorded.apply(keys, named, *values)
        refuse_gradients(name, values)
        return below(keys, *values, **named)

    return rule


def _register() -> None:
    for name in OPERATORS:
        LIBRARY.impl(name, _rule(name), "Autograd", with_keyset=True)


_register()
