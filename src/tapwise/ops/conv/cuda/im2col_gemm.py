"""cuda.im2col_gemm: the image's windows as columns of a matrix in global memory, then one matrix product.

Choices: the product reads its operands from global memory, one thread an output, or through tiles in shared memory, or
is cuBLAS's (`library`, through PyTorch, only when asked for); how many images go through at once; and, only when asked
for, the RGB report's blocks of 64, 256 or 1024 threads whose windows are a square, a row or a column. The columns
are R * S times the image, written and read once: that is why it loses where there are few filters.

Source: Chellapilla, Puri and Simard, "High performance convolutional neural networks for document processing", 2006.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, ClassVar, Final

from tapwise import capture
from tapwise.algorithm import Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.partition import PARTITIONS, tile_shape
from tapwise.cuda.plan import CudaAlgorithm, stream
from tapwise.cuda.types import DTYPES, template_args
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.patches.cuda import PART_THREADS, Im2colGridStride
from tapwise.ops.patches.cuda import Config as Expansion
from tapwise.ops.patches.problem import Im2colProblem

# Columns of all images that go through at once, and of one image at most.
WORKSPACE_BYTES: Final = 4 << 30
LARGEST_BYTES: Final = 16 << 30
# (outputs of a block along m and n, of a thread), by the number of filters that it is for.
TILES: Final = {4: (4, 512, 4, 4), 8: (8, 512, 8, 4), 32: (32, 128, 8, 4), 64: (64, 128, 8, 8), 128: (128, 64, 8, 8)}
TILES_F64: Final = {4: (4, 512, 4, 4), 8: (8, 256, 4, 4), 32: (32, 64, 4, 4), 64: (64, 32, 4, 4)}
DEPTH: Final = 8
# Filters of a block where windows are shared out by squares, rows or columns, and bytes that its tiles may take.
PART_FILTERS: Final = 4
SHARED: Final = 40 << 10
MOST_IMAGES: Final = 65535


@dataclass(frozen=True)
class Config(BaseConfig):
    """gemm: shared, global or library; filters of a block (shared); images that go through at once; partition: a
    block's windows as they come (run), or a block, row or column of the image, for so many threads (0: its own)."""

    gemm: str
    filters: int
    images: int
    partition: str = "run"
    threads: int = 0

    @property
    def across(self) -> int:
        """Windows of a block in a row of the image, 0 as they come: ACROSS in include/partition.cuh."""
        return 0 if self.partition == "run" else tile_shape(self.partition, self.threads)[0]

    @property
    def automatic(self) -> bool:
        """cuBLAS only when asked for: PyTorch's switch for tf32, which it turns off meanwhile, is all threads' own.

        Nor the RGB report's partitions: none was faster, and they multiply what is to be compared.
        """
        return self.gemm != "library" and self.partition == "run"


# Images, the launch of their im2col, and that of the product; None where that is the library's.
Pass = tuple[int, Launch, Launch | None]


class Im2colGemmPlan(window.WindowPlan):
    """Two launches for every so many images; `passes` holds (images, launch of im2col, launch of the product)."""

    def __init__(self, problem: ConvProblem, device: Device, passes: Sequence[Pass], workspace_bytes: int) -> None:
        launches = {launch for _, *pair in passes for launch in pair if launch is not None}
        super().__init__(problem, device, list(launches), workspace_bytes)
        self._passes = passes
        size = problem.itemsize
        self._x_bytes = problem.c * prod(problem.spatial) * size
        self._y_bytes = problem.k * prod(problem.output) * size

    def run(self, buffers: Buffers) -> None:
        x, packed, y, workspace, bias, residual, _ = buffers
        on = stream(buffers)
        first = 0
        for images, im2col, gemm in self._passes:
            im2col({"x": x.ptr + first * self._x_bytes, "y": workspace.ptr}, on)
            shift = first * self._y_bytes
            if gemm is None:
                self._library(images, workspace, packed, y, shift, on)
            else:
                addresses = {"x": workspace.ptr, "w": packed.ptr, "y": y.ptr + shift}
                if bias is not None:
                    addresses["bias"] = bias.ptr
                if residual is not None:
                    addresses["residual"] = residual.ptr + shift
                gemm(addresses, on)
            first += images

    def _library(self, images: int, workspace: Any, w: Any, y: Any, shift: int, stream: int) -> None:
        """The product by PyTorch's cuBLAS, in IEEE float32."""
        import torch

        capture.refuse()
        problem: ConvProblem = self.problem
        groups, m, windows = problem.groups, problem.k // problem.groups, prod(problem.output)
        depth = prod(problem.w_shape[1:])

        def tensor(address: int, shape: tuple[int, ...], owner: Any) -> Any:
            strides = tuple(prod(shape[axis + 1 :]) * y.dtype.itemsize for axis in range(len(shape)))
            return torch.as_tensor(DeviceArray(address, shape, strides, y.dtype, y.index, "other", owner))

        left = tensor(w.ptr, (1, groups, m, depth), w)
        right = tensor(workspace.ptr, (images, groups, depth, windows), workspace)
        out = tensor(y.ptr + shift, (images, groups, m, windows), y)
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            with _on(torch, stream, y.index):
                torch.matmul(left, right, out=out)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed


