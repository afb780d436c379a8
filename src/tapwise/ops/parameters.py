"""Window parameters as users give them, brought into the form that problems have."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from tapwise import arrays
from tapwise.algorithm import Device
from tapwise.arguments import LARGEST, shown, whole
from tapwise.cpu.device import host
from tapwise.errors import InvalidProblem
from tapwise.window_problem import LARGEST_STEP, Pair


def _each(value: Any, axes: int, name: str, allowed: str) -> tuple[Any, ...]:
    """One value for each axis."""
    if not isinstance(value, (tuple, list)):
        return (value,) * axes
    if len(value) == 1:
        return tuple(value) * axes
    if len(value) != axes:
        raise InvalidProblem(f"{name}={shown(value)}: {allowed} is allowed")
    return tuple(value)


def numbers(value: Any, axes: int, name: str) -> tuple[int, ...]:
    """A whole number for each axis, from one for all or a sequence."""
    allowed = "a number, or one for each of the 2 axes," if axes == 2 else "a number"
    return tuple(whole(one, name) for one in _each(value, axes, name, allowed))


def sides_of(
    padding: Any, spatial: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...],
    dilation: tuple[int, ...], output_size: Any,
) -> tuple[Pair, ...]:  # fmt: skip
    """(before, after) for each axis, from every form that `padding` and `output_size` take.

    Raises InvalidProblem for "same" with a stride, both at once, and an output size that no padding gives.
    """
    axes = len(spatial)
    if min(*stride, *dilation, *kernel) < 1:
        return ((0, 0),) * axes  # ConvProblem says what is wrong
    sides = _sides(padding, axes, kernel, stride, dilation)
    if output_size is None:
        return sides
    if any(map(any, sides)):
        raise InvalidProblem(
            f"output_size={shown(output_size)} with padding={shown(padding)}: only one of them is allowed"
        )
    wanted = numbers(output_size, axes, "output_size")
    if 8 * prod(wanted) > LARGEST:
        raise InvalidProblem(f"output_size={shown(output_size)}: sizes whose product is below 2^60 are allowed")
    return tuple(_fit(*sizes, output_size) for sizes in zip(wanted, spatial, kernel, stride, dilation, strict=True))


def _sides(
    padding: Any, axes: int, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Pair, ...]:
    allowed = "a number, one for each axis, a (before, after) pair for each axis, 'same' or 'valid'"
    if isinstance(padding, str):
        if padding == "valid":
            return ((0, 0),) * axes
        if padding != "same":
            raise InvalidProblem(f"padding={shown(padding)}: {allowed} is allowed")
        if set(stride) != {1}:
            raise InvalidProblem(f"padding='same' with stride={stride}: only stride 1 is allowed")
        totals = [d * (r - 1) for r, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    sides = []
    for one in _each(padding, axes, "padding", allowed):
        pair = one if isinstance(one, (tuple, list)) else (one, one)
        if len(pair) != 2:
            raise InvalidProblem(f"padding={shown(padding)}: {allowed} is allowed")
        sides.append((whole(pair[0], "padding", allowed), whole(pair[1], "padding", allowed)))
    return tuple(sides)


def _fit(wanted: int, size: int, kernel: int, stride: int, dilation: int, output_size: Any) -> Pair:
    """The least padding of one axis that gives `wanted` outputs, the odd rest behind."""
    least = (wanted - 1) * stride + (kernel - 1) * dilation + 1 - size
    if wanted < 1 or least + stride - 1 < 0:
        most = (size - (kernel - 1) * dilation - 1) // stride + 1
        raise InvalidProblem(
            f"output_size={shown(output_size)}: {wanted} is impossible for an input of {size}; padding only adds "
            f"to the {max(most, 1)} that there are without it"
        )
    total = max(least, 0)
    if total > LARGEST_STEP:
        raise InvalidProblem(f"output_size={shown(output_size)}: padding of {total} for an input of {size} is too much")
    return total // 2, total - total // 2


def window(spatial: tuple[int, ...], kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> dict[str, Any]:
    """The fields spatial, kernel, stride, padding and dilation of a problem of windows without filters."""
    axes = len(spatial)
    given = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
    kernel, steps, distances = (numbers(value, axes, name) for name, value in given.items())
    for name, values in zip(given, (kernel, steps, distances), strict=True):
        if min(values) < 1:
            raise InvalidProblem(f"{name}={values}: each at least 1")
    sides = sides_of(padding, spatial, kernel, steps, distances, None)
    return {"spatial": spatial, "kernel": kernel, "stride": steps, "padding": sides, "dilation": distances}


def with_batch(x: Any, axes: int, name: str = "x") -> tuple[bool, Any]:
    """(whether x, called `name`, lacks a batch axis, x with one); `axes` spatial ones."""
    if x.ndim not in (axes + 1, axes + 2):
        raise InvalidProblem(f"{name} has shape {x.shape}: {axes + 2} axes are allowed, or {axes + 1} without a batch")
    single = x.ndim == axes + 1
    return single, x[None] if single else x


def result(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], source: Any, name: str = "x", **inputs: Any) -> Any:
    """The user's `out` as an array to write to, where the source lies.

    Raises InvalidProblem where it does not fit or overlaps an input: the source, which the user calls `name`, or one of
    `inputs`.
    """
    target = arrays.target(out, source)
    if target.shape != shape:
        raise InvalidProblem(f"out has shape {target.shape}: {shape} is allowed")
    if target.dtype != dtype:
        raise InvalidProblem(f"out has dtype {target.dtype}: {dtype} is allowed")
    if not arrays.writeable(target):
        raise InvalidProblem("out is read-only: an array that can be written is allowed")
    for one, array in {name: source, **inputs}.items():
        if array is not None and arrays.overlap(target, array):
            raise InvalidProblem(f"out overlaps {one}: an array with memory of its own is allowed")
    return target


def device_of(array: arrays.Array, threads: int | None = None) -> Device:
    """The device in whose memory an array lies."""
    if isinstance(array, np.ndarray):
        return host(threads)
    from tapwise.cuda.jit.device import gpu

    return gpu(array.index)
