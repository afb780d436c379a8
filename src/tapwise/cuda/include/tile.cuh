// What the tensor cores' tiles share: their sizes, copies and products.
#pragma once

#include "hopper.cuh"
#include "narrow.cuh"

// Barriers of parts of a block (sync_part): 1 and 2 of a warpgroup; 3 and 4, whose turn it is at the ring of residuals; 5, the
// first copies of x are there, or half of a tile's products; 6 and 7, whose turn it is at the tensor cores.

// A block computes tiles of BP pixels x BF filters. The matrix instruction's rows, 64 a step, are pixels or (SWAP) filters,
// its columns the others. WARPGROUPS share a tile's rows, or (PINGPONG) take whole tiles in turns. SPLIT blocks of a cluster
// share gemm_k. SPAN: bytes of a line of channels in shared memory. BUNDLE: groups that share a line, each with its own
// filters. LAST: steps of 32 bytes of a tap's last chunk of channels. FIVE: the map of x has a fifth axis, for groups or
// parts. V elements of y are written at once. BOXES: the copy engine writes y, all of it (2) or 64 filters at a time (1).
// ORDER filters side by side were turned for the threads that write them from registers; 0: sums pass shared memory.
// RESIDUAL: none (0), brought by threads (1) or by the copy engine (2).
template <typename T_, bool SWAP_, int BP_, int BF_, int WARPGROUPS_, bool PINGPONG_, int STAGES_, int SPLIT_, int SPAN_,
          int BUNDLE_, int LAST_, bool FIVE_, int V_, int BOXES_, int STAGINGS_, int ORDER_, bool NCHW_, bool BIAS_,
          int RESIDUAL_, int ACTIVATION_>
struct Tile {
    using T = T_;
    static constexpr bool SWAP = SWAP_, PINGPONG = PINGPONG_, FIVE = FIVE_, NCHW = NCHW_, BIAS = BIAS_,
                          RESIDUAL = RESIDUAL_ > 0;
    static constexpr int BP = BP_, BF = BF_, WARPGROUPS = WARPGROUPS_, STAGES = STAGES_, SPLIT = SPLIT_, SPAN = SPAN_,
                         BUNDLE = BUNDLE_, LAST = LAST_, V = V_, BOXES = BOXES_, ORDER = ORDER_;
    static constexpr int ACTIVATION = ACTIVATION_;
    static constexpr int ROWS = SWAP ? BF : BP, COLUMNS = SWAP ? BP : BF;
    // Of one warpgroup: steps of 64 rows, pixels and filters.
    static constexpr int STEPS = ROWS / 64 / (PINGPONG ? 1 : WARPGROUPS);
    static constexpr int PIXELS = SWAP ? COLUMNS : 64 * STEPS, FILTERS = SWAP ? 64 * STEPS : COLUMNS;
    static constexpr int ELEMENTS = SPAN / (int)sizeof(T), WHOLE = SPAN / 32;
    // Lines of filters have their own group's channels.
    static constexpr int FILTER_SPAN = SPAN / BUNDLE, ROW_SPAN = SWAP ? FILTER_SPAN : SPAN,
                         COLUMN_SPAN = SWAP ? SPAN : FILTER_SPAN;
    static constexpr int CONSUMERS = 128 * WARPGROUPS;
    // With two warpgroups a third one copies, and leaves them registers.
    static constexpr bool SHARES = WARPGROUPS == 2;
    // Groups of matrix instructions under way: one where the warpgroups take turns at the tensor cores by themselves.
    static constexpr int FLIGHT = PINGPONG || WARPGROUPS == 1 ? 2 : 1;
    // The parts of shared memory through which 64 x 64 sums go to y, in lines of 128 bytes along y's inner axis, which are the
    // instruction's rows or its columns. There are two where one may still be on its way, or one for each round of a tile.
    static constexpr bool TURNED = SWAP != NCHW;
    // The copy engine brings the residual there, or threads, in pieces that can be copied asynchronously.
    static constexpr bool DELIVERED = RESIDUAL_ == 2;
    static constexpr bool FETCHED = RESIDUAL_ == 1 && SPLIT == 1 && ORDER == 0 && V * sizeof(T) >= 4;
    // The residual is there before the products, which are added to it.
    static constexpr bool BEGUN = RESIDUAL && ORDER > 0;
    static constexpr int INNER = 128 / (int)sizeof(T), STAGING = 64 * 64 * (int)sizeof(T), STAGINGS = STAGINGS_;
    // Each warpgroup has STAGINGS parts, or two in turns share a ring of them, which the copy engine fills in the order of
    // tiles.
    static constexpr int RINGS = DELIVERED && PINGPONG ? 1 : WARPGROUPS, PARTS = RINGS * STAGINGS;
    // Pixels of one box: all tiles are whole boxes. Of the residual some pixels more may come.
    static constexpr int BOX = !SWAP || BP % 64 == 0 ? 64 : BP % 32 == 0 ? 32 : BP % 16 == 0 ? 16 : 8;
    static constexpr int RESIDUAL_BOX = BOX > 32 ? BOX : 32;
    // Split sums: a block adds up EACH of the instruction's rows, which all send it.
    static constexpr int EACH = ROWS / SPLIT;
    static_assert(ROWS % 64 == 0 && STEPS >= 1 && COLUMNS % 8 == 0 && COLUMNS <= 256 && COLUMNS == WGMMA_N * BUNDLE);
    static_assert(BUNDLE == 1 || (!SWAP && LAST == WHOLE));
    static_assert(!PINGPONG || (WARPGROUPS == 2 && SPLIT == 1));
    static_assert(SPLIT == 1 || (EACH % 8 == 0 && WARPGROUPS == 1));
    static_assert(!DELIVERED || (WARPGROUPS == 2 && SPLIT == 1 && ORDER == 0 && !NCHW));
    static_assert(ORDER || STAGINGS >= (FETCHED || DELIVERED || (BOXES && sizeof(T) == 2) ? 2 : 1));
    static_assert(ORDER == 0 || (BOXES == 0 && SPLIT == 1 && !NCHW && !SWAP && WGMMA_N % ORDER == 0));
    static_assert(!BOXES || (SPLIT == 1 && !NCHW && V * sizeof(T) == 16));
};

