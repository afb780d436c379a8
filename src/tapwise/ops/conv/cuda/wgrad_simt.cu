// Weight gradient as an implicit GEMM on the FMA units, in the arithmetic of T (float or double): a block sums a tile
// of dw, filters x columns of a group, over a part of the pixels.
#pragma once

#include "cp_async.cuh"
#include "ops/conv/cuda/wgrad_places.cuh"
#include "types.cuh"

// A block: FILTERS x COLUMNS of a group, BK pixels a step. SLICES of its threads share the pixels of a step; in each,
// LF of a warp's lanes (or of the slice's fewer threads) lie along filters, and a thread has TF x TC sums. A copy takes
// X_COPY and DY_COPY elements: neighbours along channels, or for NCHW along pixels. POINTWISE: dy's pixels are x's.
// PADDED: windows leave the image; MASKS: which taps do so is known by bits of one word. PARTS: sums go to `parts`;
// CLUSTER blocks that share a tile add theirs up. WRITE elements go out at once.
template <typename T_, bool NCHW_, int X_COPY_, int DY_COPY_, bool POINTWISE_, bool PADDED_, bool MASKS_, int FILTERS_,
          int COLUMNS_, int TF_, int TC_, int LF_, int BK_, int SLICES_, int STAGES_, bool PARTS_, int CLUSTER_,
          int WRITE_>
struct Block {
    using T = T_;
    static constexpr bool NCHW = NCHW_, POINTWISE = POINTWISE_, PADDED = PADDED_, MASKS = MASKS_, PARTS = PARTS_;
    static constexpr int X_COPY = X_COPY_, DY_COPY = DY_COPY_, FILTERS = FILTERS_, COLUMNS = COLUMNS_, TF = TF_,
                         TC = TC_, LF = LF_, BK = BK_, SLICES = SLICES_, STAGES = STAGES_, CLUSTER = CLUSTER_,
                         WRITE = WRITE_;
    static constexpr int V = 16 / (int)sizeof(T), SHARE = FILTERS / TF * (COLUMNS / TC),
                         LANES = SHARE < 32 ? SHARE : 32, LC = LANES / LF, WC = COLUMNS / (LC * TC),
                         THREADS = SHARE * SLICES, DEPTH = BK / SLICES;
    static_assert(FILTERS % (LF * TF) == 0 && COLUMNS == WC * LC * TC && SHARE % LANES == 0 && THREADS % 32 == 0);
    static_assert(!(PARTS && CLUSTER > 1) && DEPTH * SLICES == BK &&
                  (NCHW ? DEPTH % V == 0 : TF % V == 0 && TC % V == 0));
    static constexpr int SUMS_PITCH = COLUMNS + V;
    // Steps whose pixels' places a warp finds at once, and steps whose places are kept.
    static constexpr int FOUND = BK < 32 ? 32 / BK : 1, KEPT = STAGES + FOUND <= 4 ? 4 : STAGES + FOUND <= 8 ? 8 : 16;
};

// x (or dy) as a block takes it: rows are pixels, or for NCHW columns (filters), an odd number of pieces of 16 bytes
// apart, so that eight rows' pieces lie in eight groups of banks.
template <class O, bool OF_X> struct Operand {
    using T = typename O::T;
    static constexpr int WIDTH = OF_X ? O::COLUMNS : O::FILTERS, EACH = OF_X ? O::X_COPY : O::DY_COPY;
    static constexpr int PITCH = O::NCHW ? O::BK + O::V : WIDTH, STAGE = (O::NCHW ? WIDTH : O::BK) * PITCH;
    static_assert(!O::NCHW || PITCH / O::V % 2 == 1);
    static DEVICE unsigned place(int pixel, int column) {
        return (O::NCHW ? column * PITCH + pixel : pixel * PITCH + column) * (int)sizeof(T);
    }
    static DEVICE const T *array(const Gradient &p) { return static_cast<const T *>(OF_X ? p.x : p.w); }
    static DEVICE unsigned begin(const Place &place) { return OF_X ? place.x : place.dy; }
};

// MASKS: rows of places and columns are bits instead. Of a column those of its row and column of taps; of a pixel those
// that lie outside. Nothing has NO_COLUMN_BIT's pixel, and what is no pixel has all bits.
constexpr unsigned NO_COLUMN_BIT = 1u << 31, PIXEL_BIT = 1u << 30;

