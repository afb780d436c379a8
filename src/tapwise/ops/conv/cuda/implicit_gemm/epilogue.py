"""How the outputs of cuda.implicit_gemm's tiles go to y, and how residuals come to them: from registers, through
epilogue buffers in shared memory, by TMA."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from tapwise.cuda.jit.tensor_map import SWIZZLE_BYTES
from tapwise.forks import cached_property
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda.implicit_gemm.config import HaloRowsConfig, HaloTileConfig, Im2colConfig
from tapwise.ops.conv.cuda.implicit_gemm.rectangle import row_vector
from tapwise.ops.conv.cuda.implicit_gemm.view import View, padded

# Filters of a tile that threads write 4 bytes at a time, or 2, and bytes of y that L2 keeps beside other things.
FEW_FILTERS, ODD_FILTERS = 64, 48
KEPT_BYTES: Final = 24 << 20
# Sums of a thread that may start from the residual; of im2col that load 16 bytes of two-byte outputs at once, from few
# pixels.
MOST_C_SUMS, MOST_C_SUMS_IM2COL, FEW_PIXELS = 128, 160, 128
# What a thread picks from an epilogue buffer and writes at once, in NCHW.
PICKED_BYTES: Final = 8
# Epilogue buffers of a warpgroup, or of a ring that two share.
MOST_BUFFERS: Final = 4


@dataclass(frozen=True)
class Epilogue:
    """What follows from a view for its outputs."""

    view: View

    @cached_property
    def aligned_vector(self) -> int:
        """Elements of y that may be written at once: they lie in one group, and begin on a multiple of themselves."""
        problem = self.view.seen
        most = 16 // problem.itemsize
        inner = problem.group_k if problem.layout == "nhwc" else prod(problem.output)
        return next(count for count in (most, most // 2, most // 4, 1) if count and inner % count == 0)

    @property
    def strided(self) -> bool:
        """Whether y has strides of its own."""
        return self.view.strides is not None

    @property
    def whole(self) -> bool:
        """Whether those are 16 bytes."""
        return self.aligned_vector * self.view.itemsize == 16

    @property
    def vector(self) -> int:
        """Elements of y that a kernel writes at once: halos in NCHW count pixels otherwise than y does."""
        config, problem = self.view.config, self.view.seen
        if isinstance(config, Im2colConfig) or problem.layout == "nhwc":
            return self.aligned_vector
        return row_vector(problem, config.across) if isinstance(config, HaloTileConfig) else 1

    @cached_property
    def run_vector(self) -> int:
        """Elements of y in NCHW that a thread picks from an epilogue buffer and writes at once, of halo rows, whose
        pixels do not lie as they do in y (include/output_runs.cuh); else 0. Planes of odd sizes took longer so in
        im2col."""
        problem = self.view.seen
        most = PICKED_BYTES // problem.itemsize
        if problem.layout == "nhwc" or not isinstance(self.view.config, HaloRowsConfig):
            return 0
        # All images' planes of a filter begin with the same remainder.
        size = problem.k * prod(problem.output)
        return next((count for count in (most, most // 2) if count > 1 and size % count == 0), 0)

    @cached_property
    def runs(self) -> int:
        """Planes that a tile of such outputs has a part of at most."""
        if not self.run_vector:
            return 0
        return ceil_div(self._share - 1, prod(padded(self.view.seen))) + 1

    @property
    def _share(self) -> int:
        """Pixels of a warpgroup's tile."""
        config = self.view.config
        whole = config.swap_ab or config.ping_pong
        return config.tile_pixels if whole else config.tile_pixels // config.warpgroups

    @cached_property
    def rounds(self) -> int:
        """Rounds of 64 x 64 in which a warpgroup's outputs go to y."""
        config = self.view.config
        return config.tile_m // 64 // self.view.cooperative * ceil_div(config.tile_n, 64)

    def _may_start_from_residual(self, whole: bool) -> bool:
        """Whether the accumulator may start from the residual, which threads load in `whole` pieces of 16 bytes or not:
        in fp32 the sums of products would lose digits beside a large one; beside many sums there are few registers to
        load it."""
        problem, config = self.view.seen, self.view.config
        im2col = isinstance(config, Im2colConfig)
        short = whole and im2col and config.tile_pixels <= FEW_PIXELS and problem.itemsize == 2
        most = MOST_C_SUMS_IM2COL if short else MOST_C_SUMS
        return problem.math != "3xtf32" and not (config.ping_pong and config.tile_m * config.tile_n // 128 > most)

    @cached_property
    def permuted_n(self) -> int:
        """So many filters are permuted when they are packed, so that threads store y from their registers; 0: none.

        A thread then has a quarter of them, side by side: 16 bytes or 8, of few filters 4. Where that measured faster
        than the way through shared memory; TMA is better at writing more than L2 holds, and for two warpgroups on a
        tile."""
        problem, config = self.view.seen, self.view.config
        size = problem.itemsize
        if config.swap_ab or config.split_k > 1 or problem.layout == "nchw" or self.view.transposed_filters:
            return 0
        whole = 64 // size
        shared = 4 if problem.groups == 1 else 1
        orders = (n for n in (whole, 16) if config.instruction_n % n == problem.group_k % (n // shared) == 0)
        order = next(orders, 0)
        if problem.residual and not self._may_start_from_residual(order == whole):
            return 0
        if not isinstance(config, Im2colConfig):
            # If K is odd two bytes are written at a time, which is slow for many.
            most = FEW_FILTERS if problem.group_k * size % 4 == 0 else ODD_FILTERS
            return order or (8 if config.instruction_n <= most else 0)
        if config.ping_pong and not problem.residual:
            return order if order == whole and prod(problem.y_shape) * size <= KEPT_BYTES else 0
        return order if config.ping_pong or config.warpgroups == 1 else 0

    @cached_property
    def direct_bytes(self) -> int:
        """Bytes of y that a thread stores at once straight from its registers; 0 where sums pass shared memory."""
        order = self.permuted_n
        each = order // 4 if order and self.aligned_vector > 1 else min(order, 1)
        return self.view.itemsize * each

    @cached_property
    def tma_residual(self) -> bool:
        """Whether TMA brings the residual: to halo rows, where sums cannot start from it."""
        problem, config = self.view.seen, self.view.config
        rows = isinstance(config, HaloRowsConfig) and not config.gather_bytes
        return problem.residual and rows and self.whole and problem.layout == "nhwc" and not self.permuted_n

    @cached_property
    def tma_store(self) -> bool:
        """Whether TMA writes y. With strides it walks from the last image's pixels to the next group's, which a tile of
        one group must not write. In NCHW a store is a row of pixels of each filter, all of one image."""
        problem, config = self.view.seen, self.view.config
        if not isinstance(config, Im2colConfig) or config.split_k > 1 or not self.whole or self.permuted_n:
            return False
        if problem.layout == "nchw":
            plane, pixels, row = prod(problem.output), config.tile_pixels, SWIZZLE_BYTES // problem.itemsize
            rows = plane % row == 0 and pixels % row == 0
            return config.transposed_pixels or rows or plane % pixels == 0
        if self.strided and problem.groups > 1:
            return False
        return config.tile_filters >= 64 or self.view.tiles_f == 1

    @property
    def last_stored(self) -> int:
        """Columns of the instruction in a tile's last store by TMA, where they are fewer than others'; else 0."""
        config, inside = self.view.config, self.view.config.swap_ab == (self.view.seen.layout == "nchw")
        return config.tile_n % (SWIZZLE_BYTES // self.view.itemsize if inside else 64) if self.tma_store else 0

    @cached_property
    def epilogue_buffers(self) -> int:
        """Epilogue buffers, of 64 x 64 outputs each, of a warpgroup: one more where one may be on its way; one for each
        round where a residual is fetched there and nothing else hides how long it takes."""
        problem, config = self.view.seen, self.view.config
        if self.permuted_n:
            return 0
        if self.tma_residual:
            return max(2, min(self.rounds, MOST_BUFFERS))
        size = problem.itemsize
        fetched = problem.residual and config.split_k == 1 and self.vector * size >= 4 and not self.run_vector
        if fetched and size == 2 and not config.ping_pong and 2 < self.rounds <= MOST_BUFFERS:
            return self.rounds
        return 2 if fetched or (self.tma_store and size == 2) else 1

    @property
    def is_ahead(self) -> bool:
        """Whether a tile's residual is fetched as a whole while its products run."""
        config = self.view.config
        fetched = config.split_k == 1 and not config.ping_pong and self.epilogue_buffers >= self.rounds
        return self.tma_residual or fetched

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: the pipeline, epilogue buffers or split sums, tables, barriers, what aligns them."""
        problem, config = self.view.seen, self.view.config
        rings = 1 if self.tma_residual else config.warpgroups
        sums = rings * self.epilogue_buffers * 64 * 64 * problem.itemsize
        if config.split_k > 1:
            sums = config.tile_pixels * config.tile_filters * 4
        places = self._share
        if self.run_vector:
            places += round_up(self._share + self.runs * self.run_vector + ceil_div(self._share, 64) + 2, 2)
        tables = config.warpgroups * (places + config.tile_filters * problem.bias) * 4
        barriers = 16 * (config.stages + self.tma_residual * self.epilogue_buffers)
        return self.view.pipeline_bytes + sums + tables + barriers + 2048
