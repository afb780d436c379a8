"""What algorithms share that read windows from an image's rows in shared memory: tiles of outputs and launches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, ClassVar, Final

from tapwise.algorithm import C, Device, Plan
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.jit.occupancy import room_of
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import pack, window
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 128
WARPS: Final = THREADS // 32
# Registers of a multiprocessor.
REGISTERS: Final = 1 << 16
# A width of tiles is offered where it is that much less than the one before.
NARROWER: Final = 0.95


class RowTiles(window.TensorCoreAlgorithm[C]):
    """A block takes tiles of outputs; filters are packed as operands. `kernel`: the .cu file and its template, where
    all problems have the same."""

    kernel: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]] = ("nhwc",)

    def kernel_of(self, problem: ConvProblem) -> str:
        """The .cu file and its template."""
        return self.kernel

    @abstractmethod
    def unsuited(self, problem: ConvProblem) -> str | None:
        """Why the kernel has no code for a problem, if so."""

    @abstractmethod
    def fitting(self, problem: ConvProblem, device: Device) -> Iterator[C]:
        """The configs whose rows and filters fit into shared memory."""

    @abstractmethod
    def template(self, problem: ConvProblem, config: Any) -> str:
        """What the kernels are instantiated with."""

    @abstractmethod
    def fields(self, problem: ConvProblem, config: Any) -> dict[str, int]:
        """The kernel's words that are its own."""

    @abstractmethod
    def filter_bytes(self, problem: ConvProblem, config: Any) -> int:
        """A block's filters as operands."""

    @abstractmethod
    def shared_bytes(self, problem: ConvProblem, config: Any) -> int:
        """Of a block."""

    def filter_tiles(self, problem: ConvProblem, config: Any) -> int:
        """Tiles along the filters: a block keeps those of one."""
        return 1

    def fragment_fields(self, problem: ConvProblem, config: Any) -> dict[str, int]:
        """The words of the kernel that packs filters, beside their strides."""
        return {"k": problem.k, "words": self.filter_tiles(problem, config) * self.filter_bytes(problem, config) // 4}

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if reason := self.unsuited(problem):
            return reason
        if max(prod(problem.y_shape), prod(problem.x_shape)) >= INDEX_LIMIT or max(problem.stride) >= 1 << 15:
            return "takes fewer than 2^31 elements, and strides under 2^15"
        fits = next(self.fitting(problem, device), None) is not None
        return None if fits else "takes rows and filters that fit into shared memory"

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[C]:
        return list(self.fitting(problem, device))

    def plan(self, problem: ConvProblem, config: Any, device: Device) -> Plan:
        launch, packer = self.launch(problem, config, device), partial(self.pack_launch, problem, config)
        return pack.PackedPlan(problem, device, [launch], packer, self.fragment_fields(problem, config)["words"] * 4)

    def source(self, problem: ConvProblem, config: Any) -> Source:
        words, kernel = self.template(problem, config), self.kernel_of(problem)
        return stub(f"ops/conv/cuda/{kernel}.cu", kernel, words, "Tiles", THREADS, config.min_blocks_per_sm)

    def pack_source(self, problem: ConvProblem, config: Any) -> Source:
        plain = self.template(problem.replace(bias=False, residual=False, activation=None), config)
        file = f"ops/conv/cuda/{self.kernel_of(problem)}.cu"
        return stub(file, "pack_fragments", plain, "Fragments", pack.THREADS)

    def sources(self, problem: ConvProblem, config: Any) -> list[Source]:
        return [self.pack_source(problem, config), self.source(problem, config)]

    def launch(self, problem: ConvProblem, config: Any, device: Device) -> Launch:
        source, shared_bytes = self.source(problem, config), self.shared_bytes(problem, config)
        tiles_h, tiles_w, tiles = tiles_of(problem, config.down, config.across)
        fields = window.window_fields(problem, source) | self.fields(problem, config)
        fields |= {"down": config.down, "across": config.across, "tiles_h": tiles_h, "tiles_w": tiles_w, "tiles": tiles}
        parts = self.filter_tiles(problem, config)
        blocks = min(tiles, max(1, device.multiprocessors * config.min_blocks_per_sm // parts)) * parts
        return Launch(source, fields, (blocks, 1, 1), THREADS, shared_bytes, dependent=True, balance=2)

    def pack_launch(self, problem: ConvProblem, config: Any, steps: tuple[int, ...]) -> Launch:
        """Filters of such strides (elements) as the instruction's operands."""
        fields = self.fragment_fields(problem, config)
        fields |= zip(("step_k", "step_c", "step_r", "step_s"), steps, strict=True)
        blocks = min(ceil_div(fields["words"], pack.THREADS), 1024)
        return Launch(self.pack_source(problem, config), fields, (blocks, 1, 1), pack.THREADS)


def min_blocks_per_sm(registers: int) -> int:
    """Blocks that a multiprocessor is to hold whose threads need so many registers: 2 to 6."""
    return max(2, min(6, REGISTERS // (THREADS * registers)))


def fits(shared_bytes: int, min_blocks_per_sm: int, device: Device) -> bool:
    """Whether as many blocks, three of them at least, have room in shared memory."""
    return shared_bytes <= room_of(device, min(min_blocks_per_sm, 3))


def tiles_of(problem: ConvProblem, down: int, across: int) -> tuple[int, int, int]:
    """Tiles of an image along both axes, and all."""
    p, q = problem.output
    high, wide = ceil_div(p, down), ceil_div(q, across)
    return high, wide, problem.n * high * wide


def shapes(problem: ConvProblem, least: int, most: int, narrow: int, whole: int = 1) -> list[tuple[int, int]]:
    """(down, across) of tiles of `least` to `most` outputs: rows cut evenly down to `narrow` outputs, into multiples
    of `whole`; images that are smaller are a tile each."""
    p, q = problem.output
    found: list[tuple[int, int]] = []
    before = float("inf")
    for count in range(1, 1 + ceil_div(q, narrow // 2)):
        across = ceil_div(q, count)
        across += -across % whole
        if across <= NARROWER * before:
            before = across
            for down in (16, 8, 4, 2, 1):
                if least <= across * down <= most and (down == 1 or down < 2 * p):
                    found.append((down, across))
        if across <= narrow:
            break
    return found or [(min(p, 16), min(q + -q % whole, narrow))]
