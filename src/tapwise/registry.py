"""ALGORITHMS: the only list of algorithms. Explicit rows, lazily imported, each operator's serial reference last."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from tapwise.algorithm import Algorithm
from tapwise.errors import InvalidProblem

# operator -> id -> "module:class", in the order in which equal predictions are preferred.
ALGORITHMS: dict[str, dict[str, str]] = {
    "conv": {
        "cpu.winograd": "tapwise.cpu.winograd:Winograd",
        "cpu.depthwise": "tapwise.cpu.depthwise:Depthwise",
        "cpu.pointwise": "tapwise.cpu.pointwise:Pointwise",
        "cpu.direct": "tapwise.cpu.direct:Direct",
        "cpu.im2col_gemm": "tapwise.cpu.im2col_gemm:Im2colGemm",
        "cpu.serial": "tapwise.cpu.serial:Serial",
        "cuda.implicit_gemm": "tapwise.cuda.implicit_gemm:ImplicitGemm",
        "cuda.implicit_gemm_mma": "tapwise.cuda.implicit_gemm_mma:ImplicitGemmMma",
        "cuda.few_channels": "tapwise.cuda.few_channels:FewChannels",
        "cuda.narrow_groups": "tapwise.cuda.narrow_groups:NarrowGroups",
        "cuda.direct": "tapwise.cuda.direct:Direct",
        "cuda.im2col_gemm": "tapwise.cuda.im2col_gemm:Im2colGemm",
        "cuda.sliding_window": "tapwise.cuda.sliding_window:SlidingWindow",
    },
    "im2col": {
        "cpu.simd": "tapwise.cpu.patch_simd:Im2colSimd",
        "cpu.serial": "tapwise.cpu.patch_serial:Im2colSerial",
        "cuda.grid_stride": "tapwise.cuda.patches:Im2colGridStride",
    },
    "col2im": {
        "cpu.simd": "tapwise.cpu.patch_simd:Col2imSimd",
        "cpu.serial": "tapwise.cpu.patch_serial:Col2imSerial",
        "cuda.grid_stride": "tapwise.cuda.patches:Col2imGridStride",
    },
    "pool": {
        "cpu.simd": "tapwise.cpu.pool_simd:PoolSimd",
        "cpu.serial": "tapwise.cpu.pool_serial:PoolSerial",
        "cuda.sliding_window": "tapwise.cuda.pool:PoolSlidingWindow",
    },
    "filter": {
        "cpu.tiles": "tapwise.cpu.filter_tiles:Tiles",
        "cpu.serial": "tapwise.cpu.filter_serial:FilterSerial",
        "cuda.sliding_window": "tapwise.cuda.filter:FilterSlidingWindow",
    },
    "softmax": {
        "cpu.simd": "tapwise.cpu.softmax_simd:SoftmaxSimd",
        "cpu.serial": "tapwise.cpu.softmax_serial:SoftmaxSerial",
        "cuda.tree": "tapwise.cuda.tree:SoftmaxTree",
    },
    "reduce": {
        "cpu.simd": "tapwise.cpu.reduce_simd:ReduceSimd",
        "cpu.serial": "tapwise.cpu.reduce_serial:ReduceSerial",
        "cuda.tree": "tapwise.cuda.tree:ReduceTree",
    },
}

# operator -> what users call; its page is docs/operators/<operator>.md.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "conv": ("conv2d", "conv1d", "prepare"),
    "im2col": ("im2col",),
    "col2im": ("col2im",),
    "pool": ("max_pool2d", "avg_pool2d", "max_pool1d", "avg_pool1d"),
    "filter": (
        "image.correlate",
        "image.convolve",
        "image.correlate1d",
        "image.convolve1d",
        "image.gaussian_filter",
        "image.uniform_filter",
        "image.sobel",
        "image.prewitt",
        "image.laplace",
        "image.gaussian_laplace",
        "image.maximum_filter",
        "image.minimum_filter",
    ),
    "softmax": ("softmax", "log_softmax"),
    "reduce": ("reduce",),
}


@cache
def get(identifier: str, operator: str = "conv") -> Algorithm[Any]:
    """An operator's algorithm of that id, e.g. "cpu.winograd". Raises InvalidProblem for an unknown one."""
    rows = ALGORITHMS[operator]
    row = rows.get(identifier)
    if row is None:
        raise InvalidProblem(f"algorithm={identifier!r}: 'auto' or one of {', '.join(rows)}")
    module, name = row.split(":")
    algorithm: Algorithm[Any] = getattr(import_module(module), name)()
    return algorithm


def of_backend(kind: str, operator: str = "conv") -> list[Algorithm[Any]]:
    """The algorithms of one operator on one backend ("cpu"), in registry order."""
    return [get(identifier, operator) for identifier in ALGORITHMS[operator] if identifier.startswith(kind + ".")]
