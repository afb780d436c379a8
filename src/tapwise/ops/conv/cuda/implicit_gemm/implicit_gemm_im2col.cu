// Implicit GEMM on Hopper's tensor cores, x by TMA's im2col mode: every step of gemm_k, one tap's chunk of channels, is
// copied to shared memory as the window lies, beside the filters' part. One warp copies ahead (producer), warpgroups
// multiply (consumers).
#pragma once

#include "direct_store.cuh"
#include "ops/conv/cuda/implicit_gemm/gathered_planes.cuh"
#include "ops/conv/cuda/implicit_gemm/shifted_planes.cuh"
#include "shared_copies.cuh"
#include "split_k.cuh"

struct Im2colGemm {
    // Tensor maps of x, of the packed filters and of y; of x and of TRANSPOSED_FILTERS in NARROW boxes, or of x in
    // boxes of LAST_PIXELS; of y in boxes of LAST_STORED.
    alignas(64) unsigned long long x[16], w[16], out[16], x_last[16], w_last[16], out_last[16];
    void *y;
    // x again, where it is gathered.
    const void *image, *bias, *residual;
    // Channels, and of a group.
    long long c, group_c;
    // Output pixels, filters and groups; tiles along the filters, of a plane (PLANES), and all, or as many as clusters
    // take at a time (`units`); steps of gemm_k: chunks of channels of a tap, chunks that share a part of x (all, or
    // one of three).
    long long pixels, filters, groups, tiles_f, tiles_p, units, p, q, taps_w, chunks, part_chunks, steps;
    long long stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    // The filters were packed before the launch before this one.
    long long weights_ready;
    // STRIDED: distances in y.
    long long image_stride, row_stride, column_stride;
    // TRANSPOSED_FILTERS: the tap of w that is the first, and how far the next lies from it.
    long long first_r, first_s, step_r, step_s;
};

// A warpgroup brings x to shared memory.
template <class Tile> constexpr bool WARPS_BRING = Gathered<Tile>::THREADS > 0 || ShiftedPlanes<Tile>::USED;

// Shared memory: the filters that stay, a ring of stages, planes as they came, epilogue buffers or the split sums,
// tables, barriers.
template <class Tile> struct Im2colLayout {
    static constexpr bool STATIONARY = Tile::FILTER_STATIONARY;
    static constexpr unsigned PIXELS = Tile::PIXEL_BYTES, FILTERS = Tile::FILTER_BYTES,
                              BOTH = PIXELS + (STATIONARY ? 0 : FILTERS);
    // What threads swizzle begins where a pattern does.
    static constexpr unsigned STAGE = Tile::TRANSPOSED_PIXELS ? BOTH + 1023 & ~1023u : BOTH;
    static constexpr unsigned SUMS =
        Tile::SPLIT_K > 1 ? Tile::TILE_M * Tile::TILE_N * 4 : Tile::BUFFERS * Tile::BUFFER_BYTES;
    unsigned stationary, ring, planes, buffers, places, biases, full, empty;
    // All parts of this CTA's share of the split sums are there.
    unsigned complete;
    // Planes came.
    unsigned arrived;
    template <class Gemm>
    DEVICE Im2colLayout(unsigned memory, const Gemm &p)
        : stationary((memory + 1023) & ~1023u), ring(stationary + stationary_bytes(p)),
          planes(ring + Tile::STAGES * STAGE), buffers(planes + ShiftedPlanes<Tile>::BYTES + 1023 & ~1023u),
          places(buffers + SUMS), biases(places + Tile::WARPGROUPS * Tile::PLACE_WORDS * 4),
          full((biases + (Tile::BIAS ? Tile::WARPGROUPS * Tile::WARPGROUP_FILTERS * 4 : 0) + 7) & ~7u),
          empty(full + Tile::STAGES * 8), complete(empty + Tile::STAGES * 8), arrived(complete + 8) {}
    template <class Gemm> DEVICE static unsigned stationary_bytes(const Gemm &p) {
        if constexpr (STATIONARY) return p.steps * FILTERS + 1023 & ~1023u;
        return 0;
    }
    DEVICE unsigned pixels(int stage) const { return ring + stage * STAGE; }
    DEVICE unsigned filters(int stage, int step) const {
        return STATIONARY ? stationary + step * FILTERS : ring + stage * STAGE + PIXELS;
    }
};

