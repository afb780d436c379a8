"""cuda.tree of reduce and softmax: threads fold strided pieces of a run, a tree puts the pieces together.

A block has `groups` x `across` runs with `down` threads on each. `down=1` is the plain method, one thread an output.
Where there are few runs, each is cut in `parts`, and a second launch puts these together.

Sums go in a fixed order, and the geometry depends on the problem and the GPU's kind alone: the same bits each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tapwise.algorithm import Algorithm, Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cuda import plan as plans
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.integers import ceil_div
from tapwise.ops.reduce.problem import ReduceProblem, SoftmaxProblem, rejects_apart

WORDS: Final = ("x", "y", "states", "outer", "length", "inner", "parts")
THREADS: Final = 256
# Threads a multiprocessor that keep it busy.
BUSY: Final = 1024
# Elements of a part at least, blocks a multiprocessor that are enough, and parts that a thread can go through.
LEAST_PART: Final = 2048
ENOUGH: Final = 4
MOST_PARTS: Final = 256
# Elements of a run that a thread of softmax holds in registers.
MOST_KEPT: Final = 16
# Blocks along the only axis of the grid that is used.
MOST_BLOCKS: Final = (1 << 31) - 1


@dataclass(frozen=True)
class Config(BaseConfig):
    """A block: `groups` times `across` neighbouring runs with `down` threads each; a run in `parts`."""

    across: int
    down: int
    groups: int
    parts: int

    @property
    def runs(self) -> int:
        """Runs of a block."""
        return self.across * self.groups


class TreePlan(plans.CudaPlan):
    """The parts' states lie in the workspace."""

    def run(self, buffers: Buffers) -> None:
        addresses = {"x": buffers.x.ptr, "y": buffers.y.ptr}
        if buffers.workspace is not None:
            addresses["states"] = buffers.workspace.ptr
        self.enqueue(addresses, plans.stream(buffers))


def rejects(problem: ReduceProblem | SoftmaxProblem, device: Device) -> str | None:
    """What neither takes: axes that are not neighbours, more runs than a launch has blocks."""
    if problem.folded is None:
        return rejects_apart(problem)
    outer, _, inner = problem.folded
    return "takes up to 2^31 runs" if outer * inner > MOST_BLOCKS else None


