// Filters on pictures, a strip of the result a block, from top to bottom in steps of a tile: what its windows see comes
// to shared memory once, as float32, where the newest rows take the oldest ones' places. Each thread goes over a tile
// with several outputs in registers. Channels lie side by side, so a tap of a row is as many elements from the next as
// there are channels.
//
// At once: a thread has DEEP rows of 4 outputs. It goes down the window's rows, with as many of the tile in registers,
// a chunk of CHUNK taps of a row at a time. A column and a row: a thread makes the column's sums of DEEP rows of 4,
// which go to shared memory, and then the row's of ALONG neighbours. Weights lie in shared memory. Where one is 0, it
// is skipped by loops of their own: what it sees, infinity perhaps, does not count.
#include "ops/filter/rows.cuh"

// What a list begins with. WHOLE: whether no weight is 0.
enum Constant { CVAL, LOW, HIGH, START, COLUMN_EPSILON, EPSILON, WHOLE, CONSTANTS = 8 };

// T: of x; OP, C channels; SEPARABLE; TAPS_H, TAPS_W of a window, CHUNK of a row at a time, SKIP elements of the tile
// in front of the first; ROWS, COLUMNS (elements) of a tile; THREADS; of a thread, DEEP rows of outputs, or of column
// sums, and ALONG outputs of a row; PIECES of 4 elements of a row of the tile with what it sees; RING: rows in shared
// memory; INTEGRAL: y holds integers, CLIP: within their range; TRUNCATE: so do the column's sums.
template <class Traits> struct FilterTile : Traits {
    using B = Traits;
    // What the ring holds: elements of a piece, pieces of a thread on their way at once.
    using STORED = float;
    static constexpr int PIECE = 4, AT_ONCE = 8 / sizeof(typename B::T);
    static constexpr bool ABREAST = false;
    // Pieces of 4 that the windows of a thread's outputs see of a chunk, and that a chunk is.
    static constexpr int SEEN = (B::SKIP + B::ALONG + (B::CHUNK - 1) * B::C + 3) / 4;
    static constexpr int CHUNKS = (B::TAPS_W + B::CHUNK - 1) / B::CHUNK, STEP = B::CHUNK * B::C / 4;
    // Words of a chunk's weights, of a row's, of all in front of a row that belongs to a column, and of the list.
    static constexpr int CHUNK_WORDS = (B::CHUNK + 3) / 4 * 4, ROW_WORDS = CHUNKS * CHUNK_WORDS;
    static constexpr int ROW_AT = CONSTANTS + (B::TAPS_H + B::DEEP - 1) / B::DEEP * B::DEEP;
    static constexpr int WORDS = B::SEPARABLE ? ROW_AT + ROW_WORDS : CONSTANTS + B::TAPS_H * ROW_WORDS;
    static constexpr int IN_ROWS = B::ROWS + B::TAPS_H - 1, PITCH = 4 * B::PIECES;
    // Rows of column sums are an odd number of pieces, and threads beside each other take neighbours of so many rows,
    // that what eight of them load lies in all banks.
    static constexpr int PITCH_SUMS = 4 * (B::PIECES | 1), APART = B::ALONG / 4;
    static constexpr int BESIDE = (APART & -APART) < 8 ? APART & -APART : 8;
    // Turns of a loop that are unrolled: all where a thread has not too many products, fewer where each weight is
    // looked at (!ALL), and of windows at once, which want registers for more rows.
    template <bool ALL> static constexpr int unrolled(int turns, int products) {
        return products <= (!ALL ? 200 : B::SEPARABLE ? 800 : 480) ? turns : 1;
    }
    static_assert(B::ROWS % B::DEEP == 0 && B::RING % B::DEEP == 0 && B::COLUMNS % B::ALONG == 0 && WORDS % 4 == 0);
};

// A tap's term to a sum. The largest of nothing is no number, and any number is larger.
template <class P> DEVICE void add_term(float &sum, float weight, float value) {
    if constexpr (P::OP == SUM) sum += weight * value;
    else sum = P::OP == LARGEST ? fmaxf(sum, value) : fminf(sum, value);
}
template <class P> DEVICE float first_sum(float start) { return P::OP == SUM ? start : NOT_A_NUMBER; }

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

