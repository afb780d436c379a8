"""Convolution and its gradients where they are computed over and over, as in training: what leads to a kernel is done
once for a kind of tensors (shapes, strides, dtypes, devices).

On a GPU a call takes new memory and launches, on a CPU it runs a plan that is kept; else, and where more is done with
tensors than to compute (modes, transforms, traces, gradients of gradients), the operators of PyTorch's dispatcher do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from tapwise import arrays
from tapwise.arrays import device
from tapwise.arrays.device import ALIGNMENT
from tapwise.arrays.host import numpy_of, tensor_of
from tapwise.arrays.tensors import recorder
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.repeated import CALL_IT, DeviceCall, HostCall, on_gpu, on_host
from tapwise.problem import Direction
from tapwise.torch import operators
from tapwise.torch.tensors import NAMES, ordered

# (stride, padding, dilation, groups); padding (rows, columns) or (top, bottom, left, right).
Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
# The result for tensors (x, w, bias) of one kind, (dy, w, bias) for dgrad, (x, dy, None) for wgrad; None where these
# are to go the whole way.
Call = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], "torch.Tensor | None"]

# Kinds of calls that are kept.
KEPT: Final = 4096
_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))
_calls: Final[dict[Any, Call]] = {}
_recording: Final = recorder(torch)
_OPS: Final = torch.ops.tapwise


def fprop(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window, math: str
) -> torch.Tensor:  # fmt: skip
    """conv(x, weight) + bias, as torch.ops.tapwise.conv2d."""

    def operator(space: Any) -> torch.Tensor:
        return space.conv2d(x, weight, bias, *window, math=math)

    return _called(operator, "fprop", x, weight, bias, None, window, math)


def dgrad(
    size: tuple[int, ...], weight: torch.Tensor, dy: torch.Tensor, window: Window, math: str
) -> torch.Tensor:  # fmt: skip
    """The gradient by x of that size, as torch.ops.tapwise.conv2d_input."""

    def operator(space: Any) -> torch.Tensor:
        return space.conv2d_input(size, weight, dy, *window, math=math)

    return _called(operator, "dgrad", dy, weight, None, size, window, math)


def transposed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window, more: tuple[int, ...], math: str
) -> torch.Tensor:  # fmt: skip
    """conv_transpose(x, weight) + bias, as torch.ops.tapwise.conv_transpose2d; `more`: its output_padding."""

    def operator(space: Any) -> torch.Tensor:
        stride, padding, dilation, groups = window
        return space.conv_transpose2d(x, weight, bias, stride, padding, more, groups, dilation, math=math)

    return _called(operator, "dgrad", x, weight, bias, more, window, math)


def transposed_size(
    x: tuple[int, ...], weight: tuple[int, ...], window: Window, more: tuple[int, ...]
) -> tuple[int, ...]:  # fmt: skip
    """The shape of a transposed convolution's result, of those of its input and filters."""
    stride, padding, dilation, groups = window
    (n, _, *image), (_, k, *kernel) = x, weight
    rows, columns = (
        (image[at] - 1) * stride[at] - 2 * padding[at] + dilation[at] * (kernel[at] - 1) + more[at] + 1
        for at in range(2)
    )
    return n, k * groups, rows, columns


def wgrad(
    x: torch.Tensor, size: tuple[int, ...], dy: torch.Tensor, window: Window, math: str
) -> torch.Tensor:  # fmt: skip
    """The gradient by filters of that size, as torch.ops.tapwise.conv2d_weight."""

    def operator(space: Any) -> torch.Tensor:
        return space.conv2d_weight(x, size, dy, *window, math=math)

    return _called(operator, "wgrad", x, dy, None, size, window, math)


def _called(
    operator: Callable[[Any], torch.Tensor], direction: Direction, x: torch.Tensor, w: torch.Tensor,
    bias: torch.Tensor | None, size: tuple[int, ...] | None, window: Window, math: str,
) -> torch.Tensor:  # fmt: skip
    """A kept call's result, or that of an operator of PyTorch's dispatcher or past it. `x` and `w` as of Call; `size`
    of the result, or what a transposed convolution has more."""
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or _recording()
        or type(x) not in _PLAIN
        or type(w) not in _PLAIN
        or x.is_neg()
        or w.is_neg()
        or x.layout is not torch.strided
        or w.layout is not torch.strided
    ):
        return operator(_OPS)
    kind = None if bias is None else (type(bias), bias.shape, bias.stride(), bias.dtype, bias.device)
    key = (
        direction, x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device, kind, size, window,
        math,
    )  # fmt: skip
    call = _calls.get(key)
    if call is not None:
        found = call(x, w, bias)
        return operator(operators) if found is None else found
    y = operator(operators)
    if len(_calls) >= KEPT:
        _calls.clear()
    # Only after the operator has found nothing wrong.
    _calls[key] = partial(_second, key)
    return y


def _second(key: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The second call of a kind, which says how those after it are made."""
    direction, (size, window, math) = key[0], key[-3:]
    _calls[key] = lambda x, w, bias: None
    if bias is not None and not bias.is_contiguous():
        return None
    if direction == "dgrad" and len(size) == 2:
        size = transposed_size(x.shape, w.shape, window, size)
    shapes = {
        "fprop": lambda: (x.shape, w.shape), "dgrad": lambda: (size, w.shape), "wgrad": lambda: (x.shape, size)
    }[direction]()  # fmt: skip
    problem = _problem(direction, *shapes, window, x, math, bias is not None)
    if device.is_device(x):
        result, run = on_gpu(problem, x, w, bias)
        call = None if run is None else _launched(run)
    elif x.device.type == "cpu":
        host = on_host(problem, numpy_of(x.detach()), numpy_of(w.detach()))
        if host is None:
            return None
        call = _on_host(host)
        result = call(x, w, bias)
    else:
        return None
    y = ordered(result, x)
    if y is result and call is not None:
        _calls[key] = call
    return y


def _problem(
    direction: Direction, shape: tuple[int, ...], filters: tuple[int, ...], window: Window, given: torch.Tensor,
    math: str, bias: bool,
) -> ConvProblem:  # fmt: skip
    """What a call computes; `shape` of x, `filters` of w."""
    stride, padding, dilation, groups = window
    (n, c, *spatial), (k, _, *kernel) = shape, filters
    view = device.view(given, "x") if device.is_device(given) else numpy_of(given.detach())
    return ConvProblem(
        n=n, c=c, spatial=tuple(spatial), k=k, kernel=tuple(kernel), stride=tuple(stride),
        padding=operators.sides(padding), dilation=tuple(dilation), groups=groups, dtype=NAMES[given.dtype],
        math=math if given.dtype is torch.float32 else "ieee",
        layout=arrays.layout_of(view), direction=direction, bias=bias,
    )  # fmt: skip


def _on_host(call: HostCall) -> Call:
    return lambda x, w, bias: tensor_of(
        call(numpy_of(x.detach()), numpy_of(w.detach()), None if bias is None else numpy_of(bias.detach()))
    )


def _launched(run: DeviceCall) -> Call:
    def call(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        addresses = [x.data_ptr(), w.data_ptr()]
        apart = addresses[0] | addresses[1]
        if bias is not None:
            addresses.append(bias.data_ptr())
            apart |= addresses[2]
        result = CALL_IT if apart % ALIGNMENT else run(addresses)
        return None if result is CALL_IT else result

    return call
