// Weight gradient as an implicit GEMM on Hopper's tensor cores: dw[k][tap, c] is the sum over pixels of dy[pixel][k] *
// x[window of pixel][tap, c]. gemm_k is pixels, the slow axis of both operands in shared memory, so both are transposed
// ones. One warp copies 64 pixels a step (producer), warpgroups multiply (consumers).
#pragma once

#include "hopper.cuh"
#include "ops/conv/cuda/implicit_gemm_wgrad/tile.cuh"
#include "ring.cuh"

struct WeightGradient {
    // Tensor maps of x and dy, and of their last blocks.
    alignas(64) unsigned long long x[16], dy[16], x_last[16], dy_last[16];
    void *dw, *parts;
    // Of a set of groups: filters, channels, blocks of channels; taps; tiles along columns, along filters, and all;
    // steps of 64 pixels, parts of them; tiles' parts, of which CTAs take one after the other.
    long long filters, channels, channel_blocks, taps, taps_w, tiles_n, tiles_m, tiles, steps, split_k, units;
    // Filters; of a group, filters and channels; of dw, channels and taps.
    long long k, group_k, group_c, dw_c, dw_taps;
    long long p, q, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, last_x_bytes, last_dy_bytes;
};

// Shared memory: a ring of stages (blocks of dy, then of x), barriers.
template <class Tile> struct WgradLayout {
    static constexpr unsigned STAGE = Tile::ROW_BLOCKS * BLOCK_BYTES + Tile::COLUMN_BLOCKS * Tile::X_BYTES;
    unsigned ring, full, empty, complete;
    DEVICE WgradLayout(unsigned memory)
        : ring((memory + 1023) & ~1023u), full(ring + max(Tile::STAGES * STAGE, Tile::SUM_BYTES)),
          empty(full + Tile::STAGES * 8), complete(empty + Tile::STAGES * 8) {}
    DEVICE unsigned dy(int stage) const { return ring + stage * STAGE; }
    DEVICE unsigned x(int stage) const { return dy(stage) + Tile::ROW_BLOCKS * BLOCK_BYTES; }
};

// One thread copies all steps, as far ahead as there are stages, `stage` and its `phase` first. Of what CTAs of a
// cluster share each copies some pixels to all of them. Blocks that dw does not have are not copied, or others in their
// place: what lies there goes to sums that nobody reads. The `first` steps wait for what ran before.
template <class Tile>
DEVICE void producer(const WeightGradient &p, const WgradLayout<Tile> &shared, const TilePlace<Tile> &at, int begin,
                     int end, bool first, int &stage, unsigned &phase) {
    constexpr int WIDE = Tile::BLOCK_CHANNELS;
    const int blocks = p.channel_blocks, taps_w = p.taps_w;
    // CTAs that share copies keep step as each waits for all copies, so none has fewer.
    constexpr bool ALL = COPYING<Tile> > 1;
    const int all_blocks = (int)p.taps * blocks, begin_block = ALL ? min(at.block, all_blocks - 1) : at.block;
    const int columns = min(Tile::COLUMN_BLOCKS, all_blocks - begin_block);
    const int rows = ALL ? Tile::ROW_BLOCKS : min(Tile::ROW_BLOCKS, ((int)p.filters - at.filter + 63) / 64);
    const ClusterPlace<Tile> own;
    constexpr int OF_DY = STEP_PIXELS / Tile::CLUSTER_N, OF_X = STEP_PIXELS / Tile::CLUSTER_M;
    const int first_dy = own.n * OF_DY, first_x = own.m * OF_X;
    const unsigned short with_dy = own.with_rows(), with_x = own.with_columns();
    const int filter0 = at.set * (int)p.filters + at.filter, channel0 = at.set * (int)p.channels,
              tap0 = begin_block / blocks, block0 = begin_block - tap0 * blocks, r0 = tap0 / taps_w,
              s0 = tap0 - r0 * taps_w;
    const LastBlocks last(p);
    unsigned bytes = rows * BLOCK_BYTES + (ALL ? Tile::COLUMN_BLOCKS : columns) * Tile::X_BYTES;
#pragma unroll
    for (int i = 0; i < Tile::ROW_BLOCKS; ++i)
        if (i < rows && last.of_dy(at.filter + i * 64)) bytes -= BLOCK_BYTES - last.dy;
#pragma unroll
    for (int i = 0, block = block0; i < Tile::COLUMN_BLOCKS; ++i) {
        if ((ALL || i < columns) && block + 1 == blocks) bytes -= Tile::X_BYTES - last.x;
        if (i + 1 < columns && ++block == blocks) block = 0;
    }
    PixelWalk pixel(begin * STEP_PIXELS + first_x, p.p, p.q);
    if (first) {
        work_out(filter0, channel0, rows, columns, bytes, block0, r0, s0, pixel.n, pixel.row, pixel.column);
        begin_dependent();
    }
    for (int step = begin; step < end; ++step) {
        const unsigned full = shared.full + stage * 8;
        const int h = pixel.row * (int)p.stride_h - (int)p.pad_h, w = pixel.column * (int)p.stride_w - (int)p.pad_w;
        barrier_wait(shared.empty + stage * 8, phase);
        barrier_expect(full, bytes);
#pragma unroll
        for (int i = 0; i < Tile::ROW_BLOCKS; ++i)
            if (i < rows)
                copy_shared_rows<Tile::CLUSTER_N>(shared.dy(stage) + i * BLOCK_BYTES + first_dy * 128,
                                                  last.of_dy(at.filter + i * 64) ? p.dy_last : p.dy, full,
                                                  filter0 + i * 64, step * STEP_PIXELS + first_dy, with_dy);
        int block = block0, r = r0, s = s0;
#pragma unroll
        for (int i = 0; i < Tile::COLUMN_BLOCKS; ++i) {
            if (!ALL && i >= columns) break;
            const unsigned to = shared.x(stage) + i * Tile::X_BYTES + first_x * Tile::SPAN;
            const int channel = channel0 + block * WIDE;
            const void *const map = block + 1 == blocks && last.x < Tile::X_BYTES ? p.x_last : p.x;
            if constexpr (Tile::POINTWISE)
                copy_shared_rows<Tile::CLUSTER_M>(to, map, full, channel, step * STEP_PIXELS + first_x, with_x);
            else
                copy_shared_pixels<Tile::CLUSTER_M>(to, map, full, channel, w, h, pixel.n, s * (int)p.dilation_w,
                                                    r * (int)p.dilation_h, with_x);
            if (i + 1 < columns && ++block == blocks) {
                block = 0;
                if (++s == taps_w) s = 0, ++r;
            }
        }
        if constexpr (!Tile::POINTWISE) pixel.advance();
        advance<Tile::STAGES>(stage, phase);
    }
}

