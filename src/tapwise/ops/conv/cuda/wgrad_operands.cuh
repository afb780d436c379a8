// How the operands of a weight gradient come to shared memory, a step of pixels at a time: dy's filters, and x's
// columns (filter taps and channels, as dw's rows lie in memory). The columns of a thread's copies never change, so it
// knows their taps once; the pixels' places are a table.
#pragma once

#include "float16.cuh"
#include "matrix.cuh"
#include "ops/conv/cuda/wgrad_places.cuh"

// Pixels of a step: lanes of a warp.
constexpr int BK = 32;
// How an operand comes to shared memory. Rows are pixels, but for PIXEL_PIECES, whose rows are columns.
enum Copies {
    // Asynchronous copies of neighbours along channels, or along pixels.
    CHANNEL_PIECES,
    PIXEL_PIECES,
    // Elements through registers, a warp's lanes side by side along channels, or along pixels.
    CHANNELS,
    PIXELS,
};

// A CTA: COLUMNS x FILTERS of each of GROUPS_PER_TILE groups, by WARPS_C x WARPS_F warps a group. BYTES of a copy. L1:
// copies of x pass it, since taps read the same pixels. RUNS: a filter's row is a run of neighbours in x, in whole
// copies: x has one channel, and columns of no tap are left out of dw. PARTS: sums go to `parts`; else WRITE elements
// of dw at once.
template <typename T_, bool NCHW_, int X_COPIES_, int X_BYTES_, int DY_COPIES_, int DY_BYTES_, bool L1_, bool RUNS_,
          int COLUMNS_, int FILTERS_, int GROUPS_PER_TILE_, int WARPS_C_, int WARPS_F_, int STAGES_, bool PARTS_,
          int WRITE_>
struct Block {
    using T = T_;
    // Bytes of an element, pixels of the instruction.
    static constexpr int SIZE = sizeof(T), K = 32 / SIZE, K_STEPS = BK / K;
    static constexpr bool NCHW = NCHW_, L1 = L1_, RUNS = RUNS_, PARTS = PARTS_;
    static constexpr int X_COPIES = X_COPIES_, X_BYTES = X_BYTES_, DY_COPIES = DY_COPIES_, DY_BYTES = DY_BYTES_;
    static constexpr int COLUMNS = COLUMNS_, FILTERS = FILTERS_, GROUPS_PER_TILE = GROUPS_PER_TILE_, WARPS_C = WARPS_C_,
                         WARPS_F = WARPS_F_, STAGES = STAGES_, WRITE = WRITE_;
    static constexpr int WARPS = GROUPS_PER_TILE * WARPS_C * WARPS_F, THREADS = 32 * WARPS;
    // Rows of 16 and columns of 8 of a warp.
    static constexpr int MT = COLUMNS / WARPS_C / 16, NT = FILTERS / WARPS_F / 8;
    static_assert(COLUMNS % (16 * WARPS_C) == 0 && FILTERS % (8 * WARPS_F) == 0);
    static constexpr int SUMS_PITCH = COLUMNS + 4;
};

// x (or dy) as a CTA takes it: WIDTH columns, EACH of a group.
template <class O, bool OF_X> struct Operand {
    static constexpr int EACH = OF_X ? O::COLUMNS : O::FILTERS, WIDTH = EACH * O::GROUPS_PER_TILE;
    static constexpr int COPIES = OF_X ? O::X_COPIES : O::DY_COPIES, BYTES = OF_X ? O::X_BYTES : O::DY_BYTES;
    static constexpr bool TRANSPOSED = COPIES != PIXEL_PIECES;
    // Rows lie in panels of at most 128 bytes.
    static constexpr int SIZE = O::SIZE, ROW = WIDTH * SIZE,
                         SPAN = !TRANSPOSED                           ? BK * SIZE
                                : ROW == 16 || ROW == 32 || ROW == 64 ? ROW
                                                                      : 128;
    static constexpr int PANELS = TRANSPOSED ? (ROW + SPAN - 1) / SPAN : 1,
                         STAGE = TRANSPOSED ? PANELS * BK * SPAN : WIDTH * SPAN;
    // Where a column's element of a pixel lies. Of 32 bits a warp reads eight of each of four pixels one by one, and
    // these pairs of pieces are what lies in other banks.
    static DEVICE unsigned place(int pixel, int column) {
        if constexpr (!TRANSPOSED) return swizzled<SPAN>(column, pixel * SIZE);
        if constexpr (SPAN == 16) return pixel * 16 + column * SIZE;
        const int panel = column * SIZE / SPAN * (BK * SPAN), at = column * SIZE % SPAN;
        if constexpr (SIZE == 2) return panel + swizzled<SPAN>(pixel, at);
        return panel + pixel * SPAN + (at ^ pixel * SPAN / 128 % (SPAN / 32) * 32);
    }
    static DEVICE Column column(const Gradient &p, int at, int first, int group0) {
        const int group = group0 + at / EACH, j = first + at % EACH;
        return column_of<O::NCHW, OF_X>(p, group, j);
    }
    static DEVICE bool inside(const Gradient &p, const Place &place, const Column &column) {
        if constexpr (!OF_X) return place.h + column.h > FAR;
        return (unsigned)(place.h + column.h) < (unsigned)p.height &&
               (unsigned)(place.w + column.w) < (unsigned)p.width;
    }
    static DEVICE const typename O::T *array(const Gradient &p) {
        return static_cast<const typename O::T *>(OF_X ? p.x : p.w);
    }
    static DEVICE const typename O::T *element(const Gradient &p, const Place &place, const Column &column) {
        return array(p) + ((OF_X ? place.x : place.dy) + column.shift);
    }
};

