"""Means of neighbours: Gaussian and box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tapwise.image import arguments
from tapwise.image.arguments import Call, OneAxis
from tapwise.image.passes import Along, apply_along
from tapwise.image.weights import gaussian_weights

# Below it a Gaussian has no width, and its axis is not filtered.
LEAST_SIGMA = 1e-15


def gaussian_filter1d(
    input: Any, sigma: float, axis: int = -1, order: int = 0, output: Any = None, mode: str = "reflect",
    cval: complex = 0.0, truncate: float = 4.0, *, radius: int | None = None,
) -> Any:  # fmt: skip
    """A Gaussian of standard deviation `sigma`, or its `order`-th derivative, along one axis.

    It has radius taps to each side, int(truncate * sigma + 0.5) by default.
    """
    return gaussian_filter(
        input, (sigma,), (order,), output, (mode,), cval, truncate, radius=None if radius is None else (radius,),
        axes=OneAxis((axis,)),
    )  # fmt: skip


def gaussian_filter(
    input: Any, sigma: Any, order: Any = 0, output: Any = None, mode: Any = "reflect", cval: complex = 0.0,
    truncate: float = 4.0, *, radius: Any = None, axes: Any = None, channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """gaussian_filter1d along each axis; sigma, order, mode and radius one for all or one for each."""
    call = Call.resolve(input, output, mode, cval, axes, channel_axis)
    sigmas, orders, radii = call.each(sigma, "sigma"), call.each(order, "order"), call.each(radius, "radius")
    weights = [gaussian_weights(*one, truncate) for one in zip(sigmas, orders, radii, strict=True)]
    apply_along(call.x, call.y, gaussians(call, sigmas, weights, call.modes), cval)
    return call.result()


def gaussians(call: Call, sigmas: Sequence[Any], weights: Sequence[np.ndarray], modes: Sequence[str]) -> list[Along]:
    """Weights of Gaussians along the axes where they have a width."""
    parts = zip(call.axes, map(float, sigmas), weights, modes, strict=True)
    return [Along(axis, w, len(w) // 2, mode) for axis, sigma, w, mode in parts if sigma > LEAST_SIGMA]


def uniform_filter1d(
    input: Any, size: int, axis: int = -1, output: Any = None, mode: str = "reflect", cval: complex = 0.0,
    origin: int = 0,
) -> Any:  # fmt: skip
    """The mean of `size` neighbours along one axis."""
    arguments.sizes_of(size, 1, 1)
    return uniform_filter(input, (size,), output, (mode,), cval, (origin,), axes=OneAxis((axis,)))


def uniform_filter(
    input: Any, size: Any = 3, output: Any = None, mode: Any = "reflect", cval: complex = 0.0, origin: Any = 0, *,
    axes: Any = None, channel_axis: int | None = None,
) -> Any:  # fmt: skip
    """The mean of a box of `size` elements; size, mode and origin one for all axes or one for each."""
    call = Call.resolve(input, output, mode, cval, axes, channel_axis)
    sizes = arguments.sizes_of(size, len(call.axes))
    parts = zip(call.axes, sizes, call.befores(sizes, origin), call.modes, strict=True)
    # A function of one axis goes over it even with one tap: what the result does not hold is cut there.
    means = [
        Along(axis, np.full(taps, 1.0 / taps), before, how, False)
        for axis, taps, before, how in parts
        if taps > 1 or isinstance(axes, OneAxis)
    ]
    apply_along(call.x, call.y, means, cval)
    return call.result()
