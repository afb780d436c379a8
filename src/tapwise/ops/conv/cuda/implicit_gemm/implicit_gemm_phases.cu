// dgrad of a stride by Hopper's tensor cores: all phases in one launch. A phase is a product of its own, dy by TMA's
// im2col mode as in implicit_gemm_im2col.cu; one tile's way to dx hides behind the products of the next one's, of
// whatever phase. One that no tap meets has no steps (EMPTY): its tiles are written as others are, beside those that
// they share lines and pages of memory with.
#pragma once

#include "ops/conv/cuda/implicit_gemm/implicit_gemm_im2col.cu"

// Of up to four phases.
struct PhasedGemm {
    // Tensor maps of dy and of dx, a phase each, and of the filters; of dy and filters in NARROW boxes; of dx in boxes
    // of LAST_STORED.
    alignas(64) unsigned long long x[4][16], out[4][16], w[16], x_last[4][16], w_last[16], out_last[4][16];
    // Where phases begin in dx.
    void *y[4];
    const void *bias;
    // Filters and groups of the product; tiles along the filters; chunks of channels.
    long long filters, groups, tiles_f, chunks, phases;
    // BY_PLACE: tiles of the phase that has most, else none: tiles of a phase follow those of the one before.
    long long places;
    long long dilation_h, dilation_w, image_stride, row_stride, column_stride, step_r, step_s;
    // Of each phase: tiles, output pixels and sizes, steps of gemm_k, taps of a row, padding, first tap of w.
    long long tiles[4], pixels[4], p[4], q[4], steps[4], taps_w[4], pad_h[4], pad_w[4], first_r[4], first_s[4];
};

// What is asked of a product, of one phase.
struct PhaseGemm {
    const void *w, *w_last;
    long long filters, groups, part_chunks, pixels, p, q, image_stride, row_stride, column_stride, first_r, first_s,
        step_r, step_s;
    DEVICE PhaseGemm(const PhasedGemm &g, int phase)
        : w(g.w), w_last(g.w_last), filters(g.filters), groups(g.groups), part_chunks(g.chunks),
          pixels(g.pixels[phase]), p(g.p[phase]), q(g.q[phase]), image_stride(g.image_stride), row_stride(g.row_stride),
          column_stride(g.column_stride), first_r(g.first_r[phase]), first_s(g.first_s[phase]), step_r(g.step_r),
          step_s(g.step_s) {}
};

DEVICE void prefetch_maps_of_last(const PhasedGemm &p) { prefetch_map(p.x_last); }

// The tiles of a CTA, one behind the other. By place, a CTA takes a tile of all phases before its next: they see the
// same dy, which L2 still has. Else phases follow each other, and short tiles fill what the long ones leave.
struct PhasedTiles {
    const PhasedGemm &p;
    int phase = 0, tile;
    DEVICE PhasedTiles(const PhasedGemm &p_) : p(p_), tile(blockIdx.x) { settle(); }
    DEVICE bool more() const { return p.places ? tile < (int)p.places : phase < (int)p.phases; }
    DEVICE void next() {
        if (!p.places) tile += gridDim.x;
        else step();
        settle();
    }

private:
    DEVICE void step() {
        if (++phase < (int)p.phases) return;
        phase = 0;
        tile += gridDim.x;
    }
    DEVICE void settle() {
        while (more() && tile >= (int)p.tiles[phase])
            if (p.places) step();
            else tile -= (int)p.tiles[phase++];
    }
};

// A tile's first outputs, and where dy has its first window.
template <class Tile> struct PhasedPixel {
    TileOrigin<Tile> origin;
    int n, h, w;
    DEVICE PhasedPixel(const PhasedGemm &p, const PhasedTiles &at) : origin(at.tile, p.tiles_f, p.groups) {
        const int width = p.q[at.phase], plane = (int)p.p[at.phase] * width;
        n = origin.pixel / plane;
        const int rest = origin.pixel - n * plane, row = rest / width;
        h = row - (int)p.pad_h[at.phase], w = rest - row * width - (int)p.pad_w[at.phase];
    }
};

// One thread copies the pixels and filters of all steps of all tiles, as far ahead as there are stages.
template <class Tile> DEVICE void phased_producer(const PhasedGemm &p, const Im2colLayout<Tile> &shared) {
    using Layout = Im2colLayout<Tile>;
    int stage = 0;
    unsigned parity = 1;
    const int chunks = p.chunks;
    PhasedTiles at(p);
    if (!at.more()) return;
    PhasedPixel<Tile> begin(p, at);
    work_out(begin.origin.group, begin.origin.filter, begin.n, begin.h, begin.w);
    begin_beside<Tile::INDEPENDENT>();
    while (true) {
        const PhaseGemm gemm(p, at.phase);
        const TileOrigin<Tile> origin = begin.origin;
        const int taps_w = p.taps_w[at.phase], steps = p.steps[at.phase];
        int chunk = 0, r = 0, s = 0;
        for (int step = 0; step < steps; ++step) {
            const unsigned full = shared.full + stage * 8;
            barrier_wait(shared.empty + stage * 8, parity);
            const bool narrow = is_narrow<Tile>(chunk, chunks);
            barrier_expect(full, narrow ? Tile::LAST_PIXEL_BYTES + Tile::LAST_FILTER_BYTES : Layout::STAGE);
            copy_chunk<Tile>(shared.pixels(stage), narrow ? p.x_last[at.phase] : p.x[at.phase], full, chunk, chunks,
                             p.groups, begin.w, begin.h, begin.n, origin.group, s * (int)p.dilation_w,
                             r * (int)p.dilation_h);
            copy_tile_filters<Tile>(gemm, shared.filters(stage, 0), full, chunk, r, s, taps_w, origin.group,
                                    origin.filter);
            if (++chunk == chunks) {
                chunk = 0;
                if (++s == taps_w) {
                    s = 0;
                    ++r;
                }
            }
            advance<Tile::STAGES>(stage, parity);
        }
        at.next();
        if (!at.more()) return;
        begin = PhasedPixel<Tile>(p, at);
    }
}

