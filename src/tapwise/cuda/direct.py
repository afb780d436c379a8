"""cuda.direct: few channels; a tile of the image in shared memory, sums in registers.

`step` names a rung of the ladder, each one idea more than the one before:

    tile        a block's part of a channel in shared memory; each thread loads its place, those at the edge the halo
    even        the loads dealt out evenly over the threads
    wide        in copies of 16 bytes that do not pass through registers
    registers   all output channels in one pass, their sums in registers
    prefetch    the next input channels on their way while one is used
    outputs     several rows and columns of outputs a thread: fewer reads of shared memory for each multiply-add

Source: the method of the hand-written kernel in the source documents (S0), with the definition's filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cuda import plan as plans
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.problem import ConvProblem

STEPS: Final = ("outputs", "prefetch", "registers", "wide", "even", "tile")
# Filters of more taps make the unrolled code too large; strides beyond make the tile too large.
MOST_TAPS: Final = 64
MOST_STRIDE: Final = 4
# Registers for sums of one thread.
MOST_SUMS: Final = 64


@dataclass(frozen=True)
class Config(BaseConfig):
    """step: the rung; k output channels a pass; a block of across x down threads with px columns and ty rows each;
    stages of input channels in shared memory."""

    step: str
    k: int
    across: int
    down: int
    px: int
    ty: int
    stages: int
    rolled: bool


class Direct(Algorithm[Config]):
    """Few channels, filters of up to 64 taps, strides up to 4, no dilation; any padding and groups; NCHW; float32,
    float64, float16 (in float32)."""

    id: ClassVar[str] = "cuda.direct"
    summary: ClassVar[str] = "tiles of the image in shared memory, sums of all output channels in registers"

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        reason = plans.rejects_window(problem, device)
        if reason is not None:
            return reason
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
        many = -(-group_k // -(-group_k // many))
        wide = 2 if problem.dtype == "f64" else 4
        found = []
        for across, down in ((32, 4), (32, 2), (16, 8), (32, 8), (16, 4), (8, 8)):
            for ty in (2, 4, 1):
                for stages in (3, 4, 2):
                    if many * ty * wide <= MOST_SUMS:
                        found += [
                            Config("outputs", many, across, down, wide, ty, stages, rolled) for rolled in (False, True)
                        ]
        found.append(Config("prefetch", many, 32, 8, 1, 1, 3, False))
        found.append(Config("registers", many, 32, 8, 1, 1, 1, False))
        found += [Config(step, 1, 32, 8, 1, 1, 1, False) for step in STEPS[3:]]
        return [config for config in found if self.shared_bytes(problem, config) <= device.shared_bytes]

    def _tile(self, problem: ConvProblem, config: Config) -> tuple[int, int, int]:
        """(rows, columns, elements of the filters) of one stage, as the kernel works them out."""
        (stride_h, stride_w), (r, s) = problem.stride, problem.kernel
        vector = 16 // plans.SIZES[problem.dtype]
        read = _round_up(self._shift(problem, config) + (config.px - 1) * stride_w + s, config.px)
        columns = _round_up((config.across - 1) * config.px * stride_w + read, vector)
        rows = (config.down * config.ty - 1) * stride_h + r
        return rows, columns, _round_up(r * s * _round_up(config.k, 4 if config.k > 2 else config.k), vector)

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        """All stages of a block: its part of an input channel with the halo, and the channel's filters."""
        rows, columns, filters = self._tile(problem, config)
        return config.stages * (rows * columns + filters) * plans.SIZES[problem.dtype]

    def _copy_bytes(self, problem: ConvProblem, config: Config) -> int:
        """Bytes of one copy: as many as a row of the image is a multiple of; 0 for loads through registers."""
        if config.step in ("even", "tile"):
            return 0
        row = problem.spatial[1] * plans.SIZES[problem.dtype]
        return next((size for size in (16, 8, 4) if row % size == 0 and size >= plans.SIZES[problem.dtype]), 0)

    def _shift(self, problem: ConvProblem, config: Config) -> int:
        """Elements before the tile, so that its rows begin on a multiple of a copy."""
        pieces = self._copy_bytes(problem, config) // plans.SIZES[problem.dtype]
        return -problem.padding[1][0] % pieces if pieces > 1 else 0

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Arithmetic at the share of a thread's instructions that are multiply-adds, blocks in waves."""
        (_, stride_w), (r, s) = problem.stride, problem.kernel
        rows, columns, _ = self._tile(problem, config)
        blocks = self._blocks(problem, config)
        # Of one thread and input channel: multiply-adds, reads of shared memory, loads of the tile.
        math = config.k * r * s * config.px * config.ty
        read = -(-(config.px * stride_w + s) // config.px) * ((config.ty - 1) * problem.stride[0] + r)
        reads = read + r * s * -(-config.k // 4) + rows * columns / (config.across * config.down) / 2
        per_thread = problem.c // problem.groups * (math + 2.0 * reads) + 200
        threads = blocks * config.across * config.down
        lanes = device.gflops / 2
        busy = max(1.0, -(-blocks // device.threads) / (blocks / device.threads))
        arithmetic = per_thread * threads / (lanes * device.threads * 1e3) * busy
        return max(arithmetic, problem.bytes / (device.gbps * 1e3 * 0.8)) + 2.0

    def _blocks(self, problem: ConvProblem, config: Config) -> int:
        p, q = problem.output
        passes = -(-(problem.k // problem.groups) // config.k) * problem.groups
        return -(-q // (config.across * config.px)) * -(-p // (config.down * config.ty)) * passes * problem.n

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return 0

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return plans.CudaPlan(problem, device, [self.launch(problem, config)])

    def source(self, problem: ConvProblem, config: Config) -> Source:
        copy = self._copy_bytes(problem, config)
        load = {"tile": "HALO", "even": "EVEN"}.get(config.step, "COPY" if copy else "EVEN")
        store = next(size for size in (4, 2, 1) if config.px % size == 0 and problem.output[1] % size == 0)
        words = (
            plans.TYPES[problem.dtype], config.k, *problem.kernel, *problem.stride, config.across, config.down,
            config.px, config.ty, config.stages, load, max(copy, 4), self._shift(problem, config),
            store, "true" if config.rolled else "false",
            plans.ACTIVATIONS[problem.activation],
        )  # fmt: skip
        threads = config.across * config.down
        return stub(
            "direct.cu", "direct", ", ".join(map(str, words)), "Window", threads, header=plans.header(problem.dtype)
        )

    def launch(self, problem: ConvProblem, config: Config) -> Launch:
        fields = plans.window_fields(problem)
        fields["tiles_q"] = -(-fields["q"] // (config.across * config.px))
        fields["tiles_p"] = -(-fields["p"] // (config.down * config.ty))
        fields["tiles_k"] = -(-(problem.k // problem.groups) // config.k) * problem.groups
        return Launch(
            self.source(problem, config), plans.WINDOW, fields, (self._blocks(problem, config), 1, 1),
            (config.across * config.down, 1, 1), self.shared_bytes(problem, config),
        )  # fmt: skip


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
