"""The one comparator, and the bounds that results must keep.

    |y - y64| <= bound

for each element, both from the problem's `reference`: what the bound is made of is written there.

Input, output and workspace lie between guards of NaN: a write outside shows, and so does a read that matters.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from tapwise import arrays, dispatch, registry
from tapwise.algorithm import Algorithm, Buffers, Config, Device
from tapwise.arrays import device as cuda
from tapwise.arrays.workspaces import aligned
from tapwise.problem import LARGEST_INTEGER, Inputs, Problem

if TYPE_CHECKING:
    from tapwise.ops.conv.prepared import PreparedConv

_GUARD_BYTES: Final = 256


@dataclass(frozen=True)
class Verdict:
    """`error` = |y - y64| and `bound`, what is allowed, at the element with the worst ratio of the two."""

    error: float
    bound: float
    verified: bool
    message: str

    def __bool__(self) -> bool:
        return self.verified


def compare(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray, dtype: Any = None) -> Verdict:
    """Whether |actual - expected| <= bound at every element, and of the wanted dtype if one is given.

    NaN and infinities must stand where they are expected, with their sign. Where the expected value is finite, the
    bound must be too: an infinite one would let everything pass. What may lie beyond the dtype's range may be infinite.
    """
    if actual.shape != expected.shape:
        return _failed(f"shape {actual.shape} instead of {expected.shape}")
    if dtype is not None and actual.dtype != np.dtype(dtype):
        return _failed(f"dtype {actual.dtype} instead of {np.dtype(dtype)}")
    if actual.size == 0:
        return Verdict(0.0, 0.0, True, "no element to compare")
    bound = np.broadcast_to(bound, expected.shape)
    with np.errstate(all="ignore"):
        error = np.abs(actual.astype(np.float64) - expected)
        beyond = _beyond(actual, expected, bound)
        if beyond.any():
            expected = np.where(beyond, actual.astype(np.float64), expected)
            error = np.where(beyond, 0.0, error)
        ratio = np.where(error == 0, 0.0, error / bound)
        finite = np.isfinite(expected)
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        ratio = np.where(finite, ratio, np.where(same, 0.0, np.inf))
        # NaN in the result, a bound that says nothing, or one that is negative.
        ratio[finite & ~(np.isfinite(error) & (bound >= 0) & np.isfinite(bound))] = np.inf
    worst = np.unravel_index(int(ratio.argmax()), ratio.shape)
    wrong = int(np.count_nonzero(ratio > 1))
    where = ", ".join(str(int(index)) for index in worst)
    value, wanted = float(actual[worst]), float(expected[worst])
    worst_error = 0.0 if same[worst] else abs(value - wanted)
    worst_bound = float(bound[worst]) if finite[worst] else 0.0
    if wrong:
        message = f"{wrong} of {actual.size} elements wrong; worst at [{where}]: {value!r} instead of {wanted!r}"
    else:
        message = f"all {actual.size} elements within their bound; closest to it at [{where}]"
    return Verdict(worst_error, worst_bound, wrong == 0, message)


def _beyond(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Where the result is an infinity of the right sign, and what it should be within its bound of one in its dtype."""
    if actual.dtype.kind in "iub":
        return np.zeros(actual.shape, bool)
    largest = float(ml_dtypes.finfo(actual.dtype).max)  # type: ignore[no-untyped-call]
    infinite = np.isinf(actual) & (np.signbit(actual) == np.signbit(expected))
    return np.asarray(infinite & np.isfinite(expected) & (np.abs(expected) + bound > largest))


def _failed(message: str) -> Verdict:
    return Verdict(float("inf"), 0.0, False, message)


def check(
    problem: Problem,
    algorithm_id: str,
    config: Config | str | None = None,
    *,
    device: Device | None = None,
    seed: int = 0,
    integers: bool = False,
) -> Verdict:
    """Run one algorithm on random data and compare it with float64.

    Data are normal, or with `integers` whole numbers from -3 to 3: then the result must be exact wherever the
    arithmetic allows it. Output and workspace are filled with NaN before. Raises NotApplicable where the algorithm
    does not apply.
    """
    if device is None:
        from tapwise.cpu.device import host

        device = host()
    choice = dispatch.choose(problem, device, algorithm_id, config=config)
    plan = dispatch.plan_for(problem, choice, device)
    algorithm = registry.get(choice.algorithm, problem.operator)
    index = device.index if device.kind == "cuda" else None
    inputs = problem.sample(np.random.default_rng(seed), integers)
    if inputs.residual is not None:
        inputs = inputs._replace(residual=arrays.dense(inputs.residual, problem.layout))
    if problem.w_is_image:
        inputs = inputs._replace(w=arrays.dense(inputs.w, problem.layout))
    x = _Guarded(inputs.x.shape, inputs.x.dtype, problem.layout, index, inputs.x)
    y = _Guarded(problem.result_shape, problem.y_dtype, problem.layout, index)
    more = problem.second
    other = None if more is None else _Guarded(more.shape, more.dtype, problem.layout, index)
    workspace = _Guarded((plan.workspace_bytes,), np.dtype(np.uint8), index=index)
    scratch = workspace.array if plan.workspace_bytes else None
    w, bias, residual = (None if one is None else _beside(one, index, problem.layout) for one in inputs[1:4])
    results = y.array if other is None else (y.array, other.array)
    plan.run(Buffers(x.array, plan.pack(w), results, scratch, bias, residual))
    sums = None
    if index is not None and not (integers and algorithm.exact and problem.exact_on_integers):
        there = registry.reference_there(problem.operator) if prod(problem.result_shape) else None
        sums = None if there is None else there(problem, x.array, w, device)
        if sums is not None and not algorithm.exact:
            sums = sums[0], algorithm.magnitude_there(problem, x.array, arrays.dense(w, "nchw"), device)
    for name, memory in (("input", x), ("output", y), ("second output", other), ("workspace", workspace)):
        if memory is not None and not memory.guards_hold():
            return _failed(f"{choice.algorithm} wrote outside its {name}")
    if more is not None and other is not None:
        found = compare(other.result(), *problem.second_reference(inputs))
        if not found:
            return replace(found, message=f"{more.name}: {found.message}")
    return _verdict(problem, algorithm, inputs, y.result(), sums)


