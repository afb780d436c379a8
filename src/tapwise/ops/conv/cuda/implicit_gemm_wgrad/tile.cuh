// A tile of dw, and the way of its sums to memory: to dw, or as parts of a split gemm_k to the workspace.
#pragma once

#include "float16.cuh"
#include "shared_memory.cuh"

// What follows from the stub's Traits: the words of wgrad.py's Config in capitals, T the type of x, dy and dw. A tile's
// rows are filters, its columns blocks of 64 channels of a tap, blocks of a tap side by side; or (HALO) one block of
// channels of all taps.
template <class Traits> struct WgradTile : Traits {
    using B = Traits;
    static constexpr int ROW_BLOCKS = B::TILE_FILTERS / 64, COLUMN_BLOCKS = B::TILE_COLUMNS / 64;
    // Warpgroups share the filters where there is a block for each, or else the columns.
    static constexpr int ACROSS = ROW_BLOCKS % B::WARPGROUPS == 0 ? 1 : B::WARPGROUPS,
                         M_STEPS = ROW_BLOCKS * ACROSS / B::WARPGROUPS, N = B::TILE_COLUMNS / ACROSS;
    static constexpr int SUMS = N / 2, CONSUMER_THREADS = 128 * B::WARPGROUPS;
    // A thread's sums of eight columns, two rows by two: quads of a tile.
    static constexpr int QUADS = B::TILE_FILTERS * B::TILE_COLUMNS / 4;
    static_assert(B::TILE_FILTERS % 64 == 0 && B::TILE_COLUMNS % (64 * ACROSS) == 0 && N <= 256);
};

// Pixels of a step, and bytes of a block of 64 channels or filters of them.
constexpr int STEP_PIXELS = 64, BLOCK_BYTES = STEP_PIXELS * 128;

// Where a tile lies: its group, first filter within the group, and first block of columns (HALO: its block of
// channels).
template <class Tile> struct TilePlace {
    int group, filter, block;
    template <class P> DEVICE TilePlace(const P &p, int tile) {
        const int tiles_n = p.tiles_n, tiles_m = p.tiles_m, rest = tile / tiles_n;
        block = (tile - rest * tiles_n) * (Tile::HALO ? 1 : Tile::COLUMN_BLOCKS);
        group = rest / tiles_m;
        filter = (rest - group * tiles_m) * Tile::TILE_FILTERS;
    }
};

// The place of a quad among those of its tile: a warp's lie side by side.
template <class Tile> DEVICE int quad_of(int warpgroup, int m, int i, int thread) {
    return ((warpgroup * Tile::M_STEPS + m) * (Tile::N / 8) + i) * 128 + thread;
}

// A quad's sums to dw (k, r, s, c), where it has such filters and channels: `thread` of the warpgroup, columns of the
// instruction from 8 * i.
template <class Tile, class P>
DEVICE void store_quad(const P &p, const TilePlace<Tile> &at, int warpgroup, int m, int i, int thread, float4 v) {
    using T = typename Tile::T;
    const int row = (Tile::ACROSS == 1 ? warpgroup * Tile::M_STEPS * 64 : 0) + m * 64 + thread / 32 * 16 +
                    thread % 32 / 4,
              column = (Tile::ACROSS == 1 ? 0 : warpgroup * Tile::N) + i * 8 + thread % 4 * 2;
    const int block = at.block + (Tile::HALO ? 0 : column / 64), blocks = p.channel_blocks, channels = p.channels,
              taps = p.taps, filters = p.filters, tap = Tile::HALO ? column / 64 : block / blocks,
              c = (Tile::HALO ? block : block - tap * blocks) * 64 + column % 64;
    if (tap >= taps || c >= channels) return;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
        const int filter = at.filter + row + 8 * high;
        if (filter >= filters) continue;
        const int place = ((at.group * filters + filter) * taps + tap) * channels + c;
        const unsigned pair = high ? Element<T>::pack(v.z, v.w) : Element<T>::pack(v.x, v.y);
        *reinterpret_cast<unsigned *>(static_cast<T *>(p.dw) + place) = pair;
    }
}

// A warpgroup's sums: to dw, or (SPLIT) to this CTA's parts as they lie in registers.
template <class Tile, class P>
DEVICE void store_sums(const P &p, const TilePlace<Tile> &at, int warpgroup,
                       const float (&d)[Tile::M_STEPS][Tile::SUMS]) {
    const int thread = threadIdx.x % 128;
    float4 *const parts = static_cast<float4 *>(p.parts) + (long long)blockIdx.x * Tile::QUADS;
#pragma unroll
    for (int m = 0; m < Tile::M_STEPS; ++m)
#pragma unroll
        for (int i = 0; i < Tile::N / 8; ++i) {
            const float4 quad = make_float4(d[m][4 * i], d[m][4 * i + 1], d[m][4 * i + 2], d[m][4 * i + 3]);
            if constexpr (Tile::SPLIT) parts[quad_of<Tile>(warpgroup, m, i, thread)] = quad;
            else store_quad<Tile>(p, at, warpgroup, m, i, thread, quad);
        }
}
