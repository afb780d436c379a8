"""Named filters for pictures: each is one matrix, two that make up a gradient, or a bank that mixes the channels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tapwise.errors import InvalidPicture
from tapwise.image.weights import gaussian_weights

Numbers = dict[str, float]


@dataclass(frozen=True)
class Filter:
    """`matrices` (r, s): one, or two along y and x whose results are put together as sqrt(a^2 + b^2); or a `bank`
    (k, c, r, s). `words` name it with its parameters."""

    words: str
    matrices: tuple[np.ndarray, ...] = ()
    bank: np.ndarray | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the window."""
        r, s = (self.matrices[0] if self.bank is None else self.bank[0, 0]).shape
        return int(r), int(s)


@dataclass(frozen=True)
class Kind:
    """`parameters` with their defaults; `make` gives the matrices."""

    summary: str
    parameters: Numbers
    make: Callable[[Numbers], tuple[np.ndarray, ...]]


def _odd(value: float, name: str) -> int:
    if value != int(value) or value < 1 or int(value) % 2 == 0:
        raise InvalidPicture(f"{name}={value:g}: an odd integer of at least 1")
    return int(value)


def _positive(value: float, name: str) -> float:
    if not value > 0 or not math.isfinite(value):
        raise InvalidPicture(f"{name}={value:g}: a number above 0")
    return value


def _box(p: Numbers) -> tuple[np.ndarray, ...]:
    size = _odd(p["size"], "size")
    return (np.full((size, size), 1.0 / size**2),)


def _bell(sigma: float, order: int = 0) -> np.ndarray:
    return gaussian_weights(_positive(sigma, "sigma"), order, None, 4.0)


def _gaussian(p: Numbers) -> tuple[np.ndarray, ...]:
    bell = _bell(p["sigma"])
    return (np.outer(bell, bell),)


def _gradient(smooth: tuple[float, float, float]) -> Callable[[Numbers], tuple[np.ndarray, ...]]:
    def make(p: Numbers) -> tuple[np.ndarray, ...]:
        across = np.outer(smooth, (-1.0, 0.0, 1.0))
        axis = p["axis"]
        if axis not in (-1, 0, 1):
            raise InvalidPicture(f"axis={axis:g}: 0 down, 1 across, -1 for the size of both")
        return {0: (across.T,), 1: (across,), -1: (across.T, across)}[int(axis)]

    return make


def _fixed(*rows: tuple[float, ...]) -> Callable[[Numbers], tuple[np.ndarray, ...]]:
    return lambda _: (np.array(rows),)


