"""cuda.implicit_gemm of wgrad: Hopper's tensor cores fed by TMA; no window is ever written to global memory.

gemm_m is filters, gemm_n channels of taps, gemm_k pixels. Pixels are the slow axis of both operands in shared memory,
[pixel][64 channels], which the matrix instruction takes as transposed. Two kernels. wgrad.cu: a CTA tile's columns are
blocks of 64 channels, each of one tap: x comes by TMA's im2col mode at the tap's offset, dy as it lies. wgrad_halo.cu
(stride 1): x of one block of channels comes once for all taps, which are the same memory from a later pixel. gemm_k is
split so that all multiprocessors have work; parts go to the workspace and are added in a fixed order.

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014; PTX ISA on wgmma (canonical layouts of
MN-major operands) and cp.async.bulk.tensor (im2col mode).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, struct_words, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.jit.tensor_map import TensorMap, legal
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.cuda.costs import joint_us
from tapwise.ops.conv.cuda.gradients import MOST_PART_PIXELS
from tapwise.ops.conv.cuda.implicit_gemm.launches import instruction
from tapwise.ops.conv.cuda.implicit_gemm.view import corners_of, last_offsets, padded
from tapwise.ops.conv.problem import ConvProblem

FOLDER: Final = "ops/conv/cuda/implicit_gemm_wgrad"
# Channels of a block: a row of 128 bytes. Pixels of a step.
BLOCK: Final = 64
STEP_PIXELS: Final = 64
BLOCK_BYTES: Final = STEP_PIXELS * BLOCK * 2
# (filters, columns, warpgroups, CTAs a multiprocessor).
TILES: Final = (
    (128, 256, 2, 1), (256, 128, 2, 1), (128, 192, 2, 1), (192, 192, 3, 1), (64, 576, 3, 1), (128, 128, 2, 1),
    (128, 128, 2, 2), (64, 256, 1, 1), (64, 192, 1, 2), (64, 128, 1, 2), (128, 64, 2, 2),
    (64, 64, 1, 3),
)  # fmt: skip
MOST_STAGES: Final = 6
# Bytes of shared memory that a block has beside its own, and that align its stages and hold barriers.
BLOCK_SHARED: Final = 1 << 10
MORE_BYTES: Final = 1024 + 16 * MOST_STAGES
# Of the halo kernel: rows of taps, one a warpgroup, and taps of a row, as many as registers hold; pixels that the last
# tap of a row may be ahead of the first: a copy of the ring's first pixels lies behind its last.
MOST_TAPS: Final = (3, 3)
MOST_APART: Final = STEP_PIXELS - 16
# Steps that a part has at least.
LEAST_STEPS: Final = 2
# Threads of a block that adds parts; threads that share them, and parts that each of these adds at least.
ADDERS: Final = 256
SLICES: Final = (8, 4, 2)
LEAST_PARTS: Final = 4

# Fitted to times of 430 configs on 20 layers (H100). Cycles of a microsecond under load. Of a step: cycles until a copy
# is there, which stages under way share; of each block's copy, and of im2col's coordinates. How much longer copies take
# of pixels that do not begin at a multiple of LINE_BYTES.
CYCLES_US: Final = 1700.0
COPY_LATENCY, COPY_CYCLES, IM2COL_CYCLES = 420.0, 142.5, 217.0
STRADDLING: Final = 1.62
LINE_BYTES: Final = 128
# Cycles of a wave's begin and end; bytes a microsecond of parts that are written or read; microseconds of the launch
# that adds them (assumed: the data tell its sum with the begin).
BEGIN_CYCLES: Final = 1100.0
PARTS_BYTES: Final = 3.1e6
SECOND_US: Final = 0.5


@dataclass(frozen=True)
class Config(BaseConfig):
    """A CTA tile of `tile_filters` x `tile_columns` (channels of taps) by so many `warpgroups`; `stages` of 64 pixels;
    `split_k` parts of the pixels; `min_blocks_per_sm`: CTAs that a multiprocessor has room for. `halo`: columns are one
    block of channels of all taps, copied once."""

    halo: bool
    tile_filters: int
    tile_columns: int
    warpgroups: int
    stages: int
    min_blocks_per_sm: int
    split_k: int

    @property
    def threads(self) -> int:
        """Warpgroups and a warp that copies."""
        return 128 * self.warpgroups + 32

    @property
    def instruction_n(self) -> int:
        """Columns of a matrix instruction: warpgroups share the filters where each gets 64, or else the columns."""
        across = 1 if self.tile_filters // BLOCK % self.warpgroups == 0 else self.warpgroups
        return self.tile_columns // across

    @property
    def stages_ahead(self) -> int:
        """Stages that copies are under way to, while one warpgroup's products of two steps are, or several's of one."""
        return max(1, self.stages - (2 if self.warpgroups == 1 else 1))


@dataclass(frozen=True)
class Grid:
    """Tiles of dw: along the columns and the filters of a group, and all; blocks of a group's channels; steps, and how
    many of them the last tap is ahead (halo)."""

    tiles_n: int
    tiles_m: int
    tiles: int
    channel_blocks: int
    steps: int
    ahead: int

    @classmethod
    def of(cls, problem: ConvProblem, config: Config) -> Grid:
        blocks, ahead = ceil_div(problem.group_c, BLOCK), 0
        down, pixels = ceil_div(problem.group_k, config.tile_filters), problem.n * prod(problem.output)
        across = ceil_div(prod(problem.kernel) * blocks, config.tile_columns // BLOCK)
        if config.halo:
            (_, wide), (reach_h, reach_w) = padded(problem), problem.reach
            across, pixels = blocks, problem.n * prod(padded(problem))
            ahead = (STEP_PIXELS - 1 + (reach_h - 1) * wide + reach_w - 1) // STEP_PIXELS
        return cls(across, down, across * down * problem.groups, blocks, ceil_div(pixels, STEP_PIXELS), ahead)

    def shared_bytes(self, config: Config) -> int:
        """Stages; in a ring of x the steps that the last tap is ahead, and the first pixels once more."""
        stage = (config.tile_filters + (BLOCK if config.halo else config.tile_columns)) // BLOCK * BLOCK_BYTES
        return config.stages * stage + (self.ahead + 1) * BLOCK_BYTES * config.halo + MORE_BYTES


class WeightGradientPlan(CudaPlan):
    """The products, and where gemm_k is split the sum of its parts."""

    def pack(self, w: Any) -> Any:
        """dy is read as it lies."""
        return w


class ImplicitGemmWgrad(window.TensorCoreAlgorithm[Config]):
    """Channels and filters in multiples of 8, those of groups of 64, any stride up to 8, padding and dilation; NHWC;
    float16 and bfloat16. Hopper."""

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cuda.implicit_gemm"
    summary: ClassVar[str] = "tensor cores (wgmma) fed by TMA, transposed operands"
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16")
    layouts: ClassVar[tuple[str, ...]] = ("nhwc",)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if device.architecture != "sm_90a":
            return f"needs Hopper (sm_90a), not {device.architecture}"
        if max(map(prod, (problem.x_shape, problem.y_shape, problem.w_shape))) >= INDEX_LIMIT:
            return "takes fewer than 2^31 elements"
        whole = 8 if problem.groups == 1 else BLOCK
        if problem.group_c % whole or problem.group_k % whole:
            of = "" if problem.groups == 1 else " of each group"
            return (
                f"takes channels and filters{of} in multiples of {whole}, not {problem.group_c} and {problem.group_k}"
            )
        seen = problem.replace(groups=1)
        if not is_pointwise(problem) and not legal(corners_of(seen), last_offsets(seen), seen.stride):
            return f"takes padding, dilation and strides that a tensor map can express, not those of '{problem}'"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        found: list[Config] = []
        # All taps of a block of channels, and a copy of 64 filters.
        taps = problem.kernel
        halo = [(BLOCK, prod(taps) * BLOCK, taps[0], 1, True)] if has_halo(problem) else []
        for filters, columns, warpgroups, beside, is_halo in [*halo, *((*tile, False) for tile in TILES)]:
            # Twice as many filters or columns as there are: most products would be dropped.
            wide = prod(problem.kernel) * ceil_div(problem.group_c, BLOCK) * BLOCK
            if filters >= 2 * max(problem.group_k, BLOCK) or columns >= 2 * wide:
                continue
            first = Config(is_halo, filters, columns, warpgroups, 1, beside, 1)
            grid = Grid.of(problem, first)
            room = (device.shared_bytes + BLOCK_SHARED) // beside - BLOCK_SHARED
            staged = (replace(first, stages=stages) for stages in range(MOST_STAGES, 1, -1))
            for config in staged:
                if grid.shared_bytes(config) <= room:
                    parts = splits(grid, device.multiprocessors, beside)
                    found += [replace(config, split_k=split_k) for split_k in parts]
                    break
        return sorted(found, key=lambda config: self.predict_us(problem, config, device))

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Waves of CTAs, of steps that take the longest of products, copies, and what a CTA alone waits for its copies;
        memory; parts, which are written and read, and their launch."""
        grid = Grid.of(problem, config)
        steps = ceil_div(grid.steps, config.split_k) + grid.ahead / 2
        rows, columns = config.tile_filters // BLOCK, 1 if config.halo else config.tile_columns // BLOCK
        product = 2 * rows * config.tile_columns
        straddling = [STRADDLING if count * problem.itemsize % LINE_BYTES else 1.0 for count in (problem.k, problem.c)]
        copies = COPY_CYCLES * (rows * straddling[0] + columns * straddling[1])
        alone = COPY_LATENCY / config.stages_ahead + COPY_CYCLES * (rows + columns)
        if not is_pointwise(problem):
            alone += IM2COL_CYCLES

        def wave(beside: int) -> float:
            """Cycles of so many CTAs beside each other on a multiprocessor, which they share."""
            return BEGIN_CYCLES + steps * max(beside * max(product, copies), alone) if beside else 0.0

        together = config.min_blocks_per_sm
        waves, rest = divmod(grid.tiles * config.split_k, device.multiprocessors * together)
        busy = (waves * wave(together) + wave(ceil_div(rest, device.multiprocessors))) / CYCLES_US
        parts_us = 0.0
        if config.split_k > 1:
            parts_us = SECOND_US + 2 * self.workspace_bytes(problem, config, device) / PARTS_BYTES
        return joint_us(busy, problem.bytes / (device.gbps * 1e3), 3.0) + parts_us

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        if config.split_k == 1:
            return 0
        grid = Grid.of(problem, config)
        return grid.tiles * config.split_k * config.tile_filters * config.tile_columns * 4

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        needed = self.workspace_bytes(problem, config, device)
        return WeightGradientPlan(problem, device, self.launches(problem, config, device), needed)

    def _traits(self, problem: ConvProblem, config: Config) -> str:
        words = ("tile_filters", "tile_columns", "warpgroups", "stages")
        values = {word.upper(): getattr(config, word) for word in words}
        values |= {"SPLIT": config.split_k > 1, "HALO": config.halo}
        values["POINTWISE"] = is_pointwise(problem)
        return traits(tensor_core_type(problem.dtype), values)

    def source(self, problem: ConvProblem, config: Config) -> Source:
        file, name, words = ("wgrad", "weight_gradient", "WeightGradient")
        if config.halo:
            file, name, words = f"{file}_halo", f"{name}_halo", f"Halo{words}"
        return stub(
            f"{FOLDER}/{file}.cu", name, "Traits", words, config.threads,
            config.min_blocks_per_sm, instruction(problem.dtype, config.instruction_n, True, True),
            declarations=self._traits(problem, config),
        )  # fmt: skip

    def sum_source(self, problem: ConvProblem, config: Config) -> Source:
        """The kernel that adds parts."""
        words = f"Traits, {slices(config)}"
        return stub(
            f"{FOLDER}/parts.cu", "add_wgrad_parts", words, "WgradParts", ADDERS,
            declarations=self._traits(problem, config),
        )  # fmt: skip

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        last = [self.sum_source(problem, config)] if config.split_k > 1 else []
        return [self.source(problem, config), *last]

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[Launch]:
        source, grid = self.source(problem, config), Grid.of(problem, config)
        fields = window.window_fields(problem, source) | {
            "filters": problem.group_k, "channels": problem.group_c, "channel_blocks": grid.channel_blocks,
            "taps": prod(problem.kernel), "taps_w": problem.kernel[1], "tiles_n": grid.tiles_n,
            "tiles_m": grid.tiles_m, "tiles": grid.tiles, "steps": grid.steps, "split_k": config.split_k,
        }  # fmt: skip
        if config.halo:
            fields["high"], fields["wide"] = padded(problem)
            fields["ahead"] = grid.ahead
        words = struct_words(source)
        fields = {name: value for name, value in fields.items() if name in words}
        names = {"dy": "w", "dw": "y", "parts": "workspace"}
        maps = {"x": map_x(problem, config.halo), "dy": map_dy(problem, config.halo)}
        blocks, shared_bytes = (grid.tiles * config.split_k, 1, 1), grid.shared_bytes(config)
        product = Launch(source, fields, blocks, config.threads, shared_bytes, maps, True, names)
        if config.split_k == 1:
            return [product]
        last = self.sum_source(problem, config)
        words = struct_words(last)
        quads = grid.tiles * config.tile_filters * config.tile_columns // 4
        blocks = (quads // (ADDERS // slices(config)), 1, 1)
        fields = {name: value for name, value in fields.items() if name in words}
        return [product, Launch(last, fields, blocks, ADDERS, dependent=True, names_of=names)]


def is_pointwise(problem: ConvProblem) -> bool:
    """Whether each output pixel's window is the input's pixel of the same number."""
    return problem.kernel == problem.stride == (1, 1) and not any(map(any, problem.padding))


def splits(grid: Grid, multiprocessors: int, beside: int) -> Iterator[int]:
    """Parts of gemm_k that give every other multiprocessor a CTA, each one to as many as it has room for, or two waves
    of these; and as few parts as may be."""
    least, most = ceil_div(grid.steps, MOST_PART_PIXELS // STEP_PIXELS), max(1, grid.steps // LEAST_STEPS)
    halves = (1, *range(2, 2 * beside + 1, 2), 4 * beside)
    wanted = {least, *(max(least, half * multiprocessors // (2 * grid.tiles)) for half in halves)}
    yield from sorted({min(split_k, most) for split_k in wanted})


def slices(config: Config) -> int:
    """Threads that share the parts of a sum."""
    return next((count for count in SLICES if config.split_k >= count * LEAST_PARTS), 1)


def has_halo(problem: ConvProblem) -> bool:
    """Whether the halo kernel takes it: stride 1, a few taps, windows that begin within an image's padded rows."""
    (high, wide), (p, q), steps = padded(problem), problem.output, (1, 1)
    few = all(taps <= most for taps, most in zip(problem.kernel, MOST_TAPS, strict=True))
    if problem.stride != steps or prod(problem.kernel) == 1 or not few or p > high or q > wide:
        return False
    near = problem.reach[1] - 1 <= MOST_APART and problem.n * high * wide < INDEX_LIMIT - (1 << 20)
    corners = (*_corners_x(problem), *_corners_dy(problem))
    return near and legal(corners[:2], (0, 0), steps) and legal(corners[2:], (0, 0), steps)


Corners = tuple[tuple[int, ...], tuple[int, ...]]


def _corners_x(problem: ConvProblem) -> Corners:
    """Where padded rows begin and end, innermost axis first: neighbours share their padding."""
    sides = problem.padding[::-1]
    return tuple(-before for before, _ in sides), tuple(max(0, after - before) for before, after in sides)


def _corners_dy(problem: ConvProblem) -> Corners:
    """Outputs are counted like the pixels where their windows begin."""
    rows = zip(padded(problem)[::-1], problem.output[::-1], strict=True)
    return (0, 0), tuple(size - count for size, count in rows)


def map_x(problem: ConvProblem, halo: bool) -> TensorMap:
    """x as windows, as padded rows (`halo`), or as rows of pixels; a copy is 64 channels of a step's pixels. Beyond the
    last image it is zeros, as it is in padding and behind the last channel."""
    if is_pointwise(problem):
        return _rows(problem, problem.c, problem.n * prod(problem.spatial))
    corners = _corners_x(problem) if halo else corners_of(problem.replace(groups=1))
    return _windows(problem, problem.c, problem.spatial, corners, problem.stride[::-1])


def map_dy(problem: ConvProblem, halo: bool) -> TensorMap:
    """dy as rows of pixels, or as padded rows (`halo`); a copy is 64 filters of a step's pixels, or zeros."""
    if halo:
        return _windows(problem, problem.k, problem.output, _corners_dy(problem), (1, 1))
    return _rows(problem, problem.k, problem.n * prod(problem.output))


def _rows(problem: ConvProblem, channels: int, pixels: int) -> TensorMap:
    return TensorMap(problem.dtype, (channels, pixels), (channels * problem.itemsize,), (BLOCK, STEP_PIXELS))


def _windows(
    problem: ConvProblem, channels: int, image: tuple[int, ...], corners: Corners, steps: tuple[int, ...]
) -> TensorMap:
    (h, w), pixel = image, channels * problem.itemsize
    strides = (pixel, pixel * w, pixel * w * h)
    return TensorMap(problem.dtype, (channels, w, h, problem.n), strides, (BLOCK, STEP_PIXELS), corners, steps)