template <class O, bool OF_X> DEVICE Column find_column(const Gradient &p, int group, int j) {
    Column column = column_of<O::NCHW, OF_X>(p, group, j);
    if constexpr (O::MASKS) {
        unsigned bits = column.h == NO_COLUMN ? NO_COLUMN_BIT : PIXEL_BIT;
        if (OF_X && O::PADDED && column.h != NO_COLUMN) {
            const int r = column.h / (int)p.dilation_h, s = column.w / (int)p.dilation_w;
            bits |= 1u << r | 1u << ((int)p.r + s);
        }
        column.h = (int)bits;
    }
    return column;
}

template <class O> DEVICE void find_place(const Gradient &p, unsigned number, unsigned to) {
    Place place = place_of<O::NCHW>(p, number);
    if constexpr (O::MASKS) {
        unsigned outside = place.h == NO_PIXEL ? ~0u : NO_COLUMN_BIT;
        if constexpr (O::PADDED) {
            int at = place.h;
            for (int r = 0; r < (int)p.r; ++r, at += (int)p.dilation_h)
                if ((unsigned)at >= (unsigned)p.height) outside |= 1u << r;
            at = place.w;
            for (int s = 0; s < (int)p.s; ++s, at += (int)p.dilation_w)
                if ((unsigned)at >= (unsigned)p.width) outside |= 1u << ((int)p.r + s);
        }
        place.h = (int)outside;
    }
    store_place(to, place);
}

template <class O, bool OF_X> DEVICE bool inside(const Gradient &p, const Place &place, const Column &column) {
    if constexpr (O::MASKS) return !(place.h & column.h);
    if constexpr (!OF_X) return place.h + column.h > FAR;
    return (unsigned)(place.h + column.h) < (unsigned)p.height && (unsigned)(place.w + column.w) < (unsigned)p.width;
}

// Copies of an operand, a step of pixels at a time.
enum Copies { CHANNELS, PLANES, WINDOWS };
template <class O, bool OF_X, int COPIES> struct Loader;

// Channels last: a thread copies the same columns of several pixels.
template <class O, bool OF_X> struct Loader<O, OF_X, CHANNELS> {
    using In = Operand<O, OF_X>;
    static constexpr int E = In::EACH, ACROSS = In::WIDTH / E, TURNS = (ACROSS + O::THREADS - 1) / O::THREADS,
                         ROWS = TURNS > 1 ? 1 : O::THREADS / ACROSS, COUNT = (O::BK + ROWS - 1) / ROWS;
    const Gradient &p;
    Column columns[TURNS];
    int first, at;

    DEVICE Loader(const Gradient &p_, unsigned, int group, int column0) : p(p_) {
        const int thread = threadIdx.x;
        first = TURNS > 1 ? 0 : thread / ACROSS;
        at = (TURNS > 1 ? thread : thread % ACROSS) * E;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) columns[i] = find_column<O, OF_X>(p, group, column0 + at + i * O::THREADS * E);
    }
    DEVICE void copy(unsigned stage, unsigned places) {
        if (TURNS == 1 && O::THREADS % ACROSS && first >= ROWS) return;
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int row = first + n * ROWS;
            if (O::BK % ROWS && row >= O::BK) break;
            const Place place = load_place(places + row * 16);
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                const int column = at + i * O::THREADS * E;
                if (TURNS > 1 && ACROSS % O::THREADS && column >= In::WIDTH) break;
                const auto *from = In::array(p) + (In::begin(place) + columns[i].shift);
                const bool real = inside<O, OF_X>(p, place, columns[i]);
                const unsigned to = stage + In::place(row, column);
                constexpr int BYTES = E * (int)sizeof(typename O::T);
                // Taps read the same pixels.
                if constexpr (OF_X && !O::POINTWISE && BYTES == 16) cp_async_through_l1(to, from, real);
                else cp_async<BYTES>(to, from, real);
            }
        }
    }
};

