"""A prepared convolution: algorithm chosen, kernel compiled, filters packed; and how any call is run."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from tapwise import arrays, capture, dispatch, registry
from tapwise.algorithm import Buffers, Choice, Config, Device, Plan, Steady
from tapwise.arguments import word
from tapwise.arrays.device import synchronize
from tapwise.arrays.host import ALIGNMENT, maker
from tapwise.arrays.host_calls import note
from tapwise.arrays.replay import Replays
from tapwise.arrays.workspaces import pool, workspace
from tapwise.errors import InvalidProblem
from tapwise.integers import round_up
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.reference import activate
from tapwise.ops.parameters import device_of, result
from tapwise.problem import DTYPES

# Buffers at half the cost of naming its fields.
_new: Final = tuple.__new__
_ndarray = np.ndarray
# Batch sizes other than its own that an operator keeps plans for.
BATCHES_KEPT: Final = 8
_NO_TERMS: Final = "nothing to sum: no output, or no input channel"


class PreparedConv:
    """A problem with its algorithm chosen, its kernel compiled and its filters packed. Made by `prepare`.

    Attributes: problem; device; choice (algorithm, config, reason); plan. Safe to call from many threads at once. It
    never changes, so copies are itself; pickled, it is its filters and words, prepared again where it is loaded.
    """

    def __init__(
        self, problem: ConvProblem, w: Any, bias: Any, *, algorithm: str, config: Config | str | None,
        threads: int | None, device: str | None,
    ) -> None:  # fmt: skip
        if problem.direction == "wgrad":
            raise InvalidProblem("problem is of wgrad: it has no filters that could be packed")
        index, self._upload = arrays.place(w, device)
        filters = arrays.anywhere(w, "w", index, self._upload)
        offset = None if bias is None else arrays.anywhere(bias, "bias", index, self._upload)
        if problem.bias and offset is None:
            raise InvalidProblem("bias=None: the problem has a bias, of shape (k,)")
        check_like("w", filters, problem.w_shape, problem.dtype)
        if offset is not None:
            check_like("bias", offset, (problem.result_shape[1],), problem.dtype)
        self.problem = problem
        self.device = device_of(filters, threads)
        planar = problem.canonical()
        self.choice, self.plan = plan_of(planar, self.device, algorithm, config, True)
        # The user's own may change. A plan for a GPU may take filters as they are.
        mine = arrays.copy(filters)
        self._packed = self.plan.pack(lift(mine, problem, False))
        self._bias: Any = None if offset is None else arrays.copy(offset)
        self._given = arrays.like(mine, w), None if self._bias is None else arrays.like(self._bias, bias)
        self._words: dict[str, Any] = {"algorithm": algorithm, "config": config, "threads": threads, "device": device}
        self._others: OrderedDict[int, PreparedConv] = OrderedDict()
        self._lock = threading.Lock()
        if index is not None and self._packed is not None:
            # So that a call may be made on any stream.
            self._packed = synchronize(self._packed)
        self._run = self.plan.run
        # What a call without any conversion looks like: NumPy arrays of this dtype, shape and strides.
        self._dtype = problem.x_dtype
        self._x_shape: tuple[int, ...] | None = planar.given_shape
        if planar is not problem or index is not None:
            self._x_shape = None
        self._y_shape = planar.result_shape
        shapes = planar.given_shape, planar.result_shape
        self._x_strides, self._y_strides = (
            arrays.empty(shape, self._dtype, problem.layout).strides for shape in shapes
        )
        self._alone = not problem.residual
        self._new = maker(planar.result_shape, self._dtype, problem.layout == "nhwc")
        self._replays = None if index is None else Replays(constants=True)
        size = self.plan.workspace_bytes if index is None else 0
        self._pool = pool(size, problem.x_dtype) if size else None

    def __call__(self, x: Any, residual: Any = None, out: Any = None) -> Any:
        """activation(conv(x, w) + bias + residual): arrays as for conv2d, of the problem's shape and dtype.

        Of dgrad x is dy, and the result dx.

        The batch may be of any size; the first call of another prepares for it. One image may come without its batch
        axis. x that is not dense in the problem's layout is copied; the result has the problem's layout, whatever x
        has. `residual` where the problem has one. `out` is filled and returned.
        """
        if out is None and self._is_plain(x, residual):
            y, pool = self._new(), self._pool
            if pool is None:
                self._run(_new(Buffers, (x, self._packed, y, None, self._bias, residual, None)))
                return y
            # As `workspace`, whose context takes a quarter of a microsecond.
            memory = pool.take()
            self._run(_new(Buffers, (x, self._packed, y, memory, self._bias, residual, None)))
            pool.free.append(memory)
            return y
        if self._replays is None:
            same = self._dense(x) if out is None else None
            return self._call((), out, x, residual) if same is None else self(same, residual)
        if residual is None:
            # Calls with one tensor are kept without a loop over them.
            return self._replays.call(self._call, (), out, x)
        return self._replays.call(self._call, (), out, x, residual)

    def _is_plain(self, x: Any, residual: Any) -> bool:
        return (
            type(x) is _ndarray
            and x.strides == self._x_strides
            and x.shape == self._x_shape
            and x.dtype is self._dtype
            and (residual is None if self._alone else self._is_as_y(residual))
            and x.flags.aligned
        )

    def _dense(self, x: Any) -> Any:
        """The same elements of an array that is dense but for the strides of axes of one: a part of the channels of one
        image. None for other arrays, and for those that are plain."""
        if type(x) is not _ndarray or x.shape != self._x_shape or x.strides == self._x_strides or not x.size:
            return None
        pairs = zip(x.shape, x.strides, self._x_strides, strict=True)
        same = all(size == 1 or mine == plain for size, mine, plain in pairs)
        return np.lib.stride_tricks.as_strided(x, strides=self._x_strides) if same else None

    def steady(self, x: Any, y: Any, residual: Any = None) -> Steady | None:
        """A call that computes y, for arrays that stay where they are; None for those that a call would copy."""
        same = self._dense(x)
        x = x if same is None else same
        if not (self._is_plain(x, residual) and self._is_as_y(y)):
            return None
        # Scratch of its own: what is in the pool may be another thread's.
        memory = None if self._pool is None else self._pool.take()
        return Steady(self.plan, Buffers(x, self._packed, y, memory, self._bias, residual))

    def _is_as_y(self, residual: Any) -> bool:
        return (
            type(residual) is _ndarray
            and residual.strides == self._y_strides
            and residual.shape == self._y_shape
            and residual.dtype is self._dtype
            and residual.flags.aligned
        )

    def _call(self, words: tuple[()], out: Any, x: Any, residual: Any = None) -> Any:
        problem = self.problem
        index = self.device.index if self.device.kind == "cuda" else None
        source = arrays.anywhere(x, "x", index, self._upload)
        single = source.ndim == len(problem.given_shape) - 1
        n = 1 if single else source.shape[0] if source.ndim else 0
        if source.shape[not single :] != problem.given_shape[1:]:
            images = ", ".join(map(str, ("n", *problem.given_shape[1:])))
            raise InvalidProblem(f"x has shape {source.shape}: ({images}) is allowed; prepare another for other images")
        if n != problem.n:
            # It has filters of its own, which are not kept for good.
            capture.refuse()
            with capture.aside():
                other = self._for_batch(n)
            return other(x, residual, out)
        check_like("x", source, problem.given_shape[single:], problem.dtype)
        if problem.residual != (residual is not None):
            wanted = f"the problem has one, of shape {problem.y_shape}" if problem.residual else "the problem has none"
            raise InvalidProblem(f"residual={'None' if residual is None else 'an array'}: {wanted}")
        added = None if residual is None else arrays.anywhere(residual, "residual", index, self._upload)
        return execute(problem, single, self.plan, self._packed, self._bias, x, source, added, out)

    def _for_batch(self, n: int) -> PreparedConv:
        """The same for another number of images, from those that were asked for last."""
        with self._lock:
            other = self._others.get(n)
            if other is None:
                problem = self.problem.replace(n=n)
                try:
                    other = PreparedConv(problem, *self._given, **self._words)
                except InvalidProblem:
                    # A config that was asked for by name need not be one of another batch's.
                    if self._words["config"] is None:
                        raise
                    other = PreparedConv(problem, *self._given, **{**self._words, "config": None})
                self._others[n] = other
                if len(self._others) > BATCHES_KEPT:
                    self._others.popitem(last=False)
            self._others.move_to_end(n)
            return other

    def __copy__(self) -> PreparedConv:
        return self

    def __deepcopy__(self, memo: object) -> PreparedConv:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.problem, *self._given, self._words)

    def __repr__(self) -> str:
        return f"<tapwise.PreparedConv '{self.problem}' with {self.choice.algorithm}>"


def _again(problem: ConvProblem, w: Any, bias: Any, words: dict[str, Any]) -> PreparedConv:
    """What was pickled, prepared for this machine."""
    return PreparedConv(problem, w, bias, **words)


def plan_of(
    problem: ConvProblem, device: Device, algorithm: str, config: Config | str | None, prepared: bool
) -> tuple[Choice, Plan]:
    """Dispatch, except where there is nothing to sum: any algorithm's name is right for that."""
    if not problem.trivial:
        choice = dispatch.choose(problem, device, algorithm, config=config, prepared=prepared)
        return choice, dispatch.plan_for(problem, choice, device)
    last = registry.of_backend(device.kind, problem.operator)[-1].id
    named = word(algorithm, "algorithm", dispatch.ALGORITHM)
    identifier = last if named == "auto" else registry.get(algorithm, problem.operator).id
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


