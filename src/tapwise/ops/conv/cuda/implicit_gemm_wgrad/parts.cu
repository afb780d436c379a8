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
// Lanes have four quads of a row each, of the same threads of the products, so that they store rows of 64 bytes. Blocks
// are small and wait beside those that multiply, so registers are few.
template <class Traits, int SLICES> DEVICE void add_wgrad_parts(const WgradParts &p) {
    using Tile = WgradTile<Traits>;
    // Quads that one thread has of four neighbours of a row; loads that are under way at once.
    constexpr int THREADS = 128, EACH = THREADS / SLICES, ROW = Tile::N / 32, ONCE = 8;
    static_assert(Tile::N % 32 == 0 && Tile::QUADS % EACH == 0 && EACH >= 8);
    __shared__ float4 sums[SLICES > 1 ? SLICES - 1 : 1][EACH];
    const int mine = threadIdx.x % EACH, slice = threadIdx.x / EACH, all = blockIdx.x * EACH + mine,
              tile = all / Tile::QUADS, quad = all - tile * Tile::QUADS;
    const int step = quad / 512, i = step % ROW * 4 + quad / 8 % 4, rest = step / ROW,
              thread = quad / 32 % 16 * 8 + quad % 8, warpgroup = rest / Tile::M_STEPS, m = rest % Tile::M_STEPS;
    const TilePlace<Tile> at(p, tile);
    const QuadPlace<Tile> place(p, at, warpgroup, m, i, thread);
    const long long distance = p.tiles * Tile::QUADS;
    const int begin = (int)p.split_k * slice / SLICES,
              end = place.has_any(p, at) ? (int)p.split_k * (slice + 1) / SLICES : begin;
    const float4 *from = static_cast<const float4 *>(p.parts) + begin * distance + (long long)tile * Tile::QUADS +
                         quad_of<Tile>(warpgroup, m, i, thread);
    float4 sum = make_float4(0, 0, 0, 0);
    begin_dependent();
#pragma unroll 1
    for (int part = begin; part < end; part += ONCE, from += ONCE * distance) {
        float4 v[ONCE];
#pragma unroll
        for (int e = 0; e < ONCE; ++e) v[e] = part + e < end ? from[e * distance] : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int e = 0; e < ONCE; ++e)
            sum = make_float4(sum.x + v[e].x, sum.y + v[e].y, sum.z + v[e].z, sum.w + v[e].w);
    }
    if constexpr (SLICES > 1) {
        if (slice > 0) sums[slice - 1][mine] = sum;
        __syncthreads();
        if (slice > 0) return;
#pragma unroll
        for (int other = 0; other < SLICES - 1; ++other) {
            const float4 v = sums[other][mine];
            sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
    }
    store_quad<Tile>(p, at, place, sum);
}