// NCHW, where neighbours along pixels are so in the array: a thread copies the same pixels of several planes.
template <class O, bool OF_X> struct Loader<O, OF_X, PLANES> {
    using In = Operand<O, OF_X>;
    static constexpr int E = In::EACH, ACROSS = O::BK / E, ROWS = O::THREADS / ACROSS,
                         COUNT = (In::WIDTH + ROWS - 1) / ROWS;
    static_assert(ROWS > 0);
    const Gradient &p;
    int first, left;
    unsigned shift, apart;

    DEVICE Loader(const Gradient &p_, unsigned, int group, int column0) : p(p_) {
        const int each = OF_X ? (int)p.columns : (int)p.group_k;
        const unsigned plane = (unsigned)p.p * (unsigned)p.q;
        first = (int)threadIdx.x / ACROSS;
        left = each - column0 - first;
        shift = (unsigned)(group * each + column0 + first) * plane;
        apart = ROWS * plane;
    }
    DEVICE void copy(unsigned stage, unsigned places) {
        if (O::THREADS % ACROSS && first >= ROWS) return;
        const int pixel = (int)threadIdx.x % ACROSS * E;
        const Place place = load_place(places + pixel * 16);
        const bool real = O::MASKS ? !(place.h & (int)PIXEL_BIT) : place.h > FAR;
        const int rows = real ? left : 0;
        const auto *from = In::array(p) + (In::begin(place) + shift);
        const unsigned to = stage + In::place(pixel, first);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (In::WIDTH % ROWS && first + i * ROWS >= In::WIDTH) break;
            cp_async<E *(int)sizeof(typename O::T)>(to + In::place(0, i * ROWS), from, i * ROWS < rows);
            from += apart;
        }
    }
};

// NCHW, taps of windows: a thread copies the same pixel for several columns, known from a table.
template <class O, bool OF_X> struct Loader<O, OF_X, WINDOWS> {
    using In = Operand<O, OF_X>;
    static constexpr int ROWS = O::THREADS / O::BK, COUNT = (In::WIDTH + ROWS - 1) / ROWS;
    static constexpr int ENTRY = O::MASKS ? 8 : 16, HELD = 64 / ENTRY;
    static_assert(ROWS > 0);
    const Gradient &p;
    unsigned table;

    DEVICE Loader(const Gradient &p_, unsigned table_, int group, int column0) : p(p_), table(table_) {
        for (int i = threadIdx.x; i < In::WIDTH; i += O::THREADS) {
            const Column column = find_column<O, OF_X>(p, group, column0 + i);
            if constexpr (O::MASKS) store_shared<8>(table + i * 8, {{column.shift, (unsigned)column.h}});
            else store_shared<16>(table + i * 16, {{column.shift, (unsigned)column.h, (unsigned)column.w, 0}});
        }
    }
    DEVICE void copy(unsigned stage, unsigned places) {
        const int pixel = (int)threadIdx.x % O::BK, first = (int)threadIdx.x / O::BK;
        if (O::THREADS % O::BK && first >= ROWS) return;
        const Place place = load_place(places + pixel * 16);
        const unsigned to = stage + In::place(pixel, first), entries = table + first * ENTRY;
        // Several entries at a time: one after the other, their latencies would add up.
#pragma unroll
        for (int held = 0; held < COUNT; held += HELD) {
            Piece<ENTRY> columns[HELD];
#pragma unroll
            for (int i = held; i < COUNT && i < held + HELD; ++i)
                if (In::WIDTH % ROWS == 0 || first + i * ROWS < In::WIDTH)
                    columns[i - held] = load_shared<ENTRY>(entries + i * ROWS * ENTRY);
#pragma unroll
            for (int i = held; i < COUNT && i < held + HELD; ++i) {
                if (In::WIDTH % ROWS && first + i * ROWS >= In::WIDTH) break;
                const auto &v = columns[i - held].v;
                Column column{v[0], (int)v[1], 0};
                if constexpr (!O::MASKS) column.w = (int)v[2];
                cp_async<sizeof(typename O::T)>(to + In::place(0, i * ROWS), In::array(p) + (place.x + column.shift),
                                                inside<O, true>(p, place, column));
            }
        }
    }
};