def execute(
    problem: ConvProblem, single: bool, plan: Plan, packed: Any, bias: np.ndarray | None,
    x: Any, source: Any, added: Any, out: Any, name: str = "x", w: Any = None,
) -> Any:  # fmt: skip
    """Run a plan on checked `source`, the view of `x`, which the user calls `name`; check residual and out; give back
    what the user expects. `w`: the user's own filters, where `packed` may share their memory."""
    shape = problem.result_shape[single:]
    layout, dtype = problem.layout, problem.x_dtype
    if added is not None:
        check_like("residual", added, shape, problem.dtype)
    target = None if out is None else result(out, shape, dtype, source, name, w=w, bias=bias, residual=added)
    lifted = lift(source, problem, single)
    images = arrays.dense(lifted, layout)
    lifted_addend = None if added is None else lift(added, problem, single)
    addend = None if lifted_addend is None else arrays.dense(lifted_addend, layout)
    direct = None if target is None else lift(target, problem, single)
    y: Any = direct
    if not arrays.takes(direct, layout, source):
        y = arrays.empty(problem.canonical().result_shape, dtype, layout, source)
    with workspace(plan.workspace_bytes, source) as memory:
        plan.run(Buffers(images, packed, y, memory, bias, addend))
    if direct is None:
        as_given = images is lifted and addend is lifted_addend
        if w is not None and as_given and isinstance(source, np.ndarray):
            arguments = source, w, bias, added
            note(again(problem, single, plan), arguments, device_of(source), partial(device_of, source))
        if len(problem.spatial) == 1:
            y = y[:, :, 0]
        return arrays.like(y[0] if single else y, x)
    if y is not direct:
        arrays.assign(direct, y)
    return out


