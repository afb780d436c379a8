// Implicit GEMM on Hopper's tensor cores, x streamed: every step of gemm_k, one tap's line of channels, is copied to shared
// memory as the window lies (TMA's im2col mode), beside the filters' part. One warp copies ahead, warpgroups multiply.
#pragma once

#include "tile.cuh"

struct Gemm {
    // Tensor maps of x and of the packed filters.
    alignas(64) unsigned long long x[16], w[16];
    void *y;
    const void *bias, *residual;
    // Output pixels, filters and groups; tiles along each; steps of gemm_k: chunks of channels of a tap, chunks that share a
    // part of x (all, or one of three).
    long long pixels, filters, groups, tiles_f, tiles, p, q, taps_w, chunks, part_chunks, steps;
    long long stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

template <class O>
DEVICE void implicit_gemm(const Gemm &p) {
    extern __shared__ unsigned char memory[];
    constexpr unsigned ROWS_BYTES = O::ROWS * O::ROW_SPAN, STAGE = ROWS_BYTES + O::COLUMNS * O::COLUMN_SPAN;
    constexpr unsigned SUMS = O::SPLIT > 1 ? O::BP * O::SUMS_LINE * 4 : 0, RING = O::STAGES * STAGE;
    constexpr unsigned POOL = RING > SUMS ? RING : SUMS;
    const unsigned ring = (shared_address(memory) + 1023) & ~1023u, staging = (ring + POOL + 1023) & ~1023u;
    const unsigned tables = staging + (O::SPLIT > 1 ? 0 : O::WARPGROUPS * O::STAGING);
    const unsigned full = tables + O::WARPGROUPS * O::PIXELS * 8, empty = full + O::STAGES * 8;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int rank = O::SPLIT > 1 ? cluster_rank() : 0;
    const int first = blockIdx.x / O::SPLIT, blocks = gridDim.x / O::SPLIT, tiles = p.tiles;
    const int steps = p.steps, begin = steps * rank / O::SPLIT, end = steps * (rank + 1) / O::SPLIT;
    if (threadIdx.x == O::CONSUMERS) {
        prefetch_map(p.x);
        prefetch_map(p.w);
        for (int stage = 0; stage < O::STAGES; ++stage) {
            barrier_init(full + stage * 8, 1);
            barrier_init(empty + stage * 8, O::PINGPONG ? 4 : 4 * O::WARPGROUPS);
        }
        publish_barriers();
    }
    __syncthreads();
    wait_for_previous();
    let_next_begin();
    if (group == O::WARPGROUPS) {
        if constexpr (O::SHARES) release_registers<56>();
        if (threadIdx.x == O::CONSUMERS) {
            int stage = 0;
            unsigned phase = 1;
            const int plane = p.p * p.q, width = p.q, chunks = p.chunks, part = p.part_chunks, taps_w = p.taps_w;
            for (int tile = first; tile < tiles; tile += blocks) {
                const At<O> at(tile, p.tiles_f, p.groups);
                const int n = at.pixel / plane, rest = at.pixel - n * plane, line = rest / width, column = rest - line * width;
                const int h = line * (int)p.stride_h - (int)p.pad_h, w = column * (int)p.stride_w - (int)p.pad_w;
                int tap = begin / chunks, chunk = begin - tap * chunks, r = tap / taps_w, s = tap - r * taps_w;
                for (int step = begin; step < end; ++step) {
                    barrier_wait(empty + stage * 8, phase);
                    barrier_expect(full + stage * 8, STAGE);
                    const unsigned rows = ring + stage * STAGE, columns = rows + ROWS_BYTES;
                    const unsigned pixels = O::SWAP ? columns : rows, filters = O::SWAP ? rows : columns;
                    copy_chunk<O>(pixels, p.x, full + stage * 8, chunk, part, p.groups, w, h, n, at.group,
                                  s * (int)p.dilation_w, r * (int)p.dilation_h);
                    copy_filters(filters, p.w, full + stage * 8, chunk * O::ELEMENTS, tap,
                                 at.group * (int)p.filters + at.filter);
                    if (++chunk == chunks) {
                        chunk = 0;
                        ++tap;
                        if (++s == taps_w) {
                            s = 0;
                            ++r;
                        }
                    }
                    advance<O::STAGES>(stage, phase);
                }
            }
        }
        if constexpr (O::SPLIT > 1) {
            __syncwarp();
            cluster_sync();
            cluster_sync();
        }
        return;
    }
    if constexpr (O::SHARES) take_registers<216>();
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const int part = p.part_chunks;
    const unsigned table = tables + group * O::PIXELS * 8;
    int stage = 0;
    unsigned phase = 0;
    float d[O::STEPS][O::COLUMNS / 2];
    if (O::PINGPONG && group == 1) arrive_part(6, 256);
    for (int tile = first, turn = 0; tile < tiles; tile += blocks, ++turn) {
        if (O::PINGPONG && turn % 2 != group) {
            advance<O::STAGES>(stage, phase, steps);
            continue;
        }
        const At<O> at(tile, p.tiles_f, p.groups);
        if (O::PINGPONG) sync_part(6 + group, 256);
        int chunk = begin % part;
        const unsigned rows0 = ring + (O::PINGPONG ? 0 : group * O::STEPS * 64 * O::ROW_SPAN);
        for (int step = begin; step < end; ++step) {
            barrier_wait(full + stage * 8, phase);
            const unsigned a = rows0 + stage * STAGE, b = ring + stage * STAGE + ROWS_BYTES;
            wgmma_fence();
            // A part's last chunk of channels may end early.
            if (O::LAST == O::WHOLE || ++chunk != part) {
                multiply<O, O::WHOLE>(d, a, b, step > begin);
            } else {
                multiply<O, O::LAST>(d, a, b, step > begin);
                chunk = 0;
            }
            wgmma_commit();
            wgmma_wait<O::FLIGHT>();
            if (step >= begin + O::FLIGHT && lane == 0) barrier_arrive(empty + before<O::STAGES>(stage, O::FLIGHT) * 8);
            advance<O::STAGES>(stage, phase);
        }
        if (O::PINGPONG) arrive_part(6 + (group ^ 1), 256);
        sums_are_there(d);
        if (lane == 0)
            for (int back = min(O::FLIGHT, end - begin); back > 0; --back)
                barrier_arrive(empty + before<O::STAGES>(stage, back) * 8);
        const int pixel0 = at.pixel + (O::SWAP || O::PINGPONG ? 0 : group * O::PIXELS);
        const int filter0 = at.filter + (O::SWAP && !O::PINGPONG ? group * O::FILTERS : 0);
        const int filters = p.filters, plane = p.p * p.q;
        const long long all = p.groups * p.filters;
        for (int i = thread; i < O::PIXELS; i += 128) {
            const int pixel = pixel0 + i;
            long long place = pixel * all + at.group * filters;
            if (O::NCHW) {
                const int n = pixel / plane;
                place = (n * all + at.group * filters) * plane + (pixel - n * plane);
            }
            set_place(table, i, pixel < p.pixels ? place : -1);
        }
        Place out{filter0, filters, at.group * filters, plane, table, staging + group * O::STAGING, 1 + group};
        if constexpr (O::SPLIT == 1) {
            finish_tile<O>(d, out, p.y, p.bias, p.residual);
        } else {
            // All warps are done with the ring, which takes the sums now.
            sync_part(1, O::CONSUMERS);
            const int warp = thread / 32;
#pragma unroll
            for (int m = 0; m < O::STEPS; ++m)
#pragma unroll
                for (int i = 0; i < O::COLUMNS / 2; ++i) {
                    const int row = (group * O::STEPS + m) * 64 + warp * 16 + lane / 4 + i % 4 / 2 * 8;
                    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                    const int pixel = O::SWAP ? column : row, filter = O::SWAP ? row : column;
                    store_shared<4>(ring + (pixel * O::SUMS_LINE + filter) * 4, Piece<4>{{__float_as_uint(d[m][i])}});
                }
            if (!O::SWAP && O::WARPGROUPS > 1) out.table = tables;
            out.filter = at.filter;
            cluster_sync();
            finish_split<O>(out, ring, rank, p.y, p.bias, p.residual);
            cluster_sync();
        }
    }
}
