// A tile of dw, and the way of its sums to memory: to dw, or as parts of a split gemm_k to the workspace.
#pragma once

#include "float16.cuh"
#include "grid.cuh"
#include "shared_copies.cuh"

// Pixels of a step, and bytes of a block of 64 filters of them.
constexpr int STEP_PIXELS = 64, BLOCK_BYTES = STEP_PIXELS * 128;

// What follows from the stub's Traits: the words of config.py's Config in capitals, T the type of x, dy and dw. A
// tile's rows are filters, its columns blocks of BLOCK_CHANNELS of a tap, blocks of a tap side by side; or (HALO) one
// block of channels of a row of taps or of all. SETS: of groups that share tiles; WHOLE: all sums of all tiles are
// dw's; NCHW: dw is (k, c, tap), else (k, tap, c), and PAIRS: it has an even number of channels.
template <class Traits> struct WgradTile : Traits {
    using B = Traits;
    static constexpr int ROW_BLOCKS = B::TILE_FILTERS / 64, COLUMN_BLOCKS = B::TILE_COLUMNS / B::BLOCK_CHANNELS;
    // Warpgroups share the filters where there is a block for each, or else the columns.
    static constexpr int ACROSS = ROW_BLOCKS % B::WARPGROUPS == 0 ? 1 : B::WARPGROUPS,
                         M_STEPS = ROW_BLOCKS * ACROSS / B::WARPGROUPS, N = B::TILE_COLUMNS / ACROSS;
    // Of a block of channels: bytes of a pixel, and of a step.
    static constexpr int SPAN = B::BLOCK_CHANNELS * 2, X_BYTES = STEP_PIXELS * SPAN;
    static constexpr int SUMS = N / 2, CONSUMER_THREADS = 128 * B::WARPGROUPS;
    // A thread's sums of eight columns, two rows by two: quads of a tile.
    static constexpr int QUADS = B::TILE_FILTERS * B::TILE_COLUMNS / 4;
    // Of a thread, and what each CTA of a cluster adds of them.
    static constexpr int THREAD_QUADS = M_STEPS * N / 8, SHARE = THREAD_QUADS / B::CLUSTER_K;
    static_assert(THREAD_QUADS % B::CLUSTER_K == 0);
    // CTAs of a cluster.
    static constexpr int CTAS = B::CLUSTER_K * B::CLUSTER_M * B::CLUSTER_N;
    static_assert(B::CLUSTER_M * B::CLUSTER_N == 1 || (B::CLUSTER_K > 1 && !B::HALO));
    // Where operands were, before barriers.
    static constexpr unsigned SUM_BYTES = B::CLUSTER_K > 1 ? QUADS * 16 : 0;
    static_assert(B::TILE_FILTERS % 64 == 0 && B::TILE_COLUMNS % (B::BLOCK_CHANNELS * ACROSS) == 0 && N <= 256);
};

// Where a step's first pixel lies among rows of images, and how far it is to the next step's: no step divides.
struct PixelWalk {
    int n, row, column;
    DEVICE PixelWalk(int pixel, int high, int wide) : high(high), wide(wide) {
        const Place at(pixel, high, wide), step(STEP_PIXELS, high, wide);
        n = at.n, row = at.row, column = at.column;
        images = step.n, rows = step.row, columns = step.column;
    }
    DEVICE void advance() {
        column += columns;
        row += rows;
        n += images;
        if (column >= wide) column -= wide, ++row;
        if (row >= high) row -= high, ++n;
    }

private:
    struct Place {
        int n, row, column;
        DEVICE Place(int pixel, int high, int wide) {
            const int plane = high * wide, rest = pixel % plane;
            n = pixel / plane, row = rest / wide, column = rest % wide;
        }
    };
    int high, wide, images, rows, columns;
};

// Bytes of a step's copy of the last block of channels and of filters: boxes that end with them, as TMA takes up to
// four times as long for those that reach beyond. What lies behind goes to sums that nobody reads.
struct LastBlocks {
    int filters, x, dy;
    template <class P>
    DEVICE explicit LastBlocks(const P &p) : filters(p.filters), x(p.last_x_bytes), dy(p.last_dy_bytes) {}
    // Whether the 64 from `filter` on are such a block.
    DEVICE bool of_dy(int filter) const { return dy < BLOCK_BYTES && filter < filters && filter + 64 > filters; }
};

