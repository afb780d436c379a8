"""Problems of filters on pictures: sums of neighbours with weights, the largest, the smallest."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final, Self

import numpy as np

from tapwise.arguments import LARGEST, number_in, settle_flags, shown, whole, wholes, word, words_of
from tapwise.errors import InvalidProblem
from tapwise.forks import cached_property
from tapwise.ops.filter import reference
from tapwise.ops.filter.edges import MODES, window_sources
from tapwise.problem import Inputs, Problem, sum_factor

# dense: every tap of the window has its weight. separable: a column and a row of weights. max, min: of the window.
OPS: Final = ("dense", "separable", "max", "min")
_INTEGERS: Final = {f"{kind}{bits}": np.dtype(f"{kind}{bits // 8}") for bits in (8, 16, 32, 64) for kind in "ui"}
_FLOATS: Final = {f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)}
DTYPES: Final[dict[str, np.dtype[Any]]] = {**_INTEGERS, **_FLOATS}
# What is computed in float32; all others in float64.
SINGLE: Final = ("u8", "i8", "u16", "i16", "f16", "f32")
# A named filter: its taps and weights follow from one number.
RECIPES: Final = ("gaussian", "box", "sobel", "laplace", "correlate", "maximum", "minimum")
# How far a sum may be off by its roundings: of 8 bits in float32, in units of the largest term; in float64, of up to
# 32 bits in those units, and of others.
_ROUNDINGS: Final = {True: 2.0**-21, False: 2.0**-50}
_LEAST_EPSILON: Final = 2.0**-26
_WORD = re.compile(r"(sigma|size|[dhwctrs])([0-9]+(?:\.[0-9]{1,20})?)")


@dataclass(frozen=True)
class FilterProblem(Problem):
    """y[d, h, w] = sum or maximum of x over a window of `size` taps an axis, of the same shape as x.

    x (depth, height, width * channels): `spatial` without channels, which lie side by side and do not mix. The window
    of an element begins `before` elements before it on each axis. Beyond the edges x is continued by `modes`, as
    scipy.ndimage means them: reflect, constant (`cval`), nearest, mirror, wrap. `to`: dtype of y. A sum that becomes
    an integer is truncated towards zero and keeps its low bits; one that misses an integer by its roundings alone
    counts as that integer (`rounding_epsilons`); with `clip` it is rounded and held within the dtype's range. A
    separable filter's column is done first, and with `truncate` its result is truncated like y. Sums are in float32
    where operands and result have at most 16 bits or are float32, unless `double`. `ordered`: along one axis at a time
    in float64, in scipy's order of terms (`ordered_terms`), each rounded, so that an integer is scipy's.

    `recipe`: the words of a named filter, for measurements; its weights are `weights()`.

    Raises InvalidProblem for sizes and words that are not allowed.
    """

    operator: ClassVar[str] = "filter"

    op: str
    spatial: tuple[int, int, int]
    size: tuple[int, int, int]
    before: tuple[int, int, int]
    c: int = 1
    modes: tuple[str, str, str] = ("reflect", "reflect", "reflect")
    cval: float = 0.0
    dtype: str = "f32"
    to: str = "f32"
    clip: bool = False
    truncate: bool = True
    double: bool = False
    ordered: bool = False
    recipe: str = ""
    layout: str = "nchw"

    def __post_init__(self) -> None:
        self._settle()
        words = [("op", self.op, OPS), *(("mode", mode, MODES) for mode in self.modes)]
        for name, value, allowed in [*words, ("dtype", self.dtype, tuple(DTYPES)), ("to", self.to, tuple(DTYPES))]:
            if value not in allowed:
                raise InvalidProblem(f"{name}={shown(value)}: one of {', '.join(allowed)}")
        if min(self.spatial) < 0 or min(self.size) < 1 or self.c < 1:
            raise InvalidProblem(f"spatial={self.spatial}, size={self.size}, c={self.c}: too small")
        for before, size in zip(self.before, self.size, strict=True):
            if not 0 <= before < size:
                raise InvalidProblem(f"before={self.before}: at least 0 and less than size={self.size}")
        if self.op == "separable" and self.size[0] != 1:
            raise InvalidProblem(f"size={self.size}: a separable filter has a column and a row")
        if 8 * prod(self.spatial) * self.c > LARGEST:
            self._check_extent()

    def _settle(self) -> None:
        """Every field of the type that it is declared with. A problem is made for each call: all at once first."""
        numbers: tuple[Any, ...] = ()
        words: tuple[Any, ...] = ()
        try:
            numbers = *self.spatial, *self.size, *self.before, self.c
            words = self.op, self.dtype, self.to, *self.modes
        except TypeError:
            pass
        whole_ones = set(map(type, numbers)) == {int} and -LARGEST <= min(numbers) <= max(numbers) <= LARGEST
        if not whole_ones or len(numbers) != 10 or len(words) != 6:
            for name in ("spatial", "size", "before"):
                object.__setattr__(self, name, wholes(getattr(self, name), name))
                if len(getattr(self, name)) != 3:
                    raise InvalidProblem(f"{name}={shown(getattr(self, name))}: a number for each of 3 axes is allowed")
            object.__setattr__(self, "c", whole(self.c, "c"))
            if not isinstance(self.modes, tuple) or len(self.modes) != 3:
                raise InvalidProblem(f"modes={shown(self.modes)}: one for each of 3 axes is allowed")
        if set(map(type, words)) != {str}:
            for name in ("op", "dtype", "to"):
                word(getattr(self, name), name, "a word")
            for mode in self.modes:
                word(mode, "mode", f"one of {', '.join(MODES)}")
        settle_flags(self)

    @property
    def x_shape(self) -> tuple[int, ...]:
        depth, height, width = self.spatial
        return (depth, height, width * self.c)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.x_shape

    @property
    def x_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @property
    def y_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.to]

    @property
    def bytes(self) -> int:
        return prod(self.x_shape) * (self.x_dtype.itemsize + self.y_dtype.itemsize)

    @cached_property
    def taps(self) -> int:
        """Operations an element at most: taps of the window, of a column and a row, or of a cross."""
        if self.recipe.startswith("laplace"):
            return 5
        return sum(self.size[1:]) if self.op != "dense" and self.size[0] == 1 else prod(self.size)

    @property
    def flops(self) -> int:
        return (2 if self.op in ("dense", "separable") else 1) * self.taps * prod(self.x_shape)

    @property
    def single(self) -> bool:
        """Whether sums are in float32."""
        return not self.double and not self.ordered and self.dtype in SINGLE and self.to in SINGLE

    @property
    def accumulator(self) -> str:
        return "f32" if self.single else "f64"

    @property
    def integral(self) -> bool:
        """Whether y has integers."""
        return self.to[0] in "iu"

    @property
    def truncates_columns(self) -> bool:
        """Whether the column sums of a separable filter are truncated to integers."""
        return self.integral and self.truncate and not self.clip

    @property
    def rounds_down(self) -> bool:
        """Whether integers are what is not larger than a sum, and not nearer to zero: those that are rounded and may
        be negative."""
        return self.clip and self.to[0] == "i"

    def sources(self) -> list[np.ndarray]:
        """For each axis `window_sources`: where the elements that its windows see come from."""
        axes = zip(self.spatial, self.size, self.before, self.modes, strict=True)
        return [window_sources(*of_axis) for of_axis in axes]

    def constant_beside(self, column: np.ndarray, epsilon: float) -> float:
        """What a separable filter's column, with its rounding epsilon, makes of `cval` beyond the left and right."""
        outside = self.cval * float(column.sum())
        return float(np.trunc(outside + np.copysign(epsilon, outside))) if self.truncates_columns else outside

    def rounding_epsilons(self, w: np.ndarray) -> tuple[float, float]:
        """What is added to the size of a sum before it is truncated: of the column's sums, of the result's.

        0 where sums are exact, being of integers, or in scipy's order, or are not truncated.
        """
        parts = [w[: self.size[1]], w[self.size[1] :]] if self.op == "separable" else [w]
        if not self.integral or self.clip or self.ordered or self.op in ("max", "min"):
            return 0.0, 0.0
        kind, gain, found = DTYPES[self.dtype], 1.0, []
        exact = kind.kind in "iu"
        largest = float(np.iinfo(kind).max) if exact and kind.itemsize <= 4 else 1.0
        unit = largest * _ROUNDINGS[self.single]
        unit = unit if self.single else max(unit, _LEAST_EPSILON)
        for part in parts:
            gain *= max(1.0, float(np.abs(part).sum()))
            exact = exact and bool(np.all(part == np.rint(part)))
            found.append(0.0 if exact else min(0.25, gain * unit))
        return (found[0], found[-1]) if self.truncate else (0.0, found[-1])

    def weights(self, seed: int = 0) -> np.ndarray:
        """What the recipe's weights are, or random ones: dense (t, r, s), separable r then s."""
        words = dict(_WORD.findall(self.recipe))
        kind = self.recipe.split()[0] if self.recipe else ""
        _, r, s = self.size
        if kind == "gaussian":
            ramp = np.arange(s) - s // 2
            row: np.ndarray = np.exp(-0.5 * (ramp / float(words["sigma"])) ** 2)
            return np.tile(row / row.sum(), 2)
        if kind == "box":
            return np.full(r + s, 1.0 / s)
        if kind == "sobel":
            return np.array([1.0, 2, 1, -1, 0, 1])
        if kind == "laplace":
            return np.array([[[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]])
        rng = np.random.default_rng(seed)
        weights = rng.standard_normal(r + s if self.op == "separable" else self.size)
        # Sums that stay within a small integer's range, so that libraries that wrap and that clip agree.
        if self.integral:
            weights = np.abs(weights) / np.abs(weights).sum()
        found: np.ndarray = weights
        return found

    def inputs(self, array: Callable[[tuple[int, ...]], Any]) -> Inputs:
        return Inputs(array(self.x_shape), None if self.op in ("max", "min") else self.weights())

    def random(self, rng: np.random.Generator, shape: tuple[int, ...], integers: bool = False) -> np.ndarray:
        """The whole range of small integers, else normal."""
        kind = self.x_dtype
        if kind.kind in "iu":
            info = np.iinfo(kind)
            low, high = max(info.min, -(1 << 15)), min(info.max, (1 << 16) - 1)
            return rng.integers(low, high, shape, dtype=np.int64, endpoint=True).astype(kind)
        return rng.standard_normal(shape, dtype=np.float32).astype(kind)

    def reference(self, inputs: Inputs, /, *_: object) -> tuple[np.ndarray, np.ndarray]:
        """For the weights that `weights()` gives unless the inputs have some.

        Sums of integers with integral weights are exact. A sum that is truncated to an integer may be off by one where
        it lies as near to one as its roundings.
        """
        with np.errstate(all="ignore"):
            x = np.asarray(inputs.x, np.float64).reshape(*self.spatial, self.c)
            if self.op in ("max", "min"):
                mask = np.ones(self.size) if inputs.w is None else inputs.w.reshape(self.size)
                y, size = reference.combine(self.op, x, mask, self.before, self.modes, self.cval)
                return y.reshape(self.y_shape), size.reshape(self.y_shape)
            w = self.weights() if inputs.w is None else np.asarray(inputs.w, np.float64)
            y, size = self._sums(x, w)
            y, size = y.reshape(self.y_shape), size.reshape(self.y_shape)
            bound = sum_factor(prod(self.size)) * self.roundoff * size
            if not self.integral:
                return y, bound + self.rounding(y)
            info = np.iinfo(self.y_dtype)
            if self.clip:
                near = np.abs(y - np.floor(y) - 0.5) <= bound
                return np.clip(np.floor(y + 0.5), info.min, info.max), np.where(near, 1.0, 0.0)
            y = np.trunc(y + np.copysign(self.rounding_epsilons(w)[1], y))
            exact = self.x_dtype.kind in "iu" and bool(np.all(w == np.rint(w)))
            wrapped = y.astype(np.int64).astype(self.y_dtype).astype(np.float64)
            return wrapped, np.zeros(()) if exact else np.ones(())

    def _sums(self, x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sums, those of absolute terms) of x (d, h, w, c) in float64, the column's truncated where y's are."""
        if self.op == "dense":
            return reference.combine("sum", x, w.reshape(self.size), self.before, self.modes, self.cval)
        _, r, s = self.size
        column, row = w[:r].reshape(1, r, 1), w[r:].reshape(1, 1, s)
        _, above, left = self.before
        y, size = reference.combine("sum", x, column, (0, above, 0), self.modes, self.cval)
        epsilon = self.rounding_epsilons(w)[0]
        if self.truncates_columns:
            y = np.trunc(y + np.copysign(epsilon, y))
        across = (0, 0, left), self.modes, self.constant_beside(w[:r], epsilon)
        return reference.combine("sum", y, row, *across)[0], reference.combine("sum", size, np.abs(row), *across)[1]

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem of a named filter: "filter gaussian h4096 w4096 c3 sigma5 u8", "filter correlate h99 w99 r7 s7",
        "filter box h4096 w4096 size15 constant", "filter sobel h64 w64 u8 to:i16"; gaussian, box, sobel, laplace,
        correlate, maximum, minimum."""
        first, *words = words_of(text) or [""]
        example = "an example is 'filter gaussian h4096 w4096 c3 sigma5 u8'"
        if first != "filter" or not words or words[0] not in RECIPES:
            raise InvalidProblem(f"problem {shown(text)}: {example}; filters are {', '.join(RECIPES)}")
        kind, *rest = words
        sizes: dict[str, str] = {}
        options: dict[str, Any] = {}
        for one in rest:
            if (match := _WORD.fullmatch(one)) and match[1] not in sizes:
                sizes[match[1]] = match[2]
            elif one in MODES and "modes" not in options:
                options["modes"] = (one,) * 3
            elif one in DTYPES and "dtype" not in options:
                options["dtype"] = one
            elif one.startswith("to:") and one[3:] in DTYPES and "to" not in options:
                options["to"] = one[3:]
            else:
                raise InvalidProblem(f"problem {shown(text)}: word {shown(one)} is unknown, or there twice; {example}")
        if any("." in value for name, value in sizes.items() if name != "sigma"):
            raise InvalidProblem(f"problem {shown(text)}: sizes are integers")
        numbers = {name: number_in(value, text) for name, value in sizes.items() if name != "sigma"}
        measure = {"gaussian": "sigma", "box": "size", "maximum": "size", "minimum": "size"}.get(kind)
        for name in ("h", "w", *([measure] if measure else [])):
            if name not in sizes:
                raise InvalidProblem(f"problem {shown(text)}: no word gives {name}")
        recipe, side = kind, 3
        if measure == "sigma":
            sigma = sizes["sigma"]
            number_in(sigma.partition(".")[0], text)
            recipe, side = f"{kind} sigma{sigma}", 2 * int(4.0 * float(sigma) + 0.5) + 1
        elif measure == "size":
            recipe, side = f"{kind} size{numbers['size']}", numbers["size"]
        t, r, s = (numbers.get(letter, 1) for letter in "trs") if kind == "correlate" else (1, side, side)
        op = {"maximum": "max", "minimum": "min", "laplace": "dense", "correlate": "dense"}.get(kind, "separable")
        options.setdefault("to", options.get("dtype", "f32"))
        try:
            spatial, before = (numbers.get("d", 1), numbers["h"], numbers["w"]), (t // 2, r // 2, s // 2)
            return cls(op, spatial, (t, r, s), before, numbers.get("c", 1), recipe=recipe, **options)
        except InvalidProblem as error:
            raise InvalidProblem(f"problem {shown(text)}: {error}") from None

    def __str__(self) -> str:
        depth, height, width = self.spatial
        known = bool(self.recipe)
        words = ["filter", self.recipe or self.op] + ([f"d{depth}"] if depth != 1 else []) + [f"h{height}", f"w{width}"]
        words += [f"c{self.c}"] if self.c != 1 else []
        if not known or self.recipe == "correlate":
            words += [f"{letter}{n}" for letter, n in zip("trs", self.size, strict=True) if n != 1]
        words += [self.dtype] if self.dtype != "f32" else []
        words += [f"to:{self.to}"] if self.to != self.dtype else []
        words += [self.modes[-1]] if set(self.modes) != {"reflect"} else []
        if not known:
            middle = tuple(n // 2 for n in self.size)
            words += ["before" + "x".join(map(str, self.before))] if self.before != middle else []
            words += [f"cval{self.cval:g}"] if self.cval else []
            flags = (
                ("clip", self.clip),
                ("uncut", not self.truncate and self.integral),
                ("double", self.double),
                ("ordered", self.ordered),
            )
            words += [word for word, is_set in flags if is_set]
        return " ".join(words)


def limits(problem: FilterProblem) -> tuple[float, float, float]:
    """(smallest, largest, what is added first) of a sum that becomes an integer: what 32 or 64 bits hold, or with
    `clip` the dtype's range and half a unit. NaN becomes the smallest.

    The low bits of both ends are what x86 makes of NaN and infinity: 0, or in 32 bits with a sign the smallest.
    """
    if problem.single:
        low, high = -(2.0**31), 2.0**31 - 2.0**16
    else:
        low = -(2.0**63) + (2.0**31 if problem.to == "i32" else 0.0)
        high = {"u64": 2.0**64 - 2.0**11, "i64": 2.0**63 - 2.0**10, "i32": -low}.get(problem.to, 2.0**63 - 2.0**32)
    if not (problem.integral and problem.clip):
        return low, high, 0.0
    info = np.iinfo(DTYPES[problem.to])
    return max(low, float(info.min)), min(high, float(info.max) + 0.5), 0.5


def ordered_terms(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(taps, values) of a row of weights as scipy.ndimage.correlate1d adds them up: the terms w * (x[i] + sign * x[j]),
    one after the other. taps (terms, 2): i, j; values (terms, 2): w, sign.

    Where the weights to both sides are equal or opposite, the middle tap comes first and then pairs from outside; else
    the last tap and then the others, each a pair with itself and a sign of 0.
    """
    count, middle = len(weights), len(weights) // 2
    before, behind = np.arange(middle), count - 1 - np.arange(middle)
    for sign in (1.0, -1.0) if count % 2 else ():
        if np.all(np.abs(weights[behind] - sign * weights[before]) <= np.finfo(np.float64).eps):
            taps = np.stack([np.append(middle, before), np.append(middle, behind)], axis=1)
            return taps, np.stack([weights[taps[:, 0]], np.append(0.0, np.full(middle, sign))], axis=1)
    order = np.append(count - 1, np.arange(count - 1))
    return np.stack([order, order], axis=1), np.stack([weights[order], np.zeros(count)], axis=1)


def stored(problem: FilterProblem, sums: np.ndarray) -> np.ndarray:
    """Sums in the dtype of y: integers truncated, with their low bits, or with `clip` rounded."""
    kind = DTYPES[problem.to]
    if not problem.integral:
        return sums.astype(kind)
    if problem.clip:
        info = np.iinfo(kind)
        sums = np.clip(np.floor(sums + 0.5), info.min, info.max)
    with np.errstate(all="ignore"):
        low, high, _ = limits(problem)
        # NaN is not larger.
        sums = np.minimum(np.where(sums > low, sums, low), high)
        if kind == np.uint64:
            sums = np.where(sums >= 2.0**63, sums - 2.0**64, sums)
        return sums.astype(np.int64).astype(kind)
