"""Passes over the axes of an array: in the shape that a filter problem has, dispatched, and written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import numpy as np

from tapwise import arrays, dispatch
from tapwise.algorithm import Buffers, Device
from tapwise.arrays.device import DeviceArray
from tapwise.arrays.workspaces import workspace
from tapwise.cpu.device import host
from tapwise.errors import InvalidPicture
from tapwise.ops.filter.edges import window_sources
from tapwise.ops.filter.problem import DTYPES, FilterProblem, stored

NAMES: Final = {kind: name for name, kind in DTYPES.items()}
# A float32 holds integers up to here.
EXACT: Final = 2.0**24


@dataclass(frozen=True)
class Pass:
    """What happens along some axes, in rising order: op of FilterProblem; for each axis the taps, how many lie before
    an element, and what lies beyond the edges.

    weights: dense over the axes' taps; for "separable" two axes' in one row; of "max" and "min" where they look, or
    None. truncate, clip, double: as in FilterProblem. ordered: integers are scipy's to the last unit, by
    FilterProblem.ordered.
    """

    op: str
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    befores: tuple[int, ...]
    modes: tuple[str, ...]
    cval: float = 0.0
    weights: np.ndarray | None = None
    truncate: bool = True
    clip: bool = False
    ordered: bool = False
    double: bool = False
    algorithm: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class Along:
    """Weights along one axis, how many of them lie before an element, and what lies beyond the edges.

    ordered: as in Pass; not for means, which scipy does not add up term by term.
    """

    axis: int
    weights: np.ndarray
    before: int
    mode: str
    ordered: bool = True


def copy(x: Any, y: Any) -> None:
    """y = x in y's dtype."""
    if not isinstance(y, DeviceArray):
        np.copyto(y, x, casting="unsafe")
    elif x is not y:
        apply(x, y, Pass("dense", (0,), (1,), (0,), ("nearest",), weights=np.ones(1)))


def in_pairs(items: Sequence[Any]) -> list[Sequence[Any]]:
    """Two neighbours at a time; of an odd number the first by itself."""
    odd = len(items) % 2
    return [items[:1]] * odd + [items[first : first + 2] for first in range(odd, len(items), 2)]


def apply_along(x: Any, y: Any, parts: Sequence[Along], cval: complex) -> None:
    """y = the weights along one axis after the other, in that order; complex x and y, too."""
    if x.dtype.kind == "c":
        if np.may_share_memory(x, y):
            x = x.copy()
        apply_along(x.real, y.real, parts, float(np.real(cval)))
        apply_along(x.imag, y.imag, parts, float(np.imag(cval)))
        return
    if not parts:
        copy(x, y)
        return
    constant, result = float(np.real(cval)), y
    y = as_bytes(y)
    for pair in in_pairs(parts):
        for group in [pair] if _goes_together(pair, constant, x.dtype, y.dtype) else [[part] for part in pair]:
            rising = sorted(group, key=lambda part: part.axis)
            step = Pass(
                "separable" if len(rising) == 2 else "dense", tuple(part.axis for part in rising),
                tuple(len(part.weights) for part in rising), tuple(part.before for part in rising),
                tuple(part.mode for part in rising), constant, np.concatenate([part.weights for part in rising]),
                ordered=rising[0].ordered,
            )  # fmt: skip
            apply(x, y, step)
            x = y
    if y is not result:
        np.not_equal(y, 0, out=result)


def as_bytes(y: Any) -> Any:
    """Where passes write: of bool its bytes, which hold a whole number from one pass to the next, as in scipy."""
    return y.view(np.uint8) if isinstance(y, np.ndarray) and y.dtype.kind == "b" else y


def _goes_together(pair: Sequence[Along], cval: float, source: np.dtype[Any], to: np.dtype[Any]) -> bool:
    """Whether both axes in one pass mean the same as one after the other.

    They do not where a constant other than 0 lies beyond an edge and the weights change it. Sums that become integers
    are cut after each axis: one pass does that where all is whole, as then low bits are kept either way, or where the
    earlier axis is first and its sums have room in the integer.
    """
    if len(pair) == 1:
        return True
    first, second = pair
    constant = cval != 0 and "constant" in (first.mode, second.mode)
    whole = all(np.all(part.weights == np.rint(part.weights)) for part in pair)
    if to.kind == "f":
        kept = all(abs(float(part.weights.sum()) - 1.0) < 1e-9 for part in pair)
        return (kept or not constant) and (first.axis < second.axis or whole)
    # Of 64 bits without a sign float64 does not hold all.
    if constant or (to.itemsize == 8 and to.kind == "u"):
        return False
    return (whole and source.kind != "f") or (first.axis < second.axis and _has_room(first.weights, source, to))


