// Rows of a picture on their way to shared memory, as float32: a strip's, into a ring of RING rows of PIECES pieces of
// four elements. Beyond the picture's edges they follow from the modes.
#pragma once

#include "cp_async.cuh"
#include "grid.cuh"
#include "ops/filter/filter.cuh"

struct FilterTiles {
    const void *x, *list;
    void *y;
    // Of the picture: rows, elements of a row; rows and elements in front of a window's own, what is beyond the edges.
    long long height, width, before_h, before_w, mode_h, mode_w;
    // Of a strip's blocks: steps of the first ones, their number, steps of the others.
    long long steps, segments, last_steps;
};

DEVICE float4 as_float4(const float (&v)[4]) { return make_float4(v[0], v[1], v[2], v[3]); }
DEVICE void put(float *to, float4 v) { to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w; }

// An element as float32. Of bits behind those of 2^23: no conversion, of which a multiprocessor makes few at once.
template <typename T> DEVICE float widened(T v) { return upcast(v); }
DEVICE float widened(unsigned short v) { return __uint_as_float(0x4b000000u | v) - 8388608.0f; }
DEVICE float widened(short v) { return __uint_as_float(0x4b000000u | ((unsigned short)v ^ 0x8000u)) - 8421376.0f; }
DEVICE float widened(unsigned char v) { return widened((unsigned short)v); }
DEVICE float widened(signed char v) { return widened((short)v); }

// Element i of those that begin in the first word's lowest byte.
template <typename T, int WORDS> DEVICE float element(const unsigned (&words)[WORDS], int i) {
    if constexpr (sizeof(T) == 4) return __uint_as_float(words[i]);
    else if constexpr (sizeof(T) == 1) {
        const bool negative = T(-1) < T(0);
        const unsigned bits = negative ? words[i / 4] ^ 0x80808080u : words[i / 4];
        return __uint_as_float(__byte_perm(bits, 0x4b000000u, 0x7440 + i % 4)) - (negative ? 8388736.0f : 8388608.0f);
    } else {
        const unsigned short bits = words[i / 2] >> i % 2 * 16;
        return widened(reinterpret_cast<const T &>(bits));
    }
}

// The bits of four elements of 1 or 2 bytes. ALIGNED: their address is a multiple of the four's size.
template <bool ALIGNED, typename T> DEVICE void load_elements(const T *from, unsigned (&words)[sizeof(T)]) {
    const unsigned beside = ALIGNED ? 0 : reinterpret_cast<unsigned long long>(from) & 3;
    const unsigned *const at = reinterpret_cast<const unsigned *>(reinterpret_cast<const char *>(from) - beside);
    if constexpr (ALIGNED && sizeof(T) == 2) {
        const uint2 both = *reinterpret_cast<const uint2 *>(at);
        words[0] = both.x, words[1] = both.y;
        return;
    }
    unsigned next = at[0];
#pragma unroll
    for (int i = 0; i < sizeof(T); ++i) {
        const unsigned low = next;
        next = i + 1 < sizeof(T) || beside ? at[i + 1] : 0;
        words[i] = __funnelshift_r(low, next, 8 * beside);
    }
}

// A piece of four: float32 by itself, and what came in words as float32.
template <bool ALIGNED> DEVICE void copy_piece(float *piece, const float *from) {
    const unsigned to = shared_address(piece);
    if constexpr (ALIGNED) cp_async<16>(to, from, true);
    else
#pragma unroll
        for (int j = 0; j < 4; ++j) cp_async<4>(to + 4 * j, from + j, true);
}
template <typename T> DEVICE void put_piece(float *piece, const unsigned (&words)[sizeof(T)]) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = element<T>(words, j);
    *reinterpret_cast<float4 *>(piece) = as_float4(v);
}

// Where piece `item` of rows of the ring lies, from place `first` on.
template <class P> DEVICE float *piece_of(float *ring, int first, int item) {
    item += first * P::PIECES;
    return ring + 4 * (item < P::RING * P::PIECES ? item : item - P::RING * P::PIECES);
}