def check_operator(
    prepared: PreparedConv, w: np.ndarray, bias: np.ndarray | None = None, *, seed: int = 0, integers: bool = False
) -> Verdict:
    """Call a prepared operator on random data and compare it with float64, within its algorithm's bound.

    `w` and `bias` are what it was prepared with: arrays of any library that `prepare` takes.
    """
    problem = prepared.problem
    given = problem.sample(np.random.default_rng(seed), integers)
    x = arrays.dense(given.x, problem.layout)
    out = arrays.empty(problem.y_shape, problem.y_dtype, problem.layout)
    out.fill(np.nan)
    y = prepared(x, residual=given.residual, out=out)
    filters = arrays.native(arrays.view(w, "w"))
    offset = None if bias is None else arrays.native(arrays.view(bias, "bias"))
    # With integers only the filters given decide whether the result is exact.
    whole = integers and bool(np.all(np.abs(filters) <= LARGEST_INTEGER) and np.all(filters == np.rint(filters)))
    inputs = Inputs(x, filters, offset, given.residual, whole and offset is None)
    return _verdict(problem, registry.get(prepared.choice.algorithm), inputs, y)


def _verdict(problem: Problem, algorithm: Algorithm[Any], inputs: Inputs, y: np.ndarray, sums: Any = None) -> Verdict:
    """`sums`: (sums, those of absolute values) where they have been worked out."""
    if sums is None:
        return compare(y, *problem.reference(inputs, algorithm), problem.y_dtype)
    # Image by image, in threads: what is in between stays in cache, and NumPy lets others run.
    exact, size = sums

    def one(image: int) -> Verdict:
        here = slice(image, image + 1)
        mine = inputs if inputs.residual is None else inputs._replace(residual=inputs.residual[here])
        expected = problem.reference(mine, algorithm, (exact[here], size[here]))
        return compare(y[here], *expected, problem.y_dtype)

    with ThreadPoolExecutor() as pool:
        verdicts = list(pool.map(one, range(len(y))))

    def share(image: int) -> tuple[bool, float]:
        """How much of its bound an error takes, those that failed first."""
        one = verdicts[image]
        return not one.verified, one.error / one.bound if one.bound else float(one.error > 0)

    worst = max(range(len(y)), key=share)
    return replace(verdicts[worst], message=f"image {worst}: {verdicts[worst].message}")


def _beside(array: np.ndarray, index: int | None, layout: str) -> Any:
    """The array, or a copy on a GPU in the same memory order."""
    if index is None:
        return array
    if array.ndim < 4 or layout == "nchw":
        return cuda.upload(array, index)
    return arrays.channels_first(cuda.upload(arrays.channels_last(array), index))


class _Guarded:
    """An array between two guards, on a cache line; every byte is 0xff, which is NaN in every dtype.

    With the number of a GPU `array` is a copy there, of `data` where it is given.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], layout: str = "nchw", index: int | None = None,
        data: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        size = prod(shape) * dtype.itemsize
        storage = aligned(size + 2 * _GUARD_BYTES)
        storage.fill(0xFF)
        self._guards = storage[:_GUARD_BYTES], storage[_GUARD_BYTES + size :]
        inside = storage[_GUARD_BYTES : _GUARD_BYTES + size].view(dtype)
        if layout == "nhwc" and len(shape) > 1:
            n, c, *spatial = shape
            self._host: np.ndarray = arrays.channels_first(inside.reshape(n, *spatial, c))
        else:
            self._host = inside.reshape(shape)
        if data is not None:
            self._host[...] = data
        self.array: Any = self._host
        self._storage = storage
        self._device: Any = None
        if index is not None:
            self._device = cuda.upload(storage, index)
            start = self._device.ptr + _GUARD_BYTES
            self.array = cuda.DeviceArray(start, shape, self._host.strides, dtype, index, "other", self._device)

    def result(self) -> np.ndarray:
        """What the array holds, in this machine's memory."""
        if self._device is not None:
            self._storage[...] = cuda.download(self._device)
        return self._host

    def guards_hold(self) -> bool:
        self.result()
        return all(bool((guard == 0xFF).all()) for guard in self._guards)