// A warpgroup's products and outputs, of all tiles or (PING_PONG) of every other one.
template <class Tile> DEVICE void phased_consumer(const PhasedGemm &p, const Im2colLayout<Tile> &shared, int group) {
    constexpr bool PING_PONG = Tile::PING_PONG;
    const int lane = threadIdx.x % 32, chunks = p.chunks;
    const unsigned table = shared.places + group * Tile::PLACE_WORDS * 4;
    const unsigned rows0 = PING_PONG ? 0 : group * Tile::M_STEPS * Tile::A_BLOCK_BYTES;
    int stage = 0, number = 0;
    unsigned parity = 0;
    float d[Tile::M_STEPS][Tile::TILE_N / 2];
    if (PING_PONG && group == 1) arrive_part(MMA_TURN, 256);
    for (PhasedTiles at(p); at.more(); at.next(), ++number) {
        const int steps = p.steps[at.phase];
        if (PING_PONG && number % 2 != group) {
            advance<Tile::STAGES>(stage, parity, steps);
            continue;
        }
        const PhaseGemm gemm(p, at.phase);
        const TileOrigin<Tile> origin(at.tile, p.tiles_f, p.groups);
        const int pixel0 = origin.pixel + (Tile::SWAP_AB || PING_PONG ? 0 : group * Tile::WARPGROUP_PIXELS);
        const int filter0 = origin.filter + (Tile::SWAP_AB && !PING_PONG ? group * Tile::WARPGROUP_FILTERS : 0);
        if (!Tile::TMA_STORE) fill_places<Tile>(gemm, table, pixel0, gemm.pixels, origin.group);
        OutputTile out{filter0, origin.group, pixel0, (int)p.filters, (int)(gemm.p * gemm.q), table};
        out.bias = shared.biases + group * Tile::WARPGROUP_FILTERS * 4;
        out.buffer = shared.buffers + group * Tile::EPILOGUE_BUFFERS * Tile::BUFFER_BYTES;
        out.barrier = WARPGROUP_BARRIER + group;
        out.map = p.out[at.phase];
        out.last_map = p.out_last[at.phase];
        out.width = gemm.q;
        out.pixels = gemm.pixels;
        Biases<Tile> bias;
        bias.load(out, p.bias);
        if (PING_PONG) sync_part(MMA_TURN + group, 256);
        if constexpr (Tile::EMPTY)
            if (steps == 0)
#pragma unroll
                for (auto &row : d)
#pragma unroll
                    for (float &sum : row) sum = 0.0f;
        int chunk = 0;
        for (int step = 0; step < steps; ++step) {
            barrier_wait(shared.full + stage * 8, parity);
            const unsigned pixels = shared.pixels(stage), filters = shared.filters(stage, 0);
            const unsigned a = (Tile::SWAP_AB ? filters : pixels) + rows0, b = Tile::SWAP_AB ? pixels : filters;
            wgmma_fence();
            // A tap's last chunk of channels may end early.
            if (Tile::LAST_CHUNK_STEPS == Tile::CHUNK_STEPS || ++chunk != chunks) {
                multiply<Tile, Tile::CHUNK_STEPS>(d, a, b, step > 0);
            } else {
                multiply<Tile, Tile::LAST_CHUNK_STEPS>(d, a, b, step > 0);
                chunk = 0;
            }
            wgmma_commit();
            wgmma_wait<Tile::IN_FLIGHT>();
            if (step >= Tile::IN_FLIGHT && lane == 0)
                barrier_arrive(shared.empty + before<Tile::STAGES>(stage, Tile::IN_FLIGHT) * 8);
            advance<Tile::STAGES>(stage, parity);
        }
        if (PING_PONG) arrive_part(MMA_TURN + (group ^ 1), 256);
        wait_for_products(d);
        if (lane == 0)
            for (int back = min(Tile::IN_FLIGHT, steps); back > 0; --back)
                barrier_arrive(shared.empty + before<Tile::STAGES>(stage, back) * 8);
        store_through_buffers<Tile>(d, out, p.y[at.phase], bias, nullptr);
    }
    if constexpr (Tile::TMA_STORE) wait_for_all_stores();
}

template <class Traits> DEVICE void implicit_gemm_phases(const PhasedGemm &p) {
    using Tile = CtaTile<Traits>;
    static_assert(Tile::STRIDED && Tile::TRANSPOSED_FILTERS && Tile::SPLIT_K == 1 && !Tile::FILTER_STATIONARY);
    extern __shared__ unsigned char memory[];
    const Im2colLayout<Tile> shared(shared_address(memory), p);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == Tile::CONSUMER_THREADS) init_barriers<Tile>(p, shared);
    if (Tile::ZEROED) zero_shared(shared.ring, shared.planes);
    __syncthreads();
    if (group == Tile::WARPGROUPS) {
        if constexpr (Tile::PRODUCER_WARPGROUP) release_registers<40>();
        if (threadIdx.x == Tile::CONSUMER_THREADS) {
            phased_producer<Tile>(p, shared);
            end_beside<Tile::INDEPENDENT>();
        }
        return;
    }
    begin_beside<Tile::INDEPENDENT>();
    if constexpr (Tile::PRODUCER_WARPGROUP) take_registers<232>();
    phased_consumer<Tile>(p, shared, group);
}
