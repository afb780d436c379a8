"""cuda.separable_window of pooling: what a row of a window gives is worked out once for all outputs of a column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from tapwise.ops.pool.cuda import PoolPlan
from tapwise.ops.pool.problem import PoolProblem

# Rows and columns of a window at most, and strides down: all are unrolled. Values of a thread's window.
MOST_TAPS, MOST_STRIDE, MOST_VALUES = 15, 8, 64
THREADS: Final = 256
# Bytes of x of a block in shared memory to choose from, NCHW.
BLOCK_BYTES: Final = (24 << 10, 12 << 10, 48 << 10)
PIECE: Final = 16
# Roughly as measured on an H200: microseconds of a launch, the share of the bandwidth; cycles of a multiprocessor for a
# warp's element that is combined, for its load, and for an output.
START_US, BYTES_SHARE = 2.0, 0.85
COMBINE, LOAD, OUTPUT = 0.75, 1.0, 6.0


@dataclass(frozen=True)
class Config(BaseConfig):
    """A thread has `channels` side by side of up to `rows` outputs of a column; NCHW: a block has `planes`, or a `band`
    of output rows of one."""

    channels: int
    rows: int
    planes: int = 1
    band: int = 0


class PoolSeparableWindow(CudaAlgorithm[Config]):
    """Windows of up to 15 x 15 without dilation, strides down of up to 8, no positions; both memory orders, fewer than
    2^31 elements; float32, float64, float16 and bfloat16 (means in float32)."""

    operator: ClassVar[str] = "pool"
    id: ClassVar[str] = "cuda.separable_window"
    summary: ClassVar[str] = "rows of windows first, which go down a thread's registers"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: PoolProblem, device: Device) -> str | None:
        if problem.indices:
            return "gives no positions"
        if max(problem.kernel) > MOST_TAPS or problem.stride[0] > MOST_STRIDE or max(problem.dilation) > 1:
            most = f"{MOST_TAPS} x {MOST_TAPS}"
            return f"takes windows of up to {most} without dilation, strides down of up to {MOST_STRIDE}"
        sizes = (prod(problem.x_shape), prod(problem.y_shape), *problem.spatial, *problem.ends)
        if max(sizes) >= INDEX_LIMIT // 2:
            return "takes fewer than 2^30 elements"
        return None if any(self._configs(problem, device)) else "has no room for a window's rows in shared memory"

    def configs(self, problem: PoolProblem, device: Device) -> Sequence[Config]:
        return list(dict.fromkeys(self._configs(problem, device)))

    def _configs(self, problem: PoolProblem, device: Device) -> Iterator[Config]:
        p, (r, _) = problem.output[0], problem.kernel
        if problem.layout == "nhwc":
            widths = (16 // problem.itemsize, 8 // problem.itemsize, 4 // problem.itemsize, 1)
            for channels in (width for width in dict.fromkeys(widths) if width and problem.c % width == 0):
                if channels == 1 or r * channels <= MOST_VALUES:
                    yield from (Config(channels, ceil_div(p, pieces)) for pieces in (1, 2, 4, 8, 16, p) if pieces <= p)
            return
        (height, width), most = problem.spatial, device.shared_bytes - PIECE
        row = width * problem.itemsize
        for room in BLOCK_BYTES:
            if height * row <= room:
                band, planes = p, min(problem.n * problem.c, room // max(1, height * row))
            else:
                band, planes = min(p, max(1, (room // row - r) // problem.stride[0] + 1)), 1
            if self._block_bytes(problem, planes, band) > most:
                continue
            for pieces in (1, 2, 4, 8):
                if pieces <= band:
                    yield Config(1, ceil_div(band, pieces), planes, band)

    @staticmethod
    def _block_bytes(problem: PoolProblem, planes: int, band: int) -> int:
        """Of x, and what lies in front of its first piece."""
        height, width = problem.spatial
        rows = height if planes > 1 else min(height, (band - 1) * problem.stride[0] + problem.kernel[0])
        return planes * rows * width * problem.itemsize + PIECE

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        """Memory, windows' rows that two bands or two pieces of a column read included; what warps issue, where few
        threads leave multiprocessors idle."""
        (r, s), step, (p, q) = problem.kernel, problem.stride[0], problem.output
        pieces = ceil_div(p, config.rows)
        rows = (p + pieces * max(0, r - step) / step) * min(step, r)
        columns = problem.n * problem.c * q
        warps = columns * (rows * s * (LOAD / config.channels + COMBINE) + p * (r * COMBINE + OUTPUT / config.channels))
        threads = columns // config.channels * pieces
        busy = min(1.0, threads / (device.multiprocessors * 512))
        issued = warps / 32 / (device.multiprocessors * device.gflops / 256 * 1e3) / max(busy, 1e-3)
        again = 1.0
        if config.band:
            again = self._block_bytes(problem, config.planes, config.band) * self.blocks(problem, config)
            again = max(1.0, again / max(1, prod(problem.x_shape) * problem.itemsize))
        memory = problem.bytes * (again if config.band < p else 1.0) / (device.gbps * 1e3 * BYTES_SHARE)
        return float(max(issued, memory / max(0.05, min(1.0, 2 * busy)))) + START_US

    def blocks(self, problem: PoolProblem, config: Config) -> int:
        p, q = problem.output
        if problem.layout == "nhwc":
            return ceil_div(problem.n * (problem.c // config.channels) * q * ceil_div(p, config.rows), THREADS)
        return ceil_div(problem.n * problem.c, config.planes) * ceil_div(p, config.band)

    def plan(self, problem: PoolProblem, config: Config, device: Device) -> Plan:
        return PoolPlan(problem, device, self.launches(problem, config, device))

    def source(self, problem: PoolProblem, config: Config) -> Source:
        words: dict[str, int | bool | str] = {
            "LAST": problem.layout == "nhwc", "V": config.channels, "LARGEST": problem.op == "max",
            "COUNT_PADDING": problem.count_include_pad, "R": problem.kernel[0], "S": problem.kernel[1],
            "SH": problem.stride[0], "THREADS": THREADS,
        }  # fmt: skip
        declarations = traits(tensor_core_type(problem.dtype), words)
        file = "ops/pool/separable_window.cu"
        return stub(file, "pool_separable", "Traits", "SeparablePooling", THREADS, declarations=declarations)

    def launches(self, problem: PoolProblem, config: Config, device: Device) -> list[Launch]:
        (height, width), (p, q), ((top, bottom), (left, right)) = problem.spatial, problem.output, problem.padding
        last = problem.layout == "nhwc"
        band = p if last else config.band
        fields = {
            "n": problem.n, "c": problem.c, "height": height, "width": width, "p": p, "q": q,
            "stride_w": problem.stride[1], "pad_h": top, "pad_w": left, "end_h": height + bottom,
            "end_w": width + right, "divisor": problem.divisor or 0, "rows": config.rows,
            "pieces": ceil_div(band, config.rows), "planes": config.planes, "band": band, "bands": ceil_div(p, band),
        }  # fmt: skip
        room = 0 if last else self._block_bytes(problem, config.planes, config.band)
        grid = self.blocks(problem, config), 1, 1
        return [Launch(self.source(problem, config), fields, grid, THREADS, room, dependent=True)]
