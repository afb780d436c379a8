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
# Bytes of x of a block in shared memory to choose from: with more, too few blocks take turns between memory and lanes.
# Where they hold fewer than LEAST_ROWS rows of x, the others: bands share rows.
BLOCK_BYTES, WIDE_BYTES, LEAST_ROWS = (12 << 10, 6 << 10, 3 << 10), (12 << 10, 24 << 10, 48 << 10), 8
THREADS: Final = 128
# Into how many pieces the rows of a band may go, and how many of them to choose from: the first that give each thread
# an item.
PIECES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PIECES_TRIED: Final = 3
PIECE, LINE = 16, 128
# The first 16 bits of -infinity.
INFINITE: Final = {"f16": 0xFC00, "bf16": 0xFF80, "f32": 0xFF80, "f64": 0xFFF0}
# Cycles of a microsecond under load. Fitted to 3200 times on 133 layers (H100), N=1 to 32: cycles of a warp's
# instruction, of a block's begin and that a thread waits for each row; the part of rows that two bands read which
# comes from memory; microseconds of a launch; how much of a wave of blocks the last one adds. The choice takes 1.09 of
# the best.
CYCLES_US, ISSUE, BEGIN, ROW, AGAIN, START_US, TAIL = 1700.0, 1.1 / 4, 2000.0, 25.0, 0.16, 0.8, 0.3


