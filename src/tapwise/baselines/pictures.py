"""Peers of filters on pictures: OpenCV and scipy.ndimage, each with the function that its users would call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tapwise.baselines import Prepared
from tapwise.errors import PeerUnavailable
from tapwise.ops.filter.problem import FilterProblem
from tapwise.problem import Inputs


def prepare(name: str, problem: FilterProblem, inputs: Inputs, threads: int) -> Prepared:
    """`name`: opencv or scipy. Results go to an array that is there already, as ours do.

    Raises PeerUnavailable where the library does not take the problem.
    """
    if not problem.recipe or problem.spatial[0] != 1:
        raise PeerUnavailable(f"{name} is measured for named filters of one picture")
    height, width = problem.spatial[1:]
    shape = (height, width, problem.c) if problem.c > 1 else (height, width)
    picture, out = inputs.x.reshape(shape), np.empty(shape, problem.y_dtype)
    run = (_opencv if name == "opencv" else _scipy)(problem, picture, out, threads)
    return Prepared(run, lambda: np.asarray(run()).reshape(problem.y_shape))


def _number(problem: FilterProblem) -> float:
    """The recipe's sigma or size."""
    found = re.search(r" (?:sigma|size)([\d.]+)", problem.recipe)
    return float(found[1]) if found else 0.0


def _opencv(problem: FilterProblem, x: np.ndarray, out: np.ndarray, threads: int) -> Callable[[], Any]:
    import cv2

    borders = {"reflect": cv2.BORDER_REFLECT, "nearest": cv2.BORDER_REPLICATE, "mirror": cv2.BORDER_REFLECT_101}
    depths = {"u8": cv2.CV_8U, "i16": cv2.CV_16S, "u16": cv2.CV_16U, "f32": cv2.CV_32F, "f64": cv2.CV_64F}
    if problem.modes[2] not in borders or problem.to not in depths or problem.dtype not in depths or problem.c > 4:
        raise PeerUnavailable("OpenCV takes reflect, nearest and mirror, u8, u16, i16, f32 and f64, up to 4 channels")
    cv2.setNumThreads(threads)
    depth, border = depths[problem.to], borders[problem.modes[2]]
    kind, sides = problem.recipe.split()[0], (problem.size[2], problem.size[1])
    sigma = _number(problem)
    if kind in ("maximum", "minimum"):
        function = cv2.dilate if kind == "maximum" else cv2.erode
        box = np.ones(problem.size[1:], np.uint8)
        return lambda: function(x, box, dst=out, borderType=border)
    weights = problem.weights()
    calls: dict[str, Callable[[], Any]] = {
        "gaussian": lambda: cv2.GaussianBlur(x, sides, sigma, dst=out, borderType=border),
        "box": lambda: cv2.blur(x, sides, dst=out, borderType=border),
        "sobel": lambda: cv2.Sobel(x, depth, 1, 0, dst=out, borderType=border),
        "laplace": lambda: cv2.Laplacian(x, depth, dst=out, ksize=1, borderType=border),
        "correlate": lambda: cv2.filter2D(x, depth, weights[0].astype(np.float32), dst=out, borderType=border),
    }
    return calls[kind]


def _scipy(problem: FilterProblem, x: np.ndarray, out: np.ndarray, threads: int) -> Callable[[], Any]:
    from scipy import ndimage

    kind, number, axes = problem.recipe.split()[0], _number(problem), (0, 1)
    common: dict[str, Any] = {"output": out, "mode": problem.modes[2], "cval": problem.cval}
    if kind in ("sobel", "laplace") and problem.c > 1:
        # scipy's derivatives go over all axes: a channel at a time, as its users do.
        function = ndimage.sobel if kind == "sobel" else ndimage.laplace

        def channels() -> np.ndarray:
            for c in range(problem.c):
                function(x[..., c], **common | {"output": out[..., c]})
            return out

        return channels
    weights = problem.weights()[0] if kind == "correlate" else None
    calls: dict[str, Callable[[], Any]] = {
        "gaussian": lambda: ndimage.gaussian_filter(x, number, axes=axes, **common),
        "box": lambda: ndimage.uniform_filter(x, int(number), axes=axes, **common),
        "sobel": lambda: ndimage.sobel(x, **common),
        "laplace": lambda: ndimage.laplace(x, **common),
        "correlate": lambda: ndimage.correlate(x, weights, axes=axes, **common),
        "maximum": lambda: ndimage.maximum_filter(x, int(number), axes=axes, **common),
        "minimum": lambda: ndimage.minimum_filter(x, int(number), axes=axes, **common),
    }
    return calls[kind]
