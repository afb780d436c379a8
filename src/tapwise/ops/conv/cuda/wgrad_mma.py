"""cuda.implicit_gemm_mma of wgrad: an implicit GEMM with warp-level tensor core instructions, any channels, either
memory order.

gemm_m is the filters of a group, gemm_n its columns: taps and channels as dw's rows lie in memory, one behind the
other, so that three channels fill a tile as well as many. gemm_k is output pixels, in steps of 32. Where pixels have
whole pieces of 4, 8 or 16 bytes of channels (or an image's plane has them of pixels: dy for NCHW, and x of 1x1), they
are copied asynchronously, several steps ahead. Else elements pass through registers. Parts of the pixels go to the
workspace as float32 sums, and a second launch adds them in a fixed order.

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014; PTX ISA, mma.sync and ldmatrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import ClassVar, Final, NamedTuple

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit import occupancy
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.types import template_args, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import costs, wgrad_parts, window
from tapwise.ops.conv.cuda.gradients import MOST_PART_PIXELS, WgradPlan
from tapwise.ops.conv.problem import ConvProblem

KERNEL: Final = "ops/conv/cuda/wgrad_mma.cu"
# (columns, filters, warps along columns, warps along filters) of a CTA.
TILES: Final = (
    (64, 64, 2, 2), (128, 128, 2, 2), (128, 64, 2, 2), (64, 128, 2, 2), (192, 64, 4, 1), (256, 64, 4, 1),
    (256, 128, 4, 2), (128, 256, 2, 4), (192, 128, 4, 2), (288, 64, 6, 1), (144, 128, 3, 2), (144, 64, 3, 1),
    (160, 64, 5, 1), (160, 64, 5, 2), (96, 64, 2, 2), (96, 128, 2, 2), (80, 64, 5, 1), (48, 64, 3, 1),
    (32, 64, 2, 2), (32, 128, 2, 2), (16, 64, 1, 4), (16, 128, 1, 4), (32, 256, 1, 4), (256, 32, 4, 1),
    (160, 32, 5, 1), (128, 32, 4, 1), (64, 32, 4, 1),
    (32, 32, 2, 1), (288, 32, 6, 1), (144, 32, 3, 1), (144, 16, 3, 1), (256, 16, 4, 1), (128, 16, 4, 1), (80, 16, 5, 1),
    (32, 16, 2, 1), (256, 8, 4, 1), (160, 8, 5, 1), (128, 8, 4, 1), (80, 8, 5, 1), (32, 8, 2, 1),
    (16, 32, 1, 2), (16, 16, 1, 2), (16, 8, 1, 1),
)  # fmt: skip
# (columns, filters) of a group of which a CTA takes several, a warp each; how many.
NARROW: Final = (
    (16, 8), (32, 8), (48, 8), (80, 8), (16, 16), (32, 16), (48, 16), (80, 16), (144, 16), (16, 32), (32, 32), (96, 32),
    (144, 32),
)  # fmt: skip
GROUPS: Final = (2, 4, 8)
# Pixels of a step.
STEP: Final = 32
# Bytes of a copy at most.
PIECE: Final = 16
# Bytes of the table entry of a pixel or a column.
ENTRY: Final = 16
# Least steps of a part.
PART_STEPS: Final = 4
# Registers of a thread beside sums and fragments; for each element on its way, with its address; most with such, and
# before sm_90, where the same code takes more.
OTHER_REGISTERS: Final = 76
HELD_REGISTERS: Final = 2
MOST_REGISTERS, MOST_BEFORE_SM_90 = 252, 240
# Of the cost model: fitted together by least squares to the logarithms of 220 configs' times on 10 layers (H100, NHWC,
# pieces of 4 to 16 bytes), but for those called assumed. Cycles of a step that a CTA waits at barriers and products,
# and for each copy that a thread issues: one after another, they take most of a step.
WAIT_CYCLES, COPY_CYCLES = 341.0, 69.0
# Cycles of a multiprocessor for a warp's copy, and for each byte of its pieces beside.
ISSUE_CYCLES, BYTE_CYCLES = 5.6, 0.66
# Multiply-adds of a multiprocessor in a cycle by mma.sync (assumed: 62 % of its tensor cores; no layer tells).
PRODUCTS: Final = 1270
# Of the bandwidth what storing dw reaches: 7x7 c512 k4096 on 7x7 pixels, which is nothing else, 122 us (H200).
STORED: Final = 0.4
# Cycles of a wave's begin and end; microseconds of each part that a thread adds.
WAVE_CYCLES, PART_US = 1800.0, 0.08
# Microseconds of the launch, and of the one that adds parts (assumed: the times tell their sum with WAVE_CYCLES).
START_US, SECOND_US = 2.0, 1.2
# The power of what overlaps in part; 3 chooses worse.
OVERLAP: Final = 2.0


@dataclass(frozen=True)
class Config(BaseConfig):
    """A tile of columns x filters of each of `groups_per_tile` groups, by warps_c x warps_f warps a group; stages;
    `split_k` parts of the pixels."""

    columns: int
    filters: int
    groups_per_tile: int
    warps_c: int
    warps_f: int
    stages: int
    split_k: int

    @property
    def warps(self) -> int:
        return self.groups_per_tile * self.warps_c * self.warps_f

    @property
    def threads(self) -> int:
        return 32 * self.warps


class Copies(NamedTuple):
    """How an operand comes to shared memory: the kernel's name for it, bytes of a copy."""

    name: str
    piece: int


