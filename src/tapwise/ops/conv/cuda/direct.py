"""cuda.direct: few channels; a tile of the image in shared memory, sums in registers.

`step` names a rung of the ladder, each one idea more than the one before:

    tile        a block's part of a channel in shared memory; each thread loads its place, those at the edge the halo
    even        the loads dealt out evenly over the threads
    wide        in copies of 16 bytes that do not pass through registers
    registers   all output channels in one pass, their sums in registers
    prefetch    the next input channels on their way while one is used
    outputs     several rows and columns of outputs a thread: fewer reads of shared memory for each multiply-add

Source: the method of the hand-written kernel of conv2d_direct, with the definition's filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import DTYPES, template_args
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.problem import ConvProblem

STEPS: Final = ("outputs", "prefetch", "registers", "wide", "even", "tile")
# Filters of more taps make the unrolled code too large; strides beyond make the tile too large.
MOST_TAPS: Final = 64
MOST_STRIDE: Final = 4
# Registers for sums of one thread.
MOST_SUMS: Final = 64
# Cycles of a block for an input channel beside its products: where it is loaded then, and where it was on its way.
WAIT_CYCLES: Final = (560, 340)
FEW_SUMS: Final = 48


@dataclass(frozen=True)
class Config(BaseConfig):
    """step: the rung; k output channels a pass; a block of across x down threads with px columns and ty rows each;
    stages of input channels in shared memory; `each` tiles a block, one below the other; `min_blocks_per_sm` blocks of
    128 threads, which bounds the registers."""

    step: str
    k: int
    across: int
    down: int
    px: int
    ty: int
    stages: int
    each: int = 1
    min_blocks_per_sm: int = 1


class Direct(CudaAlgorithm[Config]):
    """Few channels, filters of up to 64 taps, strides up to 4, no dilation; any padding and groups; NCHW; float32,
    float64, float16 and bfloat16 (in float32)."""

    id: ClassVar[str] = "cuda.direct"
    summary: ClassVar[str] = "tiles of the image in shared memory, sums of all output channels in registers"
    layouts: ClassVar[tuple[str, ...]] = ("nchw",)
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if window.is_large(problem):
            return window.TOO_LARGE
        if set(problem.dilation) != {1}:
            return f"takes no dilation, not {problem.dilation}"
        if problem.kernel[0] * problem.kernel[1] > MOST_TAPS:
            return f"takes filters of up to {MOST_TAPS} taps, not {problem.kernel[0] * problem.kernel[1]}"
        if max(problem.stride) > MOST_STRIDE:
            return f"takes strides up to {MOST_STRIDE}, not {problem.stride}"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        group_k = problem.k // problem.groups
        many = min(group_k, 4 if problem.dtype == "f64" else 8)
        # Channels in passes of even size.
        many = ceil_div(group_k, ceil_div(group_k, many))
        wide = 2 if problem.dtype == "f64" else 4
        found = []
        unit = set(problem.stride) == {1}
        stages = 4 if problem.c > 2 * problem.groups and unit else 2
        # So few sums leave room for four blocks a multiprocessor without spills.
        four = problem.dtype == "f32" and unit and not (problem.bias or problem.residual or problem.activation)
        for across, down in ((32, 4), (32, 2), (16, 4), (16, 8)):
            for ty in (2, 4, 3, 1):
                sums = many * ty * wide
                if sums > MOST_SUMS:
                    continue
                # Of configs that the model holds equal the first is taken.
                if four and sums <= FEW_SUMS and across * down == 128:
                    found.append(Config("outputs", many, across, down, wide, ty, stages, 1, 4))
                found += [Config("outputs", many, across, down, wide, ty, stages, each) for each in (1, 2, 4)]
        found.append(Config("prefetch", many, 32, 8, 1, 1, 3))
        found.append(Config("registers", many, 32, 8, 1, 1, 1))
        found += [Config(step, 1, 32, 8, 1, 1, 1) for step in STEPS[3:]]
        return [config for config in found if self.shared_bytes(problem, config) <= device.shared_bytes]

    def _tile(self, problem: ConvProblem, config: Config) -> tuple[int, int, int]:
        """(rows, columns, elements of the filters) of one stage, as the kernel works them out."""
        (stride_h, stride_w), (r, s) = problem.stride, problem.kernel
        vector = 16 // problem.itemsize
        read = round_up(self._shift(problem, config) + (config.px - 1) * stride_w + s, config.px)
        columns = round_up((config.across - 1) * config.px * stride_w + read, vector)
        rows = (config.down * config.ty - 1) * stride_h + r
        return rows, columns, round_up(r * s * round_up(config.k, 4 if config.k > 2 else config.k), vector)

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        """All stages of a block: its part of an input channel with the halo, and the channel's filters.

        And where a warp's sums are transposed for rows of y that a thread cannot write at once.
        """
        rows, columns, filters = self._tile(problem, config)
        transposed = 0
        if self._store(problem, config) < config.px:
            transposed = config.across * config.down * config.px * (8 if problem.dtype == "f64" else 4)
        return config.stages * (rows * columns + filters) * problem.itemsize + transposed

    def _store(self, problem: ConvProblem, config: Config) -> int:
        """Elements of y that a thread writes at once: all its columns, or single ones, transposed in shared memory."""
        return config.px if problem.output[1] % config.px == 0 else 1

    def _copy_bytes(self, problem: ConvProblem, config: Config) -> int:
        """Bytes of one copy: as many as a row of the image is a multiple of; 0 for loads through registers."""
        if config.step in ("even", "tile"):
            return 0
        row = problem.spatial[1] * problem.itemsize
        return next((size for size in (16, 8, 4) if row % size == 0 and size >= problem.itemsize), 0)

    def _shift(self, problem: ConvProblem, config: Config) -> int:
        """Elements before the tile, so that its rows begin on a multiple of a copy."""
        pieces = self._copy_bytes(problem, config) // problem.itemsize
        return -problem.padding[1][0] % pieces if pieces > 1 else 0

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """The larger of arithmetic and memory, three tenths of the smaller, and two microseconds for the start.

        Arithmetic: instructions of all blocks that the busiest multiprocessor gets, at 0.36 a cycle for each warp of a
        scheduler, and 0.77 at most. Memory: a block's loads, sums and stores alternate, so neither hides the other
        wholly. Constants are fitted to times of 500 configs on seven problems: the choice was within 6 % of the best.
        A block alone waits for each input channel: fitted to 190 times on 22 problems of one image (H200); the choice
        between this and implicit_gemm_simt went from 1.12 times the better one's time to 1.05.
        """
        (stride_h, stride_w), (r, s) = problem.stride, problem.kernel
        rows, columns, _ = self._tile(problem, config)
        blocks, warps = self._blocks(problem, config), config.across * config.down / 32
        # Of one thread and input channel: multiply-adds, reads of shared memory, copies.
        math = config.k * r * s * config.px * config.ty
        reads = ceil_div(config.px * stride_w + s, config.px) * ((config.ty - 1) * stride_h + r)
        reads += r * s * ceil_div(config.k, 4)
        copies = rows * columns / (config.across * config.down) / max(1, self._copy_bytes(problem, config) // 4)
        each = config.each * (
            problem.c // problem.groups * (math + reads + 37 * copies + 20) + 24 * config.k * config.ty
        )
        # Registers: the sums, the rows that they read, and sixty for the rest.
        registers = config.k * config.px * config.ty + columns // config.across * ((config.ty - 1) * stride_h + 1) + 60
        if config.min_blocks_per_sm > 1:
            registers = min(registers, 128)
        held = min(16, max(1, int(2048 / registers / warps)) * warps / 4) if config.px > 1 else 16
        share = ceil_div(blocks, device.multiprocessors)
        scheduler = min(held, share * warps / 4)
        cycles = each * share * warps / 4 / min(0.77, 0.355 * max(scheduler, 0.25))
        gigahertz = device.gflops / 256
        slow = {"f64": 2.0}.get(problem.dtype, 1.0)
        arithmetic = cycles * slow / gigahertz / 1e3
        channels = problem.c // problem.groups * config.each
        waits = channels * (WAIT_CYCLES[config.stages > 1] + 2 * config.k * r * s * config.ty) / gigahertz / 1e3
        memory = problem.bytes / (device.gbps * 1e3)
        return max(arithmetic, memory, waits) + 0.3 * min(arithmetic, memory) + 2.0

    def _blocks(self, problem: ConvProblem, config: Config) -> int:
        p, q = problem.output
        passes = ceil_div(problem.k // problem.groups, config.k) * problem.groups
        tiles = ceil_div(q, config.across * config.px) * ceil_div(p, config.down * config.ty * config.each)
        return tiles * passes * problem.n

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return window.WindowPlan(problem, device, [self.launch(problem, config)])

    def source(self, problem: ConvProblem, config: Config) -> Source:
        copy = self._copy_bytes(problem, config)
        load = {"tile": "HALO", "even": "EVEN"}.get(config.step, "COPY" if copy else "EVEN")
        words = template_args(
            DTYPES[problem.dtype].cpp, config.k, *problem.kernel, *problem.stride, config.across, config.down,
            config.px, config.ty, config.stages, load, max(copy, 4), self._shift(problem, config),
            self._store(problem, config), config.each, problem.bias, problem.residual,
            window.activation(problem.activation),
        )  # fmt: skip
        threads = config.across * config.down
        return stub("ops/conv/cuda/direct.cu", "direct", words, "Window", threads, config.min_blocks_per_sm)

    def launch(self, problem: ConvProblem, config: Config) -> Launch:
        source = self.source(problem, config)
        fields = window.window_fields(problem, source)
        fields["tiles_q"] = ceil_div(fields["q"], config.across * config.px)
        fields["tiles_p"] = ceil_div(fields["p"], config.down * config.ty * config.each)
        fields["tiles_k"] = ceil_div(problem.group_k, config.k) * problem.groups
        grid = (self._blocks(problem, config), 1, 1)
        return Launch(
            source, fields, grid, config.across * config.down, self.shared_bytes(problem, config), dependent=True
        )
