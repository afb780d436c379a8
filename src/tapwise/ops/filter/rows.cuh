// Rows of a picture on their way to shared memory, as float32 or float16 (STORED): a strip's, into a ring of RING rows
// of PIECES pieces of PIECE elements, PITCH elements apart. Beyond the picture's edges they follow from the modes.
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

// The bits of elements of 1 or 2 bytes. ALIGNED: their address is a multiple of four elements' size.
template <bool ALIGNED, typename T, int WORDS> DEVICE void load_elements(const T *from, unsigned (&words)[WORDS]) {
    const unsigned beside = ALIGNED ? 0 : reinterpret_cast<unsigned long long>(from) & 3;
    const unsigned *const at = reinterpret_cast<const unsigned *>(reinterpret_cast<const char *>(from) - beside);
    if constexpr (ALIGNED && sizeof(T) == 2 && WORDS == 2) {
        const uint2 both = *reinterpret_cast<const uint2 *>(at);
        words[0] = both.x, words[1] = both.y;
        return;
    }
    unsigned next = at[0];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const unsigned low = next;
        next = i + 1 < WORDS || beside ? at[i + 1] : 0;
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

// Bytes as float16: of bits behind those of 2^10, two in a word.
template <typename T> DEVICE void put_piece(f16 *piece, const unsigned (&words)[2]) {
    constexpr bool NEGATIVE = T(-1) < T(0);
    unsigned v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned bits = NEGATIVE ? words[i / 2] ^ 0x80808080u : words[i / 2];
        v[i] = subtract_f16x2(__byte_perm(bits, 0x64646464u, i % 2 ? 0x4342 : 0x4140),
                              NEGATIVE ? 0x64806480u : 0x64006400u);
    }
    *reinterpret_cast<uint4 *>(piece) = make_uint4(v[0], v[1], v[2], v[3]);
}
DEVICE void put_constant(float *piece, float v) { *reinterpret_cast<float4 *>(piece) = make_float4(v, v, v, v); }
DEVICE void put_constant(f16 *piece, float v) {
    const unsigned two = Element<f16>::pack(v, v);
    *reinterpret_cast<uint4 *>(piece) = make_uint4(two, two, two, two);
}
DEVICE void put_element(float *to, float v) { *to = v; }
DEVICE void put_element(f16 *to, float v) { *to = Element<f16>::from_float(v); }

// Where piece `item` of rows of the ring lies, from place `first` on.
template <class P> DEVICE typename P::STORED *piece_of(typename P::STORED *ring, int first, int item) {
    if constexpr (P::PITCH == P::PIECE * P::PIECES) {
        item += first * P::PIECES;
        return ring + P::PIECE * (item < P::RING * P::PIECES ? item : item - P::RING * P::PIECES);
    } else {
        const int row = (unsigned)item / P::PIECES, place = first + row;
        return ring + (place < P::RING ? place : place - P::RING) * P::PITCH + (item - row * P::PIECES) * P::PIECE;
    }
}

// `count` pieces of rows on their way, from `corner` of the picture to place `first` of the ring on. float32 is copied
// beside what the block does; of others a thread holds the first pieces in registers.
template <class P> struct Rows {
    using T = typename P::T;
    static constexpr bool ASYNC = sizeof(T) == 4;
    static constexpr int TURNS = (P::ROWS * P::PIECES + P::THREADS - 1) / P::THREADS;
    static constexpr int TOGETHER = ASYNC || TURNS < P::AT_ONCE ? TURNS : P::AT_ONCE, STRIDE = TOGETHER * P::THREADS;
    const T *corner;
    typename P::STORED *ring;
    unsigned pitch_bytes;
    int first, count;
    unsigned words[ASYNC ? 1 : TOGETHER][P::PIECE * sizeof(T) / 4];

    DEVICE bool aligned() const {
        return (reinterpret_cast<unsigned long long>(corner) | pitch_bytes) % (4 * sizeof(T)) == 0;
    }
    DEVICE const T *address(unsigned item) const {
        const unsigned row = item / P::PIECES;
        return reinterpret_cast<const T *>(reinterpret_cast<const char *>(corner) +
                                           (unsigned long long)row * pitch_bytes) +
               (item - row * P::PIECES) * P::PIECE;
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

// The same of elements that are no float32, where threads have pieces enough for some rows at a time (ABREAST): a
// thread keeps its piece of a row, and its rows are as far apart each time.
template <class P> struct RowsAbreast {
    using T = typename P::T;
    static constexpr int ABREAST = P::THREADS / P::PIECES, TURNS = (P::ROWS + ABREAST - 1) / ABREAST;
    static constexpr int TOGETHER = TURNS < P::AT_ONCE ? TURNS : P::AT_ONCE;
    const T *corner;
    typename P::STORED *ring;
    unsigned pitch_bytes;
    int first, count;
    unsigned words[TOGETHER][P::PIECE * sizeof(T) / 4];

    DEVICE bool aligned() const {
        return (reinterpret_cast<unsigned long long>(corner) | pitch_bytes) % (4 * sizeof(T)) == 0;
    }
    // Threads without a row: one behind all.
    DEVICE static int own_row() { return threadIdx.x < ABREAST * P::PIECES ? threadIdx.x / P::PIECES : 1 << 20; }
    template <bool ALIGNED> DEVICE void fetch(int from) {
        const char *at = reinterpret_cast<const char *>(corner + threadIdx.x % P::PIECES * P::PIECE) +
                         (unsigned long long)from * pitch_bytes;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i, at += (unsigned long long)ABREAST * pitch_bytes)
            if (from + i * ABREAST < count / P::PIECES)
                load_elements<ALIGNED>(reinterpret_cast<const T *>(at), words[i]);
    }
    DEVICE void begin() {
        if (aligned()) fetch<true>(own_row());
        else fetch<false>(own_row());
    }
    DEVICE void end() {
        const int rows = count / P::PIECES;
        typename P::STORED *const to = ring + threadIdx.x % P::PIECES * P::PIECE;
#pragma unroll 1
        for (int from = own_row(); from < rows;) {
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int place = first + from + i * ABREAST;
                if (from + i * ABREAST < rows)
                    put_piece<T>(to + (place < P::RING ? place : place - P::RING) * P::PITCH, words[i]);
            }
            from += TOGETHER * ABREAST;
            if (from >= rows) break;
            if (aligned()) fetch<true>(from);
            else fetch<false>(from);
        }
    }
};
template <class P, bool ABREAST> struct RowsOf { using type = Rows<P>; };
template <class P> struct RowsOf<P, true> { using type = RowsAbreast<P>; };