class Run(NamedTuple):
    """Filter rows as runs of neighbours in x, channels of taps side by side: elements of a copy, elements of a run in
    whole copies, those in front of the filter's own, and these."""

    each: int
    whole: int
    before: int
    real: int


def run_of(problem: ConvProblem) -> Run | None:
    """Where it allows longer copies than a tap's channels do: x is then an image of one channel and rows of w * c
    elements, and every window begins at a multiple of `each` of them."""
    if problem.layout == "nchw" or problem.groups > 1 or problem.dilation[1] > 1:
        return None
    c, width = problem.c, problem.spatial[1]
    each, padding = gcd(problem.stride[1] * c, width * c, PIECE // problem.itemsize), problem.padding[1][0] * c
    before, real = -padding % each, problem.kernel[1] * c
    if c % each == 0 or (width + sum(problem.padding[1])) * c >= wgrad_parts.EXTENT_LIMIT:
        return None
    return Run(each, round_up(before + real, each), before, real)


def columns_of(problem: ConvProblem) -> int:
    """Columns of a group that are summed, those of a run that belong to no tap among them."""
    run = run_of(problem)
    return problem.kernel[0] * run.whole if run else problem.gemm_k


def copies(problem: ConvProblem, of_x: bool) -> Copies:
    """Of x, or of dy."""
    if of_x and (run := run_of(problem)):
        return Copies("CHANNEL_PIECES", run.each * problem.itemsize)
    last = problem.layout == "nhwc"
    along = (problem.group_c if of_x else problem.group_k) if last else prod(problem.output)
    pieces, elements = ("CHANNEL_PIECES", "CHANNELS") if last else ("PIXEL_PIECES", "PIXELS")
    if not last and of_x and not wgrad_parts.pointwise(problem):
        return Copies(elements, problem.itemsize)
    sizes = (size for size in (PIECE, 8, 4) if along * problem.itemsize % size == 0)
    piece = next(sizes, 0)
    return Copies(pieces, piece) if piece else Copies(elements, problem.itemsize)


class ImplicitGemmMmaWgrad(window.TensorCoreAlgorithm[Config]):
    """Any stride, padding, dilation, groups and channels; NHWC and NCHW; float16, bfloat16, and float32 with
    math="tf32". Compute capability 8.0 and newer."""

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cuda.implicit_gemm_mma"
    summary: ClassVar[str] = "tensor cores (mma.sync), windows gathered by threads"
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16", "tf32")

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        return wgrad_parts.rejects(problem)

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        found: dict[Config, None] = {}
        most = MOST_REGISTERS if has_dependent_launches(device.architecture) else MOST_BEFORE_SM_90
        for columns, filters, groups_per_tile, warps_c, warps_f in self._tiles(problem):
            together = 0
            for stages in (4, 3):
                config = Config(columns, filters, groups_per_tile, warps_c, warps_f, stages, 1)
                # Elements on their way take the registers that a large tile would need.
                if self._held(problem, config) and self._registers(problem, config) > most:
                    continue
                # Fewer stages where more CTAs have room then.
                if self.shared_bytes(problem, config) > device.shared_bytes:
                    continue
                before, together = together, self._together(problem, config, device)
                if together > before:
                    for split_k in self._splits(problem, config, device):
                        found[replace(config, split_k=split_k)] = None
        steps = self.steps(problem)
        short = [one for one in found if ceil_div(steps, one.split_k) * STEP <= MOST_PART_PIXELS]
        return short or list(found)

    def _tiles(self, problem: ConvProblem) -> Iterator[tuple[int, int, int, int, int]]:
        """Tiles of which no half is empty: there is always one."""
        columns_end, filters_end = round_up(columns_of(problem), 16), round_up(problem.group_k, 8)
        for columns, filters, warps_c, warps_f in TILES:
            if columns < 2 * columns_end and filters < 2 * filters_end:
                yield columns, filters, 1, warps_c, warps_f
        for columns, filters in NARROW:
            if problem.group_k <= filters < 2 * filters_end and columns_of(problem) <= columns < 2 * columns_end:
                for count in GROUPS:
                    if count <= problem.groups:
                        yield columns, filters, count, 1, 1

    def _splits(self, problem: ConvProblem, config: Config, device: Device) -> list[int]:
        """Parts that fill half a wave of CTAs, one and two, powers of two, and as few as are short enough."""
        steps, tiles = self.steps(problem), prod(self._grid(problem, config))
        slots = device.multiprocessors * self._together(problem, config, device)
        room = wgrad_parts.PARTS_BYTES // (4 * wgrad_parts.part_pitch(problem))
        most = max(1, min(steps // PART_STEPS, 4 * slots // tiles, room))
        least = ceil_div(steps, MOST_PART_PIXELS // STEP)
        wanted = {1, least, *(slots * part // (2 * tiles) for part in (1, 2, 4)), *(1 << power for power in range(6))}
        # Whole parts : none is without a step.
        return sorted({ceil_div(steps, ceil_div(steps, count)) for count in wanted if 1 <= count <= most})

    @staticmethod
    def steps(problem: ConvProblem) -> int:
        return ceil_div(problem.n * prod(problem.output), STEP)

    @staticmethod
    def _grid(problem: ConvProblem, config: Config) -> tuple[int, int, int]:
        """Tiles along columns, filters and groups."""
        tiles_c, tiles_f = ceil_div(columns_of(problem), config.columns), ceil_div(problem.group_k, config.filters)
        return tiles_c, tiles_f, ceil_div(problem.groups, config.groups_per_tile)

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        """The ring, or the sums in its place; where pixels lie, and columns."""
        ring = config.stages * sum(self._stage(problem, config, of_x) for of_x in (True, False))
        sums = config.groups_per_tile * config.filters * (config.columns + 4) * 4
        tables = config.groups_per_tile * (config.columns + config.filters) if problem.layout == "nchw" else 0
        return max(ring, sums) + ENTRY * (config.stages * STEP + tables)

    @staticmethod
    def _stage(problem: ConvProblem, config: Config, of_x: bool) -> int:
        """Bytes of an operand's step."""
        row = problem.itemsize * config.groups_per_tile * (config.columns if of_x else config.filters)
        whole = copies(problem, of_x).name == "PIXEL_PIECES" or row in (16, 32, 64)
        return STEP * (row if whole else round_up(row, 128))

    @staticmethod
    def _held(problem: ConvProblem, config: Config) -> int:
        """Registers of a thread's elements that are on their way through them."""
        held = 0
        for of_x, width in ((True, config.columns), (False, config.filters)):
            name, across = copies(problem, of_x).name, width * config.groups_per_tile // 2
            if name == "PIXELS":
                held += 8 * HELD_REGISTERS * ceil_div(across, 4 * config.warps)
            if name == "CHANNELS":
                rows = max(1, config.threads // across)
                held += 2 * HELD_REGISTERS * ceil_div(STEP, rows) * ceil_div(across, config.threads)
        return held

    def _registers(self, problem: ConvProblem, config: Config) -> int:
        """Of a thread, about."""
        rows, along = config.columns // config.warps_c // 16, config.filters // config.warps_f // 8
        fragments = 2 * (4 * rows + 2 * round_up(along, 2))
        return 4 * rows * along + fragments + self._held(problem, config) + OTHER_REGISTERS

    def _resident(self, problem: ConvProblem, config: Config) -> int:
        """CTAs that a multiprocessor is to hold: it bounds the registers."""
        return costs.blocks_of(min(255, self._registers(problem, config)), config.threads)

    def _together(self, problem: ConvProblem, config: Config, device: Device) -> int:
        """CTAs that a multiprocessor does hold."""
        room = occupancy.beside_of(device, self.shared_bytes(problem, config))
        return max(1, min(room, self._resident(problem, config)))

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Waves of CTAs: their steps take what a CTA waits for its copies, and what all CTAs of a multiprocessor issue;
        memory; parts, which are written, read and added."""
        issued = config.groups_per_tile * config.columns * config.filters * STEP * problem.itemsize / (2 * PRODUCTS)
        waited = WAIT_CYCLES
        for of_x in (True, False):
            turns, piece = self._turns(problem, config, of_x)
            waited += COPY_CYCLES * turns
            issued += config.warps * turns * (ISSUE_CYCLES + BYTE_CYCLES * piece)
        steps, together = ceil_div(self.steps(problem), config.split_k), self._together(problem, config, device)

        def wave(beside: int) -> float:
            """Cycles of so many CTAs beside each other on a multiprocessor."""
            return WAVE_CYCLES + steps * costs.joint_us(waited, beside * issued, OVERLAP) if beside else 0.0

        blocks = prod(self._grid(problem, config)) * config.split_k
        waves, rest = divmod(blocks, device.multiprocessors * together)
        cycles = waves * wave(together) + wave(ceil_div(rest, device.multiprocessors))
        bytes_us = device.gbps * 1e3
        memory_us = (problem.bytes + (1 / STORED - 1) * prod(problem.w_shape) * problem.itemsize) / bytes_us
        us = START_US + costs.joint_us(cycles / costs.cycles_us(device), memory_us, OVERLAP)
        if config.split_k > 1:
            us += SECOND_US + PART_US * ceil_div(config.split_k, wgrad_parts.slices_of(config.split_k))
            us += 2 * self.workspace_bytes(problem, config, device) / bytes_us
        return us

    @staticmethod
    def _turns(problem: ConvProblem, config: Config, of_x: bool) -> tuple[int, int]:
        """Copies of an operand that a thread issues a step, and bytes of one. An element through registers counts as
        one."""
        name, piece = copies(problem, of_x)
        width = config.groups_per_tile * (config.columns if of_x else config.filters)
        if name == "PIXELS":
            return 8 * ceil_div(width // 8, config.warps), piece
        if name == "PIXEL_PIECES":
            return ceil_div(width, config.threads * piece // (problem.itemsize * STEP)), piece
        across = width * problem.itemsize // piece
        rows = max(1, config.threads // across)
        return ceil_div(STEP, rows) * ceil_div(across, config.threads), piece

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return wgrad_parts.workspace_bytes(problem, config.split_k)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        launches = self.launches(problem, config, device)
        return WgradPlan(problem, device, launches, self.workspace_bytes(problem, config, device))

    def source(self, problem: ConvProblem, config: Config) -> Source:
        parts, run = config.split_k > 1, run_of(problem)
        written = gcd(problem.gemm_k, 4 if parts else PIECE // problem.itemsize) if run is None else 1
        words = (
            tensor_core_type(problem.dtype), problem.layout == "nchw", *copies(problem, True), *copies(problem, False),
            prod(problem.kernel) > 1, run is not None, config.columns, config.filters, config.groups_per_tile,
            config.warps_c, config.warps_f, config.stages, parts, written,
        )  # fmt: skip
        template, resident = f"Block<{template_args(*words)}>", self._resident(problem, config)
        return stub(KERNEL, "wgrad_mma", template, "Gradient", config.threads, resident)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        last = [wgrad_parts.sum_source(problem, config.split_k)] if config.split_k > 1 else []
        return [self.source(problem, config), *last]

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[Launch]:
        """The sums, and where pixels are split those of the parts."""
        source, (tiles_c, tiles_f, tiles_g) = self.source(problem, config), self._grid(problem, config)
        fields = wgrad_parts.fields(problem, source, STEP, config.split_k)
        fields |= {"columns": columns_of(problem), "tiles_c": tiles_c, "tiles_f": tiles_f}
        if run := run_of(problem):
            c, width = problem.c, problem.spatial[1]
            fields |= {"c": 1, "group_c": 1, "width": width * c, "stride_w": problem.stride[1] * c, "s": run.whole}
            fields |= {"pad_w": problem.padding[1][0] * c + run.before, "before": run.before, "real": run.real}
        names = {"parts": "workspace"}
        grid = (tiles_c * tiles_f * tiles_g, config.split_k, 1)
        shared_bytes = self.shared_bytes(problem, config)
        sums = Launch(source, fields, grid, config.threads, shared_bytes, dependent=True, names_of=names, balance=2)
        return [sums] if config.split_k == 1 else [sums, wgrad_parts.sum_launch(problem, config.split_k)]
