"""cuda.separable_window of pooling, channels last: what a row of a window gives is worked out once for all outputs of a
column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda.costs import blocks_of, joint_us
from tapwise.ops.pool.cuda import PoolPlan
from tapwise.ops.pool.problem import PoolProblem

# Rows and columns of a window at most, and strides down: all are unrolled. Values of a thread's window.
MOST_TAPS, MOST_STRIDE, MOST_VALUES = 15, 8, 64
THREADS: Final = 256
# Rows of y of a thread to choose from, also of windows of many rows: with more, threads beside each other read other
# pages of memory, and there are fewer.
ROWS: Final = (1, 2, 3, 5, 8)
LARGE, LARGE_ROWS = 6, (16, 32)
# Cycles of a microsecond under load.
CYCLES_US: Final = 1700.0


# Fitted to times of 23 layers (H200), N=1 to 32: cycles of a warp for a load, an element that is combined, or two of 16
# bits of which the larger ones are, and an output; that a thread waits for each output; the share of the bandwidth,
# microseconds of a launch. The choice takes 1.03 of the best.
LOAD, COMBINE, LARGER, OUTPUT, ROW, BYTES_SHARE, START_US = 19.5, 5.93, 1.35, 25.2, 370.0, 1.29, 1.0


@dataclass(frozen=True)
class Config(BaseConfig):
    """A thread has `channels` side by side of up to `rows` outputs of a column."""

    channels: int
    rows: int


class PoolSeparableWindow(CudaAlgorithm[Config]):
    """Windows of up to 15 x 15 without dilation, strides down of up to 8, no positions; channels last, fewer than
    2^30 elements; float32, float64, float16 and bfloat16 (means in float32)."""

    operator: ClassVar[str] = "pool"
    id: ClassVar[str] = "cuda.separable_window"
    summary: ClassVar[str] = "rows of windows first, which go down a thread's registers"
    axes: ClassVar[tuple[int, ...]] = (2,)
    layouts: ClassVar[tuple[str, ...]] = ("nhwc",)

    def rejects(self, problem: PoolProblem, device: Device) -> str | None:
        if problem.indices:
            return "gives no positions"
        if max(problem.kernel) > MOST_TAPS or problem.stride[0] > MOST_STRIDE or max(problem.dilation) > 1:
            most = f"{MOST_TAPS} x {MOST_TAPS}"
            return f"takes windows of up to {most} without dilation, strides down of up to {MOST_STRIDE}"
        if problem.kernel == problem.spatial and not any(map(any, problem.padding)):
            return "takes no window that is the whole image, which is a reduction"
        sizes = (prod(problem.x_shape), prod(problem.y_shape), *problem.spatial, *problem.ends)
        if max(sizes) >= INDEX_LIMIT // 2:
            return "takes fewer than 2^30 elements"
        return None

    def configs(self, problem: PoolProblem, device: Device) -> Sequence[Config]:
        p, (r, _), found = problem.output[0], problem.kernel, []
        widths = (16 // problem.itemsize, 8 // problem.itemsize, 4 // problem.itemsize, 1)
        for channels in (width for width in dict.fromkeys(widths) if width and problem.c % width == 0):
            if channels == 1 or r * channels <= MOST_VALUES:
                many = LARGE_ROWS if r >= LARGE else ()
                found += [Config(channels, rows) for rows in sorted({min(p, one) for one in (*ROWS, *many)})]
        return found

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        """What a multiprocessor's warps issue, or its waves of blocks, each with a thread's chain of rows; memory."""
        (r, s), size, blocks = problem.kernel, problem.itemsize, self.blocks(problem, config)
        new = min(problem.stride[0], r)
        rows = config.rows * new + r - new
        pairs = problem.op == "max" and size == 2 and config.channels % 2 == 0
        values = config.channels // 2 if pairs else config.channels
        combined = values * (LARGER if pairs else COMBINE)
        issued = rows * s * (LOAD + combined) + config.rows * (r * combined + OUTPUT)
        alone = config.rows * ROW + issued
        registers = 30 + r * values + new * s * ceil_div(config.channels * size, 4) + s
        held, share = blocks_of(min(255, registers), THREADS), blocks / device.multiprocessors
        cycles = max(share * THREADS / 128 * issued, max(1.0, share / held) * alone)
        memory = prod(problem.x_shape) + prod(problem.y_shape)
        us = joint_us(cycles / CYCLES_US, memory * size / (device.gbps * 1e3 * BYTES_SHARE), 3.0)
        return us + START_US

    def blocks(self, problem: PoolProblem, config: Config) -> int:
        (p, q), vectors = problem.output, problem.c // config.channels
        return ceil_div(problem.n * vectors * q * ceil_div(p, config.rows), THREADS)

    def plan(self, problem: PoolProblem, config: Config, device: Device) -> Plan:
        return PoolPlan(problem, device, self.launches(problem, config, device))

    def source(self, problem: PoolProblem, config: Config) -> Source:
        words: dict[str, int | bool | str] = {
            "V": config.channels, "LARGEST": problem.op == "max",
            "COUNT_PADDING": problem.count_include_pad, "R": problem.kernel[0], "S": problem.kernel[1],
            "SH": problem.stride[0], "THREADS": THREADS,
        }  # fmt: skip
        declarations = traits(tensor_core_type(problem.dtype), words)
        file = "ops/pool/separable_window.cu"
        return stub(file, "pool_separable", "Traits", "SeparablePooling", THREADS, declarations=declarations)

    def launches(self, problem: PoolProblem, config: Config, device: Device) -> list[Launch]:
        (height, width), (p, q), ((top, bottom), (left, right)) = problem.spatial, problem.output, problem.padding
        fields = {
            "n": problem.n, "c": problem.c, "height": height, "width": width, "p": p, "q": q,
            "stride_w": problem.stride[1], "pad_h": top, "pad_w": left, "end_h": height + bottom,
            "end_w": width + right, "divisor": problem.divisor or 0, "rows": config.rows,
            "pieces": ceil_div(p, config.rows),
        }  # fmt: skip
        grid = self.blocks(problem, config), 1, 1
        return [Launch(self.source(problem, config), fields, grid, THREADS, dependent=True, balance=2)]
