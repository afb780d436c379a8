// What the tensor cores' tiles share: their sizes, copies and products.
#pragma once

#include "float16.cuh"
#include "hopper.cuh"
#include "ring.cuh"

// Named barriers of parts of a CTA (sync_part, arrive_part).
enum NamedBarrier {
    // One warpgroup's own: this one and the next.
    WARPGROUP_BARRIER = 1,
    // Whose turn it is at the residual's ring of epilogue buffers, one a warpgroup.
    RESIDUAL_TURN = 3,
    // The first copies of x are there.
    FIRST_COPIES = 5,
    // Whose turn it is at the tensor cores (ping-pong), one a warpgroup.
    MMA_TURN = 6,
    // A team's planes went to their places (shifted_planes.cuh), one a team.
    PLANES_MOVED = 8,
};

// What follows from the stub's Traits: the words of implicit_gemm's config.py, view.py and epilogue.py in capitals, T
// the type of x, w and y. The matrix instruction's M, 64 a step, is pixels or (SWAP_AB) filters. GROUP_AXIS: the tensor
// map of x has a fifth axis, for groups or the parts of 3xtf32. STRIDED: y's rows and columns lie a stride apart.
// TRANSPOSED_FILTERS: they are channels of fprop's (k, r, s, c), read as they lie, in blocks of 64 side by side.
// TRANSPOSED_PIXELS: x in NCHW is read as it lies, 64 pixels side by side; a warpgroup copies them in pieces of
// GATHER_BYTES, or else (PLANES) TMA does, and a tile has pixels of one plane.
// INDEPENDENT of the launch before.
template <class Traits> struct CtaTile : Traits {
    using typename Traits::T;
    using B = Traits;
    static constexpr int TILE_M = B::SWAP_AB ? B::TILE_FILTERS : B::TILE_PIXELS,
                         TILE_N = B::SWAP_AB ? B::TILE_PIXELS : B::TILE_FILTERS;
    // Of one warpgroup: steps of 64 rows, pixels and filters.
    static constexpr int M_STEPS = TILE_M / 64 / (B::PING_PONG ? 1 : B::WARPGROUPS);
    static constexpr int WARPGROUP_PIXELS = B::SWAP_AB ? TILE_N : 64 * M_STEPS,
                         WARPGROUP_FILTERS = B::SWAP_AB ? 64 * M_STEPS : TILE_N;
    static constexpr int CHUNK_ELEMENTS = B::CHUNK_BYTES / (int)sizeof(T), CHUNK_STEPS = B::CHUNK_BYTES / 32;
    // Filters' rows have their own group's channels alone.
    static constexpr int FILTER_ROW_BYTES = B::CHUNK_BYTES / B::GROUPS_PER_TILE,
                         A_ROW_BYTES = B::SWAP_AB ? FILTER_ROW_BYTES : B::CHUNK_BYTES,
                         B_ROW_BYTES = B::SWAP_AB ? B::CHUNK_BYTES : FILTER_ROW_BYTES;
    // Operands that lie across gemm_k.
    static constexpr bool A_LIES = B::SWAP_AB ? B::TRANSPOSED_FILTERS : B::TRANSPOSED_PIXELS,
                          B_LIES = B::SWAP_AB ? B::TRANSPOSED_PIXELS : B::TRANSPOSED_FILTERS;
    // A chunk of 64 filters or pixels side by side; of all of a tile's; 64 rows of the instruction.
    static constexpr int BLOCK_BYTES = CHUNK_ELEMENTS * 128, PIXEL_BLOCKS = (B::TILE_PIXELS + 63) / 64,
                         PIXEL_BYTES =
                             B::TRANSPOSED_PIXELS ? PIXEL_BLOCKS * BLOCK_BYTES : B::TILE_PIXELS * B::CHUNK_BYTES,
                         FILTER_BYTES = B::TRANSPOSED_FILTERS ? (B::TILE_FILTERS + 63) / 64 * BLOCK_BYTES
                                                              : B::TILE_FILTERS * FILTER_ROW_BYTES,
                         A_BLOCK_BYTES = A_LIES ? BLOCK_BYTES : 64 * A_ROW_BYTES;
    static constexpr bool PLANES = B::TRANSPOSED_PIXELS && B::GATHER_BYTES == 0;
    // Pixels of a tile's last block of planes, where it is not whole.
    static constexpr int LAST_PIXELS = PLANES ? B::TILE_PIXELS % 64 : 0;
    // Copies of a tap's last chunk of channels are boxes of fewer bytes, in rows as long as others'. Of a single chunk
    // a step of the instruction may see what no copy brings: zeros.
    static constexpr bool NARROW = B::LAST_CHUNK_BYTES < B::CHUNK_BYTES, ZEROED = B::LAST_CHUNK_BYTES % 32 > 0;
    static constexpr int LAST_PIXEL_BYTES = NARROW ? B::TILE_PIXELS * B::LAST_CHUNK_BYTES : PIXEL_BYTES,
                         LAST_FILTER_BYTES = NARROW && B::TRANSPOSED_FILTERS
                                                 ? FILTER_BYTES / CHUNK_STEPS * B::LAST_CHUNK_STEPS
                                                 : FILTER_BYTES;
    static_assert(!NARROW || (B::GROUPS_PER_TILE == 1 && !B::TRANSPOSED_PIXELS && B::GATHER_BYTES == 0));
    // A cluster's CTAs, which share gemm_k or filters; of these (shared_copies.cuh) pixels are rows.
    static constexpr int CLUSTER_K = 1, CLUSTER_M = B::SHARE_FILTERS, CLUSTER_N = 1, CTAS = B::SPLIT_K * CLUSTER_M;
    static constexpr int CONSUMER_THREADS = 128 * B::WARPGROUPS;
    // Beside two warpgroups a third one copies, and leaves them registers.
    static constexpr bool PRODUCER_WARPGROUP = B::WARPGROUPS == 2;
    // Groups of matrix instructions under way: one where two warpgroups keep the tensor cores busy on one tile.
    static constexpr int IN_FLIGHT = B::PING_PONG || B::WARPGROUPS == 1 ? 2 : 1;
    // Epilogue buffers have rows of 128 bytes along y's inner axis, which is the instruction's M or its N (TRANSPOSED).
    static constexpr bool TRANSPOSED = B::SWAP_AB != B::NCHW;
    // The table of the pixels' places in y, and what output_runs.cuh has behind it.
    static constexpr int RUN_WORDS = WARPGROUP_PIXELS + B::RUNS * B::RUN_VECTOR + (WARPGROUP_PIXELS + 63) / 64 + 2,
                         PLACE_WORDS = WARPGROUP_PIXELS + (B::RUN_VECTOR ? (RUN_WORDS + 1) / 2 * 2 : 0);
    // Threads bring the residual to the epilogue buffers, in pieces that can be copied asynchronously.
    static constexpr bool ASYNC_RESIDUAL = B::RESIDUAL && !B::TMA_RESIDUAL && B::SPLIT_K == 1 && B::PERMUTED_N == 0 &&
                                           B::VECTOR * sizeof(T) >= 4 && B::RUN_VECTOR == 0;
    // The accumulator starts from the residual.
    static constexpr bool RESIDUAL_AS_C = B::RESIDUAL && B::PERMUTED_N > 0;
    static constexpr int BUFFER_ROW = 128 / (int)sizeof(T), BUFFER_BYTES = 64 * 64 * (int)sizeof(T);
    // Where TMA brings the residual, two warpgroups in turns share a ring of buffers, filled in the order of tiles.
    static constexpr int BUFFERS = (B::TMA_RESIDUAL ? 1 : B::WARPGROUPS) * B::EPILOGUE_BUFFERS;
    // Columns of a tile's last store by TMA, where they are fewer than others' (epilogue.py: last_stored).
    static constexpr int LAST_STORED = TILE_N % (TRANSPOSED ? 64 : BUFFER_ROW);
    // Pixels of a copy of the residual: some more than the tile has may come.
    static constexpr int RESIDUAL_PIXELS = !B::SWAP_AB || B::TILE_PIXELS % 64 == 0 ? 64 : 32;
    // Rows of the instruction that a CTA of a cluster adds up; all send them to it.
    static constexpr int SPLIT_M = TILE_M / B::SPLIT_K;
    static_assert(TILE_M % 64 == 0 && M_STEPS >= 1 && TILE_N % 8 == 0 && TILE_N <= 256);
    static_assert(TILE_N == WGMMA_N * B::GROUPS_PER_TILE);
    static_assert(B::GROUPS_PER_TILE == 1 || (!B::SWAP_AB && B::LAST_CHUNK_STEPS == CHUNK_STEPS));
    static_assert(!B::PING_PONG || (B::WARPGROUPS == 2 && B::SPLIT_K == 1));
    static_assert(CLUSTER_M == 1 ||
                  (B::SPLIT_K == 1 && !B::FILTER_STATIONARY && !B::GROUP_AXIS && !B::TRANSPOSED_PIXELS && !B::STRIDED));
    static_assert(B::SPLIT_K == 1 || (SPLIT_M % 8 == 0 && B::WARPGROUPS == 1));
    static_assert(!B::TMA_RESIDUAL || (B::RESIDUAL && B::PING_PONG && B::PERMUTED_N == 0 && !B::NCHW));
    static_assert(B::PERMUTED_N || B::EPILOGUE_BUFFERS >=
                                       (ASYNC_RESIDUAL || B::TMA_RESIDUAL || (B::TMA_STORE && sizeof(T) == 2) ? 2 : 1));
    static_assert(B::PERMUTED_N == 0 ||
                  (!B::TMA_STORE && B::SPLIT_K == 1 && !B::NCHW && !B::SWAP_AB && WGMMA_N % B::PERMUTED_N == 0));
    static_assert(!B::RUN_VECTOR || (B::NCHW && B::SPLIT_K == 1));
    static_assert(!B::STRIDED || (!B::NCHW && !B::RESIDUAL));
    static_assert(!B::TRANSPOSED_FILTERS || (sizeof(T) == 2 && B::GROUPS_PER_TILE == 1 && B::PERMUTED_N == 0));
    static_assert(!B::TRANSPOSED_PIXELS || (B::NCHW && sizeof(T) == 2 && B::GROUPS_PER_TILE == 1));
    static_assert(!B::TMA_STORE || (B::SPLIT_K == 1 && B::VECTOR * sizeof(T) == 16));
};