// The tiles of a CTA, and its steps of gemm_k. A unit is the tile of a CTA, or of a cluster that splits gemm_k; or the
// tiles beside each other of one whose CTAs share filters.
template <class Tile> struct Im2colWork {
    static constexpr bool SHARES = COPYING<Tile> > 1;
    ClusterPlace<Tile> own;
    int rank, first, stride, units, tiles_f, steps, begin, end;
    DEVICE Im2colWork(const Im2colGemm &p)
        : rank(Tile::SPLIT_K > 1 ? cluster_rank() : 0), first(blockIdx.x / Tile::CTAS), stride(gridDim.x / Tile::CTAS),
          units(p.units), tiles_f(p.tiles_f), steps(p.steps), begin(steps * rank / Tile::SPLIT_K),
          end(steps * (rank + 1) / Tile::SPLIT_K) {}
    DEVICE int tile(int unit) const {
        if constexpr (!SHARES) return unit;
        const int row = unit / tiles_f;
        return (row * Tile::CLUSTER_M + own.m) * tiles_f + unit - row * tiles_f;
    }
};

DEVICE void prefetch_maps_of_last(const Im2colGemm &p) { prefetch_map(p.x_last); }

template <class Tile, class Gemm> DEVICE void init_barriers(const Gemm &p, const Im2colLayout<Tile> &shared) {
    prefetch_map(p.x);
    prefetch_map(p.w);
    if (Tile::NARROW || Tile::LAST_PIXELS) prefetch_maps_of_last(p);
    for (int stage = 0; stage < Tile::STAGES; ++stage) {
        barrier_init(shared.full + stage * 8, 1 + Gathered<Tile>::THREADS + ShiftedPlanes<Tile>::USED);
        barrier_init(shared.empty + stage * 8, (Tile::PING_PONG ? 4 : 4 * Tile::WARPGROUPS) * COPYING<Tile>);
    }
    for (int i = 0; i < ShiftedPlanes<Tile>::ALL_BUFFERS; ++i) barrier_init(shared.arrived + i * 8, 1);
    if constexpr (Tile::SPLIT_K > 1) {
        barrier_init(shared.complete, 1);
        barrier_expect(shared.complete, (Tile::SPLIT_K - 1) * Tile::SPLIT_M * Tile::TILE_N * 4);
    }
    publish_barriers();
}

// A tile's first outputs. Of PLANES a tile has pixels of one.
template <class Tile> DEVICE TileOrigin<Tile> origin(const Im2colGemm &p, int tile) {
    TileOrigin<Tile> at(tile, p.tiles_f, p.groups);
    if constexpr (Tile::PLANES) {
        const int number = at.pixel / Tile::TILE_PIXELS, n = number / (int)p.tiles_p;
        at.pixel += n * ((int)(p.p * p.q) - (int)p.tiles_p * Tile::TILE_PIXELS);
    }
    return at;
}

// A chunk of channels of planes in whole pieces of 16 bytes, in rows of 64 pixels.
template <class Tile>
DEVICE void copy_planes(const Im2colGemm &p, unsigned to, unsigned full, int chunk, int group, int n, int pixel) {
#pragma unroll
    for (int block = 0; block < Tile::PIXEL_BLOCKS; ++block)
        copy_box(to + block * Tile::BLOCK_BYTES, Tile::LAST_PIXELS && block + 1 == Tile::PIXEL_BLOCKS ? p.x_last : p.x,
                 full, pixel + block * 64, chunk * Tile::CHUNK_ELEMENTS, group, n);
}

// The first outputs of a unit's tile, and where x has its first window.
template <class Tile> struct FirstPixel {
    TileOrigin<Tile> at;
    int n, rest, h, w;
    DEVICE FirstPixel(const Im2colGemm &p, const Im2colWork<Tile> &work, int unit)
        : at(origin<Tile>(p, work.tile(unit))) {
        const int plane = p.p * p.q, width = p.q;
        // The last CTAs of a cluster may have no pixels, but copy for others.
        const int pixel = Im2colWork<Tile>::SHARES ? min(at.pixel, (int)p.pixels - 1) : at.pixel;
        n = pixel / plane;
        rest = pixel - n * plane;
        const int row = rest / width;
        h = row * (int)p.stride_h - (int)p.pad_h;
        w = (rest - row * width) * (int)p.stride_w - (int)p.pad_w;
    }
};

