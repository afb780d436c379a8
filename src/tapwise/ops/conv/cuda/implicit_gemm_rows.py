"""cuda.implicit_gemm_rows: few channels, of one group or of many, on tensor cores, rows of x streamed.

Where a filter's weights fit into the registers of a warp, they stay there, and a block goes down the rows of x: each
is brought to shared memory once and read from there once for all rows of the filter, whose sums are under way in
registers too. No window is built, and no filter is read again. Groups of fewer than eight channels are multiplied eight
channels at a time by block-diagonal matrices, depthwise layers by diagonal ones.

Source: PTX ISA on mma.sync and ldmatrix; cuda.depthwise's rolling rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from typing import Any, ClassVar

from tapwise import arrays
from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch, has_dependent_launches
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import boxes, streamed_rows, window
from tapwise.ops.conv.cuda.costs import REGISTERS, blocks_of, cycles_us, joint_us, memory_us
from tapwise.ops.conv.cuda.residue_classes import phases, steps
from tapwise.ops.conv.cuda.window import FpropFilters
from tapwise.ops.conv.problem import ConvProblem

# Channels of an octet, pixels of a tile; bytes of an octet, and what a stage begins at; stages.
CHANNELS, PIXELS, OCTET_BYTES, ALIGNMENT, STAGES = 8, 16, 16, 1024, 2
# Octets of channels, and of filters of a block; registers of a thread for weights; strides.
MOST_OCTETS, MOST_WEIGHTS, MOST_STRIDE = 8, 121, 2
# Threads of a block; registers of a thread in all, beside weights, sums and operands, and for an activation's function.
MOST_THREADS, MOST_REGISTERS, OTHER_REGISTERS, FUNCTION_REGISTERS = 512, 250, 28, 24
# Octets of a block of many groups, and bytes of a pixel, that come at full speed.
TMA_OCTETS, FULL_BYTES = (4, 8), 64
# Cycles of a multiprocessor for each warp: a product, four matrices from shared memory, a copy of 4 bytes, one of more,
# a stage; a pixel that TMA brings. Of a block alone: its beginning, a product, what is loaded or kept, a stage.
PRODUCT, LOAD, SMALL_COPY, COPY, STAGE, BOX_PIXEL = 1.07, 3.98, 18.1, 13.4, 17.6, 0.85
BEGINNING, PRODUCT_ALONE, MOVED_ALONE, STAGE_ALONE = 2310, 5.64, 4.25, 82.0
# Of memory's time: all, what neighbouring blocks read both, what L2 saves, and pieces of few bytes of x and of y;
# microseconds of a launch.
MEMORY, SHARED, IN_L2, FEW_X, FEW_Y, START_US = 1.13, 0.04, 0.85, 0.13, 0.43, 1.15


@dataclass(frozen=True)
class Config(BaseConfig):
    """A warp has eight times `out_each` filters of `tiles` of 16 columns, or of 8 columns of two `images`, a block
    `out` octets of filters, `groups` times so many columns, and `rows` rows of outputs. Rows of x come to shared
    memory `by` "tma", or by cp.async as "pixels"."""

    by: str
    out: int
    out_each: int
    images: int
    tiles: int
    groups: int
    rows: int

    @property
    def threads(self) -> int:
        return 32 * self.out // self.out_each * self.groups

    @property
    def columns(self) -> int:
        """Of y."""
        return PIXELS // self.images * self.tiles * self.groups


class RowsPlan(CudaPlan):
    """`in_place`: filters as they are, else as [tap][filter][channel]."""

    def __init__(self, problem: ConvProblem, device: Device, launches: Sequence[Launch], in_place: bool) -> None:
        super().__init__(problem, device, launches)
        self._in_place = in_place

    def pack(self, w: Any) -> Any:
        return arrays.dense(w if self._in_place else w.transpose(2, 3, 0, 1), "nchw")


def pitch(octets: int) -> int:
    """Octets from a pixel to the next in shared memory: an odd number, or a power of two."""
    return octets | 1 if octets & (octets - 1) else octets


def copy_bytes(channels: int) -> int:
    """Of one copy: what pixels are a multiple of."""
    return next(size for size in (16, 8, 4) if channels * 2 % size == 0)


def _depth(problem: ConvProblem) -> int:
    """Octets of channels of a group."""
    return ceil_div(problem.group_c, CHANNELS)


def _octets(problem: ConvProblem, config: Config) -> int:
    """Of x, that a block reads."""
    return _depth(problem) if problem.groups == 1 else config.out


def _slices(problem: ConvProblem) -> int:
    """Of a filter's row: eight channels as a tap sees them."""
    return problem.kernel[1] * _depth(problem)