// `count` pieces of rows on their way, from `corner` of the picture to place `first` of the ring on. float32 is copied
// beside what the block does; of others a thread holds the first pieces in registers.
template <class P> struct Rows {
    using T = typename P::T;
    static constexpr bool ASYNC = sizeof(T) == 4;
    static constexpr int TURNS = (P::ROWS * P::PIECES + P::THREADS - 1) / P::THREADS, MOST = 8 / sizeof(T),
                         TOGETHER = ASYNC || TURNS < MOST ? TURNS : MOST, STRIDE = TOGETHER * P::THREADS;
    const T *corner;
    float *ring;
    unsigned pitch_bytes;
    int first, count;
    unsigned words[ASYNC ? 1 : TOGETHER][sizeof(T)];

    DEVICE bool aligned() const {
        return (reinterpret_cast<unsigned long long>(corner) | pitch_bytes) % (4 * sizeof(T)) == 0;
    }
    DEVICE const T *address(unsigned item) const {
        const unsigned row = item / P::PIECES;
        return reinterpret_cast<const T *>(reinterpret_cast<const char *>(corner) +
                                           (unsigned long long)row * pitch_bytes) +
               (item - row * P::PIECES) * 4;
    }
    template <bool ALIGNED> DEVICE void copy() {
#pragma unroll 4
        for (int item = threadIdx.x; item < count; item += P::THREADS)
            copy_piece<ALIGNED>(piece_of<P>(ring, first, item), address(item));
    }
    template <bool ALIGNED> DEVICE void fetch(int from) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            load_elements<ALIGNED>(address(min(from + i * P::THREADS, count - 1)), words[i]);
    }
    DEVICE void begin() {
        if constexpr (ASYNC) {
            if (aligned()) copy<true>();
            else copy<false>();
        } else if (aligned()) fetch<true>(threadIdx.x);
        else fetch<false>(threadIdx.x);
    }
    DEVICE void end() {
        if constexpr (!ASYNC)
#pragma unroll 1
            for (int from = threadIdx.x; from < count;) {
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    if (from + i * P::THREADS >= count) break;
                    put_piece<T>(piece_of<P>(ring, first, from + i * P::THREADS), words[i]);
                }
                from += STRIDE;
                if (from >= count) break;
                if (aligned()) fetch<true>(from);
                else fetch<false>(from);
            }
    }
};

// The same of rows with elements beyond the picture, at once. `left`: element of the picture that a row begins with.
template <class P, bool ALIGNED>
DEVICE void load_edge(const FilterTiles &a, const typename P::T *x, float cval, float *ring, int first, int top,
                      int rows, int left) {
    using T = typename P::T;
    constexpr int C = P::C;
    const int height = a.height, width = a.width;
    const bool within = top >= 0 && top + rows <= height;
    // Elements of a row that are within the picture, in pieces; end of those that windows see.
    const int from = max(0, 3 - left) / 4 * 4, to = max(from, min(P::PITCH, width - left) / 4 * 4);
    const int end = min(P::PITCH, width - left - (int)a.before_w + (P::TAPS_W - 1) * C);
#pragma unroll 1
    for (int item = threadIdx.x; item < rows * P::PIECES; item += P::THREADS) {
        const int e = item % P::PIECES * 4, row = top + item / P::PIECES;
        const int h = within ? row : source_index(row, height, a.mode_h);
        float *const piece = piece_of<P>(ring, first, item);
        const T *const there = x + ((long long)h * width + (left + e));
        if (h < 0) *reinterpret_cast<float4 *>(piece) = make_float4(cval, cval, cval, cval);
        else if (e >= from && e < to) {
            if constexpr (sizeof(T) == 4) copy_piece<ALIGNED>(piece, there);
            else {
                unsigned words[sizeof(T)];
                load_elements<ALIGNED>(there, words);
                put_piece<T>(piece, words);
            }
        }
    }
    // One by one what is in front of these pieces, and behind them: some lanes of a warp a row.
    const int beside = from + end - to;
    int bits = 0;
    while (bits < 5 && 1 << bits < beside) ++bits;
#pragma unroll 1
    for (int number = threadIdx.x & (1 << bits) - 1; number < beside; number += 1 << bits) {
        const int e = number < from ? number : number - from + to, there = left + e;
        const int pixel = there < 0 ? -((C - 1 - there) / C) : there / C, w = source_index(pixel, width / C, a.mode_w);
        const T *const column = x + (w * C + there - pixel * C);
#pragma unroll 1
        for (int row = threadIdx.x >> bits; row < rows; row += P::THREADS >> bits) {
            const int h = within ? top + row : source_index(top + row, height, a.mode_h), place = first + row;
            float *const element = ring + (place < P::RING ? place : place - P::RING) * P::PITCH + e;
            if (h < 0) continue;
            if (w < 0) *element = cval;
            else if constexpr (sizeof(T) == 4) cp_async<4>(element, column + (long long)h * width, true);
            else *element = widened(column[(long long)h * width]);
        }
    }
}