// One thread copies the pixels and filters of all steps of all tiles, as far ahead as there are stages; or a warpgroup
// gathers the pixels.
template <class Tile>
DEVICE void producer(const Im2colGemm &p, const Im2colLayout<Tile> &shared, const Im2colWork<Tile> &work) {
    using Layout = Im2colLayout<Tile>;
    using Work = Im2colWork<Tile>;
    constexpr bool STATIONARY = Layout::STATIONARY, GATHERS = Gathered<Tile>::THREADS > 0;
    const auto pixel_bytes = [&](int chunk) -> unsigned {
        if (GATHERS) return 0;
        if (Tile::PLANES) return Tile::TILE_PIXELS * Tile::CHUNK_BYTES;
        return is_narrow<Tile>(chunk, p.part_chunks) ? Tile::LAST_PIXEL_BYTES : Layout::PIXELS;
    };
    const auto filter_bytes = [&](int chunk) -> unsigned {
        return is_narrow<Tile>(chunk, p.part_chunks) ? Tile::LAST_FILTER_BYTES : Layout::FILTERS;
    };
    const bool first_thread = !GATHERS || threadIdx.x == Tile::CONSUMER_THREADS;
    int stage = 0;
    unsigned phase = 1;
    const int chunks = p.chunks, part = p.part_chunks, taps_w = p.taps_w;
    // CTAs that share filters take turns to copy a step's.
    const unsigned short with = work.own.with_columns();
    const auto copy_filters_of = [&](const TileOrigin<Tile> &at, int to, int step, int chunk, int r, int s) {
        if (!Work::SHARES || step % Tile::CLUSTER_M == work.own.m)
            copy_tile_filters<Tile>(p, shared.filters(to, step), shared.full + to * 8, chunk, r, s, taps_w, at.group,
                                    at.filter, with);
    };
    // Filters do not wait for what ran before, as far as there is room.
    const int ahead = p.weights_ready ? min(Tile::STAGES, work.end - work.begin) : 0;
    FirstPixel<Tile> own(p, work, work.first);
    for (int step = work.begin; step < work.begin + ahead && first_thread; ++step) {
        const int to = step - work.begin, tap = step / chunks, r = tap / taps_w, chunk = step - tap * chunks;
        barrier_expect(shared.full + to * 8, pixel_bytes(chunk) + filter_bytes(chunk));
        copy_filters_of(own.at, to, step, chunk, r, tap - r * taps_w);
    }
    const int first_tap = work.begin / chunks, first_chunk = work.begin - first_tap * chunks,
              first_r = first_tap / taps_w, first_s = first_tap - first_r * taps_w;
    work_out(own.at.group, own.n, own.rest, own.h, own.w, first_chunk, first_r, first_s);
    begin_beside<Tile::INDEPENDENT>();
    for (int unit = work.first; unit < work.units; unit += work.stride) {
        if (unit != work.first) own = FirstPixel<Tile>(p, work, unit);
        const TileOrigin<Tile> at = own.at;
        const Gathered<Tile> gathered(p, at.pixel, at.group);
        int chunk = first_chunk, r = first_r, s = first_s;
        for (int step = work.begin; step < work.end; ++step) {
            const bool expected = unit == work.first && step < work.begin + ahead;
            const bool filters = first_thread && !expected && (!STATIONARY || unit == work.first);
            const unsigned full = shared.full + stage * 8;
            if (!expected) {
                barrier_wait(shared.empty + stage * 8, phase);
                if (first_thread) barrier_expect(full, pixel_bytes(chunk) + (filters ? filter_bytes(chunk) : 0));
            }
            if (filters) copy_filters_of(at, stage, step, chunk, r, s);
            if constexpr (GATHERS) gathered.copy(shared.pixels(stage), full, chunk, chunk + 1 == chunks);
            else if constexpr (Tile::PLANES)
                copy_planes<Tile>(p, shared.pixels(stage), full, chunk, at.group, own.n, own.rest);
            else
                copy_chunk<Tile>(shared.pixels(stage), is_narrow<Tile>(chunk, part) ? p.x_last : p.x, full, chunk, part,
                                 p.groups, own.w, own.h, own.n, at.group, s * (int)p.dilation_w, r * (int)p.dilation_h);
            if (++chunk == chunks) {
                chunk = 0;
                if (++s == taps_w) {
                    s = 0;
                    ++r;
                }
            }
            advance<Tile::STAGES>(stage, phase);
        }
    }
}

