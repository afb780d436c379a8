"""What the plans of all CUDA kernels share: launches in order, the words of a convolution, refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

from tapwise import arrays
from tapwise.algorithm import Buffers, Device, Plan
from tapwise.arrays.device import stream_of
from tapwise.cuda.jit.compile import HALF
from tapwise.cuda.jit.launch import Launch
from tapwise.integers import ceil_div
from tapwise.ops.conv.problem import ConvProblem
from tapwise.problem import Problem

# The words of `Window` in include/window.cuh.
WINDOW: Final = (
    "x", "w", "y", "bias", "residual", "n", "c", "height", "width", "k", "r", "s", "p", "q", "stride_h", "stride_w",
    "pad_h", "pad_w", "dilation_h", "dilation_w", "groups", "tiles_q", "tiles_p", "tiles_k",
)  # fmt: skip
TYPES: Final = {"f32": "float", "f64": "double", "f16": "__half", "bf16": "bf16"}
SIZES: Final = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}
ACTIVATIONS: Final = {
    None: "NONE", "relu": "RELU", "relu6": "RELU6", "silu": "SILU", "gelu": "GELU", "sigmoid": "SIGMOID",
    "tanh": "TANH",
}  # fmt: skip
# Activations that take more than a comparison.
FUNCTIONS: Final = ("silu", "gelu", "sigmoid", "tanh")
# How a block's outputs lie: a square, a piece of a row, a piece of a column.
PARTITIONS: Final = ("row", "block", "column")
# Elements of one plane, and of one image's rows, are counted in 32 bits.
LARGEST_PLANE: Final = 1 << 31
TOO_LARGE: Final = "takes planes of fewer than 2^31 elements"


# The arrays of `Buffers`, by their names in a launch: all but the stream.
_ARRAYS: Final = Buffers._fields[:-1]


def stream(buffers: Buffers) -> int:
    """The handle of the stream to launch on."""
    return stream_of(buffers.x) if buffers.stream is None else int(buffers.stream)


class CudaPlan(Plan):
    """Launches kernels one behind the other on the stream of x."""

    def __init__(self, problem: Problem, device: Device, launches: Sequence[Launch], workspace_bytes: int = 0) -> None:
        self.problem, self.launches, self.workspace_bytes = problem, tuple(launches), workspace_bytes
        for launch in self.launches:
            launch.load(device.architecture, device.index)

    def pack(self, w: Any) -> Any:
        """The filters as they are, dense."""
        return arrays.dense(w, "nchw")

    def run(self, buffers: Buffers) -> None:
        addresses = {name: array.ptr for name, array in zip(_ARRAYS, buffers, strict=False) if array is not None}
        if buffers.w is not None and buffers.w.settled:
            addresses["settled"] = 1
        self.enqueue(addresses, stream(buffers))

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
        """Launch the kernels on a stream, with the addresses of their arrays by name; "settled" is 1 where the filters
        were packed before all that is still to run."""
        for launch in self.launches:
            launch(addresses, stream)


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


def tile_shape(partition: str, outputs: int) -> tuple[int, int]:
    """(across, down) of a block's outputs, a power of two."""
    if partition == "row":
        return outputs, 1
    if partition == "column":
        return 1, outputs
    # As square as powers of two allow, wider than high.
    high = 1 << ((outputs.bit_length() - 1) // 2)
    return outputs // high, high


def waits_by_itself(device: Device) -> bool:
    """Whether a kernel can be placed while the launch before runs, and waits for it (compute capability 9.0 and newer).

    The launcher calls such a launch dependent."""
    return int(device.architecture.removeprefix("sm_").rstrip("af")) >= 90


def reciprocal(count: int) -> int:
    """2^32 over a number, rounded up: the upper half of a product with it is a division. 0 for 1."""
    return ceil_div(1 << 32, count) if count > 1 else 0


def header(dtype: str) -> str:
    """What a stub for that dtype begins with."""
    return HALF if dtype == "f16" else ""


def counter(count: int) -> str:
    """The type that counts so many elements: 64-bit divisions take longer than the rest of a kernel."""
    return "unsigned" if count < 1 << 31 else "unsigned long long"


def is_large(problem: ConvProblem) -> bool:
    """Whether a plane has more elements than 32 bits count."""
    return max(prod(problem.spatial), prod(problem.output)) >= LARGEST_PLANE


def roof_us(problem: ConvProblem, device: Device, math_share: float, bytes_share: float) -> float:
    """Microseconds at shares of the multiply-add rate and of the memory's bandwidth, and a launch."""
    rate = device.gflops * device.multiprocessors * {"f64": 0.5}.get(problem.dtype, 1.0)
    arithmetic = problem.flops / (rate * 1e3 * math_share)
    memory = problem.bytes / (device.gbps * 1e3 * bytes_share)
    return max(arithmetic, memory) + 2.0
