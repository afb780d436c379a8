// Implicit GEMM on Hopper's tensor cores: a tile's pixels with their halo, all that its windows reach, stay in shared
// memory while the taps pass. A tap is the same memory some pixels further on, with strides (of planes of NCHW alone)
// in the part of their residue. Two warpgroups take tiles in turns (ping-pong).
//
// Halo rows: pixels are counted along padded rows, images one below the other; a tile is so many of them in a row.
// HALO_TILE: a tile is a rectangle of an image, which has less around it where images are large. TMA brings the pixels,
// or (GATHER_BYTES) three warps do, in pieces as small as the channels ask; or (STAGED_STRIPS) they transpose planes of
// NCHW that TMA brings.
#pragma once

#include "direct_store.cuh"
#include "ops/conv/cuda/implicit_gemm/gathered_halo.cuh"
#include "ops/conv/cuda/implicit_gemm/transposed_halo.cuh"
#include "tma_residual.cuh"

template <class Tile> DEVICE void init_barriers(const HaloGemm &p, const HaloLayout<Tile> &shared) {
    prefetch_map(p.x);
    prefetch_map(p.w);
    if (Tile::NARROW) prefetch_map(p.x_last);
    for (int slot = 0; slot < Tile::HALO_BUFFERS; ++slot) {
        barrier_init(shared.halo_full + slot * 8, Tile::STAGED_STRIPS  ? TRANSPOSERS
                                                  : Tile::GATHER_BYTES ? GATHERERS
                                                                       : 1);
        barrier_init(shared.halo_empty + slot * 8, 4);
    }
    for (int slot = 0; slot < Tile::STAGES; ++slot) {
        barrier_init(shared.full + slot * 8, 1);
        barrier_init(shared.empty + slot * 8, 4);
    }
    for (int strip = 0; strip < Tile::STAGED_STRIPS; ++strip) barrier_init(shared.staged_full + strip * 8, 1);
    init_residual_barriers<Tile>(shared.residual);
    publish_barriers();
}

// Image, row and column of x, with padding in front, where a copy begins: a halo tile's, or of padded rows its pixel.
template <class Tile> struct HaloBegin {
    int n, h, w;
    DEVICE HaloBegin(const HaloGemm &p, const HaloWork &work, int pixel) {
        if constexpr (Tile::HALO_TILE) {
            const Corner corner(p, pixel / Tile::TILE_PIXELS);
            n = corner.n, h = corner.h, w = corner.w;
        } else {
            n = pixel / work.plane;
            const int rest = pixel - n * work.plane;
            h = rest / work.wide, w = rest - h * work.wide;
        }
        h -= (int)p.pad_h, w -= (int)p.pad_w;
    }
};

// A halo tile's pixels of one chunk, one copy.
template <class Tile>
DEVICE void copy_halo_tile(const HaloGemm &p, const HaloWork &work, unsigned to, unsigned full,
                           const TileOrigin<Tile> &at, const HaloBegin<Tile> &begin, int chunk) {
    const int part = work.part;
    const void *const map = is_narrow<Tile>(chunk, part) ? p.x_last : p.x;
    if constexpr (Tile::GROUP_AXIS)
        copy_box(to, map, full, chunk_of_part(chunk, part) * Tile::CHUNK_ELEMENTS, begin.w, begin.h, begin.n,
                 at.group + second_part(chunk, part) * (int)p.groups);
    else copy_box(to, map, full, chunk * Tile::CHUNK_ELEMENTS, begin.w, begin.h, begin.n);
}

