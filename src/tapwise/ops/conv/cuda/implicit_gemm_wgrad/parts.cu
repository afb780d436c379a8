// dw from the parts of a split gemm_k, which lie in the workspace as the registers of wgrad.cu hold them; what dw has
// not is not there.
#pragma once

#include "grid.cuh"
#include "ops/conv/cuda/implicit_gemm_wgrad/tile.cuh"

struct WgradParts {
    const void *parts;
    void *dw;
    // As those of WeightGradient.
    long long filters, channel_blocks, taps, tiles_n, tiles_m, tiles, split_k;
    // Filters; of a group, filters and channels; of dw, channels and taps.
    long long k, group_k, group_c, dw_c, dw_taps;
};

DEVICE float4 added(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Quads that a thread adds, of every fourth quad of a row: what they need to know of their place is worked out once.
template <class Tile> constexpr int quads_of_adder() {
    constexpr int FOURS = Tile::N / 32;
    return FOURS % 4 == 0 ? 4 : FOURS % 3 == 0 ? 3 : FOURS % 2 == 0 ? 2 : 1;
}

// Threads of a block share its quads' parts, SLICES of them one after the other; their sums are added in that order.
// Lanes have four quads of a row beside each other, of the same threads of the products, so that they store rows of 64
// bytes. Blocks are small and wait beside those that multiply, so registers are few.
template <class Traits, int SLICES> DEVICE void add_wgrad_parts(const WgradParts &p) {
    using Tile = WgradTile<Traits>;
    // ONCE: parts whose loads are under way at once.
    constexpr int QUADS = quads_of_adder<Tile>(), ONCE = QUADS == 3 ? 3 : 8 / QUADS, THREADS = 128,
                  EACH = THREADS / SLICES, ROW = Tile::N / 32 / QUADS, UNITS = Tile::QUADS / QUADS;
    static_assert(Tile::N % 32 == 0 && UNITS % EACH == 0 && EACH >= 8);
    __shared__ float4 sums[SLICES > 1 ? SLICES - 1 : 1][QUADS][EACH];
    const int mine = threadIdx.x % EACH, slice = threadIdx.x / EACH, tile = blockIdx.x / (UNITS / EACH),
              unit = blockIdx.x % (UNITS / EACH) * EACH + mine;
    const int step = unit / 512, i = step % ROW * (4 * QUADS) + unit / 8 % 4, rest = step / ROW,
              thread = unit / 32 % 16 * 8 + unit % 8, warpgroup = rest / Tile::M_STEPS, m = rest % Tile::M_STEPS;
    const TilePlace<Tile> at(p, tile);
    bool kept = false;
#pragma unroll
    for (int j = 0; j < QUADS; ++j) kept |= QuadPlace<Tile>(p, at, warpgroup, m, i + 4 * j, thread).has_any(p, at);
    const long long distance = p.tiles * Tile::QUADS;
    const int begin = (int)p.split_k * slice / SLICES, end = kept ? (int)p.split_k * (slice + 1) / SLICES : begin;
    const float4 *from = static_cast<const float4 *>(p.parts) + begin * distance + (long long)tile * Tile::QUADS +
                         quad_of<Tile>(warpgroup, m, i, thread);
    float4 sum[QUADS] = {};
    work_out(begin, end, (int)(long long)from, (int)distance);
    begin_dependent();
#pragma unroll 1
    for (int part = begin; part < end; part += ONCE) {
        float4 v[ONCE][QUADS];
#pragma unroll
        for (int e = 0; e < ONCE; ++e, from += distance)
#pragma unroll
            for (int j = 0; j < QUADS; ++j) v[e][j] = part + e < end ? from[j * 512] : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int e = 0; e < ONCE; ++e)
#pragma unroll
            for (int j = 0; j < QUADS; ++j) sum[j] = added(sum[j], v[e][j]);
    }
    if constexpr (SLICES > 1) {
#pragma unroll
        for (int j = 0; j < QUADS; ++j)
            if (slice > 0) sums[slice - 1][j][mine] = sum[j];
        __syncthreads();
        if (slice > 0) return;
#pragma unroll
        for (int other = 0; other < SLICES - 1; ++other)
#pragma unroll
            for (int j = 0; j < QUADS; ++j) sum[j] = added(sum[j], sums[other][j][mine]);
    }
#pragma unroll
    for (int j = 0; j < QUADS; ++j)
        store_quad<Tile>(p, at, QuadPlace<Tile>(p, at, warpgroup, m, i + 4 * j, thread), sum[j]);
}
