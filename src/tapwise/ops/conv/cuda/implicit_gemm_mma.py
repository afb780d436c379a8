"""cuda.implicit_gemm_mma: warp-level tensor core instructions, windows gathered by threads; any channels, either
memory order.

Where pixels have whole pieces of 4, 8 or 16 bytes of channels, they are copied asynchronously, several steps ahead.
Else, and for NCHW, elements pass through registers. gemm_k runs over taps and channels as one number, so a group of
eight channels fills the instruction's sixteen. Small problems split gemm_k: sums of parts go to the workspace and are
added in a fixed order.

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014; PTX ISA, mma.sync. 3xtf32: Ootomo and
Yokota, "Recovering single precision accuracy from tensor cores", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import INDEX_LIMIT, template_args, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import pack, window
from tapwise.ops.conv.cuda.window import OutputStrides
from tapwise.ops.conv.problem import ConvProblem

# Bytes of a row of gemm_k in shared memory.
SPAN: Final = 64
# (pixels, filters, warps along pixels, warps along filters) of a block.
TILES: Final = (
    (128, 128, 2, 4), (128, 64, 4, 2), (64, 64, 2, 2), (64, 128, 2, 4), (128, 32, 4, 1), (64, 32, 4, 1), (128, 16, 4,
    1), (64, 16, 4, 1), (128, 8, 4, 1), (256, 64, 4, 2), (32, 64, 1, 4), (64, 96, 2, 2), (128, 96, 4, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Config(BaseConfig):
    """A tile of pixels x filters of each of `groups_per_tile` groups, by warps_m x warps_n warps a group; stages;
    `split_k` parts of gemm_k."""

    pixels: int
    filters: int
    groups_per_tile: int
    warps_m: int
    warps_n: int
    stages: int
    split_k: int

    @property
    def threads(self) -> int:
        return 32 * self.groups_per_tile * self.warps_m * self.warps_n


class MmaPlan(CudaPlan):
    """The product, and where gemm_k is split the sum of its parts."""

    def __init__(self, problem: ConvProblem, device: Device, launches: Sequence[Launch], pitch: int, size: int) -> None:
        super().__init__(problem, device, launches, size)
        self._pitch, self._device = pitch, device

    def pack(self, w: Any) -> DeviceArray:
        """The filters as [k][tap][channel], filters on a multiple of 16 bytes."""
        return pack.filters(self.problem, w, self.problem.group_c, self._device, self._pitch, False)


class ImplicitGemmMma(window.TensorCoreAlgorithm[Config]):
    """Any stride, padding, dilation, groups and channels; NHWC and NCHW; float16, bfloat16, and float32 with
    math="tf32" or "3xtf32". Compute capability 8.0 and newer."""

    id: ClassVar[str] = "cuda.implicit_gemm_mma"
    summary: ClassVar[str] = "tensor cores (mma.sync), windows gathered by threads"

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if problem.n * prod(problem.output) >= INDEX_LIMIT or max(*problem.spatial, problem.gemm_k) >= 1 << 29:
            return "takes fewer than 2^31 output pixels, 2^29 rows or columns, and 2^29 terms of a sum"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        found = []
        steps = self.steps(problem)
        counts = [1]
        if problem.groups > 1 and problem.group_k % 8 == 0:
            counts += [count for count in (2, 4, 8) if count <= problem.groups]
        for groups_per_tile in counts:
            for pixels, filters, warps_m, warps_n in TILES:
                if groups_per_tile > 1 and (filters != problem.group_k or filters > 32):
                    continue
                if groups_per_tile > 1:
                    # A warp or two a group: the block has 128 to 256 threads.
                    warps_m, warps_n = max(1, 4 // groups_per_tile), 1
                for split_k in (1, 2, 4, 8, 16, 32):
                    for stages in (4, 3):
                        config = Config(pixels, filters, groups_per_tile, warps_m, warps_n, stages, split_k)
                        if split_k * 2 <= max(2, steps) and self.shared_bytes(problem, config) <= device.shared_bytes:
                            found.append(config)
        return found

    def steps(self, problem: ConvProblem) -> int:
        return ceil_div(problem.gemm_k * problem.itemsize, SPAN)

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        """The ring, or the sums in its place, and where the windows of a tile's pixels begin."""
        ring = config.stages * (config.pixels + config.filters) * config.groups_per_tile * SPAN
        sums = config.pixels * (config.filters * config.groups_per_tile + 4) * 4
        return max(ring, sums) + 16 * config.pixels

    def _grid(self, problem: ConvProblem, config: Config) -> tuple[int, int, int]:
        """Tiles along a group's filters, tiles of groups, pixels."""
        tiles_k, tiles_g = ceil_div(problem.group_k, config.filters), ceil_div(problem.groups, config.groups_per_tile)
        return tiles_k, tiles_g, ceil_div(problem.n * prod(problem.output), config.pixels)

    def _piece(self, problem: ConvProblem) -> int:
        """Bytes of x that are copied at once; 0 for elements through registers."""
        sizes = () if problem.layout == "nchw" else (16, 8, 4)
        return next((count for count in sizes if problem.group_c * problem.itemsize % count == 0), 0)

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Tiles a multiprocessor times what a step takes: the instructions, or the addresses of what is gathered, or
        its latency shared by the blocks that a multiprocessor holds; and memory. Constants are cycles (H200), fitted
        to 75 configs on ten layers: the mean error of the logarithm is 0.17."""
        tiles_k, tiles_g, tiles_pixels = self._grid(problem, config)
        blocks = tiles_k * tiles_g * tiles_pixels * config.split_k
        steps = ceil_div(self.steps(problem), config.split_k)
        warps = config.groups_per_tile * config.warps_m * config.warps_n
        room = device.shared_bytes // self.shared_bytes(problem, config)
        together = max(1, min(room, 48 // warps, 6, ceil_div(blocks, device.multiprocessors)))
        piece = self._piece(problem)
        outputs = config.pixels * config.filters * config.groups_per_tile
        # Three products, and taking numbers apart in registers.
        product = outputs * 0.067 * (4.5 if problem.math == "3xtf32" else 1)
        gathered = config.pixels * config.groups_per_tile * SPAN / 32
        gathered *= 32.4 / piece if piece else 26.0 / problem.itemsize
        step = max(product, gathered + config.filters * config.groups_per_tile * 1.1) + 30
        share = ceil_div(blocks, device.multiprocessors)
        cycles = share * (steps * max(step, 1230 / together) + 0.43 * outputs) + 660
        memory = (problem.bytes + 2 * self.workspace_bytes(problem, config, device)) / (device.gbps * 1e3)
        # Launches begin while the one before ends.
        return max(cycles / 1700, memory) + 1.0 + (1.5 if config.split_k > 1 else 0.0)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return config.split_k * prod(problem.y_shape) * 4 if config.split_k > 1 else 0

    def writes_strided(self, problem: ConvProblem, config: Config) -> bool:
        return problem.layout == "nhwc"

    def plan(self, problem: ConvProblem, config: Config, device: Device, strides: OutputStrides | None = None) -> Plan:
        launches = [self.launch(problem, config, strides)]
        if config.split_k > 1:
            launches.append(self.sum_launch(problem, config, device, strides))
        return MmaPlan(problem, device, launches, self._pitch(problem), self.workspace_bytes(problem, config, device))

    def _pitch(self, problem: ConvProblem) -> int:
        return round_up(problem.gemm_k, 16 // problem.itemsize)

    def source(self, problem: ConvProblem, config: Config, strides: OutputStrides | None = None) -> Source:
        piece = self._piece(problem)
        size = problem.itemsize
        inner = problem.group_k
        written = next(count for count in (16 // size, 8 // size, 4 // size, 1) if count and inner % count == 0)
        parts = config.split_k > 1
        words = (
            tensor_core_type(problem.dtype), piece, problem.layout == "nchw", config.pixels, config.filters,
            config.groups_per_tile, config.warps_m, config.warps_n, config.stages, parts, problem.math == "3xtf32",
            written, problem.layout == "nchw" and not parts, problem.bias and not parts,
            problem.residual and not parts, "NONE" if parts else window.activation(problem.activation),
            strides is not None and not parts,
        )  # fmt: skip
        template = f"Block<{template_args(*words)}>"
        return stub("ops/conv/cuda/implicit_gemm_mma.cu", "implicit_gemm_mma", template, "Gather", config.threads)

    def sum_source(self, problem: ConvProblem, strides: OutputStrides | None = None) -> Source:
        last = problem.bias, problem.residual, window.activation(problem.activation), strides is not None
        words = template_args(tensor_core_type(problem.dtype), problem.layout == "nchw", *last)
        return stub("ops/conv/cuda/implicit_gemm_mma.cu", "add_parts", words, "Parts", pack.THREADS)

    def sources(self, problem: ConvProblem, config: Config, strides: OutputStrides | None = None) -> list[Source]:
        last = [self.sum_source(problem, strides)] if config.split_k > 1 else []
        return [pack.filters_source(problem, False), self.source(problem, config, strides), *last]

    def launch(self, problem: ConvProblem, config: Config, strides: OutputStrides | None = None) -> Launch:
        source, steps = self.source(problem, config, strides), self.steps(problem)
        tiles_k, tiles_g, tiles_pixels = self._grid(problem, config)
        (height, width), c = problem.spatial, problem.c
        step_c, step_w = (1, c) if problem.layout == "nhwc" else (height * width, 1)
        fields = window.window_fields(problem, source) | {
            "depth": problem.gemm_k, "pitch": self._pitch(problem), "pixels": problem.n * prod(problem.output),
            "tiles_k": tiles_k, "tiles_g": tiles_g, "steps": steps, "part_steps": ceil_div(steps, config.split_k),
            "step_n": c * height * width, "step_c": step_c, "step_h": width * step_w, "step_w": step_w,
        } | window.stride_fields(strides)  # fmt: skip
        return Launch(
            source, fields, (tiles_k * tiles_g * tiles_pixels, config.split_k, 1), config.threads,
            self.shared_bytes(problem, config), dependent=True, names_of={"parts": "workspace"},
        )  # fmt: skip

    def sum_launch(
        self, problem: ConvProblem, config: Config, device: Device, strides: OutputStrides | None = None
    ) -> Launch:
        count = prod(problem.y_shape)
        fields = {
            "count": count, "k": problem.k, "plane": prod(problem.output), "split_k": config.split_k,
            "q": problem.output[1],
        } | window.stride_fields(strides)  # fmt: skip
        grid = (max(1, min(ceil_div(count, pack.THREADS), 16 * device.multiprocessors)), 1, 1)
        names = {"parts": "workspace"}
        return Launch(self.sum_source(problem, strides), fields, grid, pack.THREADS, dependent=True, names_of=names)
