"""cuda.sliding_window of pooling: one thread an output, or neighbouring channels of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final

from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan, stream
from tapwise.cuda.types import coordinates, counter, neighbours, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.pool.problem import PoolProblem

# Kernels of up to so many taps are unrolled.
MOST_TAPS: Final = 25
BLOCKS_EACH: Final = 64
# Microseconds of a tap of a kernel that is not unrolled, of so many threads on each multiprocessor at once (H200).
TAP_US, AT_ONCE = 0.2, 1024


@dataclass(frozen=True)
class Config(BaseConfig):
    """threads of a block; neighbouring channels that a thread computes, each tap with one load."""

    threads: int
    channels: int


class PoolPlan(CudaPlan):
    """y is an array, or a pair of values and positions."""

    def run(self, buffers: Buffers) -> None:
        values, places = buffers.y if self.problem.indices else (buffers.y, None)
        addresses = {"x": buffers.x.ptr, "y": values.ptr} | ({} if places is None else {"places": places.ptr})
        self.enqueue(addresses, stream(buffers))


class PoolSlidingWindow(CudaAlgorithm[Config]):
    """Any kernel, stride, padding and dilation, 2 spatial axes, both memory orders, any number of elements, positions
    too; float32, float64, float16 and bfloat16 (means in float32)."""

    operator: ClassVar[str] = "pool"
    id: ClassVar[str] = "cuda.sliding_window"
    summary: ClassVar[str] = "one thread an output, or up to 16 bytes of channels"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def configs(self, problem: PoolProblem, device: Device) -> Sequence[Config]:
        widest = neighbours(problem.c, problem.itemsize) if problem.layout == "nhwc" else 1
        return [Config(threads, channels) for channels in dict.fromkeys((widest, 1)) for threads in (256, 128, 64)]

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        """The largest of the bytes at eight tenths of the bandwidth, the taps: four loads a cycle of a multiprocessor,
        and 13 elements, with few blocks of a part of the multiprocessors; and what a thread waits for many taps."""
        gigahertz = device.gflops / 256
        cycles = problem.flops * max(1 / (4 * config.channels), 1 / 13)
        taps = cycles / (min(device.multiprocessors, self.blocks(problem, config)) * gigahertz * 1e3)
        waited = 0.0
        if prod(problem.kernel) > MOST_TAPS:
            threads = prod(problem.y_shape) / config.channels
            waited = prod(problem.kernel) * TAP_US * max(1.0, threads / (device.multiprocessors * AT_ONCE))
        us = max(problem.bytes / (device.gbps * 1e3 * 0.8), taps, waited)
        return us * (1 + (256 - config.threads) / 1e4) + 2.0

    def blocks(self, problem: PoolProblem, config: Config) -> int:
        return ceil_div(prod(problem.y_shape), config.threads * config.channels)

    def plan(self, problem: PoolProblem, config: Config, device: Device) -> Plan:
        return PoolPlan(problem, device, [self.launch(problem, config, device)])

    def source(self, problem: PoolProblem, config: Config) -> Source:
        kernel = problem.kernel if prod(problem.kernel) <= MOST_TAPS else (0, 0)
        words = (
            tensor_core_type(problem.dtype), config.channels, problem.op == "max", problem.indices,
            problem.count_include_pad, problem.layout == "nhwc", *kernel, counter(prod(problem.y_shape)),
        )  # fmt: skip
        header = coordinates(prod(problem.spatial), *problem.ends)
        return stub("ops/pool/pool.cu", "pool", template_args(*words), "Pooling", config.threads, header=header)

    def launch(self, problem: PoolProblem, config: Config, device: Device) -> Launch:
        (height, width), (r, s), (p, q) = problem.spatial, problem.kernel, problem.output
        (top, bottom), (left, right) = problem.padding
        fields = {
            "n": problem.n, "c": problem.c, "height": height, "width": width, "r": r, "s": s, "p": p, "q": q,
            "stride_h": problem.stride[0], "stride_w": problem.stride[1], "pad_h": top, "pad_w": left,
            "dilation_h": problem.dilation[0], "dilation_w": problem.dilation[1],
            "end_h": height + bottom, "end_w": width + right, "divisor": problem.divisor or 0,
        }  # fmt: skip
        blocks = min(self.blocks(problem, config), BLOCKS_EACH * device.multiprocessors)
        return Launch(self.source(problem, config), fields, (blocks, 1, 1), config.threads, dependent=True, balance=2)
