"""Copies of arrays by strides on a GPU: what is not dense is brought into order, and results into a user's `out`."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.device import gpu
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.types import DTYPES, counter, template_args
from tapwise.errors import InvalidProblem
from tapwise.integers import ceil_div

AXES: Final = 5
THREADS: Final = 256
_TYPES: Final = {DTYPES[name].size_bytes: DTYPES[name].cpp for name in ("u8", "u16", "u32", "u64")}


def source(size_bytes: int, total: int = 0) -> Source:
    """The kernel for so many elements of that size."""
    return stub("cuda/copy.cu", "copy", template_args(_TYPES[size_bytes], counter(total)), "Copy", THREADS)


@lru_cache(256)
def launch(
    shape: tuple[int, ...], from_bytes: tuple[int, ...], to_bytes: tuple[int, ...], size: int, index: int
) -> Launch:
    """A copy on GPU `index` of `size`-byte elements from strides to strides, ready to be called with addresses x, y."""
    if len(shape) > AXES:
        raise InvalidProblem(f"an array of {len(shape)} axes that is not dense: up to {AXES} are allowed on a GPU")
    if any(step % size for step in (*from_bytes, *to_bytes)):
        raise InvalidProblem(f"strides of {from_bytes} bytes: multiples of the element's {size} bytes are allowed")
    missing = AXES - len(shape)
    fields = {"total": 1}
    for axis, (count, start, end) in enumerate(zip(shape, from_bytes, to_bytes, strict=True), missing):
        fields |= {f"shape{axis}": count, f"from{axis}": start // size, f"to{axis}": end // size}
        fields["total"] *= count
    for axis in range(missing):
        fields |= {f"shape{axis}": 1, f"from{axis}": 0, f"to{axis}": 0}
    device = gpu(index)
    blocks = min(ceil_div(fields["total"], THREADS), 32 * device.multiprocessors)
    made = Launch(source(size, fields["total"]), fields, (blocks, 1, 1), THREADS, dependent=True)
    made.load(device.architecture, index)
    return made
