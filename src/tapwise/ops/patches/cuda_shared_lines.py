"""cuda.shared_lines of im2col: lines of the image lie in shared memory as each tap of a line sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.cuda.types import INDEX_LIMIT, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.patches.cuda import LONG, MOST_TAPS, STREAM_BYTES, fields
from tapwise.ops.patches.problem import PatchProblem

# Elements that stores of other kernels take at once, where lines of windows are a multiple of them.
STORED: Final = 4
# Windows of a block, and lines at least; bytes of its shared memory; threads of a multiprocessor that registers have
# room for.
WINDOWS: Final = 2048
LEAST_LINES: Final = 3
MOST_SHARED: Final = 96 << 10
RESIDENT: Final = 1536
THREADS: Final = 256
# Of the cost model (H200): parts of the bandwidth; what bringing as many lines of the image as all taps see would take
# of that time; microseconds of the first blocks.
REACHED, BROUGHT, START = 0.85, 0.2, 2.5


@dataclass(frozen=True)
class Config(BaseConfig):
    """threads of a block, and lines of windows."""

    threads: int
    lines: int


class Im2colSharedLines(CudaAlgorithm[Config]):
    """One or two axes, 16-bit elements, where lines of windows are no multiple of 4; channels of 512 windows and more,
    of which shared memory has some lines."""

    operator: ClassVar[str] = "im2col"
    id: ClassVar[str] = "cuda.shared_lines"
    summary: ClassVar[str] = "lines in shared memory as each tap sees them, written by whole lines of the cache"

    def rejects(self, problem: PatchProblem, device: Device) -> str | None:
        p = problem.canonical(3)
        if p.itemsize != 2:
            return "takes f16, bf16"
        if p.output[0] * p.kernel[0] * p.spatial[0] != 1:
            return "takes one or two axes"
        if p.output[2] % STORED == 0 or prod(p.output) < LONG:
            return f"takes lines of windows that are no multiple of {STORED}, {LONG} windows of a channel and more"
        if (
            prod(p.spatial) * 2 >= INDEX_LIMIT
            or max(p.ends) * 2 >= INDEX_LIMIT
            or p.n * p.c * p.output[1] >= INDEX_LIMIT
        ):
            return "counts in 32 bits"
        if max(p.kernel[2], p.stride[2]) > MOST_TAPS:
            return f"takes kernels and strides of up to {MOST_TAPS} along a line"
        if _shared_bytes(p, 1) > (most := min(MOST_SHARED, device.shared_bytes)):
            return f"takes lines whose taps fit into {most} bytes of shared memory"
        return None

    def configs(self, problem: PatchProblem, device: Device) -> Sequence[Config]:
        """As many lines as have about so many windows, a few at least, and fit, in about equal shares."""
        p = problem.canonical(3)
        high, wide = p.output[1:]
        lines = min(high, max(LEAST_LINES, WINDOWS // wide))
        while _shared_bytes(p, lines) > min(MOST_SHARED, device.shared_bytes):
            lines -= 1
        return [Config(THREADS, ceil_div(high, ceil_div(high, lines)))]

    def predict_us(self, problem: PatchProblem, config: Config, device: Device) -> float:
        """The bytes over a part of the bandwidth, and more where a block brings many lines for few windows."""
        p = problem.canonical(3)
        again = _rows(p, config.lines) / (config.lines * p.kernel[1])
        return problem.bytes * (1 + BROUGHT * again) / (device.gbps * 1e3 * REACHED) + START

    def plan(self, problem: PatchProblem, config: Config, device: Device) -> Plan:
        return CudaPlan(problem, device, [self.launch(problem, config, device)])

    def launch(self, problem: PatchProblem, config: Config, device: Device) -> Launch:
        p = problem.canonical(3)
        grid = (p.n * p.c * ceil_div(p.output[1], config.lines), 1, 1)
        memory = _shared_bytes(p, config.lines)
        return Launch(self.source(p, config), fields(p), grid, config.threads, memory, dependent=True)

    def source(self, problem: PatchProblem, config: Config) -> Source:
        p = problem.canonical(3)
        stream = prod(p.columns_shape) * p.itemsize > STREAM_BYTES
        sizes = p.output[2], *p.kernel[1:], *p.stride[1:], *p.dilation[1:]
        words = template_args(tensor_core_type(p.dtype), config.threads, config.lines, *sizes, stream)
        blocks = RESIDENT // config.threads
        return stub(
            "ops/patches/im2col_shared_lines.cu", "im2col_shared_lines", words, "Patches", config.threads, blocks
        )


def _rows(p: PatchProblem, lines: int) -> int:
    """Lines of the image that lines of windows see, a multiple of the stride."""
    rows = (lines - 1) * p.stride[1] + (p.kernel[1] - 1) * p.dilation[1] + 1
    return ceil_div(rows, p.stride[1]) * p.stride[1]


def _shared_bytes(p: PatchProblem, lines: int) -> int:
    """What each tap of a line sees of a block's lines, and a word that is read behind it."""
    return p.kernel[2] * 2 * ceil_div(_rows(p, lines) * p.output[2], 2) * p.itemsize + 4
