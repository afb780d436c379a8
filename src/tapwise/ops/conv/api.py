"""Convolution as a user calls it: conv2d, conv1d, and the prepared operator.

Arguments become a problem and arrays become NumPy views of logical shape (n, c, h, w); one axis is computed as an image
of height one. What comes back is of the library that `x` is from, in its memory order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from tapwise import arrays, dispatch, registry
from tapwise.algorithm import Buffers, Choice, Config, Device, Plan
from tapwise.arrays.device import settle
from tapwise.errors import InvalidProblem
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.reference import activate
from tapwise.ops.conv.torch_call import TorchCall
from tapwise.ops.parameters import device_of, numbers, sides_of, whole

_NO_TERMS: Final = "nothing to sum: no output, or no input channel"


def conv2d(
    x: Any,
    w: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Any = None,
    output_size: Any = None,
    math: str = "ieee",
    algorithm: str = "auto",
    device: str | None = None,
    out: Any = None,
) -> Any:
    """y = activation(conv(x, w) + bias + residual), with the meaning of torch.nn.functional.conv2d.

    x (n, c, h, w) or (c, h, w), w (k, c / groups, r, s), bias (k,), residual and out as y. All float32, all float64, or
    all float16 or (on a GPU) bfloat16 (summed in float32); NumPy arrays, PyTorch tensors, CuPy arrays, or arrays that
    speak DLPack, with any strides. The result is of x's kind and memory order (NCHW, or channels-last where x is
    dense that way). What lies on a GPU is computed there, on its library's current stream; `device="cuda"` copies
    NumPy arrays there and back.

    `padding`: a number, one for each axis, ((top, bottom), (left, right)), "same" (stride 1) or "valid". `output_size`:
    a wanted output size instead of padding, which is worked out, the odd rest at the bottom and right. `activation`:
    relu, relu6, silu, gelu, sigmoid or tanh. `math` of float32: "tf32" permits less exact products on tensor cores,
    "3xtf32" takes three of them and keeps the bound of fp32, "ieee" is neither; on a CPU all are IEEE. `algorithm`:
    "auto" or an id such as "cpu.direct". `out` is filled and returned; it may not overlap an input.

    Filters are packed on each call: `prepare` packs them once. Raises InvalidProblem for a bad argument, NotApplicable
    where the named algorithm does not apply.
    """
    return _convolve(
        2, x, w, bias, stride, padding, dilation, groups, activation, residual, output_size, math, algorithm,
        device, out,
    )  # fmt: skip


def conv1d(
    x: Any,
    w: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Any = None,
    output_size: Any = None,
    math: str = "ieee",
    algorithm: str = "auto",
    device: str | None = None,
    out: Any = None,
) -> Any:
    """As conv2d with one spatial axis: x (n, c, w) or (c, w), w (k, c / groups, s); padding also ((left, right),)."""
    return _convolve(
        1, x, w, bias, stride, padding, dilation, groups, activation, residual, output_size, math, algorithm,
        device, out,
    )  # fmt: skip


def prepare(
    problem: ConvProblem | str,
    w: Any,
    bias: Any = None,
    *,
    algorithm: str = "auto",
    config: Config | str | None = None,
    threads: int | None = None,
    device: str | None = None,
) -> PreparedConv:
    """An operator for one problem with its filters packed once: call it many times, from any number of threads.

    `problem`: a ConvProblem or its string ("c64 h56 w56 k64 r3 s3 pad1 relu"). w (k, c / groups, r, s) and bias (k,)
    are copied, so later changes to them have no effect; a bias that is given is used whether or not the problem says
    "bias". `config`: a config of the named algorithm, or words of its string. `threads`: workers (default:
    TAPWISE_NUM_THREADS, else the cores). Where w lies, on a GPU or not, is where it computes; `device="cuda"` copies
    NumPy filters to a GPU, and NumPy images there and back on each call.

    Raises InvalidProblem for arguments that do not fit the problem, NotApplicable where no algorithm applies.
    """
    if isinstance(problem, str):
        problem = ConvProblem.parse(problem)
    if not isinstance(problem, ConvProblem):
        raise InvalidProblem(f"problem is a {type(problem).__name__}: a ConvProblem or its string is allowed")
    if bias is not None and not problem.bias:
        problem = problem.replace(bias=True)
    return PreparedConv(problem, w, bias, algorithm=algorithm, config=config, threads=threads, device=device)


class PreparedConv:
    """A problem with its algorithm chosen, its kernel compiled and its filters packed. Made by `prepare`.

    Attributes: problem; device; choice (algorithm, config, reason); plan. Safe to call from many threads at once.
    """

    def __init__(
        self, problem: ConvProblem, w: Any, bias: Any, *, algorithm: str, config: Config | str | None,
        threads: int | None, device: str | None,
    ) -> None:  # fmt: skip
        index, self._upload = arrays.place(w, device)
        filters = arrays.anywhere(w, "w", index, self._upload)
        offset = None if bias is None else arrays.anywhere(bias, "bias", index, self._upload)
        if problem.bias and offset is None:
            raise InvalidProblem("bias=None: the problem has a bias, of shape (k,)")
        _check_like("w", filters, problem.w_shape, problem.dtype)
        if offset is not None:
            _check_like("bias", offset, (problem.k,), problem.dtype)
        self.problem = problem
        self.device = device_of(filters, threads)
        planar = as_images(problem)
        self.choice, self.plan = _plan(planar, self.device, algorithm, config, True)
        # A plan for a GPU may take filters as they are, and so the user's own.
        mine = filters if index is None else arrays.copy(filters)
        self._packed = self.plan.pack(_lift(mine, problem, False))
        self._bias = None if offset is None else arrays.copy(offset)
        if index is not None and self._packed is not None:
            # So that a call may be made on any stream.
            self._packed = settle(self._packed)
        self._run = self.plan.run
        # What a call without any conversion looks like: a NumPy array of this dtype, shape and strides.
        self._dtype = arrays.DTYPES[problem.dtype]
        self._x_shape: tuple[int, ...] | None = planar.x_shape
        if planar is not problem or problem.residual or index is not None:
            self._x_shape = None
        self._x_strides = arrays.empty(planar.x_shape, self._dtype, problem.layout).strides
        n, k, *output = planar.y_shape
        self._channels_last = problem.layout == "nhwc"
        self._y_memory = (n, *output, k) if self._channels_last else (n, k, *output)
        self._torch: Any = None
        if index is not None and not self._upload and planar is problem:
            self._torch = TorchCall.of(self, filters)
        self._free: list[np.ndarray] | None = None
        self._workspace_size = 0
        if self.plan.workspace_bytes and index is None:
            self._free, self._workspace_size = arrays.workspaces(self.plan.workspace_bytes)

    def __call__(self, x: Any, residual: Any = None, out: Any = None) -> Any:
        """activation(conv(x, w) + bias + residual): arrays as for conv2d, of the problem's shape and dtype.

        One image may come without its batch axis. x that is not dense in the problem's layout is copied; the result has
        the problem's layout. `residual` where the problem has one. `out` is filled and returned.
        """
        if (
            type(x) is np.ndarray
            and x.strides == self._x_strides
            and x.shape == self._x_shape
            and x.dtype == self._dtype
            and residual is None
            and out is None
            and x.flags.aligned
        ):
            y = np.empty(self._y_memory, self._dtype)
            if self._channels_last:
                y = y.transpose(0, 3, 1, 2)
            if self._free is None:
                self._run(Buffers(x, self._packed, y, None, self._bias))
            else:
                try:
                    workspace = self._free.pop()
                except IndexError:
                    workspace = arrays.aligned(self._workspace_size)
                self._run(Buffers(x, self._packed, y, workspace, self._bias))
                self._free.append(workspace)
            return y
        if self._torch is not None and out is None and self._torch.takes(x, residual):
            return self._torch(x, residual)
        return self._call(x, residual, out)

    def _call(self, x: Any, residual: Any, out: Any) -> Any:
        problem = self.problem
        index = self.device.index if self.device.kind == "cuda" else None
        source = arrays.anywhere(x, "x", index, self._upload)
        single = problem.n == 1 and source.ndim == len(problem.x_shape) - 1
        _check_like("x", source, problem.x_shape[single:], problem.dtype)
        if problem.residual != (residual is not None):
            wanted = f"the problem has one, of shape {problem.y_shape}" if problem.residual else "the problem has none"
            raise InvalidProblem(f"residual={'None' if residual is None else 'an array'}: {wanted}")
        added = None if residual is None else arrays.anywhere(residual, "residual", index, self._upload)
        return _execute(problem, single, self.plan, self._packed, self._bias, x, source, added, out)

    def __repr__(self) -> str:
        return f"<tapwise.PreparedConv '{self.problem}' with {self.choice.algorithm}>"


def as_images(problem: ConvProblem) -> ConvProblem:
    """The problem with two spatial axes: one axis becomes a row of an image of height one. Others as they are."""
    if len(problem.spatial) != 1:
        return problem
    return problem.replace(
        spatial=(1, *problem.spatial),
        kernel=(1, *problem.kernel),
        stride=(1, *problem.stride),
        padding=((0, 0), *problem.padding),
        dilation=(1, *problem.dilation),
    )


def _convolve(
    axes: int, x: Any, w: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any,
    activation: str | None, residual: Any, output_size: Any, math: str, algorithm: str,
    device: str | None, out: Any,
) -> Any:  # fmt: skip
    at, upload = arrays.place(x, device)

    def array(value: Any, name: str) -> Any:
        return arrays.anywhere(value, name, at, upload)

    source, filters = array(x, "x"), array(w, "w")
    offset = None if bias is None else array(bias, "bias")
    addend = None if residual is None else array(residual, "residual")
    dtype = arrays.dtype_name(source, "x")
    single = source.ndim == axes + 1
    if not single and source.ndim != axes + 2:
        raise InvalidProblem(f"x has shape {source.shape}: {axes + 2} axes are allowed, or {axes + 1} without a batch")
    if filters.ndim != axes + 2:
        raise InvalidProblem(f"w has shape {filters.shape}: {axes + 2} axes (k, c / groups, ...) are allowed")
    batched = source[None] if single else source
    _check_like("w", filters, filters.shape, dtype)
    if offset is not None:
        _check_like("bias", offset, filters.shape[:1], dtype)
    words = stride, padding, dilation, groups, output_size, activation, math
    problem_of = _known_problem if all(map(_is_plain, words)) else _problem
    problem = problem_of(
        batched.shape, filters.shape, dtype, arrays.layout_of(batched), offset is not None, residual is not None, words
    )
    _choice, plan = _plan(as_images(problem), device_of(source), algorithm, None, False)
    packed = plan.pack(_lift(filters, problem, False))
    if offset is not None:
        offset = arrays.dense(offset, "nchw")
    return _execute(problem, single, plan, packed, offset, x, source, addend, out)


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
        groups=groups, dtype=dtype, math=math if dtype == "f32" or math not in ("tf32", "3xtf32") else "ieee",
        layout=layout, bias=bias, activation=activation, residual=residual,
    )  # fmt: skip


# Working a problem out takes longer than a small layer: those of calls that were made before are kept.
_known_problem = lru_cache(dispatch.CHOICES_KEPT)(_problem)


def _is_plain(word: Any) -> bool:
    """Whether equal words mean the same: numbers, names, and tuples of them."""
    kind = type(word)
    return kind is int or kind is str or word is None or (kind is tuple and all(map(_is_plain, word)))


def _plan(
    problem: ConvProblem, device: Device, algorithm: str, config: Config | str | None, prepared: bool
) -> tuple[Choice, Plan]:
    """Dispatch, except where there is nothing to sum: any algorithm's name is right for that."""
    if not problem.empty and problem.c:
        choice = dispatch.choose(problem, device, algorithm, config=config, prepared=prepared)
        return choice, dispatch.plan_for(problem, choice, device)
    last = registry.of_backend(device.kind)[-1].id
    identifier = last if algorithm == "auto" else registry.get(algorithm).id
    return Choice(identifier, Config(), _NO_TERMS, 0.0, 0), NothingToSum(problem)


