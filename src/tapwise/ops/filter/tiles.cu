// Filters on pictures, a tile of the result a block: what its windows see comes to shared memory once, as float32, and
// each thread goes over it with several outputs in registers. Channels lie side by side, so a tap of a row is as many
// elements from the next as there are channels.
//
// At once: a thread has DEEP rows of 4 outputs. It goes down the window's rows, with as many of the tile in registers,
// a chunk of CHUNK taps of a row at a time. A column and a row: a thread makes the column's sums of DEEP rows of 4,
// which go to shared memory, and then the row's of ALONG neighbours. Weights lie in shared memory. Where one is 0, it
// is skipped by loops of their own: what it sees, infinity perhaps, does not count.
#include "cp_async.cuh"
#include "grid.cuh"
#include "ops/filter/filter.cuh"

struct FilterTiles {
    const void *x, *list;
    void *y;
    // Of the picture: rows, elements of a row; rows and elements in front of a window's own, what is beyond the edges.
    long long height, width, before_h, before_w, mode_h, mode_w;
};

// What a list begins with. WHOLE: whether no weight is 0.
enum Constant { CVAL, LOW, HIGH, START, COLUMN_EPSILON, EPSILON, WHOLE, CONSTANTS = 8 };

// T: of x; OP, C channels; SEPARABLE; TAPS_H, TAPS_W of a window, CHUNK of a row at a time, SKIP elements of the tile
// in front of the first; ROWS, COLUMNS (elements) of a tile; THREADS; of a thread, DEEP rows of outputs, or of column
// sums, and ALONG outputs of a row; PIECES of 4 elements of a row of the tile with what it sees; INTEGRAL: y holds
// integers, CLIP: within their range; TRUNCATE: so do the column's sums.
template <class Traits> struct FilterTile : Traits {
    using B = Traits;
    // Pieces of 4 that the windows of a thread's outputs see of a chunk, and that a chunk is.
    static constexpr int SEEN = (B::SKIP + B::ALONG + (B::CHUNK - 1) * B::C + 3) / 4;
    static constexpr int CHUNKS = (B::TAPS_W + B::CHUNK - 1) / B::CHUNK, STEP = B::CHUNK * B::C / 4;
    // Words of a chunk's weights, of a row's, of all in front of a row that belongs to a column, and of the list.
    static constexpr int CHUNK_WORDS = (B::CHUNK + 3) / 4 * 4, ROW_WORDS = CHUNKS * CHUNK_WORDS;
    static constexpr int ROW_AT = CONSTANTS + (B::TAPS_H + B::DEEP - 1) / B::DEEP * B::DEEP;
    static constexpr int WORDS = B::SEPARABLE ? ROW_AT + ROW_WORDS : CONSTANTS + B::TAPS_H * ROW_WORDS;
    static constexpr int IN_ROWS = B::ROWS + B::TAPS_H - 1, PITCH = 4 * B::PIECES;
    // Pieces of column sums are swapped with those beside them, so that a warp's lie in all banks.
    static constexpr int SWAPPED = B::ALONG / 4 % 2 ? 0 : B::ALONG / 4 - 1;
    static constexpr int PITCH_SUMS = (B::PIECES + SWAPPED) / (SWAPPED + 1) * (SWAPPED + 1) * 4;
    // Turns of loops that are unrolled: all where a thread has not too many products.
    static constexpr int MOST = 800, ALL_ROWS = B::TAPS_H * B::CHUNK * B::DEEP * 4 <= MOST ? B::TAPS_H : 1,
                         ALL_COLUMN = B::TAPS_H * B::DEEP * 4 <= MOST ? B::TAPS_H : 1,
                         ALL_CHUNKS = B::TAPS_W * B::ALONG <= MOST ? CHUNKS : 1;
    static_assert(B::ROWS % B::DEEP == 0 && B::COLUMNS % B::ALONG == 0 && WORDS % 4 == 0);
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

// The tile's elements from row `top` and element `left` on, pieces of 4 at a time. EDGE: some lie beyond the picture;
// ALIGNED: addresses of pieces are multiples of their size.
template <class P, bool EDGE, bool ALIGNED>
DEVICE void load_tile(const FilterTiles &a, const typename P::T *x, float cval, float *tile, int top, int left) {
    using T = typename P::T;
    constexpr bool ASYNC = sizeof(T) == 4;
    constexpr int C = P::C, COUNT = P::IN_ROWS * P::PIECES, TURNS = (COUNT + P::THREADS - 1) / P::THREADS;
    // All in one turn, or few.
    constexpr int MOST = 8, TOGETHER = (TURNS + (TURNS + MOST - 1) / MOST - 1) / ((TURNS + MOST - 1) / MOST);
    const int height = a.height, width = a.width;
#pragma unroll 1
    for (int first = threadIdx.x; first < COUNT; first += TOGETHER * P::THREADS) {
        unsigned words[TOGETHER][sizeof(T)];
        int beyond = 0;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int item = first + i * P::THREADS, row = item / P::PIECES, w = left + item % P::PIECES * 4;
            if (item >= COUNT) break;
            int h = top + row;
            if constexpr (EDGE) {
                h = source_index(h, height, a.mode_h);
                if (h < 0 || w < 0 || w + 4 > width) {
                    beyond |= 1 << i;
                    continue;
                }
            }
            const T *const from = x + ((long long)h * width + w);
            if constexpr (ASYNC) {
                const unsigned to = shared_address(tile + 4 * item);
                if constexpr (ALIGNED) {
                    cp_async<16>(to, from, true);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j) cp_async<4>(to + 4 * j, from + j, true);
                }
            } else load_elements<ALIGNED>(from, words[i]);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int item = first + i * P::THREADS;
            if (item >= COUNT) break;
            float *const to = tile + 4 * item;
            if (EDGE && beyond & 1 << i) {
                const int h = source_index(top + item / P::PIECES, height, a.mode_h);
#pragma unroll 1
                for (int j = 0; j < 4; ++j) {
                    const int e = left + item % P::PIECES * 4 + j, pixel = e < 0 ? -((C - 1 - e) / C) : e / C;
                    const int w = h < 0 ? -1 : source_index(pixel, width / C, a.mode_w);
                    to[j] = w < 0 ? cval : widened(x[(long long)h * width + w * C + e - pixel * C]);
                }
            } else if (!ASYNC) {
                float v[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) v[j] = element<T>(words[i], j);
                *reinterpret_cast<float4 *>(to) = as_float4(v);
            }
        }
    }
    if constexpr (ASYNC) cp_async_commit(), cp_async_wait<0>();
}