// Where a tile lies: its set of groups, first filter within the set, and first block of columns (HALO: its block of
// channels, and first tap).
template <class Tile> struct TilePlace {
    int set, filter, block, tap = 0;
    template <class P> DEVICE TilePlace(const P &p, int tile) {
        const int tiles_n = p.tiles_n, tiles_m = p.tiles_m, rest = tile / tiles_n;
        block = (tile - rest * tiles_n) * (Tile::HALO ? 1 : Tile::COLUMN_BLOCKS);
        if constexpr (Tile::HALO) {
            const int row = block / (int)p.channel_blocks;
            block -= row * (int)p.channel_blocks;
            tap = row * Tile::COLUMN_BLOCKS;
        }
        set = rest / tiles_m;
        filter = (rest - set * tiles_m) * Tile::TILE_FILTERS;
    }
};

// The place of a quad among those of its tile: a warp's lie side by side.
template <class Tile> DEVICE int quad_of(int warpgroup, int m, int i, int thread) {
    return ((warpgroup * Tile::M_STEPS + m) * (Tile::N / 8) + i) * 128 + thread;
}

// What a quad is of: `thread` of the warpgroup, columns of the instruction from 8 * i. Filters of its set, the second 8
// on; tap; the first of two channels of the set.
template <class Tile> struct QuadPlace {
    int filter, tap, c;
    template <class P>
    DEVICE QuadPlace(const P &p, const TilePlace<Tile> &at, int warpgroup, int m, int i, int thread) {
        const int row = (Tile::ACROSS == 1 ? warpgroup * Tile::M_STEPS * 64 : 0) + m * 64 + thread / 32 * 16 +
                        thread % 32 / 4,
                  column = (Tile::ACROSS == 1 ? 0 : warpgroup * Tile::N) + i * 8 + thread % 4 * 2;
        constexpr int WIDE = Tile::BLOCK_CHANNELS;
        const int block = at.block + (Tile::HALO ? 0 : column / WIDE), blocks = p.channel_blocks;
        filter = at.filter + row;
        tap = Tile::HALO ? at.tap + column / WIDE : block / blocks;
        c = (Tile::HALO ? block : block - tap * blocks) * WIDE + column % WIDE;
    }
    // The first channel within the group of filter `f`: of a set's channels only those of its own group are kept.
    template <class P> DEVICE int channel(const P &p, int f) const {
        return Tile::SETS ? c - f / (int)p.group_k * (int)p.group_c : c;
    }
    // Whether dw has the filter and one of the channels.
    template <class P> DEVICE bool has(const P &p, const TilePlace<Tile> &at, int f) const {
        if constexpr (Tile::WHOLE) return true;
        const int first = channel(p, f), filters = p.filters;
        const bool real = f < filters && (!Tile::SETS || at.set * filters + f < (int)p.k);
        return real && tap < (int)p.taps && first < (int)p.group_c && (!Tile::SETS || first > -2);
    }
    template <class P> DEVICE bool has_any(const P &p, const TilePlace<Tile> &at) const {
        return has(p, at, filter) || has(p, at, filter + 8);
    }
};

// Two sums of neighbouring channels to dw: of filter k, from `channel` of its group on; what is no channel of that
// group is dropped. dw is (k, tap, c) or (NCHW) (k, c, tap); taps that were packed as channels lie side by side in
// both.
template <class Tile, class P> DEVICE void store_two(const P &p, int k, int tap, int channel, float low, float high) {
    using T = typename Tile::T;
    const int channels = p.group_c, taps = p.taps;
    T *const dw = static_cast<T *>(p.dw) + k * (taps * channels);
    if constexpr (Tile::VECTOR > 1) {
        if ((unsigned)channel < (unsigned)channels)
            *reinterpret_cast<unsigned *>(dw + tap * channels + channel) = Element<T>::pack(low, high);
    } else {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int at = channel + e;
            if ((unsigned)at >= (unsigned)channels) continue;
            int place = tap * channels + at;
            if constexpr (Tile::NCHW) {
                const int dw_c = p.dw_c, beside = at / dw_c;
                place = (at - beside * dw_c) * (int)p.dw_taps + tap * (channels / dw_c) + beside;
            }
            dw[place] = Element<T>::from_float(e ? high : low);
        }
    }
}

// A quad's sums to dw, as far as it has such filters and channels.
template <class Tile, class P>
DEVICE void store_quad(const P &p, const TilePlace<Tile> &at, const QuadPlace<Tile> &place, float4 v) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
        const int f = place.filter + 8 * high;
        if (!place.has(p, at, f)) continue;
        store_two<Tile>(p, at.set * (int)p.filters + f, place.tap, place.channel(p, f), high ? v.z : v.x,
                        high ? v.w : v.y);
    }
}