// A warpgroup's products of all steps, from `stage` in its `phase` on.
template <class Tile>
DEVICE void multiply_steps(float (&d)[Tile::M_STEPS][Tile::SUMS], const WgradLayout<Tile> &shared, int warpgroup,
                           int begin, int end, int &stage, unsigned &phase) {
    // Groups of matrix instructions under way: one where other warpgroups keep the tensor cores busy.
    constexpr int IN_FLIGHT = Tile::WARPGROUPS == 1 && Tile::STAGES > 2 ? 2 : 1;
    static_assert(Tile::STAGES > IN_FLIGHT);
    const unsigned rows = Tile::ACROSS == 1 ? warpgroup * Tile::M_STEPS * BLOCK_BYTES : 0,
                   columns = Tile::ACROSS == 1 ? 0 : warpgroup * (Tile::N / Tile::BLOCK_CHANNELS) * Tile::X_BYTES;
    const unsigned empty = empty_of_lane<Tile>(shared.empty);
    for (int step = begin; step < end; ++step) {
        barrier_wait(shared.full + stage * 8, phase);
        const unsigned long long a = transposed_descriptor<128>(shared.dy(stage) + rows, BLOCK_BYTES),
                                 b = transposed_descriptor<Tile::SPAN>(shared.x(stage) + columns, Tile::X_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEP_PIXELS / 16; ++k)
#pragma unroll
            for (int m = 0; m < Tile::M_STEPS; ++m)
                wgmma(d[m], a + m * (BLOCK_BYTES / 16) + k * 128, b + k * Tile::SPAN, step > begin || k > 0);
        wgmma_commit();
        wgmma_wait<IN_FLIGHT>();
        if (step >= begin + IN_FLIGHT) release<Tile>(empty, before<Tile::STAGES>(stage, IN_FLIGHT));
        advance<Tile::STAGES>(stage, phase);
    }
    wait_for_products(d);
    // The next tile may have the last stages.
    if (Tile::PERSISTENT)
        for (int left = min(IN_FLIGHT, end - begin); left > 0; --left)
            release<Tile>(empty, before<Tile::STAGES>(stage, left));
}

template <class Traits> DEVICE void weight_gradient(const WeightGradient &p) {
    using Tile = WgradTile<Traits>;
    static_assert(Tile::N == WGMMA_N);
    extern __shared__ unsigned char memory[];
    const WgradLayout<Tile> shared(shared_address(memory));
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == Tile::CONSUMER_THREADS) {
        prefetch_map(p.x);
        prefetch_map(p.dy);
        for (int stage = 0; stage < Tile::STAGES; ++stage) {
            barrier_init(shared.full + stage * 8, 1);
            barrier_init(shared.empty + stage * 8, 4 * Tile::WARPGROUPS * COPYING<Tile>);
        }
        prepare_exchange<Tile>(shared.complete);
        publish_barriers();
    }
    __syncthreads();
    if constexpr (COPYING<Tile> > 1) {
        cluster_arrive_relaxed();
        cluster_wait();
    }
    const int first = blockIdx.x / Tile::CTAS, units = p.units;
    int stage = 0;
    unsigned phase = warpgroup == Tile::WARPGROUPS;
    if (warpgroup == Tile::WARPGROUPS) {
        if (threadIdx.x == Tile::CONSUMER_THREADS)
            for (int unit = first; unit < units; unit += gridDim.x) {
                const WgradWork<Tile> work(p, unit);
                producer<Tile>(p, shared, TilePlace<Tile>(p, work.tile), work.begin, work.end, unit == first, stage,
                               phase);
                if (!Tile::PERSISTENT) break;
            }
        return;
    }
    begin_dependent();
    for (int unit = first; unit < units; unit += gridDim.x) {
        const WgradWork<Tile> work(p, unit);
        float d[Tile::M_STEPS][Tile::SUMS];
        multiply_steps<Tile>(d, shared, warpgroup, work.begin, work.end, stage, phase);
        store_sums<Tile>(p, TilePlace<Tile>(p, work.tile), memory + (shared.ring - shared_address(memory)),
                         shared.complete, work.place, warpgroup, d);
        if (!Tile::PERSISTENT) break;
    }
}