def again(problem: ConvProblem, single: bool, plan: Plan) -> Callable[..., np.ndarray]:
    """What `execute` gives for other arrays (x, w, bias, residual) like those of a call; bias and residual may be left
    out. Filters are packed by each call."""
    canonical = problem.canonical()
    dtype = canonical.x_dtype
    new = maker(canonical.result_shape, dtype, canonical.layout == "nhwc")
    # Packed filters lie behind the workspace, where pages are there since the call before.
    behind = round_up(plan.workspace_bytes, ALIGNMENT) if plan.packed_bytes else None
    needed = plan.workspace_bytes if behind is None else behind + plan.packed_bytes
    kept = pool(needed, dtype) if needed else None
    pack, run = plan.pack_into, plan.run

    def compute(x: np.ndarray, w: np.ndarray, bias: Any = None, residual: Any = None) -> np.ndarray:
        y = new()
        if kept is None:
            run(_new(Buffers, (x, pack(w, None), y, None, bias, residual, None)))
            return y
        memory = kept.take()
        try:
            packed = pack(w, None if behind is None else memory[behind:])
            run(_new(Buffers, (x, packed, y, memory, bias, residual, None)))
        finally:
            kept.free.append(memory)
        return y

    def lifted(x: np.ndarray, w: np.ndarray, bias: Any = None, residual: Any = None) -> np.ndarray:
        if residual is not None:
            residual = lift(residual, problem, single)
        y = compute(lift(x, problem, single), lift(w, problem, False), bias, residual)
        if len(problem.spatial) == 1:
            y = y[:, :, 0]
        return y[0] if single else y

    return lifted if single or len(problem.spatial) == 1 else compute


def lift(array: Any, problem: ConvProblem, single: bool) -> Any:
    """A view with a batch axis and two spatial axes."""
    if single:
        array = array[None]
    return array[:, :, None] if len(problem.spatial) == 1 else array


def check_like(name: str, array: arrays.Array, shape: tuple[int, ...], dtype: str, like: str = "x") -> None:
    if array.shape != shape:
        raise InvalidProblem(f"{name} has shape {array.shape}: {shape} is allowed")
    if array.dtype != DTYPES[dtype]:
        arrays.dtype_name(array, name)
        raise InvalidProblem(f"{name} has dtype {array.dtype}: {DTYPES[dtype]}, as {like}, is allowed")