def _on(torch: Any, stream: int, index: int) -> AbstractContextManager[object]:
    """PyTorch's work goes to the stream of that handle meanwhile."""
    if int(torch.cuda.current_stream(index).cuda_stream) == stream:
        return nullcontext()
    default = torch.cuda.default_stream(index)
    there = default if int(default.cuda_stream) == stream else torch.cuda.ExternalStream(stream, device=index)
    chosen: AbstractContextManager[object] = torch.cuda.stream(there)
    return chosen


def _library() -> bool:
    """Whether the user has imported a PyTorch with CUDA: it takes seconds, so it is not imported here."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


class Im2colGemm(CudaAlgorithm[Config]):
    """Any stride, padding, dilation and groups; NCHW; float32, float64, float16 and bfloat16
    (in float32).

    Columns of one image of up to 16 GiB; more images go through together up to 4 GiB.
    """

    id: ClassVar[str] = "cuda.im2col_gemm"
    summary: ClassVar[str] = "windows as a matrix in global memory, then a matrix product, tiled or cuBLAS's"
    layouts: ClassVar[tuple[str, ...]] = ("nchw",)
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if window.is_large(problem):
            return window.TOO_LARGE
        each = self._columns_bytes(problem)
        if each > LARGEST_BYTES:
            return f"takes up to {LARGEST_BYTES >> 30} GiB of columns an image, not {each / (1 << 30):.1f}"
        return None

    def _columns_bytes(self, problem: ConvProblem) -> int:
        """Of one image."""
        return problem.c * prod(problem.kernel) * prod(problem.output) * problem.itemsize

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        together = max(1, min(problem.n, WORKSPACE_BYTES // self._columns_bytes(problem)))
        tiles, m = _tiles(problem), problem.k // problem.groups
        # The tile that just holds the filters first.
        sizes = sorted(tiles, key=lambda size: (ceil_div(m, size) * size, -size))
        found = []
        for images in dict.fromkeys((together, 1)):
            found += [Config("shared", size, images) for size in sizes]
            found.append(Config("global", 1, images))
            plain = not (problem.bias or problem.residual or problem.activation) and problem.dtype in ("f32", "f64")
            if plain and _library():
                found.append(Config("library", 0, images))
        for partition, threads in product(PARTITIONS, PART_THREADS):
            found.append(Config("global", 1, together, partition, threads))
            if DEPTH * threads * max(4, problem.itemsize) < SHARED:
                found.append(Config("shared", PART_FILTERS, together, partition, threads))
        return found

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Columns written and read at seven tenths of the bandwidth, then the product: at 0.4 of the arithmetic rate
        from shared memory, where whole waves of tiles count and each row of tiles reads the columns again; at 0.03
        from global memory, less where few windows leave lanes without one."""
        columns = problem.n * self._columns_bytes(problem)
        memory = (2 * columns + problem.bytes) / (device.gbps * 1e3 * 0.7)
        rate = device.gflops * {"f64": 0.5}.get(problem.dtype, 1.0) * 1e3
        if config.partition != "run":
            rate, memory = rate * 0.5, memory * 1.5
        m, windows = problem.k // problem.groups, prod(problem.output)
        passes = ceil_div(problem.n, config.images)
        launches = 5.0 * passes
        if config.gemm != "shared":
            share = 0.03 * min(1.0, windows / 8) if config.gemm == "global" else 0.6
            return memory + problem.flops / (rate * device.multiprocessors * share) + launches
        tile_m, tile_n, _, _ = self._tile(problem, config)
        blocks = ceil_div(m, tile_m) * ceil_div(windows, tile_n) * config.images * problem.groups
        depth = prod(problem.w_shape[1:])
        # Two blocks of a multiprocessor share it.
        waves = ceil_div(blocks, 2 * device.multiprocessors) * 2 if blocks > device.multiprocessors else 1
        memory += (ceil_div(m, tile_m) - 1) * columns / (device.gbps * 1e3)
        product = waves * 2 * tile_m * tile_n * depth / (rate * (0.4 if blocks > device.multiprocessors else 0.2))
        return memory + passes * product + launches

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return config.images * self._columns_bytes(problem)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        whole, rest = divmod(problem.n, config.images)
        passes = [(config.images, *self.launches(problem, config, config.images, device))] * whole
        if rest:
            passes.append((rest, *self.launches(problem, config, rest, device)))
        return Im2colGemmPlan(problem, device, passes, self.workspace_bytes(problem, config, device))

    def launches(
        self, problem: ConvProblem, config: Config, images: int, device: Device
    ) -> tuple[Launch, Launch | None]:
        """im2col of so many images, and the product; None where that is the library's."""
        patches = self._patches(problem, images)
        expand = self._expansion(config) or Im2colGridStride().configs(patches, device)[0]
        first = Im2colGridStride().launch(patches, expand, device)
        if config.gemm == "library":
            return first, None
        m, windows = problem.k // problem.groups, prod(problem.output)
        tile_m, tile_n, size_m, size_n = self._tile(problem, config)
        rows, width = problem.output
        tiles_m, tiles_n = ceil_div(m, tile_m), ceil_div(windows, tile_n)
        if config.across:
            tiles_n = ceil_div(width, config.across) * ceil_div(rows, tile_n // config.across)
        fields = {
            "batch": images, "groups": problem.groups, "m": m, "windows": windows, "depth": prod(problem.w_shape[1:]),
            "tiles_m": tiles_m, "tiles_n": tiles_n, "rows": rows, "width": width,
        }  # fmt: skip
        grid = (tiles_m * tiles_n, 1, min(images * problem.groups, MOST_IMAGES))
        threads = tile_m // size_m * (tile_n // size_n)
        return first, Launch(self.source(problem, config), fields, grid, threads)

    def _expansion(self, config: Config) -> Expansion | None:
        """How windows become columns; None: as im2col itself would."""
        return None if config.partition == "run" else Expansion(config.threads, 1, False, config.partition)

    def _patches(self, problem: ConvProblem, images: int) -> Im2colProblem:
        kernel, stride, padding, dilation = problem.window
        return Im2colProblem(
            n=images, c=problem.c, spatial=problem.spatial, kernel=kernel, stride=stride, padding=padding,
            dilation=dilation, dtype=problem.dtype,
        )  # fmt: skip

    def _tile(self, problem: ConvProblem, config: Config) -> tuple[int, int, int, int]:
        """(m, n) of a block, (m, n) of a thread."""
        if config.gemm == "global":
            return 1, config.threads or 256, 1, 1
        tile = config.filters, config.threads, config.filters, 1
        return tile if config.threads else _tiles(problem)[config.filters]

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        im2col, found = Im2colGridStride(), []
        for images in {config.images, problem.n % config.images or config.images}:
            patches = self._patches(problem, images)
            given = self._expansion(config)
            # One of them is the GPU's own.
            any_of = [given] if given else im2col.best_anywhere(patches)
            found += [im2col.source(patches, expansion) for expansion in any_of]
        return [*dict.fromkeys(found), *([] if config.gemm == "library" else [self.source(problem, config)])]

    def source(self, problem: ConvProblem, config: Config) -> Source:
        """The product's kernel."""
        tile_m, tile_n, size_m, size_n = self._tile(problem, config)
        words = (
            DTYPES[problem.dtype].cpp, config.gemm == "shared", tile_m, tile_n, DEPTH, size_m,
            size_n, config.across, window.activation(problem.activation),
        )  # fmt: skip
        threads = tile_m // size_m * (tile_n // size_n)
        # Without a bound, NVRTC begins so many loads at once that two blocks fill a multiprocessor's registers.
        tuned = config.gemm == "shared" and not config.threads
        blocks = {"f64": 2}.get(problem.dtype, 3) if tuned else 1
        return stub("ops/conv/cuda/gemm.cu", "gemm", template_args(*words), "Gemm", threads, blocks)


def _tiles(problem: ConvProblem) -> dict[int, tuple[int, int, int, int]]:
    return TILES_F64 if problem.dtype == "f64" else TILES
