"""cuda.winograd: fewer products for filters of more than one tap, as a matrix product a position of the tiles.

Three launches for so many images at a time: every tile of x is transformed, once, and written [position][channel][tile]
to the workspace; a grouped product of one tap, cuda.implicit_gemm_simt's, multiplies each position with its transformed
filters; and the sums of a tile become its outputs. What lies between the launches is to stay in L2.

Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from math import prod
from typing import ClassVar, Final

import numpy as np

from tapwise.algorithm import Device, Plan
from tapwise.arrays import device as arrays
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.cuda.types import DTYPES, template_args
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import implicit_gemm_simt, pack, window
from tapwise.ops.conv.cuda.implicit_gemm_simt import ImplicitGemmSimt
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.winograd.tiles import WinogradSums, tilings
from tapwise.ops.conv.winograd.transforms import Transform, transform

KERNEL: Final = "ops/conv/cuda/winograd.cu"
THREADS: Final = 128
# Of a part's tiles and sums; of those in float64 that verification takes.
WORKSPACE_BYTES: Final = 2 << 30
# The product that is asked for: its own configs, the best by its model.
_PRODUCT: Final = ImplicitGemmSimt()
# Fitted to times on an H200: microseconds that a transform begins with, and what it reaches of memory's bandwidth.
START_US, MEMORY = 1.3, 0.8


@dataclass(frozen=True)
class Config(implicit_gemm_simt.Config):
    """So many images at a time, in tiles of tile_h x tile_w outputs; and the product's config."""

    images: int
    tile_h: int
    tile_w: int


@dataclass(frozen=True)
class Part:
    """Some images: their number, tiles along both axes and in all, and with those behind them for which a channel's
    begin at whole pieces of 16 bytes; the product of their positions, and where in the workspace (bytes) its result and
    its own workspace begin."""

    images: int
    tiles_h: int
    tiles_w: int
    tiles: int
    pitch: int
    product: ConvProblem
    products_at: int
    parts_at: int


def axes_of(problem: ConvProblem) -> tuple[Transform, Transform]:
    """The transforms of both axes, of the largest tile that the error bound allows."""
    sizes = zip(tilings(problem)[0], problem.kernel, problem.stride, strict=True)
    high, wide = (transform(*size) for size in sizes)
    return high, wide