def _has_room(weights: np.ndarray, source: np.dtype[Any], to: np.dtype[Any]) -> bool:
    """Whether an integer holds all sums of `source`."""
    if source.kind == "f":
        return False
    (low, high), (least, most) = limits_of(source), limits_of(to)
    above, below = float(weights[weights > 0].sum()), float(weights[weights < 0].sum())
    return high * above + low * below < most + 0.99 and low * above + high * below > least - 0.99


def limits_of(kind: np.dtype[Any]) -> tuple[int, int]:
    """The smallest and the largest of an integer dtype."""
    return (0, 1) if kind.kind == "b" else (int(np.iinfo(kind).min), int(np.iinfo(kind).max))


def apply(x: Any, y: Any, step: Pass) -> None:
    """y = the pass over x; both of one shape, any strides and byte orders; they may overlap; both here or on one GPU.

    Raises InvalidPicture for dtypes that are not taken.
    """
    if x.size == 0:
        return
    kind, to = _kind(x.dtype, "input"), _kind(y.dtype, "output")
    on_gpu = isinstance(x, DeviceArray)
    if on_gpu:
        for array, found, name in ((x, kind, "input"), (y, to, "output")):
            if found != array.dtype:
                words = "on a GPU integers, float32 and float64 are taken"
                raise InvalidPicture(f"{name} has dtype {array.dtype}: {words}")
        if len(step.axes) > 3:
            raise InvalidPicture(f"axes={step.axes}: up to three at once on a GPU")
    if "b" in (x.dtype.kind, y.dtype.kind):
        # An epsilon for the roundings of bytes in float32 would be much for sums of a few ones.
        step = replace(step, double=True)
    first, last = step.axes[0], step.axes[-1]
    given = order = tuple(range(x.ndim))
    if step.axes != given[first : last + 1]:
        # The axes next to each other, at the end.
        order = (*(axis for axis in given if axis not in step.axes), *step.axes)
        first, last = x.ndim - len(step.axes), x.ndim - 1
    direct = order == given and to == y.dtype and arrays.is_dense(y, "nchw") and not arrays.overlap(x, y)
    x = x.transpose(*order)
    source = arrays.dense(x if on_gpu else x.astype(kind, order="C", copy=False), "nchw")
    target = y if direct else arrays.empty(source.shape, to, "nchw", y)
    shape = (prod(source.shape[:first]), *source.shape[first : last + 1], prod(source.shape[last + 1 :]))
    _run(_reshaped(source, shape), _reshaped(target, shape), step)
    if not direct:
        arrays.assign(y, target.transpose(*(order.index(axis) for axis in given)))


def _reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """A dense array in another shape."""
    if isinstance(array, np.ndarray):
        return array.reshape(shape)
    strides = tuple(prod(shape[axis + 1 :]) * array.dtype.itemsize for axis in range(len(shape)))
    return DeviceArray(array.ptr, shape, strides, array.dtype, array.index, array.library, array)


