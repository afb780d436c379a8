"""cuda.cluster and cuda.grid_stride of squeeze-and-excitation: a cluster an image in one launch; the plain method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod
from typing import ClassVar, Final

from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.block_reduction import power_of_two
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import INDEX_LIMIT, neighbours, template_args, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.squeeze_excitation.problem import SqueezeExcitationProblem

FILE: Final = "ops/squeeze_excitation/squeeze_excitation.cu"
# Blocks that share an image: up to what any GPU has together.
CLUSTERS: Final = (8, 4, 2, 1)
# A slice's channels, channels last, are at least so many bytes of a pixel: two sectors.
LEAST_SLICE: Final = 64
STAGES: Final = ("MEANS", "SQUEEZED", "GATES", "SCALED")
# Vectors of x that a thread holds at most, by the threads of a block: as many as registers take.
MOST_KEPT: Final = {512: 16, 256: 32}
# The barrier of a cluster.
BARRIER_BYTES: Final = 16
PLAIN_THREADS: Final = 256
BLOCKS_EACH: Final = 16
# Bytes that a thread reads and writes in a microsecond; what a launch takes, and a block's steps behind one another.
BYTES_EACH: Final = 66
LAUNCH_US: Final = 1.0
STEPS_US: Final = 3.3


@dataclass(frozen=True)
class Config(BaseConfig):
    """`blocks` of `threads` for each image, of which `slices` share the channels; the others share the pixels. `kept`:
    vectors of x that a thread holds, 0 where it reads them again. `staged`: elements of the filters that are brought to
    shared memory at once, 0 where they stay where they are."""

    blocks: int
    slices: int
    threads: int
    kept: int
    staged: int


class SqueezeExcitationCluster(CudaAlgorithm[Config]):
    """Any sizes whose slices fit in shared memory; float32, float64, float16 and bfloat16 (in float32); both memory
    orders."""

    operator: ClassVar[str] = "squeeze_excitation"
    id: ClassVar[str] = "cuda.cluster"
    summary: ClassVar[str] = "a cluster of blocks an image: means, both products and the scale in one launch"

    def rejects(self, problem: SqueezeExcitationProblem, device: Device) -> str | None:
        if problem.n * CLUSTERS[0] >= INDEX_LIMIT:
            return f"takes fewer than {INDEX_LIMIT // CLUSTERS[0]} images"
        if max(problem.c, problem.m) * 2 >= INDEX_LIMIT:
            return "takes fewer than 2^30 channels"
        return None if next(self._legal(problem, device), None) else "needs more shared memory than a block has"

    def configs(self, problem: SqueezeExcitationProblem, device: Device) -> Sequence[Config]:
        return list(self._legal(problem, device))

    def _legal(self, problem: SqueezeExcitationProblem, device: Device) -> Iterator[Config]:
        clusters = CLUSTERS if has_dependent_launches(device.architecture) else (1,)
        for blocks, threads in product(clusters, MOST_KEPT):
            config = Config(blocks, self._slices(problem, blocks), threads, 0, 0)
            config = replace(config, kept=self._kept(problem, config))
            staged = replace(config, staged=self._staged(problem, config))
            fitting = [one for one in (staged, config) if self.shared_bytes(problem, one) <= device.shared_bytes]
            yield from fitting[:1]

    @staticmethod
    def _slices(problem: SqueezeExcitationProblem, blocks: int) -> int:
        """Along channels first; channels last, no further than whole sectors."""
        most = problem.c
        if problem.layout == "nhwc":
            most = max(1, problem.c * problem.itemsize // LEAST_SLICE)
        return max(count for count in CLUSTERS if count <= min(blocks, most))

    def _kept(self, problem: SqueezeExcitationProblem, config: Config) -> int:
        """Vectors of a thread, where registers hold them."""
        channels, pixels = self.sizes(problem, config)
        vectors = channels // self.width(problem)
        if problem.layout == "nchw" or vectors > config.threads:
            return 0
        count = power_of_two(ceil_div(pixels, config.threads // vectors))
        return count if count <= MOST_KEPT[config.threads] else 0

    def _staged(self, problem: SqueezeExcitationProblem, config: Config) -> int:
        channels, _ = self.sizes(problem, config)
        return neighbours(gcd(channels, problem.c), problem.itemsize)

    @staticmethod
    def width(problem: SqueezeExcitationProblem) -> int:
        """Elements that a thread loads at once: of a pixel's channels, or of a plane."""
        return neighbours(problem.c if problem.layout == "nhwc" else problem.pixels, problem.itemsize)

    def sizes(self, problem: SqueezeExcitationProblem, config: Config) -> tuple[int, int]:
        """(channels, pixels) of a block at most: whole vectors."""
        v = self.width(problem)
        along_c, along_p = (v, 1) if problem.layout == "nhwc" else (1, v)
        channels = ceil_div(ceil_div(problem.c, config.slices), along_c) * along_c
        return channels, ceil_div(ceil_div(problem.pixels, config.blocks // config.slices), along_p) * along_p

    def shared_bytes(self, problem: SqueezeExcitationProblem, config: Config) -> int:
        """A barrier, the filters, sums and gates of the block's channels, what is exchanged and what comes of it, and
        what threads add up."""
        (channels, _), m = self.sizes(problem, config), problem.m
        scratch = max((config.threads + 8) * self.width(problem), channels)
        filters = (2 * m * channels + m + channels) * problem.itemsize if config.staged else 0
        return (
            BARRIER_BYTES
            + ceil_div(filters, 16) * 16
            + problem.accumulator_bytes * (2 * channels + (config.blocks + 1) * m + scratch)
        )

    def predict_us(self, problem: SqueezeExcitationProblem, config: Config, device: Device) -> float:
        """Rounds of a block a multiprocessor, each with its steps behind one another and its bytes at what loads of its
        threads let through; and memory. Constants are fitted to five layers with one image (mean error 5 %); with 32
        images these took twice as long, and the choice was up to 1.6 times as slow as the best."""
        image = problem.c * problem.pixels * problem.itemsize
        rounds, rate = ceil_div(problem.n * config.blocks, device.multiprocessors), config.threads * BYTES_EACH
        filters = 2 * problem.m * ceil_div(problem.c, config.slices) * problem.itemsize
        moved = (2 if config.kept else 3) * image / config.blocks + filters * (1 if config.staged else 2)
        memory = 2 * problem.n * image / (device.gbps * 1e3 * 0.8)
        return max(rounds * (STEPS_US + moved / rate), memory) + LAUNCH_US

    def source(self, problem: SqueezeExcitationProblem, config: Config) -> Source:
        words = (
            tensor_core_type(problem.dtype), self.width(problem), config.threads, config.blocks,
            config.kept, config.staged, problem.layout == "nhwc", window.activation(problem.activation),
            window.activation(problem.gate),
        )  # fmt: skip
        return stub(FILE, "squeeze_excitation", template_args(*words), "Gating", config.threads, cluster=config.blocks)

    def launch(self, problem: SqueezeExcitationProblem, config: Config) -> Launch:
        channels, pixels = self.sizes(problem, config)
        fields = {
            "c": problem.c, "pixels": problem.pixels, "m": problem.m, "slices_c": config.slices, "block_c": channels,
            "block_p": pixels,
        }  # fmt: skip
        grid, shared_bytes = (problem.n * config.blocks, 1, 1), self.shared_bytes(problem, config)
        return Launch(self.source(problem, config), fields, grid, config.threads, shared_bytes, dependent=True)

    def plan(self, problem: SqueezeExcitationProblem, config: Config, device: Device) -> Plan:
        return window.WindowPlan(problem, device, [self.launch(problem, config)])


class SqueezeExcitationGridStride(CudaAlgorithm[BaseConfig]):
    """Any size: one thread a value, four launches; float32, float64, float16 and bfloat16 (in float32)."""

    operator: ClassVar[str] = "squeeze_excitation"
    id: ClassVar[str] = "cuda.grid_stride"
    summary: ClassVar[str] = "one thread a value, a launch a step"

    def configs(self, problem: SqueezeExcitationProblem, device: Device) -> Sequence[BaseConfig]:
        return [BaseConfig()]

    def predict_us(self, problem: SqueezeExcitationProblem, config: BaseConfig, device: Device) -> float:
        """A load takes 0.02 us: of a thread's pixels, channels, squeezed channels, one behind the other; and memory."""
        image = prod(problem.x_shape) * problem.itemsize
        return 8.0 + 0.02 * (problem.pixels + problem.c + problem.m) + 3 * image / (device.gbps * 1e3 * 0.7)

    def workspace_bytes(self, problem: SqueezeExcitationProblem, config: BaseConfig, device: Device) -> int:
        return problem.accumulator_bytes * problem.n * (2 * problem.c + problem.m)

    def sources(self, problem: SqueezeExcitationProblem, config: BaseConfig) -> list[Source]:
        words = (
            tensor_core_type(problem.dtype), problem.layout == "nhwc", window.activation(problem.activation),
            window.activation(problem.gate),
        )  # fmt: skip
        return [
            stub(FILE, "squeeze_excitation_plain", template_args(*words, stage), "PlainGating", PLAIN_THREADS)
            for stage in STAGES
        ]

    def launches(self, problem: SqueezeExcitationProblem, config: BaseConfig, device: Device) -> list[Launch]:
        fields = {"n": problem.n, "c": problem.c, "pixels": problem.pixels, "m": problem.m}
        counts = (problem.n * problem.c, problem.n * problem.m, problem.n * problem.c, prod(problem.x_shape))
        return [
            Launch(
                source, fields, (min(ceil_div(count, PLAIN_THREADS), BLOCKS_EACH * device.multiprocessors), 1, 1),
                PLAIN_THREADS, dependent=True,
            )
            for source, count in zip(self.sources(problem, config), counts, strict=True)
        ]  # fmt: skip

    def plan(self, problem: SqueezeExcitationProblem, config: BaseConfig, device: Device) -> Plan:
        launches = self.launches(problem, config, device)
        return window.WindowPlan(problem, device, launches, self.workspace_bytes(problem, config, device))