def _stage(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """Rows and columns of x of each image: those that outputs see which there are."""
    outputs = min(config.columns, max(1, ceil_div(problem.output[1], phases(problem)[1])))
    return streamed_rows.period(problem), round_up(_seen(problem, outputs), 8)


def _seen(problem: ConvProblem, outputs: int) -> int:
    """Columns of x that so many of a row see."""
    return (outputs - 1) * steps(problem)[1] + problem.kernel[1]


def _live(problem: ConvProblem) -> int:
    """Rows of outputs under way."""
    return ceil_div(problem.kernel[0], steps(problem)[0])


def _brought_bytes(problem: ConvProblem, config: Config) -> int:
    """Of a stage, in shared memory."""
    pixels = config.images * prod(_stage(problem, config))
    return round_up(pixels * pitch(_octets(problem, config)) * OCTET_BYTES, ALIGNMENT)


def _stage_bytes(problem: ConvProblem, config: Config) -> int:
    """From a stage to the next: with what the last row's warps read behind it, for outputs that are none."""
    rows, columns = _stage(problem, config)
    pixels = config.images * rows * columns + max(0, _seen(problem, config.columns) - columns)
    return round_up(pixels * pitch(_octets(problem, config)) * OCTET_BYTES, ALIGNMENT)


def shared_bytes(problem: ConvProblem, config: Config) -> int:
    kept = config.images * _live(problem) * config.columns * pitch(config.out) * OCTET_BYTES
    return ALIGNMENT + 2 * round_up(kept, ALIGNMENT) + STAGES * (_stage_bytes(problem, config) + 16)


def registers(problem: ConvProblem, config: Config) -> int:
    """Of a thread."""
    r, slices = problem.kernel[0], _slices(problem)
    sums, moved = 4 * _live(problem) * config.out_each * config.tiles, ceil_div(slices, 2)
    copies = _brought_bytes(problem, config) / copy_bytes(problem.c) / config.threads
    taken = config.out_each * (r * slices + 3) + sums + moved + config.tiles * (4 * moved + 6 * (slices % 2))
    taken += 10 + ceil(3 * copies) if config.by == "pixels" else 0
    return taken + OTHER_REGISTERS + FUNCTION_REGISTERS * (problem.activation in window.FUNCTIONS)


def min_blocks_per_sm(problem: ConvProblem, config: Config) -> int:
    """Blocks that registers and shared memory leave room for."""
    return blocks_of(registers(problem, config), config.threads, shared_bytes(problem, config))


class ImplicitGemmRows(window.TensorCoreAlgorithm[Config]):
    """float16 and bfloat16, channels last, even numbers of channels and filters; strides of up to 2 in a residue
    class of the dilation; filters whose weights fit into registers: 3x3 of up to 64 channels, 5x5 of 32, 7x7 of 16. One
    group, or groups of as many filters as channels: 1, 2, 4 or a multiple of 8."""

    id: ClassVar[str] = "cuda.implicit_gemm_rows"
    summary: ClassVar[str] = "tensor cores (mma.sync), filters stationary in registers, rows of x streamed"
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16")

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        channels = problem.group_c
        if problem.layout != "nhwc":
            return "takes channels last"
        # One tap has no rows to share: measured, it took 1.1 to 1.4 times as long as elsewhere.
        if prod(problem.kernel) == 1:
            return "takes filters of several taps"
        if problem.c % 2 or problem.k % 2:
            return f"takes even numbers of channels and filters, not {problem.c} and {problem.k}"
        if problem.groups > 1 and (channels != problem.group_k or (channels % CHANNELS and channels not in (1, 2, 4))):
            return f"takes groups of as many filters as channels, 1, 2, 4 or a multiple of {CHANNELS}, not {channels}"
        if max(steps(problem)) > MOST_STRIDE:
            return f"takes strides of up to {MOST_STRIDE} in a residue class of the dilation"
        if _depth(problem) > MOST_OCTETS or problem.kernel[0] * _slices(problem) > MOST_WEIGHTS:
            return f"keeps weights in {MOST_WEIGHTS} registers: {CHANNELS} channels of a tap take one"
        if not streamed_rows.is_small(problem):
            return "takes images and filters of fewer than 2^29 elements, and sizes under 2^20"
        if next(_configs(problem, device), None) is None:
            return f"keeps sums of {_live(problem)} rows in registers, which are too many"
        return None

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        return list(_configs(problem, device))

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """What a multiprocessor's warps multiply, load and copy, a block's latency, and memory. Constants are fitted to
        1512 times on 115 drawn layers, N=32 (H200), the first ten again to 1012 on 51 more: where it is chosen, 1.07 of
        the best config's time."""
        r, slices, (stride_h, stride_w) = problem.kernel[0], _slices(problem), steps(problem)
        rows, (stage_rows, columns) = (config.rows - 1) * stride_h + r, _stage(problem, config)
        stages, size = ceil_div(rows, stage_rows), copy_bytes(problem.c)
        products = config.tiles * config.out_each * config.rows * (slices // 2 * r + slices % 2 * ceil_div(r, 2))
        loads, kept = config.tiles * rows * ceil_div(slices, 2), config.tiles * config.out_each * config.rows
        each, brought = PRODUCT * products + LOAD * loads + STAGE * stages, 0.0
        if config.by == "tma":
            brought = BOX_PIXEL * config.images * stages * stage_rows * columns
        else:
            copies = stages * _brought_bytes(problem, config) / size / config.threads
            each += (SMALL_COPY if size == 4 else COPY) * copies
        alone = BEGINNING + PRODUCT_ALONE * products + MOVED_ALONE * (loads + kept) + STAGE_ALONE * stages
        # The last wave's blocks begin while others still run.
        share, held = _blocks(problem, config) / device.multiprocessors, min_blocks_per_sm(problem, config)
        waves = 0.16 * ceil_div(ceil(share), held) + 0.84 * max(1.0, share / held)
        blocks = (ceil(share) * (each * config.threads / 32 + brought) + waves * alone) / cycles_us(device)
        again = columns / (config.columns * stride_w) * rows / (config.rows * stride_h) - 1
        memory = MEMORY + SHARED * again - IN_L2 * max(0.0, 1 - problem.bytes / device.l2_bytes)
        few = max(0.0, FULL_BYTES / (config.out * OCTET_BYTES) - 1)
        memory += FEW_X * few * (problem.groups > 1) + FEW_Y * few * (config.out * CHANNELS < problem.k)
        return START_US + joint_us(blocks, memory_us(problem, device, 32, 0) * memory, 2.03)

    def reads_in_place(self, problem: ConvProblem, config: Config, filters: FpropFilters) -> bool:
        return problem.depthwise and problem.group_k == 1

    def plan(self, problem: ConvProblem, config: Config, device: Device, filters: FpropFilters | None = None) -> Plan:
        return RowsPlan(problem, device, self.launches(problem, config, device, filters), filters is not None)

    def source(self, problem: ConvProblem, config: Config, filters: FpropFilters | None = None) -> Source:
        (r, s), (stride_h, stride_w) = problem.kernel, steps(problem)
        words: dict[str, int | bool | str] = {
            "R": r, "S": s, "SH": stride_h, "SW": stride_w, "GROUP_C": problem.group_c if problem.groups > 1 else 0,
            "OCTETS": _octets(problem, config), "OUT": config.out, "OUT_EACH": config.out_each,
            "IMAGES": config.images, "TILES": config.tiles, "GROUPS": config.groups, "STAGES": STAGES,
            "COLUMNS": _stage(problem, config)[1],
            "BY": config.by.upper(), "COPY": copy_bytes(problem.c), "Y_COPY": copy_bytes(problem.k),
            "BIAS": problem.bias, "RESIDUAL": problem.residual, "ACTIVATION": window.activation(problem.activation),
            **window.in_place_words(filters),
        }  # fmt: skip
        declarations = traits(tensor_core_type(problem.dtype), words)
        file, blocks = "ops/conv/cuda/implicit_gemm_rows.cu", min_blocks_per_sm(problem, config)
        return stub(file, "implicit_gemm_rows", "Traits", "Streamed", config.threads, blocks, declarations=declarations)

    def sources(self, problem: ConvProblem, config: Config, filters: FpropFilters | None = None) -> list[Source]:
        return [self.source(problem, config, filters)]

    def launches(
        self, problem: ConvProblem, config: Config, device: Device, filters: FpropFilters | None = None
    ) -> list[Launch]:
        octets, (rows, columns) = _octets(problem, config), _stage(problem, config)
        made = self.source(problem, config, filters)
        # Pieces of 16 bytes are swizzled where a pixel's are a power of two.
        span, box = octets * OCTET_BYTES if pitch(octets) % 2 == 0 else 0, (octets * CHANNELS, columns, rows)
        map_x = boxes.map_x(problem, box, span, config.images) if config.by == "tma" else None
        shape = _blocks(problem, config), config.threads, shared_bytes(problem, config)
        fields = streamed_rows.fields(problem, made, config.rows, _parts(problem, config))
        return [boxes.launch(made, fields, shape, map_x)]


def _configs(problem: ConvProblem, device: Device) -> Iterator[Config]:
    classes_h, classes_w = phases(problem)
    p, q = ceil_div(problem.output[0], classes_h), ceil_div(problem.output[1], classes_w)
    even = [ceil_div(p, pieces) for pieces in (1, 2, 3, 4, 6)]
    heights = sorted({*even, *(min(p, round_up(rows, _live(problem))) for rows in even)})
    for out, out_each, images, tiles in product(_outs(problem), (1, 2), (1, 2), (1, 2)):
        # Filters of a warp are of one group.
        if out % out_each or out_each * tiles > 2 or (problem.groups > 1 and _depth(problem) % out_each):
            continue
        needed = ceil_div(q, PIXELS // images * tiles)
        # Two images where their columns are fewer.
        if images == 2 and (problem.n == 1 or needed * PIXELS // 2 * tiles >= round_up(q, PIXELS * tiles)):
            continue
        for groups in dict.fromkeys(ceil_div(needed, strips) for strips in range(1, 8)):
            for rows in reversed(heights):
                for by in _ways(problem, out, device):
                    one = Config(by, out, out_each, images, tiles, groups, rows)
                    if _fits(problem, one, device):
                        yield one


def _outs(problem: ConvProblem) -> list[int]:
    """Octets of filters of a block, such as leave few idle, most first: whole groups, and more idle ones where TMA
    brings their channels."""
    found, whole = ceil_div(problem.k, CHANNELS), 1 if problem.groups == 1 else _depth(problem)
    waste = {n: ceil_div(found, n) * n / found for n in range(min(found, MOST_OCTETS), 0, -1) if n % whole == 0}
    least = min(waste.values())
    grouped = problem.groups > 1
    some = [n for n, idle in waste.items() if idle <= (1.15 if grouped and n in TMA_OCTETS else 1.07) * least]
    return some[:4]


def _ways(problem: ConvProblem, out: int, device: Device) -> list[str]:
    dense = max(problem.dilation) == 1 and has_dependent_launches(device.architecture) and problem.c % CHANNELS == 0
    depth = _depth(problem)
    whole = pitch(depth) == depth if problem.groups == 1 else out in TMA_OCTETS
    return ["tma"] * (dense and whole) + ["pixels"]


def _fits(problem: ConvProblem, config: Config, device: Device) -> bool:
    return (
        config.threads <= MOST_THREADS
        and config.out_each * problem.kernel[0] * _slices(problem) <= MOST_WEIGHTS
        and registers(problem, config) <= min(MOST_REGISTERS, REGISTERS // config.threads)
        and shared_bytes(problem, config) <= device.shared_bytes
        and (config.by == "pixels" or max(_stage(problem, config)) <= boxes.MOST)
        and _blocks(problem, config) < INDEX_LIMIT
    )


def _parts(problem: ConvProblem, config: Config) -> tuple[int, int, int]:
    """Pieces of a column of outputs, strips along a row, blocks of filters."""
    (p, q), (classes_h, classes_w) = problem.output, phases(problem)
    pieces = classes_h * ceil_div(ceil_div(p, classes_h), config.rows)
    along = classes_w * ceil_div(ceil_div(q, classes_w), config.columns)
    return pieces, along, ceil_div(problem.k, CHANNELS * config.out)


def _blocks(problem: ConvProblem, config: Config) -> int:
    return ceil_div(problem.n, config.images) * prod(_parts(problem, config))
