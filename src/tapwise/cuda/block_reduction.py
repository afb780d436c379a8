"""Block reductions: threads reduce strided pieces of a run, and the block puts their accumulators together.

Runs are those of a dense array (outer, length, inner), a problem's `collapsed` sizes. A block has `groups` x `across`
runs with `down` threads on each. `down=1` is the plain method, one thread an output. Where there are few runs, each is
cut in `parts`, and a second launch puts these together.

Sums go in a fixed order, and the geometry depends on the problem and the GPU's kind alone: the same bits each time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.cuda.types import INDEX_LIMIT, coordinates, neighbours, template_args, tensor_core_type
from tapwise.integers import ceil_div

THREADS: Final = 256
# Threads a multiprocessor that keep it busy.
BUSY: Final = 1024
# Elements of a part at least, blocks a multiprocessor that are enough, and parts that a thread can go through.
LEAST_PART: Final = 2048
ENOUGH: Final = 4
MOST_PARTS: Final = 256
# Blocks of a multiprocessor from which on they are balanced: two have more loads under way than L1 then has room for.
BALANCED: Final = 3
# Threads side by side at least that load 16 bytes each.
LEAST_ACROSS: Final = 4


@dataclass(frozen=True)
class Config(BaseConfig):
    """A block: `groups` times `across` neighbouring runs with `down` threads each; a run in `parts`. `neighbours` runs
    are one, whose elements a thread loads at once; or it loads `vector` elements of one run at once."""

    across: int
    down: int
    groups: int
    parts: int
    neighbours: int = 1
    vector: int = 1

    @property
    def threads(self) -> int:
        return self.across * self.down * self.groups

    @property
    def runs(self) -> int:
        """Runs of a block."""
        return self.across * self.groups * self.neighbours

    def skews(self, problem: Any) -> bool:
        """Whether runs begin between what a thread loads at once."""
        return bool(problem.collapsed[1] % self.vector)


class BlockReduction(CudaAlgorithm[Config]):
    """What the operators that reduce runs share. `passes`: times that the elements are read and written, to predict."""

    passes: ClassVar[float]

    @abstractmethod
    def kernels(self, problem: Any, config: Config) -> list[tuple[Source, Config]]:
        """The kernels in order, each with its geometry."""

    def rejects(self, problem: Any, device: Device) -> str | None:
        """More runs than the threads of a launch."""
        outer, _, inner = problem.collapsed
        return f"takes fewer than 2^31 x {THREADS} runs" if outer * inner > (INDEX_LIMIT - 1) * THREADS else None

    def configs(self, problem: Any, device: Device) -> Sequence[Config]:
        """Along the last axis a warp or a block a run; along others as many runs side by side as there are, up to a
        warp. Then one thread a run."""
        outer, length, inner = problem.collapsed
        # Powers of two: what neighbouring runs there are, and threads on each run: as many as keep the GPU busy, at
        # least so many that a warp reads neighbours, and no more than have four elements each.
        runs = outer * inner
        across = min(32, power_of_two(inner))
        down = max(power_of_two(ceil_div(BUSY * device.multiprocessors, runs)), min(32 // across, power_of_two(length)))
        down = min(down, THREADS // across, max(32 // across, power_of_two(ceil_div(length, 4))))
        if down == 1:
            across = THREADS
        groups = max(1, THREADS // (across * down))
        blocks = ceil_div(runs, across * groups)
        wanted = max(1, ENOUGH * device.multiprocessors // blocks)
        parts = max(1, min(wanted, length // LEAST_PART, MOST_PARTS))
        found = [Config(across, down, groups, parts)]
        if parts > 1:
            found.append(Config(across, down, groups, 1))
        plain = Config(THREADS, 1, 1, 1)
        found = found if plain in found else [*found, plain]
        return [one for one in found if ceil_div(runs, one.runs) * one.parts < INDEX_LIMIT]

    def wide(self, problem: Any, width: int, device: Device) -> list[Config]:
        """`width` runs as one: fewer side by side where blocks are few, down to what memory reads at once."""
        outer, length, inner = problem.collapsed
        columns = outer * inner // width
        across = min(32, power_of_two(inner // width))
        while across > LEAST_ACROSS and ceil_div(columns, across) < 2 * device.multiprocessors:
            across //= 2
        down = min(THREADS // across, max(32 // across, power_of_two(ceil_div(length, 4))))
        groups = THREADS // (across * down)
        blocks = ceil_div(columns, across * groups)
        parts = max(1, min(ENOUGH * device.multiprocessors // blocks, length // LEAST_PART, MOST_PARTS))
        found = [Config(across, down, groups, count, width) for count in dict.fromkeys((parts, 1))]
        return [one for one in found if blocks * one.parts < INDEX_LIMIT]

    def predict_us(self, problem: Any, config: Config, device: Device) -> float:
        """Bytes at seven tenths of the bandwidth, or what a run's own thread takes: 0.1 us an element."""
        outer, length, inner = problem.collapsed
        alone = length / (config.down * config.parts * config.vector) * 0.1
        blocks = ceil_div(outer * inner, config.runs) * config.parts
        # Threads of a warp that read neighbours: with few, a sector is read for each.
        spread = max(1.0, 8.0 * problem.itemsize / 4 if config.down == 1 and inner == 1 and length > 1 else 1.0)
        at_once = config.neighbours * config.vector
        busy = min(1.0, blocks * THREADS * at_once / (512 * device.multiprocessors))
        memory = problem.bytes * spread / (device.gbps * 1e3 * 0.7 * max(busy, 0.02))
        return float(max(memory, alone) * self.passes + 2.0 * (1 + (config.parts > 1)) + 0.1 * (at_once == 1))

    def workspace_bytes(self, problem: Any, config: Config, device: Device) -> int:
        """One accumulator (value, sum, place) a part."""
        outer, _, inner = problem.collapsed
        return outer * inner * config.parts * (24 if problem.dtype == "f64" else 16) if config.parts > 1 else 0

    def shared_bytes(self, problem: Any, config: Config) -> int:
        """Of a block, beside what the kernel declares."""
        return 0

    def sources(self, problem: Any, config: Config) -> list[Source]:
        return [source for source, _ in self.kernels(problem, config)]

    def plan(self, problem: Any, config: Config, device: Device) -> Plan:
        return CudaPlan(problem, device, self.launches(problem, config), self.workspace_bytes(problem, config, device))

    def launches(self, problem: Any, config: Config) -> list[Launch]:
        """The kernels in order; the parts' accumulators lie in the workspace."""
        outer, length, inner = problem.collapsed
        fields = {"outer": outer, "length": length, "inner": inner, "parts": config.parts}
        fields |= {} if problem.w_is_image else {"w": 0}
        names, found = {"accumulators": "workspace"}, []
        for source, block in self.kernels(problem, config):
            grid = (ceil_div(outer * inner, block.runs) * block.parts, 1, 1)
            shape = grid, block.threads, self.shared_bytes(problem, block)
            found.append(Launch(source, fields, *shape, dependent=True, names_of=names, balance=BALANCED))
        return found


def kernel(
    problem: Any, file: str, config: Config, first: object, *rest: object, cluster: int = 1, blocks: int = 1
) -> Source:
    """The template of a .cu file's name, with the `first` of its words before the geometry, and the rest behind it;
    of a `cluster` of so many blocks, and at least `blocks` a multiprocessor. Places of 2^32 are wide ones."""
    geometry = config.across, config.down, config.groups, problem.collapsed[2] == 1
    words = template_args(tensor_core_type(problem.dtype), first, *geometry, *rest)
    name = file.rpartition("/")[2].removesuffix(".cu")
    header = coordinates(problem.collapsed[1] >> 1)
    return stub(file, name, words, "Runs", config.threads, blocks, header, cluster)


def widths(length: int, itemsize: int) -> tuple[int, ...]:
    """Elements of a run that a thread may load at once: what divides its length, and 16 bytes where that is a quarter
    of these or less."""
    width, most = neighbours(length, itemsize), 16 // itemsize
    return (width,) if 4 * width > most or length < 4 * most else (most, width)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()