// The same of rows with elements beyond the picture, at once. `left`: element of the picture that a row begins with.
template <class P, bool ALIGNED>
DEVICE void load_edge(const FilterTiles &a, const typename P::T *x, float cval, typename P::STORED *ring, int first,
                      int top, int rows, int left) {
    using T = typename P::T;
    constexpr int C = P::C, PIECE = P::PIECE, WIDTH = PIECE * P::PIECES;
    const int height = a.height, width = a.width;
    const bool within = top >= 0 && top + rows <= height;
    // Elements of a row that are within the picture, in pieces; end of those that windows see.
    const int from = max(0, PIECE - 1 - left) / PIECE * PIECE;
    const int to = max(from, min(WIDTH, width - left) / PIECE * PIECE);
    const int end = min(WIDTH, width - left - (int)a.before_w + (P::TAPS_W - 1) * C);
#pragma unroll 1
    for (int item = threadIdx.x; item < rows * P::PIECES; item += P::THREADS) {
        const int e = item % P::PIECES * PIECE, row = top + item / P::PIECES;
        const int h = within ? row : source_index(row, height, a.mode_h);
        typename P::STORED *const piece = piece_of<P>(ring, first, item);
        const T *const there = x + ((long long)h * width + (left + e));
        if (h < 0) put_constant(piece, cval);
        else if (e >= from && e < to) {
            if constexpr (sizeof(T) == 4) copy_piece<ALIGNED>(piece, there);
            else {
                unsigned words[PIECE * sizeof(T) / 4];
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
            typename P::STORED *const element = ring + (place < P::RING ? place : place - P::RING) * P::PITCH + e;
            if (h < 0) continue;
            if (w < 0) put_element(element, cval);
            else if constexpr (sizeof(T) == 4) cp_async<4>(element, column + (long long)h * width, true);
            else put_element(element, widened(column[(long long)h * width]));
        }
    }
}

// A block's part of a strip, from top to bottom. `columns(place)` takes what it wants of the ring, from the place of a
// step's first row on, before the rows of the next step may come to places of older ones; `outputs(place, row)` does
// the rest beside their way. `cval`: address of what is beyond the edges.
template <class P, class Columns, class Outputs>
DEVICE void down_strip(const FilterTiles &a, const float *cval, typename P::STORED *ring, Columns columns,
                       Outputs outputs) {
    using T = typename P::T;
    // The last blocks have fewer steps, so that all multiprocessors end at about the same time.
    const int number = blockIdx.y, many = min(number, (int)a.segments), few = number - many;
    const int h0 = (many * (int)a.steps + few * (int)a.last_steps) * P::ROWS, w0 = blockIdx.x * P::COLUMNS;
    const int end = min((int)a.height, h0 + (int)(number < a.segments ? a.steps : a.last_steps) * P::ROWS);
    const T *const x = static_cast<const T *>(a.x) + (long long)blockIdx.z * a.height * a.width;
    // Rows of the next step come while this one's are added up: to places of rows that, once `columns` is done, no more
    // are wanted, or to others. `first`: place of this step's first row.
    int first = 0;
#pragma unroll 1
    for (int h = h0 - P::ROWS; h < end; h += P::ROWS) {
        const bool begun = h >= h0;
        if (begun) columns(first);
        typename RowsOf<P, P::ABREAST>::type coming;
        coming.count = 0;
        if (h + P::ROWS < end) {
            const int rows = begun ? P::ROWS : P::IN_ROWS, top = h + P::ROWS + P::IN_ROWS - rows - (int)a.before_h;
            const int left = w0 - (int)a.before_w - P::SKIP, width = a.width, place = begun ? first + P::IN_ROWS : 0;
            coming.corner = x + ((long long)top * width + left), coming.pitch_bytes = width * (unsigned)sizeof(T);
            coming.ring = ring, coming.first = place < P::RING ? place : place - P::RING;
            if (left >= 0 && left + P::PIECE * P::PIECES <= width && top >= 0 && top + rows <= a.height) {
                coming.count = rows * P::PIECES;
                coming.begin();
            } else if (coming.aligned()) load_edge<P, true>(a, x, *cval, ring, coming.first, top, rows, left);
            else load_edge<P, false>(a, x, *cval, ring, coming.first, top, rows, left);
            if constexpr (sizeof(T) == 4) cp_async_commit();
        }
        if (begun) {
            outputs(first, h);
            first += P::ROWS;
            first -= first < P::RING ? 0 : P::RING;
        }
        coming.end();
        if constexpr (sizeof(T) == 4) cp_async_wait<0>();
        __syncthreads();
    }
}