class NothingToSum(Plan):
    """y = activation(bias + residual): what is left without input channels, and nothing at all without outputs."""

    def __init__(self, problem: ConvProblem) -> None:
        self.problem = problem

    def pack(self, w: np.ndarray) -> None:
        return None

    def run(self, buffers: Buffers) -> None:
        y = buffers.y
        values = np.zeros(y.shape)
        if buffers.bias is not None:
            values += arrays.on_host(buffers.bias)[:, None, None]
        if buffers.residual is not None:
            values += arrays.on_host(buffers.residual)
        arrays.assign(y, activate(self.problem.activation, values).astype(y.dtype))


def _execute(
    problem: ConvProblem, single: bool, plan: Plan, packed: Any, bias: np.ndarray | None,
    x: Any, source: Any, added: Any, out: Any,
) -> Any:  # fmt: skip
    """Run a plan on checked `source`, the view of `x`; check residual and out; give back what the user expects."""
    shape = problem.y_shape[single:]
    layout, dtype = problem.layout, arrays.DTYPES[problem.dtype]
    if added is not None:
        _check_like("residual", added, shape, problem.dtype)
    target = None
    if out is not None:
        target = arrays.target(out, source)
        _check_out(target, shape, dtype, {"x": source, "bias": bias, "residual": added})
    images = arrays.dense(_lift(source, problem, single), layout)
    addend = None if added is None else arrays.dense(_lift(added, problem, single), layout)
    direct = None if target is None else _lift(target, problem, single)
    if (
        direct is None
        or not arrays.is_dense(direct, layout)
        or (isinstance(direct, np.ndarray) and not isinstance(source, np.ndarray))
    ):
        y = arrays.empty(as_images(problem).y_shape, dtype, layout, source)
    else:
        y = direct
    if plan.workspace_bytes and not isinstance(source, np.ndarray):
        workspace = arrays.empty((plan.workspace_bytes,), np.dtype(np.uint8), "nchw", source)
        plan.run(Buffers(images, packed, y, workspace, bias, addend))
    elif plan.workspace_bytes:
        free, size = arrays.workspaces(plan.workspace_bytes)
        try:
            workspace = free.pop()
        except IndexError:
            workspace = arrays.aligned(size)
        plan.run(Buffers(images, packed, y, workspace, bias, addend))
        free.append(workspace)
    else:
        plan.run(Buffers(images, packed, y, None, bias, addend))
    if direct is None:
        if len(problem.spatial) == 1:
            y = y[:, :, 0]
        return arrays.like(y[0] if single else y, x)
    if y is not direct:
        arrays.assign(direct, y)
    return out


