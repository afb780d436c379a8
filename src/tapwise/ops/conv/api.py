"""Convolution as a user calls it: conv2d, conv1d, and the prepared operator.

Arguments become a problem and arrays become NumPy views of logical shape (n, c, h, w); one axis is computed as an image
of height one. What comes back is of the library that `x` is from, in its memory order.
"""

from __future__ import annotations

from functools import lru_cache
from inspect import signature
from typing import Any, Final

from tapwise import arrays, dispatch
from tapwise.algorithm import Config
from tapwise.arguments import flag, one_of, shown, whole, wholes
from tapwise.arrays import device as cuda
from tapwise.arrays.replay import Replays
from tapwise.arrays.workspaces import workspace
from tapwise.errors import InvalidProblem
from tapwise.ops.conv.prepared import PreparedConv, check_like, execute, lift, plan_of
from tapwise.ops.conv.problem import MATHS, ConvProblem
from tapwise.ops.parameters import device_of, numbers, sides_of, with_batch
from tapwise.problem import LAYOUTS, activation_word


def conv2d(
    x: Any, w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, *,
    activation: str | tuple[str, float] | None = None, residual: Any = None, output_size: Any = None,
    math: str = "ieee", algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """y = activation(conv(x, w) + bias + residual), with the meaning of torch.nn.functional.conv2d.

    x (n, c, h, w) or (c, h, w), w (k, c / groups, r, s), bias (k,), residual and out as y. All float32, all float64, or
    all float16 or all bfloat16 (summed in float32); NumPy arrays, PyTorch tensors, CuPy arrays, or arrays that
    speak DLPack, with any strides. The result is of x's kind and memory order (NCHW, or channels-last where x is
    dense that way). What lies on a GPU is computed there, on its library's current stream; `device="cuda"` copies
    NumPy arrays there and back.

    `padding`: a number, one for each axis, ((top, bottom), (left, right)), "same" (stride 1) or "valid". `output_size`:
    a wanted output size instead of padding, which is worked out, the odd rest at the bottom and right. `activation`:
    relu, relu6, silu, gelu, gelu_tanh, sigmoid, tanh, hardswish, hardsigmoid, or leaky_relu with a slope of 0.01;
    ("leaky_relu", slope) with another. `math` of float32: "tf32" permits less exact products on tensor cores,
    "3xtf32" takes three of them and keeps the bound of fp32, "ieee" is neither; on a CPU all are IEEE. `algorithm`:
    "auto" or an id such as "cpu.direct". `out` is filled and returned; it may not overlap an input.

    Filters are packed on each call: `prepare` packs them once. Raises InvalidProblem for a bad argument, NotApplicable
    where the named algorithm does not apply.
    """
    words = stride, padding, dilation, groups, output_size, _word(activation), math, algorithm, device
    return _conv2d.call(_convolve, words, out, x, w, bias, residual)


def conv1d(
    x: Any, w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, *,
    activation: str | tuple[str, float] | None = None, residual: Any = None, output_size: Any = None,
    math: str = "ieee", algorithm: str = "auto", device: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """As conv2d with one spatial axis: x (n, c, w) or (c, w), w (k, c / groups, s); padding also ((left, right),)."""
    words = stride, padding, dilation, groups, output_size, _word(activation), math, algorithm, device
    return _conv1d.call(_convolve1d, words, out, x, w, bias, residual)


def prepare(
    problem: ConvProblem | str | tuple[int, ...], w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1, *, activation: str | tuple[str, float] | None = None,
    residual: bool = False, output_size: Any = None, math: str = "ieee", layout: str = "nchw", algorithm: str = "auto",
    config: Config | str | None = None, threads: int | None = None, device: str | None = None,
) -> PreparedConv:  # fmt: skip
    """An operator for one problem with its filters packed once: call it many times, from any number of threads.

    `problem`: the shape of x, (n, c, h, w) or (n, c, w), with the arguments of conv2d behind it, `residual` whether
    calls bring one, and `layout` the memory order of x, "nchw" or "nhwc"; or a ConvProblem or its string ("c64 h56 w56
    k64 r3 s3 pad1 relu"), which says all that. w (k, c / groups, r, s) and bias (k,) are copied, so later changes to
    them have no effect; a bias that is given is used whether or not the problem says "bias". `config`: a config of the
    named algorithm, or words of its string. `threads`: workers (default: TAPWISE_NUM_THREADS, else the cores). Where w
    lies, on a GPU or not, is where it computes; `device="cuda"` copies NumPy filters to a GPU, and NumPy images there
    and back on each call.

    Raises InvalidProblem for arguments that do not fit the problem, NotApplicable where no algorithm applies.
    """
    options = {
        "stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "output_size": output_size,
        "activation": activation, "math": math,
    }  # fmt: skip
    if isinstance(problem, (tuple, list)):
        problem = _of_shape(wholes(problem, "problem"), w, bias, flag(residual, "residual"), layout, options)
    else:
        for name, value in {**options, "residual": residual, "layout": layout}.items():
            if type(value) is not type(_DEFAULTS[name]) or value != _DEFAULTS[name]:
                raise InvalidProblem(f"{name}={shown(value)}: goes with a shape of x; a problem says it by its words")
    if isinstance(problem, str):
        problem = ConvProblem.parse(problem)
    if not isinstance(problem, ConvProblem):
        raise InvalidProblem(f"problem={shown(problem)}: a ConvProblem, its string, or the shape of x is allowed")
    if bias is not None and not problem.bias:
        problem = problem.replace(bias=True)
    return PreparedConv(problem, w, bias, algorithm=algorithm, config=config, threads=threads, device=device)


_DEFAULTS: Final = {name: one.default for name, one in signature(prepare).parameters.items()}


def _of_shape(
    shape: tuple[int, ...], w: Any, bias: Any, residual: bool, layout: str, options: dict[str, Any]
) -> ConvProblem:
    """The problem of an x of that shape and of these filters."""
    filters = cuda.view(w, "w") if cuda.is_device(w) else arrays.native(arrays.view(w, "w"))
    if len(shape) not in (3, 4):
        raise InvalidProblem(f"problem={shape}: the shape of x, (n, c, h, w) or (n, c, w), is allowed")
    if filters.ndim != len(shape):
        raise InvalidProblem(f"w has shape {filters.shape}: {len(shape)} axes, as x of shape {shape}, are allowed")
    one_of(layout, "layout", LAYOUTS)
    dtype = arrays.dtype_name(filters, "w")
    return _problem(shape, filters.shape, dtype, layout, bias is not None, residual, tuple(options.values()))


_conv2d, _conv1d = Replays(), Replays()


def _convolve1d(words: tuple[Any, ...], out: Any, x: Any, w: Any, bias: Any, residual: Any) -> Any:
    return _convolve(words, out, x, w, bias, residual, 1)


def _convolve(words: tuple[Any, ...], out: Any, x: Any, w: Any, bias: Any, residual: Any, axes: int = 2) -> Any:
    asked, (algorithm, device) = words[:-2], words[-2:]
    at, upload = arrays.place(x, device)

    def array(value: Any, name: str) -> Any:
        return arrays.anywhere(value, name, at, upload)

    source, filters = array(x, "x"), array(w, "w")
    offset = None if bias is None else array(bias, "bias")
    addend = None if residual is None else array(residual, "residual")
    dtype = arrays.dtype_name(source, "x")
    single, batched = with_batch(source, axes)
    if filters.ndim != axes + 2:
        raise InvalidProblem(f"w has shape {filters.shape}: {axes + 2} axes (k, c / groups, ...) are allowed")
    check_like("w", filters, filters.shape, dtype)
    if offset is not None:
        check_like("bias", offset, filters.shape[:1], dtype)
    problem_of = _known_problem if all(map(_is_plain, asked)) else _problem
    problem = problem_of(
        batched.shape, filters.shape, dtype, arrays.layout_of(batched), offset is not None, residual is not None, asked
    )
    if addend is not None:
        # Before a kernel is compiled for it.
        check_like("residual", addend, problem.result_shape[single:], dtype)
    _choice, plan = plan_of(problem.canonical(), device_of(source), algorithm, None, False)
    if offset is not None:
        offset = arrays.dense(offset, "nchw")
    # Memory that was used before: its pages are there.
    with workspace(plan.packed_bytes, source) as memory:
        packed = plan.pack_into(lift(filters, problem, False), memory)
        return execute(problem, single, plan, packed, offset, x, source, addend, out, w=filters)


def _problem(
    shape: tuple[int, ...], filters: tuple[int, ...], dtype: str, layout: Any, bias: bool, residual: bool,
    words: tuple[Any, ...],
) -> ConvProblem:  # fmt: skip
    """What a call asks for: shapes of x (with a batch) and of w, and its other words as they were given. Raises
    InvalidProblem where they do not fit."""
    stride, padding, dilation, groups, output_size, activation, math = words
    (n, c, *spatial), (k, group_c, *kernel), axes = shape, filters, len(shape) - 2
    groups = whole(groups, "groups")
    if groups < 1 or c % groups or k % groups:
        raise InvalidProblem(f"groups={groups}: at least 1, and it must divide c={c} of x and k={k} of w")
    if group_c * groups != c:
        raise InvalidProblem(
            f"w has shape {filters}: its second axis must be c / groups = {c // groups} "
            f"for the {c} channels of x and groups={groups}"
        )
    steps, distances = numbers(stride, axes, "stride"), numbers(dilation, axes, "dilation")
    sides = sides_of(padding, tuple(spatial), tuple(kernel), steps, distances, output_size)
    return ConvProblem(
        n=n, c=c, spatial=tuple(spatial), k=k, kernel=tuple(kernel), stride=steps, padding=sides, dilation=distances,
        groups=groups, dtype=dtype, math="ieee" if isinstance(math, str) and math in MATHS and dtype != "f32" else math,
        layout=layout, bias=bias, activation=activation, residual=residual,
    )  # fmt: skip


# Working a problem out takes longer than a small layer: those of calls that were made before are kept.
_known_problem = lru_cache(dispatch.CHOICES_KEPT)(_problem)


def _word(activation: Any) -> Any:
    """A name and its parameter as one word: calls with a number among their words are not kept."""
    return activation_word(activation) if type(activation) is tuple else activation


def _is_plain(word: Any) -> bool:
    """Whether equal words mean the same: numbers, names, and tuples of them."""
    kind = type(word)
    return kind is int or kind is str or word is None or (kind is tuple and all(map(_is_plain, word)))