// The pixels of one chunk along padded rows, in copies of im2col mode.
template <class Tile>
DEVICE void copy_halo_rows(const HaloGemm &p, const HaloWork &work, unsigned to, unsigned full,
                           const TileOrigin<Tile> &at, HaloBegin<Tile> begin, int chunk) {
    for (int first = 0; first < (int)p.halo_pixels; first += (int)p.copy_pixels) {
        if (first > 0) begin = HaloBegin<Tile>(p, work, at.pixel + first);
        // Behind the last image comes the next group, of whose padding only zeros are used. With five axes a copy may
        // not begin behind the last image.
        const int image = Tile::GROUP_AXIS ? begin.n % (int)p.n : begin.n,
                  group = at.group + (Tile::GROUP_AXIS ? begin.n / (int)p.n : 0);
        copy_chunk<Tile>(to + first * Tile::CHUNK_BYTES, is_narrow<Tile>(chunk, work.part) ? p.x_last : p.x, full,
                         chunk, work.part, p.groups, begin.w, begin.h, image, group, 0, 0);
    }
}

// The pixels of all chunks of all tiles: one thread, or those that gather.
template <class Tile>
DEVICE void pixel_producer(const HaloGemm &p, const HaloLayout<Tile> &shared, const HaloWork &work) {
    int slot = 0;
    unsigned phase = 1;
    TileOrigin<Tile> at(blockIdx.x, p.tiles_f, p.groups);
    HaloBegin<Tile> begin(p, work, at.pixel);
    const unsigned last_bytes = p.halo_pixels * Tile::LAST_CHUNK_BYTES;
    work_out(at.group, at.pixel, begin.n, begin.h, begin.w);
    if (!Tile::INDEPENDENT) wait_for_previous();
    for (int tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
        if (tile != blockIdx.x) {
            at = TileOrigin<Tile>(tile, p.tiles_f, p.groups);
            begin = HaloBegin<Tile>(p, work, at.pixel);
        }
        for (int chunk = 0; chunk < work.chunks; ++chunk) {
            barrier_wait(shared.halo_empty + slot * 8, phase);
            const unsigned to = shared.halos + slot * shared.halo_bytes, full = shared.halo_full + slot * 8;
            if constexpr (Tile::GATHER_BYTES > 0) {
                gather<Tile>(p, to, at.pixel, at.group, chunk);
                arrive_with_copies(full);
            } else {
                barrier_expect(full, is_narrow<Tile>(chunk, work.part) ? last_bytes : shared.copied_bytes);
                if constexpr (Tile::HALO_TILE) copy_halo_tile<Tile>(p, work, to, full, at, begin, chunk);
                else copy_halo_rows<Tile>(p, work, to, full, at, begin, chunk);
            }
            advance<Tile::HALO_BUFFERS>(slot, phase);
        }
    }
}

// The filters of all taps of all chunks; of filters that stay, once.
template <class Tile>
DEVICE void filter_producer(const HaloGemm &p, const HaloLayout<Tile> &shared, const HaloWork &work) {
    constexpr unsigned FILTERS = HaloLayout<Tile>::FILTERS;
    int slot = 0;
    unsigned phase = 1;
    for (int tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
        if (Tile::FILTER_STATIONARY && tile != blockIdx.x) break;
        const TileOrigin<Tile> at(tile, p.tiles_f, p.groups);
        for (int chunk = 0; chunk < work.chunks; ++chunk)
            for (int tap = 0, r = 0, s = 0; tap < work.taps; ++tap) {
                barrier_wait(shared.empty + slot * 8, phase);
                barrier_expect(shared.full + slot * 8,
                               is_narrow<Tile>(chunk, work.part) ? Tile::LAST_FILTER_BYTES : FILTERS);
                copy_tile_filters<Tile>(p, shared.ring + slot * FILTERS, shared.full + slot * 8, chunk, r, s, p.s,
                                        at.group, at.filter);
                if (++s == (int)p.s) {
                    s = 0;
                    ++r;
                }
                advance<Tile::STAGES>(slot, phase);
            }
    }
}