template <class O> DEVICE void wgrad_simt(const Gradient &p) {
    using T = typename O::T;
    using X = Operand<O, true>;
    using Dy = Operand<O, false>;
    using Piece = Neighbours<T, O::V>;
    constexpr int V = O::V, SIZE = sizeof(T), STAGE = X::STAGE + Dy::STAGE, RING = O::STAGES * STAGE,
                  TILE = O::FILTERS * O::SUMS_PITCH, SUMS = O::SLICES * TILE;
    extern __shared__ __align__(1024) unsigned char memory[];
    T *const ring = reinterpret_cast<T *>(memory);
    const unsigned ring_at = shared_address(memory), places = ring_at + (RING > SUMS ? RING : SUMS) * SIZE,
                   table = places + O::KEPT * O::BK * 16;
    int tile = blockIdx.x / O::CLUSTER;
    const int part = O::CLUSTER > 1 ? blockIdx.x % O::CLUSTER : blockIdx.y;
    const int column0 = tile % (int)p.tiles_c * O::COLUMNS;
    tile /= (int)p.tiles_c;
    const int filter0 = tile % (int)p.tiles_f * O::FILTERS, group = tile / (int)p.tiles_f;
    const int from = part * (int)p.part_steps, steps = min((int)p.part_steps, (int)p.steps - from);
    const int thread = threadIdx.x;
    // Places of the pixels of FOUND steps, by the first threads of as many; or of STAGES steps by all of them.
    const auto find = [&](int step, int threads) {
        const int count = threads == 32 ? O::FOUND * O::BK : O::STAGES * O::BK;
        for (int i = thread % threads; i < count; i += threads)
            find_place<O>(p, (unsigned)(from + step) * O::BK + i, places + (step * O::BK + i) % (O::KEPT * O::BK) * 16);
    };
    find(0, O::THREADS);
    Loader<O, true, !O::NCHW ? CHANNELS : O::POINTWISE ? PLANES : WINDOWS> x(p, table, group, column0);
    Loader<O, false, O::NCHW ? PLANES : CHANNELS> dy(p, table, group, filter0);
    wait_for_previous();
    __syncthreads();
    const auto copy = [&](int slot, int step) {
        const unsigned stage = ring_at + slot * (STAGE * SIZE), there = places + step % O::KEPT * (O::BK * 16);
        x.copy(stage, there);
        dy.copy(stage + X::STAGE * SIZE, there);
    };
#pragma unroll
    for (int ahead = 0; ahead < O::STAGES - 1; ++ahead) {
        if (ahead < steps) copy(ahead, ahead);
        cp_async_commit();
    }
    // Four along columns: lanes 2 i and 2 i + 1 read the same filters, lanes i and i ^ 2 the same columns: then a read
    // of 16 bytes takes two turns of the banks instead of four.
    const int slice = thread / O::SHARE, rest = thread % O::SHARE, warp = rest / O::LANES, lane = rest % O::LANES;
    const bool FOUR = O::LC == 4 && O::LANES == 32;
    const int lane_c = FOUR ? (lane & 1) | lane >> 4 << 1 : lane % O::LC, lane_f = FOUR ? lane >> 1 & 7 : lane / O::LC;
    // NCHW: columns of a thread lie LC apart; channels last, pieces of V of them do.
    constexpr int AT_ONCE = O::NCHW ? 1 : V;
    const int f0 = warp / O::WC * (O::LF * O::TF) + lane_f * AT_ONCE,
              c0 = warp % O::WC * (O::LC * O::TC) + lane_c * AT_ONCE;
    const auto filter_at = [&](int i) { return f0 + i / AT_ONCE * (O::LF * AT_ONCE) + i % AT_ONCE; };
    const auto column_at = [&](int j) { return c0 + j / AT_ONCE * (O::LC * AT_ONCE) + j % AT_ONCE; };
    const T *const dy_ring = ring + X::STAGE + Dy::place(slice * O::DEPTH, f0) / SIZE, *const x_ring =
                                                                                           ring +
                                                                                           X::place(slice * O::DEPTH,
                                                                                                    c0) /
                                                                                               SIZE;
    T sums[O::TF][O::TC] = {};
    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<O::STAGES - 2>();
        __syncthreads();
        // The next copies go where the step before lay.
        if (step + O::STAGES - 1 < steps) copy(slot == 0 ? O::STAGES - 1 : slot - 1, step + O::STAGES - 1);
        cp_async_commit();
        if (step % O::FOUND == 0 && thread / 32 == step / O::FOUND % (O::THREADS / 32)) find(step + O::STAGES, 32);
        // Unrolled further, pieces of several turns would take the registers that blocks share.
        const T *a = dy_ring + slot * STAGE, *b = x_ring + slot * STAGE;
        if constexpr (O::NCHW) {
#pragma unroll 1
            for (const T *const end = a + O::DEPTH; a != end; a += V, b += V) {
                Piece left[O::TF];
#pragma unroll
                for (int i = 0; i < O::TF; ++i) left[i] = *reinterpret_cast<const Piece *>(a + i * O::LF * Dy::PITCH);
#pragma unroll
                for (int j = 0; j < O::TC; ++j) {
                    const Piece right = *reinterpret_cast<const Piece *>(b + j * O::LC * X::PITCH);
#pragma unroll
                    for (int e = 0; e < V; ++e)
#pragma unroll
                        for (int i = 0; i < O::TF; ++i) sums[i][j] = fma(left[i].v[e], right.v[e], sums[i][j]);
                }
            }
        } else {
            constexpr int FP = O::TF / V, CP = O::TC / V, TURN = O::TF * O::TC * SIZE > 256 || O::DEPTH == 1 ? 1 : 2;
#pragma unroll 1
            for (const T *const end = a + O::DEPTH * Dy::PITCH; a != end; a += TURN * Dy::PITCH, b += TURN * X::PITCH) {
#pragma unroll
                for (int k = 0; k < TURN; ++k) {
                    Piece left[FP], right[CP];
#pragma unroll
                    for (int i = 0; i < FP; ++i)
                        left[i] = *reinterpret_cast<const Piece *>(a + k * Dy::PITCH + i * O::LF * V);
#pragma unroll
                    for (int j = 0; j < CP; ++j)
                        right[j] = *reinterpret_cast<const Piece *>(b + k * X::PITCH + j * O::LC * V);
#pragma unroll
                    for (int i = 0; i < O::TF; ++i)
#pragma unroll
                        for (int j = 0; j < O::TC; ++j)
                            sums[i][j] = fma(left[i / V].v[i % V], right[j / V].v[j % V], sums[i][j]);
                }
            }
        }
        slot = slot == O::STAGES - 1 ? 0 : slot + 1;
    }
    cp_async_wait<0>();
    // Placed before, its blocks would fill the multiprocessors that end first.
    let_next_begin();
    __syncthreads();
    // The sums of each slice, a row a filter, in the ring's memory.
