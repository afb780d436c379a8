// The residual by the copy engine: into the staging parts where sums are then added to it, as soon as what was there before has
// gone to y, so that a tile's first rounds find it there.
#pragma once

#include "finish.cuh"

template <class O>
DEVICE void init_deliveries(unsigned barriers) {
    if constexpr (O::DELIVERED)
        for (int part = 0; part < 2 * O::PARTS; ++part) barrier_init(barriers + part * 8, part / O::STAGINGS % 2 ? 4 : 1);
}

// One warp for each ring brings what the rounds of all tiles need, in their order. `map`: of the residual as windows of 1 x 1;
// pixels are counted in planes of lines of `width`, as the tiles count them. PACED: those of a tile from the middle of its
// products on, so that they do not come with the next tile's x.
template <class O, bool PACED = false>
DEVICE void deliver(const void *map, unsigned staging, unsigned barriers, int filters, int groups, int tiles_f, int first,
                    int tiles, int blocks, int plane, int width) {
    using R = Round<O>;
    wait_for_previous();
    const bool leads = threadIdx.x % 32 == 0;
    const int ring = O::RINGS == 1 ? 0 : threadIdx.x / 32 - O::CONSUMERS / 32 - 1;
    staging += ring * O::STAGINGS * O::STAGING;
    barriers += ring * O::STAGINGS * 16;
    if (!PACED) {
        // The first copies of all are those of x.
        sync_part(5, 160);
        if (!leads) return;
    }
    int slot = 0;
    unsigned phase = 1;
    for (int tile = first; tile < tiles; tile += blocks) {
        const At<O> at(tile, tiles_f, groups);
        if (PACED) {
            __syncwarp();
            sync_part(5, 160 * O::RINGS);
            if (!leads) continue;
        }
        for (int round = 0; round < R::COUNT; ++round) {
            const R now(round);
            const unsigned full = barriers + slot * 8, to = staging + slot * O::STAGING;
            const int filter = at.group * filters + at.filter + now.filter0 + (O::SWAP ? ring * O::FILTERS : 0);
            const int across = (now.filters + O::INNER - 1) / O::INNER;
            barrier_wait(full + O::STAGINGS * 8, phase);
            constexpr int EACH = O::RESIDUAL_BOX;
            barrier_expect(full, (now.pixels + EACH - 1) / EACH * EACH * across * 128);
#pragma unroll(O::RINGS == 1 ? 4 : 1)
            for (int line = 0; line < now.pixels; line += EACH) {
                const int pixel = at.pixel + now.pixel0 + (O::SWAP ? 0 : ring * O::PIXELS) + line;
                const int n = pixel / plane, rest = pixel - n * plane, h = rest / width;
                for (int a = 0; a < across; ++a)
                    copy_pixels_once(to + (a * 64 + line) * 128, map, full, filter + a * O::INNER, rest - h * width, h, n);
            }
            advance<O::STAGINGS>(slot, phase);
        }
    }
}