// Where the pixels of a warpgroup's tile lie in y, for the epilogue: those in front of `end`.
template <class Tile, class Gemm>
DEVICE void fill_places(const Gemm &p, unsigned table, int pixel0, int end, int group) {
    const int filters = p.filters, plane = p.p * p.q, k = (int)p.groups * filters;
    for (int i = threadIdx.x % 128; i < Tile::WARPGROUP_PIXELS; i += 128) {
        const int pixel = pixel0 + i, n = Tile::NCHW || Tile::STRIDED ? pixel / plane : 0, rest = pixel - n * plane;
        int place = Tile::NCHW ? (n * k + group * filters) * plane + rest : pixel * k + group * filters;
        if constexpr (Tile::STRIDED) {
            const int width = p.q, row = rest / width;
            place = strided_place(p, n, row, rest - row * width) + group * filters;
        }
        set_place(table, i, pixel < end ? place : -1);
    }
}

// A warpgroup's products and outputs, of all tiles or (PING_PONG) of every other one.
template <class Tile>
DEVICE void consumer(const Im2colGemm &p, const Im2colLayout<Tile> &shared, const Im2colWork<Tile> &work, int group) {
    constexpr bool PING_PONG = Tile::PING_PONG;
    // Where nothing else hides it, the residual is fetched when the first copies are through: of more than two rounds
    // one after each step, so that the next step's products are not late.
    constexpr bool LATE_RESIDUAL = Tile::ASYNC_RESIDUAL && !PING_PONG;
    const int part = p.part_chunks, middle = (work.begin + work.end) / 2;
    const unsigned table = shared.places + group * Tile::PLACE_WORDS * 4;
    int stage = 0;
    unsigned phase = 0;
    float d[Tile::M_STEPS][Tile::TILE_N / 2];
    if (PING_PONG && group == 1) arrive_part(MMA_TURN, 256);
    const unsigned empty = empty_of_lane<Tile>(shared.empty);
    for (int unit = work.first, number = 0; unit < work.units; unit += work.stride, ++number) {
        if (PING_PONG && number % 2 != group) {
            advance<Tile::STAGES>(stage, phase, work.steps);
            continue;
        }
        const TileOrigin<Tile> at = origin<Tile>(p, work.tile(unit));
        const int pixel0 = at.pixel + (Tile::SWAP_AB || PING_PONG ? 0 : group * Tile::WARPGROUP_PIXELS);
        const int filter0 = at.filter + (Tile::SWAP_AB && !PING_PONG ? group * Tile::WARPGROUP_FILTERS : 0);
        const int plane = p.p * p.q, image = Tile::NCHW ? (Tile::PLANES ? at.pixel : pixel0) / plane : 0;
        if (!Tile::TMA_STORE || Tile::RESIDUAL)
            fill_places<Tile>(p, table, pixel0, Tile::PLANES ? (image + 1) * plane : (int)p.pixels, at.group);
        OutputTile out{filter0, at.group, pixel0, (int)p.filters, plane, table};
        out.bias = shared.biases + group * Tile::WARPGROUP_FILTERS * 4;
        out.buffer = shared.buffers + group * Tile::EPILOGUE_BUFFERS * Tile::BUFFER_BYTES;
        out.barrier = WARPGROUP_BARRIER + group;
        out.map = p.out;
        out.width = p.q;
        out.pixels = p.pixels;
        out.image = image;
        out.last_map = p.out_last;
        int fetched = 0;
        if (!LATE_RESIDUAL) begin_tile<Tile>(out, p.residual);
        Biases<Tile> bias;
        bias.load(out, p.bias);
        // The first tile of all does not wait for its residual, and the second fetches it when the first copies are
        // through.
        const bool starts_from_residual = Tile::RESIDUAL_AS_C && (!PING_PONG || number > 0);
        if constexpr (Tile::RESIDUAL_AS_C) {
            if (PING_PONG && number == 1) sync_part(FIRST_COPIES, 256);
            add_residual<Tile, false>(d, out, p.residual, starts_from_residual);
        }
        if (PING_PONG) sync_part(MMA_TURN + group, 256);
        int chunk = work.begin % part;
        const unsigned rows0 = PING_PONG ? 0 : group * Tile::M_STEPS * Tile::A_BLOCK_BYTES;
        for (int step = work.begin; step < work.end; ++step) {
            barrier_wait(shared.full + stage * 8, phase);
            if constexpr (Gathered<Tile>::THREADS > 0) publish_shared();
            if (Tile::RESIDUAL_AS_C && PING_PONG && number == 0 && step == work.begin) arrive_part(FIRST_COPIES, 256);
            const unsigned pixels = shared.pixels(stage), filters = shared.filters(stage, step);
            const unsigned a = (Tile::SWAP_AB ? filters : pixels) + rows0, b = Tile::SWAP_AB ? pixels : filters;
            const bool add = Tile::RESIDUAL_AS_C || step > work.begin;
            wgmma_fence();
            // A part's last chunk of channels may end early.
            if (Tile::LAST_CHUNK_STEPS == Tile::CHUNK_STEPS || ++chunk != part) {
                multiply<Tile, Tile::CHUNK_STEPS>(d, a, b, add);
            } else {
                multiply<Tile, Tile::LAST_CHUNK_STEPS>(d, a, b, add);
                chunk = 0;
            }
            wgmma_commit();
            wgmma_wait<Tile::IN_FLIGHT>();
            if (step >= work.begin + Tile::IN_FLIGHT)
                release<Tile>(empty, before<Tile::STAGES>(stage, Tile::IN_FLIGHT));
            if constexpr (LATE_RESIDUAL)
                while (step >= middle && fetched < AHEAD<Tile>) {
                    fetch_next<Tile>(out, p.residual, fetched++);
                    if (AHEAD<Tile> > 2) break;
                }
            advance<Tile::STAGES>(stage, phase);
        }
        if (PING_PONG) arrive_part(MMA_TURN + (group ^ 1), 256);
        wait_for_products(d);
        for (int back = min(Tile::IN_FLIGHT, work.end - work.begin); back > 0; --back)
            release<Tile>(empty, before<Tile::STAGES>(stage, back));
        if constexpr (LATE_RESIDUAL)
            while (fetched < AHEAD<Tile>) fetch_next<Tile>(out, p.residual, fetched++);
        if constexpr (Tile::PERMUTED_N > 0) {
            if (Tile::RESIDUAL_AS_C && !starts_from_residual) add_residual<Tile, true>(d, out, p.residual, true);
            store_directly<Tile>(d, out, p.y, bias);
        } else if constexpr (Tile::SPLIT_K == 1) {
            store_through_buffers<Tile>(d, out, p.y, bias, p.residual);
        } else {
            // All CTAs of the cluster have begun.
            cluster_wait();
            send_sums<Tile>(d, shared.buffers, shared.complete, work.rank);
            // The table of places and this CTA's own part are there, then those of the others.
            sync_part(WARPGROUP_BARRIER, 128);
            barrier_wait_for_cluster(shared.complete, 0);
            store_split<Tile>(out, shared.buffers, work.rank, p.y, p.bias, p.residual);
        }
    }
    if constexpr (Tile::TMA_STORE) wait_for_all_stores();
}

