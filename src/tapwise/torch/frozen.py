"""Convolution with filters that do not change between calls, packed once: prepared operators beside their weights.

They are kept by the weight itself (weakly), its version, memory and dtype, and the bias likewise. PyTorch counts writes
in the version, but not those through `.data`, nor those to inference tensors: who makes such writes calls `forget`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from threading import Lock
from typing import Any, Final, NamedTuple
from weakref import ref

import torch

from tapwise import dispatch, registry
from tapwise.algorithm import Steady
from tapwise.arrays.host import numpy_of, tensor_of
from tapwise.ops.conv.api import prepare
from tapwise.ops.conv.prepared import PreparedConv
from tapwise.ops.conv.problem import ConvProblem
from tapwise.torch.tensors import layout_of, ordered, version

# Calls of a weight that are kept: shapes, strides and dtypes of x, and words. Each has filters of its own.
KEPT: Final = 8
# What calls NumPy's BLAS.
BLAS: Final = "cpu.im2col_gemm"


class Words(NamedTuple):
    """(stride, padding, dilation, groups), and what prepare takes by name."""

    window: tuple[Any, ...]
    named: dict[str, Any]


@lru_cache(1024)
def words_of(words: str, axes: int) -> Words:
    """Of a problem's words without sizes and dtypes, of one or two spatial axes. Raises InvalidProblem for others."""
    # Sizes that fit any words.
    groups = next((word for word in words.split() if word.startswith("groups")), "groups1").removeprefix("groups")
    sizes = "h65536 w65536 r1 s1" if axes == 2 else "w65536 s1"
    p = ConvProblem.parse(f"c{groups} k{groups} {sizes} {words}")
    return Words((p.stride, p.padding, p.dilation, p.groups), {"activation": p.activation, "math": p.math})


class Calls:
    """What was prepared of one weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        number = id(weight)
        self.weight = ref(weight, lambda gone: _drop(number, gone))
        self.bias = bias
        self.state = _state(weight, bias)
        self.calls: dict[Any, Any] = {}


# By the number of a weight.
_kept: Final[dict[int, Calls]] = {}
_lock: Final = Lock()


def _state(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Any, ...]:
    return weight.dtype, version((weight, bias))


def conv_frozen(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, words: str
) -> torch.Tensor:
    """activation(conv(x, weight) + bias + residual); weight and bias may have another floating dtype than x.

    bias: k elements, of any shape.
    """
    call = find(weight, bias, (words, x.shape, x.stride(), x.dtype, residual is None))
    if call is not None:
        return call(x) if residual is None else call(x, residual)
    return _first(x, weight, bias, residual, words)


def find(weight: torch.Tensor, bias: torch.Tensor | None, key: Any) -> Any:
    """What is kept of a weight and a bias under a key, None where they have changed since."""
    kept = _kept.get(id(weight))
    if kept is not None and kept.weight() is weight and kept.bias is bias and kept.state == _state(weight, bias):
        return kept.calls.get(key)
    return None


def keep(weight: torch.Tensor, bias: torch.Tensor | None, key: Any, call: Any) -> None:
    """Keep it, in the place of the oldest where there are many."""
    with _lock:
        kept = _kept.get(id(weight))
        if kept is None or kept.weight() is not weight or kept.bias is not bias or kept.state != _state(weight, bias):
            kept = _kept[id(weight)] = Calls(weight, bias)
        while len(kept.calls) >= KEPT:
            kept.calls.pop(next(iter(kept.calls)))
        kept.calls[key] = call


def _first(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, words: str
) -> torch.Tensor:
    window, named = words_of(words, x.ndim - 2)
    w = weight.detach().to(x.dtype)
    b = None if bias is None else bias.detach().flatten().to(x.dtype)
    layout = layout_of(x, weight)
    make = partial(prepare, tuple(x.shape), w, b, *window, **named, residual=residual is not None, layout=layout)
    made = make()
    if made.choice.algorithm == BLAS:
        made = make(algorithm=_without_blas(made))
    y = made(x, None if residual is None else residual.to(x.dtype))
    result = ordered(y, x)

    def converted(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return ordered(made(x, None if residual is None else residual.to(x.dtype)), x)

    direct = (_on_host(made) if not x.is_cuda else made) if result is y else converted
    keep(weight, bias, (words, x.shape, x.stride(), x.dtype, residual is None), direct)
    return result


def _without_blas(made: PreparedConv) -> str:
    """The next best. BLAS's threads spin for some 20 ms after a product and slow what follows: with one such layer
    ResNet-50 took 85 ms instead of 30 on two cores."""
    candidates = [
        one for one in dispatch.explain(made.problem.canonical(), made.device) if one.predicted_us is not None
    ]
    exact = [one for one in candidates if one.algorithm != BLAS and registry.get(one.algorithm, "conv").exact]
    return min(exact, key=lambda one: one.predicted_us or 0.0).algorithm


def _on_host(made: PreparedConv) -> Callable[..., torch.Tensor]:
    """Calls on tensors whose memory NumPy has as well: less than half of what a prepared operator takes for them."""

    def call(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        try:
            image, added = numpy_of(x), None if residual is None else numpy_of(residual)
        except RuntimeError:
            # Of some tensors NumPy is given no view: of those that require a gradient, or are negated lazily.
            y: torch.Tensor = made(x, residual)
        else:
            y = tensor_of(made(image, added))
        return y

    call.made = made  # type: ignore[attr-defined]
    return call


def steady(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    words: str,
) -> Steady | None:  # fmt: skip
    """What computes y again, the result of conv_frozen for tensors of a CPU that stay where they are; None where more
    than a prepared operator's kernel is to run."""
    kept = _kept.get(id(weight))
    call = None if kept is None else kept.calls.get((words, x.shape, x.stride(), x.dtype, residual is None))
    made = getattr(call, "made", None)
    if made is None:
        return None
    step: Steady | None = made.steady(numpy_of(x), numpy_of(y), None if residual is None else numpy_of(residual))
    return step


def _drop(number: int, gone: ref[torch.Tensor]) -> None:
    kept = _kept.get(number)
    if kept is not None and kept.weight is gone:
        _kept.pop(number, None)


def forget(weight: torch.Tensor | None = None) -> None:
    """Drop what was packed of a weight, or of all."""
    with _lock:
        if weight is None:
            _kept.clear()
        else:
            _kept.pop(id(weight), None)
