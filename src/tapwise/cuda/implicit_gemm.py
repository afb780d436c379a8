"""cuda.implicit_gemm: Hopper's tensor cores fed by its copy engine; no window is ever written to global memory.

Two kernels. `stream` copies the part of the window that each step of gemm_k needs, one tap's line of channels
for all pixels of a tile. `slab` (stride 1) keeps a tile's padded pixels in shared memory while all taps pass: a tap
is the same memory, read from a later line.

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014 (the product whose matrix is
never built); PTX ISA on cp.async.bulk.tensor (im2col mode) and wgmma.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod, sqrt
from typing import Any, ClassVar, Final

from tapwise.algorithm import Algorithm, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.cuda import implicit_gemm_model as model
from tapwise.cuda import pack
from tapwise.cuda import plan as plans
from tapwise.cuda.arrays import DeviceArray
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.jit.tensor_map import LINE_BYTES, WORDS, TensorMap, legal
from tapwise.problem import ConvProblem

GEMM: Final = (
    *(f"{name}{word}" for name in "xw" for word in range(WORDS)),
    "y", "bias", "residual", "pixels", "filters", "groups", "tiles_f", "tiles", "p", "q", "taps_w", "chunks",
    "part_chunks", "steps", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w",
)  # fmt: skip
SLAB: Final = (
    *(f"{name}{word}" for name in "xw" for word in range(WORDS)),
    "y", "bias", "residual", "image", "n", "filters", "groups", "tiles_f", "tiles", "p", "q", "r", "s", "chunks",
    "part_chunks", "wide", "high", "lines", "copy_lines", "pad_h", "pad_w", "dilation_h", "dilation_w",
    "height", "width", "c", "group_c",
)  # fmt: skip
# Pixels that one copy takes.
MOST_LINES: Final = 256
# Taps for which a slab is kept: as many products are under way as there may be, and one.
LEAST_TAPS: Final = 3
# Bytes of the instruction's steps along gemm_k.
STEP_BYTES: Final = 32
INSTRUCTIONS: Final = {"f16": "k16.f32.f16.f16", "bf16": "k16.f32.bf16.bf16", "f32": "k8.f32.tf32.tf32"}
LARGEST: Final = 1 << 31
# Registers of a thread beside its sums.
OTHER_REGISTERS: Final = 60
# Outputs of a tile whose sums blocks of a cluster exchange.
MOST_EXCHANGED: Final = 8192
# (rows of the instruction, pixels, filters) of a tile.
TILES: Final = tuple(
    [("filters", pixels, 64) for pixels in (32, 48, 64, 72, 80, 96, 112, 128, 160, 176, 192, 208, 224, 256)]
    + [("filters", pixels, 128) for pixels in (48, 64, 96, 112, 128, 160, 192, 224, 256)]
    + [("pixels", 64, filters) for filters in (16, 24, 32, 40, 48, 64, 96, 192)]
    + [("pixels", 128, filters) for filters in (32, 40, 48, 56, 64, 96, 128, 160, 192, 256)]
    + [("pixels", 256, filters) for filters in (16, 32, 64, 128)]
)
# For few filters, of slabs: their windows overlap less.
LONG_TILES: Final = tuple(
    [("pixels", 512, filters) for filters in (8, 16, 24, 32)] + [("pixels", 1024, filters) for filters in (8, 16)]
)
# (warpgroups, whether they take turns, blocks that share gemm_k, blocks of a multiprocessor).
SCHEDULES: Final = (
    (2, True, 1, 1), (2, False, 1, 1), (1, False, 1, 1), (1, False, 1, 2), (1, False, 2, 2), (1, False, 4, 2),
    (1, False, 8, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Config(BaseConfig):
    """`kernel`: stream or slab. A tile of pixels x filters; `rows` of the matrix instruction: pixels or filters;
    warpgroups that share a tile, or (`turns`) take tiles in turns; stages of the ring; `split` blocks of a cluster
    share gemm_k; `resident` blocks of a multiprocessor: as many as there is room for take the tiles in turns, or a
    cluster a tile where gemm_k is split. `slabs` in shared memory, `held`: all filters stay there too; `gather`: bytes
    of the pieces in which warps copy x, 0 for the copy engine; `bundle`: groups whose channels share a line."""

    kernel: str
    rows: str
    pixels: int
    filters: int
    warpgroups: int
    turns: bool
    stages: int
    split: int = 1
    resident: int = 1
    slabs: int = 0
    held: bool = False
    gather: int = 0
    bundle: int = 1


class ImplicitGemmPlan(plans.CudaPlan):
    """Perhaps a launch that packs x, and the product."""

    def __init__(
        self, problem: ConvProblem, device: Device, first: Launch | None, gemm: Launch, line: int, workspace_bytes: int
    ) -> None:
        super().__init__(problem, device, [gemm] if first is None else [first, gemm], workspace_bytes)
        self._first, self._gemm, self._line, self._device = first, gemm, line, device

    def pack(self, w: Any) -> DeviceArray:
        """The filters as [k][tap][channel], each tap's channels of a group padded to whole pieces."""
        return pack.filters(self.problem, w, self._line, self._device)

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
        if self._first is not None:
            self._first({"x": addresses["x"], "y": addresses["workspace"]}, stream)
            addresses = {**addresses, "x": addresses["workspace"]}
        self._gemm(addresses, stream)