@lru_cache(1024)
def part_of(problem: ConvProblem, images: int) -> Part:
    high, wide = axes_of(problem)
    (p, q), positions = problem.output, high.products * wide.products
    tiles_h, tiles_w = ceil_div(p, high.outputs), ceil_div(q, wide.outputs)
    tiles = images * tiles_h * tiles_w
    pitch = round_up(tiles, 16 // problem.itemsize) if problem.layout == "nchw" else tiles
    product = problem.bare().replace(
        n=1, c=positions * problem.c, k=positions * problem.k, groups=positions * problem.groups, spatial=(1, pitch),
        kernel=(1, 1), stride=(1, 1), padding=((0, 0), (0, 0)),
    )  # fmt: skip
    products_at = round_up(prod(product.x_shape) * problem.itemsize, arrays.ALIGNMENT)
    parts_at = products_at + round_up(prod(product.y_shape) * problem.itemsize, arrays.ALIGNMENT)
    return Part(images, tiles_h, tiles_w, tiles, pitch, product, products_at, parts_at)


def _most_images(problem: ConvProblem) -> int:
    """Of a part; 0 where none fits."""
    return min(problem.n, WORKSPACE_BYTES // part_of(problem, 1).parts_at)


def parts_of(problem: ConvProblem, config: Config) -> list[Part]:
    """All images, the last ones may be fewer."""
    whole, rest = divmod(problem.n, config.images)
    return [part_of(problem, images) for images in [config.images] * whole + [rest] * (rest > 0)]


# A part with its launches: images to tiles, the product, tiles to outputs.
Steps = tuple[Part, Launch, list[Launch], Launch]


def steps_of(problem: ConvProblem, config: Config, device: Device, absolute: str = "") -> list[Steps]:
    """All that a run launches, in order. `absolute`: as Winograd.magnitude_there wants, of x and w of that dtype."""
    found: list[Steps] = []
    first = 0
    for part in parts_of(problem, config):
        before = images_launch(problem, config, part, first, absolute)
        after = outputs_launch(problem, config, part, first, absolute)
        found.append((part, before, _PRODUCT.launches(part.product, config, device), after))
        first += part.images
    return found


def addresses_of(part: Part, addresses: Mapping[str, int]) -> dict[str, int]:
    """The product's arrays: x and y in the workspace."""
    memory = addresses["workspace"]
    return {"x": memory, "w": addresses["w"], "y": memory + part.products_at, "workspace": memory + part.parts_at}


class WinogradPlan(pack.PackedPlan):
    """Three steps for each part of the images."""

    def __init__(self, problem: ConvProblem, config: Config, device: Device, absolute: str = "") -> None:
        self._steps = steps_of(problem, config, device, absolute)
        launches = [launch for _, before, product, after in self._steps for launch in (before, *product, after)]
        packer = partial(pack_launch, problem, config, device, absolute)
        sizes = packed_bytes(problem, config), workspace_bytes(problem, config, device)
        super().__init__(problem, device, launches, packer, *sizes)

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
        for part, before, product, after in self._steps:
            inner = addresses_of(part, addresses)
            before({**addresses, "transformed": inner["x"]}, stream)
            for launch in product:
                launch(inner, stream)
            after({**addresses, "products": inner["y"]}, stream)


class Winograd(WinogradSums, CudaAlgorithm[Config]):
    """Filters of 2 to 7 taps an axis where a tile saves products, of stride 1 or 2; any padding and groups; NHWC and
    NCHW; float32, and float64 when asked for by name: rounding errors are larger than a direct sum's."""

    id: ClassVar[str] = "cuda.winograd"
    summary: ClassVar[str] = "fewer products: tiles transformed, then a product a position, on the FMA units"
    dtypes: ClassVar[tuple[str, ...]] = ("f32", "f64")
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if max(problem.stride) > 2 or set(problem.dilation) != {1}:
            return f"takes stride 1 or 2 and no dilation, not {problem.stride} and {problem.dilation}"
        if problem.group_c == 1 or problem.group_k == 1:
            return "takes two channels and filters a group or more"
        if not tilings(problem):
            size, stride = ("x".join(map(str, pair)) for pair in (problem.kernel, problem.stride))
            return f"takes filters whose tiles save products within its error bound, not {size} of stride {stride}"
        return None if _most_images(problem) else f"takes images whose tiles fit into {WORKSPACE_BYTES >> 30} GiB"

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """The largest tiles: smaller ones were never faster, nor parts that stay in L2."""
        # Parts of even size.
        images = ceil_div(problem.n, ceil_div(problem.n, _most_images(problem)))
        product = part_of(problem, images).product
        return [_config(problem, one, images) for one in _PRODUCT.configs(product, device)]

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """The product's own model, and for each transform a start and what it reads and writes."""
        total = 0.0
        for part in parts_of(problem, config):
            outside = prod(problem.x_shape) + prod(problem.y_shape) * (1 + problem.residual)
            moved = part.parts_at + outside * problem.itemsize * part.images / problem.n
            total += 2 * START_US + moved / (device.gbps * 1e3 * MEMORY)
            total += _PRODUCT.predict_us(part.product, config, device)
        return total

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """A launch, and the transformed filters written; not measured yet."""
        return 2.0 + 2 * packed_bytes(problem, config) / (device.gbps * 1e3)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return workspace_bytes(problem, config, device)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return WinogradPlan(problem, config, device)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        found = [make(problem, config) for make in (pack_source, images_source, outputs_source)]
        for part in parts_of(problem, config):
            found += _PRODUCT.sources(part.product, config)[1:]
        return list(dict.fromkeys(found))

    def magnitude_there(self, problem: ConvProblem, x: DeviceArray, w: DeviceArray, device: Device) -> np.ndarray:
        """`magnitude` on a GPU: the same launches in float64, of absolute values of everything."""
        wide = problem.bare().replace(dtype="f64", math="ieee")
        config = min(self.configs(wide, device), key=lambda one: self.predict_us(wide, one, device))
        plan = WinogradPlan(wide, config, device, problem.dtype)
        n, k, p, q = problem.y_shape
        y = arrays.allocate((n, p, q, k) if problem.layout == "nhwc" else (n, k, p, q), np.dtype(np.float64), x.index)
        memory = arrays.allocate((plan.workspace_bytes,), np.dtype(np.uint8), x.index)
        packed = arrays.allocate((packed_bytes(wide, config) // 8,), np.dtype(np.float64), x.index)
        plan.packer(tuple(step // w.dtype.itemsize for step in w.strides))({"w": w.ptr, "y": packed.ptr}, x.stream)
        plan.enqueue({"x": x.ptr, "w": packed.ptr, "y": y.ptr, "workspace": memory.ptr}, x.stream)
        result = arrays.download(y)
        return result.transpose(0, 3, 1, 2) if problem.layout == "nhwc" else result


def _config(problem: ConvProblem, product: implicit_gemm_simt.Config, images: int) -> Config:
    tile_h, tile_w = tilings(problem)[0]
    return Config(**asdict(product), images=images, tile_h=tile_h, tile_w=tile_w)


def packed_bytes(problem: ConvProblem, config: Config) -> int:
    return prod(_PRODUCT.packed(part_of(problem, 1).product, config)) * problem.itemsize


def workspace_bytes(problem: ConvProblem, config: Config, device: Device) -> int:
    """Transformed tiles of a part, sums of their products, and what the product itself needs."""
    part = parts_of(problem, config)[0]
    return part.parts_at + _PRODUCT.workspace_bytes(part.product, config, device)


def _types(problem: ConvProblem, absolute: str) -> tuple[str, str]:
    """Of x and w, and of what is computed."""
    return DTYPES[absolute or problem.dtype].cpp, DTYPES[problem.dtype].cpp


def _stub(problem: ConvProblem, config: Config, template: str, words: tuple[object, ...], struct: str) -> Source:
    declarations = matrices(problem.kernel, *axes_of(problem))
    return stub(KERNEL, template, template_args("Matrices", *words), struct, THREADS, declarations=declarations)


def matrices(kernel: tuple[int, ...], high: Transform, wide: Transform) -> str:
    """`struct Matrices`: sizes of a tile and the transforms of both axes, for the kernels."""
    sizes = {
        "R": kernel[0], "S": kernel[1], "OH": high.outputs, "OW": wide.outputs, "PH": high.products,
        "PW": wide.products, "IH": high.span, "IW": wide.span, "STEP_H": high.step, "STEP_W": wide.step,
    }  # fmt: skip
    lines = [f"    static constexpr int {name} = {size};\n" for name, size in sizes.items()]
    for axis, one in {"HIGH": high, "WIDE": wide}.items():
        for name, matrix in {"A": one.a_t, "B": one.b_t, "G": one.g}.items():
            rows = ", ".join(f"{{{', '.join(map(repr, row))}}}" for row in matrix)
            lines.append(f"    static constexpr double {name}_{axis}[{len(matrix)}][{len(matrix[0])}] = {{{rows}}};\n")
    return f"struct Matrices {{\n{''.join(lines)}}};\n"


def images_source(problem: ConvProblem, config: Config, absolute: str = "") -> Source:
    words = (*_types(problem, absolute), problem.layout == "nchw", bool(absolute))
    return _stub(problem, config, "winograd_images", words, "Images")


def pack_source(problem: ConvProblem, config: Config, absolute: str = "") -> Source:
    return _stub(problem, config, "winograd_filters", (*_types(problem, absolute), bool(absolute)), "Filters")


def outputs_source(problem: ConvProblem, config: Config, absolute: str = "") -> Source:
    planar = problem.layout == "nchw"
    most = 16 // problem.itemsize if planar else 1
    write = next(n for n in (4, 2, 1) if n <= most and problem.output[1] % n == config.tile_w % n == 0)
    activation = window.activation(problem.activation)
    words = (DTYPES[problem.dtype].cpp, planar, write, bool(absolute), activation)
    return _stub(problem, config, "winograd_outputs", words, "Outputs")


def images_launch(problem: ConvProblem, config: Config, part: Part, first: int, absolute: str = "") -> Launch:
    """Tiles of a part, whose first image is number `first`, to the workspace."""
    source = images_source(problem, config, absolute)
    fields = _fields(problem, source, part, first, problem.c, problem.spatial, ("c", "h", "w"))
    return _launch(source, fields | {"channels": problem.c, "pitch": part.pitch}, problem.c * part.pitch)


def outputs_launch(problem: ConvProblem, config: Config, part: Part, first: int, absolute: str = "") -> Launch:
    source = outputs_source(problem, config, absolute)
    fields = _fields(problem, source, part, first, problem.k, problem.output, ("k", "p", "q"))
    return _launch(source, fields, problem.k * part.tiles)


def _fields(
    problem: ConvProblem, source: Source, part: Part, first: int, channels: int, sizes: tuple[int, ...],
    names: tuple[str, str, str],
) -> dict[str, int]:  # fmt: skip
    """Places of tiles; distances of images, channels, rows and columns in the user's array, and in the workspace those
    of channels, tiles and positions."""
    high, wide = sizes
    positions = part.product.groups // problem.groups
    if problem.layout == "nhwc":
        steps, there = (high * wide * channels, 1, wide * channels, channels), (1, positions * channels, channels)
    else:
        steps, there = (channels * high * wide, high * wide, wide, 1), (part.pitch, 1, channels * part.pitch)
    fields = window.window_fields(problem, source)
    fields |= zip((f"step_{name}" for name in ("n", *names)), steps, strict=True)
    fields |= zip(("apart_c", "apart_tile", "apart_position"), there, strict=True)
    return fields | {"image0": first, "tiles_h": part.tiles_h, "tiles_w": part.tiles_w, "tiles": part.tiles}


def pack_launch(problem: ConvProblem, config: Config, device: Device, absolute: str, steps: tuple[int, ...]) -> Launch:
    """Filters of such strides (elements), transformed, in the product's order."""
    source = pack_source(problem, config, absolute)
    _, rows, pitch = _PRODUCT.packed(part_of(problem, 1).product, config)
    own = problem.groups
    fields = {"rows": rows, "pitch": pitch, "group_c": problem.group_c, "group_k": problem.group_k, "groups": own}
    fields |= zip(("step_k", "step_c", "step_r", "step_s"), steps, strict=True)
    blocks = min(ceil_div(own * rows * pitch, THREADS), pack.BLOCKS_EACH * device.multiprocessors)
    return Launch(source, fields, (blocks, 1, 1), THREADS)


def _launch(source: Source, fields: dict[str, int], count: int) -> Launch:
    grid = (ceil_div(count, THREADS), 1, 1)
    return Launch(source, fields, grid, THREADS, dependent=True)