def configs(problem: ReduceProblem | SoftmaxProblem, device: Device) -> Sequence[Config]:
    """Along the last axis a warp or a block a run; along others as many runs side by side as there are, up to a warp.

    Then one thread a run.
    """
    outer, length, inner = _folded(problem)
    # Powers of two: what neighbouring runs there are, and threads on each run: as many as keep the GPU busy, at least
    # so many that a warp reads neighbours, and no more than have four elements each.
    runs = outer * inner
    across = min(32, _power(inner))
    down = max(_power(ceil_div(BUSY * device.multiprocessors, runs)), min(32 // across, _power(length)))
    down = min(down, THREADS // across, max(32 // across, _power(ceil_div(length, 4))))
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
    return found if plain in found else [*found, plain]


def predict_us(problem: ReduceProblem | SoftmaxProblem, config: Config, device: Device, passes: float) -> float:
    """Bytes at seven tenths of the bandwidth, or what a run's own thread takes: 0.1 us an element."""
    outer, length, inner = _folded(problem)
    alone = length / (config.down * config.parts) / 4 * 0.4
    blocks = ceil_div(outer * inner, config.runs) * config.parts
    # Threads of a warp that read neighbours: with few, a sector is read for each.
    spread = max(1.0, 8.0 * plans.SIZES[problem.dtype] / 4 if config.down == 1 and inner == 1 and length > 1 else 1.0)
    busy = min(1.0, blocks * THREADS / (512 * device.multiprocessors))
    memory = problem.bytes * spread / (device.gbps * 1e3 * 0.7 * max(busy, 0.02))
    return max(memory, alone) * passes + 2.0 * (1 + (config.parts > 1))


def state_bytes(problem: ReduceProblem | SoftmaxProblem, config: Config) -> int:
    """The workspace: one state (value, sum, place) a part."""
    if config.parts == 1:
        return 0
    outer, _, inner = _folded(problem)
    return outer * inner * config.parts * (24 if problem.dtype == "f64" else 16)


def _launch(problem: ReduceProblem | SoftmaxProblem, source: Source, config: Config, parts: int) -> Launch:
    """`config` is the geometry, `parts` what a run was or is cut in; blocks have all the parts that `config` names."""
    outer, length, inner = _folded(problem)
    fields = {"outer": outer, "length": length, "inner": inner, "parts": parts}
    blocks = ceil_div(outer * inner, config.runs) * config.parts
    threads = config.runs * config.down
    return Launch(source, WORDS, fields, (blocks, 1, 1), (threads, 1, 1))


def launches(algorithm: Any, problem: ReduceProblem | SoftmaxProblem, config: Config) -> list[Launch]:
    """The launches of a reduction or softmax, in order."""
    return [_launch(problem, source, one, config.parts) for source, one in algorithm.sources(problem, config)]


def _source(problem: ReduceProblem | SoftmaxProblem, kernel: str, struct: str, config: Config, *words: str) -> Source:
    """The kernel with the first of its template's words before the geometry, and the rest behind it."""
    unit = "true" if _folded(problem)[2] == 1 else "false"
    geometry = f"{config.across}, {config.down}, {config.groups}, {unit}"
    text = ", ".join((plans.TYPES[problem.dtype], words[0], geometry, *words[1:]))
    threads = config.runs * config.down
    return stub(f"ops/{kernel}/{kernel}.cu", kernel, text, struct, threads, header=plans.header(problem.dtype))


def _folded(problem: ReduceProblem | SoftmaxProblem) -> tuple[int, int, int]:
    folded = problem.folded
    assert folded is not None
    return folded


def _power(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


class ReduceTree(Algorithm[Config]):
    """All ops, along neighbouring axes of a dense array; float32, float64, float16 (in float32)."""

    operator: ClassVar[str] = "reduce"
    id: ClassVar[str] = "cuda.tree"
    summary: ClassVar[str] = "threads fold strided pieces, a tree puts them together; or one thread an output"

    def rejects(self, problem: ReduceProblem, device: Device) -> str | None:
        return rejects(problem, device)

    def configs(self, problem: ReduceProblem, device: Device) -> Sequence[Config]:
        return configs(problem, device)

    def predict_us(self, problem: ReduceProblem, config: Config, device: Device) -> float:
        return predict_us(problem, config, device, 1.0)

    def workspace_bytes(self, problem: ReduceProblem, config: Config, device: Device) -> int:
        return state_bytes(problem, config)

    def sources(self, problem: ReduceProblem, config: Config) -> list[tuple[Source, Config]]:
        """The kernels in order, each with its geometry."""
        op = problem.op.upper()
        if config.parts == 1:
            return [(_source(problem, "reduce", "Reduction", config, op, "false", "true"), config)]
        last = Config(1, 32, THREADS // 32, 1)
        return [
            (_source(problem, "reduce", "Reduction", config, op, "false", "false"), config),
            (_source(problem, "reduce", "Reduction", last, op, "true", "true"), last),
        ]

    def plan(self, problem: ReduceProblem, config: Config, device: Device) -> Plan:
        return TreePlan(problem, device, launches(self, problem, config), state_bytes(problem, config))


class SoftmaxTree(Algorithm[Config]):
    """softmax and its logarithm along any axis of a dense array; float32, float64, float16 (in float32)."""

    operator: ClassVar[str] = "softmax"
    id: ClassVar[str] = "cuda.tree"
    summary: ClassVar[str] = "maximum and sum in one reading, then the quotients; or one thread a run"

    def rejects(self, problem: SoftmaxProblem, device: Device) -> str | None:
        return rejects(problem, device)

    def configs(self, problem: SoftmaxProblem, device: Device) -> Sequence[Config]:
        return configs(problem, device)

    def predict_us(self, problem: SoftmaxProblem, config: Config, device: Device) -> float:
        return predict_us(problem, config, device, 1.5)

    def workspace_bytes(self, problem: SoftmaxProblem, config: Config, device: Device) -> int:
        return state_bytes(problem, config)

    def sources(self, problem: SoftmaxProblem, config: Config) -> list[tuple[Source, Config]]:
        """The kernels in order, each with its geometry."""
        log = "true" if problem.log else "false"
        stages = ("BOTH",) if config.parts == 1 else ("MEASURE", "SCALE")
        each = ceil_div(problem.length, config.down)
        kept = _power(each) if config.parts == 1 and each <= MOST_KEPT else 0
        return [(_source(problem, "softmax", "Softmax", config, log, str(kept), stage), config) for stage in stages]

    def plan(self, problem: SoftmaxProblem, config: Config, device: Device) -> Plan:
        return TreePlan(problem, device, launches(self, problem, config), state_bytes(problem, config))