// Sums of four times eight columns to dw: lanes of a row exchange them, and each stores eight channels. Two at a time,
// a row's sectors would be written by halves.
template <class Tile, class P>
DEVICE void store_eights(const P &p, const TilePlace<Tile> &at, int warpgroup, int m, int i, int thread,
                         const float *d) {
    using T = typename Tile::T;
    const int lane = thread % 4, channels = p.group_c, taps = p.taps;
    const QuadPlace<Tile> place(p, at, warpgroup, m, i + lane, thread - lane);
#pragma unroll
    for (int high = 0; high < 2; ++high) {
        unsigned v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = Element<T>::pack(d[4 * j + 2 * high], d[4 * j + 2 * high + 1]);
        // v[j] of lane l to v[l] of lane j.
#pragma unroll
        for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (j & bit) continue;
                const unsigned other = __shfl_xor_sync(~0u, lane & bit ? v[j] : v[j + bit], bit);
                (lane & bit ? v[j] : v[j + bit]) = other;
            }
        const int f = place.filter + 8 * high;
        if (!place.has(p, at, f)) continue;
        T *const dw = static_cast<T *>(p.dw) + (at.set * (int)p.filters + f) * (taps * channels);
        *reinterpret_cast<uint4 *>(dw + place.tap * channels + place.c) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

// Which tile a CTA computes, and which part of its pixels; `unit`s are clusters, and those beside each other read the
// same pixels, of x (FILTERS_FIRST: their tiles lie along the filters) or of dy. `place`: of a tile's part in the
// workspace.
template <class Tile> struct WgradWork {
    int tile, place, begin, end;
    template <class P> DEVICE WgradWork(const P &p, int unit) {
        const ClusterPlace<Tile> own;
        const int tiles = (int)p.tiles / (Tile::CLUSTER_M * Tile::CLUSTER_N),
                  tiles_m = (int)p.tiles_m / Tile::CLUSTER_M, tiles_n = (int)p.tiles_n / Tile::CLUSTER_N;
        const int row = unit / tiles, part = row * Tile::CLUSTER_K + own.part, first = unit - row * tiles;
        // Among tiles of all sets, from the first filters down, and from the first columns across.
        int down = first / tiles_n, across = first - down * tiles_n;
        if constexpr (Tile::FILTERS_FIRST) {
            const int set = first / (tiles_m * tiles_n), at = first - set * tiles_m * tiles_n;
            across = at / tiles_m, down = set * tiles_m + at - across * tiles_m;
        }
        tile = (down * Tile::CLUSTER_M + own.m) * (int)p.tiles_n + across * Tile::CLUSTER_N + own.n;
        place = row * (int)p.tiles + tile;
        begin = p.steps * part / p.split_k;
        end = p.steps * (part + 1) / p.split_k;
    }
};

// A warpgroup's sums to a tile's quads, those that dw has.
template <class Tile, class P>
DEVICE void store_quads(const P &p, const TilePlace<Tile> &at, float4 *quads, int warpgroup,
                        const float (&d)[Tile::M_STEPS][Tile::SUMS]) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int m = 0; m < Tile::M_STEPS; ++m)
#pragma unroll
        for (int i = 0; i < Tile::N / 8; ++i)
            if (QuadPlace<Tile>(p, at, warpgroup, m, i, thread).has_any(p, at))
                quads[quad_of<Tile>(warpgroup, m, i, thread)] =
                    make_float4(d[m][4 * i], d[m][4 * i + 1], d[m][4 * i + 2], d[m][4 * i + 3]);
}