class ImplicitGemm(Algorithm[Config]):
    """Any stride up to 8, padding, dilation and groups; NHWC, and NCHW by packing x first; float16, bfloat16, and
    float32 with math="tf32" or "3xtf32". Hopper."""

    id: ClassVar[str] = "cuda.implicit_gemm"
    summary: ClassVar[str] = "tensor cores (wgmma) fed by the copy engine (TMA)"

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        reason = plans.rejects_tensor_cores(problem, device)
        if reason is not None:
            return reason
        if device.architecture != "sm_90a":
            return f"needs Hopper (sm_90a), not {device.architecture}"
        if prod(problem.y_shape) >= LARGEST or prod(problem.x_shape) >= LARGEST:
            return "takes fewer than 2^31 elements"
        # Tensor cores cut off after each step of eight channels; with few of them in a step that adds up.
        additions = 3 * prod(problem.kernel) * -(-problem.group_c // 8)
        if problem.math == "3xtf32" and additions > 0.5 * problem.gemm_k + 2 * sqrt(problem.gemm_k):
            return f"keeps fp32's bound with 3xtf32 for more channels a group, not {problem.group_c}"
        if not legal(self._corners(problem), self._reach(problem), problem.stride):
            return f"takes padding, dilation and strides that a tensor map can express, not those of '{problem}'"
        return None

    def packed(self, problem: ConvProblem, config: Config) -> bool:
        """Whether x has to be brought into another order first."""
        return not config.gather and (problem.layout == "nchw" or problem.math == "3xtf32" or not _whole(problem))

    def _five(self, problem: ConvProblem) -> bool:
        """Whether the map of x has an axis for groups and parts."""
        return problem.groups > 1 or problem.math == "3xtf32"

    def _corners(self, problem: ConvProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where windows begin, innermost axis first: from -padding to the last window's place relative to the edge."""
        lower, upper = [], []
        for (before, after), reach in zip(problem.padding[::-1], problem.reach[::-1], strict=True):
            lower.append(-before)
            upper.append(after - (reach - 1))
        if self._five(problem):
            lower, upper = [*lower, 0], [*upper, 0]
        return tuple(lower), tuple(upper)

    def _reach(self, problem: ConvProblem) -> tuple[int, ...]:
        return tuple(reach - 1 for reach in problem.reach[::-1]) + ((0,) if self._five(problem) else ())

    def padded(self, problem: ConvProblem) -> tuple[int, int]:
        """(high, wide) of an image in a slab: neighbours share their padding."""
        high, wide = (size + max(sides) for size, sides in zip(problem.spatial, problem.padding, strict=True))
        return high, wide

    def slab_lines(self, problem: ConvProblem, config: Config) -> tuple[int, int]:
        """(lines of a slab, lines of one of its copies): a tile's pixels, and what their windows reach."""
        (reach_h, reach_w), (_, wide) = problem.reach, self.padded(problem)
        lines = config.pixels + (reach_h - 1) * wide + reach_w - 1
        copies = -(-lines // MOST_LINES)
        each = -(-lines // (8 * copies)) * 8
        return copies * each, each

    def map_x(self, problem: ConvProblem, lines: int, packed: bool, slab: bool = False) -> TensorMap:
        """x as packed, or as it lies; `lines` pixels a copy; pixels of all windows, or of the padded image for a
        slab."""
        size, (h, w) = pack.SIZES[problem.dtype], problem.spatial
        five = self._five(problem)
        channels = pack.wide(problem) if packed else problem.group_c
        pixel = (channels if packed else problem.c) * size
        sizes: tuple[int, ...] = (channels, w, h, problem.n)
        strides: tuple[int, ...] = (pixel, pixel * w, pixel * w * h)
        steps = problem.stride[::-1]
        if five:
            sizes = (*sizes, problem.groups * pack.parts(problem))
            strides = (*strides, pixel * w * h * problem.n if packed else channels * size)
            steps = (*steps, 1)
        kind = "tf32" if problem.dtype == "f32" else problem.dtype
        corners = self._corners(problem)
        if slab:
            upper = [max(0, after - before) for before, after in problem.padding[::-1]]
            corners = corners[0], (*upper, 0) if five else tuple(upper)
        return TensorMap(kind, sizes, strides, (span(problem) // size, lines), corners, steps, span(problem))

    def line(self, problem: ConvProblem) -> int:
        """Channels of a tap's part of the packed filters: of 3xtf32 whole chunks, so that parts begin with one."""
        each = span(problem) // pack.SIZES[problem.dtype]
        return self._chunks(problem) * each if problem.math == "3xtf32" else pack.wide(problem)

    def map_w(self, problem: ConvProblem, lines: int) -> TensorMap:
        """The packed filters of the problem itself, not of a view of it; `lines` filters a copy."""
        size = pack.SIZES[problem.dtype]
        line = self.line(problem) * (3 if problem.math == "3xtf32" else 1)
        taps = prod(problem.kernel)
        return TensorMap(
            problem.dtype, (line, taps, problem.k), (line * size, line * taps * size),
            (span(problem) // size, 1, lines), line_bytes=span(problem),
        )  # fmt: skip

    def _chunks(self, problem: ConvProblem) -> int:
        """Lines that a group's channels fill."""
        return -(-problem.group_c * pack.SIZES[problem.dtype] // span(problem))

    def steps(self, problem: ConvProblem) -> int:
        """Steps of gemm_k: chunks of all taps and parts."""
        return prod(problem.kernel) * self._chunks(problem) * (3 if problem.math == "3xtf32" else 1)

    def _last(self, problem: ConvProblem) -> int:
        """The instruction's steps in a tap's last chunk of channels."""
        rest = problem.group_c * pack.SIZES[problem.dtype] - (self._chunks(problem) - 1) * span(problem)
        return -(-rest // STEP_BYTES)

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        bundles = self._bundles(problem, device)
        problem = folded(problem)
        found = []
        for (rows, pixels, filters), (warpgroups, turns, split, resident) in product(TILES, SCHEDULES):
            if split > 1 and pixels * filters > MOST_EXCHANGED:
                continue
            config = Config("stream", rows, pixels, filters, warpgroups, turns, 0, split, resident)
            staged = self._staged(problem, config, device)
            if staged is not None:
                found.append(staged)
        # Padded images share their padding with the next, so there is no more of it than windows reach.
        shared = all(min(sides) < reach for sides, reach in zip(problem.padding, problem.reach, strict=True))
        countable = problem.n * prod(self.padded(problem)) < LARGEST
        if set(problem.stride) == {1} and prod(problem.kernel) >= LEAST_TAPS and shared and countable:
            found += self._slabs(problem, device)
        return found + bundles

    def _bundles(self, problem: ConvProblem, device: Device) -> list[Config]:
        """Groups of 32 or 64 bytes of channels, as many in a line as fill it, each multiplied with its own filters."""
        size = problem.group_c * pack.SIZES[problem.dtype]
        count = LINE_BYTES // size if size in (32, 64) else 1
        if (
            count == 1
            or problem.groups % count
            or problem.group_k % 8
            or not _whole(problem)
            or self.line(problem) != problem.group_c
            or problem.math == "3xtf32"
            or problem.layout == "nchw"
        ):
            return []
        found: list[Config] = []
        filters = count * problem.group_k
        view = _view(problem, Config("stream", "pixels", 64, filters, 1, False, 3, bundle=count))
        taken = [one for one in SCHEDULES if one[2] == 1]
        for pixels, (warpgroups, turns, split, resident) in product((64, 128, 256), taken):
            config = Config("stream", "pixels", pixels, filters, warpgroups, turns, 0, split, resident, bundle=count)
            staged = self._staged(view, config, device)
            if staged is not None and filters <= 256:
                found.append(staged)
        shared = all(min(sides) < reach for sides, reach in zip(problem.padding, problem.reach, strict=True))
        if set(problem.stride) == {1} and prod(problem.kernel) >= LEAST_TAPS and shared:
            for pixels, stages in product((64, 128, 256), (8, 4)):
                config = Config("slab", "pixels", pixels, filters, 2, True, stages, slabs=2, bundle=count)
                if self._legal(view, config, device):
                    found.append(config)
        return found

    def _slabs(self, problem: ConvProblem, device: Device) -> list[Config]:
        found = []
        steps = self.steps(problem)
        for (rows, pixels, filters), pieces in product(TILES + LONG_TILES, _pieces(problem)):
            if filters > 64:
                continue
            held = -(-problem.group_k // filters) * problem.groups == 1
            wanted = [(steps, True)] if held else []
            wanted += [(stages, False) for stages in (12, 8, 6, 4)]
            for stages, stay in wanted:
                config = Config("slab", rows, pixels, filters, 2, True, stages, slabs=2, held=stay, gather=pieces)
                if self._legal(problem, config, device):
                    found.append(config)
                    break
        return found

    def _staged(self, problem: ConvProblem, config: Config, device: Device) -> Config | None:
        """The config with as many stages as there is room for, up to all steps."""
        steps = -(-self.steps(problem) // config.split)
        for stages in range(min(8, max(3, steps)), 2, -1):
            one = replace(config, stages=stages)
            if self._legal(problem, one, device):
                return one
        return None

    def _legal(self, problem: ConvProblem, config: Config, device: Device) -> bool:
        room = (device.shared_bytes + 1024) // config.resident - 1024
        # Two warpgroups get registers of the one that copies.
        registers = 216 if config.warpgroups == 2 else 255 if config.resident == 1 else 128
        height, width = self._sides(config)
        share, rest = divmod(height // 64, 1 if config.turns else config.warpgroups)
        return (
            self.shared_bytes(problem, config) <= room
            and self.steps(problem) >= config.split
            and share >= 1 and rest == 0
            and share * width // 2 + OTHER_REGISTERS <= registers
        )  # fmt: skip

    def _sides(self, config: Config) -> tuple[int, int]:
        """Rows and columns of the matrix instruction that make a tile."""
        pair = config.pixels, config.filters
        return pair if config.rows == "pixels" else pair[::-1]

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        """The ring or the split sums, the staging part, the tables of places, barriers, and what aligns them."""
        line = span(problem)
        ring = config.stages * (config.pixels * line + config.filters * line // config.bundle)
        if config.kernel == "slab":
            lines, _ = self.slab_lines(problem, config)
            filters = config.stages * config.filters // config.bundle
            ring = (config.slabs * lines + filters) * line + 16 * config.slabs + 2048
        sums = config.pixels * (config.filters + 4) * 4 if config.split > 1 else 0
        each = 64 * 72 * 4 if pack.SIZES[problem.dtype] == 4 else 64 * 64 * 2
        staging = 0 if config.split > 1 else config.warpgroups * each
        share = config.pixels if config.rows == "filters" or config.turns else config.pixels // config.warpgroups
        return max(ring, sums) + staging + config.warpgroups * share * 8 + config.stages * 16 + 2048

    def tiles(self, problem: ConvProblem, config: Config) -> tuple[int, int]:
        """Tiles along the filters of a group, and all."""
        across = -(-problem.group_k // config.filters)
        pixels = problem.n * prod(self.padded(problem) if config.kernel == "slab" else problem.output)
        return across, across * -(-pixels // config.pixels) * problem.groups

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """implicit_gemm_model.py says how."""
        return self._cost(problem, config, device).us

    def explain(self, problem: ConvProblem, config: Config, device: Device) -> str:
        """What the predicted time is made of."""
        return str(self._cost(problem, config, device))

    def _cost(self, problem: ConvProblem, config: Config, device: Device) -> model.Cost:
        packed_bytes = self.workspace_bytes(problem, config, device)
        moved = problem.bytes
        problem = _view(problem, config)
        rows, columns = self._sides(config)
        columns //= config.bundle
        chunks, line = self._chunks(problem), span(problem)
        taps = prod(problem.kernel)
        pixel_lines: float = config.pixels
        if config.kernel == "slab":
            pixel_lines = self.slab_lines(problem, config)[0] / taps
        _, tiles = self.tiles(problem, config)
        overlapped = "turns" if config.turns else "once" if config.split > 1 else "loop"
        if config.resident > 1 and tiles * config.split > device.threads:
            overlapped = "resident"
        work = model.Work(
            rows=rows, columns=columns, steps=-(-self.steps(problem) // config.split),
            instructions=((chunks - 1) * line / STEP_BYTES + self._last(problem)) / chunks, pixel_lines=pixel_lines,
            filter_lines=0 if config.held else config.filters / config.bundle, line_bytes=line,
            slab=config.kernel == "slab", gather=config.gather, outputs=config.pixels * config.filters,
            written=_vector(problem), blocks=tiles * config.split, split=config.split, overlapped=overlapped,
            bytes=moved, packed_bytes=packed_bytes,
        )  # fmt: skip
        return model.cost(work, device.threads, device.gbps)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return pack.images_bytes(problem) if self.packed(problem, config) else 0

    def error_factor(self, problem: ConvProblem) -> float:
        """tf32 keeps 11 bits of each factor, cut off at worst: 2^-9 of a product. 3xtf32 has the bound of fp32."""
        return super().error_factor(problem) + (2.0**15 if problem.math == "tf32" else 0.0)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        first = pack.images(problem, device) if self.packed(problem, config) else None
        gemm = self.launch(problem, config, device)
        return ImplicitGemmPlan(
            problem, device, first, gemm, self.line(problem), self.workspace_bytes(problem, config, device)
        )

    def source(self, problem: ConvProblem, config: Config) -> Source:
        problem = _view(problem, config)
        written = 1 if config.kernel == "slab" and problem.layout == "nchw" else _vector(problem)
        words = (
            pack.TYPES[problem.dtype], config.rows == "filters", config.pixels, config.filters, config.warpgroups,
            config.turns, config.stages, config.split, span(problem), config.bundle, self._last(problem),
            self._five(problem), written, problem.layout == "nchw", problem.bias, problem.residual,
            plans.ACTIVATIONS[problem.activation],
        )  # fmt: skip
        width = self._sides(config)[1] // config.bundle
        threads = self._threads(config)
        texts = [str(word).lower() if isinstance(word, bool) else str(word) for word in words]
        tile, header = f"Tile<{', '.join(texts)}>", instruction(problem.dtype, width)
        if config.kernel == "slab":
            more = f"{tile}, {config.slabs}, {str(config.held).lower()}, {config.gather}"
            return stub("implicit_gemm_slab.cu", "implicit_gemm_slab", more, "Slab", threads, 1, header)
        return stub("implicit_gemm.cu", "implicit_gemm", tile, "Gemm", threads, config.resident, header, config.split)

    def _threads(self, config: Config) -> int:
        """Warpgroups, and a warp that copies, or beside two a warpgroup."""
        return config.warpgroups * 128 + (128 if config.warpgroups == 2 else 32)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        """All kernels of a config."""
        first = [pack.images_source(problem)] if self.packed(problem, config) else []
        return [*first, pack.filters_source(problem), self.source(problem, config)]

    def launch(self, problem: ConvProblem, config: Config, device: Device) -> Launch:
        packed, source = self.packed(problem, config), self.source(problem, config)
        filters = self.map_w(folded(problem), config.filters)
        problem = _view(problem, config)
        fields = plans.window_fields(problem) | {"group_c": problem.group_c}
        tiles_f, tiles = self.tiles(problem, config)
        chunks = self._chunks(problem)
        names = SLAB if config.kernel == "slab" else GEMM
        mine = {
            "pixels": problem.n * prod(problem.output), "filters": problem.group_k, "tiles_f": tiles_f, "tiles": tiles,
            "taps_w": problem.kernel[1], "chunks": chunks * (3 if problem.math == "3xtf32" else 1),
            "part_chunks": chunks, "steps": self.steps(problem),
        }  # fmt: skip
        lines = config.pixels
        if config.kernel == "slab":
            mine["high"], mine["wide"] = self.padded(problem)
            mine["lines"], lines = self.slab_lines(problem, config)
            mine["copy_lines"] = lines
        mine = {name: value for name, value in (fields | mine).items() if name in names}
        blocks = tiles * config.split
        if config.split == 1:
            blocks = min(blocks, device.threads * config.resident)
        slab = config.kernel == "slab"
        maps = {"x": self.map_x(problem, lines, packed, slab), "w": filters}
        if config.gather:
            # Not used, but a struct has a place for it.
            del maps["x"]
        return Launch(
            source, names, mine, (blocks, 1, 1), (self._threads(config), 1, 1),
            self.shared_bytes(problem, config), maps, True, {"image": "x"},
        )  # fmt: skip


def span(problem: ConvProblem) -> int:
    """Bytes of a line of channels in shared memory: as few as hold a group's channels, 128 at most."""
    size = problem.group_c * pack.SIZES[problem.dtype]
    return next((line for line in (32, 64) if size <= line), LINE_BYTES)


def folded(problem: ConvProblem) -> ConvProblem:
    """The same sums with fewer taps: windows that lie side by side along a line are pixels of s * c channels."""
    (_, s), (_, stride), (_, sides) = problem.kernel, problem.stride, problem.padding
    height, width = problem.spatial
    if (
        s == 1 or s != stride or problem.dilation[1] != 1 or sides != (0, 0) or problem.groups > 1
        or problem.layout != "nhwc" or problem.math == "3xtf32" or width != problem.output[1] * s or not _whole(problem)
    ):  # fmt: skip
        return problem
    return problem.replace(
        c=problem.c * s, spatial=(height, width // s), kernel=(problem.kernel[0], 1), stride=(problem.stride[0], 1),
        padding=(problem.padding[0], (0, 0)),
    )  # fmt: skip


def _view(problem: ConvProblem, config: Config) -> ConvProblem:
    """The problem as a config sees its images: folded, or with several groups as one."""
    if config.bundle > 1:
        return problem.replace(groups=problem.groups // config.bundle)
    return folded(problem)


def _whole(problem: ConvProblem) -> bool:
    """Whether the copy engine can take the channels as they lie: pixels and groups in whole pieces of 16 bytes."""
    size = pack.SIZES[problem.dtype]
    return problem.c * size % 16 == 0 and problem.group_c * size % 16 == 0


def _pieces(problem: ConvProblem) -> list[int]:
    """Ways to bring a slab: by the copy engine (0), and by warps in pieces of so many bytes."""
    size = pack.SIZES[problem.dtype]
    if problem.layout == "nchw" or problem.math == "3xtf32":
        return [0]
    pieces = [count for count in (16, 8, 4) if problem.c * size % count == 0 and problem.group_c * size % count == 0]
    return [*pieces[:1], 0]


def _vector(problem: ConvProblem) -> int:
    """Elements of y that are written at once: they lie in one group, and begin on a multiple of themselves."""
    most = 16 // pack.SIZES[problem.dtype]
    inner = problem.group_k if problem.layout == "nhwc" else prod(problem.output)
    return next(count for count in (most, most // 2, most // 4, 1) if count and inner % count == 0)


def instruction(dtype: str, columns: int) -> str:
    """The matrix instruction of so many columns, as include/hopper.cuh wants it: 64 rows by one step of 32 bytes."""
    sums = columns // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    # For 16-bit elements the instruction says that neither operand is transposed.
    orders = "" if dtype == "f32" else ", 0, 0"
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    return (
        f'#define WGMMA "{{ .reg .pred p; setp.ne.b32 p, %{sums + 2}, 0; wgmma.mma_async.sync.aligned.m64n{columns}'
        f'{INSTRUCTIONS[dtype]} {{{registers}}}, %{sums}, %{sums + 1}, p, 1, 1{orders}; }}"\n'
        f"#define WGMMA_N {columns}\n#define WGMMA_SUMS {outputs}\n"
    )