// A tile's first outputs: filters run fastest, then groups, then pixels, so that CTAs beside each other share pixels.
template <class Tile> struct TileOrigin {
    int filter, group, pixel;
    DEVICE TileOrigin(int tile, int tiles_f, int groups) {
        const int rest = tile / tiles_f;
        filter = (tile - rest * tiles_f) * Tile::TILE_FILTERS;
        group = rest % groups;
        pixel = rest / groups * Tile::TILE_PIXELS;
    }
};

// The products of K steps of 32 bytes, those in front of BEGIN left out; `add` to what the sums hold, or else they
// begin.
template <class Tile, int K, int BEGIN = 0>
DEVICE void multiply(float (&d)[Tile::M_STEPS][Tile::TILE_N / 2], unsigned rows, unsigned columns, bool add) {
    // Distances in words of 16 bytes: of a step, and of 64 rows.
    constexpr int A_STEP = Tile::A_LIES ? 128 : 2, B_STEP = Tile::B_LIES ? 128 : 2, A_ROWS = Tile::A_BLOCK_BYTES / 16;
    const unsigned long long a = Tile::A_LIES ? transposed_descriptor<128>(rows, Tile::BLOCK_BYTES)
                                              : descriptor<Tile::A_ROW_BYTES>(rows),
                             b = Tile::B_LIES ? transposed_descriptor<128>(columns, Tile::BLOCK_BYTES)
                                              : descriptor<Tile::B_ROW_BYTES>(columns);
    // Steps of a group; its products go to its own columns.
    constexpr int EACH = K / Tile::GROUPS_PER_TILE, SUMS = WGMMA_N / 2;
#pragma unroll
    for (int k = BEGIN; k < K; ++k)
#pragma unroll
        for (int m = 0; m < Tile::M_STEPS; ++m) {
            const int group = k / EACH, step = k % EACH;
            float (&sums)[SUMS] = reinterpret_cast<float (&)[SUMS]>(d[m][group * SUMS]);
            wgmma(sums, a + m * A_ROWS + k * A_STEP, b + group * (WGMMA_N * Tile::B_ROW_BYTES / 16) + step * B_STEP,
                  add || step > BEGIN);
        }
}