#pragma unroll
    for (int i = 0; i < O::TF; ++i)
#pragma unroll
        for (int j = 0; j < O::TC; j += AT_ONCE) {
            Neighbours<T, AT_ONCE> piece;
#pragma unroll
            for (int e = 0; e < AT_ONCE; ++e) piece.v[e] = sums[i][j + e];
            T *const there = ring + slice * TILE + filter_at(i) * O::SUMS_PITCH + column_at(j);
            *reinterpret_cast<Neighbours<T, AT_ONCE> *>(there) = piece;
        }
    if constexpr (O::CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    using Written = Neighbours<T, O::WRITE>;
    constexpr int ACROSS = O::COLUMNS / O::WRITE;
    static_assert(O::COLUMNS % O::WRITE == 0);
    T *const dw = static_cast<T *>(O::PARTS ? p.parts : p.y) + (O::PARTS ? part * p.part_pitch : 0);
    // Of a cluster each block adds up a share of the tile, in the order of pixels.
    for (int i = (O::CLUSTER > 1 ? part * O::THREADS : 0) + thread; i < O::FILTERS * ACROSS;
         i += O::CLUSTER * O::THREADS) {
        const int row = i / ACROSS, at = i % ACROSS * O::WRITE, f = filter0 + row, j = column0 + at;
        if (f >= (int)p.group_k || j >= (int)p.columns) continue;
        const T *const here = ring + row * O::SUMS_PITCH + at;
        Written sum{};
#pragma unroll
        for (int other = 0; other < O::CLUSTER * O::SLICES; ++other) {
            const T *there = here + other % O::SLICES * TILE;
            if constexpr (O::CLUSTER > 1) there = in_block_of_rank(there, other / O::SLICES);
            const Written more = *reinterpret_cast<const Written *>(there);
#pragma unroll
            for (int e = 0; e < O::WRITE; ++e) sum.v[e] += more.v[e];
        }
        *reinterpret_cast<Written *>(dw + (group * p.group_k + f) * p.row + j) = sum;
    }
    if constexpr (O::CLUSTER > 1) {
        // What others read here has to stay.
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }
}