// A tap's term to a sum. The largest of nothing is no number, and any number is larger.
template <class P> DEVICE void add_term(float &sum, float weight, float value) {
    if constexpr (P::OP == SUM) sum += weight * value;
    else sum = P::OP == LARGEST ? fmaxf(sum, value) : fminf(sum, value);
}
template <class P> DEVICE float first_sum(float start) { return P::OP == SUM ? start : NOT_A_NUMBER; }

// Where a piece of a row of column sums lies in it.
template <class P> DEVICE int swapped(int piece) { return piece ^ (piece >> 3 & P::SWAPPED); }

// COUNT results of a row from element w on, those of the picture.
template <class P, typename Y, int COUNT>
DEVICE void store_results(Y *line, int w, int width, const float (&sums)[COUNT], const float *constants) {
    constexpr int BYTES = COUNT * sizeof(Y), MOST = BYTES & -BYTES, EACH = (MOST < 16 ? MOST : 16) / sizeof(Y);
    const float low = constants[LOW], high = constants[HIGH], epsilon = constants[EPSILON];
    Y *const to = line + w;
    const bool at_once = w + COUNT <= width && reinterpret_cast<unsigned long long>(to) % (EACH * sizeof(Y)) == 0;
#pragma unroll
    for (int i = 0; i < COUNT; i += EACH) {
        Neighbours<Y, EACH> results;
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            results.v[j] = store<Y, P::INTEGRAL, false, P::CLIP>(sums[i + j], low, high, epsilon);
        if (at_once) {
            *reinterpret_cast<Neighbours<Y, EACH> *>(to + i) = results;
            continue;
        }
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            if (w + i + j < width) to[i + j] = results.v[j];
    }
}