// The same of joined pixels of one chunk: the first column of taps is zero up to step FIRST_TAP_BEGIN, the last one
// from LAST_TAP_STEPS on.
template <class Tile>
DEVICE void multiply_partly(float (&d)[Tile::M_STEPS][Tile::TILE_N / 2], unsigned rows, unsigned columns, bool add,
                            bool first_column, bool last_column) {
    if (first_column) multiply<Tile, Tile::LAST_CHUNK_STEPS, Tile::FIRST_TAP_BEGIN>(d, rows, columns, add);
    else if (last_column) multiply<Tile, Tile::LAST_TAP_STEPS>(d, rows, columns, add);
    else multiply<Tile, Tile::LAST_CHUNK_STEPS>(d, rows, columns, add);
}

// Three products of parts, where there are: large by large, large by small, small by large. The part of x that a chunk
// takes, and the chunk within it.
DEVICE int second_part(int chunk, int part) { return chunk >= 2 * part; }
DEVICE int chunk_of_part(int chunk, int part) {
    return chunk >= 2 * part ? chunk - 2 * part : chunk >= part ? chunk - part : chunk;
}

// Whether copies of a chunk have boxes of their own.
template <class Tile> DEVICE bool is_narrow(int chunk, int part) {
    return Tile::NARROW && chunk_of_part(chunk, part) + 1 == part;
}

