// The parts of shared memory through which outputs go to y, and residuals come, in lines of 128 bytes: what threads move there
// and from there.
#pragma once

#include "async.cuh"
#include "tile.cuh"

// Where a warpgroup's outputs go: its tile's first filter, group and pixel, filters in a group, the distance of two filters in
// y (NCHW), a table of its pixels' places in y, -1 where there is none, and one of its filters' bias. `map`: of y, for the copy
// engine. `delivered`: barriers of the ring of staging parts into which the copy engine brings residuals, which say that one is
// there, and behind them those that say that one may come; `part` of the ring that is next, and its barriers' parity.
struct Place {
    int filter, group, pixel, filters, step;
    unsigned table, bias, staging;
    int barrier;
    const void *map;
    unsigned delivered;
    int part;
    unsigned phase;
};

DEVICE int place_of(const Place &at, int pixel) {
    int place;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(place) : "r"(at.table + 4 * pixel) : "memory");
    return place;
}
DEVICE void set_place(unsigned table, int pixel, int place) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(table + 4 * pixel), "r"(place) : "memory");
}

// BYTES between registers and shared or global memory.
template <int BYTES>
struct Piece {
    unsigned v[BYTES > 4 ? BYTES / 4 : 1];
};
template <int BYTES>
DEVICE Piece<BYTES> load_shared(unsigned from) {
    Piece<BYTES> r;
    if constexpr (BYTES == 16)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
                     : "r"(from)
                     : "memory");
    if constexpr (BYTES == 8)
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(r.v[0]), "=r"(r.v[1]) : "r"(from) : "memory");
    if constexpr (BYTES == 4) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r.v[0]) : "r"(from) : "memory");
    if constexpr (BYTES == 2) {
        unsigned short low;
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(low) : "r"(from) : "memory");
        r.v[0] = low;
    }
    return r;
}
template <int BYTES>
DEVICE void store_shared(unsigned to, const Piece<BYTES> &p) {
    if constexpr (BYTES == 16)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(p.v[0]), "r"(p.v[1]), "r"(p.v[2]), "r"(p.v[3])
                     : "memory");
    if constexpr (BYTES == 8) asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(p.v[0]), "r"(p.v[1]) : "memory");
    if constexpr (BYTES == 4) asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(p.v[0]) : "memory");
    if constexpr (BYTES == 2) asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"((unsigned short)p.v[0]) : "memory");
}
template <int BYTES>
DEVICE Piece<BYTES> load_global(const void *from) {
    Piece<BYTES> r;
    if constexpr (BYTES == 16) *reinterpret_cast<uint4 *>(r.v) = *static_cast<const uint4 *>(from);
    if constexpr (BYTES == 8) *reinterpret_cast<uint2 *>(r.v) = *static_cast<const uint2 *>(from);
    if constexpr (BYTES == 4) r.v[0] = *static_cast<const unsigned *>(from);
    if constexpr (BYTES == 2) r.v[0] = *static_cast<const unsigned short *>(from);
    return r;
}
template <int BYTES>
DEVICE void store_global(void *to, const Piece<BYTES> &p) {
    if constexpr (BYTES == 16) *static_cast<uint4 *>(to) = make_uint4(p.v[0], p.v[1], p.v[2], p.v[3]);
    if constexpr (BYTES == 8) *static_cast<uint2 *>(to) = make_uint2(p.v[0], p.v[1]);
    if constexpr (BYTES == 4) *static_cast<unsigned *>(to) = p.v[0];
    if constexpr (BYTES == 2) *static_cast<unsigned short *>(to) = p.v[0];
}

// Address of element `at` of a line of the staging part: lines of 128 bytes, swizzled by pieces of 16 as the copy engine wants
// them; what is longer goes on 64 lines further.
template <class O>
DEVICE unsigned staged(unsigned staging, unsigned line, unsigned at) {
    constexpr unsigned SIZE = sizeof(typename O::T), PIECE = 16 / SIZE;
    const unsigned within = at % O::INNER;
    return staging + (at / O::INNER * 64 + line) * 128 + ((within / PIECE ^ line % 8) << 4) + within % PIECE * SIZE;
}