// Windows at once. ALL: every weight counts.
template <class P, bool ALL, typename Y>
DEVICE void filter_at_once(const FilterTiles &a, const float *constants, const float *tile, Y *y, int h0, int w0) {
    constexpr int DEEP = P::DEEP, ACROSS = P::COLUMNS / 4, ITEMS = P::ROWS / DEEP * ACROSS;
    // Taps of the last chunk.
    constexpr int LAST = P::TAPS_W - (P::CHUNKS - 1) * P::CHUNK;
    static_assert(P::ALONG == 4);
#pragma unroll 1
    for (int item = threadIdx.x; item < ITEMS; item += P::THREADS) {
        const int along = item % ACROSS * 4, row = item / ACROSS * DEEP;
        float sums[DEEP][4];
#pragma unroll
        for (int t = 0; t < DEEP; ++t)
#pragma unroll
            for (int v = 0; v < 4; ++v) sums[t][v] = first_sum<P>(constants[START]);
        const float *from = tile + row * P::PITCH + along, *weights = constants + CONSTANTS;
#pragma unroll 1
        for (int chunk = 0; chunk < P::CHUNKS; ++chunk, from += P::CHUNK * P::C, weights += P::CHUNK_WORDS) {
            float window[DEEP][4 * P::SEEN];
            const auto load = [&](int to, int r) {
#pragma unroll
                for (int i = 0; i < P::SEEN; ++i)
                    put(window[to] + 4 * i, *reinterpret_cast<const float4 *>(from + r * P::PITCH + 4 * i));
            };
#pragma unroll
            for (int r = 0; r < DEEP - 1; ++r) load(r, r);
#pragma unroll P::ALL_ROWS
            for (int r0 = 0; r0 < P::TAPS_H; r0 += DEEP)
#pragma unroll
                for (int j = 0; j < DEEP; ++j) {
                    if (r0 + j >= P::TAPS_H) break;
                    load((j + DEEP - 1) % DEEP, r0 + j + DEEP - 1);
                    float some[P::CHUNK_WORDS];
#pragma unroll
                    for (int i = 0; i < P::CHUNK_WORDS; i += 4)
                        put(some + i, *reinterpret_cast<const float4 *>(weights + (r0 + j) * P::ROW_WORDS + i));
#pragma unroll
                    for (int s = 0; s < P::CHUNK; ++s)
                        if ((s < LAST || chunk + 1 < P::CHUNKS) && (ALL || some[s] != 0.0f))
#pragma unroll
                            for (int t = 0; t < DEEP; ++t)
#pragma unroll
                                for (int v = 0; v < 4; ++v)
                                    add_term<P>(sums[t][v], some[s], window[(j + t) % DEEP][P::SKIP + v + s * P::C]);
                }
        }
#pragma unroll
        for (int t = 0; t < DEEP; ++t)
            if (h0 + row + t < a.height)
                store_results<P>(y + (long long)(h0 + row + t) * a.width, w0 + along, (int)a.width, sums[t], constants);
    }
}

// The column's sums of all that the row's will see.
template <class P, bool ALL> DEVICE void filter_columns(const float *constants, const float *tile, float *sums_to) {
    constexpr int DEEP = P::DEEP, ITEMS = P::ROWS / DEEP * P::PIECES;
    const float epsilon = constants[COLUMN_EPSILON];
#pragma unroll 1
    for (int item = threadIdx.x; item < ITEMS; item += P::THREADS) {
        const int row = item / P::PIECES * DEEP, along = item % P::PIECES;
        const float *const from = tile + row * P::PITCH + along * 4, *const weights = constants + CONSTANTS;
        float sums[DEEP][4], window[DEEP][4];
#pragma unroll
        for (int t = 0; t < DEEP; ++t) {
#pragma unroll
            for (int v = 0; v < 4; ++v) sums[t][v] = first_sum<P>(0.0f);
            if (t < DEEP - 1) put(window[t], *reinterpret_cast<const float4 *>(from + t * P::PITCH));
        }
#pragma unroll P::ALL_COLUMN
        for (int r0 = 0; r0 < P::TAPS_H; r0 += DEEP) {
            float some[DEEP];
#pragma unroll
            for (int i = 0; i < DEEP; i += 4) put(some + i, *reinterpret_cast<const float4 *>(weights + r0 + i));
#pragma unroll
            for (int j = 0; j < DEEP; ++j) {
                if (r0 + j >= P::TAPS_H) break;
                put(window[(j + DEEP - 1) % DEEP],
                    *reinterpret_cast<const float4 *>(from + (r0 + j + DEEP - 1) * P::PITCH));
                if (ALL || some[j] != 0.0f)
#pragma unroll
                    for (int t = 0; t < DEEP; ++t)
#pragma unroll
                        for (int v = 0; v < 4; ++v) add_term<P>(sums[t][v], some[j], window[(j + t) % DEEP][v]);
            }
        }
#pragma unroll
        for (int t = 0; t < DEEP; ++t) {
            if constexpr (P::TRUNCATE)
#pragma unroll
                for (int v = 0; v < 4; ++v) sums[t][v] = trunc(sums[t][v] + copysign(epsilon, sums[t][v]));
            reinterpret_cast<float4 *>(sums_to + (row + t) * P::PITCH_SUMS)[swapped<P>(along)] = as_float4(sums[t]);
        }
    }
}

