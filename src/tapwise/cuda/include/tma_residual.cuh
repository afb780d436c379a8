// TMA residual load: into the epilogue buffers where sums are then added to it, as soon as what was there before has
// gone to y, so that a tile's first rounds find it there.
#pragma once

#include "epilogue.cuh"

template <class Tile> DEVICE void init_residual_barriers(unsigned barriers) {
    if constexpr (Tile::TMA_RESIDUAL)
        for (int slot = 0; slot < 2 * Tile::BUFFERS; ++slot)
            barrier_init(barriers + slot * 8, slot / Tile::EPILOGUE_BUFFERS % 2 ? 4 : 1);
}

// One warp brings what the rounds of all tiles need, in their order. `map`: of the residual as windows of 1 x 1; pixels
// are counted in planes of rows of `width`, as the tiles count them.
template <class Tile>
DEVICE void residual_producer(const void *map, unsigned buffers, unsigned barriers, int filters, int groups,
                              int tiles_f, int tiles, int plane, int width) {
    using R = Round<Tile>;
    constexpr int EACH = Tile::RESIDUAL_PIXELS;
    wait_for_previous();
    // The first copies of all are those of x.
    sync_part(FIRST_COPIES, 160);
    if (threadIdx.x % 32 != 0) return;
    int slot = 0;
    unsigned phase = 1;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const TileOrigin<Tile> at(tile, tiles_f, groups);
        for (int round = 0; round < R::COUNT; ++round) {
            const R now(round);
            const unsigned full = barriers + slot * 8, to = buffers + slot * Tile::BUFFER_BYTES;
            const int filter = at.group * filters + at.filter + now.filter0;
            const int across = (now.filters + Tile::BUFFER_ROW - 1) / Tile::BUFFER_ROW;
            barrier_wait(full + Tile::EPILOGUE_BUFFERS * 8, phase);
            barrier_expect(full, (now.pixels + EACH - 1) / EACH * EACH * across * 128);
#pragma unroll(4)
            for (int row = 0; row < now.pixels; row += EACH) {
                const int pixel = at.pixel + now.pixel0 + row;
                const int n = pixel / plane, rest = pixel - n * plane, h = rest / width;
                for (int a = 0; a < across; ++a)
                    copy_pixels_once(to + (a * 64 + row) * 128, map, full, filter + a * Tile::BUFFER_ROW,
                                     rest - h * width, h, n);
            }
            advance<Tile::EPILOGUE_BUFFERS>(slot, phase);
        }
    }
}