// What a thread moves of the 64 lines of a staging part: V elements of each LINES-th of them. Parts begin on multiples of 1024
// bytes, so that only the bits of a line's swizzle change besides a constant.
template <class O>
struct Lines {
    static constexpr int ACROSS = 64 / O::V, LINES = 128 / ACROSS, COUNT = 64 / LINES;
    int row, first;
    unsigned base;
    DEVICE Lines(const Place &at)
        : row(threadIdx.x % 128 / ACROSS), first(threadIdx.x % ACROSS * O::V), base(staged<O>(at.staging, row, first)) {}
    DEVICE unsigned address(int i) const { return (base ^ LINES * i % 8 * 16) + LINES * i * 128; }
    DEVICE int pixel(int i) const { return O::NCHW ? first : LINES * i + row; }
    DEVICE int filter(int i) const { return O::NCHW ? LINES * i + row : first; }
    // Where a thread's first filter is, and how much further its others. ptxas would add up what leads there for each of them;
    // what it cannot see through is added up once.
    template <class T>
    DEVICE T *mine(const Place &at, T *global, int filter0) const {
        T *to = global + (at.filter + filter0 + filter(0)) * (O::NCHW ? at.step : 1);
        asm("" : "+l"(to));
        return to;
    }
    DEVICE int further(const Place &at, int i) const { return O::NCHW ? LINES * i * at.step : 0; }
};

// Lines between the staging part and y or residual (IN), V elements a thread.
template <class O, bool IN>
DEVICE void move_lines(const Place &at, typename O::T *global, int pixel0, int pixels, int filter0, int filters) {
    constexpr int BYTES = O::V * (int)sizeof(typename O::T);
    const Lines<O> lines(at);
    const int end = min(filters, at.filters - at.filter - filter0);
    typename O::T *const mine = lines.mine(at, global, filter0);
    // All places first, then all loads, then all stores: each step waits once.
    constexpr int AT_ONCE = lines.COUNT < 4 ? lines.COUNT : 4;
#pragma unroll
    for (int start = 0; start < lines.COUNT; start += AT_ONCE) {
        int there[AT_ONCE];
        Piece<BYTES> piece[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int pixel = lines.pixel(start + i);
            there[i] = pixel < pixels && lines.filter(start + i) < end ? place_of(at, pixel0 + pixel) : -1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (there[i] < 0) continue;
            if constexpr (IN)
                piece[i] = load_global<BYTES>(mine + there[i] + lines.further(at, start + i));
            else
                piece[i] = load_shared<BYTES>(lines.address(start + i));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (there[i] < 0) continue;
            if constexpr (IN)
                store_shared<BYTES>(lines.address(start + i), piece[i]);
            else
                store_global<BYTES>(mine + there[i] + lines.further(at, start + i), piece[i]);
        }
    }
}

// The residual of a round on its way to the staging part.
template <class O>
DEVICE void fetch_lines(const Place &at, const typename O::T *residual, int pixel0, int pixels, int filter0, int filters) {
    constexpr int BYTES = O::V * (int)sizeof(typename O::T);
    const Lines<O> lines(at);
    const int end = min(filters, at.filters - at.filter - filter0);
    const typename O::T *const mine = lines.mine(at, residual, filter0);
#pragma unroll
    for (int i = 0; i < lines.COUNT; ++i) {
        const int pixel = lines.pixel(i);
        const int place = pixel < pixels && lines.filter(i) < end ? place_of(at, pixel0 + pixel) : -1;
        if (place >= 0) copy_piece<BYTES>(lines.address(i), mine + place + lines.further(at, i), true);
    }
}
