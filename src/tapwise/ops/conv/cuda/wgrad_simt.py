"""cuda.implicit_gemm_simt of wgrad: an implicit GEMM on the FMA units, in IEEE float32 and float64.

gemm_m is the filters of a group, gemm_n its columns: taps and channels as dw's rows lie in memory, one behind the
other. gemm_k is output pixels. Operands are copied asynchronously to shared memory, several steps ahead, in pieces of
up to 16 bytes where neighbours along channels (NHWC) or pixels (NCHW) allow it. Channels last, rows there are pixels;
for NCHW they are filters and columns, and a thread reads four of a row's pixels at once, so nothing is transposed.
Parts of the pixels go to the workspace, and a second launch adds them in a fixed order.

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014; Kerr et al., "CUTLASS: fast linear
algebra in CUDA C++", 2017 (tiles of blocks, warps and threads).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, hypot, prod
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit import occupancy
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import DTYPES, neighbours, template_args
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import costs, wgrad_parts
from tapwise.ops.conv.cuda.costs import SCHEDULERS
from tapwise.ops.conv.cuda.gradients import WgradPlan
from tapwise.ops.conv.cuda.wgrad_parts import padded, pointwise
from tapwise.ops.conv.problem import ConvProblem

KERNEL: Final = "ops/conv/cuda/wgrad_simt.cu"
# (filters, columns) of a block, (filters, columns) of a thread, lanes along filters, pixels a step, slices of them.
Tile = tuple[int, int, int, int, int, int, int]
TILES: Final[tuple[Tile, ...]] = (
    (64, 64, 8, 4, 8, 16, 1), (128, 128, 8, 8, 8, 16, 1), (64, 128, 8, 8, 8, 16, 1), (128, 64, 8, 8, 8, 16, 1),
    (64, 96, 8, 12, 8, 16, 1), (64, 192, 8, 12, 8, 16, 1), (64, 160, 8, 8, 8, 16, 1), (64, 64, 8, 8, 8, 16, 1),
    (64, 32, 4, 4, 8, 16, 1), (128, 32, 8, 8, 8, 16, 2), (32, 32, 4, 4, 8, 32, 2), (32, 64, 8, 8, 4, 32, 4),
    (32, 128, 8, 8, 4, 16, 2), (32, 192, 8, 12, 4, 16, 2), (32, 160, 4, 8, 8, 16, 1),
    (16, 128, 8, 8, 2, 32, 4), (16, 64, 8, 4, 2, 32, 4),
    (8, 64, 8, 4, 1, 32, 8), (8, 128, 8, 4, 1, 32, 4),
    (4, 32, 4, 4, 1, 64, 16), (4, 128, 4, 4, 1, 32, 4),
)  # fmt: skip
# Those of NCHW alone, where columns of a thread are no pieces.
TILES_NCHW: Final[tuple[Tile, ...]] = (
    (64, 144, 8, 9, 8, 16, 1), (8, 72, 8, 9, 1, 64, 16), (16, 72, 8, 9, 2, 32, 8), (32, 144, 8, 9, 2, 32, 2),
    (16, 144, 8, 9, 2, 32, 4), (8, 36, 8, 9, 1, 64, 16), (4, 36, 4, 9, 1, 64, 16), (16, 160, 8, 10, 2, 16, 4),
    (4, 16, 4, 1, 1, 64, 16),
)  # fmt: skip
# Those of channels last alone.
TILES_NHWC: Final[tuple[Tile, ...]] = (
    (8, 80, 4, 20, 2, 32, 16), (16, 80, 8, 20, 2, 32, 16), (64, 144, 8, 12, 8, 16, 1), (32, 144, 4, 12, 8, 16, 1),
    (4, 16, 4, 4, 1, 64, 32), (4, 40, 4, 20, 1, 64, 64),
)  # fmt: skip
TILES_F64: Final[tuple[Tile, ...]] = (
    (64, 64, 4, 4, 8, 8, 1), (128, 64, 8, 4, 8, 8, 1), (64, 128, 8, 4, 8, 8, 1), (32, 64, 4, 4, 8, 8, 1),
    (64, 32, 4, 4, 8, 8, 1), (32, 32, 4, 4, 8, 16, 2), (16, 64, 4, 4, 4, 16, 2), (8, 64, 4, 4, 2, 16, 4),
    (4, 32, 4, 4, 1, 32, 8), (4, 128, 4, 4, 1, 8, 2),
)  # fmt: skip
STAGES: Final = (4, 3)
# Blocks of a cluster on every GPU that has clusters.
LARGEST_CLUSTER: Final = 8
# Least steps of a part; most terms of a chain of float32 sums, where parts have room.
PART_STEPS: Final = 2
CHAIN: Final = 4096
# Bits that a word has for the taps' rows and columns.
MASK_BITS: Final = 30
# Bytes of the table entry of a pixel, and of a column.
PLACE: Final = 16
# Registers of a thread beside its sums and pieces; least of all.
OTHER_REGISTERS: Final = 24
LEAST_REGISTERS: Final = 72
MOST_REGISTERS: Final = 255
# Of the cost model, estimates until fitted. The clock under load over the highest; cycles of a warp for a copy, for one
# of an element with a column of its own, to find the places of 32 pixels, and of a step beside.
CLOCK: Final = 0.864
COPY_CYCLES: Final = 4.0
WINDOW_CYCLES: Final = 6.0
PLACE_CYCLES: Final = 200.0
STEP_CYCLES: Final = 50.0
# Cycles of a step beside its products, where few warps are there; of a block's begin and end; elements of a tile that a
# cycle stores.
WAIT_CYCLES: Final = 337
BLOCK_CYCLES: Final = 2500
STORED: Final = 8
START_US: Final = 1.4
SECOND_US: Final = 1.5
# Microseconds of a wave of clusters, and of as many sums of a tile; by how much clusters find less room, for each part
# but one.
CLUSTER_US: Final = 1.17
SENT_SUMS: Final = 7000
CLUSTER_ROOM: Final = 0.047


@dataclass(frozen=True)
class Config(BaseConfig):
    """A block of filters x columns; thread_f x thread_c sums a thread, `lanes_f` of a warp's lanes along filters;
    `depth` pixels a step, shared by `slices` of the threads; `stages` steps in shared memory; `split_k` parts of the
    pixels, of blocks of a cluster that add up their sums (`cluster`), or by way of the workspace."""

    filters: int
    columns: int
    thread_f: int
    thread_c: int
    lanes_f: int
    depth: int
    slices: int
    stages: int
    split_k: int
    cluster: bool

    @property
    def adds(self) -> bool:
        """Whether a second launch adds up the parts."""
        return self.split_k > 1 and not self.cluster

    @property
    def threads(self) -> int:
        return self.filters // self.thread_f * (self.columns // self.thread_c) * self.slices


class ImplicitGemmSimtWgrad(CudaAlgorithm[Config]):
    """Any channels, groups, stride, padding and dilation; NHWC and NCHW; float32 and float64, never rounded to less.
    Compute capability 8.0 and newer."""

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cuda.implicit_gemm_simt"
    summary: ClassVar[str] = "implicit GEMM on the FMA units, tiles of blocks, warps and threads"
    dtypes: ClassVar[tuple[str, ...]] = ("f32", "f64")
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        return wgrad_parts.rejects(problem)

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        found: dict[Config, None] = {}
        clusters = has_dependent_launches(device.architecture)
        for tile in self._tiles(problem):
            several = [Config(*tile, stages, 1, False) for stages in STAGES]
            # Fewer stages where more blocks have room then.
            config = max(several, key=lambda one: self._together(problem, one, device))
            if self.shared_bytes(problem, config) > device.shared_bytes:
                continue
            wave = device.multiprocessors * self._together(problem, config, device) // self._blocks(problem, config)
            for split_k in self._splits(problem, config, device):
                found[replace(config, split_k=split_k)] = None
                # More than one wave of clusters leaves more idle than a second launch takes.
                if clusters and 1 < split_k <= min(wave, LARGEST_CLUSTER):
                    found[replace(config, split_k=split_k, cluster=True)] = None
        return list(found)

    @staticmethod
    def _tiles(problem: ConvProblem) -> Iterator[Tile]:
        """Tiles of which no half is empty, or else the least ones."""
        more = TILES_NCHW if problem.layout == "nchw" else TILES_NHWC
        tiles = TILES_F64 if problem.dtype == "f64" else TILES + more
        # No tile has fewer.
        filters_end, columns_end = max(problem.group_k, 4), max(problem.gemm_k, 32)
        for tile in tiles:
            if tile[0] < 2 * filters_end and tile[1] < 2 * columns_end:
                yield tile

    def _splits(self, problem: ConvProblem, config: Config, device: Device) -> list[int]:
        """Parts that fill half a wave of blocks, one, two and three, and powers of two; as many as chains want."""
        steps, tiles = self.steps(problem, config), self._blocks(problem, config)
        slots = device.multiprocessors * self._together(problem, config, device)
        room = wgrad_parts.PARTS_BYTES // max(1, wgrad_parts.workspace_bytes(problem, 2) // 2)
        most = max(1, min(steps // PART_STEPS, room))
        chain = CHAIN * config.slices // config.depth
        least = min(most, ceil_div(steps, chain)) if problem.dtype == "f32" else 1
        most = max(least, min(most, 4 * slots // tiles))
        wanted = {least, *(slots * part // (2 * tiles) for part in (1, 2, 4, 6)), *(1 << power for power in range(5))}
        # Whole parts: none is without a step.
        return sorted({ceil_div(steps, ceil_div(steps, count)) for count in wanted if least <= count <= most})

    @staticmethod
    def steps(problem: ConvProblem, config: Config) -> int:
        return ceil_div(problem.n * prod(problem.output), config.depth)

    @staticmethod
    def _grid(problem: ConvProblem, config: Config) -> tuple[int, int]:
        """Tiles along a group's columns and filters."""
        return ceil_div(problem.gemm_k, config.columns), ceil_div(problem.group_k, config.filters)

    def _blocks(self, problem: ConvProblem, config: Config) -> int:
        return prod(self._grid(problem, config)) * problem.groups

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        """The ring, or the sums in its place; where pixels lie, and columns."""
        vector, width = 16 // problem.itemsize, config.filters + config.columns
        nchw = problem.layout == "nchw"
        stage = width * (config.depth + vector) if nchw else width * config.depth
        sums = config.slices * config.filters * (config.columns + vector)
        table = PLACE * config.columns if nchw else 0
        return max(config.stages * stage, sums) * problem.itemsize + PLACE * self._places(config) + table

    @staticmethod
    def _places(config: Config) -> int:
        """Pixels whose places are kept: those of a power of two of steps."""
        found = max(1, 32 // config.depth)
        return (1 << (config.stages + found - 1).bit_length()) * config.depth

    def _registers(self, problem: ConvProblem, config: Config) -> int:
        """Of a thread, about."""
        words, sums = problem.itemsize // 4, config.thread_f * config.thread_c
        pieces = (
            2 * (config.thread_f + config.thread_c) + (6 if words == 1 else 20) + (0 if self._masks(problem) else 12)
        )
        if problem.layout == "nchw":
            pieces = (config.thread_f + 2) * 4
        return max(LEAST_REGISTERS, sums * words + pieces + OTHER_REGISTERS)

    def _resident(self, problem: ConvProblem, config: Config) -> int:
        """Blocks that a multiprocessor is to hold: it bounds the registers."""
        return costs.blocks_of(min(MOST_REGISTERS, self._registers(problem, config)), config.threads)

    def _together(self, problem: ConvProblem, config: Config, device: Device) -> int:
        """Blocks that a multiprocessor does hold."""
        room = occupancy.beside_of(device, self.shared_bytes(problem, config))
        return max(1, min(room, self._resident(problem, config)))

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Waves of blocks, the last one of fewer: steps that take the instructions of a scheduler's warps, or their
        latency where warps are few; memory; what parts cost."""
        blocks = self._blocks(problem, config) * config.split_k
        steps = ceil_div(self.steps(problem, config), config.split_k)
        together = self._together(problem, config, device)
        waves, rest = divmod(blocks, device.multiprocessors * together)
        terms = config.depth // config.slices
        # Float64 has half as many lanes.
        products = config.thread_f * config.thread_c * (1 if problem.dtype == "f32" else 2)
        reads = (config.thread_f + config.thread_c) * problem.itemsize / 16
        copies = STEP_CYCLES + PLACE_CYCLES * config.depth / config.threads
        for of_x, width in ((True, config.columns), (False, config.filters)):
            windows = of_x and problem.layout == "nchw" and not pointwise(problem)
            each = WINDOW_CYCLES if windows else COPY_CYCLES
            copies += each * width * config.depth / self._copied(problem, of_x) / config.threads
        alone = terms * products + WAIT_CYCLES

        def wave(count: int) -> float:
            """Cycles of so many blocks on a multiprocessor."""
            warps = ceil_div(count * config.threads, 32 * SCHEDULERS)
            stored = count * config.filters * config.columns * config.slices / STORED
            return steps * hypot(warps * (terms * (products + reads) + copies), alone) + BLOCK_CYCLES + stored

        cycles = waves * wave(together) + (wave(ceil_div(rest, device.multiprocessors)) if rest else 0)
        split = 0.0
        if config.adds:
            split = SECOND_US + 2 * self.workspace_bytes(problem, config, device) / (device.gbps * 1e3)
        if config.cluster:
            cycles *= 1 + CLUSTER_ROOM * (config.split_k - 1)
            split = (CLUSTER_US + config.filters * config.columns / SENT_SUMS) * (waves + (rest > 0))
        memory = problem.bytes / (device.gbps * 1e3)
        return max(cycles / (costs.cycles_us(device) * CLOCK), memory) + START_US + split

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return wgrad_parts.workspace_bytes(problem, config.split_k) if config.adds else 0

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        launches = self.launches(problem, config, device)
        return WgradPlan(problem, device, launches, self.workspace_bytes(problem, config, device))

    @staticmethod
    def _copied(problem: ConvProblem, of_x: bool) -> int:
        """Elements of a copy of x, or of dy."""
        if problem.layout == "nhwc":
            return neighbours(problem.group_c if of_x else problem.group_k, problem.itemsize)
        return 1 if of_x and not pointwise(problem) else neighbours(prod(problem.output), problem.itemsize)

    @staticmethod
    def _masks(problem: ConvProblem) -> bool:
        """Whether a word's bits say which taps leave the image."""
        return not padded(problem) or sum(problem.kernel) <= MASK_BITS

    def source(self, problem: ConvProblem, config: Config) -> Source:
        cluster = config.split_k if config.cluster else 1
        written = gcd(problem.gemm_k, config.columns, 16 // problem.itemsize)
        words = (
            DTYPES[problem.dtype].cpp, problem.layout == "nchw", self._copied(problem, True),
            self._copied(problem, False), pointwise(problem), padded(problem), self._masks(problem), config.filters,
            config.columns, config.thread_f, config.thread_c, config.lanes_f, config.depth, config.slices,
            config.stages, config.adds, cluster, written,
        )  # fmt: skip
        template, resident = f"Block<{template_args(*words)}>", self._resident(problem, config)
        return stub(KERNEL, "wgrad_simt", template, "Gradient", config.threads, resident, cluster=cluster)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        last = [wgrad_parts.sum_source(problem, config.split_k)] if config.adds else []
        return [self.source(problem, config), *last]

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[Launch]:
        """The sums, and where pixels are split those of the parts."""
        source, (tiles_c, tiles_f) = self.source(problem, config), self._grid(problem, config)
        fields = wgrad_parts.fields(problem, source, config.depth, config.split_k)
        fields |= {"tiles_c": tiles_c, "tiles_f": tiles_f}
        blocks = self._blocks(problem, config)
        grid = (blocks * config.split_k, 1, 1) if config.cluster else (blocks, config.split_k, 1)
        shared_bytes, names = self.shared_bytes(problem, config), {"parts": "workspace"}
        sums = Launch(source, fields, grid, config.threads, shared_bytes, dependent=True, names_of=names)
        return [sums] if not config.adds else [sums, wgrad_parts.sum_launch(problem, config.split_k)]