def _unsharp(p: Numbers) -> tuple[np.ndarray, ...]:
    (blur,) = _gaussian(p)
    matrix = -p["amount"] * blur
    matrix[blur.shape[0] // 2, blur.shape[1] // 2] += 1.0 + p["amount"]
    return (matrix,)


def _motion(p: Numbers) -> tuple[np.ndarray, ...]:
    """A line of `length` at `angle` degrees, each pixel by how near the line passes."""
    size = _odd(p["length"], "length")
    turn = math.radians(p["angle"])
    y, x = np.indices((size, size)) - size // 2
    along = x * math.cos(turn) - y * math.sin(turn)
    beside = np.abs(x * math.sin(turn) + y * math.cos(turn))
    matrix = np.maximum(0.0, 1.0 - beside) * (np.abs(along) <= size / 2)
    return (matrix / matrix.sum(),)


def _log(p: Numbers) -> tuple[np.ndarray, ...]:
    bell, curve = _bell(p["sigma"]), _bell(p["sigma"], 2)
    return (np.outer(curve, bell) + np.outer(bell, curve),)


def _gabor(p: Numbers) -> tuple[np.ndarray, ...]:
    """exp(-(u^2 + (gamma v)^2) / (2 sigma^2)) cos(2 pi u / wave + phase), u and v rotated by `angle` degrees."""
    sigma, wave = _positive(p["sigma"], "sigma"), _positive(p["wave"], "wave")
    reach = int(3.0 * sigma / min(1.0, _positive(p["gamma"], "gamma")) + 0.5)
    turn = math.radians(p["angle"])
    y, x = np.indices((2 * reach + 1, 2 * reach + 1)) - reach
    u, v = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
    bell = np.exp(-(u**2 + (p["gamma"] * v) ** 2) / (2.0 * sigma**2))
    return (bell * np.cos(2.0 * math.pi * u / wave + math.radians(p["phase"])),)


KINDS: Final = {
    "box": Kind("the mean of a square", {"size": 3}, _box),
    "gaussian": Kind("a Gaussian blur", {"sigma": 1}, _gaussian),
    "sobel": Kind("gradient; axis 0 down, 1 across, -1 its size", {"axis": -1}, _gradient((1, 2, 1))),
    "scharr": Kind("gradient, the same in all directions", {"axis": -1}, _gradient((3, 10, 3))),
    "prewitt": Kind("gradient", {"axis": -1}, _gradient((1, 1, 1))),
    "laplacian": Kind("second differences", {}, _fixed((0, 1, 0), (1, -4, 1), (0, 1, 0))),
    "sharpen": Kind("the picture less its second differences", {}, _fixed((0, -1, 0), (-1, 5, -1), (0, -1, 0))),
    "unsharp": Kind("the picture and what a blur takes from it", {"sigma": 2, "amount": 1}, _unsharp),
    "emboss": Kind("light from above left", {}, _fixed((-2, -1, 0), (-1, 1, 1), (0, 1, 2))),
    "motion": Kind("a blur along a line, in degrees", {"length": 9, "angle": 0}, _motion),
    "log": Kind("Laplacian of a Gaussian", {"sigma": 1}, _log),
    "gabor": Kind(
        "a wave under a bell, angles in degrees", {"sigma": 2, "wave": 4, "angle": 0, "gamma": 1, "phase": 0}, _gabor
    ),
}
# Three filters of 3x3 over red, green and blue, as in the RGB report: what is new in each channel is a mixture of all.
BANK: Final = np.array(
    [
        [[[0, -1, 0], [-1, 5, -1], [0, -1, 0]], np.zeros((3, 3)), np.zeros((3, 3))],
        [np.full((3, 3), 1 / 27), np.full((3, 3), 1 / 27), np.full((3, 3), 1 / 27)],
        [[[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], [[-1, -2, -1], [0, 0, 0], [1, 2, 1]], [[0, 0, 0], [0, 1, 0], [0, 0, 0]]],
    ]
)


def parse(text: str) -> Filter:
    """The filter that words name: "gaussian sigma=3", "bank", or a file of a matrix (text or .npy; .npy of (k, c, r, s)
    is a bank). Raises InvalidPicture."""
    name, *words = text.split() or [""]
    if name == "bank" and not words:
        return Filter("bank", bank=BANK)
    if name not in KINDS:
        return _from_file(text)
    kind = KINDS[name]
    values = dict(kind.parameters)
    for word in words:
        key, _, value = word.partition("=")
        if key not in values:
            allowed = ", ".join(values) or "none"
            raise InvalidPicture(f"filter {text!r}: {name} has no parameter {key!r}; it has {allowed}")
        try:
            values[key] = float(value)
        except ValueError:
            raise InvalidPicture(f"filter {text!r}: {key}={value!r} is not a number") from None
    return Filter(" ".join([name, *(f"{key}={value:g}" for key, value in values.items())]), kind.make(values))


def _from_file(text: str) -> Filter:
    path = Path(text)
    if not path.is_file():
        raise InvalidPicture(f"filter {text!r}: one of {', '.join(KINDS)}, bank, or a file of a matrix")
    try:
        if path.suffix == ".npy":
            matrix = np.load(path, allow_pickle=False)
        else:
            matrix = np.loadtxt(path, ndmin=2, delimiter="," if "," in path.read_text(encoding="utf-8") else None)
        matrix = np.asarray(matrix, np.float64)
    except (OSError, ValueError) as error:
        raise InvalidPicture(f"filter {text!r}: no matrix can be read from it: {error}") from None
    if matrix.ndim not in (2, 4) or matrix.size == 0 or not np.isfinite(matrix).all():
        raise InvalidPicture(f"filter {text!r}: a matrix (r, s) or a bank (k, c, r, s) of finite numbers is needed")
    return Filter(text, (matrix,)) if matrix.ndim == 2 else Filter(text, bank=matrix)
