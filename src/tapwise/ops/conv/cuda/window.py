"""What the kernels of convolution share: a problem's words, names of activations, a plan with filters as they are."""

from __future__ import annotations

from math import prod
from typing import Any, Final

from tapwise import arrays
from tapwise.algorithm import Device
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.ops.conv.problem import ConvProblem

# The words of `Window` in include/window.cuh.
WINDOW: Final = (
    "x", "w", "y", "bias", "residual", "n", "c", "height", "width", "k", "r", "s", "p", "q", "stride_h", "stride_w",
    "pad_h", "pad_w", "dilation_h", "dilation_w", "groups", "tiles_q", "tiles_p", "tiles_k",
)  # fmt: skip
ACTIVATIONS: Final = {
    None: "NONE", "relu": "RELU", "relu6": "RELU6", "silu": "SILU", "gelu": "GELU", "sigmoid": "SIGMOID",
    "tanh": "TANH",
}  # fmt: skip
# Activations that take more than a comparison.
FUNCTIONS: Final = ("silu", "gelu", "sigmoid", "tanh")
TOO_LARGE: Final = "takes planes of fewer than 2^31 elements"


class WindowPlan(CudaPlan):
    """Kernels that read filters as they are."""

    def pack(self, w: Any) -> Any:
        """The filters, dense."""
        return arrays.dense(w, "nchw")


def window_fields(problem: ConvProblem) -> dict[str, int]:
    """The words of `Window` that a problem knows."""
    (height, width), (r, s), (p, q) = problem.spatial, problem.kernel, problem.output
    (top, _), (left, _) = problem.padding
    return {
        "n": problem.n, "c": problem.c, "height": height, "width": width, "k": problem.k, "r": r, "s": s,
        "p": p, "q": q,
        "stride_h": problem.stride[0], "stride_w": problem.stride[1], "pad_h": top, "pad_w": left,
        "dilation_h": problem.dilation[0], "dilation_w": problem.dilation[1], "groups": problem.groups,
    }  # fmt: skip


def is_large(problem: ConvProblem) -> bool:
    """Whether a plane has more elements than 32 bits count."""
    return max(prod(problem.spatial), prod(problem.output)) >= INDEX_LIMIT


def roof_us(problem: ConvProblem, device: Device, math_share: float, bytes_share: float) -> float:
    """Microseconds at shares of the multiply-add rate and of the memory's bandwidth, and a launch."""
    rate = device.gflops * device.multiprocessors * {"f64": 0.5}.get(problem.dtype, 1.0)
    arithmetic = problem.flops / (rate * 1e3 * math_share)
    memory = problem.bytes / (device.gbps * 1e3 * bytes_share)
    return max(arithmetic, memory) + 2.0