// The third warpgroup: pixels, filters, and the residual where TMA brings it.
template <class Tile> DEVICE void producer(const HaloGemm &p, const HaloLayout<Tile> &shared, const HaloWork &work) {
    constexpr bool GATHERS = Tile::GATHER_BYTES > 0, TRANSPOSES = Tile::STAGED_STRIPS > 0;
    constexpr int FILTER_THREAD = FIRST_PRODUCER + (GATHERS || TRANSPOSES ? GATHERERS : 32);
    const int thread = threadIdx.x;
    const bool brings_pixels =
        !TRANSPOSES && (GATHERS ? thread < FIRST_PRODUCER + GATHERERS : thread == FIRST_PRODUCER);
    if (!Tile::INDEPENDENT && !brings_pixels && (thread != FILTER_THREAD || !p.weights_ready)) wait_for_previous();
    if constexpr (TRANSPOSES) {
        if (thread < FIRST_PRODUCER + TRANSPOSERS * 32) transposing_producer<Tile>(p, shared);
    } else if (brings_pixels) {
        pixel_producer<Tile>(p, shared, work);
    }
    if (thread == FILTER_THREAD) filter_producer<Tile>(p, shared, work);
    if constexpr (Tile::TMA_RESIDUAL)
        if (thread / 32 == FIRST_PRODUCER / 32 + 2)
            residual_producer<Tile>(p.res, shared.buffers, shared.residual, p.filters, p.groups, p.tiles_f, work.tiles,
                                    work.plane, work.wide);
    // A CTA's shared memory stays until its copies are there.
    if constexpr (GATHERS) asm volatile("cp.async.wait_all;" ::: "memory");
    if (thread == FILTER_THREAD) end_beside<Tile::INDEPENDENT>();
}

// The numbers of the outputs of halo rows (output_runs.cuh).
template <class Tile>
DEVICE void fill_runs(const HaloGemm &p, const HaloWork &work, unsigned table, const TileOrigin<Tile> &at) {
    static_assert(!Tile::HALO_TILE);
    const OutputRuns<Tile> runs(table);
    const int width = work.wide, plane = work.plane, q = p.q, outputs = p.p * p.q, pitch = runs.pitch(outputs);
    // A pixel's output, or the next one, as many behind the first image's.
    const auto place = [&](int pixel) {
        const int n = min(pixel / plane, (int)p.n), rest = pixel - n * plane, h = rest / width, w = rest - h * width;
        return n * pitch + (n == p.n ? 0 : h < p.p ? h * q + min(w, q) : pitch);
    };
    const int first = at.pixel / plane * pitch,
              origin = (place(at.pixel) - first) / Tile::RUN_VECTOR * Tile::RUN_VECTOR;
    for (int i = threadIdx.x % 128; i <= Tile::WARPGROUP_PIXELS; i += 128) {
        const int pixel = at.pixel + i, rest = pixel % plane, h = rest / width;
        runs.set(i, place(pixel) - first - origin, pixel / plane < p.n && h < p.p && rest - h * width < q);
    }
    if (threadIdx.x % 128 == 0) runs.set_origin(origin);
}

// Where the pixels of a tile lie in y, -1 for those that are no outputs.
template <class Tile>
DEVICE void fill_places(const HaloGemm &p, const HaloWork &work, unsigned table, const TileOrigin<Tile> &at) {
    const int filters = p.filters, k = (int)p.groups * filters, outputs = p.p * p.q;
    const int width = work.wide, plane = work.plane;
    if constexpr (Tile::RUN_VECTOR > 0) fill_runs<Tile>(p, work, table, at);
    for (int i = threadIdx.x % 128; i < Tile::WARPGROUP_PIXELS; i += 128) {
        int n, h, w;
        bool output;
        if constexpr (Tile::HALO_TILE) {
            const Corner corner(p, at.pixel / Tile::TILE_PIXELS);
            const int row = i / width, column = i - row * width;
            n = corner.n;
            h = corner.h + row;
            w = corner.w + column;
            output = row < p.down && column < p.across && h < p.p && w < p.q;
        } else {
            const int pixel = at.pixel + i, rest = pixel % plane;
            n = pixel / plane;
            h = rest / width;
            w = rest - h * width;
            output = n < p.n && h < p.p && w < p.q;
        }
        const int there = h * (int)p.q + w;
        int place = Tile::NCHW ? (n * k + at.group * filters) * outputs + there
                               : (n * outputs + there) * k + at.group * filters;
        if constexpr (Tile::STRIDED) place = strided_place(p, n, h, w) + at.group * filters;
        set_place(table, i, output ? place : -1);
    }
}