def _lift(array: Any, problem: ConvProblem, single: bool) -> Any:
    """A view with a batch axis and two spatial axes."""
    if single:
        array = array[None]
    return array[:, :, None] if len(problem.spatial) == 1 else array


def _check_like(name: str, array: arrays.Array, shape: tuple[int, ...], dtype: str) -> None:
    if array.shape != shape:
        raise InvalidProblem(f"{name} has shape {array.shape}: {shape} is allowed")
    if array.dtype != arrays.DTYPES[dtype]:
        arrays.dtype_name(array, name)
        raise InvalidProblem(f"{name} has dtype {array.dtype}: {arrays.DTYPES[dtype]}, as x, is allowed")


def _check_out(
    out: arrays.Array, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: dict[str, arrays.Array | None]
) -> None:
    if out.shape != shape:
        raise InvalidProblem(f"out has shape {out.shape}: {shape} is allowed")
    if out.dtype != dtype:
        raise InvalidProblem(f"out has dtype {out.dtype}: {dtype}, as x, is allowed")
    if not arrays.writeable(out):
        raise InvalidProblem("out is read-only: an array that can be written is allowed")
    for name, array in inputs.items():
        if array is not None and arrays.overlap(out, array):
            raise InvalidProblem(f"out overlaps {name}: an array with memory of its own is allowed")
