"""Filters on pictures against scipy.ndimage: every dtype in and out, mode, origin, number of axes and memory order."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from campaign_cases import Case, Family, Refused, pick, plainly
from campaign_cases.memory import laid, plain
from campaign_cases.problems import enter, surroundings
from tapwise import image
from tapwise.errors import InvalidProblem

NAMES: Final = (
    *("correlate", "convolve", "correlate1d", "convolve1d", "gaussian_filter", "gaussian_filter1d", "uniform_filter"),
    *("uniform_filter1d", "sobel", "prewitt", "laplace", "gaussian_laplace", "maximum_filter", "minimum_filter"),
    *("maximum_filter1d", "minimum_filter1d"),
)
MODES: Final = ("reflect", "constant", "nearest", "mirror", "wrap")
DTYPES: Final = (
    *("uint8", "uint8", "int8", "uint16", "int16", "int32", "uint32", "int64", "float32", "float32", "float64", "bool"),
)
FORMS: Final = ("c", "c", "fortran", "reversed", "sliced", "readonly", "swapped", "unaligned", "inside")
KINDS: Final = ("normal", "normal", "normal", "integers", "nan", "inf", "large", "halves")


def draw(rng: np.random.Generator, backend: str) -> Case:
    rank = pick(rng, 1, 2, 2, 2, 2, 3, 3, 4)
    most = {1: 400, 2: 50, 3: 14, 4: 7}[rank]
    shape = [int(rng.integers(0 if rng.random() < 0.03 else 1, most)) for _ in range(rank)]
    name, dtype = pick(rng, *NAMES), pick(rng, *DTYPES)
    return {
        "name": name,
        "shape": shape,
        "dtype": dtype,
        "output": pick(rng, "", "", "", *DTYPES),
        "mode": pick(rng, *MODES),
        "options": _options(rng, name, rank),
        "kind": pick(rng, *KINDS[: 3 if name.startswith(("maximum", "minimum")) else len(KINDS)]),
        "form": pick(rng, *FORMS),
        "seed": int(rng.integers(1 << 30)),
        **surroundings(rng, backend),
    }


def _options(rng: np.random.Generator, name: str, rank: int) -> Case:
    """What the function takes besides the array; sizes of weights under "taps"."""
    found: Case = {"cval": pick(rng, 0.0, 0.0, 1.5, -3.0, 200.0)}
    if name.endswith("1d") or name in ("sobel", "prewitt"):
        found["axis"] = int(rng.integers(-rank, rank))
    if name.startswith("gaussian"):
        found["sigma"] = round(float(rng.uniform(0.3, 3.0)), 2)
        if "laplace" not in name and rng.random() < 0.3:
            found["order"] = int(rng.integers(0, 4))
        if rng.random() < 0.2:
            found["radius"] = int(rng.integers(1, 6))
    if name.startswith(("uniform", "maximum", "minimum")):
        sizes = [int(rng.integers(1, 8)) for _ in range(rank)]
        found["size"] = sizes[0] if name.endswith("1d") or rng.random() < 0.5 else sizes
    if name.startswith(("correlate", "convolve")):
        found["taps"] = [int(rng.integers(1, 6)) for _ in range(1 if name.endswith("1d") else rank)]
    elif name in ("maximum_filter", "minimum_filter") and rng.random() < 0.3:
        found["taps"] = [int(rng.integers(1, 6)) for _ in range(rank)]
        found.pop("size")
    if rng.random() < 0.2 and name.startswith(("correlate", "convolve", "uniform", "maximum", "minimum")):
        taps = found.get("taps") or found["size"]
        least = min(taps) if isinstance(taps, list) else taps
        found["origin"] = int(rng.integers(-(least // 2), (least - 1) // 2 + 1))
    return found


def run(case: Case) -> str | None:
    from scipy import ndimage

    enter(case)
    name, options, rng = case["name"], dict(case["options"]), np.random.default_rng(case["seed"])
    shape = tuple(case["shape"])
    x = _picture(rng, shape, np.dtype(case["dtype"]), case["kind"])
    if "taps" in options:
        taps = options.pop("taps")
        if len(taps) not in (1, len(shape)):
            return None
        if name.startswith(("maximum", "minimum")):
            footprint = rng.random(taps) < 0.7
            footprint.reshape(-1)[0] = True
            options["footprint"] = footprint
        else:
            whole = rng.random() < 0.5
            options["weights"] = rng.integers(-3, 4, taps).astype(float) if whole else rng.standard_normal(taps)
    if case["output"]:
        options["output"] = np.dtype(case["output"])
    given = laid(x, case["form"], case["backend"])
    before = plain(given).tobytes()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        # scipy reads beyond its memory where an array has no element.
        expected = getattr(ndimage, name)(x, mode=case["mode"], **options) if x.size else None
        wide = _wide(ndimage, name, x, case["mode"], options)
    try:
        y = plain(getattr(image, name)(given, mode=case["mode"], **options))
    except InvalidProblem as error:
        if "on a GPU" in str(error):
            raise Refused from None
        raise
    if plain(given).tobytes() != before:
        return "changed its input"
    if expected is None:
        return None if y.shape == shape else f"wrong: shape {y.shape} instead of {shape}"
    if case["backend"] == "cuda" and y.dtype.kind in "iu" and name in ("laplace", "gaussian_laplace"):
        return None  # cut once, at the end: the page says so
    if name == "gaussian_laplace" and y.dtype.kind in "bu" and len(shape) > 1:
        return None  # -1 and nearly -1 after one axis are 255 and 0 before the next: the page says so
    zeros = "weights" in options and not np.all(options["weights"])
    if zeros and not np.isfinite(x).all() and y.dtype.kind != "f":
        return None
    if zeros and not np.isfinite(x).all():
        # scipy leaves out weights of 0 in some functions, which else make NaN of what is not finite.
        finite = np.isfinite(y) & np.isfinite(expected)
        y, expected = np.where(finite, y, 0).astype(y.dtype), np.where(finite, expected, 0).astype(expected.dtype)
    if case["backend"] == "cuda" and options.get("order") and y.dtype.kind in "iu":
        return None  # a unit after one axis is as many as the derivative's weights after the next: the page says so
    if case["backend"] == "cuda" and y.dtype.kind == "u" and len(shape) > 1 and np.any(x < 0):
        return None  # -1 and nearly -1 after one axis are 255 and 0 before the next: the page says so
    sums = len(shape) > 1 and name.startswith(("gaussian", "uniform")) and y.dtype.kind == "i"
    if case["backend"] == "cuda" and sums and np.any(x > np.iinfo(y.dtype).max):
        return None  # so are 127 and 128, cut to 127 and -128
    # What is in float32 (bytes, those behind the first axis, too), on a GPU, or a sum over axes, counts sums that are
    # nearly whole as whole, after each axis; of a Laplacian there are as many for each.
    nearly = 1 in (x.itemsize, y.itemsize) or case["backend"] == "cuda" or name == "gaussian_laplace"
    apart = len(shape) if name.startswith(("gaussian", "uniform")) and nearly else 1
    apart = apart**2 if name == "gaussian_laplace" else apart
    # Behind the first axis a filter's numbers are of the result's type.
    axes = len(shape) > 1 and not name.startswith(("correlate", "convolve"))
    return _judge(y, expected, wide, x, apart, axes and y.dtype == np.float32)


def _picture(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], kind: str) -> np.ndarray:
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        low, high = (max(info.min, -1000), min(info.max, 1000)) if kind != "large" else (info.min // 2, info.max // 2)
        return rng.integers(low, high, shape, endpoint=True).astype(dtype)
    x = rng.standard_normal(shape) * {"large": 1e4, "halves": 1.0}.get(kind, 10.0)
    if kind in ("integers", "halves"):
        x = np.rint(x * 2) / (2 if kind == "halves" else 1)
    if kind in ("nan", "inf") and x.size:
        x.reshape(-1)[rng.integers(0, x.size, 2)] = np.nan if kind == "nan" else np.inf
    return x.astype(dtype)


def _wide(ndimage: Any, name: str, x: np.ndarray, mode: str, options: Case) -> tuple[np.ndarray, np.ndarray] | None:
    """(sums, those of absolute terms) in float64, which say how far roundings may go: 0 for the largest."""
    if not x.size:
        return None
    rest = {**options, "output": np.dtype(np.float64)}
    if name.startswith(("maximum", "minimum")):
        exact = getattr(ndimage, name)(x, mode=mode, **rest)
        return exact, np.zeros(())
    magnitude = {**rest, "cval": abs(options["cval"])}
    if "weights" in rest:
        magnitude["weights"] = np.abs(rest["weights"])
    size = np.abs(x.astype(np.float64))
    steep = getattr(ndimage, name)(size, mode=mode, **magnitude)
    largest = float(np.nanmax(np.where(np.isfinite(size), size, 0), initial=0.0)) + abs(options["cval"])
    # Derivatives cancel: their terms are those of the largest elements about.
    derivative = "order" in rest or name in ("sobel", "prewitt", "laplace", "gaussian_laplace")
    # scipy's uniform filter adds and subtracts along a row.
    floor = largest * _gain(ndimage, name, x.ndim, rest) if derivative else largest * name.startswith("uniform")
    return getattr(ndimage, name)(x.astype(np.float64), mode=mode, **rest), np.abs(steep) + floor


def _gain(ndimage: Any, name: str, rank: int, options: Case) -> float:
    """What the absolute weights of a derivative add up to, over all axes; at least that of a Laplacian."""
    if "order" not in options:
        return 16.0
    impulse = np.zeros(4 * max(options.get("radius", 0), round(4 * options["sigma"])) + 9)
    impulse[impulse.size // 2] = 1.0
    given = {key: options[key] for key in ("sigma", "order", "radius") if key in options}
    weights = ndimage.gaussian_filter1d(impulse, **given)
    return max(16.0, float(np.abs(weights).sum()) ** (1 if name.endswith("1d") else rank))


def _judge(y: np.ndarray, expected: np.ndarray, wide: Any, x: np.ndarray, most_apart: int, single: bool) -> str | None:
    if y.shape != expected.shape or y.dtype != expected.dtype:
        return f"wrong: {y.dtype} {y.shape} instead of {expected.dtype} {expected.shape}"
    exact, magnitude = wide
    if not magnitude.ndim:
        # Beyond 32 bits, what becomes a small integer is not defined in C.
        small = y.dtype.kind != "f" and (y.dtype.itemsize < 4 or y.dtype == np.int32)
        held = np.abs(exact) < 2.0**31 if small else np.ones(y.shape, bool)
        wrong = held & ~((y == expected) | ((y != y) & (expected != expected)))
        return _first(y, expected, wrong) if wrong.any() else None
    with np.errstate(all="ignore"):
        if y.dtype.kind in "biu":
            info = np.iinfo(y.dtype) if y.dtype.kind != "b" else np.iinfo(np.uint8)
            # Where what becomes an integer is not finite or out of range, C says nothing; small ones go through int32.
            most = 2.0**31 if y.dtype.itemsize < 4 or y.dtype == np.int32 else 2.0**50
            inside = np.isfinite(exact) & (magnitude < (info.max if x.dtype.kind == "f" else most))
            apart = np.abs(y.astype(np.float64) - expected.astype(np.float64))
            wrapped = np.minimum(apart, float(info.max) - float(info.min) + 1 - apart)
            wrong = inside & (wrapped > (most_apart if y.dtype.kind != "b" else 0))
        else:
            single = single or x.dtype.name == "float32" or x.dtype.itemsize < 4
            bound = (
                magnitude * (2.0**-24 if single and y.dtype.itemsize < 8 else 2.0**-45) * 64
                + np.maximum(magnitude, np.abs(exact)) * (1 + y.ndim) * np.finfo(y.dtype).eps
            )
            close = np.abs(y.astype(np.float64) - expected.astype(np.float64)) <= bound
            wrong = ~(close | (y == expected) | ~np.isfinite(expected))
    return None if not wrong.any() else _first(y, expected, wrong)


def _first(y: np.ndarray, expected: np.ndarray, wrong: np.ndarray) -> str:
    where = tuple(int(one) for one in np.argwhere(wrong)[0])
    count = int(wrong.sum())
    return f"wrong: {count} of {y.size}; at {list(where)} {y[where].item()!r} instead of {expected[where].item()!r}"


def simpler(case: Case) -> Iterator[Case]:
    for number, size in enumerate(case["shape"]):
        for less in {size // 2, size - 1} - {size}:
            if less >= 1:
                yield {**case, "shape": [*case["shape"][:number], less, *case["shape"][number + 1 :]]}
    for name in ("order", "radius", "origin"):
        if name in case["options"]:
            yield {**case, "options": {key: value for key, value in case["options"].items() if key != name}}
    if case["options"]["cval"]:
        yield {**case, "options": {**case["options"], "cval": 0.0}}
    simple = {"threads": 1, "target": "host", "form": "c", "output": "", "mode": "reflect", "kind": "normal", "seed": 0}
    yield from plainly(case, simple)


FAMILY: Final = Family(draw, run, simpler, share=1.5)
