"""squeeze_excitation as a user calls it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from tapwise import arrays, dispatch
from tapwise.algorithm import Buffers
from tapwise.arguments import word
from tapwise.arrays.replay import Replays
from tapwise.arrays.workspaces import workspace
from tapwise.errors import InvalidProblem
from tapwise.ops.parameters import device_of, result
from tapwise.ops.squeeze_excitation.problem import BETWEEN, GATES, SqueezeExcitationProblem


def squeeze_excitation(
    x: Any, weight: Any, bias: Any, activation: str = "relu", gate: str = "sigmoid", *, algorithm: str = "auto",
    device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """x * gate(expand @ activation(reduce @ mean(x) + reduce_bias) + expand_bias), a number a channel.

    x (n, c, h, w): float32, float64, float16 or bfloat16, computed in float32, float64 in float64; arrays
    and `device` as for conv2d. weight (2, m, c): the filters `reduce` (m, c) of the first of the two convolutions of
    one tap, and `expand` (c, m) of the second, transposed; bias (m + c,): theirs, one behind the other. All of x's
    dtype. `activation`: relu, relu6, silu, gelu, gelu_tanh, tanh or hardswish; `gate`: sigmoid or hardsigmoid. The
    result is of x's kind, dtype and memory order. `out`, which overlaps no input, is filled and returned. Raises
    InvalidProblem for a bad argument.

    Source: Hu, Shen and Sun, "Squeeze-and-Excitation Networks", 2018.
    """
    words = activation, gate, algorithm, device
    return _replays.call(_squeeze_excitation, words, out, x, weight, bias)


_replays: Final = Replays()
_BETWEEN: Final = f"one of {', '.join(BETWEEN)}"
_GATES: Final = f"one of {', '.join(GATES)}"
_problem = lru_cache(dispatch.CHOICES_KEPT)(SqueezeExcitationProblem)


def _squeeze_excitation(words: tuple[Any, ...], out: Any, x: Any, weight: Any, bias: Any) -> Any:
    activation, gate, algorithm, device = words
    index, upload = arrays.place(x, device)
    source = arrays.anywhere(x, "x", index, upload)
    algorithm = word(algorithm, "algorithm", dispatch.ALGORITHM)
    activation, gate = word(activation, "activation", _BETWEEN), word(gate, "gate", _GATES)
    filters, offset = (
        arrays.beside(arrays.anywhere(one, name, index, upload), source)
        for one, name in ((weight, "weight"), (bias, "bias"))
    )
    if source.ndim != 4:
        raise InvalidProblem(f"x has shape {source.shape}: 4 axes (n, c, h, w) are allowed")
    if filters.ndim != 3 or filters.shape[0] != 2 or filters.shape[2] != source.shape[1]:
        raise InvalidProblem(f"weight has shape {filters.shape}: (2, m, {source.shape[1]}) is allowed")
    n, c, h, w = source.shape
    dtype = arrays.dtype_name(source, "x")
    problem = _problem(
        n=n, c=c, h=h, w=w, m=filters.shape[1], activation=activation, gate=gate, dtype=dtype,
        layout=arrays.layout_of(source),
    )  # fmt: skip
    if offset.shape != problem.bias_shape:
        raise InvalidProblem(f"bias has shape {offset.shape}: {problem.bias_shape} is allowed")
    for name, one in (("weight", filters), ("bias", offset)):
        if one.dtype != source.dtype:
            raise InvalidProblem(f"{name} has dtype {one.dtype}: {source.dtype} is allowed")
    target = None
    if out is not None:
        target = result(out, problem.y_shape, problem.y_dtype, source, weight=filters, bias=offset)
    y = arrays.empty(problem.y_shape, problem.y_dtype, problem.layout, source)
    if not problem.empty:
        there = device_of(source)
        plan = dispatch.plan_for(problem, dispatch.choose(problem, there, algorithm), there)
        with workspace(plan.workspace_bytes, source) as memory:
            packed = plan.pack(filters)
            images, offsets = arrays.dense(source, problem.layout), arrays.dense(offset, "nchw")
            plan.run(Buffers(images, packed, y, memory, offsets))
    if target is None:
        return arrays.like(y, x)
    arrays.assign(target, y)
    return out