// Copies of an operand, a step at a time (nothing is read at the addresses of what is outside): `places` are its
// pixels'. Where elements pass through registers, `fetch` loads what `store` writes.
template <class O, bool OF_X, int COPIES> struct Loader;

template <class O, bool OF_X> struct Loader<O, OF_X, CHANNEL_PIECES> {
    using In = Operand<O, OF_X>;
    static constexpr int V = In::BYTES / O::SIZE, ACROSS = In::WIDTH / V,
                         TURNS = (ACROSS + O::THREADS - 1) / O::THREADS, ROWS = TURNS > 1 ? 1 : O::THREADS / ACROSS;
    // Addresses of many copies at once would take the registers of the sums.
    static constexpr int COUNT = (BK + ROWS - 1) / ROWS, UNROLLED = COUNT * TURNS > 8 ? 4 / TURNS + 1 : COUNT;
    // Whether every thread has something to copy.
    static constexpr bool ALL = TURNS > 1 || ROWS *ACROSS == O::THREADS;
    const Gradient &p;
    Column columns[TURNS];
    int at[TURNS], first;

    DEVICE Loader(const Gradient &p_, unsigned, int column0, int group0) : p(p_) {
        const int thread = threadIdx.x;
        first = TURNS > 1 ? 0 : thread / ACROSS;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            // Pieces of groups beside each other lie side by side.
            const int piece = TURNS > 1 ? thread + i * O::THREADS : thread % ACROSS;
            at[i] = piece % O::GROUPS_PER_TILE * In::EACH + piece / O::GROUPS_PER_TILE * V;
            columns[i] = In::column(p, at[i], column0, group0);
            if (piece >= ACROSS || first >= ROWS) at[i] = -1;
        }
    }
    DEVICE void copy(unsigned stage, unsigned places) {
#pragma unroll UNROLLED
        for (int n = 0; n < COUNT; ++n) {
            const int row = first + n * ROWS;
            if (BK % ROWS && row >= BK) break;
            if (!ALL && at[0] < 0) break;
            const Place place = load_place(places + row * 16);
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                if (ACROSS % O::THREADS && TURNS > 1 && at[i] < 0) break;
                const bool inside = In::inside(p, place, columns[i]);
                const auto *from = In::element(p, place, columns[i]);
                const unsigned to = stage + In::place(row, at[i]);
                if constexpr (OF_X && O::L1 && In::BYTES == 16) cp_async_through_l1(to, from, inside);
                else cp_async<In::BYTES>(to, from, inside);
            }
        }
    }
    DEVICE void fetch(unsigned) {}
    DEVICE void store(unsigned) {}
};

// Neighbours along pixels are so in the array: an image's plane is whole pieces.
template <class O, bool OF_X> struct Loader<O, OF_X, PIXEL_PIECES> {
    using In = Operand<O, OF_X>;
    static constexpr int V = In::BYTES / O::SIZE, ACROSS = BK / V, ROWS = O::THREADS / ACROSS;
    const Gradient &p;
    int column0, group0;

    DEVICE Loader(const Gradient &p_, unsigned, int column0_, int group0_)
        : p(p_), column0(column0_), group0(group0_) {}
    DEVICE void copy(unsigned stage, unsigned places) {
        const int pixel = (int)threadIdx.x % ACROSS * V, first = (int)threadIdx.x / ACROSS;
        const Place place = load_place(places + pixel * 16);
        const int each = OF_X ? p.columns : p.group_k;
        const unsigned plane = OF_X ? (unsigned)p.height * (unsigned)p.width : (unsigned)p.p * (unsigned)p.q;
        // Of one group, rows of the tile are as far from each other as planes.
        unsigned from = (OF_X ? place.x : place.dy) + (unsigned)(group0 * each + column0 + first) * plane;
        unsigned to = stage + In::place(pixel, first);
        // Unrolled, the distances of all rows would be kept in registers.
#pragma unroll 1
        for (int at = first; at < In::WIDTH; at += ROWS) {
            const int group = at / In::EACH, j = at % In::EACH;
            if (O::GROUPS_PER_TILE > 1)
                from = (OF_X ? place.x : place.dy) + (unsigned)((group0 + group) * each + column0 + j) * plane;
            const bool inside = place.h > FAR && group0 + group < (int)p.groups && column0 + j < each;
            // The swizzle is the same in every eighth row.
            cp_async<In::BYTES>(ROWS % 8 ? stage + In::place(pixel, at) : to, In::array(p) + from, inside);
            from += ROWS * plane;
            to += ROWS * In::SPAN;
        }
    }
    DEVICE void fetch(unsigned) {}
    DEVICE void store(unsigned) {}
};

