"""The one comparator, and the bounds that results must keep.

    |y - y64| <= L * c * u * magnitude + evaluation + rounding of the output

for each element. u is the unit roundoff of the accumulator (2^-24 for f32 and f16, 2^-53 for f64); c the algorithm's
`error_factor`; magnitude what it sums in absolute value, with |bias| and |residual|. The activation passes an error on
with its steepest slope L, and is itself evaluated to 16 u of its value (and of its argument for gelu, where 1 + erf
cancels). Rounding is half a unit in the last place of the output's dtype.

Input, output and workspace lie between guards of NaN: a write outside shows, and so does a read that matters.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from tapwise import arrays, dispatch, registry
from tapwise.algorithm import Algorithm, Buffers, Config, Device, Plan
from tapwise.ops import references
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.reference import activate, convolve
from tapwise.ops.filter.problem import FilterProblem
from tapwise.problem import Problem

if TYPE_CHECKING:
    from tapwise.ops.conv.prepared import PreparedConv

# Steepest slope of each activation.
SLOPES: Final = {None: 1.0, "relu": 1.0, "relu6": 1.0, "tanh": 1.0, "sigmoid": 0.25, "silu": 1.1, "gelu": 1.13}
EXACT_ACTIVATIONS: Final = (None, "relu", "relu6")
EVALUATION: Final = 16.0
LARGEST_INTEGER: Final = 3
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
    bound must be too: an infinite one would let everything pass.
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


def _failed(message: str) -> Verdict:
    return Verdict(float("inf"), 0.0, False, message)


def expectation(
    problem: ConvProblem,
    algorithm: Algorithm[Any],
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    sums: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(y64, bound): the exact result in float64, and what each element may be off by.

    `sums`: the convolution in float64 and what is summed in absolute value, where a GPU has worked them out.
    """
    dtype = arrays.DTYPES[problem.dtype]
    u = 2.0**-53 if problem.dtype == "f64" else 2.0**-24
    plain = problem.replace(bias=False, activation=None, residual=False)
    with np.errstate(all="ignore"):
        y, magnitude = (convolve(plain, x, w), algorithm.magnitude(plain, x, w)) if sums is None else sums
        for addend in (None if bias is None else bias.reshape(-1, *[1] * len(problem.output)), residual):
            if addend is not None:
                y += addend
                magnitude = magnitude + np.abs(addend, dtype=np.float64)
        bound: np.ndarray = magnitude * (SLOPES[problem.activation] * algorithm.error_factor(problem) * u)
        if problem.activation == "gelu":
            bound += EVALUATION * u * np.abs(y)
        y = activate(problem.activation, y)
        if problem.activation not in EXACT_ACTIVATIONS:
            bound += EVALUATION * u * np.abs(y)
        kind = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        bound += float(kind.eps) / 2 * np.abs(y) + float(kind.smallest_subnormal)
    return y, bound


def exact_on_integers(problem: ConvProblem, algorithm: Algorithm[Any]) -> bool:
    """Whether integers up to LARGEST_INTEGER give the exact result, rounded once to the output's dtype."""
    largest = LARGEST_INTEGER**2 * problem.gemm_k + 2 * LARGEST_INTEGER
    held = 2.0**53 if problem.dtype == "f64" else 2.0**24
    return algorithm.exact and largest < held and problem.activation in EXACT_ACTIVATIONS


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
    rng = np.random.default_rng(seed)
    index = device.index if device.kind == "cuda" else None
    if isinstance(problem, FilterProblem):
        return _check_plain(problem, plan, problem.sample(rng), index)
    dtype = arrays.DTYPES[problem.dtype]
    if not isinstance(problem, ConvProblem):
        return _check_plain(problem, plan, _data(rng, problem.x_shape, integers).astype(dtype), index)
    algorithm = registry.get(choice.algorithm)
    data = _data(rng, problem.x_shape, integers).astype(dtype)
    x = _Guarded(problem.x_shape, dtype, problem.layout, index, data)
    w = _data(rng, problem.w_shape, integers).astype(dtype)
    bias = _data(rng, (problem.k,), integers).astype(dtype) if problem.bias else None
    residual = None
    if problem.residual:
        residual = arrays.dense(_data(rng, problem.y_shape, integers).astype(dtype), problem.layout)
    y = _Guarded(problem.y_shape, dtype, problem.layout, index)
    workspace = _Guarded((plan.workspace_bytes,), np.dtype(np.uint8), index=index)
    scratch = workspace.array if plan.workspace_bytes else None
    there: list[Any] = [None if one is None else _beside(one, index, problem.layout) for one in (w, bias, residual)]
    plan.run(Buffers(x.array, plan.pack(there[0]), y.array, scratch, there[1], there[2]))
    sums = None
    if index is not None and not (integers and exact_on_integers(problem, algorithm)):
        from tapwise.ops.conv.cuda import reference

        sums = reference.convolve(problem, x.array, arrays.dense(there[0], "nchw"), device)
    for name, memory in (("input", x), ("output", y), ("workspace", workspace)):
        if not memory.guards_hold():
            return _failed(f"{choice.algorithm} wrote outside its {name}")
    return _verdict(problem, algorithm, data, w, bias, residual, y.result(), integers, sums)