def _kind(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    """What is computed with: native byte order, bytes for bool, float64 for longer floats."""
    plain = dtype.newbyteorder("=")
    if plain in NAMES:
        return plain
    if plain.kind == "b":
        return np.dtype(np.uint8)
    if plain.kind == "f":
        return np.dtype(np.float64)
    # Other names of the same integers.
    if plain.kind in "iu":
        return np.dtype(f"{plain.kind}{plain.itemsize}")
    raise InvalidPicture(f"{name} has dtype {dtype}: integers and real or complex floating point are taken")


def _run(x: Any, y: Any, step: Pass) -> None:
    """x and y (outer, up to three axes, inner), dense."""
    outer, *filtered, inner = x.shape
    axes = len(filtered)
    if axes > 3:
        _run_many(x, y, step)
        return
    if axes == 3:
        for number in range(outer):
            _launch(x[number], y[number], step, tuple(filtered), step.sizes, step.befores, step.modes, inner)
        return
    spatial: tuple[int, ...]
    lead: tuple[int, ...]
    if axes == 2:
        spatial, lead, c = (outer, *filtered), (0,), inner
    elif inner == 1:
        # A row of each: the rows are one picture.
        spatial, lead, c = (1, outer, *filtered), (0, 0), 1
    else:
        spatial, lead, c = (outer, *filtered, inner), (0,), 1
    tail = 3 - len(lead) - axes
    sizes = (*(1 for _ in lead), *step.sizes, *(1 for _ in range(tail)))
    befores = (*lead, *step.befores, *(0 for _ in range(tail)))
    modes = (*("nearest" for _ in lead), *step.modes, *("nearest" for _ in range(tail)))
    _launch(x, y, step, spatial, sizes, befores, modes, c)


def _launch(
    x: Any, y: Any, step: Pass, spatial: Sequence[int], size: Sequence[int], before: Sequence[int],
    modes: Sequence[str], c: int,
) -> None:  # fmt: skip
    problem = FilterProblem(
        step.op, tuple(spatial), tuple(size), tuple(before), c, tuple(modes), float(step.cval),  # type: ignore[arg-type]
        NAMES[x.dtype], NAMES[y.dtype], step.clip, step.truncate,
    )  # fmt: skip
    if step.op in ("dense", "separable") and (step.double or needs_double(problem, np.asarray(step.weights))):
        problem = problem.replace(double=True)
    if step.ordered and _in_order(problem, np.asarray(step.weights), x):
        problem = problem.replace(ordered=True)
    device = _device(x, step.threads)
    plan = dispatch.plan_for(problem, dispatch.choose(problem, device, step.algorithm), device)
    packed = plan.pack(step.weights)
    if not isinstance(x, DeviceArray):
        x, y = x.reshape(problem.x_shape), y.reshape(problem.y_shape)
    with workspace(plan.workspace_bytes, x) as memory:
        plan.run(Buffers(x, packed, y, memory))


def _device(x: Any, threads: int | None) -> Device:
    if isinstance(x, DeviceArray):
        from tapwise.cuda.jit.device import gpu

        return gpu(x.index)
    return host(threads)


def _in_order(problem: FilterProblem, weights: np.ndarray, x: Any) -> bool:
    """Whether roundings may change an integer, and by more than a mean of bytes is worth: that stays in float32."""
    if not problem.integral or problem.clip or isinstance(x, DeviceArray):
        return False
    kind = DTYPES[problem.dtype]
    exact = kind.kind in "iu" and bool(np.all(weights == np.rint(weights)))
    return not exact and (not problem.single or bool(np.any(weights < 0)))


def needs_double(problem: FilterProblem, weights: np.ndarray) -> bool:
    """Whether an integral result would not always be the exact one with sums in float32."""
    if not problem.single or not problem.integral or problem.clip:
        return False
    kind = DTYPES[problem.dtype]
    if kind.kind == "f":
        return True
    if np.any(weights != np.rint(weights)):
        return kind.itemsize > 1
    parts = [weights] if problem.op == "dense" else [weights[: problem.size[1]], weights[problem.size[1] :]]
    largest = float(max(abs(np.iinfo(kind).min), np.iinfo(kind).max, abs(problem.cval)))
    return bool(largest * prod(float(np.abs(part).sum()) for part in parts) >= EXACT)


def _run_many(x: np.ndarray, y: np.ndarray, step: Pass) -> None:
    """More than three axes at once: tap by tap in float64, by NumPy. Slow, and as large as the array itself."""
    outer, *filtered, inner = x.shape
    tables = [window_sources(*of_axis) for of_axis in zip(filtered, step.sizes, step.befores, step.modes, strict=True)]
    weights = np.ones(step.sizes) if step.weights is None else np.asarray(step.weights).reshape(step.sizes)
    total: np.ndarray | None = None
    for tap in zip(*np.nonzero(weights), strict=True):
        at = [table[start : start + length] for table, start, length in zip(tables, tap, filtered, strict=True)]
        seen = x[np.ix_(np.arange(outer), *(np.maximum(row, 0) for row in at), np.arange(inner))].astype(np.float64)
        for axis, row in enumerate(at):
            shape = [1] * seen.ndim
            shape[axis + 1] = -1
            seen = np.where((row < 0).reshape(shape), step.cval, seen)
        if step.op == "dense":
            seen *= weights[tap]
            total = seen if total is None else total + seen
        else:
            better = np.maximum if step.op == "max" else np.minimum
            total = seen if total is None else better(total, seen)
    one = FilterProblem("dense", (1,) * 3, (1,) * 3, (0,) * 3, to=NAMES[y.dtype], double=True)
    y[...] = 0 if total is None else stored(one, total)
