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
from tapwise.ops.conv.cuda.costs import blocks_of, joint_us
from tapwise.ops.pool.cuda import PoolPlan
from tapwise.ops.pool.problem import PoolProblem

# Rows and columns of a window at most, and strides down: all are unrolled. Values of a thread's window.
MOST_TAPS, MOST_STRIDE, MOST_VALUES = 15, 8, 64
# Of a block; rows of y of a thread at most, NCHW, and to choose from, channels last, also of windows of many rows: with
# more, threads beside each other read other pages of memory, and there are fewer.
THREADS: Final = 256
MOST_ROWS, ROWS_LAST = 20, (1, 2, 3, 5, 8)
LARGE, LARGE_ROWS = 6, (16, 32)
# Bytes of x of a block in shared memory to choose from, NCHW.
BLOCK_BYTES: Final = (24 << 10, 12 << 10, 48 << 10)
PIECE: Final = 16
# Cycles of a microsecond under load.
CYCLES_US: Final = 1700.0


@dataclass(frozen=True)
class Costs:
    """Cycles of a warp for a load, an element that is combined, and an output; of a block's begin, and that a thread
    waits for each output; the share of the bandwidth, microseconds of a launch."""

    load: float
    combine: float
    output: float
    begin: float
    row: float
    bytes_share: float
    start_us: float


# Fitted to 445 times on 39 layers (H200), N=32, NCHW and channels last: the choice takes 1.06 and 1.08 of the best.
COSTS: Final = {
    "nchw": Costs(3.8, 5.8, 38.0, 404.0, 175.0, 1.33, 4.3), "nhwc": Costs(16.4, 6.6, 5.4, 2525.0, 323.0, 1.29, 1.3),
}  # fmt: skip


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
    2^30 elements; float32, float64, float16 and bfloat16 (means in float32)."""

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
        if problem.kernel == problem.spatial and not any(map(any, problem.padding)):
            return "takes no window that is the whole image, which is a reduction"
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
                    many = LARGE_ROWS if r >= LARGE else ()
                    rows = sorted({min(p, one) for one in (*ROWS_LAST, *many)})
                    yield from (Config(channels, one) for one in rows)
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
            for pieces in (1, 2, 4, 8, ceil_div(band, MOST_ROWS)):
                if pieces <= band and ceil_div(band, pieces) <= MOST_ROWS:
                    yield Config(1, ceil_div(band, pieces), planes, band)

    @staticmethod
    def _block_bytes(problem: PoolProblem, planes: int, band: int) -> int:
        """Of x, and what lies in front of its first piece."""
        height, width = problem.spatial
        rows = height if planes > 1 else min(height, (band - 1) * problem.stride[0] + problem.kernel[0])
        return planes * rows * width * problem.itemsize + PIECE

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        """What a multiprocessor's warps issue, or its waves of blocks, each with a thread's chain of rows; memory, rows
        that two bands read included."""
        costs, (r, s), (p, q), size = COSTS[problem.layout], problem.kernel, problem.output, problem.itemsize
        new, blocks, items, room, again = min(problem.stride[0], r), self.blocks(problem, config), 1.0, 0, 1.0
        if config.band:
            items = config.planes * ceil_div(config.band, config.rows) * q / THREADS
            room = self._block_bytes(problem, config.planes, config.band)
            again = max(1.0, room * blocks / max(1, prod(problem.x_shape) * size)) if config.band < p else 1.0
        rows = config.rows * new + r - new
        issued = rows * s * (costs.load + config.channels * costs.combine)
        issued += config.rows * (r * config.channels * costs.combine + costs.output)
        alone = costs.begin + ceil_div(int(items * THREADS), THREADS) * (config.rows * costs.row + issued)
        registers = 30 + r * config.channels + new * s * ceil_div(config.channels * size, 4) + s
        held, share = blocks_of(min(255, registers), THREADS, room), blocks / device.multiprocessors
        cycles = max(share * THREADS / 128 * issued * items, max(1.0, share / held) * alone)
        memory = prod(problem.x_shape) * again + prod(problem.y_shape)
        us = joint_us(cycles / CYCLES_US, memory * size / (device.gbps * 1e3 * costs.bytes_share), 3.0)
        return us + costs.start_us

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
