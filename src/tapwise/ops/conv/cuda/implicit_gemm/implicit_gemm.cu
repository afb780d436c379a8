// Implicit GEMM on Hopper's tensor cores, x streamed: every step of gemm_k, one tap's line of channels, is copied to shared
// memory as the window lies (TMA's im2col mode), beside the filters' part. One warp copies ahead, warpgroups multiply.
#pragma once

#include "deliver.cuh"
#include "ordered.cuh"
#include "split.cuh"

struct Gemm {
    // Tensor maps of x, of the packed filters, of y and of the residual.
    alignas(64) unsigned long long x[16], w[16], out[16], res[16];
    void *y;
    const void *bias, *residual;
    // Output pixels, filters and groups; tiles along each; steps of gemm_k: chunks of channels of a tap, chunks that share a
    // part of x (all, or one of three).
    long long pixels, filters, groups, tiles_f, tiles, p, q, taps_w, chunks, part_chunks, steps;
    long long stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    // The filters were there before the launch before this one.
    long long weights_ready;
};

// HELD: the filters of all steps stay in shared memory, behind one another; all tiles of a block have the same.
template <class O, bool HELD>
DEVICE void implicit_gemm(const Gemm &p) {
    extern __shared__ unsigned char memory[];
    constexpr unsigned PIXELS = O::BP * O::SPAN, FILTERS = O::BF * O::FILTER_SPAN, STAGE = PIXELS + (HELD ? 0 : FILTERS);
    constexpr unsigned SUMS = O::SPLIT > 1 ? O::ROWS * O::COLUMNS * 4 : O::PARTS * O::STAGING;
    const unsigned held = (shared_address(memory) + 1023) & ~1023u;
    const unsigned ring = HELD ? held + p.steps * FILTERS + 1023 & ~1023u : held;
    const unsigned staging = ring + O::STAGES * STAGE + 1023 & ~1023u;
    const unsigned tables = staging + SUMS, biases = tables + O::WARPGROUPS * O::PIXELS * 4,
                   full = (biases + (O::BIAS ? O::WARPGROUPS * O::FILTERS * 4 : 0) + 7) & ~7u, empty = full + O::STAGES * 8;
    // All parts of this block's share of the sums are there.
    const unsigned complete = empty + O::STAGES * 8;
    const unsigned deliveries = complete + 8;
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
        init_deliveries<O>(deliveries);
        if constexpr (O::SPLIT > 1) {
            barrier_init(complete, 1);
            barrier_expect(complete, (O::SPLIT - 1) * O::EACH * O::COLUMNS * 4);
        }
        publish_barriers();
    }
    __syncthreads();
    if constexpr (O::SPLIT > 1) cluster_arrive();
    if (group == O::WARPGROUPS) {
        if constexpr (O::SHARES) release_registers<40>();
        if (threadIdx.x == O::CONSUMERS) {
            int stage = 0;
            unsigned phase = 1;
            const int plane = p.p * p.q, width = p.q, chunks = p.chunks, part = p.part_chunks, taps_w = p.taps_w;
            // Filters do not wait for what ran before, as far as there is room.
            const int ahead = p.weights_ready ? min(O::STAGES, end - begin) : 0;
            const At<O> start(first, p.tiles_f, p.groups);
            for (int step = begin; step < begin + ahead; ++step) {
                const unsigned arrived = full + (step - begin) * 8;
                barrier_expect(arrived, PIXELS + FILTERS);
                copy_filters(HELD ? held + step * FILTERS : ring + (step - begin) * STAGE + PIXELS, p.w, arrived,
                             step % chunks * O::ELEMENTS, step / chunks, start.group * (int)p.filters + start.filter);
            }
            wait_for_previous();
            let_next_begin();
            for (int tile = first; tile < tiles; tile += blocks) {
                const At<O> at(tile, p.tiles_f, p.groups);
                const int n = at.pixel / plane, rest = at.pixel - n * plane, line = rest / width, column = rest - line * width;
                const int h = line * (int)p.stride_h - (int)p.pad_h, w = column * (int)p.stride_w - (int)p.pad_w;
                int tap = begin / chunks, chunk = begin - tap * chunks, r = tap / taps_w, s = tap - r * taps_w;
                for (int step = begin; step < end; ++step) {
                    const bool begun = tile == first && step < begin + ahead, filters = !begun && (!HELD || tile == first);
                    const unsigned pixels = ring + stage * STAGE;
                    if (!begun) {
                        barrier_wait(empty + stage * 8, phase);
                        barrier_expect(full + stage * 8, filters ? PIXELS + FILTERS : STAGE);
                    }
                    copy_chunk<O>(pixels, p.x, full + stage * 8, chunk, part, p.groups, w, h, n, at.group,
                                  s * (int)p.dilation_w, r * (int)p.dilation_h);
                    if (filters)
                        copy_filters(HELD ? held + step * FILTERS : pixels + PIXELS, p.w, full + stage * 8, chunk * O::ELEMENTS,
                                     tap, at.group * (int)p.filters + at.filter);
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
        if constexpr (O::DELIVERED)
            if (threadIdx.x >= O::CONSUMERS + 32 && threadIdx.x < O::CONSUMERS + 32 + 32 * O::RINGS)
                deliver<O, true>(p.res, staging, deliveries, p.filters, p.groups, p.tiles_f, first, tiles, blocks, p.p * p.q,
                                 p.q);
        if constexpr (O::SPLIT > 1) {
            __syncwarp();
            cluster_wait();
        }
        return;
    }
    wait_for_previous();
    let_next_begin();
    if constexpr (O::SHARES) take_registers<232>();
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const int part = p.part_chunks;
    const unsigned table = tables + group * O::PIXELS * 4;
    int stage = 0;
    unsigned phase = 0;
    float d[O::STEPS][O::COLUMNS / 2];
    if (O::PINGPONG && group == 1) {
        arrive_part(6, 256);
        if (O::DELIVERED) arrive_part(3, 256);
    }
    // The next residual's part, and its parity.
    int next = 0;
    unsigned next_phase = 0;
    for (int tile = first, turn = 0; tile < tiles; tile += blocks, ++turn) {
        const int delivery = next;
        const unsigned delivery_phase = next_phase;
        if constexpr (O::DELIVERED) advance<O::STAGINGS>(next, next_phase, Round<O>::COUNT);
        if (O::PINGPONG && turn % 2 != group) {
            advance<O::STAGES>(stage, phase, steps);
            continue;
        }
        const At<O> at(tile, p.tiles_f, p.groups);
        const int pixel0 = at.pixel + (O::SWAP || O::PINGPONG ? 0 : group * O::PIXELS);
        const int filter0 = at.filter + (O::SWAP && !O::PINGPONG ? group * O::FILTERS : 0);
        const int filters = p.filters, plane = p.p * p.q, all = (int)p.groups * filters;
        if (O::BOXES != 2 || (O::RESIDUAL && !O::DELIVERED))
            for (int i = thread; i < O::PIXELS; i += 128) {
                const int pixel = pixel0 + i, n = O::NCHW ? pixel / plane : 0;
                const int place =
                    O::NCHW ? (n * all + at.group * filters) * plane + (pixel - n * plane) : pixel * all + at.group * filters;
                set_place(table, i, pixel < p.pixels ? place : -1);
            }
        const int own = O::RINGS == 1 ? 0 : group * O::STAGINGS;
        const unsigned mine = staging + own * O::STAGING, brought = deliveries + own * 16;
        const Place out{filter0, at.group,  pixel0, filters, plane,    table,         biases + group * O::FILTERS * 4,
                        mine,    1 + group, p.out,  brought, delivery, delivery_phase};
        // Where nothing else hides it, the residual is fetched when the first copies are through: of more than two rounds one
        // after each step, so that the next step's products are not late.
        constexpr bool LATE = O::FETCHED && !O::PINGPONG;
        const int middle = (begin + end) / 2;
        int fetched = 0;
        if (!LATE) begin_tile<O>(out, p.residual);
        Biases<O> bias;
        bias.load(out, p.bias);
        // The first tile of all does not wait for its residual, and the second fetches it when the first copies are through.
        const bool begun = O::BEGUN && (!O::PINGPONG || turn > 0);
        if constexpr (O::BEGUN) {
            if (O::PINGPONG && turn == 1) sync_part(5, 256);
            add_residual<O, false>(d, out, p.residual, begun);
        }
        if (O::PINGPONG) sync_part(6 + group, 256);
        int chunk = begin % part;
        const unsigned rows0 = O::PINGPONG ? 0 : group * O::STEPS * 64 * O::ROW_SPAN;
        for (int step = begin; step < end; ++step) {
            barrier_wait(full + stage * 8, phase);
            if (O::BEGUN && O::PINGPONG && turn == 0 && step == begin) arrive_part(5, 256);
            const unsigned pixels = ring + stage * STAGE, filters = HELD ? held + step * FILTERS : pixels + PIXELS;
            const unsigned a = (O::SWAP ? filters : pixels) + rows0, b = O::SWAP ? pixels : filters;
            wgmma_fence();
            // A part's last chunk of channels may end early. Where ptxas does not see that a warp's threads agree on it, it waits
            // for every product by itself.
            if (O::LAST == O::WHOLE || (O::DELIVERED ? __shfl_sync(~0u, ++chunk, 0) : ++chunk) != part) {
                multiply<O, O::WHOLE>(d, a, b, O::BEGUN || step > begin);
            } else {
                multiply<O, O::LAST>(d, a, b, O::BEGUN || step > begin);
                chunk = 0;
            }
            wgmma_commit();
            wgmma_wait<O::FLIGHT>();
            if (step >= begin + O::FLIGHT && lane == 0) barrier_arrive(empty + before<O::STAGES>(stage, O::FLIGHT) * 8);
            if (O::DELIVERED && step == middle) arrive_part(5, 160 * O::RINGS);
            if constexpr (LATE)
                while (step >= middle && fetched < AHEAD<O>) {
                    fetch_next<O>(out, p.residual, fetched++);
                    if (AHEAD<O> > 2) break;
                }
            advance<O::STAGES>(stage, phase);
        }
        if (O::PINGPONG) arrive_part(6 + (group ^ 1), 256);
        sums_are_there(d);
        if (lane == 0)
            for (int back = min(O::FLIGHT, end - begin); back > 0; --back)
                barrier_arrive(empty + before<O::STAGES>(stage, back) * 8);
        if constexpr (LATE)
            while (fetched < AHEAD<O>) fetch_next<O>(out, p.residual, fetched++);
        if constexpr (O::ORDER > 0) {
            if (O::BEGUN && !begun) add_residual<O, true>(d, out, p.residual, true);
            finish_ordered<O>(d, out, p.y, bias);
        } else if constexpr (O::SPLIT == 1) {
            finish_tile<O>(d, out, p.y, bias, p.residual);
        } else {
            // All blocks of the cluster have begun.
            cluster_wait();
            send_sums<O>(d, staging, complete, rank);
            // The table of places and this block's own part are there, then those of the others.
            sync_part(1, 128);
            barrier_wait_for_cluster(complete, 0);
            finish_split<O>(out, staging, rank, p.y, p.bias, p.residual);
        }
    }
    if constexpr (O::BOXES > 0) wait_for_all_stores();
}