// Rows of the ring for outputs from row `row` behind the first on, one after the other: behind the last of the ring
// comes its first.
template <class P> struct Window {
    const float *from;
    int until;
    DEVICE Window(const float *ring, int first, int row, int along) {
        row += first;
        row -= row < P::RING ? 0 : P::RING;
        from = ring + row * P::PITCH + along, until = P::RING - row;
    }
    DEVICE const float *row(int r) {
        if (r % P::DEEP == 0 && r == until) from -= P::RING * P::PITCH;
        return from + r * P::PITCH;
    }
};

// Windows at once. ALL: every weight counts.
template <class P, bool ALL, typename Y>
DEVICE void filter_at_once(const FilterTiles &a, const float *constants, const float *ring, int first, Y *y, int h0,
                           int w0) {
    constexpr int DEEP = P::DEEP, ACROSS = P::COLUMNS / 4, ITEMS = P::ROWS / DEEP * ACROSS;
    // Taps of the last chunk.
    constexpr int LAST = P::TAPS_W - (P::CHUNKS - 1) * P::CHUNK;
    constexpr int ALL_ROWS = P::template unrolled<ALL>(P::TAPS_H, P::TAPS_H * P::CHUNK * DEEP * 4);
    static_assert(P::ALONG == 4);
#pragma unroll 1
    for (int item = threadIdx.x; item < ITEMS; item += P::THREADS) {
        const int along = item % ACROSS * 4, row = item / ACROSS * DEEP;
        float sums[DEEP][4];
#pragma unroll
        for (int t = 0; t < DEEP; ++t)
#pragma unroll
            for (int v = 0; v < 4; ++v) sums[t][v] = first_sum<P>(constants[START]);
        const float *weights = constants + CONSTANTS;
#pragma unroll 1
        for (int chunk = 0; chunk < P::CHUNKS; ++chunk, weights += P::CHUNK_WORDS) {
            float window[DEEP][4 * P::SEEN];
            Window<P> seen(ring, first, row, along + chunk * P::CHUNK * P::C);
            const auto load = [&](int to, const float *from) {
#pragma unroll
                for (int i = 0; i < P::SEEN; ++i)
                    put(window[to] + 4 * i, *reinterpret_cast<const float4 *>(from + 4 * i));
            };
#pragma unroll
            for (int r = 0; r < DEEP - 1; ++r) load(r, seen.row(r));
#pragma unroll ALL_ROWS
            for (int r0 = 0; r0 < P::TAPS_H; r0 += DEEP)
#pragma unroll
                for (int j = 0; j < DEEP; ++j) {
                    if (r0 + j >= P::TAPS_H) break;
                    load((j + DEEP - 1) % DEEP, seen.row(r0 + j + DEEP - 1));
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

// This thread's number: another one in each step, so that what is left over for some warps goes round.
template <class P> DEVICE int turned(int step) {
    return (threadIdx.x + (step / P::DEEP + blockIdx.x) * 32 % P::THREADS) % P::THREADS;
}

// The column's sums of all that the row's will see.
template <class P, bool ALL>
DEVICE void filter_columns(const float *constants, const float *ring, int first, float *sums_to) {
    constexpr int DEEP = P::DEEP, ITEMS = P::ROWS / DEEP * P::PIECES;
    constexpr int ALL_COLUMN = P::template unrolled<ALL>(P::TAPS_H, P::TAPS_H * DEEP * 4);
    const float epsilon = constants[COLUMN_EPSILON];
#pragma unroll 1
    for (int item = turned<P>(first); item < ITEMS; item += P::THREADS) {
        const int row = item / P::PIECES * DEEP, along = item % P::PIECES;
        const float *const weights = constants + CONSTANTS;
        Window<P> seen(ring, first, row, along * 4);
        float sums[DEEP][4], window[DEEP][4];
#pragma unroll
        for (int t = 0; t < DEEP; ++t) {
#pragma unroll
            for (int v = 0; v < 4; ++v) sums[t][v] = first_sum<P>(0.0f);
            if (t < DEEP - 1) put(window[t], *reinterpret_cast<const float4 *>(seen.row(t)));
        }
#pragma unroll ALL_COLUMN
        for (int r0 = 0; r0 < P::TAPS_H; r0 += DEEP) {
            float some[DEEP];
#pragma unroll
            for (int i = 0; i < DEEP; i += 4) put(some + i, *reinterpret_cast<const float4 *>(weights + r0 + i));
#pragma unroll
            for (int j = 0; j < DEEP; ++j) {
                if (r0 + j >= P::TAPS_H) break;
                put(window[(j + DEEP - 1) % DEEP], *reinterpret_cast<const float4 *>(seen.row(r0 + j + DEEP - 1)));
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
            reinterpret_cast<float4 *>(sums_to + (row + t) * P::PITCH_SUMS)[along] = as_float4(sums[t]);
        }
    }
}

// The row's sums of the column's.
template <class P, bool ALL, typename Y>
DEVICE void filter_rows(const FilterTiles &a, const float *constants, const float *from_sums, Y *y, int h0, int w0) {
    constexpr int ALONG = P::ALONG, ACROSS = P::COLUMNS / ALONG, ITEMS = P::ROWS * ACROSS;
    constexpr int ALL_CHUNKS = P::template unrolled<ALL>(P::CHUNKS, P::TAPS_W * ALONG);
#pragma unroll 1
    for (int item = threadIdx.x; item < ITEMS; item += P::THREADS) {
        const int along = item / P::BESIDE % ACROSS * ALONG;
        const int row = item / (P::BESIDE * ACROSS) * P::BESIDE + item % P::BESIDE;
        const float4 *const from = reinterpret_cast<const float4 *>(from_sums + row * P::PITCH_SUMS + along);
        float sums[ALONG], window[4 * P::SEEN];
#pragma unroll
        for (int v = 0; v < ALONG; ++v) sums[v] = first_sum<P>(constants[START]);
#pragma unroll
        for (int i = 0; i < P::SEEN; ++i) put(window + 4 * i, from[i]);
#pragma unroll ALL_CHUNKS
        for (int chunk = 0; chunk < P::CHUNKS; ++chunk) {
            constexpr int KEPT = P::SEEN > P::STEP ? P::SEEN - P::STEP : 0;
            if (chunk > 0) {
#pragma unroll
                for (int i = 0; i < 4 * KEPT; ++i) window[i] = window[i + 4 * P::STEP];
#pragma unroll
                for (int i = KEPT; i < P::SEEN; ++i) put(window + 4 * i, from[chunk * P::STEP + i]);
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

template <class Traits, typename Y> DEVICE void filter_tiles(const FilterTiles &a) {
    using P = FilterTile<Traits>;
    using T = typename P::T;
    extern __shared__ __align__(16) unsigned char memory[];
    float *const constants = reinterpret_cast<float *>(memory), *const ring = constants + P::WORDS,
                 *const sums = ring + P::RING * P::PITCH;
    begin_dependent();
    const float *const list = static_cast<const float *>(a.list);
    for (int i = threadIdx.x; i < P::WORDS; i += P::THREADS) constants[i] = list[i];
    const int w0 = blockIdx.x * P::COLUMNS;
    Y *const y = static_cast<Y *>(a.y) + (long long)blockIdx.z * a.height * a.width;
    const auto columns = [&](int first) {
        if constexpr (P::SEPARABLE) {
            if (constants[WHOLE] != 0.0f) filter_columns<P, true>(constants, ring, first, sums);
            else filter_columns<P, false>(constants, ring, first, sums);
            __syncthreads();
        }
    };
    const auto outputs = [&](int first, int h) {
        const bool whole = constants[WHOLE] != 0.0f;
        if constexpr (P::SEPARABLE) {
            if (whole) filter_rows<P, true>(a, constants, sums, y, h, w0);
            else filter_rows<P, false>(a, constants, sums, y, h, w0);
        } else {
            if (whole) filter_at_once<P, true>(a, constants, ring, first, y, h, w0);
            else filter_at_once<P, false>(a, constants, ring, first, y, h, w0);
        }
    };
    down_strip<P>(a, list + CVAL, ring, columns, outputs);
}
