"""cuda.implicit_gemm of wgrad: Hopper's tensor cores fed by TMA.

gemm_m is filters, gemm_n channels of taps, gemm_k pixels. Pixels are the slow axis of both operands in shared memory,
[pixel][64 channels], which the matrix instruction takes as transposed. TMA takes pixels of whole pieces of 16 bytes: x
and dy that do not lie so are packed by launches in front, and so may be a few channels with their taps.

Two kernels. wgrad.cu: a CTA tile's columns are blocks of 64 channels, each of one tap: x comes by TMA's im2col mode at
the tap's offset, dy as it lies. wgrad_halo.cu (stride 1): x of one block of channels comes once for all taps, or for a
row of them, which are the same memory from a later pixel. Of narrow groups several share a tile. gemm_k is split so
that all multiprocessors have work; parts go to the workspace and are added in a fixed order.

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014; PTX ISA on wgmma (canonical layouts of
MN-major operands) and cp.async.bulk.tensor (im2col mode).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar, Final

from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, struct_words, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.jit.occupancy import cluster_places, room_of
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import pack, window
from tapwise.ops.conv.cuda.costs import joint_us
from tapwise.ops.conv.cuda.gradients import MOST_PART_PIXELS
from tapwise.ops.conv.cuda.implicit_gemm.launches import instruction
from tapwise.ops.conv.cuda.implicit_gemm_wgrad.config import (
    BLOCK,
    FEW,
    FEW_TILES,
    MOST_COLUMNS,
    MOST_HALO_STAGES,
    MOST_STAGES,
    MOST_TAPS,
    PIECE,
    ROW_FILTERS,
    STEP_PIXELS,
    TILES,
    Config,
)
from tapwise.ops.conv.cuda.implicit_gemm_wgrad.tensor_maps import has_halo, map_dy, map_x
from tapwise.ops.conv.cuda.implicit_gemm_wgrad.view import (
    View,
    image_of_y,
    is_pointwise,
    sets_of_groups,
    ways,
    whole,
)
from tapwise.ops.conv.problem import ConvProblem

FOLDER: Final = "ops/conv/cuda/implicit_gemm_wgrad"
# Steps that a part has at least.
LEAST_STEPS: Final = 2
# Threads of a block that adds parts; threads that share a sum's: so many that there is enough to do for all, with two
# parts each at least.
ADDERS: Final = 128
SLICES: Final = (1, 2, 4, 8, 16)
ENOUGH_ADDERS: Final = 1 << 15

# Fitted to 3,027 times on 130 layers, drawn at random or of kinds that were behind (H200), those near a layer's best
# above all; the choice takes 1.03 of the best of some 22 configs measured, also on layers left out (at worst 1.26).
# Cycles of a microsecond under load. Of a step: cycles until a copy is there, which stages under way share, and of each
# block's copy, where a row of it lies in one line; how much longer copies of windows take; how many CTAs that share a
# copy are worth, as a power of their number. Bytes of all copies in a microsecond; how much longer they take where a
# cluster's parts share none: those beside each other read other pixels.
CYCLES_US: Final = 1662.0
COPY_LATENCY, COPY_CYCLES, WINDOWS = 208.0, 77.8, 1.79
SHARING, COPIED_BYTES, APART = 0.455, 5.52e7, 1.825
# How much longer copies of pixels of more channels take than of fewer, as a power of their ratio: which way round a
# tile lies (64 x 128 or 128 x 64 were up to a quarter apart; it decides 17 layers of 480 drawn, 0.98 of the time).
FAR: Final = 0.04
# How far a step's products and copies overlap: the larger, or some of both (a power mean). The share of the time that
# 1x1 layers' tiles of three blocks take, of a CTA alone on its multiprocessor; why was not found.
OVERLAP, THREE_BLOCKS = 6.06, 0.84
# Cycles of a wave's begin and end, and of sharing copies; how much longer sets of groups take that are no whole pieces;
# microseconds of the launch that adds parts, and bytes of parts in one, written and read, also where dw has fewer.
BEGIN_CYCLES, SHARE_CYCLES, NARROW_SETS = 2695.0, 722.0, 2.1
SECOND_US, PARTS_BYTES = 1.63, 2.55e6
# A launch that packs; bytes a microsecond that it moves as they are, and as windows.
PACK_US, PACK_BYTES, WINDOW_BYTES = 2.4, 3.5e6, 1.55e6
# Parts that a cluster adds; bytes of sums that a CTA sends in a cycle.
CLUSTERS: Final = (2, 4, 8)
EXCHANGE_BYTES: Final = 10.9
# Tiles of a cluster that share copies, along the filters and the columns, where they and their parts are so many CTAs;
# how many tiles there may be then, of nothing at the edges, for one without.
MULTICAST: Final = ((1, 2), (2, 1), (2, 2), (1, 4), (4, 1))
SHARING_CTAS: Final = 8
MOST_TILES: Final = 1.15


class WeightGradientPlan(CudaPlan):
    """Perhaps launches that pack x and dy, the products, and where gemm_k is split the sum of its parts."""

    def __init__(self, view: View, device: Device, launches: Sequence[Launch]) -> None:
        self._places = {name: begin for name, (begin, _) in view.workspace.items()}
        super().__init__(view.original, device, launches, view.workspace_bytes)

    def pack(self, w: Any) -> Any:
        """dy as it lies: it is another one in each call."""
        return w

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
        if self._places:
            first = addresses["workspace"]
            addresses = {**addresses, **{name: first + begin for name, begin in self._places.items()}}
        super().enqueue(addresses, stream)


class ImplicitGemmWgrad(window.TensorCoreAlgorithm[Config]):
    """Any channels, filters and groups, any stride up to 8 (any at all where a few channels are packed with their
    taps), padding and dilation; NHWC and NCHW; float16 and bfloat16. Hopper."""

    operator: ClassVar[str] = "wgrad"
    id: ClassVar[str] = "cuda.implicit_gemm"
    summary: ClassVar[str] = "tensor cores (wgmma) fed by TMA, transposed operands"
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16")

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if device.architecture != "sm_90a":
            return f"needs Hopper (sm_90a), not {device.architecture}"
        if max(map(prod, (problem.x_shape, problem.y_shape, problem.w_shape))) >= INDEX_LIMIT:
            return "takes fewer than 2^31 elements"
        if not ways(problem):
            return f"takes padding, dilation and strides that a tensor map can express, not those of '{problem}'"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        found = [
            config
            for unfold in ways(problem)
            for groups in sets_of_groups(problem)
            for block in (BLOCK, FEW)
            for config in self._configs(problem, groups, unfold, block, device)
        ]
        return sorted(found, key=lambda config: self.predict_us(problem, config, device))

    def _configs(self, problem: ConvProblem, groups: int, unfold: int, block: int, device: Device) -> Iterator[Config]:
        """Those of so many groups a tile, axes unfolded, and channels of a block."""
        plain = View.of(problem, Config(False, BLOCK, block, 1, 2, 1, 1, groups, unfold, block))
        taps = plain.seen.kernel
        tiles = [(*tile, False) for tile in (TILES if block == BLOCK else FEW_TILES)]
        if block == FEW < plain.channels:
            # Rows of taps that 64 channels are too many for.
            if taps[1] * BLOCK <= MOST_COLUMNS:
                return
            tiles = []
        for filters, columns, warpgroups, beside, is_halo in [*halo_tiles(taps, block), *tiles]:
            # Twice as many filters or columns as there are: most products would be dropped.
            if filters >= 2 * max(plain.filters, BLOCK) or columns >= 2 * prod(taps) * plain.channel_blocks * block:
                continue
            for stages in range(MOST_HALO_STAGES if is_halo else MOST_STAGES, 1, -1):
                config = Config(is_halo, filters, columns, warpgroups, stages, beside, 1, groups, unfold, block)
                view = View.of(problem, config)
                if is_halo and not has_halo(view):
                    break
                if view.shared_bytes <= room_of(device, beside):
                    for split_k in splits(view.tiles, view.steps, device.multiprocessors, beside):
                        yield replace(config, split_k=split_k)
                    yield from clustered(view, device)
                    # Clusters beside each other took up to twice as long where their tiles share copies.
                    if not is_halo and beside == 1:
                        for shape in MULTICAST:
                            yield from multicast(view, shape, device)
                    break

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Waves of CTAs, of steps that take products and copies, partly beside each other, or what a CTA alone waits
        for its copies, and of the sums that a cluster exchanges; memory; parts, which are written and read, and their
        launch; launches that pack."""
        view = View.of(problem, config)
        steps = ceil_div(view.steps, config.split_k) + view.ahead / 2
        rows, columns = config.tile_filters // BLOCK, 1 if config.halo else config.tile_columns // config.block_channels
        product = 2 * rows * config.tile_columns
        of_x, of_dy = view.lines
        windows = 1.0 if is_pointwise(view.seen) else WINDOWS
        # Pixels of more channels lie further apart.
        wide = (problem.c / problem.k) ** FAR
        copies = COPY_CYCLES * (
            rows * of_dy / wide / config.cluster_n**SHARING
            + columns * of_x * wide * windows / config.cluster_m**SHARING
        )
        shares = config.ctas > config.cluster_k
        alone = COPY_LATENCY / config.stages_ahead + copies
        exchanged = config.tile_filters * config.tile_columns * 4 * (1 - 1 / config.cluster_k) / EXCHANGE_BYTES
        begin = BEGIN_CYCLES + SHARE_CYCLES * shares

        def wave(beside: int) -> float:
            """Cycles of so many CTAs beside each other on a multiprocessor, which they share, without the begin."""
            step = joint_us(beside * product, max(beside * copies, alone), OVERLAP)
            return beside * exchanged + steps * step if beside else 0.0

        together = config.min_blocks_per_sm
        places = cluster_places(device, config.ctas)
        waves, rest = divmod(view.tiles * config.split_k, places * together)
        begins = 1 if config.persistent else waves + (rest > 0)
        busy = (begins * begin + waves * wave(together) + wave(ceil_div(rest, places))) / CYCLES_US
        copied = view.tiles * view.steps * view.stage_bytes / COPIED_BYTES
        if config.cluster_k > 1 and not shares:
            copied *= APART
        us = joint_us(busy, view.bytes / (device.gbps * 1e3) + copied, 2.0)
        if config.groups_per_tile > 1 and view.group_c % PIECE:
            us *= NARROW_SETS
        if rows + columns == 3 and windows == together == config.ctas == 1:
            us *= THREE_BLOCKS
        if "parts" in view.workspace:
            first, end = view.workspace["parts"]
            us += SECOND_US + (end - first) / PARTS_BYTES
        return us + packing_us(view)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return View.of(problem, config).workspace_bytes

    def workspace_arrays(self, problem: ConvProblem, config: Config) -> Mapping[str, tuple[int, int]]:
        """Arrays within the workspace, (begin, end) in bytes by the names that launches have for them."""
        return View.of(problem, config).workspace

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return WeightGradientPlan(View.of(problem, config), device, self.launches(problem, config, device))

    def _traits(self, view: View) -> str:
        config, problem = view.config, view.original
        words = [
            *("tile_filters", "tile_columns", "warpgroups", "stages", "block_channels", "persistent"),
            *("cluster_m", "cluster_n", "cluster_k"),
        ]
        values = {word.upper(): getattr(config, word) for word in words}
        values |= {"SPLIT": config.parts > 1, "HALO": config.halo, "POINTWISE": is_pointwise(view.seen)}
        sets = config.groups_per_tile > 1
        values |= {"SETS": sets, "NCHW": problem.layout == "nchw", "VECTOR": vector(view)}
        values |= {"WHOLE": view.is_whole, "FILTERS_FIRST": view.filters_first}
        return traits(tensor_core_type(problem.dtype), values)

    def source(self, problem: ConvProblem, config: Config) -> Source:
        file, name, words = ("wgrad", "weight_gradient", "WeightGradient")
        if config.halo:
            file, name, words = f"{file}_halo", f"{name}_halo", f"Halo{words}"
        return stub(
            f"{FOLDER}/{file}.cu", name, "Traits", words, config.threads,
            config.min_blocks_per_sm, instruction(problem.dtype, config.instruction_n, True, True), config.ctas,
            declarations=self._traits(View.of(problem, config)),
        )  # fmt: skip

    def sum_source(self, problem: ConvProblem, config: Config) -> Source:
        """The kernel that adds parts."""
        words = f"Traits, {adders(View.of(problem, config))[1]}"
        return stub(
            f"{FOLDER}/parts.cu", "add_wgrad_parts", words, "WgradParts", ADDERS,
            declarations=self._traits(View.of(problem, config)),
        )  # fmt: skip

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        last = [self.sum_source(problem, config)] if config.parts > 1 else []
        return [*packing_sources(View.of(problem, config)), self.source(problem, config), *last]

    def launches(self, problem: ConvProblem, config: Config, device: Device) -> list[Launch]:
        view, source = View.of(problem, config), self.source(problem, config)
        found = packing_launches(view, device)
        names = {
            "x": "packed_x" if view.packs_x else "x", "dy": "packed_dy" if view.packs_dy else "w", "dw": "y",
        }  # fmt: skip
        names |= {f"{name}_last": names[name] for name in ("x", "dy")}
        fields = self._fields(view, source)
        maps = {"x": map_x(view), "dy": map_dy(view), "x_last": map_x(view, True), "dy_last": map_dy(view, True)}
        count = view.tiles * config.split_k
        if config.persistent:
            count = min(count, device.multiprocessors * config.min_blocks_per_sm)
        shape = (count, 1, 1), config.threads, view.shared_bytes
        found.append(Launch(source, fields, *shape, maps, True, names, balance=1))
        if config.parts > 1:
            last = self.sum_source(problem, config)
            units, slices = adders(view)
            blocks = (units * slices // ADDERS, 1, 1)
            fields = self._fields(view, last) | {"split_k": config.parts}
            found.append(Launch(last, fields, blocks, ADDERS, dependent=True, names_of=names))
        return found

    def _fields(self, view: View, source: Source) -> dict[str, int]:
        """The words of a kernel's struct that are no addresses."""
        problem, seen = view.original, view.seen
        step = STEP_PIXELS * problem.itemsize
        fields = window.window_fields(seen, source) | {
            "filters": view.filters, "channels": view.channels, "channel_blocks": view.channel_blocks,
            "taps": prod(seen.kernel), "taps_w": seen.kernel[1], "tiles_n": view.tiles_n, "tiles_m": view.tiles_m,
            "tiles": view.tiles, "steps": view.steps, "split_k": view.config.split_k, "ahead": view.ahead,
            "units": view.tiles * view.config.parts,
            "k": problem.k, "group_k": problem.group_k, "group_c": view.group_c, "dw_c": problem.group_c,
            "dw_taps": prod(problem.kernel), "last_x_bytes": step * view.last_blocks[0],
            "last_dy_bytes": step * view.last_blocks[1],
        }  # fmt: skip
        fields["high"], fields["wide"] = view.image
        words = struct_words(source)
        return {name: value for name, value in fields.items() if name in words}


def halo_tiles(taps: tuple[int, ...], block: int) -> Iterator[tuple[int, int, int, int, bool]]:
    """(filters, columns, warpgroups, CTAs a multiprocessor, halo) of a block of channels of all taps, or of a row."""
    rows, across = taps
    if rows > 1 and rows <= MOST_TAPS[0] and across <= MOST_TAPS[1]:
        yield BLOCK, rows * across * block, rows, 1, True
    columns = across * block
    for filters in ROW_FILTERS:
        # Three warpgroups have 128 registers a thread, 96 of them for sums.
        if across > 1 and columns <= (MOST_COLUMNS if filters <= 2 * BLOCK else 3 * BLOCK):
            yield filters, columns, filters // BLOCK, 1, True


def packing_sources(view: View) -> list[Source]:
    """Of the launches that pack x and dy."""
    problem, x, dy = view.original, whole(view.original), image_of_y(view.original)
    if view.packs_as_pair:
        return [pack.pair_source(x, dy)]
    of_x = pack.windows_source(problem) if view.config.unfold else pack.images_source(x)
    return [of_x] * view.packs_x + [pack.images_source(dy)] * view.packs_dy


def packing_launches(view: View, device: Device) -> list[Launch]:
    """Those launches: from "x" and "w", which is dy, to "packed_x" and "packed_dy"."""
    problem, x, dy = view.original, whole(view.original), image_of_y(view.original)
    if view.packs_as_pair:
        return [pack.pair(x, dy, device, {"x0": "x", "x1": "w", "y0": "packed_x", "y1": "packed_dy"})]
    found, names = [], {"x": "x", "y": "packed_x"}
    if view.packs_x:
        unfolds = view.config.unfold > 0
        found.append(pack.windows(problem, view.seen, device, names) if unfolds else pack.images(x, device, names))
    if view.packs_dy:
        found.append(pack.images(dy, device, {"x": "w", "y": "packed_dy"}))
    return found


def packing_us(view: View) -> float:
    """Launches that read x or dy and write it packed."""
    problem, (x_bytes, dy_bytes) = view.original, view.packed_bytes
    us = PACK_US * (view.packs_x + view.packs_dy - view.packs_as_pair)
    for packed, shape, rate in (
        (x_bytes, problem.x_shape, WINDOW_BYTES if view.config.unfold else PACK_BYTES),
        (dy_bytes, problem.y_shape, PACK_BYTES),
    ):
        if packed:
            us += (packed + prod(shape) * problem.itemsize) / rate
    return us


def splits(tiles: int, steps: int, multiprocessors: int, beside: int) -> Iterator[int]:
    """Parts of gemm_k that give every other multiprocessor a CTA, each one to as many as it has room for, or two waves
    of these; and as few parts as may be."""
    least, most = ceil_div(steps, MOST_PART_PIXELS // STEP_PIXELS), max(1, steps // LEAST_STEPS)
    halves = (1, *range(2, 2 * beside + 1, 2), 4 * beside)
    wanted = {least, *(max(least, half * multiprocessors // (2 * tiles)) for half in halves)}
    yield from sorted({min(split_k, most) for split_k in wanted})


def clustered(view: View, device: Device) -> Iterator[Config]:
    """Clusters that give every multiprocessor CTAs, as many as it has room for or half of them, where a cluster's sums
    have room in shared memory. Pairs leave no parts for another launch: that was never worth both."""
    config, beside = view.config, view.config.min_blocks_per_sm
    tiles = config.cluster_m * config.cluster_n
    if View.of(view.original, replace(config, cluster_k=2)).shared_bytes > room_of(device, beside):
        return
    quads = config.tile_filters * config.tile_columns // (512 * config.warpgroups)
    for cluster in (count for count in CLUSTERS if quads % count == 0 and tiles in (1, SHARING_CTAS // count)):
        room = cluster_places(device, cluster * tiles) * beside
        least = ceil_div(view.steps, MOST_PART_PIXELS // STEP_PIXELS * cluster)
        for parts in sorted({max(least, count // (view.tiles * cluster)) for count in (room, room // 2, 0)}):
            if LEAST_STEPS * parts * cluster <= view.steps and (parts == 1 or cluster > 2):
                yield replace(config, split_k=parts * cluster, cluster_k=cluster)


def multicast(view: View, shape: tuple[int, int], device: Device) -> Iterator[Config]:
    """Clusters whose tiles, so many along the filters and the columns, share copies, where few tiles are of nothing."""
    wide = View.of(view.original, replace(view.config, cluster_m=shape[0], cluster_n=shape[1]))
    if wide.tiles <= MOST_TILES * view.tiles:
        yield from clustered(wide, device)


def adders(view: View) -> tuple[int, int]:
    """Threads that store sums, each of up to four quads of a row; threads that share the parts of each."""
    config, fours = view.config, view.config.instruction_n // 32
    together = next(count for count in (4, 3, 2, 1) if fours % count == 0)
    units = view.tiles * config.tile_filters * config.tile_columns // (4 * together)
    enough = (count for count in SLICES if 4 * count > config.parts or units * count >= ENOUGH_ADDERS)
    return units, next(enough, SLICES[-1])


def vector(view: View) -> int:
    """Channels of dw that are stored at once."""
    if view.original.layout == "nchw" or view.group_c % 2:
        return 1
    return 2 if view.config.groups_per_tile > 1 or view.group_c % 8 else 8
