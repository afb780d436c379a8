"""Batch normalisation in training, as a user calls it: what it adds up, and its gradient."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from tapwise import arrays, dispatch
from tapwise.algorithm import Buffers
from tapwise.arguments import word
from tapwise.arrays.replay import Replays
from tapwise.arrays.workspaces import workspace
from tapwise.errors import InvalidProblem
from tapwise.ops.batch_norm.problem import BatchNormProblem
from tapwise.ops.parameters import device_of, result
from tapwise.problem import DTYPES, activation_word


def batch_norm_stats(x: Any, *, algorithm: str = "auto", device: str | None = None, out: Any = None) -> Any:
    """Mean and biased variance of each channel of x over images and pixels, an array (2, c).

    x (n, c, h, w) with elements: float32, float64, float16 or bfloat16; arrays and `device` as for conv2d. The result
    is float32, float64 of float64, of x's kind. `algorithm`: "auto" or an id such as "cuda.block_reduction". `out` is
    filled and returned. Raises InvalidProblem for a bad argument.
    """
    return _stats_replays.call(_stats, (algorithm, device), out, x)


def batch_norm_backward(
    grad_output: Any, x: Any, parameters: Any, activation: Any = None, *, algorithm: str = "auto",
    device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """The gradient of activation(batch_norm(x)) in training: (by x, sums), arrays (n, c, h, w) and (2, c). The sums,
    of g and of g * xhat over images and pixels of each channel, are the gradients by bias and weight.

    xhat = (x - mean) * invstd, u = xhat * weight + bias, g = grad_output * activation'(u); by x it is invstd * weight *
    (g - sum(g) / N - xhat * sum(g * xhat) / N), as mean and invstd hang on x. grad_output and x (n, c, h, w) of one
    shape and dtype, as for batch_norm_stats; parameters (4, c): mean, invstd, weight and bias, of the sums' dtype:
    float32, float64 of float64. `activation` as for conv2d. `out` is filled with the first result and returned in its
    place. Other arguments as for batch_norm_stats. Raises InvalidProblem for a bad argument.

    Source: Ioffe and Szegedy, "Batch Normalization", 2015; torch.batch_norm_backward_reduce and
    batch_norm_backward_elemt are the same without an activation.
    """
    words = activation_word(activation), algorithm, device
    return _backward_replays.call(_backward, words, out, grad_output, x, parameters)


_stats_replays: Final = Replays()
_backward_replays: Final = Replays()
_problem = lru_cache(dispatch.CHOICES_KEPT)(BatchNormProblem)


def _stats(words: tuple[Any, ...], out: Any, x: Any) -> Any:
    algorithm, device = words
    index, upload = arrays.place(x, device)
    source = arrays.anywhere(x, "x", index, upload)
    return _computed(source, "x", None, algorithm, out, x)


def _backward(words: tuple[Any, ...], out: Any, dy: Any, x: Any, parameters: Any) -> Any:
    activation, algorithm, device = words
    index, upload = arrays.place(dy, device)
    source = arrays.anywhere(dy, "grad_output", index, upload)
    image, vectors = (
        arrays.beside(arrays.anywhere(one, name, index, upload, "grad_output"), source)
        for one, name in ((x, "x"), (parameters, "parameters"))
    )
    if image.shape != source.shape:
        raise InvalidProblem(f"x has shape {image.shape}: {source.shape}, as grad_output, is allowed")
    if image.dtype != source.dtype:
        raise InvalidProblem(f"x has dtype {image.dtype}: {source.dtype}, as grad_output, is allowed")
    return _computed(source, "grad_output", activation, algorithm, out, dy, image, vectors)


def _computed(
    source: Any, name: str, activation: str | None, algorithm: Any, out: Any, given: Any, image: Any = None,
    vectors: Any = None,
) -> Any:  # fmt: skip
    """`source`, called `name`, as it was `given`; of the gradient dy, with x and the parameters beside it."""
    algorithm = word(algorithm, "algorithm", dispatch.ALGORITHM)
    if source.ndim != 4:
        raise InvalidProblem(f"{name} has shape {source.shape}: 4 axes (n, c, h, w) are allowed")
    if 0 in source.shape:
        raise InvalidProblem(f"{name} has shape {source.shape}: at least one element is allowed")
    n, c, h, w = source.shape
    dtype = arrays.dtype_name(source, name)
    problem = _problem(
        n=n, c=c, h=h, w=w, dtype=dtype, layout=arrays.layout_of(source), activation=activation,
        direction="fprop" if image is None else "dgrad",
    )  # fmt: skip
    if vectors is not None and vectors.shape != problem.bias_shape:
        raise InvalidProblem(f"parameters has shape {vectors.shape}: {problem.bias_shape} is allowed")
    if vectors is not None and vectors.dtype != problem.sums_dtype:
        raise InvalidProblem(f"parameters has dtype {vectors.dtype}: {DTYPES[problem.accumulator]} is allowed")
    target = None
    if out is not None:
        target = result(out, problem.y_shape, problem.y_dtype, source, name, x=image, parameters=vectors)
    y = arrays.empty(problem.y_shape, problem.y_dtype, problem.layout, source)
    more = problem.second
    second = None if more is None else arrays.empty(more.shape, more.dtype, problem.layout, source)
    there = device_of(source)
    plan = dispatch.plan_for(problem, dispatch.choose(problem, there, algorithm), there)
    with workspace(plan.workspace_bytes, source) as memory:
        dense = arrays.dense(source, problem.layout)
        beside = None if image is None else plan.pack(arrays.dense(image, problem.layout))
        numbers = None if vectors is None else arrays.dense(vectors, "nchw")
        plan.run(Buffers(dense, beside, y if second is None else (y, second), memory, numbers))
    if target is not None:
        arrays.assign(target, y)
    first = arrays.like(y, given) if target is None else out
    return first if second is None else (first, arrays.like(second, given))
