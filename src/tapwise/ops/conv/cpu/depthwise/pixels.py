"""cpu.depthwise channels last, x read where it lies: kernels, sizes and cost of a task.

Lanes run over channels. A tile is a run of pixels of a row by a few vectors of channels; neighbouring vectors of the
same pixels come next, so that memory is read in its order. Taps that lie outside the image are left out: rows of them
for a row of outputs, columns for each pixel near the left and right border, which goes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tapwise import settings
from tapwise.algorithm import Config as BaseConfig
from tapwise.algorithm import Device
from tapwise.cpu.common import lanes_of
from tapwise.cpu.cost import Breakdown
from tapwise.cpu.epilogue import Epilogue, Sums
from tapwise.cpu.fields import COMMON, Fields, entry, unravel
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, Target, target
from tapwise.integers import ceil_div
from tapwise.ops.conv.cpu import generated
from tapwise.ops.conv.cpu.depthwise.kernel import emit_filters
from tapwise.ops.conv.problem import ConvProblem

FIELDS: Final = (
    *COMMON, "channels", "h", "w_in", "p", "q", "stride_h", "stride_w", "dilation_h", "dilation_w",
    "pad_h", "pad_w", "taps", "taps_h", "taps_w", "inner", "inner_end", "row_blocks", "channel_block", "channel_blocks",
)  # fmt: skip
# Pixels by vectors of a tile, by number of vector registers.
RUNS: Final = {16: ((5, 2), (3, 3), (10, 1)), 32: ((7, 3), (5, 4), (10, 2), (14, 1))}


@dataclass(frozen=True)
class PixelsConfig(BaseConfig):
    """A tile is a run of `pixels` by `vectors` of channels; a task is `rows` rows of outputs of `channels` channels."""

    pixels: int
    vectors: int
    rows: int
    channels: int


def generate(
    target: Target, *, dtype: str, storage: str, pixels: int, vectors: int, bias: bool, residual: bool,
    activation: str | None,
) -> Kernel:  # fmt: skip
    """The kernels of one instance: `task` and `pack_task`."""
    k = Kernel(target, dtype)
    epilogue = Epilogue(k, storage, False, bias, residual, activation)
    for count in sorted({pixels, 1}):
        _emit_tile(k, epilogue, count, vectors)
    _emit_runs(k, storage, pixels, vectors)
    _emit_task(k, storage, pixels, vectors * k.lanes)
    emit_filters(k, FIELDS, storage, False, vectors)
    return k


def _emit_tile(k: Kernel, epilogue: Epilogue, pixels: int, vectors: int) -> None:
    """tile_R(args, x, taps_h, taps_w, w, bias, residual, y): R pixels over a rectangle of taps, from x and w on."""
    storage, width = epilogue.storage, vectors * k.lanes
    with k.function(
        f"tile_{pixels}", args="i64", x=storage, taps_h=INT, taps_w=INT, w=k.dtype, bias=storage, residual=storage,
        y=storage,
    ) as (args, x, taps_h, taps_w, w, bias, residual, y):  # fmt: skip
        a = Fields(k, args, FIELDS)
        row, column, step = a.dilation_h * a.w_in * a.channels, a.dilation_w * a.channels, a.stride_w * a.channels
        sums = [[k.var(k.constant(0.0)) for _ in range(vectors)] for _ in range(pixels)]
        with k.loop(0, taps_h) as r, k.loop(0, taps_w) as s:
            there, factors = x + r * row + s * column, w + (r * a.taps_w + s) * width
            loaded = [k.load(factors + v * k.lanes) for v in range(vectors)]
            for pixel in range(pixels):
                for v in range(vectors):
                    value = k.load(there + v * k.lanes)
                    sums[pixel][v].set(k.fma(loaded[v], value, sums[pixel][v].get()))
                there = there + step
        at, found = k.integer(0), []
        for pixel in range(pixels):
            for v in range(vectors):
                spot = at + v * k.lanes
                found.append(Sums(sums[pixel][v].get(), bias + v * k.lanes, residual + spot, y + spot))
            at = at + a.channels
        epilogue.store(found)


def _emit_runs(k: Kernel, storage: str, pixels: int, vectors: int) -> None:
    """run_R(args, x, first, taps_h, w, bias, residual, y, channel, end): R pixels from column `first` on, channels
    [channel, end). x, residual and y are the rows' beginnings, w that of the first row of taps."""
    width = vectors * k.lanes
    for count in sorted({pixels, 1}):
        with k.function(
            f"run_{count}", args="i64", x=storage, first=INT, taps_h=INT, w=k.dtype, bias=storage, residual=storage,
            y=storage, channel=INT, end=INT,
        ) as (args, x, first, taps_h, w, bias, residual, y, channel, end):  # fmt: skip
            a = Fields(k, args, FIELDS)
            left = first * a.stride_w - a.pad_w
            low = ((0 - left).max(0) + (a.dilation_w - 1)) // a.dilation_w
            high = ((a.w_in - left).max(0) + (a.dilation_w - 1)) // a.dilation_w
            low, high = low.min(a.taps_w), high.min(a.taps_w)
            there = x + (left + low * a.dilation_w) * a.channels
            with k.loop(channel, end, width) as c:
                # The last run of channels overlaps the one before.
                place = c.min(a.channels - width)
                at = first * a.channels + place
                k.call(
                    f"tile_{count}", args, there + place, taps_h, (high - low).max(0), w + c * a.taps + low * width,
                    bias + place, residual + at, y + at,
                )  # fmt: skip


