"""Gradients of a bias and of the activation behind it, as a user calls them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from tapwise import arrays, dispatch
from tapwise.algorithm import Buffers
from tapwise.arguments import word
from tapwise.arrays.replay import Replays
from tapwise.arrays.workspaces import workspace
from tapwise.errors import InvalidProblem
from tapwise.ops.bias_activation.problem import BiasActivationProblem
from tapwise.ops.parameters import device_of, result
from tapwise.problem import activation_word


def bias_backward(grad_output: Any, *, algorithm: str = "auto", device: str | None = None, out: Any = None) -> Any:
    """The gradient by a bias of each channel: grad_output's sums over images and pixels, an array (c,).

    grad_output (n, c, h, w): float32, float64, float16 or bfloat16, added up in float32 (float64 of float64); arrays
    and `device` as for conv2d. The result is of its kind and dtype. `algorithm`: "auto" or an id such as
    "cuda.block_reduction". `out` is filled and returned. Raises InvalidProblem for a bad argument.
    """
    return _bias_replays.call(_bias, (algorithm, device), out, grad_output)


def bias_activation_backward(
    grad_output: Any, y: Any, activation: Any, *, algorithm: str = "auto", device: str | None = None, out: Any = None
) -> Any:
    """The gradient of activation(z + bias) by z and by bias: (grad_output * activation', its sums for each channel).

    grad_output and y (n, c, h, w) of one shape and dtype, as for bias_backward. `y`: what the activation gave for tanh
    and sigmoid, what it was given for others; relu, relu6, and leaky_relu with a positive slope may be given either.
    `activation` as for conv2d, and not None. Derivatives are PyTorch's where they jump; the first result is 0 where the
    derivative is. `out` is filled with the first result and returned in its place. Other arguments as for
    bias_backward. Raises InvalidProblem for a bad argument.
    """
    words = activation_word(activation), algorithm, device
    return _activation_replays.call(_activation, words, out, grad_output, y)


_bias_replays: Final = Replays()
_activation_replays: Final = Replays()
_problem = lru_cache(dispatch.CHOICES_KEPT)(BiasActivationProblem)


def _bias(words: tuple[Any, ...], out: Any, dy: Any) -> Any:
    algorithm, device = words
    index, upload = arrays.place(dy, device)
    return _computed(arrays.anywhere(dy, "grad_output", index, upload), None, None, algorithm, out, dy)


def _activation(words: tuple[Any, ...], out: Any, dy: Any, y: Any) -> Any:
    activation, algorithm, device = words
    if activation is None:
        raise InvalidProblem("activation=None: the name of one is allowed; bias_backward is without")
    index, upload = arrays.place(dy, device)
    source = arrays.anywhere(dy, "grad_output", index, upload)
    image = arrays.beside(arrays.anywhere(y, "y", index, upload, "grad_output"), source)
    if image.shape != source.shape:
        raise InvalidProblem(f"y has shape {image.shape}: {source.shape}, as grad_output, is allowed")
    if image.dtype != source.dtype:
        raise InvalidProblem(f"y has dtype {image.dtype}: {source.dtype}, as grad_output, is allowed")
    return _computed(source, image, activation, algorithm, out, dy)


def _computed(source: Any, image: Any, activation: str | None, algorithm: Any, out: Any, given: Any) -> Any:
    """Of grad_output as it was `given`, and what the derivative is taken from."""
    algorithm = word(algorithm, "algorithm", dispatch.ALGORITHM)
    if source.ndim != 4:
        raise InvalidProblem(f"grad_output has shape {source.shape}: 4 axes (n, c, h, w) are allowed")
    n, c, h, w = source.shape
    if c == 0:
        raise InvalidProblem(f"grad_output has shape {source.shape}: at least one channel is allowed")
    problem = _problem(
        n=n, c=c, h=h, w=w, dtype=arrays.dtype_name(source, "grad_output"), layout=arrays.layout_of(source),
        activation=activation,
    )  # fmt: skip
    target = None
    if out is not None:
        target = result(out, problem.y_shape, problem.y_dtype, source, "grad_output", y=image)
    y = arrays.empty(problem.y_shape, problem.y_dtype, problem.layout, source)
    more = problem.second
    second = None if more is None else arrays.empty(more.shape, more.dtype, problem.layout, source)
    there = device_of(source)
    if problem.trivial:
        sums = y if second is None else second
        arrays.assign(sums, np.zeros(c, sums.dtype))
    else:
        plan = dispatch.plan_for(problem, dispatch.choose(problem, there, algorithm), there)
        with workspace(plan.workspace_bytes, source) as memory:
            dense = arrays.dense(source, problem.layout)
            beside = None if image is None else plan.pack(arrays.dense(image, problem.layout))
            plan.run(Buffers(dense, beside, y if second is None else (y, second), memory))
    if target is not None:
        arrays.assign(target, y)
    first = arrays.like(y, given) if target is None else out
    return first if second is None else (first, arrays.like(second, given))