// Which outputs a tile has: filters run fastest, then groups, then pixels, so that blocks beside each other share pixels.
template <class O>
struct At {
    int filter, group, pixel;
    DEVICE At(int tile, int tiles_f, int groups) {
        const int rest = tile / tiles_f;
        filter = (tile - rest * tiles_f) * O::BF;
        group = rest % groups;
        pixel = rest / groups * O::BP;
    }
};

// The products of K steps of 32 bytes; `add` to what the sums hold, or else they begin.
template <class O, int K>
DEVICE void multiply(float (&d)[O::STEPS][O::COLUMNS / 2], unsigned rows, unsigned columns, bool add) {
    const unsigned long long a = descriptor<O::ROW_SPAN>(rows), b = descriptor<O::COLUMN_SPAN>(columns);
    // Steps of a group; its products go to its own columns.
    constexpr int EACH = K / O::BUNDLE, SUMS = WGMMA_N / 2;
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int m = 0; m < O::STEPS; ++m) {
            const int group = k / EACH, step = k % EACH;
            float (&sums)[SUMS] = reinterpret_cast<float (&)[SUMS]>(d[m][group * SUMS]);
            wgmma(sums, a + m * 4 * O::ROW_SPAN + k * 2, b + group * (WGMMA_N * O::COLUMN_SPAN / 16) + step * 2,
                  add || step > 0);
        }
}

// Three products of parts, where there are: large by large, large by small, small by large. The part of x that a chunk takes,
// and the chunk within it.
DEVICE int second_part(int chunk, int part) { return chunk >= 2 * part; }
DEVICE int chunk_of_part(int chunk, int part) {
    return chunk >= 2 * part ? chunk - 2 * part : chunk >= part ? chunk - part : chunk;
}

// One chunk of channels of x, for all lines of a copy.
template <class O>
DEVICE void copy_chunk(unsigned to, const void *map, unsigned barrier, int chunk, int part, int groups, int w, int h, int n,
                       int group, int tap_w, int tap_h) {
    if constexpr (O::FIVE) {
        const int c = chunk_of_part(chunk, part) * O::ELEMENTS;
        copy_pixels(to, map, barrier, c, w, h, n, group + second_part(chunk, part) * groups, tap_w, tap_h);
    } else {
        copy_pixels(to, map, barrier, chunk * O::ELEMENTS, w, h, n, tap_w, tap_h);
    }
}

// The next of COUNT slots of a ring; `phase` turns over with it.
template <int COUNT>
DEVICE void advance(int &slot, unsigned &phase, int by = 1) {
    slot += by;
    if (by == 1 ? slot == COUNT : slot >= COUNT) {
        phase ^= slot / COUNT & 1;
        slot %= COUNT;
    }
}
template <int COUNT>
DEVICE int before(int slot, int by) {
    return slot < by ? slot - by + COUNT : slot - by;
}