template <class O, bool OF_X> struct Loader<O, OF_X, CHANNELS> {
    using In = Operand<O, OF_X>;
    static constexpr int ACROSS = In::WIDTH / 2, TURNS = (ACROSS + O::THREADS - 1) / O::THREADS,
                         ROWS = TURNS > 1 ? 1 : O::THREADS / ACROSS, COUNT = (BK + ROWS - 1) / ROWS;
    const Gradient &p;
    Column columns[TURNS][2];
    int at[TURNS], first;
    typename O::T held[COUNT][TURNS][2];

    DEVICE Loader(const Gradient &p_, unsigned, int column0, int group0) : p(p_) {
        const int thread = threadIdx.x;
        first = TURNS > 1 ? 0 : thread / ACROSS;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const int piece = TURNS > 1 ? thread + i * O::THREADS : thread % ACROSS;
            at[i] = piece < ACROSS && first < ROWS ? piece * 2 : -1;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                columns[i][e] = In::column(p, piece * 2 + e, column0, group0);
                if (at[i] < 0) columns[i][e].h = NO_COLUMN;
            }
        }
    }
    DEVICE void copy(unsigned, unsigned) {}
    DEVICE void fetch(unsigned places) {
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int row = first + n * ROWS;
            const Place place = load_place(places + (BK % ROWS || TURNS == 1 ? min(row, BK - 1) : row) * 16);
#pragma unroll
            for (int i = 0; i < TURNS; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    held[n][i][e] =
                        In::inside(p, place, columns[i][e]) ? *In::element(p, place, columns[i][e]) : typename O::T{};
        }
    }
    DEVICE void store(unsigned stage) {
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int row = first + n * ROWS;
#pragma unroll
            for (int i = 0; i < TURNS; ++i)
                if (at[i] >= 0 && row < BK) {
                    static_assert(O::SIZE == 2);
                    store_word(stage + In::place(row, at[i]), bits(held[n][i][0]) | bits(held[n][i][1]) << 16);
                }
        }
    }
};

// A lane a pixel; the warps share pieces of eight columns, known from a table.
template <class O, bool OF_X> struct Loader<O, OF_X, PIXELS> {
    using In = Operand<O, OF_X>;
    static constexpr int PIECES = In::WIDTH / 8, COUNT = (PIECES + O::WARPS - 1) / O::WARPS;
    const Gradient &p;
    unsigned table;
    typename O::T held[COUNT][8];

    DEVICE Loader(const Gradient &p_, unsigned tables, int column0, int group0) : p(p_) {
        table = tables + (OF_X ? 0 : O::COLUMNS * O::GROUPS_PER_TILE * 16);
        for (int i = threadIdx.x; i < In::WIDTH; i += O::THREADS) {
            const Column column = In::column(p, i, column0, group0);
            store_shared<16>(table + i * 16, {{column.shift, (unsigned)column.h, (unsigned)column.w, 0}});
        }
    }
    DEVICE void copy(unsigned, unsigned) {}
    DEVICE void fetch(unsigned places) {
        const Place place = load_place(places + threadIdx.x % 32 * 16);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int piece = (int)threadIdx.x / 32 + i * O::WARPS;
            if (PIECES % O::WARPS && piece >= PIECES) break;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const Piece<16> v = load_shared<16>(table + (piece * 8 + e) * 16);
                const Column column{v.v[0], (int)v.v[1], (int)v.v[2]};
                held[i][e] = In::inside(p, place, column) ? *In::element(p, place, column) : typename O::T{};
            }
        }
    }
    DEVICE void store(unsigned stage) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int piece = (int)threadIdx.x / 32 + i * O::WARPS;
            if (PIECES % O::WARPS && piece >= PIECES) break;
            constexpr int EACH = 16 / O::SIZE;
#pragma unroll
            for (int first = 0; first < 8; first += EACH) {
                Piece<16> v{};
#pragma unroll
                for (int e = 0; e < EACH; ++e) v.v[e * O::SIZE / 4] |= bits(held[i][first + e]) << e * O::SIZE % 4 * 8;
                store_shared<16>(stage + In::place(threadIdx.x % 32, piece * 8 + first), v);
            }
        }
    }
};

// Where the pixel `number` lies, to the table.
template <class O> DEVICE void find_place(const Gradient &p, unsigned number, unsigned to) {
    store_place(to, place_of<O::NCHW>(p, number));
}