def _emit_task(k: Kernel, storage: str, pixels: int, width: int) -> None:
    with entry(k, FIELDS) as (a, worker):
        x, y, w = a.pointer("x", storage), a.pointer("y", storage), a.pointer("w", k.dtype)
        bias, residual = a.pointer("bias", storage), a.pointer("residual", storage)
        with a.draws(worker) as number:
            row_block, block, image = unravel(number, a.row_blocks, a.channel_blocks)
            channel = block * a.channel_block
            end = (channel + a.channel_block).min(a.channels)
            with k.loop(row_block * a.p // a.row_blocks, (row_block + 1) * a.p // a.row_blocks) as p:
                top = p * a.stride_h - a.pad_h
                low = (((0 - top).max(0) + (a.dilation_h - 1)) // a.dilation_h).min(a.taps_h)
                high = (((a.h - top).max(0) + (a.dilation_h - 1)) // a.dilation_h).min(a.taps_h)
                there = x + (image * a.h + top + low * a.dilation_h) * (a.w_in * a.channels)
                out = (image * a.p + p) * (a.q * a.channels)
                rest = (high - low).max(0), w + low * a.taps_w * width, bias, residual + out, y + out, channel, end

                def run(count: int, q: Int, there: Ptr = there, rest: tuple[Any, ...] = rest) -> None:
                    k.call(f"run_{count}", a.args, there, q, *rest)

                with k.loop(0, a.inner) as q:
                    run(1, q)
                with k.if_else(a.inner_end - a.inner >= pixels) as (long, short):
                    # The last run overlaps the one before.
                    with long, k.loop(a.inner, a.inner_end, pixels) as q:
                        run(pixels, q.min(a.inner_end - pixels))
                    with short, k.loop(a.inner, a.inner_end) as q:
                        run(1, q)
                with k.loop(a.inner_end, a.q) as q:
                    run(1, q)


class Geometry(generated.Geometry):
    """Sizes of one problem and config. Lengths are in elements."""

    scratch_bytes = 0

    def __init__(self, problem: ConvProblem, config: PixelsConfig, device: Device) -> None:
        super().__init__(problem, config, device)
        self.width = config.vectors * self.lanes
        (left, _), stride, q = problem.padding[1], problem.stride[1], problem.output[1]
        reach = (problem.kernel[1] - 1) * problem.dilation[1]
        # Outputs whose taps all lie inside a row.
        self.inner = min(q, ceil_div(left, stride))
        self.inner_end = max(self.inner, min(q, (problem.spatial[1] - 1 - reach + left) // stride + 1))

    @property
    def tasks(self) -> int:  # type: ignore[override]
        p, c = self.problem, self.config
        return ceil_div(p.output[0], c.rows) * ceil_div(p.c, c.channels) * p.n

    def fields(self) -> dict[str, int]:
        p, c = self.problem, self.config
        return {
            "tasks": self.tasks, "scratch_step": 0, "channels": p.c,
            "h": p.spatial[0], "w_in": p.spatial[1], "p": p.output[0], "q": p.output[1],
            "stride_h": p.stride[0], "stride_w": p.stride[1],
            "dilation_h": p.dilation[0], "dilation_w": p.dilation[1],
            "pad_h": p.padding[0][0], "pad_w": p.padding[1][0],
            "taps": p.kernel[0] * p.kernel[1], "taps_h": p.kernel[0], "taps_w": p.kernel[1],
            "inner": self.inner, "inner_end": self.inner_end, "row_blocks": ceil_div(p.output[0], c.rows),
            "channel_block": c.channels, "channel_blocks": ceil_div(p.c, c.channels),
        }  # fmt: skip


def candidates(problem: ConvProblem, device: Device) -> Iterator[PixelsConfig]:
    """Channels last, one filter a channel, at least a tile's channels, and nothing to widen again for each tap."""
    lanes, (p, q) = lanes_of(problem, device), problem.output
    if problem.layout != "nhwc" or problem.group_k > 1 or problem.widened:
        return
    for pixels, vectors in RUNS[target(settings.cpu_target()).registers]:
        width = vectors * lanes
        if width > problem.c or pixels > q:
            continue
        for count in (1, 2, 4, 8, 16, 32):
            rows = ceil_div(p, min(p, count * max(1, device.threads // 2)))
            for blocks in (1, device.threads):
                yield PixelsConfig(pixels, vectors, rows, ceil_div(ceil_div(problem.c, blocks), width) * width)


# What a task costs; measured, not derived. A tap of a tile: cycles an output vector, and besides; at least what a
# multiply-add takes to end. A tile's output vector, a tile, a pixel near the border. Vectors of 64 bytes that are
# loaded at once mostly lie in two cache lines, and pixels of 256 channels in few sets of L1 (30 layers on an Emerald
# Rapids: what is chosen takes 1.08 times the best, 1.16 with the other's cycles; 24 on a Zen 5: 1.09 and 1.11).
PRODUCT: Final = 0.6
PRODUCT_WHOLE: Final = 1.1
TAP: Final = 2.4
LATENCY: Final = 3.4
STORE: Final = 0.5
TILE: Final = 25.0
# Of the time that memory takes, what is not hidden; more, where a task reads a part of each pixel.
MEMORY_EXPOSED: Final = 0.55
SPLIT_PIXELS: Final = 4.0
# Drawing a task and working out its place.
TASK: Final = 1500.0


class TaskCost(generated.TaskCost):
    """Cycles of one task of a config, on one device."""

    sizes: ClassVar = Geometry

    def breakdown(self) -> Breakdown:
        """All parts of a task."""
        p, g, c, costs = self.problem, self.geometry, self.config, self.costs
        q, whole = p.output[1], g.inner_end - g.inner
        runs = ceil_div(whole, c.pixels) if whole >= c.pixels else 0
        alone = q - (whole if runs else 0)
        panels = ceil_div(min(c.channels, p.c), g.width)
        cycles = panels * c.rows * (runs * self.tile(c.pixels) + alone * self.tile(1))
        moved = (p.spatial[0] * p.spatial[1] + p.output[0] * q) * p.itemsize * min(c.channels, p.c)
        memory = costs.stream(moved * c.rows / p.output[0], p.bytes) * MEMORY_EXPOSED
        memory *= 1.0 if c.channels >= p.c else SPLIT_PIXELS
        return Breakdown(costs, {"products": cycles, "memory": memory, "start": TASK}, g.tasks)

    def tile(self, pixels: int) -> float:
        """So many pixels of a tile's vectors; rows of taps outside the image are left out."""
        p, vectors = self.problem, self.config.vectors
        taps = p.kernel[0] * p.kernel[1]
        each = PRODUCT_WHOLE if self.costs.at_once else PRODUCT * self.device.vector_cycles
        product = each * pixels * vectors
        return taps * max(product + TAP, LATENCY) + STORE * pixels * vectors + TILE
