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
from math import gcd, prod, sqrt
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
    *(f"{name}{word}" for name in ("x", "w", "out") for word in range(WORDS)),
    "y", "bias", "residual", "pixels", "filters", "groups", "tiles_f", "tiles", "p", "q", "taps_w", "chunks",
    "part_chunks", "steps", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "settled",
)  # fmt: skip
SLAB: Final = (
    *(f"{name}{word}" for name in "xw" for word in range(WORDS)),
    "y", "bias", "residual", "image", "n", "filters", "groups", "tiles_f", "tiles", "p", "q", "r", "s", "chunks",
    "part_chunks", "wide", "high", "lines", "copy_lines", "pad_h", "pad_w", "dilation_h", "dilation_w",
    "height", "width", "c", "group_c", "down", "across", "tiles_h", "tiles_w", "settled",
)  # fmt: skip
# Pixels that one copy takes.
MOST_LINES: Final = 256
# Taps for which a slab is kept: as many products are under way as there may be, and one.
LEAST_TAPS: Final = 3
# Bytes of the instruction's steps along gemm_k.
STEP_BYTES: Final = 32
INSTRUCTIONS: Final = {"f16": "k16.f32.f16.f16", "bf16": "k16.f32.bf16.bf16", "f32": "k8.f32.tf32.tf32"}
LARGEST: Final = 1 << 31
# Registers of a thread beside its sums: in the plain kernel, and for what else it does.
PLAIN_REGISTERS: Final = 60
MORE_REGISTERS: Final = {"bias": 8, "residual": 21, "f32": 16, "nchw": 44}
# Outputs of a tile whose sums blocks of a cluster exchange.
MOST_EXCHANGED: Final = 8192
# (rows of the instruction, pixels, filters) of a tile.
TILES: Final = tuple(
    [("filters", pixels, 64) for pixels in (32, 48, 64, 72, 80, 96, 112, 128, 160, 176, 192, 208, 224, 256)]
    + [("filters", pixels, 128) for pixels in (48, 64, 96, 112, 128, 160, 192, 224, 256)]
    + [("pixels", 64, filters) for filters in (16, 24, 32, 40, 48, 64, 96, 128, 192, 256)]
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
    (1, False, 8, 2), (1, False, 2, 1), (1, False, 4, 1), (1, False, 8, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Config(BaseConfig):
    """`kernel`: stream, slab or box. A tile of pixels x filters; `rows` of the matrix instruction: pixels or filters;
    warpgroups that share a tile, or (`turns`) take tiles in turns; stages of the ring; `split` blocks of a cluster
    share gemm_k; `resident` blocks of a multiprocessor: as many as there is room for take the tiles in turns, or a
    cluster a tile where gemm_k is split. `held`: the filters stay in shared memory; `slabs` there; `gather`: bytes
    of the pieces in which warps copy x, 0 for the copy engine; `bundle`: groups whose channels share a line;
    `across`: outputs of a line of a box."""

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
    across: int = 0


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
        if config.kernel == "box":
            _, wide, high, behind = self.box(problem, config)
            return wide * high, behind
        (reach_h, reach_w), (_, wide) = problem.reach, self.padded(problem)
        lines = config.pixels + (reach_h - 1) * wide + reach_w - 1
        copies = -(-lines // MOST_LINES)
        each = -(-lines // (8 * copies)) * 8
        return copies * each, each

    def map_x(
        self, problem: ConvProblem, lines: int, packed: bool, slab: bool = False, box: tuple[int, ...] = ()
    ) -> TensorMap:
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
        if box:
            ones = (1,) * (len(sizes) - 3)
            return TensorMap(kind, sizes, strides, (span(problem) // size, *box, *ones), line_bytes=span(problem))
        if slab:
            upper = [max(0, after - before) for before, after in problem.padding[::-1]]
            corners = corners[0], (*upper, 0) if five else tuple(upper)
        return TensorMap(kind, sizes, strides, (span(problem) // size, lines), corners, steps, span(problem))

    def line(self, problem: ConvProblem) -> int:
        """Channels of a tap's part of the packed filters: whole chunks, which the copy engine takes faster; where taps
        side by side are seen as channels, no more than there are."""
        if folded(problem) is not problem:
            return problem.group_c
        return self._chunks(problem) * (span(problem) // pack.SIZES[problem.dtype])

    def map_w(self, problem: ConvProblem, lines: int) -> TensorMap:
        """The packed filters, of which a view of the problem may see fewer taps; `lines` filters a copy."""
        size, seen = pack.SIZES[problem.dtype], folded(problem)
        line = self.line(problem) * (3 if problem.math == "3xtf32" else 1) * problem.kernel[1] // seen.kernel[1]
        problem = seen
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
        for (rows, pixels, filters), (warpgroups, turns, split, resident) in product(_tiles(problem), SCHEDULES):
            if split > 1 and pixels * filters > MOST_EXCHANGED:
                continue
            config = Config("stream", rows, pixels, filters, warpgroups, turns, 0, split, resident)
            staged = self._staged(problem, config, device)
            if staged is not None:
                found.append(staged)
            # Filters stay where a block has several tiles of the same.
            if split == resident == 1 and 2 * self.blocks(problem, config, device) <= self.tiles(problem, config)[1]:
                staged = self._staged(problem, replace(config, held=True), device)
                if staged is not None and self.blocks(problem, staged, device):
                    found.append(staged)
        # Padded images share their padding with the next, so there is no more of it than windows reach.
        shared = all(min(sides) < reach for sides, reach in zip(problem.padding, problem.reach, strict=True))
        countable = problem.n * prod(self.padded(problem)) < LARGEST
        if set(problem.stride) == {1} and prod(problem.kernel) >= LEAST_TAPS and shared and countable:
            found += self._slabs(problem, device)
        if set(problem.stride) == {1} and prod(problem.kernel) >= LEAST_TAPS:
            found += self._boxes(problem, device)
        return found + bundles

    def box(self, problem: ConvProblem, config: Config) -> tuple[int, int, int, int]:
        """(outputs down a box, its lines' length, its lines' count, lines behind it that shifted operands read)."""
        (reach_h, reach_w), across = problem.reach, config.across
        wide = across + reach_w - 1
        down = config.pixels // wide
        return down, wide, down + reach_h - 1, -(-(reach_w - 1 + config.pixels - down * wide) // 8) * 8

    def _boxes(self, problem: ConvProblem, device: Device) -> list[Config]:
        """Boxes whose tiles fit the image best: a few widths for each tile."""
        if not _whole(problem) and problem.layout == "nhwc" and problem.math != "3xtf32":
            return []
        p, q = problem.output
        steps = self.steps(problem)
        found = []
        for rows, pixels, filters in _tiles(problem) + LONG_TILES:
            if filters > (128 if rows == "pixels" else 64) or pixels < 64:
                continue
            widths = {}
            for count in range(1, q + 1):
                across = -(-q // count)
                wide = across + problem.reach[1] - 1
                if across < 4 or wide > pixels:
                    if across < 4:
                        break
                    continue
                down = pixels // wide
                tiles = -(-p // down) * count
                lines = (down + problem.reach[0] - 1) * wide
                if wide <= MOST_LINES and down + problem.reach[0] - 1 <= MOST_LINES:
                    widths[across] = tiles * (pixels + lines)
            held = -(-problem.group_k // filters) * problem.groups == 1
            wanted = [(steps, True)] if held else []
            wanted += [(stages, False) for stages in (12, 8, 6, 4)]
            for across in sorted(widths, key=lambda one: widths[one])[:2]:
                for stages, stay in wanted:
                    config = Config("box", rows, pixels, filters, 2, True, stages, slabs=2, held=stay, across=across)
                    if self._legal(problem, config, device):
                        found.append(config)
                        break
        return found

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
        for (rows, pixels, filters), pieces in product(_tiles(problem) + LONG_TILES, _pieces(problem)):
            if filters > (128 if rows == "pixels" else 64):
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
        """The config with as many stages as there is room for, up to all steps of a block."""
        steps = -(-self.steps(problem) // config.split)
        if config.split == 1:
            steps *= -(-self.tiles(problem, config)[1] // (device.threads * config.resident))
        for stages in range(min(8, max(3, steps)), 2, -1):
            one = replace(config, stages=stages)
            if self._legal(problem, one, device):
                return one
        return None

    def _legal(self, problem: ConvProblem, config: Config, device: Device) -> bool:
        room = (device.shared_bytes + 1024) // config.resident - 1024
        # Two warpgroups get registers of the one that copies, which needs them itself where it gathers.
        pair = 216 if config.gather else 232
        registers = pair if config.warpgroups == 2 else 255 if config.resident == 1 else 128
        used = {
            "bias": problem.bias or problem.activation is not None, "residual": problem.residual,
            "f32": problem.dtype == "f32", "nchw": problem.layout == "nchw",
        }  # fmt: skip
        others = PLAIN_REGISTERS + sum(MORE_REGISTERS[name] for name, needed in used.items() if needed)
        height, width = self._sides(config)
        share, rest = divmod(height // 64, 1 if config.turns else config.warpgroups)
        return (
            self.shared_bytes(problem, config) <= room
            and self.steps(problem) >= config.split
            and share >= 1 and rest == 0
            and share * width // 2 + others <= registers
        )  # fmt: skip

    def _sides(self, config: Config) -> tuple[int, int]:
        """Rows and columns of the matrix instruction that make a tile."""
        pair = config.pixels, config.filters
        return pair if config.rows == "pixels" else pair[::-1]

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        """The ring or the split sums, the staging part, the tables of places, barriers, and what aligns them."""
        line = span(problem)
        filters = config.filters * line // config.bundle
        ring = config.stages * config.pixels * line + (self.steps(problem) if config.held else config.stages) * filters
        ring += 2048 if config.held else 0
        if config.kernel != "stream":
            lines, behind = self.slab_lines(problem, config)
            lines += -(-lines // 8) * 8 - lines + behind if config.kernel == "box" else 0
            filters = config.stages * config.filters // config.bundle
            ring = (config.slabs * lines + filters) * line + 16 * config.slabs + 2048
        size = pack.SIZES[problem.dtype]
        fetched = problem.residual and config.split == 1 and _vector(problem) * size >= 4
        each = 64 * 64 * size * (2 if fetched or (size == 2 and config.kernel == "stream") else 1)
        rows, columns = self._sides(config)
        # Split sums come in lines that are up to ten longer.
        staging = rows * (columns + 10) * 4 if config.split > 1 else config.warpgroups * each
        share = config.pixels if config.rows == "filters" or config.turns else config.pixels // config.warpgroups
        tables = config.warpgroups * (share + config.filters * problem.bias) * 4
        return ring + staging + tables + config.stages * 16 + 2048

    def boxes(self, problem: ConvProblem, config: Config) -> int:
        """How the copy engine writes y: not (0), 64 filters at a time (1), or all of it (2): no tile has fewer."""
        whole = _vector(problem) * pack.SIZES[problem.dtype] == 16
        if config.kernel != "stream" or config.split > 1 or problem.layout == "nchw" or not whole:
            return 0
        if config.filters % 64 == 0 or self.tiles(problem, config)[0] == 1:
            return 2
        return 1 if config.filters > 64 else 0

    def map_y(self, problem: ConvProblem, config: Config) -> TensorMap:
        """y as pixels of groups of filters; a box is a line of 128 bytes of as many pixels as all tiles are made of."""
        size = pack.SIZES[problem.dtype]
        pixels = 64 if config.rows == "pixels" else gcd(config.pixels, 64)
        return TensorMap(
            problem.dtype, (problem.group_k, problem.groups, problem.n * prod(problem.output)),
            (problem.group_k * size, problem.k * size), (LINE_BYTES // size, 1, pixels),
        )  # fmt: skip

    def tiles(self, problem: ConvProblem, config: Config) -> tuple[int, int]:
        """Tiles along the filters of a group, and all."""
        across = -(-problem.group_k // config.filters)
        if config.kernel == "box":
            down = self.box(problem, config)[0]
            p, q = problem.output
            return across, across * problem.n * -(-p // down) * -(-q // config.across) * problem.groups
        pixels = problem.n * prod(self.padded(problem) if config.kernel == "slab" else problem.output)
        return across, across * -(-pixels // config.pixels) * problem.groups

    def blocks(self, problem: ConvProblem, config: Config, device: Device) -> int:
        """Blocks of the launch; where filters stay, so many that each of them keeps its filters."""
        across, tiles = self.tiles(problem, config)
        if config.split > 1:
            return tiles * config.split
        most = min(tiles, device.threads * config.resident)
        if config.kernel == "stream" and config.held:
            most -= most % (across * problem.groups)
        return most

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """implicit_gemm_model.py says how."""
        return self._cost(problem, config, device).us

    def explain(self, problem: ConvProblem, config: Config, device: Device) -> str:
        """What the predicted time is made of."""
        return str(self._cost(problem, config, device))

    def _cost(self, problem: ConvProblem, config: Config, device: Device) -> model.Cost:
        packed_bytes = self.workspace_bytes(problem, config, device)
        size = pack.SIZES[problem.dtype]
        # Lines between strides are not read.
        seen = prod(min(1.0, taps / stride) for taps, stride in zip(problem.kernel, problem.stride, strict=True))
        read = (prod(problem.x_shape) * seen + prod(problem.w_shape) + prod(problem.y_shape) * problem.residual) * size
        problem = _view(problem, config)
        rows, columns = self._sides(config)
        columns //= config.bundle
        chunks, line = self._chunks(problem), span(problem)
        slab = config.kernel != "stream"
        pixel_lines: float = config.pixels
        if slab:
            pixel_lines = self.slab_lines(problem, config)[0] / prod(problem.kernel)
        across, tiles = self.tiles(problem, config)
        blocks = self.blocks(problem, config, device)
        filter_lines = config.filters / config.bundle
        if config.held:
            # A block copies them once.
            filter_lines = filter_lines / -(-tiles // blocks) if not slab else 0
        overlapped = "turns" if config.turns else "once" if config.split > 1 else "loop"
        if config.resident > 1 and tiles * config.split > device.threads:
            overlapped = "resident"
        pixel = (pack.wide(problem) if packed_bytes else problem.group_c) * size
        high = tiles / across / problem.groups
        # Two warpgroups and the one that copies need all registers.
        room = (
            1 if config.warpgroups == 2 else (device.shared_bytes + 1024) // (self.shared_bytes(problem, config) + 1024)
        )
        work = model.Work(
            rows=rows, columns=columns, steps=-(-self.steps(problem) // config.split),
            instructions=((chunks - 1) * line / STEP_BYTES + self._last(problem)) / chunks, stages=config.stages,
            flight=2 if config.turns or config.warpgroups == 1 else 1, pixel_lines=pixel_lines,
            filter_lines=filter_lines, line_bytes=line, ragged=pixel % line > 0,
            pixel_readers=min(across, device.threads),
            filter_readers=max(1.0, min(device.threads / across / problem.groups, high)), slab=slab,
            gather=config.gather, outputs=config.pixels * config.filters,
            residual=problem.residual, activation=problem.activation, written=_vector(problem),
            boxes=self.boxes(problem, config) > 0, tiles=tiles, split=config.split,
            room=room, overlapped=overlapped,
            multiprocessors=min(device.threads, blocks) if config.held else device.threads, read_bytes=read,
            written_bytes=prod(problem.y_shape) * size,
            packed_bytes=packed_bytes + prod(problem.x_shape) * size if packed_bytes else 0,
        )  # fmt: skip
        return model.cost(work, device.gbps)

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
        written = 1 if config.kernel != "stream" and problem.layout == "nchw" else _vector(problem)
        words = (
            pack.TYPES[problem.dtype], config.rows == "filters", config.pixels, config.filters, config.warpgroups,
            config.turns, config.stages, config.split, span(problem), config.bundle, self._last(problem),
            self._five(problem), written, self.boxes(problem, config), problem.layout == "nchw", problem.bias,
            problem.residual, plans.ACTIVATIONS[problem.activation],
        )  # fmt: skip
        width = self._sides(config)[1] // config.bundle
        threads = self._threads(config)
        texts = [str(word).lower() if isinstance(word, bool) else str(word) for word in words]
        tile, header = f"Tile<{', '.join(texts)}>", instruction(problem.dtype, width)
        if config.kernel != "stream":
            box = str(config.kernel == "box").lower()
            more = f"{tile}, {config.slabs}, {str(config.held).lower()}, {config.gather}, {box}"
            return stub("implicit_gemm_slab.cu", "implicit_gemm_slab", more, "Slab", threads, 1, header)
        more = f"{tile}, {str(config.held).lower()}"
        return stub("implicit_gemm.cu", "implicit_gemm", more, "Gemm", threads, config.resident, header, config.split)

    def _threads(self, config: Config) -> int:
        """Warpgroups, and a warp that copies, or beside two a warpgroup."""
        return config.warpgroups * 128 + (128 if config.warpgroups == 2 else 32)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        """All kernels of a config."""
        first = [pack.images_source(problem)] if self.packed(problem, config) else []
        return [*first, pack.filters_source(problem), self.source(problem, config)]

    def launch(self, problem: ConvProblem, config: Config, device: Device) -> Launch:
        packed, source = self.packed(problem, config), self.source(problem, config)
        filters = self.map_w(problem, config.filters)
        problem = _view(problem, config)
        fields = plans.window_fields(problem) | {"group_c": problem.group_c}
        tiles_f, tiles = self.tiles(problem, config)
        chunks = self._chunks(problem)
        names = GEMM if config.kernel == "stream" else SLAB
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
        box: tuple[int, ...] = ()
        if config.kernel == "box":
            mine["down"], mine["wide"], high, behind = self.box(problem, config)
            box = mine["wide"], high
            mine["high"], mine["lines"], mine["across"] = high, prod(box), config.across
            # A slab takes whole patterns of eight lines.
            mine["copy_lines"] = -(-mine["lines"] // 8) * 8 - mine["lines"] + behind
            mine["tiles_h"] = -(-problem.output[0] // mine["down"])
            mine["tiles_w"] = -(-problem.output[1] // config.across)
        mine = {name: value for name, value in (fields | mine).items() if name in names}
        blocks = self.blocks(problem, config, device)
        slab = config.kernel == "slab"
        maps = {"x": self.map_x(problem, lines, packed, slab, box), "w": filters}
        if config.gather:
            # Not used, but a struct has a place for it.
            del maps["x"]
        if self.boxes(problem, config):
            maps["out"] = self.map_y(problem, config)
        return Launch(
            source, names, mine, (blocks, 1, 1), (self._threads(config), 1, 1),
            self.shared_bytes(problem, config), maps, True, {"image": "x", "out": "y"},
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


def _tiles(problem: ConvProblem) -> tuple[tuple[str, int, int], ...]:
    """Tiles for any problem, and such as divide the filters of a group evenly."""
    widths = {-(-problem.group_k // (8 * count)) * 8 for count in range(1, 5)}
    even = product(("pixels",), (64, 128, 192, 256), sorted(width for width in widths if width <= 256))
    return tuple(dict.fromkeys((*TILES, *even)))


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