def _check_plain(problem: Problem, plan: Plan, data: np.ndarray, index: int | None) -> Verdict:
    """An operator with one input and no filters."""
    kind = references.result_dtype(problem)
    x = _Guarded(data.shape, data.dtype, problem.layout, index, data)
    y = _Guarded(problem.y_shape, kind, problem.layout, index)
    workspace = _Guarded((plan.workspace_bytes,), np.dtype(np.uint8), index=index)
    packed = references.packed(problem, plan)
    plan.run(Buffers(x.array, packed, y.array, workspace.array if plan.workspace_bytes else None))
    for name, memory in (("input", x), ("output", y), ("workspace", workspace)):
        if not memory.guards_hold():
            return _failed(f"'{problem}' wrote outside its {name}")
    return compare(y.result(), *references.expectation(problem, data), kind)


def check_operator(
    prepared: PreparedConv, w: np.ndarray, bias: np.ndarray | None = None, *, seed: int = 0, integers: bool = False
) -> Verdict:
    """Call a prepared operator on random data and compare it with float64, within its algorithm's bound.

    `w` and `bias` are what it was prepared with: arrays of any library that `prepare` takes.
    """
    problem = prepared.problem
    dtype = arrays.DTYPES[problem.dtype]
    rng = np.random.default_rng(seed)
    x = arrays.dense(_data(rng, problem.x_shape, integers).astype(dtype), problem.layout)
    residual = _data(rng, problem.y_shape, integers).astype(dtype) if problem.residual else None
    out = arrays.empty(problem.y_shape, dtype, problem.layout)
    out.fill(np.nan)
    y = prepared(x, residual=residual, out=out)
    filters = arrays.native(arrays.view(w, "w"))
    offset = None if bias is None else arrays.native(arrays.view(bias, "bias"))
    # With integers only the filters given decide whether the result is exact.
    whole = integers and bool(np.all(np.abs(filters) <= LARGEST_INTEGER) and np.all(filters == np.rint(filters)))
    algorithm = registry.get(prepared.choice.algorithm)
    return _verdict(problem, algorithm, x, filters, offset, residual, y, whole and offset is None)


def _verdict(
    problem: ConvProblem,
    algorithm: Algorithm[Any],
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    y: np.ndarray,
    integers: bool,
    sums: tuple[np.ndarray, np.ndarray] | None = None,
) -> Verdict:
    dtype = arrays.DTYPES[problem.dtype]
    if integers and exact_on_integers(problem, algorithm):
        expected = convolve(problem, x, w, bias, residual)
        return compare(y, expected.astype(dtype).astype(np.float64), np.zeros(()), dtype)
    if sums is None:
        return compare(y, *expectation(problem, algorithm, x, w, bias, residual), dtype)
    # Image by image, in threads: what is in between stays in cache, and NumPy lets others run.
    exact, size = sums

    def one(image: int) -> Verdict:
        here = slice(image, image + 1)
        added = None if residual is None else residual[here]
        mine = expectation(problem, algorithm, x, w, bias, added, (exact[here], size[here]))
        return compare(y[here], *mine, dtype)

    with ThreadPoolExecutor() as pool:
        verdicts = list(pool.map(one, range(problem.n)))
    worst = max(range(problem.n), key=lambda image: (not verdicts[image].verified, _share(verdicts[image])))
    verdict = verdicts[worst]
    return Verdict(verdict.error, verdict.bound, verdict.verified, f"image {worst}: {verdict.message}")


def _share(verdict: Verdict) -> float:
    """How much of its bound an error takes."""
    return verdict.error / verdict.bound if verdict.bound else float(verdict.error > 0)


def _data(rng: np.random.Generator, shape: tuple[int, ...], integers: bool) -> np.ndarray:
    if integers:
        return rng.integers(-LARGEST_INTEGER, LARGEST_INTEGER + 1, shape).astype(np.float32)
    return rng.standard_normal(shape, dtype=np.float32)


def _beside(array: np.ndarray, index: int | None, layout: str) -> Any:
    """The array, or a copy on a GPU in the same memory order."""
    if index is None:
        return array
    from tapwise.arrays.device import upload

    if array.ndim < 4 or layout == "nchw":
        return upload(array, index)
    return arrays.channels_first(upload(arrays.channels_last(array), index))


class _Guarded:
    """An array between two guards, on a cache line; every byte is 0xff, which is NaN in every dtype.

    With the number of a GPU `array` is a copy there, of `data` where it is given.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], layout: str = "nchw", index: int | None = None,
        data: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        size = prod(shape) * dtype.itemsize
        storage = arrays.aligned(size + 2 * _GUARD_BYTES)
        storage.fill(0xFF)
        self._guards = storage[:_GUARD_BYTES], storage[_GUARD_BYTES + size :]
        inside = storage[_GUARD_BYTES : _GUARD_BYTES + size].view(dtype)
        if layout == "nhwc":
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
            from tapwise.arrays import device as cuda

            self._device = cuda.upload(storage, index)
            start = self._device.ptr + _GUARD_BYTES
            self.array = cuda.DeviceArray(start, shape, self._host.strides, dtype, index, "other", self._device)

    def result(self) -> np.ndarray:
        """What the array holds, in this machine's memory."""
        if self._device is not None:
            from tapwise.arrays.device import download

            self._storage[...] = download(self._device)
        return self._host

    def guards_hold(self) -> bool:
        self.result()
        return all(bool((guard == 0xFF).all()) for guard in self._guards)