// A warpgroup's products and outputs, of every other tile.
template <class Tile>
DEVICE void consumer(const HaloGemm &p, const HaloLayout<Tile> &shared, const HaloWork &work, int group) {
    constexpr bool STATIONARY = Tile::FILTER_STATIONARY;
    const int lane = threadIdx.x % 32, chunks = work.chunks, part = work.part, taps = work.taps, width = work.wide;
    // Halos whose products may be under way beside the last.
    const int behind = Tile::STAGED_STRIPS && taps == 1 ? Tile::IN_FLIGHT : 1;
    const unsigned table = shared.places + group * Tile::PLACE_WORDS * 4;
    int halo = 0, slot = 0;
    unsigned halo_phase = 0, phase = 0;
    // The next residual's buffer, and its parity.
    int next = 0;
    unsigned next_phase = 0;
    float d[Tile::M_STEPS][Tile::TILE_N / 2];
    if (group == 1) {
        arrive_part(MMA_TURN, 256);
        if (Tile::TMA_RESIDUAL) arrive_part(RESIDUAL_TURN, 256);
    }
    for (int tile = blockIdx.x, number = 0; tile < work.tiles; tile += gridDim.x, ++number) {
        const int residual = next;
        const unsigned residual_phase = next_phase;
        if constexpr (Tile::TMA_RESIDUAL) advance<Tile::EPILOGUE_BUFFERS>(next, next_phase, Round<Tile>::COUNT);
        if (number % 2 != group) {
            advance<Tile::HALO_BUFFERS>(halo, halo_phase, chunks);
            if (!STATIONARY) advance<Tile::STAGES>(slot, phase, chunks * taps);
            continue;
        }
        const TileOrigin<Tile> at(tile, p.tiles_f, p.groups);
        fill_places<Tile>(p, work, table, at);
        const int buffer = (Tile::TMA_RESIDUAL ? 0 : group * Tile::EPILOGUE_BUFFERS) * Tile::BUFFER_BYTES;
        OutputTile out{at.filter, at.group, at.pixel, (int)p.filters, (int)(p.p * p.q), table};
        out.bias = shared.biases + group * Tile::WARPGROUP_FILTERS * 4;
        out.buffer = shared.buffers + buffer;
        out.barrier = WARPGROUP_BARRIER + group;
        out.residual_full = shared.residual;
        out.residual_slot = residual;
        out.residual_phase = residual_phase;
        begin_tile<Tile>(out, p.residual);
        Biases<Tile> bias;
        bias.load(out, p.bias);
        // The first tile of all does not wait for its residual, and the second fetches it when the first copies are
        // through.
        const bool starts_from_residual = Tile::RESIDUAL_AS_C && number > 0;
        if constexpr (Tile::RESIDUAL_AS_C) {
            if (number == 1) sync_part(FIRST_COPIES, 256);
            add_residual<Tile, false>(d, out, p.residual, starts_from_residual);
        }
        sync_part(MMA_TURN + group, 256);
        int within = 0;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            barrier_wait(shared.halo_full + halo * 8, halo_phase);
            if constexpr (Tile::GATHER_BYTES > 0) publish_shared();
            const unsigned pixels = shared.halos + halo * shared.halo_bytes;
            if (++within == part) within = 0;
            int r = 0, s = 0;
            for (int tap = 0; tap < taps; ++tap) {
                barrier_wait(shared.full + slot * 8, phase);
                if ((Tile::RESIDUAL_AS_C || Tile::TMA_RESIDUAL) && number == 0 && chunk + tap == 0)
                    arrive_part(FIRST_COPIES, Tile::RESIDUAL_AS_C ? 256 : 160);
                const unsigned shifted = pixels + tap_place<Tile>(p, r, s, width) * Tile::CHUNK_BYTES;
                const unsigned filters = shared.ring + slot * HaloLayout<Tile>::FILTERS;
                const bool first_column = s == 0, last_column = s + 1 == (int)p.s;
                if (++s == (int)p.s) {
                    s = 0;
                    ++r;
                }
                const unsigned a = Tile::SWAP_AB ? filters : shifted, b = Tile::SWAP_AB ? shifted : filters;
                const bool add = Tile::RESIDUAL_AS_C || chunk + tap > 0;
                wgmma_fence();
                if constexpr (Tile::PARTIAL_TAPS) multiply_partly<Tile>(d, a, b, add, first_column, last_column);
                else if (Tile::LAST_CHUNK_STEPS == Tile::CHUNK_STEPS || within != 0)
                    multiply<Tile, Tile::CHUNK_STEPS>(d, a, b, add);
                else multiply<Tile, Tile::LAST_CHUNK_STEPS>(d, a, b, add);
                wgmma_commit();
                wgmma_wait<Tile::IN_FLIGHT>();
                if (lane == 0) {
                    if (!STATIONARY && chunk * taps + tap >= Tile::IN_FLIGHT)
                        barrier_arrive(shared.empty + before<Tile::STAGES>(slot, Tile::IN_FLIGHT) * 8);
                    if (chunk >= behind && tap == min(Tile::IN_FLIGHT, taps) - 1)
                        barrier_arrive(shared.halo_empty + before<Tile::HALO_BUFFERS>(halo, behind) * 8);
                }
                if (STATIONARY) {
                    if (++slot == Tile::STAGES) slot = 0;
                } else {
                    advance<Tile::STAGES>(slot, phase);
                }
            }
            advance<Tile::HALO_BUFFERS>(halo, halo_phase);
        }
        arrive_part(MMA_TURN + (group ^ 1), 256);
        wait_for_products(d);
        if (lane == 0) {
            if (!STATIONARY)
                for (int back = min(Tile::IN_FLIGHT, chunks * taps); back > 0; --back)
                    barrier_arrive(shared.empty + before<Tile::STAGES>(slot, back) * 8);
            for (int back = min(behind, chunks); back > 0; --back)
                barrier_arrive(shared.halo_empty + before<Tile::HALO_BUFFERS>(halo, back) * 8);
        }
        if constexpr (Tile::PERMUTED_N > 0) {
            if (Tile::RESIDUAL_AS_C && !starts_from_residual) add_residual<Tile, true>(d, out, p.residual, true);
            store_directly<Tile>(d, out, p.y, bias);
        } else {
            store_through_buffers<Tile>(d, out, p.y, bias, p.residual);
        }
    }
}

