// Planes of x in NCHW that TMA does not take as they lie: whole pieces of 8 bytes, but not of 16. A warpgroup copies
// them to rows of 64 pixels of a channel, swizzled as TMA would.
#pragma once

#include "cp_async.cuh"
#include "cta_tile.cuh"

// The pixels of a tile that a thread copies of every channel: V side by side in each block of 64.
template <class Tile> struct Gathered {
    using T = typename Tile::T;
    static constexpr int SIZE = Tile::TRANSPOSED_PIXELS ? Tile::GATHER_BYTES : 0, THREADS = SIZE ? 128 : 0;
    // Pieces of a row, and rows that the warpgroup copies at once.
    static constexpr int V = SIZE ? SIZE / 2 : 1, ACROSS = 64 / V, ROWS = 128 / ACROSS;
    static_assert(Tile::CHUNK_ELEMENTS % ROWS == 0);
    const T *x;
    // Elements from a channel to the next; channels of the group from this thread's first on.
    int plane, channels;
    // Of each piece, -1 where the tile has no pixel.
    int places[Tile::PIXEL_BLOCKS];

    template <class Gemm> DEVICE Gathered(const Gemm &p, int pixel0, int group) {
        if constexpr (SIZE > 0) {
            const int row = thread() / ACROSS;
            plane = (int)p.p * (int)p.q;
            channels = (int)p.group_c - row;
            x = static_cast<const T *>(p.image) + ((long long)group * p.group_c + row) * plane;
#pragma unroll
            for (int block = 0; block < Tile::PIXEL_BLOCKS; ++block) {
                const int at = block * 64 + thread() % ACROSS * V, pixel = pixel0 + at, n = pixel / plane;
                const bool real = at < Tile::TILE_PIXELS && pixel < p.pixels;
                places[block] = real ? n * (int)p.c * plane + pixel - n * plane : -1;
            }
        }
    }
    DEVICE static int thread() { return threadIdx.x - Tile::CONSUMER_THREADS; }

    // A chunk of channels, and this thread's arrival at the barrier when it is there. Channels that the group does not
    // have are zeros, as far as the products of its `last` chunk read them.
    DEVICE void copy(unsigned to, unsigned full, int chunk, bool last) const {
        const int row = thread() / ACROSS, at = thread() % ACROSS * SIZE;
        const int left = channels - chunk * Tile::CHUNK_ELEMENTS,
                  end = (last ? Tile::LAST_CHUNK_STEPS * 16 : Tile::CHUNK_ELEMENTS) - row;
        const T *const from = x + (long long)chunk * Tile::CHUNK_ELEMENTS * plane;
#pragma unroll
        for (int block = 0; block < Tile::PIXEL_BLOCKS; ++block) {
            if (places[block] < 0) continue;
#pragma unroll
            for (int i = 0; i < Tile::CHUNK_ELEMENTS; i += ROWS)
                if (i < end)
                    cp_async<SIZE>(to + block * Tile::BLOCK_BYTES + swizzled<128>(row + i, at),
                                   i < left ? from + places[block] + i * plane : x, i < left);
        }
        arrive_with_copies(full);
    }
};
