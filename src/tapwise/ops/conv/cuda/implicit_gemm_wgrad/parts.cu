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

// Threads of a block share its quads' parts, SLICES of them one after the other; their sums are added in that order.
template <class Traits, int SLICES> DEVICE void add_wgrad_parts(const WgradParts &p) {
    using Tile = WgradTile<Traits>;
    constexpr int THREADS = 256, EACH = THREADS / SLICES;
    static_assert(Tile::QUADS % EACH == 0);
    __shared__ float4 sums[SLICES][EACH];
    const int mine = threadIdx.x % EACH, slice = threadIdx.x / EACH;
    const int all = blockIdx.x * EACH + mine, tile = all / Tile::QUADS, quad = all - tile * Tile::QUADS;
    const long long distance = p.tiles * Tile::QUADS;
    const int begin = (int)p.split_k * slice / SLICES, end = (int)p.split_k * (slice + 1) / SLICES;
    const TilePlace<Tile> at(p, tile);
    const int thread = quad % 128, step = quad / 128, i = step % (Tile::N / 8), rest = step / (Tile::N / 8);
    const QuadPlace<Tile> place(p, at, rest / Tile::M_STEPS, rest % Tile::M_STEPS, i, thread);
    const bool kept = place.has_any(p, at);
    begin_dependent();
    const float4 *from = static_cast<const float4 *>(p.parts) + begin * distance + all;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int part = kept ? begin : end; part < end; ++part, from += distance) {
        const float4 v = *from;
        sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    if constexpr (SLICES > 1) {
        sums[slice][mine] = sum;
        __syncthreads();
        if (slice > 0) return;
#pragma unroll
        for (int i = 1; i < SLICES; ++i) {
            const float4 v = sums[i][mine];
            sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
    }
    store_quad<Tile>(p, at, place, sum);
}
