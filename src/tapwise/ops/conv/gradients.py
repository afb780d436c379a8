"""The gradients of convolution as a user calls them, and transposed convolution, which is one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from tapwise import arrays, dispatch
from tapwise.algorithm import Buffers, Plan
from tapwise.arguments import one_of, shown, whole, wholes
from tapwise.arrays.host_calls import note
from tapwise.arrays.replay import Replays
from tapwise.arrays.workspaces import workspace
from tapwise.errors import InvalidProblem
from tapwise.ops.conv.prepared import check_like, execute, lift, plan_of
from tapwise.ops.conv.problem import MATHS, ConvProblem
from tapwise.ops.parameters import device_of, numbers, result, sides_of, with_batch
from tapwise.problem import activation_word


def conv2d_input(
    input_size: Any, w: Any, dy: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, *,
    math: str = "ieee", algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """dx, the gradient of conv2d by its input, with the meaning of torch.nn.grad.conv2d_input.

    `input_size`: the shape of x, (n, c, h, w) or (c, h, w); w (k, c / groups, r, s); dy (n, k, p, q), the gradient by
    y. Arrays, dtypes and the other arguments as for conv2d; padding as a number, one for each axis, or (before, after)
    pairs. dx has dy's kind and memory order. `algorithm`: "auto" or an id of dgrad, such as "cpu.fprop_phases".
    Raises InvalidProblem for a bad argument.
    """
    size = tuple(input_size) if isinstance(input_size, list) else input_size
    return _input.call(_conv2d_input, (size, stride, padding, dilation, groups, math, algorithm, device), out, dy, w)


def conv2d_weight(
    x: Any, weight_size: Any, dy: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, *,
    math: str = "ieee", algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """dw, the gradient of conv2d by its filters, with the meaning of torch.nn.grad.conv2d_weight.

    x (n, c, h, w); `weight_size`: the shape of w, (k, c / groups, r, s); dy (n, k, p, q), the gradient by y. Arrays,
    dtypes and the other arguments as for conv2d_input. dw has x's kind, and lies in channels-last order where x does.
    The same input gives the same bits. Raises InvalidProblem for a bad argument.
    """
    size = tuple(weight_size) if isinstance(weight_size, list) else weight_size
    return _weight.call(_conv2d_weight, (size, stride, padding, dilation, groups, math, algorithm, device), out, x, dy)


def conv_transpose2d(
    x: Any, w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1,
    dilation: Any = 1, *, activation: str | tuple[str, float] | None = None, math: str = "ieee",
    algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """activation(conv_transpose(x, w) + bias), with the meaning of torch.nn.functional.conv_transpose2d.

    x (n, c, h, w) or (c, h, w), w (c, k / groups, r, s), bias (k,); the result has (h - 1) * stride - top - bottom +
    dilation * (r - 1) + output_padding + 1 rows. It is dgrad of the convolution that goes from that to x. Arrays,
    dtypes, activations and `padding`, which takes from the result, as for conv2d. `output_padding`: less than the
    stride or the dilation. `algorithm`: "auto" or an id of dgrad. Raises InvalidProblem for a bad argument.
    """
    words = stride, padding, output_padding, groups, dilation, _word(activation), math, algorithm, device
    return _transpose2d.call(_conv_transpose2d, words, out, x, w, bias)


def conv_transpose1d(
    x: Any, w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1,
    dilation: Any = 1, *, activation: str | tuple[str, float] | None = None, math: str = "ieee",
    algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """As conv_transpose2d with one spatial axis: x (n, c, w) or (c, w), w (c, k / groups, s)."""
    words = stride, padding, output_padding, groups, dilation, _word(activation), math, algorithm, device
    return _transpose1d.call(_conv_transpose1d, words, out, x, w, bias)


_input, _weight, _transpose2d, _transpose1d = Replays(), Replays(), Replays(), Replays()
# Making a problem takes longer than looking it up.
_problem = lru_cache(dispatch.CHOICES_KEPT)(ConvProblem)


def _word(activation: Any) -> Any:
    """A name and its parameter as one word."""
    return activation_word(activation) if type(activation) is tuple else activation


def _math(math: Any, dtype: str) -> Any:
    """Arithmetic of float32 says nothing of other dtypes."""
    one_of(math, "math", MATHS)
    return math if dtype == "f32" else "ieee"


def _geometry(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: Any, what: str
) -> dict[str, Any]:
    """A problem's sizes, of an image's shape with its batch. Raises InvalidProblem where they do not fit: `what`."""
    (n, c, *spatial), (k, group_c, *kernel), axes = x_shape, w_shape, len(x_shape) - 2
    groups = whole(groups, "groups")
    if groups < 1 or c % groups or k % groups or group_c * groups != c:
        raise InvalidProblem(
            f"{what}, groups={groups}: groups that divide c={c} and k={k}, and c / groups channels of w, are allowed"
        )
    steps, distances = numbers(stride, axes, "stride"), numbers(dilation, axes, "dilation")
    sides = sides_of(padding, tuple(spatial), tuple(kernel), steps, distances, None)
    return {
        "n": n, "c": c, "spatial": tuple(spatial), "k": k, "kernel": tuple(kernel), "stride": steps, "padding": sides,
        "dilation": distances, "groups": groups,
    }  # fmt: skip


def _conv2d_input(words: tuple[Any, ...], out: Any, dy: Any, w: Any) -> Any:
    size, stride, padding, dilation, groups, math, algorithm, device = words
    at, upload = arrays.place(dy, device)
    source, filters = arrays.anywhere(dy, "dy", at, upload), arrays.anywhere(w, "w", at, upload, "dy")
    dtype, shape = arrays.dtype_name(source, "dy"), wholes(size, "input_size")
    single, batched = with_batch(source, 2, "dy")
    if filters.ndim != 4 or len(shape) != source.ndim:
        raise InvalidProblem(
            f"input_size={shown(size)}, w of shape {filters.shape}, dy of shape {source.shape}: "
            "(n, c, h, w), (k, c / groups, r, s) and (n, k, p, q) are allowed, n in both or in neither"
        )
    check_like("w", filters, filters.shape, dtype, "dy")
    what = f"input_size={shown(size)}, w of shape {filters.shape}"
    sizes = _geometry((1, *shape) if single else shape, filters.shape, stride, padding, dilation, groups, what)
    problem = _problem(
        **sizes, dtype=dtype, math=_math(math, dtype), layout=arrays.layout_of(batched), direction="dgrad"
    )
    _check_gradient(batched, problem)
    return _dgrad(problem, single, filters, None, dy, source, algorithm, out, "dy")


def _check_gradient(dy: Any, problem: ConvProblem) -> None:
    if dy.shape != problem.y_shape:
        raise InvalidProblem(
            f"dy has shape {dy.shape}: {problem.y_shape}, as y of stride={problem.stride}, padding={problem.padding} "
            f"and dilation={problem.dilation}, is allowed"
        )


def _dgrad(
    problem: ConvProblem, single: bool, filters: Any, bias: Any, given: Any, source: Any, algorithm: str, out: Any,
    name: str = "x",
) -> Any:  # fmt: skip
    """Run a problem on checked arrays; `source` is the view of `given`, which the user calls `name`."""
    _choice, plan = plan_of(problem.canonical(), device_of(source), algorithm, None, False)
    offset = None if bias is None else arrays.dense(bias, "nchw")
    with workspace(plan.packed_bytes, source) as memory:
        packed = plan.pack_into(lift(filters, problem, False), memory)
        return execute(problem, single, plan, packed, offset, given, source, None, out, name, filters)


def _conv2d_weight(words: tuple[Any, ...], out: Any, x: Any, dy: Any) -> Any:
    size, stride, padding, dilation, groups, math, algorithm, device = words
    at, upload = arrays.place(x, device)
    source, gradient = arrays.anywhere(x, "x", at, upload), arrays.anywhere(dy, "dy", at, upload)
    dtype, shape = arrays.dtype_name(source, "x"), wholes(size, "weight_size")
    _single, batched = with_batch(source, 2)
    if len(shape) != 4 or gradient.ndim != source.ndim:
        raise InvalidProblem(
            f"weight_size={shown(size)}, x of shape {source.shape}, dy of shape {gradient.shape}: "
            "(k, c / groups, r, s), (n, c, h, w) and (n, k, p, q) are allowed, n in both or in neither"
        )
    gradient = gradient[None] if gradient.ndim == 3 else gradient
    check_like("dy", gradient, gradient.shape, dtype)
    layout = arrays.layout_of(batched)
    what = f"x of shape {source.shape}, weight_size={shown(size)}"
    sizes = _geometry(batched.shape, shape, stride, padding, dilation, groups, what)
    problem = _problem(**sizes, dtype=dtype, math=_math(math, dtype), layout=layout, direction="wgrad")
    _check_gradient(gradient, problem)
    return weight_gradient(problem, x, source, gradient, algorithm, out)


def weight_gradient_again(problem: ConvProblem, plan: Plan) -> Callable[..., np.ndarray]:
    """What `weight_gradient` gives for other arrays (x, dy) like those of a call."""

    def compute(x: np.ndarray, dy: np.ndarray, _bias: None = None) -> np.ndarray:
        dw: np.ndarray = arrays.empty(problem.w_shape, problem.x_dtype, problem.layout)
        with workspace(plan.workspace_bytes, x) as memory:
            plan.run(Buffers(x, dy, dw, memory))
        return dw

    return compute


def weight_gradient(
    problem: ConvProblem, x: Any, source: Any, gradient: Any, algorithm: str = "auto", out: Any = None
) -> Any:
    """Run a problem of wgrad on checked arrays; `source` is the view of `x`."""
    layout, images = problem.layout, source[None] if source.ndim == 3 else source
    target = None if out is None else result(out, problem.w_shape, problem.x_dtype, source, dy=gradient)
    _choice, plan = plan_of(problem, device_of(source), algorithm, None, False)
    dw: Any = target
    if not arrays.takes(target, layout, source):
        dw = arrays.empty(problem.w_shape, problem.x_dtype, layout, source)
    with workspace(plan.workspace_bytes, source) as memory:
        plan.run(Buffers(arrays.dense(images, layout), arrays.dense(gradient, layout), dw, memory))
    as_given = source.ndim == 4 and arrays.is_dense(images, layout) and arrays.is_dense(gradient, layout)
    if target is None and as_given and isinstance(source, np.ndarray):
        again = weight_gradient_again(problem, plan)
        note(again, (source, gradient), device_of(source), partial(device_of, source))
    if target is None:
        return arrays.like(dw, x)
    if dw is not target:
        arrays.assign(target, dw)
    return out


def _conv_transpose2d(words: tuple[Any, ...], out: Any, x: Any, w: Any, bias: Any) -> Any:
    return _conv_transpose(words, out, x, w, bias, 2)


def _conv_transpose1d(words: tuple[Any, ...], out: Any, x: Any, w: Any, bias: Any) -> Any:
    return _conv_transpose(words, out, x, w, bias, 1)


def _conv_transpose(words: tuple[Any, ...], out: Any, x: Any, w: Any, bias: Any, axes: int) -> Any:
    stride, padding, output_padding, groups, dilation, activation, math, algorithm, device = words
    at, upload = arrays.place(x, device)
    source, filters = arrays.anywhere(x, "x", at, upload), arrays.anywhere(w, "w", at, upload)
    offset = None if bias is None else arrays.anywhere(bias, "bias", at, upload)
    dtype = arrays.dtype_name(source, "x")
    single, batched = with_batch(source, axes)
    if filters.ndim != axes + 2:
        raise InvalidProblem(f"w has shape {filters.shape}: {axes + 2} axes (c, k / groups, ...) are allowed")
    check_like("w", filters, filters.shape, dtype)
    (n, c, *inner), (of_c, group_k, *kernel) = batched.shape, filters.shape
    groups = whole(groups, "groups")
    if of_c != c or groups < 1 or c % groups:
        raise InvalidProblem(
            f"w has shape {filters.shape}: its first axis must be the {c} channels of x, and groups={groups} divide it"
        )
    if offset is not None:
        check_like("bias", offset, (groups * group_k,), dtype)
    steps, distances = numbers(stride, axes, "stride"), numbers(dilation, axes, "dilation")
    around = sides_of(padding, tuple(inner), tuple(kernel), steps, distances, None)
    behind = numbers(output_padding, axes, "output_padding")
    for step, pair, more, distance, size in zip(steps, around, behind, distances, inner, strict=True):
        if min(step, distance) < 1 or min(pair) < 0:
            raise InvalidProblem(f"stride={steps}, dilation={distances}, padding={around}: at least 1, 1 and 0")
        if not 0 <= more < max(step, distance):
            raise InvalidProblem(
                f"output_padding={behind}: at least 0 and less than stride={steps} or dilation={distances} is allowed"
            )
        if size < 1:
            raise InvalidProblem(f"x has shape {source.shape}: at least one element of each spatial axis is allowed")
    sizes = zip(inner, kernel, steps, around, behind, distances, strict=True)
    spatial = tuple((size - 1) * step - sum(pair) + d * (r - 1) + more + 1 for size, r, step, pair, more, d in sizes)
    if min(spatial) < 0:
        raise InvalidProblem(f"padding={around}: leaves {spatial} of the result, at least 0 are allowed")
    problem = _problem(
        n=n, c=groups * group_k, spatial=spatial, k=c, kernel=tuple(kernel), stride=steps,
        padding=around, dilation=distances, groups=groups, dtype=dtype, math=_math(math, dtype),
        layout=arrays.layout_of(batched), direction="dgrad", bias=offset is not None,
        activation=activation_word(activation),
    )  # fmt: skip
    missing = tuple(wanted - size for wanted, size in zip(problem.output, inner, strict=True))
    if any(missing):
        # A convolution of that result gives more than x where output_padding is a stride or more: zeros.
        source = arrays.extended(batched, missing)[0 if single else slice(None)]
    return _dgrad(problem, single, filters, offset, x, source, algorithm, out)
