"""What the kernels of convolution share: a problem's words, names of activations, a plan with filters as they are."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

from tapwise import arrays
from tapwise.activation import LEAKY_RELU, named_activation
from tapwise.algorithm import C, Device
from tapwise.cuda.jit.compile import Source, struct_words
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.ops.conv.problem import ConvProblem

# Activations that take more than a few instructions.
FUNCTIONS: Final = ("silu", "gelu", "gelu_tanh", "sigmoid", "tanh")
# Microseconds of a launch that packs filters, and bytes that it moves in one (H100).
PACK_US, PACK_BYTES = 2.2, 8e5
TOO_LARGE: Final = "takes planes of fewer than 2^31 elements"


@dataclass(frozen=True)
class OutputStrides:
    """Where y lies in a larger array, channels last: the distances of its images, rows and columns, in elements. Its
    address is that of its first element."""

    image: int
    row: int
    column: int

    @classmethod
    def dense(cls, problem: ConvProblem) -> OutputStrides:
        p, q = problem.output
        return cls(p * q * problem.k, q * problem.k, problem.k)


@dataclass(frozen=True)
class FpropFilters:
    """Filters (k, r, s, c) of the convolution whose gradient a product is, as they lie, dense: their channels are the
    product's filters. `kernel`: their taps; `first`: the one along each axis that is the product's first, `step`: how
    far its next one lies from it."""

    kernel: tuple[int, ...]
    first: tuple[int, ...]
    step: tuple[int, ...]


@dataclass(frozen=True)
class JoinedFilters:
    """Filters over pixels that are joined as one (joined_pixels.py). `filters`: those of one output of several,
    after which the bias repeats. Bytes of a pixel: up to `begin` the first column of taps is zero, from `end` on the
    last one."""

    filters: int
    begin: int
    end: int


def stride_fields(strides: OutputStrides | None) -> dict[str, int]:
    """Words of kernels that write y with strides; they read zeros where it has none."""
    image, row, column = (strides.image, strides.row, strides.column) if strides else (0, 0, 0)
    return {"image_stride": image, "row_stride": row, "column_stride": column}


def in_place_words(filters: FpropFilters | None) -> dict[str, int | bool | str]:
    """Words of kernels of one channel a group that may read filters of fprop: taps of such a filter, 0 where filters
    are packed; where the product's first tap lies among them, and how far it is to the next row's and column's."""
    if filters is None:
        return {"FILTER_TAPS": 0, "FILTER_FIRST": 0, "FILTER_ROW": 0, "FILTER_COLUMN": 0}
    (_, across), (first_r, first_s), (step_r, step_s) = filters.kernel, filters.first, filters.step
    return {
        "FILTER_TAPS": prod(filters.kernel), "FILTER_FIRST": first_r * across + first_s,
        "FILTER_ROW": step_r * across, "FILTER_COLUMN": step_s,
    }  # fmt: skip


def filter_fields(filters: FpropFilters | None) -> dict[str, int]:
    """Words of kernels that read filters of fprop; they read zeros where filters are packed."""
    first, step = (filters.first, filters.step) if filters else ((0, 0), (0, 0))
    return {"first_r": first[0], "first_s": first[1], "step_r": step[0], "step_s": step[1]}


class TensorCoreAlgorithm(CudaAlgorithm[C]):
    """Products by tensor cores, two spatial axes."""

    tensor_cores: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16", "tf32", "3xtf32")
    axes: ClassVar[tuple[int, ...]] = (2,)

    def pack_us(self, problem: ConvProblem, config: C, device: Device) -> float:
        """Filters of fprop are read and written once."""
        moved = 2 * prod(problem.w_shape) * problem.itemsize
        return PACK_US + moved / PACK_BYTES if self.operator == "conv" else 0.0

    def error_factor(self, problem: ConvProblem) -> float:
        """tf32 keeps 11 bits of each factor, cut off at worst: 2^-9 of a product. 3xtf32 has the bound of fp32."""
        return super().error_factor(problem) + (2.0**15 if problem.math == "tf32" else 0.0)


def activation(word: str | None) -> str:
    """An activation as a template's argument: its name in include/activation.cuh, with the slope of a leaky_relu."""
    name, slope = named_activation(word)
    return (name or "none").upper() + (f"({slope!r})" if name == LEAKY_RELU else "")


class WindowPlan(CudaPlan):
    """Kernels that read filters as they are."""

    def pack(self, w: Any) -> Any:
        """The filters, dense."""
        return arrays.dense(w, "nchw")


def window_fields(problem: ConvProblem, source: Source) -> dict[str, int]:
    """A convolution's sizes, as many as the struct of the kernel has words for."""
    (height, width), (r, s), (p, q) = problem.spatial, problem.kernel, problem.output
    fields = {
        "n": problem.n, "c": problem.c, "height": height, "width": width, "k": problem.k, "r": r, "s": s, "p": p,
        "q": q, "stride_h": problem.stride[0], "stride_w": problem.stride[1], "pad_h": problem.padding[0][0],
        "pad_w": problem.padding[1][0], "dilation_h": problem.dilation[0], "dilation_w": problem.dilation[1],
        "groups": problem.groups, "group_c": problem.group_c, "group_k": problem.group_k,
    }  # fmt: skip
    words = struct_words(source)
    return {name: value for name, value in fields.items() if name in words}


def is_large(problem: ConvProblem) -> bool:
    """Whether a plane has more elements than 32 bits count."""
    return max(prod(problem.spatial), prod(problem.output)) >= INDEX_LIMIT


def roof_us(problem: ConvProblem, device: Device, math_share: float, bytes_share: float) -> float:
    """Microseconds at shares of the multiply-add rate and of the memory's bandwidth, and a launch."""
    rate = device.gflops * device.multiprocessors * {"f64": 0.5}.get(problem.dtype, 1.0)
    arithmetic = problem.flops / (rate * 1e3 * math_share)
    memory = problem.bytes / (device.gbps * 1e3 * bytes_share)
    return max(arithmetic, memory) + 2.0
