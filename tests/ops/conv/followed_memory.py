"""Memory as tensor maps see it, and what packing leaves there, for tests that follow kernels in NumPy."""

from __future__ import annotations

from math import prod

import numpy as np
from tensor_core_cases import filter_of

from tapwise.cuda.jit.device import H200
from tapwise.cuda.jit.tensor_map import TensorMap
from tapwise.ops.conv.cuda import pack
from tapwise.ops.conv.problem import ConvProblem


class Memory:
    """An array in memory as a tensor map sees it: elements by their distance from the start."""

    def __init__(self, array: np.ndarray) -> None:
        self.flat = array.reshape(-1)

    def read(self, map_: TensorMap, size: int, place: tuple[int, ...]) -> np.ndarray:
        """The innermost line at a place of the outer axes, zeros where it leaves the tensor."""
        count = map_.box[0]
        line = np.zeros(count)
        first, *outer = place
        if all(0 <= at < extent for at, extent in zip(outer, map_.sizes[1:], strict=True)):
            start = sum(at * stride // size for at, stride in zip(outer, map_.strides, strict=True))
            held = max(0, min(count, map_.sizes[0] - first))
            line[:held] = self.flat[start + first : start + first + held]
        return line

    def boxes(self, map_: TensorMap, size: int, place: tuple[int, ...]) -> np.ndarray:
        """A copy of a box of lines."""
        channel, w, h, *rest = place
        _, wide, high, *_ = map_.box
        return np.array(
            [self.read(map_, size, (channel, w + i % wide, h + i // wide, *rest)) for i in range(wide * high)]
        )

    def windows(self, map_: TensorMap, size: int, place: tuple[int, ...], offsets: tuple[int, ...]) -> np.ndarray:
        """A copy in im2col mode: pixels from a place on, within the map's corners, each moved by the offsets."""
        assert map_.corners is not None
        lower, upper = map_.corners
        channel, *at = place
        spatial = len(lower)
        last = [map_.sizes[1 + axis] - 1 + upper[axis] for axis in range(spatial)]
        lines = []
        for _ in range(map_.box[1]):
            moved = [at[axis] + offsets[axis] for axis in range(spatial)]
            lines.append(self.read(map_, size, (channel, *moved, at[spatial])))
            for axis in range(spatial):
                at[axis] += map_.steps[axis]
                if at[axis] <= last[axis]:
                    break
                at[axis] = lower[axis]
            else:
                at[spatial] += 1
        return np.array(lines)


def packed_images(problem: ConvProblem, x: np.ndarray) -> np.ndarray:
    """What pack_images leaves, straight from its definition; parts of 3xtf32 are x and zeros here."""
    n, _, h, w = problem.x_shape
    out = np.zeros((pack.parts(problem), problem.groups, n, h, w, pack.wide(problem)))
    split = x.reshape(n, problem.groups, problem.group_c, h, w)
    out[0, ..., : problem.group_c] = split.transpose(1, 0, 3, 4, 2)
    return out


def packed_windows(problem: ConvProblem, view: ConvProblem, x: np.ndarray) -> np.ndarray:
    """What pack_windows leaves, by its launch's words; parts of 3xtf32 are x and zeros here."""
    launch = pack.windows(problem, view, H200)
    p = dict(zip(launch.names, launch.words, strict=True))
    flat = (x.transpose(0, 2, 3, 1) if problem.layout == "nhwc" else x).reshape(-1)
    flat = (x.transpose(0, 2, 3, 1) if problem.layout == "nhwc" else x).reshape(-1)
    out = np.zeros((pack.parts(problem), 1, p["n"], p["rows"], p["across"], p["wide"]))
    assert launch.grid[0] * launch.block[0] * 16 >= p["across"] * p["wide"] * problem.itemsize
    for *at, tap, channel in np.ndindex(p["n"], p["rows"], p["across"], p["taps"], p["channels"]):
        n, line, pixel = at
        r, s = divmod(tap, p["taps_w"])
        h = line * p["up_h"] - p["pad_h"] + r * p["dilation_h"]
        w = pixel * p["up_w"] - p["pad_w"] + s * p["dilation_w"]
        if 0 <= h < p["height"] and 0 <= w < p["width"]:
            value = flat[n * p["step_n"] + channel * p["step_c"] + h * p["step_h"] + w * p["step_w"]]
            out[0, 0, n, line, pixel, tap * p["channels"] + channel] = value
    return out


def packed_filters(view: ConvProblem, w: np.ndarray, line: int, order: int, tile: int) -> np.ndarray:
    """The same of filters: of a view with fewer taps, each is several of w's side by side."""
    taps = prod(view.kernel)
    parts = 3 if view.math == "3xtf32" else 1
    out = np.zeros((pack.filter_rows(view, order, tile), taps, parts, line))
    lines = w.transpose(0, 2, 3, 1).reshape(view.k, taps, -1)
    for row in range(len(out)):
        filter_ = filter_of(row, order)
        if filter_ < view.k:
            for part in (0, 2) if parts == 3 else (0,):
                out[row, :, part, : lines.shape[2]] = lines[filter_]
    return out
