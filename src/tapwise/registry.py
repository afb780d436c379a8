"""ALGORITHMS: the only list of algorithms. Explicit rows, lazily imported, each operator's serial reference last."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from tapwise.algorithm import Algorithm
from tapwise.arguments import shown, words_of
from tapwise.errors import InvalidProblem
from tapwise.forks import making
from tapwise.problem import Problem

# operator -> id -> "module:class", in the order in which equal predictions are preferred.
ALGORITHMS: dict[str, dict[str, str]] = {
    "conv": {
        "cpu.winograd": "tapwise.ops.conv.cpu.winograd.winograd:Winograd",
        "cpu.strassen": "tapwise.ops.conv.cpu.strassen.strassen:Strassen",
        "cpu.depthwise": "tapwise.ops.conv.cpu.depthwise.depthwise:Depthwise",
        "cpu.amx": "tapwise.ops.conv.cpu.amx.amx:Amx",
        "cpu.pointwise": "tapwise.ops.conv.cpu.pointwise:Pointwise",
        "cpu.direct": "tapwise.ops.conv.cpu.direct.direct:Direct",
        "cpu.im2col_gemm": "tapwise.ops.conv.cpu.im2col_gemm:Im2colGemm",
        "cpu.serial": "tapwise.ops.conv.cpu.serial:Serial",
        "cuda.implicit_gemm": "tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm:ImplicitGemm",
        "cuda.joined_pixels": "tapwise.ops.conv.cuda.joined_pixels:JoinedPixels",
        "cuda.implicit_gemm_mma": "tapwise.ops.conv.cuda.implicit_gemm_mma:ImplicitGemmMma",
        "cuda.implicit_gemm_rows": "tapwise.ops.conv.cuda.implicit_gemm_rows:ImplicitGemmRows",
        "cuda.depthwise": "tapwise.ops.conv.cuda.depthwise.depthwise:Depthwise",
        "cuda.few_channels": "tapwise.ops.conv.cuda.few_channels:FewChannels",
        "cuda.narrow_groups": "tapwise.ops.conv.cuda.narrow_groups:NarrowGroups",
        "cuda.winograd": "tapwise.ops.conv.cuda.winograd:Winograd",
        "cuda.implicit_gemm_simt": "tapwise.ops.conv.cuda.implicit_gemm_simt:ImplicitGemmSimt",
        "cuda.direct": "tapwise.ops.conv.cuda.direct:Direct",
        "cuda.im2col_gemm": "tapwise.ops.conv.cuda.im2col_gemm:Im2colGemm",
        "cuda.sliding_window": "tapwise.ops.conv.cuda.sliding_window:SlidingWindow",
    },
    "dgrad": {
        "cpu.direct": "tapwise.ops.conv.cpu.dgrad_direct:DgradDirect",
        "cpu.pixel_shuffle": "tapwise.ops.conv.cpu.pixel_shuffle:PixelShuffle",
        "cpu.fprop_phases": "tapwise.ops.conv.cpu.fprop_phases:FpropPhases",
        "cpu.gemm_col2im": "tapwise.ops.conv.cpu.gemm_col2im:GemmCol2im",
        "cpu.winograd": "tapwise.ops.conv.cpu.winograd.winograd:WinogradDgrad",
        "cpu.serial": "tapwise.ops.conv.cpu.serial_gradients:SerialDgrad",
        "cuda.implicit_gemm": "tapwise.ops.conv.cuda.implicit_gemm.dgrad:ImplicitGemmDgrad",
        "cuda.pixel_shuffle": "tapwise.ops.conv.cuda.pixel_shuffle:PixelShuffle",
        "cuda.fprop_phases": "tapwise.ops.conv.cuda.fprop_phases:FpropPhases",
        "cuda.winograd": "tapwise.ops.conv.cuda.fprop_phases:WinogradDgrad",
        "cuda.grid_stride": "tapwise.ops.conv.cuda.gradients:GridStrideDgrad",
    },
    "wgrad": {
        "cpu.depthwise": "tapwise.ops.conv.cpu.wgrad_depthwise:DepthwiseWgrad",
        "cpu.direct": "tapwise.ops.conv.cpu.wgrad_direct:DirectWgrad",
        "cpu.im2col_gemm": "tapwise.ops.conv.cpu.wgrad_im2col_gemm:Im2colGemmWgrad",
        "cpu.serial": "tapwise.ops.conv.cpu.serial_gradients:SerialWgrad",
        "cuda.depthwise": "tapwise.ops.conv.cuda.wgrad_depthwise:DepthwiseWgrad",
        "cuda.depthwise_mma": "tapwise.ops.conv.cuda.wgrad_depthwise_mma:DepthwiseMmaWgrad",
        "cuda.depthwise_mma_sp": "tapwise.ops.conv.cuda.wgrad_depthwise_mma_sp:DepthwiseMmaSpWgrad",
        "cuda.narrow_groups": "tapwise.ops.conv.cuda.wgrad_narrow_groups:NarrowGroupsWgrad",
        "cuda.implicit_gemm": "tapwise.ops.conv.cuda.implicit_gemm_wgrad.wgrad:ImplicitGemmWgrad",
        "cuda.implicit_gemm_mma": "tapwise.ops.conv.cuda.wgrad_mma:ImplicitGemmMmaWgrad",
        "cuda.implicit_gemm_simt": "tapwise.ops.conv.cuda.wgrad_simt:ImplicitGemmSimtWgrad",
        "cuda.grid_stride": "tapwise.ops.conv.cuda.gradients:GridStrideWgrad",
    },
    "im2col": {
        "cpu.simd": "tapwise.ops.patches.cpu:Im2colSimd",
        "cpu.serial": "tapwise.ops.patches.cpu_serial:Im2colSerial",
        "cuda.shared_lines": "tapwise.ops.patches.cuda_shared_lines:Im2colSharedLines",
        "cuda.grid_stride": "tapwise.ops.patches.cuda:Im2colGridStride",
    },
    "col2im": {
        "cpu.simd": "tapwise.ops.patches.cpu:Col2imSimd",
        "cpu.serial": "tapwise.ops.patches.cpu_serial:Col2imSerial",
        "cuda.grid_stride": "tapwise.ops.patches.cuda:Col2imGridStride",
    },
    "pool": {
        "cpu.simd": "tapwise.ops.pool.cpu:PoolSimd",
        "cpu.serial": "tapwise.ops.pool.cpu_serial:PoolSerial",
        "cuda.register_tile": "tapwise.ops.pool.cuda_register_tile:PoolRegisterTile",
        "cuda.separable_window": "tapwise.ops.pool.cuda_separable:PoolSeparableWindow",
        "cuda.block_reduction": "tapwise.ops.pool.cuda_whole:PoolBlockReduction",
        "cuda.sliding_window": "tapwise.ops.pool.cuda:PoolSlidingWindow",
    },
    "pool_dgrad": {
        "cpu.simd": "tapwise.ops.pool.cpu_backward:PoolDgradSimd",
        "cpu.serial": "tapwise.ops.pool.cpu_serial_backward:PoolDgradSerial",
        "cuda.tiles": "tapwise.ops.pool.cuda_backward:PoolDgradTiles",
        "cuda.grid_stride": "tapwise.ops.pool.cuda_backward:PoolDgradGridStride",
    },
    "filter": {
        "cpu.tiles": "tapwise.ops.filter.cpu.tiles:Tiles",
        "cpu.serial": "tapwise.ops.filter.cpu_serial:FilterSerial",
        "cuda.van_herk": "tapwise.ops.filter.cuda_van_herk:FilterVanHerk",
        "cuda.rolling": "tapwise.ops.filter.cuda_rolling:FilterRolling",
        "cuda.tiles_mma": "tapwise.ops.filter.cuda_tiles_mma:FilterTilesMma",
        "cuda.tiles": "tapwise.ops.filter.cuda_tiles:FilterTiles",
        "cuda.sliding_window": "tapwise.ops.filter.cuda:FilterSlidingWindow",
    },
    "softmax": {
        "cpu.simd": "tapwise.ops.softmax.cpu:SoftmaxSimd",
        "cpu.serial": "tapwise.ops.softmax.cpu_serial:SoftmaxSerial",
        "cuda.ring": "tapwise.ops.softmax.cuda_ring:SoftmaxRing",
        "cuda.thread_per_run": "tapwise.ops.softmax.cuda_thread_per_run:SoftmaxThreadPerRun",
        "cuda.block_reduction": "tapwise.ops.softmax.cuda:SoftmaxBlockReduction",
    },
    "softmax_dgrad": {
        "cpu.simd": "tapwise.ops.softmax.cpu_backward:SoftmaxDgradSimd",
        "cpu.serial": "tapwise.ops.softmax.cpu_serial_backward:SoftmaxDgradSerial",
        "cuda.block_reduction": "tapwise.ops.softmax.cuda_backward:SoftmaxDgradBlockReduction",
    },
    "reduce": {
        "cpu.simd": "tapwise.ops.reduce.cpu:ReduceSimd",
        "cpu.serial": "tapwise.ops.reduce.cpu_serial:ReduceSerial",
        "cuda.block_reduction": "tapwise.ops.reduce.cuda:ReduceBlockReduction",
    },
    "batch_norm": {
        "cpu.serial": "tapwise.ops.batch_norm.cpu_serial:BatchNormSerial",
        "cuda.block_reduction": "tapwise.ops.batch_norm.cuda:BatchNormBlockReduction",
    },
    "batch_norm_dgrad": {
        "cpu.serial": "tapwise.ops.batch_norm.cpu_serial:BatchNormDgradSerial",
        "cuda.block_reduction": "tapwise.ops.batch_norm.cuda:BatchNormDgradBlockReduction",
    },
    "bias_activation_dgrad": {
        "cpu.serial": "tapwise.ops.bias_activation.cpu_serial:BiasActivationDgradSerial",
        "cuda.block_reduction": "tapwise.ops.bias_activation.cuda:BiasActivationDgradBlockReduction",
    },
    "squeeze_excitation": {
        "cpu.simd": "tapwise.ops.squeeze_excitation.cpu:SqueezeExcitationSimd",
        "cpu.serial": "tapwise.ops.squeeze_excitation.cpu_serial:SqueezeExcitationSerial",
        "cuda.cluster": "tapwise.ops.squeeze_excitation.cuda:SqueezeExcitationCluster",
        "cuda.grid_stride": "tapwise.ops.squeeze_excitation.cuda:SqueezeExcitationGridStride",
    },
}

# First word of a problem's string -> "module:class"; a string that begins with none of them is a convolution's.
PROBLEMS: dict[str, str] = {
    "im2col": "tapwise.ops.patches.problem:Im2colProblem",
    "col2im": "tapwise.ops.patches.problem:Col2imProblem",
    "maxpool": "tapwise.ops.pool.problem:PoolProblem",
    "avgpool": "tapwise.ops.pool.problem:PoolProblem",
    "filter": "tapwise.ops.filter.problem:FilterProblem",
    "reduce": "tapwise.ops.reduce.problem:ReduceProblem",
    "softmax": "tapwise.ops.softmax.problem:SoftmaxProblem",
    "log_softmax": "tapwise.ops.softmax.problem:SoftmaxProblem",
    "batch_norm": "tapwise.ops.batch_norm.problem:BatchNormProblem",
    "bias_activation": "tapwise.ops.bias_activation.problem:BiasActivationProblem",
    "squeeze_excitation": "tapwise.ops.squeeze_excitation.problem:SqueezeExcitationProblem",
}
CONVOLUTION = "tapwise.ops.conv.problem:ConvProblem"

# operator -> "module:function" that works its sums, and those of absolute values, out in float64 on a GPU: where that
# takes too long in this machine's memory.
REFERENCES: dict[str, str] = dict.fromkeys(("conv", "dgrad", "wgrad"), "tapwise.ops.conv.cuda.reference:convolve")

PICTURE_FILTERS = (
    *("correlate", "convolve", "correlate1d", "convolve1d", "gaussian_filter", "uniform_filter", "sobel", "prewitt"),
    *("laplace", "gaussian_laplace", "maximum_filter", "minimum_filter"),
)
# operator -> what users call; its page is docs/operators/<operator>.md.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "conv": ("conv2d", "conv1d", "prepare"),
    "dgrad": ("conv2d_input", "conv_transpose2d", "conv_transpose1d"),
    "wgrad": ("conv2d_weight",),
    "im2col": ("im2col",),
    "col2im": ("col2im",),
    "pool": ("max_pool2d", "avg_pool2d", "max_pool1d", "avg_pool1d"),
    "pool_dgrad": ("max_pool2d_backward", "avg_pool2d_backward"),
    "filter": tuple(f"image.{name}" for name in PICTURE_FILTERS),
    "softmax": ("softmax", "log_softmax"),
    "softmax_dgrad": ("softmax_backward", "log_softmax_backward"),
    "reduce": ("reduce",),
    "batch_norm": ("batch_norm_stats",),
    "batch_norm_dgrad": ("batch_norm_backward",),
    "bias_activation_dgrad": ("bias_backward", "bias_activation_backward"),
    "squeeze_excitation": ("squeeze_excitation",),
}


def get(identifier: str, operator: str = "conv") -> Algorithm[Any]:
    """An operator's algorithm of that id, e.g. "cpu.winograd". Raises InvalidProblem for an unknown one."""
    rows = ALGORITHMS[operator]
    row = rows.get(identifier) if isinstance(identifier, str) else None
    if row is None:
        raise InvalidProblem(f"algorithm={shown(identifier)}: 'auto' or one of {', '.join(rows)}")
    return _made(row)


@cache
def _made(row: str) -> Algorithm[Any]:
    algorithm: Algorithm[Any] = _resolve(row)()
    return algorithm


def of_backend(kind: str, operator: str = "conv") -> list[Algorithm[Any]]:
    """The algorithms of one operator on one backend ("cpu"), in registry order."""
    return [get(identifier, operator) for identifier in ALGORITHMS[operator] if identifier.startswith(kind + ".")]


def parse(text: str) -> Problem:
    """The problem of any operator that a string names: "softmax 1024x1000", and "c64 h56 ..." for convolution."""
    first = words_of(text)[:1]
    problem: Problem = _resolve(PROBLEMS.get(first[0], CONVOLUTION) if first else CONVOLUTION).parse(text)
    return problem


def reference_there(operator: str) -> Callable[..., Any] | None:
    """(problem, x, w, device) -> (sums, sums of absolute values) in float64 on a GPU, where an operator has that."""
    row = REFERENCES.get(operator)
    return None if row is None else _resolve(row)


def _resolve(row: str) -> Any:
    """The class that "module:class" names."""
    module, name = row.split(":")
    with making:
        return getattr(import_module(module), name)