// What other CTAs of a cluster send is waited for at one barrier.
template <class Tile> DEVICE void prepare_exchange(unsigned complete) {
    if constexpr (Tile::CLUSTER_K > 1) {
        barrier_init(complete, 1);
        barrier_expect(complete, Tile::SUM_BYTES / Tile::CLUSTER_K * (Tile::CLUSTER_K - 1));
    }
}
// A thread's sums to the CTAs that add them, beginning with the next neighbour's share, so that nobody is sent to by
// all at once. They lie where stages were, which no CTA needs by then.
template <class Tile>
DEVICE void send_shares(const float (&d)[Tile::M_STEPS][Tile::SUMS], unsigned sums, unsigned complete) {
    constexpr int ROW = Tile::N / 8, QUAD = Tile::CONSUMER_THREADS * 16;
    const ClusterPlace<Tile> own;
    const int rank = own.part;
    const unsigned mine = sums + rank * Tile::SHARE * QUAD + threadIdx.x * 16;
#pragma unroll
    for (int from = 0; from < Tile::CLUSTER_K; ++from) {
        if (rank != from) continue;
#pragma unroll
        for (int turn = 1; turn <= Tile::CLUSTER_K; ++turn) {
            const int to = (from + turn) % Tile::CLUSTER_K;
            const int other = own.rank_of(own.m, own.n) - from + to;
            const unsigned there = address_of_rank(mine, other), barrier = address_of_rank(complete, other);
#pragma unroll
            for (int i = 0; i < Tile::SHARE; ++i) {
                const int quad = to * Tile::SHARE + i;
                const float *v = &d[quad / ROW][quad % ROW * 4];
                if (to != from) send_four(there + i * QUAD, barrier, v[0], v[1], v[2], v[3]);
                else
                    store_shared<16>(mine + i * QUAD, {{__float_as_uint(v[0]), __float_as_uint(v[1]),
                                                        __float_as_uint(v[2]), __float_as_uint(v[3])}});
            }
        }
    }
}
// The sums of a cluster's CTAs: each CTA adds its share of the quads, parts in the order of ranks, for dw or (SPLIT)
// the workspace.
template <class Tile, class P>
DEVICE void store_cluster_sums(const P &p, const TilePlace<Tile> &at, unsigned char *memory, unsigned complete,
                               int unit, int warpgroup, const float (&d)[Tile::M_STEPS][Tile::SUMS]) {
    constexpr int ONCE = !Tile::SPLIT && Tile::VECTOR == 8 && Tile::SHARE % 4 == 0 ? 4 : 1, ROW = Tile::N / 8;
    const int thread = threadIdx.x % 128, begin = ClusterPlace<Tile>().part * Tile::SHARE;
    // Where others were told that stages are read, they have to hear it while they are there.
    if constexpr (COPYING<Tile> > 1) cluster_arrive();
    else cluster_arrive_relaxed();
    cluster_wait();
    send_shares<Tile>(d, shared_address(memory), complete);
    barrier_wait_for_cluster(complete, 0);
    const float4 *const sums = reinterpret_cast<const float4 *>(memory) + threadIdx.x;
#pragma unroll 1
    for (int i0 = 0; i0 < Tile::SHARE; i0 += ONCE) {
        float v[4 * ONCE] = {};
#pragma unroll
        for (int rank = 0; rank < Tile::CLUSTER_K; ++rank)
#pragma unroll
            for (int i = 0; i < ONCE; ++i) {
                const float4 quad = sums[(rank * Tile::SHARE + i0 + i) * Tile::CONSUMER_THREADS];
                v[4 * i] += quad.x, v[4 * i + 1] += quad.y, v[4 * i + 2] += quad.z, v[4 * i + 3] += quad.w;
            }
        const int m = (begin + i0) / ROW, i = (begin + i0) % ROW;
        if constexpr (ONCE == 4) {
            store_eights<Tile>(p, at, warpgroup, m, i, thread, v);
        } else {
            const QuadPlace<Tile> place(p, at, warpgroup, m, i, thread);
            const float4 quad = make_float4(v[0], v[1], v[2], v[3]);
            if constexpr (!Tile::SPLIT) store_quad<Tile>(p, at, place, quad);
            else if (place.has_any(p, at))
                static_cast<float4 *>(p.parts)[(long long)unit * Tile::QUADS + quad_of<Tile>(warpgroup, m, i, thread)] =
                    quad;
        }
    }
}

// A warpgroup's sums: to dw, or (SPLIT) to this CTA's parts as they lie in registers, those that dw has.
template <class Tile, class P>
DEVICE void store_sums(const P &p, const TilePlace<Tile> &at, unsigned char *memory, unsigned complete, int unit,
                       int warpgroup, const float (&d)[Tile::M_STEPS][Tile::SUMS]) {
    const int thread = threadIdx.x % 128;
    if constexpr (Tile::CLUSTER_K > 1) {
        store_cluster_sums<Tile>(p, at, memory, complete, unit, warpgroup, d);
    } else if constexpr (Tile::SPLIT) {
        store_quads<Tile>(p, at, static_cast<float4 *>(p.parts) + (long long)unit * Tile::QUADS, warpgroup, d);
    } else if constexpr (Tile::VECTOR == 8) {
#pragma unroll
        for (int m = 0; m < Tile::M_STEPS; ++m)
#pragma unroll
            for (int i = 0; i < Tile::N / 8; i += 4) store_eights<Tile>(p, at, warpgroup, m, i, thread, &d[m][4 * i]);
    } else {
#pragma unroll
        for (int m = 0; m < Tile::M_STEPS; ++m)
#pragma unroll
            for (int i = 0; i < Tile::N / 8; ++i)
                store_quad<Tile>(p, at, QuadPlace<Tile>(p, at, warpgroup, m, i, thread),
                                 make_float4(d[m][4 * i], d[m][4 * i + 1], d[m][4 * i + 2], d[m][4 * i + 3]));
    }
}
