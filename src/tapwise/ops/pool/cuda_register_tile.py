"""cuda.register_tile of pooling: NCHW, a thread has neighbouring outputs of a row and goes down some rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import INDEX_LIMIT, reciprocal, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda.costs import blocks_of, joint_us
from tapwise.ops.pool.cuda import PoolPlan
from tapwise.ops.pool.problem import PoolProblem

# Rows and columns of a window at most, and strides: all are unrolled. Registers of a thread's rows; words that a strip
# sees of a row.
MOST_TAPS, MOST_STRIDE, MOST_VALUES, MOST_WORDS = 15, 8, 64, 40
# Bytes of x of a block in shared memory to choose from; how much of the image rows of x shared by two bands may be.
BLOCK_BYTES: Final = (24 << 10, 12 << 10, 48 << 10, 6 << 10)
# Threads of a block to choose from, and strips for each of them.
THREADS: Final = (256, 128)
# Into how many pieces the rows of a band go.
PIECES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PIECE: Final = 16
# The first 16 bits of -infinity.
INFINITE: Final = {"f16": 0xFC00, "bf16": 0xFF80, "f32": 0xFF80, "f64": 0xFFF0}
CYCLES_US: Final = 1700.0


@dataclass(frozen=True)
class Config(BaseConfig):
    """A thread has `outputs` side by side in up to `rows` rows of y; a block has `planes`, or a `band` of output rows of
    one. `staged`: y goes by way of shared memory."""

    outputs: int
    rows: int
    planes: int
    band: int
    threads: int = 256
    staged: bool = False


class PoolRegisterTile(CudaAlgorithm[Config]):
    """NCHW, windows of up to 15 x 15 without dilation, strides of up to 8, positions too; fewer than 2^30 elements;
    float32, float64, float16 and bfloat16 (means in float32)."""

    operator: ClassVar[str] = "pool"
    id: ClassVar[str] = "cuda.register_tile"
    summary: ClassVar[str] = "neighbouring outputs of a row, down some rows in registers"
    axes: ClassVar[tuple[int, ...]] = (2,)
    layouts: ClassVar[tuple[str, ...]] = ("nchw",)

    def rejects(self, problem: PoolProblem, device: Device) -> str | None:
        if max(problem.kernel) > MOST_TAPS or max(problem.stride) > MOST_STRIDE or max(problem.dilation) > 1:
            most = f"{MOST_TAPS} x {MOST_TAPS}"
            return f"takes windows of up to {most} without dilation, strides of up to {MOST_STRIDE}"
        if problem.kernel == problem.spatial and not problem.indices and not any(map(any, problem.padding)):
            return "takes no window that is the whole image, which is a reduction"
        sizes = (prod(problem.x_shape), prod(problem.y_shape), *problem.spatial, *problem.ends)
        if max(sizes) >= INDEX_LIMIT // 2:
            return "takes fewer than 2^30 elements"
        return None if any(self._configs(problem, device)) else "has no room for a window's rows in shared memory"

    def configs(self, problem: PoolProblem, device: Device) -> Sequence[Config]:
        return list(dict.fromkeys(self._configs(problem, device)))

    def _configs(self, problem: PoolProblem, device: Device) -> Iterator[Config]:
        (height, width), (p, q), size = problem.spatial, problem.output, problem.itemsize
        row = width * size
        for room in BLOCK_BYTES:
            if height * row <= room:
                band, planes = p, min(problem.n * problem.c, room // max(1, height * row))
            else:
                most = max(1, (room // row - problem.kernel[0]) // problem.stride[0] + 1)
                band, planes = ceil_div(p, ceil_div(p, most)), 1
            for outputs in self._outputs(problem):
                for threads in THREADS:
                    kept = 0
                    for pieces in PIECES:
                        items = planes * min(band, pieces) * ceil_div(q, outputs)
                        if pieces > band or kept == 3 or (items < threads and pieces < PIECES[-1] and band > 2 * pieces):
                            continue
                        kept += 1
                        store = self._store_bytes(problem, outputs)
                        direct = store >= 4 or store == outputs * size
                        for staged in (False, True) if direct else (True,):
                            config = Config(outputs, ceil_div(band, pieces), planes, band, threads, staged)
                            if sum(self._rooms(problem, config)) <= device.shared_bytes:
                                yield config

    @staticmethod
    def _outputs(problem: PoolProblem) -> list[int]:
        """Of a thread, side by side."""
        if problem.indices:
            return [2, 1]
        paired = problem.op == "max" and problem.itemsize == 2
        found = []
        for outputs in (16 // problem.itemsize, 8 // problem.itemsize, 4 // problem.itemsize):
            registers = outputs if paired or problem.itemsize < 8 else outputs * 2
            words = ((outputs - 1) * problem.stride[1] + problem.kernel[1]) * problem.itemsize // 4
            if outputs and registers * problem.kernel[0] // (2 if paired else 1) <= MOST_VALUES and words <= MOST_WORDS:
                found.append(outputs)
        return found or [2 if paired else 1]

    @staticmethod
    def _load_bytes(problem: PoolProblem, outputs: int) -> int:
        """What the bytes of a row and of a strip are multiples of."""
        return gcd(problem.spatial[1] * problem.itemsize, outputs * problem.stride[1] * problem.itemsize, PIECE)

    @staticmethod
    def _store_bytes(problem: PoolProblem, outputs: int) -> int:
        return gcd(problem.output[1] * problem.itemsize, outputs * problem.itemsize, PIECE)

    def _lead(self, problem: PoolProblem, outputs: int) -> int:
        """Elements that a strip's first vector has in front of its first window."""
        before = problem.padding[1][0]
        return round_up(before, self._load_bytes(problem, outputs) // problem.itemsize) - before

    def _rooms(self, problem: PoolProblem, config: Config) -> tuple[int, int, int]:
        """Bytes of shared memory in front of x, of x and what strips see behind it, and of y."""
        (height, width), (p, q), size = problem.spatial, problem.output, problem.itemsize
        front = round_up((problem.padding[1][0] + self._lead(problem, config.outputs)) * size, PIECE)
        rows = height if config.band == p else min(height, (config.band - 1) * problem.stride[0] + problem.kernel[0])
        columns = ceil_div(q, config.outputs) * config.outputs
        seen = (columns - 1) * problem.stride[1] + problem.kernel[1]
        behind = max(0, seen - problem.padding[1][0] - width) * size + 2 * PIECE
        x = round_up(config.planes * rows * width * size + behind, PIECE)
        y = config.planes * config.band * q * size + PIECE if config.staged else 0
        return front, x, y

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        """What a multiprocessor's warps issue, or its waves of blocks, each with a thread's chain of rows; memory, rows
        that two bands read included."""
        (r, s), (p, q), size, outputs = problem.kernel, problem.output, problem.itemsize, config.outputs
        strips, pieces, blocks = ceil_div(q, outputs), ceil_div(config.band, config.rows), self.blocks(problem, config)
        room = sum(self._rooms(problem, config))
        new = min(problem.stride[0], r)
        rows = config.rows * new + r - new
        seen = (outputs - 1) * problem.stride[1] + s
        loads = ceil_div(seen * size, max(4, self._load_bytes(problem, outputs))) + 1
        each = 0.5 if problem.op == "max" and size == 2 and not problem.indices else 1.0
        taps = outputs * each * (4.0 if problem.indices else 1.5)
        issued = rows * (loads * 3 + seen * size / 4 + taps * s) + config.rows * (taps * r + outputs * 3 + 25) + 120
        items = config.planes * pieces * strips
        staging = config.planes * config.band * q * size / PIECE * 10 if config.staged else 0
        copied = room / PIECE * 10
        block = (ceil_div(items, config.threads) * config.threads * issued + staging + copied) / 128
        share, held = blocks / device.multiprocessors, blocks_of(64, config.threads, room)
        cycles = max(share * block, max(1.0, share / held) * (1500 + 2 * block))
        again = max(1.0, room * blocks / max(1, prod(problem.x_shape) * size)) if config.band < p else 1.0
        memory = prod(problem.x_shape) * again + prod(problem.y_shape) * (1 + 8 / size * problem.indices)
        return joint_us(cycles / CYCLES_US, memory * size / (device.gbps * 1e3), 3.0) + 2.0

    def blocks(self, problem: PoolProblem, config: Config) -> int:
        return ceil_div(problem.n * problem.c, config.planes) * ceil_div(problem.output[0], config.band)

    def plan(self, problem: PoolProblem, config: Config, device: Device) -> Plan:
        return PoolPlan(problem, device, self.launches(problem, config, device))

    def source(self, problem: PoolProblem, config: Config) -> Source:
        outputs, (r, s) = config.outputs, problem.kernel
        seen = (problem.output[1] - 1) * problem.stride[1] + s - problem.padding[1][0]
        words: dict[str, int | bool | str] = {
            "LARGEST": problem.op == "max", "PLACES": problem.indices, "COUNTED": self._counted(problem),
            "COUNT_PADDING": problem.count_include_pad,
            "MASKED": problem.padding[1][0] > 0 or seen > problem.spatial[1], "R": r, "S": s,
            "SH": problem.stride[0], "SW": problem.stride[1], "V": outputs,
            "ALIGN": self._load_bytes(problem, outputs), "LEAD": self._lead(problem, outputs),
            "OUT": self._store_bytes(problem, outputs), "STAGED": config.staged,
            "INFINITE": INFINITE[problem.dtype], "THREADS": config.threads,
        }  # fmt: skip
        declarations = traits(tensor_core_type(problem.dtype), words)
        file = "ops/pool/register_tile.cu"
        return stub(
            file, "pool_register_tile", "Traits", "RegisterTilePooling", config.threads, declarations=declarations
        )

    @staticmethod
    def _counted(problem: PoolProblem) -> bool:
        """Whether means differ in what they are divided by."""
        if problem.op == "max" or problem.divisor is not None:
            return False
        return any(problem.whole(axis) != (0, count) for axis, count in enumerate(problem.output))

    def launches(self, problem: PoolProblem, config: Config, device: Device) -> list[Launch]:
        (height, width), (p, q), ((top, bottom), (left, right)) = problem.spatial, problem.output, problem.padding
        strips, pieces = ceil_div(q, config.outputs), ceil_div(config.band, config.rows)
        front, x, y = self._rooms(problem, config)
        fields = {
            "all_planes": problem.n * problem.c, "height": height, "width": width, "p": p, "q": q, "pad_h": top,
            "pad_w": left, "end_h": height + bottom, "end_w": width + right,
            "divisor": problem.divisor or prod(problem.kernel), "strips": strips, "rows": config.rows,
            "pieces": pieces, "planes": config.planes, "band": config.band, "bands": ceil_div(p, config.band),
            "per_strips": reciprocal(strips), "per_pieces": reciprocal(pieces), "front": front, "staged_at": front + x,
        }  # fmt: skip
        grid = self.blocks(problem, config), 1, 1
        source = self.source(problem, config)
        return [Launch(source, fields, grid, config.threads, front + x + y, dependent=True)]