// What begins as zeros, as no copy brings all that is multiplied.
DEVICE void zero_shared(unsigned from, unsigned to) {
    for (unsigned at = from + threadIdx.x * 16; at < to; at += blockDim.x * 16) store_shared<16>(at, Piece<16>{});
    publish_shared();
}

// One chunk of channels of x, for all pixels of a copy.
template <class Tile>
DEVICE void copy_chunk(unsigned to, const void *map, unsigned barrier, int chunk, int part, int groups, int w, int h,
                       int n, int group, int tap_w, int tap_h) {
    if constexpr (Tile::GROUP_AXIS) {
        const int c = chunk_of_part(chunk, part) * Tile::CHUNK_ELEMENTS;
        copy_pixels(to, map, barrier, c, w, h, n, group + second_part(chunk, part) * groups, tap_w, tap_h);
    } else {
        copy_pixels(to, map, barrier, chunk * Tile::CHUNK_ELEMENTS, w, h, n, tap_w, tap_h);
    }
}

// One chunk of the filters of a tile, of tap (r, s), to the CTAs `with` that share them.
template <class Tile, class Gemm>
DEVICE void copy_tile_filters(const Gemm &p, unsigned to, unsigned barrier, int chunk, int r, int s, int taps_w,
                              int group, int filter, unsigned short with = 1) {
    const int at = chunk * Tile::CHUNK_ELEMENTS;
    if constexpr (Tile::TRANSPOSED_FILTERS) {
        const int w = (int)p.first_s + s * (int)p.step_s, h = (int)p.first_r + r * (int)p.step_r;
        const void *const map = is_narrow<Tile>(chunk, p.part_chunks) ? p.w_last : p.w;
#pragma unroll
        for (int i = 0; i < Tile::FILTER_BYTES / Tile::BLOCK_BYTES; ++i) {
            const unsigned block = to + i * Tile::BLOCK_BYTES;
            if constexpr (Tile::GROUP_AXIS) copy_box(block, map, barrier, filter + i * 64, w, h, at, group);
            else copy_shared_box<Tile::CLUSTER_M>(block, map, barrier, filter + i * 64, w, h, at, with);
        }
    } else {
        copy_shared_filters<Tile::CLUSTER_M>(to, p.w, barrier, at, r * taps_w + s, group * (int)p.filters + filter,
                                             with);
    }
}