template <class Traits> DEVICE void implicit_gemm_halo(const HaloGemm &p) {
    using Tile = CtaTile<Traits>;
    static_assert(Tile::PING_PONG && (!Tile::HALO_TILE || Tile::GATHER_BYTES == 0));
    static_assert(!Tile::STAGED_STRIPS || (Tile::HALO_TILE && Tile::NCHW && sizeof(typename Tile::T) == 2));
    extern __shared__ unsigned char memory[];
    const HaloLayout<Tile> shared(shared_address(memory), p);
    const HaloWork work(p);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == FIRST_PRODUCER) init_barriers<Tile>(p, shared);
    if constexpr (Tile::STAGED_STRIPS > 0) fill_halo_places<Tile>(p, shared.table);
    if constexpr (Tile::FLAT_PLANES) {
        zero_columns<Tile>(p, shared);
        publish_shared();
    }
    if (Tile::ZEROED) zero_shared(shared.halos, shared.ring);
    __syncthreads();
    if (group == 2) {
        release_registers<(Tile::GATHER_BYTES || Tile::STAGED_STRIPS ? 72 : 40)>();
        producer<Tile>(p, shared, work);
        return;
    }
    take_registers<(Tile::GATHER_BYTES || Tile::STAGED_STRIPS ? 216 : 232)>();
    begin_beside<Tile::INDEPENDENT>();
    consumer<Tile>(p, shared, work, group);
}