@dataclass(frozen=True)
class Config(BaseConfig):
    """A thread has `outputs` side by side in up to `rows` rows of y; a block has `planes`, or a `band` of rows of y of
    one."""

    outputs: int
    rows: int
    planes: int
    band: int


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
        for room in BLOCK_BYTES if row * LEAST_ROWS <= BLOCK_BYTES[0] else WIDE_BYTES:
            if height * row <= room:
                band, planes = p, min(problem.n * problem.c, room // max(1, height * row))
            else:
                most = max(1, (room // row - problem.kernel[0]) // problem.stride[0] + 1)
                band, planes = ceil_div(p, ceil_div(p, most)), 1
            for outputs in self._outputs(problem):
                strips = planes * ceil_div(q, outputs)
                enough = (one for one in PIECES if one <= band and (one * strips >= THREADS or 2 * one > band))
                for pieces in tuple(enough)[:PIECES_TRIED] or (PIECES[-1],):
                    config = Config(outputs, ceil_div(band, pieces), planes, band)
                    if sum(self._rooms(problem, config)) <= device.shared_bytes:
                        yield config

    @staticmethod
    def _paired(problem: PoolProblem) -> bool:
        """Whether two outputs are in a register."""
        return problem.op == "max" and problem.itemsize == 2 and not problem.indices

    def _outputs(self, problem: PoolProblem) -> list[int]:
        """Of a thread, side by side."""
        if problem.indices:
            return [2, 1] if 2 * problem.kernel[0] * (problem.itemsize // 4 + 1) <= MOST_VALUES else [1]
        paired, found = self._paired(problem), []
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

    def _staged(self, problem: PoolProblem, outputs: int) -> bool:
        """Whether y goes by way of shared memory: where a strip is not written at once."""
        return self._store_bytes(problem, outputs) < outputs * problem.itemsize

    def _masked(self, problem: PoolProblem) -> bool:
        """Whether windows see columns outside of the image."""
        before = problem.padding[1][0]
        seen = (problem.output[1] - 1) * problem.stride[1] + problem.kernel[1] - before
        return before > 0 or seen > problem.spatial[1]

    def _lead(self, problem: PoolProblem, outputs: int) -> int:
        """Elements that a strip's first vector has in front of its first window."""
        before = problem.padding[1][0]
        return round_up(before, self._load_bytes(problem, outputs) // problem.itemsize) - before

    def _rooms(self, problem: PoolProblem, config: Config) -> tuple[int, int, int]:
        """Bytes of shared memory in front of x, of x and what strips see behind it, and of y.

        Lines of memory lie as lines of shared memory: copies take longer where they do not."""
        (height, width), (p, q), size = problem.spatial, problem.output, problem.itemsize
        front = round_up((problem.padding[1][0] + self._lead(problem, config.outputs)) * size, LINE)
        rows = height if config.band == p else min(height, (config.band - 1) * problem.stride[0] + problem.kernel[0])
        columns = ceil_div(q, config.outputs) * config.outputs
        seen = (columns - 1) * problem.stride[1] + problem.kernel[1]
        behind = max(0, seen - problem.padding[1][0] - width) * size + PIECE
        x = LINE + round_up(config.planes * rows * width * size + behind, LINE)
        y = config.planes * config.band * q * size + LINE if self._staged(problem, config.outputs) else 0
        return front, x, y

    def predict_us(self, problem: PoolProblem, config: Config, device: Device) -> float:
        """What a multiprocessor's warps issue, or its waves of blocks, each with a thread's chain of rows; memory, rows
        that two bands read included; and of what runs at once a part that nothing runs beside in the end."""
        (r, s), (p, q), size, outputs = problem.kernel, problem.output, problem.itemsize, config.outputs
        new, indices, room = min(problem.stride[0], r), problem.indices, sum(self._rooms(problem, config))
        each = 2 if self._paired(problem) else 1
        lead, align = self._lead(problem, outputs), self._load_bytes(problem, outputs)
        seen = (outputs - 1) * problem.stride[1] + s
        words, masked, odd = ceil_div((lead + seen) * size, 4), self._masked(problem), align < 4
        taps, stores = outputs // each * (4 if indices else 1), outputs * size / self._store_bytes(problem, outputs)
        of_row = ceil_div((lead + seen) * size, max(4, align)) + odd + words * (1 + masked + odd) + s * taps + 4
        of_row += seen if size == 2 and each == 1 else 0
        of_output = r * taps + (r - new) * outputs // each + outputs * (1 + 3 * indices) + 2 * stores + 9
        of_output += outputs * (1 if size == 2 else 6) if problem.op == "avg" else 0
        issued = (config.rows * new + r - new) * of_row + config.rows * of_output
        items = config.planes * ceil_div(config.band, config.rows) * ceil_div(q, outputs)
        registers = 30 + words * (1 + masked) + r * taps // (2 if indices else 1) + outputs * (problem.op == "avg")
        blocks, held = self.blocks(problem, config), blocks_of(min(255, registers), THREADS, room)
        share, block = blocks / device.multiprocessors, items / 32 * ISSUE * issued
        alone = BEGIN + ceil_div(items, THREADS) * (config.rows * ROW + 2 * issued)
        cycles = joint_us(share * block, max(1.0, share / held) * alone, 2.0) / CYCLES_US
        x, y = prod(problem.x_shape), prod(problem.y_shape)
        again = AGAIN * (blocks * room / size / x - 1) if config.band < p else 0.0
        memory = (x * (1 + max(0.0, again)) + y * (1 + 8 / size * indices)) * size / (device.gbps * 1e3)
        return joint_us(cycles, memory, 2.3) + START_US + TAIL * min(share, held) * block / CYCLES_US

    def blocks(self, problem: PoolProblem, config: Config) -> int:
        return ceil_div(problem.n * problem.c, config.planes) * ceil_div(problem.output[0], config.band)

    def plan(self, problem: PoolProblem, config: Config, device: Device) -> Plan:
        return PoolPlan(problem, device, self.launches(problem, config, device))

    def source(self, problem: PoolProblem, config: Config) -> Source:
        outputs, (r, s) = config.outputs, problem.kernel
        words: dict[str, int | bool | str] = {
            "LARGEST": problem.op == "max", "PLACES": problem.indices, "COUNTED": self._counted(problem),
            "COUNT_PADDING": problem.count_include_pad,
            "MASKED": self._masked(problem), "R": r, "S": s, "SH": problem.stride[0], "SW": problem.stride[1],
            "V": outputs,
            "ALIGN": self._load_bytes(problem, outputs), "LEAD": self._lead(problem, outputs),
            "OUT": self._store_bytes(problem, outputs), "STAGED": self._staged(problem, outputs),
            "INFINITE": INFINITE[problem.dtype], "THREADS": THREADS,
        }  # fmt: skip
        declarations = traits(tensor_core_type(problem.dtype), words)
        file = "ops/pool/register_tile.cu"
        return stub(file, "pool_register_tile", "Traits", "RegisterTilePooling", THREADS, declarations=declarations)

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
        return [Launch(source, fields, grid, THREADS, front + x + y, dependent=True, balance=2)]
