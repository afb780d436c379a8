"""cuda.implicit_gemm_simt: implicit GEMM on the FMA units, in IEEE float32 and float64.

gemm_m is output pixels, gemm_n the filters of a group, gemm_k its taps and channels. Windows are copied asynchronously,
element by element, to shared memory as [gemm_k][pixel], so that NHWC and NCHW differ only in which thread copies what,
and both operands are read in pieces of 16 bytes. Small problems split gemm_k: sums of parts go to the workspace and are
added in a fixed order.

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014; Kerr et al., "CUTLASS: fast linear
algebra in CUDA C++", 2017 (tiles of blocks, warps and threads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot, prod
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import DTYPES, INDEX_LIMIT, counter, template_args
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import pack, window
from tapwise.ops.conv.cuda.costs import SCHEDULERS
from tapwise.ops.conv.problem import ConvProblem

KERNEL: Final = "ops/conv/cuda/implicit_gemm_simt.cu"
PARTS_KERNEL: Final = "ops/conv/cuda/implicit_gemm_simt_parts.cu"
# (pixels, filters) of a block, (pixels, filters) of a thread, lanes of a warp along filters, terms a step.
TILES: Final = (
    (64, 64, 4, 8, 4, 16), (64, 128, 8, 8, 4, 16), (128, 64, 8, 8, 4, 16), (128, 128, 16, 8, 4, 16),
    (64, 64, 8, 8, 4, 16), (32, 64, 4, 8, 4, 16), (64, 32, 8, 4, 4, 16), (32, 32, 4, 4, 4, 16),
    (128, 96, 8, 12, 4, 16), (256, 48, 8, 12, 4, 16), (128, 32, 8, 4, 4, 16), (128, 16, 8, 4, 4, 16),
    (256, 8, 8, 8, 1, 8), (256, 4, 8, 4, 1, 8), (8, 256, 4, 8, 16, 16),
)  # fmt: skip
TILES_F64: Final = (
    (64, 64, 4, 4, 4, 8), (128, 128, 8, 8, 4, 8), (128, 64, 8, 8, 4, 8), (128, 64, 8, 4, 4, 8),
    (64, 64, 8, 4, 4, 8), (64, 32, 4, 4, 4, 8), (32, 32, 4, 4, 4, 8),
    (128, 16, 8, 4, 4, 8), (256, 4, 8, 4, 1, 8),
)  # fmt: skip
# Pixels of the tile for layers like a matrix times a vector; of those that copies of terms one by one take at once.
FEW_PIXELS, LEAST_FLAT = 8, 32
STAGES: Final = 4
SPLITS: Final = (1, 2, 4, 6, 8, 12, 16, 32)
# Blocks of a cluster on every GPU that has clusters.
LARGEST_CLUSTER: Final = 8
# Times as many steps, with whole ones of channels, that are still better than terms found one by one.
WASTE: Final = 1.1
# Blocks a multiprocessor beyond which nothing is split.
MOST_BLOCKS: Final = 8
# Filters and terms that a block transposes.
SQUARE: Final = 32
# Bytes of a pixel's or a term's place.
PLACE: Final = 16
# Bytes of shared memory that a block has beside its own.
BLOCK_SHARED: Final = 1 << 10
# Registers of a scheduler for each lane of its warps.
REGISTERS: Final = 512
# Fitted to times on an H200: the clock under load over the highest; cycles of a warp for each element that a thread
# copies, and more of them where channels and taps are one number; and for each pixel of a thread, to find its window.
CLOCK: Final = 0.864
COPY_CYCLES: Final = 11.9
FLAT_CYCLES: Final = 16.2
BEGIN_CYCLES: Final = 159
# Cycles of a step beside its products, where few warps are there.
WAIT_CYCLES: Final = 337
# Microseconds of a launch, of adding up parts by a second one, of a wave of clusters, and of as many outputs of a tile,
# whose parts it sends; by how much clusters find less room, for each part but one.
START_US: Final = 1.42
SECOND_US: Final = 4.0
CLUSTER_US: Final = 1.17
SENT_OUTPUTS: Final = 7000
CLUSTER_ROOM: Final = 0.047


@dataclass(frozen=True)
class Config(BaseConfig):
    """A block of pixels x filters; thread_m x thread_n outputs a thread, `lanes_n` of a warp's lanes along filters;
    `depth` terms a step, `stages` of them in shared memory; `split_k` parts of gemm_k, of blocks of a cluster that add
    up their sums (`cluster`), or by way of the workspace."""

    pixels: int
    filters: int
    thread_m: int
    thread_n: int
    lanes_n: int
    depth: int
    stages: int
    split_k: int
    cluster: bool

    @property
    def threads(self) -> int:
        return self.pixels // self.thread_m * (self.filters // self.thread_n)


class ImplicitGemmSimt(CudaAlgorithm[Config]):
    """Any channels, groups, stride, padding and dilation; NHWC and NCHW; float32 and float64, never rounded to less."""

    id: ClassVar[str] = "cuda.implicit_gemm_simt"
    summary: ClassVar[str] = "implicit GEMM on the FMA units, tiles of blocks, warps and threads"
    dtypes: ClassVar[tuple[str, ...]] = ("f32", "f64")
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        extents = (n + sum(sides) for n, sides in zip(problem.spatial, problem.padding, strict=True))
        if window.is_large(problem) or max(extents) >= INDEX_LIMIT:
            return f"{window.TOO_LARGE}, and as many rows and columns with padding"
        few = max(problem.k, 2 * problem.gemm_k) < INDEX_LIMIT
        return None if few else "takes fewer than 2^31 filters, and 2^30 terms of a sum"

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        found: list[Config] = []
        many = problem.n * prod(problem.output) > 2 * FEW_PIXELS
        for pixels, filters, thread_m, thread_n, lanes_n, depth in TILES_F64 if problem.dtype == "f64" else TILES:
            # Twice as many filters as a group has: most products would be dropped.
            if filters >= 2 * round_up(problem.group_k, 4) and found:
                continue
            for split_k in SPLITS:
                cluster = 1 < split_k <= LARGEST_CLUSTER and has_dependent_launches(device.architecture)
                config = Config(pixels, filters, thread_m, thread_n, lanes_n, depth, STAGES, split_k, cluster)
                if pixels < LEAST_FLAT and (many or self._flat(problem, config)):
                    break
                blocks, steps = self._blocks(problem, config) * split_k, self.steps(problem, config)
                if split_k > 1 and (steps < 2 * split_k or blocks > MOST_BLOCKS * device.multiprocessors):
                    break
                if self.shared_bytes(problem, config) <= device.shared_bytes:
                    found.append(config)
        return found

    def _flat(self, problem: ConvProblem, config: Config) -> bool:
        """Whether terms run over taps and channels as one number: where whole steps of channels waste too much."""
        whole = prod(problem.kernel) * ceil_div(problem.group_c, config.depth)
        return whole > WASTE * ceil_div(problem.gemm_k, config.depth)

    def _wide(self, problem: ConvProblem, config: Config) -> int:
        """Terms of a tap."""
        return problem.group_c if self._flat(problem, config) else round_up(problem.group_c, config.depth)

    def steps(self, problem: ConvProblem, config: Config) -> int:
        return ceil_div(prod(problem.kernel) * self._wide(problem, config), config.depth)

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        """The ring of operands, where the windows of a tile's pixels begin, and where terms lie in them; then sums."""
        vector = 16 // problem.itemsize
        pitch = config.pixels + (0 if problem.layout == "nchw" else vector)
        ring = config.stages * config.depth * (pitch + config.filters) * problem.itemsize
        terms = config.stages * config.depth if self._flat(problem, config) else 0
        along, rows = config.pixels, config.filters
        if problem.layout == "nhwc":
            along, rows = rows, along
        sums = rows * (along + vector) * problem.itemsize if config.cluster else 0
        return max(ring + PLACE * (config.pixels + terms), sums)

    def _tiles(self, problem: ConvProblem, config: Config) -> tuple[int, int]:
        """Along a group's filters, and along pixels."""
        pixels = problem.n * prod(problem.output)
        return ceil_div(problem.group_k, config.filters), ceil_div(pixels, config.pixels)

    def _blocks(self, problem: ConvProblem, config: Config) -> int:
        return prod(self._tiles(problem, config)) * problem.groups

    def _resident(self, problem: ConvProblem, config: Config) -> int:
        """Blocks that a multiprocessor is to hold: it bounds the registers."""
        sums = config.thread_m * config.thread_n * problem.itemsize // 4
        registers = 255 if sums > 64 else 128 if sums == 64 else 96 if sums >= 32 else 80
        if sums == 64 and config.threads == 32:
            # A lane copies 8 pixels: 128 registers spill on sm_80, and shared memory has room for fewer blocks.
            registers = 160
        return max(1, REGISTERS // registers * SCHEDULERS // (config.threads // 32))

    def _together(self, problem: ConvProblem, config: Config, device: Device) -> int:
        """Blocks that a multiprocessor does hold."""
        room = (device.shared_bytes + BLOCK_SHARED) // (self.shared_bytes(problem, config) + BLOCK_SHARED)
        return max(1, min(room, self._resident(problem, config)))

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """The steps of the busiest multiprocessor, the bytes of every array, the start, and what splitting costs.

        Blocks run in waves of as many as have room, the last one of fewer. A step of a wave takes the instructions of a
        scheduler's warps (multiply-adds, reads of shared memory, copies), or its latency where warps are few.
        """
        blocks = self._blocks(problem, config) * config.split_k
        steps = ceil_div(self.steps(problem, config), config.split_k)
        together = self._together(problem, config, device)
        waves, rest = divmod(blocks, device.multiprocessors * together)
        # Float64 has half as many lanes.
        products = config.thread_m * config.thread_n * (1 if problem.dtype == "f32" else 2)
        term = products + (config.thread_m + config.thread_n) * problem.itemsize / 16
        copies = config.pixels // self._pixels_at_once(problem, config) * config.depth / config.threads
        copies *= COPY_CYCLES + (FLAT_CYCLES if self._flat(problem, config) else 0)
        latency = config.depth * products + WAIT_CYCLES
        begin = BEGIN_CYCLES * config.pixels / config.threads

        def wave(count: int) -> float:
            """Cycles of so many blocks on a multiprocessor."""
            warps = ceil_div(count * config.threads, 32 * SCHEDULERS)
            return steps * hypot(warps * (config.depth * term + copies), latency) + warps * begin

        cycles = waves * wave(together) + (wave(ceil_div(rest, device.multiprocessors)) if rest else 0)
        if config.cluster:
            cycles *= 1 + CLUSTER_ROOM * (config.split_k - 1)
        arithmetic = cycles / (device.gflops / 256 * CLOCK * 1e3)
        # Parts are written and read.
        memory = (problem.bytes + 2 * self.workspace_bytes(problem, config, device)) / (device.gbps * 1e3)
        split = SECOND_US if self._adds(config) else 0.0
        if config.cluster:
            split = (CLUSTER_US + config.pixels * config.filters / SENT_OUTPUTS) * (waves + (rest > 0))
        return arithmetic + memory + START_US + split

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """A launch, and the filters read and written; not measured yet."""
        return 2.0 + 2 * prod(problem.w_shape) * problem.itemsize / (device.gbps * 1e3)

    @staticmethod
    def _adds(config: Config) -> bool:
        """Whether a second launch adds up the parts."""
        return config.split_k > 1 and not config.cluster

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return config.split_k * prod(problem.y_shape) * problem.itemsize if self._adds(config) else 0

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        size = prod(self.packed(problem, config)) * problem.itemsize
        launches, packer = self.launches(problem, config, device), partial(self.pack_launch, problem, config)
        workspace_bytes = self.workspace_bytes(problem, config, device)
        return pack.PackedPlan(problem, device, launches, packer, size, workspace_bytes)

    def _vector(self, problem: ConvProblem) -> int:
        """Elements of y written at once: neighbours along its inner axis."""
        inner = prod(problem.output) if problem.layout == "nchw" else problem.group_k
        return next(count for count in (4, 2, 1) if count * problem.itemsize <= 16 and inner % count == 0)

    def _pixels_at_once(self, problem: ConvProblem, config: Config) -> int:
        """Pixels of a copy: several where they lie in x as in y."""
        same = problem.kernel == problem.stride == (1, 1) and problem.output == problem.spatial
        same = same and problem.layout == "nchw" and not self._flat(problem, config)
        if not same:
            return 1
        # Where a step has no row for some threads, they would have nothing to copy.
        rows = config.threads * self._vector(problem) // config.pixels
        return self._vector(problem) if rows <= config.depth else 1

    def source(self, problem: ConvProblem, config: Config) -> Source:
        flat, padded = self._flat(problem, config), any(map(any, problem.padding))
        cluster = config.split_k if config.cluster else 1
        words = (
            DTYPES[problem.dtype].cpp, problem.layout == "nchw", flat, problem.group_c % config.depth == 0, padded,
            self._pixels_at_once(problem, config), config.pixels, config.filters, config.thread_m, config.thread_n,
            config.lanes_n, config.depth, config.stages, self._adds(config), cluster, self._vector(problem),
            "NONE" if self._adds(config) else window.activation(problem.activation),
        )  # fmt: skip
        template = f"Block<{template_args(*words)}>"
        resident = self._resident(problem, config)
        return stub(KERNEL, "implicit_gemm_simt", template, "Operands", config.threads, resident, cluster=cluster)

    def sum_source(self, problem: ConvProblem) -> Source:
        words = (
            DTYPES[problem.dtype].cpp, counter(prod(problem.y_shape)), self._vector(problem),
            problem.layout == "nhwc", window.activation(problem.activation),
        )  # fmt: skip
        return stub(PARTS_KERNEL, "add_parts", template_args(*words), "Parts", pack.THREADS)

    def pack_source(self, problem: ConvProblem) -> Source:
        return stub(PARTS_KERNEL, "pack_transposed", DTYPES[problem.dtype].cpp, "Transposed", pack.THREADS)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        last = [self.sum_source(problem)] if self._adds(config) else []
        return [self.pack_source(problem), self.source(problem, config), *last]

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[Launch]:
        """The product, and where gemm_k is split the sum of its parts."""
        source, steps = self.source(problem, config), self.steps(problem, config)
        (height, width), c, count = problem.spatial, problem.c, prod(problem.y_shape)
        step_c, step_w = (1, c) if problem.layout == "nhwc" else (height * width, 1)
        _, _, pitch = self.packed(problem, config)
        fields = window.window_fields(problem, source) | {
            "count": count, "depth": problem.gemm_k, "pitch": pitch, "pixels": problem.n * prod(problem.output),
            "tiles_k": self._tiles(problem, config)[0], "steps": steps, "part_steps": ceil_div(steps, config.split_k),
            "step_n": c * height * width, "step_c": step_c, "step_h": width * step_w, "step_w": step_w,
        }  # fmt: skip
        blocks = self._blocks(problem, config) * config.split_k
        grid = (blocks, 1, 1) if config.cluster else (blocks // config.split_k, config.split_k, 1)
        # Where all blocks of this launch and of the next have room.
        fields["early"] = int(2 * blocks <= device.multiprocessors * self._together(problem, config, device))
        names = {"parts": "workspace"}
        shared_bytes = self.shared_bytes(problem, config)
        shape, balance = (grid, config.threads, shared_bytes), 0 if fields["early"] else 2
        product = Launch(source, fields, *shape, dependent=True, names_of=names, balance=balance)
        if not self._adds(config):
            return [product]
        inner = prod(problem.output) if problem.layout == "nchw" else 1
        fields = {"count": count, "k": problem.k, "inner": inner, "split_k": config.split_k}
        blocks = ceil_div(count, pack.THREADS * self._vector(problem))
        grid = (min(blocks, pack.BLOCKS_EACH * device.multiprocessors), 1, 1)
        last = self.sum_source(problem)
        return [product, Launch(last, fields, grid, pack.THREADS, dependent=True, names_of=names)]

    def packed(self, problem: ConvProblem, config: Config) -> tuple[int, int, int]:
        """(groups, terms, filters) of packed filters: whole steps, and filters in whole pieces of 16 bytes."""
        terms = self.steps(problem, config) * config.depth
        return problem.groups, terms, round_up(problem.group_k, 16 // problem.itemsize)

    def pack_launch(self, problem: ConvProblem, config: Config, steps: tuple[int, ...]) -> Launch:
        """Filters of such strides (elements) to the order of gemm_k."""
        groups, rows, pitch = self.packed(problem, config)
        fields = {
            "rows": rows, "pitch": pitch, "taps": prod(problem.kernel), "wide": self._wide(problem, config),
            "group_k": problem.group_k, "group_c": problem.group_c, "taps_w": problem.kernel[1],
            "tiles_k": ceil_div(pitch, SQUARE), "tiles_rows": ceil_div(rows, SQUARE),
        }  # fmt: skip
        fields |= zip(("step_k", "step_c", "step_r", "step_s"), steps, strict=True)
        grid = (groups * fields["tiles_k"] * fields["tiles_rows"], 1, 1)
        return Launch(self.pack_source(problem), fields, grid, pack.THREADS, SQUARE * (SQUARE + 1) * problem.itemsize)