// The row's sums of the column's.
template <class P, bool ALL, typename Y>
DEVICE void filter_rows(const FilterTiles &a, const float *constants, const float *from_sums, Y *y, int h0, int w0) {
    constexpr int ALONG = P::ALONG, ACROSS = P::COLUMNS / ALONG, ITEMS = P::ROWS * ACROSS;
#pragma unroll 1
    for (int item = threadIdx.x; item < ITEMS; item += P::THREADS) {
        const int along = item % ACROSS * ALONG, row = item / ACROSS;
        const float4 *const from = reinterpret_cast<const float4 *>(from_sums + row * P::PITCH_SUMS);
        float sums[ALONG], window[4 * P::SEEN];
#pragma unroll
        for (int v = 0; v < ALONG; ++v) sums[v] = first_sum<P>(constants[START]);
#pragma unroll
        for (int i = 0; i < P::SEEN; ++i) put(window + 4 * i, from[swapped<P>(along / 4 + i)]);
#pragma unroll P::ALL_CHUNKS
        for (int chunk = 0; chunk < P::CHUNKS; ++chunk) {
            constexpr int KEPT = P::SEEN > P::STEP ? P::SEEN - P::STEP : 0;
            if (chunk > 0) {
#pragma unroll
                for (int i = 0; i < 4 * KEPT; ++i) window[i] = window[i + 4 * P::STEP];
#pragma unroll
                for (int i = KEPT; i < P::SEEN; ++i)
                    put(window + 4 * i, from[swapped<P>(along / 4 + chunk * P::STEP + i)]);
            }
            float some[P::CHUNK_WORDS];
#pragma unroll
            for (int i = 0; i < P::CHUNK_WORDS; i += 4)
                put(some + i, *reinterpret_cast<const float4 *>(constants + P::ROW_AT + chunk * P::CHUNK_WORDS + i));
#pragma unroll
            for (int s = 0; s < P::CHUNK; ++s)
                if (chunk * P::CHUNK + s < P::TAPS_W && (ALL || some[s] != 0.0f))
#pragma unroll
                    for (int v = 0; v < ALONG; ++v) add_term<P>(sums[v], some[s], window[P::SKIP + v + s * P::C]);
        }
        if (h0 + row < a.height)
            store_results<P>(y + (long long)(h0 + row) * a.width, w0 + along, (int)a.width, sums, constants);
    }
}

template <class P, bool ALL, typename Y>
DEVICE void filter_tile(const FilterTiles &a, const float *constants, const float *tile, float *sums, Y *y, int h0,
                        int w0) {
    if constexpr (P::SEPARABLE) {
        filter_columns<P, ALL>(constants, tile, sums);
        __syncthreads();
        filter_rows<P, ALL>(a, constants, sums, y, h0, w0);
    } else filter_at_once<P, ALL>(a, constants, tile, y, h0, w0);
}

template <class Traits, typename Y> DEVICE void filter_tiles(const FilterTiles &a) {
    using P = FilterTile<Traits>;
    extern __shared__ __align__(16) unsigned char memory[];
    float *const constants = reinterpret_cast<float *>(memory), *const tile = constants + P::WORDS,
                 *const sums = tile + P::IN_ROWS * P::PITCH;
    const int h0 = blockIdx.y * P::ROWS, w0 = blockIdx.x * P::COLUMNS;
    const long long picture = (long long)blockIdx.z * a.height * a.width;
    const typename P::T *const x = static_cast<const typename P::T *>(a.x) + picture;
    Y *const y = static_cast<Y *>(a.y) + picture;
    begin_dependent();
    const float *const list = static_cast<const float *>(a.list);
    for (int i = threadIdx.x; i < P::WORDS; i += P::THREADS) constants[i] = list[i];
    const int top = h0 - (int)a.before_h, left = w0 - (int)a.before_w - P::SKIP;
    const bool inside = top >= 0 && left >= 0 && top + P::IN_ROWS <= a.height && left + P::PITCH <= a.width;
    constexpr int PIECE = 4 * sizeof(typename P::T);
    if ((reinterpret_cast<unsigned long long>(x + left) % PIECE | a.width % 4) == 0) {
        if (inside) load_tile<P, false, true>(a, x, 0.0f, tile, top, left);
        else load_tile<P, true, true>(a, x, list[CVAL], tile, top, left);
    } else if (inside) load_tile<P, false, false>(a, x, 0.0f, tile, top, left);
    else load_tile<P, true, false>(a, x, list[CVAL], tile, top, left);
    __syncthreads();
    if (constants[WHOLE] != 0.0f) filter_tile<P, true>(a, constants, tile, sums, y, h0, w0);
    else filter_tile<P, false>(a, constants, tile, sums, y, h0, w0);
}
