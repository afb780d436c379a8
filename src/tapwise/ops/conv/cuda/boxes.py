"""Boxes of x that TMA brings to shared memory, channels last, and launches with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.jit.tensor_map import WORDS, TensorMap
from tapwise.ops.conv.problem import ConvProblem

# Elements of a box along an axis.
MOST: Final = 256


def launch(source: Source, fields: dict[str, int], shape: tuple[int, int, int], map_x: TensorMap | None) -> Launch:
    """A launch of (blocks, threads, bytes of shared memory), whose struct has words of a `map`, maybe of none."""
    maps = {} if map_x is None else {"map": map_x}
    if not maps:
        fields = fields | {f"map{word}": 0 for word in range(WORDS)}
    blocks, threads, shared_bytes = shape
    grid, names_of = (blocks, 1, 1), {"map": "x"}
    return Launch(source, fields, grid, threads, shared_bytes, maps, dependent=True, names_of=names_of, balance=2)


def map_x(problem: ConvProblem, box: Sequence[int], swizzle_bytes: int = 0, images: int = 1) -> TensorMap:
    """`box`: (channels, columns, rows) of so many images."""
    (height, width), pixel = problem.spatial, problem.c * problem.itemsize
    sizes, strides = (problem.c, width, height, problem.n), (pixel, pixel * width, pixel * width * height)
    return TensorMap(problem.dtype, sizes, strides, (*box, images), swizzle_bytes=swizzle_bytes)