template <class Traits> DEVICE void implicit_gemm_im2col(const Im2colGemm &p) {
    using Tile = CtaTile<Traits>;
    extern __shared__ unsigned char memory[];
    const Im2colLayout<Tile> shared(shared_address(memory), p);
    const Im2colWork<Tile> work(p);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == Tile::CONSUMER_THREADS) init_barriers<Tile>(p, shared);
    if (Tile::ZEROED) zero_shared(shared.ring, shared.planes);
    __syncthreads();
    if constexpr (Tile::SPLIT_K > 1) cluster_arrive();
    if constexpr (COPYING<Tile> > 1) {
        cluster_arrive_relaxed();
        cluster_wait();
    }
    if (group == Tile::WARPGROUPS) {
        if constexpr (Tile::PRODUCER_WARPGROUP) release_registers<(WARPS_BRING<Tile> ? 88 : 40)>();
        if (WARPS_BRING<Tile> || threadIdx.x == Tile::CONSUMER_THREADS) {
            if constexpr (ShiftedPlanes<Tile>::USED) shifting_producer<Tile>(p, shared, work);
            else producer<Tile>(p, shared, work);
            end_beside<Tile::INDEPENDENT>();
        }
        if constexpr (Tile::SPLIT_K > 1) {
            __syncwarp();
            cluster_wait();
        }
        return;
    }
    begin_beside<Tile::INDEPENDENT>();
    if constexpr (Tile::PRODUCER_WARPGROUP) take_registers<(WARPS_BRING<Tile> ? 208 : 232)>();
    consumer<Tile>(p, shared, work, group);
    // Others may have yet to say that stages of theirs were read.
    if constexpr (COPYING<Tile> > 1) {
        cluster_arrive();
        cluster_wait();
    }
}
